"""Sums of integers: what becomes of a number, its exponent, the lanes of a word, a norm; and an
update done again.
"""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import toys
from covering import first
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.errors import UsageError
from jaxdp.exact.fixed_point import (
    FORMATS,
    LARGEST,
    NEAR,
    NOT_FINITE,
    PER_BIT,
    ZERO,
    fits,
    in_bits,
    in_words,
    limit_of,
    needed_exponents,
    power_of_two,
    quantize,
    remembered,
    restore,
    squares_and_bad,
    uniform,
)  # fmt: skip
from jaxdp.exact.integer_sums import integers
from jaxdp.parallel.placement import data_mesh
from jaxdp.split import DATA, FLAT, WHOLE, spec, split_dims

EXACT, EXACT16, EXACT8 = FORMATS.values()
formats = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
SMALL = functools.partial(settings, max_examples=40, deadline=None)


def exponent_of(x):
    return needed_exponents([x])[0]


def uneven(*shape, decades=4, seed=0, dtype=np.float32):
    """Numbers of many magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-decades, decades, size=shape)).astype(
        dtype
    )


def unit_of(form, summands, exponent, bits=None):
    """What an integer counts."""
    limit, power = limit_of(bits or form.bits, summands)
    return 2.0 ** (int(exponent) + ZERO - power) / limit


# --- numbers and integers
# -------------------------------------------------------------------------------------------


@pytest.mark.slow
@formats
@given(
    values=st.lists(st.floats(-(2.0**80), 2.0**80, width=32), min_size=1, max_size=20),
    summands=st.integers(1, 18),
    spare=st.integers(0, 6),
)
@SMALL()
def test_restored_numbers_are_within_a_quantized_unit(form, values, summands, spare):
    x = jnp.asarray(values, jnp.float32)
    exponent = exponent_of(x) + spare
    key = jax.random.key(len(values)) if form.stochastic else None
    ints = quantize(x, exponent, form, summands, key)
    assert ints.dtype == f"int{form.bits}" and np.abs(
        np.asarray(ints, np.int64)
    ).max() * summands < 2 ** (form.bits - 1)
    back = np.asarray(restore(ints, exponent, summands), np.float64)
    unit, wide = unit_of(form, summands, exponent), np.asarray(x, np.float64)
    within = unit * (1 if form.stochastic else 0.5) + 2e-7 * np.abs(wide)
    assert (np.abs(back - wide) <= within).all()
    assert (back[wide == 0] == 0).all()


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_as_many_numbers_as_were_said_never_overflow(bits):
    for summands in [*range(1, 300), 1000, 4681, 2**15, 2**20]:
        most = (2 ** (bits - 1) - 1) // summands
        if most == 0:
            continue
        mantissa, power = limit_of(bits, summands)
        limit = mantissa * 2**power
        assert limit == int(limit) and 1 <= mantissa < 2 and limit * summands <= 2 ** (bits - 1) - 1
        assert mantissa == 1 if bits >= 32 else limit == most
        assert limit * 2 > most


@formats
@pytest.mark.parametrize("summands", [1, 2, 3, 7, 18])
def test_the_largest_numbers_of_an_exponent_fit(form, summands):
    """Rounded at random too: over a thousand draws."""
    mantissa, power = limit_of(form.bits, summands)
    edge = np.nextafter(np.float32(1), np.float32(0))
    x = jnp.full(1000, edge)
    keys = jax.random.key(0) if form.stochastic else None
    for sign in (1, -1):
        ints = np.asarray(quantize(sign * x, exponent_of(x), form, summands, keys), np.int64)
        limit = mantissa * 2**power
        assert np.abs(ints).max() == (
            limit if form.stochastic else round(limit * edge)
        )  # and no further
        assert summands * np.abs(ints).max() <= 2 ** (form.bits - 1) - 1


@pytest.mark.slow
@given(
    summands=st.integers(1, 16),
    cuts=st.lists(st.integers(0, 16), max_size=4),
    seed=st.integers(0, 99),
)
@SMALL()
def test_a_sum_is_that_of_integers_however_it_is_split(summands, cuts, seed):
    x = uneven(summands, 50, seed=seed)
    exponent = exponent_of(jnp.asarray(x))
    ints = np.asarray(jax.vmap(lambda x: quantize(x, exponent, EXACT, summands))(x))
    want = sum(int(v) * np.array(1, object) for v in ints[:, 0])
    exact = ints.astype(object).sum(0)
    assert exact[0] == want
    edges = sorted({0, summands, *(min(c, summands) for c in cuts)})
    parts = [ints[a:b].sum(0, dtype=np.int32) for a, b in itertools.pairwise(edges)]
    total = functools.reduce(np.add, parts[::-1])
    np.testing.assert_array_equal(total.astype(object), exact)
    got = np.asarray(restore(jnp.asarray(total), exponent, summands), np.float64)
    error = np.abs(got - x.astype(np.float64).sum(0))
    assert (error <= summands * unit_of(EXACT, summands, exponent) / 2 + 2e-7 * np.abs(got)).all()


def over(f, x, devices, out=DATA):
    """f on each device's x[device]."""
    mesh = data_mesh(jax.devices()[:devices])

    def local(x):
        return f(x[0])[None]

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P(DATA), out_specs=P(out), check_vma=False)
    )(x)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", ["int32", "int16", "int8"])
