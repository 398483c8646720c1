"""An optimizer wrapper that averages gradients over the ranks, weighted by their numbers of
examples.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxdp.errors import UsageError, one_line
from jaxdp.interop import kernels
from jaxdp.interop.parameters import placed
from jaxdp.process.context import joined
from jaxdp.process.enter import cached
from jaxdp.process.signature import Signature, as_array, compare, described
from jaxdp.run.components import make_reduction
from jaxdp.split import leaves_by_path

Tree = Any


def distributed_optimizer(
    tx: optax.GradientTransformation, axis_name: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Wrap `tx` to update with the gradients' mean over all ranks: the same optimizer step as in a
    single process.

        updates, state = tx.update(grads, state, params, weight=len(labels))

    weight: the weight of this rank's gradients, the number of examples in their mean; by default
    all ranks have equal weight. A rank of weight 0 is ignored, even if its gradients are NaN; if
    all weights are 0, the gradients are zeros. 16-bit floats are summed in float32. Leaves that are
    not floats are not changed. Other arguments are passed to `tx` and must be equal on all ranks: a
    loss (`value`) as `allreduce_metrics` returns it, no function to evaluate.

    axis_name None: call update outside jit, on all ranks together; one program packs and averages
    the gradients between the processes, and `tx` is compiled. One or several axes: call update
    inside a function that `pmap`, or `shard_map` with check_vma=False, maps over all devices of all
    processes; weight is then that of the device. In both cases wrap the complete `tx`, including a
    chain or MultiSteps.

    Raises UsageError if update is called in the wrong context, or a weight is not 0 or more (a
    traced one makes the update NaN); DistributedError if the ranks' gradients differ in shape, or a
    rank does not call it. Like Horovod's DistributedOptimizer; buckets as in PyTorch's
    DistributedDataParallel (Li et al. 2020, arXiv 2006.15704)."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", type(tx).__name__)
        raise UsageError(
            f"distributed_optimizer: {name} is not an Optax transformation; give one, such as optax.adam(1e-3)"
        )
    # Takes them, but does not say so.
    of_steps = isinstance(getattr(tx.update, "__self__", None), optax.MultiSteps)
    inner = tx if of_steps else optax.with_extra_args_support(tx)
    compiled = jax.jit(inner.update)

    def update(
        grads: Tree, state: Tree, params: Tree = None, *, weight: Any = None, **extra: Any
    ) -> tuple[Tree, Tree]:
        own, step = kernels.own_collectives(), inner.update
        if axis_name is not None:
            if own is not None:
                raise UsageError(
                    f"axis_name: over MPI, {axis_name!r} has the devices of this process alone; leave axis_name out"
                )
            mean = mean_over_axis(grads, weight, axis_name)
        elif any(
            isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((grads, state, params, weight))
        ):
            if own is None:
                raise UsageError(
                    "distributed_optimizer: update is called inside jit, where processes cannot meet; call it "
                    "outside, around the whole optimizer, or give axis_name and call it inside pmap or shard_map"
                )
            mean = _mean(grads, weight, own.sums_in_jit)
        else:
            line_search = any(map(callable, jax.tree.leaves(extra)))
            if line_search and joined().size > 1:
                raise UsageError(
                    "distributed_optimizer: a loss function, as of a line search, sees the data of its own rank alone, "
                    "so that the ranks' parameters would differ; use an optimizer without one"
                )
            # A module's activation is a function, too.
            if not (line_search or any(map(callable, jax.tree.leaves(params)))):
                step = compiled
            mean = mean_over_ranks(grads, weight)
        return step(mean, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def mean_over_axis(grads: Tree, weight: Any, axis_name: Any) -> Tree:
    """Return the weighted mean of each float leaf over a mapped axis, with one operand per bucket
    of 25 MB.
    """
    try:
        index = lax.axis_index(axis_name)
    except NameError:
        raise UsageError(
            f"no axis {axis_name!r} is mapped here; call this inside the function that pmap or shard_map maps over it"
        ) from None
    if any(_varies(index) and _is_float(x) and not _varies(x) for x in jax.tree.leaves(grads)):
        raise UsageError(
            f"distributed_optimizer: shard_map has summed the gradients over {axis_name!r} already; give it "
            "check_vma=False"
        )
    return _mean(grads, weight, lambda x: make_reduction("bucket").reduce(x, axis_name))


def _mean(
    grads: Tree, weight: Any, reduce: Callable[[list[jax.Array]], Sequence[jax.Array]]
) -> Tree:
    """Return the weighted mean of each float leaf. reduce: returns the sums of arrays over the
    ranks or devices.
    """
    _check_weight(weight)
    leaves, structure, floats = _flatten(grads)
    local = [leaves[i] for i in floats]
    weighted = _weighted(local, jnp.asarray(1.0 if weight is None else weight, float))
    for i, mean in zip(floats, _means(reduce(weighted), local)):
        leaves[i] = mean
    return jax.tree.unflatten(structure, leaves)


def _weighted(grads: Sequence[jax.Array], weight: jax.Array) -> list[jax.Array]:
    """Return what adds up: the weight, then each gradient times the weight."""
    # A traced weight cannot be checked: let the update be NaN.
    weight = jnp.where(weight >= 0, weight, jnp.nan)
    arrays = [weight]
    for g in grads:
        wide = jnp.asarray(g, kernels.accumulator(g.dtype))
        arrays.append(jnp.where(weight > 0, wide, 0) * weight.astype(wide.dtype))
    return arrays


def _means(sums: Sequence[jax.Array], grads: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the mean of each gradient from the sums of what `_weighted` returned on each rank."""
    total, *scaled = sums
    return [
        jnp.where(total == 0, 0, x / total.astype(x.dtype)).astype(g.dtype)
        for x, g in zip(scaled, grads)
    ]


