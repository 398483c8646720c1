"""Data of other makes: folders of images, Hugging Face's data sets, grain's sources, sequences of
tensors.
"""

import importlib.util
import itertools
import os
import pickle
import unicodedata

import numpy as np
import pytest

from jaxdp.cli import Call, load
from jaxdp.cli.data import run as data_command
from jaxdp.cli.parse import parse
from jaxdp.data import HuggingFace, ImageFolder, Mixture
from jaxdp.data.contents import contents
from jaxdp.data.dataset import as_dataset, check_dtypes
from jaxdp.data.example_order import order_of
from jaxdp.data.image_folder import decode
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError
from jaxdp.run.datasets import make_data

RNG = np.random.default_rng(0)


# --- folders of images
# -----------------------------------------------------------------------------------------------


@pytest.fixture
def save():
    image = pytest.importorskip(
        "PIL.Image", reason="Pillow is not installed (pip install -e '.[images]')"
    )

    def write(path, pixels, **how):
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.asarray(pixels, np.uint8)).save(path, **how)

    return write


def test_the_folders_of_a_split_are_its_classes(tmp_path, save):
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("ant", "bee")):
            for i in range(count):
                save(
                    tmp_path / split / name / f"{i}.png",
                    np.full((8, 8, 3), 100 * label + 10 * i + (split == "val")),
                )
    (tmp_path / "train" / "bee" / "notes.txt").write_text("no image")
    train, test = (ImageFolder(str(tmp_path), split, size=8) for split in ("train", "test"))
    assert (len(train), len(test), train.class_names, test.classes) == (6, 4, ["ant", "bee"], 2)
    found = train.read(np.array([5, 0, 1]))
    assert found["inputs"].dtype == np.uint8 and found["inputs"][:, 0, 0, 0].tolist() == [
        120,
        0,
        10,
    ]
    assert (
        found["labels"].tolist() == [1, 0, 0]
        and test.read(np.arange(4))["inputs"][2, 3, 3, 1] == 101
    )
    assert len(pickle.loads(pickle.dumps(train))) == 6
    check_dtypes(train, x64=False)
    save(tmp_path / "val" / "cow" / "0.png", np.zeros((8, 8, 3)))
    with pytest.raises(
        UsageError, match=r"data.args.root: '.*val' has class 'cow', which train lacks"
    ):
        ImageFolder(str(tmp_path), "test", size=8)


def test_sets_of_other_classes_are_not_scored_or_mixed(tmp_path, save):
    for root, names in (
        ("all", ("ant", "bee", "cow")),
        ("some", ("ant", "cow")),
        ("other", ("ant", "bee", "dog")),
        ("first", ("ant", "bee")),
    ):
        for split, name in itertools.product(("train", "test"), names):
            save(tmp_path / root / split / name / "0.png", np.zeros((8, 8, 3)))

    def folder(root):
        return {"target": "ImageFolder", "args": {"root": str(tmp_path / root), "size": 8}}

    def mixed(*roots):
        return Mixture({root: folder(root) for root in roots})

    def read(key, root):
        sets = (
            x
            for name, entry in (("data", folder("all")), (key, folder(root)))
            for x in (f"--{name}", str(entry))
        )
        return make_data(load(["--config", "configs/digits.yaml", *sets])[0])

    assert (
        list(read("eval.data", "all")[1]) == list(read("eval.data", "first")[1]) == [""]
    )  # the same labels
    assert mixed("all").class_names == ["ant", "bee", "cow"]
    for key in ("eval.data", "eval.also.few"):
        with pytest.raises(
            UsageError, match=rf"{key}: label 1 is 'cow', but 'bee' in the training data; make them"
        ):
            read(key, "some")
    with pytest.raises(UsageError, match=r"data.args.sets.some: classes 2, unlike 3 of all"):
        mixed("all", "some")
    with pytest.raises(UsageError, match=r"data.args.sets.other: class names .*'dog'"):
        mixed("all", "other")


