"""A loss by itself: sums over the parts of a batch are the whole's, and what is masked might as well not be there."""

from typing import Any

import jax
import numpy as np

from jaxdp.errors import one_line
from jaxdp.losses import apply_loss
from jaxdp.verify.checks import FAILED, NOTE, OK, Check
from jaxdp.verify.oracle import Oracle, Start, key_of
from jaxdp.verify.subject import Subject, Trial
from jaxdp.verify.trace import bound

SPLITS = 3  # random ones
ROWS = 8  # examples that the loss is split over


def check_loss(subject: Subject, oracle: Oracle, trial: Trial, start: Start, tolerance: float) -> Check:
    """What its sums are, over the model's own outputs for a few examples."""
    if subject.couples:
        return Check("loss", NOTE, "it couples examples (scope: global): it is compared over whole batches only")
    outputs, batch = some_rows(subject, oracle, trial, start)
    failed = lambda text: Check("loss", FAILED, f"the loss {text}")
    size = len(batch["mask"])

    def sums(index: np.ndarray, mask: Any = None) -> np.ndarray:
        """[loss, weight, *metrics] of some rows."""
        pick = lambda x: x[index] if x.ndim and len(x) == size else x
        some = jax.tree.map(pick, batch if mask is None else {**batch, "mask": mask})
        total, weight, metrics = oracle.judge(jax.tree.map(pick, outputs), some)
        return np.array([total, weight, *(metrics[name] for name in sorted(metrics))], np.float64)

    rng, order = np.random.default_rng(subject.seed), np.arange(size)
    whole = sums(order)
    metrics = sorted(oracle.judge(outputs, batch)[2])
    names = ["loss", "weight", *(f"metric {name!r}" for name in metrics)]
    if not np.isfinite(whole).all():
        return failed(f"has a {names[int(np.argmin(np.isfinite(whole)))]} that is not finite")
    if whole[1] <= 0:
        return failed(f"has the weight {whole[1]:g} for {size} examples; return batch['mask'] summed")
    sizes = np.array([1, 2, size - 3] if size > 3 else [1, size - 1])
    largest = 0.0
    for _ in range(SPLITS):
        index = np.split(rng.permutation(order), np.cumsum(rng.permutation(sizes))[:-1])
        try:
            found = np.stack([sums(part) for part in index])
        except Exception as problem:
            text = f"it cannot be split: {type(problem).__name__} where fewer examples are given: {one_line(problem)}"
            return Check("loss", NOTE, text)
        error = relative(found.sum(0), whole, np.abs(found).sum(0))
        largest = max(largest, error.max())
        if error.max() > tolerance:
            shares = np.array([len(part) for part in index]) / size, found[:, 1] / whole[1]
            is_mean = np.min([relative(s @ found, whole, np.abs(whole)) for s in shares], axis=0) <= tolerance
            return failed(explain(names, error > tolerance, is_mean))
    keep = rng.permutation(order)[: -(-size // 2)]
    mask = batch["mask"] * np.isin(order, keep).reshape(-1, *[1] * (batch["mask"].ndim - 1))
    error = relative(sums(order, mask), sums(np.sort(keep)), np.abs(whole))
    if error.max() > tolerance:
        where = names[int(error.argmax())]
        return failed(f"counts examples whose batch['mask'] is 0 (in its {where}); multiply by the mask before it sums")
    largest = max(largest, error.max())
    return Check("loss", OK, f"sums over random parts of {size} examples are the whole's ({largest:.1e})")


def explain(names: list[str], wrong: np.ndarray, is_mean: np.ndarray) -> str:
    """What a loss does whose sums do not add up."""
    if wrong[1]:
        kind = "makes a mean of means: it returns a mean, and" if is_mean[0] and wrong[0] else "has"
        return f"{kind} a weight that does not count examples; return the sum of the losses, and batch['mask'] summed"
    if wrong[0] and is_mean[0]:
        return "returns a mean instead of a sum; return the losses times batch['mask'] summed, and the weight beside"
    if wrong[0]:
        return (
            "of an example depends on the others that it comes with (as a contrastive one's does): sums over parts are "
            "not the whole's, so that numbers depend on the microbatches"
        )
    first = int(np.argmax(wrong))
    return f"has a {names[first]} that {'is a mean' if is_mean[first] else 'does not add up'}; return its sum"


def relative(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> np.ndarray:
    size = np.maximum(np.maximum(np.abs(want), scale), np.finfo(np.float64).tiny)
    return np.nan_to_num(np.abs(got - want) / size, nan=np.inf)


def some_rows(subject: Subject, oracle: Oracle, trial: Trial, start: Start) -> tuple[Any, dict[str, Any]]:
    """(outputs, what the loss gets) of up to ROWS examples, from as many microbatches as that takes."""
    pieces, places = [], trial.places
    for m in range(min(-(-ROWS // places), trial.microbatches)):
        piece = {k: v[m] for k, v in trial.batches[0].items()}
        pieces.append(oracle.forward(*start, piece, key_of(subject, 0, m))[:2])
    join = lambda *x: np.concatenate(x)[:ROWS] if np.ndim(x[0]) and len(x[0]) == places else np.asarray(x[0])
    return jax.tree.map(join, *pieces)


def check_form(subject: Subject, outputs: Any, batch: dict[str, Any]) -> Check | None:
    """What a loss returns that is not (scalar, scalar, {name: scalar}); outputs and batch: shapes."""
    returned: list[Any] = []
    bound(lambda outputs, batch: returned.append(apply_loss(subject.loss, outputs, batch)))(outputs, batch)
    result = returned[0]
    scalar = lambda x: getattr(x, "shape", None) == ()
    three = isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], dict)
    if three and all(map(scalar, (*result[:2], *result[2].values()))):
        return None
    show = lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else type(x).__name__
    return Check(
        "loss",
        FAILED,
        f"the loss returns {jax.tree.map(show, result)}, a mean perhaps; return (the sum of the losses, their weight, "
        "{name: sum}), each a scalar",
    )
