"""Muon: updates the kernels of products and convolutions as matrices, those of stacked blocks one
by one; tables and vectors use its built-in Adam.

Jordan et al. 2024, github.com/KellerJordan/Muon; weight decay as in Liu et al., arXiv 2502.16982.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxdp.optim.roles import Role, role_of


def matrices(blocks: Sequence[str] = (), roles: Mapping[str, Role] = {}) -> Callable[[Any], Any]:
    """Return a function from params to a tree of MuonDimensionNumbers for kernels, and None for
    other leaves.

    Optax treats the dims that they do not name, such as that of stacked blocks, as a batch of
    matrices. blocks, roles: see `role_of`.
    """

    def dims(path: Any, x: Any) -> MuonDimensionNumbers | None:
        return role_of(path, x, blocks, roles).matrix

    return lambda params: jax.tree_util.tree_map_with_path(dims, params)


@functools.wraps(optax.contrib.muon)
def muon(
    learning_rate: Any,
    weight_decay: float = 0.0,
    mask: Any = None,
    blocks: Sequence[str] = (),
    roles: Mapping[str, Role] = {},
    **args: Any,
) -> optax.GradientTransformation:
    """Return Optax's Muon with one masked weight decay for both parts: Optax's decay for the Adam
    part has no mask.

    With consistent_rms=0.2 both parts share a learning rate that suits AdamW; without it, Muon's is
    some 30 times larger: a config's adam_learning_rate is the peak of the other part's schedule.
    Each part decays by its own rate."""
    tx = optax.contrib.muon(
        learning_rate, **{"muon_weight_dimension_numbers": matrices(blocks, roles), **args}
    )
    if (adam := args.get("adam_learning_rate")) is None:
        return with_decay(tx, learning_rate, weight_decay, mask)

    def decays(params: Any, matrix: bool) -> Any:
        """Return a tree of booleans: whether a leaf decays, and is a matrix or not."""
        dims = matrices(blocks, roles)(params)
        fits = jax.tree.map(lambda x, dim: (dim is not None) == matrix, params, dims)
        return jax.tree.map(operator.and_, fits, mask(params)) if mask else fits

    tx = with_decay(tx, learning_rate, weight_decay, functools.partial(decays, matrix=True))
    return with_decay(tx, adam, weight_decay, functools.partial(decays, matrix=False))


def with_decay(
    tx: Any, learning_rate: Any, weight_decay: float, mask: Any
) -> optax.GradientTransformation:
    """Chain `tx` with decoupled weight decay, scaled by the learning rate: Optax's Adafactor would
    not scale it.
    """
    # without its name: the rate to report is that of the gradients
    rate = inspect.unwrap(learning_rate) if callable(learning_rate) else lambda step: learning_rate
    decay = optax.add_decayed_weights(lambda step: -weight_decay * rate(step), mask)
    return optax.chain(tx, decay) if weight_decay else tx
