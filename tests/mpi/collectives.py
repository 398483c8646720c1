"""Every eager collective against NumPy, on four processes: run as `mpirun -np 4 python tests/mpi/collectives.py`.

Prints `rank R: OK N` with the number of comparisons; the first that fails raises and ends the job.
"""

import os
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp

warnings.simplefilter("error")
context = jaxdp.init()
rank, size = context.rank, context.size
done = 0
FLOATS = ["float16", "bfloat16", "float32"]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]
WIDE = ["float64", "int64", "uint64", "complex128"]
ALL = [*FLOATS, *INTEGERS, "bool", "complex64"]
NUMPY = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def same(got, want, what):
    """Equal in type, shape and bits."""
    global done
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape, (what, got.dtype, want.dtype, got.shape, want.shape)
    assert got.tobytes() == want.tobytes(), (what, got, want)
    done += 1


def values(dtype, r, shape=(2 * size, 3)):
    """Small integers that every type and every sum of them holds exactly; different on each rank."""
    x = np.random.default_rng(7 + r).integers(0 if dtype.startswith(("u", "b")) else -3, 4, shape)
    return (x + 1j * x[::-1]).astype(dtype) if dtype.startswith("complex") else x.astype(jnp.dtype(dtype))


def reduced(op, arrays):
    dtype = arrays[0].dtype
    out = arrays[0]
    for x in arrays[1:]:
        out = NUMPY["sum" if op == "avg" else op](out, x)
    return (out.astype(np.float64) / len(arrays)).astype(dtype) if op == "avg" else out.astype(dtype)


def fails(kind, call, *parts, speaker=None):
    """Every rank that takes part gets this error, and knows who prints it."""
    global done
    try:
        call()
    except kind as error:
        for part in parts:
            assert part in str(error), (part, str(error))
        assert speaker is None or error.rank == speaker, (error.rank, speaker)
        done += 1
    else:
        raise AssertionError(f"no {kind.__name__} ({parts})")


def supports(op, dtype):
    if dtype.startswith("complex"):
        return op in ("sum", "prod")
    return op != "avg" or dtype in FLOATS or dtype == "float64"


def reductions(dtypes):
    for op in ("sum", "prod", "min", "max", "avg"):
        names = [d for d in dtypes if supports(op, d)]
        every = [[values(d, r) for d in names] for r in range(size)]
        wants = [reduced(op, xs) for xs in zip(*every)]
        mine, part = every[rank], slice(2 * rank, 2 * rank + 2)
        for dtype, got, want in zip(names, jaxdp.allreduce(mine, op), wants):
            equal(got, want, f"allreduce {op} {dtype}")
        if op in ("sum", "max", "avg"):  # the rest is one path with these
            for dtype, got, want in zip(names, jaxdp.reduce_scatter([jnp.asarray(x) for x in mine], op), wants):
                equal(got, want[part], f"reduce_scatter {op} {dtype}")
    for got, want in zip(jaxdp.reduce(mine[:2], root=1, op="avg"), wants):
        if rank == 1:
            equal(got, want, "reduce")
        else:
            assert got is None


def equal(got, want, what):
    """`same`, but for complex numbers, where the sign of a zero depends on the order of the factors."""
    if np.iscomplexobj(want):
        got, want = np.asarray(got) + 0, want + 0
        assert np.array_equal(got, want) and got.dtype == want.dtype, (what, got, want)
    else:
        same(got, want, what)


def moves(dtypes):
    every = [[values(d, r) for d in dtypes] for r in range(size)]
    mine = every[rank]
    mine_of = lambda x: x[2 * rank : 2 * rank + 2]
    results = {
        "allgather": (jaxdp.allgather(mine), [np.concatenate(x) for x in zip(*every)]),
        "broadcast": (jaxdp.broadcast(mine if rank == 2 else None, root=2), every[2]),
        "scatter": (jaxdp.scatter(mine if rank == 3 else None, root=3), [mine_of(x) for x in every[3]]),
        "all_to_all": (jaxdp.all_to_all(mine), [np.concatenate([mine_of(x) for x in xs]) for xs in zip(*every)]),
    }
    gathered = jaxdp.gather(mine, root=1, axis=-1)
    if rank == 1:
        results["gather"] = gathered, [np.concatenate(x, 1) for x in zip(*every)]
    else:
        assert gathered == [None] * len(mine)
    if rank == 0:
        jaxdp.send(mine, 3)
    if rank == 3:
        results["recv"] = jaxdp.recv(0), every[0]
    for what, (got, want) in results.items():
        for dtype, g, w in zip(dtypes, got, want, strict=True):
            same(g, w, f"{what} {dtype}")


