"""The command `jaxdp`, and `python -m jaxdp`."""

import signal
import sys
from typing import NoReturn

# Until `jaxdp.process.signals` takes them.
HELD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
COMPUTING = ("train", "eval")  # verbs whose time is that of the programs


def command(argv: list[str] | None = None) -> NoReturn:
    """Run `jaxdp.cli.main` as a command, in a process that may be replaced by one with another
    malloc.

    Signals that come meanwhile stay pending, in the new process too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMPUTING:
        from jaxdp.process import environment

        environment.malloc()
    from jaxdp.cli import main

    main(argv)


if __name__ == "__main__":
    command()
