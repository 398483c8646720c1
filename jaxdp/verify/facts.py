"""Facts about a problem that must not depend on the host: the data, its order, the learning rates,
a few updates, an evaluation, and the traced programs of all these. Two processes find them, and
compare."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.config import Config
from jaxdp.data.dataset import Dataset, probes
from jaxdp.data.example_order import EpochOrder, Streams
from jaxdp.data.prefetch import read_batch
from jaxdp.precision import cast_floats
from jaxdp.run.components import schedule_of, set_jax
from jaxdp.run.programs import Digest, describe, digest, lines
from jaxdp.verify.compare import differences, flatten, leaves, worst
from jaxdp.verify.oracle import Oracle, train
from jaxdp.verify.problem import (
    Problem,
    Tree,
    in_traceable_precision,
    make_problem,
    make_trial,
    settings,
)

# what padding or another process may change: here a fault is never as small as rounding
COARSE = 1e-6
EPOCHS, ORDERS, READ = 4, 256, 10**6  # of the order: epochs, updates and examples, at most
RATES = 2**16  # learning rates at most, over the whole run
RATE = "learning rate"
NOT_BY_INDEX = (
    "the {} is not a function of the index: {!r} of an example changes when it is read again, with others, or in "
    "another process (for another number of devices, or on another day); move what is random into its "
    "transform(batch, key, train), and compute what depends on several examples before"
)


class Facts(NamedTuple):
    """Args:
    numbers: of examples, updates and the like, by what they count.
    examples: {(set, name): dtype, shape and digest} of examples that are spread over each set.
    order: {update: digest of the examples in its microbatches}.
    values: {path: array} of the state after a few updates, their gradients, all learning rates, an
    evaluation. programs: the traced programs by name.
    """

    numbers: dict[str, int]
    examples: dict[tuple[str, str], str]
    order: dict[int, str]
    values: dict[str, np.ndarray]
    programs: dict[str, Digest]


def facts_of_config(config: Config, devices: int, updates: int) -> Facts:
    """Find the facts about a config's problem, in a process of one. devices: of the process that
    compares them.
    """
    set_jax(config, sums=False)
    problem = make_problem(config)
    with settings(jax.local_devices()[0]):
        trial = make_trial(problem, devices, updates)
        return find_facts(Oracle(in_traceable_precision(problem, trial), trial))


def find_facts(oracle: Oracle) -> Facts:
    """Compute all facts, on JAX's default device."""
    parts = oracle.problem.parts
    order = parts.order
    sets = named_sets(oracle.problem)
    numbers = {
        **{f"the number of examples of the {name}": len(sets[name]) for name in sets},
        "the number of updates": parts.steps,
    }
    examples = {}
    for name, dataset in sets.items():
        for key, values in dataset.read(probes(dataset)).items():
            examples[name, key] = describe(np.asarray(values))
    count = int(np.clip(READ // order.batch_size, 8, ORDERS))
    last = min(parts.steps, EPOCHS * order.steps_per_epoch) - 1
    updates = np.unique(np.linspace(0, last, count).astype(np.int64)).tolist()
    rows = {i: describe(order.rows(i, np.arange(order.microbatches))) for i in updates}
    return Facts(numbers, examples, rows, find_values(oracle), find_programs(oracle))


def named_sets(problem: Problem) -> dict[str, Dataset]:
    sets = {"data": problem.parts.dataset}
    for key, dataset in problem.parts.eval_sets.items():
        sets[f"evaluation set {key!r}" if key else "evaluation data"] = dataset
    return sets


def find_values(oracle: Oracle) -> dict[str, np.ndarray]:
    problem, steps = oracle.problem, oracle.problem.parts.steps
    schedule = schedule_of(problem.config, steps)
    trained = train(oracle, oracle.start.params, problem.rule())
    updates = np.unique(np.linspace(0, steps, min(steps + 1, RATES)).astype(np.int32))
    more = {
        RATE: jax.jit(lambda updates: jax.lax.map(schedule, updates))(updates),
        "gradient": trained.grads,
        "evaluation": evaluate(oracle, eval_batch(oracle)),
        "initial": oracle.start,
    }
    return flatten(trained.state, trained.curve, trained.start) | leaves(more)


def find_programs(oracle: Oracle) -> dict[str, Digest]:
    """Trace all programs, with the jitted functions of the oracle; another oracle traces
    them again.
    """
    config, parts = oracle.problem
    start, trial = oracle.start, oracle.trial
    tx, schedule = parts.rule.tx, schedule_of(config, parts.steps)
    arguments = oracle.arguments(trial.microbatch(0, 0), start.model_state)
    key, example = oracle.key(), cast_floats(trial.example, jnp.float64)

    def optimize(params):
        return tx.update(params, tx.init(params), params)

    traced = {
        "the initial state": jax.make_jaxpr(parts.forward.model.init)(key, example),
        "the loss and its gradient": jax.make_jaxpr(oracle.value)(*arguments),
        "the optimizer": jax.make_jaxpr(optimize)(parts.rule.trainable(start.params)),
        "the learning rate": jax.make_jaxpr(schedule)(jnp.int32(0)),
    }
    if batch := eval_batch(oracle):
        traced["the evaluation"] = jax.make_jaxpr(lambda batch: evaluate(oracle, batch))(batch)
    return {name: digest(lines(program)) for name, program in traced.items()}


def compute_again(oracle: Oracle, facts: Facts) -> Facts:
    """Compute the values again, with the programs that are compiled, and trace all programs again."""
    again = Oracle(oracle.problem, oracle.trial, oracle.start)
    return facts._replace(values=find_values(oracle), programs=find_programs(again))


def find_difference(one: Facts, other: Facts, tolerance: float, where: str) -> str:
    """Return the first difference of two computations in words, or "". where: the second one took
    place.
    """
    for name, number in one.numbers.items():
        if number != other.numbers[name]:
            return f"{name} is {number:,}, but {other.numbers[name]:,} {where}"
    for key, text in one.examples.items():
        if text != other.examples.get(key):
            return NOT_BY_INDEX.format(*key)
    for update, rows in one.order.items():
        if rows != other.order.get(update):
            return f"the examples of update {update + 1} (their order, or which they are) are others {where}"
    largest = worst(differences(other.values, one.values))
    at = first_changed_line(one.programs, other.programs)
    if largest.error > min(COARSE, tolerance):
        text = f"an update computed twice gives another {largest.leaf} (by {largest.error:.1e}) {where}"
        if largest.leaf == RATE:
            changed = one.values[RATE] != other.values[RATE]
            text += f", from update {np.argmax(changed) + 1} on"
        return f"{text}{'; traced code that differs: ' * bool(at)}{at}"
    return f"an update computed twice gives another program {where}: {at}" if at else ""


def first_changed_line(one: dict[str, Digest], other: dict[str, Digest]) -> str:
    """Return the first program that differs, and the first line of code in it that does; "" if none
    does.
    """
    for name, (total, by_line) in one.items():
        other_total, others = other[name]
        if other_total != total:
            for line in {**by_line, **others}:
                if by_line.get(line) != others.get(line):
                    return f"{name} at {line}"
            return name
    return ""


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
