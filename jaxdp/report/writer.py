"""The report of a run is written at its end, and now and then at an evaluation, where that takes next to no time."""

import contextlib
import pathlib
import time

from jaxdp.errors import one_line
from jaxdp.metrics import aloud
from jaxdp.metrics.writer import Record
from jaxdp.report import html
from jaxdp.report.read import read_run

NAME = "report.html"
SHARE = 0.01  # of the time, at most, that writing it may take while the run goes on


def said(directory: pathlib.Path) -> str:
    """Where the report of a run is, in a line."""
    return f"report in {directory / NAME}"


class Reports:
    """Writes `directory`/report.html, and at the end says where; where it cannot, it says so once, and training goes
    on."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self.took, self.since = 0.0, time.monotonic()
        self.failed = False

    def write(self, record: Record) -> None:
        if record["split"] == "eval" and time.monotonic() - self.since > max(self.took / SHARE, 1.0):
            self.refresh(alive=True)

    def say(self, text: str) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None:
        if self.refresh(alive=False):
            with contextlib.suppress(OSError):  # nobody reads it any more; the other writers are to be closed
                print(said(self.directory), flush=True)

    def refresh(self, alive: bool) -> bool:
        """Whether it was written: there is nothing to show of a run that has no metrics yet."""
        began, written = time.monotonic(), False
        try:
            if alive is False or (self.directory / "metrics.jsonl").stat().st_size:
                html.write(self.directory / NAME, html.render([read_run(self.directory, alive)]))
                written = True
        except Exception as error:
            if not self.failed:
                self.failed = True
                aloud.say(f"jaxdp: {NAME} could not be written: {one_line(error)}", error=True)
        self.since = time.monotonic()
        self.took = self.since - began
        return written
