"""Built-in data sets by name: one file each, imported on first use."""

import pkgutil
from typing import Any

SOURCES = {
    path.rpartition(".")[2]: path
    for path in (
        "jaxdp.recipes.augmented.Augmented",
        "jaxdp.sampling.balanced.Balanced",
        "jaxdp.data.cifar10.CIFAR10",
        "jaxdp.data.digits.Digits",
        "jaxdp.data.packing.Documents",
        "jaxdp.data.mnist.FashionMNIST",
        "jaxdp.data.hugging_face.HuggingFace",
        "jaxdp.data.image_folder.ImageFolder",
        "jaxdp.archives.image_table.ImageTable",
        "jaxdp.archives.packed.ImageZip",
        "jaxdp.data.mnist.MNIST",
        "jaxdp.archives.medmnist.MedMNIST",
        "jaxdp.data.mixture.Mixture",
        "jaxdp.data.npz.Npz",
        "jaxdp.data.packing.PackedTokens",
        "jaxdp.data.text.PennTreebank",
        "jaxdp.data.text.PythonSource",
        "jaxdp.data.stream.Stream",
        "jaxdp.tables.rows.Table",
        "jaxdp.data.text.TextFile",
        "jaxdp.data.token_file.TokenFile",
        "jaxdp.archives.web_dataset.WebDataset",
    )
}
__all__ = ["SOURCES", *SOURCES]


def __getattr__(name: str) -> Any:
    if name in SOURCES:
        return pkgutil.resolve_name(SOURCES[name])
    raise AttributeError(f"module 'jaxdp.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
