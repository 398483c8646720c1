"""A bucketed reduction sums what psum sums, in one operand a bucket."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import toys
from covering import first
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches
from jaxdp.errors import UsageError
from jaxdp.parallel.placement import assign_microbatches, data_mesh, from_first
from jaxdp.parallel.reduction import pack
from jaxdp.run.components import REDUCTIONS, make_reduction
from jaxdp.split import DATA
from judging import FLOAT_REDUCTIONS

MESH = data_mesh(jax.devices()[:4])


def reduced(name, tree, bucket_mb=25.0):
    reduce = REDUCTIONS[name](bucket_mb).reduce

    def f(tree):
        return reduce(jax.tree.map(lambda x: x[0], tree), DATA)

    return jax.jit(
        jax.shard_map(f, mesh=MESH, in_specs=P(DATA), out_specs=P(), check_vma=False)
    ), tree


@pytest.mark.parametrize("name", FLOAT_REDUCTIONS)
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-4, 1e-6])
def test_a_reduction_is_the_sum_over_devices(name, bucket_mb):
    rng = np.random.default_rng(0)
    tree = {
        "a": rng.normal(size=(4, 3, 5)).astype(np.float32),
        "b": [
            rng.integers(9, size=(4, 7)).astype(np.int32),
            rng.normal(size=(4,)).astype(np.float32),
        ],
        "c": rng.normal(size=(4, 200)).astype(jnp.bfloat16),
        "d": None,
    }
    f, tree = reduced(name, tree, bucket_mb)
    got = f(tree)
    want = jax.tree.map(lambda x: x.astype(np.float64).sum(0), tree)
    assert jax.tree.map(lambda x: x.dtype.name, got) == jax.tree.map(lambda x: x.dtype.name, tree)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2e-2, atol=3e-2),
        got,
        want,
    )
    np.testing.assert_allclose(got["a"], want["a"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_400_tensors_are_one_operand():
    tree = [jnp.ones((4, 1000)) for _ in range(400)]
    f, tree = reduced("bucket", tree)
    text = f.lower(tree).compile().as_text()
    calls = [m.group(1) for m in re.finditer(r" all-reduce(?:-start)?\(([^)]*)\)", text)]
    assert len(calls) == 1 and "," not in calls[0]
    assert "f32[400000]" in text
    f, tree = reduced("xla", tree)
    calls = [
        m.group(1)
        for m in re.finditer(
            r" all-reduce(?:-start)?\(([^)]*)\)", f.lower(tree).compile().as_text()
        )
    ]
    assert sum(c.count(",") + 1 for c in calls) == 400


def test_buckets_are_of_one_dtype_within_the_limit():
    leaves = [("f", 40), ("f", 40), ("i", 8), ("f", 40), ("f", 200), ("f", 10)]
    buckets = pack(leaves, 100)
    assert sorted(i for b in buckets for i in b) == list(range(6))
    for bucket in buckets:
        assert len({leaves[i][0] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(leaves[i][1] for i in bucket) <= 100
        assert bucket == sorted(bucket, reverse=True)
    assert buckets[0][0] == 5


def test_auto_is_xla_in_one_process():
    def program(name, mesh):
        return str(
            jax.make_jaxpr(
                jax.shard_map(
                    lambda tree: make_reduction(name).reduce(tree, "data"),
                    mesh=mesh,
                    in_specs=P(),
                    out_specs=P(),
                    check_vma=False,
                )
            )([jnp.ones(3), jnp.ones(4)])
        )

    assert program("auto", MESH) == program("xla", MESH) != program("bucket", MESH)
    alone = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    assert all("psum" not in program(name, alone) for name in FLOAT_REDUCTIONS)


def test_the_initial_sync_keeps_types_and_bits():
    tree = {
        "f": jnp.array([1.5, jnp.inf]),
        "b": jnp.array([True, False]),
        "i": jnp.arange(3, dtype=jnp.int8),
    }
    got = from_first(jax.device_put(tree, NamedSharding(MESH, P())), MESH)
    jax.tree.map(np.testing.assert_array_equal, got, tree)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, tree)


@pytest.mark.parametrize("devices", range(1, 17))
def test_shares_differ_by_at_most_one(devices):
    table = assign_microbatches(16, devices)
    shares = (table >= 0).sum(1)
    assert shares.max() - shares.min() <= 1
    assert sorted(table[table >= 0]) == list(range(16))


def test_more_devices_than_microbatches_name_the_fix():
    with pytest.raises(
        UsageError, match="microbatches: 8 cannot be split over 9 devices; set microbatches to 9"
    ):
        assign_microbatches(8, 9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", first(1, ["pjit", "pmap"]))
def test_a_bucketed_step_all_reduces_one_operand(backend):
    """Gradients, loss, weight, metrics and BatchNorm's averages travel together."""
    examples = toys.data(20)
    _, state, _, strategy, program = toys.train(
        toys.MODELS["resnet"](),
        examples,
        backend=backend,
        devices=4,
        reduction="bucket",
        bucket_mb=25.0,
        steps=0,
    )
    state = strategy.adopt(jax.device_put(state, strategy.abstract().step.sharding))
    batch = read_batches(
        Arrays(**examples), EpochOrder(20, 20, 8, 0), [0], strategy.local_microbatches
    )
    text = program.lowered(state, strategy.shard_batch(batch)).compile().as_text()
    calls = [m.group(1) for m in re.finditer(r" all-reduce(?:-start)?\(([^)]*)\)", text)]
    assert len(calls) == 1 and "," not in calls[0]
    assert not re.search(
        r" (all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\(", text
    )
