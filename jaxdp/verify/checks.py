"""Check the parts of a run: data and updates can be repeated, padding changes nothing, the loss adds up."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxdp.analysis.programs import inside, needed
from jaxdp.data.base import probes
from jaxdp.data.example_order import EpochOrder, Streams
from jaxdp.data.prefetch import read_batch
from jaxdp.distributed.context import SLOW, Context, current
from jaxdp.errors import one_line
from jaxdp.metrics.sums import flat
from jaxdp.models.base import CARRY
from jaxdp.verify.compare import MARGIN, Worst, flatten, leaf_errors, worst
from jaxdp.verify.oracle import Setup, key_of, make_setup, train, without_carry
from jaxdp.verify.problem import FAILED, NOTE, OK, SKIPPED, Check, Problem, Tree

COARSE = 1e-6  # what padding may change: here a fault is never as small as rounding
SPLITS = 3  # random ones, of the examples that the loss is checked on
ROWS = 8  # of these examples
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}  # by the dtype of the computation
DRAWS = {"random_bits", "threefry2x32", "rng_uniform", "rng_bit_generator"}
VARIABLES = (  # of launchers: the rank, and the number of processes
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JAXDP_PROCESS_ID", "JAXDP_NUM_PROCESSES"),
)
COUNTS = ("device_count", "local_device_count", "devices", "local_devices", "process_index", "process_count")


def any_failed(context: Context, checks: list[Check]) -> bool:
    """Add the failures of other processes to the checks; return whether there are any, on all processes alike."""
    texts = [check.text for check in checks if check.verdict == FAILED]
    for rank, others in enumerate(context.exchange("verify", json.dumps(texts), SLOW)):
        checks += [Check("ranks", FAILED, f"{context.title(rank)}: {t}") for t in json.loads(others) if t not in texts]
    return any(check.verdict == FAILED for check in checks)


def check_data(problem: Problem) -> Check:
    """Check that all sets return the same example for the same index: in another order, among others, and where JAX
    reports other devices and processes."""
    number = 0
    others = [(f"evaluation set {k!r}" if k else "evaluation data", x) for k, x in problem.eval_sets.items()]
    for which, dataset in [("data", problem.dataset), *others]:
        index = probes(dataset)
        number, one = number + len(index), dataset.read(index)
        with other_counts():
            other = dataset.read(index[::-2])
        for name in {**one, **other}:
            x, y = (np.asarray(examples.get(name, ())) for examples in (one, other))
            if (x.shape[1:], x.dtype, x[::-2].tobytes()) != (y.shape[1:], y.dtype, y.tobytes()):
                text = (
                    f"the {which} is not a function of the index: {name!r} of an example changes "
                    "when it is read again, with others, or for another number of devices; move what is random into "
                    "its transform(batch, key, train), and compute what depends on several examples before"
                )
                return Check("data", FAILED, text)
    return Check("data", OK, f"{number} examples are the same when they are read again")


def traits_of(setup: Setup) -> tuple[np.dtype, bool]:
    """Trace the gradient of a microbatch. Return (the dtype of its least precise floats, whether it draws random
    numbers). Raises UsageError if the loss returns something else than sums."""
    problem, trial, start, oracle = setup
    params, frozen = start.params, jax.tree.map(lambda x: None, start.params)
    arguments = params, frozen, [start.model_state], [trial.microbatch(0, 0)], [key_of(problem, 0, 0)]
    names, dtype = set[str](), np.dtype(np.float64)
    for eqn in operations(jax.make_jaxpr(oracle.value)(*arguments).jaxpr):
        names.add(name := eqn.primitive.name)
        if name == "convert_element_type":
            before, after = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
            if before == np.float64 and jnp.issubdtype(after, jnp.floating):
                dtype = max(dtype, after, key=lambda x: float(jnp.finfo(x).eps))
    return dtype, bool(names & DRAWS)


def operations(jaxpr: jex.Jaxpr) -> Iterator[jex.JaxprEqn]:
    """Yield the operations that a result depends on, those inside loops and calls too."""
    for eqn in needed(jaxpr):
        yield eqn
        for inner in inside(eqn):
            yield from operations(inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner)


@contextlib.contextmanager
def other_counts() -> Iterator[None]:
    """Let JAX, jaxdp and the variables of launchers tell all modules another rank and other numbers of devices and
    processes, and the clock another time."""

    def told(real: Any) -> Any:
        other = lambda value: 2 * value if isinstance(value, list) else value + 3
        return lambda *args, **kwargs: other(real(*args, **kwargs))

    context, value = current(), lambda name, least: int(text) if (text := os.getenv(name, "")).isdigit() else least
    variables = {name: str(value(name, least) + 3) for pair in VARIABLES for least, name in enumerate(pair)}
    elsewhere = dataclasses.replace(context, rank=context.rank + 3, size=context.size + 3)
    others = {id(real): told(real) for real in (*(getattr(jax, name) for name in COUNTS), time.time)}
    others[id(current)] = lambda: elsewhere
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        for module in [m for name, m in sys.modules.items() if not name.startswith(("jax.", "jaxlib"))]:
            replaced = {k: others[id(x)] for k, x in getattr(module, "__dict__", {}).items() if id(x) in others}
            if replaced:
                stack.enter_context(mock.patch.multiple(module, **replaced))
        yield


def change(compute: Callable[[], Tree], tolerance: float) -> Worst:
    """Return how much a result changes where other devices and processes are reported; 0 if computing it again alone
    changes it as much, as on a GPU."""

    def again() -> Tree:
        jax.clear_caches()
        return compute()

    one = again()
    with other_counts():
        largest = worst(leaf_errors(again(), one))
    if largest.error <= min(COARSE, tolerance):
        return Worst(0.0, "")
    noise = worst(leaf_errors(again(), one)).error
    return Worst(0.0, "") if largest.error <= MARGIN * noise and noise <= tolerance else largest


def check_repeat(setup: Setup, tolerance: float) -> Check:
    """Check that an update, the learning rates and an evaluation are the same when all is traced again, where other
    devices and processes are reported."""
    problem, trial = setup.problem, setup.trial._replace(batches=setup.trial.batches[:1])

    def update() -> Tree:
        setup, schedule = make_setup(problem, trial), problem.schedule()
        trained = train(setup, problem.rule(1.0))
        rates = {"learning rate": jax.jit(lambda steps: jax.lax.map(schedule, steps))(jnp.arange(0, 100, 9, jnp.int32))}
        leaves = flatten(trained, trained.curve, trained.start)
        return {**leaves, "gradient": trained.grads, **rates, "evaluation": evaluate(setup, eval_batch(setup))}

    largest = change(update, tolerance)
    text = (
        f"an update computed twice gives another {largest.leaf} (by {largest.error:.1e}): model, loss, optimizer or "
        "schedule depend on the rank, on the number of devices or processes (as jax.device_count), on the time, or on "
        "a random generator of their own; use the config, and the key that is passed in"
    )
    if not largest.leaf:
        return Check("repeat", OK, "an update is the same when it is computed again, for another number of devices")
    return Check("repeat", FAILED, text)


def eval_batch(setup: Setup) -> dict[str, Any]:
    """Return a microbatch of the first evaluation set; empty if there is none."""
    for dataset in setup.problem.eval_sets.values():
        sizes = len(dataset), setup.trial.microbatch_size, 1
        order = Streams(*sizes) if setup.problem.order.sequential else EpochOrder(*sizes, shuffle=False)
        return {k: v[0] for k, v in read_batch(dataset, order, 0, [0]).items()}
    return {}


def evaluate(setup: Setup, batch: dict[str, Any]) -> Tree:
    """Return {loss, weight, metrics} of the evaluation of a microbatch, or nothing of an empty one."""
    if not batch:
        return {}
    outputs, seen, _ = setup.oracle.forward(*setup.start, batch, key_of(setup.problem, 0, 0), False)
    return dict(zip(("loss", "weight", "metrics"), setup.oracle.loss(outputs, seen), strict=True))


def compute(setup: Setup, batch: dict[str, Any], state: Tree) -> Tree:
    """Return {loss, weight, metrics, model_state, gradient} of one microbatch."""
    params, key = setup.start.params, key_of(setup.problem, 0, 0)
    frozen = jax.tree.map(lambda x: None, params)
    (loss, (weight, metrics, states)), grads = setup.oracle.value(params, frozen, [state], [batch], [key])
    gradient = np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])  # some leaves may be rounding noise
    state = without_carry(states[0])[0]
    return {"loss": loss, "weight": weight, "metrics": metrics, "model_state": state, "gradient": gradient}


def check_padding(setup: Setup, random: bool, tolerance: float) -> Check:
    """Check that the contents of padding change nothing, nor does leaving it out (unless numbers are random)."""
    problem, trial, start, _ = setup
    size, tolerance, largest = trial.microbatch_size, max(tolerance, COARSE), 0.0
    if size < 2:
        return Check("padding", SKIPPED, "a microbatch of one example is never padded in part")
    real = size - 1  # as many as possible: with few examples the gradients of a BatchNorm are ill-conditioned

    def masked(full: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the batch with its last example as padding: one of the others, or itself."""
        mask = full["mask"].copy()
        mask[real:] = 0
        rows = np.arange(size)
        return [{**{k: v[index] for k, v in full.items()}, "mask": mask} for index in (rows % real, rows)]

    order = problem.order
    ragged = lambda size: bool(size % order.batch_size or order.batch_size % order.microbatches)
    full, has_padding = trial.microbatch(0, 0), ragged(order.size)
    padded, other = (compute(setup, batch, start.model_state) for batch in masked(full))
    pairs = [("other examples there", has_padding, padded, other)]
    if not random:
        state, carry = without_carry(start.model_state)
        state = state if carry is None else {**state, CARRY: jax.tree.map(lambda x: x[:real], carry)}
        without = compute(setup, {k: v[:real] for k, v in full.items()}, state)
        pairs.append(("none there", has_padding, padded, without))
    if batch := eval_batch(setup):
        has_padding = any(ragged(len(x)) for x in problem.eval_sets.values())
        pairs.append(("other examples there, in evaluation", has_padding, *(evaluate(setup, x) for x in masked(batch))))
    note = None
    for what, has_padding, padded, other in pairs:
        errors = leaf_errors(padded, other)
        averages = {leaf: e for leaf, e in errors.items() if leaf.startswith("model_state/") and not e <= tolerance}
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
    more = "; leaving it out is not compared, because random numbers depend on the shape" if random else ""
    return note or Check("padding", OK, f"padded examples change nothing ({largest:.1e}){more}")


