"""Files of tokens in nanoGPT's and llm.c's formats, torn ones too, and `jaxdp data tokenize`, which
makes them.
"""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxdp.cli import Call
from jaxdp.cli.data import run as data
from jaxdp.cli.parse import parse
from jaxdp.data import TextFile, TokenFile
from jaxdp.data import documents as module
from jaxdp.data.dataset import check_dtypes, fingerprint
from jaxdp.data.documents import boundary, pieces
from jaxdp.data.tokenize import tokenize
from jaxdp.data.tokenizers import File
from jaxdp.errors import UsageError
from tokenizer_files import bpe

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 1000, 500)
needs_bpe = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed"
)


def raw(path, tokens, dtype="<u2"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.asarray(tokens).astype(dtype).tobytes())
    return str(path)


def llmc(path, tokens, magic=20240520, version=1, dtype="<u2", count=None):
    """As `write_datafile` of llm.c's dev/data/data_common.py."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens).astype(dtype).tobytes())
    return str(path)


def all_tokens(source):
    found = source.read(np.arange(len(source)))
    np.testing.assert_array_equal(found["inputs"][:, 1:], found["labels"][:, :-1])
    return found["inputs"].ravel().tolist()


# --- formats
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "args", "classes"),
    [
        (raw, {}, 50257),
        (
            lambda path, tokens: raw(path, tokens, "<u4"),
            {"dtype": "uint32", "vocabulary": 2000},
            2000,
        ),
        (llmc, {}, 50257),
        (lambda path, tokens: llmc(path, tokens, 20240801, 7, "<u4"), {}, 128256),
    ],
)
def test_every_format_gives_its_tokens(tmp_path, make, args, classes):
    path = make(tmp_path / "x.bin", TOKENS)
    source = TokenFile(path, length=7, **args)
    assert len(source) == 499 // 7 and (source.classes, source.input_shape) == (classes, (7,))
    assert all_tokens(source) == TOKENS[: 71 * 7].tolist()
    assert source.tokenizer is None and not source.shards[0].flags.owndata
    check_dtypes(source, x64=False)
    again = pickle.loads(pickle.dumps(source))
    assert all_tokens(again) == all_tokens(source) and fingerprint(again) == fingerprint(source)
    assert len(pickle.dumps(source)) < 2000, "a process that gets it maps the file itself"
    overlapping = TokenFile(path, length=7, stride=2, **args)
    assert len(overlapping) == 247 and overlapping.read(np.array([3]))["inputs"].tolist() == [
        TOKENS[6:13].tolist()
    ]


def test_no_window_crosses_the_files_of_a_folder(tmp_path):
    for name, part in (("b", TOKENS[100:110]), ("a", TOKENS[:100]), ("c", TOKENS[110:113])):
        raw(tmp_path / f"{name}.bin", part)
    (tmp_path / "notes.txt").write_text("no tokens")
    wanted = [*TOKENS[:96].tolist(), *TOKENS[100:108].tolist()]
    for path in (tmp_path, f"{tmp_path}/*.bin", f"{tmp_path}/[abc].bin"):
        assert all_tokens(TokenFile(str(path), length=4)) == wanted
    assert all_tokens(TokenFile(f"{tmp_path}/[bc].bin", length=4)) == wanted[96:]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "val"),
        ("train_000001", "val_000000"),
        ("fineweb_train_000001", "fineweb_val_000000"),
        ("train", "test"),
        ("Training", "Testing"),
        ("trainSet_1", "devSet_1"),
        ("wiki.trn", "wiki.tst"),
    ],
)
def test_a_split_is_its_own_files(tmp_path, train, test):
    raw(tmp_path / f"{train}.bin", TOKENS[:400])
    raw(tmp_path / f"{test}.bin", TOKENS[400:])
    assert all_tokens(TokenFile(str(tmp_path), "train", 4)) == TOKENS[:396].tolist()
    assert all_tokens(TokenFile(str(tmp_path), "test", 4)) == TOKENS[400:496].tolist()
    assert len(TokenFile(str(tmp_path), length=4)) == 99 + 24
    one = str(tmp_path / f"{test}.bin")
    assert all_tokens(TokenFile(one, "test", 4)) == TOKENS[400:496].tolist(), (
        "files for validation are not divided"
    )


def test_an_evaluation_is_on_the_test_files_or_else_on_those_for_validation(tmp_path):
    for place, name in enumerate(("train", "val", "test")):
        raw(tmp_path / f"{name}.bin", TOKENS[100 * place : 100 * (place + 1)])
    source = TokenFile(str(tmp_path), "test", 4)
    assert all_tokens(source) == TOKENS[200:296].tolist()
    assert source.inventory == "files 'test.bin'; others: 'train.bin', 'val.bin'"


def test_without_a_file_the_test_split_is_the_end(tmp_path):
    raw(tmp_path / "a.bin", TOKENS[:300])
    raw(tmp_path / "b.bin", TOKENS[300:])
    parts = [TokenFile(str(tmp_path), split, 4, test_fraction=0.5) for split in ("train", "test")]
    assert all_tokens(parts[0]) == TOKENS[:248].tolist() and fingerprint(parts[0]) != fingerprint(
        parts[1]
    )
    assert all_tokens(parts[1]) == [*TOKENS[250:298].tolist(), *TOKENS[300:496].tolist()]
    assert all_tokens(pickle.loads(pickle.dumps(parts[1]))) == all_tokens(parts[1])


def test_documents_end_with_the_end_of_text_token(tmp_path):
    path = raw(tmp_path / "x.bin", [5, 0, 6, 7, 0, 8, 9, 9, 9])
    found = TokenFile(path, length=4, documents="separate", end_of_text=0).read(np.array([0, 1]))
    assert found["segments"].tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert found["mask"].tolist() == [[1, 0, 1, 1], [0, 1, 1, 1]]
    assert "mask" not in TokenFile(path, length=4, end_of_text=0).read(np.array([0]))
    with pytest.raises(
        UsageError, match=r"data.args.end_of_text: documents: separate needs the token"
    ):
        TokenFile(path, length=4, documents="separate")


@pytest.mark.parametrize(
    ("make", "args", "words"),
    [
        (
            lambda p: p.write_bytes(b"abc"),
            {},
            r"x.bin' has a torn end: 3 bytes are no whole number of uint16",
        ),
        (
            lambda p: p.write_bytes(b"abcdef"),
            {"dtype": "uint32"},
            r"torn end: 6 bytes are no whole number of uint32",
        ),
        (
            lambda p: llmc(p, TOKENS, count=501),
            {},
            r"x.bin' has 500 tokens, instead of 501; write it again",
        ),
        (
            lambda p: llmc(p, TOKENS, version=2),
            {},
            r"x.bin' is llm.c's version 2; only 1 is supported",
        ),
        (
            lambda p: raw(p, TOKENS),
            {"length": 500},
            r"data.args.length: 500, but there are 500 tokens",
        ),
        (lambda p: raw(p, []), {}, r"but there are 0 tokens"),
        (
            lambda p: raw(p, TOKENS),
            {"dtype": "int32"},
            r"data.args.dtype: 'int32' is not one of 'uint16', 'uint32'",
        ),
        (lambda p: raw(p, TOKENS), {"split": "val"}, r"data.args.split: 'val' is not one of"),
        (lambda p: raw(p, TOKENS), {"vocabulary": 0}, r"data.args.vocabulary: 0 is too small"),
        (
            lambda p: raw(p, TOKENS),
            {"end_of_text": -1},
            r"data.args.end_of_text: -1 is not in the vocabulary",
        ),
        (
            lambda p: raw(p, TOKENS),
            {"documents": "split"},
            r"data.args.documents: 'split' is not one of",
        ),
        (
            lambda p: (p.parent / "tokens.json").write_text("{") and raw(p, TOKENS),
            {},
            r"cannot read '.*tokens.json'",
        ),
        (
            lambda p: (p.parent / "tokens.json").write_text("{}") and raw(p, TOKENS),
            {},
            r"its format is not 1;",
        ),
        (
            lambda p: (
                (p.parent / "tokens.json").write_text('{"format": 1, "shards": []}')
                and raw(p, TOKENS)
            ),
            {},
            r"its shards is \[\]; write it again",
        ),
    ],
)
def test_a_bad_file_is_named(tmp_path, make, args, words):
    make(tmp_path / "x.bin")
    with pytest.raises(UsageError, match=words):
        TokenFile(str(tmp_path / "x.bin"), **{"length": 4, **args})


def test_a_small_vocabulary_or_missing_path_is_named(tmp_path):
    path = raw(tmp_path / "x.bin", TOKENS)
    first = int(np.argmax(TOKENS >= 900))
    with pytest.raises(
        UsageError, match=rf"vocabulary: .*x.bin: token {first} is {TOKENS[first]}, and .* has 900"
    ):
        TokenFile(path, length=4, vocabulary=900)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        UsageError, match=r"data.args.path: no .bin file in '.*empty'; `jaxdp data tokenize` makes"
    ):
        TokenFile(str(tmp_path / "empty"))
    with pytest.raises(
        UsageError, match=r"data.args.path: no such file, folder or pattern: 'none/\*.bin'"
    ):
        TokenFile("none/*.bin")


def test_a_file_of_20_gb_starts_at_once(tmp_path):
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.truncate(20 * 10**9)
        file.seek(2 * 9_000_000_000)
        file.write(np.arange(1, 100, dtype="<u2").tobytes())
    start = time.perf_counter()
    source = TokenFile(str(path), length=8, stride=8)
    fingerprint(source)
    found = source.read(np.array([0, 9_000_000_000 // 8]))
    assert time.perf_counter() - start < 2
    assert len(source) == (10**10 - 9) // 8 + 1 and found["inputs"].tolist() == [
        [0] * 8,
        list(range(1, 9)),
    ]


def sparse(path, size, pieces, dtype="<u2", head=b""):
    """A file of `size` tokens that takes no room, all 0 but for the pieces {place: tokens}, and
    what it should hold.
    """
    wanted = np.zeros(size, dtype)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + wanted.nbytes)
        for place, tokens in pieces.items():
            wanted[place : place + len(tokens)] = tokens
            file.seek(len(head) + place * wanted.itemsize)
            file.write(np.asarray(tokens).astype(dtype).tobytes())
    return wanted


def assert_windows(source, wanted, indices):
    """wanted: every shard's tokens, cut as the split is."""
    windows = np.concatenate([
        np.lib.stride_tricks.sliding_window_view(tokens, source.length + 1)[:: source.stride] for tokens in wanted
    ])  # fmt: skip
    found = source.read(indices)
    np.testing.assert_array_equal(found["inputs"], windows[indices][:, :-1])
    np.testing.assert_array_equal(found["labels"], windows[indices][:, 1:])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_each_part_of_a_file_is_read_at_its_own_place(tmp_path, dtype, split):
    pieces = dict.fromkeys(range(4_000, 400_000, 50_000), TOKENS)
    tokens = sparse(tmp_path / "x.bin", 400_000, pieces, np.dtype(dtype).newbyteorder("<"))
    source = TokenFile(str(tmp_path / "x.bin"), split, 99, dtype=dtype, test_fraction=0.3)
    part = tokens[280_000:] if split == "test" else tokens[:280_000]
    indices = RNG.permutation(len(source))
    assert_windows(source, [part], indices[:300])
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda part_of: assert_windows(source, [part], part_of), np.array_split(indices, 16)
            )
        )


