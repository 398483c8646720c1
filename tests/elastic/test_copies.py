"""Copies of sharded state: assembled from their parts on any number of devices; neighbours are on
other hosts.
"""

import jax
import numpy as np
import pytest

import toys
from jaxdp.elastic.copies import Copies, assemble, shift

LAYOUTS = [
    ("pmap", 4, {"zero": 1}),
    ("pjit", 4, {"zero": 3}),
    ("pjit", 8, {"zero": 3, "shard_size": 2}),
    ("pjit", 3, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "devices", "layout"), LAYOUTS)
def test_parts_assemble_on_another_number_of_devices(backend, devices, layout):
    strategy, _, _ = toys.build(
        toys.dropout_model(), toys.data(), backend=backend, devices=devices, layout=layout
    )
    state = strategy.export(strategy.init())
    copies = Copies(strategy, [""])
    parts = copies.read(copies.start(state))
    assert len(parts) == 1 + (layout.get("shard_size", devices) if layout else 0)
    for number in (1, 2, 6):
        other, _, _ = toys.build(
            toys.dropout_model(), toys.data(), backend="pjit", devices=number, layout={"zero": 3}
        )
        shapes, structure = jax.tree.flatten(other.abstract())
        new = jax.tree.unflatten(structure, assemble(shapes, copies.dims, parts.items()))
        jax.tree.map(np.testing.assert_array_equal, new, state)
        assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(new), shapes))


@pytest.mark.parametrize(
    ("processes", "hosts", "expected"),
    [
        ([0], "a", 0),
        ([0, 0], "a", 0),
        ([0, 1, 2], "aaa", 1),
        ([0, 0, 1, 1], "aa", 2),
        ([0, 1, 2, 3], "aabb", 2),
        ([0, 1, 2, 3, 4], "aabbc", 2),
        ([0, 0, 1, 1, 2, 2], "aab", 2),
    ],
)
def test_the_neighbour_is_on_another_host_if_any(processes, hosts, expected):
    assert shift(processes, hosts) == expected
