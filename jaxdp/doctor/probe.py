"""What may crash, abort or hang is done in a process of its own: `python -m jaxdp.doctor.probe NAME`.

A wrong jaxlib ends its process with a signal, an unknown XLA flag aborts it, and an MPI that is not mpirun's may wait
for ever. The parent gives a task as a line of JSON, and gets a line back, or hears how the process ended.
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

from jaxdp.errors import Said

MARK = "jaxdp-probe "  # before each answer: libraries print as well
TASKS = {"jax": "jaxdp.doctor.with_jax", "mpi": "jaxdp.doctor.with_mpi"}


class Ended(Exception):
    """The process ended, or did not answer; the text says how, and what it last printed."""


class Probe:
    """A process that answers, one task after the other. env: variables that it gets beside this process's own."""

    def __init__(self, kind: str, env: dict[str, str] | None = None):
        self.printed: collections.deque[str] = collections.deque(
            maxlen=400
        )  # lines of standard error; no disk is needed
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
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._listen, self._overhear)]
        for reader in self.readers:
            reader.start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                self.answers.put(line[len(MARK) :])
        self.answers.put(None)

    def _overhear(self) -> None:
        for line in self.process.stderr or ():
            self.printed.append(line)

    def send(self, task: str, **given: Any) -> None:
        """Begins a task; `receive` has its result."""
        with contextlib.suppress(OSError):  # it has ended, which is then said
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"task": task, **given}) + "\n")
            self.process.stdin.flush()

    def receive(self, seconds: float) -> Any:
        """What the task returned. Raises Ended where the process ends, or says nothing for so many seconds; or Said."""
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            words, self.silent = self.last_words(), True
            self.close()
            raise Ended(f"no answer within {seconds:g} s{words}") from None
        if line is None:
            raise Ended(f"{how(self.process.wait())}{self.last_words()}")
        answer = json.loads(line)
        if "said" in answer:
            raise Said(answer["said"])
        if "error" in answer:
            raise Ended(answer["error"])
        return answer["value"]

    def ask(self, task: str, seconds: float, **given: Any) -> Any:
        """What `task` returns, as `send` and `receive`."""
        self.send(task, **given)
        return self.receive(seconds)

    def last_words(self) -> str:
        """The line of its standard error that tells most: the first of a fatal message, else the last."""
        self.readers[1].join(0.2)
        text = "".join(self.printed)
        if waits := re.search(r"in (waits_until_\w+)", text):  # a name for people, in the traceback of a deadline
            return f": it {waits[1].replace('_', ' ')}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        fatal = [line for line in lines if re.match(r"F\d{4} |[\w.]*(Error|Exception): |Fatal Python error", line)]
        line = (fatal or lines[-1:] or [""])[0]
        return f": {re.sub(r'^[A-Z][0-9]{4} .*?] ', '', line)[:300]}" if line else ""

    def close(self) -> None:
        """Lets the process end, and makes it. What it started may still hold its output: that is not waited for."""
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


def how(code: int) -> str:
    """How a process ended."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def serve(kind: str) -> None:
    """The child's side: answers tasks until its parent is gone.

    MPICH takes leave of mpirun when a process ends by itself, after MPI_Finalize: one that is killed, or that calls
    os._exit, makes mpirun kill the other ranks.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        given = json.loads(line)
        try:
            tasks = importlib.import_module(TASKS[kind])
            answer = {"value": getattr(tasks, given.pop("task"))(**given)}
        except Said as error:
            answer = {"said": str(error)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        out.write(MARK + json.dumps(answer) + "\n")
        out.flush()
    if kind == "jax":  # whose own end would wait for the other ranks
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
