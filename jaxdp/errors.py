"""Errors that end a run with one line: bad input, the failure of another process, or of the run
itself; errors in a user's code: the key of the config, the error, and the lines of the user's
files; and the faults that end this process, of which listeners are told the cause.

Frames of jaxdp and of libraries do not help the author of a model; the last frames in the author's
own files do."""

import contextlib
import difflib
import errno
import importlib
import json
import os
import pathlib
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jaxdp.process import imports

OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|unable to allocate|cannot allocate memory|failed to allocate|bad_alloc",
    re.IGNORECASE,
)
SETTINGS = "jax/_src/config.py"  # reads JAX's environment variables when JAX is imported
BYTES = re.compile(r"(?:allocat\w+|memory of size) (\d+)(?: bytes)?(?![\d.])")
PACKAGE = os.path.dirname(__file__) + os.sep
# Errors of a wrong path.
OF_A_PATH = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EROFS,
)
PREEMPTED = 75  # exit code that asks the scheduler to start the job again (sysexits.h: EX_TEMPFAIL)
INTERRUPTED = 130  # exit code of a shell for a command that was ended by Ctrl-C


class ReportedError(Exception):
    """An error that one rank prints for all.

    rank: the rank that prints it, if every rank raises the same error; None if only one rank raises
    it."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class UsageError(ReportedError, ValueError):
    """Bad input: one line that names the field, its value and the fix. Exit code 2."""


class TooManyDevices(UsageError):
    """More devices than can share the work: processes that have just joined a running job end."""


class DistributedError(ReportedError, RuntimeError):
    """A process that did not join, ended early, or disagreed during a run; the message names the
    rank. Exit code 1.

    texts: rank -> text, of the ranks that took part in a failed exchange.
    """

    texts: dict[int, str] = {}
    code: int | None = None  # the exit code, if it is not 1


class GenerationEnded(DistributedError):
    """The processes of a job regroup: one was lost, or another one joins."""


class RunFailed(ReportedError, RuntimeError):
    """The run itself cannot continue: one line, printed by rank 0. Exit code 1."""


def check_sizes(section: str, **sizes: int | None) -> None:
    """Raise UsageError for the first size below 1, by its key in a section of the config; None is
    not checked.
    """
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise UsageError(f"{section}.{name}: {size} is too small; it must be at least 1")


def check_one_of(key: str, value: Any, known: Iterable[Any]) -> None:
    """Raise UsageError if the value of a key is not one of the known ones."""
    if value not in known:
        raise UsageError(f"{key}: {value!r} is not one of {', '.join(map(repr, known))}")


def one_line(text: object) -> str:
    """Return a message, or that of an error, on one line."""
    return " ".join(str(text).split())


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the known name that is most similar to a word, in any case of letters, or "" if none
    is similar.

    cutoff: from 0 to 1 (equal).
    """
    names = {name.casefold(): name for name in known}
    matches = difflib.get_close_matches(str(word).casefold(), names, 1, cutoff)
    return names[matches[0]] if matches else ""


def suggest(word: str, known: Iterable[str], cutoff: float = 0.5, otherwise: str = "") -> str:
    """Return "did you mean NAME?" with the most similar of the known names, or `otherwise` if none
    is similar.
    """
    near = nearest(word, known, cutoff)
    return f"did you mean {near!r}?" if near else otherwise


def install(extra: str) -> str:
    """Return the command that installs an extra of jaxdp, which is on no package index."""
    repository = os.path.dirname(os.path.dirname(PACKAGE))
    if os.path.isfile(os.path.join(repository, "pyproject.toml")):
        return f"pip install -e '{repository}[{extra}]'"
    return f"pip install -e '.[{extra}]' in a clone of jaxdp"


def import_optional(name: str, user: str, extra: str, otherwise: str = "") -> Any:
    """Import a package that only an extra installs. Raises UsageError if it is missing; user: what
    needs it.
    """
    package, _, _ = name.partition(".")
    fix = f"{install(extra)}{otherwise}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{user} needs {package}, which needs {error.name}, which is not installed"
            ) from None
        module = None
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    if (
        file
        and os.path.realpath(os.path.dirname(file.removesuffix("/__init__.py")))
        in imports.users_folders()
    ):
        raise UsageError(
            f"{user} needs the library {package}, whose name {file} has; rename this file, and {fix}"
        )
    if module is None:
        raise UsageError(f"{user} needs {package}, which is not installed; {fix}")
    return module


def explained(error: BaseException) -> ReportedError | None:
    """Return the one-line error for an exception of known cause (memory, a path, a JAX platform),
    else None.
    """
    text = f"{type(error).__name__}: {one_line(error)}"
    libraries = type(error).__module__.startswith(("jax", "numpy")) or isinstance(
        error, MemoryError | OSError
    )
    if isinstance(error, MemoryError) or (libraries and OUT_OF_MEMORY.search(text)):
        size = BYTES.search(text)
        cause = (
            f"{int(size[1]):,} bytes could not be allocated" if size else text[:200].rstrip(". ")
        )
        if notes := [
            note for note in getattr(error, "__notes__", ()) if "\n" not in note
        ]:  # of the data set, on a host
            return RunFailed(
                f"out of memory: {cause}, {notes[0]}; read less at once: fewer data.workers, or a smaller batch"
            )
        return RunFailed(
            f"out of memory: {cause}; more microbatches with parallel.accumulate: scan, or parallel.remat: full, need "
            "less memory for activations; parallel.zero splits the state over devices; `jaxdp plan` predicts the "
            "memory of each"
        )
    frames = traceback.extract_tb(error.__traceback__)
    callers = [frame.filename for frame in frames if "pathlib" not in frame.filename]
    if (
        isinstance(error, OSError)
        and error.errno in OF_A_PATH
        and callers
        and callers[-1].startswith(PACKAGE)
    ):
        return UsageError(
            f"{str(error.filename)[:300]!r} cannot be used: {error.strerror}; give another path"
        )
    # Those on topologies are about other processes.
    of_jax = isinstance(error, RuntimeError | AssertionError) and "local topologies" not in text
    if of_jax and frames and frames[-1].filename.endswith("xla_bridge.py"):
        reason = re.sub(
            r" *\(set JAX_PLATFORMS.*?\)|^Unable to initialize backend '\w*': ", "", one_line(error)
        )
        setting = os.environ.get("JAX_PLATFORMS", "")
        return UsageError(
            f"JAX_PLATFORMS: {setting!r} cannot be used{': ' if reason else ''}{reason.rstrip('. ')}; unset it to use "
            "the available devices, set it to cpu, or see what is installed with `jaxdp doctor`"
        )
    if isinstance(error, ValueError) and any(
        f.name == "<module>" and f.filename.endswith(SETTINGS) for f in frames
    ):
        return UsageError(
            f"{one_line(error)}; give another value to this environment variable, or unset it"
        )
    return None


FOLDER = pathlib.Path(__file__).parent  # of this package
# Modules of this package that call a user's code -> the key of the config that names this code.
CALLERS = {"losses": "loss", "models": "model", "data/transforms": "data.transform", "data": "data"}
SHOWN = 3  # lines of the user's files in a message
# What JAX adds about a line of jaxdp.
TRACED = re.compile(r" The error occurred while tracing the function .+? for \w+\.")


@contextlib.contextmanager
def user_code(called_with: Callable[[str], str] = lambda key: "") -> Iterator[None]:
    """Turn an error raised in a user's code, or in a built-in model, loss or transform, into a
    UsageError.

    In built-in code, convert only TypeError and ValueError: shapes and dtypes that do not fit the
    data.

    called_with: returns a description of the arguments for a key ("model", ...).
    """
    try:
        yield
    except ReportedError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own_lines = user_lines(error)
        key = caller(frames)
        if not own_lines and (
            key in ("config", "data") or not isinstance(error, TypeError | ValueError)
        ):
            raise
        text = f"{type(error).__name__}: {TRACED.sub('', one_line(error)).rstrip('.')}"
        text += "".join(f", {note}" for note in getattr(error, "__notes__", ()) if "\n" not in note)
        with contextlib.suppress(
            Exception
        ):  # describing the arguments may fail for the same reason
            text += called_with(key)
        if not own_lines:
            raise UsageError(f"{key}: its arguments do not fit the data: {text}") from error
        raise UsageError(f"{key}: it failed at {own_lines}: {text}") from error


