"""What the collectives refuse on every rank: arguments that cannot work, and ranks that disagree."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from checks import context, fails, rank, same


def differing_groups():
    """Whatever ranks believe of groups: an error on all of them that names ranks and all sides, and
    no hang.
    """
    one, distributed, usage = np.ones(4, np.float32), jaxdp.DistributedError, jaxdp.UsageError
    pairs, crossed = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    calls = {
        "allreduce": lambda g: jaxdp.allreduce(one, groups=g),
        "reduce": lambda g: jaxdp.reduce(one, [g[0][0], g[1][0]] if g else 0, groups=g),
        "broadcast": lambda g: jaxdp.broadcast(one, [0, 3] if g else 0, groups=g),
        "gather": lambda g: jaxdp.gather(one, [0, 3] if g else 0, groups=g),
        "scatter": lambda g: jaxdp.scatter(one, [0, 3] if g else 0, groups=g),
        "allgather": lambda g: jaxdp.allgather(one, groups=g),
        "reduce_scatter": lambda g: jaxdp.reduce_scatter(one, groups=g),
        "all_to_all": lambda g: jaxdp.all_to_all(one, groups=g),
    }
    beliefs = [
        [pairs, pairs, crossed, None],
        [None, None, None, pairs],
        [pairs, pairs, pairs, None],
        [crossed, None, crossed, crossed],
        [pairs, pairs, [[0, 1], [3, 2]], [[0, 1], [3, 2]]],  # another order
    ]
    for name, call in calls.items():
        for belief in beliefs:
            sides = {str(g) if g else "without groups": r for r, g in enumerate(belief)}
            fails(distributed, lambda call=call, g=belief[rank]: call(g), name, *sides, speaker=0)
    mine = [pairs, pairs, pairs, []][rank]
    fails(
        distributed,
        lambda: jaxdp.allreduce(one, groups=mine),
        "rank 0, 1, 2:",
        "[[0, 1], [2, 3]]",
        "rank 3:",
        "[]",
    )
    # a rank whose groups cannot be: all hear which, and why
    for bad in (
        [[0, 1], [1, 2]],
        [[0, -1]],
        [[0, 4]],
        [[0, True]],
        [[0, 1.0]],
        [["0"]],
        [0, 1],
        3,
        [[0, 0]],
        "01",
    ):
        fails(
            usage,
            lambda bad=bad: jaxdp.allreduce(one, groups=bad if rank == 2 else pairs),
            "rank 2",
            "groups=",
            speaker=2,
        )
    # the same groups in other words are the same
    forms = [pairs, ((2, 3), (0, 1)), np.array(pairs), (iter(g) for g in [[], *pairs])]
    same(
        jaxdp.allreduce(one * rank, groups=forms[rank]),
        one * (1 if rank < 2 else 5),
        "forms of groups",
    )
    forms = [None, [[0, 1, 2, 3]], [range(4)], jnp.arange(4)[None]]
    same(jaxdp.allreduce(one, groups=forms[rank]), one * 4, "forms of all")
    # shapes may differ between groups, not within one; an error in one group is one on every rank
    x = np.ones(3 + rank // 2, np.float32)
    same(jaxdp.allreduce(x, groups=pairs), x * 2, "another shape in another group")
    x = np.ones(3 + (rank == 3), np.float32)
    fails(
        distributed,
        lambda: jaxdp.allreduce(x, groups=pairs),
        "rank 2:",
        "float32[3]",
        "rank 3:",
        "float32[4]",
    )
    # roots
    for root in (0, [0, 1, 2], [2, 3], [0, 4], True, -1, "0", None):
        if root is not None:

            def bad(root=root):
                return jaxdp.broadcast(one, root if rank == 1 else [0, 2], pairs)

            fails(usage, bad, "rank 1", "root=", speaker=1)
    fails(usage, lambda: jaxdp.reduce(one, 0, groups=pairs), "[2, 3] has none", "root=[0, 2]")
    fails(
        distributed,
        lambda: jaxdp.reduce(one, [0, 2 + rank % 2], groups=pairs),
        "root=[0, 2]",
        "root=[0, 3]",
    )


def refused():
    one = np.ones(4, np.float32)
    usage, distributed = jaxdp.UsageError, jaxdp.DistributedError
    fails(usage, lambda: jaxdp.allreduce(np.ones(3)), "float64", "JAX_ENABLE_X64", speaker=0)
    fails(usage, lambda: jaxdp.allreduce(np.array([2**40 + 1])), "int64", speaker=0)
    # one rank alone is wrong: all hear of it, and it prints
    fails(
        usage,
        lambda: jaxdp.allreduce(np.ones(3) if rank == 2 else one),
        "rank 2",
        "float64",
        speaker=2,
    )
    fails(usage, lambda: jaxdp.allreduce(np.ones(3, np.int32), "avg"), "int32", speaker=0)
    fails(usage, lambda: jaxdp.allreduce(np.ones(3, np.complex64), "max"), "complex64")
    fails(usage, lambda: jaxdp.allreduce(one, "mean"), "'mean'", "sum, avg")
    fails(
        usage, lambda: jaxdp.reduce_scatter(np.ones(5, np.float32)), "float32[5]", "4 equal chunks"
    )
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
    fails(
        distributed,
        lambda: jaxdp.allreduce(shape),
        "rank 0, 2, 3",
        "float32[4]",
        "rank 1",
        "float32[5]",
        speaker=0,
    )
    other = one.astype(np.int32) if rank in (1, 3) else one
    fails(
        distributed,
        lambda: jaxdp.allgather(other),
        "rank 0, 2:",
        "float32[4]",
        "rank 1, 3:",
        "int32[4]",
    )
    call = jaxdp.allgather if rank == 3 else jaxdp.allreduce
    fails(distributed, lambda: call(one), "allreduce(sum)", "rank 3", "allgather(axis=0)")
    fails(distributed, lambda: jaxdp.broadcast(one, root=rank % 2), "root=0", "root=1")

    fails(
        distributed,
        lambda: jaxdp.allreduce([one] if rank == 0 else one),
        "rank 0: allreduce(sum) of a list of float32[4];",
        "rank 1, 2, 3: allreduce(sum) of float32[4]",
    )
    for call, words in {
        lambda: jaxdp.allreduce(one, "sum" if rank else "max"): "allreduce(max)",
        lambda: jaxdp.all_to_all(one, 0, 0 if rank else -1): "concat_axis=-1",
        lambda: jaxdp.all_to_all(np.ones((4, 4), np.float32), int(rank > 1)): "split_axis=1",
        lambda: jaxdp.allgather(np.ones((4, 4), np.float32), axis=rank // 2): "axis=1",
        lambda: jaxdp.reduce_scatter([one] * 4, per_rank=rank == 3): "per_rank",
        lambda: jaxdp.allreduce(np.int32(3) if rank else 3.0): "float32[]",
    }.items():
        fails(distributed, call, words, "rank 0", speaker=0)
    # what only one rank cannot bring, whatever it is: all hear of it at once
    gone = jnp.ones(4)
    gone.delete()
    for bad in (
        None,
        2**40,
        1e300,
        np.float64(1.0),
        gone,
        [[one]],
        [[one, 1]],
        {"a": one},
        "a",
        np.ma.array(one),
    ):
        fails(
            usage, lambda bad=bad: jaxdp.allreduce(bad if rank == 3 else one), "rank 3", speaker=3
        )
    for axis in (1, -2, 0.0, "0", True, None):
        fails(
            usage,
            lambda axis=axis: jaxdp.allgather(one, axis if rank == 1 else 0),
            "rank 1",
            speaker=1,
        )
        fails(
            usage,
            lambda axis=axis: jaxdp.all_to_all(one, concat_axis=axis if rank == 1 else 0),
            "rank 1",
            speaker=1,
        )
    fails(usage, lambda: jaxdp.all_to_all(np.float32(1)), "no dim 0")
    fails(usage, lambda: jaxdp.allreduce([], "mean"), "'mean'")
    fails(usage, lambda: jaxdp.reduce_scatter([one] * 3, per_rank=True), "per_rank takes 4 arrays")
    fails(
        usage, lambda: jaxdp.reduce_scatter([one, one, one, one[:1]], per_rank=True), "float32[1]"
    )
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
