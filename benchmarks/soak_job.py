"""A job that `soak` kills: its processes, found by a mark in their environment, and the lines that
they printed.
"""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time
import uuid

from benchmarks.job import AS_ROOT, ROOT

GONE = 60.0  # seconds that a job may live on after a kill
STILL = 300.0  # seconds without a line, after which a life counts as stuck
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "JAXDP_PROCESS_ID")


class Wrong(Exception):
    """What the run must not do."""


class Job:
    """A life of the run: its processes, found by a mark in their environment, and what they have
    printed, and when.
    """

    def __init__(self, command, folder, launcher, processes):
        self.mark, self.began = uuid.uuid4().hex, time.monotonic()
        self.lines: list[tuple[float, str]] = []
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("OMPI_", "PMI", "PRTE_", "JAXDP_", "SLURM_"))
        }
        env |= AS_ROOT
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "SOAK_JOB": self.mark}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
        )
        envs = [env]
        if launcher == "hand":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{free.getsockname()[1]}"
            by_hand = {"JAXDP_COORDINATOR": address, "JAXDP_NUM_PROCESSES": str(processes)}
            envs = [env | by_hand | {"JAXDP_PROCESS_ID": str(rank)} for rank in range(processes)]
        self.parts = [self._start(command, env) for env in envs]

    def _start(self, command, env):
        part = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(part.stdout,), daemon=True).start()
        return part

    def _read(self, stream):
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def find(self, pattern):
        """The first line that matches: (when, match), or None."""
        for when, line in list(self.lines):
            if found := re.search(pattern, line):
                return when, found
        return None

    def processes(self):
        """{pid: (rank or None, command)} of all that are not dead; a zombie is dead."""
        alive = {}
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                environ = (entry / "environ").read_bytes()
                if state in "ZX" or f"SOAK_JOB={self.mark}".encode() not in environ:
                    continue
                words = dict(
                    x.partition("=")[::2] for x in environ.decode(errors="replace").split("\0")
                )
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                rank = next((int(words[name]) for name in RANKS if name in words), None)
                alive[int(entry.name)] = (
                    rank if "train.py" in command and "mpirun" not in command else None,
                    command,
                )
        return alive

    def ended(self):
        return all(part.poll() is not None for part in self.parts)

    def kill(self, victim):
        """SIGKILL to a rank, or to all; where that rank is not there yet, to all."""
        alive = self.processes()
        chosen = [pid for pid, (rank, _) in alive.items() if f"rank {rank}" == victim]
        for pid in chosen or alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return victim if chosen else "all"

    def wait_gone(self):
        """Until no process of it is left; raises Wrong, and kills them, where some stay."""
        began = time.monotonic()
        while (alive := self.processes()) or not self.ended():
            if time.monotonic() - began > GONE:
                self.kill("all")
                raise Wrong(f"{GONE:.0f} s after a kill there still is {alive}")
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_end(self):
        """Until it has ended by itself, with code 0; raises Wrong where that is another."""
        self.wait_until(self.ended, "its end")
        self.wait_gone()
        if any(part.returncode for part in self.parts):
            raise Wrong("\n".join(line for _, line in self.lines[-40:]))

    def wait_until(self, ready, what):
        """Until ready(); raises Wrong where the job ends before, or prints nothing for long."""
        while not ready():
            last = self.lines[-1][0] if self.lines else self.began
            if self.ended() or time.monotonic() - last > STILL:
                text = "\n".join(line for _, line in self.lines[-40:])
                codes = [part.poll() for part in self.parts]
                self.kill("all")
                raise Wrong(f"codes {codes}, but {what} was to come first:\n{text}")
            time.sleep(0.005)
