"""Pretend to be another host: replace what a host tells a program about itself (rank, devices, names, ids, clocks)."""

import builtins
import contextlib
import datetime
import os
import platform
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.distributed import context
from jaxdp.user_errors import is_own

# Variables by which launchers number processes: Open MPI, MPICH, MVAPICH, Slurm, torchrun, Horovod, Kubernetes, jaxdp.
RANKS = """
RANK GROUP_RANK NODE_RANK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_NODE_RANK PMI_RANK PMIX_RANK MV2_COMM_WORLD_RANK
SLURM_PROCID SLURM_NODEID HOROVOD_RANK JAXDP_PROCESS_ID JOB_COMPLETION_INDEX FLUX_TASK_RANK PALS_RANKID
"""
LOCAL_RANKS = """
LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID MV2_COMM_WORLD_LOCAL_RANK SLURM_LOCALID HOROVOD_LOCAL_RANK
CUDA_VISIBLE_DEVICES
"""
SIZES = """
WORLD_SIZE LOCAL_WORLD_SIZE OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE PMI_SIZE MPI_LOCALNRANKS
MV2_COMM_WORLD_SIZE SLURM_NTASKS SLURM_NPROCS SLURM_STEP_NUM_TASKS SLURM_NNODES SLURM_JOB_NUM_NODES HOROVOD_SIZE
JAXDP_NUM_PROCESSES
"""
NAMES = "HOSTNAME HOST SLURMD_NODENAME"
NUMBERED = re.compile(r"RANK|PROC|TASK|NODE|WORKER|INDEX|(^|_)ID$")  # other variables that may number processes
Fakes = dict[tuple[Any, str], Any]  # (module, name) -> what replaces it


class Host(NamedTuple):
    """One process of a job. devices: the number of devices of each process."""

    rank: int
    size: int
    devices: int

    @property
    def name(self) -> str:
        return f"host{self.rank + 7}"


HOSTS = (Host(0, 1, 1), Host(1, 2, 1), Host(5, 6, 3))


def counts(host: Host) -> Fakes:
    total, number = host.size * host.devices, host.devices
    all_devices, local_devices = jax.devices, jax.local_devices
    take = lambda devices, first, n: [devices[(first + i) % len(devices)] for i in range(n)]
    return {
        (jax, "device_count"): lambda *a, **k: total,
        (jax, "local_device_count"): lambda *a, **k: number,
        (jax, "devices"): lambda *a, **k: take(all_devices(*a, **k), 0, total),
        (jax, "local_devices"): lambda *a, **k: take(local_devices(*a, **k), host.rank * number, number),
        (jax, "process_index"): lambda *a, **k: host.rank,
        (jax, "process_count"): lambda *a, **k: host.size,
        (jax, "process_indices"): lambda *a, **k: list(range(host.size)),
        (os, "cpu_count"): lambda: total + 100,
        (os, "sched_getaffinity"): lambda *a: set(range(total + 100)),
    }


def ids(host: Host) -> Fakes:
    system, node = os.uname(), platform.uname()._replace(node=host.name)
    number = 1_000_003 + 97 * host.rank
    return {
        **{(os, name): lambda *a: number for name in ("getpid", "getppid", "getpgrp", "getsid")},
        (uuid, "getnode"): lambda: number,
        (os, "uname"): lambda: os.uname_result((system[0], host.name, *system[2:])),
        (platform, "uname"): lambda: node,
        **{(module, name): lambda *a: host.name for module, name in (
            (socket, "gethostname"), (socket, "getfqdn"), (platform, "node")
        )},
    }  # fmt: skip


def hashes(host: Host) -> Fakes:
    real = hash

    def has_text(x: Any) -> bool:
        return isinstance(x, str | bytes) or (isinstance(x, tuple | frozenset) and any(map(has_text, x)))

    def fake(x: Any) -> int:
        user = is_own(sys._getframe(2).f_code.co_filename)  # libraries look up objects by their hash
        return real((host.rank + 7, x)) if user and has_text(x) else real(x)

    return {(builtins, "hash"): fake}


