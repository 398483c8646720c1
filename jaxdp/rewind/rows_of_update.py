"""The rows of an update, with the loss of each and its share of the gradient.

Nothing is logged for this: the order of the examples is a function of the seed and the update, so the
update is made again from the nearest checkpoint before it.
"""

import collections
import functools
import pathlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.cli import Call
from jaxdp.cli.export import run_directory
from jaxdp.cli.parse import read_config, saved_config
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError, user_code
from jaxdp.metrics.jsonl import read
from jaxdp.metrics.numbers import table
from jaxdp.process.context import current
from jaxdp.rewind.row_contents import describe
from jaxdp.run import rundir
from jaxdp.run.build import make_run, prepare_on_all_ranks, restore
from jaxdp.run.components import NOTHING, Objects, Parts, make_the_step
from jaxdp.run.fitted import config_here, settings
from jaxdp.targets import attribute
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Replica, Step

SHOWN = 10  # rows in the table of an update
NEAR = 50  # updates before and after one in which a loss may stand out
DEVIATIONS = 6  # a loss stands out above the median by so many medians of the deviations from it
EARLIER = 3  # updates that are shown before one, if no loss stands out


class Row(NamedTuple):
    """An example of an update, by its index in the data. share: of the update's gradient G, that of
    the row's gradient g: g·G/|G|². The shares of all rows add up to 1."""

    example: int
    microbatch: int
    loss: float
    share: float


class Rewound(NamedTuple):
    """loss: of the update, computed again. logged: in metrics.jsonl; None: it was not logged. began:
    the checkpoint's update. rows: the largest share first. parts: of the run. batch: the number of the
    update's batch in the order of the data."""

    update: int
    loss: float
    logged: float | None
    began: int
    rows: list[Row]
    parts: Parts
    batch: int


def run(call: Call) -> None:
    """Print the rows with the largest shares."""
    directory = run_directory(call.options["run_dir"])
    step, around = call.options["step"], call.options["around"]
    if (step is None) == (around is None):
        raise UsageError("--step, --around: give one of them, with the number of an update")
    updates = [step] if around is None else standing_out(directory, around)
    for found in rewind_all(directory, updates):
        said = "was not logged" if found.logged is None else f"was logged as {found.logged!r}"
        print(
            f"update {found.update}: {len(found.rows)} rows, counted from 0, again from update {found.began}; its loss "
            f"is {found.loss!r}, and {said}"
        )
        # How often each row was read before, and what it is.
        times = collections.Counter[int]()
        for number in range(found.batch):
            times.update(found.parts.order.batch(number).tolist())
        lines = [["example", "microbatch", "loss", "share of the gradient", "read before"]]
        texts = ["what it is"]
        for row in found.rows[:SHOWN]:
            lines.append(
                [
                    f"{row.example}",
                    f"{row.microbatch}",
                    f"{row.loss:.6g}",
                    f"{row.share:+.4f}",
                    f"{times[row.example]} times",
                ]
            )
            texts.append(describe(found.parts.dataset, row.example))
        for line, text in zip(table(lines, ">"), texts):
            print(f"{line}  {text}")


def losses_of(directory: pathlib.Path) -> dict[int, float]:
    """Return {update: its loss} of all that were logged."""
    return {
        record["step"]: float(record["loss"])
        for record in read(directory / "metrics.jsonl")
        if record.get("split") == "train"
    }


def standing_out(directory: pathlib.Path, around: int) -> list[int]:
    """Return the logged updates near one whose loss stands out; without any, that and a few before.
    Print how many were compared."""
    near = {k: x for k, x in losses_of(directory).items() if abs(k - around) <= NEAR}
    values = np.array([*near.values()] or [0.0])
    middle = np.nanmedian(values)
    limit = middle + DEVIATIONS * np.nanmedian(abs(values - middle))
    found = [update for update, loss in near.items() if not loss <= limit]
    print(
        f"{len(near)} of the losses of updates {max(1, around - NEAR)} to {around + NEAR} were logged "
        f"(log.every), and {len(found)} of those stand out"
    )
    return found or [*range(max(1, around - EARLIER), around + 1)]


