"""Data sets of a whole number of batches, so that no opponent has to think about the last one of an
epoch.
"""

import time
from typing import Any

import numpy as np

from jaxdp.data.cifar10 import CIFAR10
from jaxdp.data.dataset import Arrays
from jaxdp.data.digits import Digits


class WholeDigits(Digits):
    """The first 1,408 = 22 x 64 of the digits to train on; none to evaluate on. pixels: (mean,
    deviation, largest).
    """

    pixels = ((0.0,), (1.0,), 16.0)

    def __init__(self, examples: int = 1408):
        super().__init__()
        self.arrays = {name: array[:examples] for name, array in self.arrays.items()}


class SlowDigits(Digits):
    """Digits that take `sleep` seconds a batch to read, so that a run of a small model lasts."""

    def __init__(self, split: str = "train", sleep: float = 0.0):
        super().__init__(split)
        self.sleep = sleep if split == "train" else 0.0

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(self.sleep)
        return super().read(indices)


class Images(CIFAR10):
    """The first 49,920 = 390 x 128 = 97.5 x 512 images of CIFAR-10, or as many random ones."""

    pixels = (CIFAR10.mean, CIFAR10.std, 255.0)

    def __init__(self, root: str = "random", augment: bool = False, examples: int = 49_920):
        if root != "random":
            super().__init__(root, "train", augment)
            self.arrays = {name: array[:examples] for name, array in self.arrays.items()}
        else:
            draw = np.random.default_rng(0)
            images = draw.integers(0, 256, (examples, *self.input_shape), np.uint8)
            Arrays.__init__(self, inputs=images, labels=draw.integers(0, 10, examples, np.int32))
            self.augment = augment


class RandomTokens(Arrays):
    """Windows of random tokens: "inputs" and "labels" int32 [length], one token apart."""

    def __init__(self, length: int = 1024, classes: int = 50257, examples: int = 2048):
        tokens = np.random.default_rng(0).integers(0, classes, (examples, length + 1), np.int32)
        super().__init__(inputs=tokens[:, :-1], labels=tokens[:, 1:])
        self.classes, self.input_shape = classes, (length,)


def pixels(dataset: Any) -> tuple[tuple[float, ...], tuple[float, ...], float] | None:
    """(mean, deviation, largest value) of a set of images, by which its transform scales them."""
    return getattr(dataset, "pixels", None)
