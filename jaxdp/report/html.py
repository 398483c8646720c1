"""The HTML report: a template with inlined style, scripts and run data; one file that needs no
network.
"""

import html
import json
import os
import pathlib
import re
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.metrics.numbers import SMALLER
from jaxdp.run import rundir

FOLDER = pathlib.Path(__file__).parent / "page"
SCRIPTS = ("data.js", "chart.js", "parts.js", "runs.js", "live.js", "main.js")


def render(runs: Sequence[dict[str, Any]], defaults: Mapping[str, Any] | None = None) -> str:
    """Return the HTML page for several runs, each as returned by `read_run`.

    defaults: the default of each key of the config, by its dotted name; None: do not tell which
    keys were set."""
    title = ", ".join(run["name"] for run in runs)
    page = {
        "written": round(time.time(), 3),
        "smaller": SMALLER,
        "defaults": defaults,
        "runs": list(runs),
    }
    data = json.dumps(page, separators=(",", ":"), default=str, allow_nan=False)
    parts = {
        "title": html.escape(title),
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
    if file.exists() and not file.is_file():  # do not replace /dev/stdout or a pipe
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        return
    if (
        file.is_symlink() and file.lstat().st_uid == os.getuid()
    ):  # keep a link, but not that of another user
        file = file.resolve()
    with rundir.replaced(file, private=True) as new:  # it contains git.diff
        if file.exists():
            new.chmod(stat.S_IMODE(file.stat().st_mode))
        new.write_text(text, encoding="utf-8", errors="surrogateescape")
