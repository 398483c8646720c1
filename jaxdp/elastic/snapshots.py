"""Copies of a run's state in the memory of its processes, from which an elastic job continues after
it has lost one.

The state has parts (`copies`): its replicated leaves, which every process copies, and the slices of
its split leaves on each device. A process copies the parts of its devices and those of a neighbour.

`Newest` keeps the newest records, which a lost rank 0 may not have written.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxdp.elastic import regroup
from jaxdp.elastic.copies import Copies, assemble
from jaxdp.metrics import safe_print
from jaxdp.metrics.jsonl import read
from jaxdp.metrics.numbers import size as shown
from jaxdp.metrics.writer import KEPT, Record, Writer
from jaxdp.process import hosts
from jaxdp.process.context import Context
from jaxdp.run.callbacks import Callbacks
from jaxdp.run.driver import Continuation, Training
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState


class Newest(Writer):
    """Keeps the newest records of a rank that writes none."""

    records: Sequence[Record] = ()

    def write(self, record: Record) -> None:
        self.records = *self.records[1 - KEPT :], record

    def rewind(self, step: int, evaluated: bool = True) -> None:
        """Discard the records after update `step`; its evaluation too if it is made again: not
        `evaluated`.
        """
        last = {"train": step, "eval": step - (not evaluated)}
        self.records = [x for x in self.records if x["step"] <= last.get(x["split"], 0)]


def report_lost_updates(reached: int, start: int) -> None:
    """Print that the updates after `start` are made again: no process has their state."""
    safe_print.say(
        f"jaxdp: elastic: no process has the state after update {reached} any more: the job continues from "
        f"{f'its checkpoint of update {start}' if start else 'the first update: it has no checkpoint'}",
        error=True,
    )


FIRST, COPIES = 10, 6  # updates between the first copies, and their number
COST, LEAST = 0.01, 0.4  # after these: the share of the time for copies; seconds between two


class Snapshot(NamedTuple):
    """The state after update `step`, as far as this process has it.

    parts: the arrays of each part. meta: what a checkpoint stores beside the state, as JSON. dims:
    the dim along which each leaf is split into `slices`, or WHOLE. offset: the number of batches
    skipped before, without which an update has another state. checksums: of the arrays. ranks: the
    processes that have each part, see `find`."""

    step: int
    parts: Any  # dict[int, Sequence[np.ndarray]]; arrays of `Copies` while these are on the device
    meta: str
    dims: Sequence[int]
    slices: int = 0
    offset: int = 0
    checksums: dict[int, list[int]] = {}
    ranks: dict[int, list[int]] = {}

    @property
    def key(self) -> tuple[int, int, int]:
        """Return what distinguishes the states of a job, and how they are split."""
        return self.step, self.offset, self.slices

    def with_parts(self, parts: dict[int, Sequence[np.ndarray]]) -> "Snapshot":
        """Return this snapshot with other parts, which are in host memory."""
        return self._replace(parts=parts, checksums=jax.tree.map(checksum, parts))

    def check(self) -> "Snapshot":
        """Return the snapshot without the parts that have changed in memory since their checksums
        were made.
        """
        sound = dict(self.parts)
        for part, arrays in self.parts.items():
            if bad := [i for i, x in enumerate(arrays) if checksum(x) != self.checksums[part][i]]:
                del sound[part]
                safe_print.say(
                    f"jaxdp: the snapshot of update {self.step} in this process is damaged (leaf {bad[0]} of "
                    f"{len(arrays)}): the memory of this host may be faulty; another copy is used",
                    error=True,
                )
        return self._replace(parts=sound)


class Snapshots(Continuation):
    """The newest snapshots of this process, and what else it keeps from one generation to the next.

    every: updates between two; "auto" chooses it after the sixth, so that they take a hundredth of
    the time. trusted: only states in which no device was found wrong are copied, not the one at
    which processes regroup.

    The copy of update k is read from the device when the next one is taken, so that the loop never
    waits for it. If a host lacks the memory for copies, none is taken, and the job continues from
    its checkpoints."""

    survives = True
    reached = 0  # the last update of this process
    _pending: Snapshot | None = None  # its arrays are on the device
    _copies: Any = None  # None: there is not enough memory for them

    def __init__(self, every: int | Literal["auto"], trusted: bool = False):
        self.trusted = trusted
        self.every = 0 if every == "auto" else every  # 0: not chosen yet
        # Seconds of an update since the copy before, and of the copy.
        self._taken: list[tuple[float, float]] = []
        self._ended = 0.0  # when the last of these copies ended
        # The newest first, and the one before if the state is split: another process may not have
        # read its newest parts.
        self.kept: list[Snapshot] = []
        self.callbacks: Record = {}  # the states of callbacks before the first update
        self.records = Newest()

    @property
    def newest(self) -> Snapshot | None:
        return self.kept[0] if self.kept else None

    def prepare(self, training: Training) -> None:
        """Prepare for a run on new devices; copy the state that it has recovered, if that is split
        in another way.
        """
        run, self.training = training.run, training
        self.context = run.checkpoints.context
        self._choose(self.every)  # a process that has just joined has not measured
        self._taken.clear()
        copies = Copies(run.strategy, self.context.hosts)
        number = (3 if copies.count else 2) - bool(self.kept)
        self._pending = self._copies = None
        if enough_memory(self.context, number * copies.size):
            self._copies = copies
            if training.progress.recovered and (copies.count or any(x.slices for x in self.kept)):
                self._begin()
        regroup.report_state()

    def _choose(self, every: int) -> None:
        """Choose the longest interval of the processes."""
        self.every = max(map(int, self.context.exchange("snapshot_every", str(every))))

    def load(self, callbacks: Callbacks, saved: Record) -> None:
        # A generation may start from nothing, with the same objects of a script.
        self.callbacks = self.callbacks or callbacks.state()
        callbacks.load(saved or self.callbacks)

    def begin(self, training: Training, open_writer: Callable[[], Writer]) -> Writer:
        """Keep the records of this rank; root writes those that a lost one has not."""
        self.prepare(training)
        progress = training.progress
        self.again = max(0, self.reached - progress.start)
        records = self.records
        records.rewind(progress.step, progress.evaluated == progress.step)
        texts = self.context.exchange("records", json.dumps(records.records))
        if not self.context.is_root:
            return records
        file = training.run.log.directory / "metrics.jsonl"
        written = {(x.get("step", 0), x.get("split")) for x in read(file, math.inf)}
        newest = max((step for step, _ in written), default=0)
        reached = max(self.reached, newest)
        if not progress.recovered and reached > progress.start:
            report_lost_updates(reached, progress.start)
        writer, records.records = open_writer(), ()
        # An update that a lost process has interrupted may have succeeded in some processes, and
        # failed on root. So take the records of the process that has most, and the newest. Only
        # those at the end of the file can be missing there; a process that was left out for some
        # time has old ones.
        most = max(map(json.loads, texts), key=lambda records: sum(x["step"] for x in records))
        for record in most:
            key = record["step"], record["split"]
            if key[0] >= newest and key not in written:
                writer.write(record)
        return writer

    goes_on = staticmethod(regroup.has_ended)

    def after(self, updates: range, state: TrainState, metrics: Any) -> None:
        """Copy the state, if `every` updates have passed, or the run was rolled back."""
        step = self.reached = updates[-1]
        last = self._pending or self.newest
        since = last.step if last else self.training.progress.start
        if self._copies is None or 0 <= step - since < (self.every or FIRST):
            return
        began = time.perf_counter()
        self.settle()
        self._begin()
        if not self.every:
            # After a rollback, the number of updates is smaller than before.
            update = (began - self._ended) / max(1, step - since)
            self._ended = time.perf_counter()
            self._taken.append((update, self._ended - began))
            if len(self._taken) == COPIES:
                self._choose(affordable(self._taken))

    def keep_state(self) -> None:
        """Copy the state, and wait for the copy; without memory for it, save a checkpoint."""
        if self._copies is None:
            self.training.save()
            self.training.wait_for_checkpoint()
        elif not self.trusted:
            self._begin()
        self.settle()

    def _begin(self) -> None:
        training, copies = self.training, self._copies
        step, offset = training.progress.step, training.progress.offset
        copied = copies.start(training.run.strategy.export(training.progress.state, padded=True))
        meta = json.dumps(training.metadata())
        self._pending = Snapshot(step, copied, meta, copies.dims, copies.count, offset)

    def settle(self) -> None:
        """Read the pending copy from the device; drop it if its update has failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            parts = self._copies.read(pending.parts)
        except (ValueError, jax.errors.JaxRuntimeError):
            return  # the collective of its update has lost a process
        new = pending.with_parts(parts)
        if self.kept and self.kept[0].key == new.key:  # recovered, and split over other devices
            old = self.kept.pop(0)
            new = new._replace(parts=old.parts | new.parts, checksums=old.checksums | new.checksums)
        older = [x for x in self.kept if x.step <= new.step]  # the run may have been rolled back
        self.kept = [new, *older[: new.slices > 0]]

    def drop_after(self, step: int) -> None:
        """Drop the snapshots of later updates."""
        self.settle()
        self.kept = [x for x in self.kept if x.step <= step]

    def drop_damaged(self) -> bool:
        """Drop the parts of the newest snapshot that have changed in memory; return whether there
        were any.
        """
        newest = self.newest
        if newest is None:
            return False
        self.kept[0] = newest.check()
        return len(self.kept[0].parts) < len(newest.parts)

    def end_generation(self) -> None:
        """Keep the newest copy, unless its program does not return; the devices are about to be
        closed.
        """
        arrays = jax.tree.leaves(self._pending and self._pending.parts)
        if all(x.is_ready() for x in arrays):
            self.settle()
        self._pending = None

    def recover(self, run: Run, context: Context) -> tuple[int, Record, TrainState] | None:
        """Return (step, metadata, state) of the newest snapshot that the processes have all parts
        of; None without one.

        Every process calls it; those that lack a part receive it.
        """
        snapshot, self.kept = find(context, self.kept, 1), []
        if snapshot is None:
            return None
        saved = context.of_root("checkpoints", run.checkpoints.steps)
        step, every = snapshot.step, run.options.rollback_every
        if every and step >= every and step - step % every not in saved:
            return None  # a rollback could not return to that state: make it again
        parts = receive(context, snapshot)
        if not snapshot.slices:  # one part, which this process keeps
            snapshot = snapshot.with_parts(dict(parts))
            parts = snapshot.parts.items()
        self.kept = [snapshot]
        shapes, structure = jax.tree.flatten(run.strategy.abstract())
        leaves = assemble(shapes, snapshot.dims, parts)
        state = run.strategy.adopt(jax.tree.unflatten(structure, leaves))
        run.checkpoints.repeated = max(saved, default=0)
        if step in saved:
            run.checkpoints.last = step  # it need not be saved again
        return step, json.loads(snapshot.meta), state