@pytest.mark.parametrize("safe", [False, True])
def test_reductions_add_up_integers_of_every_width(dtype, safe):
    info = np.iinfo(dtype)
    reduction = integers("exact8", safe=safe)
    for devices in (1, 3, 8):
        x = np.random.default_rng(0).integers(
            info.min // devices + 1, info.max // devices, (devices, 24, 5)
        )
        x[0, 0], x[:, 1] = -1, info.max // devices
        x = x.astype(dtype)
        got = over(lambda x: reduction.reduce([x, x[0, :3]], DATA)[0], x, devices)
        np.testing.assert_array_equal(got, np.broadcast_to(x.sum(0), x.shape))
        got = over(lambda x: reduction.scatter([x], [0], FLAT)[0], x, devices)
        np.testing.assert_array_equal(np.asarray(got).reshape(24, 5), x.sum(0))
        assert got.dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@given(size=st.integers(1, 9), terms=st.integers(1, 5), data=st.data())
@SMALL()
def test_lanes_of_words_are_the_inverse_and_add_up(dtype, size, terms, data):
    info = np.iinfo(dtype)
    element = st.one_of(
        st.integers(info.min // terms + 1, info.max // terms), st.just(0), st.just(-1)
    )
    rows = st.lists(st.lists(element, min_size=size, max_size=size), min_size=terms, max_size=terms)
    x = np.array(data.draw(rows), dtype)
    np.testing.assert_array_equal(in_words(lambda words: words, x), x)

    def add(words):
        assert words.dtype == ("int32" if dtype == "int32" else "uint32")
        assert words.shape == (terms, -(-size * info.bits // 32))
        return words.sum(0, dtype=words.dtype)

    got = in_words(add, jnp.asarray(x))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, x.sum(0, dtype=np.int64))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_lanes_hold_the_smallest_beside_the_largest(dtype):
    info = np.iinfo(dtype)
    edges = (info.min, info.min + 1, -1, 0, 1, info.max)
    x = np.array(list(itertools.product(edges, repeat=4)), dtype)
    np.testing.assert_array_equal(in_words(lambda words: words, x), x)
    both = jnp.stack([x, ~x])
    got = in_words(lambda words: words.sum(0, dtype=words.dtype), both)
    np.testing.assert_array_equal(got, np.full_like(x, -1))


def test_lanes_of_float64_are_words_of_64_bits():
    with jax.enable_x64(True):
        x = jnp.asarray([-(2**62), 2**62 - 1, -1, 0], jnp.int64)

        def add(words):
            assert words.dtype == jnp.int64
            return words.sum(0)

        np.testing.assert_array_equal(in_words(add, jnp.stack([x, -x])), 0)
        np.testing.assert_array_equal(in_words(lambda words: words, x), x)


@pytest.mark.slow
def test_random_rounding_is_unbiased_and_keyed():
    x = jnp.asarray(np.linspace(-0.99, 0.99, 41), jnp.float32)

    def rounded(key):
        return quantize(x, exponent_of(jnp.float32(0.9)), EXACT8, 8, key)

    keys = jax.random.split(jax.random.key(0), 4000)
    draws = np.asarray(jax.jit(jax.vmap(rounded))(keys), np.float64)
    scaled = np.asarray(x, np.float64) * 15  # 127 // 8
    assert set(np.unique(draws - np.floor(scaled))) <= {0.0, 1.0}
    spread = np.sqrt(0.25 / len(keys)) + 2**-9  # eight random bits
    np.testing.assert_allclose(draws.mean(0), scaled, rtol=0, atol=5 * spread)
    np.testing.assert_array_equal(rounded(keys[3]), jax.jit(rounded)(keys[3]))
    assert (draws[0] != draws[1]).any()


@pytest.mark.slow
def test_random_numbers_are_all_256_between_0_and_1():
    for shape in ((), (1,), (7, 3), (100, 100)):
        x = np.asarray(uniform(jax.random.key(1), jnp.zeros(shape)))
        assert x.shape == shape and (x > 0).all() and (x < 1).all()
    assert len(np.unique(x)) == 256 and abs(x.mean() - 0.5) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_are_exact(dtype):
    exponents = np.arange(-126, 128)
    with jax.enable_x64(dtype == "float64"):
        got = power_of_two(jnp.asarray(exponents, jnp.int32), jnp.dtype(dtype))
        assert got.dtype == dtype
    np.testing.assert_array_equal(got, np.ldexp(np.ones((), dtype), exponents))


# --- exponents
# ------------------------------------------------------------------------------------------------------

KNOWN = [  # (largest, exponent from ZERO)
    ([0.0, -0.0], 0),
    ([1e-40], 0),  # subnormal
    ([2.0**ZERO], 1),
    ([2.0 ** (ZERO - 1), 0.0], 0),
    ([0.5, -0.7], -ZERO),
    ([-1.0, 0.3], 1 - ZERO),
    ([0.99999994], -ZERO),
    ([1e30], 100 - ZERO),
    ([2.0**LARGEST], NOT_FINITE),
    ([1.0, np.inf], NOT_FINITE),
    ([-np.inf], NOT_FINITE),
    ([np.nan, 3.0], NOT_FINITE),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("values", "exponent"), KNOWN, ids=str)
def test_the_exponent_is_the_least_power_above_all(values, exponent, dtype):
    if dtype == "bfloat16" and exponent == -ZERO:
        values = [0.5, -0.7]
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(values, dtype)
        assert x.dtype == dtype
        for f in (exponent_of, jax.jit(exponent_of)):
            assert int(f(x)) == exponent


@given(value=st.floats(2.0**-80, 2.0**90, width=32))
@SMALL(max_examples=200)
def test_an_exponent_is_just_above_the_largest(value):
    exponent = int(exponent_of(jnp.asarray([0.0, -value, value / 3], jnp.float32))) + ZERO
    assert 2.0 ** (exponent - 1) <= value < 2.0**exponent


@formats
def test_an_exponent_rises_at_once_and_falls_slowly(form):
    exponents, headroom = jnp.zeros(3, jnp.int32), form.headroom
    needed = jnp.asarray([90, 0, NOT_FINITE], jnp.int32)
    exponents = remembered(exponents, needed, headroom)
    np.testing.assert_array_equal(in_bits(exponents), [90 + headroom, headroom, 0])
    low = jnp.asarray([90 - NEAR, 0, NOT_FINITE], jnp.int32)
    for update in range(1, NEAR * PER_BIT + 1):
        exponents = remembered(exponents, low, headroom)
        assert int(exponents[0]) == (90 + headroom) * PER_BIT - update
        np.testing.assert_array_equal(exponents[1:], [headroom * PER_BIT, 0])
    assert int(in_bits(exponents)[0]) == 90 - NEAR + headroom
    exponents = remembered(exponents, jnp.full(3, NOT_FINITE), headroom)
    assert int(exponents[0]) == (90 - NEAR + headroom) * PER_BIT  # what is not finite says nothing
    np.testing.assert_array_equal(
        in_bits(remembered(exponents, jnp.full(3, 95), headroom)), np.full(3, 95 + headroom)
    )


@formats
def test_far_exponents_halve_but_slowly_at_gradient_0(form):
    exponents = jnp.full(2, 90 * PER_BIT)
    for update in range(1, 12):
        exponents = remembered(exponents, jnp.asarray([30, 0], jnp.int32), form.headroom)
        assert int(exponents[1]) == 90 * PER_BIT - update
    assert NEAR - 1 <= int(in_bits(exponents)[0]) - 30 - form.headroom <= NEAR


@formats
def test_an_exponent_that_loses_most_bits_does_not_fit(form):
    most = max(2 * NEAR, limit_of(form.bits, 8)[1] // 2) + form.headroom
    needed = jnp.asarray([40, 41, 40 - most, 39 - most, 0, NOT_FINITE], jnp.int32)
    got = fits(jnp.full(6, 40 * PER_BIT), needed, form, 8)
    np.testing.assert_array_equal(got, [True, False, True, False, True, True])


# --- norms
# ----------------------------------------------------------------------------------------------------------

TREE = {
    "kernel": (16, 24), "odd": (5, 7), "scalar": (), "bias": (8,), "one": (1,), "prime": (7, 5), "large": (300, 280),
    "blocks": {"kernel": (3, 24, 4), "bias": (3, 8)},
}  # fmt: skip


def filled(make):
    shapes, treedef = jax.tree.flatten(TREE, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(treedef, [make(i, shape) for i, shape in enumerate(shapes)])


def measured(tree, devices, split):
    mesh = data_mesh(jax.devices()[:devices])
    dims = split_dims(tree, devices if split else 1, ("blocks",))

    def f(tree, step):
        return squares_and_bad(tree, dims if split else None, DATA, step)

    specs = jax.tree.map(lambda d: spec(d, DATA), dims)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)
    return np.asarray(jax.jit(mapped)(tree, 0)), sum(d != WHOLE for d in jax.tree.leaves(dims))


def test_more_squares_than_digits_can_sum_are_refused():
    def measure(size):
        return jax.eval_shape(
            lambda tree: squares_and_bad(tree, None, DATA, jnp.int32(0)),
            {"table": jax.ShapeDtypeStruct((65_536, size), "float32")},
        )

    assert measure(65_536).shape == (2,)
    with pytest.raises(UsageError, match="at most 4,294,967,296 parameters; use xla or bucket"):
        measure(65_537)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decades", "counts"),
    [(2, (2, 3)), pytest.param(9, range(2, 9), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_a_norm_has_the_same_bits_on_any_split(decades, counts):
    tree = filled(lambda i, shape: jnp.asarray(uneven(*shape, seed=i, decades=decades)))
    want, _ = measured(tree, 1, False)
    wide = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    np.testing.assert_allclose(want[0], sum((x * x).sum() for x in wide), rtol=1e-6)
    assert want[1] == 0
    for devices, split in [(3, False), *itertools.product(counts, [True])]:
        got, number = measured(tree, devices, split)
        assert got.tobytes() == want.tobytes(), (devices, split)
        assert (number > 0) == split


@pytest.mark.slow
def test_a_norm_of_float64_keeps_its_precision():
    with jax.enable_x64(True):
        tree = filled(lambda i, shape: jnp.asarray(uneven(*shape, seed=i, dtype=np.float64)))
        want, _ = measured(tree, 1, False)
        assert want.dtype == np.float64
        np.testing.assert_allclose(
            want[0], sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(tree)), rtol=1e-13
        )
        assert measured(tree, 4, True)[0].tobytes() == want.tobytes()


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-12, 1e12])
def test_a_norm_of_any_size_is_near_float64s(scale):
    tree = {"x": jnp.asarray(scale * uneven(1000, decades=1))}
    (squares, bad), _ = measured(tree, 2, True)
    wide = np.asarray(tree["x"], np.float64)
    np.testing.assert_allclose(
        np.sqrt(np.float64(squares)), np.linalg.norm(wide), rtol=1e-6, atol=1e-22
    )
    assert bad == 0


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False])
def test_a_norm_counts_what_is_not_finite(split):
    tree = filled(lambda i, shape: jnp.asarray(uneven(*shape, seed=i)))
    tree["kernel"] = tree["kernel"].at[3, 5].set(np.nan).at[0, 0].set(-np.inf)
    tree["odd"] = tree["odd"].at[2, 2].set(np.inf)
    tree["bias"] = tree["bias"].at[0].set(2.0**LARGEST)
    (squares, bad), _ = measured(tree, 4, split)
    assert np.isnan(squares) and bad == 4