def check_loss(setup: Setup, tolerance: float) -> Check:
    """Check that the loss's sums over parts of some examples add up, and that masked examples do not count."""
    problem, _, _, oracle = setup
    outputs, batch = some_rows(setup)
    size, rng = len(batch["mask"]), np.random.default_rng(problem.forward.seed)
    metrics = sorted(flat(oracle.loss(outputs, batch)[2]))
    names = ["sum", "weight", *(f"metric {name!r}" for name in metrics)]

    def sums(index: np.ndarray, mask: Any = batch["mask"]) -> np.ndarray:
        """Return [loss, weight, *metrics] of some rows."""
        pick = lambda x: x[index] if x.ndim and len(x) == size else x
        total, weight, values = oracle.loss(*jax.tree.map(pick, (outputs, {**batch, "mask": mask})))
        return np.array([total, weight, *(flat(values)[name] for name in metrics)], np.float64)

    full, largest = sums(np.arange(size)), 0.0
    if not np.isfinite(full).all():
        return Check("loss", FAILED, f"the loss has a {names[int(np.argmin(np.isfinite(full)))]} that is not finite")
    if full[1] <= 0:
        text = f"the loss has the weight {full[1]:g} for {size} examples; return batch['mask'] summed"
        return Check("loss", FAILED, text)
    if size < 2:
        return Check("loss", SKIPPED, "one example cannot be split")
    subset = np.sort(rng.permutation(size)[: -(-size // 2)])
    mask = batch["mask"] * np.isin(np.arange(size), subset).reshape(-1, *[1] * (batch["mask"].ndim - 1))
    sizes = [1, 2, size - 3] if size > 3 else [1, size - 1]
    cut = lambda: np.split(rng.permutation(size), np.cumsum(rng.permutation(sizes))[:-1])
    try:
        splits = [np.stack([sums(part) for part in cut()]) for _ in range(0 if problem.couples else SPLITS)]
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
        return Check("loss", NOTE, "it couples examples (scope: global): it is compared over full batches only")
    return Check("loss", OK, f"sums over parts of {size} examples add up ({max(largest, wrong.max()):.1e})")


def relative(got: np.ndarray, want: np.ndarray, scale: np.ndarray) -> np.ndarray:
    largest = np.maximum(np.maximum(np.abs(want), scale), np.finfo(np.float64).tiny)
    return np.nan_to_num(np.abs(got - want) / largest, nan=np.inf)


def some_rows(setup: Setup) -> tuple[Any, dict[str, Any]]:
    """Return (outputs, what the loss gets) of up to ROWS examples, from as many microbatches as that takes."""
    problem, trial, start, oracle = setup
    size, keys = trial.microbatch_size, lambda m: key_of(problem, 0, m)
    run = lambda m: oracle.forward(*start, trial.microbatch(0, m), keys(m), True)
    microbatches = [run(m)[:2] for m in range(min(-(-ROWS // size), trial.microbatches))]
    join = lambda *x: np.concatenate(x)[:ROWS] if np.ndim(x[0]) and len(x[0]) == size else np.asarray(x[0])
    return jax.tree.map(join, *microbatches)
