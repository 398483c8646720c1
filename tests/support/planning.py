"""`jaxdp plan` in a process of its own, which tells the memory that it took."""

import os
import subprocess
import sys

from launch import ROOT

MEASURED = """import resource, subprocess, sys  # in a small process: a child's peak counts its parent's memory too
code = subprocess.run([sys.executable, "-m", "jaxdp", *sys.argv[1:]]).returncode
print("peak:", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "KiB", file=sys.stderr)
sys.exit(code)"""


ENVIRONMENT = {
    k: v for k, v in os.environ.items() if k != "XLA_FLAGS"
}  # the verb simulates its own devices


def run(*argv, config="gpt2_124m"):
    return subprocess.run(
        [sys.executable, "-c", MEASURED, "plan", "--config", f"configs/{config}.yaml", *argv],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
