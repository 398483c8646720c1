"""The rows of an update, with the loss of each and its share of the gradient.

Nothing is logged for this: the order of the examples is a function of the seed and the update, so the
update is made again from the nearest checkpoint before it.
"""

import collections
import contextlib
import functools
import pathlib
from collections.abc import Callable, Collection, Iterator
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
from jaxdp.rewind.row_contents import describe
from jaxdp.run import rundir
from jaxdp.run.build import make_run, prepare_on_all_ranks, restore
from jaxdp.run.components import NOTHING, Objects, Parts, make_the_step
from jaxdp.run.fitted import config_here, settings
from jaxdp.targets import attribute
from jaxdp.train.run import Run
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
    the checkpoint's update. rows: the largest share first."""

    update: int
    loss: float
    logged: float | None
    began: int
    rows: list[Row]


class Rerun(NamedTuple):
    """A run that is made again from the checkpoint of update `began`, with the data after `offset`
    more batches. sums: `sums_of` its step on one device, compiled."""

    run: Run
    parts: Parts
    sums: Callable[..., Any]
    began: int
    offset: int


def run(call: Call) -> None:
    """Print the rows with the largest shares."""
    options = call.options
    directory, around = run_directory(options["run_dir"]), options["around"]
    updates = [options["step"]] if around is None else standing_out(directory, around)
    with opened(directory, updates) as rerun:
        for found in updates_again(rerun, updates):
            said = "was not logged" if found.logged is None else f"was logged as {found.logged!r}"
            print(
                f"update {found.update}: {len(found.rows)} rows, again from update {rerun.began}; its loss is "
                f"{found.loss!r}, and {said}"
            )
            print("\n".join(lines_of(rerun, found)))


def lines_of(rerun: Rerun, found: Rewound) -> list[str]:
    """Return a table of the first rows, and what they are; images are written to the run directory."""
    order, folder = rerun.parts.order, rerun.run.log.directory / "rewind"
    times = collections.Counter[int]()
    for number in range(found.update - 1 + rerun.offset):
        times.update(order.batch(number).tolist())
    lines = [["example", "microbatch", "loss", "share of the gradient", "read before"]]
    texts = [""]
    for row in found.rows[:SHOWN]:
        numbers = (f"{row.loss:.6g}", f"{row.share:+.4f}", f"{times[row.example]} times")
        lines.append([str(row.example), str(row.microbatch), *numbers])
        texts.append(describe(rerun.parts.dataset, row.example, folder))
    return [f"{line}  {text}".rstrip() for line, text in zip(table(lines, ">"), texts)]


def rewind(directory: pathlib.Path, update: int, objects: Objects = NOTHING) -> Rewound:
    """Make an update of a run again, and each of its rows alone; see `rewind_all`."""
    return rewind_all(directory, [update], objects)[0]


def rewind_all(
    directory: pathlib.Path, updates: Collection[int], objects: Objects = NOTHING
) -> list[Rewound]:
    """Make some updates of a run again, in their order, and each of their rows alone.

    objects: those of the script, if it was trained by one. Raises UsageError for an update that the
    run has not made, and for a loss that couples the examples of a batch.
    """
    with opened(directory, updates, objects) as rerun:
        return [*updates_again(rerun, updates)]


def losses_of(directory: pathlib.Path) -> dict[int, float]:
    """Return {update: its loss} of all that were logged."""
    records = read(directory / "metrics.jsonl")
    return {r["step"]: float(r["loss"]) for r in records if r.get("split") == "train"}


def standing_out(directory: pathlib.Path, around: int) -> list[int]:
    """Return the logged updates near one whose loss stands out; without any, that and a few before."""
    near = {k: x for k, x in losses_of(directory).items() if abs(k - around) <= NEAR}
    values = np.array([*near.values()] or [0.0])
    middle = np.nanmedian(values)
    limit = middle + DEVIATIONS * np.nanmedian(np.abs(values - middle))
    found = [update for update, loss in near.items() if not loss <= limit]
    return found or [*range(max(1, around - EARLIER), around + 1)]


