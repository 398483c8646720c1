"""RandAugment: some of 14 operations, drawn for each image, all of one magnitude."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.ndimage import map_coordinates

from jaxdp.errors import UsageError, check_sizes
from jaxdp.recipes.crops import KEY

LARGEST = 30  # magnitude
MOVES = 5  # operations that move pixels; then there is the identity, and those that change values
GRAY = np.array([19595, 38470, 7471])  # weights of red, green and blue, of 65,536


def rand_augment(
    image: jax.Array, key: jax.Array, number: int = 2, magnitude: int = 9
) -> jax.Array:
    """Apply `number` operations to the image, each drawn from 14 with equal probability.

    E. D. Cubuk et al., "RandAugment", arXiv 1909.13719, with the operations and ranges of torchvision
    and the rounding of Pillow (single pixels of shears, rotations, brightness and autocontrast may
    differ by one): shears and shifts in both dims, rotation, identity, brightness, color,
    contrast, sharpness, posterize, solarize, autocontrast, equalize. magnitude: from 0 to 30, of all
    of them; its sign is random where there is one. Pixels from outside are 0. For values from 0 to 255;
    one channel is gray.
    """
    check_sizes(KEY, number=number)
    if not 0 <= magnitude <= LARGEST:
        raise UsageError(f"{KEY}.magnitude: {magnitude} is not from 0 to {LARGEST}; e.g. 9")
    height, width, _ = image.shape
    places = jnp.asarray(sources(height, width, magnitude))
    for draw in jax.random.randint(key, (number,), 0, 28):
        sign, kind = draw // 14, draw % 14
        source = places[sign, jnp.minimum(kind, MOVES)]
        move = functools.partial(map_coordinates, coordinates=[*source], order=0)
        image = jax.vmap(move, -1, -1)(image)
        results = changed(image, magnitude, (2 * sign - 1) * magnitude)
        image = lax.select_n(jnp.maximum(kind - MOVES, 0), *results)
    return image


def sources(height: int, width: int, magnitude: int) -> np.ndarray:
    """Return where the pixels come from, float32 [sign, move, dim, height, width], in pixels."""
    y, x = np.mgrid[:height, :width] + 0.5
    center, middle = x + y * 1j, (width + height * 1j) / 2
    moves = []
    for amount in (-magnitude, magnitude):
        slope, shift = amount / 100, amount / LARGEST * 150 / 331
        turn = np.exp(np.radians(amount) * 1j)
        moves += [
            center + slope * y,
            center + slope * x * 1j,
            center + int(shift * width),
            center + int(shift * height) * 1j,
            (center - middle) * turn + middle,
            center,
        ]
    places = np.reshape(moves, (2, -1, height, width)) - (0.5 + 0.5j)
    return np.stack([places.imag, places.real], 2).astype(np.float32)


def changed(image: jax.Array, magnitude: int, amount: jax.Array) -> list[jax.Array]:
    """Return the results of all operations that change the values of image [height, width, channel],
    after the image itself. amount: the magnitude with a sign.
    """
    gray = image
    if image.shape[-1] == len(GRAY):
        gray = (image * GRAY).sum(-1, keepdims=True) + (1 << 15) >> 16
    mean = (gray.sum() + gray.size // 2) // gray.size
    # The center of 3 x 3 pixels counts five times; the border stays.
    inner = image[1:-1, 1:-1]
    total = lax.reduce_window(image, 0, lax.add, (3, 3, 1), (1, 1, 1), "VALID") + 4 * inner
    smooth = image.at[1:-1, 1:-1].set((total + 6) // 13)
    results = [image]
    for other in (0, gray, mean, smooth):
        blended = (100 * image + 3 * amount * (image - other)) // 100
        results.append(jnp.clip(blended, 0, 255))
    dropped = round(4 * magnitude / LARGEST)  # bits
    is_bright = image * LARGEST >= 255 * (LARGEST - magnitude)
    low, high = image.min((0, 1)), image.max((0, 1))
    spread = jnp.where(high > low, 255 * (image - low) // jnp.maximum(high - low, 1), image)
    solarized = jnp.where(is_bright, 255 - image, image)
    equalized = jax.vmap(equalize, -1, -1)(image)
    return [*results, image >> dropped << dropped, solarized, spread, equalized]


def equalize(values: jax.Array) -> jax.Array:
    """Return integers values[...] with equally frequent values, as far as that is possible."""
    counts = jnp.bincount(values.reshape(-1), length=256)
    step = (values.size - counts[values.max()]) // 255
    table = (jnp.cumsum(counts) - counts + step // 2) // jnp.maximum(step, 1)
    return jnp.where(step > 0, jnp.minimum(table, 255)[values], values)
