"""Programs that the last start of the same run needed are loaded in a thread while this start still traces them.

Nothing depends on it being right: JAX traces, lowers and computes the key of what it needs as ever, and is given what
was loaded ahead under that very key. It looks programs up by a function that is not public; where that is another than
the one known here, nothing is loaded ahead.
"""

import concurrent.futures
import contextlib
import inspect
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jaxdp.compilation_cache import Note, seal, unseal

LEAST = 2**14  # bytes of a file that is worth it
PARAMETERS = ["cache_key", "compile_options", "backend", "executable_devices"]
WRITTEN = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
KEPT = ["cache_key", "module_name", "executable", "backend", "compile_time"]


class Asked(NamedTuple):
    """The programs that a start has asked for so far; note(those) keeps which the next one is to load ahead."""

    programs: list[dict[str, Any]]
    note: Callable[[list[dict[str, Any]]], None]


@contextlib.contextmanager
def loading(facts: str, wanted: bool = True) -> Iterator[Asked]:
    """Begins to load what a start of the same `facts` noted, for programs compiled in this block. To be entered once
    JAX has its devices."""
    note, found = Note(facts), _reader()
    if not wanted or note.file is None or found is None:
        yield Asked([], lambda programs: None)
        return
    module, read = found
    asked: list[dict[str, Any]] = []
    pool = concurrent.futures.ThreadPoolExecutor(1, "jaxdp-programs")
    loads = {key: pool.submit(read, key, *arguments) for key, arguments in _noted(note, note.file.parent)}

    def get(key: str, options: Any, backend: Any, devices: Any, *more: Any, **others: Any) -> Any:
        with contextlib.suppress(Exception):
            asked.append({"key": key, "options": options.SerializeAsString().hex(), "devices": [d.id for d in devices]})
        load = None if any(more) or any(others.values()) else loads.pop(key, None)  # callbacks belong to one program
        if load is not None and not load.cancel():
            with contextlib.suppress(Exception):  # what is wrong with it is said of the next try
                executable = load.result()
                if executable[0] is not None:
                    return executable
        return read(key, options, backend, devices, *more, **others)

    module.get_executable_and_time = get
    try:
        yield Asked(asked, lambda programs: note.write(seal(json.dumps(programs).encode())))
    finally:
        module.get_executable_and_time = read
        pool.shutdown(cancel_futures=True)  # a thread that still loads would outlive the interpreter


@contextlib.contextmanager
def written_by_all() -> Iterator[None]:
    """In this block every process writes what it compiles for CPU, where each has programs, and keys, of its own.

    JAX has process 0 write alone, for the sake of file systems that many would write the same to at once. It does so in
    a function that is not public; where that is another than the one known here, it is left as it is.
    """
    found = _writer()
    if jax.process_index() == 0 or jax.default_backend() != "cpu" or found is None:
        yield
        return
    compiler, write, keep = found

    def each(key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Any) -> None:
        write(key, seconds, name, backend, executable, *callbacks)
        if not any(callbacks):  # they belong to one process
            with contextlib.suppress(Exception):  # it is compiled the next time
                keep(key, name, executable, backend, int(seconds))

    compiler._cache_write = each
    try:
        yield
    finally:
        compiler._cache_write = write


def _writer() -> tuple[Any, Callable[..., None], Callable[..., None]] | None:
    """JAX's module, its function that has process 0 write a program, and the one that writes it."""
    try:
        from jax._src import compilation_cache, compiler

        write, keep = compiler._cache_write, compilation_cache.put_executable_and_time
        names = [list(inspect.signature(f).parameters) for f in (write, keep)]
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    fits = names[0][:5] == WRITTEN and names[0][5:] in ([], ["host_callbacks"]) and names[1] == KEPT
    return (compiler, write, keep) if fits else None


def _reader() -> tuple[Any, Callable[..., Any]] | None:
    """JAX's module, and its function that looks a program up, (key, options, backend, devices) -> (program, time)."""
    try:
        from jax._src import compilation_cache as module

        read = module.get_executable_and_time
        fits = list(inspect.signature(read).parameters)[:4] == PARAMETERS
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return (module, read) if fits else None


def _noted(note: Note, folder: pathlib.Path) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
    """(key, what it was looked up with) of what the last start asked for and the folder has."""
    with contextlib.suppress(Exception):  # of another version, or damaged
        from jaxlib import xla_client

        devices = {d.id: d for d in jax.devices()}
        # XLA ends the process over options that are damaged.
        for program in json.loads(unseal((note.read() or "").encode())):
            file = folder / f"{program['key']}-cache"
            if file.is_file() and file.stat().st_size >= LEAST:
                options = xla_client.CompileOptions.ParseFromString(bytes.fromhex(program["options"]))
                own = xla_client.DeviceList(tuple(devices[i] for i in program["devices"]))
                yield program["key"], (options, jax.devices()[0].client, own)