def affordable(taken: Sequence[tuple[float, float]]) -> int:
    """Return the updates between two copies: so many that copies take COST of the time, and at
    least LEAST seconds.

    taken: (seconds of an update before the copy, seconds of the copy) of COPIES copies, of which
    the first compiles. The least time of an update is used, since processes pause during the first
    ones."""
    update, copy = map(min, zip(*taken[1:]))
    return math.ceil(max(copy / COST, LEAST) / update)


def enough_memory(context: Context, need: int) -> bool:
    """Return whether every host has the memory for the copies of its processes: the newest one, and
    the next while it is read from the device; the one before too, if the state is split. Print what
    is missing.

    need: bytes of this process.
    """
    need, free = need * context.local_size, hosts.free_memory()
    lacks = (
        f"{shown(need)} on host {hosts.hostname()}, and {shown(free)} are free"
        if need > free
        else ""
    )
    if not any(lacking := context.exchange("memory of snapshots", lacks)):
        return True
    if context.is_root:
        safe_print.say(
            f"jaxdp: elastic: the copies of the state in memory need {next(filter(None, lacking))}: none are made, and "
            "the job continues from its checkpoints (see checkpoint.every)",
            error=True,
        )
    return False


def find(context: Context, kept: Sequence[Snapshot], oldest: int) -> Snapshot | None:
    """Return the newest snapshot that the processes have all parts of, as far as this one has it;
    None if there is none since step `oldest`. kept: of this process."""
    own = {x.key: x.check() for x in kept if x.step >= oldest}
    described = [x._replace(parts=[*x.parts], checksums={}) for x in own.values()]
    found: dict[tuple[int, ...], Snapshot] = {}
    for rank, text in enumerate(context.exchange("snapshots", json.dumps(described))):
        for fields in json.loads(text):
            one = Snapshot(*fields)._replace(ranks={})
            ranks = found.setdefault(one.key, one).ranks
            for part in one.parts:
                ranks.setdefault(part, []).append(rank)
    complete = [key for key, x in found.items() if len(x.ranks) > x.slices]
    if not complete:
        return None
    newest = found[max(complete)]
    mine = own.get(newest.key, newest._replace(parts={}))
    return mine._replace(meta=newest.meta, ranks=newest.ranks)


def receive(context: Context, snapshot: Snapshot) -> Iterable[tuple[int, Sequence[np.ndarray]]]:
    """Yield (number, arrays) of each part of a snapshot, in one order on all processes; send it to
    those that lack it.
    """
    from jaxdp.interop.collectives import broadcast  # which a run that loses no process never needs

    for part, ranks in snapshot.ranks.items():
        arrays = snapshot.parts.get(part)
        if lacking := [rank for rank in range(context.size) if rank not in ranks]:
            arrays = broadcast(arrays, ranks[0], groups=[[ranks[0], *lacking]])
        yield part, [np.asarray(x) for x in arrays]


def checksum(x: np.ndarray) -> int:
    """Return the sum of an array's elements as unsigned integers: each flipped bit changes it."""
    return int(x.view(f"u{min(8, x.dtype.itemsize)}").sum())  # as 64 bits
