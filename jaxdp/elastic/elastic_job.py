"""Train in an elastic job: with the processes that are left when one is lost, and with those that
join.
"""

import contextlib
import functools
import os
import pathlib
import re
import time
from typing import Any

import jax

from jaxdp.config import Config
from jaxdp.elastic.regroup import Options, run_generations
from jaxdp.elastic.snapshots import Snapshots
from jaxdp.errors import PREEMPTED, DistributedError, UsageError
from jaxdp.extras import Train, extras_of
from jaxdp.metrics import safe_print
from jaxdp.process import membership
from jaxdp.process.context import Context
from jaxdp.process.monitor import Agreement, Stopped
from jaxdp.run.build import Prepared, prepare
from jaxdp.run.components import Objects, jax_settings
from jaxdp.run.driver import Continuation

ALL_END = {  # launcher: what it does when one process ends, and the alternative
    "openmpi": "mpirun ends all processes when one is lost; add --enable-recovery",
    "mvapich": "this mpirun ends all processes when one is lost; use jaxdp launch, Open MPI or srun",
    "hydra": "this mpirun ends all processes when one is lost; use jaxdp launch, Open MPI or srun",
    "torchrun": "torchrun restarts all processes when one is lost; use jaxdp launch",
}
# The command line of a parent that is no mpirun of Open MPI, or has an argument that lets the other
# processes continue.
RECOVERS = re.compile(
    r"^(?![^\0]*(mpirun|mpiexec|prterun)\0)|\0(--?(enable-recovery|continuous)|ft_enable)\0|ulfm"
)


def train_in_generations(
    config: Config, train: Train, context: Context, continuation: Continuation
) -> Any:
    """Return what `train` does, with the processes of each generation, one after the other."""
    options = config.elastic
    if context.size < options.min_processes:
        raise UsageError(
            f"elastic.min_processes: {options.min_processes}, but the job has {context.size}; start more of them",
            rank=0,
        )
    if membership.current() is None:
        return train(context, continuation)
    if context.is_root and (problem := launcher_problem(context.launcher)):
        safe_print.say(f"jaxdp: elastic.enabled: {problem}", error=True)
    expels = config.audit.every if config.audit.action == "expel" else None
    snapshots = Snapshots(expels or options.snapshot_every, expels is not None)
    if in_advance:
        snapshots.prepared = in_advance.pop()

    def train_generation(context):
        snapshots.runs = membership.joined().job.generation
        if snapshots.runs:
            wait_for_devices(config, context)
        return train(context, snapshots)

    return run_generations(train_generation, context, snapshots.end_generation)


def options_of(config: Config, objects: Objects) -> Options:
    """Return the argument `group` of `jaxdp.init`. objects: see `make_parts`."""
    options = config.elastic
    group = Options(options.min_processes, options.join_timeout, options.join_after)
    group.prepare = functools.partial(prepare_in_advance, config, objects)
    return group


in_advance: list[Prepared] = []  # at most one, until this process trains


def prepare_in_advance(config: Config, objects: Objects) -> None:
    """Build what does not depend on the devices, while the job trains without this process.

    An error is not reported: building it again will raise it, for all processes to hear.
    """
    with contextlib.suppress(Exception), jax_settings(config):
        jax.devices()  # opened here, so that code of the user cannot join the job
        in_advance[:] = [prepare(config, objects, several=True)]


def wait_for_devices(config: Config, context: Context) -> None:
    """Wait for another process if an extra cannot go on with the devices that are left.

    Raises Stopped if one joins, GenerationEnded if one is lost, DistributedError with code 75 after
    `elastic.join_timeout` seconds."""
    timeout = config.elastic.join_timeout
    text = "; ".join(filter(None, (x.misfit(jax.device_count()) for x in extras_of(config))))
    if not text:
        return
    if context.is_root:
        safe_print.say(f"jaxdp: elastic: {text}; waiting for another process", error=True)
    agreement, deadline = Agreement(context), time.monotonic() + timeout
    membership.joined().connection.send(op="waits")
    while (request := agreement.point()) is None:
        if time.monotonic() > deadline:
            why = f"no process joined (elastic.join_timeout: {timeout:g}); the next start resumes from a checkpoint"
            error = DistributedError(f"{text}, and {why}", rank=0)
            error.code = PREEMPTED
            raise error
        time.sleep(0.2)
    raise Stopped(**request)


def launcher_problem(launcher: str) -> str | None:
    """Return why the launcher will not let the other processes continue, and what to do; None if it
    will, or if that is unknown: Slurm does unless its administrator has set KillOnBadExit."""
    command = ""
    with contextlib.suppress(OSError):
        command = pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_text(
            encoding="utf-8", errors="replace"
        )
    if launcher == "openmpi" and RECOVERS.search(command):
        return None
    return ALL_END.get(launcher)
