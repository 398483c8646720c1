"""Training with a mirror: what happens before, beside and after it, on the root process."""

import contextlib
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from jaxdp.checkpoint.folders import complete
from jaxdp.errors import one_line
from jaxdp.extras import Train
from jaxdp.metrics import safe_print
from jaxdp.mirror.storage import KEY, Storage
from jaxdp.process import imports
from jaxdp.process.context import Context
from jaxdp.process.monitor import Stopped
from jaxdp.run import rundir
from jaxdp.run.driver import LONGEST, Continuation
from jaxdp.run.start import changed_numbers

ANSWER_S = 60.0  # for the mirror's first answer
LAST_S = 600.0  # for the copies that are missing at the end


def train_mirrored(
    config: Any,
    directory: pathlib.Path,
    train: Train,
    context: Context,
    continuation: Continuation,
) -> Any:
    """Return what `train` does, in a directory that is filled from the mirror if it is empty."""
    url = f"{config.checkpoint.mirror}"
    # Later, an elastic job does not depend on the storage.
    starts = context.is_root and not continuation.runs
    context.agree(problem_at_start(url, directory, config) if starts else None, LONGEST)
    with copying(url, directory) if context.is_root else contextlib.nullcontext():
        return train(context, continuation)


def problem_at_start(url: str, directory: pathlib.Path, config: Any) -> str | None:
    """Fill an empty directory from the mirror. Return why the run cannot be mirrored, or None."""
    answer: Future[list[int]] = Future()

    def ask():
        try:
            storage.check()
            answer.set_result(storage.steps())
        except Exception as error:
            answer.set_exception(error)

    try:
        storage = Storage(url, directory)
        # A daemon, since a call that hangs must not keep the process from ending.
        threading.Thread(target=ask, daemon=True).start()
        there = answer.result(ANSWER_S)  # raises TimeoutError, without a text
        here = complete(storage.local)
        if here and there and (there[-1] > here[-1] or not any(map(storage.has, here))):
            return (
                f"{KEY}: {storage.url} is at step {there[-1]}, but {str(directory)!r} at {here[-1]}, or they are of "
                "two runs; remove the directory to continue from the mirror, or set another --run_dir"
            )
        if there and not here and rundir.not_ours(directory, False) is None:
            saved = storage.manifest(there[-1])["meta"]["config"]
            changed = changed_numbers(saved, config, ["optimizer.no_decay"])
            if changed and not config.resume.force:
                return (
                    f"{KEY}: the run in {storage.url} has other values: {'; '.join(changed)}; put them back, choose "
                    "another --run_dir, or continue it anyway with --resume.force true"
                )
            storage.download()
            if not (here := complete(storage.local)):
                return (
                    f"{KEY}: no checkpoint of {storage.url} is right, or another run writes there; remove it to start "
                    "over"
                )
            safe_print.say(f"mirror: steps up to {here[-1]} were copied from {storage.url}")
    except Exception as error:  # each file system has its own
        return (
            f"{KEY}: {url!r}: {one_line(error) or f'no answer within {ANSWER_S:g} s'}; mend that, or "
            "leave the mirror out"
        )
    return None


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
    wait_s = 0.0  # after an error others go on, or the cause is to be seen at once
    try:
        yield
        wait_s = LAST_S
    except Stopped as stop:
        wait_s = LAST_S * (stop.kind == "preempt")
        raise
    finally:
        try:
            # This ends its standard input too.
            text = child.communicate(timeout=wait_s)[0].strip()
        except subprocess.TimeoutExpired:
            text = f"{KEY}: the last copy goes on for more than {wait_s:g} s"
        if failed := child.returncode != 0:
            text = f"{text or KEY}; all is in {directory}, and the same command copies it"
        if wait_s:
            safe_print.say(text, error=failed)
