"""metrics.jsonl: one JSON object per line, flushed as written; a resumed run goes on where its checkpoint stands."""

import json
import math
import pathlib
from typing import Any

from jaxdp.metrics.writer import Record


class JsonLines:
    """Appends to `path`; lines of steps after `keep_until`, and a torn last line, are dropped first."""

    def __init__(self, path: pathlib.Path, keep_until: int = 0):
        kept = [line for line in read(path) if 0 < line.get("step", 0) <= keep_until and line.get("split") != "final"]
        new = path.with_suffix(".tmp")
        new.write_text("".join(_dump(line) for line in kept))
        new.replace(path)
        self.file = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        self.file.write(_dump(record))

    def say(self, text: str) -> None: ...

    def close(self) -> None:
        self.file.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics file, without a last line that was cut short; empty where there is no file."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _dump(record: Record) -> str:
    # JSON has no NaN or infinity: they are written as text, which float() reads back.
    clean = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean) + "\n"
