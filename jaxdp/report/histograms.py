"""Histograms over the steps of a run, from its events of the kind `histogram`."""

import math
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
KIND = "histogram"
BINS = 1000  # at most


def by_name(events: Sequence[Json]) -> dict[str, list[Json]]:
    """Return {name: [{step, low, high, counts}, ...]} by step; of two for a step the later, and
    none that is not valid.

    counts: of equal bins from low to high.
    """
    found: dict[str, dict[int, Json]] = {}
    for event in events:
        name, counts = event.get("name"), event.get("counts")
        numbers = {key: event.get(key) for key in ("step", "low", "high")}
        if not isinstance(name, str) or not isinstance(counts, list) or not 0 < len(counts) <= BINS:
            continue
        if not all(map(_is_finite, [*numbers.values(), *counts])) or min(counts) < 0:
            continue
        if event["low"] < event["high"]:
            found.setdefault(name, {})[event["step"]] = {**numbers, "counts": counts}
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
