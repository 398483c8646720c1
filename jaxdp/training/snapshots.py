"""Copies of a run's state in the memory of its processes, from which an elastic job continues after it has lost one."""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.core.state import TrainState
from jaxdp.distributed import hosts
from jaxdp.distributed.collectives import broadcast
from jaxdp.distributed.context import Context
from jaxdp.metrics.numbers import size as shown
from jaxdp.training.run import Progress, Run
from jaxdp.training.save import progress_metadata, save, wait_for_checkpoint


class Snapshot(NamedTuple):
    """The state after update `step`. leaves: full arrays; meta: what a checkpoint stores beside the state, as JSON;
    checksums: of the leaves, once these are in host memory."""

    step: int
    leaves: list[Any]
    meta: str
    checksums: Sequence[int] = ()

    def check(self) -> "Snapshot | None":
        """Return the snapshot; None, with a warning, if a leaf has changed in memory since its checksum was made."""
        bad = [i for i, x in enumerate(self.leaves) if checksum(x) != self.checksums[i]]
        if bad:
            print(
                f"jaxdp: the snapshot of update {self.step} in this process is damaged (leaf {bad[0]} of "
                f"{len(self.leaves)}): the memory of this host may be faulty; the copy of another process is used",
                file=sys.stderr,
                flush=True,
            )
        return None if bad else self


class Snapshots:
    """The newest snapshots of this process. every: updates between two. audited: only states that an audit has
    passed are copied, not the one at which processes regroup.

    The copy of update k is read from the device when the next one is taken, so that the loop never waits for it. If a
    host lacks the memory for copies, none is taken, and the job continues from its checkpoints.
    """

    def __init__(self, every: int, audited: bool = False):
        self.every, self.audited = every, audited
        self.newest: Snapshot | None = None
        self.generations = 0  # that have ended
        self.reached = 0  # the last update of this process
        self._pending: Snapshot | None = None  # its leaves are on the device
        self._enough_memory = True
        self._copy: Any = None

    def start(self, run: Run) -> None:
        """Prepare for a run on new devices."""
        self._pending = None
        self._enough_memory = enough_memory(run, self.newest is not None)
        full = NamedSharding(run.strategy.mesh, P())
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=full)

    def take(self, run: Run, progress: Progress) -> None:
        """Copy the state, if `every` updates have passed, or the run was rolled back."""
        last, self.reached = self._pending or self.newest, progress.step
        if self._enough_memory and not 0 <= progress.step - (last.step if last else run.start) < self.every:
            self.settle()
            self._begin(run, progress)

    def take_now(self, run: Run, progress: Progress) -> None:
        """Copy the state, and wait for the copy; without memory for it, save a checkpoint."""
        if self._enough_memory:
            if not self.audited:
                self._begin(run, progress)
            self.settle()
        else:
            save(run, progress)
            wait_for_checkpoint(run)

    def _begin(self, run: Run, progress: Progress) -> None:
        copy = jax.tree.leaves(self._copy(run.strategy.export(progress.state)))
        for x in copy:
            x.copy_to_host_async()
        self._pending = Snapshot(progress.step, copy, json.dumps(progress_metadata(run, progress)))

    def settle(self) -> None:
        """Read the pending copy from the device; drop it if its update has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                leaves = jax.device_get(pending.leaves)
            except (ValueError, jax.errors.JaxRuntimeError):  # the collective of its update has lost a process
                return
            self.newest = pending._replace(leaves=leaves, checksums=[checksum(x) for x in leaves])

    def drop_after(self, step: int) -> None:
        """Drop the snapshots of later updates."""
        self.settle()
        if self.newest is not None and self.newest.step > step:
            self.newest = None

    def end_generation(self) -> None:
        """Keep the newest copy; the devices are about to be closed."""
        self.settle()
        self.generations += 1

    def recover(self, run: Run, context: Context) -> tuple[int, dict[str, Any], TrainState] | None:
        """Return (step, metadata, state) of the newest snapshot of any process; None if there is none.

        Every process calls it; those that lack the snapshot receive it.
        """
        shapes, structure = jax.tree.flatten(run.strategy.abstract())
        if (newest := newest_of_all(context, self.newest, shapes, 1)) is None:
            return None
        self.newest = newest
        place = lambda a, x: jax.make_array_from_callback(x.shape, x.sharding, lambda index: a[index].copy())
        placed = [place(a, x) for a, x in zip(newest.leaves, shapes)]
        return newest.step, json.loads(newest.meta), run.strategy.adopt(jax.tree.unflatten(structure, placed))


def enough_memory(run: Run, one_exists: bool) -> bool:
    """Return whether every host has the memory for the copies of the state that its processes hold: the newest one,
    and the next while it is read from the device. Print what is missing."""
    context = run.checkpoints.context
    state = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(run.strategy.abstract()))
    need, free = (2 - one_exists) * state * context.local_size, hosts.free_memory()
    lacks = f"{shown(need)} on host {hosts.hostname()}, and {shown(free)} are free" if need > free else ""
    if not any(lacking := context.exchange("memory of snapshots", lacks)):
        return True
    if context.is_root:
        every = (
            run.save_every and f"of every {run.save_every} updates"
        ) or "(set checkpoint.every; now there are none)"
        print(
            f"jaxdp: elastic: the copies of the state in memory need {next(filter(None, lacking))}: none are made, and "
            f"the job continues from its checkpoints {every}",
            file=sys.stderr,
            flush=True,
        )
    return False


def newest_of_all(context: Context, own: Snapshot | None, shapes: Sequence[Any], oldest: int) -> Snapshot | None:
    """Return the newest snapshot of any process, on all of them; None if all are damaged or older than step `oldest`.

    shapes: of the leaves (anything with shape and dtype). Raises DistributedError if processes disagree on these.
    """
    own = own and own.check()
    steps = [int(text) for text in context.exchange("snapshot", str(own.step if own else -1))]
    newest = max(steps)
    if newest < oldest:
        return None
    root = steps.index(newest)
    meta = context.exchange("snapshot metadata", own.meta if own and context.rank == root else "")[root]
    leaves = own.leaves if own and own.step == newest else [np.zeros(x.shape, x.dtype) for x in shapes]
    if min(steps) != newest:
        leaves = [np.asarray(x) for x in broadcast(leaves, root)]
    return Snapshot(newest, leaves, meta, [checksum(x) for x in leaves])


def checksum(x: np.ndarray) -> int:
    """Return the sum of an array's bytes in words of 8: each flipped bit changes it."""
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    words, rest = np.split(data, [data.size // 8 * 8])
    return int(words.view(np.uint64).sum(dtype=np.uint64)) + int(rest.sum(dtype=np.uint64))
