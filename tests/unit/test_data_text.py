"""Windows of tokens, tokenizers and text files: against plain slices, published splits and small
files.
"""

import gzip
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxdp.cli import load
from jaxdp.config.training import Target
from jaxdp.data import SOURCES, Documents, PennTreebank, TextFile
from jaxdp.data import windows as module
from jaxdp.data.dataset import check_dtypes, fingerprint
from jaxdp.data.packing import pack, read_documents
from jaxdp.data.text import read_text
from jaxdp.data.tokenizers import Byte, Char, File, Named, Words, from_spec, make_tokenizer
from jaxdp.data.windows import Windows, cut
from jaxdp.errors import UsageError
from jaxdp.run.datasets import make_data, read_set
from tokenizer_files import TEXT, bpe

REAL = os.environ.get("JAXDP_DATA")
real_data = pytest.mark.skipif(
    not REAL, reason="JAXDP_DATA does not name a folder with the full data sets"
)


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        missing, reason=f"{package} is not installed (pip install -e '.[bpe]')"
    )


# --- windows
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
@pytest.mark.parametrize("stride", [None, 1, 3, 7])
@pytest.mark.parametrize("sizes", [(40,), (13, 0, 6, 5, 30)])
def test_a_window_is_a_slice_with_labels_one_later(dtype, stride, sizes):
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, 100, size).astype(dtype) for size in sizes]
    windows = Windows(shards, 5, stride)
    step = stride or 5
    wanted = [row[i : i + 6] for row in shards for i in range(0, len(row) - 5, step)]
    assert len(windows) == len(wanted) and windows.input_shape == (5,)
    order = rng.integers(0, len(wanted), 50)
    for source in (windows, pickle.loads(pickle.dumps(windows))):
        found = source.read(order)
        assert (
            found.keys() == {"inputs", "labels"}
            and found["inputs"].dtype == found["labels"].dtype == np.int32
        )
        np.testing.assert_array_equal(found["inputs"], [wanted[i][:-1] for i in order])
        np.testing.assert_array_equal(found["labels"], [wanted[i][1:] for i in order])
    assert windows.read(order[:0])["inputs"].shape == (0, 5)
    assert len(pickle.dumps(windows)) < 1500  # the tokens, and not each window of them
    for index in (-1, len(wanted)):
        with pytest.raises(IndexError):
            windows.read(np.array([index]))


def test_documents_are_told_apart_within_a_window():
    tokens = np.array([1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 9, 1], np.uint16)
    found = Windows([tokens], 6, end_of_text=9).read(np.array([0, 1]))
    assert found["inputs"].tolist() == [[1, 2, 9, 3, 9, 9], [4, 5, 6, 7, 8, 9]]
    assert (
        found["segments"].tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
        and found["segments"].dtype == np.int32
    )
    assert (
        found["mask"].tolist() == [[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
        and found["mask"].dtype == np.float32
    )


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.99])
def test_a_cut_shares_the_tokens_out(fraction):
    shards = [np.arange(7), np.arange(7, 7), np.arange(7, 100)]
    train, test = (np.concatenate(cut(shards, fraction, part)).tolist() for part in (False, True))
    assert train + test == list(range(100)) and len(train) == int(100 * (1 - fraction))


def test_a_token_beyond_the_vocabulary_names_its_place(monkeypatch):
    """At once, or, where there are many tokens, when it is read."""
    shards = [
        np.zeros(20, np.uint16),
        np.r_[np.zeros(33), 300, np.zeros(20)].astype(np.uint16),
        np.zeros(0, np.uint16),
    ]
    words = r"data.args.vocabulary: b.bin: token 33 is 300, and the vocabulary has 300; give a larger one"

    def make(classes):
        return Windows(shards, 4, classes=classes, names=["a.bin", "b.bin", "c.bin"])

    with pytest.raises(UsageError, match=words):
        make(300)
    make(301).read(np.arange(12))
    monkeypatch.setattr(module, "SMALL", 50)
    windows = make(300)
    windows.read(np.arange(12))
    with pytest.raises(UsageError, match=words):
        windows.read(np.arange(len(windows)))


