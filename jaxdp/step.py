"""The step is a pair of pure functions that contain no strategy and no collective.

    grads(view, batch[slot, example, ...], slots[slot], gather, join) -> Sums  one replica's share of the microbatches
    apply(state, sums, total) -> (state, metrics)                              the one division, the optimizer

Everything in `Sums` adds up over microbatches and replicas, and is divided once, by the global weight. A strategy
reaches inside through three hooks only: `gather` makes split parameters whole (and gradients what the strategy wants),
`join` brings the slots of all replicas together for a loss that couples examples, `total` measures a tree that may be
split. On one device, a strategy needs none.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxdp import inplace
from jaxdp.data.cursor import RESET
from jaxdp.errors import UsageError
from jaxdp.guard import Guard, Spike, judge
from jaxdp.guard import start as start_guard
from jaxdp.losses import LossFn, apply_loss, attribute
from jaxdp.metrics.writer import RESERVED
from jaxdp.models.base import CARRY, Model
from jaxdp.models.scan import BlockGather, as_they_are, block_hooks
from jaxdp.models.scan import remat as rematerialize
from jaxdp.precision import LossScale, LossScaling, Policy, cast_floats
from jaxdp.split import path_string

SMALL = 4096  # elements of a leaf
Tree = Any
Batch = dict[str, jax.Array]
Transform = Callable[[Batch, jax.Array, bool], Batch]  # (batch, key, train) -> batch
# (parameters, compute dtype) -> (whole ones of that dtype, what makes those of a block whole inside `scan_blocks`)
Gather = Callable[[Tree, Any], tuple[Tree, BlockGather]]
# leaves [slot, ...] of a replica -> those of all microbatches, in their order
Join = Callable[[Tree], Tree]
# (measure, tree) -> measure(the whole tree), where measure(tree) adds up over the tree's parts
Total = Callable[[Callable[[Tree], jax.Array], Tree], jax.Array]


class TrainState(struct.PyTreeNode):
    """All that an update changes, in logical shapes: step [], trees, and carry[microbatch, example, ...].

    ema: the average of the parameters. It, loss_scale and carry are None where they are not in use. guard: of updates
    that were not taken; `step` counts these too.
    """

    step: jax.Array
    params: Tree
    model_state: Tree
    opt_state: Tree
    ema: Tree = None
    loss_scale: LossScale | None = None
    carry: Tree = None
    guard: Guard = struct.field(default_factory=start_guard)

    @property
    def view(self) -> "View":
        scale = None if self.loss_scale is None else self.loss_scale.value
        return View(self.step, self.params, self.model_state, scale, self.carry)


class View(NamedTuple):
    """What a replica needs of the state to compute its sums; loss_scale [] or None, carry[slot, example, ...]."""

    step: jax.Array
    params: Tree
    model_state: Tree
    loss_scale: Any = None
    carry: Tree = None


class Sums(NamedTuple):
    """What adds up over microbatches and replicas; `carry` alone does not, it stays with its slots."""

    grads: Tree
    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]
    model_state: Tree  # floats: value x weight; integers: `Change`
    carry: Tree = None


class Change(NamedTuple):
    """The change of an integer of the model state, over the microbatches that had rows: their number, sum, squares.

    The microbatches agree exactly where parts x squares = sum^2 (equality in the Cauchy-Schwarz inequality).
    """

    parts: jax.Array
    sum: jax.Array
    squares: jax.Array


class Coupled(NamedTuple):
    """What a loss over the whole batch tells a slot [slot, ...]: its share of the sums, and d loss / d its outputs."""

    loss: jax.Array
    weight: jax.Array
    metrics: dict[str, jax.Array]
    cotangents: Tree


class Step(NamedTuple):
    """trainable(tree like the parameters) -> the same with None for frozen leaves: the structure of the gradients."""

    grads: Callable[..., Sums]
    apply: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., Sums]
    trainable: Callable[[Tree], Tree]


def plain_gather(params: Tree, dtype: Any) -> tuple[Tree, BlockGather]:
    return cast_floats(params, dtype), as_they_are


def plain_join(tree: Tree) -> Tree:
    return tree


def plain_total(measure: Callable[[Tree], jax.Array], tree: Tree) -> jax.Array:
    return measure(tree)


def thaw(frozen: Sequence[str]) -> Callable[[Tree], Tree]:
    """tree -> the same with None for each leaf whose path (a/b/c) matches one of the expressions."""
    patterns = [re.compile(p) for p in frozen]
    keep = lambda path, x: None if any(p.search(path_string(path)) for p in patterns) else x
    return lambda tree: jax.tree_util.tree_map_with_path(keep, tree) if patterns else tree


def merge(trainable: Tree, whole: Tree) -> Tree:
    """`trainable`, with the leaves of `whole` where it has None."""
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, whole, is_leaf=lambda x: x is None)


def microbatch_key(seed: int, step: jax.Array, microbatch: jax.Array) -> jax.Array:
    """fold_in(fold_in(key, step), microbatch): the key of everything random in one microbatch."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), microbatch)


