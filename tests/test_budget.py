"""The size of the package: what a newcomer has to read. A number here only falls, or a change says why it rises."""

import ast
import pathlib

import jaxdp

ROOT = pathlib.Path(jaxdp.__file__).parent
BUDGET = {"package": 27_200, "file": 300, "function": 60, "one update": 700}  # lines
ONE_UPDATE = ("core/step.py", "parallel/strategy.py", "parallel/pjit.py", "training/loop.py")
LONG_FILES = {"config/__init__.py": 398, "checkpoint/store.py": 323}
LONG_FUNCTIONS = {
    "models/equinox.py from_equinox": 72,
    "models/gpt.py __init__": 62,
    "config/check.py check": 61,
}


def lines():
    files = {f.relative_to(ROOT).as_posix(): f.read_text() for f in ROOT.rglob("*.py")}
    assert len(files) > 100
    return {name: len(text.splitlines()) for name, text in files.items()}


def test_the_package_and_its_files_stay_small():
    sizes = lines()
    assert sum(sizes.values()) <= BUDGET["package"]
    assert sum(sizes[name] for name in ONE_UPDATE) <= BUDGET["one update"]
    assert not {name: n for name, n in sizes.items() if n > LONG_FILES.get(name, BUDGET["file"])}
    assert all(sizes[name] > BUDGET["file"] for name in LONG_FILES)  # an exception ends with its cause


def test_functions_stay_short():
    longest = {}
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                name = f"{file.relative_to(ROOT).as_posix()} {node.name}"
                longest[name] = max(longest.get(name, 0), node.end_lineno - node.lineno + 1)
    assert len(longest) > 1000
    assert not {name: n for name, n in longest.items() if n > LONG_FUNCTIONS.get(name, BUDGET["function"])}
    assert all(longest[name] > BUDGET["function"] for name in LONG_FUNCTIONS)
