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
from jax.flatten_util import ravel_pytree

from jaxdp.data.dataset import probes
from jaxdp.errors import one_line
from jaxdp.optim.interpreter import inside
from jaxdp.process.context import SLOW, Context
from jaxdp.run.programs import needed
from jaxdp.train.metric_sums import flat
from jaxdp.train.state import expand_to
from jaxdp.verify.compare import differences, worst
from jaxdp.verify.facts import (
    COARSE,
    NOT_BY_INDEX,
    Facts,
    eval_batch,
    evaluate,
    find_difference,
    named_sets,
)
from jaxdp.verify.oracle import Oracle, join_carry, split_carry
from jaxdp.verify.problem import (
    FAILED,
    NOTE,
    OK,
    SKIPPED,
    Check,
    Problem,
    Tree,
    narrowest,
)

ROWS = 8  # examples that the loss is checked on
DRAWS = {"random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator"}
ELSEWHERE = "in another process, which has other devices, launcher variables and another date"
CAUSES = (
    "model, data, loss, optimizer or schedule depend on the number of devices or processes (as jax.device_count), on a "
    "variable of a launcher (as RANK), on the date, the time or the host, or on a random generator of their own; use "
    "the config, and the key that is passed in"
)


class Traits(NamedTuple):
    """What the trace of a microbatch's gradient shows.

    Args:
        dtype: that of its least precise floats.
        random: whether it draws random numbers.
        mappable: whether `jax.vmap` can map it; a callback needs a vmap_method for that.
    """

    dtype: np.dtype
    random: bool
    mappable: bool


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


def traits_of(oracle: Oracle) -> Traits:
    """Trace the gradient of a microbatch. Raises UsageError if the loss returns something else than
    sums."""
    value = oracle.value
    arguments = oracle.arguments(oracle.trial.microbatch(0, 0), oracle.start.model_state)
    names, dtypes = set[str](), [np.dtype(np.float64)]
    for eqn in operations(jax.make_jaxpr(value)(*arguments).jaxpr):
        names.add(name := eqn.primitive.name)
        if name == "convert_element_type":
            before, after = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
            if before == np.float64 and jnp.issubdtype(after, jnp.floating):
                dtypes.append(after)
    mappable = True
    if any(name.endswith("callback") for name in names):
        batch = jax.tree.map(lambda x: jnp.asarray(x)[None], arguments[3:])
        mapped = jax.vmap(value, in_axes=(None, None, None, 0, 0))
        try:
            jax.eval_shape(mapped, *arguments[:3], *batch)
        except NotImplementedError:
            mappable = False
    return Traits(narrowest(dtypes), bool(names & DRAWS), mappable)


