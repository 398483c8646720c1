"""Train configurations on their devices, with the step and a strategy: in float64 from the oracle's
first state, in the run's own precision, where nothing may be rounded or skipped on one device alone,
and with exact sums, where bits are compared."""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.checkpoint.leaves import host, params_sha256
from jaxdp.config import Config, Precision
from jaxdp.data.dataset import Dataset
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError, one_line
from jaxdp.extras import door
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import is_key, policy
from jaxdp.process.hosts import listed
from jaxdp.run.components import make_parts, set_jax
from jaxdp.run.preflight import check_optimizer
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step, UpdateRule
from jaxdp.verify.compare import Reference, Report, Result, describe, differences, leaves, worst
from jaxdp.verify.oracle import Curve, Oracle, first_state, stack
from jaxdp.verify.problem import (
    FAILED,
    OK,
    ONE_DEVICE,
    QUICK_COMPILATION,
    TOLERANCE,
    Check,
    Configuration,
    choose_configurations,
    clip,
    configuration_of,
    make_variant,
    smaller,
)

BUCKETS = 3  # about this many, however small the model
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently
FLOAT64 = Precision("float64", "float64", "float64")


def run_configuration(
    oracle: Oracle,
    reference: Reference,
    devices: Sequence[jax.Device],
    tolerance: float,
    configuration: Configuration,
) -> Result:
    """Train the updates of the trial, and compare the result with the oracle's. Raises UsageError
    as a run would.
    """
    try:
        state, curve = train(oracle, reference.rule, configuration, devices)
    except (UsageError, NotImplementedError):
        raise
    except Exception as error:
        return Result(configuration, FAILED, note=f"{type(error).__name__}: {one_line(error)}")
    errors = reference.errors(state, curve, tolerance)
    if not errors:
        return Result(configuration, FAILED, note="nothing was compared")
    largest = worst(errors)
    verdict = OK if largest.error <= tolerance else FAILED
    return Result(configuration, verdict, f"{largest.error:.1e}", largest.leaf, errors)


def train(
    oracle: Oracle, rule: UpdateRule, configuration: Configuration, devices: Sequence[jax.Device]
) -> tuple[TrainState, Curve]:
    """Return (the state after the last update, {metric: [update]}), on the host."""
    (config, parts), trial, params = oracle.problem, oracle.trial, oracle.start.params
    casts = policy("float64", "float64", "float64")
    forward = parts.forward._replace(policy=casts, loss_scaling=None)
    strategy, step = make_variant(
        dataclasses.replace(config, microbatches=trial.microbatches, precision=FLOAT64),
        parts._replace(forward=forward, rule=rule, order=trial.order),
        configuration,
        devices,
        bucket_mb=sum(x.nbytes for x in jax.tree.leaves(params)) / BUCKETS / 1e6,
        exact_group=1,
    )
    strategy.check(rule.tx, step.trainable(strategy.shapes.params))
    initial, first = strategy.export(strategy.init()), first_state(oracle, params, rule)
    # the oracle has no exponents of integer sums
    first = first.replace(extra=initial.extra | first.extra)
    drawn = worst(differences(initial.replace(opt_state=None), first.replace(opt_state=None)))
    if not drawn.error <= DRAWN:
        raise RuntimeError(
            f"the initial {drawn.leaf} differs by {drawn.error:.1e}: init is not a function of its key"
        )

    def put(x, like):
        if is_key(like):
            return like
        return jax.make_array_from_callback(x.shape, like.sharding, lambda part: np.array(x[part]))

    state = jax.tree.map(put, jax.tree.map(host, first), initial)
    del initial
    read = functools.partial(read_local, trial.order, parts.dataset, strategy)
    batches = map(read, range(len(trial.batches)))
    final, curve = run_updates(strategy, step, strategy.adopt(state), batches)
    if np.any(curve.pop("disagreeing_state", 0)):
        raise RuntimeError(
            "the microbatches disagree on integers of the model's state; all must change one alike"
        )
    return final, curve


def read_local(order: ExampleOrder, dataset: Dataset, strategy: Strategy, step: int) -> Batch:
    """Return the batch of an update on the strategy's devices."""
    return strategy.shard_batch(read_batch(dataset, order, step, strategy.local_microbatches))


def run_updates(
    strategy: Strategy, step: Step, state: TrainState, batches: Iterable[Batch]
) -> tuple[TrainState, Curve]:
    """Return (the exported state after an update on each batch, {metric: [update]}), on the host."""
    program, curve = strategy.compile(step), []
    for batch in batches:
        state, metrics = program.update(state, batch)
        curve.append(jax.tree.map(host, metrics))
    return jax.tree.map(host, strategy.export(state)), stack(curve)


UPDATES = 8  # at least


def train_in_own_precision(config: Config, devices: int, updates: int) -> dict[str, Curve]:
    """Train the first batches of a config (with the smaller arguments of `verify`) as its run does.

    Returns curves by configuration, one device with `scan` first. A configuration that is refused,
    or cannot be mapped, is left out.
    """
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(QUICK_COMPILATION, "")
    set_jax(config)
    parts, used = make_parts(config), jax.devices()
    own, curves = clip(configuration_of(config), used), {}
    for number, accumulate in itertools.product(sorted({1, devices}), ("scan", "vmap")):
        configuration = (ONE_DEVICE if number == 1 else own)._replace(accumulate=accumulate)
        try:
            strategy, step = make_variant(config, parts, configuration, used)
            state = strategy.init()
            batches = (
                read_local(parts.order, parts.dataset, strategy, i)
                for i in range(max(updates, UPDATES))
            )
            _, curve = run_updates(strategy, step, state, batches)
            curves[configuration.title] = curve
        except UsageError:
            continue
        except NotImplementedError:
            if accumulate == "scan":
                raise
    return curves


