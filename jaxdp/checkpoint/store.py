"""Checkpoints: the logical state under checkpoints/STEP, written by Orbax, complete once it has a
manifest.

Saving is asynchronous: the caller waits for the copy to the host, every process writes its shards,
Orbax commits by a rename, and then the manifest, with a checksum of every file, is renamed into
place. Only then "saved" is printed. Reading verifies the checksums first; a checkpoint that fails
them is set aside, and the previous one is used."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp.checkpoint import folders, manifest
from jaxdp.checkpoint.leaves import (
    ADDED,
    all_fields_of,
    by_number,
    check_same_leaves,
    copy,
    is_plain,
    leaves_of,
    state_of,
)
from jaxdp.checkpoint.manifest import Damaged, Meta
from jaxdp.checkpoint.orbax import (
    TIMEOUT,
    by_path,
    load,
    prepare,
    read_back,
    sample,
    save,
    silence_orbax,
)
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.jsonl import NoEvents
from jaxdp.metrics.numbers import sign
from jaxdp.process import membership
from jaxdp.process.context import Context, current
from jaxdp.run import rundir
from jaxdp.split import path_string
from jaxdp.train.average import first_statistics
from jaxdp.train.state import TrainState


class PeerFailed(Exception):
    """Another process could not save; the message names it and the reason."""


class Commit:
    """The messages of one save between root and the other processes: each sends and receives a
    number that does not grow with the number of processes."""

    def __init__(self, context: Context):
        member = membership.current()
        self.context = context
        self.turn = member.turn("save") if member else 0
        self.attempt = (
            f"{member.job.generation if member else 0}-{self.turn}"  # the same on all processes
        )

    def wait_for(self, response: Any) -> None:
        """Wait until Orbax has committed on this process. Raises PeerFailed as soon as another
        could not.

        response: Orbax's; None if this process writes nothing.
        """
        deadline = time.monotonic() + TIMEOUT
        while response is not None:
            asked = time.monotonic()
            try:
                response.result(timeout=0.2)
                return
            except TimeoutError:
                if (
                    time.monotonic() - asked < 0.1
                ):  # Orbax's timeout: it uses the wall clock, which may be changed
                    raise
                self._raise_if_failed()
                if time.monotonic() > deadline:
                    raise

    def scatter(self, name: str, texts: Sequence[str]) -> str:
        """Return root's text for this process; texts: one for each process, on root. Raises
        PeerFailed.
        """
        if self.context.size == 1:
            return texts[0]
        if self.context.is_root:
            for rank, text in enumerate(texts):
                membership.joined().put(self._key(f"{name}/{rank}"), text)
        return self._get(f"{name}/{self.context.rank}")

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes on root, and nothing on the others. Raises PeerFailed."""
        if self.context.size == 1:
            return [text]
        membership.joined().put(self._key(f"{name}/{self.context.rank}"), text)
        return [
            self._get(f"{name}/{rank}")
            for rank in range(self.context.size if self.context.is_root else 0)
        ]

    def digests(self, folder: pathlib.Path) -> manifest.Files:
        """Return on root the sizes and checksums of the files in a folder that all see; each
        process reads a share.
        """
        size = self.context.size
        names = manifest.list_files(folder) if self.context.is_root else []
        share = json.loads(self.scatter("files", [json.dumps(names[r::size]) for r in range(size)]))
        digests = manifest.digests(folder, share)
        manifest.flush(folder, share)
        parts = self.gather("digests", json.dumps(digests))
        return {
            name: (size, sha256)
            for part in parts
            for name, (size, sha256) in json.loads(part).items()
        }

    def wait_for_all(self, name: str) -> None:
        """Wait for all processes. Raises PeerFailed as soon as one could not save."""
        self.gather(name, "")
        self.scatter(f"after {name}", [""] * self.context.size)

    def report_failure(self, reason: str) -> None:
        """Tell the others that this process cannot save."""
        if self.context.size > 1:
            membership.joined().announce(self._key("failed"), f"rank {self.context.rank}: {reason}")

    def _get(self, name: str) -> str:
        """Wait for the text under a name. All processes together ask at most 1,000 times a second."""
        deadline = time.monotonic() + TIMEOUT
        while (
            text := membership.joined().get(self._key(name), max(0.2, self.context.size / 1000))
        ) is None:
            self._raise_if_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} of the save has not arrived after {TIMEOUT:g} s")
        return text

    def _raise_if_failed(self) -> None:
        if self.context.size > 1:
            membership.joined().check_generation()
            if (failure := membership.joined().announced(self._key("failed"))) is not None:
                raise PeerFailed(failure)

    def _key(self, name: str) -> str:
        return f"save/{self.turn}/{name}"