def operations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield the operations that a result depends on, those inside loops and calls too."""
    for eqn in needed(jaxpr):
        yield eqn
        for inner in inside(eqn):
            yield from operations(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


def check_same(
    facts: Facts | str, again: Facts | str, tolerance: float, elsewhere: bool = False
) -> Check:
    """Check that the facts are the same when they are computed again, or elsewhere, in a process
    with other surroundings. They are a text if a process failed.
    """
    where = ELSEWHERE if elsewhere else "in the same process"
    if isinstance(facts, str) or isinstance(again, str):
        difference = f"{where}: {facts if isinstance(facts, str) else again}"
    else:
        difference = find_difference(facts, again, tolerance, where)
    if difference:
        return Check("repeat", FAILED, f"{difference}; {CAUSES}")
    if elsewhere:
        text = f"data, order, rates, updates and programs are the same {where}"
    else:
        text = "an update is the same when it is computed again; not compared with another process"
    return Check("repeat", OK, text)


def compute(oracle: Oracle, batch: dict[str, Any], state: Tree) -> Tree:
    """Return {loss, weight, metrics, model_state, gradient} of one microbatch."""
    (loss, (weight, metrics, states)), grads = oracle.value(*oracle.arguments(batch, state))
    return {
        "loss": loss,
        "weight": weight,
        "metrics": metrics,
        "model_state": split_carry(states[0])[0],
        "gradient": ravel_pytree(grads)[0],  # one array: some leaves may be rounding noise
    }


def check_padding(oracle: Oracle, random: bool, tolerance: float) -> Check:
    """Check that the contents of padding change nothing, nor does leaving it out (unless numbers
    are random).
    """
    order, size = oracle.problem.parts.order, oracle.trial.microbatch_size
    if size < 2:
        return Check("padding", SKIPPED, "a microbatch of one example is never padded in part")
    tolerance, largest, note = max(tolerance, COARSE), 0.0, None
    # as many as possible: with few examples the gradients of a BatchNorm are ill-conditioned
    real = size - 1

    def masked(full, rows):
        """Return some rows of the batch, the last one as padding."""
        mask = full["mask"].copy()
        mask[real:] = 0
        return {**{k: v[rows] for k, v in full.items()}, "mask": mask}

    def is_padded(examples):
        return bool(examples % order.batch_size or order.batch_size % order.microbatches)

    itself, another = np.arange(size), np.arange(size) % real
    full, state = oracle.trial.microbatch(0, 0), oracle.start.model_state
    padded = compute(oracle, masked(full, another), state)
    other = compute(oracle, masked(full, itself), state)
    cases = [("other examples there", is_padded(order.size), padded, other)]
    if not random:
        state, carry = split_carry(state)
        state = join_carry(state, jax.tree.map(lambda x: x[:real], carry))
        without = compute(oracle, {k: v[:real] for k, v in full.items()}, state)
        cases.append(("none there", is_padded(order.size), padded, without))
    if batch := eval_batch(oracle):
        padded, other = (evaluate(oracle, masked(batch, rows)) for rows in (another, itself))
        has_padding = any(is_padded(len(x)) for x in oracle.problem.parts.eval_sets.values())
        cases.append(("other examples there, in evaluation", has_padding, padded, other))
    for what, has_padding, padded, other in cases:
        errors = differences(padded, other)
        wrong = {leaf: error for leaf, error in errors.items() if not error <= tolerance}
        averages = {leaf: wrong[leaf] for leaf in wrong if leaf.startswith("model_state/")}
        changed = worst(averages or errors)
        largest = max(largest, changed.error)
        if wrong:
            text = (
                f"the model counts padded examples: with {what}, {changed.leaf} differs by {changed.error:.1e}; a "
                "BatchNorm (or anything that looks across examples) needs the mask, an argument named mask"
            )
            if has_padding:
                return Check("padding", FAILED, text)
            note = note or Check("padding", NOTE, f"{text}; this run has no padding")
    text = f"padded examples change nothing ({largest:.1e})"
    if random:
        text += "; leaving it out is not compared, because random numbers depend on the shape"
    return note or Check("padding", OK, text)


def check_loss(oracle: Oracle, tolerance: float) -> Check:
    """Check that the loss's sums over single examples add up, and that masked examples do not
    count.
    """
    outputs, batch = some_rows(oracle)
    mask, size = batch["mask"], len(batch["mask"])
    rows, couples = np.arange(size), oracle.problem.couples

    def named_sums(index, mask=mask):
        """Return the sums of some rows by name."""

        def pick(x):
            return x[index] if x.ndim and len(x) == size else x

        arguments = jax.tree.map(pick, (outputs, {**batch, "mask": mask}))
        total, weight, metrics = oracle.loss(*arguments)
        named = {f"metric {name!r}": x for name, x in sorted(flat(metrics).items())}
        return {"sum": total, "weight": weight, **named}

    def sums(*arguments):
        return np.array([*named_sums(*arguments).values()], np.float64)

    names, full = [*named_sums(rows)], sums(rows)
    if not np.isfinite(full).all():
        name = names[int(np.argmin(np.isfinite(full)))]
        return Check("loss", FAILED, f"the loss has a {name} that is not finite")
    if full[1] <= 0:
        text = (
            f"the loss has the weight {full[1]:g} for {size} examples; return batch['mask'] summed"
        )
        return Check("loss", FAILED, text)
    if size < 2:
        return Check("loss", SKIPPED, "one example cannot be split")
    chosen: Any = rows % 2 == 0
    try:
        each = [full] if couples else [sums(rows[i : i + 1]) for i in rows]
        masked, alone = sums(rows, mask * expand_to(chosen, mask)), sums(rows[chosen])
    except Exception as error:
        text = f"it cannot be split: {type(error).__name__} where fewer examples are given: {one_line(error)}"
        return Check("loss", NOTE, text)
    wrong = relative(np.sum(each, 0), full, np.sum(np.abs(each), 0))
    if wrong.max() > tolerance:
        text = (
            f"the loss has a {names[int(np.argmax(wrong > tolerance))]} that does not add up over parts of a "
            "batch, as a mean does not; return sums of what belongs to the examples (of "
            "jnp.where(mask != 0, losses, 0) * mask) and batch['mask'] summed; a loss that couples examples "
            "(contrastive) needs an attribute scope = 'global'"
        )
        return Check("loss", FAILED, text)
    counted = relative(masked, alone, np.abs(full))
    if counted.max() > tolerance:
        text = f"the loss counts examples whose batch['mask'] is 0 (in its {names[int(counted.argmax())]}); sum "
        return Check("loss", FAILED, f"{text}jnp.where(mask != 0, losses, 0) * mask")
    if couples:
        text = "it couples examples (scope: global): it is compared over full batches only"
        return Check("loss", NOTE, text)
    largest = max(wrong.max(), counted.max())
    return Check("loss", OK, f"sums over parts of {size} examples add up ({largest:.1e})")


def relative(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> np.ndarray:
    largest = np.maximum(np.maximum(np.abs(want), scale), np.finfo(np.float64).tiny)
    return np.nan_to_num(np.abs(got - want) / largest, nan=np.inf)


def some_rows(oracle: Oracle) -> tuple[Any, dict[str, Any]]:
    """Return (outputs, what the loss gets) of up to ROWS examples, from as many microbatches as
    that takes.
    """
    trial, start = oracle.trial, oracle.start
    size = trial.microbatch_size
    microbatches = [
        oracle.forward(*start, trial.microbatch(0, m), oracle.key(0, m), True)[:2]
        for m in range(min(-(-ROWS // size), trial.microbatches))
    ]

    def join(*x):
        return np.concatenate(x)[:ROWS] if np.ndim(x[0]) and len(x[0]) == size else np.asarray(x[0])

    return jax.tree.map(join, *microbatches)