def init_state(
    model: Model,
    tx: optax.GradientTransformation,
    policy: Policy,
    seed: int,
    microbatches: int,
    example: Batch,
    *,
    frozen: Sequence[str] = (),
    ema: bool = False,
    loss_scaling: LossScaling | None = None,
    spike: Spike | None = None,
) -> TrainState:
    """The state before the first update; example: one microbatch [example, ...] of the data (values don't matter)."""
    params, model_state = model.init(jax.random.key(seed), policy.inputs(example))
    params = cast_floats(jax.tree.map(jnp.asarray, params), policy.params)
    model_state, carry = split_carry(cast_floats(model_state, policy.state))
    if carry is not None:
        carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (microbatches, *x.shape)), carry)
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        model_state,
        tx.init(thaw(frozen)(params)),
        ema=jax.tree.map(jnp.copy, cast_floats(params, policy.state)) if ema else None,  # small steps need precision
        loss_scale=loss_scaling.init() if loss_scaling else None,
        carry=carry,
        guard=start_guard(spike),
    )


def split_carry(model_state: Tree) -> tuple[Tree, Tree]:
    """(the model's own state, what belongs to its examples: the top-level entry 'carry')."""
    if isinstance(model_state, dict) and CARRY in model_state:
        return {k: v for k, v in model_state.items() if k != CARRY}, model_state[CARRY]
    return model_state, None


