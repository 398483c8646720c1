"""Checks of the parts of a run: data, updates and an evaluation do not depend on the host, padding
changes nothing, the loss adds up."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from optax import tree

from jaxdp.config import Config
from jaxdp.data.dataset import Dataset, probes
from jaxdp.errors import one_line
from jaxdp.optim.interpreter import inside
from jaxdp.run.components import Parts, schedule_of, set_jax
from jaxdp.run.datasets import eval_key
from jaxdp.run.elsewhere import elsewhere
from jaxdp.run.programs import describe, needed
from jaxdp.train.state import expand_to
from jaxdp.verify.oracle import (
    FAILED,
    NOTE,
    OK,
    SKIPPED,
    Oracle,
    Result,
    at,
    find_difference,
    flatten,
    leaves,
    make_oracle,
    train,
    update,
)
from jaxdp.verify.problem import TOLERANCE, Arrays, make_problem, make_trial, settings

# what padding or another process may change: here a fault is never as small as rounding
COARSE = 1e-6
EPOCHS, ORDERS = 4, 64  # of the order: epochs, and updates at most
RATES = 2**16  # learning rates at most, over the whole run


def check_parts(oracle: Oracle, devices: int, tolerance: float) -> dict[str, Result]:
    """Check the parts alone: return the result of each by name. One that failed may be the cause
    of the following ones' failures.
    devices: their number."""
    arguments = oracle.problem.config, devices, len(oracle.trial.batches)
    # Another parity, on the other side of usual limits.
    others = 1 if jax.device_count() > 1 else 8
    with elsewhere(facts_of_config, *arguments, devices=others) as again:
        loss = check_loss(oracle, tolerance)  # while the other process computes
        padding = check_padding(oracle, tolerance)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # as the other process
            facts = find_facts(oracle)
        same = check_same(facts, again(), min(COARSE, tolerance))
    data = check_data(oracle.problem.parts)
    return {"data": data, "repeat": same, "loss": loss, "padding": padding}


def facts_of_config(config: Config, devices: int, updates: int) -> Arrays:
    """Find the facts about a config's problem, in a process of one. devices: of the process that
    compares them.
    """
    set_jax(config, sums=False)
    problem = make_problem(config)
    with settings(jax.local_devices()[0]):
        trial = make_trial(problem, devices, updates)
        # Traced once more than in the process that compares: what counts its traces is found.
        make_oracle(problem, trial)
        return find_facts(make_oracle(problem, trial))


def find_facts(oracle: Oracle) -> Arrays:
    """Return what must be the same in another process, by what it is, in words.

    Of each set, the number of examples, and the dtype, shape and digest of some; the examples of some
    updates; all learning rates; the first state; the state after a few updates and one more at the
    end of the run, with their gradients; an evaluation. On JAX's default device."""
    config, parts = oracle.problem
    order, steps, rule = parts.order, parts.steps, oracle.rule
    trained = train(oracle, oracle.first.params)

    def at_the_end(x):
        is_count = x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)
        return jnp.full_like(x, steps - 1) if is_count else x

    # An optimizer may have a schedule of its own.
    counts = jax.tree.map(at_the_end, trained.state.opt_state)
    facts: dict[str, Any] = {}
    for name, dataset in named_sets(parts).items():
        facts[f"the number of examples of {name}"] = len(dataset)
        for key, values in dataset.read(probes(dataset)).items():
            facts[f"{key!r} of {name}"] = describe(np.asarray(values))
    for i in spread(min(steps, EPOCHS * order.steps_per_epoch) - 1, ORDERS).tolist():
        facts[f"the order of examples in update {i + 1}"] = describe(order.batch(i))
    evaluated = eval_batch(oracle)
    facts |= {
        "learning rate": jax.lax.map(schedule_of(config, steps), spread(steps, RATES)),
        "initial": oracle.first,
        "gradient": trained.grads,
        "last update": update(
            rule, rule.trainable(trained.state.params), counts, trained.grads[-1]
        ),
        "evaluation": oracle.loss(*oracle.outputs(evaluated, False)[:2]) if evaluated else {},
    }
    return leaves(facts) | flatten(trained.state, trained.curve, trained.start.params)


def spread(last: int, most: int) -> np.ndarray:
    """Return numbers from 0 to `last`, at most so many."""
    return np.unique(np.linspace(0, last, most, dtype=np.int32))


def named_sets(parts: Parts) -> dict[str, Dataset]:
    return {"data": parts.dataset} | {eval_key(name): x for name, x in parts.eval_sets.items()}


def eval_batch(oracle: Oracle) -> Arrays:
    """Return a microbatch of the first evaluation set; empty if there is none."""
    size = oracle.trial.order.examples_per_microbatch
    for dataset in oracle.problem.parts.eval_sets.values():
        examples = dataset.read(np.resize(probes(dataset), size))
        return {"mask": np.ones(size, np.float32), **examples}
    return {}


def check_same(facts: Arrays, again: Arrays | str, tolerance: float) -> Result:
    """Check that the facts are the same in a process with other surroundings. again: a text if that
    process failed.
    """
    where = "in another process, with other devices and launcher variables,"
    difference = again if isinstance(again, str) else find_difference(again, facts, tolerance)
    if difference:
        return FAILED, (
            f"{where} {difference}; model, data, loss, optimizer or schedule depend on the number of devices or "
            "processes, on a variable of a launcher (as RANK), or on a random generator of their own; use the "
            "config, and the key that is passed in"
        )
    return OK, f"{where} data, order, rates and updates are the same"


