"""Mistakes that a newcomer makes in code of their own: one line that names the line of theirs, and
code 2.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from covering import first
from jaxdp import current
from jaxdp.cli import load
from jaxdp.errors import UsageError
from jaxdp.run.build import make_run
from jaxdp.run.training_job import train

CODE = """
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Net(nnx.Module):
    def __init__(self, channels: int = 1, *, rngs: nnx.Rngs):
        self.conv, self.out = nnx.Conv(channels, 4, (3, 3), rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.conv(x).max((1, 2)))


class Pair(Net):
    def __call__(self, x):
        return super().__call__(x), x


class Branches(Net):
    def __call__(self, x):
        if x.mean() > 0:
            x = -x
        return super().__call__(x)


class Calls(Net):
    def __call__(self, x):
        return super().__call__(jax.pure_callback(np.negative, jax.ShapeDtypeStruct(x.shape, x.dtype), x))


class NoRngs(nnx.Module):
    def __call__(self, x):
        return x


CLASSES = np.zeros(3)


def loss(outputs, batch):
    losses = -jax.nn.log_softmax(outputs)[:, 0] * batch["mask"]
    return losses.sum(), batch["mask"].sum(), {}


def of_labels(outputs, labels):
    return jnp.abs(outputs - labels).sum(), 1.0, {}


def forgets_the_mask(outputs, batch):
    return outputs.sum(), len(outputs), {}


def stateful(first, change):
    def init(key, inputs):
        return {"w": jax.numpy.zeros(3)}, {"count": first}

    def apply(params, inputs, state):
        return inputs.sum((1, 2)) * params["w"], {"count": change(state["count"])}

    return init, apply


def fraction():
    return stateful(jax.numpy.int32(0), lambda count: count + 0.5)


def random_key():
    return stateful(jax.random.key(0), lambda count: count)


def data(split="train"):
    return np.zeros((24, 4, 4, 1), np.float32), np.zeros(24, np.int32)


def channels_first(split="train"):
    x, y = data()
    return x.transpose(0, 3, 1, 2), y


def wide(split="train"):
    return np.zeros((24, 4, 4, 1)), np.zeros(24, int)


def column(split="train"):
    x, y = data()
    return x, y[:, None]


def three(split="train"):
    x, y = data()
    return x, y, y


def no_file(split="train"):
    return np.load("nowhere.npy")


