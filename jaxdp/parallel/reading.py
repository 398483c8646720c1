"""How parameters are read on a device, and how their gradients come back.

Reading is one function with one derivative, for all stages of ZeRO:

    forward    slices are gathered to full parameters (stage 3), in the dtype of the computation
    backward   gradients are summed over the devices, to slices (stages 1 to 3) or in full (stage 0)

What is differentiated is not the parameter but its `slot`, an array that nothing reads, in the
shape in which the gradient is wanted. JAX demands that a gradient has the shape of what it belongs
to: a slice, in stage 3 and where gradients are reduced to slices, although the model computes with
the full parameter. The value is beside it, without a derivative.

Whether a gradient is summed here or after the backward pass says `Plan.when` (`reduction`). A model
without scanned blocks needs `slots`, `params`, `read`, `gather_parameters` and `sum_gradients` of
`ShardedReplica`, and nothing else of this file but what passes its arrays on.

The model reads most parameters before it starts. Those of scanned blocks stay `Stored`, and each
block reads its own inside the scan (`jaxdp.models.scan`). So one full block is in memory at a time,
if the backward pass gathers it again (`remat`). While the backward pass goes on with the block
below, the devices exchange the gradients of this
one; a sum over all blocks after the loop could overlap with nothing.

The bottommost block has none below it. Its gradients are sent last, after those of an embedding,
which need not wait for the products that give the block's own: `open_first` makes them wait.

If gradients are summed in the last pass over microbatches alone (LAST in `reduction`; not in stages
2 and 3 by default), those of the passes before it are summed with it. What is read once adds its
own to them in its backward rule, and sends the sum. Whatever nobody has taken so is sent by itself
(`inject`). Which is which is known only after the model was traced, and JAX traces the backward
rules after that: a `Ticket` carries it from the one to the other.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxdp.models.scan import at
from jaxdp.parallel.reduction import LAST, Plan, order_of
from jaxdp.precision import at_least_float32, cast_floats
from jaxdp.split import WHOLE, fit, is_below, path_string, take
from jaxdp.train.state import merge
from jaxdp.train.step import Replica

Tree = Any


class Stored(struct.PyTreeNode):
    """One parameter, or a stack of them [block, ...], before it is read.

    Args:
        slot: what is differentiated. Only its shape counts, that of the gradient: full, or a slice.
            In ZeRO 3 it is a slice, so that JAX returns the gradient as one, although the model
            computes with the full parameter. None: the parameter is frozen.
        value: the parameter as it is stored: full, or a slice.
        earlier: this device's full gradient of earlier passes, to be sent with this one; or None.
        spare: the same, as long as nobody has taken it.
        first: the token of the bottommost block, if the gradients of blocks are summed later.
        dim: along which slices are, counted from the end, so that it is the same for a stack and
            for one of its blocks; 0: there are no slices.
        size: of this dim, without padding.
        dtype: of the parameter that is read.
        summed: the gradient is summed over the devices where it is computed.
        in_block: the parameter is read inside a scan over blocks.
        ticket: what was done with it.
    """

    slot: jax.Array | None
    value: jax.Array
    earlier: jax.Array | None
    spare: jax.Array | None
    first: jax.Array | None
    dim: int = struct.field(pytree_node=False)
    size: int = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)
    summed: bool = struct.field(pytree_node=False)
    in_block: bool = struct.field(pytree_node=False)
    ticket: "Ticket" = struct.field(pytree_node=False)

    def axis(self) -> int:
        """Return the dim along which slices are, counted from the start, or WHOLE."""
        return self.value.ndim + self.dim if self.dim else WHOLE

    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the full parameter, without padding."""
        axis = self.axis()
        return tuple(self.size if i == axis else n for i, n in enumerate(self.value.shape))


class Ticket:
    """Marks that are set while a program is traced: a block sends the gradient of earlier passes
    (`taken`); the bottommost block's gradient is sent by its token (`opened`)."""

    taken = False
    opened = False


def is_stored(x: Any) -> bool:
    return isinstance(x, Stored)


def is_none(x: Any) -> bool:
    return x is None


class DeviceReplica(Replica):
    """A device's part in a step that reads parameters as they are stored, and returns gradients as
    computed; it lives inside a program that maps the plan's axes.

    Args:
        plan: see `Plan`.
        numbers: int32 [local], of its microbatches.
    """

    def __init__(self, plan: Plan, numbers: jax.Array):
        super().__init__(numbers)
        self.plan, self.reduces_last = plan, plan.when == LAST

    def join(self, tree: Tree) -> Tree:
        def gather(x: jax.Array) -> jax.Array:
            is_small = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4
            # A dtype that all backends support.
            sent = x.astype(jnp.int32) if is_small or x.dtype == jnp.bool_ else x
            joined = jax.lax.all_gather(sent, self.plan.axes.all, tiled=True)
            return joined[order_of(self.plan.assignment)].astype(x.dtype)

        return jax.tree.map(gather, tree)


class ShardedReplica(DeviceReplica):
    """A device's part in a step that gathers parameters, or sums gradients in the backward pass."""

    def summed(self, last: bool) -> Tree:
        """Return a tree of booleans like the parameters: see `Plan.summed`."""
        return self.plan.summed(last)

    def slots(self, params: Tree, last: bool) -> Tree:
        """See `Replica`. Their values are never read, so computing them costs nothing."""
        plan = self.plan
        index = jax.lax.axis_index(plan.axes.shard)
        parts = jax.lax.axis_size(plan.axes.shard)

        def slot(x: jax.Array | None, full: Any, dim: int, summed: bool) -> jax.Array | None:
            if x is None:
                return None
            wants_slice = summed and plan.update_in_slices
            if dim == WHOLE or wants_slice == plan.params_sharded:
                return at_least_float32(x)
            if wants_slice:
                return take(at_least_float32(x), dim, index, parts)
            return jnp.zeros(full.shape, at_least_float32(x).dtype)

        trees = (params, plan.shapes, plan.param_dims, self.summed(last))
        return jax.tree.map(slot, *trees, is_leaf=is_none)

    def params(self, slots: Tree, stored: Tree, dtype: Any, last: bool, earlier: Tree) -> Tree:
        plan = self.plan
        earlier = jax.tree.map(lambda _: None, stored) if earlier is None else earlier

        def store(
            slot: Any, value: Any, spare: Any, full: Any, dim: int, summed: bool, in_block: bool
        ) -> Stored:
            from_end, size = (0, 0) if dim == WHOLE else (dim - len(full.shape), full.shape[dim])
            ticket, wanted = Ticket(), dim if plan.update_in_slices else WHOLE
            if slot is not None and spare is not None:
                spare = jax.lax.stop_gradient(spare)
                slot = inject(slot, spare, ticket, plan if summed else None, wanted)
            value = jax.lax.stop_gradient(value)  # the gradient leaves through the slot
            return Stored(
                slot=slot,
                value=value,
                earlier=None,
                spare=spare,
                first=None,
                dim=from_end,
                size=size,
                dtype=jnp.dtype(dtype),
                summed=summed,
                in_block=in_block,
                ticket=ticket,
            )

        trees = (
            slots,
            stored,
            earlier,
            plan.shapes,
            plan.param_dims,
            self.summed(last),
            plan.in_blocks,
        )
        leaves = jax.tree.map(store, *trees, is_leaf=is_none)

        def of(kind: bool) -> Tree:
            return jax.tree.map(
                lambda x: x if x.in_block == kind else None, leaves, is_leaf=is_stored
            )

        blocks, link = of(True), None
        if plan.later and any(jax.tree.leaves(self.summed(last))):
            blocks, link = self.open_first(blocks)
        return merge(self.read(self.once(of(False)), link), blocks)

    def read(self, stored: Tree, link: jax.Array | None = None) -> Tree:
        """Read all leaves of a tree at once, so that a bucket can hold the gradients of a block.

        Args:
            link: from `open_first`: the bottommost blocks wait for the sums of these gradients.
        """
        leaves, treedef = jax.tree.flatten(stored, is_leaf=is_stored)
        if not leaves or not is_stored(leaves[0]):
            return stored

        def gather(leaves: list[Stored], live: Any, link: Any) -> list[jax.Array]:
            return self.gather_parameters(leaves, live)

        def backward(residuals: Any, grads: list[jax.Array]) -> Any:
            by_slot = self.sum_gradients(residuals, grads)
            if link is None:
                return by_slot, None, None
            # The gradient of the link is 0, and known when these are summed.
            by_slot, done = jax.lax.optimization_barrier((by_slot, jnp.zeros_like(link)))
            return by_slot, None, done

        read = with_derivative(gather, residuals_of, backward)
        return jax.tree.unflatten(treedef, read(leaves, self.live, link))

    def gather_parameters(self, leaves: list[Stored], live: Any) -> list[jax.Array]:
        """Return full parameters, without padding, in the dtype of the computation."""
        full = [cast_floats(x.value, x.dtype) for x in leaves]
        if self.plan.params_sharded:
            axes = [x.axis() for x in leaves]
            full = self.plan.reduction.gather(full, axes, self.plan.axes.shard)
            full = [fit(x, like.full_shape()) for x, like in zip(full, leaves)]
        return self.settle(full, self.plan.params_sharded, leaves[0].in_block, live)

    def sum_gradients(self, residuals: Any, grads: list[jax.Array]) -> list[Stored]:
        """Return the gradients by the slots, from those by the full parameters, which are summed
        over the devices here.

        Args:
            residuals: see `residuals_of`.
        """
        leaves, live = residuals
        grads = self.settle(grads, any(x.summed for x in leaves), leaves[0].in_block, live)
        by_slot: list[Any] = [
            None if x.slot is None else grad.astype(x.slot.dtype) for x, grad in zip(leaves, grads)
        ]
        by_slot = [g if x.earlier is None else x.earlier + g for x, g in zip(leaves, by_slot)]
        sent = [i for i, x in enumerate(leaves) if x.summed and x.slot is not None]
        dims = [
            by_slot[i].ndim + leaves[i].dim
            if leaves[i].dim and self.plan.update_in_slices
            else WHOLE
            for i in sent
        ]
        for i, x in zip(sent, self.plan.send([by_slot[i] for i in sent], dims)):
            by_slot[i] = x
        return [x.replace(slot=g, earlier=None) for x, g in zip(leaves, by_slot)]

    def settle(self, arrays: list[jax.Array], moved: bool, in_block: bool, live: Any) -> Any:
        """Return parameters after they were read, or gradients before they are summed; an
        arithmetic whose bits must not depend on the program keeps them from being fused.

        Args:
            moved: they have been gathered, or will be summed over the devices.
            in_block: they are those of a block.
            live: `self.live`, as it reaches the derivative.
        """
        return arrays

    live: Any = None
    """A value that `settle` needs on the device: exact mode's barrier must not look constant to XLA."""

    # --- Scanned blocks whose gradients travel while others are computed (`Plan.later`) ----

    def once(self, stored: Tree) -> Tree:
        def take_spare(x: Any) -> Any:
            if not is_stored(x) or x.spare is None or not x.summed:
                return x
            x.ticket.taken = True
            return x.replace(earlier=x.spare, spare=None)

        return jax.tree.map(take_spare, stored, is_leaf=is_stored)

    def first(self, stored: Tree) -> tuple[Tree | None, Tree]:
        leaves, treedef = jax.tree.flatten(stored, is_leaf=is_stored)
        if not leaves or not is_stored(leaves[0]):
            return None, stored
        rest = jax.tree.unflatten(treedef, [x.replace(first=None) for x in leaves])
        is_sent = any(x.summed and x.first is not None for x in leaves)
        if not is_sent or len(leaves[0].value) == 1:
            return None, rest
        for x in leaves:
            x.ticket.opened = True
        return [x.first for x in leaves], rest

    def open_first(self, stored: Tree) -> tuple[Tree, jax.Array]:
        """Open the tokens of the bottommost blocks of all stacks, for `first`.

        Returns:
            (the same tree with them, a link: the gradients of these blocks are summed when that of
            the link is known, see `read`)
        """
        leaves, treedef = jax.tree.flatten(stored, is_leaf=is_stored)

        def make(leaves: list[Stored], live: Any) -> tuple[list[Any], jax.Array]:
            return [token_of(at(x, 0)) for x in leaves], jnp.zeros(())

        def residuals(leaves: list[Stored], live: Any) -> Any:
            return leaves, live

        # JAX traces this after all of the forward pass, so the tickets say what has happened there.
        def backward(residuals: Any, grads: tuple[list[Any], jax.Array]) -> Any:
            leaves, live = residuals
            opened = [i for i, x in enumerate(leaves) if x.ticket.opened]
            # XLA drops what nothing uses from a barrier, so 0 is added to all of them.
            rows, link = jax.lax.optimization_barrier(([grads[0][i] for i in opened], grads[1]))
            rows = jax.tree.map(lambda g: g + link.astype(g.dtype), rows)
            stored = [at(leaves[i], 0) for i in opened]
            stored = [x.replace(earlier=x.spare if x.ticket.taken else None) for x in stored]
            summed = self.sum_gradients(residuals_of(stored, live), rows)

            by_slot = [x.replace(slot=None, value=None, spare=None) for x in leaves]
            for i, row in zip(opened, summed):
                if row.slot is not None:
                    slot = jnp.zeros_like(leaves[i].slot).at[0].set(row.slot)
                    by_slot[i] = by_slot[i].replace(slot=slot)
            return by_slot, None

        opened = with_derivative(make, residuals, backward)
        tokens, link = opened(leaves, self.live)
        with_token = [x.replace(first=token) for x, token in zip(leaves, tokens)]
        return jax.tree.unflatten(treedef, with_token), link

    def open(self, stored: Tree, x: Tree) -> tuple[Tree, Tree]:
        """Return zeros with the shapes of a block's full gradients, and x. Nothing reads the zeros,
        so they cost nothing; the derivative sums a block's gradients over the devices, as that of
        `read` does.

        The gradient of x waits for this sum, which travels until then. Otherwise XLA would join the
        sum with those of the bottommost block or of what lies below, and wait for them.
        """

        def make(leaves: list[Stored], live: Any, x: Tree) -> tuple[list[Any], Tree]:
            return [token_of(leaf) for leaf in leaves], x

        def backward(residuals: Any, grads: tuple[list[Any], Tree]) -> Any:
            by_slot, x_grads = self.sum_gradients(residuals, grads[0]), grads[1]
            # Integers have no gradient.
            floats = jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, x_grads)
            by_slot, floats = jax.lax.optimization_barrier((by_slot, floats))
            return by_slot, None, merge(floats, x_grads)

        opened = with_derivative(make, residuals_of, backward)
        return opened(jax.tree.leaves(stored, is_leaf=is_stored), self.live, x)

    def close(self, values: Tree, token: Tree) -> Tree:
        leaves, treedef = jax.tree.flatten(values, is_leaf=is_stored)

        def make(leaves: list[Stored], token: list[Any], live: Any) -> list[jax.Array]:
            return self.gather_parameters(leaves, live)

        def residuals(leaves: list[Stored], token: list[Any], live: Any) -> Any:
            return [empty_like(x) for x in token]

        def backward(like: list[Any], grads: list[jax.Array]) -> tuple[None, list[Any], None]:
            pairs = zip(like, grads, strict=True)
            return None, [None if x is None else g.astype(x.dtype) for x, g in pairs], None

        closed = with_derivative(make, residuals, backward)
        return jax.tree.unflatten(treedef, closed(leaves, token, self.live))

    def values(self, stored: Tree) -> Tree:
        def value_alone(x: Stored) -> Stored:
            return x.replace(slot=None, earlier=None, spare=None, first=None)

        return jax.tree.map(value_alone, stored, is_leaf=is_stored)


