"""CutMix: a part of another image, and its share of the label."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.transforms import Mixup
from jaxdp.errors import UsageError


class CutMix(Mixup):
    """Replace a rectangle in every image by that of the example before it, and its share of the label
    (arXiv 1905.04899).

    The rectangle, one for a microbatch, has the share 1 - a of the area, with a ~ Beta(alpha, alpha),
    and its center anywhere; what is beyond the image is cut off. Labels and padding: as in `Mixup`.
    mixup: the probability that a microbatch is blended as by `Mixup` instead, with the same alpha.
    """

    def __init__(self, classes: int, alpha: float = 1.0, mixup: float = 0.0):
        super().__init__(classes, alpha)
        if not 0 <= mixup <= 1:
            raise UsageError(f"data.transform.args.mixup: {mixup} is not in [0, 1], such as 0.5")
        self.mixup = mixup

    def shares(self, inputs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        if inputs.ndim != 4:
            raise UsageError(
                f"data.transform: CutMix is for images [example, height, width, channel], not {list(inputs.shape)}; "
                "use Mixup"
            )
        of_area, of_center = jax.random.split(key)
        share, _ = super().shares(inputs, of_area)
        height, width, _ = inputs.shape[1:]
        y, x = np.mgrid[:height, :width]
        row, column = jax.random.randint(of_center, (2,), 0, np.array([height, width]))
        half = jnp.sqrt(1 - share) / 2
        inside = (abs(y - row) < half * height) & (abs(x - column) < half * width)
        kept = (~inside).astype(share.dtype)
        if self.mixup:
            blends = jax.random.bernoulli(jax.random.fold_in(key, 2), self.mixup)
            kept = jnp.where(blends, share, kept)
        return kept[..., None], kept.mean()
