"""Muon takes the matrices, each alone, also those of stacked blocks; its Adam takes what is no matrix.

Jordan et al. 2024, github.com/KellerJordan/Muon; weight decay as in Liu et al., arXiv 2502.16982.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from jaxdp.split import path_string

EMBEDDING = re.compile("embed", re.IGNORECASE)  # a table of rows, though it has two dims


def matrices(blocks: Sequence[str] = ()) -> Callable[[Any], Any]:
    """params -> the same tree of MuonDimensionNumbers: kernels [in, out] and stacked ones [block, in, out]; else None.

    blocks: paths (a/b) below which leaves are stacked. What Optax is not told of a leaf's dims is a batch: the blocks
    of a stack are orthogonalized one by one.
    """
    stacks = [f"/{path}/" for path in blocks]

    def dims(path: Any, x: Any) -> MuonDimensionNumbers | None:
        own = path_string(path)
        stacked = any(stack in f"/{own}/" for stack in stacks)
        if x.ndim != 2 + stacked or EMBEDDING.search(own):
            return None
        return MuonDimensionNumbers(reduction_axis=0 + stacked, output_axis=1 + stacked)

    return lambda params: jax.tree_util.tree_map_with_path(dims, params)


@functools.wraps(optax.contrib.muon)
def muon(
    learning_rate: Any, weight_decay: float = 0.0, mask: Any = None, blocks: Sequence[str] = (), **args: Any
) -> optax.GradientTransformation:
    """Optax's, with one decay for both of its parts: Optax's own for Adam's part knows no mask.

    With consistent_rms=0.2 both parts share a learning rate that suits AdamW; without, Muon's is some 30 times larger
    (see adam_learning_rate).
    """
    rate = learning_rate if callable(learning_rate) else lambda step: learning_rate
    tx = optax.contrib.muon(learning_rate, **{"muon_weight_dimension_numbers": matrices(blocks), **args})
    decay = optax.add_decayed_weights(lambda step: -weight_decay * rate(step), mask)
    return optax.chain(tx, decay) if weight_decay else tx
