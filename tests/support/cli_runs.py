"""Runs of the command, and what they leave in a run directory."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from launch import ROOT, in_process

DIGITS = ["--config", str(ROOT / "configs" / "digits.yaml")]


def jaxdp(*argv, cwd=ROOT, code=0, devices=1, env=None):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", **(env or {})},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def ended(*argv, code=0):
    """Run `jaxdp ARGV...` in this process, and check its exit code; not 75, which would end this
    process: use `jaxdp`."""
    done = in_process(*argv)
    assert done.returncode == code, done.output
    return done


def records(run_dir, split=None):
    lines = [
        json.loads(line)
        for line in (pathlib.Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    return [r for r in lines if split is None or r["split"] == split]


def write(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def curve(run_dir):
    return np.array([r["loss"] for r in records(run_dir, "train")])
