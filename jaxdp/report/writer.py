"""The report of a run is written at its end, and now and then at an evaluation, where that takes next to no time."""

import pathlib
import time

from jaxdp.errors import one_line
from jaxdp.metrics import aloud
from jaxdp.metrics.writer import Record
from jaxdp.report import html
from jaxdp.report.read import read_run

NAME = "report.html"
SHARE = 0.01  # of the time, at most, that writing it may take while the run goes on


class Reports:
    """Writes `directory`/report.html; where it cannot, it says so once, and training goes on."""

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
        self.refresh(alive=False)

    def refresh(self, alive: bool) -> None:
        began = time.monotonic()
        try:
            if alive is False or (self.directory / "metrics.jsonl").stat().st_size:
                html.write(self.directory / NAME, html.render([read_run(self.directory, alive)]))
        except Exception as error:
            if not self.failed:
                self.failed = True
                aloud.say(f"jaxdp: {NAME} could not be written: {one_line(error)}", error=True)
        self.since = time.monotonic()
        self.took = self.since - began
