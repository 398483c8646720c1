"""Training begins from one rank's numbers, bit for bit, on all of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.distributed.collectives import broadcast
from jaxdp.distributed.context import joined
from jaxdp.distributed.signature import as_array, described
from jaxdp.split import path_string

Tree = Any
NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def broadcast_parameters(tree: Tree, root_rank: int = 0) -> Tree:
    """`tree` with the numbers that rank `root_rank` has in it, bit for bit, on every rank.

    tree: parameters, the state of an optimizer, a Flax NNX module or its state, any pytree of JAX and NumPy arrays of
    any type, PRNG keys and Python numbers; other leaves (an activation function) stay each rank's own. Each leaf comes
    back as it was brought: of its type, on its devices. A leaf is what it is: one that `pmap` replicated, with a
    leading dim for this process's devices, is sent with it, so all ranks must have equally many.

    All ranks call it together. Raises UsageError, naming rank, path and both shapes, where the trees differ, and where
    a leaf is split over processes. Horovod's `broadcast_parameters` and `broadcast_optimizer_state` in one.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    # In the order of their paths, which is the same whatever containers the ranks keep them in.
    names = [path_string(path) for path, _ in paths]
    sent = sorted((i for i, x in enumerate(leaves) if isinstance(x, NUMBERS)), key=names.__getitem__)
    joined().check_same("broadcast_parameters", {names[i]: _kind(leaves[i]) for i in sent})
    received = broadcast([_bits(leaves[i]) for i in sent], root_rank)
    for i, bits in zip(sent, received):
        leaves[i] = _as_brought(leaves[i], bits)
    return jax.tree.unflatten(structure, leaves)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _kind(x: Any) -> str:
    """What must be alike on all ranks, as in float32[4,2], key<fry>[] or int."""
    return described(x) if hasattr(x, "dtype") else type(x).__name__


def _bits(x: Any) -> Any:
    """x as collectives take it: key data for a key, and words of 32 bits where JAX would cut 64 to 32."""
    if _is_key(x):
        return jax.random.key_data(x)
    if isinstance(x, jax.Array):
        return x
    array = np.asarray(x)
    if array.dtype != object and array.dtype != jax.dtypes.canonicalize_dtype(array.dtype):
        return array.reshape(-1).view(np.uint32)
    return as_array(array)


def _as_brought(x: Any, bits: jax.Array) -> Any:
    """The numbers that were sent as `bits`, in the type and the place of x."""
    if _is_key(x):
        return _placed(x, jax.random.wrap_key_data(jnp.asarray(np.asarray(bits)), impl=jax.random.key_impl(x)))
    if isinstance(x, jax.Array):
        return _placed(x, np.asarray(bits))
    like = np.asarray(x)
    array = np.array(bits).reshape(-1).view(like.dtype).reshape(like.shape)
    if isinstance(x, np.ndarray):
        return array
    return array[()] if isinstance(x, np.generic) else array.item()


def _placed(x: jax.Array, value: Any) -> jax.Array:
    """`value` on the devices of x; not bound to them where x is not."""
    if not x.is_fully_addressable:
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: value[index])
    return jax.device_put(value, x.sharding) if x.committed else jax.device_put(value)