def test_a_token_beyond_the_vocabulary_names_its_file(tmp_path):
    sparse(tmp_path / "x.bin", (1 << 24) + 1000, {10_000_003: [70]})
    source = TokenFile(str(tmp_path / "x.bin"), length=10, vocabulary=70)
    with pytest.raises(
        UsageError, match=r"x.bin: token 10,000,003 is 70, and the vocabulary has 70"
    ):
        source.read(np.array([500_000, 1_000_000]))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_file_is_closed_with_its_data_set(tmp_path):
    for name in "abc":
        raw(tmp_path / f"{name}.bin", TOKENS)

    def is_open():
        return sum(
            os.path.realpath(f"/proc/self/fd/{number}").startswith(str(tmp_path))
            for number in os.listdir("/proc/self/fd")
        )

    source = TokenFile(str(tmp_path), length=4)
    stored = pickle.dumps(source)
    assert is_open() >= 3
    del source
    assert is_open() == 0
    (tmp_path / "b.bin").unlink()
    with pytest.raises(UsageError, match=r"data.args.path: cannot map '.*b.bin': .*No such file"):
        pickle.loads(stored)
    assert is_open() == 0


def test_a_config_takes_both_splits_and_the_vocabulary(tmp_path):
    from jaxdp.config import Config, DataTarget
    from jaxdp.run.datasets import make_data

    raw(tmp_path / "train.bin", TOKENS[:400])
    raw(tmp_path / "val.bin", TOKENS[400:])
    target = DataTarget("TokenFile", {"path": str(tmp_path), "length": 4, "vocabulary": 1000})
    train, sets = make_data(Config(data=target, steps=1))
    test = sets[""]
    assert (len(train), len(test), train.classes) == (99, 24, 1000)


