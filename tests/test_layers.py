"""Imports point one way, the config stops at build.py, and the command line starts without jax."""

import ast
import pathlib
import subprocess
import sys

import jaxdp

ROOT = pathlib.Path(jaxdp.__file__).parent
# Each may import what stands in rows above its own (and the leaves each other).
LAYERS = [
    {
        "errors",
        "own_code",
        "axes",
        "environment",
        "config",
        "precision",
        "losses",
        "optim",
        "profile",
        "targets",
        "rundir",
        "digest",
        "manifest",
        "guard",
        "inplace",
        "watch",
        "signals",
        "compilation_cache",
        "ahead",
        "xla_presets",
    }
    | {"transfer", "safetensors_file", "logits", "generate", "trace", "report"}
    | {"models", "data", "metrics", "distributed", "split", "hlo", "hardware", "flops"},
    {"step"},
    {"parallel"},
    {"checkpoint", "own_loop"},
    {"weights", "begin", "footprint"},
    {"loop", "plan", "verify", "doctor", "untraced"},
    {"build"},
    {"cli"},
    {"script"},
    {"__main__", "__init__"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def imports(file):
    """The jaxdp modules that a file imports, anywhere in it, by their first name inside the package."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "jaxdp":
            names = [f"jaxdp.{a.name}" for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [node.module]
        else:
            continue
        yield from (n.split(".")[1] for n in names if n and n.startswith("jaxdp."))


def files():
    return {f: f.relative_to(ROOT).parts[0].removesuffix(".py") for f in ROOT.rglob("*.py")}


def test_imports_point_one_way():
    edges = {(own, other) for file, own in files().items() for other in imports(file) if other in RANK and own != other}
    assert ("build", "loop") in edges and ("step", "models") in edges  # the test sees what is there
    wrong = [f"{own} imports {other}" for own, other in edges if RANK[own] <= RANK[other] and RANK[own] > 0]
    wrong += [f"{own} imports {other}" for own, other in edges if RANK[own] == 0 and RANK[other] > 0]
    assert not wrong


def test_every_file_has_a_layer():
    assert set(files().values()) <= set(RANK)


def test_the_config_is_known_to_build_and_cli_alone():
    assert {own for file, own in files().items() if "config" in imports(file)} == {"build", "cli", "config", "script"}


def test_config_and_command_line_need_no_jax():
    code = "import sys, jaxdp.cli; jaxdp.cli.load(['--config', sys.argv[1]]); assert 'jax' not in sys.modules"
    config = ROOT.parent / "configs" / "digits.yaml"
    subprocess.run([sys.executable, "-c", code, str(config)], check=True, timeout=60)


def test_only_strategies_know_their_names():
    """No `if backend ==` outside the table."""
    for file in ROOT.rglob("*.py"):
        if file.parent.name not in ("config", "parallel"):
            assert '"pmap"' not in file.read_text() and '"pjit"' not in file.read_text(), file
