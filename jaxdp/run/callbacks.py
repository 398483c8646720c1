"""User callbacks: observers that a config or a script names, called on every rank, outside `jax.jit`.

A callback has some of the methods of `jaxdp.Observer`. The names of version 0.1 still work:

    on_start(run)               start(run, progress)
    on_update(step, metrics)    after(updates, state, metrics)
    on_eval(step, metrics)      evaluated(step, record)
    on_save(step, path)         saved(step, path)
    on_end(record)              finished(record)

`StopTraining`, raised by any rank in `evaluated`, ends training after this evaluation; raised in
`wants`, as soon as all ranks can stop after the same update. A callback with `state_dict()` (JSON)
and `load_state_dict(state)` resumes with the state of the checkpoint.

`Profile` traces a window of updates for TensorBoard or Perfetto, planned or on request.
"""

import dataclasses
import difflib
import inspect
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxdp.errors import RunFailed, UsageError, cause, check_sizes, one_line, suggest
from jaxdp.metrics import safe_print
from jaxdp.metrics.numbers import known_sign
from jaxdp.process.context import Context
from jaxdp.targets import bind, call, locate, require, targets_in
from jaxdp.train.observer import WANTS, Observer
from jaxdp.train.run import Progress, Run
from jaxdp.train.state import Batch


@dataclasses.dataclass
class Profile(Observer):
    """A trace of `steps` updates after update `first`, into `directory`; with first None, nothing
    until `ask`.
    """

    directory: str = ""
    first: int | None = None
    steps: int = 5
    requested: bool = False
    running: bool = False
    ends: Collection[int] = ()

    def ask(self) -> None:
        """Request a trace of the next `steps` updates; safe from any thread."""
        self.requested = True

    def before(self, updates: range, batch: Batch) -> None:
        """Start a trace that is due before these updates."""
        if self.requested and not self.running:
            self.requested = False
            self.first = updates[0] - 1
        if self.first is not None and updates[0] == self.first + 1:
            try:
                # JAX would say only after the trace that it cannot.
                os.makedirs(self.directory, exist_ok=True)
                jax.profiler.start_trace(self.directory)
                self.running = True
            except (OSError, RuntimeError) as error:
                report(error)

    def wants(self, step: int) -> Collection[str]:
        if self.running and self.first is not None and step >= self.first + self.steps:
            return ("pause",)
        return ()

    def pause(self, step: int, last: bool) -> None:
        """End a trace that is due."""
        if self.wants(step):
            self.stop()

    def stop(self) -> None:
        """End the trace that is running, if any."""
        if self.running:
            self.running = False
            try:
                jax.profiler.stop_trace()
            except RuntimeError as error:
                report(error)


def folder(directory: pathlib.Path) -> pathlib.Path:
    """Return the folder of this process's traces in a run directory; the processes of one host
    would share names.
    """
    return (
        directory / "profile" / (f"rank_{jax.process_index()}" if jax.process_count() > 1 else "")
    )


def report(error: Exception) -> None:
    safe_print.say(
        f"jaxdp: profile: no trace is written, and the run continues: {one_line(error)}", error=True
    )


KEY = "callbacks"
POINTS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Observer).items()
    if inspect.isfunction(method)
}
"""The methods of a callback, each with the arguments that it is called with."""

OLD = {
    "on_start": ("start", ("run",)),
    "on_update": ("after", ("step", "metrics")),
    "on_eval": ("evaluated", ("step", "metrics")),
    "on_save": ("saved", ("step", "path")),
    "on_end": ("finished", ("record",)),
}
"""The names of version 0.1: the new one, and the arguments of the old one."""


class StopTraining(Exception):
    """Raised in `evaluated` or `wants`, on any rank, to end training early; the message is the
    reason."""


