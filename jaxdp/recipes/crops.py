"""Steps that mirror an image, move it, or enlarge a part of it; images are integers [height, width, channel]."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.data.augment import random_crop, random_flip
from jaxdp.errors import UsageError, check_one_of, check_sizes

KEY = "data.args.steps.args"
LEVELS = 128  # of the areas, and of the ratios, of resized crops


def flip(image: jax.Array, key: jax.Array) -> jax.Array:
    """Mirror the image left to right with probability one half."""
    return random_flip(image[None], key)[0]


def crop(image: jax.Array, key: jax.Array, padding: int = 4, mode: str = "constant") -> jax.Array:
    """Shift the image by up to `padding` pixels in both dims. mode: of what comes in from outside, as in
    `jnp.pad`: constant (zeros), reflect or edge.
    """
    check_sizes(KEY, padding=padding)
    check_one_of(f"{KEY}.mode", mode, ("constant", "reflect", "edge"))
    return random_crop(image[None], key, padding, mode)[0]


def resized_crop(
    image: jax.Array,
    key: jax.Array,
    scale: Sequence[float] = (0.08, 1.0),
    ratio: Sequence[float] = (3 / 4, 4 / 3),
) -> jax.Array:
    """Cut out a part of the image, and enlarge it to the size of the image, bilinearly.

    C. Szegedy et al., "Going Deeper with Convolutions", arXiv 1409.4842, section 6. scale: least and
    largest share of the area, uniform; ratio: least and largest width / height, uniform in its
    logarithm; in 128 steps each. As in torchvision, sizes are rounded to pixels, those that do not fit
    are drawn again, and all positions are equally likely. Rounds after each dim, as Pillow does: only
    integers decide, which are the same on every device.
    """
    of_size, of_corner = jax.random.split(key)
    full = np.array(image.shape[:2])
    size = jax.random.choice(of_size, sizes(full, scale, ratio))
    corner = jax.random.randint(of_corner, (2,), 0, full + 1 - size)
    for start, length in zip(corner, size):
        image = stretched(image, start, length).swapaxes(0, 1)
    return image


def sizes(full: np.ndarray, scale: Sequence[float], ratio: Sequence[float]) -> jax.Array:
    """Return the sizes (height, width) to draw from, int32 [size, 2], in an image of a size. Raises
    UsageError.
    """
    fitting = np.zeros(0)
    if len(scale) == len(ratio) == 2 and min(*scale, *ratio) > 0:
        areas = np.linspace(scale[0], scale[1], LEVELS)[:, None] * full.prod()
        ratios = np.geomspace(ratio[0], ratio[1], LEVELS)
        pairs = np.rint([np.sqrt(areas / ratios), np.sqrt(areas * ratios)]).reshape(2, -1).T
        fitting = pairs[((pairs > 0) & (pairs <= full)).all(1)]
    if not len(fitting):
        raise UsageError(
            f"{KEY}: scale {[*scale]} and ratio {[*ratio]} are of no part of {full[0]} x {full[1]} pixels; give "
            "the least and the largest of each, such as [0.5, 1.0] and [0.75, 1.33]"
        )
    return jnp.asarray(fitting, int)


def stretched(x: jax.Array, start: jax.Array, length: jax.Array) -> jax.Array:
    """Return rows [start, start + length) of integers x[row, ...] as all of its rows: interpolated
    between the centers of two rows, and rounded.
    """
    # The unit of places is the distance of two rows / (2 x count).
    count = len(x)
    odd = 2 * jnp.arange(count) + 1
    places = jnp.clip(odd * length, count, 2 * count * length - count) + 2 * count * start
    weights = jnp.maximum(2 * count - jnp.abs(places[:, None] - odd * count), 0)
    # The products and their sums are integers below 2^24, so float32 has them exactly.
    total = jnp.tensordot(weights.astype(float), x.astype(float), 1, precision="highest")
    return (total.astype(int) + count) // (2 * count)
