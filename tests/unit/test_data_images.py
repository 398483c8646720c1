"""Data of other makes: folders of images, Hugging Face's data sets, grain's sources, sequences of tensors."""

import importlib.util
import itertools
import pickle

import numpy as np
import pytest

from jaxdp.assemble.data import make_data
from jaxdp.cli import load
from jaxdp.data import HuggingFace, ImageFolder, Mixture
from jaxdp.data.base import as_dataset, check_dtypes
from jaxdp.data.image_folder import decode
from jaxdp.errors import UsageError

RNG = np.random.default_rng(0)


# --- folders of images -----------------------------------------------------------------------------------------------


@pytest.fixture
def save():
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install 'jaxdp-trainer[images]')")

    def write(path, pixels, **how):
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.asarray(pixels, np.uint8)).save(path, **how)

    return write


def test_the_folders_of_a_split_are_its_classes(tmp_path, save):
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("ant", "bee")):
            for i in range(count):
                save(tmp_path / split / name / f"{i}.png", np.full((8, 8, 3), 100 * label + 10 * i + (split == "val")))
    (tmp_path / "train" / "bee" / "notes.txt").write_text("no image")
    train, test = (ImageFolder(str(tmp_path), split, size=8) for split in ("train", "test"))
    assert (len(train), len(test), train.class_names, test.classes) == (6, 4, ["ant", "bee"], 2)
    found = train.read(np.array([5, 0, 1]))
    assert found["inputs"].dtype == np.uint8 and found["inputs"][:, 0, 0, 0].tolist() == [120, 0, 10]
    assert found["labels"].tolist() == [1, 0, 0] and test.read(np.arange(4))["inputs"][2, 3, 3, 1] == 101
    assert len(pickle.loads(pickle.dumps(train))) == 6
    check_dtypes(train, x64=False)
    save(tmp_path / "val" / "cow" / "0.png", np.zeros((8, 8, 3)))
    with pytest.raises(UsageError, match=r"data.args.root: '.*val' has class 'cow', which train lacks"):
        ImageFolder(str(tmp_path), "test", size=8)


def test_sets_with_other_classes_are_not_scored_or_mixed(tmp_path, save):
    for root, names in (
        ("all", ("ant", "bee", "cow")),
        ("some", ("ant", "cow")),
        ("other", ("ant", "bee", "dog")),
        ("first", ("ant", "bee")),
    ):
        for split, name in itertools.product(("train", "test"), names):
            save(tmp_path / root / split / name / "0.png", np.zeros((8, 8, 3)))

    folder = lambda root: {"target": "ImageFolder", "args": {"root": str(tmp_path / root), "size": 8}}
    mixed = lambda *roots: Mixture({root: folder(root) for root in roots})

    def read(key, root):
        sets = (x for name, entry in (("data", folder("all")), (key, folder(root))) for x in (f"--{name}", str(entry)))
        return make_data(load(["--config", "configs/digits.yaml", *sets])[0])

    assert list(read("eval.data", "all")[1]) == list(read("eval.data", "first")[1]) == [""]  # the same labels
    assert mixed("all").class_names == ["ant", "bee", "cow"]
    for key in ("eval.data", "eval.also.few"):
        with pytest.raises(UsageError, match=rf"{key}: label 1 is 'cow', but 'bee' in the training data; make them"):
            read(key, "some")
    with pytest.raises(UsageError, match=r"data.args.sets.some: classes 2, unlike 3 of all"):
        mixed("all", "some")
    with pytest.raises(UsageError, match=r"data.args.sets.other: class names .*'dog'"):
        mixed("all", "other")


def test_without_folders_for_splits_a_share_is_held_out_by_name(tmp_path, save):
    for name in ("ant", "bee"):
        for i in range(40):
            save(tmp_path / name / f"{i}.png", np.full((4, 4, 3), i))
    before = {split: set(ImageFolder(str(tmp_path), split, 4, test_fraction=0.25).files) for split in ("train", "test")}
    assert len(before["train"] | before["test"]) == 80 and not before["train"] & before["test"]
    assert 10 <= len(before["test"]) <= 30
    save(tmp_path / "cow" / "new.png", np.zeros((4, 4, 3)))
    after = {split: set(ImageFolder(str(tmp_path), split, 4, test_fraction=0.25).files) for split in ("train", "test")}
    assert before["train"] <= after["train"] and before["test"] <= after["test"]


