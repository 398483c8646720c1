"""Check what is installed and set: packages against the versions that jaxdp asks for, JAX's plug-ins
for GPUs, and environment variables whose effect surprises."""

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.version import Version

from jaxdp.doctor.findings import Check, failure, ok, warning
from jaxdp.errors import install, suggest
from jaxdp.process import environment
from jaxdp.run.rundir import installed, versions

# The variables of jaxdp; it sets the last three itself.
NAMES = [
    "JAXDP_COORDINATOR",
    "JAXDP_NUM_PROCESSES",
    "JAXDP_PROCESS_ID",
    "JAXDP_LOCAL_RANK",
    "JAXDP_LOCAL_SIZE",
    "JAXDP_SECRET",
    "JAXDP_TIMEOUT",
    "JAXDP_BEGAN",
    "JAXDP_RESTARTS",
    "JAXDP_SILENCE",
]
ON = r"\s*(1|true|t|yes|y|on)\s*"
# Regular expressions of NAME=VALUE, in any case, and the effect.
SURPRISES = {
    f"JAX_ENABLE_X64={ON}": "doubles the size of numbers in scripts (a config decides for runs)",
    f"JAX_DEBUG_(NANS|INFS)={ON}": (
        "waits for every operation, and ends a run that would skip an update"
    ),
    f"JAX_DISABLE_JIT={ON}": "compiles nothing: a run takes a hundred times as long",
    "JAX_NUMPY_(DTYPE|RANK)_PROMOTION=(strict|raise)": "makes libraries fail, such as Optax",
    f"JAX_ENABLE_COMPILATION_CACHE=(?!{ON}$).+": "compiles everything again at each start",
    r"(OMP_NUM_THREADS|NPROC)=(?!\d*[1-9]\d*(,|$)).*": "is no number of threads",
}
ON_GPUS = {
    "JAX_PLATFORM(S|_NAME)=(?!(.*,)?(cuda|gpu)(,|$)).+": "keeps JAX off the GPU",
    r"(CUDA|NVIDIA)_VISIBLE_DEVICES=\s*(-1|void|none)?\s*": "hides every GPU",
    "XLA_PYTHON_CLIENT_ALLOCATOR=platform": "allocates through the driver, which is slow",
    f"CUDA_LAUNCH_BLOCKING={ON}": "waits for every kernel",
    f"NCCL_(P2P|IB|SHM)_DISABLE={ON}": "turns the fast links between GPUs off",
    "LD_LIBRARY_PATH=.*cuda.*": "loads another CUDA instead of the one that JAX installs",
}
BETWEEN_HOSTS = {
    "(grpc|https?)_proxy=.+": (
        "is what the job's processes would connect to each other through, or fail to, unless "
        "no_proxy names their hosts"
    ),
}
JAXDP = "jaxdp-trainer"
CUDA = ("cuda12", "cuda13")  # the kinds of JAX's plug-ins for NVIDIA GPUs


def check_settings(size: int = 1, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check variables against the tables of surprises, and those of jaxdp for misspelt names. size:
    the processes of the job, which a proxy may be between.
    """
    rows = SURPRISES | (ON_GPUS if environment.gpu_count({}) else {})
    if size > 1 and not {"no_proxy", "NO_PROXY", "no_grpc_proxy"} & set(env):
        rows |= BETWEEN_HOSTS
    findings = []
    for name, value in sorted(env.items()):
        setting = f"{name}={value}"
        for pattern, effect in rows.items():
            if re.fullmatch(pattern, setting, re.IGNORECASE | re.DOTALL):
                findings.append(warning("environment", f"{setting} {effect}", "unset it"))
        if re.match("JAXDP_(?!TEST)", name) and name not in NAMES:
            fix = suggest(name, NAMES, 0.7, "unset it")
            findings.append(warning("environment", f"{name} is not a variable of jaxdp", fix))
    flags = f"; XLA_FLAGS={env['XLA_FLAGS']}" if "XLA_FLAGS" in env else ""
    yield from findings or [ok("environment", f"nothing unexpected{flags}")]


def check_versions() -> Iterator[Check]:
    """Check the packages that jaxdp needs against the bounds of their versions."""
    if installed(JAXDP) is None:
        fix = "pip install -e . in its source tree"
        yield warning(JAXDP, "not installed, so its requirements are not known", fix)
        return
    found = {name: ok(name, version) for name, version in versions().items() if version}
    wrong = {check.name: check for check in unmet(importlib.metadata.requires(JAXDP) or [])}
    yield from (found | wrong).values()


def unmet(requirements: list[str]) -> Iterator[Check]:
    """Yield a failure for each requirement that is not met. Extras may be absent."""
    for need in map(Requirement, requirements):
        version = installed(need.name)
        if need.marker is not None and not need.marker.evaluate({"extra": "mpi"}):
            continue
        if version is None and "extra" in str(need.marker):
            continue
        if version is None or not need.specifier.contains(version, prereleases=True):
            bounds = f"{need.name}{need.specifier}"
            text = f"{version or 'not installed'}; jaxdp needs {bounds}"
            yield failure(need.name, text, f"pip install -U '{bounds}'")


def plugins() -> dict[str, str]:
    """Return {kind: version} of JAX's plug-ins for NVIDIA GPUs."""
    found = {kind: installed(f"jax-{kind}-plugin") for kind in CUDA}
    return {kind: version for kind, version in found.items() if version}


def check_gpus(dev: str = "/dev") -> Iterator[Check]:
    """Check NVIDIA GPUs and JAX's plug-ins, each of which needs the other, and of jaxlib's release:
    it ignores others without a message. Of a driver that is too old, see `open_devices`.
    """
    count, found = environment.gpu_count({}, dev), plugins()
    present, jaxlib = f"{count} NVIDIA GPU{'s' * (count > 1)}", installed("jaxlib") or "0"
    if count and not found:
        text = f"{present}, but JAX has no CUDA plug-in here: it would compute on the CPU"
        yield warning("gpu", text, install("cuda12"))
    elif not found:
        yield ok("gpu", "none, and no plug-in for one")
    for kind, version in found.items():
        name = f"jax-{kind}-plugin"
        if Version(version).release[:3] != Version(jaxlib).release[:3]:
            text = f"{name} is {version}, but jaxlib is {jaxlib}: JAX would leave the GPU out"
            yield failure("gpu", text, f"pip install -U 'jax[{kind}]=={installed('jax')}'")
        elif count:
            yield ok("gpu", f"{present}, {name} {version}")
        else:
            fix = "in a container, pass it on (docker run --gpus all); else install NVIDIA's driver"
            yield warning("gpu", f"{name} is installed, but there is no GPU", fix)