@contextlib.contextmanager
def opened(
    directory: pathlib.Path, updates: Collection[int], objects: Objects = NOTHING
) -> Iterator[Rerun]:
    """Build a run once, to make these updates again inside this context; see `rewind_all`."""
    checkpoint = directory / "checkpoints" / str(choose_step(directory, "last", "run_dir"))
    last = int(checkpoint.name)
    for update in updates:
        if not 1 <= update <= last:
            raise UsageError(f"--step: {update} is none of the updates 1 to {last} of this run")
    meta = manifest.read(checkpoint)["meta"]
    config = config_here(meta["config"], str(checkpoint))
    with settings(config), rundir.inside(meta.get("folder")), user_code():
        prepared = prepare_on_all_ranks(config, current(), objects)
        parts = prepared.parts
        if attribute(parts.forward.loss, "scope", "example") == "global":
            raise UsageError(
                "--step: the loss couples the examples of a batch; they have none alone"
            )
        made = make_run(config, directory, current(), objects, prepared)
        saved = made.checkpoints
        began = max((step for step in saved.steps() if step < min(updates)), default=0)
        offset = saved.meta(began).get("offset", 0) if began else 0
        sums = jax.jit(functools.partial(sums_of, make_the_step(config, parts)))
        yield Rerun(made, parts, sums, began, offset)


def updates_again(rerun: Rerun, updates: Collection[int]) -> Iterator[Rewound]:
    """Yield each of the updates, in their order."""
    run, began, offset = rerun.run, rerun.began, rerun.offset
    strategy, logged = run.strategy, losses_of(run.log.directory)
    state = restore(run, began) if began else strategy.init()
    program = strategy.compile(run.step)
    with run.data.train.batches(began + offset, max(updates) + offset, strategy) as batches:
        for update, (_, batch) in enumerate(batches, began + 1):
            # The update overwrites its state.
            before = jax.tree.map(np.asarray, strategy.export(state)) if update in updates else None
            state, metrics = program.update(state, batch)
            if before is not None:
                rows = rows_of(rerun, update - 1 + offset, before)
                yield Rewound(update, float(metrics["loss"]), logged.get(update), began, rows)


def sums_of(step: Step, state: TrainState, batch: Batch, number: jax.Array, keep: jax.Array) -> Any:
    """Return (loss, weight, gradient [element]), sums over some rows of a microbatch.

    batch: {name: [1, example, ...]}. keep: [example], 0 masks a row.
    """
    mask = batch["mask"]
    mask = mask * keep.reshape(1, -1, *[1] * (mask.ndim - 2)).astype(mask.dtype)
    total = step.grads(state, {**batch, "mask": mask}, Replica(number[None]))
    return total.loss, total.weight, ravel_pytree(total.grads)[0]


def rows_of(rerun: Rerun, number: int, before: TrainState) -> list[Row]:
    """Return the rows of batch `number`, each alone in its microbatch, the largest share first."""
    parts = rerun.parts
    microbatches = np.arange(parts.order.microbatches)
    indices, real = parts.order.rows(number, microbatches)
    rows = read_batch(parts.dataset, parts.order, number, microbatches)
    seed = jnp.uint32(parts.forward.seed)

    def sums(m: Any, keep: np.ndarray) -> Any:
        kept, batch = jax.tree.map(lambda x: x[m : m + 1], (before.kept, rows))
        return rerun.sums(before.replace(kept=kept, seed=seed), batch, jnp.int32(m), keep)

    gradient = sum(sums(m, real[m])[2] for m in microbatches)
    square = float(jnp.vdot(gradient, gradient)) or 1.0
    found = []
    for m, e in np.argwhere(real).tolist():
        loss, weight, own = sums(m, np.arange(real.shape[1]) == e)
        share = float(jnp.vdot(own, gradient)) / square
        found.append(Row(int(indices[m, e]), m, float(loss) / (float(weight) or 1.0), share))
    return sorted(found, key=lambda row: -abs(row.share) if np.isfinite(row.share) else -np.inf)
