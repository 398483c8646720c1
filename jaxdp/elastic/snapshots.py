"""Copies of a run's state in the memory of its processes, from which an elastic job continues after
it has lost one.

The state has parts (`copies`): its replicated leaves, which every process copies, and the slices of
its split leaves on each device. A process copies the parts of its devices and those of a neighbour.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxdp.elastic import regroup
from jaxdp.elastic.copies import Copies, assemble
from jaxdp.elastic.generations import has_ended
from jaxdp.elastic.records import Newest, missing_records, report_lost_updates
from jaxdp.metrics import safe_print
from jaxdp.metrics.numbers import size as shown
from jaxdp.metrics.writer import Record, Writer
from jaxdp.process import hosts
from jaxdp.process.context import Context
from jaxdp.run.callbacks import Callbacks
from jaxdp.run.continuation import Continuation
from jaxdp.run.driver import Training
from jaxdp.split import WHOLE
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState

FIRST, COPIES = 10, 6  # updates between the first copies, and their number
COST, LEAST, MOST = (
    0.01,
    0.4,
    1000,
)  # after these: the share of the time for copies; seconds, updates between two


class Snapshot(NamedTuple):
    """The state after update `step`, as far as this process has it.

    parts: the arrays of each part. meta: what a checkpoint stores beside the state, as JSON. dims:
    the dim along which each leaf is split into `slices`, or WHOLE. offset: the number of batches
    skipped before, without which an update has another state. checksums: of the arrays, once these
    are in host memory."""

    step: int
    parts: Mapping[int, Sequence[Any]]
    meta: str
    dims: Sequence[int]
    slices: int = 0
    offset: int = 0
    checksums: Mapping[int, Sequence[int]] = {}

    @property
    def key(self) -> tuple[int, int, int]:
        """Return what distinguishes the states of a job, and how they are split."""
        return self.step, self.offset, self.slices

    def join(self, other: "Snapshot") -> "Snapshot":
        """Return this snapshot with the parts that only `other`, of the same key, has."""
        return self._replace(
            parts={**other.parts, **self.parts}, checksums={**other.checksums, **self.checksums}
        )

    def with_checksums(self) -> "Snapshot":
        return self._replace(
            checksums={part: [checksum(x) for x in arrays] for part, arrays in self.parts.items()}
        )

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


class Found(NamedTuple):
    """A snapshot that the processes have all parts of. owners: a rank that has each part; lacking:
    the ranks that do not; snapshot: as this rank has it, maybe without parts."""

    owners: Mapping[int, int]
    lacking: Mapping[int, Sequence[int]]
    snapshot: Snapshot


class Snapshots(Continuation):
    """The newest snapshots of this process, and what else it keeps from one generation to the next.

    every: updates between two; "auto" chooses it after the sixth, so that they take a hundredth of
    the time. trusted: only states in which no device was found wrong are copied, not the one at
    which processes regroup.

    The copy of update k is read from the device when the next one is taken, so that the loop never
    waits for it. If a host lacks the memory for copies, none is taken, and the job continues from
    its checkpoints."""

    survives = True

    def __init__(self, every: int | Literal["auto"], trusted: bool = False):
        self.every, self.trusted = FIRST if every == "auto" else every, trusted
        self._choose, self._measured = every == "auto", False
        self._taken: list[tuple[int, float, float]] = []  # update, began, ended
        self.newest: Snapshot | None = None
        self.previous: Snapshot | None = (
            None  # of a split state: another process may not have read its newest parts
        )
        self.reached = 0  # the last update of this process
        self.callbacks: dict[str, Any] = {}  # the states of callbacks before the first update
        self.records = Newest()
        self._pending: Snapshot | None = None  # its arrays are on the device
        self._enough_memory = True
        self._copies: Any = None

    def prepare(self, training: Training) -> None:
        """Prepare for a run on new devices; copy the state that it has recovered, if that is split
        in another way.
        """
        run, self.training = training.run, training
        context, start = run.checkpoints.context, training.progress.start
        if not training.progress.recovered and context.is_root:
            report_lost_updates(run.log.directory, start)
        self._pending, self._copies = None, Copies(run.strategy, context.hosts)
        self._taken.clear()
        if self._choose:  # a process that has just joined has not measured
            texts = context.exchange("snapshot_every", str(self.every * self._measured))
            self._measured = any(text != "0" for text in texts)
            self.every = max(map(int, texts)) if self._measured else FIRST
        copies = (3 if self._copies.count else 2) - (self.newest is not None)
        self._enough_memory = enough_memory(run, copies * self._copies.size)
        split = self._copies.count or (self.newest and self.newest.slices)
        if self._enough_memory and training.progress.recovered and split:
            self._begin()
        if (member := regroup.current()) is not None:
            member.report_state()

    def load(self, callbacks: Callbacks, saved: Record) -> None:
        # A generation may start from nothing, with the same objects of a script.
        self.callbacks = self.callbacks or callbacks.state()
        callbacks.load(saved or self.callbacks)

    def begin(self, training: Training, open_writer: Callable[[], Writer]) -> Writer:
        """Keep the records of this rank; root writes those that a lost one has not."""
        self.prepare(training)
        run, progress = training.run, training.progress
        self.again = max(0, self.reached - progress.start)
        self.records.rewind(progress.step, progress.evaluated == progress.step)
        context = run.checkpoints.context
        missing = missing_records(self.records, context, run.log.directory / "metrics.jsonl")
        if not context.is_root:
            return self.records
        writer = open_writer()
        self.records.records.clear()
        for record in missing:
            writer.write(record)
        return writer

    def goes_on(self, error: BaseException) -> bool:
        return has_ended(error)

    def after(self, updates: range, state: TrainState, metrics: Any) -> None:
        """Copy the state, if `every` updates have passed, or the run was rolled back."""
        step = self.reached = updates[-1]
        last = self._pending or self.newest
        since = last.step if last else self.training.progress.start
        if self._enough_memory and not 0 <= step - since < self.every:
            began = time.perf_counter()
            self.settle()
            self._begin()
            if self._choose and not self._measured:
                self._taken.append((step, began, time.perf_counter()))
            if len(self._taken) == COPIES:
                context = self.training.run.checkpoints.context
                texts = context.exchange("cost of snapshots", str(affordable(self._taken)))
                self.every, self._measured, self._taken = max(map(int, texts)), True, []

    def keep_state(self) -> None:
        """Copy the state, and wait for the copy; without memory for it, save a checkpoint."""
        if not self._enough_memory:
            self.training.save()
            self.training.wait_for_checkpoint()
        elif not self.trusted:
            self._begin()
        self.settle()

    def _begin(self) -> None:
        training, progress, copies = self.training, self.training.progress, self._copies
        copied = copies.start(training.run.strategy.export(progress.state, padded=True))
        meta = json.dumps(training.metadata())
        self._pending = Snapshot(
            progress.step, copied, meta, copies.dims, copies.count, progress.offset
        )

    def settle(self) -> None:
        """Read the pending copy from the device; drop it if its update has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                parts = self._copies.read(pending.parts)
            except (
                ValueError,
                jax.errors.JaxRuntimeError,
            ):  # the collective of its update has lost a process
                return
            newest, before = pending._replace(parts=parts).with_checksums(), self.newest
            if (
                before is not None and before.key == newest.key
            ):  # recovered, and split over other devices
                self.newest = newest.join(before)
                return
            is_older = (
                before is not None and before.step <= newest.step
            )  # else the run was rolled back
            self.newest, self.previous = newest, before if is_older and newest.slices else None

    def drop_after(self, step: int) -> None:
        """Drop the snapshots of later updates."""
        self.settle()
        for snapshot in (self.newest, self.previous):
            if snapshot is not None and snapshot.step <= step:
                self.newest, self.previous = snapshot, None
                return
        self.newest = self.previous = None

    def drop_damaged(self) -> bool:
        """Drop the parts of the newest snapshot that have changed in memory; return whether there
        were any.
        """
        if self.newest is None:
            return False
        count = len(self.newest.parts)
        self.newest = self.newest.check()
        return len(self.newest.parts) < count

    def end_generation(self) -> None:
        """Keep the newest copy, unless its program does not return; the devices are about to be
        closed.
        """
        if self._pending is not None and all(
            x.is_ready() for x in jax.tree.leaves(self._pending.parts)
        ):
            self.settle()
        self._pending = None

    def recover(self, run: Run, context: Context) -> tuple[int, dict[str, Any], TrainState] | None:
        """Return (step, metadata, state) of the newest snapshot that the processes have all parts
        of; None without one.

        Every process calls it; those that lack a part receive it.
        """
        shapes, structure = jax.tree.flatten(run.strategy.abstract())
        found = find(context, [s for s in (self.newest, self.previous) if s is not None], 1)
        self.newest, self.previous = found and found.snapshot, None
        if found is None:
            return None
        step, saved = found.snapshot.step, context.of_root("checkpoints", run.checkpoints.steps)
        if (
            (every := run.options.rollback_every)
            and step >= every
            and step // every * every not in saved
        ):
            self.newest = None  # a rollback could not return to that state: make it again
            return None
        parts: Any = receive(context, found, shapes)
        if not found.snapshot.slices:  # one part, which this process keeps
            self.newest = found.snapshot._replace(parts=dict(parts)).with_checksums()
            parts = self.newest.parts.items()
        leaves = assemble(shapes, found.snapshot.dims, parts)
        state = run.strategy.adopt(jax.tree.unflatten(structure, leaves))
        run.checkpoints.repeated = max(saved, default=0)
        if step in saved:
            run.checkpoints.last = step  # it need not be saved again
        return step, json.loads(found.snapshot.meta), state


