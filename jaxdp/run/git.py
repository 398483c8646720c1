"""The git commit of the code that a run starts with, and its uncommitted changes; never needed to
train.
"""

import contextlib
import os
import pathlib
import subprocess
import threading
from typing import Any

from jaxdp.run import rundir

NAME = "git.diff"
LIMIT = 200_000  # bytes of the diff
TIMEOUT = 1.0  # seconds, for all commands together
SAFE = ("git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")  # start no other program


def record(directory: pathlib.Path) -> dict[str, Any]:
    """Write the uncommitted changes of tracked files to `directory`/git.diff and return {"git":
    {"commit", "changed"}}.

    Of the repository of the current directory. Empty if it is none, git is missing, or it takes
    longer than TIMEOUT."""
    answers: list[bytes] = []
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    null = subprocess.DEVNULL

    def ask(*command: str) -> bytes:
        return subprocess.run(
            [*SAFE, *command],
            stdin=null,
            stdout=subprocess.PIPE,
            stderr=null,
            env=environment,
            timeout=TIMEOUT,
            check=True,
        ).stdout

    def work() -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            commit = ask("rev-parse", "HEAD")
            diff = ask("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
            answers.extend((commit, diff))

    thread = threading.Thread(
        target=work, name="git", daemon=True
    )  # a file system may not answer at all
    thread.start()
    thread.join(TIMEOUT)
    commit, diff = answers or (b"", b"")
    with contextlib.suppress(OSError):  # a full disk
        if not diff:
            (directory / NAME).unlink(missing_ok=True)
        else:
            with rundir.replaced(
                directory / NAME, private=True
            ) as new:  # a diff may contain passwords
                if len(diff) > LIMIT:
                    diff = diff[: diff.rfind(b"\n", 0, LIMIT) + 1] + b"[cut]\n"
                new.write_bytes(diff)
    return {"git": {"commit": commit.decode().strip(), "changed": bool(diff)}} if commit else {}
