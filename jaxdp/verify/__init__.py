"""Verify that every configuration trains what one device trains, for the user's own model, data and
optimizer.

In float64, where rounding is small and faults are not: first the parts alone, then a few updates by
an oracle that shares only small helpers with the step, and the same updates in many configurations. Then in the
run's own precision, where nothing may be rounded or skipped on one device alone. Or with exact sums,
where bits are compared.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from optax import tree

from jaxdp.checkpoint.leaves import host, params_sha256
from jaxdp.config import Config
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError, one_line
from jaxdp.extras import door
from jaxdp.metrics.numbers import table
from jaxdp.precision import is_narrow, policy
from jaxdp.process.context import SLOW, Context
from jaxdp.run.components import Parts, jax_settings, make_parts, set_jax
from jaxdp.run.preflight import check_optimizer
from jaxdp.train.state import TrainState
from jaxdp.verify.oracle import (
    FAILED,
    OK,
    REFUSED,
    Curve,
    Oracle,
    Reference,
    Result,
    find_difference,
    flatten,
    leaves,
    make_oracle,
    train,
)
from jaxdp.verify.problem import (
    ALONE,
    FLOAT64,
    ONE_DEVICE,
    TOLERANCE,
    Arrays,
    Configuration,
    Devices,
    Problem,
    check_memory,
    choose_configurations,
    make_trial,
    make_variant,
    own_configuration,
    settings,
    smaller,
)
from jaxdp.verify.verify_checks import check_parts, dtype_of

Train = Callable[[Configuration], Result]
"""(verdict, text) of a configuration, see `Check`."""

BUCKETS = 3  # about this many, however small the model
UPDATES = 8  # at least, in the run's own precision
DRAWN = 1e-6  # initial values are drawn in float32, which two programs may round differently


Progress = Callable[[str], None]


class Check(NamedTuple):
    """What was compared.

    name: of a part of the run, or the title of a configuration. verdict: OK, FAILED, NOTE, SKIPPED,
    or REFUSED as a run would be; FAILED means that the problem is not verified. text: the result."""

    name: str
    verdict: str
    text: str


@dataclasses.dataclass
class Report:
    """What was compared, and the result.

    Args:
        setting: what was trained, and on what, in words.
        own: the run's configuration.
        goal: of the comparison, in a word.
        reference: what all results are compared with, trained on one device; None: the first result.
        agreement: what verified configurations share.
        checks: of the parts of the run.
        results: of the configurations.
    """

    setting: str
    own: Configuration
    goal: str = "verified"
    reference: Any = None
    agreement: str = ""
    checks: list[Check] = dataclasses.field(default_factory=list)
    results: dict[Configuration, Check] = dataclasses.field(default_factory=dict)

    def of(self, *verdicts: str) -> list[Configuration]:
        """Return the configurations with one of these verdicts."""
        return [c for c, result in self.results.items() if result.verdict in verdicts]

    @property
    def causes(self) -> list[str]:
        """Return why it is not verified, the most certain cause first, or nothing."""
        causes = [check.text for check in self.checks if check.verdict == FAILED]
        if self.own in self.of(REFUSED):
            causes.append(
                f"the configuration that the config asks for is refused: {self.results[self.own].text}"
            )
        numbers = {c.devices for c in self.of(OK, FAILED)}
        if self.reference:
            numbers.add(1)
        if self.results and len(numbers) == 1:
            causes.append(
                f"nothing was compared but on {numbers.pop()} device(s); use --devices 2 or more, and 2 "
                "microbatches or more"
            )
        for c in self.of(FAILED)[:1]:
            causes.append(
                f"{c.title}: {self.results[c].text}; if one device agrees, the model may communicate "
                "over devices (BatchNorm with sync: true)"
            )
        return causes

    @property
    def verified(self) -> bool:
        return not self.causes

    def run(
        self,
        train: Train,
        configurations: Sequence[Configuration],
        progress: Progress,
    ) -> None:
        """Add the result of each configuration; progress: see `verify`."""
        for configuration in configurations:
            title = configuration.title
            try:
                result = train(configuration)
            except UsageError as error:
                result = REFUSED, one_line(error)
            except NotImplementedError as error:  # of a callback that jax.vmap cannot map
                result = REFUSED, f"{one_line(error)}; set parallel.accumulate to scan"
            except Exception as error:
                result = FAILED, f"{type(error).__name__}: {one_line(error)}"
            check = self.results[configuration] = Check(title, *result)
            progress(f"{len(self.results)}/{len(configurations)} {title}: {check.verdict}")

    def as_text(self, title: str) -> str:
        """Return the checks, the configurations, and the verdict as the last line."""
        rows = [*self.checks, *self.results.values()]
        lines = table([("check", "verdict", "result"), *rows])
        return "\n".join([title, self.setting, "", *lines, "", self.verdict()])

    def verdict(self) -> str:
        passed, failed, refused = (len(self.of(x)) for x in (OK, FAILED, REFUSED))
        more = f" ({refused} more refused)" if refused else ""
        if self.verified:
            return f"{self.goal}: {passed} configurations{more} {self.agreement}"
        differ = f"{failed} of {passed + failed} configurations differ{more}: " if failed else ""
        return f"not {self.goal}: {differ}{'; '.join(self.causes)}"

    def as_json(self, title: str) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "title": title,
            "setting": self.setting,
            self.goal: self.verified,
            "causes": self.causes,
            "jax": jax.__version__,
            "checks": [check._asdict() for check in self.checks],
            "configurations": [
                {"configuration": c._asdict(), **result._asdict()}
                for c, result in self.results.items()
            ],
        }


def describe(devices: Devices) -> str:
    processes = len({device.process_index for device in devices})
    return (
        f"{len(devices)} x {devices[0].device_kind}{f' in {processes} processes' * (processes > 1)}"
    )


def verify(
    problem: Problem,
    devices: Devices,
    *,
    updates: int = 3,
    progress: Progress = print,
    context: Context = ALONE,
) -> Report:
    """Compare a few updates in each configuration on these devices with the oracle's.

    Args:
        progress: called with a line of text after each part.
        context: of a job of several processes; `devices` are those of all, and every process gets
            the same report.

    Raises:
        UsageError: too little memory or data, a configuration that needs other devices, or raised
            by the user's code.
    """
    config = problem.config
    own = own_configuration(config, problem.parts, devices)
    if config.parallel.in_groups:
        own = own._replace(reduction="exact")
    local = [device for device in devices if device.process_index == jax.process_index()]
    with settings(local[0]):
        trial = make_trial(problem, len(devices), updates)
        check_memory(problem, local)
        oracle = make_oracle(problem, trial)
        dtype = dtype_of(oracle)
        limit, order = TOLERANCE[dtype], problem.parts.order
        setting = (
            f"{describe(devices)}; {updates} updates of {trial.order.batch_size} examples in "
            f"{trial.order.microbatches} microbatches (a run has {order.batch_size} in {order.microbatches}); "
            "float64, no loss scaling, a constant learning rate; the model and the loss compute in "
            f"{dtype}; {tree.size(oracle.first.params):,} parameters; allowed error {limit:g}"
        )
        report = Report(setting, own)

        # The programs and the data of all ranks are the same already.
        parts = context.of_root("verify", lambda: check_parts(oracle, len(devices), limit), SLOW)
        for name, result in parts.items():
            report.checks.append(part := Check(name, *result))
            if part.verdict == FAILED and part.name != "padding":
                return report  # a fault would be blamed on what follows
        epsilon, trainer = float(jnp.finfo(dtype).eps), functools.partial(train, oracle)
        report.reference = reference = Reference(trainer, oracle.first.params, epsilon, limit)
        context.barrier("verify", SLOW)  # root has compiled the oracle before the others
        report.checks += [Check("rounding", *note) for note in reference.notes]
        for check in report.checks:
            progress(f"{check.name}: {check.verdict}")
        most = config.verify.strategies
        chosen = choose_configurations(own, devices)[: most and most + 1]
        report.run(with_oracle(oracle, reference, devices), chosen, progress)
        dtypes = dtype, *map(str, problem.parts.forward.policy)
        narrow = max(dtypes, key=TOLERANCE.__getitem__)
        if is_narrow(narrow) and not config.parallel.in_groups:
            with jax_settings(config):
                result = check_own_precision(problem, own, devices, updates, narrow, progress)
            report.checks.append(Check(f"in {narrow}", *result))
        compared, trained = reference.compared
        report.agreement = (
            f"agree with the oracle; at most, {reference.largest[1]}; allowed {limit:g}; {compared} of {trained} "
            "trained leaves compared"
            f"{'; the others have no gradient, but for rounding, or do not move' * (compared < trained)}"
        )
        return report


Make = Callable[[Configuration], Any]


def maker(config: Config, parts: Parts, devices: Devices) -> Make:
    """Return a function that builds the run in a configuration. It returns the strategy and a
    function (state, the number of the batch of each update) -> (the exported state after them, their
    metrics), on the host."""

    def make(configuration):
        strategy, step = make_variant(config, parts, configuration, devices)
        check_optimizer(config, strategy, parts.rule.tx, step)

        def run_updates(state, numbers):
            program, curve = strategy.compile(step), []
            for number in numbers:
                batch = read_batches(
                    parts.dataset, parts.order, [number], strategy.local_microbatches
                )
                state, metrics = program.update(state, strategy.shard_batch(batch))
                curve.append(metrics)
            return jax.tree.map(host, (strategy.export(state), curve))

        return strategy, run_updates

    return make


def with_oracle(oracle: Oracle, reference: Reference, devices: Devices) -> Train:
    """Return a function that trains the updates of the trial in a configuration, and compares the
    result with the oracle's: see `Report.run`. It raises UsageError as a run would."""
    (config, parts), trial = oracle.problem, oracle.trial
    forward = parts.forward._replace(
        policy=policy("float64", oracle.compute, "float64"), loss_scaling=None
    )
    bucket_mb = 8 * tree.size(oracle.first.params) / BUCKETS / 1e6
    config = dataclasses.replace(
        config,
        microbatches=trial.order.microbatches,
        precision=FLOAT64,
        parallel=dataclasses.replace(config.parallel, bucket_mb=bucket_mb, exact_group=1),
    )
    parts = parts._replace(forward=forward, rule=oracle.rule, order=trial.order)
    make = maker(config, parts, devices)

    def run(configuration):
        strategy, run_updates = make(configuration)
        initial, first = strategy.export(strategy.init()), reference.trained.start
        # the oracle has no exponents of integer sums
        first = first.replace(extra=initial.extra | first.extra)
        if difference := find_difference(flatten(initial, []), flatten(first, []), DRAWN):
            return FAILED, f"the initial {difference}: init is no function of its key"

        def copy(x, like):
            # a new array for each device: two that share memory cannot be donated
            return jax.make_array_from_callback(x.shape, like.sharding, lambda i: jnp.copy(x[i]))

        placed = jax.tree.map(copy, first, initial)
        del initial
        state, curve = run_updates(strategy.adopt(placed), range(len(trial.batches)))
        if any(metrics.get("disagreeing_state") for metrics in curve):
            return FAILED, (
                "the microbatches disagree on integers of the model's state; all must change one alike"
            )
        return reference.compare(state, curve)

    return run