def affordable(taken: Sequence[tuple[int, float, float]]) -> int:
    """Return the updates between two copies: so many that copies take COST of the time, and at
    least LEAST seconds.

    taken: (update, when the copy began, when it ended), in seconds, of COPIES copies, of which the
    first compiles. The least time of an update is used, since processes pause during the first
    ones."""
    taken = taken[1:]
    between = (
        (b[1] - a[2]) / max(1, b[0] - a[0]) for a, b in itertools.pairwise(taken)
    )  # less: it was rolled back
    update, copy = min(between), min(ended - began for _, began, ended in taken)
    return min(MOST, math.ceil(max(copy / COST, LEAST) / update))


def enough_memory(run: Run, need: int) -> bool:
    """Return whether every host has the memory for the copies of its processes: the newest one, and
    the next while it is read from the device; the one before too, if the state is split. Print what
    is missing.

    need: bytes of this process.
    """
    context = run.checkpoints.context
    need, free = need * context.local_size, hosts.free_memory()
    lacks = (
        f"{shown(need)} on host {hosts.hostname()}, and {shown(free)} are free"
        if need > free
        else ""
    )
    if not any(lacking := context.exchange("memory of snapshots", lacks)):
        return True
    if context.is_root:
        every = run.options.save_every
        often = (
            f"of every {every} updates" if every else "(set checkpoint.every; now there are none)"
        )
        safe_print.say(
            f"jaxdp: elastic: the copies of the state in memory need {next(filter(None, lacking))}: none are made, and "
            f"the job continues from its checkpoints {often}",
            error=True,
        )
    return False


