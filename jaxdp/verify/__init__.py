"""Verify that every configuration trains what one device trains, for the user's own model, data and optimizer.

First the parts are traced, here and as on other hosts. Then, in float64, where rounding is small and faults are not:
the loss alone, a few updates by an oracle that shares no code with the step, and the same updates in many
configurations.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxdp.distributed.context import Context
from jaxdp.verify.checks import any_failed, check_loss, check_padding, check_repeat, compare_processes
from jaxdp.verify.compare import find_reference
from jaxdp.verify.configurations import Configuration, check_layout, choose_configurations
from jaxdp.verify.oracle import make_setup, train
from jaxdp.verify.problem import Problem, check_memory, in_traceable_precision, make_trial
from jaxdp.verify.report import Report, as_json, as_text
from jaxdp.verify.static_checks import run_static_checks
from jaxdp.verify.training import run_configuration

__all__ = ["Configuration", "Problem", "Report", "as_json", "as_text", "settings", "verify"]


@contextlib.contextmanager
def settings(device: jax.Device) -> Iterator[None]:
    """Compute in float64 (in the threads of callbacks, too) with exact products, on this device by default."""
    before = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", True)
    try:
        with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.default_device(device):
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
        tolerance: the largest relative error of a leaf (L2 norm); None: by the dtype that the model computes in.
        most: the number of configurations beside one device, the problem's own first.
        progress: called with a line of text after each part.
        context: of a job of several processes; `devices` are those of all, and every process gets the same report.

    Raises:
        UsageError: too little memory or data, a configuration that needs other devices, or raised by the user's code.
    """
    context = context or Context()
    local = [device for device in devices if device.process_index == jax.process_index()]
    with settings(local[0]):
        first = problem.configuration
        first = first._replace(devices=min(first.devices or len(devices), len(devices)))
        check_layout(first, devices)
        trial = make_trial(problem, len(devices), updates)
        problem = in_traceable_precision(dataclasses.replace(problem, configuration=first), trial)
        static = run_static_checks(problem, trial, tolerance)
        tolerance, checks = static.tolerance, static.checks
        report = Report(problem, trial, list(devices), static.parameters, tolerance, checks)
        checks += compare_processes(context, static.digests)
        if any_failed(context, checks):
            return report
        check_memory(problem, trial, local)
        setup = make_setup(problem, trial)
        checks += check_repeat(setup, tolerance) or [check_loss(setup, tolerance)]
        if any_failed(context, checks):
            return report  # whatever is trained with it would be as wrong
        checks.append(check_padding(setup, static.random, tolerance))
        report.reference = reference = find_reference(
            lambda params, rule: train(setup._replace(start=setup.start._replace(params=params)), rule),
            problem.rule,
            setup.start.params,
            static.epsilon,
            tolerance,
        )
        checks += reference.notes(tolerance)
        for check in checks:
            progress(f"{check.name}: {check.verdict}")
        chosen = choose_configurations(first, devices)[: None if most is None else most + 1]
        for i, configuration in enumerate(chosen):
            result = run_configuration(setup, reference, configuration, devices, tolerance)
            report.results.append(result)
            progress(f"{i + 1}/{len(chosen)} {configuration.title}: {result.outcome}, {result.seconds:.1f} s")
        return report
