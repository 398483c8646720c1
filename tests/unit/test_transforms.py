"""Transforms of one's own: a key for each example, Mixup, and what is no transform."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from jaxdp.data.transforms import Mixup, Scale, as_transform, both
from jaxdp.errors import UsageError

KEY = jax.random.key(3)


def noisy(example, key):
    return {
        **example,
        "inputs": example["inputs"] + jax.random.normal(key, example["inputs"].shape),
    }


def test_each_example_has_a_key_and_evaluation_none():
    batch = {"inputs": jnp.zeros((5, 3)), "labels": jnp.arange(5), "mask": jnp.ones(5)}
    transform = as_transform(noisy)
    found = transform(batch, KEY, True)
    want = [jax.random.normal(jax.random.fold_in(KEY, i), (3,)) for i in range(5)]
    np.testing.assert_allclose(found["inputs"], want, rtol=1e-6)
    np.testing.assert_array_equal(found["mask"], batch["mask"])
    assert transform(batch, KEY, False) is batch
    scaled = as_transform(
        lambda example, key, train: {**example, "inputs": example["inputs"] + (1 if train else 2)}
    )
    assert (
        float(scaled(batch, KEY, False)["inputs"][0, 0]) == 2
        and float(scaled(batch, KEY, True)["inputs"][0, 0]) == 1
    )


@pytest.mark.slow
def test_mixup_mixes_real_examples_with_real_ones():
    batch = {"inputs": jnp.eye(5), "labels": jnp.arange(5), "mask": jnp.asarray([1.0, 1, 1, 0, 0])}
    found = Mixup(classes=5)(batch, KEY, True)
    np.testing.assert_allclose(found["inputs"], found["labels"], rtol=1e-6)
    share = float(found["labels"][1, 1])
    want = share * np.eye(3) + (1 - share) * np.roll(np.eye(3), 1, axis=0)[[0, 1, 2]]
    np.testing.assert_allclose(found["labels"][:3, :3], want, atol=1e-6)
    np.testing.assert_array_equal(found["inputs"][3:], np.eye(5)[3:])
    assert 0 < share < 1 and Mixup(classes=5)(batch, KEY, False) is batch
    with pytest.raises(UsageError, match="Mixup mixes floats, not uint8"):
        Mixup(classes=5)({**batch, "inputs": jnp.zeros((5, 2), jnp.uint8)}, KEY, True)


def test_an_unmasked_label_beyond_mixups_is_nan():
    batch = {
        "inputs": jnp.eye(5),
        "labels": jnp.asarray([0, 9, 2, -100, 4]),
        "mask": jnp.asarray([1.0, 1, 1, 0, 1]),
    }
    found = np.isnan(Mixup(classes=5)(batch, KEY, True)["labels"]).any(-1)
    np.testing.assert_array_equal(
        found, [False, True, True, False, False]
    )  # and the example that it is mixed into


def test_a_batched_function_gets_the_microbatch():
    def shift(batch, key, train, by):
        return {**batch, "inputs": batch["inputs"] + by * batch["mask"].sum()}

    shift.batched = True
    batch = {"inputs": jnp.zeros((5, 3)), "mask": jnp.ones(5)}
    assert (
        float(as_transform(functools.partial(shift, by=2))(batch, KEY, True)["inputs"][0, 0]) == 10
    )
    with pytest.raises(
        UsageError, match=r"data.transform.args.by: shift needs it; set data.transform.args.by"
    ):
        as_transform(shift)


def test_the_second_transform_has_an_independent_key():
    keys = []
    transform = both(*[lambda batch, key, train: keys.append(key) or batch] * 2)
    transform({"inputs": jnp.zeros((5, 3))}, KEY, True)
    known = [KEY, *jax.random.split(KEY, 4), *(jax.random.fold_in(KEY, i) for i in range(9))]
    assert keys[0] == KEY and not any(keys[1] == key for key in known)


@pytest.mark.slow
def test_mixup_leaves_out_examples_that_the_data_masks():
    batch = {
        "inputs": jnp.eye(5),
        "labels": jnp.asarray([0, -100, 2, 3, -100]),
        "mask": jnp.asarray([1.0, 0, 1, 1, 0]),
    }
    found = Mixup(classes=5)(batch, KEY, True)
    share = float(found["labels"][2, 2])
    want = share * np.eye(5) + (1 - share) * np.eye(5)[[3, 1, 0, 2, 4]]
    np.testing.assert_allclose(found["inputs"], want, atol=1e-6)
    np.testing.assert_allclose(found["labels"][jnp.array([0, 2, 3])], want[[0, 2, 3]], atol=1e-6)


@pytest.mark.slow
def test_they_train_the_same_on_any_devices():
    transform = both(as_transform(noisy), Mixup(classes=toys.CLASSES))
    with jax.enable_x64(True):
        states = [
            toys.train(
                toys.MODELS["mlp"](), toys.data(53, dtype=np.float64), steps=4, dtype="float64", transform=transform,
                backend=backend, devices=devices,
            )[1]
            for backend, devices in (("pmap", 1), ("pjit", 8))
        ]  # fmt: skip
    for state in states[1:]:
        assert toys.relative_error(state.params, states[0].params)[0] < 1e-12


def test_what_is_no_transform():
    with pytest.raises(
        UsageError,
        match=r"data.transform.target: .* takes 1 arguments; it must be \(example, key\)",
    ):
        as_transform(lambda example: example)
    with pytest.raises(
        UsageError, match=r"data.transform.args.strength: .* needs it; set data.transform.args.str"
    ):
        as_transform(lambda example, key, strength: example)
    batch = {"inputs": jnp.zeros((5, 3)), "mask": jnp.ones(5)}
    with pytest.raises(UsageError, match=r"it returned .*; return a dict of arrays"):
        as_transform(lambda example, key: example["inputs"])(batch, KEY, True)
    with pytest.raises(
        UsageError, match=r"it returned 'mask', which only the data can set; add it to the examples"
    ):
        as_transform(lambda example, key: {**example, "mask": 0})(batch, KEY, True)


@pytest.mark.parametrize(
    "f", [lambda e, key, train: e, lambda e, key, train=False: e, lambda e, key, *, train=True: e]
)
def test_a_transform_with_train_runs_in_evaluation(f):
    seen = []

    def transform(example, key, *args, **kwargs):
        seen.append((args, kwargs))
        return f(example, key, *args, **kwargs)

    transform.__signature__ = inspect.signature(f)
    batch = {"inputs": jnp.zeros((5, 3)), "mask": jnp.ones(5)}
    for train in (True, False):
        as_transform(transform)(batch, KEY, train)
    assert seen == [((), {"train": True}), ((), {"train": False})]


@pytest.mark.parametrize("train", [True, False])
def test_scale_divides_an_entry_and_leaves_the_others(train):
    batch = {"inputs": jnp.array([[0, 51, 255]], jnp.uint8), "labels": jnp.array([3])}
    found = as_transform(Scale())(batch, KEY, train)
    assert found["inputs"].dtype == np.float32 and found["labels"] is batch["labels"]
    np.testing.assert_allclose(found["inputs"], [[0, 0.2, 1]], rtol=1e-6)
    with pytest.raises(
        UsageError,
        match=r"data.transform.args.name: no 'image'; the data has \['inputs', 'labels'\]",
    ):
        Scale(name="image")(batch, KEY, train)
    with pytest.raises(UsageError, match=r"data.transform.args.divisor: 0 must be greater than 0"):
        Scale(0)
