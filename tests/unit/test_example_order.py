"""Every example once an epoch, in one order, however the microbatches are dealt out."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.data.example_order import EpochOrder, permute
from jaxdp.errors import UsageError


def batch_in_order(cursor, step, shares):
    """The batch's examples by row, put together from what each of the `shares` of slots reads on
    its own.
    """
    rows = {}
    for slots in shares:
        indices, mask = cursor.rows(step, slots)
        assert indices.shape == mask.shape == (len(slots), cursor.examples_per_microbatch)
        assert indices.dtype == np.int64 and mask.dtype == bool
        for slot, place in zip(*np.nonzero(mask)):
            row = place * cursor.microbatches + slots[slot]
            assert row not in rows
            rows[row] = int(indices[slot, place])
    assert sorted(rows) == list(range(len(cursor.batch(step))))
    return [rows[row] for row in sorted(rows)]


@st.composite
def deals(draw, microbatches):
    """Microbatches dealt to processes: unevenly, in any order, with empty slots and idle processes."""
    slots = draw(st.permutations([*range(microbatches), *[-1] * draw(st.integers(0, 3))]))
    processes = draw(st.integers(1, 5))
    owners = [draw(st.integers(0, processes - 1)) for _ in slots]
    return [
        [slot for slot, owner in zip(slots, owners) if owner == process]
        for process in range(processes)
    ]


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_split_has_each_example_once_in_one_order(data):
    size, batch_size = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 40))
    microbatches = data.draw(st.integers(1, 9))
    cursor = EpochOrder(
        size,
        batch_size,
        microbatches,
        data.draw(st.integers(-(2**70), 2**70)),
        data.draw(st.booleans()),
    )
    epoch = data.draw(st.integers(0, 3))
    order = []
    for step in range(epoch * cursor.steps_per_epoch, (epoch + 1) * cursor.steps_per_epoch):
        batch = batch_in_order(cursor, step, data.draw(deals(microbatches)))
        assert batch == batch_in_order(cursor, step, [list(range(microbatches))])
        order += batch
    assert sorted(order) == list(range(size))
    assert cursor.shuffle or order == list(range(size))
    whole = EpochOrder(size, size, 1, cursor.seed, cursor.shuffle)
    assert order == whole.rows(epoch, [0])[0][0].tolist(), (
        "the order depends on the batch size or the microbatches"
    )


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 9), st.integers(0, 40))
def test_padding_repeats_the_first_example_of_a_batch(size, batch_size, microbatches, step):
    cursor = EpochOrder(size, batch_size, microbatches, seed=5)
    indices, mask = cursor.rows(step, [*range(microbatches), -1])
    empty = ~mask.any(1)
    assert (indices[~mask & ~empty[:, None]] == indices[0, 0]).all() and (
        indices[empty] == indices[0]
    ).all()
    assert mask[0, 0] and empty[-1]
    assert mask.sum() == len(cursor.batch(step))


def test_rows_are_dealt_round_robin():
    cursor = EpochOrder(size=10, batch_size=7, microbatches=3, seed=0, shuffle=False)
    assert (cursor.steps_per_epoch, cursor.examples_per_microbatch) == (2, 3)
    indices, mask = cursor.rows(0, [0, 1, 2])
    assert indices.tolist() == [[0, 3, 6], [1, 4, 0], [2, 5, 0]]
    assert mask.tolist() == [[True] * 3, [True, True, False], [True, True, False]]
    indices, mask = cursor.rows(1, [2, -1, 0])  # the ragged last batch: examples 7, 8, 9
    assert indices.tolist() == [[9, 7, 7], [7, 7, 7], [7, 7, 7]]
    assert mask.tolist() == [[True, False, False], [False] * 3, [True, False, False]]
    assert (len(cursor.batch(0)), len(cursor.batch(1)), len(cursor.batch(2))) == (7, 3, 7)
    assert cursor.rows(2, [1])[0].tolist() == cursor.rows(0, [1])[0].tolist()
    assert cursor.rows(0, [])[0].shape == (0, 3)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_the_permutation_is_one(size, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(size), size, seed, epoch)), np.arange(size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 8, 13, 33])
def test_every_element_goes_everywhere_equally_often(size):
    seeds = 4000
    orders = np.stack([permute(np.arange(size), size, seed, 0) for seed in range(seeds)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    # Chi-square of a place x element table with (size - 1)^2 degrees of freedom; five standard
    # deviations are allowed.
    chi_square = ((counts - seeds / size) ** 2 / (seeds / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.slow
def test_all_orders_of_four_are_about_equally_likely():
    seeds = 12_000
    orders = [tuple(permute(np.arange(4), 4, seed, 0).tolist()) for seed in range(seeds)]
    counts = np.array([orders.count(order) for order in itertools.permutations(range(4))])
    assert ((counts - seeds / 24) ** 2 / (seeds / 24)).sum() < 23 + 5 * np.sqrt(2 * 23)


@pytest.mark.parametrize("size", [64, 1000, 1437, 50_000])
def test_neighbours_do_not_stay_neighbours(size):
    order = permute(np.arange(size), size, seed=3, epoch=1)
    kept = (np.abs(np.diff(order)) == 1).sum()  # 2 of all pairs by chance, whatever the size
    assert kept <= 10
    # Uniform gaps average a third of the size; the order does not follow the number either.
    assert abs(np.abs(np.diff(order)).mean() * 3 / size - 1) < 6 / np.sqrt(size)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 5 / np.sqrt(size)


def test_seeds_and_epochs_give_unrelated_orders():
    size = 2000
    orders = [
        permute(np.arange(size), size, seed, epoch)
        for seed in (0, 1, -1, 2**64 + 7)
        for epoch in (0, 1, 2)
    ]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() <= 12  # one by chance
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(size)


def test_the_order_is_frozen():
    """A resumed run has to draw what the first one would have: these numbers may never change."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [9, 5, 7, 8, 1, 4, 0, 3, 6, 2]
    assert permute(np.arange(3), 20_000_000_000, 42, 7).tolist() == [
        423287408,
        17404662043,
        16633256896,
    ]


def test_twenty_billion_examples():
    cursor = EpochOrder(size=20_000_000_000, batch_size=4096, microbatches=8, seed=1)
    last = cursor.steps_per_epoch - 1
    indices, mask = cursor.rows(last + 1000 * cursor.steps_per_epoch, [7, 0])
    assert indices.min() >= 0 and indices.max() < cursor.size
    assert len(cursor.batch(last)) == 20_000_000_000 - last * 4096 == mask.sum() * 4
    assert len(np.unique(cursor.rows(0, range(8))[0])) == 4096


def test_bad_numbers_are_refused():
    with pytest.raises(UsageError, match="data: the data set is empty"):
        EpochOrder(0, 8, 2, 0)
    with pytest.raises(UsageError, match="batch_size: 0 is not positive"):
        EpochOrder(5, 0, 2, 0)
    with pytest.raises(UsageError, match="microbatches: -1 is not positive"):
        EpochOrder(5, 8, -1, 0)
