"""What can be judged without a strategy, and in what words: here what padding does, and the optimizer on slices."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.errors import UsageError, one_line
from jaxdp.models.base import CARRY
from jaxdp.optim import check_elementwise
from jaxdp.split import path_string
from jaxdp.verify.compare import Worst, leaf_errors, worst
from jaxdp.verify.oracle import Oracle, Start, key_of, without_carry
from jaxdp.verify.subject import Subject, Tree, Trial

OK, FAILED, SUSPECT, NOTE, SKIPPED = "ok", "FAILED", "suspect", "note", "skipped"
COARSE = 1e-6  # what padding may change: rounding is not what makes a difference there


class Check(NamedTuple):
    """verdict: one of the words above; only FAILED decides anything."""

    name: str
    verdict: str
    text: str


def check_padding(
    subject: Subject, oracle: Oracle, trial: Trial, start: Start, random: bool, tolerance: float
) -> Check:
    """What stands in the padded places of a microbatch changes nothing; nor does it, without random numbers, whether
    they are there."""
    places = trial.places
    if places < 2:
        return Check("padding", SKIPPED, "a microbatch of one example is never padded in part")
    real = places - 1  # as many as can be: few make a BatchNorm's gradients ill-conditioned
    whole = {k: v[0] for k, v in trial.batches[0].items()}
    masked = whole["mask"].copy()
    masked[real:] = 0
    repeat = np.where(np.arange(places) < real, np.arange(places), 0)
    frozen = jax.tree.map(lambda x: None, start.params)

    def value(batch: dict[str, Any], state: Tree) -> tuple[Tree, Tree]:
        (loss, (weight, metrics, new)), grads = oracle.value(start.params, frozen, state, batch, key_of(subject, 0, 0))
        return {"loss": loss, "weight": weight, "metrics": metrics, "model_state": without_carry(new)[0]}, grads

    padded = value({**{k: v[repeat] for k, v in whole.items()}, "mask": masked}, start.model_state)
    others = {"other examples there": value({**whole, "mask": masked}, start.model_state)}
    if not random:
        state, carry = without_carry(start.model_state)
        if carry is not None:
            state = {**state, CARRY: jax.tree.map(lambda x: x[:real], carry)}
        others["none there"] = value({k: v[:real] for k, v in whole.items()}, state)
    largest, tolerance = 0.0, max(tolerance, COARSE)
    for what, other in others.items():
        sums = leaf_errors(padded[0], other[0])
        averages = worst({leaf: e for leaf, e in sums.items() if leaf.startswith("model_state/")})
        found = averages if averages.error > tolerance else max(worst(sums), gradient_error(padded[1], other[1]))
        largest = max(largest, found.error)
        if found.error > tolerance:
            size = len(subject.dataset)
            pads = size % subject.batch_size or subject.batch_size % subject.microbatches
            text = (
                f"the model counts padded examples: with {what}, {found.leaf} differs by {found.error:.1e}; a "
                "BatchNorm (or whatever looks over examples) must be given the mask, an argument named mask"
            )
            return Check("padding", FAILED if pads else NOTE, text if pads else f"{text}; this run has none")
    more = "" if not random else "; real rows alone are not compared, for random numbers depend on the places"
    return Check("padding", OK, f"what stands in padded places changes nothing ({largest:.1e}){more}")


def gradient_error(got: Tree, want: Tree) -> Worst:
    """The leaf that differs most, against the norm of the whole gradient: some leaves may be rounding noise."""
    norm = lambda tree: np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(tree)))
    apart = leaf_norms(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), got, want))
    return worst({f"gradient/{path}": e / max(norm(want), np.finfo(np.float64).tiny) for path, e in apart.items()})


def leaf_norms(tree: Tree) -> dict[str, float]:
    return {path_string(path): float(np.linalg.norm(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def check_optimizer(subject: Subject, params: Tree) -> Check:
    """Whether it can be used at all, and on slices of the parameters."""
    tx = subject.make_tx(1.0)
    try:
        jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)
        check_elementwise(tx, params, blocks=subject.model.blocks)
    except TypeError as error:
        text = f"the optimizer's update needs more than gradients, state and parameters: {one_line(error)}"
        return Check("optimizer", FAILED, text)
    except UsageError as error:
        return Check("optimizer", NOTE, str(error).removeprefix("optimizer: "))
    return Check("optimizer", OK, "elementwise: it works on slices of the parameters as on the whole")
