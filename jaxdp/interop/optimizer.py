"""Gradients are averaged over the ranks before the optimizer sees them, each rank counted by its examples."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.distributed import kernels
from jaxdp.distributed.context import joined
from jaxdp.distributed.signature import Signature, as_array, compare, described
from jaxdp.errors import UsageError, one_line
from jaxdp.parallel import make_reduction
from jaxdp.split import path_string

Tree = Any


def distributed_optimizer(
    tx: optax.GradientTransformation, axis_name: Any = None
) -> optax.GradientTransformationExtraArgs:
    """`tx` on the gradients' mean over all ranks: the one optimizer step that a single process would have made.

        updates, state = tx.update(grads, state, params, weight=len(labels))

    weight: how much this rank's gradients count, the number of examples that their mean is over; left out, all ranks
    count alike. A rank of weight 0 counts nothing, even where its gradients are NaN; where all are of weight 0, the
    gradients are zeros. Halves are added up in float32. Leaves that are not floats are left as they are. Other
    arguments reach `tx`.

    axis_name None: update is called outside jit, by all ranks together; gradients are packed and averaged by one
    program between the processes, and `tx` is compiled. An axis, or several: update is called where it is mapped, by
    `pmap`, or by `shard_map` with check_vma=False, over all devices of all processes; weight is each device's own.
    Either way this belongs around the whole of `tx`, a chain or a MultiSteps included.

    Raises UsageError where update is called in the wrong place, or a weight is not 0 or more; DistributedError where
    the ranks bring different gradients, or one does not come. Horovod's DistributedOptimizer; buckets as in PyTorch's
    DistributedDataParallel (Li et al. 2020, arXiv 2006.15704).
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        named = getattr(tx, "__name__", type(tx).__name__)
        raise UsageError(
            f"distributed_optimizer: {named} is not an Optax transformation; give one, such as optax.adam(1e-3)"
        )
    inner = optax.with_extra_args_support(tx)
    compiled = jax.jit(inner.update)

    def update(grads: Tree, state: Tree, params: Tree = None, *, weight: Any = None, **extra: Any) -> tuple[Tree, Tree]:
        if axis_name is not None:
            _check_one_number(weight)
            return inner.update(mean_over_axis(grads, weight, axis_name), state, params, **extra)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((grads, state, params, weight))):
            raise UsageError(
                "distributed_optimizer: update is called inside jit, where processes cannot meet; call it outside, "
                "around the whole optimizer, or give axis_name and call it inside pmap or shard_map"
            )
        mean = mean_over_ranks(grads, weight)
        plain = any(callable(x) for x in jax.tree.leaves(extra))  # a line search takes the loss function
        return (inner.update if plain else compiled)(mean, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def mean_over_axis(grads: Tree, weight: Any, axis_name: Any) -> Tree:
    """The weighted mean of each float leaf over a mapped axis, by one operand per bucket of 25 MB."""
    try:
        index = lax.axis_index(axis_name)
    except NameError:
        raise UsageError(
            f"distributed_optimizer: no axis {axis_name!r} is mapped here; call update inside the function that pmap "
            "or shard_map maps over it"
        ) from None
    leaves, structure = jax.tree.flatten(grads)
    floats = [i for i, x in enumerate(leaves) if _is_float(x)]
    if any(_varies(index) and not _varies(leaves[i]) for i in floats):
        raise UsageError(
            f"distributed_optimizer: shard_map has summed the gradients over {axis_name!r} already; give it "
            "check_vma=False"
        )
    own = jnp.asarray(1.0 if weight is None else weight, jnp.float32)
    scaled = [_scaled(leaves[i], own) for i in floats]
    total, *sums = make_reduction("bucket").reduce([own, *scaled], axis_name)
    for i, x in zip(floats, sums):
        mean = jnp.where(total > 0, x / total.astype(x.dtype), jnp.zeros_like(x))
        leaves[i] = mean.astype(leaves[i].dtype)
    return jax.tree.unflatten(structure, leaves)


def mean_over_ranks(grads: Tree, weight: Any) -> Tree:
    """The weighted mean of each float leaf over the processes, on the devices where this one's are."""
    context, arrays, number, error = joined(), [], None, None
    leaves, structure = jax.tree.flatten(grads)
    floats = [i for i, x in enumerate(leaves) if _is_float(x)]
    try:
        _check_one_number(weight)
        number = None if weight is None else float(weight)
        if number is not None and not 0 <= number < math.inf:
            raise UsageError(f"weight: {number} is not a number of examples; give 0 or more")
        arrays = [as_array(leaves[i]) for i in floats] if context.size > 1 else []
    except Exception as problem:  # of any kind: the others must hear of it, or they would wait
        error = one_line(problem)
    if context.size == 1:
        if error:
            raise UsageError(error)
        return jax.tree.map(lambda g: jnp.zeros_like(g) if _is_float(g) else g, grads) if number == 0 else grads
    label = "distributed_optimizer" if weight is None else "distributed_optimizer with weights"
    members = tuple(range(context.size))
    brought = Signature(f"{label} on {_names(grads, structure)}", [described(x) for x in arrays], True, error)
    compare("collective", context.rank, members, brought)
    for i, mean in zip(floats, _meet(arrays, 1.0 if number is None else number, context.rank, members)):
        x = leaves[i]
        elsewhere = isinstance(x, jax.Array) and x.sharding != mean.sharding
        leaves[i] = jax.device_put(mean, x.sharding) if elsewhere else mean
    return jax.tree.unflatten(structure, leaves)


def _check_one_number(weight: Any) -> None:
    if weight is not None and jnp.shape(weight) != ():
        raise UsageError(f"weight: of shape {jnp.shape(weight)}; give one number, this rank's or device's own")


_known_names: dict[Any, str] = {}


def _names(tree: Tree, structure: Any) -> str:
    """The first names in a tree, and a digest of all: two trees of equal shapes may be of other parameters."""
    if structure not in _known_names:
        text = ", ".join(path_string(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        _known_names[structure] = f"{text[:60] + '...' if len(text) > 60 else text} (names {digest})"
    return _known_names[structure]


def _meet(arrays: list[Any], weight: float, rank: int, members: tuple[int, ...]) -> list[jax.Array]:
    mesh = kernels.ranks_mesh(members)
    sharding, device = NamedSharding(mesh, P(kernels.AXIS)), mesh.devices.flat[rank]
    rows: list[jax.Array] = _as_rows(jax.device_put([*arrays, np.float32(weight)], device))
    whole = [jax.make_array_from_single_device_arrays((len(members), *x.shape[1:]), sharding, [x]) for x in rows]
    return [x.addressable_data(0) for x in _program(members)(whole)]


@jax.jit
def _as_rows(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Each with a dim for the rank in front."""
    return [x[None] for x in arrays]


@functools.cache
def _program(members: tuple[int, ...]) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """(grads[rank, ...], the last of them the weights[rank]) -> their means."""

    def replica(rows: list[jax.Array]) -> list[jax.Array]:
        *own, weight = [x[0] for x in rows]
        return mean_over_axis(own, weight, kernels.AXIS)

    mapped = jax.shard_map(
        replica, mesh=kernels.ranks_mesh(members), in_specs=P(kernels.AXIS), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped)


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _scaled(g: jax.Array, weight: jax.Array) -> jax.Array:
    wide = jnp.asarray(g, kernels.accumulator(g.dtype))
    return jnp.where(weight > 0, wide, jnp.zeros_like(wide)) * weight.astype(wide.dtype)


def _varies(x: Any) -> bool:
    """Whether shard_map keeps account of what differs between devices, and this does."""
    kind = jax.typeof(x)
    kept = getattr(kind, "mat", None)  # JAX has moved this more than once; without it, only the error is lost
    return bool(getattr(kind, "vma", None) or getattr(kept, "varying", None))
