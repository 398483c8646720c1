"""The command `jaxdp`, and `python -m jaxdp`."""

import sys
from typing import NoReturn

COMPUTING = ("train", "eval", "profile")  # verbs whose time is that of the programs


def command(argv: list[str] | None = None) -> NoReturn:
    """`jaxdp.cli.main`, as a command: the process may begin anew, before it has imported much."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMPUTING:
        from jaxdp import environment

        environment.malloc()
    from jaxdp.cli import main

    main(argv)


if __name__ == "__main__":
    command()
