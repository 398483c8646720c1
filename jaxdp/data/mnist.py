"""MNIST and Fashion-MNIST, from their published IDX files, gzipped or not."""

import gzip
import math
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxdp.data.dataset import Arrays, check_split, find_file
from jaxdp.data.standardized import StandardizedImages
from jaxdp.errors import UsageError


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read a uint8 array with `dims` dims from an IDX file (big-endian; format:
    http://yann.lecun.com/exdb/mnist).

    Raises UsageError with the name of a file that is not an IDX file, is cut short or too long.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            f"data.args.root: cannot read {path}: {error}; fetch the file again"
        ) from error
    magic, header = bytes([0, 0, 8, dims]), 4 + 4 * dims
    if len(data) < header or data[:4] != magic:
        raise UsageError(
            f"data.args.root: {path} is not an IDX file of bytes with {dims} dims: it starts with "
            f"{data[:4].hex() or 'nothing'}, not {magic.hex()}; fetch the file again"
        )
    shape = np.frombuffer(data, ">u4", dims, offset=4).tolist()
    size = math.prod(shape)
    if len(data) != header + size:
        raise UsageError(
            f"data.args.root: {path} has {len(data) - header:,} bytes of data, its header says {size:,} ({shape}); "
            "fetch the file again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


class MNIST(StandardizedImages, Arrays):
    """60,000 and 10,000 images: "inputs" uint8 [28, 28, 1], "labels" int32 in [0, 10).

    Y. LeCun, C. Cortes, C. Burges, http://yann.lecun.com/exdb/mnist. root: the folder with the four
    files, or the one above it. augment: random shifts by up to two pixels in training. Raises
    UsageError with the name of a file that is missing, damaged, or does not match the other.
    """

    classes = 10
    input_shape = (28, 28, 1)
    title: ClassVar[str] = "MNIST"
    home: ClassVar[str] = "https://storage.googleapis.com/cvdf-datasets/mnist"
    folders: ClassVar[tuple[str, ...]] = ("", "mnist", "MNIST/raw", "raw")
    mean, std = 0.1307, 0.3081  # as published with PyTorch's examples
    shift = 2

    def __init__(self, root: str, split: str = "train", augment: bool = False):
        check_split(split)
        stem = {"train": "train", "test": "t10k"}[split]
        image_file = self._file(root, f"{stem}-images", 3)
        label_file = self._file(root, f"{stem}-labels", 1)
        images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
        if images.shape[1:] != self.input_shape[:2]:
            raise UsageError(
                f"data.args.root: {image_file} has images of {images.shape[1:]}, not (28, 28)"
            )
        if len(images) != len(labels):
            raise UsageError(
                f"data.args.root: {image_file} has {len(images):,} images, {label_file} {len(labels):,} labels; "
                "they are not of one set"
            )
        if labels.size and labels.max() >= self.classes:
            raise UsageError(
                f"data.args.root: {label_file} has label {labels.max()}; labels are 0 to 9"
            )
        super().__init__(inputs=images[..., None], labels=labels.astype(np.int32))
        self.augment = augment

    def _file(self, root: str, stem: str, dims: int) -> Path:
        names = [f"{stem}{mark}idx{dims}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
        title = f"{self.title} file {names[1]!r}"
        return find_file(root, self.folders, names, title, f"the four files from {self.home}")


class FashionMNIST(MNIST):
    """Fashion-MNIST: like `MNIST`, with articles of clothing; augment also mirrors the images.

    H. Xiao, K. Rasul, R. Vollgraf 2017, "Fashion-MNIST",
    https://github.com/zalandoresearch/fashion-mnist."""

    title = "Fashion-MNIST"
    home = "https://github.com/zalandoresearch/fashion-mnist"
    folders = ("", "fashion-mnist", "FashionMNIST/raw", "raw")
    mean, std = 0.2860, 0.3530
    flips = True