# --- tokenizers
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["byte", "char", "words", pytest.param("file", marks=needs("tokenizers"))]
)
def test_a_tokenizer_of_a_spec_brings_text_back(name, tmp_path):
    made = make_tokenizer(bpe(tmp_path) if name == "file" else name, lambda: TEXT)
    ids = made.encode(TEXT)
    assert (
        ids.ndim == 1
        and np.issubdtype(ids.dtype, np.integer)
        and ids.min() >= 0
        and ids.max() < made.size
    )
    assert made.decode(ids) == TEXT
    for again in (from_spec(json.loads(json.dumps(made.spec()))), pickle.loads(pickle.dumps(made))):
        np.testing.assert_array_equal(again.encode(TEXT), ids)
        assert again.decode(ids) == made.decode(ids) and again.size == made.size
    assert len(made.encode("")) == 0 and made.decode([]) == ""


def test_bytes_that_are_no_text_are_replaced():
    assert Byte().decode([104, 0xC3, 105]) == "h�i" and Byte().encode("é").tolist() == [0xC3, 0xA9]
    assert (Byte.size, Byte.end_of_text) == (256, 0)


def test_characters_are_numbered_unknown_ones_named():
    made = Char.of("hello\n")
    assert (
        made.alphabet == "\nehlo"
        and made.encode("hole").tolist() == [2, 4, 3, 1]
        and made.end_of_text is None
    )
    assert Char("ba\0").encode("ab\0").tolist() == [1, 0, 2] and Char("ba\0").end_of_text == 2
    with pytest.raises(
        UsageError, match=r"character 'x' at 6 \(line 2\) is not in the alphabet of 5; use another"
    ):
        made.encode("hello\nxx")


def test_words_are_numbered_as_they_appear():
    made = Words.of(" the cat \n the <unk> sat \n")
    assert made.vocabulary == ["the", "cat", "<eos>", "<unk>", "sat"]
    assert made.encode("the dog sat\n").tolist() == [0, 3, 4, 2]
    with pytest.raises(
        UsageError,
        match=r"word 'dog' \(line 2\) is not in the vocabulary of 3, which has no '<unk>'",
    ):
        Words(["the", "cat", "<eos>"]).encode("the cat\nthe dog")


def test_evaluation_data_has_the_tokens_of_training(tmp_path):
    for name in ("abc", "abd", "cba"):
        (tmp_path / name).write_text(name * 50)

    def data(name, tokenizer="char"):
        args = {"path": str(tmp_path / name), "length": 4, "tokenizer": tokenizer}
        return ["TextFile", json.dumps(args)]

    def read(train, test):
        words = zip(
            ("--data.target", "--data.args", "--eval.data.target", "--eval.data.args"),
            [*train, *test],
        )
        return make_data(
            load(["--config", "configs/python_gpt.yaml", *(x for pair in words for x in pair)])[0]
        )

    for train, test in ((data("abc"), data("cba")), (data("abc", "byte"), data("abd", "byte"))):
        assert len(read(train, test)[1][""]) > 0
    with pytest.raises(
        UsageError,
        match=r"eval.data: its tokenizer \(char\) differs from that of the training data \(char\), so the same",
    ):
        read(data("abc"), data("abd"))
    with pytest.raises(
        UsageError,
        match=r"eval.data: its tokenizer \(byte\) differs from that of the training data \(char\), so the same",
    ):
        read(data("abc"), data("abc", "byte"))


