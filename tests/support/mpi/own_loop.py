"""A loop of one's own on several processes: `mpirun -np 3 python tests/support/mpi/own_loop.py
ranks` (or `devices`).

Rank 0 prints the loss of each update of each loop as one line of JSON; what differs from what it
should be raises."""

import json
import os
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp.data import Digits
from jaxdp.interop.partition import Partition

EXAMPLES, BATCH, EPOCHS, SEED = 1001, 50, 2, 3  # an epoch's last batch is of one example


def data():
    rows = Digits().read(np.arange(EXAMPLES))
    return rows["inputs"].reshape(EXAMPLES, 64) / np.float32(16), rows["labels"]


def weights(seed):
    def draw(key, *shape):
        return jax.random.normal(jax.random.key(key), shape) / np.sqrt(shape[0])

    return {"in": draw(2 * seed, 64, 16), "out": draw(2 * seed + 1, 16, 10), "bias": jnp.zeros(10)}


def losses_of(params, x, y):
    logits = jax.nn.relu(x @ params["in"]) @ params["out"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


def plain():
    """The losses of a loop that knows nothing of jaxdp but the order of the examples."""
    params, (x, y) = weights(0), data()
    state, curve = adam.init(params), []
    backward, update = (
        jax.jit(jax.value_and_grad(lambda *args: losses_of(*args).mean())),
        jax.jit(adam.update),
    )
    sampler = jaxdp.DistributedSampler(EXAMPLES, seed=SEED, rank=0, size=1)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for rows in sampler.batches(BATCH):
            loss, grads = backward(params, x[rows], y[rows])
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            curve.append(float(loss))
    return curve


def by_ranks(context):
    """A rank without rows brings NaN, and must not count."""
    params = jaxdp.broadcast_parameters(weights(context.rank))
    tx = jaxdp.distributed_optimizer(adam)
    state, curve, empty = tx.init(params), [], 0
    backward = jax.jit(jax.value_and_grad(lambda *args: losses_of(*args).mean()))
    batches = jaxdp.partition_dataset(data(), BATCH, SEED)
    assert len(batches) == 21
    for _ in range(EPOCHS):
        for x, y in batches:
            loss, grads = backward(params, x, y)
            updates, state = tx.update(grads, state, params, weight=len(y))
            params = optax.apply_updates(params, updates)
            curve.append(jaxdp.allreduce_metrics({"loss": loss}, weight=len(y))["loss"])
            empty += len(y) == 0
            assert len(y) or np.isnan(loss)
    assert empty == (EPOCHS if context.rank else 0)
    return curve


def by_devices(context):
    """The axis of pmap goes over the devices of all processes."""
    params = jaxdp.broadcast_parameters(weights(context.rank))
    tx = jaxdp.distributed_optimizer(adam, "batch")
    devices, state = jax.local_device_count(), tx.init(params)

    def update(params, state, x, y, mask):
        def mean(params):
            return jnp.where(mask, losses_of(params, x, y), 0).sum() / mask.sum()

        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = tx.update(grads, state, params, weight=mask.sum())
        whole = jax.lax.psum(jnp.where(mask.any(), loss * mask.sum(), 0), "batch") / jax.lax.psum(
            mask.sum(), "batch"
        )
        return optax.apply_updates(params, updates), state, whole

    params, state = jax.tree.map(lambda x: jnp.stack([x] * devices), (params, state))
    update, curve = jax.pmap(update, axis_name="batch"), []
    batches = jaxdp.partition_dataset(data(), BATCH, SEED, devices=devices)
    for _ in range(EPOCHS):
        for (x, y), mask in batches:
            params, state, loss = update(params, state, x, y, mask)
            curve.append(float(loss[0]))
    return curve


def by_a_mesh_each(context):
    """jit over each process's own devices, and the eager mean between the processes."""
    mesh = jax.make_mesh(
        (jax.local_device_count(),),
        ("d",),
        devices=jax.local_devices(),
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    split, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("d"), jax.P()))
    params = jaxdp.broadcast_parameters(jax.device_put(weights(context.rank), whole))
    tx = jaxdp.distributed_optimizer(adam)

    def mean(params, x, y, mask):
        return losses_of(params, x, y).sum(where=mask) / mask.sum()

    backward, state, curve = jax.jit(jax.value_and_grad(mean)), tx.init(params), []
    for (x, y), mask in jaxdp.partition_dataset(
        data(), BATCH, SEED, devices=jax.local_device_count()
    ):
        loss, grads = backward(params, *jax.device_put((x, y, mask), split))
        updates, state = tx.update(grads, state, params, weight=mask.sum())
        assert updates["in"].sharding.is_equivalent_to(whole, 2)
        params = optax.apply_updates(params, updates)
        curve.append(jaxdp.allreduce_metrics(loss, weight=mask.sum()))
    return curve