def check_own_precision(curves: dict[str, Curve] | str, dtype: np.dtype) -> Check:
    """Check that skipped updates, loss scales and losses do not depend on the devices. curves: a
    text if the process failed. dtype: the least precise."""
    name, tolerance = f"in {dtype.name}", TOLERANCE[dtype.name]
    if isinstance(curves, str):
        return Check(name, FAILED, f"nothing was compared in the run's own precision: {curves}")
    (first, want), *others = curves.items()
    for title, got in others:
        for metric, allowed in (("skipped", 0.0), ("loss_scale", 0.0), ("loss", tolerance)):
            x, y = (curve.get(metric, np.zeros(1)) for curve in (got, want))
            apart = ~np.isclose(x, y, allowed, 0.0, equal_nan=True)
            if apart.any():
                i = int(apart.argmax())
                text = f"{metric} of update {i + 1} is {x[i]:.6g} with {title}, but {y[i]:.6g} with {first}"
                return Check(name, FAILED, text)
    text = f"{len(curves)} configurations skip the same updates, with losses alike to {tolerance:g}"
    return Check(name, OK, text)


# configuration -> (its strategy, the step, batch number -> its batch on the strategy's devices)
Make = Callable[[Configuration], tuple[Strategy, Step, Callable[[int], Batch]]]


def exactly(config: Config) -> Config:
    """Return the config in exact mode, with the smaller arguments of `verify`. Raises UsageError."""
    door("exact", "--exact")
    from jaxdp.exact import in_exact_mode

    return in_exact_mode(smaller(config))


def verify_exactly(
    config: Config, devices: int, updates: int, progress: Callable[[str], None]
) -> Report:
    """Compare the bits of a config in exact mode, on its first batches and the last of an epoch,
    maybe incomplete.

    devices: the most to use; in a job of several processes all are used.
    """
    set_jax(config)
    parts = make_parts(config)
    used = jax.devices()
    if jax.process_count() == 1:
        used = used[: min(devices, config.microbatches // config.parallel.exact_group)]

    def make(configuration):
        strategy, step = make_variant(config, parts, configuration, used)
        check_optimizer(config, strategy, parts.rule.tx, step)
        return strategy, step, functools.partial(read_local, parts.order, parts.dataset, strategy)

    last = parts.order.steps_per_epoch - 1
    batches = [*(min(i, last) for i in range(updates - 1)), last]
    trained = f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    own = clip(configuration_of(config), used)
    return compare_bits(make, own, used, batches, trained, progress)


def compare_bits(
    make: Make,
    own: Configuration,
    devices: Sequence[jax.Device],
    batches: Sequence[int],
    trained: str,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Train the same updates in every configuration on these devices, and compare them to the bit.

    own: that of the run. batches: the number of the batch of each update. trained: what the updates
    train on, in words. Raises UsageError if no configuration can train.
    """
    report = Report(
        f"{describe(devices)}; {len(batches)} updates of {trained}", "params_sha256", goal="exact"
    )
    first: dict[str, np.ndarray] = {}
    changed: list[bool] = []

    def run(configuration):
        strategy, step, batch = make(configuration)
        state = strategy.init()
        before = digest_of_floats(strategy.export(state))
        final, curve = run_updates(strategy, step, state, map(batch, batches))
        changed.append(digest_of_floats(final) != before)
        bits = {**leaves(final), **leaves({"curve": curve})}
        if not first:
            first.update(bits)
        difference = first_difference(first, bits)
        digest = params_sha256(final.params)
        return Result(configuration, FAILED if difference else OK, digest, difference)

    report.run(run, choose_configurations(own, devices, exact=True), progress)
    compared = report.passed + report.failed
    if not compared:
        raise UsageError(report.results[0].note)
    report.agreement = f"give the same bits; params_sha256 {compared[0].value}"
    report.causes = [f"{r.configuration.title}: {r.note}" for r in report.failed[:1]]
    report.causes += report.refusal(own)
    counts = {result.configuration.devices for result in compared}
    if not any(changed):
        report.causes = [
            f"{len(batches)} updates changed no float of the parameters or the optimizer state (none was applied, or "
            "every gradient is zero); verify with data and --updates that train something"
        ]
    elif len(counts) == 1:
        report.causes.append(
            f"only {counts.pop()} device(s) could train; use --devices 2 or more, and 2 microbatches or more"
        )
    return report


def digest_of_floats(state: TrainState) -> str:
    """Return the digest of the floats of the parameters and of the optimizer state."""
    arrays = jax.tree.leaves((state.params, state.opt_state))
    return params_sha256([x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)])


def first_difference(first: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> str:
    """Return where two first differ, the update and the leaves at the end, or ""."""

    def same(x, y):
        return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())

    differing = [path for path in first if path not in other or not same(first[path], other[path])]
    if not differing:
        return ""
    pairs = [zip(first[path], other[path]) for path in differing if path.startswith("curve/")]
    updates = [i for pair in pairs for i, (x, y) in enumerate(pair, 1) if not same(x, y)]
    when = f"from update {min(updates)} on" if updates else "in the state alone"
    differing.sort(key=lambda path: not path.startswith("params/"))
    return f"differs {when}, in {listed(differing, 3)}"
