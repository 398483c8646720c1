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
    """

    def __init__(self, classes: int, alpha: float = 1.0):
        super().__init__(classes, alpha)

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
        return kept[..., None], kept.mean()
