"""Rewind: the rows of an update, with losses and shares, from the nearest checkpoint."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx

import jaxdp
from cli_runs import ended, records
from cli_runs import jaxdp as train
from jaxdp.checkpoint import manifest
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.text import TextFile
from jaxdp.errors import UsageError
from jaxdp.rewind.row_contents import describe
from jaxdp.rewind.rows_of_update import rewind_all, standing_out
from jaxdp.run.components import NOTHING
from jaxdp.run.datasets import Source

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


def rewind(directory, update, objects=NOTHING):
    [found] = rewind_all(directory, [update], objects)
    return found


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
        r"update 4: 20 rows, counted from 0, again from update 0; its loss is (\S+), and was logged as (\S+)$",
        first,
    )
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-4)
    assert len(table) == 11 and table[0].split()[:3] == ["example", "microbatch", "loss"]
    logged = [r["loss"] for r in records(tmp_path / "run", "train") if r["step"] == 4]
    assert logged == [float(found[2])]
    for step in ("7", "0"):
        assert (
            "--step"
            in ended("rewind", "--run_dir", tmp_path / "run", "--step", step, code=2).stderr
        )


def test_what_has_no_rows_alone_is_refused(run_dir, tmp_path):
    with pytest.raises(UsageError, match="--step, --around: 41 is none of the updates 1 to 40"):
        rewind(run_dir, 41, OBJECTS)
    with pytest.raises(UsageError, match="no run in"):
        rewind(tmp_path / "none", 1)
    with pytest.raises(UsageError, match="cannot be imported"):
        rewind(run_dir, 1)


@pytest.mark.parametrize("kept", [True, False])
def test_a_killed_run_has_later_updates(kept, run_dir, tmp_path):
    """They follow from it, or from the start if there is none, with the losses that were logged."""
    killed = tmp_path / "killed"
    shutil.copytree(run_dir, killed)
    for step in (40, *(() if kept else (15, 30))):
        shutil.rmtree(killed / "checkpoints" / f"{step}")
    found = rewind(killed, 37, OBJECTS)
    assert found.began == (30 if kept else 0)
    assert found.rows == rewind(run_dir, 37, OBJECTS).rows or not kept
    assert found.logged == pytest.approx(found.loss, rel=1e-4)


def test_the_options_of_the_command(run_dir, tmp_path, monkeypatch):
    ended("train", "--config", "configs/digits.yaml", "--run_dir", tmp_path / "run", "--steps", "3")
    for words in ([], ["--step", "2", "--around", "2"]):
        said = ended("rewind", "--run_dir", tmp_path / "run", *words, code=2).stderr
        assert "--step, --around: give one of them" in said
    said = ended("rewind", "--run_dir", tmp_path / "run", "--around", "9", code=2).stderr
    assert "--step, --around: 6 is none of the updates 1 to 3 of this run" in said
    monkeypatch.chdir(tmp_path)  # not where it was started
    said = ended("rewind", "--run_dir", "run", "--around", "2").stdout
    assert said.startswith("1 of the losses of updates 1 to 52 were logged (log.every), and 0")
    assert re.findall(r"(?m)^update (\d): ", said) == ["1", "2"]


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


@pytest.mark.parametrize("planted", ["mislabelled", "scaled"])
def test_100_of_100_planted_rows_are_named(tmp_path, planted):
    """The rows of the last epoch with the largest losses are those that were planted."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(2000, 8)).astype(np.float32)
    direction = np.ones(8, np.float32) / np.sqrt(8)
    x += 3 * np.sign(x @ direction)[:, None] * direction  # no row is near the boundary
    score = x @ direction
    bad = rng.choice(len(x), 100, replace=False)
    labels = (score > 0).astype(np.int32)
    labels[bad] = 1 - labels[bad]
    loss, target = "SoftmaxCrossEntropy", labels
    if planted == "scaled":
        loss, target = "MeanSquaredError", score.astype(np.float32)[:, None]
        target[bad] *= 20

    class Linear(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.head = nnx.Linear(8, 2 if planted == "mislabelled" else 1, rngs=rngs)

        def __call__(self, x):
            return self.head(x)

    run, more = (
        tmp_path / "run",
        {"checkpoint": {"every": 60, "keep": 9}, "parallel": {"devices": 2}},
    )
    settings = {"steps": 200, "batch_size": 100, "microbatches": 4, "log": {"every": 1}, **more}
    jaxdp.fit(Linear, (x, target), loss, {"target": "adam", "lr": 0.1}, run_dir=run, **settings)
    model = jaxdp.load(run, model=Linear, data=(x, target)).config.model.target
    objects = {"model": {model: Linear}, "data": {"tuple (object)": (x, target)}}
    updates = range(181, 201)
    found = [*rewind_all(run, updates, objects)]
    assert [one.update for one in found] == [*updates] and {one.began for one in found} == {180}
    rows = [row for one in found for row in one.rows]
    assert sorted(row.example for row in rows) == [*range(2000)]
    largest = sorted(rows, key=lambda row: -row.loss)[:100]
    assert {row.example for row in largest} == {*bad.tolist()}


def test_updates_whose_loss_stands_out_are_found(tmp_path):
    lines = [
        {"step": s, "split": "train", "loss": 1.0 + 0.01 * (s % 7) + 3 * (s in (340, 341))}
        for s in range(1, 1001)
    ]
    lines[699]["loss"] = "nan"
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert standing_out(tmp_path, 330) == [340, 341]
    assert standing_out(tmp_path, 700) == [700]
    assert standing_out(tmp_path, 500) == [497, 498, 499, 500]
    (tmp_path / "metrics.jsonl").unlink()
    assert standing_out(tmp_path, 2) == [1, 2]


def test_the_rows_around_a_spike_are_shown_and_counted(tmp_path):
    """A row with a wrong label and large inputs makes a spike; how often it was read is counted."""
    x, y = np.concatenate([X] * 2), np.concatenate([Y] * 2)
    pandas = pytest.importorskip("pandas", reason="pip install -e '.[tables]'")
    frame = pandas.DataFrame(x, columns=list("abcd")).assign(label=np.where(y, "up", "down"))
    frame.iloc[5, :4], frame.iloc[5, 4] = 40.0, "down"
    frame.to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "run.yaml").write_text(
        "model: {target: MLP, args: {hidden: []}}\nsteps: 80\nbatch_size: 16\nlog: {every: 1}\n"
        f"data: {{target: Table, args: {{table: {tmp_path}/rows.csv, label: label, test_fraction: 0}}}}\n"
        "optimizer: {lr: 5.0e-2}\n"
    )
    ended("train", "--config", tmp_path / "run.yaml", "--run_dir", tmp_path / "run")
    said = ended("rewind", "--run_dir", tmp_path / "run", "--around", "50").stdout
    tables = re.split(r"(?m)^update (?=\d+: )", said)[1:]
    firsts = {int(text.split(":")[0]): text.splitlines()[2] for text in tables}
    update = next(update for update, line in firsts.items() if line.split()[0] == "5")
    assert firsts[update].endswith(
        f" {(update - 1) // 8} times  label down; row 5 of the file, counted from 0"
    )