def reason_of(error: BaseException) -> str:
    """Return why a save has failed, in one line."""
    member = membership.current()
    if member is not None and member.ended is not None:
        return member.ended  # a process was lost, and others go on
    text = one_line(error) or type(error).__name__
    return "no space left on the device" if "No space left" in text else text[:300]


Say = Callable[[str], None]


@dataclasses.dataclass
class Checkpoints:
    """The checkpoints of one run directory, shared by all processes, which must make the same
    calls.

    keep: the number of last checkpoints to keep; keep_every: also keep multiples of this step;
    return_every: also keep the last multiple of this step; best: also keep the best one by this
    metric of the evaluation, of which `mode` is best ('min', 'max'; None: see `sign`).
    context: the processes, by default the current ones. facts: JSON to store with every state.
    `events`: a log of the saves. `trusted`: the last update at which no device was found wrong,
    so that the last checkpoint up to it is kept too; None: the devices are not compared.
    """

    directory: pathlib.Path
    keep: int = 3
    _: dataclasses.KW_ONLY
    keep_every: int | None = None
    return_every: int | None = None
    best: str | None = None
    mode: str | None = None
    context: Context = dataclasses.field(default_factory=current)
    facts: Meta = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # `directory` may be a link to another disk
        self.run_directory = self.directory.absolute().parent
        self.directory = pathlib.Path(os.path.realpath(self.directory))
        # of the metric, to look for the smallest
        self.sign = sign(str(self.best), self.mode)
        # whether this process makes and removes the folders of checkpoints
        self.writes = self.context.is_root
        # the last step whose save was started, or that is known to exist
        self.last: int | None = None
        self.trusted: int | None = None
        # the last step that was saved before, if its updates are made again
        self.repeated = 0
        self.events = NoEvents()
        self._failure: str | None = None  # why the last save has failed
        self._thread: threading.Thread | None = None
        self._copies: Any = None
        self._sample: tuple[str, np.ndarray] | None = None  # of a save that will be read back
        self._reads_back = True  # until a first save was right
        self._lock = threading.Lock()
        self._notes = dict[int, dict[str, Any]]()
        silence_orbax()

    def attach(self, nonce: str) -> str | None:
        """Return why this process cannot use the run directory in which root has written `nonce`,
        or None.
        """
        return rundir.is_shared(self.run_directory, nonce)

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, in order; only `latest` verifies the files."""
        return folders.complete(self.directory)

    def meta(self, step: int) -> dict[str, Any]:
        """Return the metadata that was saved with the state at `step`. Raises Damaged."""
        return manifest.read(self.directory / str(step))["meta"]

    def best_step(self) -> int | None:
        """Return the step with the best evaluation by `best`, the earliest of equals, or None."""
        values = self._values()
        return min(values, key=lambda step: (values[step] * self.sign, step)) if values else None

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return True if an evaluation is better than those of all checkpoints."""
        if self.best is None or not math.isfinite(metrics.get(self.best, math.nan)):
            return False
        value = metrics[self.best] * self.sign
        return self.context.of_root(
            "best", lambda: all(value < other * self.sign for other in self._values().values())
        )

    def metas(self) -> dict[int, dict[str, Any]]:
        """Return {step: metadata} of all checkpoints that are not damaged, durable yet or not."""
        with self._lock:
            metas = dict(self._notes)
            for step in self.steps():
                with contextlib.suppress(Damaged):
                    metas[step] = self.meta(step)
        return metas

    def _values(self) -> dict[int, float]:
        """Return {step: the metric named by `best`} of all checkpoints that have it, durable yet or
        not.
        """
        values = dict[int, float]()
        for step, meta in self.metas().items():
            value = meta.get("metrics", {}).get(self.best)
            if isinstance(value, int | float) and math.isfinite(value):
                values[step] = value
        return values

    def annotate(self, step: int, more: Meta) -> None:
        """Add metadata to the checkpoint of `step`, durable yet or not; do nothing if there is
        none.
        """
        if step != self.last or self._failure is not None or not self.writes:
            return
        folder = self.directory / str(step)
        with self._lock:
            if (folder / manifest.NAME).is_file():
                with contextlib.suppress(OSError, Damaged):  # then the old manifest remains
                    content = manifest.read(folder)
                    if any(content["meta"].get(name) != value for name, value in more.items()):
                        manifest.write(folder, content["files"], {**content["meta"], **more})
            else:
                self._notes[step] = dict(more)
                return
        self._prune(step)  # the best step may have changed

    def save(self, step: int, state: TrainState, meta: Meta, say: Say = print) -> None:
        """Start to save an exported state; return once it is copied, so that the state may be
        donated.

        Waits first for a save that is still running. meta: JSON to store with the state. say:
        called on root with a line when the checkpoint is durable or has failed. `wait` returns the
        result."""
        self.wait()
        if step == self.last and self._failure is None:
            return
        self.last = step
        self._failure = None
        self._began = time.monotonic()
        self._commit = Commit(self.context)
        if self.writes:
            folders.clean(self.directory)
        # Orbax would remove an existing one before it writes.
        if step <= self.repeated and self.context.of_root(
            "exists", lambda: folders.has(self.directory, step, meta.get("offset"))
        ):
            self.annotate(step, meta)
            return
        tree: dict[str, Any] = all_fields_of(state)
        meta = {"step": step, **self.facts, **meta, "state": leaves_of(tree)}
        if self._reads_back and self.writes:
            self._sample = sample(tree)
        if not is_plain(tree):
            meta["numbered"] = [*meta["state"]]
            tree = by_number(tree, meta["numbered"])
        try:
            response = self._start(
                folders.temporary(self.directory, step, self._commit.attempt), tree
            )
        except (OSError, ValueError, TimeoutError) as error:
            self._give_up(step, error, say)
            return
        self._thread = threading.Thread(
            None, self._finish, "checkpoint", (step, response, meta, say), daemon=True
        )
        self._thread.start()

    def _start(self, folder: pathlib.Path, tree: dict[str, Any]) -> Any:
        """Start to write the state into a folder; return Orbax's response, or None if this process
        writes nothing.
        """
        if (
            jax.default_backend() == "cpu"
        ):  # Orbax would read the buffers in place, so the next update would copy them
            old_copies = self._copies if leaves_of(self._copies) == leaves_of(tree) else None
            self._copies = tree = copy(old_copies, tree)
        prepare(self.context)
        return save(folder, tree)

    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the save that is running; return why the last one has failed, or None."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.2)  # in pieces: signals are handled in between
        self._thread = None
        return self._failure

    def latest(
        self,
        say: Say = print,
        tidy: bool = True,
        refused: Iterable[int] = (),
        only: int | None = None,
    ) -> int:
        """Return the last complete step, after verifying every byte, or 0. All processes share the
        reading.

        Damaged and unfinished checkpoints are renamed, which `say` reports on root; not if tidy is
        false, since the directory may belong to another run. refused: steps that do not count.
        only: the single step that counts. Raises UsageError if files cannot be read.
        """
        context = self.context
        refused = set(refused)
        if self.writes and tidy:
            self._set_unfinished_aside(say)
        while True:
            step, problem = context.of_root(
                "checkpoint", lambda: folders.newest(self.directory, refused, only)[::2], TIMEOUT
            )
            if not step:
                self.last = None
                return 0
            if not problem:
                rank = context.rank
                size = context.size
                wait = 0.0 if context.is_root else 10.0
                local = manifest.problem(self.directory / str(step), rank, size, wait)
                problem = next(
                    filter(None, context.exchange("checked", local, timeout=TIMEOUT)), ""
                )
            if problem.startswith("cannot read"):
                raise UsageError(f"run_dir: {problem}; fix that first", rank=context.root_rank)
            if not problem:
                self.last = step
                return step
            refused.add(step)
            if context.is_root:
                self.set_aside(
                    step,
                    "damaged" if tidy else None,
                    f"checkpoint {step} is damaged: {problem}",
                    say,
                )

    def restore(self, step: int, abstract: TrainState, say: Say = print) -> TrainState:
        """Restore the state saved at `step`, with the shardings of `abstract`. Raises UsageError if
        leaves differ.

        Exponents of integer sums may be missing: the next update determines them. So may the average
        of the model state, which then starts from the model state.
        """
        saved = self.check_fits(step, abstract)
        numbered = self.context.of_root("numbered", lambda: self.meta(step).get("numbered"))
        fields = all_fields_of(abstract)
        exponents = abstract.extra.get("exponents")
        lacks = "ema_state" in abstract.extra and not any(
            path.startswith("ema_state") for path in saved
        )
        if lacks:
            fields.pop("ema_state")
        fields.pop("exponents", None)
        if "exponents" in saved:
            dtype, shape = saved["exponents"]
            fields["exponents"] = jax.ShapeDtypeStruct(
                shape, dtype, sharding=abstract.step.sharding
            )
        folder = self.directory / str(step)
        if numbered:
            leaves = by_path(load(folder, by_number(fields, numbered)), {"numbered": numbered})
            state = jax.tree_util.tree_map_with_path(
                lambda path, _: leaves[path_string(path)], fields
            )
        else:
            state = load(folder, fields)
        if (
            exponents is not None
            and getattr(state.get("exponents"), "shape", None) != exponents.shape
        ):
            zeros = np.zeros(exponents.shape, exponents.dtype)
            state["exponents"] = jax.make_array_from_callback(
                exponents.shape, exponents.sharding, zeros.__getitem__
            )
            if self.context.is_root:
                say(
                    f"checkpoint {step} has no exponents for integer sums: the next update is computed twice"
                )
        if lacks:
            state["ema_state"] = first_statistics(state["model_state"])
            if self.context.is_root:
                say(
                    f"checkpoint {step} has no running average of the model state: it starts from the model state"
                )
        return state_of(state, abstract)

    def check_fits(self, step: int, abstract: TrainState) -> dict[str, Any]:
        """Return {path: [dtype, shape]} of the state saved at `step`. Raises UsageError if
        `abstract` differs.
        """
        saved = self.context.of_root("state", lambda: self.meta(step)["state"])
        ours = {
            path: leaf
            for path, leaf in leaves_of(all_fields_of(abstract)).items()
            if path in saved or not path.startswith(ADDED)
        }
        check_same_leaves(step, saved, ours, self.context.root_rank)
        return saved

    def _finish(self, step: int, response: Any, meta: Meta, say: Say) -> None:
        """Wait in a thread for Orbax and write the manifest; on failure, tell all processes."""
        try:
            self._commit.wait_for(response)
            if self.writes:
                folders.publish(self.directory, step, self._commit.attempt)
            if self._sample is not None:
                read_back(self.directory / str(step), meta, self._sample)
                self._sample = None
                self._reads_back = False
            files = self._digests(self.directory / str(step))
            if self.writes:
                with self._lock:
                    manifest.write(
                        self.directory / str(step), files, {**meta, **self._notes.get(step, {})}
                    )
                    self._notes.pop(step, None)
                self._prune(step)
            self._commit.wait_for_all("durable")
            with contextlib.suppress(
                Exception
            ):  # standard output may be closed; the checkpoint is saved
                if self.context.is_root:
                    self.events.note(
                        "saved", step, seconds=round(time.monotonic() - self._began, 3)
                    )
                    say(f"saved step {step}")
        except PeerFailed as failure:
            self._failed(step, str(failure), say)
        except (
            BaseException
        ) as error:  # on any error the run continues, and the next save tries again
            self._give_up(step, error, say)

    def _digests(self, folder: pathlib.Path) -> manifest.Files:
        """Return on a writer the sizes and checksums of the files, once all processes have written
        theirs.
        """
        return self._commit.digests(folder)

    def _give_up(self, step: int, error: BaseException, say: Say) -> None:
        """Record that this process cannot save, and tell the others."""
        reason = reason_of(error)
        with contextlib.suppress(Exception):
            self._commit.report_failure(reason)
        self._failed(step, reason, say)

    def _failed(self, step: int, reason: str, say: Say) -> None:
        self._failure = f"checkpoint {step} could not be saved: {reason}"
        with self._lock:
            self._notes.pop(step, None)
        member = membership.current()
        if self.writes and (
            member is None or member.ended is None
        ):  # else others may be writing this step
            folders.clean(self.directory, step)
        if self.context.is_root:
            self.events.note("save_failed", step, reason=reason)
            earlier = (
                f"the last one is {steps[-1]}" if (steps := self.steps()) else "there is none yet"
            )
            say(f"{self._failure}; {earlier}, and the next save tries again")

    def _prune(self, saved: int) -> None:
        """Remove checkpoints that need not be kept; ignore steps after `saved`, from which no run
        resumes.
        """
        steps = [step for step in self.steps() if step <= saved]
        retained = steps[-self.keep :]
        if self.keep_every:
            retained += [step for step in steps if step % self.keep_every == 0]
        if self.return_every:
            retained += [step for step in steps if step % self.return_every == 0][-1:]
        if self.trusted:
            retained += [step for step in steps if step <= self.trusted][-1:]
        if self.best is not None:
            retained.append(self.best_step() or 0)
        folders.remove(self.directory, {*steps} - {*retained})

    def remove(self, steps: Iterable[int]) -> None:
        if self.writes:
            folders.remove(self.directory, steps)

    def _set_unfinished_aside(self, say: Say) -> None:
        with contextlib.suppress(OSError):
            folders.clean(self.directory)
        for step in folders.unfinished(self.directory):
            self.set_aside(
                step, "unfinished", f"checkpoint {step} was not finished: no {manifest.NAME}", say
            )

    def set_aside(self, step: int, word: str | None, why: str, say: Say) -> None:
        self.events.note("checkpoint_refused", step, reason=why)
        if word is None:
            return say(f"{why}; it is not used")
        try:
            say(f"{why}; set aside as {folders.set_aside(self.directory, step, word).name}")
        except OSError as error:
            say(f"{why}; it is not used (and cannot be renamed: {error.strerror})")


