"""The verb `verify`: check that every layout reproduces single-device training, and print a report."""

import json
import sys
from typing import Any

import jax

from jaxdp.cli import Call
from jaxdp.config import Config
from jaxdp.errors import user_code
from jaxdp.process.context import SLOW
from jaxdp.process.environment import add_flag
from jaxdp.run.components import set_jax
from jaxdp.verify import exactly, verify, verify_exactly
from jaxdp.verify.problem import ALONE, QUICK_COMPILATION, make_problem


def configure(config: Config | None, options: dict[str, Any]) -> Config | None:
    """Return the config to verify, before JAX opens its devices: in exact mode, if that is asked."""
    return exactly(config) if config is not None and options["exact"] else config


def run(call: Call) -> None:
    """Print the report on root. Exit with code 1 if several devices do not reproduce single-device
    training.
    """
    config = call.config
    options = call.options
    context = call.context or ALONE

    def show(text):
        return print(text, file=sys.stderr, flush=True) if context.is_root else None

    with user_code():
        if options["exact"]:
            report = verify_exactly(config, options["devices"], options["updates"], show)
        else:
            # A verification compiles much and computes little. Processor time with level 1, all and
            # no optimizations: 33, 42 and 27 s for a GPT, 27, 38 and 61 s for a CNN.
            add_flag(QUICK_COMPILATION)
            set_jax(config)
            report = verify(
                make_problem(config, context),
                choose_devices(options["devices"], config.microbatches),
                updates=options["updates"],
                progress=show,
                context=context,
            )
    title = f"{config.model.target}; {config.data.target}; {config.optimizer.target}"
    for part, args in {"model": config.verify.model_args, "data": config.verify.data_args}.items():
        title += f"; {part}.args with {args}" if args else ""
    if context.is_root:
        print(
            json.dumps(report.as_json(title), indent=1)
            if options["json"]
            else report.as_text(title),
            flush=True,
        )
    if not all(context.exchange("verified", "yes" if report.verified else "", SLOW)):
        sys.exit(1)


def choose_devices(number: int, microbatches: int) -> list[jax.Device]:
    """Return this number of real devices, or of simulated ones if there are fewer; at most one per
    microbatch.

    In a job of several processes: all devices of all processes.
    """
    if jax.process_count() > 1:
        return jax.devices()
    wanted = min(number, microbatches)
    devices = jax.devices()
    if len(devices) < wanted and jax.default_backend() != "cpu":
        devices = jax.devices("cpu")
    return devices[:wanted]
