"""A data-parallel strategy: the placement of the state, and the one reduction between `grads` and
`apply`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdp.parallel.layout import Share
from jaxdp.train.state import Batch, Sums, TrainState
from jaxdp.train.step import Step

Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


class Seeded(functools.partial):
    """A program and its first argument, the seed: runs that differ only in the seed share the
    compiled program.
    """

    def lower(self, state: TrainState, batch: Batch) -> Any:
        return self.func.lower(*self.args, state, batch)  # type: ignore[attr-defined]


class Program(NamedTuple):
    """The compiled programs of a step; each also has `.lower(state, batch)`.

    update(state, batch) -> (state, metrics), donating the state; evaluate(state, batch) -> Sums over all devices.
    updates: several updates on batches [step, ...], with metrics[step].
    """

    update: Update
    evaluate: Callable[[TrainState, Batch], Sums]
    updates: Update

    def lowered(self, state: TrainState, batch: Batch, several: bool = False) -> dict[str, Any]:
        """Lower `update` for these arguments, or `updates` if several."""
        name = "updates" if several else "update"
        return {name: getattr(self, name).lower(state, batch)}


class Strategy(Protocol):
    """The interface of a backend for the loop and the checkpoint, built from a function that
    returns the state.

    shapes: of the state; dims: the dim along which each leaf is sharded into `parts`; slices: the
    same for gradients and updates, if any state is sharded. blocks: paths of parameters that are
    stacked [block, ...]. assignment[device, local]: the numbers of the microbatches of each device,
    -1 for none. local_microbatches: those of this process's devices, in the order of `shard_batch`.
    """

    devices: list[jax.Device]
    mesh: Mesh
    parts: int
    blocks: tuple[str, ...]
    shapes: TrainState
    dims: Any
    slices: Any
    assignment: np.ndarray
    local_microbatches: np.ndarray

    def check(self, tx: Any, params: Any) -> None:
        """Raise UsageError if the optimizer cannot work on this strategy's slices."""

    def abstract(self, padded: bool = False) -> TrainState:
        """Return shapes, dtypes and shardings of the exported state: as in a checkpoint, or with
        the padding.
        """

    def share(self) -> Share:
        """Return the share of the state that is sharded."""

    def init(self) -> TrainState:
        """Compute the state before the first update in place: sharded leaves are never full on a
        device.
        """

    def shard_batch(self, batch: dict[str, np.ndarray], several: bool = False) -> Batch:
        """Place this process's microbatches [local, example, ...] on their devices.

        several: the microbatches of several updates [step, local, ...], for `Program.updates`.
        """

    def replicate(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Copy arrays to each device of this process; batches from `shard_batch` index into them."""

    def compile(self, step: Step) -> Program:
        """Return the step's programs over all devices; each is compiled at its first call."""

    def averaged(self, state: TrainState) -> TrainState:
        """Return the state with `ema` as its parameters, and the model state that belongs to it,
        for evaluation.
        """

    def evaluated(self, state: TrainState) -> TrainState:
        """Return the state with the parameters to evaluate, if the optimizer has others
        (`jaxdp.optim.evaluation`).
        """

    def argument_shapes(self, example: dict[str, Any]) -> tuple[TrainState, dict[str, Any]]:
        """Return the shapes of a program's arguments for microbatches like `example` {name:
        [example, ...]}.
        """

    def export(self, state: TrainState, padded: bool = False) -> TrainState:
        """Return global arrays in logical shapes, the same for every strategy.

        padded: keep the padding of leaves that have some (`jaxdp.parallel.padding`); then no data
        moves."""

    def adopt(self, state: TrainState) -> TrainState:
        """Return the state as this strategy stores it: the inverse of `export`, from logical
        shapes.
        """
