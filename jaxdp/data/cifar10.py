"""CIFAR-10 from its published Python batches."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.dataset import Arrays, check_split, find_file
from jaxdp.data.standardized import StandardizedImages
from jaxdp.errors import UsageError

FILES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
# What a pickle of arrays, lists, dicts, strings and numbers may name, of Python 2 or 3 and NumPy 1
# or 2.
NAMED = {"numpy.ndarray", "numpy.dtype", "_codecs.encode", "numpy._core.numeric._frombuffer"}
NAMED |= {"numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar"}


class CIFAR10(StandardizedImages, Arrays):
    """50,000 and 10,000 images: "inputs" uint8 [32, 32, 3], "labels" int32 in [0, 10).

    A. Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images",
    https://www.cs.toronto.edu/~kriz/cifar.html. root: the folder `cifar-10-batches-py`, or the one
    above it. augment: in training, random crops of the image padded by 4 zeros, and mirroring.
    Raises UsageError with the name of a file that is missing, damaged, or contains anything but
    arrays and numbers; never executes code from a file."""

    classes = 10
    input_shape = (32, 32, 3)
    # of the training pixels in [0, 1], by channel
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    shift = 4
    flips = True

    def __init__(self, root: str, split: str = "train", augment: bool = True):
        check_split(split)
        names = FILES[split]
        folder = find_file(
            root,
            ("", "cifar-10-batches-py"),
            names,
            "CIFAR-10 batches",
            "and unpack cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html",
        ).parent
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise UsageError(
                f"data.args.root: {folder} lacks {', '.join(missing)}; unpack cifar-10-python.tar.gz again"
            )
        planes, labels = zip(*(_read_batch(folder / name) for name in names))
        # Each row of `planes` is the red, green and blue plane of an image.
        images = np.concatenate(planes).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        super().__init__(inputs=np.ascontiguousarray(images), labels=np.concatenate(labels))
        self.augment = augment


class _Unpickler(pickle.Unpickler):
    """Refuses everything that could run code:
    https://docs.python.org/3/library/pickle.html#restricting-globals.
    """

    def find_class(self, module: str, name: str) -> Any:
        current = module.replace("numpy.core.", "numpy._core.")
        if f"{current}.{name}" not in NAMED:
            raise ValueError(
                f"it asks for {module}.{name}; only arrays, lists, dicts, strings and numbers are read"
            )
        return super().find_class(current, name)


def _read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (planes[n, 3072] uint8, labels[n] int32). Raises UsageError."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # an invalid pickle raises many types of errors
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UsageError(
            f"data.args.root: cannot read {path}: {kind}{error}; fetch the file again"
        ) from error
    entries: Any = content if isinstance(content, dict) else {}
    # The keys of Python 2 are bytes.
    planes, labels = (entries.get(k, entries.get(k.encode())) for k in ("data", "labels"))
    images = (
        isinstance(planes, np.ndarray) and planes.dtype == np.uint8 and planes.shape[1:] == (3072,)
    )
    numbers = isinstance(labels, list | tuple | np.ndarray) and all(
        isinstance(x, int | np.integer) and 0 <= x < 10 for x in labels
    )
    if not (images and numbers and len(planes) == len(labels)):
        needed = "'data' must be [n, 3072] uint8, 'labels' a list of n integers from 0 to 9"
        raise UsageError(
            f"data.args.root: {path} is not a CIFAR-10 batch: {needed}; fetch the file again"
        )
    return planes, np.array(labels, np.int32)