def fails(kind, call, *parts):
    """Every rank gets this error."""
    try:
        call()
    except kind as error:
        assert all(part in str(error) for part in parts), (parts, str(error))
        assert "\n" not in str(error)
    else:
        raise AssertionError(f"no {kind.__name__} ({parts})")


def everything(rank):
    """A tree of all that a training loop may hold, other on each rank; and what is no number."""
    rng = np.random.default_rng(rank)
    nan = np.array([0x7FC00001 + rank, 0x80000000, 1], np.uint32).view(np.float32)
    return {
        "f32": jnp.asarray(nan),
        "bf16": jnp.asarray(rng.normal(size=(2, 3)), jnp.bfloat16),
        "placed": jax.device_put(rng.normal(size=4).astype(np.float32), jax.local_devices()[-1]),
        "list": [jnp.int8(rank), jnp.array([rank % 2 == 0]), jnp.zeros((0, 2))],
        "key": jax.random.key(rank),
        "keys": jax.random.split(jax.random.key(rank), 2),
        "raw": jax.random.PRNGKey(rank),
        "numpy": (
            rng.normal(size=3),
            np.int64(2**40 + rank),
            rng.integers(0, 9, (2, 2), np.uint16),
        ),
        "swapped": [np.array([1.5 + rank, 2], dtype) for dtype in (">f4", ">f8", ">i2", "<i4")],
        "python": {
            "float": 0.1 + rank,
            "int": 2**60 + rank,
            "bool": rank == 2,
            "complex": 1j * rank,
        },
        "none": None,
        "function": max,
        "adam": optax.adam(1e-3).init({"w": jnp.full(3, float(rank))}),
    }


def bits(x):
    x = (
        jax.random.key_data(x)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
    )
    return (
        x if callable(x) else (type(x), np.asarray(x).dtype, np.shape(x), np.asarray(x).tobytes())
    )


def broadcasting(context):
    for root in (2, 0):
        brought, want = everything(context.rank), everything(root)
        got = jaxdp.broadcast_parameters(brought, root_rank=root)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert jax.tree.map(bits, got) == jax.tree.map(bits, want)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(brought)):
            assert not isinstance(x, jax.Array) or (x.sharding, x.committed) == (
                y.sharding,
                y.committed,
            )
    tree = {"dense": {"kernel": jnp.zeros((4, 2 + (context.rank == 1)))}}
    fails(
        jaxdp.UsageError,
        lambda: jaxdp.broadcast_parameters(tree),
        "rank 1",
        "dense/kernel=float32[4,3]",
        "[4,2]",
    )
    tree = {"dense": 1.0, "bias" if context.rank == 2 else "kernel": 2.0}
    fails(
        jaxdp.UsageError,
        lambda: jaxdp.broadcast_parameters(tree),
        "rank 2",
        "kernel=None",
        "kernel=float",
    )
    large = {"seed": 2**63 + 5 if context.rank == 0 else 5}
    fails(
        jaxdp.UsageError,
        lambda: jaxdp.broadcast_parameters(large),
        "rank 1",
        "seed=int (int64)",
        "(uint64)",
    )
    fails(jaxdp.UsageError, lambda: jaxdp.broadcast_parameters(1.0, 3), "root=3", "0 to 2")


