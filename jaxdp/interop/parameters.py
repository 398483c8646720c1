"""Broadcast of one rank's parameters to all ranks, bit for bit, before training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.errors import UsageError
from jaxdp.interop.collectives import broadcast
from jaxdp.precision import is_key
from jaxdp.process import protocol
from jaxdp.process.context import joined
from jaxdp.process.signature import described, native
from jaxdp.split import path_string

Tree = Any
NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def broadcast_parameters(tree: Tree, root_rank: int = 0) -> Tree:
    """Broadcast the numbers in rank `root_rank`'s `tree` to every rank, bit for bit; return the
    tree.

    tree: parameters, optimizer state, a Flax NNX module or its state, any pytree of JAX and NumPy
    arrays of any dtype, PRNG keys and Python numbers; other leaves (such as an activation function)
    are not changed. Each leaf keeps its type and devices. A leaf that `pmap` replicated is sent
    with its leading dim for this process's devices, so all ranks must have the same number of
    devices.

    All ranks call it together. Raises UsageError with rank, path and both shapes if the trees
    differ, and if a leaf is split over processes. Replaces Horovod's `broadcast_parameters` and
    `broadcast_optimizer_state`."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    # In the order of paths, which does not depend on the ranks' containers.
    names = [path_string(path) for path, _ in paths]
    sent = sorted(
        (i for i, x in enumerate(leaves) if isinstance(x, NUMBERS)), key=names.__getitem__
    )
    kinds = {names[i]: _kind(leaves[i]) for i in sent}
    joined().check_same("broadcast_parameters", kinds, protocol.default_timeout())
    received = broadcast([_bits(names[i], leaves[i]) for i in sent], root_rank)
    for i, bits in zip(sent, received):
        leaves[i] = _from_bits(leaves[i], bits)
    return jax.tree.unflatten(structure, leaves)


def _kind(x: Any) -> str:
    """Return the type that must be equal on all ranks, such as float32[4,2], key<fry>[] or int."""
    return described(x) if hasattr(x, "dtype") else f"{type(x).__name__} ({np.asarray(x).dtype})"


def _bits(name: str, x: Any) -> Any:
    """Convert x for collectives: a key to its data, and what is no JAX array to its bytes, since
    JAX would truncate 64-bit numbers.
    """
    if is_key(x):
        return jax.random.key_data(x)
    if isinstance(x, jax.Array):
        return x
    array = native(x)
    is_number = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool
    # JAX has no long double.
    if isinstance(x, np.ma.MaskedArray) or array.dtype.char in "gG" or not is_number:
        kind = f"{type(x).__name__} of {array.dtype}"
        raise UsageError(
            f"broadcast_parameters: {name!r} is a {kind}; give arrays of the numbers that JAX has"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _from_bits(x: Any, bits: jax.Array) -> Any:
    """Convert received `bits` back to the type and devices of x."""
    if isinstance(x, jax.Array):
        value = np.asarray(bits)
        return placed(
            x,
            jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(x))
            if is_key(x)
            else value,
        )
    like = np.asarray(x)
    numbers = np.array(bits).view(like.dtype.newbyteorder("="))
    array = numbers.astype(like.dtype).reshape(like.shape)
    if isinstance(x, np.ndarray):
        return array
    return array[()] if isinstance(x, np.generic) else array.item()


def placed(x: jax.Array, value: Any) -> jax.Array:
    """Put `value` on the devices of x, committed only if x is."""
    if not x.is_fully_addressable:
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])
    return jax.device_put(value, x.sharding) if x.committed else jax.device_put(value)
