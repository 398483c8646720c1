"""Handwritten digits included in the package: a data set that needs no download."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.dataset import Arrays, check_split


class Digits(Arrays):
    """1,797 images of 8x8: "inputs" uint8 [8, 8, 1] with values 0 to 16, "labels" int32 in [0, 10).

    E. Alpaydin and C. Kaynak (1998), "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, doi 10.24432/C50P49, CC BY 4.0; see DIGITS.md. Every fifth example is the
    test split (360), the others are the train split (1,437). augment: random shifts by up to one
    pixel in training."""

    classes = 10
    input_shape = (8, 8, 1)

    def __init__(self, split: str = "train", augment: bool = False):
        check_split(split)
        with np.load(Path(__file__).with_name("digits.npz")) as stored:
            images, labels = stored["images"], stored["labels"]
        chosen = (np.arange(len(labels)) % 5 == 0) == (split == "test")
        super().__init__(inputs=images[chosen][..., None], labels=labels[chosen].astype(np.int32))
        self.augment = augment

    def transform(self, batch: dict[str, Any], key: Any, train: bool) -> dict[str, Any]:
        """Scale pixels to float32 in [0, 1]; see `Dataset`."""
        from jaxdp.data.augment import random_crop, standardize

        images = batch["inputs"]
        if train and self.augment:
            images = random_crop(images, key, padding=1)
        return {**batch, "inputs": standardize(images, mean=0.0, std=1.0, top=16)}
