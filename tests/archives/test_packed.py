"""Zip files of images: what an `ImageFolder` reads in their folder, and nothing that harms."""

import os
import shutil
import subprocess
import tracemalloc
import warnings
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cli_runs import jaxdp
from jaxdp.cli import Call
from jaxdp.cli.data import run as data_command
from jaxdp.cli.parse import parse
from jaxdp.data import ImageFolder, ImageZip
from jaxdp.data.contents import contents
from jaxdp.data.image_files import kind_of_name
from jaxdp.errors import UsageError
from launch import ROOT
from odd_names import FOLDERS
from packing import check_readers, grays, png, write_files, write_zip

ONE = {"size": 8, "test_fraction": 1e-9}
TWO = {f"{name}/{i}.png": png(10 * i + len(name)) for name in ("ant", "bée") for i in range(20)}


def within(folder, members):
    return {f"{folder}/{name}": content for name, content in members.items()}


@pytest.mark.parametrize(
    "members",
    [
        TWO,
        within("train", TWO) | within("test", {"ant/x.png": png(3)}),
        within("Training", TWO) | within("my-val", {"bée/x.png": png(3)}),
        within("ant", TWO) | within("bée/deep", TWO),
        within("train", TWO),
    ],
)
@pytest.mark.parametrize("top", ["", "pets"])
def test_a_zip_is_read_as_the_folder_it_was_made_of(tmp_path, members, top):
    members = members | {"README": b"", "notes.txt": b"x"}
    write_files(tmp_path / "pets", members)
    root = tmp_path if top else tmp_path / "pets"
    path = shutil.make_archive(str(tmp_path / "all"), "zip", root, top or None)
    for split in ("train", "test"):
        one = ImageFolder(str(tmp_path / "pets"), split, size=8)
        two = ImageZip(path, split, size=8)
        assert grays(one) == grays(two) and one.class_names == two.class_names and len(one)
        assert one.inventory.split(";")[0] == two.inventory.split(";")[0]
        assert "1 .txt" in two.inventory and "1 without an ending" in two.inventory


