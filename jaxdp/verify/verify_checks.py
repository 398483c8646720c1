"""Check the parts of a run: data and updates can be repeated, padding changes nothing, the loss
adds up.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxdp.data.dataset import probes
from jaxdp.errors import one_line
from jaxdp.models.base import CARRY
from jaxdp.optim.interpreter import inside
from jaxdp.process.context import SLOW, Context
from jaxdp.run.programs import needed
from jaxdp.train.metric_sums import flat
from jaxdp.verify.compare import leaf_errors, worst
from jaxdp.verify.facts import (
    COARSE,
    NOT_BY_INDEX,
    Facts,
    eval_batch,
    evaluate,
    find_difference,
    find_facts,
    named_sets,
    trace_again,
)
from jaxdp.verify.oracle import Setup, key_of, without_carry
from jaxdp.verify.problem import FAILED, NOTE, OK, SKIPPED, Check, Problem, Tree

SPLITS = 3  # random ones, of the examples that the loss is checked on
ROWS = 8  # of these examples
TOLERANCE = {
    "float64": 1e-10,
    "float32": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}  # by the dtype of the computation
DRAWS = {"random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator"}
SUM = 1e-5  # relative error of a sum of gradients: 1e-7 in float32, 1e-3 in bfloat16
ELSEWHERE = "in another process, which has other devices, launcher variables and another date"
CAUSES = (
    "model, data, loss, optimizer or schedule depend on the number of devices or processes (as jax.device_count), on a "
    "variable of a launcher (as RANK), on the date, the time or the host, or on a random generator of their own; use "
    "the config, and the key that is passed in"
)
Curve = dict[str, np.ndarray]  # {metric: [update]}


class OwnPrecision(NamedTuple):
    """What training in the run's own precision gives: curves by configuration, one device with
    `scan` first. sums: the error of one device's sum of gradients, by `accumulate`."""

    curves: dict[str, Curve]
    sums: dict[str, float]


def any_failed(context: Context, checks: list[Check]) -> bool:
    """Add the failures of other processes to the checks; return whether there are any, on all
    processes alike.
    """
    texts = [check.text for check in checks if check.verdict == FAILED]
    for rank, others in enumerate(context.exchange("verify", json.dumps(texts), SLOW)):
        checks += [
            Check("ranks", FAILED, f"{context.title(rank)}: {t}")
            for t in json.loads(others)
            if t not in texts
        ]
    return any(check.verdict == FAILED for check in checks)


def check_data(problem: Problem) -> Check:
    """Check that all sets return the same example for the same index, in another order and among
    others.
    """
    number = 0
    for which, dataset in named_sets(problem).items():
        index = probes(dataset)
        number, one = number + len(index), dataset.read(index)
        other = dataset.read(index[::-2])
        for name in {**one, **other}:
            x, y = (np.asarray(examples.get(name, ())) for examples in (one, other))
            if (x.shape[1:], x.dtype, x[::-2].tobytes()) != (y.shape[1:], y.dtype, y.tobytes()):
                return Check("data", FAILED, NOT_BY_INDEX.format(which, name))
    return Check("data", OK, f"{number} examples are the same when they are read again")


def traits_of(setup: Setup) -> tuple[np.dtype, bool]:
    """Trace the gradient of a microbatch. Return (the dtype of its least precise floats, whether it
    draws random numbers). Raises UsageError if the loss returns something else than sums."""
    names, dtype = set[str](), np.dtype(np.float64)
    for eqn in operations(jax.make_jaxpr(setup.oracle.value)(*arguments_of(setup)).jaxpr):
        names.add(name := eqn.primitive.name)
        if name == "convert_element_type":
            before, after = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
            if before == np.float64 and jnp.issubdtype(after, jnp.floating):
                dtype = max(dtype, after, key=lambda x: float(jnp.finfo(x).eps))
    return dtype, bool(names & DRAWS)


def is_mappable(setup: Setup) -> bool:
    """Return whether `jax.vmap` can map the gradient of a microbatch; a callback needs a
    vmap_method for that.
    """
    arguments, axes = arguments_of(setup), (None, None, None, 0, 0)
    traced = operations(jax.make_jaxpr(setup.oracle.value)(*arguments).jaxpr)
    if not any(eqn.primitive.name.endswith("callback") for eqn in traced):
        return True
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], arguments[3:])
    try:
        jax.eval_shape(jax.vmap(setup.oracle.value, in_axes=axes), *arguments[:3], *batch)
    except NotImplementedError:
        return False
    return True


def arguments_of(setup: Setup) -> tuple[Any, ...]:
    """Return arguments of `Oracle.value`: one microbatch, all parameters trainable."""
    problem, trial, start, _ = setup
    frozen = jax.tree.map(lambda x: None, start.params)
    return (
        start.params,
        frozen,
        [start.model_state],
        [trial.microbatch(0, 0)],
        [key_of(problem, 0, 0)],
    )


