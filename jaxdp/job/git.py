"""The git commit of the code that a run starts with, and its uncommitted changes; never needed to train."""

import contextlib
import os
import pathlib
import subprocess
import threading
from typing import Any

from jaxdp import rundir

NAME = "git.diff"
LIMIT = 200_000  # bytes of the diff
TIMEOUT = 1.0  # seconds, for all commands together
SAFE = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")  # start no other program


def record(directory: pathlib.Path) -> dict[str, Any]:
    """Write the uncommitted changes of tracked files to `directory`/git.diff and return {"git": {"commit", "changed"}}.

    Of the repository of the current directory. Empty if it is none, git is missing, or it takes longer than TIMEOUT.
    """
    answers: list[bytes] = []

    def ask() -> None:
        for command in (("rev-parse", "HEAD"), ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")):
            answer = _output(command)
            if answer is None:
                return
            answers.append(answer)

    thread = threading.Thread(target=ask, name="git", daemon=True)  # a file system may not answer at all
    thread.start()
    thread.join(TIMEOUT)
    commit, diff = answers if len(answers) == 2 else (b"", b"")
    with contextlib.suppress(OSError):  # a full disk
        (directory / NAME).unlink(missing_ok=True)
        if diff:
            with rundir.replaced(directory / NAME) as new:
                new.write_bytes(diff if len(diff) <= LIMIT else diff[: diff.rfind(b"\n", 0, LIMIT) + 1] + b"[cut]\n")
    return {"git": {"commit": commit.decode().strip(), "changed": bool(diff)}} if commit else {}


def _output(command: tuple[str, ...]) -> bytes | None:
    """Return the first LIMIT bytes, and one more if there are any, of what git prints; None if it fails."""
    try:
        process = subprocess.Popen(
            [*SAFE, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except OSError:
        return None
    killer = threading.Timer(TIMEOUT, process.kill)
    killer.daemon = True
    killer.start()
    with process:
        assert process.stdout is not None
        text = process.stdout.read(LIMIT + 1)
        if len(text) > LIMIT:
            process.kill()
    killer.cancel()
    return text if process.returncode == 0 or len(text) > LIMIT else None
