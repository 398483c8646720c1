"""Throughput: tokens per second, model FLOP/s and MFU of a log interval, and the goodput of the
full run.
"""

import pathlib
import time
from collections.abc import Callable

from jaxdp.metrics.jsonl import read
from jaxdp.metrics.writer import Record


def throughput(
    examples: float, tokens: int | None, flops: float | None, peak: float | None
) -> Callable[[float], Record]:
    """Return a function from the milliseconds per update to the throughput entries of a record.

    examples: per update, on average. tokens: per example, or None. flops: the model's forward and
    backward FLOPs per example (`jaxdp.plan.flops.model_flops`), or None. peak: total FLOP/s of
    all devices, or None.

        tokens_per_s        tokens x examples per second
        model_flops_per_s   flops x examples per second
        mfu                 model_flops_per_s / peak (arXiv 2204.02311, appendix B)

    An entry is omitted if one of its inputs is None.
    """

    def record(milliseconds: float) -> Record:
        rate = examples / (1e-3 * milliseconds)
        entries: Record = {}
        if tokens is not None:
            entries["tokens_per_s"] = tokens * rate
        if flops is not None:
            entries["model_flops_per_s"] = flops * rate
            if peak is not None:
                entries["mfu"] = flops * rate / peak
        return entries

    return record


def goodput(metrics: pathlib.Path, began: float) -> Record:
    """Return {"goodput"}: the fraction of the time since a run's first start spent on updates that
    were kept.

    metrics: the path of metrics.jsonl, which has no lost updates. began: the first start, in
    seconds since the epoch. Startup, compilation, evaluation, saving, downtime and lost updates
    reduce it, as in MegaScale (arXiv 2402.15627) and Google's ML Goodput. Empty if no update was
    timed."""
    productive, step = 0.0, 0
    for record in read(metrics):
        if record.get("split") == "train":
            productive += 1e-3 * float(record.get("step_time_ms", 0.0)) * (record["step"] - step)
            step = record["step"]
    elapsed = time.time() - began
    return {"goodput": min(1.0, productive / elapsed)} if productive and elapsed > 0 else {}
