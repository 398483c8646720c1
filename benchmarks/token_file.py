"""Random windows of a 20 GB file of tokens, against plain copies of memory beside them.

    python benchmarks/token_file.py [--gb 20] [--length 1024] [--batch 64] [--windows 4096] [--repeats 15]
        [--folder DIR]
    python benchmarks/token_file.py --file train.bin        # a file on a disk; its pages are dropped before each repeat

The file is sparse and in a temporary folder: it takes no room, and its pages are zeros that the
kernel makes when they are first looked at. Prints how long the data set takes to start (with its
fingerprint), and medians of interleaved repeats, of windows that are new (`cold`), of the same
windows once more (`again`) and a third time (`warm`). Bytes a second are those of the file's tokens
(`read`) and those of the int32 inputs and labels (`delivered`), each also as a ratio to copying as
many bytes, which are in none of the caches, into an array that is there already."""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

from jaxdp.data.dataset import fingerprint
from jaxdp.data.token_file import TokenFile

MEMORY = 1 << 29  # bytes, of which a part is copied


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--windows", type=int, default=4096, help="in a repeat")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--folder", help="where the file is made; left out, a temporary folder")
    parser.add_argument("--file", type=pathlib.Path, help="a raw file of uint16 to read instead")
    options = parser.parse_args(argv)
    if options.file:
        print(json.dumps(measure(options.file, options, drop=True)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = pathlib.Path(folder) / "train.bin"
        with path.open("wb") as file:
            file.truncate(int(options.gb * 1e9) // 2 * 2)
        print(json.dumps(measure(path, options)))


def measure(path: pathlib.Path, options: argparse.Namespace, drop: bool = False) -> dict:
    length, batch = options.length, options.batch
    drop_pages(path, drop)
    began = time.perf_counter()
    tokens = TokenFile(str(path), length=length, vocabulary=50257)
    fingerprint(tokens)
    start = time.perf_counter() - began
    rng = np.random.default_rng(None if drop else 0)
    batches = max(1, options.windows // batch)
    counted = {"read": 2 * batches * batch * length, "delivered": 8 * batches * batch * length}
    source, target = np.ones(MEMORY, np.uint8), np.zeros(max(counted.values()), np.uint8)
    names = ("cold", "again", "warm")
    took: dict[str, list[float]] = {name: [] for name in (*counted, *names)}
    for _ in range(options.repeats):
        indices = rng.integers(0, len(tokens), (batches, batch))
        for kind, size in counted.items():
            at = rng.integers(0, MEMORY - size)
            took[kind].append(
                seconds(lambda size=size, at=at: np.copyto(target[:size], source[at : at + size]))
            )
        drop_pages(path, drop)
        for name in names:
            took[name].append(seconds(lambda indices=indices: read(tokens, indices)))
    median = {name: statistics.median(times) for name, times in took.items()}
    return {
        "file_gb": round(path.stat().st_size / 1e9, 1),
        "length": length,
        "batch": batch,
        "start_s": round(start, 3),
        **{
            kind: {
                "copy_gb_per_s": round(size / median[kind] / 1e9, 1),
                "gb_per_s": {name: round(size / median[name] / 1e9, 3) for name in names},
                "ratio_to_copy": {name: round(median[kind] / median[name], 3) for name in names},
            }
            for kind, size in counted.items()
        },
    }


def drop_pages(path: pathlib.Path, drop: bool) -> None:
    """Those of the file that are in memory and not mapped; a data set that maps them is not to be
    there yet.
    """
    if drop:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(tokens: TokenFile, indices: np.ndarray) -> None:
    for rows in indices:
        tokens.read(rows)


def seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(sys.argv[1:])
