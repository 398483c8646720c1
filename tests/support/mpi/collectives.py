"""Every eager collective against NumPy, on four processes: `mpirun -np 4 python
tests/support/mpi/collectives.py`.

Prints `rank R: OK N` with the number of comparisons; the first that fails raises and ends the job.
"""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from refusals import differing_groups, refused

import checks
import jaxdp
from checks import FLOATS, INTEGERS, context, fails, group_of, rank, reduced, same, size, values

WIDE = ["float64", "int64", "uint64", "complex128"]
ALL = [*FLOATS, *INTEGERS, "bool", "complex64"]


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
            for dtype, got, want in zip(
                names, jaxdp.reduce_scatter([jnp.asarray(x) for x in mine], op), wants
            ):
                equal(got, want[part], f"reduce_scatter {op} {dtype}")
    for got, want in zip(jaxdp.reduce(mine[:2], root=1, op="avg"), wants):
        if rank == 1:
            equal(got, want, "reduce")
        else:
            assert got is None


def equal(got, want, what):
    """`same`, but for complex numbers, where the sign of a zero depends on the order of the
    factors.
    """
    if np.iscomplexobj(want):
        got, want = np.asarray(got) + 0, want + 0
        assert np.array_equal(got, want) and got.dtype == want.dtype, (what, got, want)
    else:
        same(got, want, what)


