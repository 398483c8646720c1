"""The command as people use it: training, resuming, refusing, alone and under mpirun."""

import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from cli_runs import curve, ended, jaxdp, records, write
from covering import first
from ends import check_end
from faulty_runs import when
from jaxdp import cli
from jaxdp.config.validation import inner, known_keys
from jaxdp.errors import UsageError
from jaxdp.metrics.console import Console
from jaxdp.process.signals import start_verb
from jaxdp.run.components import check_paths
from jaxdp.run.start import spared_by
from launch import mpirun, port, processes, together
from two_hosts import TwoHosts

ROOT = pathlib.Path(__file__).parents[2]
MLP = ["--model", "{target: MLP, args: {hidden: [8]}}"]
CNN = ["--model", "{target: CNN, args: {widths: [4, 8], dropout: 0.1}}"]


SMALL = """
model: {target: CNN, args: {widths: [4], dropout: 0.1}}
data: {target: Digits, args: {augment: true}}
steps: 30
batch_size: 60
optimizer: {target: adamw, lr: 1.0e-2, weight_decay: 0.1, clip_norm: 1.0}
log: {every: 1}
"""


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One process, one device: what everything else must equal."""
    folder = tmp_path_factory.mktemp("single")
    jaxdp("--config", write(folder, SMALL), "--run_dir", folder / "run")
    return folder / "run"


def assert_same_curve(run_dir, reference):
    ours, theirs = curve(run_dir), curve(reference)
    assert len(ours) == len(theirs) == 30
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    final, want = records(run_dir, "final")[0], records(reference, "final")[0]
    assert final["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert final["accuracy"] == pytest.approx(want["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_the_run_directory_contains_what_is_documented(single):
    env = json.loads((single / "env.json").read_text())
    assert (
        env["versions"]["jax"] and env["topology"]["processes"] == 1 and env["launcher"] == "none"
    )
    assert "target: CNN" in (single / "config.yaml").read_text()
    train, final = records(single, "train"), records(single, "final")
    assert [r["step"] for r in train] == list(range(1, 31))
    assert {"loss", "accuracy", "lr", "grad_norm", "nonfinite_grads"} <= set(train[0])
    assert {"step_time_ms", "examples_per_s"} <= set(train[-1])
    assert len(final) == 1 and re.fullmatch("[0-9a-f]{64}", final[0]["params_sha256"])
    assert final[0]["step"] == 30 and 0 < final[0]["accuracy"] <= 1
    assert train[-1]["loss"] < train[0]["loss"]
    assert (single / "checkpoints" / "30").is_dir()
    assert all(abs(r["time"] - train[0]["time"]) < 100 for r in train + final)
    page = (single / "report.html").read_text()
    assert '"word":"finished"' in page and re.search('"all-reduce"|"collectives":{}', page)


@pytest.mark.slow
@pytest.mark.parametrize("where", first(1, [("pmap", 3), ("pjit", 8)]))
def test_devices_and_backend_change_nothing(single, tmp_path, where):
    backend, devices = where
    jaxdp(
        "--config", write(tmp_path, SMALL), "--run_dir", tmp_path / "run", "--parallel.backend", backend,
        "--parallel.accumulate", "scan", devices=devices,
    )  # fmt: skip
    assert_same_curve(tmp_path / "run", single)


@pytest.mark.xdist_group("mpi")  # which has made `single`
def test_a_finished_run_says_so_and_digests_repeat(single, tmp_path):
    config = write(tmp_path, SMALL)
    out = jaxdp("--config", config, "--run_dir", tmp_path / "run").stdout
    digest = [records(d, "final")[0]["params_sha256"] for d in (single, tmp_path / "run")]
    assert digest[0] == digest[1] and digest[0][:16] in out
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "finished" in ended("train", "--config", config, "--run_dir", tmp_path / "run").stdout
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_run_resumes_under_the_other_backend(single, tmp_path):
    """Stopped after 20 updates on one device under pmap, goes on with 4 under pjit: the same curve,
    no line twice.
    """
    config = write(tmp_path, SMALL)
    argv = ["--config", config, "--run_dir", tmp_path / "run", "--optimizer.schedule_steps", 30]
    jaxdp(*argv, "--steps", 20, "--checkpoint.every", 10)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 25, "split": "train", "loss": 99.0}\n{"step": 26, "spl'
        )  # written before a crash
    out = jaxdp(*argv, "--parallel.backend", "pjit", devices=4).stdout
    assert "resumes after step 20" in out
    assert_same_curve(tmp_path / "run", single)
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    told = [(e["kind"], e["step"]) for e in events if e["kind"] not in ("saving", "settled")]
    saved = [event for event in told if event[0] == "saved"]  # in a thread of its own
    assert saved == [("saved", 10), ("saved", 20), ("saved", 30)]
    assert [event for event in told if event not in saved] == [
        ("start", 0), ("first_update", 1), ("evaluation", 20), ("finished", 20),
        ("resume", 20), ("first_update", 21), ("evaluation", 30), ("finished", 30),
    ]  # fmt: skip
    layout = json.loads((tmp_path / "run" / "layout.json").read_text())
    params = layout["parameters"] * 4
    assert layout["bytes_per_device"]["params"] == params and layout["devices"] == 4
    assert (
        params <= layout["program"]["collectives"]["all-reduce"]["bytes"] <= params + 200
    )  # and other sums
    evaluated = ended("eval", "--run_dir", tmp_path / "run")
    accuracy = records(tmp_path / "run", "final")[0]["accuracy"]
    assert f"accuracy {accuracy:.4f}" in " ".join(evaluated.stdout.split())
    refused = ended("train", *argv, "--seed", 5, code=2).stderr
    assert "seed: 0 -> 5" in refused and refused.count("\n") == 1
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "10",
        "20",
        "30",
    ]


@pytest.mark.slow
def test_a_class_outside_the_package_trains_by_path(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np, flax.linen as nn, optax, jax.numpy as jnp\n"
        "class Net(nn.Module):\n"
        "    width: int = 8\n"
        "    @nn.compact\n"
        "    def __call__(self, x):\n"
        "        return nn.Dense(1)(nn.tanh(nn.Dense(self.width)(x)))[:, 0]\n"
        "class Data:\n"
        "    def __init__(self, n, split='train'):\n"
        "        self.x = np.random.default_rng(split == 'train').normal(size=(n, 3)).astype(np.float32)\n"
        "    def __len__(self): return len(self.x)\n"
        "    def __getitem__(self, i): return self.x[i], self.x[i].sum()\n"
        "def loss(outputs, batch, scale=1.0):\n"
        "    mask = batch['mask']\n"
        "    return scale * jnp.sum(mask * (outputs - batch['labels']) ** 2), jnp.sum(mask), {}\n"
        "def tx(learning_rate, decay=0.9):\n"
        "    return optax.rmsprop(learning_rate, decay)\n"
    )
    config = write(
        tmp_path,
        "model: {target: mine.Net, args: {width: 16}}\ndata: {target: mine.Data, args: {n: 101}}\n"
        "loss: {target: mine.loss, args: {scale: 0.5}}\noptimizer: {target: mine.tx, lr: 0.02, args: {decay: 0.99}}\n"
        "epochs: 40\nbatch_size: 16\nlog: {every: 10}\n",
    )
    jaxdp("--config", config, cwd=tmp_path, devices=2)
    losses = [r["loss"] for r in records(tmp_path / "runs" / "config")]
    assert losses[-1] < 0.2 * losses[0]


BAD = {
    "a name of a set": (["--eval.also", "{a.b: Digits}"], "eval.also: 'a.b' is not a name"),
    "a name that is a number": (["--eval.also", "{1: Digits}"], "eval.also: 1 is not a name"),
    "no set": (
        ["--eval.also", "{a: {}}"],
        "eval.also.a: {} is not a data set; give a name such as Digits",
    ),
    "a set's argument": (
        ["--eval.also", "{a: {target: Digits, args: {x: 1}}}"],
        "eval.also.a.args.x: Digits takes no",
    ),
    "the best of no set": (
        ["--checkpoint.best", "a/loss"],
        "checkpoint.best: 'a/loss' is not among the numbers",
    ),
    "stopping by no metric": (
        ["--callbacks", "[{target: EarlyStopping, args: {metric: acuracy}}]"],
        "callbacks.args.metric: 'acuracy' is not among the numbers of an evaluation: accuracy, loss",
    ),
    "unknown key": (["--modle.target", "MLP"], "did you mean 'model.target'"),
    "wrong type": (["--batch_size", "many"], "batch_size"),
    "target that is not there": (
        ["--model.target", "nowhere.Net"],
        "model.target: 'nowhere.Net' cannot be imported",
    ),
    "misspelled target": (["--model.target", "CNM"], "did you mean 'CNN'"),
    "target without such a name": (["--loss.target", "jaxdp.losses.Hinge"], "has no 'Hinge'"),
    "unknown argument": (
        ["--model.args.widhts", "[3]"],
        "model.args.widhts: CNN takes no such argument; did you mean",
    ),
    "wrong argument": (
        ["--model.args.widths", "3"],
        "model.args.widths: 3 is not a list of integers, which CNN takes",
    ),
    "argument without a name": (
        ["--model.args", "{1: 2}"],
        "model.args.1: CNN takes no such argument",
    ),
    "unknown optimizer argument": (
        ["--optimizer.args.b7", "3"],
        "optimizer.args.b7: adamw takes no such argument",
    ),
    "unknown argument of sgd": (
        ["--optimizer.target", "sgd", "--optimizer.args.b7", "3"],
        "b7: sgd takes no such",
    ),
    "decay that is not taken": (
        ["--optimizer.target", "optax.rmsprop"],
        "optimizer.weight_decay: 0.1 but rmsprop takes none",
    ),
    "no decay of no parameter": (
        ["--optimizer.no_decay", "[embedding]"],
        "optimizer.no_decay: 'embedding' matches no parameter; a path is such as",
    ),
    "classes that are no number": (["--model.args.num_classes", "abc"], "model.args"),
    "missing argument": (
        ["--data.target", "CIFAR10", "--data.args", "{}"],
        "data.args.root: CIFAR10 needs it",
    ),
    "missing data": (
        ["--data.target", "MNIST", "--data.args", "{root: /nowhere}"],
        "data.args.root",
    ),
    "too many devices": (["--microbatches", "2"], "set microbatches to 8"),
    "devices that are not there": (
        ["--parallel.devices", "9"],
        "parallel.devices: 9, but there are 8",
    ),
    "labels that do not fit": (["--loss.target", "MeanSquaredError"], "loss: outputs"),
    "target that is no path": (
        ["--model.target", ".foo.bar"],
        "model.target: '.foo.bar' is not a dotted path",
    ),
    "target that is a number": (
        ["--data.target", "math.pi", "--data.args", "{}"],
        "data.target: 'math.pi' is float",
    ),
    "target that is no model": (
        ["--model.target", "os.getcwd", "--model.args", "{}"],
        "model: str is not a model; give a Flax NNX class",
    ),
    "argument of another type": (
        ["--model.args.dropout", "much"],
        "model.args.dropout: 'much' is a text",
    ),
    "too few classes": (
        ["--model.args.num_classes", "4"],
        "model.args.num_classes: 4, but the data has 10",
    ),
    "argument with a key of its own": (
        ["--optimizer.args.weight_decay", "1"],
        "set by optimizer.weight_decay",
    ),
    "a run directory that is a file": (
        ["--run_dir", "pyproject.toml"],
        "run_dir: cannot write in 'pyproject.toml'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_code_2(case, tmp_path):
    argv, words = BAD[case]
    run_dir = tmp_path / "run"
    done = ended("train", "--config", write(tmp_path, SMALL), "--run_dir", run_dir, *argv, code=2)
    assert (
        words in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("jaxdp: ")
    )
    assert "Traceback" not in done.stderr
    assert not run_dir.exists()  # nothing is left of a run that never began


def test_no_decay_may_match_nothing_if_unused():
    paths = {"layer": {"kernel": np.zeros(2)}}
    decay = ["--optimizer.weight_decay", "0.1"]
    expression = ["--optimizer.no_decay", "[embedding]"]

    def check(*more):
        words = ["--model.target", "MLP", "--data.target", "Digits", "--steps", "1", *more]
        check_paths(cli.load(words)[0], paths)

    check(*decay)
    check(*expression)
    with pytest.raises(UsageError, match=r"no_decay: 'embedding' matches no parameter"):
        check(*decay, *expression)


@pytest.mark.slow
def test_a_run_resumes_if_decay_spares_the_same_arrays(tmp_path):
    """An older run, whose config has the expressions that were the default, resumes if these spare
    the same arrays.
    """
    argv = [
        "--config",
        write(tmp_path, SMALL),
        "--run_dir",
        tmp_path / "run",
        "--optimizer.schedule",
        "constant",
        *MLP,
    ]
    said = ended("train", *argv, "--steps", "2").stdout
    line = r"groups +weight decay 0\.1 for 2 kernels \(592 parameters\), not for 2 vectors \(18 parameters\)\n"
    assert re.search(line, said)
    same = ["--optimizer.no_decay", r"['(^|/)(bias|scale)$']"]
    assert "resumes after step 2" in ended("train", *argv, "--steps", "3", *same).stdout
    refused = ended("train", *argv, "--steps", "4", "--optimizer.no_decay", "[head]", code=2).stderr
    assert (
        "optimizer.no_decay: ['(^|/)(bias|scale)$'] -> ['head']: this run was trained to step 3"
        in refused
    )


def test_old_checkpoints_name_spared_arrays_by_pattern():
    paths = ["params/a/bias", "params/a/kernel", "opt_state/a/bias"]
    saved = {"config": {"optimizer": {"no_decay": ["bias$"]}}, "state": dict.fromkeys(paths)}
    assert spared_by(saved) == ["a/bias"] and spared_by({**saved, "spared": ["x"]}) == ["x"]


@pytest.mark.slow
def test_bfloat16_opt_state_warns_and_is_another_run(tmp_path):
    argv = [
        "--config",
        write(tmp_path, SMALL),
        "--run_dir",
        tmp_path / "run",
        "--optimizer.schedule",
        "constant",
        *MLP,
    ]
    argv += ["--precision.params", "bfloat16", "--optimizer.lr", "1e-5"]
    said = ended("train", *argv, "--steps", "1", "--precision.state", "bfloat16").stdout
    share = re.search(
        r"warning: precision.state: bfloat16: an update of the size of .*1e-05, changes ([\d.]+)% of",
        said,
    )
    assert 0 < float(share[1]) < 20
    refused = ended("train", *argv, "--steps", "2", code=2).stderr
    assert refused.startswith(
        "jaxdp: precision.state: 'bfloat16' -> 'float32': this run was trained to step 1"
    )
    narrow = ended("train", *argv, "--steps", "1", "--precision.state", "float64", code=2).stderr
    assert (
        "precision.state: float64 with precision.params: bfloat16; leave it null, or set it to bfloat16 or"
        in narrow
    )


def test_files_of_others_are_not_replaced(tmp_path):
    """As with `--config config.yaml --run_dir .`"""
    text = write(tmp_path, SMALL).read_text()
    refused = ended(
        "train", "--config", tmp_path / "config.yaml", "--run_dir", tmp_path, code=2
    ).stderr
    assert (
        "is not the directory of a run of jaxdp" in refused
        and "but has 'config.yaml', which a run" in refused
    )
    assert (tmp_path / "config.yaml").read_text() == text and len([*tmp_path.iterdir()]) == 1


def test_a_refused_command_ends_with_code_2(tmp_path):
    """The other refusals are tested without a process."""
    done = jaxdp("--config", write(tmp_path, SMALL), "--modle.target", "MLP", code=2)
    assert "did you mean 'model.target'" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_garbage_collection_leaves_out_the_modules(tmp_path):
    program = "import atexit, gc\natexit.register(lambda: print('frozen', gc.get_freeze_count()))\n"
    program += "from jaxdp.cli import main\nmain()"
    words = [
        "train",
        "--config",
        write(tmp_path, SMALL),
        "--run_dir",
        str(tmp_path / "run"),
        "--steps",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True
    )
    assert int(re.search(r"frozen (\d+)", done.stdout)[1]) > 100_000


@pytest.mark.slow
def test_the_best_checkpoint_by_a_known_metric_is_kept(tmp_path):
    argv = ["--config", write(tmp_path, SMALL), "--run_dir", tmp_path / "run", "--eval.every", 5]
    refused = ended("train", *argv, "--checkpoint.best", "acuracy", code=2).stderr
    assert (
        refused
        == "jaxdp: checkpoint.best: 'acuracy' is not among the numbers of an evaluation: accuracy, loss\n"
    )
    said = jaxdp(*argv, "--checkpoint.best", "loss", "--checkpoint.keep", 1).stdout
    losses = {
        r["step"]: r["loss"]
        for r in records(tmp_path / "run", "eval") + records(tmp_path / "run", "final")
    }
    best = min(losses, key=losses.get)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == sorted(
        {str(best), "30"}
    )
    assert f"best loss so far: {losses[best]:.4g}, after update {best}" in said
    ended_with = next(x for x in said.splitlines() if "params_sha256" in x)
    assert f"best loss {losses[best]:.4g} at step {best}" in ended_with


def test_an_evaluation_is_printed_with_all_its_metrics(capsys):
    record = {"step": 2, "loss": 0.5, "f1": 0.25, "valid/f1": 0.75}
    console = Console(2)
    console.write({**record, "split": "eval"})
    console.write({**record, "split": "final", "stopped": "a reason", "params_sha256": "0"})
    console.write({**record, "split": "train", "lr": 0.1})
    evaluated, last, trained = capsys.readouterr().out.splitlines()
    for line, split in ((evaluated, "eval"), (last, "final")):
        assert line.split() == [
            split,
            "2/2",
            "loss",
            "0.5000",
            "f1",
            "0.2500",
            "valid/f1",
            "0.7500",
        ]
    assert "f1" not in trained


def test_epochs_are_that_many_updates(tmp_path):
    """1,437 examples in batches of 500, computed in parts, are three updates."""
    argv = ["train", "--config", write(tmp_path, SMALL), "--run_dir", tmp_path / "run"]
    argv += ["--steps", 7, "--batch_size", 500, "--parallel.accumulate", "scan"]
    epochs = ["--eval.every", "1 epoch", "--checkpoint.every", "2 epochs"]
    ended(*argv, *epochs, "--optimizer.schedule_steps", 7)
    assert [r["step"] for r in records(tmp_path / "run", "eval")] == [3, 6]
    assert {x.name for x in (tmp_path / "run" / "checkpoints").iterdir()} == {"6", "7"}
    assert "every: 1 epoch" in (tmp_path / "run" / "config.yaml").read_text()
    # A resume compares the numbers of updates: nothing is evaluated again.
    argv += ["--optimizer.schedule_steps", 7, "--eval.every"]
    assert "nothing to do" in ended(*argv, "3").output
    assert "nothing to do" not in ended(*argv, "2 epochs").output


def endless():
    return ({"inputs": np.float32([i % 2]), "labels": np.int32(i % 2)} for i in itertools.count())


def test_a_stream_has_no_epochs(tmp_path):
    source = f"{{source: {__name__}.endless}}"
    text = f"model: {{target: MLP, args: {{num_classes: 2}}}}\ndata: {{target: Stream, args: {source}}}\nsteps: 9"
    argv = ["train", "--config", write(tmp_path, text), "--run_dir", tmp_path / "run"]
    for key in ("eval.every", "checkpoint.every"):
        done = ended(*argv, f"--{key}", "2 epochs", code=2)
        expected = f"jaxdp: {key}: 2 epochs, but the stream's length is unknown; give a number of"
        assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1
        assert not (tmp_path / "run").exists()


def with_named_sets(tmp_path):
    also = "{train: {target: Digits, args: {split: train}}, again: Digits}"
    argv = ["--config", write(tmp_path, SMALL), "--eval.every", 15, "--eval.also", also]
    return [*argv, "--checkpoint.best", "train/loss"]


@pytest.mark.slow
def test_named_evaluation_sets_are_in_the_same_records(tmp_path):
    """And one of them can decide on the best checkpoint."""
    out = jaxdp(*with_named_sets(tmp_path), "--run_dir", tmp_path / "run").stdout
    assert "evaluates on 360 and 1,437 (train) and 360 (again)" in out and "train/loss" in out
    found = [*records(tmp_path / "run", "eval"), *records(tmp_path / "run", "final")]
    assert [r["step"] for r in found] == [15, 30]
    for r in found:
        assert (
            r["again/loss"] == r["loss"] != r["train/loss"] and r["again/accuracy"] == r["accuracy"]
        )


@pytest.mark.slow
@pytest.mark.mpi
def test_named_evaluation_sets_agree_on_two_processes(tmp_path):
    argv = with_named_sets(tmp_path)
    jaxdp(*argv, "--run_dir", tmp_path / "run")
    two = mpirun(2, ["train.py", *map(str, argv), "--run_dir", str(tmp_path / "two")])
    assert two.returncode == 0, two.stderr
    one, both = (records(tmp_path / run, "final")[0]["train/loss"] for run in ("run", "two"))
    assert both == pytest.approx(one, rel=1e-5)


LONGER = """
import numpy as np


