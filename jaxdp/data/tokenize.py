"""Tokenize text into shards: stream the input, write to a temporary folder, and rename it when
complete.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxdp.data.documents import boundary, pieces
from jaxdp.data.split_names import files_by_split, listed
from jaxdp.data.token_file import FORMAT, META
from jaxdp.data.tokenizers import Char, File, Tokenizer, make_tokenizer
from jaxdp.errors import UsageError

Ranges = list[tuple[Path, int, int]]  # (file, first byte, end)


@contextlib.contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write; its content is on the disk when the context is left."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_shards(
    arrays: Iterable[np.ndarray], folder: Path, kind: str, size: int
) -> dict[str, int]:
    """Write tokens to files KIND_000000.bin, KIND_000001.bin, ... of `size` tokens each; the last
    may have fewer. Return the number of tokens of each file by its name.
    """
    shards, name = dict[str, int](), ""
    with contextlib.ExitStack() as opened:
        for tokens in arrays:
            while len(tokens):
                if shards.get(name, size) == size:
                    opened.close()
                    name = f"{kind}_{len(shards):06}.bin"
                    shards[name] = 0
                    file = opened.enter_context(synced(folder / name))
                part = tokens[: size - shards[name]]
                file.write(part.tobytes())
                shards[name] += len(part)
                tokens = tokens[len(part) :]
    return shards


def tokenize(
    inputs: Sequence[Path], output: Path, tokenizer: str, split: float, shard_tokens: int
) -> dict[str, Any]:
    """Write the folder `output`; return the content of its tokens.json.

    inputs: .txt and .jsonl files; see `documents.pieces`. The last fraction `split` of the bytes of
    each, from the start of a line or document, is for validation; but if names show that some files
    are for it, all of these, and nothing of the others. The tokenizer's end_of_text follows each
    document of a .jsonl file, replaces <|endoftext|> in a text, and separates two files. Tokens are
    little-endian uint16, or uint32 for a larger vocabulary. shard_tokens: tokens per shard.
    tokenizer: as in `make_tokenizer`; char reads the inputs twice, to collect its alphabet, with
    U+0000 as end_of_text if there are several documents."""
    if tokenizer == "words":
        raise UsageError(
            "data.args.tokenizer: words is not for files of tokens; give another, or train on the text with TextFile"
        )
    ranges = divide(inputs, split)
    sizes = {kind: sum(stop - start for _, start, stop in part) for kind, part in ranges.items()}
    check_parts(sizes, inputs, split)
    encoder = Char(alphabet(inputs)) if tokenizer == "char" else make_tokenizer(tokenizer)
    partial = output.parent / f".{output.name}.partial{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        meta = _write(ranges, partial, encoder, shard_tokens)
        check_parts(meta["counts"], inputs, split)
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return meta


def held_out(inputs: Sequence[Path]) -> list[Path]:
    """Return the files that are for validation by their names, if there are others. Raises
    UsageError.
    """
    groups = files_by_split(inputs, "INPUT", "rename it")
    valid, test = groups["valid"], groups["test"]
    if len(valid + test) == len(inputs):
        return []
    if valid and test:
        raise UsageError(
            f"INPUT: {listed(valid + test)} are both for validation and for testing by their names; give those of one "
            "split here, and write the others to another --output"
        )
    return valid or test


def divide(inputs: Sequence[Path], split: float) -> dict[str, Ranges]:
    """Return the ranges of the files for training and for validation; see `tokenize`."""
    chosen, sizes = held_out(inputs), [path.stat().st_size for path in inputs]
    if chosen:
        cuts = [0 if path in chosen else size for path, size in zip(inputs, sizes)]
    else:
        cuts = [boundary(path, split) for path in inputs]
    return {
        "train": [(path, 0, cut) for path, cut in zip(inputs, cuts)],
        "val": [(path, cut, size) for path, cut, size in zip(inputs, cuts, sizes)],
    }


def check_parts(sizes: Mapping[str, int], inputs: Sequence[Path], split: float) -> None:
    """Raise UsageError if there is no text, or, with a `split`, nothing to train on or for
    validation. sizes: of both parts."""
    if not any(sizes.values()):
        names = ", ".join(repr(str(path)) for path in inputs)
        raise UsageError(f"INPUT: {names} have no text; give files that are not empty")
    if not split:
        return
    fix = "a file is divided between two lines or documents; give more text"
    if not sizes["val"]:
        raise UsageError(
            f"--split: {split:g} leaves nothing for validation: {fix}, a larger share, or 0 for none"
        )
    if not sizes["train"]:
        raise UsageError(
            f"--split: {split:g} leaves nothing to train on: {fix}, or a smaller share"
        )


def alphabet(inputs: Sequence[Path]) -> str:
    """Return the characters of all inputs, sorted by code point; with U+0000 if a document ends
    before the last.
    """
    characters: set[str] = set()
    for text, ends in _texts([(path, 0, path.stat().st_size) for path in inputs], Char.reserved):
        characters.update(text, "\0" * ends)
    return "".join(sorted(characters))


def _write(
    ranges: Mapping[str, Ranges], folder: Path, tokenizer: Tokenizer, shard_tokens: int
) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
    counts, shards = dict[str, int](), dict[str, int]()
    for kind, parts in ranges.items():
        arrays = _encoded(parts, tokenizer, dtype)
        written = write_shards(arrays, folder, kind, shard_tokens)
        counts[kind] = sum(written.values())
        shards |= written
    spec = tokenizer.spec()
    if isinstance(tokenizer, File):  # make the folder self-contained
        shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
        spec["path"] = "tokenizer.json"
    meta = {
        "format": FORMAT,
        "tokenizer": spec,
        "vocabulary": tokenizer.size,
        "dtype": dtype.name,
        "end_of_text": tokenizer.end_of_text,
        "counts": counts,
        "shards": shards,
    }
    with synced(folder / META) as file:
        file.write(json.dumps(meta, indent=1).encode() + b"\n")
    return meta


def _encoded(ranges: Ranges, tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[np.ndarray]:
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    for text, ends in _texts(ranges, tokenizer.reserved):
        yield tokenizer.encode(text).astype(dtype, copy=False)
        if ends:
            yield np.array(end, dtype)


def _texts(ranges: Ranges, reserved: str) -> Iterator[tuple[str, bool]]:
    """Yield (text, True if a document ends after it) for ranges of files; a document also ends
    between two files.
    """
    nonempty = [part for part in ranges if part[1] < part[2]]
    for number, (path, start, stop) in enumerate(nonempty):
        ends = True
        for text, ends in pieces(path, start, stop, "INPUT", reserved):
            yield text, ends
        if not ends and number + 1 < len(nonempty):
            yield "", True
