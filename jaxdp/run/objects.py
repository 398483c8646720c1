"""Names for the objects of a script, so that a config can contain them."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.targets import OBJECT, OF_SCRIPT, name_of


def name_it(objects: dict[str, dict[str, Any]], section: str, value: Any) -> dict[str, Any]:
    """Return the config section that names an object, and add the object to `objects`."""
    rest: dict[str, Any] = {}
    if isinstance(value, Mapping) and "target" in value:
        rest = {k: v for k, v in value.items() if k != "target"}
        value = value["target"]
    elif isinstance(value, Mapping) and section in ("model", "loss", "optimizer"):
        return dict(value)  # keys of the section; its target is the default
    if isinstance(value, str):
        return {"target": value, **rest}
    is_factory = isinstance(value, type) or inspect.isroutine(value)
    named = value if is_factory else type(value)
    name = f"{named.__module__}.{named.__qualname__}".removeprefix("builtins.")
    if section == "optimizer":
        if not hasattr(value, "update"):
            raise UsageError(
                f"optimizer: {name} is not an Optax transformation; give one, such as optax.adam(1e-3)"
            )
        for key in {"lr", "schedule", "warmup_steps", "schedule_steps", "final_lr"} & {*rest}:
            raise UsageError(
                f"optimizer.{key}: {rest[key]!r}, but an Optax transformation has its own learning rate; set it there"
            )
        name = f"{OF_SCRIPT} {name_of(value)}"
        transformation: Any = value

        def value(learning_rate):
            return transformation  # has its own

        value.__name__ = name
    elif not importable(named, value):
        name += OBJECT
    objects[section] = {name: value}
    return {"target": name, **rest}


def importable(named: Any, value: Any) -> bool:
    """Return True if another process can import the value by its dotted path."""
    target: Any = sys.modules.get(named.__module__) if named.__module__ != "__main__" else None
    for part in named.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is value
