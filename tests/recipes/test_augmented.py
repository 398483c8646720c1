"""A data set whose images are augmented: the same numbers on any devices, only in training."""

import json
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import jaxdp
from cli_runs import ended, records
from cli_runs import jaxdp as jaxdp_command
from jaxdp.data import Augmented
from jaxdp.data.dataset import Arrays
from jaxdp.data.standardized import StandardizedImages
from jaxdp.data.transforms import both
from jaxdp.errors import UsageError
from jaxdp.recipes.crops import flip
from jaxdp.recipes.cutmix import CutMix

STEPS = [
    "RandomFlip",
    {"target": "RandomCrop", "args": {"padding": 2}},
    {"target": "RandomResizedCrop", "args": {"scale": [0.3, 1]}},
    {"target": "RandAugment", "args": {"magnitude": 12}},
]


class Images(StandardizedImages, Arrays):
    """Random images of two brightnesses; every fifth does not count."""

    classes, augment, mean, std, input_shape = 2, False, 0.5, 0.25, (9, 8, 3)
    class_names = ("dark", "bright")

    def __init__(self, split="train", size=88):
        rng = np.random.default_rng(0)
        labels = np.arange(size, dtype=np.int32) % 2
        images = rng.integers(0, 128, (size, 9, 8, 3)) + 100 * labels[:, None, None, None]
        mask = np.float32(np.arange(size) % 5 != 0)
        super().__init__(inputs=images.astype(np.uint8), labels=labels, mask=mask)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.conv(x)).mean((1, 2)))


def step_of(*steps):
    """The first step of a data set, as it is bound."""
    return Augmented(Images(), steps).steps[0]


def test_devices_and_a_resume_change_nothing(tmp_path):
    def fit(devices, run, steps=9):
        return jaxdp.fit(
            Net,
            Augmented(Images(), STEPS),
            transform=CutMix(2),
            steps=steps,
            batch_size=48,  # a last batch of 40
            microbatches=4,
            optimizer={"target": "sgd", "lr": 0.1, "schedule": "constant"},
            parallel={"devices": devices, "backend": "pjit"},
            log={"every": 1},
            run_dir=tmp_path / run,
            eval_data=Images(),
        )

    one = fit(1, "one")
    fit(2, "several", 4)
    several = fit(4, "several")
    curves = [[r["loss"] for r in records(tmp_path / x, "train")] for x in ("one", "several")]
    assert len(curves[0]) == len(curves[1]) == 9
    np.testing.assert_allclose(*curves, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (one.params, several.params))):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert len({*curves[0]}) == 9


def transformed(dataset, rows, train, key=3):
    batch = {name: jax.numpy.asarray(x) for name, x in dataset.read(np.array(rows)).items()}
    return dataset.transform(batch, jax.random.key(key), train)


def test_an_evaluation_has_the_sets_own_transform():
    rows = np.arange(10)
    for steps in ([], STEPS):
        got = transformed(Augmented(Images(), steps), rows, False)
        wanted = transformed(Images(), rows, False)
        for name, values in wanted.items():
            np.testing.assert_array_equal(got[name], values)


@pytest.mark.slow
def test_an_image_depends_on_its_key_and_row_alone():
    """Not on how many rows there are, on the other images, or on their masks."""
    dataset = Augmented(Images(), STEPS)
    whole = transformed(dataset, range(12), True)
    few = transformed(dataset, [*range(5), 70], True)
    np.testing.assert_array_equal(few["inputs"][:5], whole["inputs"][:5])
    other = transformed(dataset, range(12), True, key=4)
    assert (np.asarray(other["inputs"]) != whole["inputs"]).any((1, 2, 3)).mean() > 0.8
    for name in ("labels", "mask"):
        np.testing.assert_array_equal(whole[name], dataset.read(np.arange(12))[name])


def test_steps_come_in_their_order_before_the_sets_own():
    rows = list(range(8))
    [one, two] = [step_of("RandomFlip"), step_of({"target": "RandomCrop", "args": {"padding": 3}})]
    got = transformed(Augmented(Images(), [STEPS[0], STEPS[1]]), rows, True)
    of_set, *of_steps = jax.random.split(jax.random.key(3), 3)
    images = Images().read(np.array(rows))["inputs"].astype(np.int32)
    assert one.func is flip and two.keywords == {"padding": 3}
    for step, key in zip((one, step_of(STEPS[1])), of_steps):
        images = jax.vmap(step)(images, jax.random.split(key, 8))
    wanted = Images().transform({"inputs": images.astype(np.uint8)}, of_set, True)
    np.testing.assert_array_equal(got["inputs"], wanted["inputs"])


def test_cutmix_never_mixes_what_the_mask_excludes():
    dataset = Augmented(Images(), STEPS)
    batch = {name: jax.numpy.asarray(x) for name, x in dataset.read(np.arange(10)).items()}
    plain = dataset.transform(batch, jax.random.key(0), True)
    mixed = both(dataset.transform, CutMix(2))(batch, jax.random.key(0), True)
    real = np.flatnonzero(batch["mask"])
    assert real.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    for number in range(10):
        before = real[list(real).index(number) - 1] if number in real else number
        own = np.asarray(mixed["inputs"][number] == plain["inputs"][number])
        assert (own | np.asarray(mixed["inputs"][number] == plain["inputs"][before])).all()


