"""Random windows of a 20 GB file of tokens, against plain copies of memory beside them.

    python benchmarks/token_file.py [--gb 20] [--length 1024] [--batch 64] [--folder DIR]

The file is sparse and in a temporary folder: it takes no room, and its pages are zeros that the kernel makes when they
are first looked at. Prints how long the data set takes to start (with its fingerprint), and medians of interleaved
repeats: bytes of the file's tokens that are sampled a second, of windows that are new (`cold`: the kernel makes each
page first) and of the same windows once more (`warm`), against bytes copied a second between two arrays far larger than
the caches.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np

from jaxdp.data.base import fingerprint
from jaxdp.data.token_file import TokenFile

REPEATS, READS, COPY = 15, 32, 1 << 28  # batches a repeat, bytes of a copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--folder", help="where the file is made; left out, a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = pathlib.Path(folder) / "train.bin"
        with path.open("wb") as file:
            file.truncate(int(options.gb * 1e9) // 2 * 2)
        print(json.dumps(measure(path, options.length, options.batch)))


def measure(path: pathlib.Path, length: int, batch: int) -> dict:
    began = time.perf_counter()
    tokens = TokenFile(str(path), length=length)
    fingerprint(tokens)
    start = time.perf_counter() - began
    rng = np.random.default_rng(0)
    source, target = np.ones(COPY, np.uint8), np.zeros(COPY, np.uint8)
    rates: dict[str, list[float]] = {"copy": [], "cold": [], "warm": []}
    for _ in range(REPEATS):
        indices = rng.integers(0, len(tokens), (READS, batch))
        rates["copy"].append(COPY / seconds(lambda: np.copyto(target, source)))
        for name in ("cold", "warm"):
            rates[name].append(2 * indices.size * length / seconds(lambda indices=indices: read(tokens, indices)))
    median = {name: statistics.median(rate) for name, rate in rates.items()}
    return {
        "file_gb": path.stat().st_size / 1e9,
        "examples": len(tokens),
        "start_s": round(start, 3),
        "gb_per_s": {name: round(rate / 1e9, 2) for name, rate in median.items()},
        "ratio_to_copy": {name: round(median[name] / median["copy"], 3) for name in ("cold", "warm")},
    }


def read(tokens: TokenFile, indices: np.ndarray) -> None:
    for rows in indices:
        tokens.read(rows)


def seconds(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
