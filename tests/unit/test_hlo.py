"""What a compiled program moves is read right: kinds, bytes, dtypes, groups, and times the loops
around it.
"""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.plan.hlo import Collective, collectives, summarize
from jaxdp.plan.hlo.compiled_program import UNKNOWN_GROUPS, replica_groups

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("r", "d"), axis_types=(AxisType.Auto,) * 2)
ALL = (tuple(range(8)),)
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))


def mapped(f, mesh=MESH):
    """f(x) per device, over a mesh of eight; what it returns is taken from the first."""
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def found(f, *args, mesh=MESH):
    lowered = mapped(f, mesh).lower(*args)
    return collectives(lowered.compile().as_text(), lowered.as_text())


def read(text):
    return collectives(textwrap.dedent(text))


def brief(found):
    return [(c.kind, c.count, c.bytes, c.dtype, c.group_size, c.exact) for c in found]


X = jnp.ones((8, 3))  # 96 bytes


def test_a_reduction_is_counted_whole():
    (c,) = found(lambda x: jax.lax.psum(x, ("r", "d")), X)
    assert c[:6] == ("all-reduce", 1, 96, "float32", 8, ALL)
    assert c.exact
    assert c.wire == 2 * 96


def test_scatter_and_gather_count_the_full_array():
    def f(x):
        part = jax.lax.psum_scatter(x, "d", tiled=True)
        return jax.lax.all_gather(part, "d", tiled=True)

    scatter, gather = found(f, X)
    assert scatter[:6] == ("reduce-scatter", 1, 96, "float32", 4, ROWS)
    assert gather[:6] == ("all-gather", 1, 96, "float32", 4, ROWS)
    assert scatter.wire == gather.wire == 96
    assert summarize([scatter, gather]) == {
        "reduce-scatter": (1, 96, 96),
        "all-gather": (1, 96, 96),
    }


def test_a_group_along_either_axis():
    r, d = found(lambda x: jax.lax.psum(jax.lax.psum(x, "r") * 2, "d"), X)
    assert (r.group_size, r.groups) == (2, COLUMNS) and (d.group_size, d.groups) == (4, ROWS)
    assert [d.per_block(k) for k in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert [r.per_block(k) for k in (1, 2, 4, 8)] == [1, 1, 1, 2]


def test_nested_loops_multiply():
    def f(x):
        def inner(c, _):
            return c + jax.lax.psum(c, "d"), None

        def outer(c, _):
            c, _ = jax.lax.scan(inner, c, None, length=3)
            return jnp.sin(
                jax.lax.all_gather(jax.lax.psum_scatter(c, "r", tiled=True), "r", tiled=True)
            ), None

        return jax.lax.scan(outer, x, None, length=5)[0]

    rows = summarize(found(f, X))
    assert rows == {
        "all-reduce": (15, 15 * 96, 15 * 192),
        "reduce-scatter": (5, 5 * 96, 5 * 96),
        "all-gather": (5, 5 * 96, 5 * 96),
    }


def test_what_only_the_run_knows_is_flagged():
    def f(x):
        x = jax.lax.while_loop(lambda c: c.sum() < 1e3, lambda c: c + jax.lax.psum(c, "d"), x)
        return jax.lax.cond(x[0, 0] > 0, lambda c: jax.lax.pmax(c, "r"), lambda c: c, x)

    assert brief(found(f, X)) == [("all-reduce", 1, 96, "float32", n, False) for n in (4, 2)]


def test_narrow_floats_are_recovered_beside_wide_ones():
    x = X.astype(jnp.bfloat16)
    rows = found(lambda x: jax.lax.psum((x, jnp.arange(5.0)), ("r", "d")), x)
    assert sorted(brief(rows)) == [
        ("all-reduce", 1, 20, "float32", 8, True),
        ("all-reduce", 1, 48, "bfloat16", 8, True),
    ]
    assert {
        c.dtype
        for c in collectives(mapped(lambda x: jax.lax.psum(x, "d")).lower(x).compile().as_text())
    } == {"float32"}, "XLA:CPU no longer widens: the second text is not needed"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_of_every_kind(dtype):
    def f(x):
        whole = jax.lax.all_gather(jax.lax.psum_scatter(x, "d", tiled=True), "d", tiled=True)
        moved = jax.lax.ppermute(whole, "d", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return jax.lax.all_to_all(moved, "d", 0, 0, tiled=True)

    got = {c.kind: (c.bytes, c.dtype, c.group_size, c.groups) for c in found(f, X.astype(dtype))}
    kinds = ["reduce-scatter", "all-gather", "collective-permute", "all-to-all"]
    assert got == dict.fromkeys(kinds, (48, jnp.dtype(dtype).name, 4, ROWS))


def test_a_float32_of_the_same_size_stays():
    def f(x):
        return jax.lax.psum(x.astype(jnp.bfloat16), "d"), jax.lax.psum(jnp.sin(x), "r")

    assert {(c.bytes, c.dtype) for c in found(f, X)} == {(96, "float32")}


def test_integers_and_booleans():
    x = jnp.ones((8, 3), jnp.int8)
    assert brief(found(lambda x: jax.lax.pmax(x, "d"), x)) == [
        ("all-reduce", 1, 24, "int8", 4, True)
    ]
    assert brief(found(lambda x: jax.lax.all_gather(x > 0, "d"), x))[0][:3] == ("all-gather", 1, 96)


def test_many_operands_are_one_collective():
    (c,) = found(lambda x: jax.lax.psum([x, x[0], x[0, 0] * 2], ("r", "d")), X)
    assert c.bytes == 96 + 12 + 4


def test_what_the_partitioner_inserts_is_seen():
    def put(x, spec):
        return jax.device_put(x, NamedSharding(MESH, spec))

    a, b = put(jnp.ones((16, 32)), P(None, "d")), put(jnp.ones((32, 8)), P("d", None))
    compiled = jax.jit(jnp.dot, out_shardings=NamedSharding(MESH, P())).lower(a, b).compile()
    assert [c[:6] for c in collectives(compiled.as_text())] == [
        ("all-reduce", 1, 16 * 8 * 4, "float32", 4, ROWS)
    ]


def test_pmap():
    lowered = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i").lower(X)
    assert [c[:6] for c in collectives(lowered.compile().as_text())] == [
        ("all-reduce", 1, 12, "float32", 8, ALL)
    ]


def test_groups_follow_the_mesh_and_not_the_device_ids():
    axes = (AxisType.Auto,) * 3
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 2, 2).transpose(2, 1, 0),
        ("a", "b", "c"),
        axis_types=axes,
    )
    (c,) = found(lambda x: jax.lax.all_gather(x, ("c", "a")), X, mesh=mesh)
    assert c[:6] == ("all-gather", 1, 4 * 96, "float32", 4, ((0, 4, 1, 5), (2, 6, 3, 7)))