def with_first(
    make: Make,
    batches: Sequence[int],
    arrays: Callable[[TrainState, Curve], Arrays],
    tolerance: float = 0.0,
) -> Train:
    """Return a function that trains a configuration from its initial state, and compares it with the
    first one: see `Report.run`.

    batches: the number of the batch of each update. arrays: (state, curve) -> what is compared."""
    first: Arrays = {}

    def run(configuration):
        strategy, run_updates = make(configuration)
        nonlocal first
        state, curve = run_updates(strategy.init(), batches)
        got = arrays(state, curve)
        first = first or got
        difference = find_difference(got, first, tolerance)
        return FAILED if difference else OK, difference or params_sha256(state.params)

    return run


def check_own_precision(
    problem: Problem,
    own: Configuration,
    devices: Devices,
    updates: int,
    dtype: str,
    progress: Progress,
) -> Result:
    """Check that skipped updates, loss scales and losses of a run do not depend on its devices.
    dtype: its least precise."""
    tolerance = TOLERANCE[dtype]
    text = f"skip the same updates, with losses alike to {tolerance:g}"
    report = Report("", own, "alike", agreement=text)
    both = itertools.product((ONE_DEVICE, own), ("scan", "vmap"))
    configurations = [one._replace(accumulate=accumulate) for one, accumulate in both]
    make, batches = maker(*problem, devices), range(max(updates, UPDATES))
    report.run(with_first(make, batches, decisions, tolerance), configurations, progress)
    return OK if report.verified else FAILED, report.verdict()


