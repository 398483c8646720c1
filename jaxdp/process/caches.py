"""Caches of meshes and programs, which are cleared when the devices are closed."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_caches: list[Any] = []


def cached(f: F) -> F:
    """Cache the results of a function, like `functools.cache`, until the devices are closed."""
    wrapped: Any = functools.cache(f)
    _caches.append(wrapped)
    return wrapped


def clear() -> None:
    for wrapped in _caches:
        wrapped.cache_clear()