def test_a_program_without_collectives():
    assert found(jnp.sin, X) == [] and summarize([]) == {}


def test_a_text_that_is_no_compiled_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives(mapped(jnp.sin).lower(X).as_text())


GPU = """
    HloModule jit_update, is_scheduled=true, entry_computation_layout={(bf16[64]{0})->bf16[64]{0}}, num_partitions=8

    %add (x: f32[], y: f32[]) -> f32[] {
      %x = f32[] parameter(0)
      %y = f32[] parameter(1)
      ROOT %sum = f32[] add(%x, %y)
    }

    %async (p: f32[1024]) -> f32[128] {
      %p = f32[1024]{0:T(1024)} parameter(0)
      ROOT %rs.2 = f32[128]{0:T(128)S(1)} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, \
to_apply=%add, metadata={op_name="jit(update)/reduce_scatter"}
    }

    %body (c: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
      %c = (s32[], bf16[64,32]{1,0:T(8,128)(2,1)}) parameter(0)
      %w = bf16[8,32]{1,0} get-tuple-element(%c), index=1
      %ags = (bf16[8,32]{1,0:T(8,128)(2,1)}, bf16[64,32]{1,0:T(8,128)(2,1)}) all-gather-start(%w), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true, metadata={op_name="a \\"}{ all-reduce(\\" b"}
      %agd = bf16[64,32]{1,0:T(8,128)(2,1)} all-gather-done(%ags), metadata={op_name="all-gather-done(x)"}
      %call = bf16[64,32]{1,0} call(%agd), to_apply=%inner
      ROOT %out = (s32[], bf16[64,32]{1,0}) tuple(%i, %call)
    }

    %inner (q: bf16[64,32]) -> bf16[64,32] {
      %ars = bf16[64,32]{1,0} all-reduce-start(%q), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
      ROOT %ard = bf16[64,32]{1,0} all-reduce-done(%ars)
    }

    %condition (c: (s32[], bf16[64,32])) -> pred[] {
      %c.1 = (s32[], bf16[64,32]{1,0}) parameter(0)
      %ar.9 = pred[] all-reduce(%c.1), replica_groups={}, to_apply=%add
      ROOT %lt = pred[] compare(%ar.9, %ar.9), direction=LT
    }

    ENTRY %main (a: bf16[64], /*index=1*/b: f32[1024]) -> bf16[64] {
      %ars.2 = (f32[10]{0}, bf16[6]{0}, /*index=2*/f32[]) all-reduce-start(%a, %b, %d), replica_groups={}, to_apply=%add
      %ard.2 = (f32[10]{0}, bf16[6]{0}, f32[]) all-reduce-done(%ars.2)
      %start = ((f32[1024]{0}), f32[128]{0}, s32[]) async-start(%b), calls=%async
      %done = f32[128]{0} async-done(%start), calls=%async
      %rss = ((f32[16]{0}, f32[32]{0}), (f32[4]{0}, f32[8]{0})) reduce-scatter-start(%b, %b), \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
      %rsd = (f32[4]{0}, f32[8]{0}) reduce-scatter-done(%rss)
      %cps = (f8e4m3fn[7]{0}, f8e4m3fn[7]{0}, u32[], u32[]) collective-permute-start(%a), \
source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
      %cpd = f8e4m3fn[7]{0} collective-permute-done(%cps)
      %a2a = (bf16[2,8]{1,0}, bf16[2,8]{1,0}) all-to-all(%a, %a), replica_groups={{0,1},{2,3},{4,5},{6,7}}
      %cb = s4[9]{0} collective-broadcast(%a), replica_groups={{0,1}}
      %while = (s32[], bf16[64,32]{1,0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}
      ROOT %r = bf16[64]{0} copy(%a)
    }
"""


