"""Augmentation: what it does to each image, and that nothing but the key and the place decides it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.data.augment import random_crop, random_flip, standardize

IMAGES = np.random.default_rng(0).integers(
    1, 256, (12, 9, 7, 3), np.uint8
)  # no zeros: padding shows
AUGMENTATIONS = {"crop": lambda images, key: random_crop(images, key, 3), "flip": random_flip}


@pytest.fixture(params=AUGMENTATIONS)
def augment(request):
    return AUGMENTATIONS[request.param]


def test_a_crop_is_a_window_of_the_padded_image():
    padded = np.pad(IMAGES, ((0, 0), (3, 3), (3, 3), (0, 0)))
    corners = set()
    for seed in range(40):
        for image, got in zip(padded, np.asarray(random_crop(IMAGES, jax.random.key(seed), 3))):
            found = [
                (y, x)
                for y in range(7)
                for x in range(7)
                if np.array_equal(image[y : y + 9, x : x + 7], got)
            ]
            assert len(found) == 1
            corners.update(found)
    assert len(corners) == 49, "some shifts never happen"
    np.testing.assert_array_equal(random_crop(IMAGES, jax.random.key(0), 0), IMAGES)


def test_a_flip_mirrors_about_half():
    mirrored = 0
    for seed in range(40):
        for image, got in zip(IMAGES, np.asarray(random_flip(IMAGES, jax.random.key(seed)))):
            flipped = np.array_equal(got, image[:, ::-1])
            assert flipped != np.array_equal(got, image)
            mirrored += flipped
    assert abs(mirrored - 240) < 5 * np.sqrt(480) / 2


def test_an_example_depends_on_its_key_and_index_alone(augment):
    key = jax.random.key(3)
    whole = np.asarray(augment(IMAGES, key))
    np.testing.assert_array_equal(augment(IMAGES[:5], key), whole[:5])
    others = IMAGES.copy()
    others[::2] = 7
    np.testing.assert_array_equal(np.asarray(augment(others, key))[1::2], whole[1::2])
    assert not np.array_equal(augment(IMAGES, jax.random.key(4)), whole)


@pytest.mark.quick(1)
def test_the_same_alone_under_jit_and_under_vmap(augment):
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = np.stack([IMAGES, IMAGES[::-1], IMAGES])
    alone = np.stack([augment(images, key) for images, key in zip(stacked, keys)])
    np.testing.assert_array_equal(jax.vmap(augment)(stacked, keys), alone)
    np.testing.assert_array_equal(jax.jit(jax.vmap(augment))(stacked, keys), alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uint8", "float32", "bfloat16", "int32"])
def test_the_dtype_stays(augment, kind):
    with jax.numpy_dtype_promotion("strict"):
        got = jax.jit(augment)(jnp.asarray(IMAGES).astype(kind), jax.random.key(0))
    assert got.dtype == kind and got.shape == IMAGES.shape
    np.testing.assert_array_equal(
        got, np.asarray(augment(IMAGES, jax.random.key(0))).astype(got.dtype)
    )


@pytest.mark.parametrize(
    ("mean", "std", "top"),
    [(0.25, 0.5, 255), ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 255), (0.0, 1.0, 16)],
)
def test_standardize_has_the_same_bits_everywhere(mean, std, top):
    want = (IMAGES.astype(np.float64) / top - np.array(mean)) / np.array(std)
    with jax.numpy_dtype_promotion("strict"):
        got = [
            standardize(IMAGES, mean, std, top),
            standardize(jnp.asarray(IMAGES), mean, std, top),
            jax.jit(lambda images: standardize(images, mean, std, top))(IMAGES),
            jax.jit(jax.vmap(lambda images: standardize(images, mean, std, top)))(IMAGES[:, None])[
                :, 0
            ],
        ]
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
    for one in got:
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, got[0])
