"""Rewind: the rows of an update, with losses and shares, from the nearest checkpoint."""

import re
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx

import jaxdp
from cli_runs import ended, records
from cli_runs import jaxdp as train
from jaxdp.errors import UsageError
from jaxdp.rewind.rows_of_update import rewind

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
BAD = 37  # a row with a wrong label, far from the boundary
X[BAD], Y[BAD] = 6.0, 0


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def fit(run_dir, **more):
    base = {"steps": 40, "batch_size": 16, "microbatches": 4, "log": {"every": 1}}
    optimizer = {"target": "adam", "lr": 0.02}
    return jaxdp.fit(Net, (X, Y), optimizer=optimizer, run_dir=run_dir, **{**base, **more})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewind") / "run"
    fit(folder, checkpoint={"every": 15}, parallel={"devices": 4})
    return folder


OBJECTS = {"data": {"tuple (object)": (X, Y)}}


@pytest.mark.parametrize("update", [1, 15, 16, 33, 40])
def test_an_update_has_its_rows_losses_and_shares(run_dir, update):
    found = rewind(run_dir, update, OBJECTS)
    assert found.began == max(s for s in (0, 15, 30) if s < update)
    assert found.logged == pytest.approx(found.loss, rel=1e-4)
    assert len(found.rows) == 16 and sum(row.share for row in found.rows) == pytest.approx(
        1, abs=1e-4
    )
    assert np.mean([row.loss for row in found.rows]) == pytest.approx(found.loss, rel=1e-4)
    epoch = [rewind(run_dir, u, OBJECTS).rows for u in range(1, 5)] if update == 1 else []
    assert not epoch or sorted(r.example for rows in epoch for r in rows) == list(range(64))


def test_a_bad_row_is_the_first_of_its_update(run_dir):
    """Once the others are learned, the wrong label has the largest loss, and most of the gradient."""
    epochs = [rewind(run_dir, update, OBJECTS) for update in range(33, 37)]
    [first] = [found.rows[0] for found in epochs if BAD in [row.example for row in found.rows]]
    assert first.example == BAD and first.share > 0.5
    assert first.loss == max(row.loss for found in epochs for row in found.rows)


def test_the_command_prints_them(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(
        "model: {target: MLP, args: {hidden: [8]}}\ndata: {target: Digits}\nsteps: 6\n"
        "batch_size: 20\nlog: {every: 1}\noptimizer: {ema: 0.9}\n"
    )
    ended("train", "--config", tmp_path / "run.yaml", "--run_dir", tmp_path / "run")
    said = ended("rewind", "--run_dir", tmp_path / "run", "--step", "4").stdout
    first, *table = said.splitlines()
    found = re.match(
        r"update 4: 20 rows, again from update 0; its loss is (\S+), and was logged as (\S+)$",
        first,
    )
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-4)
    assert len(table) == 11 and table[0].split()[:3] == ["example", "microbatch", "loss"]
    logged = [r["loss"] for r in records(tmp_path / "run", "train") if r["step"] == 4]
    assert logged == [float(found[2])]
    for step in ("7", "0"):
        assert (
            "--step: "
            in ended("rewind", "--run_dir", tmp_path / "run", "--step", step, code=2).stderr
        )


def test_what_has_no_rows_alone_is_refused(run_dir, tmp_path):
    with pytest.raises(UsageError, match="--step: 41 is none of the updates 1 to 40"):
        rewind(run_dir, 41, OBJECTS)
    with pytest.raises(UsageError, match="no such directory"):
        rewind(tmp_path / "none", 1)
    with pytest.raises(UsageError, match="cannot be imported"):
        rewind(run_dir, 1)


@pytest.mark.slow
def test_in_exact_mode_the_loss_has_its_bits(tmp_path):
    for devices in (1, 4):
        argv = [
            "--config",
            "configs/digits.yaml",
            "--parallel.reduction",
            "exact",
            "--log.every",
            "1",
        ]
        argv += ["--steps", "12", "--epochs", "null", "--checkpoint.every", "5"]
        run = tmp_path / str(devices)
        train(*argv, "--parallel.devices", devices, "--run_dir", run, devices=devices)
        logged = {r["step"]: r["loss"] for r in records(run, "train")}
        argv = [sys.executable, "-m", "jaxdp", "rewind", "--run_dir", run, "--step", "9"]
        done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=200)
        assert f"its loss is {logged[9]!r}, and was logged as {logged[9]!r}" in done.stdout
