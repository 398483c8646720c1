"""Run what may crash, abort or hang in a process of its own: `python -m jaxdp.doctor.probe KIND`.

A wrong jaxlib kills its process, an unknown XLA flag aborts it, and an MPI that is not mpirun's may wait for ever. The
parent sends a task as a line of JSON, and gets an answer or an account of how the process ended.
"""

import collections
import contextlib
import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from typing import Any

from jaxdp.errors import ReportedError

MARK = "jaxdp-probe "  # before each answer: libraries print as well


class Ended(Exception):
    """The process ended or did not answer; the text says how, and what it last printed."""


class Probe:
    """A process that does tasks, one after the other, with `env` beside this process's variables."""

    def __init__(self, kind: str, env: dict[str, str] | None = None):
        self.printed: collections.deque[str] = collections.deque(maxlen=400)  # lines of standard error
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxdp.doctor.probe", kind],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # MPICH's mpirun talks to its ranks through a file descriptor that they inherit
            text=True,
            errors="replace",
        )
        self.silent = False
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._read_answers, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def _read_answers(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                self.answers.put(line[len(MARK) :])
        self.answers.put(None)

    def _read_errors(self) -> None:
        self.printed.extend(self.process.stderr or ())

    def send(self, task: str, **arguments: Any) -> None:
        """Start a task; `receive` returns its result."""
        with contextlib.suppress(OSError):  # it has ended, which `receive` reports
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
            self.process.stdin.flush()

    def receive(self, seconds: float) -> Any:
        """Return the task's result. Raises Ended if the process ends or stays silent, or its task's error."""
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            words, self.silent = self.last_words(), True
            self.close()
            raise Ended(f"no answer within {seconds:g} s{words}") from None
        if line is None:
            code = self.process.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise Ended(f"{how}{self.last_words()}")
        answer = json.loads(line)
        if "said" in answer:
            raise ReportedError(answer["said"])
        if "error" in answer:
            raise Ended(answer["error"])
        return answer["value"]

    def ask(self, task: str, seconds: float, **arguments: Any) -> Any:
        """Send a task and receive its result."""
        self.send(task, **arguments)
        return self.receive(seconds)

    def last_words(self) -> str:
        """Return the most useful line of standard error: the first of a fatal message, else the last."""
        self.readers[1].join(0.2)
        text = "".join(self.printed.copy())
        if waits := re.search(r"in (waits_until_\w+)", text):  # a function's name, in the traceback of a deadline
            return f": it {waits[1].replace('_', ' ')}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        fatal = [line for line in lines if re.match(r"F\d{4} |[\w.]*(Error|Exception): |Fatal Python error", line)]
        line = (fatal or lines[-1:] or [""])[0]
        return f": {re.sub(r'^[A-Z][0-9]{4} .*?] ', '', line)[:300]}" if line else ""

    def close(self) -> None:
        """End the process. Processes that it started may still have its output open: they are not waited for."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(0 if self.silent else 2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader, stream in zip(self.readers, (self.process.stdout, self.process.stderr)):
            reader.join(0.2)
            if stream is not None and not reader.is_alive():
                stream.close()


def serve(kind: str) -> None:
    """Do tasks in the child until its parent closes the pipe.

    With MPI it must end by itself, after MPI_Finalize: a rank that is killed or calls os._exit makes MPICH's mpirun
    kill the others.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            tasks = importlib.import_module("jaxdp.doctor.tasks")
            answer = {"value": getattr(tasks, arguments.pop("task"))(**arguments)}
        except ReportedError as error:
            answer = {"said": str(error)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        out.write(MARK + json.dumps(answer) + "\n")
        out.flush()
    if kind == "jax":  # whose own end would wait for the other ranks
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
