"""`jax.pmap` over each process's devices, with `psum` over the axis of all: the classic data-parallel loop."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.axes import DATA, FLAT
from jaxdp.errors import UsageError
from jaxdp.optim import check_elementwise
from jaxdp.parallel.base import (
    Program,
    TwoParts,
    abstract_state,
    applier,
    collect,
    data_mesh,
    deal,
    like,
    make_state,
    of_this_process,
    one_by_one,
    ordered_devices,
    over_slots,
    reducer,
    same,
    sent_by_call,
    slot_table,
    totaller,
)
from jaxdp.parallel.exact import check_devices, largest, pieces_of
from jaxdp.parallel.layout import ZERO, Share, make_gather, of_params, share, state_dims, whole_shape
from jaxdp.parallel.reduction import Reduction
from jaxdp.parallel.rounding import running
from jaxdp.split import WHOLE, spec, take
from jaxdp.step import Batch, Gather, Step, Sums, TrainState, View, merge

VARIES = (True, False, True, False)  # the parts of two arguments


class PMap:
    """State whole on every local device, held once per process; each device computes the whole update.

    Every replica divides the same psum by the same weight (`lax.pmean` with weights), so all stay equal. zero: 1 gives
    each device a slice of the optimizer state, and of the update; for elementwise optimizers. Other arguments as
    those of `PJit`.
    """

    def __init__(
        self,
        make: Callable[[], TrainState],
        microbatches: int,
        reduction: Reduction,
        reduce_dtype: Any = None,
        devices: Sequence[jax.Device] | None = None,
        *,
        zero: int = 0,
        shard_size: int | None = None,
        accumulator: str = "split",
        blocks: tuple[str, ...] = (),
        split_as: int | None = None,
    ):
        if zero > 1 or shard_size is not None:
            key, value = ("zero", zero) if zero > 1 else ("shard_size", shard_size)
            raise UsageError(f"parallel.{key}: {value} does not work under pmap; set parallel.backend to pjit", rank=0)
        self.devices = ordered_devices(devices)
        if reduction.exact:
            check_devices(microbatches, len(self.devices), per_slot=False)
        self.most = largest(microbatches) if reduction.exact else 1
        self.table = slot_table(microbatches, len(self.devices))
        here = of_this_process(self.devices)
        local = [self.devices[i] for i in here]
        self.local_slots = self.table[here].reshape(-1)
        self.per_device = (len(local), self.table.shape[1])
        self.by_call = sent_by_call(self.devices)
        self.mesh = data_mesh(self.devices)
        self.everywhere = NamedSharding(self.mesh, P())
        self.here = NamedSharding(data_mesh(local), P())
        self.split_everywhere = NamedSharding(self.mesh, P(DATA))
        self.split_here = NamedSharding(data_mesh(local), P(DATA))
        self.reduction, self.reduce_dtype = reduction, reduce_dtype
        self.layout, self.blocks, self.parts = ZERO[zero], blocks, len(self.devices)
        self.make, self.shapes = make, jax.eval_shape(make)
        self.dims = state_dims(self.shapes, self.layout, split_as or len(self.devices), blocks, self.most)
        self.dims = self.dims.replace(opt_state=of_params(self.shapes, self.dims.opt_state))
        whole_split = state_dims(self.shapes, ZERO[3], split_as or len(self.devices), blocks, self.most)
        self.slices: Any = whole_split.params  # the dims of gradients and updates, where any state is split

    def check(self, tx: Any, params: Any) -> None:
        parts = 2 if self.most > 1 else len(self.devices)  # exact: what any number of devices splits
        if self.layout.opt_state and parts > 1:
            check_elementwise(tx, params, parts, self.blocks)

    def abstract(self) -> TrainState:
        return abstract_state(self.shapes, self.mesh, self.dims, DATA)

    def share(self) -> Share:
        return share(self.shapes, self.dims, self.layout)

    def init(self) -> TrainState:
        return self.adopt(make_state(self.make, self.abstract(), self.mesh, self.dims, FLAT))

    def put(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        def by_device(x: np.ndarray) -> np.ndarray:
            """[local device, slot, ...], or [local device, step, slot, ...]."""
            if several:
                return x.reshape(len(x), *self.per_device, *x.shape[2:]).swapaxes(0, 1)
            return x.reshape(*self.per_device, *x.shape[1:])

        dealt = {k: by_device(x) for k, x in batch.items()}
        if self.by_call:
            return dealt  # type: ignore[return-value]
        return self._placed(dealt, self.split_here, self.split_everywhere)

    def hold(self, arrays: dict[str, np.ndarray]) -> Batch:
        return self._placed(arrays, self.here, self.everywhere)

    def _placed(self, arrays: dict[str, np.ndarray], here: NamedSharding, everywhere: NamedSharding) -> Batch:
        """On this process's devices; as parts of global arrays where there are other processes (see `_Mapped`)."""
        placed: Batch = jax.device_put(arrays, here)
        return {k: over_all(x, everywhere) for k, x in placed.items()} if jax.process_count() > 1 else placed

    def lower(self, step: Step) -> Program:
        parts, exact = len(self.devices), self.reduction.exact
        split_dims = self.slices
        grad_dims = step.trainable(split_dims) if self.layout.opt_state else None
        pieces = pieces_of(step.trainable(self.shapes.params), self.blocks, self.most) if exact else None
        reduce = reducer(self.reduction, dtype=self.reduce_dtype, dims=grad_dims)
        sums_of = over_slots(step.grads, reduce, self.table, FLAT, exact)
        evaluation_of = over_slots(step.evaluate, reducer(self.reduction), self.table, FLAT, exact)

        def gathered(view: View) -> tuple[View, Gather]:
            params, gather = make_gather(
                view.params,
                split_dims,
                split_params=False,
                split_grads=False,
                reduction=self.reduction,
                axes=FLAT,
                blocks=self.blocks,
                trainable=step.trainable,
                live=running(view.step) if exact else None,
            )
            return view._replace(params=params), gather

        def grads(state: TrainState, batch: Batch) -> Sums:
            view, gather = gathered(state.view)
            return sums_of(view, batch, gather)

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, dict[str, jax.Array]]:
            total = totaller(grad_dims, DATA, pieces, state.step)
            if grad_dims is None:
                return step.apply(state, sums, total)
            index = jax.lax.axis_index(DATA)
            before = state.params
            own = jax.tree.map(lambda x, d: take(x, d, index, parts), before, split_dims)
            state, metrics = step.apply(state.replace(params=own), sums, total)
            joined = self.reduction.gather(step.trainable(state.params), grad_dims, DATA)
            return state.replace(params=merge(joined, before)), metrics

        def evaluate(state: TrainState, batch: Batch) -> Sums:
            view, gather = gathered(state.view)
            return evaluation_of(view, batch, gather)

        split = lambda tree: jax.tree.map(lambda d: d != WHOLE, tree)
        of_state = split(self.dims).replace(carry=True)
        yes: Any = True
        no: Any = False
        of_sums = Sums(split(grad_dims) if self.layout.opt_state else no, no, no, no, no, yes)
        mapped = functools.partial(_Mapped, devices=self.devices)
        results = (of_state, False)
        evaluation = mapped(evaluate, (of_state, True), Sums(no, no, no, no, no, yes))

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
            return apply(state, grads(state, batch))

        if not exact:
            compiled = lambda f: mapped(f, (of_state, True), results, donate=True)
            return Program(compiled(update), evaluation, compiled(one_by_one(update)))
        first = mapped(grads, (of_state, True), of_sums)
        second = mapped(applier(apply, exact), (of_state, of_sums), results, donate=True)
        return Program(TwoParts(first, second, first.result_shapes), evaluation)

    def averaged(self, state: TrainState) -> TrainState:
        ema = self.export(state).ema
        whole = jax.jit(same, out_shardings=self.everywhere)(like(ema, state.params))
        place = self.here if state.step.is_fully_addressable else self.everywhere  # as the other leaves
        return state.replace(params=jax.tree.map(lambda x: _of_buffers(x.shape, place, x), whole))

    def arguments(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        local, slots = self.per_device

        def own(x: Any, dim: int) -> Any:
            """[local device, ...slice] of what is split; what is whole as it is."""
            slice_ = (n // len(self.devices) if d == dim else n for d, n in enumerate(x.shape))
            return jax.ShapeDtypeStruct(x.shape if dim == WHOLE else (local, *slice_), x.dtype)

        state = jax.tree.map(own, self.shapes.replace(carry=None), self.dims.replace(carry=None))
        stack = lambda x, shape: jax.ShapeDtypeStruct((local, slots, *shape), x.dtype)
        carry = jax.tree.map(lambda x: stack(x, x.shape[1:]), self.shapes.carry)
        return state.replace(carry=carry), {k: stack(x, x.shape) for k, x in example.items()}

    def export(self, state: TrainState) -> TrainState:
        whole = jax.tree.map(self._everywhere, state.replace(carry=None), self.dims.replace(carry=None))
        if state.carry is None:
            return whole
        carry = jax.tree.map(self._join, state.carry)
        return whole.replace(carry=collect(self.table, carry, self.everywhere))

    def adopt(self, state: TrainState) -> TrainState:
        here = jax.tree.map(self._here, state.replace(carry=None), self.dims.replace(carry=None))
        if state.carry is None:
            return here
        carry = deal(self.table, state.carry, self.split_everywhere)
        return here.replace(carry=jax.tree.map(self._part, carry))

    def _carried(self, value: Any) -> Any:
        return jax.tree.map(lambda _: value, self.shapes.carry)

    def _everywhere(self, x: jax.Array, dim: int) -> jax.Array:
        """The same buffers as a global array: whole, or [local device, ...slice] along its dim; nothing moves."""
        if dim == WHOLE:
            return _of_buffers(x.shape, self.everywhere, x)
        slices = [s.data.reshape(s.data.shape[1:]) for s in x.addressable_shards]
        place = NamedSharding(self.mesh, spec(dim, DATA))
        shape = whole_shape(slices[0], dim, len(self.devices))
        return jax.make_array_from_single_device_arrays(shape, place, slices)

    def _here(self, x: jax.Array, dim: int) -> jax.Array:
        """The inverse of `_everywhere`."""
        if dim == WHOLE:
            return _of_buffers(x.shape, self.here, x)
        slices = [s.data[None] for s in x.addressable_shards]
        shape = (len(slices), *slices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split_here, slices)

    def _join(self, x: jax.Array) -> jax.Array:
        """[local device, slot, ...] on this process's devices -> [device x slot, ...] over all."""
        shards = [s.data.reshape(s.data.shape[1:]) for s in x.addressable_shards]
        shape = (self.table.size, *x.shape[2:])
        return jax.make_array_from_single_device_arrays(shape, self.split_everywhere, shards)

    def _part(self, x: jax.Array) -> jax.Array:
        """The inverse of `_join`."""
        shards = [s.data[None] for s in x.addressable_shards]
        shape = (*self.per_device, *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.split_here, shards)


class _Mapped:
    """`pmap` of f(state, other): every tree goes in and comes out as two tuples of leaves, those that differ between
    devices and those that do not, because `pmap` over several processes wants its axes hashable.

    takes, gives: of each argument, and of the result, a tree (or a prefix of one) of which leaves differ. donate: the
    first argument.

    Over several processes `pmap` makes a global array of each one of this process's, and the reverse, in every call,
    which takes longer than all else that Python does. There it only compiles; what is compiled takes global arrays and
    gives global arrays, and what is not global yet is made so here, once.
    """

    def __init__(
        self, f: Callable, takes: tuple[Any, Any], gives: Any, devices: list[jax.Device], donate: bool = False
    ):
        self.takes, self.gives = [_Parted(varies) for varies in takes], _Parted(gives)

        def run(_: jax.Array, *parts: tuple) -> tuple[tuple, tuple]:
            first, second = self.takes
            return self.gives.cut(f(first.join(*parts[:2]), second.join(*parts[2:])))

        local = data_mesh([devices[i] for i in of_this_process(devices)])
        self.here = {varies: NamedSharding(local, P(DATA) if varies else P()) for varies in (True, False)}
        self.everywhere = {varies: NamedSharding(data_mesh(devices), own.spec) for varies, own in self.here.items()}
        anchor = np.zeros(local.size, bool)  # pmap wants something that is mapped
        self.anchor = jax.device_put(anchor, self.here[True])
        self.compiled: Any = None

        # Over several processes pmap takes all devices in their own order, which must be ours.
        chosen = None if jax.process_count() > 1 else devices
        assert chosen is not None or devices == jax.devices(), (devices, jax.devices())
        self.mapped = jax.pmap(
            run,
            axis_name=DATA,
            in_axes=(0, 0, None, 0, None),
            out_axes=(0, None),
            donate_argnums=(1, 2) if donate else (),
            devices=chosen,
        )

    def __call__(self, *arguments: Any) -> Any:
        parts = self._cut(arguments)
        if jax.process_count() == 1:
            return self.gives.join(*self.mapped(self.anchor, *parts))
        if self.compiled is None:
            self.compiled = self._lower(parts).compile()
            self.anchor = over_all(self.anchor, self.everywhere[True])
        return self.gives.join(*self.compiled(self.anchor, *map(self._over_all, parts, VARIES)))

    def _over_all(self, part: tuple, varies: bool) -> tuple:
        """A part as global arrays; all of it are, or none is."""
        if not part or not part[0].is_fully_addressable:
            return part
        return tuple(over_all(x, self.everywhere[varies]) for x in part)

    def _lower(self, parts: Sequence[tuple]) -> Any:
        """`pmap` lowers for this process's arrays."""
        own = lambda x, varies: x if x.is_fully_addressable else over_all(x, self.here[varies])
        anchor = own(self.anchor, True)
        return self.mapped.lower(anchor, *(tuple(own(x, v) for x in part) for part, v in zip(parts, VARIES)))

    def by(self, call: Callable[..., tuple], result: Any) -> Callable[..., Any]:
        """This function, by another that takes and gives leaves in the same order. result: a tree like that given."""
        own = len(self.gives.cut(result)[0])

        def called(*arguments: Any) -> Any:
            leaves = call(self.anchor, *itertools.chain(*self._cut(arguments)))
            return self.gives.join(leaves[:own], leaves[own:])

        return called

    def lower(self, *arguments: Any) -> Any:
        parts = self._cut(arguments)
        return self._lower(parts) if jax.process_count() > 1 else self.mapped.lower(self.anchor, *parts)

    def result_shapes(self, lowered: Any) -> Any:
        return self.gives.join(*lowered.out_info)

    def _cut(self, arguments: Sequence[Any]) -> list[tuple]:
        return [part for parted, tree in zip(self.takes, arguments, strict=True) for part in parted.cut(tree)]


class _Parted:
    """Trees of one structure as two tuples of leaves: (those that vary, the others)."""

    def __init__(self, varies: Any):
        self.prefix = varies
        self.treedef: Any = None
        self.varies: list[bool] = []
        self.others: list[bool] = []

    def cut(self, tree: Any) -> tuple[tuple, tuple]:
        leaves, treedef = jax.tree.flatten(tree)
        if self.treedef is None or treedef != self.treedef:
            self.treedef, self.varies = treedef, jax.tree.leaves(jax.tree.broadcast(self.prefix, tree))
            self.others = [not v for v in self.varies]
        return tuple(itertools.compress(leaves, self.varies)), tuple(itertools.compress(leaves, self.others))

    def join(self, own: tuple, shared: tuple) -> Any:
        own_left, shared_left = iter(own), iter(shared)
        return jax.tree.unflatten(self.treedef, [next(own_left if v else shared_left) for v in self.varies])


def over_all(x: jax.Array, place: NamedSharding) -> jax.Array:
    """This process's array [local device, ...], or one that is whole on each, as the global array it is part of; or the
    reverse, by the place."""
    return _of_buffers((place.mesh.size, *x.shape[1:]) if place.spec else x.shape, place, x)


def _of_buffers(shape: tuple[int, ...], sharding: NamedSharding, x: jax.Array) -> jax.Array:
    """The same replicated buffers as an array of another sharding."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in x.addressable_shards])
