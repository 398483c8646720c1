"""The plan of one update on simulated devices: memory and traffic from the compiler, time from a
hardware model.

Programs are compiled for simulated CPU devices from shapes alone: no parameter is allocated.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxdp.parallel.layout import Share
from jaxdp.parallel.strategy import Strategy
from jaxdp.plan.hardware import Hardware, update_seconds
from jaxdp.plan.hlo import Collective
from jaxdp.plan.memory import analyzed, bytes_by_tree, peak
from jaxdp.run.flops import count_flops
from jaxdp.train.state import Batch
from jaxdp.train.step import Step


class Case(NamedTuple):
    """A strategy over simulated devices and its step; example: the shapes of a microbatch {name:
    [example, ...]}.
    """

    strategy: Strategy
    step: Step
    example: Batch
    accumulate_split: bool  # gradients are sharded while they accumulate


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
    its products.
    """

    zero: int
    devices: int
    per_device: int
    memory: Memory
    share: Share
    gathered_whole: bool  # stage 3, and the model does not scan blocks
    collectives: tuple[Collective, ...]
    flops: float


def make_plan(case: Case, zero: int) -> Plan:
    """Compile the case, and return the plan of its update."""
    strategy = case.strategy
    program = strategy.compile(case.step)
    state, batch = strategy.argument_shapes(case.example)
    used, sent = analyzed(program.lowered(state, batch), True)
    sizes = bytes_by_tree(strategy, case.step, batch, case.accumulate_split)
    return Plan(
        zero,
        len(strategy.devices),
        strategy.assignment.shape[1],
        Memory(
            **sizes,
            activations=max(0, used[0].temp_size_in_bytes - sizes["grads"]),
            peak=max(map(peak, used)),
        ),
        strategy.share(),
        zero == 3 and not strategy.blocks,
        tuple(sent),
        count_flops(jax.make_jaxpr(program.update)(state, batch)),
    )


def predict(plan: Plan, hardware: Hardware, dtype: str) -> dict[str, float]:
    """Return the seconds of one update on the hardware (`update_seconds`), and the scaling
    efficiency.

    efficiency: the time of the computation alone over that of an update without overlap;
    efficiency_overlap: over that of an update whose communication is hidden as far as possible;
    efficiency_expected: over that of the estimate."""
    memory = plan.memory
    traffic = (
        2 * (memory.params + memory.opt_state) + memory.grads
    )  # state: read and written; gradients: read
    host = hardware.devices_per_host
    calls = [(c, min(c.per_block(host), host, c.group_size)) for c in plan.collectives]
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
