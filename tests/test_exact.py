"""Exact mode trains the same bits on any number of devices and processes, in every stage; and what that is made of.

Bits of runs are compared in jobs of their own, which `jaxdp.environment.exact` prepares before JAX starts.
"""

import functools
import itertools
import json
import math
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import toys
from jaxdp import environment
from jaxdp.axes import DATA, REPLICA, SHARD, Axes
from jaxdp.build import check_optimizer
from jaxdp.config import Config, Optimizer
from jaxdp.errors import UsageError
from jaxdp.hlo import collectives
from jaxdp.models import as_model
from jaxdp.models.mlp import MLP
from jaxdp.optim import OPTIMIZERS
from jaxdp.parallel.base import data_mesh, slot_table
from jaxdp.parallel.exact import _counter, add_up, check_devices, halve, pieces_of, sum_all, total
from jaxdp.parallel.reduction import REDUCTIONS
from jaxdp.parallel.rounding import as_written, running, settle
from jaxdp.split import WHOLE, spec, split_dim, split_dims
from launch import Finished, mpirun, together
from test_cli import curve, jaxdp, records, write

SCRIPT = str(pathlib.Path(__file__).parent / "mpi" / "exact.py")
MODELS = ("dropout", "resnet", "lstm", "blocks", "gpt")
WAYS = ("pmap-0-{}-split", "pmap-1-{}-split", "pjit-0-{}-split", "pjit-1-{}-split", "pjit-2-{}-split")
WAYS += ("pjit-2-{}-whole", "pjit-3-{}-split", "pjit-3-{}-whole")

# --- the same bits --------------------------------------------------------------------------------------------------

COVER = {
    "dropout": ("pmap-0-1-split", "pmap-1-2-split", "pjit-3-4-split", "pjit-2-8/4-split"),
    "gpt": ("pmap-0-1-split", "pjit-2-2-split", "pjit-1-8/4-split", "pjit-3-8-split"),
    "resnet": ("pjit-0-1-split", "pjit-2-2-whole", "pmap-1-8-split", "pjit-3-8/4-split"),
    "lstm": ("pmap-1-1-split", "pjit-0-2-split", "pjit-2-4-whole", "pjit-3-8-whole"),
    "blocks": ("pjit-1-1-split", "pjit-3-2-split", "pmap-0-8-split", "pjit-2-8/2-split"),
}
FAULTS = {  # each adds up in another order than one device; loops over 8 devices would not
    how: [f"dropout-pjit-0-{n}-split-adamw-{how}" for n in (1, devices)] for how, devices in (("vmap", 8), ("loop", 4))
}
PROCESSES = ("dropout-pmap-1-4-split", "dropout-pjit-2-4/2-whole", "blocks-pjit-3-4-split")


def rows_of(model, ways, optimizer="adamw"):
    return [f"{model}-{way}-{optimizer}-exact" for way in ways]


