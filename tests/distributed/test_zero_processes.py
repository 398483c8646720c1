"""Two real processes train what one does, whatever is split over them; and what they saved goes on
elsewhere.
"""

import json
import re
import sys

import numpy as np
import pytest

from cli_runs import curve, records, write
from launch import SUPPORT, mpirun, require, together
from mpi import zero

pytestmark = pytest.mark.mpi
SCRIPT = SUPPORT / "mpi" / "zero.py"


@pytest.mark.slow
def test_every_stage_over_two_processes_is_one_device():
    """Losses, the last norm of the gradients, and the loss of the averaged parameters."""
    done = mpirun(2, [str(SCRIPT)], devices=2, timeout=180)
    assert done.returncode == 0 and not done.left, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    curves = json.loads(line)
    one = {
        model: zero.train(
            next(name for name, row in zero.STRATEGIES.items() if row[-1] == model), 1, True
        )
        for model in ("mlp", "blocks")
    }
    assert list(curves) == list(zero.STRATEGIES)
    for name, got in curves.items():
        want = one[zero.STRATEGIES[name][-1]][: len(got)]
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)
        assert got[4] < 0.9 * got[0] and len(got) == 6 + (name in zero.EVALUATED)


CONFIG = """
model: {target: MLP, args: {hidden: [32, 16]}}
data: {target: Digits}
steps: 12
batch_size: 60
optimizer: {target: adamw, lr: 1.0e-2, weight_decay: 0.1, clip_norm: 1.0, schedule_steps: 12, ema: 0.9}
precision: {params: float64}
eval: {ema: true}
log: {every: 1}
"""


@pytest.mark.slow
def test_stage_3_of_two_processes_resumes_in_stage_1(tmp_path):
    """Stage 3 under pjit, split over two processes; then stage 1 under pmap, over four devices of
    one.
    """
    base = ["train.py", "--config", str(write(tmp_path, CONFIG)), "--run_dir"]
    two = [
        require("openmpi5"),
        "--bind-to",
        "none",
        "--oversubscribe",
        "-np",
        "2",
        sys.executable,
        *base,
    ]
    split = [
        str(tmp_path / "run"),
        "--parallel.backend",
        "pjit",
        "--parallel.zero",
        "3",
        "--steps",
        "6",
    ]
    whole = [sys.executable, *base, str(tmp_path / "whole"), "--parallel.devices", "1"]
    jobs = together([([*two, *split], {}), (whole, {})], timeout=300, devices=2)
    on = [sys.executable, *base, str(tmp_path / "run"), "--parallel.zero", "1"]
    jobs += together([(on, {})], timeout=60, devices=4)
    assert all(job.returncode == 0 and not job.left for job in jobs), "\n".join(
        job.output for job in jobs
    )
    assert "resumes after step 6" in jobs[-1].stdout

    np.testing.assert_allclose(curve(tmp_path / "run"), curve(tmp_path / "whole"), rtol=1e-10)
    finals = [records(tmp_path / run, "final")[-1] for run in ("run", "whole")]
    assert [final["step"] for final in finals] == [12, 12] and len(curve(tmp_path / "run")) == 12
    assert finals[0]["loss"] == pytest.approx(finals[1]["loss"], rel=1e-10)
    assert all(re.fullmatch("[0-9a-f]{64}", final["params_sha256"]) for final in finals)