# --- jaxdp data tokenize
# ---------------------------------------------------------------------------------------------


def command(*argv, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", "data", *map(str, argv)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


POEM = "".join(f"line {i}: " + "rhyme " * (i % 5) + "é\n" for i in range(400))


def test_the_command_makes_what_token_file_reads(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    out = tmp_path / "out"
    done = command("tokenize", "--output", out, "--tokenizer=char", tmp_path / "poem.txt", "--split", 0.2,
                   "--shard_tokens", 1000)  # fmt: skip
    meta = json.loads((out / "tokens.json").read_text())
    train, test = (
        TokenFile(str(out), split, 16, documents="ignore") for split in ("train", "test")
    )
    assert (
        meta["counts"]["train"] + meta["counts"]["val"] == len(POEM) and meta["end_of_text"] is None
    )
    assert (
        (meta["dtype"], meta["vocabulary"])
        == ("uint16", len(set(POEM)))
        == ("uint16", train.classes)
    )
    assert (
        f"{meta['counts']['train']:,} tokens to train on" in done.stdout
        and len(done.stdout.splitlines()) == 2
    )
    assert set(meta["shards"].values()) > {1000} and max(meta["shards"].values()) == 1000
    assert sorted(os.listdir(out)) == sorted([*meta["shards"], "tokens.json"])
    whole = [np.concatenate(source.shards).tolist() for source in (train, test)]
    texts = [train.tokenizer.decode(part) for part in whole]
    assert (
        "".join(texts) == POEM
        and texts[1].startswith("line ")
        and 0.15 < len(texts[1]) / len(POEM) <= 0.2
    )
    reference = TextFile(str(tmp_path / "poem.txt"), length=16, tokenizer="char")
    assert reference.tokenizer.spec() == meta["tokenizer"]
    (out / "val_000000.bin").write_bytes(b"ab")
    with pytest.raises(
        UsageError, match=r"val_000000.bin' has 1 tokens, instead of [\d,]+; write it again"
    ):
        TokenFile(str(out), "test", 16)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            (),
            "jaxdp data: no action given; it is `jaxdp data tokenize INPUT... --output DIR` or `jaxdp data check",
        ),
        (
            ("tokenise", "a.txt"),
            "jaxdp data: unknown action 'tokenise'; it is `jaxdp data tokenize",
        ),
        (("tokenize",), "INPUT: missing; give .txt or .jsonl files"),
        (("tokenize", "none.txt"), "INPUT: no file 'none.txt'; give .txt or .jsonl files"),
        (("tokenize", "Makefile"), "INPUT: 'Makefile' ends in neither .txt nor .jsonl"),
        (("tokenize", "{poem}"), "--output: missing; name the folder to make"),
        (("tokenize", "{poem}.gz", "--output", "{new}"), "INPUT: no file"),
        (
            ("tokenize", "{poem}", "--output", "tests"),
            "--output: 'tests' already exists; choose another",
        ),
        (
            ("tokenize", "{poem}", "--output", "{new}", "--split", "1"),
            "--split: 1.0 is not in [0, 1); e.g. 0.01",
        ),
        (("tokenize", "{poem}", "--output", "{new}", "--tokenizer", "bits"), "--tokenizer: "),
        (
            ("tokenize", "{poem}", "--output", "{new}", "--tokenizer", "words"),
            "--tokenizer: words is not for files",
        ),
        (
            ("tokenize", "{poem}", "--output", "{new}", "--shard_tokens", "0"),
            "--shard_tokens: 0 is too small",
        ),
        (
            ("tokenize", "{poem}", "--output", "{new}", "--shard_tokens", "x"),
            "--shard_tokens: 'x' is not an integer",
        ),
        (
            ("tokenize", "{poem}", "--out", "x"),
            "command line: unknown option 'out'; did you mean 'output'?",
        ),
    ],
)
def test_a_bad_command_is_refused_in_one_line(tmp_path, argv, words):
    (tmp_path / "poem.txt").write_text(POEM)
    places = {"poem": tmp_path / "poem.txt", "new": tmp_path / "new"}
    with pytest.raises(UsageError) as caught:
        data(Call(options=parse([arg.format(**places) for arg in argv], "data")[0]))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(words)
    assert sorted(os.listdir(tmp_path)) == ["poem.txt"]