def clocks(host: Host) -> Fakes:
    seconds = 12_345_678.9 * (host.rank + 1)
    fakes: Fakes = {}

    def shift(name: str, by: float) -> None:
        real = getattr(time, name)
        fakes[time, name] = lambda: real() + by

    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        shift(name, seconds)
        shift(f"{name}_ns", int(seconds * 1e9))
    now, local, strftime = time.time() + seconds, time.localtime, time.strftime
    default = lambda real: lambda s=None: real(now if s is None else s)
    fakes |= {(time, name): default(getattr(time, name)) for name in ("gmtime", "localtime", "ctime")}
    fakes[time, "strftime"] = lambda text, t=None: strftime(text, local(now) if t is None else t)
    moment, day = datetime.datetime, datetime.date

    class Later(moment):  # type: ignore[valid-type,misc]
        now = classmethod(lambda cls, tz=None: moment.fromtimestamp(time.time(), tz))
        utcnow = classmethod(lambda cls: moment.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None))
        today = classmethod(lambda cls: moment.fromtimestamp(time.time()))

    class Day(day):  # type: ignore[valid-type,misc]
        today = classmethod(lambda cls: day.fromtimestamp(time.time()))

    return {**fakes, (datetime, "datetime"): Later, (datetime, "date"): Day}


def variables(host: Host) -> dict[str, str]:
    """Return the environment variables that number processes or name hosts."""
    numbered = {k: v for k, v in os.environ.items() if v.isdigit() and NUMBERED.search(k)}
    return {
        **{name: str(int(value) + host.rank + 1) for name, value in numbered.items()},
        **dict.fromkeys(RANKS.split(), str(host.rank)),
        **dict.fromkeys(LOCAL_RANKS.split(), str(host.rank % 2)),
        **dict.fromkeys(SIZES.split(), str(host.size)),
        **dict.fromkeys(NAMES.split(), host.name),
    }


FUNCTIONS: dict[str, Callable[[Host], Fakes]] = {
    "the number of devices or processes, or the rank (as jax.device_count, jax.process_index)": counts,
    "the process id or the host's name": ids,
    "the time": clocks,
    "the hash of a text (another in every process, unless PYTHONHASHSEED is set)": hashes,
}
VARIABLES = "an environment variable of the launcher"
FACTS = (next(iter(FUNCTIONS)), VARIABLES, *list(FUNCTIONS)[1:])


@contextlib.contextmanager
def pretend(host: Host, facts: Sequence[str] = FACTS) -> Iterator[None]:
    """Report these facts as `host` would, to the calling thread, inside this context.

    Functions that a user's modules imported by name are replaced there, too.
    """
    thread, before, environment = threading.get_ident(), context._current, dict(os.environ)
    fakes: Fakes = {}
    for fact in facts:
        fakes |= FUNCTIONS[fact](host) if fact in FUNCTIONS else {}
    originals = {id(getattr(*key)): key for key in fakes}
    fakes = {key: for_thread(thread, fake, getattr(*key)) for key, fake in fakes.items()}
    names: list[tuple[Any, str, Any]] = [(vars(module), name, fakes[module, name]) for module, name in fakes]
    for module in user_modules().values():
        imported = [(name, id(value)) for name, value in vars(module).items() if id(value) in originals]
        names += [(vars(module), name, fakes[originals[number]]) for name, number in imported]
    real = [namespace[name] for namespace, name, _ in names]
    try:
        for namespace, name, fake in names:
            namespace[name] = fake
        if VARIABLES in facts:
            os.environ.update(variables(host))
        if FACTS[0] in facts:
            hosts = ("",) * host.size
            context._current = context.Context(host.rank, host.size, host.rank % 2, min(host.size, 2), hosts=hosts)
        yield
    finally:
        for (namespace, name, _), value in zip(names, real, strict=True):
            namespace[name] = value
        context._current = before
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update(environment)


def for_thread(thread: int, fake: Any, real: Any) -> Any:
    """Return a function that calls `fake` in this thread alone; a class as it is."""
    if isinstance(fake, type):
        return fake
    return lambda *a, **k: (fake if threading.get_ident() == thread else real)(*a, **k)


def user_modules() -> dict[str, Any]:
    """Return the imported modules that belong neither to jaxdp nor to a library."""
    modules = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or next(iter(map(str, getattr(module, "__path__", ()))), None)
        if file and name not in ("__main__", "__mp_main__") and is_own(str(file)):
            modules[name] = module
    return modules


@contextlib.contextmanager
def fresh_modules() -> Iterator[None]:
    """Import a user's modules again inside this context."""
    before = user_modules()
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in user_modules():
            del sys.modules[name]
        sys.modules.update(before)
