"""zero1(tx) in a loop of one's own is pmean and tx, with a part of the state on each device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import toys
from jaxdp.errors import UsageError
from jaxdp.optim import decay_mask, scale_by_path, zero1
from jaxdp.split import WHOLE, spec, split_dims
from launch import port, processes, ranks

AXIS, N = "batch", 8
MESH = jax.make_mesh((N,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
# by number of updates and bytes: some leaves are split, along the first, middle or last dim, some
# whole
SHAPES = {
    "kernel": (16, 24), "bias": (8,), "conv": (3, 3, 4, 16), "blocks": {"kernel": (8, 16, 4), "scale": (8, 3)},
    "odd": (5, 7), "scalar": (),
}  # fmt: skip
BLOCKS = ["blocks"]


def IS_SHAPE(x):
    return isinstance(x, tuple)


TX = {
    "adamw": lambda: optax.adamw(
        optax.linear_schedule(1e-1, 1e-2, 5), weight_decay=0.1, mask=decay_mask(["bias"])
    ),
    "momentum by path": lambda: optax.chain(
        optax.sgd(0.1, 0.9, nesterov=True), scale_by_path({"^blocks/": 0.5})
    ),
}


def trees(dtype, seed=0):
    """(params, one device's gradients of each of 4 updates [update][device, ...])"""
    rng = np.random.default_rng(seed)

    def make(*lead):
        return jax.tree.map(
            lambda shape: jnp.asarray(rng.normal(size=(*lead, *shape)), dtype),
            SHAPES,
            is_leaf=IS_SHAPE,
        )

    return make(), [make(N) for _ in range(4)]


def reference(tx, params, grads, mean=True):
    """Plain optax on whole parameters and the reduced gradients."""

    def reduce(g):
        return jnp.mean(g, 0) if mean else jnp.sum(g, 0)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(jax.tree.map(reduce, grads), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for g in grads:
        params, state = update(params, state, g)
    return params


def by_pmap(tx, params, grads):
    """-> (params of each device [device, ...], the states [device, ...], the compiled update's
    text)
    """

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), params)
    state = jax.pmap(tx.init, AXIS)(params)
    update = jax.pmap(update, AXIS)
    text = update.lower(params, state, grads[0]).compile().as_text()
    for g in grads:
        params, state = update(params, state, g)
    return params, state, text


@functools.cache
def adamw_by_pmap():
    """(params before, what `by_pmap` gives) in float32, for the tests that look at it from one side
    each.
    """
    params, grads = trees(np.float32)
    return params, by_pmap(zero1(optax.adamw(1e-3), AXIS, blocks=BLOCKS), params, grads)


def by_shard_map(tx, inner, params, grads):
    """State as arrays of the logical shapes, each device with its slices: what `jaxdp.split` tells
    of the whole.
    """
    specs = jax.tree.map(
        lambda dim: spec(dim, AXIS), split_dims(jax.eval_shape(inner.init, params), N, BLOCKS)
    )

    def mapped(f, ins, outs):
        return jax.jit(jax.shard_map(f, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False))

    def update(params, state, grads):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return optax.apply_updates(params, updates), state

    state = mapped(tx.init, P(), specs)(params)
    update = mapped(update, (P(), specs, P(AXIS)), (P(), specs))
    for g in grads:
        params, state = update(params, state, g)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize("name", TX)
def test_pmap_equals_pmean_and_the_whole_optimizer(name):
    with jax.enable_x64(True):
        params, grads = trees(np.float64)
        got, _, _ = by_pmap(zero1(TX[name](), AXIS, blocks=BLOCKS), params, grads)
        want = reference(TX[name](), params, grads)
        assert toys.relative_error(jax.tree.map(lambda x: x[0], got), want)[0] < 1e-12
        jax.tree.map(
            lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), got
        )


@pytest.mark.slow
@pytest.mark.parametrize("mean", [True, False])
def test_shard_map_equals_it_too(mean):
    with jax.enable_x64(True):
        params, grads = trees(np.float64)
        inner = TX["adamw"]()
        got, state = by_shard_map(
            zero1(inner, AXIS, mean=mean, blocks=BLOCKS), inner, params, grads
        )
        want = reference(inner, params, grads, mean)
        assert toys.relative_error(got, want)[0] < 1e-12
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, inner.init(params))
        # The momentum's slices, put together, are the whole one's.
        mu = optax.tree.get(state, "mu")["kernel"]
        assert mu.sharding.spec == P(None, AXIS) and mu.shape == (16, 24)


@pytest.mark.slow
def test_bfloat16_parameters_keep_their_type():
    params, grads = trees(jnp.bfloat16)
    got, _, _ = by_pmap(zero1(optax.sgd(0.1, 0.9), AXIS, blocks=BLOCKS), params, grads)
    want = reference(optax.sgd(0.1, 0.9), params, grads)
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"bfloat16"}
    assert toys.relative_error(jax.tree.map(lambda x: x[0], got), want)[0] < 2e-2