def read(job: Finished):
    """{row: (digest, [[loss, norm] of each update])}"""
    assert job.returncode == 0 and not job.left, job.output
    (line,) = [line for line in job.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def run(rows, devices=8, processes=1, timeout=1800.0):
    if processes == 1:
        return read(together([([sys.executable, SCRIPT, *rows], {})], timeout, devices)[0])
    return read(mpirun(processes, [SCRIPT, *rows], devices=devices, timeout=timeout))


def differing(trained):
    """[(row, the first update whose loss or norm is another than that of the model's first row, or 'state')]"""
    first, found = {}, []
    for row, (digest, numbers) in trained.items():
        want = first.setdefault(row.partition("-")[0], (digest, numbers))
        if (digest, numbers) != want:
            found.append((row, next((i for i, (a, b) in enumerate(zip(numbers, want[1])) if a != b), "state")))
    return found


@pytest.fixture(scope="module")
def trained():
    """Two jobs of eight devices at the same time: compiling is what takes the time."""
    jobs = [["dropout", "gpt"], ["resnet", "lstm", "blocks"]]
    rows = [[row for model in models for row in rows_of(model, COVER[model])] for models in jobs]
    rows[0] += [row for pair in FAULTS.values() for row in pair]
    done = together([([sys.executable, SCRIPT, *some], {}) for some in rows], timeout=400, devices=8)
    return {row: got for job in done for row, got in read(job).items()}


@pytest.mark.slow
@pytest.mark.xdist_group("trained")
def test_every_model_is_the_same_on_any_number_of_devices_in_every_stage(trained):
    exact = {row: got for row, got in trained.items() if row.endswith("-exact")}
    assert not (wrong := differing(exact)), wrong
    assert len({digest for digest, _ in exact.values()}) == len(MODELS)
    for _, numbers in exact.values():
        losses = [float.fromhex(loss) for loss, _ in numbers]
        assert len(set(losses)) == 6 and np.isfinite(losses).all()


def test_the_cover_has_each_model_on_1_2_and_8_devices_and_in_every_stage():
    split = {model: [way.split("-") for way in ways] for model, ways in COVER.items()}
    for ways in split.values():
        assert {place.partition("/")[0] for _, _, place, _ in ways} >= {"1", "2", "8"}
        assert {int(zero) for _, zero, _, _ in ways} == {0, 1, 2, 3}
    everywhere = {f"{backend}-{zero}-{{}}-{how}" for ways in split.values() for backend, zero, _, how in ways}
    assert everywhere == set(WAYS) and set(split) == set(MODELS)


@pytest.mark.slow
@pytest.mark.xdist_group("trained")
def test_an_ordinary_sum_does_not_pass_for_exact(trained):
    """The same rows, but for the reduction: what is compared does see another order of adding up."""
    for one, more in FAULTS.values():
        assert [row for row, _ in differing({row: trained[row] for row in (one, more)})] == [more]


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.xdist_group("trained")
def test_two_processes_of_two_devices_are_one_device(trained):
    exact = {row: trained[row] for model in MODELS for row in rows_of(model, COVER[model])}
    together = run([f"{row}-adamw-exact" for row in PROCESSES], devices=2, processes=2, timeout=240)
    assert len(together) == len(PROCESSES)
    assert not (wrong := differing(exact | together)), wrong


def everywhere(*counts):
    """Every way, on these numbers of devices; hybrid too where a stage under pjit splits anything."""
    for n, way in itertools.product(counts, WAYS):
        groups = [k for k in (2, 4) if k < n and way.startswith("pjit") and "-0-" not in way]
        yield from (way.format(place) for place in (n, *(f"{n}/{k}" for k in groups)))


@functools.cache
def alone(model, optimizer="adamw"):
    """What one process of one device trains."""
    return run(rows_of(model, ["pjit-0-1-split"], optimizer), devices=1)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "counts", "ways"), [("resnet", (1, 8), 26), ("gpt", (1, 8), 26)])
def test_every_way_on_every_number_of_devices_is_one_device(model, counts, ways):
    got = run(rows_of(model, everywhere(*counts)))
    assert len(got) == ways
    assert not (wrong := differing(alone(model) | got)), wrong


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("processes", "devices", "model"), [(2, 1, "resnet"), (2, 1, "gpt"), (4, 1, "dropout"), (4, 2, "blocks")]
)
def test_stages_over_processes_are_one_device(processes, devices, model):
    n = processes * devices
    few = [f"pmap-1-{n}-split", f"pjit-0-{n}-split", f"pjit-2-{n}/2-split", f"pjit-3-{n}-split"]
    ways = [way.format(n) for way in WAYS] if n == 2 else few
    got = run(rows_of(model, ways), devices, processes)
    assert not (wrong := differing(alone(model) | got)), wrong


