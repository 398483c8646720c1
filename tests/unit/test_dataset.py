"""What is accepted as a data set, and what is said of that which is not."""

import os
import time

import ml_dtypes
import numpy as np
import pytest

from jaxdp.data import Mixture, Npz, Stream, TokenFile
from jaxdp.data.contents import contents, difference
from jaxdp.data.dataset import Arrays, Examples, as_dataset, check_dtypes, fingerprint, probes
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.data.windows import Windows
from jaxdp.errors import RunFailed, UsageError

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.arange(6, dtype=np.int32)


class MapStyle:
    """As in other libraries: a length, one example at a time, and a `transform` that is none of
    ours.
    """

    transform = "not ours"

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def read(source, indices=(4, 0, 4)):
    return as_dataset(source).read(np.array(indices))


def same(got, **want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype
        np.testing.assert_array_equal(got[key], value)


@pytest.mark.parametrize(
    "source",
    [
        Arrays(inputs=X, labels=Y),
        {"inputs": X, "labels": Y},
        (X, Y),
        [{"inputs": x, "labels": y} for x, y in zip(X, Y)],
        [(x, y) for x, y in zip(X, Y)],
        [(x, int(y)) for x, y in zip(X, Y)],  # a Python number becomes what JAX makes of it
        tuple((x, y) for x, y in zip(X, Y)),
        MapStyle([(x, y) for x, y in zip(X, Y)]),
    ],
)
def test_the_same_examples_in_every_form(source):
    same(read(source), inputs=X[[4, 0, 4]], labels=Y[[4, 0, 4]])
    assert len(as_dataset(source)) == 6
    check_dtypes(as_dataset(source), x64=False)
    assert not hasattr(as_dataset(source), "transform")
    same(read(source, np.zeros(0, np.int64)), inputs=X[:0], labels=Y[:0])


def test_a_pair_or_list_of_arrays_is_inputs_and_labels():
    for pair in ((X, Y), [X, Y], (X.tolist(), Y.tolist()), (X, Y.tolist())):
        dataset = as_dataset(pair)
        assert len(dataset) == len(X)
        for key, value in dataset.read(np.arange(len(X))).items():
            np.testing.assert_array_equal(
                value, {"inputs": X, "labels": Y}[key].astype(value.dtype)
            )
    assert len(as_dataset([X, X.astype(np.float64)])) == len(X), "two examples would be alike"
    with pytest.raises(
        UsageError,
        match=r"a list of two arrays float32\[.*\] may be a pair or two examples; give a tuple",
    ):
        as_dataset([X, X.copy()])
    for several in ((X,), (X, X, X), (X, X, X, X)):  # an input, a mask and labels, say
        with pytest.raises(
            UsageError, match=rf"a tuple of {len(several)} arrays; give a pair .*, a dict of arrays"
        ):
            as_dataset(several)
    assert len(as_dataset([X, X, X])) == 3 and len(as_dataset((0.5, 1.5, 2.5))) == 3


WRONG = "has 'mask' {} in example 4; set it to 0 where nothing counts, and to 1 or another positive weight elsewhere"


@pytest.mark.parametrize(
    "value, dtype", [(-1, "float32"), (-1, "int8"), (np.nan, "float16"), (np.inf, "float64")]
)
@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_a_negative_or_nonfinite_mask_is_refused(value, dtype, shape, tmp_path):
    """In memory as soon as it is given; elsewhere as soon as a batch has it."""
    mask = np.ones(shape, dtype)
    mask[4] = value
    with pytest.raises(UsageError, match=f"^data: an array {WRONG.format(mask[4].flat[0])}$"):
        Arrays(inputs=X, mask=mask)
    np.save(tmp_path / "mask.npy", mask)
    mapped = Arrays(inputs=X, mask=np.load(tmp_path / "mask.npy", mmap_mode="r"))
    listed = as_dataset(MapStyle([{"inputs": x, "mask": m} for x, m in zip(X, mask)]))
    order = EpochOrder(6, 6, 2, 0, shuffle=False)
    for dataset, name in ((mapped, "Arrays"), (listed, "MapStyle")):
        with pytest.raises(UsageError, match=f"^data: {name} {WRONG.format('.*')}$"):
            read_batches(dataset, order, [0], [0, 1])
        assert read_batches(dataset, order, [0], [1])["mask"].all()  # without example 4


def test_masks_of_floats_booleans_and_ints_are_read():
    for mask in (
        np.linspace(0, 2, 6),
        np.arange(6) > 2,
        np.arange(6, dtype=np.uint8),
        np.arange(6) % 2,
    ):
        read = Arrays(inputs=X, mask=mask).read(np.arange(6))["mask"]
        np.testing.assert_array_equal(read, mask)


def test_masked_entries_are_not_read_as_numbers():
    mask = np.zeros(X.shape, bool)
    same(read(np.ma.array(X, mask=mask)), inputs=X[[4, 0, 4]])
    mask[2] = True
    with pytest.raises(UsageError, match="'inputs' has masked entries; fill them"):
        as_dataset(np.ma.array(X, mask=mask))


def test_one_array_or_a_list_of_them_is_the_inputs():
    import jax.numpy as jnp

    for source in (X, list(X), MapStyle(list(X)), jnp.asarray(X)):
        same(read(source), inputs=X[[4, 0, 4]])
    same(read([[1, 2], [3, 4]], [1]), inputs=np.array([[3, 4]], np.int32))


def test_an_object_with_read_is_taken_as_it_is():
    dataset = Arrays(inputs=X)
    assert as_dataset(dataset) is dataset


def test_a_memory_map_is_not_read_whole(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    dataset = as_dataset((mapped, Y))
    assert np.shares_memory(dataset.arrays["inputs"], mapped)
    same(dataset.read(np.array([5])), inputs=X[5:], labels=Y[5:])


class Unlike(MapStyle):
    def __init__(self, odd):
        super().__init__(
            [{"inputs": np.zeros((28, 28), np.uint8), "labels": np.int32(1)} for _ in range(20)]
        )
        self.items[17] = odd


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (
            {"inputs": np.zeros((28, 27), np.uint8), "labels": np.int32(1)},
            r"example 17 has 'inputs' of shape \(28, 27\) uint8, example 0 has \(28, 28\) uint8",
        ),
        (
            {"inputs": np.zeros((28, 28), np.float32), "labels": np.int32(1)},
            r"example 17 has 'inputs' of shape \(28, 28\) float32, example 0 has \(28, 28\) uint8",
        ),
        (
            {"inputs": np.zeros((28, 28), np.uint8)},
            r"example 17 has keys \['inputs'\], example 0 has \['inputs', 'labels'\]",
        ),
        ((1, 2, 3), r"example 17 is a tuple of 3; give \(inputs, labels\) or a dict"),
        (
            {"inputs": np.zeros((28, 28), np.uint8), "labels": "cat"},
            "'labels' of example 17 is <U3, not numbers",
        ),
        (
            {"inputs": np.zeros((28, 28), np.uint8), "labels": None},
            "'labels' of example 17 is object, not numbers",
        ),
        (
            {"inputs": np.zeros((28, 28), np.uint8), "labels": [[1], [2, 3]]},
            "'labels' of example 17 is ragged",
        ),
    ],
)
def test_an_example_unlike_the_first_is_named(odd, said):
    dataset = as_dataset(Unlike(odd))
    dataset.read(np.arange(17))
    with pytest.raises(UsageError, match=said):
        dataset.read(np.arange(20))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ((x for x in X), "generator has no length"),
        (5, "int has no length"),
        ([], "the data set is empty"),
        (X[:0], "the data set is empty"),
        ((X, Y[:0]), r"differ in their number of examples: .*\(6, 4\).*\(0,\)"),
        ({"inputs": X[:0], "labels": Y[:0]}, "the data set is empty"),
        ({"inputs": X, "labels": 3}, "one entry an example"),
        ({1, 2}, "set has neither read nor __getitem__"),
        ((X, np.array(["a"] * 6)), "'labels' is <U1, not numbers"),
        ((X.astype(np.longdouble), Y), "'inputs' is <f16, which JAX lacks; cast it, as by .astype"),
    ],
)
def test_what_is_no_data_set_is_refused(source, said):
    with pytest.raises(UsageError, match=said):
        as_dataset(source)


