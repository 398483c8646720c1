"""Detect the launcher, the rank and the number of processes from environment variables alone.

`World` checks what they say.
"""

from __future__ import annotations

import operator
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import SupportsIndex

from jaxdp.errors import UsageError

Env = Mapping[str, str]
MPI = ("openmpi", "mvapich", "hydra")  # launchers whose ranks agree on rank 0's address over MPI


@dataclass(frozen=True)
class World:
    """The rank of this process and the size of its job.

    local_rank, local_size: rank and number of the processes on this host; None if the launcher does
    not set them. coordinator: "host:port" of rank 0; None if the processes agree on it in another
    way (MPI)."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    launcher: str = "none"
    coordinator: str | None = None

    @property
    def speaker(self) -> int:
        """Return the rank that prints what is wrong on this host: that of its first process."""
        return self.rank - (self.local_rank or 0)


def integer(env: Env, name: str, least: int = 0) -> int:
    try:
        number = int(env[name])
    except ValueError:
        raise UsageError(
            f"{name}={env[name]!r} is not a whole number: set it to one, or unset it"
        ) from None
    if number < least:
        raise UsageError(
            f"{name}={number} is less than {least}: set it to {least} or more, or unset it"
        )
    return number


def optional(env: Env, name: str | None, least: int = 0) -> int | None:
    return integer(env, name, least) if name and env.get(name) else None


def partners(env: Env, launcher: str, names: tuple[str, ...]) -> None:
    missing = [n for n in names if not env.get(n)]
    if missing:
        present = ", ".join(f"{n}={env[n]}" for n in names if env.get(n))
        raise UsageError(
            f"{', '.join(missing)} is not set, but {present} is ({launcher}): set all of them, or none"
        )


def within(rank: int, rank_name: str, size: int, size_name: str) -> None:
    if rank >= size:
        raise UsageError(
            f"{rank_name}={rank}, but {size_name}={size}: ranks run from 0 to {size - 1}"
        )


def address(text: str, name: str) -> str:
    """Return `text` ("host:port", "tcp://host:port", "[v6]:port") as "host:port". Raises UsageError
    naming `name`.
    """
    plain = str(text).removeprefix("tcp://").rstrip("/")
    host, _, port = plain.rpartition(":")
    v6 = host.startswith("[") and host.endswith("]")
    if not host or "/" in plain or (":" in host and not v6):
        raise UsageError(
            f"{name}={text!r} has no port: write it as host:port, such as 10.0.0.1:12355"
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{name}={text!r}: the port {port!r} is not a number from 1 to 65535")
    return plain


@dataclass(frozen=True)
class Variables:
    """A launcher that sets one variable for each value."""

    name: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    also: tuple[str, ...] = ()
    coordinator: Callable[[Env], str | None] = lambda env: None
    unless: Callable[[Env], bool] = lambda env: False

    def detect(self, env: Env) -> World | None:
        if self.unless(env):
            return None
        partners(env, self.name, (self.rank, self.size, *self.also))
        rank = integer(env, self.rank)
        size = integer(env, self.size, 1)
        within(rank, self.rank, size, self.size)
        local_rank = optional(env, self.local_rank)
        local_size = optional(env, self.local_size, 1)
        if local_rank is not None and local_size is not None:
            within(local_rank, str(self.local_rank), local_size, str(self.local_size))
        return World(rank, size, local_rank, local_size, self.name, self.coordinator(env))


def seconds_of(variable: str, default: float, value: float | None = None) -> float:
    """Return `value`, else the environment variable's, else the default. Raises UsageError if it is
    not above 0.

    Infinity becomes 30 years, since JAX counts in whole seconds.
    """
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text if value is None else value)
        if not seconds > 0:
            raise ValueError
    except (ValueError, TypeError):
        source = f"{variable}={text!r}" if value is None else f"timeout={value!r}"
        raise UsageError(f"{source} is not a number of seconds above 0") from None
    return min(seconds, 1e9)


# The variables of which any identifies a launcher, and its detection.
Launcher = tuple[tuple[str, ...], Callable[[Env], World | None]]
PORT = 12355  # of pod 0, in Kubernetes


def _under_srun(env: Env) -> bool:
    """Return whether srun --mpi=pmi2 set PMI_RANK; there is no mpirun then, and Slurm is the
    launcher.
    """
    return "MPI_LOCALRANKID" not in env and env.get("SLURM_STEP_NUM_TASKS") == env.get("PMI_SIZE")


def _torchrun(env: Env) -> str:
    """Return the coordinator under torchrun. Its agent's store may occupy MASTER_PORT; then use the
    next port.
    """
    port = integer(env, "MASTER_PORT", 1) + (env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    host = env["MASTER_ADDR"]
    return address(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "MASTER_ADDR:MASTER_PORT"
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: node003 of `node[003-007,9],login`, r1n3 of
    `r[1-2]n[3,4]`.
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if not first or nodelist.count("[") != nodelist.count("]"):
        raise UsageError(
            f"SLURM_STEP_NODELIST={nodelist!r} is not a node list such as node[003-007,9]"
        )
    return re.sub(r"\[([^,\]-]*)[^\]]*\]", r"\1", first[0])


def tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's tasks per node: [2, 2, 2, 1] for `2(x3),1`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slurm(env: Env) -> World:
    """Detect `srun`: only inside a job step, since a batch script alone is one process regardless
    of --ntasks.
    """
    partners(env, "slurm", ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"))
    rank = integer(env, "SLURM_PROCID")
    size = integer(env, "SLURM_STEP_NUM_TASKS", 1)
    within(rank, "SLURM_PROCID", size, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return World(rank, size, 0, 1, "slurm")
    partners(env, "slurm", ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"))
    local_size = None
    if env.get("SLURM_STEP_TASKS_PER_NODE") and env.get("SLURM_NODEID"):
        counts = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
        node = integer(env, "SLURM_NODEID")
        within(
            node, "SLURM_NODEID", len(counts), "the number of nodes in SLURM_STEP_TASKS_PER_NODE"
        )
        local_size = counts[node]
    # Ports above 61000 are not handed out to outgoing connections; two steps of a job get different
    # ones.
    port = 61440 + (integer(env, "SLURM_JOB_ID") * 8 + (optional(env, "SLURM_STEP_ID") or 0)) % 4096
    host = first_host(env["SLURM_STEP_NODELIST"])
    return World(rank, size, optional(env, "SLURM_LOCALID"), local_size, "slurm", f"{host}:{port}")


def kubernetes(env: Env) -> World | None:
    """Detect an Indexed Job, or a Job of a JobSet, of JAXDP_NUM_PROCESSES pods: pod i is <job>-<i>,
    pod 0 is rank 0.
    """
    if not env.get("JAXDP_NUM_PROCESSES"):
        return None
    rank = integer(env, "JOB_COMPLETION_INDEX")
    size = integer(env, "JAXDP_NUM_PROCESSES", 1)
    within(rank, "JOB_COMPLETION_INDEX", size, "JAXDP_NUM_PROCESSES")
    if size == 1 or env.get("JAXDP_COORDINATOR"):
        return World(rank, size, launcher="kubernetes")
    pod, _, rest = (env.get("HOSTNAME") or socket.getfqdn()).partition(".")
    full, _, domain = socket.getfqdn().partition(".")
    job, _, index = pod.rpartition("-")
    if not job or index != str(rank):
        raise UsageError(
            f"the pod's host name {pod!r} is not <job>-{rank}, so pod 0's cannot be derived: "
            f"set JAXDP_COORDINATOR to host:port of the pod with JOB_COMPLETION_INDEX 0"
        )
    subdomain = rest or (domain if full == pod else "")
    host = f"{job}-0.{subdomain}" if subdomain else f"{job}-0"
    return World(rank, size, launcher="kubernetes", coordinator=f"{host}:{PORT}")


def tpu(env: Env) -> World | None:
    """Detect a host of a Cloud TPU slice, in GKE or on TPU VMs, or of several slices (Multislice).

    Their variables name all hosts of a slice. A process per host has all of its devices.
    """
    if " " in env.get("TPU_WORKER_HOSTNAMES", " "):  # a message of libtpu, which finds no TPU
        return None
    partners(env, "tpu", ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"))
    names = env["TPU_WORKER_HOSTNAMES"].split(",")
    worker = integer(env, "TPU_WORKER_ID")
    within(worker, "TPU_WORKER_ID", len(names), "the number of names in TPU_WORKER_HOSTNAMES")
    if (slices := optional(env, "MEGASCALE_NUM_SLICES", 1) or 1) == 1:
        return World(worker, len(names), 0, 1, "tpu", f"{names[0].partition(':')[0]}:{PORT}")
    partners(env, "tpu", ("MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"))
    number = integer(env, "MEGASCALE_SLICE_ID")
    within(number, "MEGASCALE_SLICE_ID", slices, "MEGASCALE_NUM_SLICES")
    host = env["MEGASCALE_COORDINATOR_ADDRESS"].partition(":")[0]
    rank, size = number * len(names) + worker, slices * len(names)
    return World(rank, size, 0, 1, "tpu", f"{host}:{PORT}")


TORCHRUN = Variables(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    also=("MASTER_ADDR", "MASTER_PORT"),
    coordinator=_torchrun,
    # Some clusters export MASTER_ADDR, RANK or WORLD_SIZE for every process: one of them alone
    # proves nothing.
    unless=lambda env: (
        sum(bool(env.get(n)) for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")) < 2
    ),
)


def by_its(variables: Variables) -> Launcher:
    """Return a launcher that is identified by its variables for the rank and the size."""
    return (variables.rank, variables.size), variables.detect


# In order of precedence, innermost first: if mpirun or torchrun's agent runs inside a Slurm step,
# it started this process, and the step's variables describe something else.
LAUNCHERS = (
    by_its(
        Variables(
            "jaxdp",
            "JAXDP_PROCESS_ID",
            "JAXDP_NUM_PROCESSES",
            "JAXDP_LOCAL_RANK",
            "JAXDP_LOCAL_SIZE",
            unless=lambda env: (
                bool(env.get("JOB_COMPLETION_INDEX")) and not env.get("JAXDP_PROCESS_ID")
            ),
        )
    ),
    (("TORCHELASTIC_RUN_ID",), TORCHRUN.detect),
    by_its(
        Variables(
            "openmpi",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    ),
    by_its(
        Variables(  # MVAPICH 2; later ones are Hydra's
            "mvapich",
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        )
    ),
    by_its(
        Variables(
            "hydra",
            "PMI_RANK",
            "PMI_SIZE",
            "MPI_LOCALRANKID",
            "MPI_LOCALNRANKS",
            unless=_under_srun,
        )
    ),
    (("SLURM_STEP_NUM_TASKS",), slurm),
    by_its(TORCHRUN),
    (("JOB_COMPLETION_INDEX",), kubernetes),
    (("TPU_WORKER_HOSTNAMES",), tpu),
)


def detected(env: Env, launchers: Iterable[Launcher]) -> World | None:
    """Return the world of the first of these launchers that started this process, or None."""
    for variables, detect in launchers:
        if any(map(env.get, variables)) and (world := detect(env)) is not None:
            return world
    return None


def _explicit(rank: int | None, size: int | None) -> World:
    if rank is None or size is None:
        raise UsageError(f"init(rank={rank}, size={size}): give both, or neither")
    if not 0 <= rank < size:
        raise UsageError(f"init(rank={rank}, size={size}): ranks run from 0 to size - 1")
    return World(rank, size, launcher="explicit")


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError(
            f"init({name}={value!r}): not a whole number; give one, such as int({value!r})"
        )
    return operator.index(value)


def _by_method(
    method: object, env: Env, world: World | None, explicit: str | None
) -> tuple[World | None, str | None]:
    """Return the world and rank 0's address after an `init_method`; world, explicit: before it."""
    if method == "env://":
        if world is not None and env.get("MASTER_ADDR"):
            partners(env, "env://", ("MASTER_ADDR", "MASTER_PORT"))
            explicit = explicit or _torchrun(env)
        world = world or detected(env, [by_its(TORCHRUN)])
        if world is None:
            raise UsageError(
                "init_method='env://', but RANK and WORLD_SIZE are not set: start it with torchrun"
            )
        return world, explicit
    if isinstance(method, str) and method.startswith("tcp://"):
        return world, explicit or address(method, "init_method")
    raise UsageError(f"init_method={method!r} is neither 'tcp://host:port' nor 'env://'")


