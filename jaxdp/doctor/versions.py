"""Check that every installed package has the versions it asks for: pip's own rule, for what a run imports."""

import importlib
import importlib.metadata
import pathlib
import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import jaxdp
from jaxdp.distributed import hosts
from jaxdp.doctor.check import Check, failure, ok, warning

DISTRIBUTION = "jaxdp-trainer"
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py")
OPTIONAL = ("mpi4py",)
IMPORTED = {"jax": "jax", "jaxlib": "jaxlib", "flax": "flax", "optax": "optax", "orbax-checkpoint": "orbax.checkpoint"}
PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")


def check_versions() -> Iterator[Check]:
    """Check Python and every package that jaxdp needs, directly or not, against the bounds of those that need it."""
    requirements, pythons = own_requirements()
    python = platform.python_version()
    if pythons and not Requirement(f"python{pythons}").specifier.contains(python, prereleases=True):
        yield failure("python", f"{python}; jaxdp needs {pythons}", "use another Python for this environment")
    else:
        yield ok("python", python)
    wrong = unmet(requirements)
    for name in dict.fromkeys([*SHOWN, *wrong]):
        version = installed(name)
        if name in wrong:
            yield failure(name, *wrong[name])
        elif version is not None:
            yield ok(name, version)
        elif name not in OPTIONAL:
            yield failure(name, "not installed", f"pip install {name}")
    yield from check_plugins()


def own_requirements() -> tuple[list[str], str | None]:
    """Return (requirements, bounds of Python) of jaxdp, from its source tree if there is one, else as installed."""
    file = pathlib.Path(jaxdp.__file__).parent.parent / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text()).get("project", {})
        if project.get("name") == DISTRIBUTION:
            mpi = [f'{r}; extra == "mpi"' for r in project.get("optional-dependencies", {}).get("mpi", [])]
            return [*project.get("dependencies", []), *mpi], project.get("requires-python")
    meta = importlib.metadata.metadata(DISTRIBUTION)
    return importlib.metadata.requires(DISTRIBUTION) or [], meta["Requires-Python"]


def installed(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: list[str]) -> dict[str, tuple[str, str]]:
    """Return {package: (what is wrong, the fix)} for jaxdp's requirements and, recursively, for theirs.

    A package that only an extra needs may be absent, but must fit if it is installed.
    """
    wrong: dict[str, tuple[str, str]] = {}
    queue, seen = [("jaxdp", text) for text in requirements], set()
    while queue:
        parent, text = queue.pop(0)
        need = Requirement(text)
        name, version = canonicalize_name(need.name), installed(need.name)
        extra = need.marker is not None and "extra" in str(need.marker)
        if need.marker is not None and not need.marker.evaluate({"extra": "mpi" if parent == "jaxdp" else ""}):
            continue
        plain = need.name + ",".join(sorted(map(str, need.specifier), reverse=True))
        if version is None:
            if not extra:
                wrong.setdefault(name, (f"not installed; {parent} needs {plain}", f"pip install '{plain}'"))
            continue
        if not need.specifier.contains(version, prereleases=True):
            wrong.setdefault(name, (f"{version}; {parent} needs {plain}", f"pip install -U '{plain}'"))
        if name not in seen:
            seen.add(name)
            queue += [(need.name, other) for other in importlib.metadata.requires(need.name) or []]
    return wrong


def check_plugins() -> Iterator[Check]:
    """Check JAX's GPU plug-ins: jaxlib ignores one of another release without a message."""
    jaxlib = installed("jaxlib")
    for dist in importlib.metadata.distributions():
        name = canonicalize_name(dist.metadata["Name"] or "")
        kind = PLUGIN.fullmatch(name)
        if kind and jaxlib and Version(dist.version).release[:3] != Version(jaxlib).release[:3]:
            fix = f"pip install -U 'jax[{kind[1]}]=={installed('jax') or jaxlib}'"
            yield failure(name, f"{dist.version}, but jaxlib is {jaxlib}: JAX would leave the GPU out", fix)
        elif kind:
            yield ok(name, dist.version)


def check_imports() -> Iterator[Check]:
    """Import what a run imports, and check that it is what is installed, not a folder elsewhere on the path."""
    for name, module in IMPORTED.items():
        package, version = importlib.import_module(module), installed(name)
        imported = getattr(package, "__version__", None)
        if imported is None:
            text = f"Python imports {package.__file__ or package.__path__}, which is not a release of {name}"
            yield failure("imports", text, "rename that")
        elif version is not None and Version(version).public != Version(imported).public:
            text = f"Python imports {name} {imported}, but {version} is installed"
            yield warning("imports", text, f"see PYTHONPATH and the working directory: {name} is in two places")
    yield ok("imports", f"{', '.join(IMPORTED)} can be imported")


def check_same(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """Check that every rank has the package versions of rank 0."""
    for rank, fact in facts.items():
        for package, version in fact["versions"].items():
            other = facts[0]["versions"].get(package)
            if version != other:
                text = f"{hosts.title(rank, fact['host'])} has {version}, {hosts.title(0, facts[0]['host'])} {other}"
                yield failure(package, text, "use one environment for all ranks")