def decisions(state: TrainState, curve: Curve) -> Arrays:
    """Return what must be alike in the run's own precision."""
    ends = "/skipped", "/loss_scale", "/loss"
    return {path: x for path, x in by_update(curve).items() if path.endswith(ends)}


def by_update(curve: Curve) -> Arrays:
    """Return {update 1/loss: its value} and so on."""
    return leaves({f"update {i}": metrics for i, metrics in enumerate(curve, 1)})


def exactly(config: Config) -> Config:
    """Return the config in exact mode, with the smaller arguments of `verify`. Raises UsageError."""
    door("exact", "--exact")
    from jaxdp.exact import in_exact_mode

    return in_exact_mode(smaller(config))


def verify_exactly(config: Config, devices: int, updates: int, progress: Progress) -> Report:
    """Compare the bits of a config in exact mode, on its first batches and the last of an epoch,
    maybe incomplete.

    devices: the most to use; in a job of several processes all are used.
    """
    set_jax(config)
    parts = make_parts(config)
    used = jax.devices()
    if jax.process_count() == 1:
        used = used[: min(devices, config.microbatches // config.parallel.exact_group)]
    last = parts.order.steps_per_epoch - 1
    batches = [*range(updates - 1), last]
    trained = f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    own = own_configuration(config, parts, used)
    return compare_bits(maker(config, parts, used), own, used, batches, trained, progress)


def compare_bits(
    make: Make,
    own: Configuration,
    devices: Devices,
    batches: Sequence[int],
    trained: str,
    progress: Progress = print,
) -> Report:
    """Train the same updates in every configuration on these devices, and compare them to the bit.

    own: that of the run. trained: what the updates train on, in words. Raises UsageError if no
    configuration can train.
    """
    report = Report(f"{describe(devices)}; {len(batches)} updates of {trained}", own, "exact")
    applied = list[Any]()

    def bits(state, curve):
        applied.extend(m["grad_norm"] for m in curve if not m["skipped"])
        arrays = by_update(curve) | leaves({"state": state})
        return {path: np.frombuffer(x.tobytes(), np.uint8) for path, x in arrays.items()}

    configurations = choose_configurations(own, devices, exact=True)
    report.run(with_first(make, batches, bits), configurations, progress)
    compared = report.of(OK, FAILED)
    if not compared:
        raise UsageError(report.results[configurations[0]].text)
    report.agreement = f"give the same bits; params_sha256 {report.results[compared[0]].text}"
    if not any(applied):
        text = (
            f"{len(batches)} updates trained nothing (none was applied, or every gradient is zero); verify with data "
            "and --updates that train something"
        )
        report.checks.append(Check("training", FAILED, text))
    return report
