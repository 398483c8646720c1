"""Built-in data sets by name: one file each, imported on first use."""

import importlib
from typing import Any

SOURCES = {
    "Balanced": "jaxdp.sampling.balanced.Balanced",
    "CIFAR10": "jaxdp.data.cifar10.CIFAR10",
    "Digits": "jaxdp.data.digits.Digits",
    "Documents": "jaxdp.data.packing.Documents",
    "FashionMNIST": "jaxdp.data.mnist.FashionMNIST",
    "HuggingFace": "jaxdp.data.hugging_face.HuggingFace",
    "ImageFolder": "jaxdp.data.image_folder.ImageFolder",
    "MNIST": "jaxdp.data.mnist.MNIST",
    "Mixture": "jaxdp.data.mixture.Mixture",
    "Npz": "jaxdp.data.npz.Npz",
    "PackedTokens": "jaxdp.data.packing.PackedTokens",
    "PennTreebank": "jaxdp.data.text.PennTreebank",
    "PythonSource": "jaxdp.data.text.PythonSource",
    "Stream": "jaxdp.data.stream.Stream",
    "Table": "jaxdp.tables.rows.Table",
    "TextFile": "jaxdp.data.text.TextFile",
    "TokenFile": "jaxdp.data.token_file.TokenFile",
}
__all__ = ["SOURCES", *SOURCES]


def __getattr__(name: str) -> Any:
    if name in SOURCES:
        module, _, attribute = SOURCES[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    raise AttributeError(f"module 'jaxdp.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
