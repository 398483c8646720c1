"""Memory of a run on a device and traffic between devices: from shapes, and from the compiled
program.
"""

import contextlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdp.parallel.strategy import Program, Strategy
from jaxdp.plan.hlo import Collective, collectives, summarize
from jaxdp.run import rundir
from jaxdp.split import WHOLE, padded_shape
from jaxdp.train.average import EMA, EMA_STATE
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import Step


def bytes_by_tree(
    strategy: Strategy, step: Step, batch: Mapping[str, Any], split_grads: bool
) -> dict[str, float]:
    """Return the bytes of each tree on one device; batch: shapes of a full batch {name:
    [microbatch, example, ...]}.

    split_grads: gradients are sharded while they accumulate.
    """
    dims, shapes, n = strategy.dims, strategy.shapes, strategy.parts
    devices = strategy.assignment.shape[0]

    def wide(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    grads = jax.tree.map(wide, step.trainable(shapes.params))  # as they are summed
    return {
        "params": local_bytes(shapes.params, dims.params, n),
        "grads": local_bytes(grads, step.trainable(strategy.slices) if split_grads else None, n),
        "opt_state": local_bytes(
            (shapes.opt_state, shapes.extra.get(EMA)), (dims.opt_state, dims.extra.get(EMA)), n
        ),
        "model_state": local_bytes((shapes.model_state, shapes.extra.get(EMA_STATE)), None, n)
        + local_bytes(shapes.kept, None, n) / devices,
        "batch": sum(math.prod(x.shape) * x.dtype.itemsize for x in batch.values()) / devices,
    }


def local_bytes(tree: Any, dims: Any, parts: int) -> int:
    """Return the bytes of one device's part of a tree of shapes, split along `dims` into `parts`;
    None: replicated.
    """
    dims = jax.tree.map(lambda _: WHOLE, tree) if dims is None else dims

    def size(x, d):
        return (
            math.prod(padded_shape(x.shape, d, parts))
            * x.dtype.itemsize
            // (1 if d == WHOLE else parts)
        )

    return sum(jax.tree.leaves(jax.tree.map(size, tree, dims)))


def of_compiled(
    lowered: Mapping[str, Any], devices: int, updates: int = 1
) -> dict[str, Any] | None:
    """Return the compiler's report on an update that has run: bytes per device beside the trees,
    collectives by kind.

    lowered: the update's parts, lowered again in a millisecond, since JAX caches them and their
    executables. Returns None if an executable is not in the cache: this never compiles. updates:
    the number of updates in one call. A single device sends nothing, even if its program has
    collectives."""
    if not all(is_compiled(part) for part in lowered.values()):
        return None
    used, sent = analyzed(lowered, devices > 1)
    totals = summarize(sent)

    def per_update(n):
        return n / updates if n % updates else n // updates

    return {
        "temporaries": max(u.temp_size_in_bytes for u in used),
        "peak": max(map(peak, used)),
        "collectives": {
            kind: {name: per_update(value) for name, value in total._asdict().items()}
            for kind, total in totals.items()
        },
    }


def record(
    directory: pathlib.Path,
    layout: Mapping[str, Any],
    strategy: Strategy,
    program: Program,
    state: TrainState,
    batch: Batch,
    updates: int,
) -> None:
    """Write layout.json again, with the compiler's report on the program, after the program's first
    call.

    updates: the number of updates in that call.
    """
    with contextlib.suppress(Exception):  # without the compiler's report, keep the old file
        lowered = program.lowered(state, batch, updates > 1)
        rundir.write_layout(
            directory,
            {**layout, "program": of_compiled(lowered, len(strategy.assignment), updates)},
        )


def analyzed(lowered: Mapping[str, Any], sends: bool) -> tuple[list[Any], list[Collective]]:
    """Compile the parts of an update; return XLA's memory analysis of each, and all collectives if
    it sends anything.
    """
    compiled = [(part.compile(), part) for part in lowered.values()]
    texts = [(c.as_text(), part.as_text()) for c, part in compiled if sends]
    return [c.memory_analysis() for c, _ in compiled], [
        c for text in texts for c in collectives(*text)
    ]


def peak(used: Any) -> int:
    """Return the peak bytes on a device while a program runs, from XLA's memory analysis."""
    added = max(0, used.output_size_in_bytes - used.alias_size_in_bytes)
    return used.argument_size_in_bytes + used.temp_size_in_bytes + added


def is_compiled(lowered: Any) -> bool:
    """Return True if `lowered.compile()` only looks up an executable; False if this version of JAX
    does not tell.
    """
    return getattr(getattr(lowered, "_lowering", None), "_executable", None) is not None
