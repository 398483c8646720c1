"""What each stage moves and holds is what the ZeRO paper and our table say, read from compiled
programs.

A layout that silently does nothing trains the same numbers; only bytes show it. So every claim is
checked by a function of the claim, which must also refuse the programs of other stages.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from covering import cover, first, name, only, product
from jaxdp.plan.hlo import Collective, collectives, summarize
from jaxdp.precision import Policy
from programs import DEVICES, LAYERS, OPTIMIZERS, SLOTS, USUAL, build, compiled, size


class Claim(NamedTuple):
    """What a program is said to do. k: microbatches of a device that are reduced and gathered for
    one after the other; parts: devices that share one copy of what is split; gathers: of a block,
    per microbatch, in stage 3."""

    zero: int
    k: int = 1
    gradient_buffer: str = "sharded"
    parts: int = DEVICES
    gathers: int = 2
    gather_bytes: int = 4  # of a parameter
    reduce_bytes: int = 4

    @property
    def split_grads(self):
        return self.zero > 1 and self.gradient_buffer == "sharded"

    @property
    def wire(self):
        """(kind, devices of a group) -> bytes per update in units of float32 parameters: the table
        of the design.
        """
        if self.zero == 0:
            return {("all-reduce", DEVICES): self.reduce_bytes / 4}
        scatters = (self.k if self.split_grads else 1) * self.reduce_bytes / 4
        gathers = self.gathers * self.k * self.gather_bytes / 4 if self.zero == 3 else 1
        across = (
            {}
            if self.parts == DEVICES
            else {("all-reduce", DEVICES // self.parts): scatters / self.parts}
        )
        return {
            ("reduce-scatter", self.parts): scatters,
            ("all-gather", self.parts): gathers,
        } | across


def problems(claim, found, params):
    """Why a program with these collectives, of a model with so many bytes of float32 parameters, is
    not what is claimed: kinds, bytes within 2 % (scalars, norms, factored rows), groups, and what
    happens block by block: in a loop over the blocks, or beside it and no more than a block."""
    groups = {
        claim.parts: tuple(
            tuple(range(i, i + claim.parts)) for i in range(0, DEVICES, claim.parts)
        ),
        DEVICES // claim.parts: tuple(
            tuple(range(i, DEVICES, claim.parts)) for i in range(claim.parts)
        ),
        DEVICES: (tuple(range(DEVICES)),),
    }
    moved, in_blocks, said = {}, {}, []
    for c in found:
        if not c.exact:
            said.append(f"{c.kind} in a loop of unknown length")
        if c.kind not in ("all-reduce", "reduce-scatter", "all-gather"):
            said.append(f"{c.kind} of {c.bytes} bytes")
        if c.bytes * c.count > 0.002 * params and c.groups != groups.get(c.group_size):
            said.append(f"{c.kind} in groups {c.groups}")
        key = (c.kind, c.group_size)
        moved[key] = moved.get(key, 0) + c.bytes * c.count / params
        if c.count >= LAYERS or c.bytes <= params / LAYERS:
            in_blocks[c.kind] = in_blocks.get(c.kind, 0) + c.bytes * c.count / params
    for key in moved.keys() | claim.wire.keys():
        got, want = moved.get(key, 0), claim.wire.get(key, 0)
        if abs(got - want) > 0.02 * max(1, want):
            said.append(f"{key[0]} over {key[1]}: {got:.3f} parameters, not {want}")
    scattered, gathered = in_blocks.get("reduce-scatter", 0), in_blocks.get("all-gather", 0)
    if claim.split_grads and scattered < 0.95 * claim.wire["reduce-scatter", claim.parts]:
        said.append("gradients are not split block by block")
    if claim.zero == 3 and gathered < 0.95 * claim.wire["all-gather", claim.parts]:
        said.append("parameters are not gathered block by block")
    return said


def claim_of(zero, gradient_buffer, place, accumulate, **_):
    parts = int(place[2:]) if "/" in place else DEVICES
    return Claim(zero, SLOTS if accumulate == "scan" else 1, gradient_buffer, parts)


FACTORS = {
    "backend": ("pjit", "pmap"),
    "zero": (0, 1, 2, 3),
    "gradient_buffer": ("sharded", "replicated"),
    "accumulate": ("scan", "vmap"),
    "place": ("8", "8/4"),
    "reduction": ("xla", "bucket"),
    "optimizer": tuple(OPTIMIZERS),
}


def allowed(row):
    if row["backend"] == "pmap":
        elementwise = row["optimizer"] in ("adamw", "sgd", "lion")
        return (
            row["zero"] < 2
            and row["place"] == "8"
            and row["gradient_buffer"] == "sharded"
            and elementwise
        )
    if row["zero"] == 0 and row["place"] != "8":
        return False
    return row["zero"] > 1 or row["gradient_buffer"] == "sharded"


COVER = sorted(
    cover(allowed, **FACTORS | {"optimizer": ("adamw", "lamb", "adafactor")}),
    key=lambda row: (row["optimizer"] != "adamw", row["zero"]),  # those that compile soonest first
)


def check(row):
    program = compiled(**row)
    assert program.params > 10e6 * 4
    assert not (said := problems(claim_of(**row), program.found, program.params)), said
    return program


@pytest.mark.parametrize("row", first(1, COVER), ids=name)
def test_a_stage_moves_what_the_table_says(row):
    check(row)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("row", product(allowed, **FACTORS), ids=name)
def test_every_combination_moves_what_the_table_says(row):
    check(row)


def asks_less(claim, other):
    """Whether a program that does what `other` claims does what `claim` does."""

    def blockwise(c):
        return (c.split_grads, c.zero == 3)

    return claim.wire == other.wire and all(
        a <= b for a, b in zip(blockwise(claim), blockwise(other))
    )


@pytest.mark.slow
def test_a_stage_is_not_taken_for_another():
    """Each program of the cover against every claim that says something else: none is believed. So
    is none that moves a bit of something in another way."""
    claims = [
        Claim(zero, k, gradient_buffer, parts)
        for zero, k, gradient_buffer, parts in itertools.product(
            (0, 1, 2, 3), (1, SLOTS), ("sharded", "replicated"), (8, 4)
        )
    ]
    believed = []
    for row in COVER:
        program, own = compiled(**row), claim_of(**row)
        for claim in claims:
            if not asks_less(claim, own) and not problems(claim, program.found, program.params):
                believed.append((name(row), claim))
        for kind in ("all-to-all", "collective-permute"):
            more = Collective(kind, 1, 4, "float32", 8, ((tuple(range(8))),))
            assert problems(own, [*program.found, more], program.params) == [f"{kind} of 4 bytes"]
    assert not believed


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", first(1, [row for row in COVER if row["reduction"] == "bucket"]), ids=name
)
def test_buckets_are_few_large_collectives(row):
    """25 MB each: three of the 50 MB of the model, as leaves are not cut; or one a block and one
    for the rest.
    """
    program, claim = check(row), claim_of(**row)
    rows = summarize([c for c in program.found if c.bytes > 0.001 * program.params])
    blocks = LAYERS * claim.k
    most = {"all-reduce": 3, "reduce-scatter": 3, "all-gather": 3}
    if claim.split_grads:
        most |= {"all-reduce": blocks + claim.k, "reduce-scatter": blocks + claim.k}
    if claim.zero == 3:
        most["all-gather"] = 2 * blocks + claim.k
    assert all(total.count <= most[kind] for kind, total in rows.items()), rows


@pytest.mark.slow
@pytest.mark.parametrize(("reduce", "bytes_"), [("float32", 4), ("bfloat16", 2)])
def test_bfloat16_is_two_bytes_a_parameter_on_the_wire(reduce, bytes_):
    """What stage 3 gathers has the dtype of the computation, what is scattered that of the
    reduction; StableHLO's, as XLA:CPU widens both. Stage 1's new parameters travel as they are."""
    policy = Policy(jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype(reduce))
    program = compiled(zero=3, policy=policy)
    claim = Claim(3, SLOTS, gather_bytes=2, reduce_bytes=bytes_)
    assert not (said := problems(claim, program.found, program.params)), said
    assert problems(Claim(3, SLOTS), program.found, program.params)
    if reduce == "bfloat16":
        whole = compiled(zero=1, policy=policy)
        assert not (said := problems(Claim(1, reduce_bytes=2), whole.found, whole.params)), said


PLACED = [("pjit", zero, place) for zero in range(4) for place in ("8", "8/4")] + [
    ("pmap", 0, "8"),
    ("pmap", 1, "8"),
]


def zero_bytes(zero, parameters, parts):
    """{tree: bytes of a device}: section 5 of the ZeRO paper, for Adam, all in float32."""
    divisors = {
        "params": parts if zero > 2 else 1,
        "grads": parts if zero > 1 else 1,
        "adam": parts if zero else 1,
    }
    return {tree: (8 if tree == "adam" else 4) * parameters / n for tree, n in divisors.items()}


def gradient_bytes(strategy, step, arguments):
    """Of what a device's backward pass gives, from the shapes that the step returns inside the
    strategy's program.
    """
    seen = []

    def grads(*args):
        sums = step.grads(*args)
        seen.append(size(sums.grads))
        return sums

    strategy.compile(step._replace(grads=grads)).lowered(*arguments)
    return seen[-1]


QUICK = [("pjit", 2, "8/4"), ("pmap", 0, "8")]


@pytest.mark.parametrize("where", only(QUICK, PLACED), ids=str)
def test_a_device_holds_what_the_zero_paper_says(where):
    """12.7 million parameters: shapes, and the compiled program's arguments (state) and results."""
    backend, zero, place = where
    strategy, step, arguments = build(**USUAL | {"backend": backend, "zero": zero, "place": place})
    state = strategy.abstract()
    parts = int(place[2:]) if "/" in place else DEVICES

    def local(tree):
        return sum(
            x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
            for x in jax.tree.leaves(tree)
        )

    got = {"params": local(state.params), "adam": local(state.opt_state)}
    got["grads"] = gradient_bytes(strategy, step, arguments)
    want = zero_bytes(zero, size(strategy.shapes.params) // 4, parts)
    assert got == pytest.approx(want, rel=0.02)
    if (zero, place) in ((3, "8"), (1, "8")):
        memory = compiled(backend=backend, zero=zero, place=place).memory
        for held in (
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
        ):
            assert held == pytest.approx(want["params"] + want["adam"], rel=0.02)


@pytest.mark.quick(1)
@pytest.mark.parametrize("gradient_buffer", ["sharded", "replicated"])
@pytest.mark.parametrize("zero", [2, 3])
def test_the_gradient_buffer_is_sharded_or_replicated(zero, gradient_buffer):
    strategy, *rest = build(**USUAL | {"zero": zero, "gradient_buffer": gradient_buffer})
    parameters = size(strategy.shapes.params)
    want = parameters / 8 if gradient_buffer == "sharded" else parameters
    assert gradient_bytes(strategy, *rest) == pytest.approx(want, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("where", only([("pjit", 2, "8/4")], PLACED), ids=str)
def test_arrays_take_what_the_zero_paper_says(where):
    """Allocated, before and after an update, on each of the devices."""
    backend, zero, place = where
    layout = {"zero": zero} | ({"shard_size": int(place[2:])} if "/" in place else {})
    strategy, step, batch = toys.build(
        toys.MODELS["blocks"](),
        toys.data(),
        backend=backend,
        devices=8,
        optimizer="adamw",
        layout=layout,
    )
    parameters = size(strategy.shapes.params) // 4
    want = zero_bytes(zero, parameters, layout.get("shard_size", 8))

    def check(state):
        for device in strategy.devices:

            def held(tree, device=device):
                return sum(
                    s.data.nbytes
                    for x in jax.tree.leaves(tree)
                    for s in x.addressable_shards
                    if s.device == device
                )

            got = {"params": held(state.params), "adam": held(state.opt_state)}
            assert got == pytest.approx({tree: want[tree] for tree in got}, rel=0.02)

    state = strategy.init()
    check(state)
    check(strategy.compile(step).update(state, batch(0))[0])


def in_blocks(bytes_, program, layers=LAYERS):
    """Bytes in units of one block's parameters."""
    return bytes_ / (size(program.strategy.shapes.params["blocks"]) / layers)


def beside_gradients(**settings):
    """The temporaries of a device beyond the gradients' slices, in blocks. Those are there twice:
    summed up, and the next slot's, or divided by the weight. Few tokens, so that hardly anything
    else is left."""
    program = compiled(tokens=4, slots=1 if settings["accumulate"] == "vmap" else SLOTS, **settings)
    return in_blocks(program.memory.temp_size_in_bytes - 2 * program.params / DEVICES, program)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", first(1, ["scan", "vmap"]))
@pytest.mark.parametrize("remat", first(1, ["full", "dots_no_batch"]))
def test_stage_3_has_at_most_two_blocks_whole(accumulate, remat):
    assert beside_gradients(zero=3, accumulate=accumulate, remat=remat) < 2


@pytest.mark.slow
def test_stage_3_that_keeps_what_it_gathered_is_caught():
    assert beside_gradients(zero=3, accumulate="vmap", remat="none") > LAYERS


@pytest.mark.slow
def test_stage_3_of_more_blocks_takes_slices_more():
    """Eight more blocks: twice an eighth of each for the gradients, and its input."""
    more, fewer = (compiled(zero=3, accumulate="vmap", layers=n) for n in (LAYERS, LAYERS // 2))
    grown = in_blocks(more.memory.temp_size_in_bytes - fewer.memory.temp_size_in_bytes, more)
    assert grown / (LAYERS // 2) < 2 / DEVICES + 0.02


@pytest.mark.slow
def test_stage_2_frees_a_blocks_gradients_as_it_goes():
    """Against stage 1 and the replicated buffer, which have all of them."""

    def temporaries(**settings):
        return (lambda p: p.memory.temp_size_in_bytes / p.params)(
            compiled(remat="full", tokens=4, **settings)
        )

    for accumulate in ("vmap", "scan"):
        assert temporaries(zero=2, accumulate=accumulate) < 0.5
    assert temporaries(zero=1, accumulate="vmap") > 1
    assert temporaries(zero=2, accumulate="scan", gradient_buffer="replicated") > 1


@pytest.mark.slow
@pytest.mark.parametrize("place", first(1, ["8/4", "8"]))
def test_a_split_state_is_born_in_its_place(place):
    """Nothing of it is whole on any device while it is made: results and temporaries are slices."""
    strategy, *_ = build(**USUAL | {"zero": 3, "place": place})
    shardings = jax.tree.map(lambda x: x.sharding, strategy.abstract())
    program = jax.jit(strategy.make, out_shardings=shardings).lower().compile()
    memory, whole = program.memory_analysis(), size(strategy.shapes)
    assert memory.output_size_in_bytes == pytest.approx(whole / strategy.parts, rel=0.02)
    assert memory.temp_size_in_bytes < whole / strategy.parts
    assert collectives(program.as_text()) == []
