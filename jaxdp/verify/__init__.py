"""Verify that every configuration trains what one device trains, for the user's own model, data and
optimizer.

In float64, where rounding is small and faults are not: first the parts alone, then a few updates by
an oracle that shares no code with the step, and the same updates in many configurations.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.process.context import SLOW, Context
from jaxdp.run.components import jax_settings
from jaxdp.verify.compare import FAILED, NOTE, Check, Report, describe, no_progress
from jaxdp.verify.oracle import Oracle, find_reference, train
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
from jaxdp.verify.trained import check_own_precision, with_oracle
from jaxdp.verify.verify_checks import check_parts, narrowest, traits_of


def verify(
    problem: Problem,
    devices: Sequence[jax.Device],
    *,
    updates: int = 3,
    tolerance: float | None = None,
    progress: Callable[[str], None] = no_progress,
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
    config, in_groups = problem.config, problem.config.parallel.in_groups
    own = own_configuration(config, problem.parts, devices)
    if in_groups:
        own = own._replace(reduction="exact")
    local = [device for device in devices if device.process_index == jax.process_index()]
    with settings(local[0]):
        trial = make_trial(problem, len(devices), updates)
        traceable = in_traceable_precision(problem, trial)
        check_memory(traceable, trial, local)
        oracle = Oracle(traceable, trial)
        dtype, random = traits_of(oracle)
        limit = tolerance or TOLERANCE[dtype.name]
        report = Report(describe_setting(oracle, devices, limit), own)
        # The programs and the data of all ranks are the same already.
        checks = context.of_root(
            "verify", lambda: check_parts(oracle, len(devices), random, limit), SLOW
        )
        report.checks += [Check(*check) for check in checks]
        if {check.name for check in report.checks if check.verdict == FAILED} - {"padding"}:
            return report
        if dtype != np.float64:
            text = f"the model or the loss computes in {dtype.name}, also from float64 arguments"
            report.checks.append(Check("precision", NOTE, text))

        report.reference = reference = find_reference(
            functools.partial(train, oracle),
            traceable.rule,
            oracle.first.params,
            float(jax.numpy.finfo(dtype).eps),
            limit,
        )
        report.checks += reference.checks
        for check in report.checks:
            progress(f"{check.name}: {check.verdict}")
        most = config.verify.strategies
        chosen = choose_configurations(own, devices)[: most and most + 1]
        report.run(with_oracle(oracle, reference, devices), chosen, progress)
        used = config.precision
        narrow = narrowest([dtype, *filter(None, (used.params, used.compute, used.reduce))])
        if narrow.itemsize < 4 and not in_groups:
            with jax_settings(config):
                check = check_own_precision(problem, own, devices, updates, narrow)
            report.checks.append(check)
        report.agreement = find_agreement(report)
        return report


def describe_setting(oracle: Oracle, devices: Sequence[jax.Device], limit: float) -> str:
    used, order = oracle.trial.order, oracle.problem.parts.order
    parameters = sum(x.size for x in jax.tree.leaves(oracle.first.params))
    return (
        f"{describe(devices)}; {len(oracle.trial.batches)} updates of {used.batch_size} examples in "
        f"{used.microbatches} microbatches (a run has {order.batch_size} in {order.microbatches}); float64, no "
        f"loss scaling, a constant learning rate; {parameters:,} parameters; allowed error {limit:g}"
    )


def find_agreement(report: Report) -> str:
    """Return how well the configurations agree, if they do."""
    reference, largest = report.reference, report.largest
    compared, trained = reference.compared
    return (
        f"agree with the oracle{f' at {reference.rate:g} of the peak learning rate' * (reference.rate < 1)}; largest "
        f"relative error {largest.error:.1e}, of {largest.text}; allowed {reference.tolerance:g}; {compared} of "
        f"{trained} trained leaves compared"
        f"{'; the others have no gradient, but for rounding, or do not move' * (compared < trained)}"
    )
