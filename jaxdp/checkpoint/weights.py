"""Weights are named arrays that lie somewhere: in a checkpoint, or in a `.safetensors` file; read in their place."""

import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.checkpoint import manifest, safetensors
from jaxdp.checkpoint.matching import MODEL_STATE, named
from jaxdp.checkpoint.orbax import orbax
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.errors import UsageError, one_line
from jaxdp.models import gpt2
from jaxdp.split import path_string

GIVE = "give a run directory, one of its checkpoints (.../checkpoints/STEP) or a .safetensors file"
FORMAT = "jaxdp"  # of the files that `jaxdp export` writes


class Weights(NamedTuple):
    """title: where they are from. arrays: {name: what has shape and dtype}, names as in `jaxdp.checkpoint.matching`.

    read({name: what it is to be read as}) -> {name: array}; every process must call. As: a ShapeDtypeStruct with a
    sharding; from a checkpoint, a NumPy array too. facts: what must be equal on every rank. names: {their name: ours}
    where the layout is known. rows: {name: how many} of those that have fewer rows than they are read with. note: what
    is to be said of the layout.
    """

    title: str
    arrays: dict[str, Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    facts: dict[str, str]
    names: Mapping[str, str] | None = None
    rows: Mapping[str, int] = MappingProxyType({})
    note: str = ""


def locate(path: str) -> pathlib.Path:
    """The checkpoint or file that `init_from` names; of a run directory, the last checkpoint."""
    place = pathlib.Path(path)
    try:
        place.stat()
    except (OSError, ValueError) as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened ({one_line(error)})"
        raise UsageError(f"init_from: {path!r} {problem}; {GIVE}") from None
    if place.is_file():
        if place.suffix != ".safetensors":
            raise UsageError(f"init_from: {path!r} is no .safetensors file; {GIVE}")
        return place
    if steps := Checkpoints(place / "checkpoints").steps():
        return place / "checkpoints" / str(steps[-1])
    if (place / manifest.NAME).is_file():
        return place
    raise UsageError(f"init_from: {path!r} holds no checkpoint; {GIVE}")


def open_weights(place: pathlib.Path, ema: bool) -> Weights:
    """Those at a place that `locate` gave. ema: the running average in place of the parameters."""
    return from_checkpoint(place, ema) if place.is_dir() else from_safetensors(place, ema)


def from_checkpoint(place: pathlib.Path, ema: bool, field: str = "init_from", ema_field: str = "init.ema") -> Weights:
    """Those of a checkpoint directory; it is read in parts, and knows itself what it holds.

    field, ema_field: what the user asked for it with, for errors.
    """
    try:
        manifest.check(place, manifest.read(place)["files"])
        tree: Any = orbax().metadata(place.resolve()).metadata
        problem = None if isinstance(tree, dict) and "params" in tree else "it holds no parameters"
    except Exception as error:
        problem = one_line(error)
    if problem:
        raise UsageError(f"{field}: {str(place)!r} is not a whole checkpoint of jaxdp ({problem}); give another")
    if ema and "ema" not in tree:
        raise UsageError(
            f"{ema_field}: {str(place)!r} keeps no running average; leave it out (optimizer.ema keeps one)"
        )
    trees = {"ema" if ema else "params": "", "model_state": MODEL_STATE}

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        asked = jax.tree.map(lambda _: orbax().PLACEHOLDER, tree)
        for name in trees.keys() & tree.keys():
            pick = lambda path, _, prefix=trees[name]: wanted.get(prefix + path_string(path), orbax().PLACEHOLDER)
            asked[name] = jax.tree_util.tree_map_with_path(pick, tree[name])
        restored = orbax().load(place.resolve(), asked)
        found = named(*(restored.get(name) for name in trees))
        return {name: found[name] for name in wanted}

    arrays = named(*(tree.get(name) for name in trees))
    title = f"the running average in {place}" if ema else str(place)
    return Weights(title, arrays, read, facts(arrays))


def on_host(weights: Weights) -> dict[str, Any]:
    """All arrays of a checkpoint, in NumPy."""
    return weights.read({name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in weights.arrays.items()})


def from_safetensors(file: pathlib.Path, ema: bool) -> Weights:
    """Those of a file of ours, or of anybody's, whose names may be joined by '.'."""
    try:
        arrays, metadata = safetensors.header(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(
            f"init_from: {str(file)!r} cannot be read as safetensors ({one_line(error)}); {GIVE}"
        ) from None
    own = metadata.get("format") == FORMAT
    if ema and not (own and metadata.get("ema") == "true"):
        raise UsageError(
            f"init.ema: {str(file)!r} holds no running average; leave it out, or write it with export --ema"
        )
    dotted = not own and not any("/" in name for name in arrays)
    names = {name.replace(".", "/") if dotted else name: name for name in arrays}
    if len(names) < len(arrays):
        raise UsageError(f"init_from: {str(file)!r} has names that differ only in '.'; rename them")

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        found = safetensors.read(file, {names[name]: like for name, like in wanted.items()})
        return {name: found[names[name]] for name in wanted}

    arrays = {name: arrays[stored] for name, stored in names.items()}
    return Weights(str(file), arrays, read, facts(arrays) | {k: v for k, v in metadata.items() if k != "config"})


def as_gpt2(weights: Weights, place: pathlib.Path, ours: Mapping[str, Any]) -> Weights:
    """Those of a file in GPT-2's published layout, for a model that is a GPT, as its arrays; any others as they are.

    ours: {path: what has shape and dtype}. Where our embedding has more rows, for the sake of its size, the rest of
    them are left; where we have fewer positions, only the first are read.
    """
    if place.is_dir() or not gpt2.is_gpt(ours):
        return weights
    stored = safetensors.header(place).arrays
    if not gpt2.is_published(stored):
        return weights
    places = gpt2.places(list(stored), f"{gpt2.STACK}/norm1/scale" in ours)
    arrays, parts, rows, notes = {}, {}, {}, []
    for name, where in places.items():
        first = stored[where.names[0]]
        for other in where.names:
            if stored[other].shape != first.shape:
                raise UsageError(
                    f"init_from: {str(place)!r} has {where.names[0]!r} of {first.shape}, but {other!r} of "
                    f"{stored[other].shape}; give a file of equal blocks"
                )
        shape, offset = first.shape, 0
        if where.third is not None:
            shape = (*shape[:-1], shape[-1] // 3)
            offset = where.third * shape[-1]
        shape = (len(where.names), *shape) if where.stacked else shape
        own = ours[name].shape if name in ours else shape
        if name == "embed/embedding" and own[0] > shape[0] and own[1:] == shape[1:]:
            rows[where.label] = shape[0]
            notes.append(f"rows {shape[0]} to {own[0] - 1} of {name} left as initialized")
            shape = own
        if name == "positions" and own[0] < shape[0] and own[1:] == shape[1:]:
            notes.append(f"the first {own[0]} of {shape[0]} positions")
            shape = own
        arrays[where.label] = safetensors.Array(shape, first.dtype)
        parts[where.label] = safetensors.Parts(where.names, where.stacked, offset)
    for name in stored.keys() - gpt2.used(stored):
        arrays[name] = stored[name]

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        return safetensors.assemble(place, {name: (like, parts[name]) for name, like in wanted.items()})

    notes.append("biases of keys, which softmax takes away, left out")
    note = f"  in GPT-2's published layout: {'; '.join(notes)}"
    names = {where.label: name for name, where in places.items()}
    return weights._replace(arrays=arrays, read=read, names=names, rows=rows, note=note)


def facts(arrays: Mapping[str, Any]) -> dict[str, str]:
    text = json.dumps([[name, str(x.dtype), list(x.shape)] for name, x in sorted(arrays.items())])
    return {"names, shapes and dtypes": hashlib.sha256(text.encode()).hexdigest()[:16]}