SAMPLE = ("pmap-0-8-split", "pmap-1-2-split", "pjit-0-2-split", "pjit-1-8/2-split", "pjit-2-4-split", "pjit-3-8-split")
TWELVE = ("pmap-0-4-split", "pmap-1-2-split", "pjit-1-4/2-split", "pjit-2-4-whole", "pjit-3-2-whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["sixteen", "bfloat16", "float16", "float64", "frozen", "guarded", "wide", "twelve"]
)
def test_other_dtypes_sizes_and_numbers_of_microbatches_are_the_same_on_any_number_of_devices(variant):
    got = run(rows_of(variant, TWELVE if variant == "twelve" else SAMPLE))
    assert not (wrong := differing(alone(variant) | got)), wrong


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [name for name in toys.OPTIMIZERS if name != "adamw"])
def test_every_optimizer_is_the_same_wherever_it_may_be_used(optimizer):
    model = "blocks" if optimizer == "muon" else "dropout"
    whole = [way for way in everywhere(1, 2, 4, 8) if "-0-" in way]
    got = run(rows_of(model, SAMPLE if optimizer in ("momentum", "lion") else whole, optimizer))
    assert not (wrong := differing(alone(model, optimizer) | got)), wrong


CONFIG = """
model: {target: MLP, args: {hidden: [36], dropout: 0.2}}
data: {target: Digits, args: {augment: true}}
steps: 10
batch_size: 300
optimizer: {target: adamw, lr: 3.0e-2, weight_decay: 0.1, clip_norm: 1.0, schedule_steps: 10, ema: 0.5}
parallel: {reduction: exact}
eval: {every: 4, ema: true}
log: {every: 1}
"""


@pytest.mark.slow
@pytest.mark.mpi
def test_a_run_that_goes_on_over_two_processes_has_the_digest_of_one_device(tmp_path):
    """Stopped after 5 of 10 updates on 8 devices under pjit, stage 2; then one device in each of two, under pmap. The
    fifth batch of an epoch is short."""
    base = ["train.py", "--config", str(write(tmp_path, CONFIG)), "--run_dir"]
    devices = lambda n: {"XLA_FLAGS": f"--xla_force_host_platform_device_count={n}"}
    stage_2 = [str(tmp_path / "run"), "--steps", "5", "--parallel.backend", "pjit", "--parallel.zero", "2"]
    split, whole = [*base, *stage_2], [*base, str(tmp_path / "whole")]
    jobs = together([([sys.executable, *split], devices(8)), ([sys.executable, *whole], devices(1))], timeout=180)
    jobs.append(mpirun(2, [*base, str(tmp_path / "run"), "--parallel.backend", "pmap"], timeout=120))
    assert all(job.returncode == 0 and not job.left for job in jobs), "\n".join(job.output for job in jobs)
    assert "goes on after step 5" in jobs[-1].stdout

    assert len(curve(tmp_path / "whole")) == 10
    np.testing.assert_array_equal(curve(tmp_path / "run"), curve(tmp_path / "whole"))
    evaluated = lambda name: {
        r["step"]: (r["loss"], r["accuracy"]) for r in records(tmp_path / name) if r["split"] in ("eval", "final")
    }
    assert evaluated("run") == evaluated("whole") and list(evaluated("run")) == [4, 8, 10]
    assert evaluated("run")[10][1] > 0.3
    digests = [records(tmp_path / name, "final")[-1]["params_sha256"] for name in ("run", "whole")]
    assert digests[0] == digests[1] and len(digests[0]) == 64


# --- the tree -------------------------------------------------------------------------------------------------------


def by_hand(parts):
    """[n, ...] -> the sum of the first half and that of the second; of an odd number, one after the other."""
    half, odd = divmod(len(parts), 2)
    return functools.reduce(np.add, parts) if odd else by_hand(parts[:half]) + by_hand(parts[half:])