# --- updates
# --------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "pmap-3": {"devices": 3},
    "pjit-3-8": {"backend": "pjit", "devices": 8, "layout": {"zero": 3}},
    "pjit-2-4/2": {
        "backend": "pjit",
        "devices": 4,
        "layout": {"zero": 2, "shard_size": 2, "gradient_buffer": "replicated"},
    },
}


def linear(scale=1.0):
    """Whose gradient is that of `scale` x the data: no rounding but of what the sums are of."""

    def init(key, batch):
        return {"w": jnp.zeros((32, 8)), "b": jnp.zeros(8)}, {}

    def apply(params, state, batch, key, train):
        x = batch["inputs"].reshape(len(batch["inputs"]), -1)
        return (x @ params["w"] + params["b"])[:, : toys.CLASSES], state

    return types.SimpleNamespace(init=init, apply=apply, blocks=())


class Products:
    """The sum of outputs x an example's own factor."""

    def __call__(self, outputs, batch):
        each = (outputs * batch["factor"][:, None]).sum(-1) * batch["mask"]
        return each.sum(), batch["mask"].sum(), {}


def factors(*sizes):
    """Batches of 16 examples, each with gradients of its size."""
    examples = toys.data(16 * len(sizes))
    examples["inputs"] = np.sign(examples["inputs"]) * np.float32(0.5)
    return examples | {"factor": np.repeat(np.asarray(sizes, np.float32), 16)}


