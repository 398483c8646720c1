"""Configure JAX's persistent compilation cache, so that the next start need not compile the same
programs again.

Programs are read and written under a lock; the least recently used are removed first (docs.jax.dev,
"Persistent compilation cache"). On CPU each process has different cache keys, so each writes its
own. A folder contains programs for one kind of processor: those for another may crash with an
illegal instruction."""

import os
import pathlib
import warnings

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxdp.errors import one_line
from jaxdp.process import environment

SIZE = 2 * 2**30  # bytes; about a thousand programs
FOLDER = "jax_compilation_cache_dir"
SETTINGS = {
    "jax_compilation_cache_max_size": SIZE,
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # most programs of a start are small
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
# processes that may share a folder with a lock, which one program after the other is read under
LOCKED = 256
PROBE = 2**16  # bytes of a test file; if it does not fit, the disk counts as full


def use(where: str | None, processes: int = 1) -> str | None:
    """Enable JAX's compilation cache. Return a one-line error message if that fails, or None.

    where: a folder, "auto" for the user's cache folder, None for no cache. A folder already set in
    JAX, by JAX_COMPILATION_CACHE_DIR or by the script, takes precedence with all its settings; ""
    there disables the cache. processes: of the job. More than LOCKED use a folder of their own,
    without a limit of its size and thus without locks: with one, some 250 programs a second are
    read, and JAX compiles what it has waited for for 10 s."""
    if where is None or jax.config.values[FOLDER] is not None:
        return None
    shown: pathlib.Path | str = where  # in an error message
    values = SETTINGS | ({"jax_compilation_cache_max_size": -1} if processes > LOCKED else {})
    try:
        shown = folder = environment.compiled(where)
        if processes > LOCKED:
            shown = folder = folder / "unlimited"
            folder.mkdir(parents=True, exist_ok=True)
        else:
            tidy(folder)
    except filelock.Timeout:
        pass  # another process uses the folder, so it works
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: no such home directory, or no file locks
        reason = getattr(error, "strerror", None) or one_line(error)
        return f"compilation_cache: cannot write in {str(shown)!r} ({reason}), so every start compiles again"
    for name, value in values.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update(FOLDER, str(folder))
    # JAX reads its settings once, which may have been before this call
    compilation_cache.reset_cache()
    # If an entry cannot be read or written (full disk), JAX compiles the program: no warning
    # needed.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    return None


def leave(before: dict[str, object]) -> None:
    """Restore JAX's cache settings. before: the result of `settings`."""
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def settings() -> dict[str, object]:
    """Return JAX's current cache settings, for `leave`."""
    return {name: jax.config.values[name] for name in (FOLDER, *SETTINGS)}


def tidy(folder: pathlib.Path) -> None:
    """Create the folder, and remove incomplete programs: those without the access time that JAX
    writes last.

    Raises OSError if the folder is not writable, and `filelock.Timeout` if another process has
    locked it."""
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / ".lockfile", timeout=1.0):  # the same lock as JAX's
        probe = folder / ".probe"
        try:
            probe.write_bytes(bytes(PROBE))
        finally:
            probe.unlink(missing_ok=True)
        for program in folder.glob("*-cache"):
            access_time = program.with_name(f"{program.name.removesuffix('-cache')}-atime")
            if not access_time.is_file():
                program.unlink()
