"""Traced programs as text: what differs between processes that trace the same program is no part of
it.
"""

import jax
import numpy as np

from jaxdp.run.programs import describe, lines


def test_shapes_are_described_without_addresses():
    first, second, other = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((3,), (3,), (4,)))
    assert describe(first) == describe(second) != describe(other)
    assert describe(np.ones(3)) == describe(np.ones(3)) != describe(np.zeros(3))
    program = jax.make_jaxpr(lambda x: jax.pure_callback(np.sort, first, x))(
        np.zeros(3, np.float32)
    )
    (text, *_), _ = lines(program)
    assert "float32[3]" in text
