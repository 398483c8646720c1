"""A contender as a running job: its processes, and a connection to each of its ranks.

A job that fails raises `Failed`, with the reason and the last lines of its log; `harness` decides
what follows."""

import dataclasses
import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from benchmarks import contender

ROOT = pathlib.Path(__file__).parent.parent
LOG_LINES = 6  # of a failed job's log, shown with the reason
# Open MPI 4 and 5 refuse root without these.
AS_ROOT = {
    f"{p}_ALLOW_RUN_AS_ROOT{s}": "1"
    for p in ("OMPI", "PRTE")
    for s in ("", "_CONFIRM")
    if os.geteuid() == 0
}
# What the answer to each command contains; lists are of numbers.
ANSWERS: dict[str, dict[str, Any]] = {
    "losses": {"losses": list, "seconds": (int, float)},
    "run": {"seconds": (int, float)},
    "memory": {},
}
HELLO = {"rank": int, "pid": int, "versions": dict, "cores": list}


class Failed(Exception):
    """A contender cannot be measured, or a case has none left. The text names the reason."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A command to start. launcher: none (one process), ranks (one process for each rank) or
    mpirun.
    """

    name: str
    command: Sequence[str]
    processes: int = 1
    launcher: str = "none"
    env: dict[str, str] = dataclasses.field(default_factory=dict)


