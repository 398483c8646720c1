"""Files of tokens are mapped, not read: a set of any size starts at once, and costs the pages that are looked at."""

import functools
import glob
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdp.data.base import check_split
from jaxdp.data.mapped import Mapped
from jaxdp.data.tokenizers import Tokenizer, from_spec
from jaxdp.data.windows import SMALL, Windows, cut
from jaxdp.errors import UsageError, one_line

META, FORMAT = "tokens.json", 1  # what `jaxdp data tokenize` writes beside its shards
HEADER = 256 * 4  # llm.c's: 256 int32, of which the first three are magic, version and number of tokens
MAGIC: dict[int, tuple[int, np.dtype, int]] = {  # to version, dtype, vocabulary
    20240520: (1, np.dtype("<u2"), 50257),
    20240801: (7, np.dtype("<u4"), 128256),
}
WORDS = {"train": ("train",), "test": ("val", "valid", "validation", "test")}
GPT2 = 50257


class Shard(NamedTuple):
    """Where the tokens of a file are; vocabulary: what its format says, 0 where it says nothing."""

    path: Path
    dtype: np.dtype
    offset: int
    size: int
    vocabulary: int


class TokenFile(Windows):
    """Tokens from binary files: "inputs" and "labels" int32 [length], one token apart; see `Windows`.

    path: a file, a folder of .bin files, or a pattern such as `shards/*.bin`. Each file is nanoGPT's (raw
    little-endian uint16, or uint32 as dtype or the tokens.json beside it says) or llm.c's (256 int32, of which the
    first are 20240520, 1 and the number of uint16 that follow; or 20240801, 7 and uint32; `dev/data/data_common.py`).
    No window crosses from one file to the next, and no file is read whole.

    split: where there are files of both kinds, called train... and val... (or test...), those of the one; where all
    are val files, all of them. Else the last `test_fraction` of the tokens is the test split. None: all there is.
    vocabulary: its size; by itself that of tokens.json or of the format, and GPT-2's 50,257 where nothing says.
    documents: `separate` gives also "segments" and "mask", so that nothing is learned across the end of a document,
    end_of_text: the token there, by itself that of tokens.json. `tokenizer` is that of tokens.json, or None.

    Raises UsageError naming the file for one that is missing, torn, of another format, or shorter than one example.
    """

    def __init__(
        self,
        path: str,
        split: str | None = None,
        length: int = 1024,
        stride: int | None = None,
        vocabulary: int | None = None,
        dtype: str | None = None,
        documents: Literal["ignore", "separate"] = "ignore",
        end_of_text: int | None = None,
        test_fraction: float = 0.1,
    ):
        if split is not None:
            check_split(split)
        if documents not in ("ignore", "separate"):
            raise UsageError(f"data.args.documents: {documents!r} is neither 'ignore' nor 'separate'")
        files = find(path)
        meta = read_meta(files[0].parent)
        files, whole = choose(files, split)
        kind = dtype_of(dtype or meta.get("dtype", "uint16"))
        self.files = [open_shard(file, kind, meta.get("shards", {}).get(file.name)) for file in files]
        ends = meta.get("end_of_text") if end_of_text is None else end_of_text
        if documents == "separate" and ends is None:
            raise UsageError(
                "data.args.end_of_text: documents are to be separated, but by which token? e.g. 50256, GPT-2's"
            )
        self.part = None if whole else (test_fraction, split == "test")
        self.tokenizer_spec: dict[str, Any] | None = meta.get("tokenizer")
        if self.tokenizer_spec and "path" in self.tokenizer_spec:  # relative to the metadata
            place = (files[0].parent / Path(self.tokenizer_spec["path"]).expanduser()).absolute()
            self.tokenizer_spec = {**self.tokenizer_spec, "path": str(place)}
        own = vocabulary or meta.get("vocabulary") or max(shard.vocabulary for shard in self.files) or GPT2
        names = [str(file) for file in files]
        stride = None if split == "test" else stride
        super().__init__(self._map(), length, stride, own, names, ends if documents == "separate" else None)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Made when it is asked for: to train, no library of a tokenizer is needed, nor a network."""
        return None if self.tokenizer_spec is None else from_spec(self.tokenizer_spec)

    def _map(self) -> list[np.ndarray]:
        random = sum(shard.size for shard in self.files) > SMALL  # less is looked at whole, and in order
        self._maps = [Mapped(shard.path, random) for shard in self.files]
        shards = [
            mapped.bytes[shard.offset :].view(shard.dtype)[: shard.size]
            for shard, mapped in zip(self.files, self._maps)
        ]
        shards = shards if self.part is None else cut(shards, *self.part)
        self._begins = [tokens.ctypes.data - mapped.address for tokens, mapped in zip(shards, self._maps)]
        return shards

    def _fetch(self, firsts: dict[int, np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """What is not in memory is asked for in all files, before any of it is waited for."""
        length, absent = self.length + 1, {}
        for owner, places in firsts.items():
            size = self.shards[owner].itemsize
            offsets = self._begins[owner] + places * size
            if self._maps[owner].ask(offsets, length * size):
                absent[owner] = offsets
        for owner, offsets in absent.items():
            rows = np.empty((len(offsets), length), self.shards[owner].dtype)
            self._maps[owner].read(offsets, rows)
            yield owner, rows
        yield from super()._fetch({owner: places for owner, places in firsts.items() if owner not in absent})

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps: another process makes its own."""
        return {**super().__getstate__(), "shards": None, "_maps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.part, self.files = state["part"], state["files"]
        shards = self._map()
        super().__setstate__({**state, "shards": shards, "_maps": self._maps})


def find(path: str) -> list[Path]:
    """The files that a path, a folder or a pattern names, by name; UsageError where there is none."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    found = place.glob("*.bin") if place.is_dir() else map(Path, glob.glob(str(place)))
    files = sorted(file for file in found if file.is_file())
    if not files:
        what = "no .bin file in" if place.is_dir() else "no such file, folder or pattern:"
        raise UsageError(f"data.args.path: {what} {path!r}; `jaxdp data tokenize` makes such files from text")
    return files


def choose(files: list[Path], split: str | None) -> tuple[list[Path], bool]:
    """(the files of a split, whether they are all its own); they are not where it is a part of their tokens."""
    if split is None:
        return files, True
    kinds = {name: [file for file in files if _is(file, name)] for name in WORDS}
    if kinds["train"] and kinds["test"]:
        return kinds[split], True
    return files, kinds["test"] == files


def _is(file: Path, kind: str) -> bool:
    """Whether a word of the file's name says so: train.bin, val_000.bin, fineweb_val_000000.bin."""
    return not {*re.split(r"[^a-z]+", file.stem.lower())}.isdisjoint(WORDS[kind])


def read_meta(folder: Path) -> Mapping[str, Any]:
    """The content of the tokens.json in a folder, {} where there is none."""
    path = folder / META
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
    except (OSError, ValueError) as error:
        raise UsageError(f"data.args.path: cannot read {str(path)!r}: {one_line(error)}; write it again") from None
    return found


def dtype_of(name: str) -> np.dtype:
    if name not in ("uint16", "uint32"):
        raise UsageError(f"data.args.dtype: {name!r} is neither 'uint16' nor 'uint32'")
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[name])


def open_shard(path: Path, dtype: np.dtype, stated: int | None = None) -> Shard:
    """What a file holds, by its size and the first bytes. dtype: of a raw one. stated: tokens that it should have."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = np.frombuffer(file.read(12).ljust(12, b"\0"), "<i4")
    except OSError as error:
        raise UsageError(f"data.args.path: cannot read {str(path)!r}: {error.strerror}") from None
    offset, vocabulary = 0, 0
    if size >= HEADER and int(head[0]) in MAGIC:
        version, dtype, vocabulary = MAGIC[int(head[0])]
        if head[1] != version:
            raise UsageError(f"data.args.path: {str(path)!r} is llm.c's version {head[1]}; version {version} is read")
        offset, stated = HEADER, int(head[2])
    count, torn = divmod(size - offset, dtype.itemsize)
    if torn:
        raise UsageError(
            f"data.args.path: {str(path)!r} has a torn end: {size:,} bytes are no whole number of {dtype.name}; write "
            "it again, or set data.args.dtype"
        )
    if stated not in (None, count):
        raise UsageError(
            f"data.args.path: {str(path)!r} holds {count:,} tokens, and should hold {stated:,}; write it again"
        )
    return Shard(path, dtype, offset, count, vocabulary)
