"""The training step: two pure functions, and nothing between them but sums.

    grads(state, batch, replica) -> Sums             of a device's microbatches
    apply(state, sums, total) -> (state, metrics)    the one division, and the optimizer

A batch is split into microbatches; their number is a matter of the config, not of the devices. Each
is computed with its own random key, and yields sums and a weight. Sums add up over microbatches and
devices in any grouping and are divided once, in `apply`. So the config decides the numbers, and the
hardware only the speed.

Nothing here knows a device. A strategy calls `grads` on each device with its microbatches, adds up
what the backward pass has not summed over the devices already (`parallel/reading.py`), and calls
`apply`. A `LocalStep` is a device's share of a step; it asks a `Replica` what depends on the
strategy. What has a memory of its own wraps a step: `average`, `carry`, `coupled`.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdp.cpu import on_cpu
from jaxdp.data.transforms import NOT_OF_EXAMPLES, Transform
from jaxdp.errors import UsageError
from jaxdp.losses import LossFn, apply_loss
from jaxdp.models.base import Model
from jaxdp.models.scan import BlockReader, PerBlock, remat
from jaxdp.optim.interpreter import has_narrow_floats
from jaxdp.optim.optimizers import master_copy
from jaxdp.optim.schedule import rate_of
from jaxdp.precision import (
    MIN_SCALE,
    LossScaling,
    Policy,
    at_least_float32,
    cast_floats,
    is_float,
    is_narrow,
)
from jaxdp.split import path_string
from jaxdp.targets import attribute
from jaxdp.train.average import with_average
from jaxdp.train.carry import with_carry
from jaxdp.train.coupled import COUPLED, coupled_result, with_coupled_loss
from jaxdp.train.skip import Facts, Spike, decide, start_guard
from jaxdp.train.state import (
    Batch,
    Sums,
    TrainState,
    add,
    check_result,
    divide,
    expand_to,
    mean_state,
    merge,
    microbatch_key,
    select,
    weighted_state,
)

SMALL = 4096  # elements: smaller leaves are concatenated on CPU
Tree = Any
Metrics = dict[str, jax.Array]


class Forward(NamedTuple):
    """The forward pass of a microbatch, up to its loss.

    Args:
        seed: an int or a uint32 [], the root of all random keys.
        remat: the values that the backward pass recomputes (`jaxdp.models.scan.REMAT`), block by
            block if the model reads its parameters so.
        transform, eval_transform: change the batch before the model, in training and evaluation.
    """

    model: Model
    loss: LossFn
    policy: Policy = Policy()
    seed: Any = 0
    remat: str = "none"
    loss_scaling: LossScaling | None = None
    transform: Transform | None = None
    eval_transform: Transform | None = None


class UpdateRule(NamedTuple):
    """How an update follows from the mean gradients.

    Args:
        frozen: expressions; parameters whose path matches one have no gradient and no optimizer
            state.
        ema_decay: of the running average of the parameters; None: there is none.
        schedule: the learning rate by applied update, to report as `lr` if the optimizer names none
            (`jaxdp.optim.schedule`).
        max_nonfinite: halt training after this many consecutive updates with a non-finite loss or
            gradient; each of them is skipped (`jaxdp.train.skip`).
        spike: how to detect and treat a loss that is too large.
    """

    tx: optax.GradientTransformation
    clip_norm: float | None = None
    frozen: Sequence[str] = ()
    ema_decay: float | None = None
    schedule: Callable[[jax.Array], jax.Array] | None = None
    max_nonfinite: int = 10
    spike: Spike | None = None

    def trainable(self, tree: Tree) -> Tree:
        """Return a tree like the parameters with None for those that are frozen."""

        def keep(path: Any, x: Any) -> Any:
            name = path_string(path)
            return None if any(re.search(pattern, name) for pattern in self.frozen) else x

        return jax.tree_util.tree_map_with_path(keep, tree) if self.frozen else tree


class Recipe(NamedTuple):
    """What a step computes.

    Args:
        accumulate: "vmap" computes a device's microbatches at once, "scan" one after the other, in
            the memory of one. Computations in 16 bits always scan.
        padded: batches may have padding; if False, the program of `grads` contains no mask.
    """

    forward: Forward
    rule: UpdateRule
    accumulate: str = "vmap"
    padded: bool = True


class Step(NamedTuple):
    """The functions of a step, with its recipe bound.

    Args:
        trainable: returns a tree like the parameters with None for frozen leaves, which is the
            structure of gradients.
        blocks: paths of the stacked parameters that the model reads one block at a time.
    """

    init: Callable[..., TrainState]
    grads: Callable[..., Sums]
    apply: Callable[..., tuple[TrainState, Metrics]]
    evaluate: Callable[..., Sums]
    trainable: Callable[[Tree], Tree]
    blocks: tuple[str, ...] = ()


def make_step(
    forward: Forward, rule: UpdateRule, accumulate: str = "vmap", padded: bool = True
) -> Step:
    """Build the step of a model, a loss and an optimizer; see `Recipe`."""
    # Traced once, for the update and for the rate that it computes with.
    rule = rule._replace(tx=rule.tx._replace(update=jax.jit(rule.tx.update, inline=True)))
    recipe = Recipe(forward, rule, accumulate, padded)
    step = Step(
        init=functools.partial(init, recipe),
        grads=functools.partial(grads, recipe),
        apply=functools.partial(apply, recipe),
        evaluate=functools.partial(evaluate, recipe),
        trainable=rule.trainable,
        blocks=forward.model.read_by_block,
    )
    if attribute(forward.loss, "scope", "example") == "global":
        step = with_coupled_loss(step, functools.partial(first_pass, recipe), forward.loss)
    step = with_carry(step)
    return step if rule.ema_decay is None else with_average(step, rule.ema_decay, forward.policy)


def init_state(forward: Forward, rule: UpdateRule, microbatches: int, example: Batch) -> TrainState:
    """Return the state before the first update; see `init`. The seed is that of `forward`."""
    return make_step(forward, rule).init(forward.seed, microbatches, example)


class Replica(BlockReader):
    """One device's part in a step. This class is for a single device; a strategy has a subclass. It
    is also how `scan_blocks` reads the parameters of a block.

    Args:
        numbers: int32 [local], the numbers of its microbatches among all of the batch, -1 for none.

    Attributes:
        reduces_last: gradients are summed over the devices inside the last pass over microbatches,
            so that the devices talk while they compute. That pass is then compiled apart from the
            others.
    """

    reduces_last = False

    def __init__(self, numbers: jax.Array):
        self.numbers = numbers

    def slots(self, params: Tree, last: bool) -> Tree:
        """Return the arrays to differentiate by, in the shapes in which gradients are wanted.

        Args:
            params: the trained parameters as this device stores them.
            last: for the last pass over microbatches.
        """
        return params

    def params(self, slots: Tree, stored: Tree, dtype: Any, last: bool, earlier: Tree) -> Tree:
        """Return the parameters for the model. Those of blocks may be opaque until a block is read.

        Args:
            slots: from `slots`, None for frozen parameters.
            stored: the parameters as they are stored, including frozen ones.
            dtype: of the computation.
            earlier: this device's gradients of the passes before the last; None: there are none.
        """
        return cast_floats(merge(slots, stored), dtype)

    def join(self, tree: Tree) -> Tree:
        """Return leaves [local, ...] of all devices as [microbatch, ...]."""
        return tree


class Piece(NamedTuple):
    """One microbatch, or several of them [count, ...].

    Args:
        batch: {name: [example, ...]} with "mask" [example, ...], which is 0 for padding.
        kept: what belongs to its examples, by name.
        number: int32 [], among all of the batch.
        coupled: its share of a loss that couples all examples; None for any other loss.
    """

    batch: Batch
    kept: dict[str, Tree]
    number: jax.Array
    coupled: Tree = None


# --- The start ---------------------------------------------------------------------


def init(recipe: Recipe, seed: Any, microbatches: int, example: Batch) -> TrainState:
    """Return the state before the first update.

    Args:
        seed: an int or a uint32 [].
        microbatches: their number in a batch; what is kept for examples needs it.
        example: one microbatch [example, ...]; only its shapes and dtypes matter.

    Raises:
        UsageError: a parameter that cannot be trained.
    """
    forward, rule, policy = recipe.forward, recipe.rule, recipe.forward.policy
    params, model_state = forward.model.init(jax.random.key(seed), policy.inputs(example))
    params = cast_floats(jax.tree.map(jnp.asarray, params), policy.params)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not is_float(x):
            fix = "make it part of the model's state, or a constant"
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                fix = "store its real and imaginary parts as two arrays"
            name = path_string(path)
            raise UsageError(
                f"model: parameter {name!r} is {x.dtype}, and only floats are trained; {fix}"
            )

    # Running averages stay in at least float32: small steps would vanish in bfloat16.
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=cast_floats(model_state, policy.state),
        opt_state=rule.tx.init(rule.trainable(params)),
        loss_scale=forward.loss_scaling.init() if forward.loss_scaling else None,
        guard=start_guard(rule.spike),
        seed=jnp.asarray(seed, jnp.uint32),
    )


def first_microbatch(example: dict[str, Any], size: int, transform: Transform | None) -> Batch:
    """Return a microbatch of `size` copies of an example [1, ...], transformed as for the model."""
    inputs: Batch = {k: jnp.broadcast_to(v[0], (size, *v.shape[1:])) for k, v in example.items()}
    inputs.setdefault("mask", jnp.ones(size, bool))
    return inputs if transform is None else transform(inputs, jax.random.key(0), True)


# --- One microbatch ----------------------------------------------------------------


class LocalStep(NamedTuple):
    """What a device computes in a step before anything is updated.

    Args:
        state: as this device stores it; kept: leaves [local, example, ...].
        replica: the numbers of the device's microbatches, and how parameters are read.
        train: in training, not in evaluation.
    """

    recipe: Recipe
    state: TrainState
    replica: Replica
    train: bool

    def params(self, slots: Tree, last: bool = False, earlier: Tree = None) -> Tree:
        """Return the parameters for the model; see `Replica.params`."""
        dtype = self.recipe.forward.policy.compute
        return self.replica.params(slots, self.state.params, dtype, last, earlier)

    def compute_outputs(self, params: Tree, piece: Piece) -> tuple[Tree, Batch, Tree]:
        """Compute the model's outputs for one microbatch.

        Args:
            params: from `params`.

        Returns:
            (the outputs, the batch for the loss, the new model state including what is kept for
            examples)
        """
        forward, state, train = self.recipe.forward, self.state, self.train
        mask, batch = piece.batch["mask"], replace_masked(piece.batch)
        key, transform_key = jax.random.split(microbatch_key(state.seed, state.step, piece.number))
        transform = forward.transform if train else forward.eval_transform
        if transform is not None:
            batch = transform(batch, transform_key, train)

        # A microbatch of padding alone is shown to the model as if it were real, because BatchNorm
        # would divide 0 by 0; its sums are dropped in `loss_and_sums`.
        visible = (mask != 0) | ~jnp.any(mask != 0)
        inputs = forward.policy.inputs({**batch, "mask": visible})
        before = {**state.model_state, **piece.kept} if piece.kept else state.model_state

        # Blocks are recomputed one by one in the backward pass; any other model as a whole.
        blocks, recomputed = forward.model.read_by_block, forward.remat if train else "none"
        options = {"per_block": PerBlock(self.replica, recomputed)} if blocks else {}

        def apply_model(params: Tree, before: Tree, inputs: Batch, key: Any) -> tuple[Tree, Tree]:
            return forward.model.apply(params, before, inputs, key, train, **options)

        whole = remat("none" if blocks else recomputed, apply_model)
        outputs, after = whole(params, before, inputs, key)

        # A mask that is negative or NaN makes the loss NaN.
        mask = mask.astype(forward.policy.state)
        loss_batch = {**batch, "mask": jnp.where(mask >= 0, mask, jnp.nan)}
        return forward.policy.outputs(outputs), loss_batch, after

    def loss_and_sums(self, params: Tree, piece: Piece) -> tuple[jax.Array, Sums]:
        """Return (the loss [] to differentiate, the Sums of one microbatch without gradients).

        Both are 0 if the microbatch has no example.
        """
        forward, state, mask = self.recipe.forward, self.state, piece.batch["mask"]
        outputs, batch, after = self.compute_outputs(params, piece)
        kept, model_state = {}, after
        if piece.kept:
            kept = {name: after[name] for name in piece.kept}
            model_state = {name: x for name, x in after.items() if name not in piece.kept}
        if piece.coupled is None:
            loss, weight, metrics = check_result(apply_loss(forward.loss, outputs, batch))
        else:
            loss, weight, metrics = coupled_result(outputs, piece.coupled)

        real, weight = jnp.any(mask != 0), weight.astype(loss.dtype)
        sums = Sums(
            loss=loss,
            weight=weight,
            metrics=jax.tree.map(lambda x: x.astype(loss.dtype), metrics),
            model_state=weighted_state(state.model_state, model_state, weight, real),
        )
        sums, loss = jax.tree.map(lambda x: jnp.where(real, x, 0), (sums, loss))

        def keep_real(old, new):
            return jnp.where(expand_to(real_examples(mask), old), new.astype(old.dtype), old)

        # In float16 small gradients underflow, so the loss is scaled up here, and the sums of
        # gradients are divided by the scale in `apply`.
        if forward.loss_scaling and state.loss_scale:
            loss = loss * forward.loss_scaling.factor(state.loss_scale.value).astype(loss.dtype)
        return loss, sums._replace(kept=jax.tree.map(keep_real, piece.kept, kept))

    def sums(self, piece: Piece) -> Sums:
        """Return the sums of one microbatch, without gradients."""
        return self.loss_and_sums(self.params(self.state.params), piece)[1]

    # --- All microbatches of a device -----------------------------------------------

    def pieces(self, batch: Batch) -> Piece:
        """Return the microbatches [local, ...] of the device."""
        batch = dict(batch)
        coupled = batch.pop(COUPLED, None)
        return Piece(batch, self.state.kept, self.replica.numbers, coupled)

    def map(self, f: Callable[[Piece], Tree], pieces: Piece) -> Tree:
        """Return f of all microbatches [local, ...], at once where `grads` would compute them so."""
        all_of_them = jax.jit(functools.partial(at_once, f), inline=True)  # traced once
        one_by_one = self.recipe.accumulate == "scan" or (
            len(pieces.number) > 1 and has_narrow_floats(all_of_them.trace(pieces).jaxpr)
        )
        return jax.lax.map(f, pieces) if one_by_one else all_of_them(pieces)

    def one_pass(self, pieces: Piece, last: bool, earlier: Tree = None) -> Sums:
        """Return the sums over microbatches [count, ...] that are computed at once, with gradients.

        Parameters are read once for all of them, so the gradient of a weight is one product over
        all their examples.
        """

        def total(slots: Tree) -> tuple[jax.Array, Sums]:
            params = self.params(slots, last, earlier)
            losses, sums = at_once(functools.partial(self.loss_and_sums, params), pieces)
            return losses.sum(), sum_over_first(sums)

        slots = self.replica.slots(self.recipe.rule.trainable(self.state.params), last)
        (_, sums), gradients = jax.value_and_grad(total, has_aux=True)(slots)
        return sums._replace(grads=gradients)

    def several_passes(self, pieces: Piece) -> Sums:
        """Return the sums over microbatches [count, ...], one after the other, in the memory of
        one, with gradients.

        Sums are at least float32: a sum of bfloat16 stops growing after some 256 microbatches.
        """

        @functools.partial(jax.jit, inline=True)  # traced once
        def compute(piece: Piece) -> Sums:
            return self.one_pass(jax.tree.map(lambda x: x[None], piece), last=False)

        def accumulate(sums: Sums, piece: Piece) -> tuple[Sums, Tree]:
            new = compute(piece)
            return add(sums, new._replace(kept=None)), new.kept

        shapes = jax.eval_shape(compute, first_of(pieces))._replace(kept=None)
        start = jax.tree.map(lambda x: at_least_float32(jnp.zeros(x.shape, x.dtype)), shapes)
        sums, kept = jax.lax.scan(accumulate, start, pieces)
        return sums._replace(kept=jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept))

    def passes_and_last(self, pieces: Piece) -> Sums:
        """Return what `several_passes` does. The last pass sums the gradients of all passes over
        the devices, block by block, as its backward pass arrives there."""
        head, tail = (
            jax.tree.map(lambda x, s=s: x[s], pieces) for s in (slice(-1), slice(-1, None))
        )
        if len(pieces.number) == 1:
            return self.one_pass(tail, last=True)
        sums = self.several_passes(head)
        rest = self.one_pass(tail, last=True, earlier=sums.grads)
        kept = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), sums.kept, rest.kept)
        total = add(sums._replace(grads=None, kept=None), rest._replace(grads=None, kept=None))
        return total._replace(grads=rest.grads, kept=kept)


def replace_masked(batch: Batch) -> Batch:
    """Return the batch with the first real example in the place of each example whose mask is 0.

    The contents of these may be anything, and 0 times NaN is NaN, in the gradient of a weight too.
    If no example is real, numbers that are not finite become 0, and so they do where a mask of
    tokens excludes them.
    """
    mask, real = batch["mask"], real_examples(batch["mask"])

    def replace(x: jax.Array) -> jax.Array:
        if x.shape[:1] != real.shape:
            return x
        is_inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        finite = jnp.where(jnp.isfinite(x), x, 0) if is_inexact else x
        if mask.ndim > 1 and x.shape[: mask.ndim] == mask.shape:
            x = jnp.where(expand_to(mask, x) != 0, x, finite)
        example = jnp.where(jnp.any(real), x[jnp.argmax(real)], finite)
        return jnp.where(expand_to(real, x), x, example)

    return {name: x if name in NOT_OF_EXAMPLES else replace(x) for name, x in batch.items()}


def real_examples(mask: jax.Array) -> jax.Array:
    """Return True [example] for each example of which something counts; mask: [example, ...]."""
    return jnp.any(mask.reshape(len(mask), -1) != 0, axis=-1)


def at_once(f: Callable[[Piece], Tree], pieces: Piece) -> Tree:
    """Return f of all microbatches [count, ...] at once; a model need not support that for one."""
    if len(pieces.number) > 1:
        return jax.vmap(f)(pieces)
    return jax.tree.map(lambda x: x[None], f(first_of(pieces)))


def first_of(pieces: Piece) -> Piece:
    """Return the first of several microbatches."""
    return jax.tree.map(lambda x: x[0], pieces)


def sum_over_first(sums: Sums) -> Sums:
    """Sum over the leading dim of all that adds up."""
    total = jax.tree.map(lambda x: x.sum(0), sums._replace(kept=None))
    return total._replace(kept=sums.kept)


def grads(recipe: Recipe, state: TrainState, batch: Batch, replica: Replica) -> Sums:
    """Return the sums over a device's microbatches, with the gradients of their losses.

    Computations in 16 bits take one microbatch after the other: products for several of them would
    round, and overflow, by how many microbatches a device has, and XLA rounds a mapped convolution
    in other places than a single one.

    Args:
        state: as this device stores it; kept: leaves [local, example, ...].
        batch: {name: [local, example, ...]}.
        replica: the numbers of these microbatches, and how parameters are read. Gradients that its
            derivatives sum over the devices are returned as these sums, perhaps as slices.
    """
    local, mask = LocalStep(recipe, state, replica, train=True), batch["mask"]
    if not recipe.padded:
        batch = {**batch, "mask": jnp.ones_like(mask)}  # a constant that the compiler can fold
    pieces = local.pieces(batch)
    # A trace of its own: in that of the pass, gradients may be sent in 16 bits.
    one_by_one = (
        recipe.accumulate == "scan"
        or any(is_narrow(x.dtype) for x in jax.tree.leaves(state.params))
        or has_narrow_floats(jax.make_jaxpr(local.sums)(first_of(pieces)))
    )
    if not one_by_one:
        sums = local.one_pass(pieces, last=True)
    elif replica.reduces_last:
        sums = local.passes_and_last(pieces)
    else:
        sums = local.several_passes(pieces)
    if recipe.padded:
        return sums

    # With a constant weight, XLA would fuse the division into every reader of a gradient and
    # compute it each time.
    return sums._replace(weight=sums.weight * jnp.max(mask).astype(sums.weight.dtype))


def evaluate(recipe: Recipe, state: TrainState, batch: Batch, replica: Replica) -> Sums:
    """Return the sums over a device's microbatches, without gradients; see `grads`."""
    local = LocalStep(recipe, state, replica, train=False)
    return sum_over_first(local.map(local.sums, local.pieces(batch))._replace(model_state=None))