@dataclasses.dataclass
class Callbacks:
    """A list of callbacks.

    entries: [target, args] of each, to find its state in a checkpoint.
    """

    callbacks: Sequence[Any] = ()
    context: Context = Context()
    entries: Sequence[Any] = ()

    def __post_init__(self) -> None:
        entries = self.entries or [[type(c).__qualname__, {}] for c in self.callbacks]
        self.entries = json.loads(json.dumps(entries, default=str))
        self.reasons: list[str] = []  # of this rank, to end training after the last evaluation
        self.observers = [Callback(callback, self.reasons) for callback in self.callbacks]

    def change_step(self, run: Run, progress: Progress) -> Run:
        """Return the run with the step that the callbacks make of its step, one after another."""
        for callback in self.observers:
            run = dataclasses.replace(run, step=callback.change_step(run, progress))
        return run

    def start(self, run: Run) -> None:
        """Report the old names, and call `on_start`, once before the first update of this start."""
        names = {name for callback in self.callbacks for name in methods_of(callback)}
        old = {name: OLD[name][0] for name in OLD if name in names}
        if old and self.context.is_root:
            new = [f"{name}({', '.join(POINTS[name])})" for name in old.values()]
            safe_print.say(f"{KEY}: {', '.join(old)} still works; the new name is {', '.join(new)}")
        for observer in self.observers:
            observer.on_start(run)

    def state(self) -> dict[str, Any]:
        """Return {'callback_states': [[entry, a copy of `state_dict()`], ...]}, which is saved with
        checkpoints.

        Raises UsageError, with the name of the callback, if a state cannot be stored as JSON.
        """
        states = []
        for entry, callback in zip(self.entries, self.callbacks):
            if not hasattr(callback, "state_dict"):
                continue
            try:  # a copy, since the save thread reads it while the next updates run
                states.append([entry, json.loads(json.dumps(callback.state_dict()))])
            except Exception as error:
                raise UsageError(
                    f"{KEY}: {entry[0]}.state_dict failed: {type(error).__name__}: {one_line(error)}; return numbers, "
                    "texts, lists and dicts"
                ) from error
        return {"callback_states": states} if states else {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore each callback from the state of an equal entry in the metadata of a checkpoint;
        print what is not.
        """
        states = [*saved.get("callback_states", [])]
        unnamed = saved.get("callbacks", [])
        if len(unnamed) == len(self.callbacks):  # of an older version, which has no entries
            states += [
                [entry, state] for entry, state in zip(self.entries, unnamed) if state is not None
            ]
        for entry, callback in zip(self.entries, self.callbacks):
            pair = next((pair for pair in states if pair[0] == entry), None)
            if pair is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(pair[1])
                states.remove(pair)
        for (target, args), _ in states if self.context.is_root else ():
            safe_print.say(
                f"{KEY}: the state of {target} {args} is not restored: no such callback loads it"
            )


def methods_of(callback: Any) -> dict[str, tuple[str, ...]]:
    """Return the methods of a callback that are called, each with its arguments.

    A class with old names, if it is no Observer, may use the new ones for something else.
    """
    old = {name: arguments for name, (_, arguments) in OLD.items() if hasattr(callback, name)}
    if old and not isinstance(callback, Observer):
        return old
    has = (name for name in POINTS if callable(getattr(callback, name, None)))
    return {name: POINTS[name] for name in has}


class Callback(Observer):
    """A callback of a user as an observer, which has the methods that the callback has.

    An error in one of them becomes RunFailed, and names it. reasons: where StopTraining goes.
    """

    def __init__(self, callback: Any, reasons: list[str]):
        self.name = type(callback).__qualname__
        self.ends = getattr(callback, "ends", ())
        self.reasons = reasons
        for name in methods_of(callback):
            point = OLD[name][0] if name in OLD and name != "on_start" else name
            method = getattr(callback, name)
            if getattr(method, "__func__", None) is not getattr(Observer, point, None):
                if name == "on_update":
                    method = for_each_update(method)
                elif name == "wants":
                    method = checked_wants(method)
                setattr(self, point, self._named(method, f"{self.name}.{name}", callback))

    def on_start(self, run: Run) -> None:
        """Unlike `start`, this is not called again after a rollback."""

    def _named(self, method: Callable[..., Any], name: str, callback: Any) -> Callable[..., Any]:
        def call(*args):
            try:
                return method(*args)
            except Exception as error:
                if isinstance(error, StopTraining) and name.endswith(
                    (".evaluated", ".on_eval", ".wants")
                ):
                    self.reasons.append(str(error) or "a callback")
                    return {"finish"}  # of `wants`
                raise RunFailed(
                    f"{KEY}: {type(callback).__module__}.{name} failed{cause(error)}"
                ) from error

        return call


def for_each_update(method: Callable[[int, Mapping[str, jax.Array]], None]) -> Callable[..., None]:
    """Return an `after` that calls `method` for each update, with its own metrics []."""

    def after(updates, state, metrics):
        for i, step in enumerate(updates):
            one = metrics if len(updates) == 1 else {k: x[i] for k, x in metrics.items()}
            method(step, one)

    return after


def checked_wants(method: Callable[[int], Any]) -> Callable[[int], Collection[str]]:
    """Return a `wants` that raises ValueError for anything but a collection of the words in WANTS."""

    def wants(step):
        words = method(step)
        if isinstance(words, str) or not isinstance(words, Collection) or not set(words) <= WANTS:
            raise ValueError(
                f"it returned {words!r}; return a collection, such as a set, of any of "
                f"{', '.join(sorted(WANTS))}"
            )
        return words

    return wants


class EarlyStopping:
    """End training when a metric of the evaluation has not improved for `patience` evaluations.

    Args:
        metric: its name.
        patience: the number of evaluations.
        mode: 'min' or 'max'; None: by its name, as `checkpoint.mode`.
        min_delta: the least improvement that counts.

    A value that is not finite, or missing because no example counts for the metric, is no
    improvement."""

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 3,
        mode: str | None = None,
        min_delta: float = 0.0,
    ):
        check_sizes(f"{KEY}.args", patience=patience)
        if mode not in (None, "min", "max"):
            raise UsageError(f"{KEY}.args.mode: {mode!r} is not min, max or null")
        if not 0 <= min_delta < math.inf:
            raise UsageError(
                f"{KEY}.args.min_delta: {min_delta!r} is not a finite number of at least 0"
            )
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.sign = -known_sign(f"{KEY}.args.metric", metric, mode)
        self.best, self.best_step, self.waited = -sys.float_info.max, 0, 0  # finite, to be JSON
        self.measure = {"metric": metric, "mode": "min" if self.sign < 0 else "max"}  # of `best`

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics and not self.best_step:
            raise KeyError(f"{self.metric!r} is not among {sorted(metrics)}")
        value = metrics.get(self.metric, math.nan)
        if math.isfinite(value) and self.sign * value > self.best + self.min_delta:
            self.best = self.sign * value
            self.best_step = step
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            text = "was never finite"
            if self.best_step:
                text = f"has not improved since step {self.best_step}"
            if not math.isfinite(value):
                text += f" (it is {value} at step {step})"
            raise StopTraining(f"{self.metric} {text}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, state[name])


CALLBACKS: dict[str, Any] = {
    "EarlyStopping": EarlyStopping,
    "TimeLimit": "jaxdp.observers.time_limit.TimeLimit",
}


def make_callbacks(
    entries: Sequence[Any], scripted: Mapping[str, Any], context: Context
) -> Callbacks:
    """Build the callbacks of a run.

    Args:
        scripted: {name: object} from a script; an entry with such a name refers to the object.

    Raises:
        UsageError: an unknown name, a wrong argument, or an object that `check_methods` refuses.
    """
    callbacks, named = [], []
    for target, args in targets_in(KEY, entries, "callback", "EarlyStopping"):
        callback = locate(KEY, target, {**CALLBACKS, **scripted})
        if isinstance(callback, type) or (callable(callback) and target not in scripted):
            bound = bind(KEY, callback, args)
            require(KEY, bound)
            callback = call(KEY, bound)
        elif args:
            raise UsageError(f"{KEY}: {target!r} is an object and takes no args; leave them out")
        check_methods(target, callback)
        callbacks.append(callback)
        named.append(
            [
                type(callback).__qualname__ if target in scripted else target,
                callback.measure if isinstance(callback, EarlyStopping) else args,
            ]
        )
    return Callbacks(callbacks, context, named)


def check_methods(name: str, callback: Any) -> None:
    """Raise UsageError unless a callback has methods of `POINTS` or `OLD` that accept their
    arguments, and no other method `on_...`.
    """
    known = methods_of(callback)
    others = (name for name in dir(callback) if name.startswith("on_") and name not in known)
    if unknown := [name for name in others if callable(getattr(callback, name))]:
        hint = suggest(unknown[0], POINTS, 0.5, f"the methods are {', '.join(POINTS)}")
        raise UsageError(
            f"{KEY}: {name!r} has a method {unknown[0]!r}, which is never called; {hint}"
        )
    for method, arguments in known.items():
        try:
            inspect.signature(getattr(callback, method)).bind(*arguments)
        except TypeError as error:
            gets = ", ".join(arguments)
            raise UsageError(
                f"{KEY}: {name!r}: {method} is called with ({gets}), but {one_line(error)}"
            ) from None
    if isinstance(callback, Observer):
        own = [x for x in dir(callback) if not hasattr(Observer, x) and not x.startswith("_")]
        for method in own:
            meant = difflib.get_close_matches(method, POINTS, 1, 0.75)
            if meant and callable(getattr(callback, method)):
                raise UsageError(
                    f"{KEY}: {name!r} has a method {method!r}, which is never called; did you mean "
                    f"{meant[0]!r}?"
                )
        if all(getattr(type(callback), x) is getattr(Observer, x) for x in POINTS):
            known = {}
    if not known:
        raise UsageError(f"{KEY}: {name!r} has none of the methods {', '.join(POINTS)}")
