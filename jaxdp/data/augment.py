"""Image augmentation on the device; random choices depend only on the microbatch's key and the
example's row in it.

The functions run inside the training step, under vmap and jit, on integer or float images. Keys are
threefry: with `jax_threefry_partitionable` (JAX's default) the first draws of a key do not depend
on the number of draws."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def random_crop(
    images: jax.Array, key: jax.Array, padding: int, mode: str = "constant"
) -> jax.Array:
    """Shift each of images[n, h, w, c] by up to `padding` pixels in both dims, filled with zeros, or
    as another mode of `jnp.pad` does; keep shape and dtype.

    The standard augmentation of CIFAR since He et al. 2015, "Deep Residual Learning" (section 4.2).
    """
    corners = jax.random.bits(key, (len(images), 2), jnp.uint32) % np.uint32(2 * padding + 1)
    padded = jnp.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)), mode)

    # One slice per example is fastest on CPU: 0.07 ms for 128 CIFAR images, against 0.1 for an
    # indexed gather, 0.4 for one-hot matrix products and 2.9 for a select over all shifts.
    def crop(image, corner):
        return lax.dynamic_slice(image, (*corner, np.uint32(0)), images.shape[1:])

    return jax.vmap(crop)(padded, corners)


def random_flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirror each of images[n, h, w, c] left to right with probability one half; keep shape and
    dtype.
    """
    mirrored = jax.random.bits(key, (images.shape[0], 1, 1, 1), jnp.uint32) >> 31 == 1
    return jnp.where(mirrored, images[:, :, ::-1], images)


def standardize(
    images: jax.Array,
    mean: float | tuple[float, ...],
    std: float | tuple[float, ...],
    top: float = 255,
) -> jax.Array:
    """Convert images[..., c] with values in [0, top] to float32 `(images / top - mean) / std`, by
    channel.
    """
    # One subtraction, then one product: no compiler can contract them to a fused multiply-add or a
    # reciprocal, so every program that contains this function computes the same bits.
    middle, scale = top * np.asarray(mean), 1 / (top * np.asarray(std))
    return (images.astype(jnp.float32) - middle.astype(np.float32)) * scale.astype(np.float32)