def first_pass(
    recipe: Recipe, state: TrainState, batch: Batch, replica: Replica, train: bool
) -> tuple[Tree, Batch]:
    """Return (outputs, the batch for the loss) of all devices' microbatches [microbatch, ...]."""
    local = LocalStep(recipe, state, replica, train)
    outputs = local.map(
        lambda piece: local.compute_outputs(local.params(state.params), piece)[:2],
        local.pieces(batch),
    )
    return replica.join(outputs)


# --- The update ---------------------------------------------------------------------


def plain_total(tree: Tree) -> jax.Array:
    """Return [2]: the sum of squares and the number of non-finite elements, in at least float32.

    On CPU, small leaves are concatenated, since starting an operation costs more than running it,
    and elements are counted only if the sum of squares is not finite.
    """
    if not on_cpu():
        return _squares_and_nonfinite(tree)
    leaves = [at_least_float32(x).reshape(-1) for x in jax.tree.leaves(tree)]
    small = [x for x in leaves if x.size <= SMALL]
    vectors = [x for x in leaves if x.size > SMALL] + ([jnp.concatenate(small)] if small else [])
    squares = sum((jnp.dot(x, x) for x in vectors), jnp.float32(0))
    return jax.lax.cond(
        jnp.isfinite(squares),
        lambda _: jnp.stack([squares, jnp.zeros_like(squares)]),
        _squares_and_nonfinite,
        leaves,
    )


