"""The verb `verify`: check that every layout reproduces single-device training, and print a report."""

import functools
import json
import sys
from typing import Any

import jax

from jaxdp import user_errors
from jaxdp.assemble.components import set_jax
from jaxdp.assemble.verification import ALONE, exactly, make_bits, make_problem
from jaxdp.cli import Call
from jaxdp.config import Config
from jaxdp.distributed.context import SLOW, Context
from jaxdp.environment import add_flag
from jaxdp.verify import Problem, as_json, as_text, exact, verify


def run(call: Call) -> None:
    """Print the report on root. Exit with code 1 if several devices do not reproduce single-device training."""
    config, options, context = call.config, call.options, call.context or ALONE
    with user_errors.reported():
        if options["exact"]:
            set_jax(config)
            text, verified = report_exact(config, options, context)
        else:
            # A verification compiles much and computes little. Processor time with level 1, all and no optimizations:
            # 33, 42 and 27 s for a GPT, 27, 38 and 61 s for a CNN.
            add_flag("--xla_backend_optimization_level=1")
            set_jax(config)
            text, verified = report(config, make_problem(config, context), options, context)
    if context.is_root:
        print(text, flush=True)
    if not all(context.exchange("verified", "yes" if verified else "", SLOW)):
        sys.exit(1)


def report_exact(config: Config, options: dict[str, Any], context: Context) -> tuple[str, bool]:
    """Return (a table of configurations and digests, whether all are equal). Rank 0 prints progress to stderr."""
    config = exactly(config)
    make, configurations, batches = make_bits(config, options["devices"], options["updates"])
    result = exact.compare_bits(make, configurations, batches, functools.partial(show, context))
    title = (
        f"{config.model.target}; {config.data.target}; {config.optimizer.target}; {len(batches)} updates of "
        f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    )
    if options["json"]:
        return json.dumps({"title": title, **exact.as_json(result)}, indent=1), result.exact
    return exact.as_text(result, title), result.exact


def show(context: Context, text: str) -> None:
    if context.is_root:
        print(text, file=sys.stderr, flush=True)


def report(config: Config, problem: Problem, options: dict[str, Any], context: Context) -> tuple[str, bool]:
    """Return (the report as text or JSON, whether all layouts agree). Rank 0 prints progress to standard error."""
    result = verify(
        problem,
        choose_devices(options["devices"], config.microbatches),
        updates=options["updates"],
        tolerance=options["tolerance"],
        most=config.verify.strategies,
        progress=functools.partial(show, context),
        context=context,
    )
    title = f"{config.model.target} {result.parameters:,} parameters; {config.data.target}; {config.optimizer.target}"
    smaller = {"model": config.verify.model_args, "data": config.verify.data_args}
    for part, args in smaller.items():
        title += f"; {part}.args with {args}" if args else ""
    if options["json"]:
        return json.dumps({"title": title, **as_json(result), "smaller": smaller}, indent=1), result.verified
    return as_text(result, title), result.verified


def choose_devices(number: int, microbatches: int) -> list[jax.Device]:
    """Return this number of real devices, or of simulated ones if there are fewer; at most one per microbatch.

    In a job of several processes: all devices of all processes.
    """
    if jax.process_count() > 1:
        return jax.devices()
    wanted, devices = min(number, microbatches), jax.devices()
    if len(devices) < wanted and jax.default_backend() != "cpu":
        devices = jax.devices("cpu")
    return devices[:wanted]
