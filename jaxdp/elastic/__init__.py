"""Elastic training: a job continues when processes are lost, and when others join (docs/elastic.md).

`jaxdp.elastic.run` is for training loops of your own, and `Options` for the job that they run in.
"""

import importlib
from typing import Any

# They load on first use: the coordinator imports this folder, and needs no training.
_HOME = {
    "run": ("jaxdp.elastic.own_loop", "run"),
    "Options": ("jaxdp.elastic.regroup", "Options"),
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, attribute = _HOME[name]
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'jaxdp.elastic' has no attribute {name!r}")
