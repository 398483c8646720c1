"""Facts about a problem that must not depend on the host: the data, its order, the learning rates,
a few updates, an evaluation, and the traced programs of all these. Two processes find them, and
compare."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.dataset import probes
from jaxdp.data.example_order import EpochOrder, Streams
from jaxdp.data.prefetch import read_batch
from jaxdp.precision import cast_floats
from jaxdp.run.programs import Digest, describe, digest, lines
from jaxdp.verify.compare import differences, flatten, leaves, worst
from jaxdp.verify.oracle import Setup, key_of, make_oracle, partition, train
from jaxdp.verify.problem import Problem, Tree

COARSE = (
    1e-6  # what padding or another process may change: here a fault is never as small as rounding
)
EPOCHS, ORDERS, READ = (
    4,
    256,
    10**6,
)  # of the order: this many epochs, updates at most, and examples at most
RATES = 2**16  # learning rates at most, over the whole run
RATE = "learning rate"


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


def find_facts(setup: Setup) -> Facts:
    """Compute all facts, on JAX's default device."""
    problem, order = setup.problem, setup.problem.order
    sets = named_sets(problem)
    numbers = {
        **{f"the number of examples of the {name}": len(dataset) for name, dataset in sets.items()},
        "the number of updates": problem.steps,
        "batch_size of the order of examples": order.batch_size,
        "microbatches of the order of examples": order.microbatches,
    }
    examples = {
        (name, key): describe(np.asarray(values))
        for name, dataset in sets.items()
        for key, values in dataset.read(probes(dataset)).items()
    }
    count = int(np.clip(READ // order.batch_size, 8, ORDERS))
    last = min(problem.steps, EPOCHS * order.steps_per_epoch) - 1
    updates = np.unique(np.linspace(0, last, count).astype(np.int64)).tolist()
    rows = {i: describe(order.rows(i, np.arange(order.microbatches))) for i in updates}
    return Facts(numbers, examples, rows, find_values(setup), find_programs(setup))


def named_sets(problem: Problem) -> dict[str, Any]:
    evaluated = {
        f"evaluation set {k!r}" if k else "evaluation data": x for k, x in problem.eval_sets.items()
    }
    return {"data": problem.dataset, **evaluated}


def find_values(setup: Setup) -> dict[str, np.ndarray]:
    problem, schedule = setup.problem, setup.problem.schedule()
    trained = train(setup, problem.rule(1.0))
    steps = np.unique(np.linspace(0, problem.steps, min(problem.steps + 1, RATES)).astype(np.int32))
    more = {
        RATE: jax.jit(lambda steps: jax.lax.map(schedule, steps))(steps),
        "gradient": trained.grads,
        "evaluation": evaluate(setup, eval_batch(setup)),
        "initial": setup.start,
    }
    return flatten(trained, trained.curve, trained.start) | leaves(more)


def find_programs(setup: Setup) -> dict[str, Digest]:
    """Trace all programs, with the jitted functions of the setup's oracle; another oracle traces
    them again.
    """
    problem, trial, start, oracle = setup
    trainable, frozen = partition(start.params, problem.rule(1.0).frozen)
    tx, key, state = problem.tx or problem.rule(1.0).tx, key_of(problem, 0, 0), start.model_state
    traced = {
        "the initial state": jax.make_jaxpr(problem.forward.model.init)(
            key, cast_floats(trial.example, jnp.float64)
        ),
        "the loss and its gradient": jax.make_jaxpr(oracle.value)(
            trainable, frozen, [state], [trial.microbatch(0, 0)], [key]
        ),
        "the optimizer": jax.make_jaxpr(lambda x: tx.update(x, tx.init(x), x))(trainable),
        "the learning rate": jax.make_jaxpr(problem.schedule())(jnp.int32(0)),
    }
    if batch := eval_batch(setup):
        traced["the evaluation"] = jax.make_jaxpr(lambda batch: evaluate(setup, batch))(batch)
    return {name: digest(lines(program)) for name, program in traced.items()}


def trace_again(setup: Setup) -> Facts:
    """Compute the values again, with the programs that are compiled, and trace all programs again."""
    again = setup._replace(oracle=make_oracle(setup.problem))
    return Facts({}, {}, {}, find_values(setup), find_programs(again))


def find_difference(one: Facts, other: Facts, tolerance: float, where: str) -> str:
    """Return the first difference of two computations in words, or "". where: the second one took
    place.
    """
    for name, number in one.numbers.items():
        if number != other.numbers.get(name, number):
            return f"{name} is {number:,}, but {other.numbers[name]:,} {where}"
    for key, text in one.examples.items():
        if text != other.examples.get(key, text):
            return NOT_BY_INDEX.format(*key)
    updates = [i for i, rows in one.order.items() if rows != other.order.get(i, rows)]
    if updates:
        return f"the examples of update {updates[0] + 1} (their order, or which they are) are others {where}"
    largest, at = worst(differences(other.values, one.values)), place(one.programs, other.programs)
    if largest.error > min(COARSE, tolerance):
        text = f"an update computed twice gives another {largest.leaf} (by {largest.error:.1e}) {where}"
        if largest.leaf == RATE:
            text += (
                f", from update {np.flatnonzero(one.values[RATE] != other.values[RATE])[0] + 1} on"
            )
        return f"{text}{'; traced code that differs: ' * bool(at)}{at}"
    return f"an update computed twice gives another program {where}: {at}" if at else ""


NOT_BY_INDEX = (
    "the {} is not a function of the index: {!r} of an example changes when it is read again, with others, or in "
    "another process (for another number of devices, or on another day); move what is random into its "
    "transform(batch, key, train), and compute what depends on several examples before"
)


def place(one: dict[str, Digest], other: dict[str, Digest]) -> str:
    """Return the first program that differs, and the first line of code in it that does; "" if none
    does.
    """
    for name, (total, by_line) in one.items():
        if other.get(name, (total,))[0] != total:
            others = other[name][1]
            lines = [
                line for line in {**by_line, **others} if by_line.get(line) != others.get(line)
            ]
            return f"{name}{f' at {lines[0]}' if lines else ''}"
    return ""


def eval_batch(setup: Setup) -> dict[str, Any]:
    """Return a microbatch of the first evaluation set; empty if there is none."""
    for dataset in setup.problem.eval_sets.values():
        sizes = len(dataset), setup.trial.microbatch_size, 1
        order = (
            Streams(*sizes) if setup.problem.order.sequential else EpochOrder(*sizes, shuffle=False)
        )
        return {k: v[0] for k, v in read_batch(dataset, order, 0, [0]).items()}
    return {}


def evaluate(setup: Setup, batch: dict[str, Any]) -> Tree:
    """Return {loss, weight, metrics} of the evaluation of a microbatch, or nothing of an empty one."""
    if not batch:
        return {}
    outputs, seen, _ = setup.oracle.forward(*setup.start, batch, key_of(setup.problem, 0, 0), False)
    return dict(zip(("loss", "weight", "metrics"), setup.oracle.loss(outputs, seen), strict=True))
