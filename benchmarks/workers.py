"""JPEG images decoded by worker processes against the reading thread, and what a pipe carries.

    python benchmarks/workers.py [--workers 2] [--images 512] [--batch 32] [--repeats 7]

Makes images of noise, 400 x 300, in a temporary folder. Prints medians of interleaved repeats:
images a second by thread and by workers, each from the second batch on, and their ratio; and GB a
second of ready batches that one worker sends.
"""

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
from PIL import Image

from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.image_folder import ImageFolder
from jaxdp.data.prefetch import prefetch, read_batches
from jaxdp.data.workers import prefetch_in_workers

SKIPPED = 4  # batches that are not timed: the first of each worker, with its start


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder) / "noise", options.images)
        images = ImageFolder(folder, test_fraction=1e-9)
        sent = Arrays(inputs=np.zeros((options.batch, 3, 512, 512), np.float32))
        rates: dict[str, list[float]] = {"thread": [], "workers": [], "pipe": []}
        for _ in range(options.repeats):
            rates["thread"].append(options.batch * batches_per_s(images, options.batch, 0))
            rates["workers"].append(
                options.batch * batches_per_s(images, options.batch, options.workers)
            )
            rates["pipe"].append(
                sent.arrays["inputs"].nbytes * batches_per_s(sent, options.batch, 1)
            )
    median = {name: statistics.median(rate) for name, rate in rates.items()}
    result = {
        "images_per_s": {name: round(median[name]) for name in ("thread", "workers")},
        "ratio": round(median["workers"] / median["thread"], 2),
        "pipe_gb_per_s": round(median["pipe"] / 1e9, 2),
        "workers": options.workers,
    }
    print(json.dumps(result))


def write(folder: pathlib.Path, count: int) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (300, 400, 3), np.uint8)).save(
            folder / f"{number}.jpg", quality=80
        )


def batches_per_s(dataset, batch: int, workers: int) -> float:
    cursor = EpochOrder(len(dataset), batch, 1, seed=0)
    stop = 16 + SKIPPED

    def read(step):
        return read_batches(dataset, cursor, [step], [0])

    reader: Any = contextlib.closing(prefetch(read, range(stop)))
    if workers:
        reader = prefetch_in_workers(dataset, cursor, [0], range(stop), workers)
    with reader as batches:
        for _ in range(SKIPPED):
            next(batches)
        began = time.perf_counter()
        for _ in range(stop - SKIPPED):
            next(batches)
        return (stop - SKIPPED) / (time.perf_counter() - began)


if __name__ == "__main__":
    main(sys.argv[1:])