def rewind_all(
    directory: Any, updates: Collection[int], objects: Objects = NOTHING
) -> Iterator[Rewound]:
    """Make some updates of a run again, in their order, and each of their rows alone. An update
    after the last checkpoint is made from there, even if the run has not come so far.

    objects: those of the script, if it was trained by one. Raises UsageError for an update that the
    run does not have, or that no checkpoint leads to, and for a loss that couples the examples of a
    batch.
    """
    directory = pathlib.Path(directory).absolute()  # the working directory changes
    file = saved_config(f"{directory}")
    config = config_here(read_config(file), file)
    with settings(config), rundir.inside(rundir.folder(directory)), user_code():
        prepared = prepare_on_all_ranks(config, current(), objects)
        parts = prepared.parts
        if attribute(parts.forward.loss, "scope", "example") == "global":
            raise UsageError(
                "--step, --around: the loss couples the examples of a batch; they have none alone"
            )
        made = make_run(config, directory, current(), objects, prepared)
        strategy, logged = made.strategy, losses_of(directory)
        for update in updates:
            if not 1 <= update <= made.options.steps:
                raise UsageError(
                    f"--step, --around: {update} is none of the updates 1 to {made.options.steps} of this run"
                )
        metas = {0: {}, **made.checkpoints.metas()}
        began = max(step for step in metas if step < min(updates))
        offset = metas[began].get("offset", 0)
        if not began and config.init_from:
            raise UsageError(
                f"--step, --around: {min(updates)} is before the first checkpoint of a run with init_from; choose a "
                "later one"
            )
        after = min((step for step in metas if step >= max(updates)), default=began)
        if metas[after].get("offset", 0) != offset:
            raise UsageError(
                f"--step, --around: it was rolled back, and left data out, between updates {began} and {after}; choose "
                "another"
            )
        state = restore(made, began) if began else strategy.init()
        program = strategy.compile(made.step)
        sums = jax.jit(functools.partial(sums_of, make_the_step(config, parts)))
        with made.data.train.batches(began + offset, max(updates) + offset, strategy) as batches:
            for update, ([number], batch) in enumerate(batches, began + 1):
                before = jax.device_get(strategy.export(state)) if update in updates else None
                state, metrics = program.update(state, batch)
                if before:
                    rows, loss = rows_of(parts, sums, number, before), float(metrics["loss"])
                    yield Rewound(update, loss, logged.get(update), began, rows, parts, number)


def sums_of(step: Step, state: TrainState, batch: Batch, number: jax.Array, keep: jax.Array) -> Any:
    """Return (loss, weight, gradient [element]), sums over some rows of a microbatch.

    batch: {name: [1, example, ...]}. keep: [example], 0 masks a row.
    """
    mask = batch["mask"]
    mask = mask * keep.reshape(1, -1, *[1] * (mask.ndim - 2)).astype(mask.dtype)
    total = step.grads(state, {**batch, "mask": mask}, Replica(number[None]))
    return total.loss, total.weight, ravel_pytree(total.grads)[0]


def rows_of(parts: Parts, sums_of_rows: Any, number: int, before: TrainState) -> list[Row]:
    """Return the rows of batch `number`, each alone in its microbatch, the largest share first.

    sums_of_rows: `sums_of` the step on one device, compiled. before: the state before the update.
    """
    microbatches = np.arange(parts.order.microbatches)
    indices, real = parts.order.rows(number, microbatches)
    rows = read_batches(parts.dataset, parts.order, [number], microbatches)

    def sums(m, keep):
        kept, batch = jax.tree.map(lambda x: x[m : m + 1], (before.kept, rows))
        return sums_of_rows(
            before.replace(kept=kept, seed=jnp.uint32(parts.forward.seed)),
            batch,
            jnp.int32(m),
            keep,
        )

    # Without what is not finite: a row whose own share is NaN then is one that has brought it in.
    gradient = jnp.nan_to_num(sum(sums(m, real[m])[2] for m in microbatches))
    square = float(gradient @ gradient) or 1.0
    found = []
    for m, e in np.argwhere(real).tolist():
        loss, weight, own = sums(m, np.arange(real.shape[1]) == e)
        loss = float(loss) / (float(weight) or 1.0)
        found.append(Row(int(indices[m, e]), m, loss, float(jnp.vdot(own, gradient)) / square))
    return sorted(found, key=lambda row: np.nan_to_num(-abs(row.share), nan=-np.inf))
