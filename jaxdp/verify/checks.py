"""Check one microbatch: it can be repeated, padding changes nothing, and sums of the loss over parts add up."""

import json
from typing import Any

import jax
import numpy as np

from jaxdp.analysis.programs import Digest, check_same
from jaxdp.distributed.context import SLOW, Context
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.sums import flat
from jaxdp.models.base import CARRY
from jaxdp.verify.causes import FAILED, NOTE, OK, SKIPPED, Check, failed
from jaxdp.verify.compare import leaf_errors, worst
from jaxdp.verify.oracle import Setup, key_of, without_carry
from jaxdp.verify.problem import Tree

COARSE = 1e-6  # what padding may change: here a fault is never as small as rounding
SPLITS = 3  # random ones, of the examples that the loss is checked on
ROWS = 8  # of these examples


def compare_processes(context: Context, digests: dict[str, Digest]) -> list[Check]:
    """Return a failure if the processes of a job have different programs or data."""
    try:
        check_same(context, digests, SLOW)
    except UsageError as error:
        return [Check("ranks", FAILED, str(error))]
    return []


def any_failed(context: Context, checks: list[Check]) -> bool:
    """Add the failures of other processes to the checks; return whether there are any, on all processes alike."""
    texts = [check.text for check in checks if check.verdict == FAILED]
    for rank, others in enumerate(context.exchange("verify", json.dumps(texts), SLOW)):
        checks += [Check("ranks", FAILED, f"{context.title(rank)}: {t}") for t in json.loads(others) if t not in texts]
    return any(check.verdict == FAILED for check in checks)


def compute(setup: Setup, batch: dict[str, Any], state: Tree) -> Tree:
    """Return {loss, weight, metrics, model_state, gradient} of one microbatch."""
    params, key = setup.start.params, key_of(setup.problem, 0, 0)
    frozen = jax.tree.map(lambda x: None, params)
    (loss, (weight, metrics, states)), grads = setup.oracle.value(params, frozen, [state], [batch], [key])
    model_state = without_carry(states[0])[0]
    return {"loss": loss, "weight": weight, "metrics": metrics, "model_state": model_state, "gradient": grads}


def check_repeat(setup: Setup, tolerance: float) -> list[Check]:
    """Return a failure if one microbatch, computed twice, gives different numbers."""
    one, other = (compute(setup, setup.trial.microbatch(0, 0), setup.start.model_state) for _ in range(2))
    largest = worst(leaf_errors(other, one))
    return [] if largest.error <= tolerance else [failed("repeat", "repeat", **largest._asdict())]


def check_padding(setup: Setup, random: bool, tolerance: float) -> Check:
    """Check that the contents of padding change nothing, nor does leaving it out (unless numbers are random)."""
    problem, trial, start, _ = setup
    size, tolerance, largest = trial.microbatch_size, max(tolerance, COARSE), 0.0
    if size < 2:
        return Check("padding", SKIPPED, "a microbatch of one example is never padded in part")
    real = size - 1  # as many as possible: with few examples the gradients of a BatchNorm are ill-conditioned
    full, repeat = trial.microbatch(0, 0), np.arange(size) % real
    mask = full["mask"].copy()
    mask[real:] = 0

    def run(batch: dict[str, Any], state: Tree) -> Tree:
        sums = compute(setup, batch, state)
        gradient = np.concatenate([np.ravel(x) for x in jax.tree.leaves(sums["gradient"])])
        return {**sums, "gradient": gradient}  # as one vector: some leaves may be rounding noise

    padded = run({**{k: v[repeat] for k, v in full.items()}, "mask": mask}, start.model_state)
    others = {"other examples there": run({**full, "mask": mask}, start.model_state)}
    if not random:
        state, carry = without_carry(start.model_state)
        state = state if carry is None else {**state, CARRY: jax.tree.map(lambda x: x[:real], carry)}
        others["none there"] = run({k: v[:real] for k, v in full.items()}, state)
    for what, other in others.items():
        errors = leaf_errors(padded, other)
        averages = {leaf: e for leaf, e in errors.items() if leaf.startswith("model_state/") and not e <= tolerance}
        changed = worst(averages or errors)
        largest = max(largest, changed.error)
        if not changed.error <= tolerance:
            check = failed("padding", "padding", what=what, **changed._asdict())
            if len(problem.dataset) % problem.order.batch_size or problem.order.batch_size % problem.order.microbatches:
                return check
            return check._replace(verdict=NOTE, text=f"{check.text}; this run has no padding")
    more = "; leaving it out is not compared, because random numbers depend on the shape" if random else ""
    return Check("padding", OK, f"padded examples change nothing ({largest:.1e}){more}")


