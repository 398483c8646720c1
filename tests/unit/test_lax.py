"""Collectives inside pmap and shard_map, along an axis of eight devices, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import lax

N = 8
EVEN = [[3, 1, 0, 2], [4, 7, 6, 5]]
UNEVEN = [[5, 0, 2], [1, 7]]  # 3, 4, 6 work alone
NUMPY = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, "avg": np.add}
DTYPES = ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]


def on_devices(kind, f, *xs):
    """f of each device's own x, of xs[device, ...], stacked again."""
    if kind == "pmap":
        return jax.tree.map(np.asarray, jax.pmap(f, "i")(*xs))
    spec = P("i")

    def each(*rows):
        return jax.tree.map(lambda y: y[None], f(*(row[0] for row in rows)))

    mesh = Mesh(np.array(jax.devices()[:N]), ("i",))
    mapped = jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*xs))


def values(dtype="float32", shape=(N, 8, 3)):
    x = np.random.default_rng(3).integers(0 if dtype[0] in "ub" else -2, 3, shape)
    return (
        (x + 1j * x[:, ::-1]).astype(dtype) if dtype == "complex64" else x.astype(jnp.dtype(dtype))
    )


def group_of(groups, rank):
    return list(range(N)) if groups is None else next((g for g in groups if rank in g), [rank])


def reduced(op, rows):
    out = functools.reduce(NUMPY[op], rows)
    return (
        (out.astype(np.complex128) / len(rows)).astype(out.dtype)
        if op == "avg"
        else out.astype(rows[0].dtype)
    )