def discover(
    env: Env | None = None,
    *,
    coordinator: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    init_method: str | None = None,
) -> World:
    """Return this process's World: from the arguments, else from the first launcher detected, else
    a single process.

    coordinator, init_method="tcp://host:port", JAXDP_COORDINATOR: address of rank 0, overriding the
    launcher's. init_method="env://": use torchrun's variables and no others. Raises UsageError on
    malformed or partial variables."""
    env = os.environ if env is None else env
    explicit = coordinator and address(coordinator, "coordinator")
    arguments = {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size}
    numbers = {name: _whole(name, x) for name, x in arguments.items() if x is not None}
    world = None
    if "rank" in numbers or "size" in numbers:
        world = _explicit(numbers.get("rank"), numbers.get("size"))
    if init_method is not None:
        world, explicit = _by_method(init_method, env, world, explicit)
    if env.get("JAXDP_COORDINATOR") and not explicit:
        explicit = address(env["JAXDP_COORDINATOR"], "JAXDP_COORDINATOR")
    world = world or detected(env, LAUNCHERS)
    if world is None and explicit:
        raise UsageError(
            f"the coordinator is {explicit}, but the rank of this process is not set: "
            "set JAXDP_PROCESS_ID and JAXDP_NUM_PROCESSES, or use mpirun, srun or torchrun"
        )
    world = world or World(0, 1)
    if world.size > 1 and not (explicit or world.coordinator or world.launcher in MPI):
        fix = "init(coordinator=...)" if world.launcher == "explicit" else "JAXDP_COORDINATOR"
        raise UsageError(
            f"{world.size} processes ({world.launcher}) need rank 0's address: set {fix} to its host:port"
        )
    most = numbers.get("local_size", world.size)
    if not 0 < most <= world.size or not 0 <= numbers.get("local_rank", 0) < most:
        text = f"init(local_rank={local_rank}, local_size={local_size})"
        raise UsageError(
            f"{text}: local ranks run from 0 to local_size - 1, and local_size to the {world.size} processes"
        )
    return replace(
        world,
        coordinator=explicit or world.coordinator,
        local_rank=numbers.get("local_rank", world.local_rank),
        local_size=numbers.get("local_size", world.local_size),
    )
