"""The command line: `jaxdp VERB --config FILE [--key value ...]`. JAX is imported only after the
config is checked.
"""

import atexit
import contextlib
import faulthandler
import gc
import os
import re
import sys
import traceback
from typing import Any, NamedTuple, NoReturn

from jaxdp import __version__
from jaxdp.api import end_start, join, set_environment
from jaxdp.cli.option_table import REMOVED, VERBS
from jaxdp.cli.parse import help_of, load, parse
from jaxdp.config import Config
from jaxdp.errors import (
    INTERRUPTED,
    PREEMPTED,
    DistributedError,
    ReportedError,
    UsageError,
    explained,
    suggest,
)
from jaxdp.extras import load_extra
from jaxdp.metrics import safe_print
from jaxdp.process import environment, launchers, signals

__all__ = [
    "PREEMPTED",
    "VERBS",
    "Call",
    "help_of",
    "load",
    "main",
    "set_environment",
]
# Objects created between two garbage collections. With Python's 700, collections took 12 % of a
# start.
BETWEEN_COLLECTIONS = 100_000
USAGE = """usage: jaxdp VERB [--config FILE] [--key value ...]

{verbs}

{examples}

`jaxdp VERB --help` shows examples and the options of a verb, and `jaxdp train --help` every key of a config, with its
default. `python train.py` is `jaxdp train`.
"""


class Call(NamedTuple):
    """The arguments of a verb. config, path: None for verbs without a config. context: only for
    verbs in a job.
    """

    config: Any = None
    path: str | None = None
    options: dict[str, Any] = {}
    context: Any = None


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 2 bad usage or config, 75 preempted and saved, 130
    interrupted, 1 otherwise.
    """
    argv = sys.argv[1:] if argv is None else argv
    with contextlib.suppress(OSError, RuntimeError):  # no stderr
        faulthandler.enable()  # a signal that kills the process, such as SIGBUS, shows where
    gc.set_threshold(BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])
    atexit.register(safe_print.drain)
    safe_print.escape()
    name, *words = argv or ["--help"]
    if name in ("-h", "--help"):
        print(usage(), end="")
        sys.exit(0 if argv else 2)
    if name == "--version":
        print(__version__)
        sys.exit(0)
    if name not in VERBS:
        near = suggest(name, VERBS, otherwise=f"known: {', '.join(VERBS)}")
        _refuse(UsageError(f"unknown verb {name!r}; {REMOVED.get(name, near)}"))
    try:
        if name in ("launch", "sweep"):  # until they send signals on to what they start
            signals.end_at_once(PREEMPTED)
        if name != "train":  # `train` saves its state on a signal
            signals.deliver()
        run(name, words)
    except ReportedError as error:
        _refuse(error)
    except SystemExit as error:
        _exit_alone(error)
    except KeyboardInterrupt:
        _refuse(DistributedError("interrupted by Ctrl-C (SIGINT)"), INTERRUPTED)
    except BaseException as error:
        # The reader has closed the pipe, as `head` does. Those that train have others, of a job.
        if isinstance(error, BrokenPipeError) and name not in ("train", "eval"):
            sys.exit(0)
        if (known := explained(error)) is not None:
            _refuse(known)
        # With this rank, and the job ends: the other ranks would wait for this one.
        if (context := _context()) is not None:
            context.crash(error)
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def usage() -> str:
    verbs = "\n".join(f"  {name:10} {verb.does}" for name, verb in VERBS.items())
    examples = "\n".join(
        f"  {line}" for verb in VERBS.values() for line in verb.examples[: verb.featured]
    )
    return USAGE.format(verbs=verbs, examples=examples)


def run(name: str, argv: list[str]) -> None:
    where = VERBS[name].where
    if where == "host":
        options, _ = parse(argv, name)
        if name not in ("doctor", "launch"):
            environment.use_cpu()  # a training job may use all memory of the GPU
        _module(name).run(Call(options=options))
    elif where == "runs":
        _module(name).run(Call(options={"argv": argv}))
    elif where == "alone" and not (name == "verify" and launchers.discover().size > 1):
        run_alone(name, argv)
    else:
        run_in_job(name, argv)


def run_alone(name: str, argv: list[str]) -> None:
    """Run a verb in one process, on simulated devices if there are no real ones."""
    config, path, options = load(argv, name)
    if name in ("plan", "summary"):  # they run nothing
        environment.use_cpu()
    if name == "plan":  # the devices need not exist: compile for CPU, without optimization
        options["devices"] = _module(name).devices_of(options)
        flags = re.sub(
            r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", "")
        )
        quick = "" if options["target"] else "--xla_backend_optimization_level=0"
        os.environ["XLA_FLAGS"] = f"{flags} {quick}".strip()
    environment.simulate(options.get("devices") or 1)
    verb = _module(name)
    config = verb.configure(config, options) if name == "verify" else config
    set_environment(config, name == "verify")
    verb.run(Call(config, path, options))


def run_in_job(name: str, argv: list[str]) -> None:
    """Join the job, if there are several processes, and run a verb in all of them."""
    config: Config | None = None
    path = None
    error = None
    options = dict[str, Any]()
    if name == "train":
        signals.listen(end_start)
    try:
        config, path, options = load(argv, name)
        if name == "verify":
            config = _module(name).configure(config, options)
    except UsageError as problem:
        if launchers.discover().size == 1:
            raise
        # The other ranks may have a valid config: `agree` sends them this error.
        error = str(problem)
    verb = _module(name)  # before the job is joined: its other processes may wait for what follows
    set_environment(config)
    gc.freeze()  # modules stay alive: to scan them takes 0.1 s, in each generation too
    context = join(config, error=error)
    signals.act()
    from jaxdp.process.context import leave
    from jaxdp.process.monitor import Stopped

    try:
        verb.run(Call(config, path, options, context))
    except Stopped:
        leave(PREEMPTED, speaker=0)
    except SystemExit as ended:
        if name != "verify" or context.size == 1:
            raise
        leave(int(str(ended)), speaker=0)


def _module(name: str) -> Any:
    return load_extra(VERBS[name].module or f"cli.{name}", f"jaxdp {name}")


def _context() -> Any:
    """Return the module `jaxdp.process.context`; None if it was not imported, and so no job was
    joined.
    """
    return sys.modules.get("jaxdp.process.context")


def _refuse(error: ReportedError, code: int | None = None) -> NoReturn:
    """Print the error on its rank and exit with `code`, or with 2 for bad input and 1 for any other
    failure.
    """
    context = _context()
    if context is not None and not context.alone():
        context.fail(error, code)
    print(f"jaxdp: {error}", file=sys.stderr, flush=True)
    sys.exit(code or (2 if isinstance(error, UsageError) else 1))


def _exit_alone(error: SystemExit) -> NoReturn:
    """End the job after the user's code called sys.exit on this rank: the others would wait for it."""
    context = _context()
    if context is not None and not context.alone():
        code = error.code if isinstance(error.code, int) and error.code else 1
        context.fail(
            DistributedError(f"rank {context.process().rank} called sys.exit({error.code!r})"), code
        )
    raise error
