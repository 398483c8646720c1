"""Rows that go on from batch to batch: the order, what begins anew, and that devices and backends
do not matter.
"""

import jax
import numpy as np
import pytest

import toys
from covering import first
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder, Streams
from jaxdp.data.prefetch import read_batches
from sequences import check_evaluation, check_skipped, check_training_in_order, evaluated


@pytest.mark.parametrize(
    "size, batch_size, microbatches", [(53, 20, 8), (12, 4, 4), (7, 10, 3), (40, 6, 8), (1, 1, 1)]
)
def test_every_row_reads_its_own_part_in_order(size, batch_size, microbatches):
    order = Streams(size, batch_size, microbatches)
    parts = np.array_split(np.arange(size), batch_size)
    for epoch in range(2):
        for t in range(order.steps_per_epoch):
            step = epoch * order.steps_per_epoch + t
            assert (order.place(step)[1:] == (epoch, 0)) == (t == 0)
            indices, mask = order.rows(step, np.arange(microbatches))
            for r, part in enumerate(parts):
                place = (r % microbatches, r // microbatches)
                assert mask[place] == (t < len(part))
                if mask[place]:
                    assert indices[place] == part[t]
            assert mask.sum() == len(order.batch(step)) and (indices[~mask] < size).all()


def test_a_batch_says_where_its_rows_begin_anew():
    order = Streams(10, 4, 2)
    data = Arrays(inputs=np.arange(10.0), reset=np.arange(10) % 5 == 4)
    assert read_batches(data, order, [0], [0, 1])["reset"].all()
    later = read_batches(data, order, [1], [0, 1, -1])
    np.testing.assert_array_equal(later["inputs"][:2], [[1, 7], [4, 9]])
    np.testing.assert_array_equal(later["reset"][:2], [[False, False], [True, True]])
    any_order = EpochOrder(
        10, 4, 2, shuffle=False
    )  # says nothing of it by itself, but that there is nothing before it
    assert read_batches(data, any_order, [0], [0, 1])["reset"].all()
    np.testing.assert_array_equal(
        read_batches(data, any_order, [1], [0, 1])["reset"], [[True, False], [False, False]]
    )
    assert "reset" not in read_batches(Arrays(inputs=np.arange(10.0)), any_order, [0], [0, 1])
    of_tokens = Arrays(
        inputs=np.arange(10.0), reset=np.ones((10, 3))
    )  # something else of the same name
    assert read_batches(of_tokens, any_order, [0], [0, 1])["reset"].shape == (2, 2, 3)


def unrolled(examples, batch_size, steps):
    """What each row carries after `steps` updates: the sum of what it has seen in this epoch."""
    parts = np.array_split(np.arange(len(examples["inputs"])), batch_size)
    t = steps % -(-len(examples["inputs"]) // batch_size)
    return [examples["inputs"][part[:t]].sum(0) for part in parts]


@pytest.mark.slow
@pytest.mark.parametrize("way", [("pmap", 1, "vmap"), ("pmap", 4, "scan"), ("pjit", 3, "vmap")])
def test_what_is_carried_begins_anew_with_an_epoch(way):
    """53 examples in 20 rows, three updates an epoch, in the last of which seven rows have ended."""
    backend, devices, accumulate = way
    model, examples = toys.summing(), toys.data(53)
    for steps in (2, 4):
        _, state, *_ = toys.train(
            model,
            examples,
            steps=steps,
            sequential=True,
            backend=backend,
            devices=devices,
            accumulate=accumulate,
        )
        for r, want in enumerate(unrolled(examples, 20, steps)):
            got = state.kept["carry"]["seen"][r % 8, r // 8]
            np.testing.assert_allclose(got, want.ravel(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"devices": 1}, {"devices": 4, "backend": "pjit"}], ids=str)
def test_an_evaluation_goes_on_from_batch_to_batch(way):
    check_evaluation(way)


@pytest.mark.slow
def test_out_of_order_each_batch_starts_from_nothing():
    examples = toys.data(53)
    params = jax.device_get(toys.summing().init(jax.random.key(0), examples)[0])
    alone = examples["inputs"].reshape(53, -1) @ params["kernel"]
    logs = alone - np.log(np.exp(alone).sum(-1, keepdims=True))
    want = -logs[np.arange(53), examples["labels"]].mean()
    assert evaluated(toys.summing(), examples, False, devices=2) == pytest.approx(want, rel=1e-4)


@pytest.mark.slow
def test_training_in_order_is_the_same_on_any_devices():
    check_training_in_order(("pmap", 8, "bucket"))


WAYS = [
    ("pjit", 3, "xla"),
    ("pmap", 1, "xla"),
    ("pmap", 4, "bucket"),
]


@pytest.mark.slow
@pytest.mark.parametrize("way", first(1, WAYS), ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_a_skipped_update_begins_anew_all_the_same(way, own):
    check_skipped(way, own)