def test_without_split_folders_a_share_is_held_out(tmp_path, save):
    for name in ("ant", "bee"):
        for i in range(40):
            save(tmp_path / name / f"{i}.png", np.full((4, 4, 3), i))
    before = {
        split: set(ImageFolder(str(tmp_path), split, 4, test_fraction=0.25).files)
        for split in ("train", "test")
    }
    assert len(before["train"] | before["test"]) == 80 and not before["train"] & before["test"]
    assert 10 <= len(before["test"]) <= 30
    save(tmp_path / "cow" / "new.png", np.zeros((4, 4, 3)))
    after = {
        split: set(ImageFolder(str(tmp_path), split, 4, test_fraction=0.25).files)
        for split in ("train", "test")
    }
    assert before["train"] <= after["train"] and before["test"] <= after["test"]


def test_an_image_is_resized_and_cropped_to_its_middle(tmp_path, save):
    wide = np.zeros((10, 30, 3))
    wide[:, 10:20] = 200
    save(tmp_path / "wide.png", wide)
    np.testing.assert_array_equal(decode(tmp_path / "wide.png", 10), np.full((10, 10, 3), 200))
    assert decode(tmp_path / "wide.png", 5).shape == (5, 5, 3) and decode(
        tmp_path / "wide.png", 50
    ).shape == (
        50,
        50,
        3,
    )
    np.testing.assert_array_equal(decode(tmp_path / "wide.png", 5)[:, 1:4], np.full((5, 3, 3), 200))
    gray = RNG.integers(0, 256, (7, 7))
    save(tmp_path / "gray.png", gray)
    np.testing.assert_array_equal(
        decode(tmp_path / "gray.png", 7), np.repeat(gray[..., None], 3, 2)
    )
    top = np.zeros((6, 6, 3))
    top[:3] = 255
    from PIL import Image

    turned = Image.Exif()
    turned[0x0112] = 3  # upside down
    save(tmp_path / "turned.png", top, exif=turned)
    np.testing.assert_array_equal(decode(tmp_path / "turned.png", 6), top[::-1])


@pytest.mark.parametrize(
    ("dtype", "name"), [("uint16", "deep.png"), ("int32", "deep.tiff"), ("float32", "deep.tiff")]
)
def test_an_image_over_8_bits_a_channel_is_refused(tmp_path, dtype, name):
    image = pytest.importorskip(
        "PIL.Image", reason="Pillow is not installed (pip install -e '.[images]')"
    )
    image.fromarray(np.linspace(0, 60_000, 16).reshape(4, 4).astype(dtype)).save(tmp_path / name)
    with pytest.raises(
        UsageError,
        match=rf"cannot read image '.*{name}': .* have more than 8 bits a channel; replace",
    ):
        decode(tmp_path / name, 4)


def test_what_is_no_image_is_named_with_its_path(tmp_path, save):
    save(tmp_path / "cat" / "a.jpg", RNG.integers(0, 256, (64, 64, 3)))
    whole = (tmp_path / "cat" / "a.jpg").read_bytes()
    (tmp_path / "cat" / "b.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cat" / "c.jpg").write_text("hello")
    source = ImageFolder(str(tmp_path), size=8, test_fraction=1e-9)
    assert source.read(np.array([0]))["inputs"].shape == (1, 8, 8, 3)
    for index, name in ((1, "b"), (2, "c")):
        with pytest.raises(
            UsageError,
            match=rf"data: cannot read image '.*cat/{name}.jpg': .*; replace or remove it",
        ):
            source.read(np.array([0, index]))
    for root in ("none", str(tmp_path / "cat")):
        with pytest.raises(
            UsageError,
            match=r"data.args.root: no folder of images in '.*'; images are in .*/CLASS or",
        ):
            ImageFolder(root)
    with pytest.raises(UsageError, match=r"data.args.root: no image for test in its classes in"):
        ImageFolder(str(tmp_path), "test", test_fraction=1e-9)
    with pytest.raises(UsageError, match=r"data.args.size: 0 is too small"):
        ImageFolder(str(tmp_path), size=0)


def images(source):
    return [path.relative_to(source.top).as_posix() for path in source.files]