def metrics(context):
    rank = context.rank
    brought = {"loss": jnp.float32(rank), "more": [rank == 0, np.float64(0.125), 2**40 + 1]}
    assert jaxdp.allreduce_metrics(brought) == {"loss": 1.0, "more": [1 / 3, 0.125, 2.0**40 + 1]}
    mine = {"loss": [1.0, np.nan, 4.0][rank]}
    assert jaxdp.allreduce_metrics(mine, weight=[3, 0, jnp.int32(1)][rank]) == {"loss": 1.75}
    assert np.isnan(jaxdp.allreduce_metrics(mine)["loss"])
    each = {"loss": 2.0**rank, "class": float(rank), "none": 1.0}
    got = jaxdp.allreduce_metrics(each, weight={"loss": 1, "class": [0, 3, 1][rank], "none": 0})
    assert got["loss"] == 7 / 3 and got["class"] == 1.25 and np.isnan(got["none"])
    assert np.isnan(jaxdp.allreduce_metrics(1.0, weight=0))
    assert jaxdp.allreduce_metrics({"a": np.inf if rank else 1.0}) == {"a": np.inf}
    usage, ones = jaxdp.UsageError, np.ones(2)
    fails(
        usage,
        lambda: jaxdp.allreduce_metrics({"a": ones if rank == 1 else 1.0}),
        "rank 1",
        "'a' has shape (2,)",
    )
    fails(
        usage,
        lambda: jaxdp.allreduce_metrics({"a" if rank < 2 else "b": 1.0}),
        "rank 2",
        "has b",
        "has a",
    )
    fails(usage, lambda: jaxdp.allreduce_metrics(1.0, weight=-1), "weight: -1.0")


def gradients(context):
    rank, tx = context.rank, jaxdp.distributed_optimizer(optax.identity())
    grads = {
        "half": jnp.full(
            3, 40000.0 if rank == 0 else 0.0, jnp.float16
        ),  # x 3 would overflow in float16
        "float": np.full((2, 2), rank, np.float32),
        "complex": jnp.full(2, 1j * rank, jnp.complex64),
        "step": jnp.int32(rank),
    }
    assert tx.update({"w": 1.0 + rank}, tx.init(None))[0] == {"w": 2.0}
    everywhere = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("d",)), jax.P())
    whole = jax.jit(lambda: {"w": jnp.arange(3.0)}, out_shardings=everywhere)()
    mean = tx.update(whole, tx.init(None))[0]["w"]
    assert mean.sharding.is_equivalent_to(everywhere, 1)
    assert np.asarray(mean).tolist() == [0, 1, 2]

    def search():
        return tx.update(grads, tx.init(None), value_fn=lambda params: 0.0)

    fails(
        jaxdp.UsageError,
        search,
        "a loss function, as of a line search, sees the data of its own rank alone",
    )
    placed = jax.device_put(grads, jax.local_devices()[-1])
    for brought in (grads, placed):
        mean, _ = tx.update(brought, tx.init(None), weight=[3, 2, 1][rank])
        assert {k: x.dtype for k, x in mean.items()} == {k: x.dtype for k, x in grads.items()}
        np.testing.assert_allclose(mean["half"], np.full(3, 20000), rtol=1e-3)
        np.testing.assert_allclose(mean["float"], np.full((2, 2), 4 / 6), rtol=1e-6)
        np.testing.assert_allclose(mean["complex"], np.full(2, 4j / 6), rtol=1e-6)
        assert mean["step"] == rank
    np.testing.assert_allclose(
        tx.update(grads, tx.init(None))[0]["float"], np.ones((2, 2)), rtol=1e-6
    )
    np.testing.assert_array_equal(tx.update(grads, tx.init(None), weight=0)[0]["half"], np.zeros(3))

    def step(tree, **extra):
        return tx.update(tree, tx.init(None), **extra)

    # what one rank alone has wrong is an error on all, at once
    for weight in (-1, np.nan, "x", np.ones(2)):
        fails(
            jaxdp.UsageError,
            lambda weight=weight: step(grads, weight=weight if rank == 1 else 1),
            "rank 1",
            "weight",
        )
    renamed = {"bias" if k == "float" and rank == 2 else k: x for k, x in grads.items()}
    fails(
        jaxdp.DistributedError,
        lambda: step(renamed),
        "rank 0, 1: ",
        "float, half",
        "rank 2: ",
        "bias, complex",
    )
    weight = {} if rank == 1 else {"weight": 1}
    fails(
        jaxdp.DistributedError,
        lambda: tx.update(grads, tx.init(None), **weight),
        "rank 1",
        "rank 0, 2",
        "weights",
    )


