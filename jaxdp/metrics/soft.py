"""A writer that may fail: training goes on without it, and says so once."""

import sys

from jaxdp.errors import one_line
from jaxdp.metrics.writer import Record, Writer


class Soft:
    """Passes on to another writer until that raises."""

    def __init__(self, name: str, writer: Writer):
        self.name, self.writer = name, writer
        self.failed = False

    def write(self, record: Record) -> None:
        self._try("write", record)

    def say(self, text: str) -> None:
        self._try("say", text)

    def rewind(self, step: int) -> None:
        self._try("rewind", step)

    def close(self) -> None:
        self._try("close")

    def _try(self, method: str, *args: object) -> None:
        if self.failed:
            return
        try:
            getattr(self.writer, method)(*args)
        except Exception as error:
            self.failed = True
            print(
                f"jaxdp: warning: log.writers: {self.name} failed ({one_line(error)}); training goes on without it",
                file=sys.stderr,
                flush=True,
            )