def test_words_are_never_cut_or_joined(tmp_path):
    words = [f"word{i}" for i in range(97)]
    file = tmp_path / "words.txt"
    file.write_text(" ".join(["<unk>", *words]))
    for fraction in (0.1, 0.213, 0.5):
        parts = [
            TextFile(str(file), s, 2, tokenizer="words", test_fraction=fraction)
            for s in ("train", "test")
        ]
        text = " ".join(parts[0].tokenizer.decode(part.shards[0]) for part in parts)
        assert [w for w in text.split() if w != "<eos>"] == ["<unk>", *words]
    (tmp_path / "documents.jsonl").write_text(
        "".join(json.dumps({"text": word}) + "\n" for word in words)
    )
    documents = Documents(str(tmp_path / "documents.jsonl"), length=4, tokenizer="words")
    assert {*words} <= {*documents.tokenizer.vocabulary}


@needs("tokenizers")
def test_a_vocabulary_with_gaps_ends_at_its_last_token(tmp_path):
    """Else token 300 of a vocabulary of 2 would be stored in a byte, as 44."""
    model = {"type": "WordLevel", "vocab": {"be": 0, "not": 300}, "unk_token": "be"}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "model": model,
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({**content, "normalizer": None, "decoder": None})
    )
    (tmp_path / "text.txt").write_text("be not not " * 20)
    source = TextFile(
        str(tmp_path / "text.txt"), length=2, tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert source.classes == 301 and source.read(np.arange(1))["labels"].tolist() == [[300, 300]]


@needs("tokenizers")
def test_a_tokenizer_file_is_known_by_its_content(tmp_path):
    made = File(bpe(tmp_path))
    assert made.end_of_text == 0 and 300 >= made.size > 257
    assert made.encode("<|endoftext|>x").tolist()[0] == 0
    spec = made.spec()
    assert from_spec(spec).encode("to be").tolist() == made.encode("to be").tolist()
    bpe(tmp_path, "quite another text")
    with pytest.raises(UsageError, match=r"tokenizer.json' is not the file that was used before"):
        from_spec(spec)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad.json' is not a tokenizer.json: "):
        make_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(UsageError, match=r"no file 'none.json'; give the path"):
        make_tokenizer("none.json")


@needs("tokenizers")
def test_a_tokenizers_own_truncation_cuts_nothing(tmp_path):
    """A tokenizer.json of the hub stores the truncation and padding that it was saved with."""
    import tokenizers

    path = bpe(tmp_path)
    plain = File(path).encode(TEXT * 20)
    stored = tokenizers.Tokenizer.from_file(path)
    stored.enable_truncation(5)
    stored.enable_padding(length=4096)
    stored.save(path)
    made = File(path)
    np.testing.assert_array_equal(made.encode(TEXT * 20), plain)
    assert (
        made.encode("to be").tolist() == from_spec(made.spec()).encode("to be").tolist()
        and len(plain) > 100
    )
    assert len(pickle.loads(pickle.dumps(made)).encode(TEXT * 20)) == len(plain)


@needs("tiktoken")
def test_tiktoken_by_name(tmp_path):
    """A vocabulary of its own, by tiktoken's way to add one; the published ones would have to be
    fetched.
    """
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "toy.py").write_text(
        "def toy():\n"
        "    ranks = {bytes([i]): i for i in range(256)} | {b'to': 256, b' be': 257, b'be': 258}\n"
        "    return dict(name='toy', pat_str=r' ?\\w+|\\s|[^\\s\\w]+', mergeable_ranks=ranks,\n"
        "                special_tokens={'<|endoftext|>': 259})\n"
        "ENCODING_CONSTRUCTORS = {'toy': toy}\n"
    )
    code = (
        "from jaxdp.data.tokenizers import *\n"
        "import pickle\n"
        "made = make_tokenizer('toy')\n"
        "assert made.encode('to be').tolist() == [256, 257] and made.decode([256, 257]) == 'to be'\n"
        "assert (made.size, made.end_of_text, made.spec()) == (260, 259, {'kind': 'named', 'name': 'toy'})\n"
        "assert made.encode('<|endoftext|>').max() < 259, 'a special token in a text is text'\n"
        "for again in (from_spec(made.spec()), pickle.loads(pickle.dumps(made))):\n"
        "    assert again.encode('be').tolist() == [258]\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
    with pytest.raises(
        UsageError, match=r"'gpt22' is not known; did you mean 'gpt2'\? or one of .*cl100k_base"
    ):
        Named("gpt22")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"kind": "bytes"},
            r"\{'kind': 'bytes'\} is not a spec; its kind is one of byte, char, words, file, named",
        ),
        ({"kind": "char"}, "is not a spec"),
        ({"kind": "char", "alphabet": ""}, "char has an empty alphabet"),
    ],
)
def test_what_is_no_spec_is_refused(spec, words):
    with pytest.raises(UsageError, match=words):
        make_tokenizer(spec)
    with pytest.raises(UsageError, match="'char' needs a text"):
        make_tokenizer("char")