def uneven(*shape):
    """Numbers of many magnitudes: hardly any two orders of adding them up agree."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, size=shape)).astype(np.float32)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 8, 12])
def test_slots_are_added_up_by_the_tree_and_what_is_their_own_stays(slots):
    x, keep = uneven(slots, 500), lambda piece: (piece[0][0], piece[1])
    f = jax.jit(lambda x, step: add_up(lambda *piece: piece, (x, -x), running(step), keep))
    summed, own = f(x, 0)
    np.testing.assert_array_equal(summed, by_hand(x))
    np.testing.assert_array_equal(own, -x)
    if slots > 3:
        assert (by_hand(x) != functools.reduce(np.add, x)).any()


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 8, 12, 64, 96])
def test_sums_that_wait_are_as_many_as_the_levels_of_the_tree(slots):
    x = jax.ShapeDtypeStruct((slots, 1000), np.float32)
    jaxpr = jax.make_jaxpr(lambda x, step: add_up(lambda x: 2 * x, (x,), running(step), lambda x: (x[0], None)))(x, 0)
    waiting = {
        v.aval.shape[0] for eqn in jaxpr.eqns if eqn.primitive.name == "while" for v in eqn.outvars if v.aval.shape
    }
    levels = 1 + int(math.log2(slots))
    assert waiting == {max(2, int(_counter(slots)[1].max()) + 1)} and max(waiting) <= max(2, levels)


def over(axes_sizes, f, x, out):
    """f on each device's x[device] of a mesh {axis: size}; out: the axes that its results are split over."""
    devices = math.prod(axes_sizes.values())
    mesh = jax.make_mesh(
        tuple(axes_sizes.values()), tuple(axes_sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes_sizes),
        devices=jax.devices()[:devices],
    )  # fmt: skip
    local = lambda x: f(x[0])[None]
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(tuple(axes_sizes)), out_specs=P(out), check_vma=False))(x)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_halving_adds_up_the_devices_by_the_tree(devices):
    rows = uneven(devices, devices, 300)
    got = over({DATA: devices}, lambda x: halve(x, DATA), rows, DATA)
    np.testing.assert_array_equal(got, by_hand(rows))


@pytest.mark.parametrize(
    "axes", [{DATA: 1}, {DATA: 2}, {DATA: 4}, {DATA: 8}, {REPLICA: 4, SHARD: 2}, {REPLICA: 2, SHARD: 4}]
)
@pytest.mark.parametrize("size", [1, 7, 400])
def test_a_sum_over_all_devices_is_the_tree_on_each(axes, size):
    devices, names = math.prod(axes.values()), tuple(axes)
    x = uneven(devices, size)
    got = over(axes, lambda x: sum_all(x, names if len(names) > 1 else names[0]), x, names)
    np.testing.assert_array_equal(got, np.broadcast_to(by_hand(x), x.shape))