@pytest.mark.slow
def test_each_device_holds_an_eighth_of_the_state():
    params, (_, state, _) = adamw_by_pmap()
    dims = split_dims(params, N, BLOCKS)
    assert (
        dims["blocks"] == {"kernel": 1, "scale": WHOLE} and dims["odd"] == dims["scalar"] == WHOLE
    )
    for moment in (optax.tree.get(state, "mu"), optax.tree.get(state, "nu")):
        own = jax.tree.map(lambda x: x[0].nbytes, moment)
        want = jax.tree.map(lambda x, dim: x.nbytes // (1 if dim == WHOLE else N), params, dims)
        assert own == want
        assert {s.data.nbytes for s in moment["kernel"].addressable_shards} == {16 * 24 * 4 // N}


@pytest.mark.slow
def test_it_sends_a_reduce_scatter_and_an_all_gather():
    """Of every split leaf one each, and an all-reduce of the whole leaves alone."""
    params, (*_, text) = adamw_by_pmap()

    def operands(kind):
        return [
            shape
            for line in re.findall(rf"= (.*) {kind}(?:-start)?\(", text)
            for shape in re.findall(r"f32\[([\d,]*)\]", line)
        ]

    dims = split_dims(params, N, BLOCKS)
    split = [
        (x.shape, dim)
        for x, dim in zip(jax.tree.leaves(params), jax.tree.leaves(dims))
        if dim != WHOLE
    ]

    def elements(shapes):
        return sorted(int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)

    assert elements(operands("reduce-scatter")) == sorted(
        int(np.prod(shape)) // N for shape, _ in split
    )
    assert elements(operands("all-gather")) == sorted(int(np.prod(shape)) for shape, _ in split)
    assert elements(operands("all-reduce")) == [
        1,
        24,
        35,
    ]  # the scalar, the stacked scale, the odd one
    assert not re.search(r" (all-to-all|collective-permute)(-start)?\(", text)


OVER_GLOO = """
import re
import jax, jaxdp, numpy as np, optax
from jaxdp.optim import zero1

context = jaxdp.init()
rng, inner = np.random.default_rng(0), optax.adamw(1e-3)
shapes, n = {"kernel": (16, 24), "conv": (3, 4, 16), "odd": (5, 7)}, jax.local_device_count()
params = {k: rng.normal(size=(1, *shape)).astype(np.float32) for k, shape in shapes.items()}
grads = {k: rng.normal(size=(2 * n, *shape)).astype(np.float32) for k, shape in shapes.items()}
tx = zero1(inner, "batch")
own = {k: g[context.rank * n :][:n] for k, g in grads.items()}
whole = {k: np.repeat(x, n, 0) for k, x in params.items()}
update = jax.pmap(lambda g, p: tx.update(g, tx.init(p), p)[0], "batch")
kinds = re.findall(r" (reduce-scatter|all-reduce)(?:-start)?[(]", update.lower(own, whole).compile().as_text())
first = {k: x[0] for k, x in params.items()}
want, _ = inner.update({k: g.mean(0) for k, g in grads.items()}, inner.init(first), first)
for name, got in update(own, whole).items():
    np.testing.assert_allclose(got, np.broadcast_to(want[name], got.shape), rtol=1e-4, atol=1e-7)
print(jax.device_count(), *{*kinds})
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_over_gloo_an_all_reduce_has_the_same_numbers():
    """Two processes of four devices."""
    both = ranks(2, f"127.0.0.1:{port()}")
    for job in processes(["-c", OVER_GLOO], both, timeout=120, devices=4):
        assert job.returncode == 0, job.output
        assert job.stdout.splitlines()[-1] == "8 all-reduce"  # after lines of Gloo


def test_extra_arguments_and_no_parameters_are_passed():
    seen = []

    def update(updates, state, params=None, *, value=None, **extra):
        seen.append((params, value, extra))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = zero1(inner, AXIS)
    out = jax.pmap(lambda g: tx.update(g, optax.EmptyState(), value=3, other="x")[0], AXIS)(
        jnp.ones((N, 16))
    )
    assert seen == [(None, 3, {"other": "x"})]
    np.testing.assert_array_equal(out, np.ones((N, 16)))


def test_two_axes_are_one():
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params, grads = trees(np.float32)
    tx = zero1(optax.sgd(0.1), ("host", "device"), blocks=BLOCKS)

    def f(params, grads):
        return tx.update(jax.tree.map(lambda g: g[0], grads), tx.init(params), params)[0]

    ins = (P(), P(("host", "device")))
    updates = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=P(), check_vma=False))(
        params, grads[0]
    )
    want = jax.tree.map(lambda g: -0.1 * g.mean(0), grads[0])
    assert toys.relative_error(updates, want)[0] < 1e-5


def test_outside_of_the_axis_it_says_where_to_call_it():
    tx = zero1(optax.adamw(1e-3), AXIS)
    with pytest.raises(
        UsageError, match="no axis 'batch' is mapped here; call init and update inside the function"
    ):
        tx.init({"kernel": jnp.ones((8, 8))})


@pytest.mark.slow
def test_the_example_learns_with_an_eighth_of_state():
    (job,) = processes(["examples/zero1.py"], [{}], devices=N)
    assert job.returncode == 0, job.output
    *_, first, _, _, last, size = job.stdout.splitlines()
    assert float(first.split()[1]) > 2 and float(last.split()[1]) < 0.2, job.output
    split, whole = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:bytes|unsplit)", size)
    )
    assert whole / N <= split < whole / N * 1.01