@pytest.mark.slow
def test_four_devices_and_workers_have_the_bits_of_one(tmp_path):
    write_files(tmp_path / "pets", TWO)
    shutil.make_archive(str(tmp_path / "pets"), "zip", tmp_path, "pets")
    digests = []
    for target, root, devices in (("ImageFolder", "pets", 1), ("ImageZip", "pets.zip", 4)):
        argv = ["--model.target", "MLP", "--model.args", "{hidden: [8]}", "--data.target", target]
        argv += ["--data.args", f"{{root: {tmp_path / root}, size: 8, augment: true}}"]
        argv += ["--data.workers", devices // 4, "--parallel.reduction", "exact", "--steps", 7]
        argv += [
            "--epochs",
            "null",
            "--batch_size",
            12,
            "--microbatches",
            4,
            "--eval.every",
            "null",
        ]
        config = ["--config", ROOT / "configs" / "digits.yaml", "--run_dir", tmp_path / target]
        done = jaxdp(*config, *argv, devices=devices)
        digests += [line for line in done.stdout.split() if len(line) == 16 and line.isalnum()]
    assert len(digests) == 2 and digests[0] == digests[1], digests


def test_the_order_does_not_depend_on_who_reads(tmp_path):
    source = ImageZip(write_zip(tmp_path / "x.zip", TWO), **ONE)
    check_readers(source)


def test_hidden_or_escaping_names_are_counted_not_read(tmp_path):
    more = {
        "__MACOSX/ant/._0.png": b"",
        "ant/.hidden.png": png(0),
        "../../bée/1.png": png(0),
        "ant/Thumbs.db": b"",
        "cover.jpg": png(0),
    }
    source = ImageZip(write_zip(tmp_path / "x.zip", {**TWO, **more}), **ONE)
    assert len(source) == 40 and source.inventory.endswith(
        "; ignored: 4 hidden, 1 image outside of the classes"
    )
    absolute = ImageZip(write_zip(tmp_path / "y.zip", within("/root", TWO)), **ONE)
    assert grays(absolute) == grays(source) and os.listdir(tmp_path) == ["x.zip", "y.zip"]


@pytest.mark.parametrize("name", ["ant/0.png", "ant//0.png", "./ant/0.png", "ant\\0.png"])
def test_two_images_of_a_name_are_refused(tmp_path, name):
    """A folder has one of them."""
    path = write_zip(tmp_path / "x.zip", TWO)
    with zipfile.ZipFile(path, "a") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file.writestr(name, png(7))
        file.writestr("ant/", b"")
        file.writestr("ant/", b"")
    with pytest.raises(
        UsageError, match=r"data.args.root: 2 images are called '.*ant/0.png'; keep"
    ):
        ImageZip(path, **ONE)


@pytest.mark.parametrize(
    "splits, said",
    [
        ({"trian": "a"}, "data.args.splits: 'trian' is not one of 'train', 'test'"),
        ({"train": "c"}, "data.args.splits.train: no 'c' in '.*x.zip', only 'a', 'b'"),
        ({"train": "a", "test": "c"}, "data.args.splits.test: no 'c' in '.*x.zip', only 'a', 'b'"),
    ],
)
def test_keys_and_names_of_splits_are_checked(tmp_path, splits, said):
    path = write_zip(tmp_path / "x.zip", within("a", TWO) | within("b", TWO))
    with pytest.raises(UsageError, match=said):
        ImageZip(path, splits=splits, **ONE)
    assert len(ImageZip(path, splits={"train": "a", "test": "b"}, **ONE)) == 40


def test_a_class_without_an_image_is_refused_by_name(tmp_path):
    for number, more in enumerate(({"cow/": b""}, {"cow/a.heic": b"x"})):
        path = write_zip(tmp_path / f"{number}.zip", TWO | more)
        with pytest.raises(UsageError, match=r"no image in 'cow' of the classes in '.*zip'; add"):
            ImageZip(path, **ONE)
    path = write_zip(tmp_path / "z.zip", {"a.txt": b"", "b/c.txt": b""})
    with pytest.raises(
        UsageError, match=r"data.args.root: .* 'b'|has no image for train, but 2 .txt"
    ):
        ImageZip(path, **ONE)
    with pytest.raises(UsageError, match=r"has no image for train, but nothing; set data.args.spl"):
        ImageZip(write_zip(tmp_path / "e.zip", {}), **ONE)
    members = within("train", TWO) | {"test/cow/0.png": png(1)}
    with pytest.raises(UsageError, match=r"'test' has class 'cow', which train lacks"):
        ImageZip(write_zip(tmp_path / "t.zip", members), "test", size=8)


def test_splits_are_named(tmp_path):
    path = write_zip(tmp_path / "x.zip", within("a", TWO) | within("b", TWO) | within("c", TWO))
    source = ImageZip(path, "test", splits={"train": "a", "test": "b"}, size=8)
    assert source.class_names == ["ant", "bée"] and len(source) == 40
    assert source.inventory.endswith("ignored: 40 image of 'c'")
    assert ImageZip(path, **ONE).class_names == ["a", "b", "c"]
    path = write_zip(tmp_path / "y.zip", {"train/0.png": png(0), "bus/0.png": png(1)})
    assert ImageZip(path, splits={}, **ONE).class_names == ["bus", "train"]
    with pytest.raises(UsageError, match=r"has no image for train, but 2 image outside of the"):
        ImageZip(path, **ONE)
    with pytest.raises(UsageError, match=r"has no image for train, but .*; set data.args.splits"):
        ImageZip(path, splits={"train": "none"}, **ONE)


def test_names_in_unicode_with_and_without_their_flag(tmp_path):
    """Archivers of macOS and Linux write UTF-8 without saying so, those of Windows code page 437."""
    source = ImageZip(write_zip(tmp_path / "x.zip", TWO), **ONE)
    content = (tmp_path / "x.zip").read_bytes()
    for form in ("e\u0301", "é"):  # of the same sound in two forms
        named = {name.replace("é", form): image for name, image in TWO.items()}
        write_zip(tmp_path / "y.zip", named)
        content = (tmp_path / "y.zip").read_bytes()
        for head, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            parts = content.split(head)
            content = head.join(
                [parts[0], *(x[: at - 4] + b"\0\0" + x[at - 2 :] for x in parts[1:])]
            )
        (tmp_path / "y.zip").write_bytes(content)
        assert zipfile.ZipFile(tmp_path / "y.zip").namelist() != [*named]
        assert grays(ImageZip(str(tmp_path / "y.zip"), **ONE)) == grays(source)
    old = zipfile.ZipInfo("b\u00e9e\\0.png")
    old.flag_bits = 0
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        file.writestr("ant\\0.png", png(1))
        file.writestr("bee\\0.png", png(2))
    assert ImageZip(str(tmp_path / "z.zip"), **ONE).class_names == ["ant", "bee"]


def test_the_zip_of_the_system_is_read(tmp_path):
    if shutil.which("zip") is None:
        pytest.skip("no zip command")
    write_files(tmp_path / "pets", TWO)
    subprocess.run(["zip", "-qr", "pets.zip", "pets"], cwd=tmp_path, check=True)
    subprocess.run(["zip", "-qre", "-P", "x", "secret.zip", "pets"], cwd=tmp_path, check=True)
    source = ImageZip(str(tmp_path / "pets.zip"), **ONE)
    assert grays(source) == grays(ImageFolder(str(tmp_path / "pets"), **ONE))
    secret = ImageZip(str(tmp_path / "secret.zip"), **ONE)
    with pytest.raises(
        UsageError, match=r"cannot read image '.*ant/0.png': .*encrypted, password r"
    ):
        secret.read(np.array([0]))


def test_a_damaged_member_is_refused_or_listed(tmp_path, capsys):
    path = tmp_path / "x.zip"
    write_zip(path, {**TWO, "ant/0.png": b"no image", "bée/3.png": b""})
    content = path.read_bytes()
    at = content.index(TWO["ant/1.png"])
    path.write_bytes(content[:at] + b"\0" * 20 + content[at + 20 :])
    source = ImageZip(str(path), on_error="skip", **ONE)
    mask = source.read(np.arange(40))["mask"]
    assert np.flatnonzero(mask == 0).tolist() == [0, 1, 33]
    said = capsys.readouterr().err
    assert "x.zip/ant/0.png': cannot identify image file;" in said and "Bad CRC-32" in said
    with pytest.raises(
        UsageError, match=r"x.zip/ant/1.png': Bad CRC-32 .*data.args.on_error: skip"
    ):
        ImageZip(str(path), **ONE).read(np.array([1]))
    (tmp_path / "run.yaml").write_text(
        f"model: {{target: CNN}}\ndata: {{target: ImageZip, args: {{root: {path}, size: 8}}}}\nsteps: 1\n"
    )
    with pytest.raises(UsageError, match="data check: 3 problems, listed above"):
        data_command(Call(options=parse(["check", str(tmp_path / "run.yaml")], "data")[0]))


def test_a_bomb_takes_bounded_memory(tmp_path):
    """One that says what it unpacks to, one that says less, and one of a method without a bound."""
    image = png(1) + bytes(1 << 28)
    path = write_zip(
        tmp_path / "x.zip", {**TWO, "ant/z.png": image}, compression=zipfile.ZIP_DEFLATED
    )
    del image
    small = {**TWO, "ant/z.png": png(1)}
    write_zip(tmp_path / "y.zip", small, compression=zipfile.ZIP_LZMA)
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = packed.compress(bytes(1 << 28)) + packed.flush()
    name = "ant/z.png"
    write_zip(tmp_path / "z.zip", {**TWO, name: bomb})
    content = (tmp_path / "z.zip").read_bytes()
    for head, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        start = content.rindex(head, 0, content.rindex(name.encode()) if at == 10 else len(content))
        start = start if at == 10 else content.rindex(head)
        size = 22 if at == 8 else 24
        content = content[: start + at] + b"\x08\0" + content[start + at + 2 :]
        content = content[: start + size] + (99).to_bytes(4, "little") + content[start + size + 4 :]
    (tmp_path / "z.zip").write_bytes(content)
    for file, said in (
        (path, r"it has 268,435,\d+ bytes; an image has at most 268,435,456"),
        (str(tmp_path / "y.zip"), "it is neither stored nor deflated"),
        (str(tmp_path / "z.zip"), "Bad CRC-32|cannot identify image"),
    ):
        source = ImageZip(file, **ONE)
        index = [str(member).endswith(name) for member in source.files].index(True)
        tracemalloc.start()
        with pytest.raises(UsageError, match=said):
            source.read(np.array([index]))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 22, (file, peak)


def test_what_is_no_zip_file_is_refused_in_a_line(tmp_path):
    write_zip(tmp_path / "x.zip", TWO)
    whole = (tmp_path / "x.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.zip").write_text("hello")
    for name in ("cut.zip", "text.zip", "none.zip"):
        with pytest.raises(
            UsageError, match=rf"data.args.root: cannot read '.*{name}' \(.*\); give"
        ):
            ImageZip(str(tmp_path / name), **ONE)


def test_other_contents_are_seen_on_resume(tmp_path):
    one = ImageZip(write_zip(tmp_path / "x.zip", TWO), **ONE)
    many = TWO | {f"ant/more{i}.png": png(0) for i in range(90)}
    first = contents(ImageZip(write_zip(tmp_path / "a.zip", many), **ONE))
    again = {zipfile.ZipInfo(name, (1999, 1, 1, 0, 0, 0)): many[name] for name in many}
    assert first == contents(ImageZip(write_zip(tmp_path / "a.zip", again), **ONE))
    assert first["all"] and not first["partly"]
    changed = contents(
        ImageZip(write_zip(tmp_path / "a.zip", many | {"ant/more7.png": png(1)}), **ONE)
    )
    assert first["all"] != changed["all"] and contents(one)["probes"]


names = st.one_of(
    st.sampled_from(FOLDERS),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(["..", ".", "a.png", "x.jpg", "Thumbs.db", "__MACOSX", "train", "test"]),
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@settings(deadline=None, max_examples=60)
@given(st.lists(paths, min_size=1, max_size=8, unique=True))
@example(["a/b/x.png", "a/b/"])
@example(["a/x.png", "a/x.png/y.png"])
@example(["a/x.png/."])
def test_any_member_is_read_or_counted_or_refused(tmp_path_factory, members):
    """Whatever is named as an image is read, or the line of the summary or of the refusal says so."""
    folder = tmp_path_factory.mktemp("zip")
    path = write_zip(folder / "x.zip", {name: png(7) for name in members if name.split("\0")[0]})
    try:
        source = ImageZip(path, **ONE)
    except UsageError as refused:
        assert "data.args.root" in str(refused) and "\n" not in str(refused)
        return
    read = source.read(np.arange(len(source)))
    assert (read["inputs"] == 7).all() and os.listdir(folder) == ["x.zip"]
    stored = [x for x in map(str, zipfile.ZipFile(path).namelist()) if not x.endswith("/")]
    paths = map(os.path.normpath, stored)  # a/./b.png is a/b.png where the file is unpacked too
    images = [name for name in paths if kind_of_name(name.rpartition("/")[2]) == "image"]
    assert len(source) <= len(images) and (
        len(source) == len(stored) or "ignored" in source.inventory
    )


def test_a_member_without_a_name_is_ignored(tmp_path):
    path = tmp_path / "x.zip"
    write_zip(path, dict([*TWO.items()][:4]))
    content = path.read_bytes()
    name = next(iter(TWO)).encode()
    at = content.rindex(name)  # in the directory of the file, at its end
    path.write_bytes(content[:at] + b"\0" + content[at + 1 :])
    assert len(ImageZip(str(path), on_error="skip", **ONE)) == 3


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_file_is_refused_or_skipped(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("zip") / "x.zip"
    write_zip(path, dict([*TWO.items()][:4]), compression=zipfile.ZIP_DEFLATED)
    content = bytearray(path.read_bytes())
    for at, value in changes:
        content[at % len(content)] = value
    path.write_bytes(content)
    try:
        source = ImageZip(str(path), on_error="skip", **ONE)
        assert len(source.read(np.arange(len(source)))["mask"]) == len(source)
    except UsageError as refused:
        assert "\n" not in str(refused)
