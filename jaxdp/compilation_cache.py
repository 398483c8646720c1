"""What XLA has compiled stays on disk, so that the next start of the same program need not compile it.

The cache is JAX's own persistent one (docs.jax.dev, "Persistent compilation cache"): rank 0 writes, all read (on CPU
each process has programs, and writes them: `ahead.written_by_all`), under a lock, and the least recently used go first.
A folder holds those for one kind of processor: what is compiled for another may end in an illegal instruction.
"""

import contextlib
import hashlib
import os
import pathlib
import time
import warnings

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxdp import environment
from jaxdp.errors import one_line

SIZE = 2 * 2**30  # bytes; about a thousand programs
FOLDER = "jax_compilation_cache_dir"
ENABLED = "jax_enable_compilation_cache"
SETTINGS = {
    "jax_compilation_cache_max_size": SIZE,
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # small programs are most of those that a start needs
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
NOTE, PROGRAM = "-note", "-update"  # end the name of a file
UPDATES = 32  # so many are kept of what `untraced` keeps
KEPT = 90 * 86400.0  # seconds that a note stays without being used
PROBE = 2**16  # bytes that must fit, or the disk is as good as full


def use(where: str | None) -> str | None:
    """Has JAX keep what it compiles from now on; returns in a line why it cannot, or None.

    where: a folder, "auto" for the user's own cache folder, None for no cache. A folder that JAX has been given
    already, by JAX_COMPILATION_CACHE_DIR or by the script, stands, with all that is set about it; "" is none.
    """
    if where is None or jax.config.values[FOLDER] is not None:
        return None
    top: pathlib.Path | str = where  # until there is a better name for it
    try:
        top = folder = environment.compiled(where)
        tidy(folder)
    except filelock.Timeout:
        pass  # it is in use, and so it works
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no such home directory, or no lock
        reason = getattr(error, "strerror", None) or one_line(error)
        return f"compilation_cache: cannot write in {str(top)!r} ({reason}), so every start compiles anew"
    for name, value in SETTINGS.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    jax.config.update(FOLDER, str(folder))
    compilation_cache.reset_cache()  # JAX looks at its settings once, which may have been before this
    # What cannot be read or written, since the disk is full meanwhile, is compiled: nobody need do anything about it.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    return None


def leave(before: dict[str, object]) -> None:
    """Puts JAX's settings back as they were."""
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def settings() -> dict[str, object]:
    """JAX's settings of its cache as they are, for `leave`."""
    return {name: jax.config.values[name] for name in (FOLDER, *SETTINGS)}


def tidy(folder: pathlib.Path) -> None:
    """Makes the folder, and removes programs that were not written to their end: JAX notes the time of use last.

    Raises OSError where nothing can be written in it, and `filelock.Timeout` where others hold it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / ".lockfile", timeout=1.0):  # the one that JAX takes
        probe = folder / ".probe"
        try:
            probe.write_bytes(bytes(PROBE))
        finally:
            probe.unlink(missing_ok=True)
        for program in folder.glob("*-cache"):
            used = program.with_name(f"{program.name.removesuffix('-cache')}-atime")
            if not used.is_file():
                program.unlink()
        for note in folder.glob(f"*{NOTE}*"):
            if time.time() - note.stat().st_mtime > KEPT:
                note.unlink()
        prune(folder)


def prune(folder: pathlib.Path) -> None:
    """Leaves those of what `untraced` keeps that were used last. Raises OSError."""
    for update in sorted(folder.glob(f"*{PROGRAM}*"), key=lambda file: -file.stat().st_mtime)[UPDATES:]:
        update.unlink(missing_ok=True)


def seal(content: bytes) -> bytes:
    """The content with its digest before it, so that what is damaged is not used."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unseal(sealed: bytes) -> bytes:
    """The content. Raises ValueError where it is damaged."""
    content = sealed.partition(b"\n")[2]
    if seal(content) != sealed:
        raise ValueError("it is damaged")
    return content


class Note:
    """What was found out before, beside the programs; facts: all that it depends on, or None where nothing is kept.
    kind: how its file's name ends."""

    def __init__(self, facts: str | None, kind: str = NOTE):
        folder = jax.config.values[FOLDER]
        kept = facts is not None and bool(folder) and "://" not in folder and jax.config.values[ENABLED]
        digest = hashlib.sha256(facts.encode()).hexdigest() if facts is not None else ""
        self.file = pathlib.Path(folder) / f"{digest}{kind}" if kept else None

    def read(self) -> str | None:
        """The text that was kept."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if self.file is not None:
                text = self.file.read_text()
                self.file.touch()  # it is in use
                return text
        return None

    def write(self, text: str | bytes) -> None:
        with contextlib.suppress(OSError):
            if self.file is not None:
                new = self.file.with_name(f"{self.file.name}.{os.getpid()}")
                try:
                    new.write_bytes(text.encode() if isinstance(text, str) else text)
                    new.replace(self.file)
                finally:  # what a full disk did not take
                    new.unlink(missing_ok=True)
