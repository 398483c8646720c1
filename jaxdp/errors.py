"""The two ways a run can be refused: the user's input is wrong, or the other processes are."""


class UsageError(ValueError):
    """Bad input: one line that names the field, its value and the fix. The command exits with code 2.

    rank: the one rank that should print it, where every rank raises the same error; None where only the rank that
    raises it knows of it.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class DistributedError(RuntimeError):
    """A process that did not come, left, or disagreed in the middle of a run; names the rank. Exit code 1.

    rank: as in `UsageError`.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank
