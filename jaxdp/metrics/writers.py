"""The writers of `log.writers`, in addition to the console and metrics.jsonl: built-in, or any class
by its path. Each writes in the background: if it fails or hangs, training continues without it
after one warning.

TensorBoard has one tag per number, such as train/loss and eval/loss; Weights & Biases has one W&B run per
run directory, resumed with it.
"""

import pathlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdp.errors import UsageError, import_optional, one_line
from jaxdp.metrics import safe_print
from jaxdp.metrics.writer import Record, Writer
from jaxdp.targets import bind, locate, require, targets_in


class TensorBoard(Writer):
    """A writer of TensorBoard event files.

    directory: the run directory; start: the update that the run resumes after (later points are
    purged); folder: a subfolder of the directory; flush_secs: seconds between writes. Raises
    UsageError if tensorboardX is not installed."""

    def __init__(
        self,
        directory: pathlib.Path,
        start: int = 0,
        folder: str = "tensorboard",
        flush_secs: float = 10,
    ):
        library = import_optional("tensorboardX", "log.writers: TensorBoard", "tensorboard")
        self.make = lambda purge: library.SummaryWriter(
            str(directory / folder), purge_step=purge, flush_secs=flush_secs, write_to_disk=True
        )
        self.writer = self.make(start + 1 if start else None)

    def write(self, record: Record) -> None:
        step = record["step"]
        split = record["split"]
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "time"):
                self.writer.add_scalar(f"{split}/{name}", value, step)

    def rewind(self, step: int) -> None:
        self.writer.close()
        self.writer = self.make(step + 1)

    def close(self) -> None:
        self.writer.close()


class WandB(Writer):
    """A writer that logs to Weights & Biases; mode: offline works without a network, for a later
    `wandb sync`.

    directory: the run directory, which stores the W&B run's id in wandb_id; config: the config to
    show; project, name, mode and others: as in `wandb.init`. Raises UsageError if wandb is not
    installed."""

    def __init__(
        self,
        directory: pathlib.Path,
        config: Mapping[str, Any] | None = None,
        project: str = "jaxdp",
        name: str | None = None,
        mode: str | None = None,
        **others: Any,
    ):
        wandb = import_optional("wandb", "log.writers: WandB", "wandb")
        file = directory / "wandb_id"
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if wandb.run is not None:  # of the script: `init` would return it
            others.setdefault("reinit", "create_new")
        self.run = wandb.init(
            project=project,
            name=name or directory.name,
            dir=str(directory),
            config=dict(config or {}),
            id=known
            or secrets.token_hex(4),  # else that of WANDB_RUN_ID, which may be another run's
            resume="allow",
            mode=mode,
            **others,
        )
        file.write_text(f"{self.run.id}\n", encoding="utf-8")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # W&B's step cannot decrease, but ours can

    def write(self, record: Record) -> None:
        numbers = {
            f"{record['split']}/{k}": v
            for k, v in record.items()
            if isinstance(v, int | float) and k != "step"
        }
        self.run.log({"step": record["step"], **numbers})
        if record["split"] == "final":
            self.run.summary.update({k: v for k, v in record.items() if k not in ("step", "split")})

    def close(self) -> None:
        self.run.finish()


START = 10.0  # seconds that training waits for a writer to start
LONGEST_CALL = 30.0  # seconds that one call may take at the end of the run
WAITING = 10_000  # the capacity of the call queue


class BackgroundWriter(Writer):
    """A writer that makes another writer and forwards calls to it in a separate thread, until that
    raises or hangs.

    If `make` takes longer than START seconds, calls wait in the queue. Raises the UsageError of
    `make`."""

    def __init__(self, name: str, make: Callable[[], Writer]):
        self.name = name
        self.failed = False
        self.calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(WAITING)
        self.began = time.monotonic()  # the start of the current call
        self.refused: UsageError | None = None
        ready = threading.Event()
        self.thread = threading.Thread(
            target=self._work, args=(make, ready), name=f"writer {name}", daemon=True
        )
        self.thread.start()
        if not ready.wait(START):
            self._warn(
                f"is not ready after {START:g} s; training continues, and records are queued for it"
            )
        if self.refused is not None:
            raise self.refused

    def write(self, record: Record) -> None:
        self._enqueue("write", dict(record))

    def say(self, text: str) -> None:
        self._enqueue("say", text)

    def rewind(self, step: int) -> None:
        self._enqueue("rewind", step)

    def close(self) -> None:
        """Wait for the queued calls, as long as no call takes LONGEST_CALL seconds."""
        self._enqueue("close")
        while self.thread.is_alive() and not self.failed:
            remaining = self.began + LONGEST_CALL - time.monotonic()
            if remaining <= 0:
                self._abandon(f"did not answer for {LONGEST_CALL:g} s")
            self.thread.join(min(max(remaining, 0.0), 1.0))

    def _enqueue(self, method: str, *args: Any) -> None:
        if not self.failed:
            try:
                self.calls.put_nowait((method, args))
            except queue.Full:
                self._abandon(f"has {WAITING:,} queued records and accepts none")

    def _work(self, make: Callable[[], Writer], ready: threading.Event) -> None:
        method = ""
        try:
            writer = make()
            ready.set()
            while method != "close" and not self.failed:
                method, args = self.calls.get()
                self.began = time.monotonic()
                getattr(writer, method)(*args)
        except BaseException as error:
            if isinstance(error, UsageError) and not ready.is_set():
                self.refused = error
            else:
                self._abandon(f"failed ({type(error).__name__}: {one_line(error)})")
        finally:
            ready.set()

    def _abandon(self, reason: str) -> None:
        if not self.failed:
            self.failed = True
            self._warn(f"{reason}; training continues without it")

    def _warn(self, text: str) -> None:
        safe_print.say(f"jaxdp: warning: log.writers: {self.name} {text}", error=True)


WRITERS: dict[str, Any] = {"TensorBoard": TensorBoard, "WandB": WandB}
KEY = "log.writers"


def bound_writers(entries: Sequence[Any], available: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (target, function that makes the writer) of each. Raises UsageError if one is unknown,
    or does not accept its arguments."""
    writers = []
    for target, args in targets_in(KEY, entries, "writer", "TensorBoard"):
        make = bind(KEY, locate(KEY, target, WRITERS), args, available)
        require(KEY, make)
        writers.append((target, make))
    return writers


def check_writers(entries: Sequence[Any]) -> None:
    """Raise UsageError as `bound_writers` does; makes no writer."""
    bound_writers(entries, dict.fromkeys(("directory", "start", "config")))


def make_writers(
    entries: Sequence[Any], directory: pathlib.Path, start: int, config: Mapping[str, Any]
) -> list[Writer]:
    """Return the configured writers; a writer that fails or hangs, at the start or later, is
    dropped with a warning.

    If a writer's class or function declares directory (of the run), start (the update that the run
    resumes after) or config (a dict), jaxdp passes them in.
    """
    available = {"directory": directory, "start": start, "config": config}
    return [BackgroundWriter(target, make) for target, make in bound_writers(entries, available)]
