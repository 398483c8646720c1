"""The plan of published training runs beside what was published, and the fit of the planner's
constants.

Every run is counted by formula as `jaxdp plan` counts a program (6 FLOP per parameter and token,
attention's 12 layers x width x length per token, the collectives of its layout), and timed twice:

before: by `compute_seconds`, as a plan without --target. Five constants are fitted.
after: by its schedule, block by block, as a plan with --target plays a compiled one (`play`). Five
constants are fitted, each for a reason (`Constants`); links have their data sheet's rates, since
shares from 0.8 to 1 of them fit alike.

Which half of the runs is fitted depends on their names and order alone: per source, the first,
third, ... run is judged, the second, fourth, ... is fitted; a source with one run is only judged.
Whether this split is a lucky one is seen from others: with --splits, a seed shuffles the runs of each
source before they are split so, and the constants are fitted and judged anew.

    python -m benchmarks.published                # the tables of docs/plan.md
    python -m benchmarks.published --fit          # the constants of jaxdp/plan, from the fitted half
    python -m benchmarks.published --splits 10    # seeds 0 to 9; kept, and written into RESULTS.md
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.published_runs import BF16, COMPILED, RUNS, SOURCES, Run
from benchmarks.record import ROOT, cell, fill, table
from jaxdp.plan.hardware import (
    HARDWARE,
    NETWORK,
    OVERLAP,
    Hardware,
    collective_seconds,
    compute_seconds,
    expected_seconds,
)
from jaxdp.plan.timeline import MEMORY, SLOWED

# Bytes for each parameter: float32 parameters and Adam's moments read and written, gradients read.
OPTIMIZER = 28


class Seconds(NamedTuple):
    """The parts of an update: products at the peak, memory traffic, communication at full
    bandwidth.

    amount: what a device computes in it, in the run's unit times seconds.
    """

    products: float
    traffic: float
    communication: float
    amount: float


def hardware_of(run: Run) -> Hardware:
    """Return the row of HARDWARE with what the run says of its own machine."""
    hw = HARDWARE[run.hardware]
    return hw._replace(
        inter_bandwidth=run.inter or hw.inter_bandwidth,
        devices_per_host=run.per_host or hw.devices_per_host,
        memory_bandwidth=run.memory_bandwidth or hw.memory_bandwidth,
    )


def flops_of(run: Run) -> float:
    """Return the FLOPs of an update on a device, without recomputation."""
    tokens = run.length * run.sequences * run.microbatches
    per_token = 6 * (run.params - run.outside) + 12 * run.layers * run.width * run.length
    return tokens * per_token


def amount_of(run: Run) -> float:
    """Return what a device computes in an update, in the run's unit times seconds."""
    tokens = run.length * run.sequences * run.microbatches
    amounts = {"efficiency": run.alone or 0.0, "tokens/s": tokens, "TFLOP/s": flops_of(run) / 1e12}
    return amounts[run.unit]


