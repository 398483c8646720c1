"""Tables of images: columns, classes and splits by name, and what is missing or not listed."""

import pickle
import unicodedata

import numpy as np
import pytest

from jaxdp.data import ImageTable
from jaxdp.data.contents import contents
from jaxdp.data.example_order import order_of
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError
from packing import grays, png, write_files

pandas = pytest.importorskip("pandas", reason="pip install -e '.[tables]'")
ONE = {"size": 8, "test_fraction": 1e-9}
IMAGES = {f"images/{i}.png": png(i) for i in range(8)}
HEAD = "path,label,split\n"
LINES = [
    f"images/{i}.png,{'cat' if i % 2 else 'chät'},{'train' if i < 6 else 'val'}\n" for i in range(8)
]


@pytest.fixture
def table(tmp_path):
    """A function that writes a table beside eight images, and returns its path."""
    write_files(tmp_path, IMAGES)

    def write(text, name="labels.csv"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("kind", ["csv", "parquet", "DataFrame"])
def test_columns_classes_and_splits_go_by_name(tmp_path, table, kind):
    path, args = table(HEAD + "".join(LINES)), {"columns": {"split": "split"}, "size": 8}
    source = path
    if kind != "csv":
        source = pandas.read_csv(path)
    if kind == "parquet":
        source.to_parquet(tmp_path / "labels.parquet")
        source = str(tmp_path / "labels.parquet")
    if kind == "DataFrame":
        args["folder"] = str(tmp_path)
    train, test = (ImageTable(source, split=split, **args) for split in ("train", "test"))
    assert train.class_names == ["cat", "chät"] and train.classes == 2
    assert grays(train) == [
        (1, "cat"),
        (3, "cat"),
        (5, "cat"),
        (0, "chät"),
        (2, "chät"),
        (4, "chät"),
    ]
    assert grays(test) == [(7, "cat"), (6, "chät")]
    assert test.inventory == "2 images in 2 classes: cat 1, chät 1"


def test_a_second_table_is_the_test_split(table):
    parts = {
        "train": table(HEAD + "".join(LINES[:5])),
        "test": table(HEAD + "".join(LINES[5:7]), "t.csv"),
    }
    assert len(ImageTable(parts, size=8)) == 5 and len(ImageTable(parts, split="test", size=8)) == 2
    assert ImageTable(parts, size=8).inventory.endswith("ignored: 1 image that no table has")


def test_splits_of_other_names_are_set(table):
    path = table("id;n,kind,fold\n" + "".join(f"{i},{10 + i // 4},{i % 3}\n" for i in range(8)))
    args = {
        "columns": {"path": "id;n", "label": "kind", "split": "fold"},
        "size": 8,
        "ending": ".png",
    }
    args["folder"] = path.replace("labels.csv", "images")
    chosen = {"splits": {"train": "0", "test": "1"}}
    train = ImageTable(path, **args, **chosen)
    assert grays(train) == [(0, "10"), (3, "10"), (6, "11")]
    assert train.inventory.endswith("ignored: 2 image of '2'")
    assert grays(ImageTable(path, split="test", **args, **chosen)) == [
        (1, "10"),
        (4, "11"),
        (7, "11"),
    ]
    for splits in (None, {"train": "5"}):
        said = r"no image for train, but .* image of '0'.*set data.args.s"
        if splits:
            said = "data.args.splits.train: no '5' in '.*', only '0', '1', '2'"
        with pytest.raises(UsageError, match=said):
            ImageTable(path, splits=splits, **args)
    with pytest.raises(
        UsageError, match=r"data.args.splits: 'trian' is not one of 'train', 'test'"
    ):
        ImageTable(path, splits={"trian": "0"}, **args)


def test_classes_sort_as_numbers_if_all_are_numbers(table):
    def names(labels):
        rows = "".join(f"images/{i}.png,{label}\n" for i, label in enumerate(labels))
        return ImageTable(table(f"path,label\n{rows}"), **ONE).class_names

    assert names(["10", "9", "9", "100"]) == ["9", "10", "100"]
    assert names(["007", "None", "NA", "10"]) == ["007", "10", "NA", "None"]
    assert names(["1.5", "x", "true"]) == ["1.5", "true", "x"]


def test_missing_images_are_counted_refused_or_skipped(table):
    path = table(HEAD + "".join(LINES[:6]) + "images/a.png,cat,train\nb.png,cat,train\n")
    with pytest.raises(
        UsageError, match=r"data.args.table: 2 of 8 images are missing: '.*b.png', '.*im"
    ):
        ImageTable(path, **ONE)
    source = ImageTable(path, on_error="skip", **ONE)
    assert len(source) == 6
    assert source.inventory.endswith("; ignored: 2 image that no table has, 2 missing image")


def test_a_class_without_any_image_left_is_no_class(table):
    path = table(HEAD + "".join(LINES[:6]) + "images/a.png,dog,train\n")
    assert ImageTable(path, on_error="skip", **ONE).class_names == ["cat", "chät"]
    with pytest.raises(UsageError, match="1 of 7 images are missing"):
        ImageTable(path, **ONE)


def test_the_unicode_form_of_names_does_not_matter(tmp_path):
    write_files(tmp_path, {f"{unicodedata.normalize('NFD', 'é')}{i}.png": png(i) for i in range(3)})
    rows = "".join(f"{unicodedata.normalize('NFC', 'é')}{i}.png,é\n" for i in range(2))
    rows += f"./é2.png,{unicodedata.normalize('NFD', 'é')}\n"
    (tmp_path / "l.csv").write_text(f"path,label\n{rows}", encoding="utf-8")
    source = ImageTable(str(tmp_path / "l.csv"), **ONE)
    assert grays(source) == [(0, "é"), (1, "é"), (2, "é")]
    assert source.inventory == "3 images in 1 class: é 3"


@pytest.mark.parametrize(
    "text, said",
    [
        ("file,label\n", "data.args.table: '.*' has no rows"),
        ("file,label\nx,y\n", "data.args.columns: the table has no column 'path', only file, label"),
        ("path,label\nimages/0.png,\n", "data.args.table: '.*images/0.png' has no label; give it one"),
        ("path,label\nimages/0.png,a\n./images/0.png,b\n", "'.*0.png' has two rows; remove one"),
        ("path,label\n\"x", "data.args.table: '.*' cannot be read"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(table, text, said):
    with pytest.raises(UsageError, match=said):
        ImageTable(table(text), **ONE)


def test_two_columns_of_a_name_are_refused(table):
    frame = pandas.read_csv(table("path,label\nimages/0.png,cat\nimages/1.png,dog\n"))
    twice = pandas.concat([frame, frame[["label"]]], axis=1)
    with pytest.raises(
        UsageError, match=r"data.args.table: two columns are called 'label'; rename"
    ):
        ImageTable(twice, **ONE)


def test_other_arguments_are_refused(table):
    path = table(HEAD + "".join(LINES))
    for args, said in (
        ({"folder": "none"}, "data.args.folder: no folder 'none'"),
        ({"columns": {"labl": "label"}}, "data.args.columns: 'labl' is not one of 'path', 'label'"),
    ):
        with pytest.raises(UsageError, match=said):
            ImageTable(path, **args, **ONE)


def test_damaged_images_and_processes_change_no_order(tmp_path, table):
    path = table(HEAD + "".join(LINES))
    (tmp_path / "images" / "3.png").write_bytes(b"no image")
    source = ImageTable(path, on_error="skip", **ONE)
    assert source.read(np.arange(8))["mask"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    order = order_of(source, 8, 4, 0, True)
    whole = read_batches(source, order, [1], range(4))
    for part in (range(1), range(1, 4)):
        batch = read_batches(pickle.loads(pickle.dumps(source)), order, [1], part)
        real = batch["mask"] == 1  # what stands for a damaged image is never counted
        for name, x in batch.items():
            np.testing.assert_array_equal(x[real], whole[name][part.start : part.stop][real])


def test_other_labels_are_seen_on_resume(tmp_path, table):
    write_files(tmp_path, {f"images/x{i}.png": png(0) for i in range(90)})
    rows = "".join(f"images/x{i}.png,{i % 2}\n" for i in range(90))
    first = contents(ImageTable(table(f"path,label\n{rows}"), **ONE))
    second = contents(
        ImageTable(table(f"path,label\n{rows.replace('x3.png,1', 'x3.png,0')}"), **ONE)
    )
    assert first["all"] != second["all"] and not first["partly"]