def test_an_image_is_resized_by_its_shorter_side_and_cut_to_the_middle(tmp_path, save):
    wide = np.zeros((10, 30, 3))
    wide[:, 10:20] = 200
    save(tmp_path / "wide.png", wide)
    np.testing.assert_array_equal(decode(tmp_path / "wide.png", 10), np.full((10, 10, 3), 200))
    assert decode(tmp_path / "wide.png", 5).shape == (5, 5, 3) and decode(tmp_path / "wide.png", 50).shape == (
        50,
        50,
        3,
    )
    np.testing.assert_array_equal(decode(tmp_path / "wide.png", 5)[:, 1:4], np.full((5, 3, 3), 200))
    gray = RNG.integers(0, 256, (7, 7))
    save(tmp_path / "gray.png", gray)
    np.testing.assert_array_equal(decode(tmp_path / "gray.png", 7), np.repeat(gray[..., None], 3, 2))
    top = np.zeros((6, 6, 3))
    top[:3] = 255
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    save(tmp_path / "turned.png", top, exif=turned)
    np.testing.assert_array_equal(decode(tmp_path / "turned.png", 6), top[::-1])


@pytest.mark.parametrize(("dtype", "name"), [("uint16", "deep.png"), ("int32", "deep.tiff"), ("float32", "deep.tiff")])
def test_an_image_of_more_than_8_bits_a_channel_is_refused(tmp_path, dtype, name):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed (pip install 'jaxdp-trainer[images]')")
    image.fromarray(np.linspace(0, 60_000, 16).reshape(4, 4).astype(dtype)).save(tmp_path / name)
    with pytest.raises(UsageError, match=rf"cannot read image '.*{name}': .* have more than 8 bits a channel; replace"):
        decode(tmp_path / name, 4)


def test_what_is_no_image_is_named_with_its_path(tmp_path, save):
    save(tmp_path / "cat" / "a.jpg", RNG.integers(0, 256, (64, 64, 3)))
    whole = (tmp_path / "cat" / "a.jpg").read_bytes()
    (tmp_path / "cat" / "b.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat" / "c.jpg").write_text("hello")
    source = ImageFolder(str(tmp_path), size=8, test_fraction=1e-9)
    assert source.read(np.array([0]))["inputs"].shape == (1, 8, 8, 3)
    for index, name in ((1, "b"), (2, "c")):
        with pytest.raises(UsageError, match=rf"data: cannot read image '.*cat/{name}.jpg': .*; replace or remove it"):
            source.read(np.array([0, index]))
    for root in ("none", str(tmp_path / "cat")):
        with pytest.raises(UsageError, match=r"data.args.root: no folder of images in '.*'; images are in .*/CLASS or"):
            ImageFolder(root)
    with pytest.raises(UsageError, match=r"data.args.root: no image for test in its classes in"):
        ImageFolder(str(tmp_path), "test", test_fraction=1e-9)
    with pytest.raises(UsageError, match=r"data.args.size: 0 is too small"):
        ImageFolder(str(tmp_path), size=0)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="datasets is not installed (pip install 'jaxdp-trainer[datasets]')")


def test_columns_of_a_saved_data_set_by_split(tmp_path, datasets):
    x, y = RNG.normal(size=(9, 3)).astype(np.float32), RNG.integers(0, 4, 9)
    row = datasets.List(datasets.Value("float32"), 3)
    made = datasets.Dataset.from_dict(
        {"x": x, "kind": y, "text": ["words"] * 9},
        features=datasets.Features({"x": row, "kind": datasets.ClassLabel(4), "text": datasets.Value("string")}),
    )
    parts = datasets.DatasetDict({"train": made.select(range(6)), "validation": made.select(range(6, 9))})
    parts.save_to_disk(str(tmp_path / "parts"))
    columns = {"inputs": "x", "labels": "kind"}
    train, test = (HuggingFace(str(tmp_path / "parts"), split, columns) for split in ("train", "test"))
    assert (len(train), len(test), train.classes, train.input_shape) == (6, 3, 4, (3,))
    for source in (train, pickle.loads(pickle.dumps(train))):
        found = source.read(np.array([4, 0, 4]))
        np.testing.assert_array_equal(found["inputs"], x[[4, 0, 4]], strict=True)
        np.testing.assert_array_equal(found["labels"], y[[4, 0, 4]].astype(np.int32), strict=True)
    assert test.read(np.array([2]))["labels"].tolist() == [y[8]] and train.read(np.zeros(0, int))["inputs"].shape == (
        0,
        3,
    )
    check_dtypes(train, x64=False)
    for given, words in (
        (None, r"data.args.columns.inputs: no column 'inputs'; it is one of x, kind, text"),
        ({"labels": "y"}, r"data.args.columns.labels: no column 'y'; it is one of x, kind, text"),
        ({"inputs": "text"}, r"data.args.columns: 'text' has .*, not numbers; encode it"),
    ):
        with pytest.raises(UsageError, match=words):
            HuggingFace(str(tmp_path / "parts"), columns=given)
    with pytest.raises(UsageError, match=r"data.args.path: cannot load 'none' \(.*\); give a folder that save_to_disk"):
        HuggingFace("none")


