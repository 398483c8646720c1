"""Mixtures and streams: the examples of each update, on any number of devices, from any update on."""

import collections
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.data import Mixture, Stream
from jaxdp.data.dataset import UNKNOWN, Arrays, as_dataset, check_dtypes, fingerprint
from jaxdp.data.example_order import order_of
from jaxdp.data.mixture import split_by_weight
from jaxdp.data.prefetch import read_batches
from jaxdp.data.stream import StreamEnded
from jaxdp.data.workers import prefetch_in_workers
from jaxdp.errors import UsageError


def numbers(first, count, split="train"):
    """A set of `count` numbers; those of the test split are negative."""
    x = np.arange(first, first + count, dtype=np.int32)
    return {"inputs": x if split == "train" else -x}


def read(dataset, order, step, shares):
    """The examples of a batch by row, put together from what each process reads; shares:
    microbatches by process.
    """
    rows = {}
    for share in shares:
        batch = read_batches(dataset, order, [step], share)
        for local, place in zip(*np.nonzero(batch["mask"])):
            rows[place * order.microbatches + share[local]] = int(batch["inputs"][local, place])
    return [rows[row] for row in sorted(rows)]


@st.composite
def shares(draw, microbatches):
    """Assignments of the microbatches to processes."""
    processes = draw(st.integers(1, microbatches))
    owners = [draw(st.integers(0, processes - 1)) for _ in range(microbatches)]
    return [
        x for p in range(processes) if (x := [m for m, owner in enumerate(owners) if owner == p])
    ]


