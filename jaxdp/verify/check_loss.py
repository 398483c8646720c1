"""Check the loss alone: sums over parts of a batch add up to the full batch's, and masked examples do not count."""

from typing import Any

import jax
import numpy as np

from jaxdp.errors import one_line
from jaxdp.metrics.sums import flat
from jaxdp.verify.checks import FAILED, NOTE, OK, SKIPPED, Check
from jaxdp.verify.oracle import Oracle, Start, key_of
from jaxdp.verify.problem import Problem, Trial

SPLITS = 3  # random ones
ROWS = 8  # examples that are split


def check_loss(problem: Problem, oracle: Oracle, trial: Trial, start: Start, tolerance: float) -> Check:
    """Check the sums of the loss over the model's outputs for a few examples."""
    if problem.couples:
        return Check("loss", NOTE, "it couples examples (scope: global): it is compared over full batches only")
    outputs, batch = some_rows(problem, oracle, trial, start)
    failed = lambda text: Check("loss", FAILED, f"the loss {text}")
    size = len(batch["mask"])
    rng, order = np.random.default_rng(problem.seed), np.arange(size)
    metrics = sorted(flat(oracle.loss(outputs, batch)[2]))
    names = ["loss", "weight", *(f"metric {name!r}" for name in metrics)]

    def sums(index: np.ndarray, mask: Any = batch["mask"]) -> np.ndarray:
        """Return [loss, weight, *metrics] of some rows."""
        pick = lambda x: x[index] if x.ndim and len(x) == size else x
        total, weight, values = oracle.loss(*jax.tree.map(pick, (outputs, {**batch, "mask": mask})))
        return np.array([total, weight, *(flat(values)[name] for name in metrics)], np.float64)

    full = sums(order)
    if not np.isfinite(full).all():
        return failed(f"has a {names[int(np.argmin(np.isfinite(full)))]} that is not finite")
    if full[1] <= 0:
        return failed(f"has the weight {full[1]:g} for {size} examples; return batch['mask'] summed")
    if size < 2:
        return Check("loss", SKIPPED, "one example cannot be split")
    sizes = np.array([1, 2, size - 3] if size > 3 else [1, size - 1])
    largest = 0.0
    for _ in range(SPLITS):
        parts = np.split(rng.permutation(order), np.cumsum(rng.permutation(sizes))[:-1])
        try:
            values = np.stack([sums(part) for part in parts])
        except Exception as failure:
            kind = type(failure).__name__
            text = f"it cannot be split: {kind} where fewer examples are given: {one_line(failure)}"
            return Check("loss", NOTE, text)
        error = relative(values.sum(0), full, np.abs(values).sum(0))
        largest = max(largest, error.max())
        if error.max() > tolerance:
            shares = np.array([len(part) for part in parts]) / size, values[:, 1] / full[1]
            is_mean = np.min([relative(s @ values, full, np.abs(full)) for s in shares], axis=0) <= tolerance
            return failed(name_fault(names, error > tolerance, is_mean))
    subset = np.sort(rng.permutation(order)[: -(-size // 2)])
    mask = batch["mask"] * np.isin(order, subset).reshape(-1, *[1] * (batch["mask"].ndim - 1))
    error = relative(sums(order, mask), sums(subset), np.abs(full))
    if error.max() > tolerance:
        where = names[int(error.argmax())]
        return failed(f"counts examples whose batch['mask'] is 0 (in its {where}); multiply by the mask before summing")
    return Check("loss", OK, f"sums over parts of {size} examples add up ({max(largest, error.max()):.1e})")


def name_fault(names: list[str], wrong: np.ndarray, is_mean: np.ndarray) -> str:
    """Return what is wrong with a loss whose sums do not add up."""
    if wrong[1]:
        kind = "makes a mean of means: it returns a mean, and" if is_mean[0] and wrong[0] else "has"
        return f"{kind} a weight that does not count examples; return the sum of the losses, and batch['mask'] summed"
    if wrong[0] and is_mean[0]:
        return "returns a mean instead of a sum; return the losses times batch['mask'] summed, and the weight beside"
    if wrong[0]:
        return (
            "of an example depends on the other examples of its microbatch (as a contrastive loss does): sums over "
            "parts do not add up; set its attribute scope to 'global', so that it gets the full batch"
        )
    first = int(np.argmax(wrong))
    return f"has a {names[first]} that {'is a mean' if is_mean[first] else 'does not add up'}; return its sum"


def relative(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> np.ndarray:
    size = np.maximum(np.maximum(np.abs(want), scale), np.finfo(np.float64).tiny)
    return np.nan_to_num(np.abs(got - want) / size, nan=np.inf)


def some_rows(problem: Problem, oracle: Oracle, trial: Trial, start: Start) -> tuple[Any, dict[str, Any]]:
    """Return (outputs, what the loss gets) of up to ROWS examples, from as many microbatches as that takes."""
    size = trial.microbatch_size
    microbatches = [
        oracle.forward(*start, trial.microbatch(0, m), key_of(problem, 0, m))[:2]
        for m in range(min(-(-ROWS // size), trial.microbatches))
    ]
    join = lambda *x: np.concatenate(x)[:ROWS] if np.ndim(x[0]) and len(x[0]) == size else np.asarray(x[0])
    return jax.tree.map(join, *microbatches)
