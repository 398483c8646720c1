"""CutMix: the pixels, the labels and the masks; and the losses that accept its labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_runs import ended
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.recipes.cutmix import CutMix

CUT = jax.jit(CutMix(classes=10), static_argnums=2)


def constant_images(mask, height=6, width=8):
    """Image i has the value i everywhere, and the label i."""
    numbers = jnp.arange(len(mask))
    images = jnp.broadcast_to(numbers[:, None, None, None], (len(mask), height, width, 2))
    return {"inputs": images.astype(jnp.float32), "labels": numbers, "mask": jnp.asarray(mask)}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 1), min_size=8, max_size=8), st.integers(0, 2**31))
def test_a_real_example_is_mixed_with_the_one_before(mask, seed):
    batch = constant_images(np.float32(mask))
    mixed = CUT(batch, jax.random.key(seed), True)
    images, labels = np.asarray(mixed["inputs"]), np.asarray(mixed["labels"])
    real = np.flatnonzero(mask)
    rectangles = []
    for number in range(8):
        before = real[list(real).index(number) - 1] if mask[number] else number
        own = (images[number] == number).all(-1)
        assert (own | (images[number] == before).all(-1)).all()
        wanted = np.zeros(10)
        wanted[before] += 1 - own.mean()
        wanted[number] += own.mean()
        np.testing.assert_allclose(labels[number], wanted, atol=1e-6)
        if before != number:
            rectangles.append(~own)
    # The same rectangle in all images: rows x columns, both in one piece.
    for cut in rectangles:
        np.testing.assert_array_equal(cut, rectangles[0])
        rows, columns = cut.any(1), cut.any(0)
        np.testing.assert_array_equal(cut, np.outer(rows, columns))
        for line in (rows, columns):
            assert (np.diff(np.flatnonzero(line)) == 1).all()


def test_some_microbatches_are_blended_instead():
    """Each as a whole: with a probability of 0.3, 300 of 1,000, but for 4 standard deviations."""
    mixed = jax.vmap(lambda key, x: CutMix(10, mixup=0.3)(x, key, True), (0, None))
    batch, keys = (
        constant_images(np.float32([1, 1, 0, 1])),
        jax.random.split(jax.random.key(0), 1000),
    )
    result = jax.jit(mixed)(keys, batch)
    images, labels = np.asarray(result["inputs"])[..., 0], np.asarray(result["labels"])
    # Image 3 has pixels of images 3 and 1, or is one of uniform values in between.
    share = (images[:, 3] - 1) / 2
    is_cut = np.isin(share, [0, 1]).all((1, 2))
    np.testing.assert_allclose(labels[:, 3, 3], share.mean((1, 2)), atol=1e-6)
    assert abs((~is_cut).sum() - 300) < 4 * np.sqrt(1000 * 0.3 * 0.7)
    assert (np.ptp(share[~is_cut], (1, 2)) == 0).all() and share[~is_cut].std() > 0.2
    assert (images[:, 2] == 2).all()


@pytest.mark.parametrize("mixup", [-0.1, 1.5, float("nan")])
def test_a_share_of_blends_is_a_probability(mixup):
    with pytest.raises(UsageError, match=r"data.transform.args.mixup: .* is not in \[0, 1\]"):
        CutMix(10, mixup=mixup)


@pytest.mark.slow
def test_the_area_follows_the_formula_of_the_paper():
    """Its mean and its quantiles, for two alphas."""
    rng = np.random.default_rng(0)
    for alpha in (1.0, 0.3):
        shares = jax.vmap(CutMix(2, alpha).shares, (None, 0))
        images, keys = jnp.zeros((1, 20, 30, 3)), jax.random.split(jax.random.key(0), 4000)
        got = 1 - np.asarray(shares(images, keys)[1])
        half = np.sqrt(1 - rng.beta(alpha, alpha, 4000)) / 2
        parts = []
        for side in (20, 30):
            center = rng.integers(0, side, 4000)[:, None]
            parts.append((np.abs(np.arange(side) - center) < (half * side)[:, None]).sum(1))
        wanted = parts[0] * parts[1] / 600
        assert abs(got.mean() - wanted.mean()) < 0.02
        levels = np.linspace(0, 1, 21)
        found = [np.searchsorted(np.sort(x), levels, "right") / 4000 for x in (got, wanted)]
        assert np.abs(found[0] - found[1]).max() < 1.95 * np.sqrt(2 / 4000)


def test_an_evaluation_stays():
    batch = constant_images(np.ones(4))
    assert CutMix(10)(batch, jax.random.key(0), False) is batch


def test_the_cross_entropy_is_that_of_both_labels():
    batch = constant_images(np.float32([1, 1, 0, 1]))
    mixed = CUT(batch, jax.random.key(2), True)
    outputs = jax.random.normal(jax.random.key(3), (4, 10))
    share = float(mixed["labels"][1, 1])
    assert 0 < share < 1
    loss = SoftmaxCrossEntropy()
    own, weight, _ = loss(outputs, batch)
    other, *_ = loss(outputs, {**batch, "labels": jnp.array([3, 0, 2, 1])})
    both, same, _ = loss(outputs, {**batch, "labels": mixed["labels"]})
    np.testing.assert_allclose(both, share * own + (1 - share) * other, rtol=1e-5)
    assert float(weight) == float(same) == 3


@pytest.mark.parametrize(
    "batch, said",
    [
        ({"inputs": jnp.zeros((4, 8))}, r"data.transform: CutMix is for images .*, not \[4, 8\]; use Mixup"),
        ({"inputs": jnp.zeros((4, 5, 6, 3), jnp.uint8)}, "CutMix mixes floats, not uint8; scale the inputs"),
    ],
)  # fmt: skip
def test_inputs_that_are_no_images_are_refused(batch, said):
    batch = {"labels": jnp.zeros(4, int), "mask": jnp.ones(4), **batch}
    with pytest.raises(UsageError, match=said):
        CutMix(10)(batch, jax.random.key(0), True)


MIXED = "{target: CutMix, args: {classes: 10}}"
CONFIG = (
    "model: {target: CNN, args: {widths: [4]}}\ndata: {target: Digits, transform: "
    f"{MIXED}}}\nsteps: 2\nbatch_size: 32\n"
)


@pytest.mark.parametrize(
    "loss, said",
    [
        ("{target: WeightedCrossEntropy}", "loss: WeightedCrossEntropy is for integer labels, not float32"),
        (
            "{target: PerExample, args: {function: optax.softmax_cross_entropy_with_integer_labels}}",
            "loss: ",
        ),
    ],
)  # fmt: skip
def test_a_loss_of_integers_is_refused_in_one_line(tmp_path, loss, said):
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = ["--config", tmp_path / "c.yaml", "--run_dir", tmp_path / "run", "--loss", loss]
    done = ended("train", *words, code=2)
    assert done.stderr.count("\n") == 1 and f"jaxdp: {said}" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "loss",
    [
        "{target: SoftmaxCrossEntropy, args: {label_smoothing: 0.1, top_k: [2]}}",
        "{target: Measured, args: {metrics: [AUC]}}",
    ],
)
def test_the_command_trains_with_it(tmp_path, loss):
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = ["--config", tmp_path / "c.yaml", "--run_dir", tmp_path / "run", "--loss", loss]
    done = ended("train", *words)
    assert "accuracy" in done.stdout.splitlines()[-2]
