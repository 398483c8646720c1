"""Class-balanced sampling: the shares of an epoch, whatever the devices, the step or the split."""

import re
import tracemalloc

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdp
from jaxdp.data import Balanced
from jaxdp.data.dataset import Arrays
from jaxdp.data.mixture import split_by_weight
from jaxdp.errors import UsageError


def made(labels, **more):
    labels = np.asarray(labels, np.int32)
    return Balanced({"inputs": np.arange(len(labels)), "labels": labels}, **more)


def epochs(dataset, number, batch_size=7, seed=0):
    """The examples of each epoch, in the order of their batches."""
    order = dataset.example_order(batch_size, 1, seed)
    steps = order.steps_per_epoch
    return [
        np.concatenate([order.batch(epoch * steps + i) for i in range(steps)])
        for epoch in range(number)
    ]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=5, max_size=60),
    st.integers(1, 9),
    st.integers(0, 2**31),
    st.data(),
)
def test_each_class_has_its_share_and_is_read_fully(labels, batch_size, seed, data):
    labels = np.array(labels)
    classes = np.unique(labels)
    weights = {int(c): data.draw(st.integers(1, 5)) for c in classes}
    counts = split_by_weight(len(labels), [*weights.values()])
    if 0 in counts:
        return
    seen = epochs(made(labels, weights=weights), 6, batch_size, seed)
    for epoch in seen:
        assert [int((labels[epoch] == c).sum()) for c in classes] == counts
    # At the end of each epoch, no example has been drawn two times more than another of its class.
    times = np.zeros(len(labels), int)
    for epoch in seen:
        times += np.bincount(epoch, minlength=len(labels))
        assert all(np.ptp(times[labels == c]) <= 1 for c in classes)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(0, 40), st.integers(0, 9))
def test_the_order_ignores_devices_and_where_it_begins(parts, step, seed):
    """An update's examples are the same when they are split over microbatches, and at any step."""
    dataset = made([0] * 95 + [1] * 5)
    whole = dataset.example_order(12, 1, seed).batch(step)
    order = dataset.example_order(12, 2 * parts, seed)
    rows, mask = order.rows(step, np.arange(2 * parts))
    assert sorted(rows[mask].tolist()) == sorted(whole.tolist())


def test_classes_come_evenly_over_an_epoch():
    """Chi-square of the classes in the tenths of many epochs: at the 0.1 % level of 9 degrees."""
    labels = np.array([0] * 900 + [1] * 100)
    dataset, counts = made(labels), np.zeros(10)
    for epoch in epochs(dataset, 40, batch_size=100):
        counts += [(labels[part] == 1).sum() for part in np.split(epoch, 10)]
    expected = counts.sum() / 10
    assert expected == 2000 and ((counts - expected) ** 2 / expected).sum() < 27.9


def test_names_size_and_split():
    class Named(Arrays):
        class_names = ("cat", "dog")
        classes = 2

        def __init__(self):
            super().__init__(inputs=np.arange(10), labels=np.array([0] * 8 + [1] * 2))

    dataset = Balanced(Named(), weights={"dog": 3, "cat": 1}, size=20)
    assert (dataset.sizes, dataset.counts) == ((8, 2), (5, 15)) and dataset.classes == 2
    [epoch] = epochs(dataset, 1)
    assert len(epoch) == 20 and len(dataset) == 10
    assert not hasattr(Balanced(Named(), split="test"), "counts")
    assert Balanced.has_split({"data": {"target": "Digits"}})


def test_weights_may_be_numbers_of_numpy():
    labels = np.arange(40) % 4 == 0
    wanted = made(labels, weights={0: 1, 1: 3}).counts
    assert (
        made(labels, weights={np.int64(0): np.float32(1), np.int64(1): np.int64(3)}).counts
        == wanted
    )


@pytest.mark.parametrize(
    "labels, more, said",
    [
        ([0, 1], {"weights": {0: 1}}, "data.args.weights.1: None is no weight"),
        ([0, 1], {"weights": {0: 1, 1: 0}}, "data.args.weights.1: 0 is no weight"),
        ([0, 1], {"weights": {0: 1, 1: float("nan")}}, "data.args.weights.1: nan is no weight"),
        ([0, 1], {"weights": {0: 1, 1: -2}}, "data.args.weights.1: -2 is no weight"),
        ([0, 1], {"weights": {0: 1, 1: 1, 7: 1}}, "weights.7: there is no such class; it is one of 0, 1"),
        ([0, 0, 1], {"weights": {0: 1e9, 1: 1}}, "class 1 has less than one of the 3 examples"),
        ([0, 1], {"weights": {0: 1e308, 1: 1e308}}, "is not finite"),
        ([0, -1], {}, "data.args.by: 'labels' is int32.* of an example; a class is one integer"),
        ([0, 1], {"by": "kind"}, "data.args.by: the examples have no 'kind', only .'inputs', 'labels'."),
        ([0, 1], {"size": 0}, "data.args.size: 0 is too small"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(labels, more, said):
    with pytest.raises(UsageError, match=said):
        made(labels, **more)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def test_several_devices_and_a_resume_change_nothing(tmp_path):
    rng = np.random.default_rng(0)
    labels = (np.arange(80) % 16 == 0).astype(np.int32)
    x = (rng.normal(size=(80, 3)) + labels[:, None]).astype(np.float32)

    def fit(devices, run, steps=12):
        dataset = Balanced((x, labels))
        return jaxdp.fit(
            Net,
            dataset,
            steps=steps,
            batch_size=16,
            microbatches=4,
            optimizer={"target": "sgd", "lr": 0.1, "schedule": "constant"},
            parallel={"devices": devices, "backend": "pjit"},
            run_dir=tmp_path / run,
            eval_data=(x, labels),
        )

    one = fit(1, "one")
    fit(2, "several", 5)
    several = fit(4, "several")
    for a, b in zip(*map(jax.tree.leaves, (one.params, several.params))):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    # Without balance, the rare class is hardly ever predicted.
    assert (one.predict(x).argmax(-1)[labels == 1] == 1).mean() > 0.5


def test_the_command_trains_on_it(tmp_path):
    from cli_runs import ended

    (tmp_path / "c.yaml").write_text(
        "model: {target: MLP, args: {hidden: [8]}}\n"
        "data: {target: Balanced, args: {data: {target: Digits}, weights: "
        f"{{{', '.join(f'{i}: {1 + i}' for i in range(10))}}}}}}}\nsteps: 3\nbatch_size: 32\n"
    )
    done = ended("train", "--config", tmp_path / "c.yaml", "--run_dir", tmp_path / "run", code=0)
    assert re.search(
        r"Balanced, 1,437 examples, 45 updates an epoch; evaluates on 360", done.stdout
    )


@pytest.mark.slow
def test_ten_million_examples_need_eight_bytes_each():
    labels = (np.arange(10**7) % 20 == 0).astype(np.int32)
    dataset = Balanced(Arrays(inputs=labels, labels=labels))
    order = dataset.example_order(1024, 8, 0)
    tracemalloc.start()
    counts = sum((labels[order.batch(i)] == 1).sum() for i in range(0, 5000, 50))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 50e6 and abs(counts / (100 * 1024) - 0.5) < 0.01
    assert dataset.members.nbytes == 8 * 10**7