def test_arrays_of_the_other_byte_order_are_converted(tmp_path):
    """JAX has no such arrays."""
    for source in (
        (X.astype(">f4"), Y.astype(">i8")),
        [(x.astype(">f4"), y.astype(">i8")) for x, y in zip(X, Y)],
    ):
        assert {value.dtype.str for value in read(source).values()} == {"<f4", "<i4"}
    np.save(tmp_path / "x.npy", X.astype(">f4"))
    with pytest.raises(UsageError, match="'inputs' is >f4, which JAX lacks"):
        as_dataset({"inputs": np.load(tmp_path / "x.npy", mmap_mode="r")})


def test_int64_that_fits_becomes_int32():
    """NumPy's and PyTorch's integers are int64 unless asked otherwise."""
    assert read((X, Y.astype(np.int64)))["labels"].dtype == np.int32
    assert read([(X[0], np.int64(3))] * 5)["labels"].dtype == np.int32


@pytest.mark.parametrize("kind", ["int64", "uint64", "float64", "complex128"])
def test_64_bit_data_needs_x64(kind):
    labels = Y.astype(kind)
    labels[-1] = 2**31
    dataset = as_dataset((X, labels))
    check_dtypes(dataset, x64=True)
    with pytest.raises(
        UsageError, match=f"'labels' is {kind}, .*cast to .*precision.params: float64"
    ) as error:
        check_dtypes(dataset, x64=False)
    assert ("labels that are classes to int32" in str(error.value)) == (kind == "float64")
    assert dataset.read(np.arange(2))["labels"].dtype == kind


