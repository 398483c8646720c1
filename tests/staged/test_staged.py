"""Batch sizes that change during training: the order of examples, and the numbers of a run."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_runs import DIGITS, curve, ended, jaxdp, records
from jaxdp.api import fit
from jaxdp.config.parsing import from_mapping
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.mixture import Mixture
from jaxdp.data.prefetch import read_batches
from jaxdp.data.stream import Stream
from jaxdp.errors import UsageError
from jaxdp.sampling.balanced import Balanced
from jaxdp.staged.staged_order import Staged
from launch import ROOT, mpirun

SIZES = st.dictionaries(st.integers(1, 40), st.integers(1, 30), max_size=4)


def size_at(sizes, step):
    return sizes[max(start for start in sizes if start <= step)]


def staged(order, sizes):
    return Staged(order.size, max(sizes.values()), order.microbatches, order, sizes)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_each_epoch_has_each_example_once_in_the_order_of_any_batch_size(data):
    """Whatever the schedule, the epochs are those of one batch an epoch, cut into batches of the
    size that each update has.
    """
    size, microbatches = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    sizes = {**data.draw(SIZES), 0: data.draw(st.integers(1, 30))}
    order = EpochOrder(
        size, 1, microbatches, data.draw(st.integers(0, 99)), data.draw(st.booleans())
    )
    whole = EpochOrder(size, size, 1, order.seed, order.shuffle)
    order, step, updates = staged(order, sizes), 0, [0]
    for epoch in range(4):
        expected = whole.batch(epoch).tolist()
        while expected:
            batch = order.batch(step).tolist()
            assert batch == expected[: size_at(sizes, step)]
            del expected[: len(batch)]
            indices, mask = order.rows(step, range(microbatches))
            assert indices.shape == (microbatches, math.ceil(size_at(sizes, step) / microbatches))
            assert indices.T[mask.T].tolist() == batch
            assert order.place(step)[:2] == (size_at(sizes, step), epoch)
            step += 1
        updates.append(step)
        assert order.updates(epoch + 1) == step
    assert order.steps_per_epoch == updates[1]
    assert updates[2] <= order.updates(2.5) <= updates[3]


@given(st.integers(1, 500), st.integers(1, 60), st.floats(0, 50), st.integers(0, 400))
def test_a_constant_size_counts_as_one_integer(size, batch_size, epochs, step):
    order = EpochOrder(size, batch_size, 4)
    per_epoch = math.ceil(size / batch_size)
    assert order.updates(epochs) == math.ceil(epochs * per_epoch)
    assert order.place(step) == (batch_size, step // per_epoch, step % per_epoch * batch_size)
    assert order.average(step) == size / per_epoch
    other = staged(order, {0: batch_size, 4: batch_size, 9: batch_size})
    assert other.place(step) == order.place(step) and other.average(step) == order.average(step)
    assert other.updates(3) == order.updates(3)


def sets():
    """Data sets with an order of their own, and the number of examples of each of their epochs."""
    examples = {"inputs": np.arange(60.0), "labels": np.arange(60) % 3}
    yield Mixture({"a": Arrays(**examples), "b": Arrays(**examples)}, {"a": 1, "b": 3}, size=40), 40
    yield Balanced(Arrays(**examples), weights={"0": 2, "1": 1, "2": 1}, size=48), 48
    yield (
        Stream(lambda: iter([{"inputs": np.float64(i)} for i in range(60)]), size=60, shuffle=7),
        60,
    )


@pytest.mark.parametrize("dataset, size", [*sets()], ids=["mixture", "balanced", "stream"])
def test_other_orders_are_cut_at_the_same_positions(dataset, size):
    sizes = {0: 7, 3: 16, 8: 5}
    order, whole = staged(dataset.example_order(1, 4, 3), sizes), dataset.example_order(size, 4, 3)
    steps = range(order.updates(3))
    read = np.concatenate([order.batch(step) for step in steps])
    assert read.tolist() == np.concatenate([whole.batch(epoch) for epoch in range(3)]).tolist()
    assert [len(order.batch(step)) for step in range(4)] == [7, 7, 7, 16]


def test_a_stream_of_unknown_length_is_read_on():
    dataset = Stream(lambda: iter([{"inputs": np.float64(i)} for i in range(100)]))
    order = staged(dataset.example_order(1, 2, 0), {0: 4, 2: 10})
    batches = [read_batches(dataset, order, [step], range(2)) for step in range(4)]
    assert [x["inputs"].T.reshape(-1).tolist() for x in batches] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [*range(8, 18)], [*range(18, 28)]
    ]  # fmt: skip


# --- a run
# --------------------------------------------------------------------------------------------------

SCHEDULE = {0: 20, 3: 50, 9: 13}  # an epoch of 97 examples ends in updates 4, 6, 8, 13 and 21
STEPS = 20
INPUTS = np.random.default_rng(0).normal(size=(97, 5))
LABELS = INPUTS @ np.arange(5.0) + 1


def init(key, inputs):
    return {"w": jnp.zeros(5), "b": jnp.zeros(())}


def apply(params, inputs):
    return inputs @ params["w"] + params["b"]


def squares(outputs, batch):
    mask = batch["mask"]
    return jnp.sum(mask * (outputs - batch["labels"]) ** 2), jnp.sum(mask), {}


def train(run_dir, **more):
    settings = {
        "steps": STEPS,
        "batch_size": SCHEDULE,
        "optimizer": {"target": "sgd", "lr": 0.02, "schedule": "constant"},
        "precision": {"params": "float64"},
        "log": {"every": 1},
        **more,
    }
    fitted = fit((init, apply), (INPUTS, LABELS), loss=squares, run_dir=run_dir, **settings)
    return fitted, np.array(fitted.history["train"]["loss"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sizes") / "run")


def test_a_run_is_a_plain_loop_whose_batch_changes(trained):
    """Gradient descent in float64 over slices of the order of each epoch, without jaxdp's step."""
    epochs = [EpochOrder(97, 97, 1).batch(epoch) for epoch in range(6)]
    params, losses, rows = {"w": np.zeros(5), "b": 0.0}, [], []
    for step in range(STEPS):
        rows = rows if len(rows) else epochs.pop(0)
        batch, rows = np.split(rows, [size_at(SCHEDULE, step)])
        residuals = INPUTS[batch] @ params["w"] + params["b"] - LABELS[batch]
        losses.append(np.mean(residuals**2))
        params["w"] = params["w"] - 0.02 * 2 * residuals @ INPUTS[batch] / len(batch)
        params["b"] = params["b"] - 0.02 * 2 * np.mean(residuals)
    np.testing.assert_allclose(trained[1], losses, rtol=1e-12)
    np.testing.assert_allclose(trained[0].params["w"], params["w"], rtol=1e-12)
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    "more",
    [
        {"parallel": {"backend": "pmap", "zero": 1}},
        {"parallel": {"backend": "pjit", "zero": 2, "accumulate": "scan"}},
        {"parallel": {"backend": "pjit", "zero": 3}},
        {"steps_per_call": 4},
        {"steps_per_call": 4, "parallel": {"backend": "pjit", "devices": 3}},
    ],
    ids=lambda more: "-".join(map(str, more.get("parallel", more).values())),
)
def test_devices_stages_and_calls_change_nothing(trained, tmp_path, more):
    _, losses = train(tmp_path / "run", **more)
    np.testing.assert_allclose(losses, trained[1], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("reader", [{"on_device": True}, {"workers": 2}], ids=["device", "workers"])
def test_every_reader_reads_the_same(tmp_path, reader):
    words = ["--steps", 8, "--epochs", "null", "--batch_size", "{0: 20, 2: 50, 5: 13}"]
    digests = []
    for name, more in (("thread", {}), ("other", reader)):
        options = [word for key, value in more.items() for word in (f"--data.{key}", value)]
        ended("train", *DIGITS, *words, "--run_dir", tmp_path / name, *map(str, options))
        digests.append(records(tmp_path / name, "final")[-1]["params_sha256"])
    assert digests[0] == digests[1]


@pytest.mark.parametrize("first", [2, 3, 5, 10])
def test_a_resume_in_any_stage_has_the_same_bits(trained, tmp_path, first):
    train(tmp_path / "run", steps=first)
    fitted, losses = train(tmp_path / "run")
    assert fitted.final["params_sha256"] == trained[0].final["params_sha256"]
    np.testing.assert_array_equal(losses, trained[1])


def test_another_size_of_a_past_update_is_another_run(tmp_path):
    train(tmp_path / "run", steps=4)
    with pytest.raises(UsageError, match=r"batch_size.3: 50 -> 40"):
        train(tmp_path / "run", batch_size={**SCHEDULE, 3: 40})
    with pytest.raises(UsageError, match=r"batch_size.2: None -> 50"):
        train(tmp_path / "run", batch_size={0: 20, 2: 50, 9: 13})


def test_epochs_become_the_updates_that_read_them(tmp_path):
    fitted, losses = train(tmp_path / "run", steps=None, epochs=4)
    assert fitted.final["step"] == len(losses) == 13


def test_records_have_the_examples_of_each_size(tmp_path):
    """examples/s over the time of an update are the mean size of a batch, as that of an int."""
    train(tmp_path / "run", steps=30)
    means = {
        r["step"]: r["examples_per_s"] * r["step_time_ms"] / 1e3
        for r in records(tmp_path / "run", "train")
        if "examples_per_s" in r
    }
    assert {1, 4, 10}.isdisjoint(means)  # each compiles
    assert means[3] == pytest.approx(97 / 5)
    assert means[8] == pytest.approx(97 / 2)
    assert means[20] == pytest.approx(97 / 8)


# --- bad input
# --------------------------------------------------------------------------------------------------

VALUES = {
    "model": {"target": "MLP"},
    "data": {"target": "Digits"},
    "loss": {"target": "SoftmaxCrossEntropy"},
}
BAD = [
    *(
        (
            sizes,
            re.escape(f"batch_size: {sizes} is not a schedule; give 0 and each other number of"),
        )
        for sizes in (
            {3: 64},
            {},
            {0: 64, -1: 32},
            {0: 64, 1.5: 32},
            {0: 64, True: 32},
            {0: 64, "ten": 32},
            {0: 64, "1000": 32, 1000: 16},
            {0: 64, "9": 32},
            {0: 64, 5: 0},
            {0: 64, 5: -8},
            {0: 64, 5: 2**31},
            {0: 64, 5: 1.5},
            {0: 64, 5: None},
            {0: 64, 5: True},
            {0: 64, 5: "32"},
        )
    ),
    ([64, 128], r"batch_size: \[64, 128\] is not an integer or a mapping"),
    ("many", r"batch_size: 'many' is not an integer or a mapping"),
]


@pytest.mark.parametrize("sizes, text", BAD, ids=lambda x: repr(x) if isinstance(x, str) else "")
def test_bad_schedules_are_refused_in_one_line(sizes, text):
    with pytest.raises(UsageError, match=text) as caught:
        from_mapping({**VALUES, "steps": 3, "batch_size": sizes}, "test")
    assert "\n" not in str(caught.value)


def test_texts_of_numbers_are_numbers_in_any_order(trained, tmp_path):
    """As in the JSON of a checkpoint."""
    fitted, _ = train(tmp_path / "run", batch_size={"9": 13, "3": 50, "0": 20})
    assert fitted.final["params_sha256"] == trained[0].final["params_sha256"]


def test_a_model_with_a_carry_refuses_them(tmp_path):
    data = ["--data", "{target: PythonSource, args: {length: 16}}"]
    words = ["--model.target", "LSTM", *data, "--loss.target", "CausalLM", "--steps", "4"]
    sizes = ["--batch_size", "{0: 8, 2: 16}", "--microbatches", "4"]
    for order in ("null", "sequential", "shuffled"):
        more = ["--data.order", order, "--run_dir", tmp_path / order]
        done = ended("train", *map(str, [*words, *sizes, *more]), code=2)
        assert "batch_size: {0: 8, 2: 16}, but rows of a batch continue in the next" in done.stderr


@pytest.mark.parametrize(
    "more, text",
    [
        (
            ["--eval.every", "1 epoch"],
            r"eval.every: 1 epoch, but batch_size changes",
        ),
        (
            ["--checkpoint.every", "2 epochs"],
            r"checkpoint.every: 2 epochs, but batch_size changes",
        ),
        (
            ["--data.order", "sequential"],
            r"batch_size: .*, but rows of a batch continue in the next",
        ),
    ],
)
def test_what_needs_a_constant_size_refuses_others(tmp_path, more, text):
    words = ["--steps", 4, "--epochs", "null", "--batch_size", "{0: 16, 2: 32}", *more]
    done = ended("train", *DIGITS, "--run_dir", tmp_path / "run", *map(str, words), code=2)
    (line,) = done.stderr.splitlines()
    assert re.search(text, line)


def test_a_change_after_the_end_is_a_warning(tmp_path):
    words = ["--steps", 2, "--epochs", "null", "--batch_size", "{0: 16, 2: 32}"]
    done = ended("train", *DIGITS, "--run_dir", tmp_path / "run", *map(str, words))
    assert (
        "warning: batch_size: 32 after update 2 is not reached: the run ends after update 2"
        in done.stdout
    )
    assert "batch      {0: 16, 2: 32} examples in 8 microbatches" in done.stdout


# --- bits, devices and processes
# --------------------------------------------------------------------------------------------------

EXACT = [
    *(*DIGITS, "--steps", "5", "--epochs", "null", "--optimizer.schedule_steps", "5"),
    *("--model.args", "{hidden: [8]}", "--data.args.augment", "false", "--log.every", "1"),
    *("--batch_size", "{0: 40, 2: 100}", "--parallel.reduction", "exact"),
]


def digest(run_dir):
    return records(run_dir, "final")[-1]["params_sha256"]


@pytest.mark.slow
def test_four_devices_have_the_bits_of_one(tmp_path):

    def run(name, *more, devices):
        return jaxdp(*EXACT, "--run_dir", tmp_path / name, *more, devices=devices)

    run("one", devices=1)
    run("four", "--parallel.backend", "pjit", "--parallel.zero", "3", devices=4)
    assert digest(tmp_path / "one") == digest(tmp_path / "four")
    assert (curve(tmp_path / "one") == curve(tmp_path / "four")).all()


@pytest.mark.slow
@pytest.mark.mpi
def test_two_processes_have_the_bits_of_one(tmp_path):
    """The second half is resumed by one process of another number of devices, in the middle of a
    stage.
    """
    script = str(ROOT / "train.py")
    jaxdp(*EXACT, "--run_dir", tmp_path / "one", devices=1)
    words = [*EXACT, "--run_dir", str(tmp_path / "two"), "--parallel.backend"]
    two = mpirun(2, [script, *words, "pmap", "--steps", "3"], devices=2, timeout=240)
    assert two.returncode == 0 and not two.left, two.output
    jaxdp(*words, "pjit", "--parallel.zero", "2", devices=3)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    assert (curve(tmp_path / "one") == curve(tmp_path / "two")).all()
