"""What is summed besides gradients, and what the mask excludes: state of all sizes, infinities, NaN
in padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step, replace_masked
from masked import MASKED, check_excluded, check_state, check_weights_of_0, excluded, pairs, product

# --- model state
# ----------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [53, 5])  # 5: microbatches that have no example
def test_states_of_any_size_are_averaged_by_element(size):
    check_state("bucket", size)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_a_state_of_weight_0_does_not_count(accumulate):
    check_weights_of_0("bucket", accumulate)


# --- what the mask excludes
# -----------------------------------------------------------------------------------------

CASES = [
    ("mlp", product, excluded(np.nan), {}),
    ("resnet", SoftmaxCrossEntropy(0.1, top_k=[2]), excluded(np.nan), {"accumulate": "scan"}),
    ("mlp", pairs, excluded(np.nan), {"devices": 2}),
    ("directions", SoftmaxCrossEntropy(), excluded(0.0, MASKED[:3]), {"accumulate": "scan"}),
    ("directions", product, excluded(1e38, MASKED[:3]), {"backend": "pjit", "devices": 3}),
    (
        "blocks",
        product,
        excluded(-np.inf),
        {"backend": "pjit", "devices": 4, "layout": {"zero": 3}},
    ),
    ("unmasked", SoftmaxCrossEntropy(), excluded(np.nan), {"devices": 4}),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("model, loss, examples, settings", CASES)
def test_contents_that_the_mask_excludes_do_not_count(model, loss, examples, settings):
    check_excluded(model, loss, examples, **settings)


@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_a_step_masks_rows_before_anyone_reads_them(accumulate):
    """Whoever reads the batch: excluded rows beside real ones, and microbatches of nothing else."""
    examples = toys.data(24)

    def whiten(batch, key, train):
        x = batch["inputs"]
        return {**batch, "inputs": (x - x.mean(0)) / (x.std(0) + 1e-6)}

    forward = Forward(toys.MODELS["mlp"](), product, transform=whiten, eval_transform=whiten)
    rule = UpdateRule(optax.sgd(0.1))
    step = make_step(forward, rule, accumulate)
    batch = {k: v.reshape(6, 4, *v.shape[1:]) for k, v in examples.items()}
    batch |= {"heights": np.ones((6, 4), np.float32), "mask": np.ones((6, 4), np.float32)}
    excluded = [(0, 0), (0, 2), (3, 3), *((5, i) for i in range(4))]
    state, results = init_state(forward, rule, 6, {k: v[0] for k, v in batch.items()}), []
    for bad in (np.nan, -np.inf, 0.0):
        for where in excluded:
            batch["mask"][where], batch["inputs"][where], batch["heights"][where] = 0, bad, bad

        def run(f):
            return jax.jit(toys.alone(f, np.arange(6)))(state, batch)

        results.append(jax.tree.map(np.array, (run(step.grads), run(step.evaluate))))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(results[-1]))
        jax.tree.map(np.testing.assert_array_equal, results[0], results[-1])
    assert results[0][0].weight == 17
    for wrong in (-1, np.nan):
        batch["mask"][1, 1] = wrong
        assert np.isnan(run(step.grads).loss) and np.isnan(run(step.evaluate).loss)


def test_tokens_that_a_mask_excludes_may_hold_anything():
    """Finite numbers stay, since a model may read them as context; an example without tokens is
    replaced.
    """
    x = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    x[0, 1, 0], x[2, 0, 1] = np.nan, np.inf
    mask, tokens = np.array([[1.0, 0.0], [0.5, 1.0], [0.0, 0.0]]), np.arange(6).reshape(3, 2)
    new = replace_masked(
        {"inputs": jnp.asarray(x), "ids": jnp.asarray(tokens), "mask": jnp.asarray(mask)}
    )
    first = [[0, 1], [0, 3]]
    np.testing.assert_array_equal(new["inputs"], [first, x[1], first])
    np.testing.assert_array_equal(new["ids"], tokens[[0, 1, 0]])
    x[1, 0, 0] = np.nan  # of a token that counts
    assert np.isnan(
        replace_masked({"inputs": jnp.asarray(x), "mask": jnp.asarray(mask)})["inputs"][1, 0, 0]
    )
