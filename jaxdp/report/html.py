"""The page is a template with its style, its script and the data of the runs inside: one file, no network."""

import html
import json
import pathlib
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
        "style": (FOLDER / "page.css").read_text(),
        "script": "\n".join((FOLDER / name).read_text() for name in SCRIPTS),
        "data": data.replace("<", "\\u003c"),  # nothing in it ends the element that holds it
    }
    text = (FOLDER / "page.html").read_text()
    for name, part in parts.items():
        text = text.replace(f"[[{name}]]", part, 1)
    return text


def write(file: pathlib.Path, text: str) -> None:
    """In one piece: a browser that reads it meanwhile gets the one before. Raises OSError."""
    new = file.with_name(f"{file.name}.tmp")
    try:
        new.write_text(text)
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise
