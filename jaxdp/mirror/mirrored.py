"""Training with a mirror: what happens before, beside and after it, on the root process."""

import contextlib
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from jaxdp.checkpoint.folders import complete
from jaxdp.config import Config
from jaxdp.config.validation import changed_numbers
from jaxdp.errors import UsageError, one_line
from jaxdp.extras import Train
from jaxdp.metrics import safe_print
from jaxdp.mirror.storage import KEY, Storage
from jaxdp.process import imports
from jaxdp.process.context import SLOW, Context
from jaxdp.process.monitor import Stopped
from jaxdp.run import rundir
from jaxdp.run.driver import Continuation

ANSWER_S = 60.0  # for the mirror's first answer
LAST_S = 600.0  # for the copies that are missing at the end


def train_mirrored(
    config: Config,
    directory: pathlib.Path,
    train: Train,
    context: Context,
    continuation: Continuation,
) -> Any:
    """Return what `train` does, in a directory that is filled from the mirror if it is empty."""
    url = f"{config.checkpoint.mirror}"
    # Later, an elastic job does not depend on the storage.
    starts = context.is_root and not continuation.runs
    context.agree(problem_at_start(url, directory, config) if starts else None, SLOW)
    with copying(url, directory) if context.is_root else contextlib.nullcontext():
        return train(context, continuation)


def problem_at_start(url: str, directory: pathlib.Path, config: Config) -> str | None:
    """Fill an empty directory from the mirror. Return why the run cannot be mirrored, or None."""
    try:
        storage = Storage(url, directory)
        there = ask(storage)
        here = complete(storage.local)
        if here and there and (there[-1] > here[-1] or not storage.has_one_of(here)):
            return (
                f"{KEY}: {storage.url} is at step {there[-1]}, but {str(directory)!r} at {here[-1]}, or they are of "
                "two runs; remove the directory to continue from the mirror, or set another --run_dir"
            )
        if there and not here and rundir.not_ours(directory, False) is None:
            saved = storage.saved(there[-1])["config"]
            changed = changed_numbers(saved, config, ["optimizer.no_decay"])
            if changed and not config.resume.force:
                return (
                    f"{KEY}: the run in {storage.url} has other values: {'; '.join(changed)}; put them back, choose "
                    "another --run_dir, or continue it anyway with --resume.force true"
                )
            for text in storage.download():
                safe_print.say(f"{KEY}: {text}", error=True)
            if not (here := complete(storage.local)):
                return f"{KEY}: no checkpoint of {storage.url} is right; remove it to start over"
            safe_print.say(f"mirror: steps up to {here[-1]} were copied from {storage.url}")
    except UsageError as error:
        return str(error)
    except Exception as error:  # each file system has its own
        return (
            f"{KEY}: {url!r}: {one_line(error) or type(error).__name__}; mend that, or leave the "
            "mirror out"
        )
    return None


def ask(storage: Storage) -> list[int]:
    """Return the steps in the mirror, where a file can be written. Raises what fsspec raises, and
    TimeoutError if there is no answer."""
    found: list[Any] = []

    def answer() -> None:
        try:
            storage.check()
            found.append(storage.steps())
        except Exception as error:
            found.append(error)

    # A daemon, since a call that hangs must not keep the process from ending.
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not found:
        raise TimeoutError(f"no answer within {ANSWER_S:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


@contextlib.contextmanager
def copying(url: str, directory: pathlib.Path) -> Iterator[None]:
    """Copy finished checkpoints to the mirror, in a process of its own: it takes no time from the
    updates, and outlives this one by a last copy."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxdp.mirror.copier", url, f"{directory}"],
        env=imports.for_module(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,  # signals are for the run, which saves once more
    )
    wait_s = LAST_S
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, Stopped) and error.kind == "preempt"):
            wait_s = 0.0  # others go on, or the cause is to be seen at once
        raise
    finally:
        try:
            # This ends its standard input too.
            text = child.communicate(timeout=wait_s)[0].strip()
        except subprocess.TimeoutExpired:
            text = f"{KEY}: the last copy goes on for more than {wait_s:g} s"
        if child.returncode != 0 and wait_s:
            text = f"{text or KEY}; all is in {directory}, and the same command copies it"
        if wait_s:
            safe_print.say(text, error=child.returncode != 0)