@pytest.mark.parametrize("axes", [{DATA: 8}, {REPLICA: 4, SHARD: 2}, {REPLICA: 2, SHARD: 4}])
def test_scattered_sums_over_groups_and_replicas_are_the_tree(axes):
    """Neighbours first, then the groups."""
    reduction = REDUCTIONS["exact"]()
    of = Axes(SHARD, REPLICA) if len(axes) > 1 else Axes(DATA)
    x, parts = uneven(8, 5, 16), axes.get(SHARD, 8)
    got = over(axes, lambda x: reduction.scatter([x], [1], of)[0], x, tuple(axes))
    slices = np.split(by_hand(x), parts, axis=1)
    np.testing.assert_array_equal(got, slices * (8 // parts))


@pytest.mark.parametrize(
    ("microbatches", "devices", "counts"),
    [(8, 3, "1, 2, 4, 8"), (8, 6, "1, 2, 4, 8"), (8, 16, "1, 2, 4, 8"), (12, 8, "1, 2, 4"), (7, 2, "1")],
)
@pytest.mark.parametrize("per_slot", [False, True])
def test_a_number_of_devices_that_does_not_fit_the_tree_is_refused_with_those_that_do(
    microbatches, devices, counts, per_slot
):
    with pytest.raises(UsageError) as refused:
        check_devices(microbatches, devices, per_slot)
    assert str(refused.value) == (
        f"parallel.reduction: exact does not work on {devices} devices with {microbatches} microbatches; it needs "
        f"a power of two that divides the microbatches: {counts} devices"
    )


def test_the_tree_takes_what_fits_it():
    for devices in (1, 2, 4):
        check_devices(12, devices, per_slot=False)
        with pytest.raises(UsageError, match=r"power of two, not 12; set parallel.accumulator to whole"):
            check_devices(12, devices, per_slot=True)
        check_devices(8, devices, per_slot=True)


@pytest.mark.parametrize("backend", ["pmap", "pjit"])
@pytest.mark.parametrize("devices", [3, 6])
def test_a_strategy_refuses_devices_that_do_not_fit(backend, devices):
    with pytest.raises(UsageError, match=f"on {devices} devices with 8 microbatches; .*: 1, 2, 4, 8 devices"):
        toys.build(toys.MODELS["mlp"](), toys.data(), backend=backend, devices=devices, reduction="exact")


def test_slots_in_strides_are_every_microbatch_once():
    np.testing.assert_array_equal(slot_table(8, 2, strided=True), [[0, 2, 4, 6], [1, 3, 5, 7]])
    for devices in (1, 2, 4, 8):
        table = slot_table(8, devices, strided=True)
        np.testing.assert_array_equal(table.T.reshape(-1), np.arange(8))
        np.testing.assert_array_equal(slot_table(8, devices).reshape(-1), np.arange(8))


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_both_ways_of_dealing_lead_to_the_same_tree(devices):
    """Slots first and then devices, of consecutive microbatches; or devices first, of strided ones."""
    x = uneven(8, 200)
    consecutive, strided = (x[slot_table(8, devices, strided)] for strided in (False, True))
    np.testing.assert_array_equal(by_hand([by_hand(own) for own in consecutive]), by_hand(x))
    np.testing.assert_array_equal(by_hand([by_hand(slot) for slot in strided.swapaxes(0, 1)]), by_hand(x))


# --- what is split, and measured ------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 48), max_size=4).map(tuple),
    most=st.sampled_from([2, 4, 8, 16, 32]),
    stacked=st.booleans(),
)
def test_a_leaf_is_split_along_one_dim_by_all_numbers_of_parts_and_never_into_single_elements(shape, most, stacked):
    numbers = [2**i for i in range(1, most.bit_length())]
    dims = [split_dim(shape, parts, stacked, most) for parts in numbers]
    along = [d for d in dims if d != WHOLE]
    assert len(set(along)) <= 1 and dims == along + [WHOLE] * (len(dims) - len(along))
    for parts in numbers[: len(along)]:
        assert shape[along[0]] % parts == 0 and math.prod(shape) // parts > 1 and along[0] >= stacked
    left = range(int(stacked), len(shape))
    could = [p for p in numbers if any(shape[d] % p == 0 for d in left) and math.prod(shape) > p]
    assert len(along) == len(could)
    assert split_dim(shape, 1, stacked, most) == WHOLE


TREE = {
    "kernel": (16, 24), "odd": (5, 7), "scalar": (), "bias": (8,), "one": (1,), "four": (12, 5),
    "blocks": {"kernel": (3, 24, 4), "bias": (3, 8)},
}  # fmt: skip


def squares(tree):
    return jnp.stack(
        [sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)), sum(jnp.sum(x) for x in jax.tree.leaves(tree))]
    )


def measured(tree, devices, split):
    mesh = data_mesh(jax.devices()[:devices])
    dims = split_dims(tree, devices if split else 1, ("blocks",), 8)
    cut = pieces_of(tree, ("blocks",), 8)
    f = lambda tree, step: total(squares, tree, dims, cut, DATA, running(step))
    specs = jax.tree.map(lambda d: spec(d, DATA), dims)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False))(tree, 0), dims