def check_loss(setup: Setup, tolerance: float) -> Check:
    """Check that the loss's sums over parts of some examples add up, and that masked examples do not count."""
    problem, _, _, oracle = setup
    if problem.couples:
        return Check("loss", NOTE, "it couples examples (scope: global): it is compared over full batches only")
    outputs, batch = some_rows(setup)
    size, rng = len(batch["mask"]), np.random.default_rng(problem.forward.seed)
    metrics = sorted(flat(oracle.loss(outputs, batch)[2]))
    names = ["loss", "weight", *(f"metric {name!r}" for name in metrics)]

    def sums(index: np.ndarray, mask: Any = batch["mask"]) -> np.ndarray:
        """Return [loss, weight, *metrics] of some rows."""
        pick = lambda x: x[index] if x.ndim and len(x) == size else x
        total, weight, values = oracle.loss(*jax.tree.map(pick, (outputs, {**batch, "mask": mask})))
        return np.array([total, weight, *(flat(values)[name] for name in metrics)], np.float64)

    full = sums(np.arange(size))
    if not np.isfinite(full).all():
        return failed("loss", "loss not finite", what=names[int(np.argmin(np.isfinite(full)))])
    if full[1] <= 0:
        return failed("loss", "no weight", weight=full[1], size=size)
    if size < 2:
        return Check("loss", SKIPPED, "one example cannot be split")
    sizes, largest = [1, 2, size - 3] if size > 3 else [1, size - 1], 0.0
    for _ in range(SPLITS):
        parts = np.split(rng.permutation(size), np.cumsum(rng.permutation(sizes))[:-1])
        try:
            values = np.stack([sums(part) for part in parts])
        except Exception as error:
            text = f"it cannot be split: {type(error).__name__} where fewer examples are given: {one_line(error)}"
            return Check("loss", NOTE, text)
        wrong = relative(values.sum(0), full, np.abs(values).sum(0))
        largest = max(largest, wrong.max())
        if wrong.max() > tolerance:
            shares = np.array([len(part) for part in parts]) / size, values[:, 1] / full[1]
            is_mean = min(relative(share @ values, full, np.abs(full))[0] for share in shares) <= tolerance
            loss, weight, *_ = wrong > tolerance
            kind = ("mean of means" if is_mean and loss else "weight") if weight else "mean" if is_mean else "couples"
            return failed("loss", kind if loss or weight else "metric", what=names[int(np.argmax(wrong))])
    subset = np.sort(rng.permutation(size)[: -(-size // 2)])
    mask = batch["mask"] * np.isin(np.arange(size), subset).reshape(-1, *[1] * (batch["mask"].ndim - 1))
    wrong = relative(sums(np.arange(size), mask), sums(subset), np.abs(full))
    if wrong.max() > tolerance:
        return failed("loss", "mask", what=names[int(wrong.argmax())])
    return Check("loss", OK, f"sums over parts of {size} examples add up ({max(largest, wrong.max()):.1e})")


def relative(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> np.ndarray:
    largest = np.maximum(np.maximum(np.abs(want), scale), np.finfo(np.float64).tiny)
    return np.nan_to_num(np.abs(got - want) / largest, nan=np.inf)


def some_rows(setup: Setup) -> tuple[Any, dict[str, Any]]:
    """Return (outputs, what the loss gets) of up to ROWS examples, from as many microbatches as that takes."""
    problem, trial, start, oracle = setup
    size, run = trial.microbatch_size, lambda m: oracle.forward(*start, trial.microbatch(0, m), key_of(problem, 0, m))
    microbatches = [run(m)[:2] for m in range(min(-(-ROWS // size), trial.microbatches))]
    join = lambda *x: np.concatenate(x)[:ROWS] if np.ndim(x[0]) and len(x[0]) == size else np.asarray(x[0])
    return jax.tree.map(join, *microbatches)
