"""Compute the size of a config's checkpoint from shapes: `python -m jaxdp.cli.checkpoint_size CONFIG` prints bytes."""

import math
import os
import sys


def checkpoint_bytes(path: str) -> int:
    """Return the bytes of all arrays in a run's state. Reads the data set, for the shapes of its examples."""
    import jax

    from jaxdp.assemble.components import make_parts, set_jax, state_maker
    from jaxdp.cli import load

    config, _, _ = load(["--config", path])
    set_jax(config)
    shapes = jax.eval_shape(state_maker(config, make_parts(config)))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(checkpoint_bytes(sys.argv[1]))
