"""The verb `verify`: from a config to a report."""

import json
import sys
from typing import Any

from jaxdp.build.bits import exactly, make_bits
from jaxdp.config import Config
from jaxdp.environment import add_flag
from jaxdp.verify import Subject, as_json, as_text, bits, choose_devices, verify
from jaxdp.verify.bits import verify_bits


def compile_quickly() -> None:
    """Few of the compiler's own optimizations, unless XLA_FLAGS says how many; before JAX compiles anything.

    A verification compiles much and computes little: a GPT took 33 s of processor time so, 42 with all, 27 with none; a
    CNN 27, 38 and 61.
    """
    add_flag("--xla_backend_optimization_level=1")


def report_exact(config: Config, options: dict[str, Any]) -> tuple[str, bool]:
    """(every way to train with its digest, whether they are one)."""
    config = exactly(config)
    make, most, batches = make_bits(config, options["devices"], options["updates"])
    found = verify_bits(make, most, batches, lambda text: print(text, file=sys.stderr, flush=True))
    title = (
        f"{config.model.target}; {config.data.target}; {config.optimizer.target}; {len(batches)} updates of "
        f"{config.batch_size} examples in {config.microbatches} microbatches, the last one the last of an epoch"
    )
    if options["json"]:
        return json.dumps({"title": title, **bits.as_json(found)}, indent=1), found.exact
    return bits.as_text(found, title, sys.stdout.isatty()), found.exact


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
