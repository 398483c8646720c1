"""The sets of MedMNIST, from their published .npz files."""

from typing import Any

import numpy as np

from jaxdp.data.npz import Npz
from jaxdp.data.standardized import StandardizedImages
from jaxdp.errors import check_one_of


class MedMNIST(StandardizedImages, Npz):
    """Images of a set of MedMNIST: "inputs" uint8 [size, size, channels], or [size, size, size, 1] of
    a volume, and "labels".

    J. Yang et al. 2023, "MedMNIST v2", https://medmnist.com. path: the .npz file. split: train, val or
    test. labels are int32 [], or of a set with several labels an example (chestmnist), uint8 [label], 0
    or 1: for a loss such as `PerExample`. augment: in training, random shifts by up to two pixels, of
    images, not of volumes. `transform` standardizes by a mean and a deviation of 0.5, as published.
    Raises UsageError.
    """

    mean, std = 0.5, 0.5
    shift = 2

    def __init__(self, path: str, split: str = "train", augment: bool = False):
        check_one_of("data.args.split", split, ("train", "val", "test"))
        names = {"inputs": f"{split}_images", "labels": f"{split}_labels"}
        super().__init__(path, "train", names, 0)
        images, labels = self.arrays["inputs"], self.arrays["labels"]
        if images.ndim == 3 or images.shape[-1] != 3:
            self.arrays["inputs"] = images[..., None]
        self.classes = labels.size // len(labels)
        if self.classes == 1:
            self.arrays["labels"] = labels.reshape(-1).astype(np.int32)
            self.classes = int(labels.max()) + 1
        self.inventory = ", ".join(names.values())
        self.augment, self.input_shape = augment, self.arrays["inputs"].shape[1:]
        self.arguments: Any = path, split, augment  # of another process
