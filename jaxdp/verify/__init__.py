"""Verify that every configuration trains what one device trains, for the user's own model, data and
optimizer.

In float64, where rounding is small and faults are not: first the parts alone, then a few updates by
an oracle that shares no code with the step, and the same updates in many configurations.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.process.context import SLOW, Context
from jaxdp.run.components import jax_settings
from jaxdp.run.elsewhere import elsewhere
from jaxdp.verify.compare import FAILED, NOTE, Check, Report, describe
from jaxdp.verify.oracle import Oracle, Reference, find_reference, train
from jaxdp.verify.problem import (
    ALONE,
    TOLERANCE,
    Problem,
    check_memory,
    choose_configurations,
    in_traceable_precision,
    make_trial,
    own_configuration,
    settings,
)
from jaxdp.verify.trained import check_own_precision, run_configuration, train_in_own_precision
from jaxdp.verify.verify_checks import (
    COARSE,
    check_data,
    check_loss,
    check_padding,
    check_same,
    facts_of_config,
    find_facts,
    narrowest,
    traits_of,
)


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
    own = own_configuration(config, problem.parts, devices)
    in_groups = config.parallel.in_groups
    if in_groups:
        own = own._replace(reduction="exact")
    local = [device for device in devices if device.process_index == jax.process_index()]
    with settings(local[0]), contextlib.ExitStack() as processes:
        trial = make_trial(problem, count, updates)
        traceable = in_traceable_precision(problem, trial)
        check_memory(traceable, trial, local)
        if context.is_root:
            # Another parity, on the other side of usual limits.
            others = 1 if jax.device_count() > 1 else 8
            again = processes.enter_context(
                elsewhere(facts_of_config, config, count, updates, devices=others)
            )
        oracle = Oracle(traceable, trial)
        dtype, random = traits_of(oracle)
        limit = tolerance or TOLERANCE[dtype.name]
        report = Report(describe_setting(oracle, devices), f"error (allowed {limit:g})", own)
        checks, loss = [check_data(problem)], check_loss(oracle, limit)
        padding = check_padding(oracle, random, limit)
        if context.is_root:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):  # as the other process
                facts = find_facts(oracle)
            checks.append(check_same(facts, again(), min(COARSE, limit)))
        report.checks = on_all_ranks(context, [*checks, loss])
        if report.causes:
            return report
        report.checks.append(padding)
        if dtype != np.float64:
            text = f"the model or the loss computes in {dtype.name}, also from float64 arguments"
            report.checks.append(Check("precision", NOTE, text))

        report.reference = reference = find_reference(
            functools.partial(train, oracle),
            traceable.rule,
            oracle.params,
            float(jax.numpy.finfo(dtype).eps),
            limit,
        )
        report.checks += reference.checks
        for check in report.checks:
            progress(f"{check.name}: {check.verdict}")
        most = config.verify.strategies
        chosen = choose_configurations(own, devices)[: most and most + 1]
        report.run(
            functools.partial(run_configuration, oracle, reference, devices), chosen, progress
        )
        used = config.precision
        least_precise = narrowest([dtype, *filter(None, (used.params, used.compute, used.reduce))])
        if least_precise.itemsize < 4 and not in_groups:
            with jax_settings(config):
                curves = train_in_own_precision(problem, own, devices, updates)
            report.checks.append(check_own_precision(curves, least_precise))
        report.agreement = find_agreement(report, reference)
        return report


def describe_setting(oracle: Oracle, devices: Sequence[jax.Device]) -> str:
    used, order = oracle.trial.order, oracle.problem.parts.order
    parameters = sum(x.size for x in jax.tree.leaves(oracle.params))
    return (
        f"{describe(devices)}; {len(oracle.trial.batches)} updates of {used.batch_size} examples in "
        f"{used.microbatches} microbatches (a run has {order.batch_size} in {order.microbatches}); float64, no "
        f"loss scaling, a constant learning rate; {parameters:,} parameters"
    )


def find_agreement(report: Report, reference: Reference) -> str:
    """Return how well the configurations agree, if they do."""
    (error, leaf), (compared, trained) = report.largest, reference.compared
    return (
        f"agree with the oracle{f' at {reference.rate:g} of the peak learning rate' * (reference.rate < 1)}; largest "
        f"relative error {error:.1e}, of {leaf}; allowed {reference.tolerance:g}; {compared} of {trained} trained "
        f"leaves compared{'; the others have no gradient, but for rounding, or do not move' * (compared < trained)}"
    )


def on_all_ranks(context: Context, checks: list[Check]) -> list[Check]:
    """Return the checks up to the first that failed here, on which its fault would be blamed, or
    failed on another rank."""
    failed = [i for i, check in enumerate(checks) if check.verdict == FAILED]
    text = checks[failed[0]].text if failed else ""
    others = enumerate(context.exchange("verify", text, SLOW))
    return checks[: failed[0] + 1 if failed else None] + [
        Check("ranks", FAILED, f"{context.title(rank)}: {other}")
        for rank, other in others
        if other not in ("", text)
    ]
