"""Weights: named arrays in a checkpoint or in a `.safetensors` file, read directly into their shardings."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.checkpoint import manifest, published, safetensors
from jaxdp.checkpoint.orbax import load, orbax
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.errors import UsageError, one_line
from jaxdp.optim.evaluation import sources
from jaxdp.split import path_string

GIVE = "give a run directory, one of its checkpoints (.../checkpoints/STEP) or a .safetensors file"
MODEL_STATE = "model_state/"
FORMAT = "jaxdp"  # in the metadata of files that `jaxdp export` writes


class Weights(NamedTuple):
    """title: the source. arrays: {name: object with shape and dtype}; see `named`.

    read({name: target}) -> {name: array}; every process must call it. A target is a ShapeDtypeStruct with a sharding
    or, for a checkpoint, a NumPy array. facts: must be equal on every rank. rows: {name: number of rows} of arrays that
    have fewer rows than their target. note: a line to print about the layout.
    """

    title: str
    arrays: dict[str, Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    facts: dict[str, str]
    rows: Mapping[str, int] = MappingProxyType({})
    note: str = ""


def named(params: Any, model_state: Any) -> dict[str, Any]:
    """Return {name: leaf} of both trees. A name is a path (a/b/c); those of the model state (BatchNorm's running
    averages) begin with `model_state/`, so that the same expressions apply to both."""
    trees = (("", params), (MODEL_STATE, model_state))
    return {
        f"{prefix}{path_string(path)}": leaf
        for prefix, tree in trees
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def locate(path: str) -> pathlib.Path:
    """Return the path of the checkpoint or file that `init_from` names; for a run directory, its last checkpoint."""
    source = pathlib.Path(path)
    try:
        source.stat()
    except (OSError, ValueError) as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened ({one_line(error)})"
        raise UsageError(f"init_from: {path!r} {problem}; {GIVE}") from None
    if source.is_file():
        if source.suffix != ".safetensors":
            raise UsageError(f"init_from: {path!r} is not a .safetensors file; {GIVE}")
        return source
    if steps := Checkpoints(source / "checkpoints").steps():
        return source / "checkpoints" / str(steps[-1])
    if (source / manifest.NAME).is_file():
        return source
    raise UsageError(f"init_from: {path!r} contains no checkpoint; {GIVE}")


def open_weights(path: pathlib.Path, ema: bool) -> Weights:
    """Open the weights at a path from `locate`. ema: the running average instead of the parameters."""
    return from_checkpoint(path, ema) if path.is_dir() else from_safetensors(path, ema)


def from_checkpoint(path: pathlib.Path, ema: bool, field: str = "init_from", ema_field: str = "init.ema") -> Weights:
    """Open the weights of a checkpoint directory; its own metadata lists the arrays, which are read in parts.

    field, ema_field: the names of the user's settings, for errors.
    """
    try:
        manifest.check(path, manifest.read(path)["files"])
        tree: Any = orbax().metadata(path.resolve()).metadata
        problem = None if isinstance(tree, dict) and "params" in tree else "it contains no parameters"
    except Exception as error:
        problem = one_line(error)
    if problem:
        raise UsageError(f"{field}: {str(path)!r} is not a complete jaxdp checkpoint ({problem}); give another")
    if ema and "ema" not in tree:
        raise UsageError(
            f"{ema_field}: {str(path)!r} has no running average; leave it out (optimizer.ema computes one)"
        )
    stored = {path_string(key): x for key, x in jax.tree_util.tree_leaves_with_path(tree)}
    of = lambda field: {
        name[len(field) + 1 :]: name for name in stored if name == field or name.startswith(f"{field}/")
    }
    where = of("ema" if ema else "params")  # {our name: path in the checkpoint}
    where |= {
        f"{MODEL_STATE}{name}": key for name, key in (of("model_state") | (of("ema_state") if ema else {})).items()
    }
    state = of("opt_state")
    others = (
        {} if ema else {name: (kind, [state[key] for key in keys]) for name, (kind, keys) in sources(state).items()}
    )

    def read(wanted: Mapping[str, Any]) -> dict[str, Any]:
        needed = {where[name]: target for name, target in wanted.items()}
        for name in wanted.keys() & others.keys():
            counterpart, *scalars = others[name][1]
            needed |= {counterpart: wanted[name], **{key: np.zeros((), stored[key].dtype) for key in scalars}}
        pick = lambda key, _: needed.get(path_string(key), orbax().PLACEHOLDER)
        restored = load(path.resolve(), jax.tree_util.tree_map_with_path(pick, tree))
        loaded = {path_string(key): x for key, x in jax.tree_util.tree_leaves_with_path(restored)}
        arrays = {name: loaded[where[name]] for name in wanted}
        for name in wanted.keys() & others.keys():
            kind, keys = others[name]
            evaluated = kind.evaluated(arrays[name], *(loaded[key] for key in keys))
            arrays[name] = evaluated.astype(arrays[name].dtype)
        return arrays

    arrays = {name: stored[key] for name, key in where.items()}
    title = f"the running average in {path}" if ema else str(path)
    return Weights(title, arrays, read, facts(arrays))


def on_host(weights: Weights) -> dict[str, Any]:
    """Read all arrays of a checkpoint as NumPy arrays."""
    return weights.read({name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in weights.arrays.items()})


def from_safetensors(file: pathlib.Path, ema: bool) -> Weights:
    """Open the weights of a file, written by `jaxdp export` or not; in the latter, names may be joined by '.'."""
    try:
        arrays, metadata = safetensors.header(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(
            f"init_from: {str(file)!r} cannot be read as safetensors ({one_line(error)}); {GIVE}"
        ) from None
    exported = metadata.get("format") == FORMAT
    if ema and not (exported and metadata.get("ema") == "true"):
        raise UsageError(f"init.ema: {str(file)!r} has no running average; leave it out, or write it with export --ema")
    dotted = not exported and not any("/" in name for name in arrays)
    renamed = {name.replace(".", "/") if dotted else name: array for name, array in arrays.items()}
    if len(renamed) < len(arrays):
        raise UsageError(f"init_from: {str(file)!r} has names that differ only in '.'; rename them")
    read = functools.partial(safetensors.read, file, renamed)
    return Weights(str(file), renamed, read, facts(renamed) | {k: v for k, v in metadata.items() if k != "config"})


def as_published(weights: Weights, path: pathlib.Path, ours: Mapping[str, Any]) -> Weights:
    """Map a file in a published layout to the arrays of a GPT of that form; return any other weights unchanged.

    ours: {path: object with shape and dtype}. Rows by which our embedding is larger than theirs stay as initialized,
    such columns of our head become zeros; if we have fewer positions, only the first ones are read.
    """
    stored = {} if path.is_dir() else safetensors.header(path).arrays
    layout = published.layout_of(stored, ours)
    if layout is None:
        return weights
    try:
        arrays = published.arrays_of(layout, stored, f"{published.STACK}/norm1/scale" in ours)
    except ValueError as error:
        raise UsageError(f"init_from: {str(path)!r} has {error}; give a file of equal blocks") from None
    if "head/kernel" not in ours:
        arrays.pop("head/kernel", None)  # repeats the embedding
    rows, notes = {}, []
    for name in sorted(arrays.keys() & {"embed/embedding", "head/kernel", "positions"} & ours.keys()):
        order = -1 if name == "head/kernel" else 1
        (theirs, *rest), (number, *our_rest) = arrays[name].shape[::order], ours[name].shape[::order]
        if rest != our_rest or theirs == number or (theirs > number) == (name != "positions"):
            continue
        if name == "head/kernel":
            notes.append(f"columns {theirs} to {number - 1} of {name} are zeros")
        elif theirs < number:
            rows[name] = theirs
            notes.append(f"rows {theirs} to {number - 1} of {name} left as initialized")
        else:
            notes.append(f"the first {number} of {theirs} positions")
        arrays[name] = arrays[name]._replace(shape=ours[name].shape)
    notes.append(
        "key biases, which cancel in the softmax, left out"
        if layout.joined
        else "heads, kv_heads and rotary_base are not in the file; set them as in its config.json"
    )
    arrays |= {name: stored[name] for name in stored.keys() - published.used(layout, stored)}
    read = functools.partial(safetensors.read, path, arrays)
    note = f"  in {layout.title}'s published layout: {'; '.join(notes)}"
    return weights._replace(arrays=arrays, read=read, rows=rows, note=note)


def facts(arrays: Mapping[str, Any]) -> dict[str, str]:
    text = json.dumps([[name, str(x.dtype), list(x.shape)] for name, x in sorted(arrays.items())])
    return {"names, shapes and dtypes": hashlib.sha256(text.encode()).hexdigest()[:16]}