def make_step(
    model: Model,
    loss: LossFn,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    policy: Policy | None = None,
    clip_norm: float | None = None,
    accumulate: str = "vmap",
    remat: str = "none",
    frozen: Sequence[str] = (),
    ema_decay: float | None = None,
    loss_scaling: LossScaling | None = None,
    transform: Transform | None = None,
    eval_transform: Transform | None = None,
    schedule: Callable[[jax.Array], jax.Array] | None = None,
    max_nonfinite: int = 10,
    spike: Spike | None = None,
    padded: bool = True,
) -> Step:
    """The step of a model, a loss and an Optax transformation.

    accumulate: 'vmap' computes a replica's microbatches at once, 'loop' one after the other; 'one' is given only one.
    remat: what the backward pass computes again (`REMAT`): of each block, or of a model without blocks as a whole.
    frozen: parameters whose path matches one of these expressions have no gradient and no optimizer state.
    ema_decay: of the running average of the parameters, ema = decay x ema + (1 - decay) x params after each update.
    transform: run on each microbatch before the model (normalization, augmentation); eval_transform: in evaluation.
    schedule: reported as `lr` in the metrics.
    max_nonfinite: so many updates in a row whose loss or gradients are not finite halt (`jaxdp.guard`); until then each
    is skipped. spike: what is done about a loss that is too large. padded: a batch may have places without an example;
    where none has, what masks them out is left out of `grads`.
    """
    policy = policy or Policy()
    accumulation = {"vmap": _at_once, "loop": _one_by_one, "one": _only}[accumulate]
    trainable = thaw(frozen)

    couples = attribute(loss, "scope", "example") == "global"
    if couples and accumulate == "one":
        raise UsageError(
            "parallel.reduction: exact adds up microbatch by microbatch, and this loss couples the examples of all; "
            "use xla or bucket"
        )

    def forward(view: View, batch: Batch, slot: jax.Array, train: bool, gather: Gather) -> tuple[Tree, Batch, Tree]:
        """(outputs, what the loss gets, new model state) of one microbatch."""
        key, augment_key = jax.random.split(microbatch_key(seed, view.step, slot))
        mask = batch["mask"]
        prepare = transform if train else eval_transform
        if prepare is not None:
            batch = prepare(batch, augment_key, train)
        state = view.model_state
        if view.carry is not None:
            state = {**state, CARRY: begin_anew(view.carry, batch.get(RESET))}
        # Padding repeats a real example, so that a microbatch without rows can be computed like any other, and weighs
        # nothing. Were it masked inside the model, BatchNorm would divide 0 by 0.
        seen = jnp.logical_or(mask != 0, jnp.logical_not(jnp.any(mask != 0)))
        params, block_gather = gather(view.params, policy.compute)
        inputs = policy.inputs({**batch, "mask": seen})
        again = remat if train else "none"
        run = rematerialize("none" if model.blocks else again, lambda *args: model.apply(*args, train))
        with block_hooks(block_gather, again):
            outputs, new_state = run(params, state, inputs, key)
        return policy.outputs(outputs), {**batch, "mask": mask.astype(policy.state)}, new_state

    def microbatch(
        view: View, batch: Batch, slot: jax.Array, coupled: Coupled | None, train: bool, gather: Gather
    ) -> tuple[jax.Array, Sums]:
        """(the scaled loss, the sums) of one microbatch, without gradients; one without rows adds nothing."""
        real = jnp.any(batch["mask"] != 0)
        outputs, judged, new_state = forward(view, batch, slot, train, gather)
        new_state, carry = split_carry(new_state)
        if coupled is None:
            total, weight, metrics = _three(apply_loss(loss, outputs, judged))
            scaled = total
        else:
            total, weight, metrics, cotangents = coupled
            scaled = _inner(outputs, cotangents).astype(total.dtype) if train else total
        dtype = total.dtype
        weight = weight.astype(dtype)
        sums = Sums(
            grads=None,
            loss=total,
            weight=weight,
            metrics=jax.tree.map(lambda x: x.astype(dtype), metrics),
            model_state=jax.tree.map(lambda old, new: _weigh(old, new, weight, real), view.model_state, new_state),
        )
        only_real = lambda x: jnp.where(real, x, jnp.zeros_like(x))
        sums, scaled = jax.tree.map(only_real, (sums, scaled))
        before = begin_anew(view.carry, batch.get(RESET))
        carry = jax.tree.map(functools.partial(_keep, batch["mask"]), before, carry)
        if loss_scaling is not None:
            scaled = scaled * loss_scaling.factor(view.loss_scale).astype(dtype)
        return scaled, sums._replace(carry=carry)

    def couple(view: View, batch: Batch, slots: jax.Array, train: bool, gather: Gather, join: Join) -> Coupled | None:
        """The first of two passes of a loss over the whole batch: outputs of all slots, and what the loss says of them.

        The second computes each slot again, with these cotangents for its loss (GradCache, arXiv 2101.06983).
        """
        if not couples:
            return None

        def one(piece: Any) -> tuple[Tree, Batch]:
            carry, batch, slot = piece
            return forward(view._replace(carry=carry), batch, slot, train, gather)[:2]

        every = jax.vmap(one) if accumulate == "vmap" else lambda pieces: jax.lax.map(one, pieces)
        outputs, judged = join(every((view.carry, batch, slots)))
        rows = judged["mask"].reshape(len(judged["mask"]), -1).sum(-1)

        def whole(outputs: Tree) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (outputs, judged))
            total, weight, metrics = _three(apply_loss(loss, *flat))
            return total, (weight, metrics)

        if train:
            (total, (weight, metrics)), found = jax.value_and_grad(whole, has_aux=True, allow_int=True)(outputs)
            cotangents = jax.tree.map(lambda x, c: c if _is_float(x) else x, outputs, found)
        else:
            (total, (weight, metrics)), cotangents = whole(outputs), None
        index = jnp.maximum(slots, 0)
        share = (rows / jnp.maximum(rows.sum(), 1))[index].astype(total.dtype)
        each = lambda x: x.astype(total.dtype) * share
        own = jax.tree.map(lambda x: x[index], cotangents)
        return jax.lax.stop_gradient(Coupled(each(total), each(weight), jax.tree.map(each, metrics), own))

    def grads(
        view: View, batch: Batch, slots: jax.Array, gather: Gather = plain_gather, join: Join = plain_join
    ) -> Sums:
        def total(params: Tree, *piece: Any) -> tuple[jax.Array, Sums]:
            carry, batch, slot, coupled = piece
            here = view._replace(params=merge(params, view.params), carry=carry)
            return microbatch(here, batch, slot, coupled, True, gather)

        given = batch["mask"]
        if not padded:
            batch = {**batch, "mask": jnp.ones_like(given)}  # a constant, which the compiler follows
        coupled = couple(view, batch, slots, True, gather, join)
        sums = accumulation(total, trainable(view.params), (view.carry, batch, slots, coupled))
        if padded:
            return sums
        # Divided by a weight that the compiler knew, no gradient would be written: each reader would multiply again.
        return sums._replace(weight=sums.weight * jnp.max(given).astype(sums.weight.dtype))

    def evaluate(
        view: View, batch: Batch, slots: jax.Array, gather: Gather = plain_gather, join: Join = plain_join
    ) -> Sums:
        """The carry goes on from batch to batch where the batches say where it begins anew; else each begins with 0."""
        goes_on = RESET in batch
        carry = view.carry if goes_on else jax.tree.map(jnp.zeros_like, view.carry)

        def one(piece: Any) -> Sums:
            carry, batch, slot, coupled = piece
            sums = microbatch(view._replace(carry=carry), batch, slot, coupled, False, gather)[1]
            return sums._replace(model_state=None, carry=sums.carry if goes_on else None)

        pieces = (carry, batch, slots, couple(view._replace(carry=carry), batch, slots, False, gather, join))
        if accumulate == "one":
            sums = one(_first(pieces))
            return sums._replace(carry=jax.tree.map(lambda x: x[None], sums.carry))
        every = jax.vmap(one) if accumulate == "vmap" else lambda pieces: jax.lax.map(one, pieces)
        sums = every(pieces)
        return jax.tree.map(lambda x: x.sum(0), sums._replace(carry=None))._replace(carry=sums.carry)

    def apply(state: TrainState, sums: Sums, total: Total = plain_total) -> tuple[TrainState, dict[str, jax.Array]]:
        params = trainable(state.params)
        weight = jnp.where(sums.weight > 0, sums.weight, jnp.ones_like(sums.weight))
        divisor = weight
        if loss_scaling is not None and state.loss_scale is not None:
            divisor = weight * loss_scaling.factor(state.loss_scale.value).astype(weight.dtype)

        def divide(g: jax.Array, p: jax.Array) -> jax.Array:
            """In at least float32: bfloat16 would round the weight itself."""
            wide = g.astype(jnp.promote_types(g.dtype, jnp.float32))
            return (wide / divisor.astype(wide.dtype)).astype(p.dtype)

        mean = jax.tree.map(divide, sums.grads, params)
        squares, bad = total(_squares_and_bad if accumulate == "one" else _squares_then_bad, mean)
        norm = jnp.sqrt(squares)
        if clip_norm is not None:
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
            mean = jax.tree.map(lambda g: g * scale.astype(g.dtype), mean)
        model_state, disagreeing = _settle(state.model_state, sums.model_state, sums.weight)
        loss = sums.loss / weight
        finite = (bad == 0) & jnp.isfinite(loss)
        expected: Any = False
        if loss_scaling is not None and state.loss_scale is not None:
            expected = jnp.isfinite(loss) & loss_scaling.can_fall(state.loss_scale)
        taken, guard = judge(state.guard, state.step + 1, loss, finite, expected, max_nonfinite, spike)
        mean = inplace.where(taken, mean, jax.tree.map(jnp.zeros_like, mean))
        updates, opt_state = inplace.update(tx, taken, mean, state.opt_state, params)
        moved = inplace.where(taken, optax.apply_updates(params, updates), params)
        new = state.replace(
            params=merge(moved, state.params),
            opt_state=opt_state,
            model_state=inplace.where(taken, model_state, state.model_state),
            carry=inplace.where(taken, sums.carry, state.carry),
        )
        if ema_decay is not None:
            average = lambda e, p: e + (1 - ema_decay) * (p.astype(e.dtype) - e)
            new = new.replace(ema=inplace.where(taken, jax.tree.map(average, state.ema, new.params), state.ema))
        metrics = {
            "loss": loss,
            **{name: value / weight for name, value in sums.metrics.items()},
            "grad_norm": norm,
            "nonfinite_grads": bad,
            "weight": sums.weight,
            "skipped": (~taken).astype(jnp.int32),
            "skipped_updates": guard.skipped,
            "halted": guard.halted,
        }
        if disagreeing is not None:
            metrics["disagreeing_state"] = disagreeing
        if schedule is not None:
            metrics["lr"] = jnp.asarray(schedule(state.step - state.guard.skipped), jnp.float32)
        running = state.guard.halted == 0
        if loss_scaling is not None and state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.value
            adjusted = loss_scaling.adjust(state.loss_scale, bad == 0)
            new = new.replace(loss_scale=inplace.where(running, adjusted, state.loss_scale))
        return new.replace(step=state.step + running.astype(state.step.dtype), guard=guard), metrics

    return Step(grads, apply, evaluate, trainable)