def test_a_row_that_is_not_finite_comes_first(tmp_path):
    """By its number in the data, and its row of the file. The other rows have finite shares."""
    x, y = np.concatenate([X] * 4), np.concatenate([Y] * 4)
    x[200, 1] = np.nan
    np.savez(tmp_path / "rows.npz", inputs=x, labels=y)
    (tmp_path / "run.yaml").write_text(
        "model: {target: MLP, args: {hidden: []}}\nsteps: 20\nbatch_size: 16\n"
        f"data: {{target: Npz, args: {{path: {tmp_path}/rows.npz}}}}\n"
    )
    said = ended("train", "--config", tmp_path / "run.yaml", "--run_dir", tmp_path / "run").stdout
    skipped = re.search(r"warning: skipped updates: (\d) of 20: their gradients were not fin", said)
    one = ["--nonfinite.max_consecutive", "1", "--run_dir", tmp_path / "one"]
    halted = ended("train", "--config", tmp_path / "run.yaml", *one, code=1).stderr
    assert "inputs not finite in row 200 (counted from 0); correct them, or set" in halted
    update = int(re.search(r"in the batch of update (\d+):", halted)[1])
    found = rewind(f"{tmp_path}/run", update)
    assert (
        skipped
        and np.isnan(found.rows[0].share)
        and found.parts.dataset.rows[found.rows[0].example] == 200
    )
    assert np.isfinite([row.share for row in found.rows[1:]]).all()
    assert "row 200 of the file, counted from 0" in describe(
        found.parts.dataset, found.rows[0].example
    )
    checked = ended("data", "check", "--config", tmp_path / "run.yaml", code=2).stdout
    assert "data: inputs not finite in row 200 (counted from 0); correct them" in checked
    more = ["--check", "--batch_size", "128", "--run_dir", tmp_path / "check"]
    checked = ended("train", "--config", tmp_path / "run.yaml", *more, code=2)
    assert "data: inputs not finite in row 200 (counted" in checked.stderr


class Own:
    """A data set of the user's, which calls what it has read its rows."""

    def __init__(self):
        self.rows = [*zip(X, Y)]

    def __len__(self):
        return len(self.rows)

    def read(self, indices):
        x = np.where(indices[:, None] == 5, np.nan, X[indices])
        return {"inputs": x.astype(np.float32), "labels": Y[indices]}


def test_rows_of_a_data_set_of_ones_own_are_not_those_of_a_file():
    found = Source(Own(), EpochOrder(64, 16, 1, 0)).find_not_finite()
    assert found.startswith("inputs not finite in example 5 (counted from 0); correct")
    assert describe(Own(), 5) == f"label {Y[5]}"


class Named(jaxdp.data.Digits):
    """Digits whose classes have names."""

    class_names = tuple(f"n{number}" for number in range(10))


def test_what_a_row_is(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    tokens = TextFile(str(text), length=32)
    assert describe(tokens, 3) == repr(
        bytes(tokens.read(np.array([3]))["inputs"][0].astype(np.uint8)).decode()
    )
    digits = jaxdp.data.Digits()
    label = digits.read(np.array([7]))["labels"][0]
    assert describe(digits, 7) == f"label {label}" and describe(Named(), 7) == f"label n{label}"
    assert describe(Arrays(inputs=X), 0) == ""


def test_what_no_checkpoint_leads_to_is_refused(run_dir, tmp_path):
    """The weights of init_from, and the data after a rollback, are not those of the run's start."""
    fit(
        tmp_path / "tuned",
        init_from=str(run_dir),
        checkpoint={"every": 10},
        steps=20,
        parallel={"devices": 4},
    )
    with pytest.raises(
        UsageError, match="7 is before the first checkpoint of a run with init_from"
    ):
        rewind(tmp_path / "tuned", 7, OBJECTS)
    found = rewind(tmp_path / "tuned", 12, OBJECTS)
    assert found.logged == pytest.approx(found.loss, rel=1e-4)

    checkpoint = tmp_path / "tuned" / "checkpoints" / "20"
    content = manifest.read(checkpoint)
    manifest.write(checkpoint, content["files"], {**content["meta"], "offset": 3})
    with pytest.raises(UsageError, match="was rolled back, and left data out, between updates 10"):
        rewind(tmp_path / "tuned", 12, OBJECTS)