def test_a_tree_is_measured_to_the_same_bits_however_it_is_split():
    shapes, treedef = jax.tree.flatten(TREE, is_leaf=lambda x: isinstance(x, tuple))
    tree = jax.tree.unflatten(treedef, [jnp.asarray(uneven(*shape)) for shape in shapes])
    want, _ = measured(tree, 1, False)
    for devices, split in itertools.product((2, 4, 8), (False, True)):
        got, dims = measured(tree, devices, split)
        np.testing.assert_array_equal(got, want, err_msg=f"{devices} devices, split: {split}")
        assert sum(d != WHOLE for d in jax.tree.leaves(dims)) == (split and {2: 5, 4: 5, 8: 3}[devices])
    wide = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
    np.testing.assert_allclose(want[0], sum((x * x).sum() for x in wide), rtol=1e-6)
    assert {
        cut.number for cut in jax.tree.leaves(pieces_of(tree, ("blocks",), 8), is_leaf=lambda x: hasattr(x, "number"))
    } == {1, 4, 8}


# --- rounding as written --------------------------------------------------------------------------------------------


def rounded(f, *args):
    return jax.jit(lambda step, *args: as_written(f, running(step))(*args))(0, *args)


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_product_is_rounded_before_it_is_added(dtype):
    a, b, c = draw(3, 10_000).astype(jnp.dtype(dtype))
    f = lambda a, b, c: (a * b + c, jnp.square(a) - c, a**3 + b)
    with jax.enable_x64(dtype == "float64"):
        got = rounded(f, a, b, c)
    for y, want in zip(got, (a * b + c, a * a - c, a * a * a + b), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, want)
    if dtype != "float64":
        once = (a.astype(float) * b.astype(float) + c.astype(float)).astype(a.dtype)
        assert (once != a * b + c).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_is_divided_by_a_scalar_is_multiplied_by_its_reciprocal(dtype):
    """Also where the scalar was made an array of equal entries, and inside functions jitted for themselves."""
    x, s = draw(10_000).astype(jnp.dtype(dtype)), draw(1)[0].astype(jnp.dtype(dtype))
    inner = jax.jit(lambda x, s: (x / s, jax.jit(lambda x: x / jnp.full(x.shape, s))(x)))
    with jax.enable_x64(dtype == "float64"):
        got = [*rounded(lambda x, s: inner(x, s), x, s), rounded(lambda x, s: x / s + x, x, s)]
    reciprocal = np.ones((), x.dtype) / s
    product = x * reciprocal
    for y, want in zip(got, (product, product, product + x), strict=True):
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, want)
    assert (product != x / s).any()


def test_a_scalar_and_an_array_are_divided_as_ever():
    x, s = draw(10_000), np.float32(0.3)
    scalar, array = rounded(lambda s, x: (s / x[0], x / x[::-1]), s, x)
    np.testing.assert_array_equal(scalar, s / x[0])
    np.testing.assert_array_equal(array, x / x[::-1])


def derived(f):
    """f with a derivative of its own."""
    f = jax.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f


WITHIN = {
    "jit": lambda f: jax.jit(f),
    "cond": lambda f: lambda *args: jax.lax.cond(args[0][0] < 9, f, lambda *_: jnp.zeros(10_000), *args),
    "other branch": lambda f: lambda *args: jax.lax.cond(args[0][0] > 9, lambda *_: jnp.zeros(10_000), f, *args),
    "checkpoint": jax.checkpoint,
    "custom_jvp": derived,
    "vmap": jax.vmap,
    "jit in cond in jit": lambda f: jax.jit(WITHIN["cond"](jax.jit(f))),
}


@pytest.mark.parametrize("within", WITHIN)
def test_functions_inside_are_rounded_as_written_too(within):
    a, b, c = draw(3, 10_000)
    np.testing.assert_array_equal(rounded(WITHIN[within](lambda a, b, c: a * b + c), a, b, c), a * b + c)


def test_what_settles_is_as_it_was():
    tree = {"x": uneven(50), "n": np.arange(3), "yes": np.array([True, False]), "none": None, "zero": np.float32(-0.0)}
    got = jax.jit(lambda step, tree: settle(tree, running(step)))(0, tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert [x.tobytes() for x in jax.tree.leaves(jax.device_get(got))] == [
        np.asarray(x).astype(y.dtype).tobytes() for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(got))
    ]