def test_a_folder_without_a_test_split_is_not_evaluated_on(tmp_path, datasets):
    made = datasets.Dataset.from_dict({"inputs": [[1, 2], [3, 4]], "labels": [0, 1]})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "train"))
    datasets.DatasetDict({"train": made, "valid": made}).save_to_disk(str(tmp_path / "both"))
    for name, count in {"one": 0, "train": 0, "both": 1}.items():
        argv = ["--model.target", "MLP", "--steps", "1", "--data.target", "HuggingFace"]
        config, *_ = load([*argv, "--data.args.path", str(tmp_path / name)])
        assert len(make_data(config)[1]) == count, name


def test_rows_that_differ_are_named(tmp_path, datasets):
    made = datasets.Dataset.from_dict({"inputs": [[1, 2], [3, 4], [5, 6, 7]]})
    made.save_to_disk(str(tmp_path / "one"))
    source = HuggingFace(str(tmp_path / "one"))
    assert source.read(np.array([1, 0]))["inputs"].tolist() == [[3, 4], [1, 2]] and not hasattr(source, "classes")
    for indices in ([0, 2], [2], [2, 2]):
        with pytest.raises(UsageError, match=r"2 has 'inputs' of shape \(3,\) int32, example 0 has \(2,\) int32"):
            source.read(np.array(indices))


def test_rows_with_integers_too_wide_for_32_bits_need_x64(tmp_path, datasets):
    datasets.Dataset.from_dict({"inputs": [1, 2**40]}).save_to_disk(str(tmp_path / "one"))
    source = HuggingFace(str(tmp_path / "one"))
    with pytest.raises(UsageError, match=r"example 1 has 'inputs' of shape \(\) int64, example 0 has \(\) int32"):
        source.read(np.arange(2))
    check_dtypes(source, x64=True)
    assert source.read(np.array([0]))["inputs"].dtype == np.int64 and source.read(np.arange(2))["inputs"][1] == 2**40


# --- sequences of other libraries ------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("grain") is None, reason="grain is not installed (pip install grain)")
def test_a_source_of_grain_is_a_data_set():
    import grain

    x = RNG.normal(size=(10, 3)).astype(np.float32)
    ranges = grain.MapDataset.range(10).map(lambda i: {"inputs": x[i], "labels": np.int32(i)})
    for source in (ranges, grain.MapDataset.source([{"inputs": v, "labels": np.int32(i)} for i, v in enumerate(x)])):
        found = as_dataset(source).read(np.array([7, 2]))
        np.testing.assert_array_equal(found["inputs"], x[[7, 2]], strict=True)
        assert found["labels"].tolist() == [7, 2]
    numbers = grain.sources.RangeDataSource(5, 15, 1)
    assert as_dataset(numbers).read(np.array([0, 9]))["inputs"].tolist() == [5, 14]


class Tensor:
    """As tensors of other libraries: an array only by `__array__`."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.array(self.value, dtype)


class MapStyle:
    """As a torch Dataset: `__len__` and `__getitem__`, which gives a tuple of tensors."""

    def __init__(self, count):
        self.x = RNG.normal(size=(count, 4)).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return Tensor(self.x[index]), Tensor(np.int32(index % 3))


def test_a_map_style_set_of_tensors_is_a_data_set():
    source = MapStyle(6)
    dataset = as_dataset(source)
    found = dataset.read(np.array([5, 1]))
    np.testing.assert_array_equal(found["inputs"], source.x[[5, 1]], strict=True)
    assert found["labels"].dtype == np.int32 and found["labels"].tolist() == [2, 1]
    check_dtypes(dataset, x64=False)
