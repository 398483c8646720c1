"""Run verbs of jaxdp in processes that are forked from this one, which has imported JAX for all of
them.

An import takes more than a second of a core. JAX may be imported before a fork, but must not have
opened its devices."""

import atexit
import contextlib
import gc
import multiprocessing
import os
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from jaxdp.cli import main
from jaxdp.process.signals import NUMBERS, handled


def preload() -> None:
    """Import what a training needs, and do not let the garbage collector write to pages that
    processes share.
    """
    import jaxdp.cli.train  # noqa: F401
    from jaxdp.checkpoint.orbax import orbax

    orbax()
    gc.collect()
    gc.freeze()


class Forked:
    """A process that runs a verb; it has the methods of `subprocess.Popen` that are needed here.

    argv: the verb and its arguments. environment: all variables. name: shown by `ps -o comm` and
    `top`, 15 characters. output: a file descriptor for what the process prints.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        output: int | None = None,
    ):
        arguments = argv, environment, name, output, sys.stdin
        self._process = multiprocessing.get_context("fork").Process(target=_run, args=arguments)
        blocked = signal.pthread_sigmask(
            signal.SIG_BLOCK, NUMBERS
        )  # in the child until `main` takes them
        stdin, sys.stdin = sys.stdin, None  # multiprocessing would close it in the child
        try:
            self._process.start()
        finally:
            sys.stdin = stdin
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None if the process runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    name: str,
    output: int | None,
    stdin: TextIO | None,
) -> None:
    with contextlib.suppress(OSError):  # not on Linux
        pathlib.Path("/proc/self/comm").write_text(name, encoding="utf-8")
    for number in handled():
        signal.signal(number, signal.SIG_DFL)
    multiprocessing.set_start_method(
        None, force=True
    )  # "fork" here; data of the user may choose, or use the default
    if "numpy" in sys.modules:
        sys.modules[
            "numpy"
        ].random.seed()  # else all processes have the same; Python's `random` is seeded by the fork
    os.environ.clear()
    os.environ.update(environment)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    sys.argv, sys.stdin = ["jaxdp", *argv], stdin
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not