def test_python_integers_wider_than_32_bits_stay_wide():
    assert read([2**40, 1], [0])["inputs"].tolist() == [2**40]
    with pytest.raises(
        UsageError, match=r"example 1 has 'inputs' of shape .* int64, example 0 has .* int32"
    ):
        read([1, 2**40], [1])
    with pytest.raises(UsageError, match=r"'inputs' is float64, .*float32"):
        check_dtypes(as_dataset([0.1, 0.2]), x64=False)


def test_int64_of_some_examples_is_read_if_jax_has_it():
    source = [(np.zeros(2, np.float32), 3), (np.zeros(2, np.float32), 2**40)]
    dataset = as_dataset(source)
    check_dtypes(dataset, x64=True)
    labels = dataset.read(np.array([1, 0, 1]))["labels"]
    assert labels.dtype == np.int64 and labels.tolist() == [2**40, 3, 2**40]
    fits = as_dataset(source[:1])
    before = fingerprint(fits)
    check_dtypes(fits, x64=True)
    assert (
        fits.read(np.zeros(1, np.int64))["labels"].dtype == np.int32 and fingerprint(fits) == before
    )


def test_half_precision_and_bools_are_numbers():
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.bool_, np.int8):
        same(read(X.astype(kind)), inputs=X[[4, 0, 4]].astype(kind))
        fingerprint(as_dataset(X.astype(kind)))


def test_the_fingerprint_tells_data_apart():
    base = fingerprint(Arrays(inputs=X, labels=Y))
    assert (
        base
        == fingerprint(Arrays(labels=Y.copy(), inputs=X.copy()))
        == fingerprint(as_dataset((X, Y)))
    )
    assert len(base) == 16 and int(base, 16) >= 0
    assert base == fingerprint(Arrays(inputs=X.astype(">f4"), labels=Y)), (
        "the byte order is not the data"
    )
    changed = X.copy()
    changed[5, 3] += 1

    class Other(Arrays):
        pass

    others = [
        Arrays(inputs=changed, labels=Y),
        Arrays(inputs=X[:5], labels=Y[:5]),
        Arrays(inputs=X.view(np.int32), labels=Y),
        Arrays(inputs=X.reshape(6, 2, 2), labels=Y),
        Arrays(images=X, labels=Y),
        Other(inputs=X, labels=Y),
        as_dataset([(x, y) for x, y in zip(X, Y)]),
    ]
    assert len({base, *map(fingerprint, others)}) == 8


def test_a_fingerprint_reads_at_most_64_even_examples():
    asked = []

    class Counting(Examples):
        def read(self, indices):
            asked.append(indices)
            return super().read(indices)

    fingerprint(Counting(range(1000)))
    (indices,) = asked
    assert len(indices) == 64 and indices[0] == 0 and set(np.diff(indices)) == {15, 16}
    fingerprint(Counting(range(3)))
    assert asked[1].tolist() == [0, 1, 2]


class Readable:
    """A data set without parts. wait: seconds for a read."""

    def __init__(self, labels, wait=0.0):
        self.labels, self.wait = labels, wait

    def __len__(self):
        return len(self.labels)

    def read(self, indices):
        time.sleep(self.wait)
        return {"labels": self.labels[indices]}


class Doubled(Arrays):
    """Has another `read` than that of its parts."""

    factor = 2

    def read(self, indices):
        return {"labels": self.factor * self.arrays["labels"][indices]}


