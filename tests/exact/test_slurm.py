"""Under a real Slurm: the same curve as one process, and a preempted job that goes on to the same
bits.
"""

import json
import re
import sys
import time

import numpy as np
import pytest

from launch import ROOT, processes
from slow_runs import CONFIG, SLOW
from slurm import Slurm

pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.xdist_group("slurm")]
TRAIN = [sys.executable, str(ROOT / "train.py")]
DOUBLE = "precision: {params: float64, compute: float64, reduce: float64}\n"
PAGE = (ROOT / "docs" / "hosts.md").read_text()
SCRIPT, _ = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", PAGE, re.DOTALL)  # the other has mpirun


@pytest.fixture(scope="module")
def slurm():
    with Slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that is slow enough to be stopped, and its end when nothing stops it, in one process."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "slow_digits.py").write_text(SLOW)
    (folder / "run.yaml").write_text(CONFIG + DOUBLE)
    argv = [TRAIN[1], "--config", str(folder / "run.yaml"), "--run_dir", str(folder / "reference")]
    (job,) = processes(argv, [{"PYTHONPATH": str(folder)}])
    assert job.returncode == 0, job.output
    return folder


def records(run_dir, split):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split]


def wait_for(there, seconds=90.0):
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def step(run_dir):
    file = run_dir / "metrics.jsonl"
    return file.read_text().count('"train"') if file.exists() else 0


def test_two_preempted_tasks_equal_one_process(slurm, folder):
    """scancel --signal=TERM preempts: code 75 after a save; the same command goes on, to the curve
    of one process.
    """
    run_dir = folder / "two"
    command = ["srun", "-n", "2", *TRAIN, "--config", "run.yaml", "--run_dir", str(run_dir)]
    first = slurm.start(*command, cwd=folder, PYTHONPATH=str(folder))
    wait_for(lambda: step(run_dir) >= 30)
    job = slurm.run("squeue", "-h", "-o", "%i").stdout.strip()
    assert slurm.run("scancel", "--signal=TERM", job).returncode == 0
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 75 and "preempted by SIGTERM" in out, out
    again = slurm.run(*command, cwd=folder, PYTHONPATH=str(folder))
    assert again.returncode == 0 and "resumes after step" in again.stdout, again.stdout
    env = json.loads((run_dir / "env.json").read_text())
    assert (env["launcher"], env["topology"]["processes"], env["devices"]["count"]) == (
        "slurm",
        2,
        2,
    )
    check(run_dir, folder)


def check(run_dir, folder):
    """The curve of the run that nothing stopped, and its bits."""
    (one, want), (two, final) = (
        (records(d, "train"), records(d, "final")[-1]) for d in (folder / "reference", run_dir)
    )
    assert [r["step"] for r in two] == list(range(1, 151))
    np.testing.assert_allclose([r["loss"] for r in two], [r["loss"] for r in one], rtol=1e-9)
    assert final["params_sha256"] == want["params_sha256"]


def test_the_batch_script_puts_itself_back_and_goes_on(slurm, folder):
    """The script of docs/hosts.md, but for the size of the job; Slurm's signal comes two minutes
    too early.
    """
    script = SCRIPT.replace(
        "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8", "--nodes=1 --ntasks=2"
    )
    script = script.replace("jaxdp ", f"{sys.executable} -m jaxdp ")
    (folder / "job.sh").write_text(script)
    run_dir, out = folder / "runs" / "run", folder / "job.out"
    paths = {"PYTHONPATH": f"{ROOT}:{folder}", "JAXDP_TIMEOUT": "60"}
    sent = slurm.run("sbatch", "--parsable", f"--output={out}", "job.sh", cwd=folder, **paths)
    job = sent.stdout.strip()
    assert sent.returncode == 0, sent.stdout

    def state():
        return slurm.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()

    wait_for(lambda: step(run_dir) >= 30)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: state() == "PENDING")
    assert "preempted by SIGUSR1" in out.read_text()
    time.sleep(
        3
    )  # Slurm's own wait is two minutes: within a second the node would take it for the job that ended
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: records(run_dir, "final"))
    wait_for(lambda: state() in ("", "COMPLETED"))
    text = out.read_text()
    assert (
        text.count("2 processes on") == 2 and "all-reduce" in text and "resumes after step" in text
    ), text
    check(run_dir, folder)
