"""Check what is installed and set: that every package has the versions it asks for (pip's own rule,
for what a run imports), and environment variables whose effect surprises."""

import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jaxdp.doctor.findings import FAILURE, WARNING, Check, failure, ok, warning
from jaxdp.errors import suggest
from jaxdp.process import environment
from jaxdp.run.rundir import PACKAGES, installed

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
OFF = rf"(?!{ON}$).+"
NOT_POSITIVE = r"(?!(\d+\.?\d*|\.\d+)(e-?\d+)?$).+|[0.]+"


class Surprise(NamedTuple):
    """names, values: regular expressions of variables and of values with that effect."""

    names: str
    values: str
    effect: str
    status: str = WARNING
    fix: str = "unset it"


SURPRISES = (
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
    Surprise("JAX_ENABLE_COMPILATION_CACHE", OFF, "compiles everything again at each start"),
    Surprise("OMP_NUM_THREADS|NPROC", r"(?!\d*[1-9]\d*(,|$)).*", "is no number of threads"),
    Surprise("JAXDP_TIMEOUT", NOT_POSITIVE, "is no number of seconds above 0", FAILURE),
)
ON_GPUS = (
    Surprise(
        "JAX_PLATFORMS|JAX_PLATFORM_NAME",
        r"(?!(.*,)?(cuda|gpu)(,|$)).+",
        "keeps JAX off the GPU",
    ),
    Surprise("(CUDA|NVIDIA)_VISIBLE_DEVICES", r"\s*(-1|void|none)?\s*", "hides every GPU", FAILURE),
    Surprise(
        "XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "allocates through the driver, which is slow"
    ),
    Surprise("CUDA_LAUNCH_BLOCKING", ON, "waits for every kernel"),
    Surprise("NCCL_(P2P|IB|SHM)_DISABLE", ON, "turns the fast links between GPUs off"),
    Surprise(
        "LD_LIBRARY_PATH", ".*cuda.*", "loads another CUDA instead of the one that JAX installs"
    ),
)
PROXY = Surprise(
    "(?i:(grpc|https?)_proxy)",
    ".+",
    "is what the job's processes would connect to each other through, or fail to",
    fix="unset it, or name the job's hosts in no_proxy",
)
JAXDP = "jaxdp-trainer"
PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")


def check_settings(size: int = 1, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check variables against the tables of surprises, and those of jaxdp for misspelt names. size:
    the processes of the job, which a proxy may be between.
    """
    rows = list(SURPRISES)
    if environment.gpu_count({}):
        rows += ON_GPUS
    if size > 1 and not {"no_proxy", "NO_PROXY", "no_grpc_proxy"} & set(env):
        rows.append(PROXY)
    found = False
    for name, value in sorted(env.items()):
        for row in rows:
            if re.fullmatch(row.names, name) and re.fullmatch(row.values, value, re.I | re.S):
                found = True
                yield Check("environment", f"{name}={value} {row.effect}", row.fix, row.status)
        if re.match("JAXDP_(?!TEST)", name) and name not in NAMES:
            found = True
            fix = suggest(name, NAMES, 0.7, "unset it")
            yield warning("environment", f"{name} is not a variable of jaxdp", fix)
    if not found:
        flags = env.get("XLA_FLAGS", "")
        yield ok("environment", f"nothing unexpected{f'; XLA_FLAGS={flags}' if flags else ''}")


def check_versions() -> Iterator[Check]:
    """Check every package that jaxdp needs, directly or not, against the bounds of those that need
    it.
    """
    if installed(JAXDP) is None:
        text = "not installed, so its requirements are not known"
        yield warning(JAXDP, text, "pip install -e . in its source tree")
        return
    yield ok("python", platform.python_version())
    wrong = unmet(importlib.metadata.requires(JAXDP) or [])
    for name in dict.fromkeys([*PACKAGES, *wrong]):
        if name in wrong:
            yield failure(name, *wrong[name])
        elif version := installed(name):
            yield ok(name, version)
    yield from check_plugins()


def unmet(requirements: list[str]) -> dict[str, tuple[str, str]]:
    """Return {package: (what is wrong, the fix)} for requirements and, recursively, theirs. Extras
    may be absent.
    """
    wrong: dict[str, tuple[str, str]] = {}
    queue = [("jaxdp", text) for text in requirements]
    seen = set[str]()
    for parent, text in queue:  # which grows
        need = Requirement(text)
        version = installed(need.name)
        extra = "mpi" if parent == "jaxdp" else ""
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        if version is None and "extra" in str(need.marker):
            continue
        if version is None or not need.specifier.contains(version, prereleases=True):
            bounds = need.name + ",".join(sorted(map(str, need.specifier), reverse=True))
            problem = f"{version or 'not installed'}; {parent} needs {bounds}"
            wrong.setdefault(need.name, (problem, f"pip install -U '{bounds}'"))
        if version is not None and need.name not in seen:
            seen.add(need.name)
            queue += [(need.name, other) for other in importlib.metadata.requires(need.name) or []]
    return wrong


def plugins() -> dict[str, tuple[str, str]]:
    """Return {package: (kind, version)} of JAX's GPU plug-ins. kind: cuda12, cuda13, rocm7."""
    found = dict[str, tuple[str, str]]()
    for package in importlib.metadata.distributions():
        name = canonicalize_name(package.metadata["Name"] or "")
        if match := PLUGIN.fullmatch(name):
            found[name] = (match[1], package.version)
    return found


def check_plugins() -> Iterator[Check]:
    """Check JAX's GPU plug-ins: jaxlib ignores one of another release without a message."""
    jaxlib = installed("jaxlib") or "0"
    for name, (kind, version) in plugins().items():
        if Version(version).release[:3] == Version(jaxlib).release[:3]:
            yield ok(name, version)
        else:
            text = f"{version}, but jaxlib is {jaxlib}: JAX would leave the GPU out"
            yield failure(name, text, f"pip install -U 'jax[{kind}]=={installed('jax')}'")


def check_imports() -> Iterator[Check]:
    """Import what a run imports, and check that it is what is installed, not a folder elsewhere on
    the path.
    """
    for name in PACKAGES[:5]:
        package, version = importlib.import_module(name.replace("-", ".")), installed(name)
        imported = getattr(package, "__version__", "0")
        if version is not None and Version(version).public != Version(imported).public:
            text = f"Python imports {name} {imported} from {package.__path__}, not {version}"
            fix = f"see PYTHONPATH and the working directory: {name} is in two folders"
            yield warning("imports", text, fix)
    yield ok("imports", f"{', '.join(PACKAGES[:5])} can be imported")