def test_a_refusal_ends_with_code_2_without_jax(tmp_path):
    said = command("tokenize", "none.txt", code=2).stderr
    assert said == "jaxdp: INPUT: no file 'none.txt'; give .txt or .jsonl files\n"
    (tmp_path / "poem.txt").write_text(POEM)
    code = (
        "import sys; from jaxdp.cli import Call, parse; from jaxdp.cli.data import run as data\n"
        "data(Call(options=parse(sys.argv[1:], 'data')[0])); assert 'jax' not in sys.modules"
    )
    argv = [
        "tokenize",
        str(tmp_path / "poem.txt"),
        "--output",
        str(tmp_path / "out"),
        "--tokenizer",
        "byte",
    ]
    subprocess.run([sys.executable, "-c", code, *argv], check=True, timeout=60, capture_output=True)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    for name in ("a.bin", "b.bin"):
        raw(tmp_path / name, TOKENS)
    meta = {"format": 1, "dtype": "uint16", "shards": {"a.bin": len(TOKENS), "b.bin": len(TOKENS)}}
    (tmp_path / "tokens.json").write_text(json.dumps(meta))
    whole = TokenFile(str(tmp_path), length=8)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(
        UsageError,
        match=r"data.args.path: '.*' lacks 'b.bin', which its tokens.json lists; copy it",
    ):
        TokenFile(str(tmp_path), length=8)
    assert 0 < len(TokenFile(str(tmp_path / "a.bin"), length=8)) < len(whole)