def _at_once(total: Callable, params: Tree, pieces: Tree) -> Sums:
    """The gradient of the sum over slots: one product per weight, not one gradient per slot."""
    if len(jax.tree.leaves(pieces)[0]) == 1:
        return _only(total, params, pieces)

    def all_slots(params: Tree) -> tuple[jax.Array, Sums]:
        loss, sums = jax.vmap(lambda *piece: total(params, *piece))(*pieces)
        summed = jax.tree.map(lambda x: x.sum(0), sums._replace(carry=None))
        return loss.sum(), summed._replace(carry=sums.carry)

    (_, sums), grads = jax.value_and_grad(all_slots, has_aux=True)(params)
    return sums._replace(grads=grads)


def _only(total: Callable, params: Tree, pieces: Tree) -> Sums:
    """Of one slot."""
    (_, sums), grads = jax.value_and_grad(total, has_aux=True)(params, *_first(pieces))
    return sums._replace(grads=grads, carry=jax.tree.map(lambda x: x[None], sums.carry))


def _one_by_one(total: Callable, params: Tree, pieces: Tree) -> Sums:
    """Gradient accumulation: the activations of one slot at a time."""

    def slot(piece: Tree) -> Sums:
        (_, sums), grads = jax.value_and_grad(total, has_aux=True)(params, *piece)
        return sums._replace(grads=grads)

    def add(sums: Sums, piece: Tree) -> tuple[Sums, Tree]:
        new = slot(piece)
        return jax.tree.map(jnp.add, sums, new._replace(carry=None)), new.carry

    shapes = jax.eval_shape(slot, _first(pieces))._replace(carry=None)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, carry = jax.lax.scan(add, zero, pieces)
    return sums._replace(carry=carry)