def test_a_gpu_program():
    want = [
        ("reduce-scatter", 1, 4096, "float32", 8, True),
        ("all-gather", 12, 64 * 32 * 2, "bfloat16", 8, True),
        ("all-reduce", 12, 64 * 32 * 2, "bfloat16", 4, True),
        ("all-reduce", 13, 1, "bool", 8, True),  # a condition is asked once more than the body runs
        ("all-reduce", 1, 44, "float32", 8, True),
        ("all-reduce", 1, 12, "bfloat16", 8, True),
        ("reduce-scatter", 1, 4 * 48, "float32", 4, True),
        ("collective-permute", 1, 7, "float8_e4m3fn", 2, True),
        ("all-to-all", 1, 64, "bfloat16", 2, True),
        ("collective-broadcast", 1, 5, "int4", 2, True),
    ]
    got = read(GPU)
    assert brief(got) == want
    assert got[2].groups == ((0, 2, 4, 6), (1, 3, 5, 7)) and got[7].groups == ((0, 4), (1, 5))


@pytest.mark.parametrize(
    "count, exact", [("", False), (', backend_config={"known_trip_count":{"n":"3"}}', True)]
)
def test_a_loop_in_a_loop_of_unknown_length(count, exact):
    text = f"""
        HloModule m, num_partitions=2
        %inner (p: f32[4]) -> f32[4] {{
          %p = f32[4] parameter(0)
          ROOT %r = f32[4] all-reduce(%p), replica_groups={{{{0,1}}}}, to_apply=%add
        }}
        %outer (p: f32[4]) -> f32[4] {{
          %p = f32[4] parameter(0)
          ROOT %w = f32[4] while(%p), condition=%c, body=%inner, backend_config={{"known_trip_count":{{"n":"5"}}}}
        }}
        ENTRY %main (p: f32[4]) -> f32[4] {{
          %p = f32[4] parameter(0)
          %twice = f32[4] call(%p), to_apply=%outer
          ROOT %w = f32[4] while(%twice), condition=%c, body=%outer{count}
        }}
    """
    assert brief(read(text)) == [
        ("all-reduce", 5 * (1 + (3 if exact else 1)), 16, "float32", 2, exact)
    ]


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups={}, dimensions={0}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("dimensions={0}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8]", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", COLUMNS),
        ("replica_groups=[4,2]<=[2,2,2]T(1,0,2)", ((0, 1), (4, 5), (2, 3), (6, 7))),
        ("replica_groups=mesh['r'=2,'d'=4] {'d'}, x", ROWS),
        ("replica_groups=mesh['r'=2,'d'=4] {'r'}", COLUMNS),
        ("replica_groups=mesh[r=2,d=4] {r,d}", ALL),
        ("replica_groups=mesh['r'=2,'d'=4] {'d','r'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, x={0}", COLUMNS),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("replica_groups=mesh['a'=1,'b'=8] {'a'}", tuple((i,) for i in range(8))),
        ("source_target_pairs={{0,1},{1,2},{2,0},{5,5}}", ((0, 1, 2), (5,))),
    ],
)
def test_every_syntax_of_groups(text, groups):
    assert replica_groups(text, 8) == groups
    assert UNKNOWN_GROUPS.findall(f"%r = f32[4] all-reduce(%p), {text}, to_apply=%add") == []


@pytest.mark.parametrize("name", ["replica_groups", "source_target_pairs"])
@pytest.mark.parametrize(
    "groups", ["<0..7 step 2>", "[2,4]{0, 1}", "[]", "every(2)", "mesh['d'=8] {'d':(2)2}"]
)
def test_an_unknown_syntax_of_groups_is_found(name, groups):
    line = f"  %r = f32[4] all-reduce(%p), {name}={groups}"
    for text in (f"{line}, to_apply=%add\n", f"{line}\n", line):
        assert UNKNOWN_GROUPS.findall(text + "\n%known = f32[] all-reduce(%q)") == [groups]
        assert replica_groups(text, 8) == ALL


def test_the_smallest_share_of_uneven_groups():
    c = Collective("all-reduce", 1, 4, "float32", 4, ((0, 1, 2, 3), (4, 5, 6, 8)))
    assert c.per_block(8) == 1 and c.per_block(4) == 1 and c.per_block(16) == 4
