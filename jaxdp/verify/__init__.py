"""Verify that every configuration trains what one device trains, for the user's own model, data and
optimizer.

In float64, where rounding is small and faults are not: first the parts alone, then a few updates by
an oracle that shares no code with the step, and the same updates in many configurations.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.process.context import Context
from jaxdp.verify import verify_checks
from jaxdp.verify.compare import Reference, find_reference, list_leaves
from jaxdp.verify.configurations import Configuration, choose_configurations, clip
from jaxdp.verify.facts import COARSE, find_facts
from jaxdp.verify.oracle import Setup, make_setup, train
from jaxdp.verify.problem import (
    FAILED,
    NOTE,
    Check,
    Problem,
    check_memory,
    in_traceable_precision,
    make_trial,
)
from jaxdp.verify.trained import run_configuration
from jaxdp.verify.verdict import Report, as_json, as_text, describe

__all__ = ["Configuration", "Problem", "Report", "as_json", "as_text", "settings", "verify"]

NOT_MAPPABLE = (
    "parallel.accumulate: jax.vmap cannot map the model's callback, and a device with several microbatches maps it; "
    "set it to scan, or give the callback a vmap_method"
)


@contextlib.contextmanager
def settings(device: jax.Device) -> Iterator[None]:
    """Compute in float64 (in the threads of callbacks, too) with exact products, on this device by
    default.
    """
    before = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", True)
    try:
        with (
            jax.enable_x64(True),
            jax.default_matmul_precision("highest"),
            jax.default_device(device),
        ):
            yield
    finally:
        jax.config.update("jax_enable_x64", before)


def verify(
    problem: Problem,
    devices: Sequence[jax.Device],
    *,
    updates: int = 3,
    tolerance: float | None = None,
    most: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    context: Context | None = None,
) -> Report:
    """Compare a few updates in each configuration on these devices with the oracle's.

    Args:
        tolerance: the largest relative error of a leaf (L2 norm); None: by the dtype that the model
            computes in.
        most: the number of configurations beside one device, the problem's own first.
        progress: called with a line of text after each part.
        context: of a job of several processes; `devices` are those of all, and every process gets
            the same report.

    Raises:
        UsageError: too little memory or data, a configuration that needs other devices, or raised
            by the user's code.
    """
    context = context or Context()
    if tolerance is not None and not 0 < tolerance < 1:
        raise UsageError(
            f"tolerance: {tolerance} is not between 0 and 1; to compare bits, use --exact"
        )
    local = [device for device in devices if device.process_index == jax.process_index()]
    with settings(local[0]), contextlib.ExitStack() as others:
        first = clip(problem.configuration, devices)
        trial = make_trial(problem, len(devices), updates)
        problem = in_traceable_precision(dataclasses.replace(problem, configuration=first), trial)
        check_memory(problem, trial, local)

        def start(make, *args):
            return others.enter_context(make(len(devices), updates, *args)) if make else None

        elsewhere = start(problem.elsewhere, True) if context.is_root else None
        on_cpu = jax.default_backend() == "cpu"
        near = elsewhere and (
            None if on_cpu else start(problem.elsewhere, False)
        )  # compare CPU with CPU
        setup = make_setup(problem, trial)
        (dtype, random), mappable = verify_checks.traits_of(setup), verify_checks.is_mappable(setup)
        narrowest = max(dtype, problem.narrowest, key=lambda x: float(jax.numpy.finfo(x).eps))
        own = start(problem.own_precision) if context.is_root and narrowest.itemsize < 4 else None
        limit = tolerance or verify_checks.TOLERANCE[dtype.name]
        report = Report(
            describe_setting(setup, devices),
            f"error (allowed {limit:g})",
            [verify_checks.check_data(problem)],
        )
        if dtype != np.float64:
            text = f"the model or the loss computes in {dtype.name}, also from float64 arguments"
            report.checks.append(Check("precision", NOTE, text))
        if not check_parts(report, setup, random, limit, context, elsewhere, near):
            report.causes = failures(report)
            return report
        report.reference = reference = find_reference(
            lambda params, rule: train(
                setup._replace(start=setup.start._replace(params=params)), rule
            ),
            problem.rule,
            setup.start.params,
            float(jax.numpy.finfo(dtype).eps),
            limit,
        )
        report.checks += reference.notes(limit)
        for check in report.checks:
            progress(f"{check.name}: {check.verdict}")
        chosen = choose_configurations(first, devices)[: None if most is None else most + 1]
        if not mappable:
            chosen = list(dict.fromkeys(one._replace(accumulate="scan") for one in chosen))

        def run(configuration):
            return run_configuration(setup, reference, configuration, devices, limit)

        report.run(run, chosen, progress)
        if own is not None:
            report.checks.append(verify_checks.check_own_precision(own(), narrowest))
        report.causes = [*failures(report), *find_causes(report, reference, first)]
        if not mappable and first.accumulate == "vmap":
            report.causes.insert(0, NOT_MAPPABLE)
        report.agreement = find_agreement(report, reference, limit)
        return report


def describe_setting(setup: Setup, devices: Sequence[jax.Device]) -> str:
    trial, order = setup.trial, setup.problem.order
    parameters = sum(x.size for x in jax.tree.leaves(setup.start.params))
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
    setup: Setup,
    random: bool,
    tolerance: float,
    context: Context,
    elsewhere: Callable[[], Any] | None,
    near: Callable[[], Any] | None,
) -> bool:
    """Check the parts alone. Return False if one failed that the others use, on which its fault
    would be blamed.

    elsewhere: the process with other surroundings; near: one with the same, if this one computes on
    no CPU."""
    facts, exactness = find_facts(setup), min(COARSE, tolerance)
    report.checks.append(verify_checks.check_repeat(setup, math.inf if near else exactness, facts))
    if verify_checks.any_failed(context, report.checks):
        return False
    others = [verify_checks.check_loss(setup, tolerance)]  # while the other process computes
    if others[0].verdict != FAILED:
        others.append(verify_checks.check_padding(setup, random, tolerance))
    if elsewhere is not None:
        report.checks[-1] = verify_checks.check_elsewhere(
            near() if near else facts, elsewhere(), exactness
        )
    if verify_checks.any_failed(context, report.checks):
        return False
    report.checks += others[:1]
    if verify_checks.any_failed(context, report.checks):
        return False
    report.checks += others[1:]
    return True