def choose_step(directory: pathlib.Path, wanted: str | None, field: str = "--step") -> int:
    """Return the step of a run directory's checkpoint that is wanted: its number, "best" by the
    metric `checkpoint.best` of the run, or "last", the default.

    field: the name of the user's setting. Raises UsageError if there is no such checkpoint.
    """
    saved = Checkpoints(directory / "checkpoints")
    steps = saved.steps()
    if not steps:
        raise UsageError(
            f"--run_dir: {str(directory)!r}: {'no checkpoint in it' if directory.is_dir() else 'no such directory'}; "
            "train first, or name another"
        )
    if wanted == "best":
        kept = saved.meta(steps[-1])["config"]["checkpoint"]
        saved = Checkpoints(saved.directory, best=kept["best"], mode=kept["mode"])
        if not saved.sign or (step := saved.best_step()) is None:
            raise UsageError(
                f"{field}: best, but no checkpoint in {str(directory)!r} is known to be it by checkpoint.best: "
                f"{saved.best}; train with --checkpoint.best METRIC, --checkpoint.mode and --eval.every, or use last"
            )
        return step
    texts = {str(step): step for step in steps} | {"last": steps[-1]}
    if (step := texts.get(wanted or "last")) is None:
        raise UsageError(
            f"{field}: {wanted} is not in {str(directory)!r}; use one of {', '.join(texts)}, best"
        )
    return step
