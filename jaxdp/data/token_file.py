"""Memory-mapped token files: a data set of any size opens at once and uses memory only for the
pages it reads.
"""

import functools
import glob
import json
import math
import mmap
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdp.data.dataset import Batch, MappedFiles, Part, check_split
from jaxdp.data.split_names import files_by_split, listed
from jaxdp.data.tokenizers import Tokenizer, from_spec
from jaxdp.data.windows import SMALL, Windows, cut
from jaxdp.errors import UsageError, check_one_of, check_sizes, one_line

META, FORMAT = "tokens.json", 1  # what `jaxdp data tokenize` writes beside its shards
KINDS = {"shards": dict, "dtype": str, "end_of_text": int, "vocabulary": int, "tokenizer": dict}
HEADER = 256 * 4  # of llm.c: 256 int32, of which the first are magic, version, number of tokens
MAGIC: dict[int, tuple[int, np.dtype, int]] = {  # magic: (version, dtype, vocabulary)
    20240520: (1, np.dtype("<u2"), 50257),
    20240801: (7, np.dtype("<u4"), 128256),
}
GPT2 = 50257


class Shard(NamedTuple):
    """The tokens of a file: `size` tokens from byte `offset`; vocabulary: that of the format, 0 if
    unknown.
    """

    path: Path
    dtype: np.dtype
    offset: int
    size: int
    vocabulary: int


class TokenFile(Windows):
    """Tokens from binary files: "inputs" and "labels" int32 [length], one token apart; see
    `Windows`.

    path: a file, a folder of .bin files, or a pattern such as `shards/*.bin`. Each file has
    nanoGPT's format (raw little-endian uint16, or uint32 according to dtype or the tokens.json
    beside it) or llm.c's (256 int32, starting with 20240520, 1 and the number of uint16 that
    follow; or 20240801, 7 and uint32; `dev/data/data_common.py`). No window crosses a file
    boundary, and no file is read in full.

    split: if there are files of both kinds, named train... and test... (or else val...), the files of
    that split; if all are val or test files, all of them; otherwise the last `test_fraction` of the tokens
    is the test split. None: all tokens. vocabulary: its size; defaults to that of tokens.json or of
    the format, else GPT-2's 50,257. documents: `separate` adds "segments" and "mask", so that
    nothing is learned across the end of a document. end_of_text: the token that ends a document, by
    default that of tokens.json. `tokenizer` is that of tokens.json, or None.

    Raises UsageError with the name of a file that is missing, torn, of another format, or shorter
    than one example."""

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
        check_one_of("data.args.documents", documents, ("ignore", "separate"))
        files = find(path)
        meta = read_meta(files[0].parent)
        sizes = meta.get("shards", {})
        lost = sorted(sizes.keys() - {file.name for file in files})
        if lost and Path(path).expanduser().is_dir():
            raise UsageError(
                f"data.args.path: {path!r} lacks {lost[0]!r}, which its {META} lists; copy it again"
            )
        chosen, self.part = choose(files, split, test_fraction)
        others = [file.name for file in files if file not in chosen]
        rest = f"; others: {listed(others)}" * bool(others)
        self.inventory = f"files {listed(file.name for file in chosen)}{rest}"
        dtype = dtype or meta.get("dtype", "uint16")
        check_one_of("data.args.dtype", dtype, ("uint16", "uint32"))
        stored = np.dtype(dtype).newbyteorder("<")
        self.files = [open_shard(file, stored, sizes.get(file.name)) for file in chosen]
        ends = meta.get("end_of_text") if end_of_text is None else end_of_text
        if documents == "separate" and ends is None:
            raise UsageError(
                "data.args.end_of_text: documents: separate needs the token that ends a document, e.g. 50256 (GPT-2's)"
            )
        self.tokenizer_spec = meta.get("tokenizer")
        check_sizes("data.args", vocabulary=vocabulary)
        known = max(shard.vocabulary for shard in self.files)
        classes = vocabulary or meta.get("vocabulary") or known or GPT2
        if ends is not None and not 0 <= ends < classes:
            raise UsageError(
                f"data.args.end_of_text: {ends} is not in the vocabulary of {classes:,}; change either"
            )
        names = [*map(str, chosen)]
        stride = None if split == "test" else stride
        ends = ends if documents == "separate" else None
        super().__init__(self._map(), length, stride, classes, names, ends)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, made on first use: training needs neither a tokenizer library nor a
        network.
        """
        return None if self.tokenizer_spec is None else from_spec(self.tokenizer_spec)

    def parts(self) -> dict[str, Part]:
        parts = super().parts()
        if sum(map(len, self.shards)) <= SMALL:
            return parts
        # Only the names: the files are read at random, which is slow in full.
        return {name: part._replace(size=math.inf) for name, part in parts.items()}

    def read(self, indices: np.ndarray) -> Batch:
        self.mapped.check()
        return super().read(indices)

    def _map(self) -> list[np.ndarray]:
        # Smaller sets are read in full and in order.
        random = sum(shard.size for shard in self.files) > SMALL
        shards = [map_tokens(shard, random) for shard in self.files]
        self.mapped = MappedFiles(shard.path for shard in self.files)
        return shards if self.part is None else cut(shards, *self.part)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the maps: another process opens its own."""
        return {**self.__dict__, "shards": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.shards = self._map()


def find(path: str) -> list[Path]:
    """Return the files of a path, a folder or a pattern, sorted by name. Raises UsageError if there
    are none.
    """
    location = Path(path).expanduser()
    if location.is_file():
        return [location]
    matches = location.glob("*.bin") if location.is_dir() else map(Path, glob.glob(str(location)))
    files = sorted(file for file in matches if file.is_file())
    if not files:
        problem = "no .bin file in" if location.is_dir() else "no such file, folder or pattern:"
        raise UsageError(
            f"data.args.path: {problem} {path!r}; `jaxdp data tokenize` makes such files from text"
        )
    return files


def choose(
    files: list[Path], split: str | None, fraction: float
) -> tuple[list[Path], tuple[float, bool] | None]:
    """Return (the files of a split, None if the split is all their tokens, else the arguments of
    `cut`).

    Raises UsageError for a name of two splits.
    """
    if split is None:
        return files, None
    fix = "rename it, or give a pattern of the files to train on, and eval.data"
    groups = files_by_split(files, "data.args.path", fix)
    held_out = groups["test"] or groups["valid"]
    if groups["train"] and held_out:
        return (held_out if split == "test" else groups["train"]), None
    return files, None if held_out == files else (fraction, split == "test")


def read_meta(folder: Path) -> dict[str, Any]:
    """Return what the tokens.json in a folder has of `KINDS`, {} if there is none. The path of a
    tokenizer, relative to the folder, becomes absolute. Raises UsageError."""
    path = folder / META
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        meta = {name: meta[name] for name in KINDS if meta.get(name) is not None}
        for name, value in meta.items():
            if not isinstance(value, KINDS[name]):
                raise ValueError(f"its {name} is {value!r}")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"data.args.path: cannot read {str(path)!r}: {one_line(error)}; write it again"
        ) from None
    spec = meta.get("tokenizer", {})
    if "path" in spec:
        spec["path"] = str((folder / Path(spec["path"]).expanduser()).absolute())
    return meta