def user_lines(error: BaseException) -> str:
    """Return the lines of the user's files in the traceback of an error, innermost first; "" if
    there are none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_own(frame.filename)]
    if not user_frames:
        return ""
    innermost, *outer = user_frames[::-1][:SHOWN]
    callers = "".join(f", from {relative(frame.filename)}:{frame.lineno}" for frame in outer)
    return f"{relative(innermost.filename)}:{innermost.lineno} (in {innermost.name}: {innermost.line}{callers})"


def cause(error: BaseException) -> str:
    """Return " at LINES: TYPE: message" of an error, without the lines if none are the user's."""
    where = user_lines(error)
    return f"{f' at {where}' if where else ''}: {type(error).__name__}: {one_line(error)}"


def is_own(file: str) -> bool:
    """Return whether a file is the user's: not in jaxdp, the standard library or an installed
    package.
    """
    return not (file.startswith((PACKAGE, "<")) or imports.is_installed(file))


def relative(file: str) -> str:
    """Return a path relative to the working directory if it is inside it, else unchanged."""
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def caller(frames: Any) -> str:
    """Return the key of the config whose code was called."""
    key = "config"
    for frame in frames:
        if is_own(frame.filename):
            return key
        for module, its_key in CALLERS.items():
            if frame.filename.startswith(PACKAGE + module):
                key = its_key
                break
    return key


RECORDING = 1.0  # seconds: a hanging file system must not keep a process from ending
# Words in JAX's errors on a process whose collective, or coordination service, has lost another
# process.
CONSEQUENCES = (
    "gloo",
    "nccl",
    "connection",
    "coordination",
    "peer",
    "socket",
    "heartbeat",
    "unhealthy",
)
_fault_listeners: list[Callable[[str], None]] = []


def on_fault(listener: Callable[[str], None]) -> None:
    """Call `listener` with the cause before a fault ends this process, in a thread, for RECORDING
    seconds at most.
    """
    _fault_listeners.append(listener)


def off_fault(listener: Callable[[str], None]) -> None:
    _fault_listeners.remove(listener)


def record_fault(text: str) -> None:
    """Pass the cause to all listeners, just before this process ends."""

    def work() -> None:
        for listener in list(_fault_listeners):
            with contextlib.suppress(Exception):
                listener(text)

    if _fault_listeners:
        thread = threading.Thread(target=work, name="faults", daemon=True)
        thread.start()
        thread.join(RECORDING)


def append_fault(log: str, text: str) -> None:
    """Append the cause of a fault to a run's events.jsonl, unless its last line contains it."""
    with contextlib.suppress(OSError, ValueError):
        lines = pathlib.Path(log).read_text(encoding="utf-8", errors="replace")
        if text in lines.rstrip("\n").rpartition("\n")[2]:
            return
        line = json.dumps({"t": round(time.time(), 3), "kind": "failed", "reason": text})
        with open(
            log,
            "a",
            encoding="utf-8",
            opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666),
        ) as file:
            # End a torn line.
            file.write(f"{line}\n" if lines.endswith("\n") or not lines else f"\n{line}\n")


def is_consequence(error: BaseException) -> bool:
    """Return whether this looks like the error of a process that lost its connection to another."""
    import jax

    text = str(error).lower()
    if isinstance(error, ValueError):  # JAX's kind for a status of UNKNOWN
        return "gloo" in text
    return isinstance(error, jax.errors.JaxRuntimeError | DistributedError) and any(
        w in text for w in CONSEQUENCES
    )