@functools.cache
def trained(layout, sizes, reduction="exact", steps=None):
    more = {"devices": 1} if layout is None else LAYOUTS[layout]
    return toys.train(
        as_model(linear()), factors(*sizes), loss=Products(), batch_size=16, reduction=reduction,
        optimizer=(optax.sgd(1e-3), None), steps=steps or len(sizes), bucket_mb=25.0, **more,
    )  # fmt: skip


def as_model(plain):
    from jaxdp.models.base import Model

    return Model(plain.init, plain.apply)


SIZES = (1.0, 1.0, 1e6, 1.0, 1e6, 1e6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", first(1, list(LAYOUTS)))
def test_an_unfit_update_is_recomputed_on_all_devices(layout):
    _, want, one, *_ = trained(None, SIZES)
    _, got, metrics, *_ = trained(layout, SIZES)
    assert [int(m["recomputed"]) for m in metrics] == [1, 0, 1, 1, 1, 0]  # too small, too large
    assert [int(m["recomputed"]) for m in one] == [1, 0, 1, 1, 1, 0]
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    np.testing.assert_array_equal(got.extra["exponents"], want.extra["exponents"])
    assert got.extra["exponents"].shape == (2,) and all(m["skipped"] == 0 for m in metrics)


@pytest.mark.slow
def test_a_recomputed_update_equals_one_that_fits():
    """The second update of the same size, from the same parameters: only what is remembered
    differs.
    """
    strategy, step, batch = toys.build(
        as_model(linear()), factors(1e6), loss=Products(), batch_size=16, reduction="exact",
        optimizer=(optax.sgd(0.0), None), devices=2,
    )  # fmt: skip
    program, state = strategy.compile(step), strategy.init()
    norms, again = [], []
    for _ in range(3):
        state, metrics = program.update(state, batch(0))
        norms.append(float(metrics["grad_norm"]))
        again.append(int(metrics["recomputed"]))
    assert again == [1, 0, 0] and len(set(norms)) == 1
    x = factors(1e6)["inputs"].reshape(16, -1).astype(np.float64)
    gradient = np.concatenate([1e6 * x.mean(0), [1e6]])
    np.testing.assert_allclose(
        norms[0], np.linalg.norm(np.repeat(gradient, toys.CLASSES)), rtol=1e-6
    )


@pytest.mark.slow
def test_updates_after_a_large_gradient_equal_bucket():
    """An exponent that stays too large would round their gradients to zero, for hundreds of
    updates.
    """
    losses = {}
    for reduction in ("bucket", "exact", "exact16"):
        _, _, metrics, *_ = toys.train(
            as_model(linear()), factors(1.0, 1e9, *[1.0] * 10), loss=Products(), batch_size=16, reduction=reduction,
            optimizer=(optax.adam(1e-2, b2=0.9), 1.0), steps=12, devices=1,
        )  # fmt: skip
        losses[reduction] = np.array([float(m["loss"]) for m in metrics[2:]])
    np.testing.assert_allclose(losses["exact"], losses["bucket"], rtol=1e-5)
    np.testing.assert_allclose(losses["exact16"], losses["bucket"], rtol=2e-2)


FEW = [("pjit-3-8", np.inf, "exact8"), ("pmap-3", np.nan, "exact"), ("pjit-2-4/2", 1e38, "exact16")]
MORE = [
    row for row in itertools.product(LAYOUTS, (np.nan, np.inf, 1e38), FORMATS) if row not in FEW
]
EVERY = [pytest.param(*row, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for row in MORE]


@pytest.mark.parametrize(
    ("layout", "bad", "reduction"),
    [FEW[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in FEW[1:]), *EVERY],
)
def test_a_nonfinite_update_leaves_the_exponents(layout, bad, reduction):
    steps = 3
    examples = factors(1.0, 1.0, 1.0)
    examples["factor"][16 + 7] = bad  # in one microbatch
    strategy, step, batch = toys.build(
        as_model(linear()), examples, loss=Products(), batch_size=16, reduction=reduction,
        optimizer=(optax.sgd(1e-3), None), bucket_mb=25.0, **LAYOUTS[layout],
    )  # fmt: skip
    program, state = strategy.compile(step), strategy.init()
    metrics, exponents, params = [], [], []
    for i in range(steps):
        state, m = program.update(state, batch(i))
        metrics.append(jax.device_get(m))
        exported = strategy.export(state)
        exponents.append(np.array(exported.extra["exponents"]))
        params.append(jax.tree.map(np.array, exported.params))
    elements = toys.CLASSES * (32 + 1)  # the gradients of one microbatch that are not zero
    assert [int(m["skipped"]) for m in metrics] == [0, 1, 0] and int(
        metrics[-1]["skipped_updates"]
    ) == 1
    assert [int(m["nonfinite_grads"]) for m in metrics][::2] == [0, 0]
    assert int(metrics[1]["nonfinite_grads"]) >= elements, metrics[1]
    jax.tree.map(np.testing.assert_array_equal, params[0], params[1])
    np.testing.assert_array_equal(exponents[0], exponents[1])
    assert [int(m["recomputed"]) for m in metrics] == [1, 0, 0]
    assert np.isfinite(jax.tree.leaves(params[2])[0]).all()


# --- checkpoints
# ----------------------------------------------------------------------------------------------------


def saved(tmp_path, state, step):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(step, state, {}, lambda text: None)
    assert checkpoints.wait() is None
    return checkpoints


def restored(checkpoints, step, strategy):
    return strategy.adopt(checkpoints.restore(step, strategy.abstract()))


@pytest.fixture(scope="module")
def strategies():
    def build(reduction, **more):
        return toys.build(
            as_model(linear()), factors(1.0, 1.0, 1.0), loss=Products(), batch_size=16, reduction=reduction,
            optimizer=(optax.sgd(1e-3), None), **more,
        )  # fmt: skip

    return {
        "bucket": build("bucket", devices=2),
        "exact": build("exact", devices=3),
        "exact8": build("exact8", devices=4, backend="pjit", layout={"zero": 3}),
    }


def updates(built, state, numbers):
    """(the state after these, [recomputed])"""
    strategy, step, batch = built
    program, again = strategy.compile(step), []
    for i in numbers:
        state, metrics = program.update(state, batch(i))
        again.append(int(metrics.get("recomputed", -1)))
    return state, again


@pytest.mark.slow
@pytest.mark.parametrize("after", first(1, ["exact8", "exact"]))
def test_without_exponents_an_update_is_recomputed(tmp_path, strategies, after):
    strategy, *_ = strategies["bucket"]
    state, _ = updates(strategies["bucket"], strategy.init(), [0])
    checkpoints = saved(tmp_path, strategy.export(state), 1)
    state = restored(checkpoints, 1, strategies[after][0])
    state, again = updates(strategies[after], state, [1, 2])
    assert again == [1, 0] and int(state.step if state.step.ndim == 0 else state.step[0]) == 3


@pytest.mark.slow
def test_exponents_are_restored_where_they_are_needed(tmp_path, strategies):
    strategy, *_ = strategies["exact"]
    state, again = updates(strategies["exact"], strategy.init(), [0])
    exported = strategy.export(state)
    params = jax.tree.map(np.array, exported.params)
    exponents = np.array(exported.extra["exponents"])
    assert again == [1] and (exponents > 0).all()
    checkpoints = saved(tmp_path, exported, 1)
    state = restored(checkpoints, 1, strategies["exact8"][0])
    np.testing.assert_array_equal(
        strategies["exact8"][0].export(state).extra["exponents"], exponents
    )
    _, again = updates(strategies["exact8"], state, [1])
    assert again == [0]
    state = restored(checkpoints, 1, strategies["bucket"][0])
    assert "exponents" not in state.extra
    jax.tree.map(
        np.testing.assert_array_equal, strategies["bucket"][0].export(state).params, params
    )
    state, _ = updates(strategies["bucket"], state, [1])
    checkpoints = saved(tmp_path, strategies["bucket"][0].export(state), 2)
    _, again = updates(strategies["exact"], restored(checkpoints, 2, strategy), [2])
    assert again == [1]
