"""Keep what XLA compiles on disk, in JAX's own persistent cache, so that the next start need not compile it again.

Rank 0 writes and all ranks read, under a lock; the least recently used programs are removed first (docs.jax.dev,
"Persistent compilation cache"). On CPU each process has cache keys of its own, so only rank 0 finds its programs again.
A folder holds the programs for one kind of processor: one that was compiled for another may crash with an illegal
instruction.
"""

import os
import pathlib
import warnings

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxdp import environment
from jaxdp.errors import one_line

SIZE = 2 * 2**30  # bytes; about a thousand programs
FOLDER = "jax_compilation_cache_dir"
SETTINGS = {
    "jax_compilation_cache_max_size": SIZE,
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # small programs are most of those that a start needs
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
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