def test_hidden_and_system_files_are_never_read(tmp_path, save):
    for name in ("ant", "bee"):
        save(tmp_path / "train" / name / "1.JPG", np.zeros((8, 8, 3)))
        save(tmp_path / "train" / name / ".ipynb_checkpoints" / "1.png", np.zeros((8, 8, 3)))
        save(tmp_path / "train" / name / "__MACOSX" / "2.png", np.zeros((8, 8, 3)))
        for hidden in ("._1.jpg", "Thumbs.db", ".DS_Store", "desktop.ini"):
            (tmp_path / "train" / name / hidden).write_bytes(b"no image")
        save(tmp_path / "train" / "__MACOSX" / name / "1.png", np.zeros((8, 8, 3)))
        save(tmp_path / "__MACOSX" / "train" / name / "1.png", np.zeros((8, 8, 3)))
    (tmp_path / "train" / "bee" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "bee" / "README").write_text("no image")
    (tmp_path / "labels.csv").write_text("a,b")
    source = ImageFolder(str(tmp_path), size=8, test_fraction=1e-9)
    assert source.class_names == ["ant", "bee"] and images(source) == [
        "train/ant/1.JPG",
        "train/bee/1.JPG",
    ]
    assert source.inventory == (
        "2 images in 2 classes: ant 1, bee 1; ignored: 14 hidden, 1 .csv, 1 .txt, 1 without an ending"
    )


@pytest.mark.parametrize("ending", [".jfif", ".JPEG", ".avif", ".jpe"])
def test_a_class_of_other_endings_does_not_vanish(tmp_path, save, ending):
    features = pytest.importorskip("PIL.features")
    if ending == ".avif" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    for name in ("ant", "bee", "cow"):
        how = {"format": "AVIF" if ending == ".avif" else "JPEG"} if name == "bee" else {}
        save(
            tmp_path / name / f"0{ending if name == 'bee' else '.png'}",
            np.full((8, 8, 3), 99),
            **how,
        )
    source = ImageFolder(str(tmp_path), size=8, test_fraction=1e-9)
    assert source.class_names == ["ant", "bee", "cow"] and source.labels.tolist() == [0, 1, 2]
    assert abs(int(source.read(np.array([1]))["inputs"][0, 4, 4, 0]) - 99) < 9


def test_a_class_without_an_image_is_refused_by_name(tmp_path, save):
    save(tmp_path / "ant" / "0.png", np.zeros((8, 8, 3)))
    for name, file in (("bee", "0"), ("cow", "0.heic"), ("dog", None)):
        (tmp_path / name).mkdir()
        if file:
            (tmp_path / name / file).write_text("an image of another kind")
    with pytest.raises(
        UsageError,
        match=r"data.args.root: no image in 'bee' \(1 without an ending\), 'cow' \(1 .heic\), 'dog' \(empty\) of the",
    ):
        ImageFolder(str(tmp_path), size=8)
    for i in range(30):
        (tmp_path / f"x{i:02}").mkdir()
    with pytest.raises(UsageError, match=r"'x04' \(empty\) and 25 more of the classes in"):
        ImageFolder(str(tmp_path), size=8)
    for i in range(30):
        save(tmp_path / "train" / f"{i:02}" / "0.png", np.zeros((8, 8, 3)))
    source = ImageFolder(str(tmp_path / "train"), size=8, test_fraction=1e-9)
    assert (
        source.inventory.startswith("30 images in 30 classes: 00 1, 01 1, ")
        and "and 22 more" in source.inventory
    )
    (tmp_path / "train" / "00" / "0.png").rename(tmp_path / "train" / "0.png")
    with pytest.raises(UsageError, match=r"no image in '00' \(empty\)"):
        ImageFolder(str(tmp_path / "train"), size=8)