class NoCall(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(4, 3, rngs=rngs)


class Constant(nnx.Module):
    def __init__(self, rngs):
        pass

    def __call__(self, x):
        return x.sum((1, 2))


class Batches:
    def __init__(self, kind, split="train"):
        self.kind = kind

    def __len__(self):
        return 24

    def read(self, indices):
        x, n = np.zeros((24, 4, 4, 1), np.float32), len(indices)
        arrays = {
            "a list": [x[:n]], "nothing": {}, "a list inside": {"inputs": x[:n].tolist()}, "numbers": {0: x[:n]},
            "too few": {"inputs": x[: n - 1]}, "texts": {"inputs": np.array(["a"] * n)},
        }
        return arrays[self.kind]


def no_argument(lr):
    return lambda: lr


def a_text(lr):
    return lambda step: "fast"


class Reads:
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return {"inputs": self.x[i]}


def augment(example, key):
    return {"inputs": example["image"]}
"""
CONFIG = """
model: {target: mine.Net}
data: {target: mine.data}
loss: {target: mine.loss}
steps: 2
batch_size: 8
"""
LINE = r"mine\.py:\d+ \(in {}: {}\)"
BAD = {
    "a model that returns a tuple": (
        ["--model.target", "mine.Pair"],
        f"loss: it failed at {LINE.format('loss', '.*')}: TypeError: .*; a loss is called as .outputs, batch., "
        r"here with \(float32\[1, 3\], float32\[1, 4, 4, 1\]\) and {inputs: .*, labels: int32\[1\], mask: ",
    ),
    "a tuple for a loss of ours": (
        ["--model.target", "mine.Pair", "--loss.target", "SoftmaxCrossEntropy"],
        "loss: the model returns tuple, not one array",
    ),
    "channels that do not fit": (
        ["--model.args.channels", "3"],
        f"model: it failed at {LINE.format('__call__', 'return self.out.*')}: ValueError: .*; the batch is {{inputs: ",
    ),
    "channels first": (
        ["--data.target", "mine.channels_first"],
        r"model: it .*the batch is {inputs: float32\[1, 1, 4",
    ),
    "a branch on a value": (
        ["--model.target", "mine.Branches"],
        r"model: it failed at .*in __call__: if x.mean\(\) > 0",
    ),
    "an integer that gets a fraction": (
        ["--model.target", "mine.fraction"],
        "model: its state 'count' changes from int32 to float32; initialize it with the dtype that it gets",
    ),
    "a random key as state": (
        ["--model.target", "mine.random_key"],
        "model: its state 'count' is a random key",
    ),
    "no __call__": (["--model.target", "mine.NoCall"], "model: NoCall has no __call__; define it"),
    "no parameters": (
        ["--model.target", "mine.Constant"],
        "model: 'mine.Constant' has no parameters, so there is",
    ),
    "an array as a model": (
        ["--model.target", "mine.CLASSES"],
        "model.target: it is an object of type ndarray, not a",
    ),
    **{
        f"a read of {kind}": (
            ["--data", f"{{target: mine.Batches, args: {{kind: {kind}}}}}"],
            words,
        )
        for kind, words in {
            "a list": "data: Batches.read gave a list; return a dict of arrays by name",
            "nothing": r"data: Batches.read gave a dict with the keys \[\]; return a dict of arrays by name",
            "numbers": r"data: Batches.read gave a dict with the keys \[0\]; return a dict of arrays by name",
            "a list inside": "data: Batches.read gave 'inputs' as list for 1 indices; return arrays, with one entry an",
            "too few": r"data: Batches.read gave 'inputs' of shape \(0, 4, 4, 1\) for 1 indices; return arrays",
            "texts": "data: 'inputs' is <U1, not numbers; encode it before it is read",
        }.items()
    },
    "a schedule without an argument": (
        ["--optimizer.schedule", "mine.no_argument"],
        "optimizer.schedule.args: no_argument.*failed.*: TypeError: .* 0 positional arguments but 1 was given",
    ),
    "a schedule of texts": (
        ["--optimizer.schedule", "mine.a_text"],
        "optimizer.schedule.args: a_text.*failed: Type",
    ),
    "no rngs": (
        ["--model.target", "mine.NoRngs"],
        "got an initialized NoRngs; .* that takes rngs: nnx.Rngs",
    ),
    "a loss of labels": (
        ["--loss.target", "mine.of_labels"],
        r"loss: .*TypeError: .* as \(outputs, labels\), and returns a loss of each example",
    ),
    "a weight that is a length": (
        ["--loss.target", "mine.forgets_the_mask"],
        r"loss: it returned \(float32\[\], a Python int, {}\); a loss returns",
    ),
    "64 bits": (
        ["--data.target", "mine.wide"],
        r"data: 'inputs' is float64, .* cast to float32, as by .astype\(np.float32\)",
    ),
    "labels in a column": (
        ["--data.target", "mine.column", "--loss.target", "SoftmaxCrossEntropy"],
        r"logits \[1, 1, classes\], or the labels drop their last dim",
    ),
    "three arrays": (
        ["--data.target", "mine.three"],
        "data: a tuple of 3 arrays of different shapes; give a pair",
    ),
    "a file that is not there": (
        ["--data.target", "mine.no_file"],
        r"data.args: no_file\(split='train'\) failed at mine.py:\d+ .*: FileNotFoundError: .*'nowhere.npy'",
    ),
    "an example that fails": (
        ["--data.target", "mine.Reads"],
        "data: it failed at mine.py.*in __getitem__: .*'x'",
    ),
    "a transform that fails": (
        ["--data.transform.target", "mine.augment"],
        "data.transform: it failed at mine.py.*in augment: .*: KeyError: 'image'",
    ),
    "a module that fails": (
        ["--model.target", "broken.Net"],
        r"'broken.Net' cannot be imported: SyntaxError: .*line 1",
    ),
    "a misspelt module": (["--model.target", "mime.Net"], "no module 'mime'; did you mean 'mine'?"),
    "a module alone": (
        ["--model.target", "mine"],
        "'mine' is a module: name an object in it, such as mine.Name",
    ),
    "a file": (
        ["--model.target", "mine.py"],
        "'mine.py' is a file; name an object in it, such as mine.Name",
    ),
    "a colon": (["--model.target", "mine:Net"], "; with a dot: mine.Net"),
    "an array's file": (
        ["--data.target", "x.npy"],
        "'x.npy' is a file; name a function of yours that reads",
    ),
    "another trainer's key": (["--learning_rate", "1"], "did you mean 'optimizer.lr'?"),
    "an argument that is no key": (
        ["--model.channels", "1"],
        "did you mean 'model.args.channels'?",
    ),
    "an argument of the optimizer": (
        ["--optimizer.momentum", "1"],
        "did you mean 'optimizer.args.momentum'?",
    ),
    "an argument without a name": (
        ["other.yaml"],
        # The folder jaxdp/starter may be deleted.
        "DATA: 'other.yaml' is not data .*; a config needs --config|DATA: other.yaml needs the folder",
    ),
    "a section that is a word": (
        ["--config", "word.yaml"],
        r"model: 'mine.Net' is not a mapping; .*model: {target: ...}",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    for name, text in {
        "mine.py": CODE,
        "mine.yaml": CONFIG,
        "word.yaml": "model: mine.Net",
        "broken.py": "def",
        "x.npy": "",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_that_says_where_it_is(case, folder, monkeypatch):
    monkeypatch.chdir(folder)
    argv, words = BAD[case]
    with pytest.raises(UsageError) as refused:
        config, *_ = load(["--config", "mine.yaml", "--parallel.devices", "1", *argv])
        make_run(config, pathlib.Path("run"), current())
    assert re.search(words, str(refused.value)), refused.value
    assert "\n" not in str(refused.value) and str(pathlib.Path(__file__).parents[2]) not in str(
        refused.value
    )


@pytest.mark.slow
def test_a_model_without_vmap_trains_by_microbatches(folder, monkeypatch):
    monkeypatch.chdir(folder)
    argv = [
        "--config",
        "mine.yaml",
        "--parallel.devices",
        "1",
        "--model.target",
        "mine.Calls",
        "--run_dir",
        "mapped",
    ]
    config, path, _ = load(argv)
    words = f"model: it failed at {LINE.format('__call__', '.*')}: .*vmap.*; .*, set parallel.accumulate: scan$"
    with pytest.raises(UsageError, match=words):
        train(config, path, current())
    config, path, _ = load([*argv, "--parallel.accumulate", "scan"])
    assert train(config, path, current())[0]["step"] == 2


def command(*argv, verb="train"):
    return [sys.executable, "-m", "jaxdp", verb, "--config", "mine.yaml", *argv]


@pytest.mark.slow
@pytest.mark.parametrize("verb", first(1, ["train", "plan", "verify"]))
def test_the_command_says_it_without_a_traceback(verb, folder):
    argv = command("--run_dir", "refused", "--model.target", "mine.Pair", verb=verb)
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and re.fullmatch(
        r"jaxdp: loss: it failed at mine.py:.*\n", done.stderr
    ), done.stderr
    assert not done.stdout and not (folder / "refused").exists()


@pytest.mark.slow
def test_a_closed_pipe_of_the_output_ends_no_training(folder):
    read, write = os.pipe()
    job = subprocess.Popen(
        command("--run_dir", "left"), cwd=folder, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    os.close(read)
    said = job.communicate(timeout=300)[1]
    assert job.returncode == 0 and not said, said
    assert '"final"' in (folder / "left" / "metrics.jsonl").read_text()
