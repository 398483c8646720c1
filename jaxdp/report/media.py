"""What callbacks wrote for the report: files `media/STEP-NAME.png` or `.txt`, and events of the kind
`histogram`.
"""

import base64
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
FOLDER = "media"
NAME = re.compile(r"(\d{1,15})-(.+)\.(png|jpg|jpeg|gif|txt)", re.IGNORECASE)
TYPES = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif"}
# Bytes at most: of a text, which is cut, of an image, of all.
TEXT, IMAGE, PAGE = 20_000, 1_000_000, 4_000_000


def read(directory: pathlib.Path, most: int = PAGE) -> Json:
    """Return {"items": [{step, name, and text or image}, ...] by step, "omitted": the number of
    files}.

    image: a data URI. most: the bytes of all; the files of the last steps come first. Larger images
    are omitted."""
    folder = directory / FOLDER
    items = []
    omitted = 0
    names = [file.name for file in folder.glob("*") if file.is_file()]
    matches = filter(None, map(NAME.fullmatch, names))
    for step, name, match in sorted(((int(m[1]), m[0], m) for m in matches), reverse=True):
        kind = match[3].lower()
        limit = TEXT if kind == "txt" else IMAGE
        try:
            with (folder / name).open("rb") as stream:
                content = stream.read(limit + 1)
        except OSError:
            content = b""
        is_long = len(content) > limit
        if not content or len(content) > most or (kind != "txt" and is_long):
            omitted += 1
            continue
        most -= len(content)
        item: Json = {"step": step, "name": match[2]}
        if kind == "txt":
            item["text"] = content[:limit].decode("utf-8", "replace") + "\n[cut]" * is_long
        else:
            item["image"] = f"data:{TYPES[kind]};base64,{base64.b64encode(content).decode()}"
        items.append(item)
    return {"items": items[::-1], "omitted": omitted}


KIND = "histogram"  # of an event
BINS = 1000  # at most


def histograms(events: Sequence[Json]) -> dict[str, list[Json]]:
    """Return {name: [{step, low, high, counts}, ...]} by step; of two for a step the later, and
    none that is not valid.

    counts: of equal bins from low to high.
    """
    found: dict[str, dict[int, Json]] = {}
    for event in events:
        name = event.get("name")
        counts = event.get("counts")
        numbers = {key: event.get(key) for key in ("step", "low", "high")}
        if not isinstance(name, str) or not isinstance(counts, list) or not 0 < len(counts) <= BINS:
            continue
        if not all(map(is_finite, [*numbers.values(), *counts])) or min(counts) < 0:
            continue
        if event["low"] < event["high"]:
            found.setdefault(name, {})[event["step"]] = {**numbers, "counts": counts}
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}


def is_finite(value: Any) -> bool:
    """Return whether a value of a record is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)