def test_links_to_folders_are_followed_loops_are_not(tmp_path, save):
    for name, count in (("elsewhere/ant", 2), ("elsewhere/more", 3), ("set/bee", 1)):
        for i in range(count):
            save(tmp_path / name / f"{i}.png", np.zeros((8, 8, 3)))
    links = {
        "set/ant": "../elsewhere/ant",  # a class
        "set/bee/linked": "../../elsewhere/more",
        "set/bee/again": "../../elsewhere/more",
        "set/bee/up": "..",
        "set/bee/self": "self",
        "set/bee/gone.png": "nowhere",
        "elsewhere/more/back": "../../set/bee",
        "set/root": ".",
    }
    for name, target in links.items():
        os.symlink(target, tmp_path / name)
    source = ImageFolder(str(tmp_path / "set"), size=8, test_fraction=1e-9)
    found = [
        "ant/0.png",
        "ant/1.png",
        "bee/0.png",
        "bee/again/0.png",
        "bee/again/1.png",
        "bee/again/2.png",
    ]
    assert images(source) == found and source.class_names == ["ant", "bee"]
    assert "4 link to a folder that is read already, 2 broken link" in source.inventory


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Train", "Test"),
        ("training", "testing"),
        ("TRAIN", "Validation"),
        ("trn", "dev"),
        ("my_train", "my-val"),
        ("trainSet", "TestSet"),
        ("trainset", "testset"),
        ("train2017", "val2017"),
        ("pets.training.images", "pets.eval.images"),
    ],
)
def test_a_split_in_any_spelling_is_no_class(tmp_path, save, train, test):
    for split, value in ((train, 0), (test, 9)):
        for name in ("ant", "bee"):
            save(tmp_path / split / name / "0.png", np.full((8, 8, 3), value))
    (tmp_path / "other").mkdir()
    both = [ImageFolder(str(tmp_path), split, size=8) for split in ("train", "test")]
    for source, value in zip(both, (0, 9)):
        assert source.class_names == ["ant", "bee"] and len(source) == 2
        assert (source.read(np.arange(2))["inputs"] == value).all()
        assert source.inventory.endswith("ignored: 1 folder 'other'")


def test_ambiguous_folders_are_refused_or_chosen(tmp_path, save):
    def tree(root, *names):
        for name in names:
            save(tmp_path / root / name / "0.png", np.zeros((8, 8, 3)))
        return str(tmp_path / root)

    one = {"test_fraction": 1e-9, "size": 8}
    classes = ImageFolder(tree("vehicles", "bus", "train"), **one)  # the images are in it: a class
    assert classes.class_names == ["bus", "train"]
    for root, names, words in (
        (
            "flat",
            ("train", "test"),
            r"'test', 'train' in '.*flat' have images, but no folders of classes; set data.args.s",
        ),
        ("alone", ("Training",), r"'Training' in '.*alone' have images, but no folders of classes"),
        (
            "beside",
            ("train/ant", "bee"),
            r"'train' looks like a split, but not 'bee' beside it; the folders .* are",
        ),
        (
            "two",
            ("train/ant", "training/ant"),
            r"'train', 'training' may each be the train split; the folders in",
        ),
        (
            "both",
            ("train_test/ant", "test/ant"),
            r"'train_test' may be either of two splits; the folders in",
        ),
        ("held", ("val/ant",), r"has only 'val', nothing to train on; set data.args.splits"),
    ):
        with pytest.raises(UsageError, match=f"data.args.root: .*{words}"):
            ImageFolder(tree(root, *names), **one)
    assert ImageFolder(str(tmp_path / "flat"), splits={}, **one).class_names == ["test", "train"]
    assert ImageFolder(str(tmp_path / "held"), "test", size=8).class_names == ["ant"]
    chosen = {"splits": {"train": "train_test", "test": "test"}, "size": 8}
    assert [
        images(ImageFolder(str(tmp_path / "both"), split, **chosen)) for split in ("train", "test")
    ] == [
        ["train_test/ant/0.png"],
        ["test/ant/0.png"],
    ]
    with pytest.raises(
        UsageError, match=r"data.args.splits.test: no 'val' in '.*both', only 'test', 'train_test'"
    ):
        ImageFolder(str(tmp_path / "both"), splits={"test": "val"})
    with pytest.raises(UsageError, match=r"data.args.splits: 'dev' is not one of 'train', 'test'"):
        ImageFolder(str(tmp_path / "both"), splits={"dev": "val"})
    plain = ImageFolder(
        tree("plain", "train/ant", "test/ant", "val/ant", "test_old/ant"), "test", size=8
    )
    assert (
        images(plain) == ["test/ant/0.png"]
        and "1 folder 'test_old', 1 folder 'val'" in plain.inventory
    )


