"""End a coordinator of this job on this host that does not run: stopped by a signal, or in a frozen
control group.

It would keep the job's port, and might continue later, when another one has taken its place.
"""

import contextlib
import hashlib
import hmac
import math
import os
import pathlib
import re
import signal
import time

APART = 4.0  # seconds between two checks of what a process does, at least
VARIABLE = "JAXDP_COORDINATOR_OF"  # in a coordinator's environment, which other users cannot read


def mark(secret: str, port: int) -> str:
    """Return the value of VARIABLE: what identifies the coordinators of a job."""
    return hmac.digest(
        secret.encode(), f"coordinator at port {port}".encode(), hashlib.sha256
    ).hex()


class Frozen:
    """Finds the coordinators of a job on this host (and in this network namespace) that do not run.

    A coordinator that runs wakes up every tenth of a second, and one that is overloaded uses the
    CPU."""

    def __init__(self, secret: str, port: int):
        self.entry = f"{VARIABLE}={mark(secret, port)}".encode()
        self.last: dict[str, list[str]] = {}  # process id -> its activity at the last check
        self.checked_at = -math.inf

    def end(self) -> None:
        """End each coordinator that has not run since the last call; do nothing if that was a
        moment ago.
        """
        if time.monotonic() - self.checked_at < APART:
            return
        now = {}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                is_one = self.entry in (process / "environ").read_bytes().split(b"\0")
                if is_one and os.readlink(process / "ns/net") == os.readlink("/proc/self/ns/net"):
                    now[process.name] = activity(process)
        for pid, active in now.items():
            if self.last.get(pid) == active:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
        self.last = now
        self.checked_at = time.monotonic()


def activity(process: pathlib.Path) -> list[str]:
    """Return the CPU time and the context switches of the main thread of a process, which change
    while it runs.
    """
    times = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return [
        *times,
        *re.findall(r"ctxt_switches:\s*(\d+)", (process / "status").read_text(encoding="utf-8")),
    ]
