"""Documents packed from token files: each document whole where it fits, each token once, and no
label of another.
"""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.data import PackedTokens
from jaxdp.data import packing as module
from jaxdp.errors import UsageError

END = 0


def write(path, documents, ends=True):
    tokens = (
        np.concatenate([np.append(d, END) for d in documents])
        if ends
        else np.concatenate(documents)
    )
    tokens.astype("<u2").tofile(path)
    return tokens


def slowly(tokens, length):
    """The examples, one document after the other: lists of pieces (tokens, the labels of those that
    have one).
    """
    documents, start = [], 0
    for i, token in enumerate(tokens):
        if token == END or i == len(tokens) - 1:
            documents.append((start, i + 1))
            start = i + 1
    examples, used = [], length
    for start, stop in documents:
        for first in range(start, stop, length):
            last = min(first + length, stop)
            if used + last - first > length:
                examples.append([])
                used = 0
            labels = [
                t
                for i in range(first, last)
                if tokens[i] != END and i + 1 < len(tokens)
                for t in [tokens[i + 1]]
            ]
            examples[-1].append((tokens[first:last], labels))
            used += last - first
    return examples


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_packing_is_that_of_a_loop_over_the_documents(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("tokens")
    length, files = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 30), min_size=1, max_size=12)
    rng, examples = np.random.default_rng(data.draw(st.integers(0, 9))), []
    for i in range(files):
        documents = [rng.integers(1, 50, n) for n in [length + 1, *data.draw(sizes)]]
        tokens = write(
            folder / f"{i}.bin", documents, ends=data.draw(st.booleans()) or not documents
        )
        examples += slowly(tokens, length)
    source = PackedTokens(str(folder), length=length, end_of_text=END, vocabulary=50)
    assert len(source) == len(examples)
    order = rng.permutation(len(examples))
    batch = pickle.loads(pickle.dumps(source)).read(order)
    for row, pieces in enumerate(examples[i] for i in order):
        used = np.concatenate([tokens for tokens, _ in pieces])
        padding = length - len(used)
        assert batch["inputs"][row].tolist() == [*used, *[0] * padding]
        segments = [n for n, (tokens, _) in enumerate(pieces) for _ in tokens]
        assert batch["segments"][row].tolist() == [*segments, *[len(pieces)] * padding]
        masked = batch["mask"][row] > 0
        assert batch["labels"][row][masked].tolist() == [
            label for _, labels in pieces for label in labels
        ]
        assert not masked[len(used) :].any()
    assert {k: v.dtype.name for k, v in batch.items()} == {
        "inputs": "int32", "labels": "int32", "segments": "int32", "mask": "float32",
    }  # fmt: skip


def test_a_large_file_is_searched_in_pieces(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    write(tmp_path / "tokens.bin", [rng.integers(1, 50, n) for n in rng.integers(1, 100, 2000)])
    at_once = PackedTokens(str(tmp_path), length=64, end_of_text=END)
    monkeypatch.setattr(module, "PIECE", 1000)
    in_pieces = PackedTokens(str(tmp_path), length=64, end_of_text=END)
    assert all(np.array_equal(*x) for x in zip(at_once.begins, in_pieces.begins))
    assert len(pickle.dumps(in_pieces)) < 8 * len(in_pieces) + 4000
    train, test = (
        PackedTokens(str(tmp_path), split, length=64, end_of_text=END)
        for split in ("train", "test")
    )
    assert 0.08 < len(test) / (len(train) + len(test)) < 0.12


def test_bad_files_are_named(tmp_path):
    write(tmp_path / "a.bin", [np.arange(1, 30)])
    with pytest.raises(
        UsageError, match=r"data.args.end_of_text: documents: separate needs the token that ends"
    ):
        PackedTokens(str(tmp_path), length=8)
    with pytest.raises(
        UsageError, match=r"data.args.length: 64, but there are 30 tokens; make it smaller"
    ):
        PackedTokens(str(tmp_path), length=64, end_of_text=END)
    with pytest.raises(
        UsageError, match=r"a.bin: token 19 is 20, and the vocabulary has 20; give a larger one"
    ):
        PackedTokens(str(tmp_path), length=8, end_of_text=END, vocabulary=20)
    source = PackedTokens(str(tmp_path), length=8, end_of_text=END)
    with pytest.raises(IndexError):
        source.read(np.array([len(source)]))
