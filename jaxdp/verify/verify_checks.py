"""Check the parts of a run: data, updates and an evaluation do not depend on the host, padding
changes nothing, the loss adds up."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jaxdp.config import Config
from jaxdp.data.dataset import Dataset, probes
from jaxdp.data.example_order import EpochOrder, Streams
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import one_line
from jaxdp.optim.interpreter import inside
from jaxdp.process.context import SLOW, Context
from jaxdp.run.components import schedule_of, set_jax
from jaxdp.run.programs import describe, needed
from jaxdp.train.state import expand_to, flat
from jaxdp.verify.compare import differences, flatten, leaves, worst
from jaxdp.verify.oracle import Oracle, join_carry, partition, split_carry, train, update
from jaxdp.verify.problem import (
    FAILED,
    NOTE,
    OK,
    SKIPPED,
    Check,
    Problem,
    Tree,
    in_traceable_precision,
    make_problem,
    make_trial,
    narrowest,
    settings,
)

# what padding or another process may change: here a fault is never as small as rounding
COARSE = 1e-6
EPOCHS, ORDERS, READ = 4, 256, 10**6  # of the order: epochs, updates and examples, at most
RATES = 2**16  # learning rates at most, over the whole run
RATE = "learning rate"


class Facts(NamedTuple):
    """Args:
    texts: what is equal or not, by what it is, in words: numbers of examples and updates, the dtype,
    shape and digest of examples that are spread over each set, the examples of some updates.
    values: {path: array} of the state after a few updates, of one more at the end of the run, their
    gradients, all learning rates, an evaluation.
    """

    texts: dict[str, str]
    values: dict[str, np.ndarray]


def facts_of_config(config: Config, devices: int, updates: int) -> Facts:
    """Find the facts about a config's problem, in a process of one. devices: of the process that
    compares them.
    """
    set_jax(config, sums=False)
    problem = make_problem(config)
    with settings(jax.local_devices()[0]):
        trial = make_trial(problem, devices, updates)
        # Traced once more than in the process that compares: what counts its traces is found.
        traceable = in_traceable_precision(in_traceable_precision(problem, trial), trial)
        return find_facts(Oracle(traceable, trial))


def find_facts(oracle: Oracle) -> Facts:
    """Compute all facts, on JAX's default device."""
    parts = oracle.problem.parts
    order = parts.order
    sets = named_sets(oracle.problem)
    texts = {f"the number of examples of the {name}": f"{len(sets[name]):,}" for name in sets}
    texts["the number of updates"] = f"{parts.steps:,}"
    for name, dataset in sets.items():
        for key, values in dataset.read(probes(dataset)).items():
            texts[NOT_BY_INDEX.format(name, key)] = describe(np.asarray(values))
    count = int(np.clip(READ // order.batch_size, 8, ORDERS))
    last = min(parts.steps, EPOCHS * order.steps_per_epoch) - 1
    for i in np.unique(np.linspace(0, last, count).astype(np.int64)).tolist():
        rows = order.rows(i, np.arange(order.microbatches))
        texts[f"the examples of update {i + 1}, or their order"] = describe(rows)
    return Facts(texts, find_values(oracle))


def named_sets(problem: Problem) -> dict[str, Dataset]:
    sets = {"data": problem.parts.dataset}
    for key, dataset in problem.parts.eval_sets.items():
        sets[f"evaluation set {key!r}" if key else "evaluation data"] = dataset
    return sets


def find_values(oracle: Oracle) -> dict[str, np.ndarray]:
    problem, steps = oracle.problem, oracle.problem.parts.steps
    schedule, rule = schedule_of(problem.config, steps), problem.rule()
    trained = train(oracle, oracle.start.params, rule)

    def at_the_end(x):
        return (
            jnp.full_like(x, steps - 1)
            if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.integer)
            else x
        )

    # An optimizer may have a schedule of its own.
    counts = jax.tree.map(at_the_end, trained.state.opt_state)
    parameters = partition(trained.state.params, rule.frozen)[0]
    updates = np.unique(np.linspace(0, steps, min(steps + 1, RATES)).astype(np.int32))
    more = {
        RATE: jax.jit(lambda updates: jax.lax.map(schedule, updates))(updates),
        "gradient": trained.grads,
        "last update": update(rule.tx, rule.clip_norm, parameters, counts, trained.grads[-1]),
        "evaluation": evaluate(oracle, eval_batch(oracle)),
        "initial": oracle.start,
    }
    return flatten(trained.state, trained.curve, trained.start) | leaves(more)


def find_difference(one: Facts, other: Facts, tolerance: float) -> str:
    """Return the first difference of two processes in words, or ""."""
    for name, text in one.texts.items():
        if text != other.texts.get(name):
            return f"{name}: {text}, but {other.texts.get(name)}"
    largest = worst(differences(other.values, one.values))
    if largest.error <= tolerance:
        return ""
    text = f"an update computed twice gives another {largest.leaf} (by {largest.error:.1e})"
    if largest.leaf == RATE:
        changed = one.values[RATE] != other.values[RATE]
        text += f" from update {np.argmax(changed) + 1} on"
    return text


def eval_batch(oracle: Oracle) -> dict[str, Any]:
    """Return a microbatch of the first evaluation set; empty if there is none."""
    parts = oracle.problem.parts
    for dataset in parts.eval_sets.values():
        sizes = len(dataset), oracle.trial.microbatch_size, 1
        order = Streams(*sizes) if parts.order.sequential else EpochOrder(*sizes, shuffle=False)
        return {k: v[0] for k, v in read_batch(dataset, order, 0, [0]).items()}
    return {}


def evaluate(oracle: Oracle, batch: dict[str, Any]) -> Tree:
    """Return {loss, weight, metrics} of the evaluation of a microbatch, or nothing of an empty one."""
    if not batch:
        return {}
    outputs, seen, _ = oracle.forward(*oracle.start, batch, oracle.key(), False)
    return dict(zip(("loss", "weight", "metrics"), oracle.loss(outputs, seen), strict=True))


DRAWS = {"random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator"}
ELSEWHERE = "in another process, which has other devices and launcher variables"
CAUSES = (
    "model, data, loss, optimizer or schedule depend on the number of devices or processes, on a variable of a "
    "launcher (as RANK), or on a random generator of their own; use the config, and the key that is passed in"
)
NOT_BY_INDEX = (
    "the {} is not a function of the index: {!r} of an example changes when it is read again, with others; move what "
    "is random into its transform(batch, key, train), and compute what depends on several examples before"
)


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


def traits_of(oracle: Oracle) -> tuple[np.dtype, bool]:
    """Trace the gradient of a microbatch. Return the dtype of its least precise floats, and whether
    it draws random numbers. Raises UsageError if the loss returns something else than sums."""
    arguments = oracle.arguments(oracle.trial.microbatch(0, 0), oracle.start.model_state)
    names, dtypes = set[str](), [np.dtype(np.float64)]
    for eqn in operations(jax.make_jaxpr(oracle.value)(*arguments).jaxpr):
        names.add(name := eqn.primitive.name)
        if name == "convert_element_type":
            before, after = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
            if before == np.float64 and jnp.issubdtype(after, jnp.floating):
                dtypes.append(after)
    return narrowest(dtypes), bool(names & DRAWS)


def operations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield the operations that a result depends on, those inside loops and calls too."""
    for eqn in needed(jaxpr):
        yield eqn
        for inner in inside(eqn):
            yield from operations(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


def check_same(facts: Facts, again: Facts | str, tolerance: float) -> Check:
    """Check that the facts are the same in a process with other surroundings. again: a text if that
    process failed.
    """
    difference = again if isinstance(again, str) else find_difference(facts, again, tolerance)
    if difference:
        return Check("repeat", FAILED, f"{difference} {ELSEWHERE}; {CAUSES}")
    return Check("repeat", OK, f"data, order, rates and updates are the same {ELSEWHERE}")


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
    """Check the loss on each microbatch of the first update that has unmasked examples."""
    numbers = range(oracle.trial.microbatches)
    batches = [oracle.trial.microbatch(0, number) for number in numbers]
    checks = [check_sums(oracle, batch, tolerance) for batch in batches if batch["mask"].any()]
    return next((check for check in checks if check.verdict == FAILED), checks[0])


def check_sums(oracle: Oracle, batch: Tree, tolerance: float) -> Check:
    """Check that the loss's sums over single examples of a microbatch add up, and that masked
    examples do not count.
    """
    outputs, batch = oracle.forward(*oracle.start, batch, oracle.key(), True)[:2]
    mask, size = batch["mask"], oracle.trial.microbatch_size
    rows, couples = np.arange(size), oracle.problem.couples

    def named_sums(index, mask=mask):
        """Return the sums of some rows by name."""

        def pick(x):
            return x[index] if x.ndim and len(x) == size else x

        arguments = jax.tree.map(pick, (outputs, {**batch, "mask": mask}))
        total, weight, metrics = oracle.loss(*arguments)
        named = {f"metric {name!r}": x.sum() for name, x in sorted(flat(metrics).items())}
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