@functools.cache
def count(run: Run) -> Seconds:
    """Time the FLOPs, memory traffic and collectives of one update on the run's hardware, without
    fitted constants.
    """
    hw = hardware_of(run)._replace(efficiency=1.0)
    replica, replicas = run.params / run.model, run.devices // run.model // run.shard
    near = max(1, hw.devices_per_host // run.model)  # of a host, with the same part of the model

    def sent(kind: str, times: int, size: float, n: int, close: int) -> float:
        return times * collective_seconds(hw, kind, round(size), n, max(1, min(n, close)))

    communication = 0.0
    if run.shard > 1:
        times = run.microbatches
        communication += sent("all-gather", 2 * times, BF16 * replica, run.shard, near)
        communication += sent("reduce-scatter", times, run.reduce * replica, run.shard, near)
    if replicas > 1:
        size = run.reduce * replica / run.shard
        communication += sent("all-reduce", 1, size, replicas, near // run.shard)
    dtype = "float32" if run.alone else "bfloat16"
    traffic = compute_seconds(hw, 0.0, dtype, OPTIMIZER * replica / run.shard)
    if run.alone:
        return Seconds(run.alone, 0.0, communication, amount_of(run))
    products = compute_seconds(hw, flops_of(run) * run.recompute, dtype, 0.0)
    return Seconds(products, traffic, communication, amount_of(run))


# --- The schedule, played through -----------------------------------------------------


class Constants(NamedTuple):
    """The fitted constants of the played schedule.

    products: the share of a family's peak that large products reach; power and shapes limit it.
    slowed: seconds that computation takes longer for each second of communication beside it, since
    both use the device's cores and memory. traffic: bytes that the kernels between products move
    in the forward pass of a block, for each token and unit of its width, where no compiler fuses
    them. The first are in jaxdp/plan/devices.toml, the second is in jaxdp/plan/timeline.py; a compiled
    program shows its traffic itself."""

    products: dict[str, float]
    slowed: float
    traffic: float


# traffic: `python -m benchmarks.published --fit`
TODAY = Constants(
    {run.family: HARDWARE[run.hardware].products for run in RUNS if not run.alone}, SLOWED, 100
)

# The same where a compiler fuses them, counted: a norm reads and writes an array of the width in 2
# bytes, a residual sum with the next norm 4, the activation of a feed-forward four times as wide 8,
# the second sum 3. The backward pass moves twice as much: a gradient goes with each array.
FUSED = 2 * (2 + 4 + 8 + 3)
BACKWARD = 2


class Block(NamedTuple):
    """Seconds of a block of a run, and of one microbatch, at full rates.

    products, traffic: of the forward pass. exchange: of tensor parallelism in it. gather, scatter:
    of its parameters and gradients. reduce: its gradients between replicas. optimizer: of all."""

    products: float
    traffic: float
    exchange: float
    gather: float
    scatter: float
    reduce: float
    optimizer: float


@functools.cache
def block_of(run: Run, traffic: float) -> Block:
    """Count a block of a run as `count` does the run; its parameters are spread evenly over blocks."""
    hw = hardware_of(run)
    tokens, blocks = run.length * run.sequences, blocks_in(run)
    flops = flops_of(run) / run.microbatches
    replica, replicas = run.params / run.model, run.devices // run.model // run.shard
    near = max(1, hw.devices_per_host // run.model)

    def sent(kind: str, size: float, n: int, close: int) -> float:
        return collective_seconds(hw, kind, size, n, max(1, min(n, close))) if n > 1 else 0.0

    moved = tokens * run.width * (FUSED if run.compiled else traffic)
    fast = hw._replace(intra_bandwidth=run.tensor_bandwidth or hw.intra_bandwidth)
    exchanged = tokens * run.tensor * run.width * BF16
    exchange = collective_seconds(fast, "all-gather", exchanged, run.tensor, run.tensor)
    shard = replica / blocks
    return Block(
        products=flops / 3 / blocks / hw.flops["bfloat16"] if not run.alone else 0.0,
        traffic=moved / hw.memory_bandwidth,
        exchange=run.exchanges * exchange,
        gather=sent("all-gather", BF16 * shard, run.shard, near),
        scatter=sent("reduce-scatter", run.reduce * shard, run.shard, near),
        reduce=sent("all-reduce", run.reduce * shard / run.shard, replicas, near // run.shard),
        optimizer=OPTIMIZER * replica / run.shard / hw.memory_bandwidth,
    )


def blocks_in(run: Run) -> int:
    """Return the blocks of a run; a convolutional network counts as 20."""
    return run.layers or 20


@dataclasses.dataclass
class Streams:
    """Two streams of a device, as `timeline.Player` has them: computation, and collectives one after
    the other.

    now: seconds since the update began. free: when the last collective ends. sent: seconds of all
    collectives. waited: seconds without computation."""

    now: float = 0.0
    free: float = 0.0
    sent: float = 0.0
    waited: float = 0.0

    def repeat(self, before: "Streams", times: int) -> None:
        """Let as much time pass again, so many times, as since another state."""
        for name, value in dataclasses.asdict(self).items():
            setattr(self, name, value + times * (value - getattr(before, name)))

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def start(self, seconds: float) -> float:
        """Start a collective; return when it ends: at once if it takes no time."""
        if not seconds:
            return self.now
        self.free = max(self.now, self.free) + seconds
        self.sent += seconds
        return self.free

    def wait(self, end: float) -> None:
        self.waited += max(0.0, end - self.now)
        self.now = max(self.now, end)


def play(run: Run, constants: Constants = TODAY) -> float:
    """Return the seconds of an update. The parameters of a block are gathered while the one before
    is computed; its gradients are sent when they are known, or when a bucket of them is."""
    block, streams, blocks = block_of(run, constants.traffic), Streams(), blocks_in(run)
    products = block.products / constants.products.get(run.family, 1.0)
    traffic = block.traffic / MEMORY
    recomputed = 3 * (run.recompute - 1)  # share of a forward pass
    forward = products + traffic + block.exchange
    backward = BACKWARD * (products + traffic) + block.exchange
    backward += recomputed * (products + traffic) + (recomputed > 0) * block.exchange
    if run.alone:
        forward, backward = run.alone / blocks / 3, run.alone / blocks * 2 / 3
    usual = (1 - run.last / run.params) / blocks  # share of the parameters in a block
    bucket = run.bucket / (run.reduce * run.params / run.model / run.shard)

    def one_pass(is_last: bool) -> None:
        ready = streams.start(block.gather)
        waiting = run.last / run.params
        for i in range(2 * blocks):
            is_backward, ends = i >= blocks, i + 1 == 2 * blocks
            streams.wait(ready)
            if not ends and i + 1 != blocks:  # the last block's parameters stay
                ready = streams.start(block.gather)
            streams.compute(backward if is_backward else forward)
            if is_backward:
                streams.start(block.scatter)
                waiting += usual
                if is_last and (waiting >= bucket or ends):
                    streams.start(waiting * blocks * block.reduce)
                    waiting = 0.0

    others = run.microbatches - 1
    for _ in range(min(others, 2)):
        began = dataclasses.replace(streams)
        one_pass(False)
    if others > 2:  # the others take as long as the second
        streams.repeat(began, others - 2)
    one_pass(True)
    streams.wait(streams.free)
    hidden = streams.sent - streams.waited
    computed = run.microbatches * blocks * (forward + backward)
    seconds = streams.now + run.bubble * computed + constants.slowed * hidden
    return seconds if run.alone else seconds + block.optimizer / MEMORY


def played(run: Run, constants: Constants = TODAY) -> float:
    """Return the figure of the played schedule, in the run's unit."""
    return amount_of(run) / play(run, constants)


def off(run: Run, constants: Constants = TODAY) -> float:
    """Return the error of the played schedule: 0.1 is 10 % too high."""
    return played(run, constants) / run.published - 1


def fit_schedule(runs: Sequence[Run], coarse: int = 1) -> Constants:
    """Return the constants with the least squares of log(played/published) on a grid, or on every
    `coarse`th of its values.
    """
    families = sorted({run.family for run in runs if not run.alone})
    shares = [round(0.4 + 0.025 * i, 3) for i in range(0, 25, coarse)]
    best: tuple[float, Constants] = (math.inf, TODAY)
    for i, j in itertools.product(range(0, 13, coarse), range(0, 13, coarse)):
        constants = Constants({}, round(0.05 * i, 2), 40 + 20 * j)
        total = off_squared([r for r in runs if r.alone], constants)
        for family in families:
            group = [r for r in runs if r.family == family]
            loss, share = lowest(group, family, constants, shares)
            total += loss
            constants.products[family] = share
        best = min(best, (total, constants), key=lambda pair: pair[0])
    return best[1]


def off_squared(runs: Sequence[Run], constants: Constants) -> float:
    return sum(math.log(1 + off(r, constants)) ** 2 for r in runs)


def lowest(
    runs: Sequence[Run], family: str, constants: Constants, shares: list[float]
) -> tuple[float, float]:
    """Return (loss, share) of the best share of the peak, which all the others lead down to."""
    losses: dict[float, float] = {}

    def loss(share: float) -> float:
        if share not in losses:
            losses[share] = off_squared(runs, constants._replace(products={family: share}))
        return losses[share]

    first, last = 0, len(shares) - 1
    while first < last:
        middle = (first + last) // 2
        if loss(shares[middle]) <= loss(shares[middle + 1]):
            last = middle
        else:
            first = middle + 1
    return loss(shares[first]), shares[first]


# --- Constants in the place of a schedule ---------------------------------------------


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


def median_error(runs: Sequence[Run], error: Callable[[Run], float] = error) -> float:
    return statistics.median(abs(error(r)) for r in runs)


def halves(seed: int | None = None) -> tuple[list[Run], list[Run]]:
    """Return the fitted and the judged runs: of a source, every second one is judged, from the
    first.

    seed: the order of the runs; None: that of the table.
    """
    order = list(RUNS)
    if seed is not None:
        random.Random(seed).shuffle(order)
    judged = [
        run
        for i, run in enumerate(order)
        if sum(r.source == run.source for r in order[:i]) % 2 == 0
    ]
    return [r for r in order if r not in judged], judged


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


def pick(source: str, name: str, devices: int) -> Run:
    return next(r for r in RUNS if (r.source, r.name, r.devices) == (source, name, devices))


def report() -> str:
    """Return the figures of docs/plan.md: the summaries, the tables and the sources."""
    _, judged = halves()
    header = "| source | run | devices | unit | published | before | error | after | error | half |"
    rule = "Judged: the first, third, ... run of each source below; fitted: the second, fourth, ..."
    lines = [summary("Before", error), summary("After", off), rule]
    lines += ["", header, "|---" * 10 + "|"]
    for run in RUNS:
        figures = [
            figure(run, run.published),
            figure(run, predict(run)),
            f"{100 * error(run):+.0f} %",
            figure(run, played(run)),
            f"{100 * off(run):+.0f} %",
        ]
        half = "judged" if run in judged else "fitted"
        lines.append(
            f"| {' | '.join([run.source, run.name, f'{run.devices:,}', run.unit, *figures, half])} |"
        )
    lines += ["", "| scaling | devices | published | before | after |", "|---" * 5 + "|"]
    for source, name, few, many in SCALING:
        small, large = pick(source, name, few), pick(source, name, many)
        rates = [large.published / small.published, predict(large) / predict(small)]
        rates.append(played(large) / played(small))
        shown = " | ".join(f"{100 * rate:.1f} %" for rate in rates)
        lines.append(f"| {source}, {name} | {few:,} to {many:,} | {shown} |")
    lines += ["", "| with torch.compile | published | after |", "|---" * 3 + "|"]
    for run in COMPILED:
        lines.append(
            f"| {run.source} {run.name} | {figure(run, run.published)} | {figure(run, played(run))} |"
        )
    sources = [f"- {name}: {address}" for name, address in SOURCES.items()]
    return "\n".join([*lines, "", *sources])


def summary(name: str, error: Callable[[Run], float]) -> str:
    """Return the medians of the absolute error: of both halves and of the sources; and the two
    largest that are judged.
    """
    fitted, judged = halves()
    of_source = [median_error([r for r in judged if r.source == s], error) for s in SOURCES]
    worst, second = sorted(judged, key=lambda r: -abs(error(r)))[:2]
    return (
        f"{name}: median error {100 * median_error(judged, error):.1f} % of {len(judged)} judged runs, "
        f"{100 * median_error(fitted, error):.1f} % of {len(fitted)} fitted runs; "
        f"each source counted once {100 * statistics.median(of_source):.1f} %. "
        f"The largest judged: {worst.source} {worst.name}, {worst.devices:,} devices, {100 * error(worst):+.0f} %; "
        f"the next {second.source} {second.name}, {100 * error(second):+.0f} %."
    )


# --- Other splits -----------------------------------------------------------------------

RECORD = ROOT / "benchmarks" / "published.json"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
ASKED = {"median": 0.06, "largest": 0.25, "second": 0.25}


def split_errors(seed: int | None, coarse: int = 1) -> dict[str, Any]:
    """Fit all constants to one half, and return the errors of the other: the median and the two
    largest, before and after, with the name of the largest.
    """
    fitted, judged = halves(seed)
    efficiency, *links = fit(fitted, coarse)
    constants = fit_schedule(fitted, coarse)
    assert {run.family for run in judged if not run.alone} <= constants.products.keys()
    before = {run: abs(error(run, efficiency.get(run.family), *links)) for run in judged}
    after = {run: abs(off(run, constants)) for run in judged}
    figures = {"before": errors_of(before), "after": errors_of(after)}
    return {
        "split": "by rule" if seed is None else f"seed {seed}",
        "judged": len(judged),
        **figures,
    }


def errors_of(errors: dict[Run, float]) -> dict[str, Any]:
    """Return the median, the largest and the second largest error, and the run of the largest."""
    worst, second = sorted(errors, key=lambda run: -errors[run])[:2]
    return {
        "median": round(statistics.median(errors.values()), 4),
        "largest": round(errors[worst], 4),
        "run": f"{worst.source} {worst.name}, {worst.devices:,}",
        "second": round(errors[second], 4),
    }


def splits_table(splits: Sequence[dict[str, Any]]) -> str:
    """Return the errors of splits as a table, bold where they are above what is asked."""

    def row(name: str, judged: int, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        cells = [
            cell(own[key], f"{100 * own[key]:.1f} %", bound, larger_is_better=False)
            for own in (before, after)
            for key, bound in ASKED.items()
        ]
        return [name, str(judged), *cells, after["run"]]

    rows = [row(x["split"], x["judged"], x["before"], x["after"]) for x in splits]
    shuffled = [x for x in splits if x["split"] != "by rule"]
    if shuffled:
        medians = [
            {key: statistics.median(x[which][key] for x in shuffled) for key in ASKED} | {"run": ""}
            for which in ("before", "after")
        ]
        rows.append(row(f"median of {len(shuffled)} seeds", shuffled[0]["judged"], *medians))
    parts = [f"{key} {which}" for which in ("before", "after") for key in ASKED]
    return table(["split of the published runs", "judged", *parts, "the largest after"], rows)


def tables() -> dict[str, str]:
    """Return {name of the mark: what stands there}."""
    splits = json.loads(RECORD.read_text()) if RECORD.exists() else []
    return {"published": splits_table(splits)}


def left_out(coarse: int = 1) -> str:
    """Return each source's error with constants fitted to all runs of the other sources."""
    lines = ["| source left out of the fit | runs | before | after |", "|---" * 4 + "|"]
    for source in SOURCES:
        runs = [r for r in RUNS if r.source == source]
        others = [r for r in RUNS if r.source != source]
        efficiency, *links = fit(others, coarse)
        before = [abs(error(r, efficiency.get(r.family), *links)) for r in runs]
        constants = fit_schedule(others, coarse)
        after = [abs(off(r, constants)) for r in runs]
        medians = " | ".join(f"{100 * statistics.median(x):.1f} %" for x in (before, after))
        lines.append(f"| {source} | {len(runs)} | {medians} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--coarse", type=int, default=1, help="fit on every Nth value of the grid")
    parser.add_argument("--splits", type=int, help="fit and judge this many other splits as well")
    parser.add_argument(
        "--out", type=pathlib.Path, default=RECORD, help="where --splits keeps them"
    )
    options = parser.parse_args(argv)
    if options.splits is not None:
        splits = [split_errors(seed, options.coarse) for seed in (None, *range(options.splits))]
        options.out.write_text(json.dumps(splits, indent=1) + "\n")
        print(splits_table(splits))
        if options.out == RECORD:
            fill(PAGE, "published", tables())
    elif options.fit:
        fitted, _ = halves()
        print("EFFICIENCY = {}\nNETWORK = {}\nOVERLAP = {}".format(*fit(fitted, options.coarse)))
        constants = fit_schedule(fitted, options.coarse)
        print("PRODUCTS = {}\nSLOWED = {}\ntraffic = {}".format(*constants), end="\n\n")
        print(left_out(options.coarse))
    else:
        print(report())


if __name__ == "__main__":
    main(sys.argv[1:])