def find(context: Context, kept: Sequence[Snapshot], oldest: int) -> Found | None:
    """Return the newest snapshot that the processes have all parts of; None if there is none since
    step `oldest`.

    kept: of this process. Prints what is missing.
    """
    own = {snapshot.key: snapshot.check() for snapshot in kept if snapshot.step >= oldest}
    texts = context.exchange("snapshots", json.dumps([(key, [*s.parts]) for key, s in own.items()]))
    ranks: dict[tuple[int, int, int], dict[int, list[int]]] = {}  # {key: {part: ranks}}
    for rank, text in enumerate(texts):
        for key, parts in json.loads(text):
            for part in parts:
                ranks.setdefault((key[0], key[1], key[2]), {}).setdefault(part, []).append(rank)
    complete = [key for key, parts in ranks.items() if len(parts) > key[2]]
    if not complete:
        if ranks and context.is_root:
            step, _, count = key = max(ranks)
            missing = ", ".join(str(part) for part in range(count) if part not in ranks[key])
            safe_print.say(
                f"jaxdp: elastic: no process that is left has part {missing} of the state after update {step}: the job "
                "continues from its newest checkpoint",
                error=True,
            )
        return None
    newest = max(complete)
    owners = {part: holders[0] for part, holders in sorted(ranks[newest].items())}
    found = own.get(newest)
    text = (
        json.dumps([found.meta, list(found.dims)])
        if found and context.rank == owners[WHOLE]
        else ""
    )
    meta, dims = json.loads(context.exchange("snapshot metadata", text)[owners[WHOLE]])
    lacking = {
        part: [r for r in range(context.size) if r not in holders]
        for part, holders in ranks[newest].items()
    }
    step, offset, slices = newest
    return Found(owners, lacking, found or Snapshot(step, {}, meta, dims, slices, offset))


def receive(
    context: Context, found: Found, shapes: Sequence[Any]
) -> Iterator[tuple[int, Sequence[np.ndarray]]]:
    """Yield (number, arrays) of each part of a snapshot, in one order on all processes; send it to
    those that lack it.

    shapes: of the leaves of the state (anything with shape and dtype). Raises DistributedError if
    processes disagree on these.
    """
    from jaxdp.interop.collectives import broadcast  # which a run that loses no process never needs

    parts, dims, count = found.snapshot.parts, found.snapshot.dims, found.snapshot.slices
    for part, owner in found.owners.items():
        arrays = parts.get(part)
        if arrays is None:
            assert context.rank != owner, (
                f"part {part} of the state after update {found.snapshot.step}"
            )
            pieces = [(x, d) for x, d in zip(shapes, dims) if (d == WHOLE) == (part == WHOLE)]

            def cut(x, d):
                return [-(-n // count) if i == d else n for i, n in enumerate(x.shape)]

            arrays = [np.zeros(cut(x, d), x.dtype) for x, d in pieces]
        if lacking := found.lacking[part]:
            arrays = [np.asarray(x) for x in broadcast(arrays, owner, groups=[[owner, *lacking]])]
        yield part, arrays


def checksum(x: np.ndarray) -> int:
    """Return the sum of an array's bytes in words of 8: each flipped bit changes it."""
    data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    words, rest = np.split(data, [data.size // 8 * 8])
    return int(words.view(np.uint64).sum(dtype=np.uint64)) + int(rest.sum(dtype=np.uint64))