def test_classes_do_not_depend_on_unicode_forms(tmp_path, save):
    """An archive made on a Mac has e and an accent where others have é, which sorts elsewhere."""
    for form in ("NFC", "NFD"):
        for split in ("train", "test"):
            for name in ("ez", "é", "f"):
                for file in ("ez", "é", "f"):
                    kind = "NFC" if split == "test" else form
                    parts = [unicodedata.normalize(kind, part) for part in (name, f"{file}.png")]
                    save(
                        tmp_path / form / split / parts[0] / parts[1],
                        np.full((4, 4, 3), ord(file[0]) % 256),
                    )
    sets = {form: ImageFolder(str(tmp_path / form), size=4) for form in ("NFC", "NFD")}
    for form, source in sets.items():
        assert (
            source.class_names == ["ez", "f", "é"]
            and len(ImageFolder(str(tmp_path / form), "test", size=4)) == 9
        )
        assert source.read(np.arange(9))["inputs"][:, 0, 0, 0].tolist() == [101, 102, 233] * 3
    assert contents(sets["NFC"]) == contents(sets["NFD"])
    shares = [
        [
            unicodedata.normalize("NFC", x)
            for x in images(ImageFolder(str(tmp_path / form / "train"), size=4))
        ]
        for form in sets
    ]
    assert shares[0] == shares[1]
    for kind in ("NFC", "NFD"):
        save(tmp_path / "two" / unicodedata.normalize(kind, "é") / "0.png", np.zeros((4, 4, 3)))
    with pytest.raises(
        UsageError, match=r"has two folders 'é', whose names differ only in their Unicode form"
    ):
        ImageFolder(str(tmp_path / "two"))


def test_a_name_that_is_not_utf8_is_read(tmp_path, save):
    save(tmp_path / os.fsdecode(b"caf\xe9") / os.fsdecode(b"\xe9.png"), np.zeros((4, 4, 3)))
    source = ImageFolder(str(tmp_path), size=4, test_fraction=1e-9)
    assert len(source) == 1 and contents(source)["probes"]


@pytest.fixture
def partly_damaged(tmp_path, save):
    """Twelve images of two classes; 2 of them are not readable, one of which is empty."""
    for i in range(12):
        save(tmp_path / "set" / ("ant", "bee")[i % 2] / f"{i:02}.png", np.full((8, 8, 3), i))
    (tmp_path / "set" / "ant" / "00.png").write_bytes(b"")
    (tmp_path / "set" / "bee" / "05.png").write_text("no image")
    return tmp_path / "set"


def test_an_image_that_is_skipped_moves_no_other(partly_damaged, capsys):
    def make(**args):
        return ImageFolder(str(partly_damaged), size=8, test_fraction=1e-9, **args)

    source = make(on_error="skip")
    everything = source.read(np.arange(12))
    assert (
        everything["mask"].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]
        and everything["mask"].dtype == np.float32
    )
    said = capsys.readouterr().err
    assert (
        said.count("warning: skipped, with mask 0: data: cannot read image") == 2
        and "it has 0 bytes" in said
    )
    source.read(np.arange(12))
    assert capsys.readouterr().err == ""
    order = order_of(source, 4, 4, 0, True)
    whole = [read_batches(source, order, [step], range(4)) for step in range(3)]
    for part in (range(2), range(2, 4)):  # of two processes
        for step in range(3):
            batch = read_batches(source, order, [step], part)
            for name in ("labels", "mask"):
                np.testing.assert_array_equal(
                    batch[name], whole[step][name][part.start : part.stop]
                )
    assert sum(batch["mask"].sum() for batch in whole) == 10
    with pytest.raises(
        UsageError,
        match=r"00.png': it has 0 bytes; replace or remove it, or set data.args.on_error: sk",
    ):
        make().read(np.array([0]))
    with pytest.raises(
        UsageError, match=r"data.args.on_error: 'ignore' is not one of 'raise', 'skip'"
    ):
        make(on_error="ignore")
    assert "mask" not in make().read(np.array([1]))


def check(*argv):
    data_command(Call(options=parse(["check", *map(str, argv)], "data")[0]))