def test_it_has_what_the_set_has_and_is_read_without_jax():
    dataset = Augmented({"target": "Balanced", "args": {"data": {"target": "Digits"}}}, STEPS)
    assert dataset.classes == 10 and len(dataset) == 1437
    assert type(dataset.example_order(4, 2, 0)).__name__ == "BalancedOrder"
    assert Augmented.has_split({"data": {"target": "Digits"}})
    assert not Augmented.has_split({"data": Images()})
    assert len(Augmented({"target": "Digits"}, [], "test")) == 360
    code = (
        "import pickle, sys; x = pickle.load(sys.stdin.buffer); import numpy as np; "
        "print(len(x), x.read(np.arange(3))['labels'].tolist(), 'jax' in sys.modules)"
    )
    one = Augmented({"target": "Digits"}, STEPS)
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(one), capture_output=True, check=True
    )
    labels = one.read(np.arange(3))["labels"].tolist()
    assert done.stdout.decode().strip() == f"1437 {labels} False"


def noisy(image, key, amount):
    return image + amount


def test_a_function_of_ones_own_is_a_step():
    steps = [{"target": f"{__name__}.noisy", "args": {"amount": 2}}]
    got = transformed(Augmented(Images(), steps), range(4), True)["inputs"]
    pixels = Images().read(np.arange(4))["inputs"] + 2
    wanted = Images().transform({"inputs": pixels}, jax.random.key(0), False)["inputs"]
    np.testing.assert_array_equal(got, wanted)


FLOATS = {"inputs": np.zeros((8, 4, 4, 1), np.float32), "labels": np.zeros(8, np.int32)}


@pytest.mark.parametrize(
    "data, steps, said",
    [
        (None, ["Mixup"], "data.args.steps.target: 'Mixup' is neither built in nor a dotted path"),
        (None, [3], "data.args.steps: 3 is not a step; give a name such as RandomFlip"),
        (None, [{"target": "RandomFlip", "args": {"p": 1}}], "data.args.steps.args.p: flip takes no such"),
        (None, [f"{__name__}.noisy"], "data.args.steps.args.amount: noisy needs it"),
        (None, [{"target": "RandAugment", "args": {"number": "x"}}], "data.args.steps.args.number: 'x' is"),
        (None, [{"target": "RandomResizedCrop", "args": {"scale": "x"}}], "data.args.steps.args.scale: 'x' is"),
        (None, [{"target": "jaxdp.recipes.cutmix.CutMix"}], "data.args.steps.target: .*CutMix' is a class"),
        (FLOATS, STEPS, r"data.args.data: 'inputs' are float32\[4, 4, 1\] an example, not uint8"),
        (Arrays(inputs=np.zeros((8, 4), np.uint8)), STEPS, r"'inputs' are uint8\[4\] an example, not uint8 \[height"),
        ({"x": np.zeros((8, 4))}, STEPS, r"'inputs' are float64\[\] an example"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(data, steps, said):
    with pytest.raises(UsageError, match=said):
        transformed(Augmented(Images() if data is None else data, steps), range(4), True)


CONFIG = """
model: {target: CNN, args: {widths: [4]}}
data:
  target: Augmented
  args:
    data: {target: Digits}
    steps: [RandomResizedCrop, {target: RandAugment, args: {magnitude: 5}}]
  transform: {target: CutMix, args: {classes: 10}}
steps: 3
batch_size: 32
"""


def test_the_command_trains_and_evaluates_on_it(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = ["--config", tmp_path / "c.yaml", "--run_dir"]
    plain = ["--eval.also", "{plain: {target: Digits}}"]
    done = ended("train", *words, tmp_path / "run", *plain)
    assert "Augmented, 1,437 examples, 45 updates an epoch; evaluates on 360" in done.stdout
    [final] = records(tmp_path / "run", "final")
    assert final["loss"] == final["plain/loss"] and final["accuracy"] == final["plain/accuracy"]


@pytest.mark.slow
def test_four_devices_and_workers_have_the_bits_of_one(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = ["--config", tmp_path / "c.yaml", "--parallel.reduction", "exact", "--run_dir"]
    jaxdp_command(*words, tmp_path / "one")
    jaxdp_command(*words, tmp_path / "four", "--data.workers", 2, devices=4)
    [one], [four] = (records(tmp_path / x, "final") for x in ("one", "four"))
    assert one["params_sha256"] == four["params_sha256"]


@pytest.mark.parametrize(
    "steps, said",
    [
        ("[{target: RandAugment, args: {magnitude: 99}}]", "data.args.steps.args.magnitude: 99 is not"),
        ("[{target: RandomCrop, args: {mode: mirror}}]", "data.args.steps.args.mode: 'mirror' is not one"),
        ("[RandomErasing]", "data.args.steps.target: 'RandomErasing' is neither built in"),
        ("[jaxdp.data.transforms.Scale]", "data.args.steps.target: 'jaxdp.data.transforms.Scale' is a class"),
        ("[{target: RandomResizedCrop, args: {scale: 0.5}}]", "args.scale: 0.5 is not a list of numbers"),
        ("[{target: RandomResizedCrop, args: {scale: [0.5]}}]", "data.args.steps.args: scale [0.5] and ratio"),
    ],
)  # fmt: skip
def test_wrong_steps_are_one_line_of_the_command(tmp_path, steps, said):
    (tmp_path / "c.yaml").write_text(CONFIG)
    args = json.dumps({"data": {"target": "Digits"}})[:-1] + f', "steps": {steps}}}'
    words = ["--config", tmp_path / "c.yaml", "--run_dir", tmp_path / "run", "--data.args", args]
    done = ended("train", *words, code=2)
    assert done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
