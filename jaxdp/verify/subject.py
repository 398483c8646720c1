"""What is verified: the plain parts of a run, and the few examples that it is tried on."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp.data.base import Dataset
from jaxdp.data.cursor import Cursor, Order, Streams
from jaxdp.data.prefetch import read_batch
from jaxdp.errors import UsageError
from jaxdp.losses import LossFn, attribute
from jaxdp.models.base import Model
from jaxdp.step import Transform

Tree = Any
Arrays = dict[str, np.ndarray]
MOST_EXAMPLES = 4  # of a microbatch; of two, a BatchNorm without pixels to average over has no gradient left to compare


class Row(NamedTuple):
    """A strategy: one row of the matrix. accumulator counts where gradients are split, shard_size where state is."""

    devices: int
    backend: str
    zero: int = 0
    reduction: str = "xla"
    accumulate: str = "vmap"
    accumulator: str = "split"
    shard_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Subject:
    """The parts of a run, as a script would make them; `own` is the strategy that the run itself would use.

    transform: run on each microbatch. sequential: rows go on from batch to batch. make_tx: factor -> the optimizer at
    that much of its peak learning rate, from the first update on: those of a warm-up would change next to nothing.
    remat: the policy of a ZeRO stage.
    """

    model: Model
    loss: LossFn
    make_tx: Callable[[float], optax.GradientTransformation]
    dataset: Dataset
    own: Row
    transform: Transform | None = None
    sequential: bool = False
    seed: int = 0
    batch_size: int = 32
    microbatches: int = 8
    clip_norm: float | None = None
    frozen: Sequence[str] = ()
    ema_decay: float | None = None
    remat: Callable[[int], str] = lambda zero: "none"

    @property
    def couples(self) -> bool:
        return attribute(self.loss, "scope", "example") == "global"


class Trial(NamedTuple):
    """batches: one an update, {name: [microbatch, example, ...]}, every place with an example of its own.

    example: {name: [example, ...]}, a microbatch as the model gets it, to initialize with.
    """

    batches: list[Arrays]
    example: dict[str, jax.Array]

    @property
    def microbatches(self) -> int:
        return len(self.batches[0]["mask"])

    @property
    def places(self) -> int:
        return self.batches[0]["mask"].shape[1]

    def slots(self, update: int, slots: np.ndarray) -> Arrays:
        """The microbatches of some slots, [slot, example, ...]; a slot of -1 has none, and repeats the first masked."""
        batch = {k: v[np.maximum(slots, 0)] for k, v in self.batches[update].items()}
        empty = (slots < 0).reshape(-1, *[1] * (batch["mask"].ndim - 1))
        return {**batch, "mask": np.where(empty, np.zeros_like(batch["mask"]), batch["mask"])}


def make_trial(subject: Subject, devices: int, updates: int) -> Trial:
    """As many microbatches and examples as the run has, up to a few; UsageError where the data has too few."""
    microbatches = min(subject.microbatches, max(2 * devices, 4))
    wanted = min(-(-subject.batch_size // subject.microbatches), MOST_EXAMPLES)
    size = len(subject.dataset)
    if size < microbatches:
        raise UsageError(f"data: {size} examples cannot be dealt to {microbatches} microbatches; give it more")
    places = min(wanted, size // microbatches)
    batch_size = microbatches * places
    whole = size - size % batch_size
    if subject.sequential:
        cursor: Order = Streams(whole, batch_size, microbatches)
    else:
        cursor = Cursor(whole, batch_size, microbatches, subject.seed)
    batches = [read_batch(subject.dataset, cursor, i, np.arange(microbatches)) for i in range(updates)]
    first = subject.dataset.read(np.zeros(1, np.int64))
    example: Any = {k: jnp.broadcast_to(v[0], (places, *v.shape[1:])) for k, v in first.items()}
    example.setdefault("mask", jnp.ones(places, bool))
    if subject.transform is not None:
        example = subject.transform(example, jax.random.key(0), True)
    return Trial(batches, example)
