"""A loop whose length is known at run time only names its length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdp.exact.rounding import scan_unfused
from jaxdp.plan.hlo import collectives

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("r", "d"), axis_types=(AxisType.Auto,) * 2)
X = jnp.ones((8, 3))


def mapped(f):
    """f(x) per device, over a mesh of eight; what it returns is taken from the first."""
    return jax.jit(jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False))


@pytest.mark.parametrize(
    "over", [mapped, lambda f: jax.pmap(f, axis_name="d")], ids=["shard_map", "pmap"]
)
def test_a_loop_that_names_its_length_is_counted(over):
    """Also around another, and inside a loop of unknown length."""

    def f(x):
        step = x[0, 0].astype(jnp.int32)

        def add(y):
            return jax.lax.psum(y, "d"), y

        def outer(y):
            total, _ = scan_unfused(add, y + x[:3], step)
            return total + jax.lax.pmin(total, "d"), y

        def scan(c):
            return c + scan_unfused(outer, c + x[:5], step)[0]

        return jax.lax.while_loop(lambda c: c.sum() < 9, scan, x[0])

    lowered = over(f).lower(X if over is mapped else jnp.ones((8, *X.shape)))
    counts = [(c.count, c.exact) for c in collectives(lowered.compile().as_text())]
    assert counts == [(15, False), (5, False)]