def same(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore:.*discards the imaginary part")
@pytest.mark.parametrize("groups", [None, EVEN, UNEVEN], ids=["all", "even", "uneven"])
@pytest.mark.parametrize("op", [*NUMPY])
def test_reductions(op, groups):
    def fits(d):
        return d != "bool" if op == "avg" else d != "complex64" or op in ("sum", "prod")

    dtypes = [d for d in DTYPES if fits(d) and not (op == "avg" and d in ("int8", "uint32"))]
    xs = [values(d) for d in dtypes]
    roots = 2 if groups is None else [g[1] for g in groups]

    def calls(*x):
        out = [lax.allreduce(list(x), "i", op, groups), lax.reduce(list(x), "i", roots, op, groups)]
        return out if groups is UNEVEN else [*out, lax.reduce_scatter(list(x), "i", op, groups)]

    for kind in ("pmap", "shard_map"):
        everywhere, rooted, *chunks = on_devices(kind, calls, *xs)
        for r in range(N):
            group = group_of(groups, r)
            for i, x in enumerate(xs):
                want = reduced(op, [x[m] for m in group])
                same(everywhere[i][r], want)
                is_root = len(group) == 1 or r in np.atleast_1d(roots)
                same(rooted[i][r], want if is_root else np.zeros_like(want))
                if chunks:
                    at, k = group.index(r), 8 // len(group)
                    same(chunks[0][i][r], want[at * k : (at + 1) * k])


@pytest.mark.quick(1)
@pytest.mark.parametrize("groups", [None, EVEN], ids=["all", "even"])
@pytest.mark.parametrize("kind", ["pmap", "shard_map"])
@pytest.mark.parametrize("dtypes", [DTYPES[:3], DTYPES], ids=["few", "all"])
def test_what_is_moved(dtypes, kind, groups):
    n = len(group_of(groups, 0))
    roots = 5 if groups is None else [1, 5]
    xs = [values(d, (N, 8, 16)) for d in dtypes]
    xs[0][:, 0, 0] = -0.0
    names = {
        "allgather": lambda x: lax.allgather(x, "i", 1, groups),
        "gather": lambda x: lax.gather(x, "i", roots, -1, groups),
        "broadcast": lambda x: lax.broadcast(x, "i", roots, groups),
        "scatter": lambda x: lax.scatter(x, "i", roots, groups),
        "all_to_all": lambda x: lax.all_to_all(x, "i", -1, 0, groups),
        "scalars": lambda x: lax.allgather([a[0, 0] for a in x], "i", groups=groups),
        "send": lambda x: lax.send_recv(x, "i", 6, 1),
    }
    got = on_devices(kind, lambda *x: {name: f(list(x)) for name, f in names.items()}, *xs)
    for r in range(N):
        group = group_of(groups, r)
        at, root = group.index(r), next(m for m in group if m in np.atleast_1d(roots))
        for i, x in enumerate(xs):
            joined = np.concatenate([x[m] for m in group], 1)
            cut = [np.split(x[m], n, 1)[at] for m in group]
            want = {
                "allgather": joined,
                "gather": joined if r == root else np.zeros_like(joined),
                "broadcast": x[root],
                "scatter": np.split(x[root], n)[at],
                "all_to_all": np.concatenate(cut),
                "scalars": np.stack([x[m, 0, 0] for m in group]),
                "send": x[6] if r == 1 else np.zeros_like(x[6]),
            }
            for name in names:
                same(got[name][i][r], want[name])
                if i == 0 and name == "broadcast":
                    assert np.array_equal(np.signbit(got[name][i][r]), np.signbit(want[name]))


def test_broadcast_in_uneven_groups_and_of_each_root():
    x = values()
    for root in range(N):
        got = on_devices("shard_map", lambda a, root=root: lax.broadcast(a, "i", root), x)
        same(got, np.broadcast_to(x[root], x.shape))
    got = on_devices("pmap", lambda a: lax.broadcast(a, "i", [2, 1], UNEVEN), x)
    same(got, x[[2, 1, 2, 3, 4, 2, 6, 1]])


def test_reduce_scatter_of_a_list_in_both_senses():
    xs = [values(shape=(N, 8, 3)) + j for j in range(N)]
    each, one = on_devices(
        "pmap",
        lambda *x: (
            lax.reduce_scatter(list(x), "i"),
            lax.reduce_scatter(list(x), "i", "max", per_rank=True),
        ),
        *xs,
    )
    for r in range(N):
        same(one[r], xs[r].max(0))
        for j in range(N):
            same(each[j][r], xs[j].sum(0)[r : r + 1])


def test_nan_stays_and_halves_are_rounded_once():
    x = np.ones((N, 2), np.float32)
    x[3, 0] = np.nan
    for op in NUMPY:
        got = on_devices("pmap", lambda a, op=op: lax.allreduce(a, "i", op, EVEN), x)
        assert (
            np.isnan(got[:4, 0]).all()
            and not np.isnan(got[4:]).any()
            and not np.isnan(got[:, 1]).any()
        )
    big = np.where(np.arange(N) == 0, 256, 1).astype(jnp.bfloat16)
    got = on_devices("pmap", lambda a: lax.allreduce(a, "i"), big)
    same(got, np.full(N, np.float32(263)).astype(jnp.bfloat16))


@pytest.mark.slow
def test_gradients_are_those_of_the_same_function_without_devices():
    """d/dx of sum over devices of w . f(x): what each moves is linear, and so its transpose moves
    back.
    """
    x, w = values(shape=(N, 8)), np.random.default_rng(4).normal(size=(N, 64)).astype(np.float32)
    plain = {
        "avg": lambda a: jnp.broadcast_to(a.mean(0), a.shape),
        "sum": lambda a: jnp.broadcast_to(a.sum(0), a.shape),
        "allgather": lambda a: jnp.broadcast_to(a.reshape(-1), (N, 64)),
        "broadcast": lambda a: jnp.broadcast_to(a[3], a.shape),
        "all_to_all": lambda a: a.T,
        "scatter": lambda a: a[3][:, None],
        "reduce_scatter": lambda a: a.sum(0)[:, None],
        "send": lambda a: jnp.zeros_like(a).at[1].set(a[6]),
    }
    mapped = {
        "avg": lambda a: lax.allreduce(a, "i", "avg"),
        "sum": lambda a: lax.allreduce(a, "i"),
        "allgather": lambda a: lax.allgather(a, "i"),
        "broadcast": lambda a: lax.broadcast(a, "i", 3),
        "all_to_all": lambda a: lax.all_to_all(a, "i"),
        "scatter": lambda a: lax.scatter(a, "i", 3),
        "reduce_scatter": lambda a: lax.reduce_scatter(a, "i"),
        "send": lambda a: lax.send_recv(a, "i", 6, 1),
    }

    def dot(y, v):
        return (y * v[: y.size]).sum()

    for name, f in mapped.items():
        got = on_devices("shard_map", lambda a, v, f=f: jax.grad(lambda b: dot(f(b), v))(a), x, w)
        want = jax.grad(lambda b, g=plain[name]: sum(dot(y, v) for y, v in zip(g(b), w)))(x)
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: lax.allreduce(x, "i", "mean"), "is not one of"),
        (lambda x: lax.allreduce(x.astype(int), "i", "avg"), "the average of int32"),
        (lambda x: lax.allreduce(x, "i", groups=[[0, 1], [1, 2]]), "twice"),
        (lambda x: lax.allgather(x, "i", groups=[[0, 1]]), "of one size"),
        (lambda x: lax.broadcast(x, "i", 0, [[0, 1], [2, 3]]), "root=[0, 2]"),
        (lambda x: lax.broadcast(x, "i", 8), "root=8 is not a rank"),
        (lambda x: lax.reduce_scatter(x[:3], "i"), "8 equal chunks"),
        (lambda x: lax.reduce_scatter([x] * 3, "i", per_rank=True), "a list of 8"),
        (
            lambda x: lax.reduce_scatter([x[:1]] + [x] * 7, "i", per_rank=True),
            "8 arrays of one type and shape",
        ),
        (
            lambda x: lax.reduce_scatter([x.astype(int)] + [x] * 7, "i", per_rank=True),
            "of one type and shape",
        ),
        (lambda x: lax.reduce_scatter([{"a": x}] * 8, "i", per_rank=True), "of one type and shape"),
        (lambda x: lax.allreduce(x, "j"), "no axis 'j' is mapped here"),
        (lambda x: lax.allreduce(x, "i", ["sum"]), "op=['sum'] is not one of"),
        (lambda x: lax.allreduce("x", "i"), "give an array, or a tree of arrays"),
        (lambda x: lax.all_to_all(x[:3], "i"), "cannot be split into 8 equal chunks"),
        (lambda x: lax.allgather(x, "i", axis="0"), "has no dim '0'"),
        (lambda x: lax.send_recv(x, "i", 1, 9), "src=1, dst=9: 9 is not a rank"),
        (lambda x: lax.send_recv(x, "i", 1, 9), "9 is not a rank"),
        (lambda x: lax.all_to_all(x, "i", 7), "has no dim 7"),
        (lambda x: lax.all_to_all(x, "i", 0, -7), "has no dim -7"),
        (lambda x: lax.allgather(x, "i", axis=7), "has no dim 7"),
    ],
)
def test_what_cannot_work_is_refused_while_tracing(call, words):
    with pytest.raises(jaxdp.UsageError) as error:
        on_devices("pmap", call, values())
    assert words in str(error.value)


def test_an_eager_collective_inside_jit_names_the_module():
    with pytest.raises(jaxdp.UsageError, match=r"use jaxdp\.lax"):
        jax.jit(jaxdp.allreduce)(np.ones(2, np.float32))
