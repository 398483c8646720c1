"""The identity of a run: values that must be equal on every rank, and fingerprints to compare on resume."""

import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdp.assemble.components import Objects
from jaxdp.assemble.data import named_sets
from jaxdp.config import Config, Optimizer
from jaxdp.config.check import flatten
from jaxdp.config.training import Target
from jaxdp.data import SOURCES
from jaxdp.data.base import Dataset
from jaxdp.data.mixture import is_target
from jaxdp.data.transforms import TRANSFORMS
from jaxdp.fingerprint import NotComparable, fingerprint
from jaxdp.losses import LOSSES
from jaxdp.models import MODELS
from jaxdp.optim import OPTIMIZERS, SCHEDULES
from jaxdp.targets import locate, targets_in

NOT_COMPARABLE = "not comparable: "


def facts(config: Config, data: str) -> dict[str, str]:
    """Return the values that must be equal on every rank: config keys, the package's code, the data's fingerprint."""
    keys = {k: repr(v) for k, v in flatten(config).items()}
    code = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parent.parent.rglob("*.py")):
        code.update(file.read_bytes())
    keys |= {"JAXDP_FAULT": os.environ.get("JAXDP_FAULT", "")}
    return {**keys, "the jaxdp package's code": code.hexdigest()[:16], "data fingerprint": data}


def sections(config: Config) -> list[tuple[str, Target | Optimizer, Mapping[str, Any]]]:
    """Return (key, section, built-in names) of every object that a config names."""
    transform, eval_data = config.data.transform, config.eval.data
    [schedule] = targets_in("optimizer.schedule", [config.optimizer.schedule], "schedule", "cosine")
    return [
        ("model", config.model, MODELS),
        ("data", config.data, SOURCES),
        *((f"data.args.{name}", target, SOURCES) for name, target in parts_of(config.data)),
        ("loss", config.loss, LOSSES),
        ("optimizer", config.optimizer, OPTIMIZERS),
        ("optimizer.schedule", Target(*schedule), SCHEDULES),
        *([("data.transform", transform, TRANSFORMS)] if transform else []),
        *([("eval.data", eval_data, SOURCES)] if eval_data else []),
        *((f"eval.also.{name}", target, SOURCES) for name, target in named_sets(config).items()),
    ]


def fingerprints(config: Config, objects: Objects) -> dict[str, str]:
    """Return {key: fingerprint} of a script's objects, and of code that a config names by a dotted path.

    Built-in names have none. For an object that cannot be compared, the value is NOT_COMPARABLE and the reason.
    """
    result: dict[str, str] = {}
    for key, section, table in sections(config):
        named = {**table, **objects.get(key, {})}
        if key not in objects and is_built_in(named.get(section.target, section.target)):
            continue
        try:  # data in files is compared by reading some examples
            result[key] = fingerprint(locate(key, section.target, named), pure="data" not in key.split("."))
        except NotComparable as error:
            if key in objects:
                result[key] = f"{NOT_COMPARABLE}{error}"
    return result


def parts_of(data: Target) -> list[tuple[str, Target]]:
    """Return the targets in the arguments of a Mixture or a Stream, by their keys."""
    if data.target == "Stream":
        return [(k, Target(data.args[k])) for k in ("source", "decode") if isinstance(data.args.get(k), str)]
    named = {k: v for k, v in data.args.get("sets", {}).items() if is_target(v)} if data.target == "Mixture" else {}
    return [(f"sets.{k}", Target(*targets_in("data", [v], "data set", "Digits")[0])) for k, v in named.items()]


def is_built_in(entry: Any) -> bool:
    """Return True if a table's entry, a dotted path or an object, belongs to this package or to Optax."""
    return str(entry if isinstance(entry, str) else getattr(entry, "__module__", "")).startswith(("jaxdp.", "optax."))


def shapes_of(dataset: Dataset) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return {name: (shape [1, ...], dtype)} of an example."""
    return {k: (v.shape, v.dtype) for k, v in dataset.read(np.zeros(1, np.int64)).items()}
