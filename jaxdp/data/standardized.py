"""The transform of the sets of images: move and mirror them in training, then standardize them."""

from typing import Any, ClassVar


class StandardizedImages:
    """A data set of images, whose `transform` standardizes them by `mean` and `std` of pixels in
    [0, 1], of all channels or by channel.

    augment: in training, shift images by up to `shift` pixels, and mirror half of them if `flips`.
    """

    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    shift: ClassVar[int] = 0
    flips: ClassVar[bool] = False
    augment: bool

    def transform(self, batch: dict[str, Any], key: Any, train: bool) -> dict[str, Any]:
        """Return the batch with inputs as float32 of mean 0 and variance 1 over the training set;
        see `Dataset`."""
        from jaxdp.data.augment import standardize

        images = batch["inputs"]
        if train and self.augment:
            images = self.moved(images, key)
        return {**batch, "inputs": standardize(images, self.mean, self.std)}

    def moved(self, images: Any, key: Any) -> Any:
        from jax import random

        from jaxdp.data.augment import random_crop, random_flip

        shifted, mirrored = random.split(key)
        images = random_crop(images, shifted, self.shift)
        return random_flip(images, mirrored) if self.flips else images
