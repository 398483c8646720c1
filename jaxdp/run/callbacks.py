"""User callbacks: objects that the loop calls at fixed points, on every rank, outside `jax.jit`.

    on_start(run)               before the first update
    on_update(step, metrics)    after update `step` was sent to the device; metrics: arrays on the device
    on_eval(step, metrics)      after an evaluation; metrics: floats, the same on every rank
    on_save(step, path)         when the checkpoint of update `step` has been started
    on_end(record)              after the final record

Each method is optional. `StopTraining`, raised by any rank in `on_eval`, ends training after this
evaluation. A callback with `state_dict()` (JSON) and `load_state_dict(state)` resumes with the
state of the checkpoint."""

import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxdp.errors import RunFailed, UsageError, check_sizes, one_line, suggest
from jaxdp.metrics import safe_print
from jaxdp.metrics.numbers import smaller_is_better
from jaxdp.process.context import SLOW, Context
from jaxdp.targets import bind, call, locate, require, targets_in

KEY = "callbacks"
POINTS = {
    "on_start": ("run",),
    "on_update": ("step", "metrics"),
    "on_eval": ("step", "metrics"),
    "on_save": ("step", "path"),
    "on_end": ("record",),
}
"""The methods of a callback, each with the arguments that it is called with."""


class StopTraining(Exception):
    """Raised in `on_eval` to end training early; the message is the reason."""


class Callbacks:
    """A list of callbacks. An error raised in one becomes RunFailed and names the callback.

    entries: [target, args] of each, to find its state in a checkpoint.
    """

    def __init__(
        self,
        callbacks: Sequence[Any] = (),
        context: Context | None = None,
        entries: Sequence[Any] = (),
    ):
        self.callbacks, self.context = callbacks, context or Context()
        self.entries = json.loads(
            json.dumps(entries or [[type(c).__qualname__, {}] for c in callbacks], default=str)
        )

    def call(self, point: str, *args: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, point, None)
            if method is None:
                continue
            try:
                method(*args)
            except Exception as error:
                if isinstance(error, StopTraining) and point == "on_eval":
                    raise
                name = f"{type(callback).__module__}.{type(callback).__qualname__}.{point}"
                raise RunFailed(
                    f"callbacks: {name} raised {type(error).__name__}: {error}"
                ) from error

    def on_update(self, updates: Sequence[int], metrics: Mapping[str, jax.Array]) -> None:
        """Call `on_update` for each update of a call; metrics: [] of one, [update] of several."""
        follows = any(hasattr(callback, "on_update") for callback in self.callbacks)
        for i, step in enumerate(updates if follows else ()):
            self.call(
                "on_update",
                step,
                metrics if len(updates) == 1 else {k: x[i] for k, x in metrics.items()},
            )

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Call `on_eval`; return the reason to end training, the same on all ranks, or None."""
        if not self.callbacks:
            return None
        reason: str | None = None
        try:
            self.call("on_eval", step, dict(metrics))
        except StopTraining as stop:
            reason = str(stop) or "a callback"
        reasons = self.context.exchange(
            f"stop at {step}", reason or "", SLOW
        )  # one rank may have more to do
        return next((reason for reason in reasons if reason), None)

    def state(self) -> dict[str, Any]:
        """Return {'callback_states': [[entry, a copy of `state_dict()`], ...]}, which is saved with
        checkpoints.

        Raises UsageError, with the name of the callback, if a state cannot be stored as JSON.
        """
        states = []
        for entry, c in zip(self.entries, self.callbacks):
            try:  # a copy, since the save thread reads it while the next updates run
                states += (
                    [[entry, json.loads(json.dumps(c.state_dict()))]]
                    if hasattr(c, "state_dict")
                    else []
                )
            except Exception as error:
                why = f"{type(error).__name__}: {one_line(error)}; return numbers, texts, lists and dicts"
                raise UsageError(f"{KEY}: {entry[0]}.state_dict failed: {why}") from error
        return {"callback_states": states} if states else {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore each callback from the state of an equal entry in the metadata of a checkpoint;
        print what is not.
        """
        states, unnamed = [*saved.get("callback_states", [])], saved.get("callbacks", [])
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


class EarlyStopping:
    """End training when a metric of the evaluation has not improved for `patience` evaluations.

    Args:
        metric: its name.
        patience: the number of evaluations.
        mode: 'min' or 'max'; None: 'min' if its name has loss, perplexity, error, entropy, mse or
            mae, else 'max'.
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
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = -1.0 if smaller_is_better(metric, mode) else 1.0
        self.best, self.best_step, self.waited = -sys.float_info.max, 0, 0  # finite, to be JSON
        self.measure = {"metric": metric, "mode": "min" if self.sign < 0 else "max"}  # of `best`

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics and not self.best_step:
            raise KeyError(f"{self.metric!r} is not among {sorted(metrics)}")
        value = metrics.get(self.metric, math.nan)
        if math.isfinite(value) and self.sign * value > self.best + self.min_delta:
            self.best, self.best_step, self.waited = self.sign * value, step, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            last = "" if math.isfinite(value) else f" (it is {value} at step {step})"
            since = (
                f"has not improved since step {self.best_step}"
                if self.best_step
                else "was never finite"
            )
            raise StopTraining(f"{self.metric} {since}{last}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.waited = (
            float(state["best"]),
            int(state["best_step"]),
            int(state["waited"]),
        )


CALLBACKS: dict[str, Any] = {"EarlyStopping": EarlyStopping}


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
        name = type(callback).__qualname__ if target in scripted else target
        named.append([name, callback.measure if isinstance(callback, EarlyStopping) else args])
    return Callbacks(callbacks, context, named)


def check_methods(name: str, callback: Any) -> None:
    """Raise UsageError unless the methods `on_...` of a callback are those of `POINTS` and accept
    their arguments.
    """
    methods = [method for method in dir(callback) if method.startswith("on_")]
    if unknown := [
        method for method in methods if method not in POINTS and callable(getattr(callback, method))
    ]:
        hint = suggest(unknown[0], POINTS, 0.5, f"the methods are {', '.join(POINTS)}")
        raise UsageError(
            f"{KEY}: {name!r} has a method {unknown[0]!r}, which is never called; {hint}"
        )
    for method in POINTS.keys() & {*methods}:
        try:
            inspect.signature(getattr(callback, method)).bind(*POINTS[method])
        except TypeError as error:
            gets = ", ".join(POINTS[method])
            raise UsageError(
                f"{KEY}: {name!r}: {method} is called with ({gets}), but {one_line(error)}"
            ) from None
    if not any(hasattr(callback, point) for point in POINTS):
        raise UsageError(f"{KEY}: {name!r} has none of the methods {', '.join(POINTS)}")