def test_integers_and_leaves_that_are_none_are_as_they_were():
    n, x = np.arange(-5, 5, dtype=np.int32), draw(10)

    def f(tree, nothing):
        values, indices = jax.lax.top_k(tree["x"], 3)  # one operation, two results
        assert nothing is None
        return {"n": tree["n"] * 7 // 3, "top": values * 2, "at": indices, "none": None, "even": tree["n"] % 2 == 0}

    got, want = rounded(f, {"n": n, "x": x}, None), f({"n": n, "x": x}, None)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)


# --- what it needs, and refuses -------------------------------------------------------------------------------------


@pytest.fixture
def variables(monkeypatch):
    """(XLA_FLAGS, the kind of machine) -> the environment's two variables after `environment.exact`."""
    monkeypatch.setenv("NPROC", "5")

    def after(flags, microbatches=8, gpus=0):
        monkeypatch.setattr(environment.gpus, "count", lambda: gpus)
        monkeypatch.setenv("XLA_FLAGS", flags)
        environment.exact(microbatches)
        environment.check_exact(microbatches)
        return os.environ["XLA_FLAGS"], os.environ["NPROC"]

    return after


def test_the_environment_of_exact_mode_keeps_the_users_own_flags(variables, monkeypatch):
    off = "--xla_disable_hlo_passes="
    assert variables("") == (f"{off}algsimp", "32")
    mine = "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false"
    assert variables(mine) == (f"{mine} {off}algsimp", "32")
    assert variables(f"--xla_a=1 {off}dce,cse --xla_b=2")[0].split() == [
        "--xla_a=1",
        "--xla_b=2",
        f"{off}dce,cse,algsimp",
    ]
    for done in (f"{off}algsimp", f"{off}dce,algsimp --xla_a=1"):
        assert variables(done) == (done, "32")
    assert variables("", microbatches=64)[1] == "256"
    assert variables("", microbatches=2**20)[1] == "2048"
    monkeypatch.delenv("XLA_FLAGS")
    environment.exact(8)
    assert os.environ["XLA_FLAGS"] == f"{off}algsimp"


def test_the_environment_of_a_gpu_asks_for_operations_that_are_the_same_every_time(variables):
    assert variables("--xla_a=1", gpus=1) == ("--xla_a=1 --xla_gpu_deterministic_ops=true", "32")
    assert variables("--xla_gpu_deterministic_ops=false", gpus=1)[0] == "--xla_gpu_deterministic_ops=true"


