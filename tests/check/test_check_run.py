"""`jaxdp train --check`: what a run does is tried, what is wrong is said, and nothing is left."""

import os
import re
import signal
import subprocess
import sys

import pytest

from cli_runs import jaxdp
from jaxdp.check import PARTS
from launch import environment

CONFIG = """
model: {target: MLP, args: {hidden: [8]}}
data: {target: Digits}
steps: 100
batch_size: 50
microbatches: 4
optimizer: {lr: 1.0e-2, schedule: cosine, warmup_steps: 50}
eval: {every: 1 epoch}
checkpoint: {every: 10, keep: 1}
"""
CODE = """
import itertools
import math
import numpy as np

COUNT = itertools.count()


class Noise:
    classes = 4

    def __init__(self, split="train"):
        pass

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"inputs": np.float32([math.sin(next(COUNT)), i / 64]), "labels": np.int32(i % 4)}


def constant(outputs, batch):
    weight = batch["mask"].sum()
    return 3.0 * weight + 0.0 * outputs.sum(), weight, {}


class Callback:
    def evaluated(self, step, metrics):
        raise ValueError("no such plot")


class Full:
    def __init__(self, directory):
        self.file = directory / "own.txt"

    def write(self, record):
        self.file.write_text(f"{record}")
        raise OSError("the disk is full")

    say = rewind = lambda self, *_: None
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def check(folder, *more, code=0, **options):
    """Return what a check prints; nothing may be left."""
    before = sorted(folder.rglob("*"))
    env = {"PYTHONPATH": os.pathsep.join([".", *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = ["--config", "run.yaml", "--check", *more]
    done = jaxdp(*argv, cwd=folder, code=code, env=env, **options)
    assert sorted(folder.rglob("*")) == before
    return done


def parts(done):
    """Return {part: whether it is ok}."""
    found = re.findall(rf"^({'|'.join(PARTS)}) +(ok|failed)", done.stdout, re.MULTILINE)
    return {name: word == "ok" for name, word in found}


def test_each_part_is_tried_and_nothing_is_left(folder):
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "runs" / "run" / "notes.txt").write_text("of the user")
    writers = "[TensorBoard, {target: WandB, args: {mode: online}}]"
    done = check(folder, "--log.writers", writers, "--checkpoint.mirror", "store", devices=2)
    assert parts(done) == dict.fromkeys(PARTS, True), done.stdout
    assert "2 besides the console" in done.stdout and "after updates [1, 2]" in done.stdout
    assert "left out   checkpoint.mirror: store" in done.stdout
    assert (folder / "runs" / "run" / "notes.txt").read_text() == "of the user"


@pytest.mark.slow
def test_two_processes_print_each_part_once(folder):
    argv = ["launch", "--processes", "2", "train", "--config", "run.yaml", "--check"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", *argv, "--elastic.enabled", "true"],
        cwd=folder,
        env=environment({"PYTHONPATH": os.pathsep.join(sys.path)}, 1),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [done.stdout.count(f"{part:10} ok") for part in PARTS] == [1] * len(PARTS)
    assert "left out   elastic.enabled: true" in done.stdout
    assert sorted(x.name for x in folder.iterdir()) == ["own.py", "run.yaml"]


FAULTS = {
    ("--model.args.hidden", "x"): (2, "config", "model.args.hidden: 'x' is not a list of integers"),
    ("--run_dir", "own.py/run"): (2, None, "run_dir: cannot write in "),
    ("--callbacks", "[own.Callback]"): (
        1,
        "evaluation",
        'callbacks: own.Callback.evaluated failed at own.py:29 (in evaluated: raise ValueError("no such plot")): '
        "ValueError: no such plot",
    ),
    ("--log.writers", "[own.Full]"): (1, "writers", "log.writers: own.Full failed; the warning"),
    ("--data.target", "own.Noise"): (
        1,
        "restore",
        "update 2 after a restore has other bits",
    ),
    ("--loss.target", "own.constant"): (
        1,
        "one batch",
        "the loss of one batch does not fall: loss 3 to 3 in 1000 updates",
    ),
}


@pytest.mark.parametrize("more", FAULTS, ids=" ".join)
@pytest.mark.quick(3)
def test_a_fault_is_named_with_its_part(folder, more):
    code, part, text = FAULTS[more]
    done = check(folder, *more, code=code)
    assert done.stderr.splitlines()[-1].startswith(f"jaxdp: {text}"), done.stderr
    results = parts(done)
    assert [name for name, ok in results.items() if not ok] == [part] * (part is not None)
    assert [*results] == list(PARTS[: PARTS.index(part) + 1] if part else [])


def test_a_signal_leaves_nothing(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxdp", "train", "--config", "run.yaml", "--check"],
        cwd=folder,
        env=environment({"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}, 1),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline().startswith("config")
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 75
    assert sorted(x.name for x in folder.iterdir()) == ["own.py", "run.yaml"]
