"""Train configurations on their devices, with the step and a strategy: in float64 from the oracle's
first state, in the run's own precision, where nothing may be rounded or skipped on one device alone,
and with exact sums, where bits are compared."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxdp.checkpoint.leaves import host, params_sha256
from jaxdp.config import Config
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError
from jaxdp.extras import door
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import policy
from jaxdp.run.components import Parts, make_parts, set_jax
from jaxdp.run.preflight import check_optimizer
from jaxdp.train.state import Batch, TrainState, floats
from jaxdp.train.step import Step
from jaxdp.verify.compare import (
    FAILED,
    OK,
    Check,
    Report,
    Result,
    by_update,
    describe,
    find_difference,
    flatten,
    leaves,
    worst,
)
from jaxdp.verify.oracle import Oracle, Reference, first_state, stack
from jaxdp.verify.problem import (
    FLOAT64,
    ONE_DEVICE,
    TOLERANCE,
    Arrays,
    Configuration,
    Problem,
    choose_configurations,
    make_variant,
    own_configuration,
    smaller,
)

BUCKETS = 3  # about this many, however small the model
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently


def run_configuration(
    oracle: Oracle,
    reference: Reference,
    devices: Sequence[jax.Device],
    configuration: Configuration,
) -> Result:
    """Train the updates of the trial, and compare the result with the oracle's. Raises UsageError
    as a run would.
    """
    (config, parts), trial, rule = oracle.problem, oracle.trial, reference.rule
    casts = policy("float64", "float64", "float64")
    forward = parts.forward._replace(policy=casts, loss_scaling=None)
    parts = parts._replace(forward=forward, rule=rule, order=trial.order)
    strategy, step = make_variant(
        dataclasses.replace(config, microbatches=trial.order.microbatches, precision=FLOAT64),
        parts,
        configuration,
        devices,
        bucket_mb=sum(x.nbytes for x in jax.tree.leaves(oracle.params)) / BUCKETS / 1e6,
        exact_group=1,
    )
    strategy.check(rule.tx, step.trainable(strategy.shapes.params))
    initial, first = strategy.export(strategy.init()), first_state(oracle, oracle.params, rule)
    # the oracle has no exponents of integer sums
    first = first.replace(extra=initial.extra | first.extra)
    drawn = [flatten(state.replace(opt_state=None), {}) for state in (initial, first)]
    if difference := find_difference(*drawn, DRAWN):
        raise RuntimeError(f"the initial {difference}: init is not a function of its key")
    shardings = jax.tree.map(lambda x: x.sharding, initial)
    placed = strategy.adopt(jax.device_put(first, shardings, may_alias=False))
    del initial
    batches = map(reader(parts, strategy), range(len(trial.batches)))
    state, curve = run_updates(strategy, step, placed, batches)
    if np.any(curve.pop("disagreeing_state", 0)):
        raise RuntimeError(
            "the microbatches disagree on integers of the model's state; all must change one alike"
        )
    errors = reference.errors(state, curve)
    if not errors:
        return Result(configuration, FAILED, note="nothing was compared")
    error, leaf = worst(errors)
    if error <= reference.tolerance:
        return Result(configuration, OK, f"{error:.1e}", leaf, errors)
    return Result(configuration, FAILED, f"{error:.1e}", f"{leaf} differs by {error:.1e}", errors)


def reader(parts: Parts, strategy: Strategy) -> Callable[[int], Batch]:
    """Return a function from the number of an update to its batch on the strategy's devices."""

    def read(update: int) -> Batch:
        numbers = strategy.local_microbatches
        return strategy.shard_batch(read_batch(parts.dataset, parts.order, update, numbers))

    return read


def run_updates(
    strategy: Strategy, step: Step, state: TrainState, batches: Iterable[Batch]
) -> tuple[TrainState, Arrays]:
    """Return (the exported state after an update on each batch, {metric: [update]}), on the host."""
    program, curve = strategy.compile(step), []
    for batch in batches:
        state, metrics = program.update(state, batch)
        curve.append(jax.tree.map(host, metrics))
    return jax.tree.map(host, (strategy.export(state), stack(curve) if curve else {}))


UPDATES = 8  # at least


def train_in_own_precision(
    problem: Problem, own: Configuration, devices: Sequence[jax.Device], updates: int
) -> dict[str, Arrays]:
    """Train the first batches as the run does, on one device and in the run's own configuration.

    Returns curves by configuration, one device with `scan` first. A configuration that is refused,
    or cannot be mapped, is left out.
    """
    (config, parts), curves = problem, {}
    for one, accumulate in itertools.product((ONE_DEVICE, own), ("scan", "vmap")):
        configuration = one._replace(accumulate=accumulate)
        try:
            strategy, step = make_variant(config, parts, configuration, devices)
            batches = map(reader(parts, strategy), range(max(updates, UPDATES)))
            _, curves[configuration.title] = run_updates(strategy, step, strategy.init(), batches)
        except UsageError:
            continue
        except NotImplementedError:
            if accumulate == "scan":
                raise
    return curves


def check_own_precision(curves: dict[str, Arrays], dtype: np.dtype) -> Check:
    """Check that skipped updates, loss scales and losses do not depend on the devices. dtype: the
    least precise."""
    name, tolerance = f"in {dtype.name}", TOLERANCE[dtype.name]
    (first, want), *others = curves.items()
    for title, got in others:
        for metric, allowed in (("skipped", 0.0), ("loss_scale", 0.0), ("loss", tolerance)):
            values = [
                by_update({k: curve[k] for k in curve if k == metric}) for curve in (got, want)
            ]
            if difference := find_difference(*values, allowed):
                return Check(name, FAILED, f"{difference}, with {title} and with {first}")
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
        return strategy, step, reader(parts, strategy)

    last = parts.order.steps_per_epoch - 1
    batches = [*(min(i, last) for i in range(updates - 1)), last]
    trained = f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    own = own_configuration(config, parts, used)
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
    setting = f"{describe(devices)}; {len(batches)} updates of {trained}"
    report = Report(setting, "params_sha256", own, "exact")
    first: Arrays = {}
    changed: list[str] = []

    def run(configuration):
        strategy, step, batch = make(configuration)
        state = strategy.init()
        before = floats_of(strategy.export(state))
        final, curve = run_updates(strategy, step, state, map(batch, batches))
        changed.append(find_difference(floats_of(final), before, 0.0))
        arrays = {**by_update(curve), **leaves({"state": final})}
        bits = {path: np.frombuffer(x.tobytes(), np.uint8) for path, x in arrays.items()}
        difference = find_difference(bits, first or bits, 0.0)
        first.update({} if first else bits)
        digest = params_sha256(final.params)
        return Result(configuration, FAILED if difference else OK, digest, difference)

    report.run(run, choose_configurations(own, devices, exact=True), progress)
    compared = report.passed + report.failed
    if not compared:
        raise UsageError(report.results[0].note)
    report.agreement = f"give the same bits; params_sha256 {compared[0].value}"
    if changed and not any(changed):
        text = (
            f"{len(batches)} updates changed no float of the parameters or the optimizer state (none was applied, or "
            "every gradient is zero); verify with data and --updates that train something"
        )
        report.checks.append(Check("training", FAILED, text))
    return report


def floats_of(state: TrainState) -> Arrays:
    """Return the floats of the parameters and of the optimizer state."""
    return leaves({"params": state.params, "opt_state": floats(state.opt_state)})