LABELS = np.arange(450, dtype=np.int32)
MAKES = {
    "arrays": lambda labels, folder: Arrays(labels=labels),
    "a list": lambda labels, folder: as_dataset([{"labels": x} for x in labels]),
    "an own data set": lambda labels, folder: Readable(labels),
    "a subclass with another read": lambda labels, folder: Doubled(labels=labels),
    "a file": lambda labels, folder: npz(folder, labels=labels),
    "the test rows of a file": lambda labels, folder: npz(
        folder, "test", 0.5, labels=np.repeat(labels, 2)
    ),
    "a text": lambda labels, folder: Windows([labels], 3, 1),
    "tokens": lambda labels, folder: token_file(folder, labels),
    "a mixture": lambda labels, folder: Mixture({"a": {"labels": labels}, "b": {"labels": labels}}),
}


def npz(folder, split="train", fraction=0.0, **arrays):
    np.savez(folder / "data.npz", **arrays)
    return Npz(str(folder / "data.npz"), split, test_fraction=fraction)


def token_file(folder, tokens):
    tokens.astype("<u2").tofile(folder / "train.bin")
    return TokenFile(str(folder), None, 3, 1)


@pytest.mark.parametrize("kind", MAKES)
def test_contents_are_of_all_examples(tmp_path, kind):
    """Every example counts, where a fingerprint is of 64; the same data has the same digests."""

    def make(labels):
        return contents(MAKES[kind](labels, tmp_path))

    first, changed = make(LABELS), LABELS.copy()
    changed[np.arange(450) % 7 > 0] += 500
    changed[probes(Readable(LABELS))] = LABELS[probes(Readable(LABELS))]
    assert difference(first, make(LABELS.copy())) is None and not first["partly"]
    assert " -> " in difference(first, make(changed))


def test_what_contents_leave_out_is_said(tmp_path, monkeypatch):
    slow, stream = contents(Readable(LABELS, 0.08)), contents(Stream(lambda: iter(LABELS[:, None])))
    assert (slow["partly"], slow["all"]) == ("64 of 450 examples", None)
    assert (stream["partly"], stream["all"]) == ("64 examples", None)
    changed = LABELS.copy()
    changed[3] += 1
    assert difference(slow, contents(Readable(changed))) is None, "only what both have is compared"
    monkeypatch.setattr("jaxdp.data.contents.MOST", 2000)

    def large(labels):
        return contents(Arrays(inputs=np.zeros((450, 8), np.float32), labels=labels))

    assert large(LABELS)["partly"] == "64 of 450 examples and 1 of 2 files or arrays"
    assert difference(large(LABELS), large(changed)) is not None

    class Broken(Readable):
        def read(self, indices):
            return super().read(indices) if 100 not in indices else 1 / 0

    assert contents(Broken(LABELS))["partly"] == "64 of 450 examples"


@pytest.mark.parametrize("classes, known", [(7, True), (["cat", "dog"], False)])
def test_the_number_of_classes_of_a_sequence_is_known(classes, known):
    class Source(list):
        pass

    source = Source([(np.zeros(2, np.float32), 1)])
    source.classes = classes
    assert getattr(as_dataset(source), "classes", None) == (classes if known else None)


def test_an_array_without_a_name():
    with pytest.raises(UsageError, match="data: the key 0 is not a name; give each array one"):
        as_dataset({0: X, 1: Y})


@pytest.mark.parametrize("kind", ["npy", "tokens"])
def test_a_mapped_file_that_shrinks_is_named(tmp_path, kind):
    """To read it would kill the process by SIGBUS."""
    if kind == "npy":
        for name in ("inputs", "labels"):
            np.save(tmp_path / f"{name}.npy", np.zeros((50_000,), np.int32))
        dataset, file = (
            Arrays(
                **{n: np.load(tmp_path / f"{n}.npy", mmap_mode="r") for n in ("inputs", "labels")}
            ),
            "inputs.npy",
        )
    else:
        np.zeros(100_000, np.uint16).tofile(tmp_path / "tokens.bin")
        dataset, file = TokenFile(str(tmp_path / "tokens.bin"), length=16), "tokens.bin"
    last = np.array([len(dataset) - 1])
    assert len(dataset.read(last)["inputs"]) == 1
    os.truncate(tmp_path / file, 5000)
    with pytest.raises(RunFailed, match=rf"data: '.*{file}' had 200,\d+ bytes and now has 5,000"):
        dataset.read(last)