def test_an_environment_that_exact_mode_cannot_work_in_is_refused_with_what_to_call(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    monkeypatch.setenv("NPROC", "32")
    with pytest.raises(UsageError, match=r"XLA_FLAGS='--xla_a=1 --xla_disable_hlo_passes=algsimp' in the environment"):
        environment.check_exact(8)
    environment.exact(8)
    with pytest.raises(UsageError, match=r"NPROC='64' in the environment, not '32'; call jaxdp.environment.exact.16."):
        environment.check_exact(16)
    environment.check_exact(8)


BEYOND = {  # an element: what an update of it depends on
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: OPTIMIZERS["muon"](1e-2),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}
beyond = functools.cache(lambda optimizer: BEYOND[optimizer]())  # one object: what was found out of it is remembered
NARROW = as_model(lambda rngs: MLP((12,), 20, (20,), rngs=rngs))  # 4 divides its dims, and 8 does not


def refusal(model, optimizer, backend, zero, devices, accumulate="one", reduction="exact"):
    """What `build` says of the optimizer, or None."""
    tx = beyond(optimizer)
    strategy, step, _ = toys.build(
        model, toys.data(), backend=backend, devices=devices, reduction=reduction, accumulate=accumulate,
        optimizer=(tx, None), layout={"zero": zero},
    )  # fmt: skip
    try:
        check_optimizer(Config(optimizer=Optimizer(target=optimizer)), strategy, tx, step)
    except UsageError as error:
        return str(error)


PLACES = [("pmap", 1), ("pjit", 1), ("pjit", 3)]


@pytest.mark.parametrize("optimizer", BEYOND)
@pytest.mark.parametrize(("backend", "zero"), PLACES)
def test_what_is_not_elementwise_is_refused_by_name_where_anything_is_split(optimizer, backend, zero):
    """On one device too: it would not give what eight do."""
    model = toys.MODELS["mlp"]()
    for devices in (1, 8):
        said = refusal(model, optimizer, backend, zero, devices)
        assert said.startswith(f"optimizer.target: {optimizer}: it is not elementwise: "), said
        assert "adamw or lion" in said
    assert refusal(model, optimizer, backend, 0, 8) is None
    assert backend == "pmap" or refusal(model, optimizer, backend, zero, 8, "loop", "bucket") is None


@pytest.mark.parametrize(("backend", "zero"), PLACES)
def test_what_is_not_elementwise_is_refused_where_only_few_devices_split_anything(backend, zero):
    assert "not elementwise" in str(refusal(NARROW, "lamb", backend, zero, devices=2))


def test_the_command_refuses_lamb_in_one_line(tmp_path):
    config = write(tmp_path, CONFIG.replace("adamw", "lamb"))
    argv = ["--config", config, "--run_dir", tmp_path / "run", "--parallel.zero", 1, "--parallel.backend", "pjit"]
    said = jaxdp(*argv, code=2, devices=2).stderr.strip()
    assert "optimizer.target: lamb: it is not elementwise" in said and "or zero: 0" in said and "\n" not in said


# --- bytes ----------------------------------------------------------------------------------------------------------

WIDE = as_model(lambda rngs: MLP(toys.SHAPE, toys.CLASSES, (3200,), rngs=rngs))  # 115,000 parameters


def sent(reduction, slots, zero, place="8", accumulator="split", backend="pjit"):
    """Bytes that one device sends in an update, by the shapes of the compiled programs alone."""
    _, _, shard_size = place.partition("/")
    strategy, step, _ = toys.build(
        WIDE, toys.data(), backend=backend, devices=8, microbatches=8 * slots, reduction=reduction, bucket_mb=25.0,
        accumulate="one" if reduction == "exact" else "loop", optimizer=(optax.sgd(0.1), None),
        layout={"zero": zero, "accumulator": accumulator} | ({"shard_size": int(shard_size)} if shard_size else {}),
    )  # fmt: skip
    example = {"inputs": np.zeros((1, *toys.SHAPE), np.float32), "labels": np.zeros(1, np.int32)}
    arguments = strategy.arguments({**example, "mask": np.zeros(1, np.float32)})
    bytes_ = 0
    for lowered in strategy.lower(step).lowered(*arguments).values():
        compiled = lowered.compile({"xla_backend_optimization_level": 0})  # of no matter to collectives
        for c in collectives(compiled.as_text(), lowered.as_text()):
            assert c.exact or reduction == "exact"
            bytes_ += c.ring * (1 if c.exact else slots)  # the only loop whose length the run knows is over the slots
    return bytes_


SENT = [({"zero": zero}, slots) for zero in range(4) for slots in (1, 2)] + [({"zero": 3, "place": "8/2"}, 2)]
ALSO = [({"zero": zero, "backend": "pmap"}, 2) for zero in (0, 1)] + [
    ({"zero": zero, "accumulator": accumulator, "place": place}, 4)
    for zero, accumulator, place in itertools.product((2, 3), ("split", "whole"), ("8", "8/4"))
]


@pytest.mark.parametrize(
    ("where", "slots"), [*SENT, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALSO)], ids=str
)
def test_exact_mode_sends_what_buckets_do(where, slots):
    exact, bucket = (sent(reduction, slots, **where) for reduction in ("exact", "bucket"))
    assert 0.95 < exact / bucket <= 1.05, (exact, bucket)
