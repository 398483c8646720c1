"""Weights: named arrays in a checkpoint or in a `.safetensors` file, read directly into their
shardings.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdp.checkpoint import manifest, published, safetensors
from jaxdp.checkpoint.manifest import Meta
from jaxdp.checkpoint.orbax import by_path, choose, described, load
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.errors import UsageError, one_line
from jaxdp.optim.evaluation import sources
from jaxdp.precision import kind
from jaxdp.process.hosts import listed
from jaxdp.split import leaves_by_path, path_string

GIVE = "give a run directory, one of its checkpoints (.../checkpoints/STEP) or a .safetensors file, or a folder of such"
MODEL_STATE = "model_state/"
FORMAT = "jaxdp"  # in the metadata of files that `jaxdp export` writes
DESCRIBED = ("config", "data")  # metadata of such files: what the run was


class Weights(NamedTuple):
    """Arrays that can be read, and what is known of their model.

    title: the source. arrays: {name: object with shape and dtype}; see `named`.

    read({name: target}) -> {name: array}; every process must call it. A target is a ShapeDtypeStruct with a sharding
    or, for a checkpoint, a NumPy array. facts: must be equal on every rank. rows: {name: number of
    rows} of arrays that have fewer rows than their target. note: a line to print about the layout.
    meta: the "config" and "data" of the run that has saved them, {} if there is none. tensors:
    those of files, by the names in the files. layout: of `tensors`, if it is a published one, and
    then absent: {our name: a tensor that it needs and the files do not have}."""

    title: str
    arrays: dict[str, Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    facts: dict[str, str]
    rows: Mapping[str, int] = MappingProxyType({})
    note: str = ""
    meta: Meta = MappingProxyType({})
    tensors: Mapping[str, safetensors.Array] = MappingProxyType({})
    layout: published.Layout | None = None
    absent: Mapping[str, str] = MappingProxyType({})


def named(params: Any, model_state: Any) -> dict[str, Any]:
    """Return {name: leaf} of both trees. A name is a path (a/b/c); those of the model state
    (BatchNorm's running averages) begin with `model_state/`, so that the same expressions apply to
    both."""
    trees = (("", params), (MODEL_STATE, model_state))
    return {
        f"{prefix}{path}": leaf
        for prefix, tree in trees
        for path, leaf in leaves_by_path(tree).items()
    }


def locate(path: str) -> pathlib.Path:
    """Return the path of the checkpoint, file or folder of files that `init_from` names; for a run
    directory, its last checkpoint."""
    source = pathlib.Path(path)
    try:
        source.stat()
    except (OSError, ValueError) as error:
        problem = (
            "does not exist"
            if isinstance(error, FileNotFoundError)
            else f"cannot be opened ({one_line(error)})"
        )
        raise UsageError(f"init_from: {path!r} {problem}; {GIVE}") from None
    if source.is_file():
        if source.suffix in safetensors.PYTORCH:
            raise UsageError(f"init_from: {path!r} is a file of PyTorch; {safetensors.CONVERT}")
        if source.suffix != safetensors.SUFFIX:
            raise UsageError(f"init_from: {path!r} is not a .safetensors file; {GIVE}")
        return source
    if steps := Checkpoints(source / "checkpoints").steps():
        return source / "checkpoints" / str(steps[-1])
    if (source / manifest.NAME).is_file():
        return source
    if safetensors.is_folder(source):
        return source
    if torch := sorted(x.name for x in source.iterdir() if x.suffix in safetensors.PYTORCH):
        raise UsageError(
            f"init_from: {path!r} has only files of PyTorch ({torch[0]}); {safetensors.CONVERT}"
        )
    raise UsageError(f"init_from: {path!r} contains no checkpoint; {GIVE}")


def open_weights(path: pathlib.Path, ema: bool) -> Weights:
    """Open the weights at a path from `locate`. ema: the running average instead of the parameters."""
    is_checkpoint = path.is_dir() and (
        (path / manifest.NAME).is_file() or not safetensors.is_folder(path)
    )
    return from_checkpoint(path, ema) if is_checkpoint else from_safetensors(path, ema)


def from_checkpoint(
    path: pathlib.Path, ema: bool, field: str = "init_from", ema_field: str = "init.ema"
) -> Weights:
    """Open the weights of a checkpoint directory; its own metadata lists the arrays, which are read
    in parts.

    field, ema_field: the names of the user's settings, for errors.
    """
    stored = dict[str, Any]()

    def of(field):
        """Return {name below a field: its path in the checkpoint}."""
        return {
            name[len(field) + 1 :]: name
            for name in stored
            if name == field or name.startswith(f"{field}/")
        }

    try:
        saved = manifest.read(path)
        manifest.check(path, saved["files"])
        tree: Any = described(path.resolve())
        meta = saved["meta"]
        stored = by_path(tree, meta)
        problem = None if of("params") else "it contains no parameters"
    except Exception as error:
        problem = one_line(error)
    if problem:
        raise UsageError(
            f"{field}: {str(path)!r} is not a complete jaxdp checkpoint ({problem}); give another"
        )
    if ema and not of("ema"):
        raise UsageError(
            f"{ema_field}: {str(path)!r} has no running average; leave it out (optimizer.ema computes one)"
        )

    where = of("ema" if ema else "params")  # {our name: path in the checkpoint}
    where |= {
        f"{MODEL_STATE}{name}": key
        for name, key in (of("model_state") | (of("ema_state") if ema else {})).items()
    }
    state = of("opt_state")
    others = {
        name: (kind, [state[key] for key in keys])
        for name, (kind, keys) in ({} if ema else sources(state)).items()
    }

    def read(wanted):
        needed = {where[name]: target for name, target in wanted.items()}
        for name in wanted.keys() & others.keys():
            counterpart, *scalars = others[name][1]
            needed |= {
                counterpart: wanted[name],
                **{key: np.zeros((), stored[key].dtype) for key in scalars},
            }

        loaded = by_path(load(path.resolve(), choose(tree, meta, needed)), meta)
        arrays = {name: loaded[where[name]] for name in wanted}
        for name in wanted.keys() & others.keys():
            kind, keys = others[name]
            evaluated = kind.evaluated(arrays[name], *(loaded[key] for key in keys))
            arrays[name] = evaluated.astype(arrays[name].dtype)
        return arrays

    arrays = {name: stored[key] for name, key in where.items()}
    title = f"the running average in {path}" if ema else str(path)
    return Weights(title, arrays, read, facts(arrays), meta=meta)


def on_host(weights: Weights) -> dict[str, Any]:
    """Read all arrays of a checkpoint as NumPy arrays."""
    return weights.read(
        {
            name: np.broadcast_to(np.zeros((), x.dtype), x.shape)
            for name, x in weights.arrays.items()
        }
    )


def filled(like: Any, arrays: Mapping[str, np.ndarray], where: str, prefix: str = "") -> Any:
    """Return a tree like one of shapes, of arrays by name: see `named`. where: they are from, for
    errors. Raises UsageError if one is missing or has another shape."""

    def one(path: Any, x: Any) -> np.ndarray:
        name = prefix + path_string(path)
        if name not in arrays or arrays[name].shape != x.shape:
            raise UsageError(
                f"--run_dir: {where!r} has no {name!r} {list(x.shape)}: the code of the model has changed; use that of "
                "the run"
            )
        return arrays[name]

    return jax.tree_util.tree_map_with_path(one, like)


def from_safetensors(source: pathlib.Path, ema: bool) -> Weights:
    """Open the weights of a file, or a folder of files, of `jaxdp export` or of another program; in
    the latter, names may be joined by '.'."""
    arrays, metadata = safetensors.open_all(source)
    exported = metadata.get("format") == FORMAT
    if ema and not (exported and metadata.get("ema") == "true"):
        raise UsageError(
            f"init.ema: {str(source)!r} has no running average; leave it out, or write it with export --ema"
        )
    dotted = not exported and not any("/" in name for name in arrays)
    renamed = {name.replace(".", "/") if dotted else name: array for name, array in arrays.items()}
    if len(renamed) < len(arrays):
        raise UsageError(
            f"init_from: {str(source)!r} has names that differ only in '.'; rename them"
        )
    read = functools.partial(safetensors.read, renamed)
    same = facts(renamed) | {k: v for k, v in metadata.items() if k not in DESCRIBED}
    meta = {key: json.loads(metadata[key]) for key in DESCRIBED if exported and key in metadata}
    return Weights(str(source), renamed, read, same, meta=meta, tensors=arrays)


def as_published(weights: Weights, source: pathlib.Path, ours: Mapping[str, Any]) -> Weights:
    """Map files in a published layout to the arrays of a GPT of that form; return any other weights
    unchanged.

    ours: {path: object with shape and dtype}. Rows by which our embedding is larger than theirs
    stay as initialized, such columns of our head become zeros; if we have fewer positions, only the
    first ones are read. A head that repeats the embedding and biases that are zero are left out, if
    our model has none."""
    tensors = weights.tensors
    layout = published.layout_of(tensors, ours)
    if layout is None:
        return weights
    stacked = f"{published.STACK}/norm1/scale" in ours
    try:
        if published.count(layout, tensors) > len(tensors):
            raise ValueError(
                f"tensors of block {published.count(layout, tensors) - 1}, but only {len(tensors)} tensors"
            )
        arrays = published.arrays_of(layout, tensors, stacked)
    except ValueError as error:
        raise UsageError(
            f"init_from: {str(source)!r} has {error}; give a file of equal blocks"
        ) from None
    notes, rows = list[str](), dict[str, int]()
    if without := redundant(arrays, ours):
        notes.append(f"{listed(without)} left out, which changes nothing")
        arrays = {name: array for name, array in arrays.items() if name not in without}
    for name in sorted(
        arrays.keys() & {"embed/embedding", "head/kernel", "positions"} & ours.keys()
    ):
        if len(arrays[name].shape) != len(ours[name].shape):
            continue
        order = -1 if name == "head/kernel" else 1
        (theirs, *rest), (number, *our_rest) = (
            arrays[name].shape[::order],
            ours[name].shape[::order],
        )
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
    if layout.joined:
        notes.append("key biases, which cancel in the softmax, left out")
    arrays |= {name: tensors[name] for name in tensors.keys() - published.used(layout, tensors)}
    read = functools.partial(safetensors.read, arrays)
    note = f"  in {layout.title}'s published layout: {'; '.join(notes) or 'complete'}"
    absent = published.absent(layout, tensors, stacked)
    return weights._replace(
        arrays=arrays, read=read, rows=rows, note=note, layout=layout, absent=absent
    )


def redundant(arrays: Mapping[str, safetensors.Array], ours: Collection[str]) -> list[str]:
    """Return the published arrays that our model lacks and does not need: a head with the values of
    the embedding, and biases of zeros."""

    def changes_nothing(name, array):
        if kind(array.dtype) != "float":
            return False
        if name == "head/kernel":
            embedding = arrays.get("embed/embedding", array)
            alike = embedding is not array and kind(embedding.dtype) == "float"
            return alike and safetensors.equal(array.parts[0], embedding.parts[0])
        return name.endswith("/bias") and not any(
            rows.any() for part in array.parts for rows in safetensors.rows(part)
        )

    return [
        name for name, array in arrays.items() if name not in ours and changes_nothing(name, array)
    ]


def facts(arrays: Mapping[str, Any]) -> dict[str, str]:
    text = json.dumps([[name, str(x.dtype), list(x.shape)] for name, x in sorted(arrays.items())])
    return {"names, shapes and dtypes": hashlib.sha256(text.encode()).hexdigest()[:16]}
