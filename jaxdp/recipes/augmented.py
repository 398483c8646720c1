"""A data set whose training images are augmented by a list of steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxdp.errors import UsageError
from jaxdp.recipes.wrapped import DATA, Wrapped
from jaxdp.targets import bind, locate, parameters, require, targets_in

KEY = "data.args.steps"
STEPS = {
    "RandAugment": "jaxdp.recipes.rand_augment.rand_augment",
    "RandomCrop": "jaxdp.recipes.crops.crop",
    "RandomFlip": "jaxdp.recipes.crops.flip",
    "RandomResizedCrop": "jaxdp.recipes.crops.resized_crop",
}


class Augmented(Wrapped):
    """A data set whose training images, "inputs" uint8 [height, width, channel], are changed by `steps`
    on the device.

    data: {target, args}, a target, or data as in `as_dataset`. steps: names or {target, args}, of
    functions (image, key) -> image, int32 of the same shape. They follow one another; the result is
    clipped to 0 to 255, and then comes the set's own transform. split: passed to the target.

    Each image has its own key in each step, of the microbatch and its row, so its numbers do not depend
    on devices or on where a run was resumed. An evaluation has only the set's own transform. Raises
    UsageError.
    """

    def __init__(self, data: Any, steps: Sequence[Any], split: str = "train"):
        super().__init__(data, split)
        self.steps = []
        for target, args in targets_in(KEY, steps, "step", "RandomFlip"):
            make = locate(KEY, target, STEPS)
            if isinstance(make, type):
                raise UsageError(
                    f"{KEY}.target: {target!r} is a class; give a function (image, key) -> image, or set data.transform"
                )
            step = bind(KEY, make, args)
            require(KEY, step, *[*parameters(step)][:2])
            self.steps.append(step)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs: it reads examples, without JAX."""
        return {"dataset": self.dataset}

    def transform(self, batch: Any, key: Any, train: bool) -> Any:
        import jax

        if train:
            images = batch.get("inputs", np.zeros(0))
            if images.dtype != np.uint8 or images.ndim != 4:
                raise UsageError(
                    f"{DATA}: 'inputs' are {images.dtype}{[*images.shape[1:]]} an example, not uint8 [height, width, "
                    "channel]; steps are for images; use data.transform for others"
                )
            key, *of_steps = jax.random.split(key, 1 + len(self.steps))
            changed = images.astype(np.int32)
            for step, of_step in zip(self.steps, of_steps):
                changed = jax.vmap(step)(changed, jax.random.split(of_step, len(images)))
            batch = {**batch, "inputs": changed.clip(0, 255).astype(np.uint8)}
        own = getattr(self.dataset, "transform", None)
        return own(batch, key, train) if own else batch