def partitions(context):
    """All ranks' rows together are a single process's batches; what the ranks ask for must be the
    same.
    """
    for shuffle, seen in ((True, 7), (False, 1)):
        whole = jaxdp.DistributedSampler(23, seed=1, shuffle=shuffle, rank=0, size=1)
        part = jaxdp.partition_dataset(np.arange(23), 5, 1, shuffle)
        part.set_epoch(seen)
        for epoch in (seen, seen + 1):
            whole.set_epoch(epoch)
            for own, rows in zip(part, whole.batches(5), strict=True):
                theirs = [
                    json.loads(text) for text in context.exchange("rows", json.dumps(own.tolist()))
                ]
                assert (
                    sorted(np.concatenate(theirs)) == sorted(rows)
                    and max(map(len, theirs)) - min(map(len, theirs)) <= 1
                )
    shares = (np.arange(context.size) + 1) / sum(range(context.size + 1))
    whole = jaxdp.DistributedSampler(97, seed=1, rank=0, size=1)
    part, total = jaxdp.partition_dataset(np.arange(97), 24, 1, sizes=shares.tolist()), 0
    for own, rows in zip(part, whole.batches(24), strict=True):
        theirs = [json.loads(text) for text in context.exchange("rows", json.dumps(own.tolist()))]
        assert np.concatenate(theirs).tolist() == rows, (
            "next to one another, in the order of the batch"
        )
        assert all(abs(len(t) - share * len(rows)) <= 1 for t, share in zip(theirs, shares))
        total += len(rows)
    assert total == 97
    seed = int(context.rank == 2)
    fails(
        jaxdp.UsageError,
        lambda: jaxdp.partition_dataset(np.arange(9), 3, seed),
        "rank 2",
        "seed=1",
        "seed=0",
    )
    other = np.arange(9) + (context.rank == 2)
    fails(
        jaxdp.UsageError,
        lambda: jaxdp.partition_dataset(other, 3),
        "rank 2",
        "the arrays' fingerprint=",
    )
    listed = [*other.astype(np.float32 if context.rank == 2 else np.int32)]
    fails(
        jaxdp.UsageError,
        lambda: jaxdp.partition_dataset(listed, 3),
        "rank 2",
        "an example={'inputs': 'float32[]'}",
    )
    assert isinstance(jaxdp.partition_dataset(np.arange(9), 3), Partition)


if __name__ == "__main__":
    warnings.simplefilter("error")
    context = jaxdp.init(backend=os.environ.get("BACKEND"))
    if sys.argv[1] == "ranks":
        for part in (broadcasting, metrics, gradients, partitions):
            part(context)
    loops = {
        "ranks": [by_ranks],
        "devices": [by_devices, by_a_mesh_each],
        "meshes": [by_a_mesh_each],
    }[sys.argv[1]]
    curves = [loop(context) for loop in loops]
    if context.is_root:
        print(json.dumps(curves))
