"""The layouts that a state has, and whether two states are the same."""

import jax
import numpy as np

LAYOUTS = {
    "pmap-0": {"backend": "pmap"},
    "pmap-1": {"backend": "pmap", "layout": {"zero": 1}},
    "pjit-0": {"backend": "pjit"},
    "pjit-2": {"backend": "pjit", "layout": {"zero": 2}},
    "pjit-3": {"backend": "pjit", "layout": {"zero": 3}},
    "hybrid-3": {"backend": "pjit", "layout": {"zero": 3, "shard_size": 4}},
}


def assert_same_bits(a, b):
    assert jax.tree.leaves(a)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def contents(state):
    averages = {name: x for name, x in state.extra.items() if name != "exponents"}
    return state.params, state.opt_state, state.model_state, averages, state.kept
