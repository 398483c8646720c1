"""Shards of WebDataset: samples by name, classes by number, and files that are not whole."""

import io
import os
import pathlib
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_runs import jaxdp
from jaxdp.archives import web_dataset
from jaxdp.data import WebDataset
from jaxdp.data.contents import contents
from jaxdp.errors import UsageError
from launch import ROOT
from packing import check_readers, grays, png, write_tar

ONE = {"size": 8, "test_fraction": 1e-9}


def samples(numbers, classes=3):
    """{name: content} of samples whose gray is ten times their number."""
    files = {}
    for i in numbers:
        files |= {f"{i:04}.png": png(10 * i), f"{i:04}.cls": str(i % classes).encode()}
    return files


@pytest.fixture
def shards(tmp_path):
    """The pattern of four shards of 24 samples."""
    for i in range(4):
        write_tar(tmp_path / f"s-{i:03}.tar", samples(range(6 * i, 6 * i + 6)))
    return str(tmp_path / "s-{000..003}.tar")


def test_samples_of_a_range_are_read_in_the_order_of_their_classes(shards):
    source = WebDataset(shards, **ONE)
    assert source.class_names == ["0", "1", "2"] and source.classes == 3
    expected = [(10 * i, f"{c}") for c in range(3) for i in range(24) if i % 3 == c]
    assert grays(source) == expected
    assert source.inventory == "24 images in 3 classes: 0 8, 1 8, 2 8"
    same = WebDataset(shards.replace("{000..003}", "*"), **ONE)
    assert grays(same) == expected
    assert len(WebDataset(shards.replace("{000..003}", "{001..002}"), **ONE)) == 12


def test_a_test_split_is_named_or_a_share(shards):
    first, rest = shards.replace("000..003", "000..000"), shards.replace("000..003", "001..003")
    named = {"train": rest, "test": first}
    assert len(WebDataset(named, size=8)) == 18
    test = WebDataset(named, "test", size=8)
    assert sorted(gray for gray, _ in grays(test)) == [0, 10, 20, 30, 40, 50]
    parts = [grays(WebDataset(shards, x, size=8, test_fraction=0.3)) for x in ("train", "test")]
    assert sorted(parts[0] + parts[1]) == sorted(grays(WebDataset(shards, **ONE)))
    assert 1 < len(parts[1]) < 15
    folds = {"a": first, "b": rest}
    chosen = WebDataset(folds, "test", splits={"train": "b", "test": "a"}, size=8)
    assert grays(chosen) == grays(test)
    for wrong in ({"trian": shards}, {"train": rest, "tset": first}):
        with pytest.raises(
            UsageError, match=r"data.args.shards: '(trian|tset)' is not one of 'train'"
        ):
            WebDataset(wrong, size=8)
    assert len(WebDataset(shards.replace("000..003", "003..001"), **ONE)) == 18


def test_names_up_to_the_first_dot_are_samples(tmp_path):
    """As WebDataset has it: in folders, with endings of several parts and in any case."""
    files = {
        "./v1.0/a.PNG": png(1),
        "./v1.0/a.seg.png": png(9),
        "./v1.0/a.cls": b"12\n",
        "b.txt": b"a caption",
        "b.cls": b"007",
        "b.png": png(2),
        "._b.png": b"",
        "README": b"",
        "folder/": b"",
    }
    source = WebDataset(write_tar(tmp_path / "x.tar", files), **ONE)
    assert grays(source) == [(2, "7"), (1, "12")]
    assert source.inventory.endswith("; ignored: 3 hidden, folder or link, 1 seg.png, 1 txt")


def test_several_ranges_and_patterns_in_one(tmp_path):
    for name in ("a-0/s-01.tar", "a-0/s-02.tar", "a-1/s-01.tar", "a-1/s-02.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tar(tmp_path / name, samples(range(3)))
    for pattern, count in (("a-{0..1}/s-{01..02}.tar", 12), ("a-{0..1}/s-*.tar", 12)):
        assert len(WebDataset(str(tmp_path / pattern), **ONE)) == count
    with pytest.raises(UsageError, match=r"cannot read '.*a-2/s-01.tar' \(.*No such file"):
        WebDataset(str(tmp_path / "a-{0..2}/s-{01..02}.tar"), **ONE)


def test_a_path_of_the_home_is_found(tmp_path, monkeypatch):
    write_tar(tmp_path / "x.tar", samples(range(3)))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(WebDataset("~/x.tar", **ONE)) == 3


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.png": None}, r"'a' of '.*x.tar' has png; a sample has one image"),
        ({"a.cls": b"1"}, r"has cls;"),
        ({"a.png": None, "a.jpg": None, "a.cls": b"1"}, r"has png, jpg, cls;"),
        ({"a.png": None, "a.cls": b"-1"}, r"its class, a whole number, in .cls"),
        ({"a.png": None, "a.cls": b"1.5"}, r"its class, a whole number, in .cls"),
        ({"a.png": None, "a.cls": b"cat"}, r"its class, a whole number, in .cls"),
        ({"a.png": None, "a.cls": b"\xff"}, r"its class, a whole number, in .cls"),
        ({"a.png": None, "a.json": b'{"label": 1}'}, r"has png, json;"),
    ],
)
def test_a_sample_without_an_image_or_a_class_is_refused(tmp_path, files, said):
    files = {name: png(1) if content is None else content for name, content in files.items()}
    path = write_tar(tmp_path / "x.tar", samples(range(3)) | files)
    with pytest.raises(UsageError, match=said) as refused:
        WebDataset(path, **ONE)
    assert str(refused.value).startswith("data.args.shards: ") and "\n" not in str(refused.value)


