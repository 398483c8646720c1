"""The HTML report: a template with inlined style, scripts and run data; one file that needs no
network. A run writes it at its end, and before as long as that takes a negligible share of the
time."""

import dataclasses
import html
import json
import math
import os
import pathlib
import re
import stat
import time
from collections.abc import Sequence
from typing import Any

from jaxdp.config import Config
from jaxdp.config.validation import flatten
from jaxdp.errors import one_line
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import NoEvents
from jaxdp.metrics.numbers import sign
from jaxdp.metrics.writer import Record, Writer
from jaxdp.report.read import read_run
from jaxdp.run import rundir
from jaxdp.run.rundir import REPORT

FOLDER = pathlib.Path(__file__).parent / "page"
SCRIPTS = ("data.js", "chart.js", "parts.js", "runs.js", "live.js", "main.js")


def render(runs: Sequence[dict[str, Any]]) -> str:
    """Return the HTML page for several runs, each as returned by `read_run`."""
    page = {
        "written": round(time.time(), 3),
        "directions": {name: sign(name) for run in runs for name in run["numbers"]},
        "defaults": flatten(Config()),
        "runs": list(runs),
    }
    data = json.dumps(page, separators=(",", ":"), default=str, allow_nan=False)
    parts = {
        "title": html.escape(", ".join(run["name"] for run in runs)),
        "style": read("page.css"),
        "script": "\n".join(map(read, SCRIPTS)),
        "data": data.replace("<", "\\u003c"),  # so that no text in it can close the script element
    }
    return re.sub(r"\[\[(\w+)\]\]", lambda match: parts[match[1]], read("page.html"))


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def write(file: pathlib.Path, text: str) -> None:
    """Replace the file atomically: a browser that reads it meanwhile gets the previous version.
    Raises OSError.
    """
    content = text.encode("utf-8", "surrogateescape")
    if file.exists() and not file.is_file():  # do not replace /dev/stdout or a pipe
        file.write_bytes(content)
        return
    if (
        file.is_symlink() and file.lstat().st_uid == os.getuid()
    ):  # keep a link, but not that of another user
        file = file.resolve()
    with rundir.replaced(file, private=True) as new:  # it contains git.diff
        if file.exists():
            new.chmod(stat.S_IMODE(file.stat().st_mode))
        new.write_bytes(content)


SHARE = 0.01  # the largest fraction of the time that writing may take during the run
PAUSE = {
    "eval": 1.0,
    "train": 10.0,
}  # seconds from one report to the next, at least, by the split of the record


@dataclasses.dataclass
class Reports(Writer):
    """A writer of `directory`/report.html that prints its path at the end; if writing fails, it
    warns once and training continues."""

    directory: pathlib.Path
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
        # after a `regroup`, other processes wait for this one
        if self.events.ended != "regroup" and self.refresh(alive=False):
            safe_print.say(f"report in {self.directory / REPORT}")

    def refresh(self, alive: bool) -> bool:
        """Write the report; return True if it was written."""
        began = time.monotonic()
        try:
            write(self.directory / REPORT, render([read_run(self.directory, alive)]))
            return True
        except Exception as error:
            if not self.failed:
                self.failed = True
                safe_print.say(
                    f"jaxdp: {REPORT} could not be written: {one_line(error)}", error=True
                )
            return False
        finally:
            self.since = time.monotonic()
            self.took = self.since - began
