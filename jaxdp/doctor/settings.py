"""Check environment variables whose effect surprises: a table of names, values, effects and fixes."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxdp.doctor.findings import FAILURE, WARNING, Check, ok, warning
from jaxdp.errors import suggest
from jaxdp.process import environment

NAMES = [
    "COORDINATOR",
    "NUM_PROCESSES",
    "PROCESS_ID",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "SECRET",
    "TIMEOUT",
]
NAMES += ["BEGAN", "RESTARTS", "SILENCE"]  # which jaxdp sets itself
ON = r"\s*(1|true|t|yes|y|on)\s*"
OFF = rf"(?!{ON}$).+"
RANDOM = "makes random numbers depend on the devices"
NOT_POSITIVE = r"(?!(\d+\.?\d*|\.\d+)(e-?\d+)?$).+|[0.]+"


class Surprise(NamedTuple):
    """names, values: regular expressions of variables and of values with that effect. gpu: only on
    a host with GPUs.
    """

    names: str
    values: str
    effect: str
    status: str = WARNING
    gpu: bool = False


SURPRISES = (
    Surprise(
        "JAX_PLATFORMS|JAX_PLATFORM_NAME",
        r"(?!(.*,)?(cuda|gpu)(,|$)).+",
        "keeps JAX off the GPU",
        gpu=True,
    ),
    Surprise(
        "(CUDA|NVIDIA)_VISIBLE_DEVICES",
        r"\s*(-1|void|none)?\s*",
        "hides every GPU",
        FAILURE,
        gpu=True,
    ),
    Surprise(
        "JAX_ENABLE_X64", ON, "doubles the size of numbers in scripts (a config decides for runs)"
    ),
    Surprise(
        "JAX_DEBUG_(NANS|INFS)",
        ON,
        "waits for every operation, and ends a run that would skip an update",
    ),
    Surprise("JAX_DISABLE_JIT", ON, "compiles nothing: a run takes a hundred times as long"),
    Surprise(
        "JAX_NUMPY_(DTYPE|RANK)_PROMOTION", "strict|raise", "makes libraries fail, such as Optax"
    ),
    Surprise("JAX_THREEFRY_PARTITIONABLE", OFF, RANDOM, FAILURE),
    Surprise("JAX_DEFAULT_PRNG_IMPL", r"(?!threefry2x32$).+", RANDOM, FAILURE),
    Surprise("JAX_ENABLE_COMPILATION_CACHE", OFF, "compiles everything again at each start"),
    Surprise(
        "XLA_PYTHON_CLIENT_ALLOCATOR",
        "platform",
        "allocates through the driver, which is slow",
        gpu=True,
    ),
    Surprise("CUDA_LAUNCH_BLOCKING", ON, "waits for every kernel", gpu=True),
    Surprise("NCCL_(P2P|IB|SHM)_DISABLE", ON, "turns the fast links between GPUs off", gpu=True),
    Surprise("OMP_NUM_THREADS|NPROC", r"(?!\d*[1-9]\d*(,|$)).*", "is no number of threads"),
    Surprise("JAXDP_TIMEOUT", NOT_POSITIVE, "is no number of seconds above 0", FAILURE),
    Surprise(
        "LD_LIBRARY_PATH",
        ".*cuda.*",
        "loads another CUDA instead of the one that JAX installs",
        gpu=True,
    ),
)


def check_settings(size: int = 1, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check variables against SURPRISES, those of jaxdp for misspelt names, and proxies between a
    job's processes.
    """
    gpu, findings = environment.gpu_count({}) > 0, []
    for name, value in sorted(env.items()):
        for row in SURPRISES:
            matches = re.fullmatch(row.names, name) and re.fullmatch(
                row.values, value, re.IGNORECASE | re.DOTALL
            )
            if matches and (gpu or not row.gpu):
                findings.append(
                    Check("environment", f"{name}={value} {row.effect}", "unset it", row.status)
                )
        if (
            name.startswith("JAXDP_")
            and not name.startswith("JAXDP_TEST")
            and name[6:] not in NAMES
        ):
            fix = suggest(name, [f"JAXDP_{known}" for known in NAMES], 0.7, "unset it")
            findings.append(warning("environment", f"{name} is not a variable of jaxdp", fix))
        is_proxy = name.lower() in ("grpc_proxy", "https_proxy", "http_proxy")
        if (
            size > 1
            and is_proxy
            and value
            and not {"no_proxy", "NO_PROXY", "no_grpc_proxy"} & set(env)
        ):
            text = f"{name}={value}: the job's processes would connect to each other through it, or fail to"
            findings.append(
                warning("environment", text, "unset it, or name the job's hosts in no_proxy")
            )
    flags = env.get("XLA_FLAGS", "")
    yield from findings or [
        ok("environment", f"nothing unexpected{f'; XLA_FLAGS={flags}' if flags else ''}")
    ]