def lists():
    """A list is one transfer per type, keeps its order, and may hold scalars and empty arrays."""
    build = lambda r: [
        np.float32(r + 1),
        np.full((3, 2), r, np.int32),
        np.full((0, 4), r, np.float32),
        np.full(5, 0.5 * r, jnp.bfloat16),
        np.array([r == 1]),
        np.full((2, 1), r + 0.25, np.float32),
    ]
    every = [build(r) for r in range(size)]
    for got, *xs in zip(jaxdp.allreduce(every[rank]), *every):
        same(got, reduced("sum", [np.asarray(x) for x in xs]), "list allreduce")
    for got, *xs in zip(jaxdp.allgather(every[rank]), *every):
        same(got, np.concatenate([np.atleast_1d(x) for x in xs]), "list allgather")
    for got, x in zip(jaxdp.broadcast(every[rank] if rank == 1 else None, root=1), every[1]):
        same(got, x, "list broadcast")
    assert jaxdp.allreduce([]) == []
    same(jaxdp.allreduce(rank + 1), np.int32(10), "python scalar")
    if rank == 2:
        jaxdp.send([np.arange(3, dtype=np.int8), np.float32(-0.0)], 1)
    if rank == 1:
        first, second = jaxdp.recv(2)
        same(first, np.arange(3, dtype=np.int8), "recv list")
        same(second, np.float32(-0.0), "recv list")
    tree = {"w": np.full((2, 2), rank, np.float32), "n": [np.int32(rank)], "key": jax.random.key(rank)}
    got = context.broadcast(tree)
    assert got["key"].dtype == tree["key"].dtype
    same(jax.random.key_data(got["key"]), jax.random.key_data(jax.random.key(0)), "key")
    same(got["w"], np.zeros((2, 2), np.float32), "tree")
    same(got["n"][0], np.int32(0), "tree")


def grouped():
    x = np.ones((1, 4), np.float32) * (rank + 1)
    table = {  # RAF's own: what each rank has afterwards
        None: [10, 10, 10, 10],
        ((0, 1), (2, 3)): [3, 3, 7, 7],
        ((0, 1, 2), (3,)): [6, 6, 6, 4],
        ((0, 1, 2),): [6, 6, 6, 4],
        ((3, 1),): [1, 6, 3, 6],
    }
    for groups, want in table.items():
        same(jaxdp.allreduce(x, groups=groups), x * 0 + want[rank], f"allreduce {groups}")
    for groups in [[[0, 1], [2, 3]], [[2, 0, 1]], [[3, 0]], []]:
        group = next((g for g in groups if rank in g), [rank])
        n, at = len(group), group.index(rank)
        every = {r: values("int32", r, (6, 2)) for r in group}
        chunk = 6 // n
        same(jaxdp.allgather(every[rank], groups=groups), np.concatenate([every[r] for r in group]), "allgather")
        want = sum(every.values())[at * chunk : (at + 1) * chunk].astype(np.int32)
        same(jaxdp.reduce_scatter(every[rank], groups=groups), want, f"reduce_scatter {groups}")
        want = np.concatenate([every[r][at * chunk : (at + 1) * chunk] for r in group])
        same(jaxdp.all_to_all(every[rank], groups=groups), want, f"all_to_all {groups}")
        same(
            jaxdp.allreduce(every[rank].astype(np.float32), "avg", groups),
            reduced("avg", [e.astype(np.float32) for e in every.values()]),
            "avg",
        )


def bits():
    """NaN payloads, signaling NaNs, -0.0 and denormals survive every move."""
    patterns = {
        "float32": np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32).view(np.float32),
        "float16": np.array([0x7E01, 0x7C01, 0xFE12, 0x8000, 1], np.uint16).view(np.float16),
        "bfloat16": np.array([0x7FC1, 0x7F81, 0xFFC5, 0x8000, 1], np.uint16).view(jnp.bfloat16),
    }
    patterns["complex64"] = np.stack([patterns["float32"], patterns["float32"][::-1]], -1).view(np.complex64)[:, 0]
    for dtype, x in patterns.items():
        same(jaxdp.broadcast(x if rank == 1 else np.zeros_like(x), root=1), x, f"bits broadcast {dtype}")
        same(jaxdp.allgather(x), np.tile(x, size), f"bits allgather {dtype}")
        same(jaxdp.all_to_all(np.repeat(x[:4], 1)), np.repeat(x[rank : rank + 1], size), f"bits all_to_all {dtype}")
        same(jaxdp.scatter(x[:4] if rank == 0 else None), x[rank : rank + 1], f"bits scatter {dtype}")
        if rank == 3:
            jaxdp.send(x, 0)
        if rank == 0:
            same(jaxdp.recv(3), x, f"bits recv {dtype}")


def accuracy():
    """Halves are summed in float32 and rounded once; integers wrap; NaN is seen by every operation."""
    for dtype, big in {"bfloat16": 256, "float16": 2048}.items():
        x = np.array([big if rank == 0 else 1], jnp.dtype(dtype))  # big + 1 rounds to big, big + 3 to big + 4
        want = np.array([np.float32(big + 3)]).astype(jnp.dtype(dtype))
        same(jaxdp.allreduce(x), want, f"once {dtype}")
        same(jaxdp.reduce_scatter(np.repeat(x, 4)), want, f"once {dtype}")
    same(jaxdp.allreduce(np.array([100], np.uint8)), np.array([144], np.uint8), "wraps")
    same(jaxdp.allreduce(np.array([100], np.int8)), np.array([-112], np.int8), "wraps")
    x = np.array([np.nan if rank == 2 else rank, rank], np.float32)
    for op in ("sum", "prod", "min", "max", "avg"):
        got = np.asarray(jaxdp.allreduce(x, op))
        assert np.isnan(got[0]) and not np.isnan(got[1]), (op, got)