def _squares_and_nonfinite(tree: Tree) -> jax.Array:
    leaves = [*map(at_least_float32, jax.tree.leaves(tree))]
    zero = jnp.float32(0)
    squares = sum((jnp.sum(jnp.square(x)) for x in leaves), zero)
    return jnp.stack([squares, sum((jnp.sum(~jnp.isfinite(x)) for x in leaves), zero)])


def clip(gradients: Tree, norm: jax.Array, max_norm: float) -> Tree:
    """Scale the gradients so that their norm is at most `max_norm`."""
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


def apply(
    recipe: Recipe,
    state: TrainState,
    sums: Sums,
    total: Callable[[Tree], jax.Array] = plain_total,
) -> tuple[TrainState, Metrics]:
    """Update the state from the sums over all devices.

    Args:
        sums: of the whole batch. Gradients, parameters and optimizer state may be slices, or full.
        total: returns [2], the sum of squares of gradients and the number of their non-finite
            elements; over all slices, if gradients are slices.

    Returns:
        (the state after the update, the metrics [] to report)
    """
    rule, scaling = recipe.rule, recipe.forward.loss_scaling
    params = rule.trainable(state.params)

    # The one division. A batch of weight 0, without any example that counts, has no mean: its loss
    # is NaN, and so it is skipped like any other update that is not finite.
    divisor = jnp.where(sums.weight > 0, sums.weight, 1)
    real_weight = jnp.where(sums.weight > 0, sums.weight, jnp.nan)
    if scaling and state.loss_scale:
        divisor *= scaling.factor(state.loss_scale.value).astype(divisor.dtype)
    like = master_copy(params, state.opt_state)

    def mean(total, like):
        total = at_least_float32(total)  # bfloat16 would round the weight itself
        return (total / divisor.astype(total.dtype)).astype(like.dtype)

    gradients = jax.tree.map(mean, sums.grads, like)
    squares, nonfinite = total(gradients)
    norm = jnp.sqrt(squares)
    model_state, disagreeing = mean_state(state.model_state, sums.model_state, sums.weight)
    loss = sums.loss / real_weight

    # All of this is computed from sums over all devices, so all devices take the same decision.
    # While a loss scale falls, overflow is expected: it skips the update, and is no step to a halt.
    finite = (nonfinite == 0) & jnp.isfinite(loss)
    overflow: Any = False
    if scaling and state.loss_scale:
        can_fall = (state.loss_scale.value > MIN_SCALE) & scaling.dynamic
        overflow = jnp.isfinite(loss) & can_fall
    facts = Facts(state.step + 1, loss, finite, overflow, disagreeing)
    applied, guard = decide(state.guard, facts, rule.max_nonfinite, rule.spike)
    running = state.guard.halted == 0

    def optimize():
        clipped = gradients
        if rule.clip_norm is not None:
            clipped = clip(gradients, norm, rule.clip_norm)
        # With zeros where the update is skipped, so that the optimizer never sees a NaN.
        safe = jax.tree.map(lambda g: jnp.where(applied, g, 0), clipped)
        updates, opt_state = rule.tx.update(safe, state.opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def keep():
        return params, state.opt_state

    # An update is skipped by selecting the old state, which XLA does in the optimizer's own loops
    # over the elements. On CPU it would copy the old moments first: the loop for a parameter
    # computes the new ones again, from them. A branch updates them in place. XLA does not know that
    # nothing is skipped in the branch; without the zeros there, it would contract other products
    # and sums, and so give other numbers.
    if on_cpu():
        updated, opt_state = jax.lax.cond(applied, optimize, keep)
    else:
        updated, opt_state = select(applied, optimize(), keep())
    new = state.replace(
        step=state.step + running.astype(state.step.dtype),
        params=merge(updated, state.params),
        model_state=select(applied, model_state, state.model_state),
        opt_state=opt_state,
        guard=guard,
    )
    metrics = {
        "loss": loss,
        **divide(sums.metrics, real_weight),
        "grad_norm": norm,
        "nonfinite_grads": nonfinite,
        "weight": sums.weight,
        "skipped": (~applied).astype(jnp.int32),
        "skipped_updates": guard.skipped,
        "halted": guard.halted,
    }
    if disagreeing is not None:
        metrics["disagreeing_state"] = disagreeing
    rate = rate_of(rule.tx, gradients, state.opt_state, params, opt_state)
    if rate is None and rule.schedule is not None:
        rate = rule.schedule(state.step - state.guard.skipped)
    if rate is not None:
        metrics["lr"] = jnp.asarray(rate, float)
    if scaling and state.loss_scale:
        adjusted = scaling.adjust(state.loss_scale, nonfinite == 0)
        new = new.replace(loss_scale=select(running, adjusted, state.loss_scale))
        metrics["loss_scale"] = state.loss_scale.value
    return new, metrics