def test_the_check_lists_all_that_cannot_be_read(partly_damaged, tmp_path, save, capsys):
    (tmp_path / "run.yaml").write_text(
        f"model: {{target: CNN}}\ndata: {{target: ImageFolder, args: {{root: {partly_damaged}, size: 8}}}}\n"
        f"eval: {{also: {{mixed: {{target: Mixture, args: {{sets: {{a: {{target: ImageFolder, args: {{root: "
        f"{partly_damaged}, size: 8}}}}, b: Digits}}}}}}}}}}\nsteps: 1\n"
    )
    for argv in ((partly_damaged,), ("--config", tmp_path / "run.yaml"), (tmp_path / "run.yaml",)):
        with pytest.raises(UsageError, match=r"data check: \d problems, listed above"):
            check(*argv)
        said = capsys.readouterr().out
        assert "00.png': it has 0 bytes" in said and "05.png': cannot identify image file" in said
        assert (
            "12 images in 2 classes: ant 6, bee 6" in said or "--config" in argv or argv[0].suffix
        )
    assert "eval.also.mixed.args.sets.b: 360 of 360 examples can be read" in said
    for name in ("ant/00.png", "bee/05.png"):
        (partly_damaged / name).unlink()
    from PIL import Image

    for mode in ("P", "L", "1", "CMYK", "LA"):
        ending = "tif" if mode == "CMYK" else "png"
        Image.new(mode, (9, 9)).save(partly_damaged / "ant" / f"{mode}.{ending}")
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
    frames[0].save(partly_damaged / "ant" / "moving.gif", save_all=True, append_images=frames[1:])
    check(partly_damaged)
    said = capsys.readouterr().out
    assert "16 of 16 images can be read: 10 RGB" in said and "1 CMYK" in said
    assert "animated (its first frame is read)" in said
    (partly_damaged / "cow").mkdir()
    with pytest.raises(UsageError, match="1 problem, listed above"):
        check(partly_damaged)
    for argv, words in (
        ((), "INPUT: missing"),
        (("none",), "INPUT: 'none' does not exist; give a folder of images"),
    ):
        with pytest.raises(UsageError, match=words):
            check(*argv)


# --- Hugging Face
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def datasets():
    return pytest.importorskip(
        "datasets", reason="datasets is not installed (pip install -e '.[datasets]')"
    )


def test_columns_of_a_saved_data_set_by_split(tmp_path, datasets):
    x, y = RNG.normal(size=(9, 3)).astype(np.float32), RNG.integers(0, 4, 9)
    row = datasets.List(datasets.Value("float32"), 3)
    made = datasets.Dataset.from_dict(
        {"x": x, "kind": y, "text": ["words"] * 9},
        features=datasets.Features(
            {"x": row, "kind": datasets.ClassLabel(4), "text": datasets.Value("string")}
        ),
    )
    parts = datasets.DatasetDict(
        {"train": made.select(range(6)), "validation": made.select(range(6, 9))}
    )
    parts.save_to_disk(str(tmp_path / "parts"))
    columns = {"inputs": "x", "labels": "kind"}
    train, test = (
        HuggingFace(str(tmp_path / "parts"), split, columns) for split in ("train", "test")
    )
    assert (len(train), len(test), train.classes, train.input_shape) == (6, 3, 4, (3,))
    for source in (train, pickle.loads(pickle.dumps(train))):
        found = source.read(np.array([4, 0, 4]))
        np.testing.assert_array_equal(found["inputs"], x[[4, 0, 4]], strict=True)
        np.testing.assert_array_equal(found["labels"], y[[4, 0, 4]].astype(np.int32), strict=True)
    assert test.read(np.array([2]))["labels"].tolist() == [y[8]] and train.read(np.zeros(0, int))[
        "inputs"
    ].shape == (
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
    with pytest.raises(
        UsageError,
        match=r"data.args.path: cannot load 'none' \(.*\); give a folder that save_to_disk",
    ):
        HuggingFace("none")


def test_a_folder_without_test_split_is_not_evaluated(tmp_path, datasets):
    made = datasets.Dataset.from_dict({"inputs": [[1, 2], [3, 4]], "labels": [0, 1]})
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "train"))
    datasets.DatasetDict({"train": made, "valid": made}).save_to_disk(str(tmp_path / "both"))
    for name, count in {"one": 0, "train": 0, "both": 1}.items():
        argv = ["--model.target", "MLP", "--steps", "1", "--data.target", "HuggingFace"]
        config, *_ = load([*argv, "--data.args.path", str(tmp_path / name)])
        assert len(make_data(config)[1]) == count, name