def mean_over_ranks(grads: Tree, weight: Any) -> Tree:
    """Return the weighted mean of each float leaf over the processes, on the devices of this
    process's leaves.
    """
    context, arrays, number, error = joined(), [], 1.0, None
    leaves, structure, floats = _flatten(grads)
    try:
        _check_weight(weight)
        number = 1.0 if weight is None else float(weight)
        arrays = [as_array(leaves[i]) for i in floats]
    except Exception as problem:  # tell the other ranks about any error, or they would wait
        error = one_line(problem)
    if context.size == 1:
        if error:
            raise UsageError(error)
        return jax.tree.unflatten(
            structure, [jnp.zeros_like(x) if number == 0 and _is_float(x) else x for x in leaves]
        )
    members = tuple(range(context.size))
    call = f"distributed_optimizer{' with weights' * (weight is not None)} on {_names(structure)}"
    compare(context.rank, members, Signature(call, [*map(described, arrays)], True, error))
    device = jax.local_devices()[0]
    *local, scale = jax.device_put([*arrays, jnp.asarray(number, float)], device)
    if kernels.own_collectives() is None:
        means = _program(members)(_as_rows([*local, scale]))
    else:
        weighted = jax.jit(_weighted)(local, scale)
        sums = kernels.run("allreduce", "sum", weighted, context.rank, members)
        means = jax.jit(_means)(sums, local)
    for i, mean in zip(floats, means):
        x = leaves[i]
        elsewhere = isinstance(x, jax.Array) and x.sharding != mean.sharding
        leaves[i] = placed(x, mean) if elsewhere else mean
    return jax.tree.unflatten(structure, leaves)


def _check_weight(weight: Any) -> None:
    if weight is None:
        return
    if jnp.shape(weight) != ():
        raise UsageError(
            f"weight: of shape {jnp.shape(weight)}; give one number, for this rank or device"
        )
    if not isinstance(weight, jax.core.Tracer):
        number, range_ = float(weight), np.finfo(np.float32)
        if not (number == 0 or float(range_.tiny) <= number <= float(range_.max)):
            raise UsageError(f"weight: {number} is not a number of examples; give 0 or more")


@functools.cache
def _names(structure: Any) -> str:
    """Return the first names in a tree, and a digest of all: trees of equal shapes may have
    different parameters.
    """
    text = ", ".join(leaves_by_path(structure.unflatten(range(structure.num_leaves))))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[:60] + '...' if len(text) > 60 else text} (names {digest})"


@jax.jit
def _as_rows(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Add a leading dim for the rank to each array."""
    return [x[None] for x in arrays]


@cached
def _program(members: tuple[int, ...]) -> kernels.Replica:
    """Return the program that maps this rank's grads[1, ...], followed by weight[1], to the means."""

    def replica(rows: Sequence[jax.Array]) -> list[jax.Array]:
        *grads, weight = [x[0] for x in rows]
        return mean_over_axis(grads, weight, kernels.AXIS)

    return kernels.compiled(replica, members)


def _flatten(grads: Tree) -> tuple[list[Any], Any, list[int]]:
    """Return the leaves, Python floats as arrays, the structure, and the numbers of the leaves that
    are floats.
    """
    leaves, structure = jax.tree.flatten(grads)
    leaves = [jnp.asarray(x) if type(x) in (float, complex) else x for x in leaves]
    return leaves, structure, [i for i, x in enumerate(leaves) if _is_float(x)]


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _varies(x: Any) -> bool:
    """Return True if shard_map tracks which values vary between devices, and x varies."""
    kind = jax.typeof(x)
    # JAX has moved this attribute more than once; without it, only the error is lost.
    mat = getattr(kind, "mat", None)
    return bool(getattr(kind, "vma", None) or getattr(mat, "varying", None))