def check_data(parts: Parts) -> Result:
    """Check that all sets return the same example for the same index, in another order and among
    others.
    """
    sets = named_sets(parts)
    for name, dataset in sets.items():
        index = probes(dataset)
        one, other = at(slice(None, None, -2), dataset.read(index)), dataset.read(index[::-2])
        if difference := find_difference(other, one, 0.0):
            return FAILED, (
                f"{name} is not a function of the index: read again, with others, {difference}; move what is random "
                "into its transform(batch, key, train), and compute what depends on several examples before"
            )
    return OK, f"examples of {', '.join(sets)} are the same when they are read again"


def dtype_of(oracle: Oracle) -> str:
    """Return the name of the least precise dtype of floats in the gradient of a microbatch."""
    dtypes = {"float64"}
    for eqn in operations(oracle.program.jaxpr):
        if eqn.primitive.name == "convert_element_type":
            before, after = (str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))  # type: ignore[attr-defined]
            if before in TOLERANCE:  # neither a mask nor labels
                dtypes.add(after)
    return max(dtypes & TOLERANCE.keys(), key=TOLERANCE.__getitem__)


def operations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield the operations that a result depends on, those inside loops and calls too."""
    for eqn in needed(jaxpr):
        yield eqn
        for inner in inside(eqn):
            yield from operations(getattr(inner, "jaxpr", inner))


def check_padding(oracle: Oracle, tolerance: float) -> Result:
    """Check that the model computes the same of the other examples, whatever the padded one is; in
    training and in evaluation.
    """
    parts, order = oracle.problem.parts, oracle.problem.parts.order
    cases = [("", at(0, oracle.trial.batches[0]), [order.size])]
    if evaluated := eval_batch(oracle):
        cases.append((", in evaluation", evaluated, [len(x) for x in parts.eval_sets.values()]))
    real = oracle.trial.order.examples_per_microbatch - 1
    if not real:
        return SKIPPED, "a microbatch of one example is never padded in part"

    def results(batch, train):
        outputs, _, state = oracle.outputs(batch, train)
        outputs = jax.tree.map(lambda x: x[:real] if x.ndim else x, outputs)
        return leaves({"model_state": state, "outputs": outputs})

    result = OK, "padded examples change nothing"
    for where, batch, sizes in cases:
        mask = batch["mask"].copy()
        mask[real:] = 0
        # The first example as padding, not none: random numbers depend on the shape.
        batches = at([*range(real), 0], batch), batch
        got, want = (results({**x, "mask": mask}, not where) for x in batches)
        if difference := find_difference(got, want, max(tolerance, COARSE)):
            text = (
                f"the model counts padded examples{where}: {difference}; a BatchNorm (or anything that looks across "
                "examples) needs the mask, an argument named mask"
            )
            uneven = order.batch_size % order.microbatches
            if uneven or any(size % order.batch_size for size in sizes):
                return FAILED, text
            result = NOTE, f"{text}; this run has no padding"
    return result


def check_loss(oracle: Oracle, tolerance: float) -> Result:
    """Check the loss on each microbatch of the first update that has unmasked examples: in some, an
    accuracy may be 0 however it is counted.
    """
    batch = oracle.trial.batches[0]
    real = [m for m, mask in enumerate(batch["mask"]) if mask.any()]
    results = [check_sums(oracle, at(m, batch), tolerance) for m in real]
    return max(results, key=lambda result: result[0] == FAILED)  # the first of equals


def check_sums(oracle: Oracle, batch: Arrays, tolerance: float) -> Result:
    """Check that the loss's sums over single examples of a microbatch add up, and that masked
    examples do not count.
    """
    outputs, seen, _ = oracle.outputs(batch, True)
    mask, size = seen["mask"], len(seen["mask"])
    rows, couples = np.arange(size), oracle.couples
    half: Any = rows % 2 == 0

    def sums(rows, mask=mask):
        """Return the sums of some rows by name."""
        return oracle.loss(
            *jax.tree.map(
                lambda x: x[rows] if x.ndim and len(x) == size else x,
                (outputs, {**seen, "mask": mask}),
            )
        )

    if size < 2:
        return SKIPPED, "one example cannot be split"
    try:
        full, each = sums(rows), [sums(row) for row in rows[:, None]]
        masked, alone = sums(rows, mask * expand_to(half, mask)), sums(rows[half])
    except Exception as error:
        text = f"{type(error).__name__} where fewer examples are given: {one_line(error)}"
        return NOTE, f"it cannot be split: {text}"

    def compare(got, want):
        """An error is relative to the examples' own sums, too: terms may cancel."""
        parts = functools.partial(jax.tree.map, lambda *x: np.stack(x))
        return find_difference(parts(got, *each), parts(want, *each), tolerance)

    if not couples and (difference := compare(functools.reduce(tree.add, each), full)):
        return FAILED, (
            f"the loss does not add up over parts of a batch, as a mean does not: its {difference}; return sums "
            "of what belongs to the examples (of jnp.where(mask != 0, losses, 0) * mask) and batch['mask'] "
            "summed; a loss that couples examples (contrastive) needs an attribute scope = 'global'"
        )
    if difference := compare(masked, alone):
        text = f"the loss counts examples whose batch['mask'] is 0: its {difference}; sum "
        return FAILED, f"{text}jnp.where(mask != 0, losses, 0) * mask"
    if couples:
        return NOTE, "it couples examples (scope: global): it is compared over full batches only"
    return OK, f"sums over parts of {size} examples add up"
