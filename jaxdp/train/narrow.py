"""Whether a function computes with floats of less than 32 bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.optim.interpreter import inside


def has_narrow_floats(f: Callable, *args: Any) -> bool:
    """Return whether f(*args) has a float of less than 32 bits anywhere, from its arguments or of
    its own accord."""

    def is_narrow(value: Any) -> bool:
        dtype = getattr(value.aval, "dtype", None)
        return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4

    def anywhere(jaxpr: Any) -> bool:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # an open one is its own
        return any(map(is_narrow, jaxpr.invars)) or any(
            any(map(is_narrow, eqn.outvars)) or any(map(anywhere, inside(eqn)))
            for eqn in jaxpr.eqns
        )

    return anywhere(jax.make_jaxpr(f)(*args))