# --- mixtures
# --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(st.data())
@pytest.mark.slow
def test_a_mixture_reads_by_weight_on_any_devices(data):
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    size, batch_size, microbatches = (
        data.draw(st.integers(*x)) for x in ((500, 600), (20, 200), (1, 8))
    )
    sets = {f"set{i}": numbers(1000 * i, n) for i, n in enumerate(sizes)}
    mixture = Mixture(sets, dict(zip(sets, weights)), size)
    order = order_of(mixture, batch_size, microbatches, data.draw(st.integers(0, 9)))
    epochs = data.draw(st.integers(1, 3))
    steps = range(epochs * order.steps_per_epoch)
    alone = [read(mixture, order, step, [range(microbatches)]) for step in steps]
    start = data.draw(st.sampled_from(steps))
    resumed, split = pickle.loads(pickle.dumps(mixture)), data.draw(shares(microbatches))
    assert [read(resumed, order, step, split) for step in steps[start:]] == alone[start:]
    drawn = [x for batch in alone for x in batch]
    for epoch in range(epochs):
        of_set = collections.Counter(x // 1000 for x in drawn[epoch * size : (epoch + 1) * size])
        for i, weight in enumerate(weights):
            assert abs(of_set[i] - size * weight / sum(weights)) < 1
    for i, count in enumerate(sizes):  # each set is read to its end before it begins again
        times = collections.Counter(x for x in drawn if x // 1000 == i)
        assert len(times) == count or max(times.values()) == 1
        assert max(times.values()) - min(times.values()) <= 1


def test_without_weights_each_example_is_once_an_epoch():
    mixture = Mixture({"a": numbers(0, 30), "b": numbers(1000, 70)})
    order = order_of(mixture, 100, 4, seed=1)
    first, second = (read(mixture, order, step, [range(4)]) for step in (0, 1))
    assert sorted(first) == sorted(second) == [*range(30), *range(1000, 1070)] and first != second
    mixed = [x < 1000 for x in first]
    assert 2 < sum(mixed[:20]) < 12, "the sets follow one another"
    assert first == read(mixture, order_of(mixture, 100, 4, seed=1), 0, [range(4)])
    assert first != read(mixture, order_of(mixture, 100, 4, seed=2), 0, [range(4)])


@given(st.integers(1, 10_000), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_counts_add_up_to_the_size(size, weights):
    counts = split_by_weight(size, weights)
    assert sum(counts) == size and min(counts) >= 0


def test_the_test_split_mixes_sets_that_have_one():
    sets = {"a": numbers(1000, 9), "b": {"target": "Digits"}}
    assert Mixture.has_split({"sets": sets}) and not Mixture.has_split({"sets": {"a": sets["a"]}})
    assert not Mixture.has_split({"sets": None})
    test = Mixture(
        {"b": "Digits", "c": {"target": "Digits", "args": {"split": "train"}}},
        {"b": 1, "c": 5},
        split="test",
    )
    assert len(test) == 360 and test.classes == 10 and test.input_shape == (8, 8, 1)
    assert not order_of(test, 100, 4, 0, shuffle=False).shuffle


def test_a_file_without_test_split_leaves_the_others(tmp_path):
    np.savez(tmp_path / "few.npz", inputs=np.arange(20), labels=np.arange(20))
    sets = {
        n: {"target": "Npz", "args": {"path": str(tmp_path / "few.npz"), "test_fraction": n}}
        for n in (0.0, 0.5)
    }
    sets = {"whole": sets[0.0], "halves": sets[0.5]}
    assert Mixture(sets, split="test").names == ["halves"] and len(Mixture(sets)) == 30
    assert Mixture.has_split({"sets": sets}) and not Mixture.has_split(
        {"sets": {"whole": sets["whole"]}}
    )


def test_each_set_keeps_its_transform():
    import jax

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def __len__(self):
            return 4

        def read(self, indices):
            return {"inputs": np.ones((len(indices), 2), np.float32)}

        def transform(self, batch, key, train):
            return {**batch, "inputs": batch["inputs"] * self.factor}

    mixture = Mixture({"a": Scaled(2.0), "b": Scaled(3.0)})
    batch = mixture.read(np.array([0, 5, 3, 4]))
    assert batch["set"].tolist() == [0, 1, 0, 1]
    done = jax.jit(mixture.transform, static_argnums=2)(batch, jax.random.key(0), True)
    assert done.keys() == {"inputs"} and done["inputs"][:, 1].tolist() == [2, 3, 2, 3]


def test_int64_of_some_examples_is_read_as_of_one_set():
    few, none = [{"inputs": 3}, {"inputs": 2**40}], [{"inputs": 4}]
    mixture = Mixture({"a": few, "b": few})
    check_dtypes(mixture, x64=True)
    inputs = mixture.read(np.arange(4))["inputs"]
    assert inputs.dtype == np.int64 and inputs.tolist() == [3, 2**40] * 2
    with pytest.raises(
        UsageError,
        match=r"data.args.sets.b: examples of .*int32.*, unlike .*int64.* of a; make them",
    ):
        check_dtypes(Mixture({"a": few, "b": none}), x64=True)


def test_an_entry_that_a_mixture_adds_itself_is_named():
    class Scaled(Arrays):
        def transform(self, batch, key, train):
            return batch

    with pytest.raises(
        UsageError, match=r"data.args.sets: the examples have an entry 'set', which .*; rename it"
    ):
        Mixture({"a": Scaled(inputs=np.arange(3), set=np.arange(3))})
    assert Mixture({"a": {"inputs": np.arange(3), "set": np.arange(3)}}).read(np.array([2]))[
        "set"
    ].tolist() == [2]


@pytest.mark.parametrize(
    ("sets", "args", "message"),
    [
        ({}, {}, r"data.args.sets: {} has no set; give {name: {target, args}, ...}"),
        ({"a": []}, {}, r"data.args.sets.a: data: the data set is empty; give it at least one example"),
        ({"a": numbers(0, 3)}, {"weights": {"a": -1}}, r"data.args.weights.a: -1 is no weight; give this set a pos"),
        ({"a": numbers(0, 3)}, {"weights": {"a": 0}}, r"data.args.weights.a: 0 is no weight; give this set a pos"),
        ({"a": numbers(0, 3)}, {"weights": {"a": float("nan")}}, r"data.args.weights.a: nan is no weight"),
        ({"a": numbers(0, 3)}, {"weights": {"a": "1"}}, r"data.args.weights.a: '1' is no weight"),
        ({"a": numbers(0, 3), "b": numbers(0, 3)}, {"weights": {"a": 1e308, "b": 1e308}}, "data.args.weights: the sum"),
        ({"a": numbers(0, 3)}, {"weights": {}}, r"data.args.weights.a: None is no weight; give this set"),
        ({"a": numbers(0, 3)}, {"weights": {"a": 1, "c": 1}}, r"data.args.weights.c: there is no such set; .* a"),
        ({"a": numbers(0, 3), "b": numbers(0, 3)}, {"weights": {"a": 1e9, "b": 1}}, r"b: less than one of the 6"),
        ({"a": numbers(0, 3)}, {"size": 0}, r"data.args.size: 0 is too small"),
        ({"a": numbers(0, 3), "b": {"inputs": [0.5]}}, {}, r"data.args.sets.b: examples of .*float.*, unlike .*int32"),
        ({"a": {"target": "Digits", "args": {"split": "train"}}}, {"split": "test"}, "no set has a test split; add"),
        ({"a": "Digit"}, {}, r"data.args.sets.a.target: 'Digit' is neither built in nor a dotted path; did you mean"),
        ({"a": {"target": "Digits", "args": {"roots": 1}}}, {}, r"data.args.sets.a.args.roots: Digits takes no such"),
        ({"a": Stream(lambda: iter([1, 2]))}, {}, r"data.args.sets.a: a stream is read in its order, and a mixture"),
        ({"a": Stream(lambda: iter([1, 2]), size=2)}, {}, r"sets.a: a stream is read in its order, and a mixture"),
    ],
)  # fmt: skip
def test_bad_mixtures_are_named(sets, args, message):
    with pytest.raises(UsageError, match=message):
        Mixture(sets, **args)


# --- streams
# ---------------------------------------------------------------------------------------------------------


def count_to(count, start=0):
    yield from range(start, count)


def only_in_order(count):
    yield from range(count)


def decode(record):
    return np.int32(record)


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_a_stream_is_read_by_position_on_any_devices(data):
    count, block = data.draw(st.integers(80, 300)), data.draw(st.sampled_from([1, 2, 7, 50]))
    size = data.draw(st.sampled_from([None, count, count - 17]))
    batch_size, microbatches = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 8))
    source = data.draw(st.sampled_from([count_to, only_in_order]))

    def make():
        return Stream(source, {"count": count}, size, block, decode)

    order = order_of(make(), batch_size, microbatches, data.draw(st.integers(0, 9)))
    stream, alone = make(), []
    if size is None:
        with pytest.raises(StreamEnded, match=rf"the stream ends after {count} examples"):
            for step in range(count + 1):
                alone.append(read(stream, order, step, [range(microbatches)]))
        assert len(stream) == UNKNOWN
    else:
        alone = [
            read(stream, order, step, [range(microbatches)])
            for step in range(2 * order.steps_per_epoch)
        ]
    drawn = [x for batch in alone for x in batch]
    if size is None:
        assert count - len(drawn) < batch_size + block and len(set(drawn)) == len(drawn)
        assert block > 1 or drawn == [*range(len(drawn))]
    else:
        assert sorted(drawn[:size]) == sorted(drawn[size:]) == [*range(size)]
    for i in range(len(drawn)):
        assert abs(drawn[i] - i % (size or count)) < block
    if alone:
        start, split = data.draw(st.integers(0, len(alone) - 1)), data.draw(shares(microbatches))
        for process in split:  # each has a stream of its own
            own = pickle.loads(pickle.dumps(make()))
            for step in range(start, len(alone)):
                rows = [row for row in range(len(alone[step])) if row % microbatches in process]
                batch = read_batches(own, order, [step], process)
                assert sorted(batch["inputs"][batch["mask"] > 0]) == sorted(
                    alone[step][row] for row in rows
                )


def test_a_process_decodes_only_its_rows_of_a_stream():
    decoded, opened = [], []

    def source(start=0):
        opened.append(start)
        yield from range(start, 10_000)

    def note(record):
        decoded.append(record)
        return np.int32(record)

    stream = Stream(source, decode=note)
    order = order_of(stream, 8, 4, 0)
    decoded.clear()
    read_batches(stream, order, [500], [1, 3])
    read_batches(stream, order, [501], [1, 3])
    assert sorted(decoded) == [4001, 4003, 4005, 4007, 4009, 4011, 4013, 4015] and opened == [
        0,
        4000,
    ]
    stream = pickle.loads(pickle.dumps(Stream(count_to, {"count": 10_000}, decode=decode)))
    assert stream.records.iterator is None and read_batches(stream, order, [500], [0])[
        "inputs"
    ].tolist() == [[4000, 4004]]
    assert stream.records.first == 4000


def test_workers_read_a_stream():
    stream = Stream(count_to, {"count": 100}, decode=decode)
    order = order_of(stream, 30, 3, 0)
    with (
        prefetch_in_workers(stream, order, np.arange(3), range(9), 1) as batches,
        pytest.raises(StreamEnded),
    ):
        list(batches)
    plain = [read_batches(stream, order, [step], np.arange(3)) for step in range(3)]
    for share in ([0], [1], [2]):  # the last batch has rows for the first of them, but is not full
        with pytest.raises(StreamEnded, match="the stream ends after 100 examples"):
            read_batches(stream, order, [3], share)
    assert [x["inputs"].T.reshape(-1).tolist() for x in plain] == [
        [*range(i, i + 30)] for i in (0, 30, 60)
    ]
    error = pickle.loads(pickle.dumps(StreamEnded("data: it ends")))
    assert isinstance(error, StreamEnded) and str(error) == "data: it ends"


def test_steps_over_an_epochs_end_keep_a_short_window():
    longest, stream = [0], Stream(count_to, {"count": 1000}, size=1000, decode=decode)
    fetch = stream.records.fetch
    stream.records.fetch = lambda *args: (fetch(*args), longest.append(len(stream.records.buffer)))
    order = order_of(stream, 10, 2, 0)
    batches = read_batches(stream, order, range(98, 102), [0, 1])
    assert batches["inputs"].swapaxes(1, 2).ravel().tolist() == [*range(980, 1000), *range(20)]
    assert max(longest) <= 64


def test_examples_of_a_stream_may_be_dicts_or_pairs():
    for form in (
        lambda i: {"inputs": np.float32(i), "labels": 2 * i},
        lambda i: (np.float32(i), 2 * i),
    ):
        stream = as_dataset(Stream(lambda form=form: map(form, range(70))))
        found = stream.read(np.array([5, 69]))
        assert found["inputs"].tolist() == [5, 69] and found["labels"].tolist() == [10, 138]
        assert re.fullmatch("[0-9a-f]{16}", fingerprint(stream)) and stream.read_ahead == 64


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"source": "os.none"}, r"data.args.source: module 'os' has no 'none'"),
        (
            {"source": [1, 2]},
            r"data.args.source: list is not a function or a class that returns an iterable",
        ),
        (
            {"source": lambda: iter(())},
            r"data.args.source: the stream is empty; give it at least one example",
        ),
        ({"source": lambda: 3}, r"data.args.source: it returned a int, which is not iterable"),
        (
            {"source": count_to, "args": {"counts": 3}},
            r"data.args.args.counts: count_to takes no such argument; did",
        ),
        ({"source": count_to, "args": {"count": 3}, "size": 0}, r"data.args.size: 0 is too small"),
        (
            {"source": count_to, "args": {"count": 3}, "shuffle": 0},
            r"data.args.shuffle: 0 is too small",
        ),
        (
            {"source": count_to, "args": {"count": 3}, "split": "all"},
            r"data.args.split: 'all' is not one of",
        ),
    ],
)
def test_bad_streams_are_named(args, message):
    with pytest.raises(UsageError, match=message):
        Stream(**args)


