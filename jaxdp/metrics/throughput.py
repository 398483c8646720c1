"""What a run makes of its devices: tokens, model FLOP/s and MFU of an interval, and the goodput of the whole."""

import pathlib
import time
from collections.abc import Callable

from jaxdp.metrics.jsonl import read
from jaxdp.metrics.writer import Record


def throughput(
    examples: float, tokens: int | None, flops: float | None, peak: float | None
) -> Callable[[float], Record]:
    """A function of the milliseconds of an update that says what else a record holds.

    examples: per update, on average. tokens: of an example, or None where it has none. flops: that the model asks for,
    forward and backward, for an example (`jaxdp.analysis.flops.model_flops`). peak: FLOP/s of all devices together.

        tokens_per_s        tokens x examples per second
        model_flops_per_s   flops x examples per second
        mfu                 model_flops_per_s / peak (arXiv 2204.02311, appendix B)

    Each is left out where what it needs is None.
    """

    def record(milliseconds: float) -> Record:
        rate = examples / (1e-3 * milliseconds)
        found: Record = {}
        if tokens is not None:
            found["tokens_per_s"] = tokens * rate
        if flops is not None:
            found["model_flops_per_s"] = flops * rate
            if peak is not None:
                found["mfu"] = flops * rate / peak
        return found

    return record


def goodput(metrics: pathlib.Path, began: float) -> Record:
    """`goodput`: the share of the time since a run's first start that went into updates which were kept.

    metrics: metrics.jsonl, which holds no update that was made anew. began: when, in seconds since the epoch. Starting,
    compiling, evaluating, saving, being stopped, and updates that were lost make it less (so MegaScale, arXiv
    2402.15627, and Google's ML Goodput have it). Empty where no update was timed.
    """
    kept, step = 0.0, 0
    for record in read(metrics):
        if record.get("split") == "train":
            kept += 1e-3 * float(record.get("step_time_ms", 0.0)) * (record["step"] - step)
            step = record["step"]
    elapsed = time.time() - began
    return {"goodput": min(1.0, kept / elapsed)} if kept and elapsed > 0 else {}