def test_a_run_that_fails_leaves_no_output(tmp_path):
    good, bad = tmp_path / "a.txt", tmp_path / "b.txt"
    good.write_text(POEM)
    bad.write_bytes(b"ab\xff\n" * 9)
    with pytest.raises(
        UsageError, match=r"INPUT: '.*b.txt' is not UTF-8: byte 2 is 0xff; convert it"
    ):
        tokenize([good, bad], tmp_path / "out", "byte", 0.1, 100)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]
    with pytest.raises(UsageError, match=r"INPUT: .*c.txt' have no text"):
        (tmp_path / "c.txt").write_text("")
        tokenize([tmp_path / "c.txt"], tmp_path / "out", "byte", 0.1, 100)


def test_documents_end_where_they_end(tmp_path):
    lines, marked, plain = (tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt"))
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", "three")))
    marked.write_text("four<|endoftext|>five")
    plain.write_text("six\n\nseven\n")
    meta = tokenize([lines, marked, plain], tmp_path / "out", "byte", 0, 1000)
    source = TokenFile(str(tmp_path / "out"), length=8, documents="separate")
    assert (
        bytes(np.concatenate(source.shards).tolist())
        == b"one\0two\0three\0four\0five\0six\n\nseven\n"
    )
    assert meta["counts"]["val"] == 0 and meta["end_of_text"] == 0
    assert source.read(np.array([0]))["mask"].tolist() == [[1, 1, 1, 0, 1, 1, 1, 0]]
    tokenize([lines, marked], tmp_path / "char", "char", 0.3, 1000)
    split = TokenFile(str(tmp_path / "char"), "test", 4, documents="separate")
    assert split.tokenizer.decode(np.concatenate(split.shards)) == "three\0five"


def test_files_named_for_validation_are_not_trained_on(tmp_path, capsys):
    parts = {"wiki.Train.txt": "training\n" * 90, "wiki.Valid.txt": "held out\n" * 9}
    for name, text in parts.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in parts]
    options = parse(
        ["tokenize", *files, "--output", str(tmp_path / "out"), "--tokenizer", "byte"], "data"
    )[0]
    data(Call(options=options))
    for split, text in zip(("train", "test"), parts.values()):
        assert (
            bytes(
                np.concatenate(TokenFile(str(tmp_path / "out"), split, 8).shards).tolist()
            ).decode()
            == text
        )
    assert (
        f"for validation, as its name says, instead of a share of each file: {files[1]}"
        in capsys.readouterr().out
    )
    (tmp_path / "wiki.test.txt").write_text("test\n")
    for names, words in (
        (
            (*parts, "wiki.test.txt"),
            "'.*wiki.Valid.txt', '.*wiki.test.txt' are both for validation and for testing",
        ),
        (("train_test.txt", *parts), "INPUT: 'train_test' may be either of two splits; rename it"),
    ):
        (tmp_path / "train_test.txt").write_text("any\n")
        with pytest.raises(UsageError, match=words):
            tokenize([tmp_path / name for name in names], tmp_path / "new", "byte", 0.1, 1000)
    (tmp_path / "wiki.test.txt").write_text("test\n" * 9)
    meta = tokenize(
        [tmp_path / "wiki.test.txt"], tmp_path / "alone", "byte", 0.5, 1000
    )  # nothing else to train on
    assert meta["counts"] == {"train": 25, "val": 20}