def test_two_members_of_a_name_are_refused(tmp_path):
    path = write_tar(tmp_path / "x.tar", [*samples(range(3)).items(), ("./0001.PNG", png(1))])
    with pytest.raises(UsageError, match=r"cannot read .*two members are called './0001.PNG'"):
        WebDataset(path, **ONE)
    write_tar(tmp_path / "s-0.tar", samples(range(3)))
    write_tar(tmp_path / "s-1.tar", samples(range(3)))  # each file has names of its own
    assert len(WebDataset(str(tmp_path / "s-*.tar"), **ONE)) == 6


def test_a_file_that_is_no_whole_tar_file_is_refused_in_a_line(tmp_path, shards):
    whole = pathlib.Path(shards.replace("{000..003}", "000")).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    damaged = bytearray(whole)
    damaged[whole.index(b"0003.png")] = 255  # of a header: its checksum is wrong
    write_tar(tmp_path / "packed.tar", samples(range(3)), "w:gz")
    write_tar(tmp_path / "packed.tar.gz", samples(range(3)), "w:gz")
    contents = {
        "cut.tar": whole[: len(whole) // 2],
        "header.tar": whole[:end][: whole.index(b"0003.png") + 100],
        "boundary.tar": whole[:end],
        "damaged.tar": bytes(damaged),
        "two.tar": whole[: end + 1024] + whole,
        "joined.tar": whole + whole,  # tar pads each with zeros to 10,240 bytes
        "text.tar": b"hello",
        "empty.tar": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "packed.tar", "packed.tar.gz", "none.tar", "{000..003}.tar", "x-*.tar"):
        with pytest.raises(
            UsageError, match=r"data.args.shards: cannot read .*; give .*gunzip"
        ) as e:
            WebDataset(str(tmp_path / name), **ONE)
        assert "\n" not in str(e.value)
    with pytest.raises(UsageError, match=r"cannot read '.*s-004.tar' \(.*No such file"):
        WebDataset(shards.replace("003", "004"), **ONE)


def test_a_link_is_no_member(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for name, content in samples(range(2)).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("0002.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    source = WebDataset(str(tmp_path / "x.tar"), **ONE)
    assert len(source) == 2 and source.inventory.endswith("1 hidden, folder or link")


def test_the_order_does_not_depend_on_who_reads(shards):
    source = WebDataset(shards, **ONE)
    check_readers(source)


def test_other_contents_are_seen_on_resume(tmp_path, monkeypatch):
    """Not when the samples were packed; of many images, the line says what was not compared."""
    files = samples(range(25), 3) | {f"x{i}.png": png(i) for i in range(90)}
    files |= {f"x{i}.cls": b"0" for i in range(90)}

    def stored(changed, **more):
        path = write_tar(tmp_path / "x.tar", files | changed, **more)
        return contents(WebDataset(path, **ONE))

    first = stored({})
    assert first == stored({}, mtime=10**9) and first["all"] and not first["partly"]
    assert first["all"] != stored({"x70.png": png(200)})["all"]
    assert first["all"] != stored({"x70.cls": b"1"})["all"]
    monkeypatch.setattr(web_dataset, "READ", 50)
    assert stored({})["partly"].endswith("of 115 examples and 1 of 116 files or arrays")


def test_a_damaged_image_is_refused_or_skipped(tmp_path, capsys):
    files = samples(range(4), 1) | {"0001.png": b"no image", "0002.png": b""}
    path = write_tar(tmp_path / "x.tar", files)
    source = WebDataset(path, on_error="skip", **ONE)
    assert source.read(np.arange(4))["mask"].tolist() == [1, 0, 0, 1]
    assert "x.tar/0001.png': cannot identify image file;" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"x.tar/0001.png': .*data.args.on_error: skip"):
        WebDataset(path, **ONE).read(np.array([1]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_file_is_refused_or_all_of_its_samples_are_there(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    write_tar(path, samples(range(4)))
    content = bytearray(path.read_bytes())
    for at, value in changes:
        content[at % len(content)] = value
    path.write_bytes(content)
    try:
        source = WebDataset(str(path), on_error="skip", **ONE)
        assert len(source.read(np.arange(len(source)))["mask"]) == len(source)
        assert len(source) == 4 or "ignored" in source.inventory
    except UsageError as refused:
        assert "\n" not in str(refused)


@pytest.mark.slow
def test_four_devices_and_workers_have_the_bits_of_one(shards, tmp_path):
    digests = []
    for devices in (1, 4):
        argv = ["--model.target", "MLP", "--model.args", "{hidden: [8]}", "--data.target"]
        argv += ["WebDataset", "--data.args", f"{{shards: '{shards}', size: 8, augment: true}}"]
        argv += ["--data.workers", devices // 4, "--parallel.reduction", "exact", "--steps", 7]
        argv += ["--epochs", "null", "--batch_size", 12, "--microbatches", 4]
        argv += ["--eval.every", "null", "--run_dir", tmp_path / f"{devices}"]
        done = jaxdp("--config", ROOT / "configs" / "digits.yaml", *argv, devices=devices)
        digests += [line for line in done.stdout.split() if len(line) == 16 and line.isalnum()]
    assert len(digests) == 2 and digests[0] == digests[1], digests
    assert "run" not in os.listdir(tmp_path)
