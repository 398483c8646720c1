"""RandAugment's operations against Pillow's, and how they are drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.scipy.ndimage import map_coordinates

from jaxdp.errors import UsageError
from jaxdp.recipes.rand_augment import changed, rand_augment, sources

Image = pytest.importorskip("PIL.Image")
from PIL import ImageEnhance, ImageOps  # noqa: E402  # with Image

CHANGE = jax.jit(changed, static_argnums=1)
# An even contrast, values that are all there, and few of them.
SMOOTH = np.add.outer(np.arange(13) * 11, np.arange(17) * 6)[..., None] + np.array([0, 9, 20])
SPARSE = np.array([7, 200, 90])[np.random.default_rng(0).integers(0, 3, (16, 20, 3))]
NOISE = np.random.default_rng(1).integers(0, 256, (12, 12, 3))
PICTURES = [x.astype(np.uint8) for x in (SMOOTH, SPARSE, NOISE, np.full((5, 6, 3), 40))]


def values(image, magnitude, sign):
    """What Pillow makes of an image, in the order of `changed`."""
    picture, factor = Image.fromarray(image), 1 + sign * 0.03 * magnitude
    kinds = ("Brightness", "Color", "Contrast", "Sharpness")
    return [
        image,
        *(np.asarray(getattr(ImageEnhance, kind)(picture).enhance(factor)) for kind in kinds),
        np.asarray(ImageOps.posterize(picture, 8 - round(magnitude / 7.5))),
        np.asarray(ImageOps.solarize(picture, 255 * (1 - magnitude / 30))),
        np.asarray(ImageOps.autocontrast(picture)),
        np.asarray(ImageOps.equalize(picture)),
    ]


def moves(image, magnitude, sign):
    """What Pillow makes of an image: shears, shifts, and a rotation."""
    picture, amount = Image.fromarray(image), sign * magnitude
    down, right = (int(amount / 30 * 150 / 331 * side) for side in image.shape[:2])
    matrices = [
        (1, amount / 100, 0, 0, 1, 0),
        (1, 0, 0, amount / 100, 1, 0),
        (1, 0, right, 0, 1, 0),
        (1, 0, 0, 0, 1, down),
    ]
    moved = [picture.transform(picture.size, Image.Transform.AFFINE, x) for x in matrices]
    return [np.asarray(x) for x in (*moved, picture.rotate(amount))]


@pytest.mark.parametrize("picture", range(len(PICTURES)))
@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
@pytest.mark.parametrize("sign", [-1, 1])
def test_values_change_as_in_pillow(picture, magnitude, sign):
    image = PICTURES[picture]
    got = CHANGE(jnp.asarray(image, jnp.int32), magnitude, jnp.int32(sign * magnitude))
    wanted = values(image, magnitude, sign)
    assert len(got) == len(wanted) == 9
    for number, (one, other) in enumerate(zip(got, wanted)):
        difference = np.abs(np.asarray(one) - other.astype(int))
        # Pillow multiplies floats, and cuts off what may be one less than the integer.
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02, number


@pytest.mark.parametrize("magnitude", [0, 9, 30])
@pytest.mark.parametrize("sign", [-1, 1])
def test_pixels_move_as_in_pillow(magnitude, sign):
    image = PICTURES[2][:11]
    places = sources(*image.shape[:2], magnitude)[(sign + 1) // 2]
    wanted = moves(image, magnitude, sign)
    assert len(places) == len(wanted) + 1
    for number, (place, other) in enumerate(zip(places, [*wanted, image])):
        got = [map_coordinates(x, list(place), order=0) for x in jnp.moveaxis(image, -1, 0)]
        # Pillow's coordinates have 16 bits after the point.
        assert (np.stack(got, -1) != other).any(-1).mean() < 0.02, number


@pytest.mark.slow
def test_each_draw_is_one_of_28_equally_likely():
    """The operations of a draw are those of Pillow for it, one after the other."""
    image, counts = PICTURES[2][:11], np.zeros(28)
    changes = jax.jit(jax.vmap(rand_augment, (None, 0)))
    keys = jax.random.split(jax.random.key(0), 1120)
    results = np.asarray(changes(jnp.asarray(image, jnp.int32), keys))
    for key, result in zip(keys, results):
        wanted = image
        for draw in jax.random.randint(key, (2,), 0, 28).tolist():
            sign = 2 * (draw // 14) - 1
            wanted = [*moves(wanted, 9, sign), *values(wanted, 9, sign)][draw % 14]
            counts[draw] += 1
        assert (np.abs(result - wanted.astype(int)).max(-1) > 2).mean() < 0.05
    # Chi-square with 27 degrees of freedom, at the level of 0.1 %.
    assert ((counts - 80) ** 2 / 80).sum() < 55.5


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(st.sampled_from([1, 3, 4]), st.integers(0, 2**31), st.integers(0, 30))
def test_values_and_shapes_stay_those_of_images(channels, seed, magnitude):
    image = jax.random.randint(jax.random.key(seed), (6, 9, channels), 0, 256)
    got = np.asarray(rand_augment(image, jax.random.key(seed + 1), 3, magnitude))
    assert got.shape == image.shape and got.min() >= 0 and got.max() <= 255


def test_one_channel_is_gray():
    """An image of three equal channels is changed as one of them."""
    one = jnp.asarray(PICTURES[0][..., :1], jnp.int32)
    for seed in range(10):
        key = jax.random.key(seed)
        three = np.asarray(rand_augment(jnp.repeat(one, 3, -1), key))
        np.testing.assert_array_equal(three[..., :1], rand_augment(one, key))


@pytest.mark.parametrize(
    "args, said",
    [
        ({"number": 0}, "data.args.steps.args.number: 0 is too small"),
        ({"magnitude": 31}, "data.args.steps.args.magnitude: 31 is not from 0 to 30"),
        ({"magnitude": -1}, "data.args.steps.args.magnitude: -1 is not from 0 to 30"),
    ],
)
def test_arguments_out_of_range_are_named(args, said):
    with pytest.raises(UsageError, match=said):
        rand_augment(jnp.zeros((4, 4, 3), jnp.int32), jax.random.key(0), **args)
