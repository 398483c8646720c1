"""What callbacks wrote for the report: files `media/STEP-NAME.png` or `.txt`, and events of the kind
`histogram`.
"""

import base64
import mimetypes
import pathlib
import re
from typing import Any

Json = dict[str, Any]
NAME = re.compile(r"(\d{1,15})-(.+)\.(png|jpg|jpeg|gif|txt)", re.IGNORECASE)
# Bytes at most: of a text, which is cut, of an image, of all.
TEXT, IMAGE, PAGE = 20_000, 1_000_000, 4_000_000


def read(directory: pathlib.Path, most: int = PAGE) -> Json:
    """Return {"items": [{step, name, and text or image}, ...] by step, "omitted": the number of
    files}.

    image: a data URI. most: the bytes of all; the files of the last steps come first. Larger images
    are omitted."""
    folder, items, omitted = directory / "media", list[Json](), 0
    names = [file.name for file in folder.glob("*") if file.is_file()]
    matches = filter(None, map(NAME.fullmatch, names))
    for step, name, match in sorted(((int(m[1]), m[0], m) for m in matches), reverse=True):
        kind, _ = mimetypes.guess_type(name)
        is_text = kind == "text/plain"
        limit = TEXT if is_text else IMAGE
        content = start(folder / name, limit + 1)
        is_long = len(content) > limit
        if not content or len(content) > most or (is_long and not is_text):
            omitted += 1
            continue
        most -= len(content)
        item: Json = {"step": step, "name": match[2]}
        if is_text:
            item["text"] = content[:limit].decode("utf-8", "replace") + "\n[cut]" * is_long
        else:
            item["image"] = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        items.append(item)
    return {"items": items[::-1], "omitted": omitted}


def start(file: pathlib.Path, most: int) -> bytes:
    """Return the first bytes of a file; none if it is missing or cannot be read."""
    try:
        with file.open("rb") as stream:
            return stream.read(most)
    except OSError:
        return b""


KIND = "histogram"  # of an event
BINS = 1000  # at most


def histograms(events: list[Json]) -> dict[str, list[Json]]:
    """Return {name: [{step, low, high, counts}, ...]} of the events of this kind, by step; of two for
    a step the later, and none that is not valid.

    counts: of equal bins from low to high.
    """
    found: dict[str, dict[int, Json]] = {}
    for event in events:
        name = event.get("name")
        counts = event.get("counts")
        numbers = {key: event.get(key) for key in ("step", "low", "high")}
        if (
            event["kind"] == KIND
            and isinstance(name, str)
            and isinstance(counts, list)
            and 0 < len(counts) <= BINS
            and all(map(is_number, [*numbers.values(), *counts]))
            and min(counts) >= 0
            and event["low"] < event["high"]
        ):
            found.setdefault(name, {})[event["step"]] = {**numbers, "counts": counts}
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a number, which is finite: `jsonl.parse` reads others as
    strings.
    """
    return type(value) in (int, float)