def test_a_stream_shorter_than_its_size_is_named():
    stream = Stream(count_to, {"count": 90}, size=100, decode=decode)
    with pytest.raises(
        UsageError, match=r"data.args.size: 100, but the stream ends after 90; make it smaller"
    ) as caught:
        stream.read(np.arange(80, 100))
    assert not isinstance(caught.value, StreamEnded)


def test_iterable_sets_of_other_libraries_are_streams():
    """They are in the extra `test`; without them, the test is skipped."""
    datasets = pytest.importorskip("datasets", reason="pip install -e '.[datasets]'")
    grain = pytest.importorskip("grain", reason="pip install -e '.[grain]'")
    rows = datasets.Dataset.from_dict({"inputs": [*range(200)], "labels": [*range(200)]})
    of_datasets = Stream(lambda start=0: rows.to_iterable_dataset().skip(start))
    of_grain = Stream(lambda: grain.MapDataset.range(200).to_iter_dataset())
    for stream in (of_datasets, of_grain):
        order = order_of(stream, 16, 4, 0)
        assert read(stream, order, 9, [[1, 3], [0, 2]]) == [*range(144, 160)]
        assert read(stream, order, 2, [range(4)]) == [*range(32, 48)]
        with pytest.raises(StreamEnded, match="the stream ends after 200 examples"):
            read(stream, order, 12, [range(4)])
