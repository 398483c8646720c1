"""What ends a run in one line: the user's input is wrong, another process is, or the run itself."""


class Said(Exception):
    """An error that one rank prints for all.

    rank: the one that should, where every rank raises the same error; None where only the rank that raises it knows.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class UsageError(Said, ValueError):
    """Bad input: one line that names the field, its value and the fix. The command exits with code 2."""


class DistributedError(Said, RuntimeError):
    """A process that did not come, left, or disagreed in the middle of a run; names the rank. Exit code 1."""


class RunFailed(Said, RuntimeError):
    """The run itself cannot go on: one line, said by rank 0. Exit code 1."""


def one_line(text: object) -> str:
    """A message, or an error's, without its line breaks."""
    return " ".join(str(text).split())
