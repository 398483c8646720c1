"""Data sets by name: each is one file, imported when it is first asked for, so that a name costs nothing."""

import importlib
from typing import Any

SOURCES = {
    "CIFAR10": "jaxdp.data.cifar10.CIFAR10",
    "Digits": "jaxdp.data.digits.Digits",
    "FashionMNIST": "jaxdp.data.mnist.FashionMNIST",
    "MNIST": "jaxdp.data.mnist.MNIST",
    "PythonSource": "jaxdp.data.python_source.PythonSource",
}
__all__ = ["SOURCES", *SOURCES]


def __getattr__(name: str) -> Any:
    if name in SOURCES:
        module, _, attribute = SOURCES[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'jaxdp.data' has no attribute {name!r}")
