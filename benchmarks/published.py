"""The plan of published training runs beside what was published, and the fit of the planner's
constants.

Every run is counted by formula as `jaxdp plan` counts a program (6 FLOP per parameter and token,
attention's 12 layers x width x length per token, the collectives of its layout) and timed by
`update_seconds`. Per source, the first, third, ... run is judged, the second, fourth, ... is
fitted; a source with one run is only judged.

    python -m benchmarks.published          # the table of docs/plan.md
    python -m benchmarks.published --fit    # the constants of jaxdp/plan/hardware.py, from the fitted half
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.published_runs import BF16, RUNS, SOURCES, Run
from jaxdp.plan.hardware import HARDWARE, NETWORK, OVERLAP, expected_seconds, update_seconds
from jaxdp.plan.hlo import Collective


class Seconds(NamedTuple):
    """The parts of an update: products at the peak, memory traffic, communication at full
    bandwidth.

    amount: what a device computes in it, in the run's unit times seconds.
    """

    products: float
    traffic: float
    communication: float
    amount: float


@functools.cache
def count(run: Run) -> Seconds:
    """Time the FLOPs, memory traffic and collectives of one update on the run's hardware, without
    fitted constants.
    """
    hw = HARDWARE[run.hardware]
    inter, per_host = run.inter or hw.inter_bandwidth, run.per_host or hw.devices_per_host
    hw = hw._replace(inter_bandwidth=inter, devices_per_host=per_host, efficiency=1.0)
    tokens = run.length * run.sequences * run.microbatches
    flops = tokens * (6 * (run.params - run.outside) + 12 * run.layers * run.width * run.length)
    replica, replicas = run.params / run.model, run.devices // run.model // run.shard
    near = max(1, per_host // run.model)  # devices of a host that hold the same part of the model

    def call(kind, times, size, n, k):
        return (Collective(kind, times, round(size), "", n, ()), max(1, min(n, k)))

    calls = []
    if run.shard > 1:
        calls.append(call("all-gather", 2 * run.microbatches, BF16 * replica, run.shard, near))
        calls.append(
            call("reduce-scatter", run.microbatches, run.reduce * replica, run.shard, near)
        )
    if replicas > 1:
        calls.append(
            call("all-reduce", 1, run.reduce * replica / run.shard, replicas, near // run.shard)
        )
    traffic = (
        28 * replica / run.shard
    )  # float32: parameters and Adam's moments read and written, gradients read
    dtype = "float32" if run.alone else "bfloat16"
    found = update_seconds(hw, 0.0, dtype, calls, traffic)
    amount = {"efficiency": run.alone or 0.0, "tokens/s": tokens, "TFLOP/s": flops / 1e12}[run.unit]
    if run.alone:
        return Seconds(run.alone, 0.0, found["communication"], amount)
    products = update_seconds(hw, flops * run.recompute, dtype, [])["compute"]
    return Seconds(products, found["compute"], found["communication"], amount)


def predict(
    run: Run, efficiency: float | None = None, network: float = NETWORK, overlap: float = OVERLAP
) -> float:
    """Return the planner's figure in the run's unit. efficiency: the share of the peak, by default
    the hardware's.
    """
    parts, efficiency = (
        count(run),
        efficiency or (1.0 if run.alone else HARDWARE[run.hardware].efficiency),
    )
    compute = parts.products / efficiency + parts.traffic
    return parts.amount / expected_seconds(compute, parts.communication, network, overlap)


def error(run: Run, *constants: float | None) -> float:
    return predict(run, *constants) / run.published - 1  # type: ignore[arg-type]


def median_error(runs: Sequence[Run]) -> float:
    return statistics.median(abs(error(r)) for r in runs)


def halves() -> tuple[list[Run], list[Run]]:
    """Return the fitted and the judged runs: of a source, every second one is judged, from the
    first.
    """
    judged = [
        run for i, run in enumerate(RUNS) if sum(r.source == run.source for r in RUNS[:i]) % 2 == 0
    ]
    return [r for r in RUNS if r not in judged], judged


def loss_of(runs: Sequence[Run], efficiency: float | None, network: float, overlap: float) -> float:
    return sum(math.log(predict(r, efficiency, network, overlap) / r.published) ** 2 for r in runs)


def fit(runs: Sequence[Run], coarse: int = 1) -> tuple[dict[str, float], float, float]:
    """Return EFFICIENCY, NETWORK and OVERLAP: the least squares of log(predicted/published) on a
    grid, or on every `coarse`th of its values.

    Runs with published seconds have no efficiency to fit.
    """
    shares = [round(0.2 + 0.005 * i, 3) for i in range(0, 160, coarse)]
    groups = {
        name: [r for r in runs if r.family == name] for name in sorted({r.family for r in runs})
    }
    best: tuple[float, dict[str, float], float, float] = (math.inf, {}, 1.0, 0.0)
    for n, o in itertools.product(range(6, 21, coarse), range(0, 21, coarse)):
        network, overlap = n / 20, o / 20
        total = 0.0
        efficiency: dict[str, float] = {}
        for name, group in groups.items():
            tried = [None] if group[0].alone else shares
            loss, e = min(
                ((loss_of(group, e, network, overlap), e) for e in tried), key=lambda pair: pair[0]
            )
            total += loss
            efficiency |= {name: e} if e else {}
        best = min(best, (total, efficiency, network, overlap), key=lambda row: row[0])
    return best[1:]


def figure(run: Run, value: float) -> str:
    return f"{value:.2f}" if run.unit == "efficiency" else f"{value:,.0f}"


# Scaling over devices: the devices of the small and of the large run.
SCALING = [
    ("torchtitan", "Llama 3.1 8B", 8, 128),
    ("llm-foundry", "MPT 1b, H100", 8, 64),
    ("MaxText", "Llama 2 7B", 8, 128),
    ("MaxText v5e", "16B", 256, 8192),
]


def scaling(source: str, name: str, few: int, many: int) -> tuple[float, float]:
    """Return the predicted and the published efficiency of `many` devices over `few`."""

    def pick(n):
        return next(r for r in RUNS if (r.source, r.name, r.devices) == (source, name, n))

    small, large = pick(few), pick(many)
    return predict(large) / predict(small), large.published / small.published


def report() -> str:
    """Return the figures of docs/plan.md: the summary, the tables and the sources."""
    _, judged = halves()
    header = "| source | run | devices | unit | published | predicted | error | half |"
    lines = [summary(), "", header, "|---" * 8 + "|"]
    for run in RUNS:
        figures = [
            figure(run, run.published),
            figure(run, predict(run)),
            f"{100 * error(run):+.0f} %",
        ]
        half = "judged" if run in judged else "fitted"
        lines.append(
            f"| {' | '.join([run.source, run.name, f'{run.devices:,}', run.unit, *figures, half])} |"
        )
    lines += ["", "| scaling | devices | published | predicted |", "|---" * 4 + "|"]
    for source, name, few, many in SCALING:
        ours, theirs = scaling(source, name, few, many)
        lines.append(
            f"| {source}, {name} | {few:,} to {many:,} | {100 * theirs:.1f} % | {100 * ours:.1f} % |"
        )
    sources = [f"- {name}: {address}" for name, address in SOURCES.items()]
    return "\n".join([*lines, "", *sources])


def summary() -> str:
    """Return the medians of the absolute error: of both halves and of the sources; and the largest
    that is judged.
    """
    fitted, judged = halves()
    of_source = [median_error([r for r in judged if r.source == s]) for s in SOURCES]
    worst = max(judged, key=lambda r: abs(error(r)))
    return (
        f"Median error: {100 * median_error(judged):.1f} % of {len(judged)} judged runs, "
        f"{100 * median_error(fitted):.1f} % of {len(fitted)} fitted runs; "
        f"each source counted once: {100 * statistics.median(of_source):.1f} %. "
        f"The largest judged: {worst.source} {worst.name}, {worst.devices:,} devices, {100 * error(worst):+.0f} %."
    )


def left_out(coarse: int = 1) -> str:
    """Return each source's error with constants fitted to all runs of the other sources."""
    lines = ["| source left out of the fit | runs | median error |", "|---" * 3 + "|"]
    for source in SOURCES:
        runs = [r for r in RUNS if r.source == source]
        efficiency, *links = fit([r for r in RUNS if r.source != source], coarse)
        errors = [abs(error(r, efficiency.get(r.family), *links)) for r in runs]
        lines.append(f"| {source} | {len(runs)} | {100 * statistics.median(errors):.1f} % |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--coarse", type=int, default=1, help="fit on every Nth value of the grid")
    options = parser.parse_args(argv)
    if options.fit:
        constants = fit(halves()[0], options.coarse)
        print(
            "EFFICIENCY = {}\nNETWORK = {}\nOVERLAP = {}".format(*constants),
            left_out(options.coarse),
            sep="\n\n",
        )
    else:
        print(report())


if __name__ == "__main__":
    main(sys.argv[1:])
