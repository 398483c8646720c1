"""The page is a template with its style, its script and the data of the runs inside: one file, no network."""

import html
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "page"
SCRIPTS = ("data.js", "chart.js", "parts.js", "main.js")


def render(runs: Sequence[dict[str, Any]]) -> str:
    """HTML of what `read_run` gives for each."""
    title = ", ".join(run["name"] for run in runs)
    data = json.dumps({"runs": list(runs)}, separators=(",", ":"), default=str, allow_nan=False)
    parts = {
        "title": html.escape(title),
        "style": read("page.css"),
        "script": "\n".join(map(read, SCRIPTS)),
        "data": data.replace("<", "\\u003c"),  # nothing in it ends the element that holds it
    }
    return re.sub(r"\[\[(\w+)\]\]", lambda place: parts[place[1]], read("page.html"))


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def write(file: pathlib.Path, text: str) -> None:
    """In one piece: a browser that reads it meanwhile gets the one before. Raises OSError."""
    if file.exists() and not file.is_file():  # /dev/stdout, a pipe: what it is stays
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
        return
    file = file.resolve()  # a link stays one
    new = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # the run and the command may write it at one time
    try:
        new.write_text(text, encoding="utf-8", errors="surrogateescape")
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise
