"""Built-in sources against small files in the official formats, damaged ones too, and the real ones
where present.
"""

import functools
import gzip
import io
import os
import pickle
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

import jaxdp.data
from jaxdp.data import CIFAR10, MNIST, Digits, FashionMNIST
from jaxdp.data.dataset import check_dtypes
from jaxdp.errors import UsageError
from packing import write_tar

RNG = np.random.default_rng(0)
REAL = os.environ.get("JAXDP_DATA")
OF_IMAGES = [
    name
    for name in jaxdp.data.SOURCES
    if name not in ("Augmented", "Table") and hasattr(getattr(jaxdp.data, name), "transform")
]
real_data = pytest.mark.skipif(
    not REAL, reason="JAXDP_DATA does not name a folder with the full data sets"
)


# --- the contract of every source
# ------------------------------------------------------------------------------------


def write_cifar(folder, rows=6, **dump):
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        planes = RNG.integers(0, 256, (rows, 3072), np.uint8)
        labels = RNG.integers(0, 10, rows).tolist()
        content = {
            b"batch_label": b"one",
            b"labels": labels,
            b"data": planes,
            b"filenames": [b"a.png"] * rows,
        }
        (folder / name).write_bytes(pickle.dumps(content, **dump))
        written[name] = planes, labels
    return written


def idx(array):
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write_mnist(folder, rows=7, zipped=True, mark="-"):
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        images, labels = (
            RNG.integers(0, 256, (rows, 28, 28), np.uint8),
            RNG.integers(0, 10, rows).astype(np.uint8),
        )
        for kind, array in (("images", images), ("labels", labels)):
            path = folder / f"{stem}-{kind}{mark}idx{array.ndim}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
        written[split] = images, labels
    return written


def write_text(folder):
    folder.mkdir()
    words = [f"word{i}" for i in RNG.integers(0, 50, 10_000)]
    lines = "\n".join(" ".join(words[i : i + 10]) for i in range(0, len(words), 10))
    for split in ("train", "valid", "test"):
        (folder / f"ptb.{split}.txt").write_text(lines)
    (folder / "documents.txt").write_text(lines.replace("\n", "<|endoftext|>"))
    RNG.integers(0, 50257, 60_000).astype("<u2").tofile(folder / "tokens.bin")


def write_images(folder):
    pillow = pytest.importorskip(
        "PIL.Image", reason="Pillow is not installed (pip install -e '.[images]')"
    )
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = RNG.integers(0, 256, (20, 30, 3), np.uint8)
                pillow.fromarray(pixels).save(folder / split / name / f"{i}.png")


def write_hugging_face(folder):
    datasets = pytest.importorskip("datasets", reason="pip install -e '.[datasets]'")
    features = datasets.Features(
        {"inputs": datasets.Array2D((4, 3), "uint8"), "labels": datasets.ClassLabel(3)}
    )
    rows = {"inputs": RNG.integers(0, 256, (8, 4, 3), np.uint8), "labels": RNG.integers(0, 3, 8)}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(folder))


def write_npz(folder):
    folder.mkdir()

    def rows(n):
        return {
            "inputs": RNG.integers(0, 256, (n, 4, 3), np.uint8),
            "labels": RNG.integers(0, 3, n),
        }

    np.savez(folder / "data.npz", **rows(8), **{f"{k}_test": v for k, v in rows(6).items()})


def write_table(folder):
    pandas = pytest.importorskip("pandas", reason="pip install -e '.[tables]'")
    folder.mkdir()
    table = pandas.DataFrame({"a": RNG.normal(size=60), "kind": RNG.choice(["x", "y"], 60)})
    table.to_csv(folder / "table.csv", index=False)


def write_image_zip(folder):
    write_images(folder / "images")
    shutil.make_archive(str(folder / "images"), "zip", folder / "images")


def write_image_table(folder):
    pandas = pytest.importorskip("pandas", reason="pip install -e '.[tables]'")
    write_images(folder)
    images = sorted(folder.glob("*/*/*.png"))
    table = {
        "path": [str(path.relative_to(folder)) for path in images],
        "label": [path.parts[-2] for path in images],
        "split": [path.parts[-3] for path in images],
    }
    pandas.DataFrame(table).to_csv(folder / "table.csv", index=False)


def write_web_dataset(folder):
    write_images(folder / "images")
    members = {}
    for number, path in enumerate(2 * sorted(folder.glob("images/*/*/*.png"))):
        members |= {f"{number}.cls": b"%d" % (number % 2), f"{number}.png": path.read_bytes()}
    write_tar(folder / "all-0.tar", members)


def write_medmnist(folder):
    folder.mkdir()
    parts = {}
    for split, rows in (("train", 8), ("val", 7), ("test", 6)):
        parts[f"{split}_images"] = RNG.integers(0, 256, (rows, 28, 28), np.uint8)
        parts[f"{split}_labels"] = RNG.integers(0, 3, (rows, 1), np.uint8)
    np.savez_compressed(folder / "mnist.npz", **parts)


WRITE = {  # what a source is made of; those that are not here need nothing
    "CIFAR10": ("", lambda folder: write_cifar(folder, protocol=2)),
    "MNIST": ("", write_mnist),
    "FashionMNIST": ("", write_mnist),
    "TextFile": ("ptb.test.txt", write_text),
    "PennTreebank": ("", write_text),
    "TokenFile": ("tokens.bin", write_text),
    "Documents": ("documents.txt", write_text),
    "ImageFolder": ("", write_images),
    "HuggingFace": ("", write_hugging_face),
    "PackedTokens": ("tokens.bin", write_text),
    "Npz": ("data.npz", write_npz),
    "Table": ("table.csv", write_table),
    "ImageZip": ("images.zip", write_image_zip),
    "ImageTable": ("table.csv", write_image_table),
    "MedMNIST": ("mnist.npz", write_medmnist),
    "WebDataset": ("all-{0..0}.tar", write_web_dataset),
}
ARGS = {
    "ImageTable": {"columns": {"split": "split"}},
    "Augmented": {"data": "Digits", "steps": ["RandomFlip"]},
    "Balanced": {"data": "Digits"},
    "Table": {"label": "kind"},
    "Mixture": {"sets": {"a": "Digits", "b": "Digits"}, "weights": {"a": 1, "b": 2}},
    "PackedTokens": {"end_of_text": 5},
    "WebDataset": {"test_fraction": 0.5},
}
RANDOM_ACCESS = [name for name in jaxdp.data.SOURCES if name != "Stream"]


def make(name, folder, **args):
    """The source `name` of what is in a folder, which is written first where it is not there."""
    args |= ARGS.get(name, {})
    if name not in WRITE:
        return getattr(jaxdp.data, name)(**args)
    file, write = WRITE[name]
    if not (folder / name).exists():
        write(folder / name)
    return getattr(jaxdp.data, name)(str(folder / name / file), **args)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", RANDOM_ACCESS)
def test_every_source_keeps_the_contract(name, split, tmp_path):
    source = make(name, tmp_path, split=split)
    got = source.read(np.array([3, 0, 3]))
    assert got["inputs"].shape == (3, *source.input_shape) and got["inputs"].dtype in (
        np.uint8,
        np.int32,
        np.float32,
    )
    assert got["labels"].shape in ((3,), got["inputs"].shape) and got["labels"].dtype == np.int32
    assert got["labels"].max() < source.classes and np.array_equal(
        got["inputs"][0], got["inputs"][2]
    )
    check_dtypes(source, x64=False)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_images_are_scaled_and_augmented_in_training(name, split, tmp_path):
    import jax

    source = make(name, tmp_path, split=split, augment=True)
    rows = source.read(np.arange(5))
    batch = {**rows, "mask": np.ones(5, np.float32)}
    with jax.numpy_dtype_promotion("strict"):
        transform = jax.jit(source.transform, static_argnums=2)
        still, again = transform(batch, None, False), transform(batch, jax.random.key(1), False)
        moved, other = (transform(batch, jax.random.key(seed), True) for seed in (0, 1))
    for out in (still, moved):
        assert out.keys() == batch.keys() and np.array_equal(out["labels"], rows["labels"])
        assert out["inputs"].dtype == np.float32 and out["inputs"].shape == rows["inputs"].shape
        assert np.isfinite(out["inputs"]).all()
    assert np.array_equal(still["inputs"], again["inputs"]), "evaluation must not depend on a key"
    assert not np.array_equal(moved["inputs"], other["inputs"]) and not np.array_equal(
        still["inputs"], moved["inputs"]
    )
    source.augment = False
    with jax.numpy_dtype_promotion("strict"):
        assert np.array_equal(
            source.transform(batch, jax.random.key(0), True)["inputs"], still["inputs"]
        )


@pytest.mark.parametrize("name", RANDOM_ACCESS)
def test_a_split_is_train_or_test(name, tmp_path):
    more = {"PennTreebank": "'train', 'valid', 'test'", "MedMNIST": "'train', 'val', 'test'"}
    known = more.get(name, "'train', 'test'")
    with pytest.raises(UsageError, match=f"data.args.split: 'all' is not one of {known}"):
        make(name, tmp_path, split="all")


def test_sources_load_without_jax():
    code = "import sys, jaxdp.data as d; d.CIFAR10, d.MNIST, len(d.Digits()); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'CIFAR11'"):
        _ = jaxdp.data.CIFAR11


# --- digits
# ----------------------------------------------------------------------------------------------------------


def test_digits_are_the_published_ones():
    train, test = Digits("train"), Digits("test")
    assert (len(train), len(test)) == (1437, 360)
    counts = sum(np.bincount(split.arrays["labels"], minlength=10) for split in (train, test))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert test.arrays["inputs"][0, 0, :, 0].tolist() == [
        0,
        0,
        5,
        13,
        9,
        1,
        0,
        0,
    ]  # the file's first row, a zero
    assert test.arrays["labels"][0] == 0 and train.arrays["labels"][:4].tolist() == [1, 2, 3, 4]
    assert max(split.arrays["inputs"].max() for split in (train, test)) == 16
    scaled = train.transform(train.read(np.arange(100)), None, False)["inputs"]
    assert (float(scaled.min()), float(scaled.max())) == (0.0, 1.0)


# --- CIFAR-10
# --------------------------------------------------------------------------------------------------------


def python2_pickle(content):
    """Protocol 2 as Python 2 wrote it: every string, the array's bytes too, as a byte string."""
    out = io.BytesIO()

    def string(value):
        out.write(b"T" + struct.pack("<I", len(value)) + value)

    planes, labels = content
    out.write(b"\x80\x02}(")
    string(b"data")
    out.write(b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85")
    string(b"b")
    out.write(
        b"tR(K\x01"
        + b"".join(b"J" + struct.pack("<i", n) for n in planes.shape)
        + b"\x86cnumpy\ndtype\n("
    )
    string(b"u1")
    out.write(b"K\x00K\x01tR(K\x03")
    string(b"|")
    out.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
    string(planes.tobytes())
    out.write(b"tb")
    string(b"labels")
    out.write(b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"eu.")
    return out.getvalue()


@pytest.mark.parametrize("dump", [{"protocol": n} for n in (0, 1, 2, 3, 4, 5)], ids=str)
def test_cifar_reads_every_protocol(tmp_path, dump):
    written = write_cifar(tmp_path / "cifar-10-batches-py", **dump)
    train, test = (
        CIFAR10(str(tmp_path)),
        CIFAR10(str(tmp_path / "cifar-10-batches-py"), split="test"),
    )
    assert (len(train), len(test)) == (30, 6)
    planes, labels = written["data_batch_2"]
    got = train.read(np.arange(6, 12))
    assert got["labels"].tolist() == labels
    assert np.array_equal(
        got["inputs"][4, 5, 9], planes[4].reshape(3, 32, 32)[:, 5, 9]
    )  # [row, column] -> r, g, b
    assert np.array_equal(
        test.arrays["inputs"].transpose(0, 3, 1, 2).reshape(-1, 3072), written["test_batch"][0]
    )


def test_cifar_reads_python_2_files_and_variants(tmp_path):
    written = write_cifar(tmp_path)
    planes, labels = written["test_batch"]
    variants = {
        "Python 2": python2_pickle((planes, labels)),
        "old module path": pickle.dumps({"data": planes, "labels": labels}, 2).replace(
            b"numpy._core", b"numpy.core"
        ),
        "labels as an array": pickle.dumps({"data": planes, "labels": np.array(labels)}),
        "labels as NumPy numbers": pickle.dumps(
            {"data": planes, "labels": list(np.array(labels, ">i2"))}
        ),
        "Fortran order": pickle.dumps({"data": np.asfortranarray(planes), "labels": labels}, 2),
        "Fortran order, protocol 5": pickle.dumps(
            {"data": np.asfortranarray(planes), "labels": labels}, 5
        ),
    }
    for name, content in variants.items():
        (tmp_path / "test_batch").write_bytes(content)
        test = CIFAR10(str(tmp_path), split="test")
        assert test.arrays["labels"].tolist() == labels, name
        assert np.array_equal(
            test.arrays["inputs"].transpose(0, 3, 1, 2).reshape(-1, 3072), planes
        ), name


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path):
    write_cifar(tmp_path)
    victim = tmp_path / "executed"
    evil = {
        "posix.system": Evil(os.system, f"touch {victim}"),
        "builtins.eval": Evil(eval, f"open({str(victim)!r}, 'w')"),
        "builtins.getattr": Evil(getattr, np.ndarray, "tofile"),
        "subprocess.Popen": Evil(subprocess.Popen, ["touch", str(victim)]),
        "io.open": Evil(io.open, str(victim), "w"),
        "numpy.load": Evil(np.load, str(tmp_path / "data_batch_1")),
    }
    for name, attack in evil.items():
        for protocol in (0, 2, 4, 5):
            content = pickle.dumps(
                {b"labels": [attack], b"data": np.zeros((1, 3072), np.uint8)}, protocol
            )
            (tmp_path / "test_batch").write_bytes(content)
            with pytest.raises(
                UsageError, match=r"cannot read .*test_batch: it asks for .*; only arrays"
            ) as caught:
                CIFAR10(str(tmp_path), split="test")
            assert name.split(".")[-1] in str(caught.value).replace("_io.open", "io.open")
    assert not victim.exists()


NO_BATCH = r"test_batch is not a CIFAR-10 batch: 'data' must be \[n, 3072\] uint8, 'labels' a list of n integers from 0"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "EOFError"),
        (b"<html>not found</html>", "test_batch: "),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]})[:-3000],
            "truncated|Ran out",
        ),
        (pickle.dumps([1, 2]), NO_BATCH),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}), NO_BATCH),
        (pickle.dumps({"data": np.zeros((2, 3000), np.uint8), "labels": [1, 2]}), NO_BATCH),
        (pickle.dumps({"data": np.zeros((2, 3072), np.int16), "labels": [1, 2]}), NO_BATCH),
        (pickle.dumps({"data": "pixels", "labels": [1, 2]}), NO_BATCH),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}), NO_BATCH),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 0.5]}), NO_BATCH),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, [2]]}), NO_BATCH),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 10]}), NO_BATCH),
        (pickle.dumps({"data": np.array([{}, None]), "labels": [1, 2]}), NO_BATCH),
    ],
)
def test_a_damaged_cifar_file_is_named_with_the_cause(tmp_path, content, cause):
    write_cifar(tmp_path)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(UsageError, match=cause) as caught:
        CIFAR10(str(tmp_path), split="test")
    assert "data.args.root: " in str(caught.value) and str(tmp_path / "test_batch") in str(
        caught.value
    )


def test_missing_cifar_files_say_where_to_fetch_them(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"data.args.root: no CIFAR-10 batches in '.*nowhere'.*cifar-10-python.tar.gz from",
    ):
        CIFAR10(str(tmp_path / "nowhere"))
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(UsageError, match="lacks data_batch_3"):
        CIFAR10(str(tmp_path))