# --- text files
# ------------------------------------------------------------------------------------------------------


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_the_end_of_a_text_is_its_test_split(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(200)) + "é" * 50
    path = write(tmp_path / "a.txt", text)
    for tokenizer in ("byte", "char"):
        train, test = (
            TextFile(path, split, 10, tokenizer=tokenizer, test_fraction=0.3)
            for split in ("train", "test")
        )
        for source, part in ((train, text[:175]), (test, text[175:])):
            made = source.tokenizer
            found = source.read(np.arange(len(source)))
            tokens = made.encode(part)
            assert len(source) == (len(tokens) - 1) // 10 and source.classes == made.size
            assert found["inputs"].ravel().tolist() == tokens[: 10 * len(source)].tolist()
            check_dtypes(source, x64=False)
        assert train.tokenizer.spec() == test.tokenizer.spec() and fingerprint(
            train
        ) != fingerprint(test)
    assert train.classes == 27 and len(TextFile(path, length=10, stride=1, tokenizer="char")) == 215
    assert len(TextFile(path, length=10, max_mb=1e300)) > 17
    assert (
        len(TextFile(path, length=10, max_mb=201e-6)) == 17
    )  # of 200 characters: a half one is left out
    given = TextFile(
        path,
        length=5,
        tokenizer={"kind": "char", "alphabet": "é" + "".join(map(chr, range(97, 123)))},
    )
    assert given.read(np.array([0]))["inputs"].tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "args", "words"),
    [
        (b"abc\xff" * 9, {}, r"data.args.path: '.*a.txt' is not UTF-8: byte 3 is 0xff; convert it"),
        (
            b"abc" * 9,
            {"length": 30},
            r"data.args.length: 30, but there are 24 tokens; make it smaller",
        ),
        (b"", {}, r"data.args.length: 4, but there are 0 tokens"),
        (b"abc" * 9, {"length": 0}, r"data.args.length: 0 is too small"),
        (b"abc" * 9, {"stride": 0}, r"data.args.stride: 0 is too small"),
        (b"abc" * 9, {"max_mb": -1}, r"data.args.max_mb: -1 must be greater than 0"),
        (
            b"abc" * 9,
            {"test_fraction": 1.0},
            r"data.args.test_fraction: 1.0 is not between 0 and 1",
        ),
        (b"abc" * 9, {"split": "val"}, r"data.args.split: 'val' is not one of 'train', 'test'"),
        (
            b"abc" * 9,
            {"tokenizer": "bytes"},
            r"data.args.tokenizer: (it needs|'bytes' .*mean 'byte')",
        ),
    ],
)
def test_a_bad_text_is_named(tmp_path, content, args, words):
    with pytest.raises(UsageError, match=words):
        TextFile(write(tmp_path / "a.txt", content), **{"length": 4, **args})
    with pytest.raises(UsageError, match=r"data.args.path: cannot read 'none.txt': No such file"):
        TextFile("none.txt")
    with pytest.raises(UsageError, match=r"data.args.length: 256, but there are 0 tokens"):
        (tmp_path / "empty").mkdir()
        TextFile(str(tmp_path / "empty"))