@pytest.mark.parametrize(
    ("name", "content", "split", "words"),
    [
        (
            "a.txt",
            "a single line",
            0.1,
            "--split: 0.1 leaves nothing for validation: a file is divided between two lines",
        ),
        (
            "a.jsonl",
            '{"text": "a single document"}\n',
            0.01,
            "--split: 0.01 leaves nothing for validation",
        ),
        ("a.jsonl", '{"text": "a"}\n\n\n', 0.1, "--split: 0.1 leaves nothing for validation"),
        ("a.jsonl", '\n{"text": "a"}\n', 0.99, "--split: 0.99 leaves nothing to train on"),
    ],
)
def test_a_split_without_tokens_is_refused(tmp_path, name, content, split, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=words):
        tokenize([tmp_path / name], tmp_path / "out", "byte", split, 1000)
    assert os.listdir(tmp_path) == [name]
    if split < 0.9:
        assert tokenize([tmp_path / name], tmp_path / "out", "byte", 0, 1000)["counts"]["val"] == 0


def test_bad_lines_and_texts_are_named_by_position(tmp_path, capsys):
    lines = [
        '{"text": "one"}',
        '{"txt": "b"}',
        '{"text": "c"}',
        '{"text": "\\ud83d"}',
        '{"text": "a\\u0000"}',
        "[1",
    ]
    (tmp_path / "a.JSONL").write_text("\n".join(lines) + "\n")
    for split, words in ((0, "line 2 at byte 16 is no JSON object"), (0.5, "line 2 at byte 16")):
        with pytest.raises(UsageError, match=f"INPUT: '.*a.JSONL': {words}"):
            tokenize([tmp_path / "a.JSONL"], tmp_path / "out", "byte", split, 1000)
    with pytest.raises(UsageError, match="data check: 4 problems, listed above"):
        data(Call(options=parse(["check", str(tmp_path / "a.JSONL")], "data")[0]))
    said = capsys.readouterr().out
    assert (
        "line 2 at byte 16" in said
        and "line 4 at byte 43 has half a character" in said
        and "line 5 at byte 62 has '\\x00' in its text" in said
        and "line 6 at byte" in said
    )
    for tokenizer in ("byte", "char"):
        (tmp_path / "b.txt").write_bytes(b"ab\ncd\0\nef\n" * 3)
        with pytest.raises(
            UsageError, match=r"INPUT: '.*b.txt' has '\\x00' at byte 5, which ends a document"
        ):
            tokenize([tmp_path / "b.txt"], tmp_path / "out", tokenizer, 0.3, 1000)
        (tmp_path / "c.jsonl").write_text('{"text": "c"}\n' * 8 + '{"text": "a\\u0000"}\n')
        with pytest.raises(
            UsageError, match=r"INPUT: '.*c.jsonl': line 9 at byte 112 has '\\x00' in its text"
        ):
            tokenize([tmp_path / "c.jsonl"], tmp_path / "out", tokenizer, 0.1, 1000)
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbfone\rtwo\rthree\r")
    tokenize([tmp_path / "d.txt"], tmp_path / "out", "byte", 0.4, 1000)
    texts = [
        bytes(np.concatenate(TokenFile(str(tmp_path / "out"), s, 4).shards).tolist())
        for s in ("train", "test")
    ]
    assert texts == [b"one\rtwo\r", b"three\r"]


