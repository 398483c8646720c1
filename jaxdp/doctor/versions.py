"""Check that every installed package has the versions it asks for: pip's own rule, for what a run
imports.
"""

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from jaxdp.doctor.findings import Check, failure, ok, warning
from jaxdp.run.rundir import PACKAGES, installed

JAXDP = "jaxdp-trainer"
PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")


def check_versions() -> Iterator[Check]:
    """Check every package that jaxdp needs, directly or not, against the bounds of those that need
    it.
    """
    if installed(JAXDP) is None:
        yield warning(
            JAXDP,
            "not installed, so its requirements are not known",
            "pip install -e . in its source tree",
        )
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
    queue, seen = [("jaxdp", text) for text in requirements], set()
    for parent, text in queue:  # which grows
        need = Requirement(text)
        version, extra = installed(need.name), "mpi" if parent == "jaxdp" else ""
        plain = need.name + ",".join(sorted(map(str, need.specifier), reverse=True))
        if need.marker is not None and not need.marker.evaluate({"extra": extra}):
            continue
        if version is None and "extra" in str(need.marker):
            continue
        if version is None or not need.specifier.contains(version, prereleases=True):
            text = f"{version or 'not installed'}; {parent} needs {plain}"
            wrong.setdefault(need.name, (text, f"pip install -U '{plain}'"))
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
            fix = f"pip install -U 'jax[{kind}]=={installed('jax') or jaxlib}'"
            yield failure(
                name, f"{version}, but jaxlib is {jaxlib}: JAX would leave the GPU out", fix
            )


def check_imports() -> Iterator[Check]:
    """Import what a run imports, and check that it is what is installed, not a folder elsewhere on
    the path.
    """
    for name in PACKAGES[:5]:
        package, version = importlib.import_module(name.replace("-", ".")), installed(name)
        imported = getattr(package, "__version__", "0")
        if version is not None and Version(version).public != Version(imported).public:
            text = f"Python imports {name} {imported} from {package.__file__ or package.__path__}, not {version}"
            yield warning(
                "imports",
                text,
                f"see PYTHONPATH and the working directory: {name} is in two folders",
            )
    yield ok("imports", f"{', '.join(PACKAGES[:5])} can be imported")