@real_data
def test_shakespeare_is_cut_as_nanogpt_cuts_it():
    path = f"{REAL}/text/tinyshakespeare.txt"
    train, test = (TextFile(path, split, 256, tokenizer="char") for split in ("train", "test"))
    assert train.classes == 65 and [len(s.shards[0]) for s in (train, test)] == [1_003_854, 111_540]
    assert train.tokenizer.decode(train.read(np.array([0]))["inputs"][0]).startswith(
        "First Citizen:\nBefore we proceed"
    )


def test_a_folder_has_the_texts_of_any_case_of_their_ending(tmp_path):
    for name in ("a.txt", "b.TXT", "c.md"):
        write(tmp_path / name, name)
    assert read_text(tmp_path) == "a.txt\nb.TXT"


def test_penn_treebank_has_its_train_files_vocabulary(tmp_path):
    folder = tmp_path / "simple-examples" / "data"
    folder.mkdir(parents=True)
    parts = {
        "train": " a b <unk> \n c a N \n" * 3,
        "valid": " b zebra \n" * 4,
        "test": " c N c \n" * 5,
    }
    for split, text in parts.items():
        write(folder / f"ptb.{split}.txt", text)
    sources = {split: PennTreebank(str(tmp_path), split, 3) for split in parts}
    assert {source.classes for source in sources.values()} == {6}
    words = ["a", "b", "<unk>", "<eos>", "c", "N"]
    for split, text in parts.items():
        tokens = [
            words.index(w) if w in words else 2
            for line in text.splitlines()
            for w in (*line.split(), "<eos>")
        ]
        found = sources[split].read(np.arange(len(sources[split])))
        assert found["labels"].ravel().tolist() == tokens[1 : 1 + found["labels"].size]
        assert len(sources[split]) == (len(tokens) - 1) // 3
    with pytest.raises(UsageError, match=r"split: 'val' is not one of 'train', 'valid', 'test'"):
        PennTreebank(str(tmp_path), "val")
    (folder / "ptb.train.txt").unlink()
    with pytest.raises(UsageError, match=r"data.args.root: no 'ptb.train.txt' in"):
        PennTreebank(str(tmp_path), "test")
    assert PennTreebank(str(tmp_path), "test", 3, vocabulary=words).read(np.array([0]))[
        "inputs"
    ].tolist() == [[4, 5, 4]]


# --- packed documents
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [None, 99])
def test_documents_are_packed_without_crossing(end):
    documents = [
        np.arange(1, n + 1, dtype=np.uint8) + 10 * i for i, n in enumerate([3, 4, 2, 11, 1, 5])
    ]
    found = pack(documents, 5, end)
    assert found["inputs"].tolist() == [
        [1, 2, 3, 0, 0],
        [11, 12, 13, 14, 0],
        [21, 22, 0, 0, 0],
        [31, 32, 33, 34, 35],
        [36, 37, 38, 39, 40],
        [41, 41, 0, 0, 0],
        [51, 52, 53, 54, 55],
    ]
    assert found["segments"].tolist()[0] == [0, 0, 0, 1, 1] and found["segments"].tolist()[5] == [
        0,
        1,
        2,
        2,
        2,
    ]
    last = 0 if end is None else end
    assert found["labels"].tolist()[0] == [2, 3, last, 0, 0] and found["labels"].tolist()[3] == [
        32,
        33,
        34,
        35,
        36,
    ]
    assert found["mask"].astype(int).tolist()[0] == [1, 1, int(end is not None), 0, 0]
    assert found["mask"].sum() == sum(map(len, documents)) - (
        0 if end is not None else len(documents)
    )