def test_a_part_begins_with_a_line_or_a_document(tmp_path):
    file = tmp_path / "a.txt"
    for content, fraction, wanted in (
        ("aaaa\nbbbb\ncccc\n", 0.5, 10),
        ("aaaa\nbbbb\ncccc\n", 2 / 3, 5),
        ("aaaa\nbbbb\ncccc\n", 0.01, 10),
        ("aaaa\nbbbb\ncccc\n", 0, 15),
        ("aaaabbbb", 0.5, 8),
        ("aa<|endoftext|>\nbb<|endoftext|>cc", 0.4, 31),
    ):
        file.write_text(content)
        assert boundary(file, fraction) == wanted, content


def test_a_long_text_in_pieces_has_the_same_tokens(tmp_path, monkeypatch):
    """Blocks of seven bytes: characters, marks and words are cut everywhere."""
    file = tmp_path / "a.txt"
    text = ("héllo wörld\n\n\n  it is\nlate 🙂\n" * 9 + "<|endoftext|>") * 3 + "end"
    file.write_text(text)
    monkeypatch.setattr(module, "BLOCK", 7)
    found = list(pieces(file))
    assert "".join(piece.text + "<|endoftext|>" * piece.ends for piece in found) == text
    assert max(len(piece.text) for piece in found) < 60 and sum(piece.ends for piece in found) == 3
    if importlib.util.find_spec("tokenizers"):
        made = File(bpe(tmp_path, text))
        documents = text.split("<|endoftext|>")
        whole = [token for document in documents for token in made.encode(document).tolist()]
        assert [token for piece in found for token in made.encode(piece.text).tolist()] == whole
    file.write_bytes("é".encode() * 20 + b"\xc3")
    with pytest.raises(UsageError, match="byte 40 is 0xc3"):
        list(pieces(file))


@needs_bpe
def test_a_tokenizer_file_goes_with_the_tokens(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM + "<|endoftext|>" + POEM)
    path = bpe(tmp_path, POEM)
    meta = tokenize([tmp_path / "poem.txt"], tmp_path / "out", path, 0.1, 10**6)
    Path(path).unlink()
    (tmp_path / "out").rename(tmp_path / "moved")
    source = TokenFile(str(tmp_path / "moved"), length=16)
    assert (
        meta["tokenizer"]["path"] == "tokenizer.json"
        and source.classes == meta["vocabulary"] == source.tokenizer.size
    )
    whole = np.concatenate(source.shards)
    assert (
        source.tokenizer.decode(whole) == POEM + "<|endoftext|>" + POEM
        and (whole == meta["end_of_text"]).sum() == 1
    )
