"""Train in an elastic job: with the processes that are left when one is lost, and with those that
join.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import threading
import time

import jax

from jaxdp.config import Config
from jaxdp.config.validation import decides, flatten
from jaxdp.elastic.regroup import Options
from jaxdp.errors import PREEMPTED, DistributedError
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import read
from jaxdp.metrics.writer import Newest, Record
from jaxdp.process import membership
from jaxdp.process.context import Context
from jaxdp.process.monitor import Stopped
from jaxdp.run.build import Prepared, prepare
from jaxdp.run.components import NOTHING, Objects, jax_settings

ALL_END = {  # launcher: what it does when one process ends, and the alternative
    "openmpi": "mpirun ends all processes when one is lost; add --enable-recovery",
    "mvapich": "this mpirun ends all processes when one is lost; use jaxdp launch, Open MPI or srun",
    "hydra": "this mpirun ends all processes when one is lost; use jaxdp launch, Open MPI or srun",
    "torchrun": "torchrun restarts all processes when one is lost; use jaxdp launch",
}
RECOVERS = re.compile(
    r"^--?(enable-recovery|continuous)$|^ft_enable$|ulfm"
)  # arguments of Open MPI's mpirun


def settings(config: Config | None, objects: Objects = NOTHING) -> Options | None:
    """Return the argument `elastic` of `jaxdp.init`; None if it is off. objects: see `make_parts`."""
    if config is None or not config.elastic.enabled:
        return None
    alike = {
        k: v for k, v in flatten(config).items() if decides(k) == "numbers" or k.startswith("eval.")
    }
    text = json.dumps({**alike, "run_dir": config.run_dir}, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    options, build = config.elastic, functools.partial(prepare_in_advance, config, objects)
    return Options(options.min_processes, options.join_timeout, options.join_after, digest, build)


in_advance: list[Prepared] = []  # at most one, until this process trains


def prepare_in_advance(config: Config, objects: Objects) -> None:
    """Build what does not depend on the devices, while the job trains without this process.

    An error is not reported: building it again will raise it, for all processes to hear.
    """
    with contextlib.suppress(Exception), jax_settings(config):
        jax.devices()  # opened here, so that code of the user cannot join the job
        in_advance[:] = [prepare(config, objects, several=True)]


def wait_for_devices(replicas: int, context: Context, timeout: float) -> None:
    """Wait for another process if the devices that are left cannot share `replicas` replicas
    (`outer`).

    Raises Stopped if one joins, GenerationEnded if one is lost, DistributedError with code 75 after
    `timeout` seconds."""
    devices = jax.device_count()
    if not replicas % devices or not devices % replicas:
        return
    text = f"outer.replicas: {replicas} cannot be split over the {devices} devices that are left"
    if context.is_root:
        safe_print.say(f"jaxdp: elastic: {text}; waiting for another process", error=True)
    member, joins, deadline = membership.joined(), threading.Event(), time.monotonic() + timeout
    member.on("join", lambda rank, name: joins.set())
    member.announce("waiting", "")
    while not joins.wait(0.2):
        member.check_generation()
        if time.monotonic() > deadline:
            why = f"no process joined (elastic.join_timeout: {timeout:g}); the next start resumes from a checkpoint"
            error = DistributedError(f"{text}, and {why}", rank=0)
            error.code = PREEMPTED
            raise error
    raise Stopped("regroup", "another process joins")


def missing_records(newest: Newest, context: Context, file: pathlib.Path) -> list[Record]:
    """Return the newest records of the process that has most of those that are not in root's file.

    An update that a lost process has interrupted may have succeeded in some processes, and failed
    on root."""

    def key(record):
        return [record.get("step"), record.get("split")]

    written = context.of_root("written records", lambda: [*map(key, read(file, math.inf))])
    missing = [record for record in newest.records if key(record) not in written]
    texts = context.exchange("missing records", json.dumps(missing))
    return json.loads(max(texts, key=len))


def report_lost_updates(directory: pathlib.Path, start: int) -> None:
    """Print that updates are made again, from a checkpoint or from the first one, if no process has
    their state.
    """
    reached = max(
        (record.get("step", 0) for record in read(directory / "metrics.jsonl", math.inf)), default=0
    )
    if reached > start:
        origin = (
            f"its checkpoint of update {start}"
            if start
            else "the first update: it has no checkpoint"
        )
        text = (
            f"jaxdp: elastic: no process has the state after update {reached} any more: the job "
            f"continues from {origin}"
        )
        safe_print.say(text, error=True)


def launcher_problem(launcher: str) -> str | None:
    """Return why the launcher will not let the other processes continue, and what to do; None if it
    will, or if that is unknown: Slurm does unless its administrator has set KillOnBadExit."""
    if launcher == "openmpi":
        try:
            name, *arguments = (
                pathlib.Path(f"/proc/{os.getppid()}/cmdline")
                .read_text(encoding="utf-8", errors="replace")
                .split("\0")
            )
        except OSError:
            return None
        if not name.endswith(("mpirun", "mpiexec", "prterun")) or any(
            map(RECOVERS.search, arguments)
        ):
            return None
    return ALL_END.get(launcher)