class Job:
    """A started contender. facts: what it reports of itself. Raises OSError where the command does
    not exist.
    """

    def __init__(
        self, contender_: Contender, folder: pathlib.Path, port: int, cores: Sequence[int]
    ):
        self.name, self.contender = contender_.name, contender_
        self.log = folder / f"{self.name.replace(' ', '_').replace('/', '_')}.log"
        self.lines: dict[int, socket.socket] = {}
        self.answers: dict[int, TextIO] = {}
        self.pids: list[int] = []
        self.facts: dict[str, Any] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.began = time.perf_counter()
        env = {
            **environment(**contender_.env),
            contender.ADDRESS: str(port),
            contender.CORES: ",".join(map(str, cores)),
            contender.NAME: self.name,
            contender.PROCESSES: str(contender_.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        command, ranks = list(contender_.command), 1
        if contender_.launcher == "mpirun":
            command = [*mpirun(contender_.processes), *command]
        elif contender_.launcher == "ranks":
            ranks = contender_.processes
        with self.log.open("w") as log:
            for rank in range(ranks):
                own = env | ({contender.RANK: str(rank)} if contender_.launcher == "ranks" else {})
                self.processes.append(start(command, own, stdout=log, stderr=log))

    @property
    def is_connected(self) -> bool:
        return len(self.lines) == self.contender.processes

    def connect(self, hello: Any, line: socket.socket, file: TextIO) -> str:
        """Accept the connection of a rank; return why not, if its first line is wrong."""
        if not has(hello, HELLO):
            return f"it began with {str(hello)[:80]}"
        self.lines[hello["rank"]], self.answers[hello["rank"]] = line, file
        self.pids.append(hello["pid"])
        self.facts |= {"start_s": time.perf_counter() - self.began} | {
            k: hello[k] for k in ("versions", "cores")
        }
        return ""

    def failed(self, why: str) -> Failed:
        """Return the exception to raise: the reason, and the end of the log."""
        last = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return Failed("\n  ".join([why + ("; the end of its log:" if last else ""), *last]))

    def check_start(self) -> None:
        """Raise Failed if a process ended before all ranks have connected."""
        if any(process.poll() is not None for process in self.processes):
            self.wait(2.0)
            codes = [process.poll() for process in self.processes]
            raise self.failed(
                f"it ended with code {codes[0] if len(codes) == 1 else codes} before it began"
            )

    def send(self, **command: Any) -> None:
        """Send a command to all ranks. Raises Failed."""
        try:
            for line in self.lines.values():
                line.sendall(f"{json.dumps(command)}\n".encode())
        except OSError:
            self.wait(2.0)
            raise self.failed(f"a process ended before `{command['do']}`") from None

    def ask(self, timeout: float, **command: Any) -> list[dict[str, Any]]:
        """Send a command and return the answers of all ranks, by rank. timeout: seconds. Raises
        Failed.
        """
        self.send(**command)
        deadline, answers, waiting = time.monotonic() + timeout, {}, dict(self.lines)
        while waiting:
            ready, *_ = select.select(list(waiting.values()), [], [], 1.0)
            for rank in [rank for rank, line in waiting.items() if line in ready]:
                del waiting[rank]
                self.lines[rank].settimeout(timeout)
                try:
                    text = self.answers[rank].readline()
                except TimeoutError:  # of a line that has begun
                    raise self.failed(
                        f"no answer to `{command['do']}` within {timeout:.0f} s"
                    ) from None
                except OSError:
                    text = ""
                if not text:
                    self.wait(2.0)
                    raise self.failed(f"a process ended during `{command['do']}`")
                answers[rank] = answer = read(text)
                if not has(answer, ANSWERS[command["do"]]):
                    raise self.failed(f"it answered {text.strip()[:80]!r} to `{command['do']}`")
            if not ready and time.monotonic() > deadline:
                raise self.failed(f"no answer to `{command['do']}` within {timeout:.0f} s")
        return [answers[rank] for rank in sorted(answers)]

    def run(self, updates: int, timeout: float) -> float:
        """Make updates and return the seconds of the slowest rank. Raises Failed."""
        seconds = max(answer["seconds"] for answer in self.ask(timeout, do="run", updates=updates))
        if not 0 < seconds < float("inf"):
            raise self.failed(f"it took {seconds} s for {updates} updates")
        return seconds

    def cpu_seconds(self) -> float:
        """Return the CPU time of all ranks since they started. Raises Failed if one is gone."""
        total = 0.0
        for pid in self.pids:
            try:
                fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                raise self.failed("a process ended while it waited") from None
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def wait(self, seconds: float) -> None:
        """Wait until all processes have ended, at most so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(
            process.poll() is None for process in self.processes
        ):
            time.sleep(0.05)

    def end(self) -> None:
        """End all processes of the job."""
        for answers in self.answers.values():
            answers.close()
        for line in self.lines.values():
            line.close()
        for process in self.processes:
            process.terminate() if process.poll() is None else None
        self.wait(3.0)
        kill([*(process.pid for process in self.processes), *self.pids])
        for process in self.processes:
            process.wait()


def read(text: str) -> Any:
    """Return the JSON of a line; None if it is something else."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def has(message: Any, fields: dict[str, Any]) -> bool:
    """Return whether a message has these fields, of these types; the elements of a list must be
    numbers.
    """
    if not isinstance(message, dict) or any(
        not isinstance(message.get(name), kind) for name, kind in fields.items()
    ):
        return False
    numbers = (x for name, kind in fields.items() if kind is list for x in message[name])
    return all(isinstance(x, (int, float)) for x in numbers)


def first_line(text: str) -> str:
    return text.partition("\n")[0].removesuffix("; the end of its log:").removesuffix(":")


def start(
    command: Sequence[str], env: dict[str, str], cwd: pathlib.Path = ROOT, **files: Any
) -> "subprocess.Popen[Any]":
    """Start a command in a session of its own, so that `kill` reaches what it starts."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, cwd=cwd, env=env, start_new_session=True, **files
    )


def kill(pids: Sequence[int]) -> None:
    """Kill processes and their process groups."""
    for pid in pids:
        for send in (os.killpg, os.kill):
            try:
                send(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def output(command: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> str:
    """Run a command and return its stdout. Raises Failed if it fails, or runs longer than `timeout`
    seconds.
    """
    process = start(
        command, env or environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill([process.pid])
        process.communicate()
        raise Failed(f"{' '.join(command[1:3])} did not end within {timeout:.0f} s") from None
    if process.returncode:
        last = "\n  ".join(error.strip().splitlines()[-LOG_LINES:])
        raise Failed(f"{' '.join(command[1:3])} ended with code {process.returncode}:\n  {last}")
    return out


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, in which `benchmarks` can be imported and mpirun starts,
    and `more`.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **AS_ROOT, "PYTHONPATH": path, **more}


def mpirun(processes: int) -> list[str]:
    """Return the words that start a command in so many processes: of the mpirun beside this Python,
    or on PATH.
    """
    beside = (
        f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    )
    program = shutil.which("mpirun", path=beside) or "mpirun"
    return [program, "-np", str(processes), "--bind-to", "none", "--oversubscribe"]


def train(
    words: Sequence[str], folder: pathlib.Path, launcher: Sequence[str] = (), **env: str
) -> list[dict[str, Any]]:
    """Run `train.py WORDS` in a job of its own; return the records of its metrics file. Raises
    CalledProcessError.
    """
    call(
        [*launcher, sys.executable, str(ROOT / "train.py"), *words, "--run_dir", str(folder)],
        environment(**env),
    )
    return records(folder)


def call(command: Sequence[str], env: dict[str, str], cwd: pathlib.Path | None = None) -> None:
    """Run a command to its end; what it prints goes to stderr. Raises CalledProcessError."""
    subprocess.run(command, check=True, stdout=sys.stderr, env=env, cwd=cwd)


def records(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
