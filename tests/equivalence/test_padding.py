"""Leaves that no dim divides are padded to be split: at least 99 % of the state is, and nothing
else changes.
"""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import toys
from checkpoints import META
from jaxdp import split
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.errors import UsageError
from jaxdp.parallel.layout import Sharding, rule_dims
from jaxdp.parallel.placement import can_pad
from jaxdp.plan import prediction
from jaxdp.split import WHOLE, fit, padded_shape, split_dim, take
from padded import PLACES, ROWS, drawn, put, strategy_of, train
from programs import USUAL, build, size


@pytest.fixture(autouse=True)
def no_leaf_is_small(monkeypatch):
    monkeypatch.setattr(split, "SMALL", 1)


SHAPES = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(SHAPES, st.integers(2, 9), st.booleans())
def test_slices_of_a_padded_leaf_are_its_own_and_zeros(shape, parts, stacked):
    dim, x = (
        split_dim(shape, parts, stacked, True),
        np.random.default_rng(0).normal(size=shape).astype(np.float32),
    )
    divides = any(n % parts == 0 for n in shape[stacked:])
    assert (
        dim == split_dim(shape, parts, stacked)
        if divides
        else split_dim(shape, parts, stacked) == WHOLE
    )
    if dim == WHOLE:
        assert all(
            padded_shape(shape, d, parts)[d] > 2 * shape[d] for d in range(stacked, len(shape))
        )
        return
    assert dim >= stacked and (divides or padded_shape(shape, dim, parts)[dim] <= 2 * shape[dim])
    slices = [take(x, dim, i, parts) for i in range(parts)]
    whole = np.concatenate(slices, dim)
    assert len({piece.shape for piece in slices}) == 1 and whole.shape == padded_shape(
        shape, dim, parts
    )
    np.testing.assert_array_equal(fit(whole, shape), x)
    assert np.abs(whole).sum(dtype=np.float64) == np.abs(x).sum(dtype=np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["xla", "bucket"])
@pytest.mark.parametrize(("backend", "zero", "devices", "buffer"), ROWS[:4])
def test_float_sums_agree_with_and_without_padding(backend, zero, devices, buffer, reduction):
    with jax.enable_x64(True):
        a, b = (
            train(
                backend,
                zero,
                devices,
                buffer,
                pad,
                reduction=reduction,
                dtype="float64",
                optimizer="momentum",
            )[1]
            for pad in (True, False)
        )
    assert (
        toys.relative_error(
            (a.params, a.opt_state, a.extra["ema"]), (b.params, b.opt_state, b.extra["ema"])
        )[0]
        < 1e-12
    )


@pytest.mark.slow
def test_checkpoints_hold_no_padding(tmp_path):
    """Saved in one layout, with padding or without, restored in all others."""
    strategies, want = drawn()
    for i, strategy in enumerate(strategies):
        stored = put(strategy, want)
        exported, checkpoints = strategy.export(stored), Checkpoints(tmp_path / str(i))
        checkpoints.save(1, exported, META, lambda text: None)
        assert checkpoints.wait() is None
        for other in strategies:
            state = other.adopt(checkpoints.restore(1, other.abstract()))
            jax.tree.map(np.testing.assert_array_equal, other.export(state), want)


@pytest.mark.slow
def test_an_average_is_evaluated_without_padding():
    for backend, devices, layout in PLACES[:2]:
        strategy = strategy_of(backend, devices, layout)
        state = strategy.init()
        want = jax.tree.map(np.asarray, strategy.export(state).extra["ema"])
        got = strategy.export(strategy.averaged(state)).params
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "devices"), [(1, 3), (2, 5), (3, 7), (3, 8)])
def test_compiled_programs_split_nearly_everything(zero, devices):
    """The arguments of an update, and what it sends, are those of the formulas, with padding for
    what divides not.
    """
    strategy, step, (state, batch) = build(
        **USUAL | {"zero": zero, "place": f"{devices}", "layers": 2, "pad": True}
    )
    share = strategy.share()
    sharded = {1: 2 / 3, 2: 2 / 3, 3: 1}[zero]
    assert share.split_bytes >= 0.99 * sharded * share.total_bytes
    sizes = prediction.bytes_by_tree(strategy, step, batch)
    whole = size(strategy.shapes.params)
    assert sizes["opt_state"] < 1.03 * 2 * whole / devices
    assert sizes["params"] < 1.03 * whole / (devices if zero == 3 else 1)
    lowered = strategy.compile(step).lowered(state, batch)
    used = lowered.compile().memory_analysis()
    stored = sum(sizes[name] for name in ("params", "opt_state", "model_state", "batch"))
    assert used.argument_size_in_bytes == pytest.approx(stored, rel=0.02)


@pytest.mark.slow
def test_only_elementwise_optimizers_get_padding():
    shapes = strategy_of("pjit", 5, {"zero": 1}).shapes

    def can(tx, parts=5):
        state = shapes.replace(opt_state=jax.eval_shape(tx.init, shapes.params))
        return can_pad(tx, lambda tree: tree, state, Sharding(zero=1, pad=True), parts)

    assert can(optax.adamw(1e-2))
    for name in ("lamb", "adafactor", "muon"):
        assert not can(toys.OPTIMIZERS[name][0]()), name
    assert not can(optax.flatten(optax.adam(1e-2)))
    assert can(optax.flatten(optax.adam(1e-2)), parts=1)  # there is nothing to pad
    leaf = max(jax.tree.leaves(shapes.params), key=lambda x: x.size)
    masked = optax.adamw(
        1e-2, mask=lambda tree: jax.tree.map(lambda x: x.shape == leaf.shape, tree)
    )
    assert padded_shape(leaf.shape, split_dim(leaf.shape, 5, pad=True), 5) != leaf.shape
    assert not can(masked)


SHAPED = {
    "embed": {"table": jax.ShapeDtypeStruct((12, 24), np.float32)},
    "blocks": {"up": jax.ShapeDtypeStruct((3, 24), np.float32)},
}


def test_rules_select_the_dim_that_is_split():
    rules = (("^embed/", (None, "shard")), ("^head/kernel$", (None, None)))
    strategy = strategy_of("pjit", 4, {"zero": 1, "rules": rules})
    assert (
        strategy.state_dims.opt_state[0].mu["embed"]
        == strategy.state_dims.extra["ema"]["embed"]
        == {"embedding": 1}
    )
    assert (
        strategy.param_dims["embed"] == {"embedding": 1}
        and strategy.param_dims["head"]["kernel"] == WHOLE
    )
    ruleless = strategy_of("pjit", 4, {"zero": 1})
    assert (
        ruleless.param_dims["head"]["kernel"] == 0
        and ruleless.param_dims["blocks"] == strategy.param_dims["blocks"]
    )


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (
            {"^embd/": (None, "shard")},
            "'^embd/' matches no parameter; a path is such as 'blocks/up'",
        ),
        (
            {"^embed/": (None, "shard"), "table": (None, None)},
            "'^embed/' and 'table' both match embed/table",
        ),
        ({"embed": ("shard",)}, "'embed' has 1 entries, but embed/table has shape [12, 24]"),
        (
            {"blocks": ("shard", None)},
            "'blocks' shards dim 0 of blocks/up, which counts the blocks",
        ),
    ],
)
def test_rules_that_do_not_fit_are_one_line(rules, words):
    with pytest.raises(UsageError) as error:
        rule_dims(SHAPED, tuple(rules.items()), ("blocks",))
    assert f"parallel.rules: {words}" in str(error.value) and "\n" not in str(error.value)
