"""Evaluation: every example of a set exactly once, for any number of devices."""

import collections
import math
from typing import Any

import jax
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.parallel.strategy import Program
from jaxdp.train.run import Host, Record, Run, Source
from jaxdp.train.state import TrainState, divide, make_record

IN_FLIGHT = 2  # batches that may wait on the device
PLAIN = Host()


def evaluate(run: Run, program: Program, state: TrainState, host: Host = PLAIN) -> Record:
    """Return the loss and metrics over each evaluation set; NAME/loss, ... of a named set.

    Args:
        program: that of `run.step`. A set with a transform of its own has a program of its own.
        state: as the strategy stores it; it is not changed.
        host: calls the programs.
    """
    state = run.strategy.averaged(state) if run.data.averaged else run.strategy.evaluated(state)
    record: Record = {}
    for name, source in run.data.eval.items():
        try:
            means = evaluate_source(run, source, program, state, host)
        except UsageError as error:
            if type(error) is not UsageError:
                raise
            # the message of a read names no set
            key = f"eval.also.{name}: " if name else "eval.data: "
            raise UsageError(str(error).replace("data: ", key, 1), rank=error.rank) from None
        record |= {f"{name}/{key}" if name else key: value for key, value in means.items()}
    return record


def evaluate_source(
    run: Run, source: Source, program: Program, state: TrainState, host: Host
) -> Record:
    """Return the loss and metrics over one set, counting every example exactly once."""
    totals: dict[str, Any] = collections.defaultdict(float)
    suspects: list[int] = []
    in_flight: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
    program = source.program() if source.program else program

    def collect(most: int) -> None:
        while len(in_flight) > most:
            number, sums = in_flight.popleft()
            values = jax.device_get(sums)
            for name, value in values.items():
                totals[name] += np.float64(value)
            if not math.isfinite(values["loss"]):
                suspects.append(number)

    with source.batches(0, source.order.steps_per_epoch, run.strategy) as batches:
        for (number,), batch in batches:
            sums = host.call(f"evaluation, batch {number}", program.evaluate, state, batch)
            if sums.kept:  # sequences that continue in the next batch
                state = state.replace(kept=sums.kept)
            in_flight.append((number, {"loss": sums.loss, "weight": sums.weight, **sums.metrics}))
            collect(IN_FLIGHT)
    collect(0)
    for number in suspects[:1]:
        source.examine(number, f"batch {number} of the evaluation")
    weight = totals.pop("weight")
    return make_record(divide(totals, weight if weight > 0 else math.nan, np), run.derive)