def open_shard(path: Path, dtype: np.dtype, stated: int | None = None) -> Shard:
    """Return a file's `Shard`. dtype: of a raw file. stated: the expected number of tokens. Raises
    UsageError.
    """
    try:
        size, head = path.stat().st_size, np.fromfile(path, "<i4", count=3)
    except OSError as error:
        raise UsageError(f"data.args.path: cannot read {str(path)!r}: {error.strerror}") from None
    offset, vocabulary = 0, 0
    if size >= HEADER and int(head[0]) in MAGIC:
        version, dtype, vocabulary = MAGIC[int(head[0])]
        if head[1] != version:
            raise UsageError(
                f"data.args.path: {str(path)!r} is llm.c's version {head[1]}; only {version} is supported"
            )
        offset, stated = HEADER, int(head[2])
    count, torn = divmod(size - offset, dtype.itemsize)
    if torn:
        raise UsageError(
            f"data.args.path: {str(path)!r} has a torn end: {size:,} bytes are no whole number of {dtype.name}; write "
            "it again, or set data.args.dtype"
        )
    if stated not in (None, count):
        raise UsageError(
            f"data.args.path: {str(path)!r} has {count:,} tokens, instead of {stated:,}; write it again"
        )
    return Shard(path, dtype, offset, count, vocabulary)


def map_tokens(shard: Shard, random: bool) -> np.ndarray:
    """Map a shard's tokens into memory. random: disable readahead, of many times a window. Raises
    UsageError.
    """
    if not shard.size:
        return np.zeros(0, shard.dtype)
    try:
        with shard.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UsageError(
            f"data.args.path: cannot map {str(shard.path)!r}: {one_line(error)}"
        ) from None
    if random and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, shard.dtype, shard.size, shard.offset)
