"""Snapshots in memory hold no padding."""

import jax
import numpy as np
import pytest

from jaxdp import split
from jaxdp.elastic.copies import Copies, assemble
from padded import drawn, put


@pytest.fixture(autouse=True)
def no_leaf_is_small(monkeypatch):
    monkeypatch.setattr(split, "SMALL", 1)


@pytest.mark.slow
def test_snapshots_hold_no_padding():
    """Made in one layout, with padding or without, put together in all others."""
    strategies, want = drawn()
    for strategy in strategies:
        stored, copies = put(strategy, want), Copies(strategy, [""])
        parts = copies.read(copies.start(strategy.export(stored, padded=True)))
        assert len(parts) == 1 + copies.count
        for other in strategies:
            shapes, structure = jax.tree.flatten(other.abstract())
            joined = other.adopt(
                jax.tree.unflatten(structure, assemble(shapes, copies.dims, parts.items()))
            )
            jax.tree.map(np.testing.assert_array_equal, other.export(joined), want)
