"""What the programs of a start depend on: by it, what an earlier start found out or compiled is known again."""

import functools
import hashlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdp import compilation_cache
from jaxdp.build.parts import Given, Parts
from jaxdp.config import Config
from jaxdp.config.check import WHERE, decides, flatten
from jaxdp.data import SOURCES
from jaxdp.data.base import Dataset
from jaxdp.data.transforms import TRANSFORMS
from jaxdp.environment import processor
from jaxdp.losses import LOSSES
from jaxdp.models import MODELS
from jaxdp.optim import OPTIMIZERS
from jaxdp.rundir import versions

# Keys that no program of training depends on.
BESIDE = (
    *("run_dir", "compilation_cache", "data.workers", "log.", "profile.", "checkpoint.", "resume.", "watchdog."),
    *("verify.", *WHERE),
)
REHEARSED = ("parallel.", "eval.", "checkpoint.best")  # keys that a rehearsal looks at, beside those of the numbers
AROUND = ("flax", "optax")  # packages that a program is traced through, beside ours


def facts(config: Config, data: str) -> dict[str, str]:
    """What must be equal on every rank: every config key, the package's code, the data's fingerprint."""
    keys = {k: repr(v) for k, v in flatten(config).items()}
    code = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parent.parent.rglob("*.py")):
        code.update(file.read_bytes())
    if config.parallel.reduction == "exact":
        keys["NPROC"] = os.environ.get("NPROC", "")
    return {**keys, "the jaxdp package's code": code.hexdigest()[:16], "data fingerprint": data}


def note_of(config: Config, data: str, parts: Parts, given: Given) -> compilation_cache.Note:
    """Of a rehearsal; none where code of the user's takes part, which may be another the next time."""
    if has_own_code(config, given):
        return compilation_cache.Note(None)
    keys = {k: v for k, v in facts(config, data).items() if decides(k) == "numbers" or k.startswith(REHEARSED)}
    return compilation_cache.Note(repr((sorted(keys.items()), *facts_around(parts))))


def facts_of_programs(
    config: Config, data: str, parts: Parts, given: Given, devices: Sequence[jax.Device], padded: bool
) -> str | None:
    """What a run's programs depend on beside JAX's settings; None where it is not known, or not the same for all."""
    if has_own_code(config, given) or jax.process_count() > 1:
        return None
    places = ([(d.id, d.device_kind) for d in devices], devices[0].client.platform_version, processor())
    around = {k: v for k, v in facts(config, data).items() if k not in flatten(config)}
    own = (around, parts.steps, padded, places, os.environ.get("XLA_FLAGS"))
    return repr((keys_of_programs(config), *facts_around(parts), *own))


def keys_of_programs(config: Config) -> list[tuple[str, Any]]:
    """The keys, with their values, that programs of training may depend on."""
    return sorted((k, v) for k, v in flatten(config).items() if not k.startswith(BESIDE))


def facts_around(parts: Parts) -> tuple[Any, Any]:
    """The versions of what computes, and the shapes of what is read."""
    examples = [None if d is None else shapes_of(d) for d in (parts.dataset, parts.eval_set)]
    return [*sorted(versions().items()), *map(files_of, AROUND)], examples


@functools.cache
def files_of(package: str) -> str:
    """A digest of where a package is, and of its files' sizes and dates: it may be changed in its place."""
    found = importlib.util.find_spec(package)
    digest = hashlib.sha256()
    for folder in found.submodule_search_locations or () if found is not None else ():
        digest.update(folder.encode())
        for file in sorted(pathlib.Path(folder).rglob("*.py")):
            stat = file.stat()
            digest.update(f"{file}{stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def has_own_code(config: Config, given: Given) -> bool:
    """Whether code of the user's takes part."""
    own = config.data.transform
    tables: list[tuple[Any, Mapping[str, Any]]] = [
        (config.model, MODELS),
        (config.data, SOURCES),
        (config.loss, LOSSES),
        (config.optimizer, OPTIMIZERS),
        *([(own, TRANSFORMS)] if own else []),
        *([(config.eval.data, SOURCES)] if config.eval.data else []),
    ]
    return bool(given) or not all(
        is_ours(table.get(section.target, section.target)) and all(map(is_known, targets_in(section.args)))
        for section, table in tables
    )


def is_ours(entry: Any) -> bool:
    """Whether a table's entry, a dotted path or what it leads to, came with the package or is Optax's."""
    return str(entry if isinstance(entry, str) else getattr(entry, "__module__", "")).startswith(("jaxdp.", "optax."))


def is_known(target: Any) -> bool:
    """Whether what an argument names is ours, in whichever table it is."""
    return any(is_ours(table.get(target, target)) for table in (MODELS, SOURCES, LOSSES, OPTIMIZERS, TRANSFORMS))


def targets_in(value: Any) -> Iterator[Any]:
    """The targets that arguments name, such as the losses of a `MultiTask`."""
    if isinstance(value, Mapping):
        if isinstance(value.get("target"), str):
            yield value["target"]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from targets_in(one)


def shapes_of(dataset: Dataset) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Those of an example [1, ...], by name."""
    return {k: (v.shape, v.dtype) for k, v in dataset.read(np.zeros(1, np.int64)).items()}
