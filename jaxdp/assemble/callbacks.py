"""The callbacks of a config or a script."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.targets import bind, call, locate, require, targets_in
from jaxdp.training.callbacks import POINTS, Callbacks, EarlyStopping

CALLBACKS: dict[str, Any] = {"EarlyStopping": EarlyStopping}
KEY = "callbacks"


def make_callbacks(entries: Sequence[Any], scripted: Mapping[str, Any], context: Context) -> Callbacks:
    """Build the callbacks of a run.

    Args:
        scripted: {name: object} from a script; an entry with such a name refers to the object.

    Raises:
        UsageError: an unknown name, a wrong argument, or an object without a method of `POINTS`.
    """
    callbacks = []
    for target, args in targets_in(KEY, entries, "callback", "EarlyStopping"):
        callback = locate(KEY, target, {**CALLBACKS, **scripted})
        if isinstance(callback, type) or (callable(callback) and target not in scripted):
            bound = bind(KEY, callback, args)
            require(KEY, bound)
            callback = call(KEY, bound)
        elif args:
            raise UsageError(f"{KEY}: {target!r} is an object and takes no args; leave them out")
        if not any(hasattr(callback, point) for point in POINTS):
            raise UsageError(f"{KEY}: {target!r} has none of the methods {', '.join(POINTS)}")
        callbacks.append(callback)
    return Callbacks(callbacks, context)
