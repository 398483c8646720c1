"""The verb `confusion`: how often a trained classifier takes each class for each."""

import json
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdp.cli.export import run_directory
from jaxdp.data.dataset import class_names
from jaxdp.errors import UsageError
from jaxdp.measures.measured import OfClasses, Sums
from jaxdp.metrics.numbers import table
from jaxdp.run import rundir
from jaxdp.run.fitted import Fitted, load

NAME = "sums:confusion"
MOST, PRINTED = 1000, 20  # classes at most of a table, and of one on the console


def run(call: Any) -> None:
    """Print the table, and write it to confusion.json in the run directory, for the report."""
    directory = run_directory(call.options["run_dir"]).absolute()
    fitted = load(directory, call.options["step"] or "last")
    with rundir.inside(rundir.folder(directory)):
        counts = confusion(fitted)
    names = class_names(fitted.data)
    names += map(str, range(len(names), len(counts)))
    rundir.write(
        directory / "confusion.json",
        json.dumps({"step": fitted.final["step"], "names": names, "counts": counts.tolist()}),
    )
    rows = [["", *names], *np.column_stack([names, counts]).tolist()]
    lines = table(rows, ">") if len(names) <= PRINTED else []
    print(*lines, f"{counts.trace():,} of {counts.sum():,} right", sep="\n")


def confusion(fitted: Fitted) -> np.ndarray:
    """Return how many examples of each class are predicted as each: int [class, prediction].

    They are counted in the evaluation data of the run, without `eval.also`, as an evaluation counts them:
    each example once, or each token, on all devices; those that the mask excludes do not count. Several
    processes: every one calls it. Raises UsageError for a model whose outputs are no logits of classes,
    are not finite, or are for more than 1,000.
    """
    # An evaluation of the run, but for its loss.
    counts, config = Counts(), fitted.config
    replace(
        fitted,
        config=replace(
            config,
            loss=replace(config.loss, target=NAME, args={}),
            eval=replace(config.eval, also={}),
            checkpoint=replace(config.checkpoint, best=None),
            callbacks=[],
        ),
        objects={**fitted.objects, "loss": {NAME: counts}},
    ).evaluate()
    if not np.isfinite(counts.last).all():
        raise UsageError("run_dir: outputs are not finite, so they name no class")
    return counts.last.astype(int)


class Counts(OfClasses):
    """A loss whose metrics are the sums of a confusion matrix. last: of the last evaluation, float
    [class, prediction]."""

    number = None

    def __call__(self, outputs: Any, batch: Any) -> Any:
        weight = jnp.sum(batch["mask"])
        return weight, weight, super().__call__(outputs, batch)

    def sums(self, logits: Any, labels: Any, mask: Any) -> Sums:
        classes = logits.shape[-1]
        if classes > MOST:
            raise UsageError(f"run_dir: {classes:,} classes; a table has at most {MOST:,}")
        counts = jnp.zeros([classes, classes], mask.dtype)
        return {NAME: counts.at[labels, jnp.argmax(logits, -1)].add(mask)}

    def derive(self, means: Any) -> Sums:
        self.last = means[NAME]
        return {}
