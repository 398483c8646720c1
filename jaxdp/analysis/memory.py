"""What a run holds on a device and moves between devices: from shapes, and from a program that is compiled anyway."""

import contextlib
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jaxdp import rundir
from jaxdp.analysis.hlo import Collective, collectives, summarize
from jaxdp.core.state import Batch, TrainState
from jaxdp.core.step import Step
from jaxdp.parallel.strategy import Program, Strategy
from jaxdp.split import WHOLE


def bytes_by_tree(strategy: Strategy, step: Step, batch: Mapping[str, Any], split_grads: bool) -> dict[str, float]:
    """Bytes on one device of each tree; batch: the shapes of a whole one, {name: [microbatch, example, ...]}.

    split_grads: gradients are split while they are accumulated.
    """
    dims, shapes, n = strategy.dims, strategy.shapes, strategy.parts
    devices = strategy.table.shape[0]
    grads = step.trainable(shapes.params)
    return {
        "params": held(shapes.params, dims.params, n),
        "grads": held(grads, step.trainable(strategy.slices) if split_grads else None, n),
        "opt_state": held((shapes.opt_state, shapes.ema), (dims.opt_state, dims.ema), n),
        "model_state": held(shapes.model_state, None, n) + held(shapes.carry, None, n) / devices,
        "batch": sum(math.prod(x.shape) * x.dtype.itemsize for x in batch.values()) / devices,
    }


def held(tree: Any, dims: Any, parts: int) -> int:
    """Bytes of one device's part of a tree of shapes that is split along `dims` into `parts`; None: whole."""
    along = jax.tree.map(lambda _: WHOLE, tree) if dims is None else dims
    size = lambda x, d: math.prod(x.shape) * x.dtype.itemsize // (1 if d == WHOLE else parts)
    return sum(jax.tree.leaves(jax.tree.map(size, tree, along)))


def moved(texts: Mapping[str, tuple[str, str]], slots: int) -> list[Collective]:
    """The collectives of an update whose parts are {name: (compiled text, lowered text)}.

    slots: microbatches of a device: the length of a loop that only the run knows is that over them.
    """
    found = [c for compiled, lowered in texts.values() for c in collectives(compiled, lowered)]
    return [c if c.exact else c._replace(count=c.count * slots, exact=True) for c in found]


def of_compiled(lowered: Mapping[str, Any], devices: int, slots: int, updates: int = 1) -> dict[str, Any] | None:
    """What the compiler says of an update that has run: bytes of a device beside the trees, collectives by kind.

    lowered: its parts, lowered again, which costs a millisecond: JAX finds them, and their executables, in its caches.
    None where an executable is not found there: nothing is compiled for this. updates: so many in one call. One device
    by itself sends nothing, whatever its program says.
    """
    if not all(is_compiled(part) for part in lowered.values()):
        return None
    compiled = {name: part.compile() for name, part in lowered.items()}
    used = [part.memory_analysis() for part in compiled.values()]
    texts = {name: (compiled[name].as_text(), lowered[name].as_text()) for name in lowered if devices > 1}
    totals = summarize(moved(texts, slots))
    each = lambda n: n / updates if n % updates else n // updates
    return {
        "temporaries": max(u.temp_size_in_bytes for u in used),
        "peak": max(peak(u) for u in used),
        "collectives": {
            kind: {name: each(value) for name, value in total._asdict().items()} for kind, total in totals.items()
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
    """Write layout.json again, with what the compiler reports about the program whose first call has been made.

    updates: the number of updates in that call.
    """
    devices, slots = strategy.table.shape
    with contextlib.suppress(Exception):  # what the compiler does not report is left out
        lowered = program.lowered(state, batch, updates > 1)
        rundir.write_layout(directory, {**layout, "program": of_compiled(lowered, devices, slots, updates)})


def peak(used: Any) -> int:
    """Bytes of a device while a program runs, from XLA's memory analysis."""
    added = max(0, used.output_size_in_bytes - used.alias_size_in_bytes)
    return used.argument_size_in_bytes + used.temp_size_in_bytes + added


def is_compiled(lowered: Any) -> bool:
    """Whether `lowered.compile()` would only look up an executable; False where this JAX does not tell."""
    return getattr(getattr(lowered, "_lowering", None), "_executable", None) is not None
