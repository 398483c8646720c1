"""Crops and mirroring: the values of Pillow, the distribution of torchvision's formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdp.errors import UsageError
from jaxdp.recipes.crops import crop, flip, resized_crop, sizes, stretched

IMAGE = np.random.default_rng(0).integers(1, 256, (20, 15, 3), np.uint8)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_part_is_enlarged_as_pillow_does(data):
    Image = pytest.importorskip("PIL.Image")
    length, columns = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 15))
    top, left = data.draw(st.integers(0, 20 - length)), data.draw(st.integers(0, 15 - columns))
    got = stretched(jnp.asarray(IMAGE, jnp.int32), top, length).swapaxes(0, 1)
    got = np.asarray(stretched(got, left, columns).swapaxes(0, 1))
    part = Image.fromarray(IMAGE).crop((left, top, left + columns, top + length))
    wanted = np.asarray(part.resize((15, 20), Image.Resampling.BILINEAR)).astype(int)
    # Pillow begins with the columns, and each dim is rounded.
    assert np.abs(got - wanted).max() <= 1 and abs((got - wanted).mean()) < 0.2


def test_the_image_itself_stays_and_one_pixel_is_all():
    image = jnp.asarray(IMAGE, jnp.int32)
    np.testing.assert_array_equal(
        resized_crop(image, jax.random.key(0), (1, 1), (0.75, 0.75)), IMAGE
    )
    one = resized_crop(image, jax.random.key(0), (1 / 300, 1 / 300), (1, 1))
    assert (one == one[0, 0]).all() and (one[0, 0] == IMAGE).all(-1).any()


def drawn_by_rejection(height, width, scale, ratio, count):
    """torchvision's `RandomResizedCrop.get_params`, without its limit of ten attempts."""
    rng, pairs = np.random.default_rng(0), []
    while len(pairs) < count:
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(*map(math.log, ratio)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            pairs.append((h, w))
    return np.array(pairs)


@pytest.mark.parametrize("height, width", [(32, 32), (24, 40)])
@pytest.mark.parametrize("scale, ratio", [((0.08, 1), (3 / 4, 4 / 3)), ((0.5, 0.6), (1, 2))])
def test_sizes_are_drawn_as_in_torchvision(height, width, scale, ratio):
    table = np.asarray(sizes(np.array([height, width]), scale, ratio))
    wanted = drawn_by_rejection(height, width, scale, ratio, 20_000)
    assert ((table > 0) & (table <= (height, width))).all()
    for one, other in zip(table.T, wanted.T):
        # Cumulative shares: Kolmogorov-Smirnov, at the level of 0.1 %, and the width of a level.
        levels = np.arange(41)
        shares = [np.searchsorted(np.sort(x), levels, "right") / len(x) for x in (one, other)]
        assert np.abs(shares[0] - shares[1]).max() < 1.95 / math.sqrt(20_000) + 2 / 128


def test_all_positions_are_equally_likely():
    """Of a part of 3 x 2 pixels in one of 5 x 4; the first pixel says where it begins."""
    image = jnp.arange(20).reshape(5, 4, 1) * 10
    cut = jax.jit(jax.vmap(lambda key: resized_crop(image, key, (0.3, 0.3), (2 / 3, 2 / 3))))
    begins = np.asarray(cut(jax.random.split(jax.random.key(0), 1800)))[:, 0, 0, 0] // 10
    places, counts = np.unique(begins, return_counts=True)
    assert places.tolist() == [4 * y + x for y in range(3) for x in range(3)]
    assert ((counts - 200) ** 2 / 200).sum() < 26.1  # chi-square of 8 degrees at 0.1 %


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_a_crop_is_a_window_of_the_padded_image(mode):
    padded = np.pad(IMAGE, ((2, 2), (2, 2), (0, 0)), mode)
    windows = {padded[y : y + 20, x : x + 15].tobytes() for y in range(5) for x in range(5)}
    keys = jax.random.split(jax.random.key(1), 300)
    crops = jax.vmap(lambda key: crop(jnp.asarray(IMAGE), key, 2, mode))(keys)
    assert {np.asarray(x).tobytes() for x in crops} == windows


def test_half_of_the_images_are_mirrored():
    keys = jax.random.split(jax.random.key(1), 400)
    flips = np.asarray(jax.vmap(lambda key: flip(jnp.asarray(IMAGE), key))(keys))
    mirrored = (flips == IMAGE[:, ::-1]).all((1, 2, 3))
    assert (mirrored | (flips == IMAGE).all((1, 2, 3))).all() and 150 < mirrored.sum() < 250


@pytest.mark.parametrize(
    "step, args, said",
    [
        (crop, {"padding": 0}, "data.args.steps.args.padding: 0 is too small"),
        (crop, {"mode": "zeros"}, "data.args.steps.args.mode: 'zeros' is not one of 'constant', 'reflect', 'edge'"),
        (resized_crop, {"scale": (0, 1)}, r"data.args.steps.args: scale \[0, 1\] and ratio .* of no part"),
        (resized_crop, {"ratio": (-1, 1)}, r"ratio \[-1, 1\] are of no part of 20 x 15 pixels; give"),
        (resized_crop, {"ratio": (90, 95)}, r"ratio \[90, 95\] are of no part of 20 x 15 pixels; give"),
        (resized_crop, {"scale": (2, 3)}, r"scale \[2, 3\] and ratio .* are of no part"),
        (resized_crop, {"scale": (0.1, float("nan"))}, r"scale \[0.1, nan\] and ratio .* are of no part"),
    ],
)  # fmt: skip
def test_arguments_without_a_crop_are_named(step, args, said):
    with pytest.raises(UsageError, match=said):
        step(jnp.asarray(IMAGE, jnp.int32), jax.random.key(0), **args)
