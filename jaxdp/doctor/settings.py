"""Environment variables that surprise: each row says when one does, what it does then, and what to do about it."""

from __future__ import annotations

import difflib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jaxdp.distributed import gpus
from jaxdp.doctor.check import FAILURE, WARNING, Check, ok

Env = Mapping[str, str]
OWN = (
    "JAXDP_COORDINATOR",
    "JAXDP_NUM_PROCESSES",
    "JAXDP_PROCESS_ID",
    "JAXDP_LOCAL_RANK",
    "JAXDP_LOCAL_SIZE",
    "JAXDP_TIMEOUT",
)


class Surprise(NamedTuple):
    """One of `names` surprises where `when(value, whether the host has GPUs)`; `does` says how."""

    names: tuple[str, ...]
    when: Callable[[str, bool], bool]
    does: str
    status: str = WARNING
    fix: str = "unset it"


def on(value: str, gpu: bool = False) -> bool:
    return value.strip().lower() in ("1", "true", "t", "yes", "y", "on")


def off(value: str, gpu: bool) -> bool:
    return gpu and value.strip().lower() in ("0", "false", "f", "no", "n", "off")


def on_gpu(value: str, gpu: bool) -> bool:
    return gpu and on(value)


def no_interface(value: str, gpu: bool) -> bool:
    """NCCL's list of prefixes of interfaces; ^ before it excludes, = takes them whole."""
    net = pathlib.Path("/sys/class/net")
    if not value or value.startswith("^") or not net.is_dir():
        return False
    there = [p.name for p in net.iterdir()]
    wanted = [name.partition(":")[0] for name in value.lstrip("=").split(",") if name]
    return not any(name == w or (name.startswith(w) and value[0] != "=") for name in there for w in wanted)


def no_seconds(value: str, gpu: bool) -> bool:
    try:
        return not float(value) > 0
    except ValueError:
        return True


SURPRISES = (
    Surprise(
        ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"),
        lambda value, gpu: gpu and value != "" and not {"cuda", "gpu"} & set(value.split(",")),
        "keeps JAX off the GPU that is here",
    ),
    Surprise(
        ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        lambda value, gpu: gpu and value.strip() in ("", "-1", "void", "none"),
        "hides every GPU of this host",
        FAILURE,
    ),
    Surprise(
        ("JAX_ENABLE_X64",), on, "doubles the size of numbers in programs of one's own (a config decides for runs)"
    ),
    Surprise(
        ("JAX_DEBUG_NANS", "JAX_DEBUG_INFS"), on, "waits for every operation, and ends a run that would skip an update"
    ),
    Surprise(("JAX_DISABLE_JIT",), on, "compiles nothing: a run takes a hundred times as long"),
    Surprise(("JAX_NUMPY_DTYPE_PROMOTION",), lambda v, gpu: v == "strict", "makes Optax fail, which mixes types"),
    Surprise(("JAX_NUMPY_RANK_PROMOTION",), lambda v, gpu: v == "raise", "makes libraries fail that broadcast"),
    Surprise(
        ("JAX_THREEFRY_PARTITIONABLE",),
        lambda v, gpu: v != "" and not on(v),
        "makes random numbers depend on the devices",
        FAILURE,
    ),
    Surprise(
        ("JAX_DEFAULT_PRNG_IMPL",),
        lambda v, gpu: v not in ("", "threefry2x32"),
        "makes random numbers depend on the devices",
        FAILURE,
    ),
    Surprise(
        ("JAX_ENABLE_COMPILATION_CACHE",),
        lambda v, gpu: v != "" and not on(v),
        "compiles everything anew at each start",
    ),
    Surprise(
        ("XLA_PYTHON_CLIENT_ALLOCATOR",),
        lambda v, gpu: gpu and v == "platform",
        "asks the driver for memory each time, which is slow",
    ),
    Surprise(("CUDA_LAUNCH_BLOCKING",), on_gpu, "waits for every kernel"),
    Surprise(
        ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"), on_gpu, "takes the fast way between GPUs away"
    ),
    Surprise(
        ("NCCL_DEBUG",), lambda v, gpu: gpu and v.upper() in ("INFO", "TRACE"), "prints much", fix="set it to WARN"
    ),
    Surprise(
        ("NCCL_SOCKET_IFNAME",),
        no_interface,
        "names no network interface of this host",
        FAILURE,
        "set it to one of ip link, or unset it",
    ),
    Surprise(
        ("OMP_NUM_THREADS",), lambda v, gpu: not v.partition(",")[0].isdecimal() or v == "0", "is no number of threads"
    ),
    Surprise(
        ("NPROC",), lambda v, gpu: not v.isdecimal() or v == "0", "is no number of threads, which XLA takes it for"
    ),
    Surprise(
        ("JAXDP_TIMEOUT",), no_seconds, "is no number of seconds above 0", FAILURE, "set it to seconds, such as 60"
    ),
    Surprise(
        ("LD_LIBRARY_PATH",),
        lambda v, gpu: gpu and "cuda" in v.lower(),
        "puts another CUDA before the one that comes with JAX",
    ),
    Surprise(
        ("LD_PRELOAD",),
        lambda v, gpu: any(not os.path.exists(p) for p in v.replace(":", " ").split() if "/" in p),
        "names a file that is not there",
    ),
    Surprise(("TF_CPP_MIN_LOG_LEVEL",), lambda v, gpu: v == "0", "prints much", fix="unset it, or set it to 1"),
)
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def check_settings(size: int = 1, env: Env = os.environ) -> Iterator[Check]:
    """The variables of SURPRISES, those of ours that are spelt wrongly, and proxies between processes of a job."""
    gpu = gpus.count({}) > 0
    found = []
    for surprise in SURPRISES:
        for name in surprise.names:
            if name in env and surprise.when(env[name], gpu):
                found.append(Check("environment", surprise.status, f"{name}={env[name]} {surprise.does}", surprise.fix))
    for name in sorted(env):
        if name.startswith("JAXDP_") and not name.startswith("JAXDP_TEST") and name not in OWN:
            near = difflib.get_close_matches(name, OWN, 1, 0.6)
            fix = f"did you mean {near[0]}?" if near else "unset it"
            found.append(Check("environment", WARNING, f"{name}={env[name]} is read by nothing", fix))
    for name in PROXIES:
        value = env.get(name) or env.get(name.upper())
        if size > 1 and value and not (env.get("no_proxy") or env.get("NO_PROXY") or env.get("no_grpc_proxy")):
            text = f"{name}={value}: processes of a job would talk to each other through it, or not at all"
            found.append(Check("environment", WARNING, text, "unset it, or name the job's hosts in no_proxy"))
    flags = env.get("XLA_FLAGS", "")
    yield from found or [ok("environment", f"nothing that surprises{f'; XLA_FLAGS={flags}' if flags else ''}")]
