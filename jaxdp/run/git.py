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
    processes: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}

    def ask(*command):
        """Append the first LIMIT bytes, and one more if there are any, of what git prints; return
        False if it fails.
        """
        arguments = [*SAFE, *command]
        with subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        ) as process:
            processes.append(process)
            assert process.stdout is not None
            answers.append(process.stdout.read(LIMIT + 1))
            if is_cut := len(answers[-1]) > LIMIT:
                process.kill()
        return is_cut or process.returncode == 0

    def work():
        with contextlib.suppress(OSError):
            if not (
                ask("rev-parse", "HEAD")
                and ask("diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
            ):
                answers.clear()

    thread = threading.Thread(
        target=work, name="git", daemon=True
    )  # a file system may not answer at all
    thread.start()
    thread.join(TIMEOUT)
    commit, diff = answers if len(answers) == 2 else (b"", b"")
    for process in processes:
        process.kill()  # if it has not ended
    with contextlib.suppress(OSError):  # a full disk
        if not diff:
            (directory / NAME).unlink(missing_ok=True)
        else:
            with rundir.replaced(
                directory / NAME, private=True
            ) as new:  # a diff may contain passwords
                new.write_bytes(
                    diff
                    if len(diff) <= LIMIT
                    else diff[: diff.rfind(b"\n", 0, LIMIT) + 1] + b"[cut]\n"
                )
    return {"git": {"commit": commit.decode().strip(), "changed": bool(diff)}} if commit else {}
