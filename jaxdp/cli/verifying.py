"""The verb `verify`: from a config to a report."""

import json
import sys
from typing import Any

from jaxdp.config import Config
from jaxdp.environment import add_flag
from jaxdp.verify import Subject, as_json, as_text, choose_devices, verify


def compile_quickly() -> None:
    """Few of the compiler's own optimizations, unless XLA_FLAGS says how many; before JAX compiles anything.

    A verification compiles much and computes little: a GPT took 33 s of processor time so, 42 with all, 27 with none; a
    CNN 27, 38 and 61.
    """
    add_flag("--xla_backend_optimization_level=1")


def report(config: Config, subject: Subject, options: dict[str, Any]) -> tuple[str, bool]:
    """(the report as text or JSON, whether all is as it should be); progress goes to standard error."""
    found = verify(
        subject,
        choose_devices(options["devices"], config.microbatches),
        updates=options["updates"],
        tolerance=options["tolerance"],
        most=config.verify.strategies,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    title = f"{config.model.target} {found.parameters:,} parameters; {config.data.target}; {config.optimizer.target}"
    smaller = {"model": config.verify.model_args, "data": config.verify.data_args}
    for part, args in smaller.items():
        title += f"; {part}.args with {args}" if args else ""
    if options["json"]:
        return json.dumps({"title": title, **as_json(found), "smaller": smaller}, indent=1), found.verified
    return as_text(found, title, sys.stdout.isatty()), found.verified
