"""A checkpoint of format 1, made by golden/make_golden.py, stays readable bit for bit, and its run
goes on.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from covering import first
from jaxdp.checkpoint import manifest
from jaxdp.cli import load
from jaxdp.process.context import current
from jaxdp.run.build import make_run, restore
from launch import ROOT, SUPPORT

GOLDEN = SUPPORT / "golden"
TRAIN = ROOT / "train.py"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
STEP = 10
sys.path.insert(0, str(GOLDEN))  # for its model

from make_golden import leaves  # noqa: E402


def run_of(directory, backend, zero, devices):
    argv = ["--config", str(GOLDEN / "golden.yaml"), "--parallel.backend", backend]
    config, *_ = load([*argv, "--parallel.zero", str(zero), "--parallel.devices", str(devices)])
    return make_run(config, directory, current())


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(GOLDEN / "run", tmp_path / "run")
    return tmp_path / "run"


def test_it_is_whole(copied):
    said = []
    assert run_of(copied, "pmap", 0, 1).checkpoints.latest(said.append) == STEP and not said
    assert manifest.FORMAT == 1, (
        "make a golden of the new format beside this one, and keep this one readable"
    )


LAYOUTS = [
    ("pjit", 3, 3),
    ("pmap", 0, 1),
    ("pmap", 0, 4),
    ("pmap", 1, 8),
    ("pjit", 0, 2),
    ("pjit", 3, 8),
]


@pytest.mark.parametrize("layout", first(2, LAYOUTS), ids=str)
def test_every_leaf_is_what_was_saved(copied, layout):
    backend, zero, devices = layout
    run = run_of(copied, backend, zero, devices)
    assert run.checkpoints.latest() == STEP
    found = leaves(run.strategy.export(restore(run, STEP)))
    assert found == {path: tuple(leaf) for path, leaf in EXPECTED["leaves"].items()}


def test_it_holds_all_that_a_state_may_have():
    kinds = {path.partition("/")[0] for path in EXPECTED["leaves"]}
    assert kinds == {
        "step",
        "params",
        "model_state",
        "opt_state",
        "ema",
        "loss_scale",
        "carry",
        "guard",
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, [("pjit", 3, 4), ("pmap", 0, 1)]), ids=str)
def test_the_run_goes_on_from_it(copied, layout):
    """The losses of the updates after it, as they were when it was made; other processors round
    otherwise.

    An evaluation that was written, but of which the checkpoint does not know, is made again, and
    written once."""
    with (copied / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEP, "split": "eval", "loss": 99.0}) + "\n")
    backend, zero, devices = layout
    argv = ["--parallel.backend", backend, "--parallel.zero", str(zero), "--eval.every", str(STEP)]
    argv += ["--data.order", "shuffled"]  # the run is older than this key
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(GOLDEN),
    }
    command = [
        sys.executable,
        str(TRAIN),
        "--config",
        str(GOLDEN / "golden.yaml"),
        "--run_dir",
        str(copied),
        *argv,
    ]
    done = subprocess.run(
        command[:-2], cwd=TRAIN.parent, env=env, capture_output=True, text=True, timeout=300
    )
    assert (
        done.returncode == 2 and "data.order: shuffled, as before this key existed" in done.stderr
    ), done.stderr
    done = subprocess.run(
        command, cwd=TRAIN.parent, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumes after step {STEP}" in done.stdout
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 11), 10, *range(11, 21), 20]
    assert [line["loss"] < 3 for line in lines if line["split"] == "eval"] == [True]
    losses = {
        str(line["step"]): line["loss"]
        for line in lines
        if line["split"] == "train" and line["step"] > STEP
    }
    assert losses == pytest.approx(EXPECTED["losses"], rel=1e-5)
    assert lines[-1]["loss"] == pytest.approx(EXPECTED["final"]["loss"], rel=1e-5)
    assert lines[-1]["accuracy"] == pytest.approx(EXPECTED["final"]["accuracy"], abs=0.01)