def token_of(x: Stored) -> jax.Array | None:
    """Return zeros in the shape of the full gradient of a block's parameter; None if it is frozen."""
    return None if x.slot is None else jnp.zeros(x.full_shape(), x.slot.dtype)


def with_derivative(f: Callable, residuals: Callable, backward: Callable) -> Callable:
    """Return f with a derivative of its own: backward(residuals(arguments of f), gradients of the
    results) -> gradients of the arguments."""

    def forward(*arguments: Any) -> tuple[Any, Any]:
        return f(*arguments), residuals(*arguments)

    derived = jax.custom_vjp(f)
    derived.defvjp(forward, backward)
    return derived


def residuals_of(leaves: list[Stored], live: Any, *others: Any) -> tuple[list[Stored], Any]:
    """Return what the backward pass needs of the arguments: of slots, the dtypes alone."""
    return [x.replace(slot=empty_like(x.slot), value=None, spare=None) for x in leaves], live


def empty_like(x: jax.Array | None) -> jax.Array | None:
    """Return an array without elements, since residuals of a derivative must be arrays."""
    return None if x is None else jnp.zeros((0,), x.dtype)


def inject(
    slot: jax.Array, earlier: jax.Array, ticket: Ticket, plan: Plan | None, dim: int
) -> jax.Array:
    """Return the slot. Add the gradient of earlier passes to its own, unless a block has sent it.

    Args:
        plan: by which the gradient is summed over the devices; None: it is not.
        dim: along which slices of the sum are wanted, or WHOLE.
    """

    def same(slot: jax.Array, earlier: jax.Array) -> jax.Array:
        return slot

    def residuals(slot: jax.Array, earlier: jax.Array) -> jax.Array:
        return earlier

    # JAX traces this after all of the forward pass, so the ticket says what has happened there.
    def backward(earlier: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
        if ticket.taken:
            return grad, None
        [total] = [earlier] if plan is None else plan.send([earlier], [dim])
        return grad + total.astype(grad.dtype), None

    return with_derivative(same, residuals, backward)(slot, earlier)


def in_blocks(params: Tree, blocks: tuple[str, ...]) -> Tree:
    """Return a tree of booleans: the leaves below one of the paths (a/b)."""

    def is_inside(path: Any, _: Any) -> bool:
        return is_below(path_string(path), blocks)

    return jax.tree_util.tree_map_with_path(is_inside, params)