def test_splits_of_a_saved_data_set_have_any_spelling(tmp_path, datasets):
    def made(label):
        return datasets.Dataset.from_dict({"inputs": [[1, 2], [3, 4]], "labels": [label, label]})

    def save(name, **sets):
        return datasets.DatasetDict({k: made(v) for k, v in sets.items()}).save_to_disk(
            str(tmp_path / name)
        )

    save("spelled", Training=0, Dev=1)
    save("mnli", train=0, validation_matched=1, validation_mismatched=2)
    for name, split, label in (
        ("spelled", "train", 0),
        ("spelled", "test", 1),
        ("mnli", "train", 0),
    ):
        assert HuggingFace(str(tmp_path / name), split).read(np.arange(2))["labels"].tolist() == [
            label,
            label,
        ]
    assert HuggingFace.has_split({"path": str(tmp_path / "spelled")})
    words = r"data.args.splits: 'validation_matched', 'validation_mismatched' may each be the test split; the splits of"
    for make in (
        lambda path: HuggingFace(path, "test"),
        lambda path: HuggingFace.has_split({"path": path}),
    ):
        with pytest.raises(UsageError, match=words):
            make(str(tmp_path / "mnli"))
    chosen = HuggingFace(str(tmp_path / "mnli"), "test", splits={"test": "validation_mismatched"})
    assert chosen.read(np.arange(1))["labels"].tolist() == [2]
    assert chosen.inventory == "split validation_mismatched; others: train, validation_matched"


def test_a_split_without_labels_or_rows_is_refused(tmp_path, datasets):
    """As the test splits of GLUE, whose labels are not published."""
    columns = {"inputs": [[1, 2]] * 3, "labels": [-1] * 3}
    made = datasets.Dataset.from_dict(columns)
    train = datasets.Dataset.from_dict({**columns, "labels": [-1, 0, -1]})
    sets = {"train": train, "validation": train.select([]), "test": made}
    datasets.DatasetDict(sets).save_to_disk(str(tmp_path / "glue"))
    assert len(HuggingFace(str(tmp_path / "glue"))) == 3
    with pytest.raises(
        UsageError,
        match=r"data: the split 'test' of '.*glue' has no labels: all are -1; use another",
    ):
        HuggingFace(str(tmp_path / "glue"), "test")
    with pytest.raises(
        UsageError,
        match=r"data: the data set is empty; .*; the split 'validation' of '.*glue' has no",
    ):
        HuggingFace(str(tmp_path / "glue"), "test", splits={"test": "validation"})


def test_rows_that_differ_are_named(tmp_path, datasets):
    made = datasets.Dataset.from_dict({"inputs": [[1, 2], [3, 4], [5, 6, 7]]})
    made.save_to_disk(str(tmp_path / "one"))
    source = HuggingFace(str(tmp_path / "one"))
    assert source.read(np.array([1, 0]))["inputs"].tolist() == [[3, 4], [1, 2]] and not hasattr(
        source, "classes"
    )
    for indices in ([0, 2], [2], [2, 2]):
        with pytest.raises(
            UsageError, match=r"2 has 'inputs' of shape \(3,\) int32, example 0 has \(2,\) int32"
        ):
            source.read(np.array(indices))


def test_rows_of_integers_beyond_32_bits_need_x64(tmp_path, datasets):
    datasets.Dataset.from_dict({"inputs": [1, 2**40]}).save_to_disk(str(tmp_path / "one"))
    source = HuggingFace(str(tmp_path / "one"))
    with pytest.raises(
        UsageError, match=r"example 1 has 'inputs' of shape \(\) int64, example 0 has \(\) int32"
    ):
        source.read(np.arange(2))
    check_dtypes(source, x64=True)
    assert (
        source.read(np.array([0]))["inputs"].dtype == np.int64
        and source.read(np.arange(2))["inputs"][1] == 2**40
    )


# --- sequences of other libraries
# ------------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("grain") is None, reason="grain is not installed (pip install grain)"
)
def test_a_source_of_grain_is_a_data_set():
    import grain

    x = RNG.normal(size=(10, 3)).astype(np.float32)
    ranges = grain.MapDataset.range(10).map(lambda i: {"inputs": x[i], "labels": np.int32(i)})
    for source in (
        ranges,
        grain.MapDataset.source([{"inputs": v, "labels": np.int32(i)} for i, v in enumerate(x)]),
    ):
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
