"""Versions fit when every package that is installed has what it asks for: pip's own rule, for what a run imports."""

import importlib.metadata
import pathlib
import platform
import re
import tomllib
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import jaxdp
from jaxdp.doctor.check import Check, failure, ok, warning

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "mpi4py")
OPTIONAL = ("mpi4py",)
PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")


def check_versions() -> Iterator[Check]:
    """Python, and every package that jaxdp asks for, or that one of those asks for, against the bounds they give."""
    own, pythons = own_requirements()
    here = platform.python_version()
    if pythons and not Requirement(f"python{pythons}").specifier.contains(here, prereleases=True):
        yield failure("python", f"{here}; jaxdp needs {pythons}", "use another Python for this environment")
    else:
        yield ok("python", here)
    wrong = unmet(own)
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
    """(requirements, bounds of Python) of jaxdp: of the source tree where there is one, else as installed."""
    file = pathlib.Path(jaxdp.__file__).parent.parent / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text()).get("project", {})
        if project.get("name") == "jaxdp":
            extras = project.get("optional-dependencies", {})
            mpi = [f'{r}; extra == "mpi"' for r in extras.get("mpi", [])]
            return [*project.get("dependencies", []), *mpi], project.get("requires-python")
    meta = importlib.metadata.metadata("jaxdp")
    return importlib.metadata.requires("jaxdp") or [], meta["Requires-Python"]


def installed(name: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def unmet(requirements: list[str]) -> dict[str, tuple[str, str]]:
    """{package: (what is wrong, the fix)} for jaxdp's requirements and, from package to package, for theirs.

    What only an extra asks for must fit where it is installed, and may be absent.
    """
    wrong: dict[str, tuple[str, str]] = {}
    left, seen = [("jaxdp", text) for text in requirements], set()
    while left:
        asker, text = left.pop(0)
        need = Requirement(text)
        name, version = canonicalize_name(need.name), installed(need.name)
        extra = need.marker is not None and "extra" in str(need.marker)
        if need.marker is not None and not need.marker.evaluate({"extra": "mpi" if asker == "jaxdp" else ""}):
            continue
        if version is None:
            if not extra and name not in wrong:
                wrong[name] = f"not installed; {asker} needs {plain(need)}", f"pip install '{plain(need)}'"
            continue
        if not need.specifier.contains(version, prereleases=True) and name not in wrong:
            wrong[name] = f"{version}; {asker} needs {plain(need)}", f"pip install -U '{plain(need)}'"
        if name not in seen:
            seen.add(name)
            left += [(need.name, other) for other in importlib.metadata.requires(need.name) or []]
    return wrong


def plain(need: Requirement) -> str:
    return need.name + ",".join(sorted(map(str, need.specifier), reverse=True))


def check_plugins() -> Iterator[Check]:
    """JAX's GPU plug-ins are loaded by exactly one release of jaxlib; of another, the GPU is left out in silence."""
    jaxlib = installed("jaxlib")
    for dist in importlib.metadata.distributions():
        name = canonicalize_name(dist.metadata["Name"] or "")
        kind = PLUGIN.fullmatch(name)
        if kind and jaxlib and Version(dist.version).release[:3] != Version(jaxlib).release[:3]:
            fix = f"pip install -U 'jax[{kind[1]}]=={installed('jax') or jaxlib}'"
            yield failure(name, f"{dist.version}, but jaxlib is {jaxlib}: JAX would leave the GPU out", fix)
        elif kind:
            yield ok(name, dist.version)


def check_imports(versions: dict[str, str]) -> Iterator[Check]:
    """versions: {package: __version__} as imported; one that is not installed is from a folder that is in the way."""
    for name, imported in versions.items():
        there = installed(name)
        if there is not None and Version(there).public != Version(imported).public:
            found = f"{imported} is what Python imports, but {there} is installed"
            yield warning(name, found, f"see PYTHONPATH and the working directory: {name} is found twice")