def _first(pieces: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], pieces)


def _three(result: Any) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """What a loss returned, if it is what a loss returns."""
    own = result[2] if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], dict) else {}
    if taken := [name for name in own if name in RESERVED or not isinstance(name, str)]:
        raise UsageError(
            f"loss: a metric of it is called {taken[0]!r}, which a record says by itself; give it another name"
        )
    scalar = lambda x: getattr(x, "shape", None) == ()
    if not (
        isinstance(result, tuple)
        and len(result) == 3
        and scalar(result[0])
        and scalar(result[1])
        and isinstance(result[2], dict)
        and all(map(scalar, result[2].values()))
    ):
        kind = lambda x: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else f"a Python {type(x).__name__}"
        got = str(jax.tree.map(kind, result)).replace("'", "")
        raise UsageError(
            f"loss: it returned {got}; a loss returns (sum [], weight [], {{name: sum []}}), e.g. the losses times "
            "batch['mask'] summed, and batch['mask'] summed"
        )
    return result


def begin_anew(carry: Tree, reset: jax.Array | None) -> Tree:
    """Leaves [example, ...], zero where reset[example] is true; as they are without it."""
    if reset is None:
        return carry
    return jax.tree.map(lambda x: jnp.where(reset.reshape(-1, *(1,) * (x.ndim - 1)) != 0, jnp.zeros_like(x), x), carry)


