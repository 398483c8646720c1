"""Fields of the config, marked by what they decide."""

import copy
import dataclasses
from typing import Any


def _field(decides: str, default: Any) -> Any:
    if isinstance(default, list | dict) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata={"decides": decides})
    return dataclasses.field(default=default, metadata={"decides": decides})


def numbers(default: Any) -> Any:
    """Create a field that changes the numbers of a run."""
    return _field("numbers", default)


def speed(default: Any) -> Any:
    """Create a field that changes only speed, memory or output."""
    return _field("speed", default)
