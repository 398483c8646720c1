"""Prefetch: in order, bounded, its faults handed over, and gone when it is left. read_batches: rows,
shapes, masks.
"""

import threading
import time
import traceback
from contextlib import closing

import numpy as np
import pytest

from jaxdp.data import prefetch as module
from jaxdp.data.dataset import Arrays, Examples
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import prefetch, read_ahead, read_batches
from jaxdp.errors import UsageError


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "jaxdp-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not readers()
    yield
    assert not readers()


def wait_until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_every_item_in_order():
    items = prefetch(lambda step: step * step, range(3, 20))
    assert list(items) == [step * step for step in range(3, 20)]
    assert next(items, None) is None
    assert list(prefetch(lambda step: step, range(5, 5))) == []


def test_at_most_two_items_are_made_ahead():
    made, depth = [], 2
    with closing(prefetch(lambda step: made.append(step) or step, range(100))) as items:
        for taken in range(1, 6):
            assert next(items) == taken - 1
            wait_until(lambda taken=taken: len(made) == taken + depth)
            time.sleep(0.02)
            assert len(made) == taken + depth
    assert len(made) <= 5 + depth


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, SystemExit])
def test_a_fault_arrives_in_order_as_the_same_object(kind):
    fault = kind("disk on fire")

    def broken_reader(step):
        if step == 2:
            raise fault
        return step

    got = []
    with pytest.raises(kind) as caught:
        for item in prefetch(broken_reader, range(9)):
            got.append(item)
    assert got == [0, 1] and caught.value is fault
    assert "broken_reader" in [frame.name for frame in traceback.extract_tb(fault.__traceback__)]


def test_a_stray_stop_iteration_is_an_error():
    def make(step):
        return next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(prefetch(make, range(9)))


def test_leaving_early_frees_a_blocked_reader():
    with closing(prefetch(lambda step: step, range(10**9))) as items:
        assert next(items) == 0
        (thread,) = readers()
        time.sleep(0.05)
        start = time.monotonic()
    assert time.monotonic() - start < 1 and not thread.is_alive()
    assert next(items, "over") == "over"


def test_a_consumers_fault_ends_the_reader_too():
    items = prefetch(lambda step: step, range(10**9))
    with pytest.raises(ZeroDivisionError), closing(items):
        1 / next(items)


def test_a_fault_not_read_is_not_raised_on_leaving():
    raised = threading.Event()

    def make(step):
        if step:
            raised.set()
            raise OSError

    with closing(prefetch(make, range(9))) as items:
        next(items)
        assert raised.wait(5)


def test_a_read_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    hung, freed = threading.Event(), threading.Event()

    def make(step):
        if step:
            hung.set()
            freed.wait(30)

    start = time.monotonic()
    with closing(prefetch(make, range(9))) as items:
        next(items)
        assert hung.wait(5)
        (thread,) = readers()
    assert time.monotonic() - start < 2 and thread.daemon
    freed.set()
    thread.join(5)


# --- read_ahead


class Clock:
    """A clock that each read of an item moves by so many seconds."""

    def __init__(self, seconds):
        self.now, self.seconds, self.threads = 0.0, dict(enumerate(seconds)), []

    def perf_counter(self):
        return self.now

    def make(self, step):
        self.threads.append(threading.current_thread().name)
        self.now += self.seconds.get(step, 0.0)
        return step


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ([], None),  # short ones
        ([0.1, 0.0] * 10, None),  # no two long ones in a row
        ([0.001] * 20, None),
        ([0.0, 0.1, 0.1], 3),
        ([0.003] * 20, 2),
    ],
)
def test_a_thread_reads_once_reads_are_long(monkeypatch, seconds, first):
    clock = Clock(seconds)
    monkeypatch.setattr(module, "time", clock)
    assert list(read_ahead(clock.make, range(20))) == [*range(20)]
    ahead = [i for i, name in enumerate(clock.threads) if name == "jaxdp-prefetch"]
    assert ahead == ([] if first is None else [*range(first, 20)])


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_faults_and_an_early_end_of_either_way(monkeypatch, seconds):
    clock, fault = Clock([seconds] * 20), OSError("disk on fire")
    monkeypatch.setattr(module, "time", clock)

    def broken_reader(step):
        if step == 9:
            raise fault
        return clock.make(step)

    got = []
    with pytest.raises(OSError) as caught:
        for item in read_ahead(broken_reader, range(20)):
            got.append(item)
    assert got == [*range(9)] and caught.value is fault
    with closing(read_ahead(clock.make, range(10**9))) as items:
        assert [next(items) for _ in range(8)] == [*range(8)]
    assert next(items, "over") == "over"


# --- read_batches
# ------------------------------------------------------------------------------------------------------

X = np.arange(40, dtype=np.float32).reshape(10, 2, 2)
Y = np.arange(10, dtype=np.int32)


class Recorder(Arrays):
    def read(self, indices):
        self.asked = indices
        return super().read(indices)


def test_a_batch_is_the_cursors_rows_and_their_mask():
    dataset, cursor = Recorder(inputs=X, labels=Y), EpochOrder(10, 6, 2, seed=1)
    for step in range(4):
        indices, mask = cursor.rows(step, [1, -1, 0])
        batch = read_batches(dataset, cursor, [step], [1, -1, 0])
        assert batch.keys() == {"inputs", "labels", "mask"}
        assert batch["inputs"].dtype == np.float32 and batch["labels"].dtype == np.int32
        np.testing.assert_array_equal(batch["inputs"], X[indices])
        np.testing.assert_array_equal(batch["labels"], indices)
        np.testing.assert_array_equal(batch["mask"], mask.astype(np.float32), strict=True)
        assert len(dataset.asked) == len(set(dataset.asked.tolist())), "padding is read once"
    assert read_batches(dataset, cursor, [0], [])["inputs"].shape == (0, 3, 2, 2)
    assert read_batches(Examples(list(X)), cursor, [0], [])["inputs"].shape == (0, 3, 2, 2)


@pytest.mark.parametrize("kind", ["bool", "int32", "float32", "float64", "uint8"])
def test_the_data_sets_own_mask_is_kept_in_its_shape(kind):
    tokens = (np.arange(50).reshape(10, 5) % 3 > 0).astype(kind)
    cursor = EpochOrder(10, 6, 2, seed=1)
    indices, mask = cursor.rows(1, [0, 1])
    got = read_batches(Arrays(inputs=X, mask=tokens), cursor, [1], [0, 1])["mask"]
    assert got.shape == (2, 3, 5) and got.dtype == ("float64" if kind == "float64" else "float32")
    np.testing.assert_array_equal(got, tokens[indices] * mask[..., None])
    by_row = read_batches(Arrays(inputs=X, mask=tokens[:, 1]), cursor, [1], [0, 1])["mask"]
    np.testing.assert_array_equal(by_row, tokens[:, 1][indices] * mask)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([X], "Broken.read gave a list; return a dict of arrays"),
        ({"inputs": X[:2]}, r"Broken.read gave 'inputs' of shape \(2, 2, 2\) for 6 indices"),
        (
            {"inputs": X[:6], "labels": 3},
            "Broken.read gave 'labels' as int for 6 indices; return arrays",
        ),
    ],
)
def test_a_read_that_breaks_the_contract_is_named(given, said):
    class Broken(Arrays):
        def read(self, indices):
            return given

    with pytest.raises(UsageError, match=said):
        read_batches(Broken(inputs=X), EpochOrder(10, 6, 2, seed=1), [0], [0, 1])