def _inner(outputs: Tree, cotangents: Tree) -> jax.Array:
    """The sum of the products of all floats."""
    pairs = zip(jax.tree.leaves(outputs), jax.tree.leaves(cotangents))
    return sum((jnp.sum(x * y) for x, y in pairs if _is_float(x)), jnp.zeros(()))


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _keep(mask: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """A leaf of the carry [example, ...]: that of a place without an example stays as it was."""
    real = jnp.any(mask.reshape(mask.shape[0], -1) != 0, axis=-1)
    return jnp.where(real.reshape(-1, *(1,) * (old.ndim - 1)), new.astype(old.dtype), old)


def _weigh(old: jax.Array, new: jax.Array, weight: jax.Array, real: jax.Array) -> jax.Array | Change:
    """A model-state leaf as something that adds up."""
    if jnp.issubdtype(old.dtype, jnp.floating):
        return new.astype(weight.dtype) * weight
    change = jnp.where(real, new.astype(jnp.int32) - old.astype(jnp.int32), 0)
    return Change(real.astype(jnp.int32), change, change * change)


def _settle(old: Tree, sums: Tree, weight: jax.Array) -> tuple[Tree, jax.Array | None]:
    """(the model state after the update, how many integers of it the microbatches disagree on or None)."""
    disagreeing = []

    def settle(old: jax.Array, new: jax.Array | Change) -> jax.Array:
        if not isinstance(new, Change):
            return jnp.where(weight > 0, new / jnp.where(weight > 0, weight, 1), old).astype(old.dtype)
        disagreeing.append(jnp.sum(new.parts * new.squares != new.sum * new.sum))
        change = new.sum // jnp.maximum(new.parts, 1)
        return (old.astype(jnp.int32) + change).astype(old.dtype)

    settled = jax.tree.map(settle, old, sums)
    return settled, (sum(disagreeing, jnp.zeros((), jnp.int32)) if disagreeing else None)


def _squares_then_bad(tree: Tree) -> jax.Array:
    """As `_squares_and_bad`; on CPU small leaves are taken together, as an operation costs more to start than to do,
    and what is not finite is counted where the squares are not, and so hardly ever."""
    if jax.default_backend() != "cpu":
        return _squares_and_bad(tree)
    leaves = [x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(-1) for x in jax.tree.leaves(tree)]
    small = [x for x in leaves if x.size <= SMALL]
    vectors = [x for x in leaves if x.size > SMALL] + ([jnp.concatenate(small)] if small else [])
    squares = sum((jnp.dot(x, x) for x in vectors), jnp.zeros((), jnp.float32))
    return jax.lax.cond(
        jnp.isfinite(squares), lambda _: jnp.stack([squares, jnp.zeros_like(squares)]), _squares_and_bad, leaves
    )


def _squares_and_bad(tree: Tree) -> jax.Array:
    """[2]: the sum of squares, and how many elements are not finite; at least in float32."""
    leaves = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)]
    zero = jnp.zeros((), jnp.float32)
    squares = sum((jnp.sum(jnp.square(x)) for x in leaves), zero)
    return jnp.stack([squares, sum((jnp.sum(~jnp.isfinite(x)) for x in leaves), zero).astype(squares.dtype)])
