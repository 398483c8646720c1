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
from jaxdp.run.elsewhere import other_count, process
from jaxdp.verify import verify_checks
from jaxdp.verify.compare import Reference, find_reference, list_leaves
from jaxdp.verify.configurations import (
    Configuration,
    choose_configurations,
    clip,
    configuration_of,
)
from jaxdp.verify.facts import COARSE, compute_again, facts_of_config, find_facts
from jaxdp.verify.oracle import Oracle, train
from jaxdp.verify.own_precision import check_own_precision, train_in_own_precision
from jaxdp.verify.problem import (
    ALONE,
    FAILED,
    NOTE,
    TOLERANCE,
    Check,
    Problem,
    check_memory,
    in_traceable_precision,
    make_trial,
    narrowest,
    settings,
)
from jaxdp.verify.trained import run_configuration
from jaxdp.verify.verdict import Report, as_json, as_text, describe

__all__ = ["Configuration", "Problem", "Report", "as_json", "as_text", "settings", "verify"]

NOT_MAPPABLE = (
    "parallel.accumulate: jax.vmap cannot map the model's callback, and a device with several microbatches maps it; "
    "set it to scan, or give the callback a vmap_method"
)
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

        elsewhere = near = narrow = None
        if context.is_root:
            others = other_count(jax.device_count())
            elsewhere = start(facts_of_config, devices=others, elsewhere=True)
            if jax.default_backend() != "cpu":  # compare CPU with CPU
                near = start(facts_of_config, devices=jax.device_count())
        oracle = Oracle(problem, trial)
        traits = verify_checks.traits_of(oracle)
        used = config.precision
        names = [name for name in (used.params, used.compute, used.reduce) if name]
        least_precise = narrowest([traits.dtype, *names])
        if context.is_root and least_precise.itemsize < 4 and not in_groups:
            narrow = start(train_in_own_precision, devices=count)
        limit = tolerance or TOLERANCE[traits.dtype.name]
        report = Report(describe_setting(oracle, devices), f"error (allowed {limit:g})")
        report.checks.append(verify_checks.check_data(problem))
        if traits.dtype != np.float64:
            text = f"the model or the loss computes in {traits.dtype.name}, also from float64 arguments"
            report.checks.append(Check("precision", NOTE, text))
        if not check_parts(report, oracle, traits.random, limit, context, elsewhere, near):
            report.causes = failures(report)
            return report

        epsilon = float(jax.numpy.finfo(traits.dtype).eps)
        train_by = functools.partial(train, oracle)
        reference = find_reference(train_by, problem.rule, oracle.start.params, epsilon, limit)
        report.reference = reference
        report.checks += reference.notes(limit)
        for check in report.checks:
            progress(f"{check.name}: {check.verdict}")
        most = config.verify.strategies
        chosen = choose_configurations(first, devices)[: None if most is None else most + 1]
        if not traits.mappable:
            chosen = list(dict.fromkeys(one._replace(accumulate="scan") for one in chosen))
        run = functools.partial(run_configuration, oracle, reference, devices, limit)
        report.run(run, chosen, progress)
        if narrow is not None:
            report.checks.append(check_own_precision(narrow(), least_precise))
        report.causes = [*failures(report), *find_causes(report, reference, first)]
        if not traits.mappable and first.accumulate == "vmap":
            report.causes.insert(0, NOT_MAPPABLE)
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
            fault += "; one device agrees, so what communicates over devices may be the cause "
            fault += "(a BatchNorm with sync: true)"
        causes.append(f"{one.configuration.title}: {fault}")
    return causes


def check_parts(
    report: Report,
    oracle: Oracle,
    random: bool,
    tolerance: float,
    context: Context,
    elsewhere: Other | None,
    near: Other | None,
) -> bool:
    """Check the parts alone. Return False if one failed that the others use, on which its fault
    would be blamed.

    elsewhere: the process with other surroundings; near: one with the same, if this one computes on
    no CPU."""
    checks, exactness = report.checks, min(COARSE, tolerance)
    facts = find_facts(oracle)
    again = compute_again(oracle, facts)
    checks.append(verify_checks.check_same(facts, again, np.inf if near else exactness))
    if verify_checks.any_failed(context, checks):
        return False
    others = [verify_checks.check_loss(oracle, tolerance)]  # while the other process computes
    if others[0].verdict != FAILED:
        others.append(verify_checks.check_padding(oracle, random, tolerance))
    if elsewhere is not None:
        expected = near() if near else facts
        checks[-1] = verify_checks.check_same(expected, elsewhere(), exactness, elsewhere=True)
    if verify_checks.any_failed(context, checks):
        return False
    checks.append(others[0])
    if verify_checks.any_failed(context, checks):
        return False
    checks += others[1:]
    return True
