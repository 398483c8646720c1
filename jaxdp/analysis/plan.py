"""The plan of one update on simulated devices: memory and traffic from the compiler, time from a hardware model.

Programs are compiled for simulated CPU devices from shapes alone: no parameter is allocated. For more devices than JAX
can simulate, two smaller programs, sharded like the large one, are extrapolated: every figure is a + b/devices.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxdp.analysis.flops import count_flops
from jaxdp.analysis.hardware import Hardware, update_seconds
from jaxdp.analysis.hlo import Collective
from jaxdp.analysis.memory import bytes_by_tree, peak, update_collectives
from jaxdp.core.state import Batch
from jaxdp.core.step import Step
from jaxdp.errors import UsageError
from jaxdp.parallel.layout import Share
from jaxdp.parallel.strategy import Strategy

SIMULATED = 2048  # devices that JAX can simulate
SCALED = 1024  # a larger plan is extrapolated from two of at most this many devices, if possible


class Case(NamedTuple):
    """A strategy over simulated devices and its step; example: the shapes of a microbatch {name: [example, ...]}."""

    strategy: Strategy
    step: Step
    example: Batch
    accumulate_split: bool  # gradients are sharded while they accumulate


class Memory(NamedTuple):
    """Bytes per device. activations: the compiler's temporaries without the gradients; peak: the total."""

    params: float
    grads: float
    opt_state: float
    model_state: float
    batch: float
    activations: float
    peak: float


class Plan(NamedTuple):
    """The figures of an update in one ZeRO stage. per_device: microbatches of a device; flops: of its products."""

    zero: int
    devices: int
    per_device: int
    memory: Memory
    share: Share
    gathered_whole: bool  # stage 3, and the model does not scan blocks
    collectives: tuple[Collective, ...]
    flops: float
    scaled_from: tuple[int, ...]  # the numbers of devices that were compiled, if extrapolated


def make_plan(case: Callable[[int], Case], zero: int, devices: int, group: int | None = None) -> Plan:
    """Return the plan for `devices`, from case(n) on n simulated devices, sharded as for `devices`.

    group: the number of devices in a sharding group, None for all. Raises UsageError if `devices` exceeds SIMULATED
    and is not a multiple of two numbers of devices that can be compiled.
    """
    if devices <= SIMULATED:
        return _measure(case(devices), zero, devices)
    groups = lambda n: devices % n == 0 and (group is None or (n % group == 0 and n > group))
    fits = [n for n in range(2, SIMULATED + 1) if groups(n)]
    few = [n for n in fits if n <= SCALED]
    fits = few if len(few) > 1 else fits
    if len(fits) < 2 and group is not None:
        raise UsageError(
            f"parallel.shard_size: {group} makes too few groups of the {SIMULATED} devices that can be simulated; plan "
            "with a smaller one"
        )
    if len(fits) < 2:
        raise UsageError(
            f"--devices: {devices} is more than the {SIMULATED} that can be simulated, and not a multiple of two "
            f"smaller numbers to scale from; use a rounder one, such as {2 ** math.ceil(math.log2(devices))}"
        )
    small, large = (_measure(case(n), zero, n) for n in fits[-2:])
    return scale(small, large, devices)


def scale(small: Plan, large: Plan, devices: int) -> Plan:
    """Extrapolate the plan of more devices from those of two smaller numbers: each figure is a + b/devices."""
    a, b = small.devices, large.devices

    def extrapolate(x: float, y: float) -> float:
        slope = (x - y) / (1 / a - 1 / b)
        return max(0.0, y + slope * (1 / devices - 1 / b))

    pairs = list(zip(small.collectives, large.collectives, strict=True))
    assert all((x.kind, x.count) == (y.kind, y.count) for x, y in pairs)
    grown = [
        y._replace(
            bytes=round(extrapolate(x.bytes, y.bytes)),
            group_size=y.group_size if x.group_size == y.group_size else y.group_size * devices // b,
        )
        for x, y in pairs
    ]
    memory = Memory(*(extrapolate(x, y) for x, y in zip(small.memory, large.memory)))
    return large._replace(devices=devices, memory=memory, collectives=tuple(grown), scaled_from=(a, b))


def _measure(case: Case, zero: int, devices: int) -> Plan:
    strategy = case.strategy
    program = strategy.compile(case.step)
    state, batch = strategy.argument_shapes(case.example)
    lowered = program.lowered(state, batch)
    compiled = {name: part.compile() for name, part in lowered.items()}
    used = [part.memory_analysis() for part in compiled.values()]
    per_device = strategy.assignment.shape[1]
    sizes = bytes_by_tree(strategy, case.step, batch, case.accumulate_split)
    return Plan(
        zero,
        devices,
        per_device,
        Memory(
            **sizes,
            activations=max(0, used[0].temp_size_in_bytes - sizes["grads"]),
            peak=max(peak(u) for u in used),
        ),
        strategy.share(),
        zero == 3 and not strategy.blocks,
        tuple(update_collectives({k: (compiled[k].as_text(), lowered[k].as_text()) for k in lowered}, per_device)),
        count_flops(jax.make_jaxpr(program.update)(state, batch)),
        (),
    )


def predict(plan: Plan, hardware: Hardware, dtype: str) -> dict[str, float]:
    """Return the seconds of one update on the hardware (`update_seconds`), and the scaling efficiency.

    efficiency: the time of the computation alone over that of an update without overlap; efficiency_overlap: over that
    of an update whose communication is hidden as far as possible; efficiency_expected: over that of the estimate.
    """
    memory = plan.memory
    traffic = 2 * (memory.params + memory.opt_state) + memory.grads  # state: read and written; gradients: read
    calls = [(c, c.per_block(hardware.devices_per_host)) for c in plan.collectives]
    calls = [(c, min(g, hardware.devices_per_host, c.group_size)) for c, g in calls]
    seconds = update_seconds(hardware, plan.flops, dtype, calls, traffic)
    compute = seconds["compute"]
    return {
        **seconds,
        "efficiency": compute / seconds["no_overlap"],
        "efficiency_overlap": compute / seconds["full_overlap"],
        "efficiency_expected": compute / seconds["expected"],
    }


def recommend(plans: Sequence[Plan], memory: float) -> Plan | None:
    """Return the lowest stage that fits into `memory` bytes, or None."""
    return next((p for p in sorted(plans, key=lambda p: p.zero) if p.memory.peak <= memory), None)