class Text:
    classes = 11

    def __init__(self, number, length):
        self.number, self.length = number, length

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        tokens = np.random.default_rng(i).integers(0, 11, self.length + 1).astype(np.int32)
        return {"inputs": tokens[:-1], "labels": tokens[1:]}
"""
LONGER_CONFIG = """
model: {target: GPT, args: {layers: 1, heads: 2, dim: 16, positions: rotary}}
data: {target: longer.Text, args: {number: 64, length: 16}}
loss: {target: CausalLM}
steps: 2
batch_size: 8
optimizer: {target: adamw, lr: 1.0e-3}
eval:
  data: {target: longer.Text, args: {number: 20, length: 24}}
  also: {short: {target: longer.Text, args: {number: 12, length: 8}}}
"""


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["pmap", "pjit"])
def test_evaluation_sets_may_have_other_shapes(tmp_path, backend):
    (tmp_path / "longer.py").write_text(LONGER)
    argv = ["--config", write(tmp_path, LONGER_CONFIG), "--parallel.backend", backend]
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    jaxdp(*argv, "--run_dir", tmp_path / "one", env=env)
    two = mpirun(2, ["train.py", *map(str, argv), "--run_dir", str(tmp_path / "two")], env=env)
    assert two.returncode == 0, two.stderr
    one, two = (records(tmp_path / name, "final")[0] for name in ("one", "two"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["short/loss"] == pytest.approx(one["short/loss"], rel=1e-5) != one["loss"]


def test_int64_data_without_x64_is_refused(tmp_path):
    (tmp_path / "wide.py").write_text(
        "import numpy as np\ndef data():\n    return [(np.zeros((4, 4, 1), np.float32), np.int64(2**31))] * 8\n"
    )
    config = write(
        tmp_path, SMALL.replace("{target: Digits, args: {augment: true}}", "{target: wide.data}")
    )
    done = jaxdp("--config", config, "--model.args.num_classes", 3, cwd=tmp_path, code=2)
    assert "'labels' is int64" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_eval_of_an_unknown_step_lists_the_saved_steps(tmp_path):
    run, config = tmp_path / "run", write(tmp_path, SMALL)
    ended(
        "train",
        "--config",
        config,
        "--run_dir",
        run,
        "--steps",
        4,
        "--checkpoint.every",
        2,
        "--eval.every",
        2,
    )
    at_two, at_four = (
        {k: f"{r[k]:.4f}" for k in ("loss", "accuracy")}
        for r in records(run)
        if r["split"] in ("eval", "final")
    )
    assert at_two != at_four
    for argv, want in ((["--step", 2], at_two), (["--step=4"], at_four), ([], at_four)):
        out = ended("eval", "--run_dir", run, *argv).stdout
        assert re.search(rf"loss +{want['loss']}  accuracy +{want['accuracy']}", out), out
    for verb in ("eval", "export"):
        refused = ended(verb, "--run_dir", run, "--step", 3, code=2).stderr
        assert refused == f"jaxdp: --step: 3 is not in {str(run)!r}; use one of 2, 4, last, best\n"
    done = ended("eval", "--run_dir", run, "--step", "two", code=2)
    assert done.stderr.startswith(f"jaxdp: --step: two is not in {str(run)!r}; use one of 2, 4")
    done = ended("eval", "--run_dir", run, "--step", "best", code=2)
    assert "no checkpoint in" in done.stderr and "checkpoint.best" in done.stderr
    (run / "checkpoints" / "2" / "state" / "_METADATA").write_text("{")
    done = ended("eval", "--run_dir", run, "--step", 2, code=2)
    assert (
        "checkpoint 2 is damaged" in done.stdout
        and f"no undamaged checkpoint 2 in {str(run)!r}" in done.stderr
    )
    assert (run / "checkpoints" / "2").is_dir() and ended("eval", "--run_dir", run, "--step", 4)


def test_damaged_run_directories(single, tmp_path):
    """What a checkpoint is of stands in its manifest; config.yaml is for people, and written anew."""
    config = write(tmp_path, SMALL)
    shutil.copytree(single, tmp_path / "odd")
    (tmp_path / "odd" / "config.yaml").write_text("a: [")

    def run(name, *more, **expected):
        return ended("train", "--config", config, "--run_dir", tmp_path / name, *more, **expected)

    assert "finished" in run("odd").stdout
    assert "seed: 0 -> 1" in run("odd", "--seed", 1, code=2).stderr
    shutil.copytree(single, tmp_path / "torn")
    with (tmp_path / "torn" / "metrics.jsonl").open("ab") as file:
        file.write(b'3\n[1]\n\xff\xfe\n{"step":')
    assert "finished" in run("torn").stdout
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoints").write_text("")
    assert "cannot write" in run("file", code=2).stderr
    done = ended("eval", "--run_dir", single, "--model.args.widths", "[2]", code=2)
    assert "model.args.widths: [4] -> [2]" in done.stderr


@pytest.mark.slow
def test_a_sized_sequence_is_data_by_its_path(tmp_path):
    (tmp_path / "rows.py").write_text(
        "import numpy as np\nROWS = [{'inputs': np.ones((4, 4, 1), np.float32), 'labels': i % 3} for i in range(9)]\n"
    )
    config = write(
        tmp_path, SMALL.replace("{target: Digits, args: {augment: true}}", "{target: rows.ROWS}")
    )
    jaxdp("--config", config, "--model.args.num_classes", 3, "--steps", 2, cwd=tmp_path)
    final = records(tmp_path / "runs" / "config", "final")[0]
    assert (
        final["loss"] == records(tmp_path / "runs" / "config", "train")[-1]["loss"]
    )  # nothing to evaluate on


def test_help_reads_well():
    for argv in (["-m", "jaxdp", "--help"], ["train.py", "--help"]):
        done = subprocess.run(
            [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stdout.startswith("usage: ") and not done.stderr
    for key in (
        "--optimizer.clip_norm",
        "--parallel.backend {pmap,pjit}",
        "--microbatches",
        "over all devices",
    ):
        assert key in done.stdout
    for verb, row in cli.VERBS.items():
        text = cli.help_of(verb)
        assert text.startswith(f"usage: jaxdp {verb}") and all(
            f"  {line}\n" in text for line in row.examples
        ), verb
    keys = [key for key, hint in known_keys().items() if inner(hint) is None]
    shown = re.findall(r"^  --([\w.]+)", done.stdout, re.MULTILINE)
    own = [*cli.VERBS["train"].options, "config", "print_config"]
    assert sorted(shown) == sorted([*keys, *own])  # and none that is refused
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", "trian"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "unknown verb 'trian'" in done.stderr


def test_a_removed_verb_names_its_replacement():
    done = ended("profile", "--config", "configs/digits.yaml", code=2)
    words = "unknown verb 'profile'; jaxdp train --profile.start N writes a trace, "
    assert done.stderr.startswith(f"jaxdp: {words}") and done.stderr.count("\n") == 1


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("which", "np_", "devices", "backend"),
    [
        ("openmpi5", 2, 2, "pjit"), pytest.param("openmpi5", 2, 1, "pmap", marks=pytest.mark.slow),
        pytest.param("openmpi5", 4, 1, "pjit", marks=pytest.mark.slow),
        pytest.param("openmpi5", 2, 2, "pmap", marks=pytest.mark.slow),
        pytest.param("mpich", 2, 1, "pjit", marks=pytest.mark.slow),
        pytest.param("openmpi4", 2, 1, "pmap", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_processes_change_nothing(single, tmp_path, which, np_, devices, backend):
    argv = [
        "train.py",
        "--config",
        write(tmp_path, SMALL),
        "--run_dir",
        tmp_path / "run",
        "--parallel.backend",
        backend,
    ]
    done = mpirun(np_, list(map(str, argv)), which, devices=devices)
    assert done.returncode == 0, done.output
    assert not done.left
    assert_same_curve(tmp_path / "run", single)
    assert done.stdout.count("final 30/30") == 1  # rank 0 alone prints


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("which", first(1, ["openmpi5", "mpich"]))
def test_bad_input_under_mpirun_is_said_once(tmp_path, which):
    config = write(tmp_path, SMALL)
    for argv, words in (
        (["--modle.target", "X"], "did you mean"),
        (["--microbatches", "1"], "set microbatches to 2"),
    ):
        done = mpirun(
            2,
            ["train.py", "--config", str(config), "--run_dir", str(tmp_path / "r"), *argv],
            which,
            timeout=60,
        )
        assert done.returncode == 2, done.output
        assert (
            done.stderr.count("jaxdp: ") == 1
            and words in done.stderr
            and "Traceback" not in done.stderr
        )
        assert not done.left and done.seconds < 30


@pytest.mark.slow
@pytest.mark.mpi
def test_two_hosts_change_nothing(single, tmp_path):
    argv = ["train.py", "--config", str(write(tmp_path, SMALL)), "--run_dir", str(tmp_path / "run")]
    with TwoHosts(tmp_path) as hosts:
        done = hosts.mpirun(argv, timeout=300)
    assert done.returncode == 0, done.output
    assert (
        json.loads((tmp_path / "run" / "env.json").read_text())["topology"]["hosts"] == hosts.names
    )
    assert_same_curve(tmp_path / "run", single)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    "fault", ["OSError('the disk is gone')", pytest.param("SystemExit(0)", marks=pytest.mark.slow)]
)
def test_a_rank_that_fails_ends_the_job_in_seconds(tmp_path, fault):
    (tmp_path / "failing.py").write_text(
        "import pathlib\nimport jaxdp\nfrom jaxdp.data.digits import Digits\n"
        "class Data(Digits):\n"
        "    def read(self, indices):\n"
        "        if jaxdp.current().rank == 1 and 1000 in indices:\n"
        f"            pathlib.Path({str(tmp_path / 'failed')!r}).touch()\n"
        f"            raise {fault}\n"
        "        return super().read(indices)\n"
    )
    config = write(
        tmp_path, SMALL.replace("{target: Digits, args: {augment: true}}", "{target: failing.Data}")
    )
    argv = [
        "train.py",
        "--config",
        str(config),
        "--run_dir",
        str(tmp_path / "run"),
        "--steps",
        "60",
    ]
    done = mpirun(2, argv, env={"PYTHONPATH": str(tmp_path)}, timeout=60)
    assert done.returncode == 1, done.output
    assert (
        "rank 1 " in done.stderr
        and time.time() - (tmp_path / "failed").stat().st_mtime < 30
        and not done.left
    )
    assert ("the disk is gone" in done.stderr) == fault.startswith("OSError")


def ranks(tmp_path, argvs, timeout=60.0, prefixes=None):
    """Two processes with arguments of their own, as two hosts might have: told apart by their rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = tmp_path / "each.py"
    script.write_text(
        "import json, os, sys\nfrom jaxdp.cli import main\n"
        "main(['train', *json.loads(sys.argv[1])[int(os.environ['JAXDP_PROCESS_ID'])]])\n"
    )
    env = {"JAXDP_COORDINATOR": f"127.0.0.1:{port}", "JAXDP_NUM_PROCESSES": "2"}
    each = [env | {"JAXDP_PROCESS_ID": str(r)} for r in range(2)]
    return processes(
        [str(script), json.dumps([list(map(str, a)) for a in argvs])], each, timeout, 1, prefixes
    )


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param([], ["--modle.target", "X"], "rank 1", marks=pytest.mark.slow),
        ([], ["--seed", "3"], "seed"),
        pytest.param(
            [],
            ["--data.target", "MNIST", "--data.args", "{root: /nowhere}"],
            "rank 1",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["config error on one", "configs that differ", "data missing on one"],
)
def test_ranks_that_differ_are_named_once(tmp_path, first, second, words):
    base = ["--config", write(tmp_path, SMALL), "--run_dir", tmp_path / "run"]
    refused_once(ranks(tmp_path, [[*base, *first], [*base, *second]]), words)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_that_waits_for_others(tmp_path, number):
    address = ("127.0.0.1", port())
    argv = ["train.py", "--config", write(tmp_path, SMALL), "--run_dir", str(tmp_path / "run")]
    alone = {
        "JAXDP_COORDINATOR": "{}:{}".format(*address),
        "JAXDP_NUM_PROCESSES": "2",
        "JAXDP_PROCESS_ID": "0",
    }

    def has_coordinator():
        with socket.socket() as client:
            return not client.connect_ex(address)

    during = when(has_coordinator, lambda process: process.send_signal(number))
    [done] = together([([sys.executable, *argv], alone)], 60.0, 1, during)
    assert done.returncode == 75 and not done.left, done.output
    assert f"jaxdp: {number.name} before the first update: nothing to save" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_directory_that_is_not_shared(tmp_path):
    """Rank 1 has a file system of its own at the same path, as a host without the network mount
    would.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    alone = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none "$0" && exec "$@"',
        str(run_dir),
    ]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("mounting in a namespace of one's own is not permitted here")
    base = ["--config", write(tmp_path, SMALL), "--run_dir", run_dir]
    refused_once(
        ranks(tmp_path, [base, base], prefixes=[[], alone]),
        "is not the directory that rank 0 writes to",
    )


def refused_once(done, words):
    errors = "".join(d.stderr for d in done)
    assert [d.returncode for d in done] == [2, 2], errors
    assert errors.count("jaxdp: ") == 1 and words in errors and "Traceback" not in errors
    assert max(d.seconds for d in done) < 30 and not done[0].left


@pytest.mark.parametrize(
    ("argv", "processes", "restart", "command"),
    [
        (["-n", "3", "train", "--config", "x"], 3, 0, ["train", "--config", "x"]),
        (["--restart=2", "--", "python", "a.py", "-n", "5"], 2, 2, ["python", "a.py", "-n", "5"]),
        (["python", "a.py", "--help"], 2, 0, ["python", "a.py", "--help"]),
        (["-n", "2"], 2, 0, []),
    ],
)
def test_launch_leaves_the_command_as_it_is(argv, processes, restart, command):
    options = cli.parse(argv, "launch")[0]
    assert options == {"processes": processes, "restart": restart, "command": command}


def test_an_option_before_a_command_that_is_not_known():
    with pytest.raises(UsageError, match="unknown option 'restarts'; did you mean 'restart'"):
        cli.parse(["--restarts", "2", "train", "--config", "x"], "launch")[0]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_options_of_a_verb_fill_less_than_a_screen(verb):
    """The keys of a config are listed once, by `train`."""
    text, row = cli.help_of(verb), cli.VERBS[verb]
    shown = re.findall(r"^  (?:-\w(?: \w+)?, )?--(?!help)([\w.]+)", text, re.MULTILINE)
    of_config = ["config"] * row.has_config + ["print_config"] * (row.where in ("job", "alone"))
    own = [*of_config, *row.options]
    assert shown[: len(own)] == own
    assert verb == "train" or (shown == own and text.count("\n") <= 40)


@pytest.mark.parametrize(
    "argv", [["train", "--help"], ["launch", "--help"], ["train", "--print_config"]]
)
def test_a_reader_that_leaves_is_no_error(argv):
    """As `head` does."""
    words = [sys.executable, "-m", "jaxdp", *argv, "--config", "configs/digits.yaml"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(words, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    os.close(write_end)
    assert done.returncode == 0 and not done.stderr, done


def test_help_behind_the_command_is_the_commands():
    assert "usage: jaxdp launch" in ended("launch", "-n", "2", "--help").stdout
    words = [sys.executable, "-m", "jaxdp", "launch", "-n", "1", "eval", "--help"]
    assert (
        "usage: jaxdp eval"
        in subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=60).stdout
    )


@pytest.mark.mpi
def test_launch_leaves_the_platform_to_the_job(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    show = "import os; os.write(1, os.environ.get('JAX_PLATFORMS', 'any').encode() + b' ')"
    words = [sys.executable, "-m", "jaxdp", "launch", "-n", "2", sys.executable, "-c", show]
    assert (
        subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=60).stdout.split()
        == ["any"] * 2
    )


def test_a_verb_without_devices_opens_the_cpu_alone(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    show = "import jax; from jaxdp.process import environment; environment.use_cpu(); print(jax.config.jax_platforms)"
    done = subprocess.run(
        [sys.executable, "-c", show], cwd=ROOT, text=True, capture_output=True, timeout=60
    )
    assert done.stdout.split() == ["cpu"], done.stderr


@pytest.mark.mpi
def test_launch_ends_its_processes_if_one_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setenv("DIR", str(tmp_path / "run"))
    monkeypatch.setenv(
        "JAXDP_TIMEOUT", "600"
    )  # of the first process, which would wait for the other
    script = tmp_path / "two.py"
    script.write_text(
        "import os, subprocess\n"
        "class Once(subprocess.Popen):\n"
        "    count = 0\n"
        "    def __init__(self, *args, **kwargs):\n"
        "        Once.count += 1\n"
        "        if Once.count > 1:\n"
        "            raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "        super().__init__(*args, **kwargs)\n"
        "subprocess.Popen = Once\n"
        "from jaxdp.cli import main\n"
        "main(['launch', '-n', '2', 'train', '--config', 'configs/digits.yaml', '--run_dir', os.environ['DIR']])"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == "jaxdp: launch: 'train' cannot be started: Resource temporarily unavailable"
    )


def test_a_failed_start_leaves_signals_unblocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pytest.raises(OSError, match="Argument list too long"):  # 128 KiB a variable on Linux
        start_verb(["train"], {"LONG": "x" * 2**20})
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_signal_during_a_start_waits_for_its_handler(tmp_path):
    """Without a handler, the process would die of it, with code -15."""
    words = ["train", "--config", "configs/digits.yaml", "--run_dir", str(tmp_path / "run")]
    child = start_verb(words, os.environ | {"PYTHONPATH": str(ROOT)})
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 75 and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_malloc_settings_change_no_environment():
    show = "import os; from jaxdp.process import environment; environment.malloc(); "
    show += "print(os.environ.get('GLIBC_TUNABLES'))"
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}

    def run(**more):
        return subprocess.run(
            [sys.executable, "-c", show],
            cwd=ROOT,
            env=env | more,
            text=True,
            capture_output=True,
            timeout=60,
            check=True,
        )

    assert run().stdout.split() == ["None"]
    assert run(GLIBC_TUNABLES="glibc.malloc.check=0").stdout.split() == ["glibc.malloc.check=0"]


@pytest.mark.mpi
def test_launch_sets_ranks_and_ends_with_the_jobs_code(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nos.write(1, os.environb[b'JAXDP_PROCESS_ID'] + b' ')\nsys.exit(int(sys.argv[1]))\n"
    )
    for code in (0, 2, 75, 1):
        words = [
            sys.executable,
            "-m",
            "jaxdp",
            "launch",
            "-n",
            "3",
            sys.executable,
            str(script),
            str(code),
        ]
        done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=60)
        assert (done.returncode, sorted(done.stdout.split())) == (code, ["0", "1", "2"])


@pytest.mark.mpi
@pytest.mark.parametrize("codes", ["01", "10"])
def test_a_job_fails_if_one_of_its_processes_fails(tmp_path, codes):
    """A process that leaves the others to their fate is no end."""
    check_end(tmp_path, codes, 1)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("rank_1", "more", "code", "expected"),
    [
        ("sys.exit(1)", ["--restart", "1"], 1, ""),
        (
            "os.kill(os.getpid(), 9)",
            [],
            1,
            "jaxdp: launch: rank 1 has ended by SIGKILL; others run",
        ),
        ("sys.exit(3)", [], 1, "jaxdp: launch: rank 1 has ended with code 3; others run"),
    ],
    ids=["restart", "killed", "code"],
)
def test_a_script_that_fails_on_one_rank_has_failed(tmp_path, rank_1, more, code, expected):
    """The others end when the launcher has named it."""
    script = tmp_path / "one.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        f"if os.environ['JAXDP_PROCESS_ID'] == '1':\n    {rank_1}\n"
        "while sys.argv[1] and sys.argv[1] not in pathlib.Path('err').read_text():\n    time.sleep(0.05)\n"
    )
    words = [
        sys.executable,
        "-m",
        "jaxdp",
        "launch",
        "-n",
        "3",
        *more,
        sys.executable,
        str(script),
        expected,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with (tmp_path / "err").open("w") as err:
        assert (
            subprocess.run(words, cwd=tmp_path, env=env, stderr=err, timeout=60).returncode == code
        )


@pytest.mark.parametrize(
    "call",
    [
        "init(init_method='tcp://localhost')",
        "init(rank=0)",
        "allreduce(1.0)",
        "init(rank='0', size=2)",
    ],
)
def test_bad_input_of_a_script_is_one_line(call):
    """allreduce: of two processes, of which none has called init."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env |= {"JAXDP_PROCESS_ID": "0", "JAXDP_NUM_PROCESSES": "2", "JAXDP_COORDINATOR": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", f"import jaxdp; jaxdp.{call}"],
        env=env,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (
        done.returncode == 2 and done.stderr.startswith("jaxdp: ") and done.stderr.count("\n") == 1
    ), done.stderr


def test_a_signal_ends_a_launch_that_waits_to_restart(tmp_path):
    words = [
        sys.executable,
        "-m",
        "jaxdp",
        "launch",
        "-n",
        "1",
        "--restart",
        "1000",
        "sh",
        "-c",
        "echo x; exit 1",
    ]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            assert process.stdout.readline() == "x\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
