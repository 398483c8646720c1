"""What must be equal on every rank of a run, or when it is resumed."""

import hashlib
import pathlib

import numpy as np

from jaxdp.config import Config
from jaxdp.config.validation import flatten
from jaxdp.data.dataset import Dataset
from jaxdp.run.components import Objects


def facts(config: Config, data: str) -> dict[str, str]:
    """Return the values that must be equal on every rank: config keys, the package's code, the
    data's fingerprint.
    """
    keys = {k: repr(v) for k, v in flatten(config).items()}
    code = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parent.parent.rglob("*.py")):
        code.update(file.read_bytes())
    return {**keys, "the jaxdp package's code": code.hexdigest()[:16], "data fingerprint": data}


def has_own_code(config: Config, objects: Objects) -> bool:
    """Return whether a script passed objects, or the config names code by a dotted path."""
    return bool(objects) or any(
        "." in str(v) for k, v in flatten(config).items() if k.endswith(("target", "schedule"))
    )


def shapes_of(dataset: Dataset) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return {name: (shape [1, ...], dtype)} of an example."""
    return {k: (v.shape, v.dtype) for k, v in dataset.read(np.zeros(1, np.int64)).items()}