def refused():
    one = np.ones(4, np.float32)
    usage, distributed = jaxdp.UsageError, jaxdp.DistributedError
    fails(usage, lambda: jaxdp.allreduce(np.ones(3)), "float64", "JAX_ENABLE_X64", speaker=0)
    fails(usage, lambda: jaxdp.allreduce(np.array([2**40 + 1])), "int64", speaker=0)
    # one rank alone is wrong: all hear of it, and it prints
    fails(usage, lambda: jaxdp.allreduce(np.ones(3) if rank == 2 else one), "rank 2", "float64", speaker=2)
    fails(usage, lambda: jaxdp.allreduce(np.ones(3, np.int32), "avg"), "int32", speaker=0)
    fails(usage, lambda: jaxdp.allreduce(np.ones(3, np.complex64), "max"), "complex64")
    fails(usage, lambda: jaxdp.allreduce(one, "mean"), "'mean'", "sum, avg")
    fails(usage, lambda: jaxdp.reduce_scatter(np.ones(5, np.float32)), "float32[5]", "4 equal chunks")
    fails(usage, lambda: jaxdp.scatter(np.ones(5, np.float32) if rank == 0 else None), "float32[5]")
    fails(usage, lambda: jaxdp.broadcast(None), "rank 0", speaker=0)
    fails(usage, lambda: jaxdp.broadcast(one, root=4), "root=4", "0 to 3")
    fails(usage, lambda: jaxdp.allgather(one, axis=1), "no dim 1")
    fails(usage, lambda: jaxdp.allreduce(one, groups=[[0, 1], [1, 2]]), "rank 1", "twice")
    fails(usage, lambda: jaxdp.allreduce(one, groups=[[0, 4]]), "4 is not a rank")
    fails(usage, lambda: jaxdp.send(one, rank), "itself")
    fails(usage, lambda: jaxdp.allreduce(jax.random.key(0)), "key_data")
    # disagreement: both sides are named, on every rank
    shape = np.ones(5 if rank == 1 else 4, np.float32)
    fails(distributed, lambda: jaxdp.allreduce(shape), "rank 0, 2, 3", "float32[4]", "rank 1", "float32[5]", speaker=0)
    other = one.astype(np.int32) if rank in (1, 3) else one
    fails(distributed, lambda: jaxdp.allgather(other), "rank 0, 2:", "float32[4]", "rank 1, 3:", "int32[4]")
    call = jaxdp.allgather if rank == 3 else jaxdp.allreduce
    fails(distributed, lambda: call(one), "allreduce(sum)", "rank 3", "allgather(axis=0)")
    fails(distributed, lambda: jaxdp.broadcast(one, root=rank % 2), "root=0", "root=1")
    fails(distributed, lambda: jaxdp.allreduce([one] if rank == 0 else one), "rank 1, 2, 3")
    if rank in (0, 2):
        call = (lambda: jaxdp.send(one, 2)) if rank == 0 else (lambda: jaxdp.send(one, 0))
        fails(distributed, call, "send from rank 0 to rank 2", "send from rank 2 to rank 0")
    # ranks that come too late are named, on themselves as well; and then the next call works
    os.environ["JAXDP_TIMEOUT"] = "2"
    context.barrier("start together")
    if rank in (1, 2):
        time.sleep(3.0)
    fails(distributed, lambda: jaxdp.allreduce(one), "rank 1, 2 did not come", "2 s")
    os.environ["JAXDP_TIMEOUT"] = "30"
    same(jaxdp.allreduce(one), 4 * one, "after errors")


def context_itself():
    assert context.exchange("names", f"I am {rank}") == [f"I am {r}" for r in range(size)]
    usage = jaxdp.UsageError
    context.agree(None)
    fails(
        usage, lambda: context.agree("no such file" if rank >= 2 else None), "rank 2 (host ", "no such file", speaker=2
    )
    context.check_same("run", {"config": "a", "data": "b"})
    facts = {"config": "a", "data": "c" if rank >= 1 else "b"}
    fails(usage, lambda: context.check_same("run", facts), "run: rank 1", "data=c", "data=b", speaker=0)
    context.barrier("all", timeout=30.0)
    assert jaxdp.init() is context
    fails(usage, lambda: jaxdp.init(rank=9, size=10), "already joined")


def wide():
    with jax.enable_x64(True):
        reductions(WIDE)
        moves(WIDE)
        same(jaxdp.allreduce(np.array([2**40 + 1])), np.array([2**42 + 4]), "int64")


for part in (
    context_itself,
    lambda: reductions(ALL),
    lambda: moves(ALL),
    lists,
    grouped,
    bits,
    accuracy,
    refused,
    wide,
):
    began = time.monotonic()
    part()
    if os.environ.get("TIMES") and rank == 0:
        print(f"{part.__name__} {time.monotonic() - began:.2f} s", flush=True)
context.barrier("done")
sys.stdout.write(f"rank {rank}: OK {done}\n")