def moves(dtypes):
    every = [[values(d, r) for d in dtypes] for r in range(size)]
    mine = every[rank]

    def mine_of(x):
        return x[2 * rank : 2 * rank + 2]

    results = {
        "allgather": (jaxdp.allgather(mine), [np.concatenate(x) for x in zip(*every)]),
        "broadcast": (jaxdp.broadcast(mine if rank == 2 else None, root=2), every[2]),
        "scatter": (
            jaxdp.scatter(mine if rank == 3 else None, root=3),
            [mine_of(x) for x in every[3]],
        ),
        "all_to_all": (
            jaxdp.all_to_all(mine),
            [np.concatenate([mine_of(x) for x in xs]) for xs in zip(*every)],
        ),
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

    def build(r):
        return [
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
    tree = {
        "w": np.full((2, 2), rank, np.float32),
        "n": [np.int32(rank)],
        "key": jax.random.key(rank),
    }
    got = jaxdp.broadcast_parameters(tree)
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
    for groups, root in [
        ([[0, 1], [2, 3]], [3, 0]),
        ([[2, 0, 1]], 1),
        ([[3, 0]], (0,)),
        ([], 0),
        (None, 2),
    ]:
        group = group_of(groups)
        n, at = len(group), group.index(rank)
        top = next(r for r in group if n == 1 or r in np.atleast_1d(root))
        every = {r: values("int32", r, (6 * n, 2)) for r in group}
        x, chunk = every[rank], slice(at * 6, at * 6 + 6)
        joined, total = np.concatenate([*every.values()]), sum(every.values()).astype(np.int32)

        def at_top(y, top=top):
            return y if rank == top else None

        wants = {
            "allgather": (jaxdp.allgather(x, groups=groups), joined),
            "gather": (jaxdp.gather(x, root, groups=groups), at_top(joined)),
            "reduce": (jaxdp.reduce(x, root, groups=groups), at_top(total)),
            "reduce_scatter": (jaxdp.reduce_scatter(x, groups=groups), total[chunk]),
            "broadcast": (jaxdp.broadcast(at_top(x), root, groups), every[top]),
            "scatter": (jaxdp.scatter(at_top(x), root, groups), every[top][chunk]),
            "all_to_all": (
                jaxdp.all_to_all(x, groups=groups),
                np.concatenate([e[chunk] for e in every.values()]),
            ),
        }
        for name, (got, want) in wants.items():
            assert got is None if want is None else not same(got, want, f"{name} {groups}"), name
        halves = [e.astype(np.float32) for e in every.values()]
        same(jaxdp.allreduce(x.astype(np.float32), "avg", groups), reduced("avg", halves), "avg")
    # RAF's reduce_scatter of a list: its i-th array, reduced, on the i-th rank; ours: each of them
    # split
    lists = {r: [values("float32", 10 * r + i, (4, 3)) for i in range(4)] for r in range(size)}
    for groups in (None, [[3, 1], [0, 2]]):
        group = group_of(groups)
        mine = {r: lists[r][: len(group)] for r in group}
        at, k = group.index(rank), 4 // len(group)
        for op in ("sum", "prod", "min", "max", "avg"):
            want = [reduced(op, [*xs]) for xs in zip(*mine.values())]
            same(
                jaxdp.reduce_scatter(mine[rank], op, groups, per_rank=True),
                want[at],
                f"per_rank {op}",
            )
            for got, w in zip(jaxdp.reduce_scatter(mine[rank], op, groups), want, strict=True):
                same(got, w[at * k : at * k + k], f"list {op}")
    same(
        jaxdp.reduce_scatter([np.float32(i) for i in range(4)], per_rank=True),
        np.float32(4 * rank),
        "scalars",
    )


def axes():
    """all_to_all along any two dims, of many types at once, in all and in groups; the others along
    any one.
    """
    dtypes = [*FLOATS, "int8", "bool", "complex64"]
    for groups in (None, [[2, 1]]):
        group = group_of(groups)
        n, at = len(group), group.index(rank)
        every = {r: [values(d, r, (4, 8, 12)) for d in dtypes] for r in group}
        for split in range(-1, 3):
            for join in range(-2, 3):
                got = jaxdp.all_to_all(every[rank], split, join, groups)
                for i in range(len(dtypes)):
                    chunks = [np.split(e[i], n, split)[at] for e in every.values()]
                    same(got[i], np.concatenate(chunks, join), f"all_to_all {split} {join}")
            got = jaxdp.allgather([jnp.asarray(x) for x in every[rank]], split, groups)
            for i in range(len(dtypes)):
                same(
                    got[i],
                    np.concatenate([e[i] for e in every.values()], split),
                    f"allgather {split}",
                )


def brought():
    """What is brought in other forms than a fresh array: its numbers arrive."""
    base = np.arange(48, dtype=np.float32).reshape(6, 8) + rank

    def want(x):
        return x * 4 + 6 - 4 * rank

    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    sharded = jax.device_put(
        base, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
    )
    forms = {
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "big-endian": base.astype(">f4"),
        "read-only": np.frombuffer(base.tobytes(), np.float32),
        "another device": jax.device_put(base, devices[-1]),
        "sharded": sharded,
        "of pmap": jax.pmap(lambda x: x)(jnp.stack([base] * len(devices))),
        "0-d": base[0, 0].reshape(()),
        "scalar": base[0, 0],
    }
    for name, x in forms.items():
        native = np.asarray(x).astype(np.float32)
        same(jaxdp.allreduce(x), want(native), name)
        same(jaxdp.broadcast(x, 3), native + 3 - rank, name)
    for shape in [(0,), (4, 0), (0, 4)]:
        empty = np.zeros(shape, np.float32)
        for call in (jaxdp.allreduce, jaxdp.broadcast, jaxdp.all_to_all):
            same(call(empty), empty, f"{call.__name__} {shape}")
        same(jaxdp.allgather(empty), np.concatenate([empty] * 4), f"allgather {shape}")
        same(
            jaxdp.reduce_scatter(empty),
            np.zeros((shape[0] // 4, *shape[1:]), np.float32),
            f"reduce_scatter {shape}",
        )
        same(jaxdp.scatter(empty if rank == 0 else None), np.split(empty, 4)[0], f"scatter {shape}")
    for number, dtype in {True: np.bool_, 2: np.int32, 0.5: np.float32, 1j: np.complex64}.items():
        same(
            jaxdp.broadcast(number if rank == 1 else None, 1),
            np.asarray(number, dtype),
            "Python number",
        )
    small = np.array([rank - 2, 1], jnp.int4)
    same(jaxdp.allgather(small), np.array([-2, 1, -1, 1, 0, 1, 1, 1], jnp.int4), "int4")
    same(
        jaxdp.allreduce(np.array([0.5], jnp.float8_e4m3fn)),
        np.array([2.0], jnp.float8_e4m3fn),
        "float8",
    )


def bits():
    """NaN payloads, signaling NaNs, -0.0 and denormals survive every move."""
    patterns = {
        "float32": np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000, 1], np.uint32).view(
            np.float32
        ),
        "float16": np.array([0x7E01, 0x7C01, 0xFE12, 0x8000, 1], np.uint16).view(np.float16),
        "bfloat16": np.array([0x7FC1, 0x7F81, 0xFFC5, 0x8000, 1], np.uint16).view(jnp.bfloat16),
    }
    patterns["complex64"] = np.stack([patterns["float32"], patterns["float32"][::-1]], -1).view(
        np.complex64
    )[:, 0]
    for dtype, x in patterns.items():
        same(
            jaxdp.broadcast(x if rank == 1 else np.zeros_like(x), root=1),
            x,
            f"bits broadcast {dtype}",
        )
        same(jaxdp.allgather(x), np.tile(x, size), f"bits allgather {dtype}")
        same(
            jaxdp.all_to_all(np.repeat(x[:4], 1)),
            np.repeat(x[rank : rank + 1], size),
            f"bits all_to_all {dtype}",
        )
        same(
            jaxdp.scatter(x[:4] if rank == 0 else None), x[rank : rank + 1], f"bits scatter {dtype}"
        )
        if rank == 3:
            jaxdp.send(x, 0)
        if rank == 0:
            same(jaxdp.recv(3), x, f"bits recv {dtype}")


def accuracy():
    """Halves are summed in float32 and rounded once; integers wrap; NaN is seen by every operation."""
    for dtype, big in {"bfloat16": 256, "float16": 2048}.items():
        x = np.array(
            [big if rank == 0 else 1], jnp.dtype(dtype)
        )  # big + 1 rounds to big, big + 3 to big + 4
        want = np.array([np.float32(big + 3)]).astype(jnp.dtype(dtype))
        same(jaxdp.allreduce(x), want, f"once {dtype}")
        same(jaxdp.reduce_scatter(np.repeat(x, 4)), want, f"once {dtype}")
    same(jaxdp.allreduce(np.array([100], np.uint8)), np.array([144], np.uint8), "wraps")
    same(jaxdp.allreduce(np.array([100], np.int8)), np.array([-112], np.int8), "wraps")
    x = np.array([np.nan if rank == 2 else rank, rank], np.float32)
    for op in ("sum", "prod", "min", "max", "avg"):
        got = np.asarray(jaxdp.allreduce(x, op))
        assert np.isnan(got[0]) and not np.isnan(got[1]), (op, got)


def context_itself():
    assert context.exchange("names", f"I am {rank}") == [f"I am {r}" for r in range(size)]
    usage = jaxdp.UsageError
    context.agree(None)
    fails(
        usage,
        lambda: context.agree("no such file" if rank >= 2 else None),
        "rank 2 (host ",
        "no such file",
        speaker=2,
    )
    context.check_same("run", {"config": "a", "data": "b"})
    facts = {"config": "a", "data": "c" if rank >= 1 else "b"}
    fails(
        usage,
        lambda: context.check_same("run", facts),
        "run: rank 1",
        "data=c",
        "data=b",
        speaker=0,
    )
    context.barrier("all", timeout=30.0)
    assert jaxdp.init() is context
    fails(usage, lambda: jaxdp.init(rank=9, size=10), "already joined")


def wide():
    with jax.enable_x64(True):
        reductions(WIDE)
        moves(WIDE)
        same(jaxdp.allreduce(np.array([2**40 + 1])), np.array([2**42 + 4]), "int64")


for part in (
    differing_groups,  # as the job's first collectives
    context_itself,
    lambda: reductions(ALL),
    lambda: moves(ALL),
    lists,
    grouped,
    axes,
    brought,
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
sys.stdout.write(f"rank {rank}: OK {checks.done}\n")
