"""Write a run's report at its end, and during the run as long as that takes a negligible share of
the time.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from jaxdp.errors import one_line
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import NoEvents
from jaxdp.metrics.writer import Record, Writer
from jaxdp.report import html
from jaxdp.report.read import read_run

NAME = "report.html"
SHARE = 0.01  # the largest fraction of the time that writing may take during the run
PAUSE = {
    "eval": 1.0,
    "train": 10.0,
}  # seconds from one report to the next, at least, by the split of the record


def location(directory: pathlib.Path) -> str:
    """Return a line with the path of a run's report."""
    return f"report in {directory / NAME}"


@dataclasses.dataclass
class Reports(Writer):
    """A writer of `directory`/report.html that prints its path at the end; if writing fails, it
    warns once and training continues. defaults: as for `html.render`."""

    directory: pathlib.Path
    defaults: Mapping[str, Any] | None = None
    events: NoEvents = NoEvents()

    def __post_init__(self) -> None:
        self.took = 0.0
        self.since = time.monotonic()
        self.failed = False

    def write(self, record: Record) -> None:
        pause = PAUSE.get(record["split"], math.inf)  # `close` follows the final record
        if time.monotonic() - self.since > max(self.took / SHARE, pause):
            self.refresh(alive=True)

    def close(self) -> None:
        if self.events.ended != "regroup" and self.refresh(
            alive=False
        ):  # else other processes wait for this one
            safe_print.say(location(self.directory))

    def refresh(self, alive: bool) -> bool:
        """Write the report unless the run has no metrics yet; return True if it was written."""
        began, written = time.monotonic(), False
        try:
            if alive is False or (self.directory / "metrics.jsonl").stat().st_size:
                html.write(
                    self.directory / NAME,
                    html.render([read_run(self.directory, alive)], self.defaults),
                )
                written = True
        except Exception as error:
            if not self.failed:
                self.failed = True
                safe_print.say(f"jaxdp: {NAME} could not be written: {one_line(error)}", error=True)
        self.since = time.monotonic()
        self.took = self.since - began
        return written
