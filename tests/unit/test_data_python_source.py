"""The standard library's source as a data set, against the files themselves and against small
folders.
"""

import pathlib
import re
import sysconfig

import numpy as np
import pytest

import jaxdp.data
from jaxdp.data import PythonSource
from jaxdp.data.dataset import check_dtypes, fingerprint
from jaxdp.errors import UsageError


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that makes the standard library of {path: content}; it returns the folder."""
    monkeypatch.setitem(sysconfig.get_config_vars(), "installed_base", str(tmp_path))
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    assert folder.is_relative_to(tmp_path)

    def make(files):
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder

    return make


def test_it_is_the_library_of_this_python():
    train, test = PythonSource(), PythonSource(split="test", length=64)
    assert len(train) * 128 > 5_000_000 and 0.02 < len(test) * 64 / (len(train) * 128) < 0.1
    assert (train.classes, train.input_shape, test.input_shape) == (256, (128,), (64,))
    assert train.shards[0].dtype == np.uint8
    got = train.read(np.array([3, 0, 3]))
    assert got["inputs"].shape == got["labels"].shape == (3, 128)
    assert got["inputs"].dtype == got["labels"].dtype == np.int32
    np.testing.assert_array_equal(got["inputs"][:, 1:], got["labels"][:, :-1])
    np.testing.assert_array_equal(got["inputs"][0], got["inputs"][2])
    check_dtypes(train, x64=False)
    assert fingerprint(train) == fingerprint(PythonSource()) != fingerprint(test)
    text = bytes(train.read(np.arange(len(train)))["inputs"].astype(np.uint8).ravel())
    assert b"\0" in text and b"import " in text


def test_examples_are_consecutive_without_the_tail(library):
    library(
        {"a.py": bytes(range(1, 9)), "b/c.py": bytes(range(11, 20))}
    )  # neither is in the test split
    source = PythonSource(length=5)
    text = np.array([*range(1, 9), 0, *range(11, 20)])
    got = source.read(np.arange(len(source)))
    assert len(source) == (len(text) - 1) // 5 == 3
    np.testing.assert_array_equal(got["inputs"].ravel(), text[:15])
    np.testing.assert_array_equal(got["labels"].ravel(), text[1:16])
    assert len(PythonSource(length=5, max_mb=11e-6)) == 2


def test_splits_share_no_file_and_no_foreign_code(library):
    names = [f"m{i:03}.py" for i in range(400)]
    skipped = [
        "test/x.py",
        "json/tests/x.py",
        "site-packages/x.py",
        "idlelib/x.py",
        "_sysconfigdata__linux.py",
        "x.txt",
    ]
    library({name: name.encode() for name in names} | dict.fromkeys(skipped, b"no"))
    parts = {}
    for split in ("train", "test"):
        source = PythonSource(split, length=1)
        text = bytes(source.read(np.arange(len(source)))["inputs"].astype(np.uint8).ravel())
        parts[split] = (text + b"y").split(b"\0")
    assert parts["train"] == sorted(parts["train"]) and 8 <= len(parts["test"]) <= 35
    assert sorted(parts["train"] + parts["test"]) == [name.encode() for name in names]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"split": "valid"}, "data.args.split: 'valid' is not one of"),
        ({"length": 0}, "data.args.length: 0 is too small"),
        ({"max_mb": 0}, "data.args.max_mb: 0 must be greater than 0"),
        ({"length": 100}, "data.args.length: 100, but there are 9 bytes; make it smaller"),
        (
            {"split": "test"},
            "data: no Python source in .*; use a Python whose library is not packed",
        ),
    ],
)
def test_what_cannot_be_read_is_named(library, args, words):
    library({"a.py": b"import os"})
    with pytest.raises(UsageError, match=words):
        PythonSource(**args)


def test_a_packed_library_is_named(library):
    with pytest.raises(
        UsageError, match=f"no Python source in {re.escape(repr(str(library({}))))}"
    ):
        jaxdp.data.PythonSource()
