"""A data-parallel strategy: where the state is placed, plus the one reduction between `grads` and `apply`."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxdp.core.state import Batch, Sums, TrainState
from jaxdp.core.step import Step
from jaxdp.parallel.layout import Share

Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


class Program(NamedTuple):
    """The compiled programs of a step; each also has `.lower(state, batch)`.

    update(state, batch) -> (state, metrics), donating the state; evaluate(state, batch) -> Sums over all devices.
    updates: several updates on batches [step, ...], with metrics[step].
    """

    update: Update
    evaluate: Callable[[TrainState, Batch], Sums]
    updates: Update

    def lowered(self, state: TrainState, batch: Batch, several: bool = False) -> dict[str, Any]:
        """Lower `update` for such arguments; or `updates`, if several."""
        name = "updates" if several else "update"
        return {name: getattr(self, name).lower(state, batch)}


class Strategy(Protocol):
    """What the loop and the checkpoint know of a backend, made for the state that a function returns.

    shapes: of that state; dims: along which its leaves are sharded into `parts`; slices: those of gradients and
    updates, where any state is sharded. blocks: paths of parameters that are stacked [block, ...]. table: the
    microbatch, or -1, of [device, slot]. local_slots: the microbatch (or -1, none) of each slot of this process's
    devices, in the order of `shard_batch`.
    """

    devices: list[jax.Device]
    parts: int
    blocks: tuple[str, ...]
    shapes: TrainState
    dims: Any
    slices: Any
    table: np.ndarray
    local_slots: np.ndarray

    def check(self, tx: Any, params: Any) -> None:
        """Raise UsageError if the optimizer cannot work on the slices that this strategy gives it."""

    def abstract(self) -> TrainState:
        """Return shapes, dtypes and shardings of the exported state, as in a checkpoint."""

    def share(self) -> Share:
        """Return how much of the state is sharded."""

    def init(self) -> TrainState:
        """Compute the state before the first update in place: sharded leaves are never full on a device."""

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        """Place this process's slots [slot, example, ...] on their devices.

        several: the slots of several updates [step, slot, ...], for `Program.updates`.
        """

    def replicate(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Copy arrays to each device of this process, to be indexed by what `shard_batch` places."""

    def compile(self, step: Step) -> Program:
        """Return the step as programs over all devices; each is compiled when it is first called."""

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with its `ema` for parameters, to evaluate."""

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """Return the shapes of a program's arguments, for microbatches like `example` {name: [example, ...]}."""

    def export(self, state: TrainState) -> TrainState:
        """Return global arrays in logical shapes, the same for every strategy."""

    def adopt(self, state: TrainState) -> TrainState:
        """Return the state as this strategy stores it: the inverse of `export`."""
