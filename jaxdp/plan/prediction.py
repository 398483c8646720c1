"""The plan of one update on simulated devices: memory and traffic from the compiler, time from a
hardware model. Programs are compiled from shapes alone: no parameter is allocated.

And memory and traffic of a run, from shapes and from its compiled program; and time and traffic over
a slow network, of an all-reduce between sites every so many updates."""

import contextlib
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdp.errors import UsageError
from jaxdp.metrics.numbers import scaled, size
from jaxdp.parallel.layout import Share
from jaxdp.parallel.strategy import Program, Strategy
from jaxdp.plan.hardware import Hardware, compute_seconds, expected_seconds, seconds_sent
from jaxdp.plan.hlo import Collective, collectives, summarize
from jaxdp.plan.hlo.compiled_program import UNKNOWN_GROUPS, CompiledProgram
from jaxdp.plan.timeline import Schedule, play
from jaxdp.run import rundir
from jaxdp.run.build import Case
from jaxdp.run.model_summary import count_flops
from jaxdp.split import WHOLE, padded_shape
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step


def bytes_by_tree(strategy: Strategy, step: Step, batch: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of each tree on one device; batch: shapes of a full batch {name:
    [microbatch, example, ...]}."""
    dims, shapes, n = strategy.state_dims, strategy.shapes, strategy.parts
    devices = strategy.assignment.shape[0]

    def wide(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    grads = jax.tree.map(wide, step.trainable(shapes.params))  # as they are summed
    return {
        "params": local_bytes(shapes.params, dims.params, n),
        "grads": local_bytes(
            grads, step.trainable(strategy.param_dims) if strategy.every else None, n
        ),
        "opt_state": local_bytes(
            (shapes.opt_state, shapes.extra.get(EMA)), (dims.opt_state, dims.extra.get(EMA)), n
        ),
        "model_state": local_bytes((shapes.model_state, shapes.extra.get(EMA_STATE)), None, n)
        + local_bytes(shapes.kept, None, n) / devices,
        "batch": sum(math.prod(x.shape) * x.dtype.itemsize for x in batch.values()) / devices,
    }


def local_bytes(tree: Any, dims: Any, parts: int) -> int:
    """Return the bytes of one device's part of a tree of shapes, split along `dims` into `parts`;
    None: replicated.
    """
    dims = jax.tree.map(lambda _: WHOLE, tree) if dims is None else dims

    def size(x, d):
        return (
            math.prod(padded_shape(x.shape, d, parts))
            * x.dtype.itemsize
            // (1 if d == WHOLE else parts)
        )

    return sum(jax.tree.leaves(jax.tree.map(size, tree, dims)))


def of_compiled(lowered: Any, devices: int, updates: int = 1) -> dict[str, Any] | None:
    """Return the compiler's report on an update that has run: bytes per device beside the trees,
    collectives by kind.

    lowered: the update, lowered again in a millisecond, since JAX caches it and its executable.
    Returns None if the executable is not in the cache: this never compiles. updates: the number of
    updates in one call. A single device sends nothing, even if its program has collectives."""
    if not is_compiled(lowered):
        return None
    compiled = lowered.compile()
    used = compiled.memory_analysis()
    sent = collectives(compiled.as_text(), lowered.as_text()) if devices > 1 else []

    def per_update(n):
        return n / updates if n % updates else n // updates

    return {
        "temporaries": used.temp_size_in_bytes,
        "peak": peak(used),
        "collectives": {
            kind: {name: per_update(value) for name, value in total._asdict().items()}
            for kind, total in summarize(sent).items()
        },
    }


def record(
    directory: pathlib.Path,
    layout: Mapping[str, Any],
    strategy: Strategy,
    program: Program,
    state: TrainState,
    batch: Batch,
    updates: int,
) -> None:
    """Write layout.json again, with the compiler's report on the program, after the program's first
    call.

    updates: the number of updates in that call.
    """
    with contextlib.suppress(Exception):  # without the compiler's report, keep the old file
        lowered = program.lowered(state, batch, updates > 1)
        rundir.write_layout(
            directory,
            {**layout, "program": of_compiled(lowered, len(strategy.assignment), updates)},
        )


def peak(used: Any) -> int:
    """Return the peak bytes on a device while a program runs, from XLA's memory analysis."""
    added = max(0, used.output_size_in_bytes - used.alias_size_in_bytes)
    return used.argument_size_in_bytes + used.temp_size_in_bytes + added


def is_compiled(lowered: Any) -> bool:
    """Return True if `lowered.compile()` only looks up an executable; False if this version of JAX
    does not tell.
    """
    return getattr(getattr(lowered, "_lowering", None), "_executable", None) is not None


class Memory(NamedTuple):
    """Bytes per device. activations: the compiler's temporaries without the gradients; peak: the
    total.
    """

    params: float
    grads: float
    opt_state: float
    model_state: float
    batch: float
    activations: float
    peak: float


class Plan(NamedTuple):
    """The figures of an update in one ZeRO stage. per_device: microbatches of a device; flops: of
    its products. unknown_loops: those whose iterations only a run knows; each counts as one.
    unknown_groups: of collectives, in a syntax that is not known; each counts as one of all devices.
    schedule: of the program that the target's own compiler made; None: the program is that of
    simulated CPU devices.
    """

    zero: int
    devices: int
    per_device: int
    memory: Memory
    share: Share
    gathered_whole: bool  # stage 3, and the model does not scan blocks
    collectives: tuple[Collective, ...]
    flops: float
    unknown_loops: list[str]
    unknown_groups: list[str]
    schedule: Schedule | None = None

    @property
    def compiled_by(self) -> str:
        return "the compiler of the target" if self.schedule else "XLA for CPU, simulated devices"


def make_plan(case: Case, zero: int, hardware: Hardware | None = None) -> Plan:
    """Compile the case, and return the plan of its update.

    hardware: that of its devices, if they are a target's.
    """
    strategy = case.strategy
    program = strategy.compile(case.step)
    state, batch = strategy.argument_shapes(case.example)
    lowered = program.lowered(state, batch)
    compiled = lowered.compile()
    used, text = compiled.memory_analysis(), compiled.as_text()
    sizes = bytes_by_tree(strategy, case.step, batch)
    return Plan(
        zero,
        len(strategy.devices),
        strategy.assignment.shape[1],
        Memory(
            **sizes,
            activations=max(0, used.temp_size_in_bytes - sizes["grads"]),
            peak=peak(used),
        ),
        strategy.share(),
        zero == 3 and not strategy.blocks,
        tuple(collectives(text, lowered.as_text())),
        count_flops(jax.make_jaxpr(program.update)(state, batch)),
        CompiledProgram(text).unknown_loops(),
        UNKNOWN_GROUPS.findall(text),
        None if hardware is None else play(text, hardware),
    )


def predict(plan: Plan, hardware: Hardware, dtype: str) -> dict[str, float]:
    """Return the seconds of one update on the hardware: its parts, an upper and a lower bound, and an
    estimate; and the scaling efficiency.

        compute             that of the schedule, or by `compute_seconds`
        communication       the collectives, one after the other, with links at their full rate
        expected            the seconds of the schedule, or `expected_seconds`
        no_overlap          compute + communication: the upper bound
        full_overlap        max(compute, communication): the lower bound
        efficiency          compute / no_overlap
        efficiency_overlap  compute / full_overlap: the communication is hidden as far as possible

    Raises UsageError if the plan has no schedule, and the hardware no peak for `dtype`.
    """
    if (schedule := plan.schedule) is not None:
        sent, expected = schedule.communication, schedule.seconds
        compute = expected - schedule.exposed
    else:
        memory = plan.memory
        # State is read and written, gradients are read.
        traffic = 2 * (memory.params + memory.opt_state) + memory.grads
        compute = compute_seconds(hardware, plan.flops, dtype, traffic)
        sent = seconds_sent(hardware, plan.collectives)
        expected = expected_seconds(compute, sent)
    return {
        "compute": compute,
        "communication": sent,
        "expected": expected,
        "no_overlap": compute + sent,
        "full_overlap": max(compute, sent),
        "efficiency": compute / (compute + sent),
        "efficiency_overlap": compute / max(compute, sent),
    }


def recommend(plans: Sequence[Plan], memory: float) -> Plan | None:
    """Return the first plan, that of the lowest stage, that fits into `memory` bytes, or None."""
    return next((p for p in plans if p.memory.peak <= memory), None)


UNITS = {"KBIT": 1e3, "MBIT": 1e6, "GBIT": 1e9}


class Network(NamedTuple):
    """The network of a site: bits per second, in each direction, and the seconds that a message
    takes.
    """

    rate: float
    latency: float


def read_network(text: str) -> Network:
    """Parse a network such as 100mbit:40ms, or 1gbit."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)([KMG]BIT)(?::(\d+(?:\.\d*)?)MS)?", text.strip().upper())
    if not match or not float(match[1]):
        raise UsageError(f"--network: {text!r} is not a rate and a latency, such as 100mbit:40ms")
    return Network(float(match[1]) * UNITS[match[2]], float(match[3] or 0) / 1e3)


def describe(
    sites: int, data: float, every: int, compute: float | None, network: Network | None
) -> list[str]:
    """Return lines on the traffic of a site and the time that it takes, without overlap.

    The all-reduce is a ring: each site sends 2 (sites - 1) messages, in all 2 (sites - 1) / sites
    of the data.

    Args:
        data: bytes that are summed, once in `every` updates.
        compute: seconds of an update without communication; None if unknown.
    """
    if sites == 1:
        return ["one device computes all replicas: nothing is sent between sites"]
    sent = 2 * (sites - 1) / sites * data
    lines = [
        f"{sites} sites: each sends {size(sent)} once in {every} updates; the rows above count that in each update"
    ]
    if network is not None and compute is not None:
        exchange = 8 * sent / network.rate + 2 * (sites - 1) * network.latency
        update = compute + exchange / every
        lines += [
            f"over {scaled(network.rate)}bit/s with {1e3 * network.latency:g} ms: {exchange:.3g} s an exchange, "
            f"{1 / update:.3g} updates/s, {compute / update:.1%} of the time computing, "
            f"{size(3600 / update * sent / every)} an hour from each site"
        ]
    return lines
