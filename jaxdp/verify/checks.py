"""Checks that compute one microbatch: is it repeatable, does padding change it, can the optimizer work on slices."""

import json
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.analysis.programs import Digest, check_same
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError, one_line
from jaxdp.models.base import CARRY
from jaxdp.optim import check_elementwise
from jaxdp.verify.compare import Worst, leaf_errors, leaves, worst
from jaxdp.verify.oracle import Oracle, Start, key_of, without_carry
from jaxdp.verify.problem import Problem, Tree, Trial

OK, FAILED, NOTE, SKIPPED = "ok", "FAILED", "note", "skipped"
TIMEOUT = 600.0  # seconds that one process may take longer than another
COARSE = 1e-6  # what padding may change: here a fault is never as small as rounding


class Check(NamedTuple):
    """verdict: one of the words above; FAILED alone means that the problem is not verified."""

    name: str
    verdict: str
    text: str


def compare_processes(context: Context, digests: dict[str, Digest]) -> list[Check]:
    """Return a failure if the processes of a job have different programs or data."""
    try:
        check_same(context, digests, TIMEOUT)
    except UsageError as error:
        return [Check("ranks", FAILED, str(error))]
    return []


def any_failed(context: Context, checks: list[Check]) -> bool:
    """Add the failures of other processes to the checks; return whether there are any, on all processes alike."""
    failed = [check.text for check in checks if check.verdict == FAILED]
    for rank, texts in enumerate(context.exchange("verify", json.dumps(failed), TIMEOUT)):
        checks += [Check("ranks", FAILED, f"{context.title(rank)}: {t}") for t in json.loads(texts) if t not in failed]
    return any(check.verdict == FAILED for check in checks)


def compute(problem: Problem, oracle: Oracle, start: Start, batch: dict[str, Any], state: Tree) -> tuple[Tree, Tree]:
    """Return ({loss, weight, metrics, model_state}, gradients) of one microbatch."""
    frozen = jax.tree.map(lambda x: None, start.params)
    (loss, (weight, metrics, states)), grads = oracle.value(
        start.params, frozen, [state], [batch], [key_of(problem, 0, 0)]
    )
    return {"loss": loss, "weight": weight, "metrics": metrics, "model_state": without_carry(states[0])[0]}, grads


def check_repeat(problem: Problem, oracle: Oracle, trial: Trial, start: Start, tolerance: float) -> list[Check]:
    """Return a failure if one microbatch, computed twice, gives different numbers."""
    one, other = (compute(problem, oracle, start, trial.microbatch(0, 0), start.model_state) for _ in range(2))
    largest = worst(leaf_errors({**other[0], "gradient": other[1]}, {**one[0], "gradient": one[1]}))
    if largest.error <= tolerance:
        return []
    text = (
        f"one microbatch computed twice gives another {largest.leaf} (by {largest.error:.1e}): model or loss draw from "
        "a random generator of their own, as in a host callback; derive random numbers from the key"
    )
    return [Check("repeat", FAILED, text)]


def check_padding(
    problem: Problem, oracle: Oracle, trial: Trial, start: Start, random: bool, tolerance: float
) -> Check:
    """Check that the contents of padding change nothing, nor does leaving it out (unless numbers are random)."""
    size, tolerance = trial.microbatch_size, max(tolerance, COARSE)
    if size < 2:
        return Check("padding", SKIPPED, "a microbatch of one example is never padded in part")
    real = size - 1  # as many as possible: with few examples the gradients of a BatchNorm are ill-conditioned
    full = trial.microbatch(0, 0)
    mask = full["mask"].copy()
    mask[real:] = 0
    repeat = np.where(np.arange(size) < real, np.arange(size), 0)
    run = lambda batch, state: compute(problem, oracle, start, batch, state)
    padded = run({**{k: v[repeat] for k, v in full.items()}, "mask": mask}, start.model_state)
    others = {"other examples there": run({**full, "mask": mask}, start.model_state)}
    if not random:
        state, carry = without_carry(start.model_state)
        if carry is not None:
            state = {**state, CARRY: jax.tree.map(lambda x: x[:real], carry)}
        others["none there"] = run({k: v[:real] for k, v in full.items()}, state)
    largest = 0.0
    for what, other in others.items():
        sums = leaf_errors(padded[0], other[0])
        averages = worst({leaf: e for leaf, e in sums.items() if leaf.startswith("model_state/")})
        changed = averages if averages.error > tolerance else max(worst(sums), gradient_error(padded[1], other[1]))
        largest = max(largest, changed.error)
        if changed.error > tolerance:
            pads = len(problem.dataset) % problem.batch_size or problem.batch_size % problem.microbatches
            text = (
                f"the model counts padded examples: with {what}, {changed.leaf} differs by {changed.error:.1e}; a "
                "BatchNorm (or anything that looks across examples) needs the mask, an argument named mask"
            )
            return Check("padding", FAILED if pads else NOTE, text if pads else f"{text}; this run has no padding")
    more = "; leaving it out is not compared, because random numbers depend on the shape" if random else ""
    return Check("padding", OK, f"padded examples change nothing ({largest:.1e}){more}")


def gradient_error(got: Tree, want: Tree) -> Worst:
    """Return the leaf that differs most, relative to the norm of all gradients: some leaves may be rounding noise."""
    norm = np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(want)))
    apart = leaves(jax.tree.map(lambda a, b: np.linalg.norm(np.asarray(a) - np.asarray(b)), got, want))
    return worst({f"gradient/{path}": float(e) / max(norm, np.finfo(np.float64).tiny) for path, e in apart})


def check_optimizer(problem: Problem, params: Tree) -> Check:
    """Check that the optimizer works at all, and on slices of the parameters."""
    tx = problem.make_tx(1.0)
    try:
        jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)
    except (TypeError, UsageError) as error:
        return Check("optimizer", FAILED, one_line(error).removeprefix("optimizer.target: "))
    try:
        check_elementwise(tx, params, blocks=problem.model.blocks)
    except UsageError as error:
        return Check("optimizer", NOTE, str(error).removeprefix("optimizer: "))
    return Check("optimizer", OK, "elementwise: it works on slices of the parameters as on full ones")
