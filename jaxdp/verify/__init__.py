"""Verify that every configuration trains what one device trains, for the user's own model, data and
optimizer.

In float64, where rounding is small and faults are not: first the parts alone, then a few updates by
an oracle that shares no code with the step, and the same updates in many configurations.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.process.context import Context
from jaxdp.run.elsewhere import process
from jaxdp.verify import verify_checks
from jaxdp.verify.compare import (
    Reference,
    Report,
    describe,
    find_reference,
    list_leaves,
)
from jaxdp.verify.oracle import Oracle, train
from jaxdp.verify.problem import (
    ALONE,
    FAILED,
    NOTE,
    TOLERANCE,
    Check,
    Configuration,
    Problem,
    check_memory,
    choose_configurations,
    clip,
    configuration_of,
    in_traceable_precision,
    make_trial,
    narrowest,
    settings,
)
from jaxdp.verify.trained import check_own_precision, run_configuration, train_in_own_precision
from jaxdp.verify.verify_checks import COARSE, facts_of_config, find_facts

Other = Callable[[], Any]  # waits for the result of another process: a text if it failed


def verify(
    problem: Problem,
    devices: Sequence[jax.Device],
    *,
    updates: int = 3,
    tolerance: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
    context: Context = ALONE,
) -> Report:
    """Compare a few updates in each configuration on these devices with the oracle's.

    Args:
        tolerance: the largest relative error of a leaf (L2 norm); None: by the dtype that the model
            computes in.
        progress: called with a line of text after each part.
        context: of a job of several processes; `devices` are those of all, and every process gets
            the same report.

    Raises:
        UsageError: too little memory or data, a configuration that needs other devices, or raised
            by the user's code.
    """
    if tolerance is not None and not 0 < tolerance < 1:
        raise UsageError(
            f"tolerance: {tolerance} is not between 0 and 1; to compare bits, use --exact"
        )
    config, count = problem.config, len(devices)
    own = configuration_of(config)
    in_groups = config.parallel.in_groups
    first = clip(own._replace(reduction="exact") if in_groups else own, devices)
    local = [device for device in devices if device.process_index == jax.process_index()]
    with settings(local[0]), contextlib.ExitStack() as processes:
        trial = make_trial(problem, count, updates)
        problem = in_traceable_precision(problem, trial)
        check_memory(problem, trial, local)

        def start(function, **more):
            return processes.enter_context(process(function, config, count, updates, **more))

        elsewhere = narrow = None
        if context.is_root:
            # Another parity, on the other side of usual limits.
            elsewhere = start(
                facts_of_config, devices=1 if jax.device_count() > 1 else 8, elsewhere=True
            )
        oracle = Oracle(problem, trial)
        dtype, random = verify_checks.traits_of(oracle)
        used = config.precision
        least_precise = narrowest([dtype, *filter(None, (used.params, used.compute, used.reduce))])
        if context.is_root and least_precise.itemsize < 4 and not in_groups:
            narrow = start(train_in_own_precision, devices=count)
        limit = tolerance or TOLERANCE[dtype.name]
        report = Report(describe_setting(oracle, devices), f"error (allowed {limit:g})")
        report.checks.append(verify_checks.check_data(problem))
        if dtype != np.float64:
            text = f"the model or the loss computes in {dtype.name}, also from float64 arguments"
            report.checks.append(Check("precision", NOTE, text))
        if not check_parts(report, oracle, random, limit, context, elsewhere):
            report.causes = failures(report)
            return report

        reference = find_reference(
            functools.partial(train, oracle),
            problem.rule,
            oracle.start.params,
            float(jax.numpy.finfo(dtype).eps),
            limit,
        )
        report.reference = reference
        report.checks += reference.notes(limit)
        for check in report.checks:
            progress(f"{check.name}: {check.verdict}")
        most = config.verify.strategies
        chosen = choose_configurations(first, devices)[: most and most + 1]
        run = functools.partial(run_configuration, oracle, reference, devices, limit)
        report.run(run, chosen, progress)
        if narrow is not None:
            report.checks.append(check_own_precision(narrow(), least_precise))
        report.causes = [*failures(report), *find_causes(report, reference, first)]
        report.agreement = find_agreement(report, reference, limit)
        return report


def describe_setting(oracle: Oracle, devices: Sequence[jax.Device]) -> str:
    trial, order = oracle.trial, oracle.problem.parts.order
    parameters = sum(x.size for x in jax.tree.leaves(oracle.start.params))
    return (
        f"{describe(devices)}; {len(trial.batches)} updates of {trial.microbatches * trial.microbatch_size} examples "
        f"in {trial.microbatches} microbatches (a run has {order.batch_size} in {order.microbatches}); float64, no "
        f"loss scaling, a constant learning rate; {parameters:,} parameters"
    )


def find_agreement(report: Report, reference: Reference, tolerance: float) -> str:
    """Return how well the configurations agree, if they do."""
    (error, leaf), (compared, trained) = report.largest, reference.compared
    return (
        f"agree with the oracle{f' at {reference.rate:g} of the peak learning rate' * (reference.rate < 1)}; largest "
        f"relative error {error:.1e}, of {leaf}; allowed {tolerance:g}; {compared} of {trained} trained leaves compared"
        f"{'; the others have no gradient, but for rounding, or do not move' * (compared < trained)}"
    )


def failures(report: Report) -> list[str]:
    """Return what the checks of the parts found."""
    return list(dict.fromkeys(check.text for check in report.checks if check.verdict == FAILED))


def find_causes(report: Report, reference: Reference, own: Configuration) -> list[str]:
    """Return why what was trained is not verified, the most certain cause first. own: the run's
    configuration.
    """
    causes, losses = report.refusal(own), reference.trained.curve["loss"]
    if not np.isfinite(losses).all():
        causes.append(
            f"the loss is not finite: {losses.tolist()} in the first updates; try a smaller optimizer.lr"
        )
    elif reference.unexplained:
        leaves = list_leaves(reference.unexplained)
        causes.append(f"not compared, because rounding alone moves them too far: {leaves}")
    elif not reference.compared[0]:
        causes.append("no parameter was compared that training moves")
    elif not any(r.configuration.devices > 1 for r in report.passed + report.failed):
        causes.append(
            "nothing was compared on several devices; use --devices 2 or more, and 2 microbatches or more"
        )
    for one in report.failed[:1]:
        fault = f"{one.note} differs by {one.value}" if one.value else one.note
        if any(r.configuration.devices == 1 for r in report.passed):
            fault += "; one device agrees: the cause may be what communicates over devices (BatchNorm with sync: true)"
        causes.append(f"{one.configuration.title}: {fault}")
    return causes


def check_parts(
    report: Report,
    oracle: Oracle,
    random: bool,
    tolerance: float,
    context: Context,
    elsewhere: Other | None,
) -> bool:
    """Check the parts alone. Return False if one failed that the others use, on which its fault
    would be blamed.

    elsewhere: the process with other surroundings, which root alone has."""
    checks = report.checks
    others = [verify_checks.check_loss(oracle, tolerance)]  # while the other process computes
    if others[0].verdict != FAILED:
        others.append(verify_checks.check_padding(oracle, random, tolerance))
    if elsewhere is not None:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # as the other process
            facts = find_facts(oracle)
        checks.append(verify_checks.check_same(facts, elsewhere(), min(COARSE, tolerance)))
    if verify_checks.any_failed(context, checks):
        return False
    checks.append(others[0])
    if verify_checks.any_failed(context, checks):
        return False
    checks += others[1:]
    return True
