"""Scripts of `benchmarks`, and which of them a test runs."""

import json
import re
import subprocess
import sys

from benchmarks import job
from launch import ROOT

FOLDER = ROOT / "benchmarks"


HIDDEN = ["--model.args.hidden", "[8]"]


MLP = ["--config", str(FOLDER / "configs/digits_mlp.yaml"), *HIDDEN]


def runs(*scripts):
    """Mark the test of a script."""
    return lambda test: test


def scripts_with_a_test():
    """The scripts that a test is marked with."""
    names = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for marked in re.findall(r"^@runs\((.*?)\)$", file.read_text(), re.DOTALL | re.MULTILINE):
            names.update(re.findall(r'"([\w.]+)"', marked))
    return names


def run_script(name, *words, code=0, env=None):
    """Run a script on one device; return the lines that it printed, each as JSON where it is.
    With another code: its errors. None: whatever its code.
    """
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)],
        cwd=ROOT,
        env=job.environment(**{"XLA_FLAGS": "", **(env or {})}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert code is None or ended.returncode == code, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    return (
        ended.stderr
        if code
        else [json.loads(line) if line.startswith(("{", "[")) else line for line in lines]
    )