# --- MNIST
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize(("zipped", "mark"), [(True, "-"), (False, "-"), (False, ".")])
def test_mnist_reads_idx(tmp_path, where, zipped, mark):
    written = write_mnist(tmp_path / where, zipped=zipped, mark=mark)
    for split, (images, labels) in written.items():
        source = MNIST(str(tmp_path), split=split)
        assert np.array_equal(source.arrays["inputs"][..., 0], images) and np.array_equal(
            source.arrays["labels"], labels
        )


def test_fashion_mnist_has_its_own_folder_and_mean(tmp_path):
    write_mnist(tmp_path / "mnist")
    with pytest.raises(
        UsageError, match=r"no Fashion-MNIST file 'train-images-idx3-ubyte.gz' in .*zalandoresearch"
    ):
        FashionMNIST(str(tmp_path))
    write_mnist(tmp_path / "fashion-mnist")
    batch = FashionMNIST(str(tmp_path)).read(np.arange(2))
    means = [
        float(source(str(tmp_path)).transform(batch, None, False)["inputs"].mean())
        for source in (MNIST, FashionMNIST)
    ]
    raw = batch["inputs"].mean() / 255
    assert means == pytest.approx([(raw - 0.1307) / 0.3081, (raw - 0.2860) / 0.3530], rel=1e-5)


IMAGES, LABELS = np.zeros((7, 28, 28), np.uint8), np.zeros(7, np.uint8)
# Without the time, by which what the processes of a test run collect would differ.
zipped = functools.partial(gzip.compress, mtime=0)


@pytest.mark.parametrize(
    ("stem", "content", "cause"),
    [
        ("images-idx3", zipped(idx(IMAGES))[:-20], "cannot read .*end-of-stream"),
        ("images-idx3", b"<html>", "cannot read .*(gzip|compressed)"),
        ("images-idx3", b"\x1f\x8b" + bytes(30), "cannot read "),
        ("images-idx3", zipped(idx(IMAGES)[:-5]), "has 5,483 bytes of data, its header says 5,488"),
        (
            "images-idx3",
            zipped(idx(IMAGES) + b"more"),
            "has 5,492 bytes of data, its header says 5,488",
        ),
        (
            "images-idx3",
            zipped(b"\x93NUMPY" + bytes(100)),
            "not an IDX file .* starts with 934e554d, not 00000803",
        ),
        ("images-idx3", zipped(b""), "starts with nothing"),
        ("images-idx3", zipped(idx(LABELS)), "starts with 00000801, not 00000803"),
        ("images-idx3", zipped(idx(IMAGES[:, 1:])), r"images of \(27, 28\), not \(28, 28\)"),
        ("labels-idx1", zipped(idx(LABELS[1:])), "has 7 images, .*labels-idx1-ubyte.gz 6 labels"),
        ("labels-idx1", zipped(idx(LABELS + np.uint8(10))), "has label 10"),
    ],
)
def test_a_damaged_idx_file_is_named_with_the_cause(tmp_path, stem, content, cause):
    write_mnist(tmp_path)
    path = tmp_path / f"train-{stem}-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=cause) as caught:
        MNIST(str(tmp_path))
    assert "data.args.root: " in str(caught.value) and str(path) in str(caught.value)


# --- the full sets
# ---------------------------------------------------------------------------------------------------


@real_data
@pytest.mark.parametrize(
    ("source", "sizes", "first"),
    [
        (CIFAR10, (50_000, 10_000), [6, 9, 9, 4, 1]),
        (MNIST, (60_000, 10_000), [5, 0, 4, 1, 9]),
        (FashionMNIST, (60_000, 10_000), [9, 0, 0, 3, 0]),
    ],
)
def test_the_full_set(source, sizes, first):
    train, test = source(REAL, "train"), source(REAL, "test")
    assert (len(train), len(test)) == sizes and train.arrays["labels"][:5].tolist() == first
    counts = np.bincount(train.arrays["labels"])
    assert counts.size == 10 and (counts.min() == counts.max() or source is MNIST)
    sample = train.transform(train.read(np.arange(0, len(train), 5)), None, False)["inputs"]
    assert np.allclose(sample.mean((0, 1, 2)), 0, atol=0.02) and np.allclose(
        sample.std((0, 1, 2)), 1, atol=0.02
    )
