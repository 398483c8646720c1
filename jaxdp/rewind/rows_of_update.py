"""The rows of an update, with the loss of each and its share of the gradient.

Nothing is logged for this: the order of the examples is a function of the seed and the update, so the
update is made again from the nearest checkpoint before it.
"""

import itertools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.checkpoint import manifest
from jaxdp.checkpoint.store import choose_step
from jaxdp.cli import Call
from jaxdp.cli.export import run_directory
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError, user_code
from jaxdp.metrics.jsonl import read
from jaxdp.metrics.numbers import table
from jaxdp.process.context import current
from jaxdp.run import rundir
from jaxdp.run.build import make_run, restore
from jaxdp.run.components import NOTHING, Objects, make_parts, make_the_step
from jaxdp.run.fitted import config_here, settings
from jaxdp.targets import attribute
from jaxdp.train.step import Replica

SHOWN = 10  # rows in the table


class Row(NamedTuple):
    """An example of an update, by its index in the data. share: of the update's gradient G, that of
    the row's gradient g: g·G/|G|². The shares of all rows add up to 1."""

    example: int
    microbatch: int
    loss: float
    share: float


class Rewound(NamedTuple):
    """loss: of the update, computed again. logged: in metrics.jsonl; None: it was not logged. began:
    the checkpoint's update. rows: the largest share first."""

    update: int
    loss: float
    logged: float | None
    began: int
    rows: list[Row]


def run(call: Call) -> None:
    """Print the rows with the largest shares."""
    options = call.options
    found = rewind(run_directory(options["run_dir"]), options["step"])
    said = "was not logged" if found.logged is None else f"was logged as {found.logged!r}"
    print(
        f"update {found.update}: {len(found.rows)} rows, again from update {found.began}; its loss is "
        f"{found.loss!r}, and {said}"
    )
    shown = [
        [str(row.example), str(row.microbatch), f"{row.loss:.6g}", f"{row.share:+.4f}"]
        for row in found.rows[:SHOWN]
    ]
    print(
        "\n".join(table([["example", "microbatch", "loss", "share of the gradient"], *shown], ">"))
    )


def rewind(directory: pathlib.Path, update: int, objects: Objects = NOTHING) -> Rewound:
    """Make an update of a run again, and each of its rows alone.

    objects: those of the script, if it was trained by one. Raises UsageError for an update that the
    run has not made, and for a loss that couples the examples of a batch.
    """
    checkpoint = directory / "checkpoints" / str(choose_step(directory, "last", "run_dir"))
    last = int(checkpoint.name)
    if not 1 <= update <= last:
        raise UsageError(f"--step: {update} is none of the updates 1 to {last} of this run")
    meta = manifest.read(checkpoint)["meta"]
    config = config_here(meta["config"], str(checkpoint))
    with settings(config), rundir.inside(meta.get("folder")), user_code():
        made = make_run(config, directory, current(), objects)
        parts = make_parts(config, objects)
        if attribute(parts.forward.loss, "scope", "example") == "global":
            raise UsageError(
                "--step: the loss couples the examples of a batch; they have none alone"
            )
        strategy, saved = made.strategy, made.checkpoints
        began = max((step for step in saved.steps() if step < update), default=0)
        offset = saved.meta(began).get("offset", 0) if began else 0
        state = restore(made, began) if began else strategy.init()
        program, number = strategy.compile(made.step), update - 1 + offset
        before: Any = None
        metrics: Any = {}
        with made.data.train.batches(began + offset, number + 1, strategy) as batches:
            for numbers, batch in batches:
                if number in numbers:
                    before = jax.tree.map(np.asarray, strategy.export(state))
                state, metrics = program.update(state, batch)

        # One microbatch after the other, with the mask of all rows but one set to 0.
        step = make_the_step(config, parts)
        microbatches = np.arange(parts.order.microbatches)
        indices, real = parts.order.rows(number, microbatches)
        rows = read_batch(parts.dataset, parts.order, number, microbatches)
        seed = jnp.uint32(parts.forward.seed)

        @jax.jit
        def sums(state, batch, number):
            total = step.grads(state, batch, Replica(number[None]))
            return total.loss, total.weight, ravel_pytree(total.grads)[0]

        def alone(microbatch, keep):
            piece = {name: x[microbatch : microbatch + 1] for name, x in rows.items()}
            mask = piece["mask"]
            piece["mask"] = mask * keep.reshape(1, -1, *[1] * (mask.ndim - 2)).astype(mask.dtype)
            kept = jax.tree.map(lambda x: x[microbatch : microbatch + 1], before.kept)
            return sums(before.replace(kept=kept, seed=seed), piece, jnp.int32(microbatch))

        whole = [alone(m, real[m]) for m in microbatches]
        gradient = sum(grads for _, _, grads in whole)
        square = float(jnp.vdot(gradient, gradient)) or 1.0
        found = []
        for m, e in itertools.product(microbatches, range(real.shape[1])):
            if real[m, e]:
                loss, weight, grads = alone(m, np.arange(real.shape[1]) == e)
                share = float(jnp.vdot(grads, gradient)) / square
                mean = float(loss) / (float(weight) or 1.0)
                found.append(Row(int(indices[m, e]), int(m), mean, share))
    found.sort(key=lambda row: -abs(row.share) if np.isfinite(row.share) else -np.inf)
    logged = [
        record["loss"]
        for record in read(directory / "metrics.jsonl", update)
        if record.get("split") == "train" and record["step"] == update
    ]
    return Rewound(update, float(metrics["loss"]), (logged or [None])[-1], began, found)