def test_documents_of_a_jsonl_file_and_of_texts(tmp_path):
    texts = ["first one", "second\n\none", "é", "", "the last of them"]
    lines = "\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)) + "\n\n"
    files = {
        "a.jsonl": lines,
        "a.txt": "<|endoftext|>".join(texts),
        "blank.txt": "first one\n\nsecond\n\n\n\né\n\nthe last of them\n",
    }
    found = {
        name: Documents(write(tmp_path / name, text), length=32, test_fraction=0.25)
        for name, text in files.items()
    }
    for name, source in found.items():
        batch = source.read(np.arange(len(source)))
        assert batch.keys() == {"inputs", "labels", "segments", "mask"} and len(source) == 1
        assert (
            batch["mask"].dtype == np.float32
            and batch["inputs"].dtype == batch["segments"].dtype == np.int32
        )
        assert (source.classes, source.input_shape) == (256, (32,))
        size = int(batch["mask"].sum())
        text = bytes(batch["inputs"][0, :size].tolist()).decode()
        assert text == ("first onesecond\n\noneé" if name != "blank.txt" else "first onesecondé")
        assert batch["segments"].max() == 3
        test = Documents(str(tmp_path / name), "test", 32, test_fraction=0.25).read(np.array([0]))
        assert bytes(test["labels"][0, :16].tolist()) == b"he last of them\0"
        check_dtypes(source, x64=False)
    assert Documents(str(tmp_path / "a.txt"), length=8, tokenizer="char").classes == len(
        set("".join(texts))
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n{"txt": "b"}\n',
            r"a.jsonl': line 2 at byte 14 is no JSON object with a 'text'; a",
        ),
        ("a.jsonl", '{"text": "a"}\n{"text": 3}\n', "at byte 14 is no JSON object with a 'text'"),
        ("a.jsonl", '{"text": "a"}\n[1\n', "at byte 14 is no JSON object"),
        ("a.jsonl", b'{"text": "\xff"}\n', "at byte 0 is not UTF-8"),
        ("a.jsonl", "\n", "has no document"),
        ("a.txt", "\n \n", "has no document"),
        ("a.txt", "one", "has 1 documents, too few for two splits"),
        ("a.jsonl", "", "has no document"),
        (
            "a.jsonl",
            '\n\n{"text": "a"}\n{"text": null}\n',
            "line 4 at byte 16 is no JSON object with a 'text'",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\r{"text": "b"}\r',
            "line 1 at byte 0 is no JSON object with a 'text'",
        ),
        pytest.param(
            "a.jsonl",
            '{"text": ' + "[" * 100_000,
            "line 1 at byte 0 is no JSON object",
            id="nested",
        ),
        (
            "a.JSONL",
            '{"text": "a"}\n{"text": "b \\ud83d"}\n',
            r"line 2 at byte 14 has half a character, '\\ud83d', in it",
        ),
        (
            "a.ndjson",
            '{"text": "a\\u0000"}\n',
            r"line 1 at byte 0 has '\\x00' in its text, which ends a document for",
        ),
        (
            "a.txt",
            "one\n\ntwo\0",
            r"a.txt' has '\\x00' in line 3, which ends a document for this tokenizer; remove it",
        ),
        (
            "a.json",
            ' \n[{"text": "a"}]',
            "a.json' is a JSON array; write one object per line, as with jq -c '.*'",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}', mtime=0),
            "a.jsonl.gz' is compressed; decompress it with",
        ),
        (
            "a.txt",
            gzip.compress(b"one", mtime=0),
            "a.txt' is compressed; decompress it with gunzip",
        ),
        ("a.txt", "one\n\ntwo".encode("utf-16"), "a.txt' is UTF-16; convert it with iconv"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "a.jsonl' is UTF-16; convert it with iconv"),
        ("a.txt", b"one\n\ntw\xff", "a.txt' is not UTF-8: byte 7 is 0xff"),
    ],
)
def test_bad_documents_are_named(tmp_path, name, content, words):
    with pytest.raises(UsageError, match=words):
        Documents(write(tmp_path / name, content), length=4)
    with pytest.raises(UsageError, match=r"cannot read 'none.jsonl': No such file"):
        Documents("none.jsonl")