def operations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield the operations that a result depends on, those inside loops and calls too."""
    for eqn in needed(jaxpr):
        yield eqn
        for inner in inside(eqn):
            yield from operations(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


def check_repeat(setup: Setup, tolerance: float, facts: Facts | None = None) -> Check:
    """Check that updates, learning rates and an evaluation are the same when they are computed and
    traced again.
    """
    difference = find_difference(
        facts or find_facts(setup), trace_again(setup), tolerance, "in the same process"
    )
    if difference:
        return Check("repeat", FAILED, f"{difference}; {CAUSES}")
    return Check(
        "repeat",
        OK,
        "an update is the same when it is computed again; not compared with another process",
    )


def check_elsewhere(facts: Facts | str, found: Facts | str, tolerance: float) -> Check:
    """Check that the facts are the same in a process with other surroundings. They are a text if a
    process failed.
    """
    for one in (facts, found):
        if isinstance(one, str):
            return Check("repeat", FAILED, f"{ELSEWHERE}: {one}; {CAUSES}")
    assert not isinstance(facts, str) and not isinstance(found, str)
    if difference := find_difference(facts, found, tolerance, ELSEWHERE):
        return Check("repeat", FAILED, f"{difference}; {CAUSES}")
    return Check("repeat", OK, f"data, order, rates, updates and programs are the same {ELSEWHERE}")


def check_own_precision(found: OwnPrecision | str, dtype: np.dtype) -> Check:
    """Check that the gradients of microbatches are added without rounding to 16 bits, and that
    skipped updates, loss scales and losses do not depend on the devices. found: a text if the
    process failed. dtype: the least precise."""
    name, tolerance = f"in {dtype.name}", TOLERANCE[dtype.name]
    if isinstance(found, str):
        return Check(name, FAILED, f"nothing was compared in the run's own precision: {found}")
    for accumulate, error in found.sums.items():
        if error > SUM:
            text = (
                f"with parallel.accumulate: {accumulate} a device rounds the sum of its microbatches' gradients (by "
                f"{error:.1e}) where several devices do not, so their number changes the numbers"
            )
            return Check(name, FAILED, text)
    (first, want), *others = found.curves.items()
    for title, got in others:
        for metric, allowed in (("skipped", 0.0), ("loss_scale", 0.0), ("loss", tolerance)):
            x, y = (curve.get(metric, np.zeros(1)) for curve in (got, want))
            apart = ~np.isclose(x, y, allowed, 0.0, equal_nan=True)
            if apart.any():
                i = int(apart.argmax())
                text = f"{metric} of update {i + 1} is {x[i]:.6g} with {title}, but {y[i]:.6g} with {first}"
                return Check(name, FAILED, text)
    text = f"{len(found.curves)} configurations skip the same updates, with losses alike to {tolerance:g}"
    errors = [
        f"{accumulate} adds gradients to {error:.0e}" for accumulate, error in found.sums.items()
    ]
    return Check(name, OK, "; ".join([text, *errors]))


def compute(setup: Setup, batch: dict[str, Any], state: Tree) -> Tree:
    """Return {loss, weight, metrics, model_state, gradient} of one microbatch."""
    params, key = setup.start.params, key_of(setup.problem, 0, 0)
    frozen = jax.tree.map(lambda x: None, params)
    (loss, (weight, metrics, states)), grads = setup.oracle.value(
        params, frozen, [state], [batch], [key]
    )
    return {
        "loss": loss,
        "weight": weight,
        "metrics": metrics,
        "model_state": without_carry(states[0])[0],
        # one array: some leaves may be rounding noise
        "gradient": np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)]),
    }


def check_padding(setup: Setup, random: bool, tolerance: float) -> Check:
    """Check that the contents of padding change nothing, nor does leaving it out (unless numbers
    are random).
    """
    problem, trial, start, _ = setup
    size, tolerance, largest = trial.microbatch_size, max(tolerance, COARSE), 0.0
    if size < 2:
        return Check("padding", SKIPPED, "a microbatch of one example is never padded in part")
    real = (
        size - 1
    )  # as many as possible: with few examples the gradients of a BatchNorm are ill-conditioned

    def masked(full):
        """Return the batch with its last example as padding: one of the others, or itself."""
        mask = full["mask"].copy()
        mask[real:] = 0
        rows = np.arange(size)
        return [
            {**{k: v[index] for k, v in full.items()}, "mask": mask}
            for index in (rows % real, rows)
        ]

    order = problem.order

    def ragged(size):
        return size % order.batch_size or order.batch_size % order.microbatches

    full, has_padding = trial.microbatch(0, 0), ragged(order.size)
    padded, other = (compute(setup, batch, start.model_state) for batch in masked(full))
    pairs = [("other examples there", has_padding, padded, other)]
    if not random:
        state, carry = without_carry(start.model_state)
        state = (
            state if carry is None else {**state, CARRY: jax.tree.map(lambda x: x[:real], carry)}
        )
        without = compute(setup, {k: v[:real] for k, v in full.items()}, state)
        pairs.append(("none there", has_padding, padded, without))
    if batch := eval_batch(setup):
        has_padding = any(ragged(len(x)) for x in problem.eval_sets.values())
        evaluated = (evaluate(setup, x) for x in masked(batch))
        pairs.append(("other examples there, in evaluation", has_padding, *evaluated))
    note = None
    for what, has_padding, padded, other in pairs:
        errors = leaf_errors(padded, other)
        averages = {
            leaf: e
            for leaf, e in errors.items()
            if leaf.startswith("model_state/") and not e <= tolerance
        }
        changed = worst(averages or errors)
        largest = max(largest, changed.error)
        if not changed.error <= tolerance:
            text = (
                f"the model counts padded examples: with {what}, {changed.leaf} differs by {changed.error:.1e}; a "
                "BatchNorm (or anything that looks across examples) needs the mask, an argument named mask"
            )
            if has_padding:
                return Check("padding", FAILED, text)
            note = note or Check("padding", NOTE, f"{text}; this run has no padding")
    more = (
        "; leaving it out is not compared, because random numbers depend on the shape"
        if random
        else ""
    )
    return note or Check("padding", OK, f"padded examples change nothing ({largest:.1e}){more}")


def check_loss(setup: Setup, tolerance: float) -> Check:
    """Check that the loss's sums over parts of some examples add up, and that masked examples do
    not count.
    """
    problem, _, _, oracle = setup
    outputs, batch = some_rows(setup)
    size, rng = len(batch["mask"]), np.random.default_rng(problem.forward.seed)
    metrics = sorted(flat(oracle.loss(outputs, batch)[2]))
    names = ["sum", "weight", *(f"metric {name!r}" for name in metrics)]

    def sums(index, mask=batch["mask"]):
        """Return [loss, weight, *metrics] of some rows."""

        def pick(x):
            return x[index] if x.ndim and len(x) == size else x

        total, weight, values = oracle.loss(*jax.tree.map(pick, (outputs, {**batch, "mask": mask})))
        return np.array([total, weight, *(flat(values)[name] for name in metrics)], np.float64)

    full, largest = sums(np.arange(size)), 0.0
    if not np.isfinite(full).all():
        return Check(
            "loss",
            FAILED,
            f"the loss has a {names[int(np.argmin(np.isfinite(full)))]} that is not finite",
        )
    if full[1] <= 0:
        text = (
            f"the loss has the weight {full[1]:g} for {size} examples; return batch['mask'] summed"
        )
        return Check("loss", FAILED, text)
    if size < 2:
        return Check("loss", SKIPPED, "one example cannot be split")
    subset = np.sort(rng.permutation(size)[: -(-size // 2)])
    mask = batch["mask"] * np.isin(np.arange(size), subset).reshape(
        -1, *[1] * (batch["mask"].ndim - 1)
    )
    sizes = [1, 2, size - 3] if size > 3 else [1, size - 1]

    def cut():
        return np.split(rng.permutation(size), np.cumsum(rng.permutation(sizes))[:-1])

    try:
        splits = [
            np.stack([sums(part) for part in cut()])
            for _ in range(0 if problem.couples else SPLITS)
        ]
        masked, alone = sums(np.arange(size), mask), sums(subset)
    except Exception as error:
        text = f"it cannot be split: {type(error).__name__} where fewer examples are given: {one_line(error)}"
        return Check("loss", NOTE, text)
    for values in splits:
        wrong = relative(values.sum(0), full, np.abs(values).sum(0))
        largest = max(largest, wrong.max())
        if wrong.max() > tolerance:
            text = (
                f"the loss has a {names[int(np.argmax(wrong > tolerance))]} that does not add up over parts of a "
                "batch, as a mean does not; return sums of what belongs to the examples (of "
                "jnp.where(mask != 0, losses, 0) * mask) and batch['mask'] summed; a loss that couples examples "
                "(contrastive) needs an attribute scope = 'global'"
            )
            return Check("loss", FAILED, text)
    wrong = relative(masked, alone, np.abs(full))
    if wrong.max() > tolerance:
        text = f"the loss counts examples whose batch['mask'] is 0 (in its {names[int(wrong.argmax())]}); sum "
        return Check("loss", FAILED, f"{text}jnp.where(mask != 0, losses, 0) * mask")
    if problem.couples:
        return Check(
            "loss",
            NOTE,
            "it couples examples (scope: global): it is compared over full batches only",
        )
    return Check(
        "loss", OK, f"sums over parts of {size} examples add up ({max(largest, wrong.max()):.1e})"
    )


def relative(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> np.ndarray:
    largest = np.maximum(np.maximum(np.abs(want), scale), np.finfo(np.float64).tiny)
    return np.nan_to_num(np.abs(got - want) / largest, nan=np.inf)


def some_rows(setup: Setup) -> tuple[Any, dict[str, Any]]:
    """Return (outputs, what the loss gets) of up to ROWS examples, from as many microbatches as
    that takes.
    """
    problem, trial, start, oracle = setup
    size = trial.microbatch_size
    microbatches = [
        oracle.forward(*start, trial.microbatch(0, m), key_of(problem, 0, m), True)[:2]
        for m in range(min(-(-ROWS // size), trial.microbatches))
    ]

    def join(*x):
        return np.concatenate(x)[:ROWS] if np.ndim(x[0]) and len(x[0]) == size else np.asarray(x[0])

    return jax.tree.map(join, *microbatches)
