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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.distributed import context
from jaxdp.user_errors import is_own

COUNTS = "the number of devices or processes, or the rank (as jax.device_count, jax.process_index)"
VARIABLES = "an environment variable of the launcher"
NAMES = "the process id or the host's name"
CLOCKS = "the time"
HASHES = "the hash of a text (another in every process, unless PYTHONHASHSEED is set)"
FACTS = (COUNTS, VARIABLES, NAMES, CLOCKS, HASHES)
# Variables by which launchers number processes and name hosts, and a pattern of others that may.
RANKS = """RANK GROUP_RANK NODE_RANK OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_NODE_RANK PMI_RANK PMIX_RANK SLURM_PROCID
SLURM_NODEID HOROVOD_RANK JAXDP_PROCESS_ID JOB_COMPLETION_INDEX MV2_COMM_WORLD_RANK FLUX_TASK_RANK
PALS_RANKID"""
LOCAL_RANKS = """LOCAL_RANK OMPI_COMM_WORLD_LOCAL_RANK MPI_LOCALRANKID SLURM_LOCALID HOROVOD_LOCAL_RANK JAXDP_LOCAL_RANK
MV2_COMM_WORLD_LOCAL_RANK CUDA_VISIBLE_DEVICES"""
SIZES = """WORLD_SIZE LOCAL_WORLD_SIZE OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE PMI_SIZE MPI_LOCALNRANKS
SLURM_NTASKS SLURM_NPROCS SLURM_STEP_NUM_TASKS SLURM_NNODES SLURM_JOB_NUM_NODES HOROVOD_SIZE JAXDP_NUM_PROCESSES
MV2_COMM_WORLD_SIZE"""
HOST_NAMES = "HOSTNAME HOST SLURMD_NODENAME"
NUMBERED = re.compile(r"RANK|PROC|TASK|NODE|WORKER|INDEX|(^|_)ID$")


class Host(NamedTuple):
    """One process of a job. devices: the number of devices of each process."""

    rank: int
    size: int
    devices: int


HOSTS = (Host(0, 1, 1), Host(1, 2, 1), Host(5, 6, 3))


def fakes(fact: str, host: Host) -> dict[tuple[Any, str], Any]:
    """Return {(module, name): what replaces it} to report a fact as `host` would."""
    total, name, always = host.size * host.devices, f"host{host.rank + 7}", lambda value: lambda *a, **k: value
    if fact == COUNTS:
        everywhere, local = jax.devices, jax.local_devices
        take = lambda devices, first, number: [devices[(first + i) % len(devices)] for i in range(number)]
        return {
            (jax, "device_count"): always(total),
            (jax, "local_device_count"): always(host.devices),
            (jax, "devices"): lambda *a, **k: take(everywhere(*a, **k), 0, total),
            (jax, "local_devices"): lambda *a, **k: take(local(*a, **k), host.rank * host.devices, host.devices),
            (jax, "process_index"): always(host.rank),
            (jax, "process_count"): always(host.size),
            (jax, "process_indices"): always(list(range(host.size))),
            (os, "cpu_count"): always(total + 100),
            (os, "sched_getaffinity"): always(set(range(total + 100))),
        }
    if fact == NAMES:
        number, system = 1_000_003 + 97 * host.rank, os.uname()
        return {
            **{(os, get): always(number) for get in ("getpid", "getppid", "getpgrp", "getsid")},
            (uuid, "getnode"): always(number),
            (os, "uname"): always(os.uname_result((system[0], name, *system[2:]))),
            (platform, "uname"): always(platform.uname()._replace(node=name)),
            **{(socket, get): always(name) for get in ("gethostname", "getfqdn")},
        }
    if fact == CLOCKS:
        return clocks(12_345_678 * (host.rank + 1))
    return {(builtins, "hash"): hash_of(name)} if fact == HASHES else {}


def clocks(seconds: int) -> dict[tuple[Any, str], Any]:
    """Return the replacements for clocks that are fast; what reads `time.time`, such as `date.today`, follows."""

    class Later(datetime.datetime):
        now = classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz))
        utcnow = classmethod(lambda cls: cls.now(datetime.UTC).replace(tzinfo=None))

    names = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    faster = lambda real, by: lambda: real() + by
    now = lambda real: lambda *a: real(*a) if a else real(time.time())
    local, text = time.localtime, time.strftime
    return {
        (datetime, "datetime"): Later,
        **{(time, name): faster(getattr(time, name), seconds) for name in names},
        **{(time, f"{n}_ns"): faster(getattr(time, f"{n}_ns"), seconds * 10**9) for n in names},
        **{(time, name): now(getattr(time, name)) for name in ("gmtime", "localtime", "ctime")},
        (time, "strftime"): lambda format, *when: text(format, *when or [local(time.time())]),
    }


def hash_of(salt: str) -> Any:
    """Return a hash that differs for texts, when the user's code calls it: libraries look up objects by their hash."""
    real = hash

    def has_text(x: Any) -> bool:
        return isinstance(x, str | bytes) or (isinstance(x, tuple | frozenset) and any(map(has_text, x)))

    return lambda x: real((salt, x)) if is_own(sys._getframe(2).f_code.co_filename) and has_text(x) else real(x)


def variables(host: Host) -> dict[str, str]:
    """Return the environment variables that number processes or name hosts."""
    numbered = {k: int(v) for k, v in os.environ.items() if v.isdigit() and NUMBERED.search(k)}
    return {
        **{name: str(value + host.rank + 1) for name, value in numbered.items()},
        **dict.fromkeys(RANKS.split(), str(host.rank)),
        **dict.fromkeys(LOCAL_RANKS.split(), str(host.rank % 2)),
        **dict.fromkeys(SIZES.split(), str(host.size)),
        **dict.fromkeys(HOST_NAMES.split(), f"host{host.rank + 7}"),
    }


@contextlib.contextmanager
def pretend(host: Host, facts: Sequence[str]) -> Iterator[None]:
    """Report these facts as `host` would, to the calling thread, inside this context.

    Functions that a user's modules imported by name are replaced there, too.
    """
    thread, modules = threading.get_ident(), list(user_modules().values())
    replacements = {key: fake for fact in facts for key, fake in fakes(fact, host).items()}

    def in_this_thread(fake: Any, real: Any) -> Any:
        return lambda *a, **k: (fake if threading.get_ident() == thread else real)(*a, **k)

    with contextlib.ExitStack() as stack:
        for (module, name), fake in replacements.items():
            real = getattr(module, name)
            fake = fake if isinstance(fake, type) else in_this_thread(fake, real)
            users = [(user, alias) for user in modules for alias, value in vars(user).items() if value is real]
            for owner, alias in [(module, name), *users]:
                stack.callback(setattr, owner, alias, real)
                setattr(owner, alias, fake)
        if VARIABLES in facts:
            stack.callback(os.environ.update, dict(os.environ))
            for name in (changed := variables(host)).keys() - os.environ.keys():
                stack.callback(os.environ.pop, name, None)
            os.environ.update(changed)
        if COUNTS in facts:
            stack.callback(setattr, context, "_current", context._current)
            hosts = ("",) * host.size
            context._current = context.Context(host.rank, host.size, host.rank % 2, min(host.size, 2), hosts=hosts)
        yield


def user_modules() -> dict[str, Any]:
    """Return the imported modules that belong neither to jaxdp nor to a library."""
    file = lambda module: getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    modules = {name: (module, file(module)) for name, module in list(sys.modules.items())}
    main = ("__main__", "__mp_main__")
    return {name: module for name, (module, path) in modules.items() if path and name not in main and is_own(str(path))}


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