@pytest.mark.parametrize("line", ["\n", "\r\n", "\r"])
def test_documents_end_at_blank_lines_of_any_line_ends(tmp_path, line):
    text = "\n\nfirst\nof two lines\n\n    second \n \t\nthird\n\n\n\n \n\nfourth\n\u2003\nfifth\n\f\nthe last\n\n"
    path = write(tmp_path / "a.txt", text.replace("\n", line).encode())
    first = f"first{line}of two lines"
    assert read_documents(path) == [first, "    second ", "third", "fourth", "fifth", "the last"]
    marked = write(tmp_path / "b.txt", f"one{line}{line}more<|endoftext|>two".encode())
    assert read_documents(marked) == [f"one{line}{line}more", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.Json"])
def test_a_file_of_lines_is_known_by_its_ending(tmp_path, name):
    lines = '{"text": "one"}\r\n\n{"text": "two\\n\\nlines", "id": 3}\n{"text": "\\ud83d\\ude42"}'
    for mark in (b"", b"\xef\xbb\xbf"):
        assert read_documents(write(tmp_path / name, mark + lines.encode())) == [
            "one",
            "two\n\nlines",
            "🙂",
        ]


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, text in (
        ("a.txt", "one two\n\nthree four"),
        ("b.txt", "one two<|endoftext|>three four"),
    ):
        with_mark, without = (
            write(tmp_path / f"{i}{name}", mark + text.encode())
            for i, mark in enumerate((b"\xef\xbb\xbf", b""))
        )
        assert read_documents(with_mark) == read_documents(without)
        for tokenizer in ("byte", "char", "words"):
            one, two = (
                TextFile(path, length=1, tokenizer=tokenizer) for path in (with_mark, without)
            )
            assert one.tokenizer.spec() == two.tokenizer.spec() and fingerprint(one) == fingerprint(
                two
            )


@needs("tokenizers")
def test_a_zero_byte_is_text_if_it_ends_no_document(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "to\\u0000be"}\n' * 9)
    assert len(Documents(path, length=8, tokenizer=bpe(tmp_path))) > 0
    for tokenizer in ("char", {"kind": "byte"}, {"kind": "char", "alphabet": "\0be"}):
        with pytest.raises(
            UsageError, match=r"line 1 at byte 0 has '\\x00' in its text, which ends a document"
        ):
            Documents(path, length=8, tokenizer=tokenizer)
    assert (
        TextFile(write(tmp_path / "a.txt", "a\0b" * 99), length=8).classes == 256
    )  # no documents, no collision


@pytest.mark.parametrize("key", ["data", "eval.data"])
def test_an_error_of_a_set_names_its_split_and_path(tmp_path, key):
    path = str(write(tmp_path / "a.txt", b"abc" * 9))
    for split, args in (("train", {"length": 30}), ("test", {"length": 4, "test_fraction": 0.1})):
        with pytest.raises(
            UsageError,
            match=rf"^{key}.args.length: .* \(the {split} split of TextFile in {path!r}\)$",
        ):
            read_set(key, Target("TextFile", {"path": path, **args}), split, False, SOURCES)
    with pytest.raises(
        UsageError,
        match=rf"^{key}.args.lenght: TextFile takes no such argument; did you mean 'length'\?$",
    ):
        read_set(key, Target("TextFile", {"path": path, "lenght": 1}), "test", False, SOURCES)


def test_a_folder_is_read_once_and_without_what_is_hidden(tmp_path):
    """A folder may be called x.txt, too; macOS writes ._a.txt beside a.txt."""
    for name, text in {
        "b.txt": "BB",
        "._b.txt": "no",
        ".git/c.txt": "no",
        "x.txt/in.TXT": "XX",
        "x.txt/.hidden.txt": "no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_text(tmp_path) == "BB\nXX"
