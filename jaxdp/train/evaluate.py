"""Evaluation: every example of a set exactly once, for any number of devices."""

import collections
import math
from typing import Any

import jax
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.metrics.writer import Record
from jaxdp.parallel.strategy import Program
from jaxdp.process.context import SLOW
from jaxdp.run.source import Source
from jaxdp.train.metric_sums import divide, make_record
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState

OVERFLOW = (
    "its examples are finite, so the model, a transform or the loss computes such a number from some of them: training "
    "has diverged (lower optimizer.lr, set clip_norm), or precision.compute is too narrow"
)


def evaluate(run: Run, program: Program, state: TrainState) -> Record:
    """Return the loss and metrics over each evaluation set; NAME/loss, ... of a named set."""
    state = run.strategy.averaged(state) if run.data.averaged else run.strategy.evaluated(state)
    record: Record = {}
    for name, source in run.data.eval.items():
        try:
            record |= {
                f"{name}/{k}" if name else k: v
                for k, v in of_set(run, source, program, state).items()
            }
        except UsageError as error:
            if type(error) is not UsageError:
                raise
            # the message of a read names no set
            key = f"eval.also.{name}: " if name else "eval.data: "
            raise UsageError(str(error).replace("data: ", key, 1), rank=error.rank) from None
    return record


def not_finite(run: Run, record: Record) -> tuple[str, bool] | None:
    """Return, on every rank, why a loss of an evaluation is not finite, and whether its examples
    are the cause; None if all losses are finite. Reads the examples again."""
    names = [
        name
        for name in run.data.eval
        if not math.isfinite(record[f"{name}/loss" if name else "loss"])
    ]
    if not names:
        return None
    context, texts = run.checkpoints.context, []
    with run.hooks.watch.suspend_timeout("examines the evaluation data"):
        for name in names:
            cause = run.data.eval[name].find_not_finite()
            causes = context.exchange(
                "the evaluation data", cause, SLOW
            )  # a process may have read another file
            rank = next((rank for rank, text in enumerate(causes) if text), 0)
            cause = f"{context.title(rank)}: {causes[rank]}" if len({*causes}) > 1 else causes[rank]
            where = f"the evaluation set {name!r}" if name else "the evaluation data"
            loss = record[f"{name}/loss" if name else "loss"]
            texts.append((f"the loss of {where} is {loss}: {cause or OVERFLOW}", bool(cause)))
    return next((text for text in texts if text[1]), texts[0])


def of_set(run: Run, source: Source, program: Program, state: TrainState) -> Record:
    """Return the loss and metrics over an evaluation set, counting every example exactly once."""
    totals, suspects = collections.defaultdict[str, float](float), list[int]()
    in_flight: collections.deque[tuple[Any, Any]] = collections.deque()
    program = source.program() if source.program else program

    def add(number: int, sums: dict[str, jax.Array]) -> None:
        values = jax.device_get(sums)
        for name, value in values.items():
            totals[name] += float(value)
        if not math.isfinite(values["loss"]):
            suspects.append(number)

    with source.batches(0, source.order.steps_per_epoch, run.strategy) as batches:
        for (number,), batch in batches:
            with run.hooks.compiling():
                sums = run.hooks.watch.run_step(
                    f"evaluation, batch {number}", program.evaluate, state, batch
                )
            if sums.kept:
                state = state.replace(kept=sums.kept)
            in_flight.append((number, {"loss": sums.loss, "weight": sums.weight, **sums.metrics}))
            if len(in_flight) > 2:  # at most this many batches wait on the device
                add(*in_flight.popleft())
    for number, pending in in_flight:
        add(number, pending)
    for number in suspects[:1]:
        source.examine(number, f"batch {number} of the evaluation", run.checkpoints.context)
    weight = totals.pop("weight")
    return make_record(divide(totals, weight if weight > 0 else math.nan, np), run.log.derive)
