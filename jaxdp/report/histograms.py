"""Histograms over the steps of a run, from its events of the kind `histogram`."""

from collections.abc import Callable, Sequence
from typing import Any

Json = dict[str, Any]
KIND = "histogram"
BINS = 1000  # at most


def by_name(events: Sequence[Json], is_finite: Callable[[Any], bool]) -> dict[str, list[Json]]:
    """Return {name: [{step, low, high, counts}, ...]} by step; of two for a step the later, and none that is not valid.

    counts: of equal bins from low to high.
    """
    found: dict[str, dict[int, Json]] = {}
    for event in events:
        name, step, counts = event.get("name"), event.get("step"), event.get("counts")
        low, high = event.get("low"), event.get("high")
        valid = isinstance(name, str) and is_finite(step) and is_finite(low) and is_finite(high)
        if not valid or not isinstance(counts, list) or not 0 < len(counts) <= BINS or not low < high:
            continue
        if all(is_finite(count) and count >= 0 for count in counts):
            found.setdefault(name, {})[step] = {"step": step, "low": low, "high": high, "counts": counts}
    return {name: [steps[step] for step in sorted(steps)] for name, steps in found.items()}
