"""The model interface: two pure functions, which adapters build from Flax or Equinox modules or
plain functions.

    init(key, batch) -> (params, model_state)
    apply(params, model_state, batch, key, train) -> (outputs, model_state)

batch: one microbatch, {name: [example, ...]}; "inputs" goes to the module's first argument, and
"mask" [example] (True for real examples) or any other entry to an argument of that name.
model_state is a nested dict: floats and complex numbers are averaged over microbatches by weight,
integers must agree, and arrays under the top-level key "carry" ([example, ...]) belong to the
examples. A module declares carry for one example; its adapter broadcasts it to [example, ...].
Carry starts as zeros, and a step resets it to zeros where a new sequence starts."""

import functools
import inspect
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from jaxdp.errors import UsageError
from jaxdp.losses import wide
from jaxdp.precision import cast_floats
from jaxdp.split import DATA, REPLICA, SHARD, path_string

PARAMS, STATE, CARRY = "params", "state", "carry"
Batch = dict[str, jax.Array]  # of a microbatch: [example, ...]
# The names of arguments that are true in training.
TRAINING = ("train", "training", "is_training", "is_train", "enable_dropout")
EVALUATION = ("deterministic", "inference", "use_running_average", "eval_mode")
UNBOUND, MESH = r"unbound axis name: (\w+)", (DATA, REPLICA, SHARD)
# What asks for a source of randomness: an argument's name, or its annotation.
RANDOM, RANDOM_TYPE = re.compile(r"(\w+_)?(rngs?|key)"), re.compile(r"\bRng(s|Stream)\b|PRNGKey")


class Model(NamedTuple):
    """A model as pure functions.

    blocks: paths (a/b) of the parameters stacked [block, ...] for `scan_blocks`. An `apply` with an
    argument `per_block` (`jaxdp.models.scan.PerBlock`) hands it and these parameters, unchanged, to
    `scan_blocks`; any other one gets them read as a whole. module(params, model_state): return a
    module of the user's library with these values, in evaluation mode, its carry at zero; None:
    there is no such thing.
    """

    init: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]
    blocks: tuple[str, ...] = ()
    module: Callable[[Any, Any], Any] | None = None

    @property
    def read_by_block(self) -> tuple[str, ...]:
        """Return the paths in `blocks`, if `apply` reads one block at a time; else ()."""
        return self.blocks if "per_block" in inspect.signature(self.apply).parameters else ()


def modes(train: bool) -> dict[str, bool]:
    """Return the value of every argument that selects training or evaluation."""
    return {**dict.fromkeys(TRAINING, train), **dict.fromkeys(EVALUATION, not train)}


def call_arguments(
    call: Callable, batch: dict[str, Any], train: bool, key: jax.Array
) -> tuple[tuple, dict[str, Any]]:
    """Return the (positional, keyword) arguments for a bound `__call__(x, mask, train, ...)`,
    matched by name.

    An argument gets the batch entry of its name; `TRAINING` and `EVALUATION` arguments get the
    mode; an argument annotated or named as randomness (`nnx.Rngs`, `rngs`, `key`, `z_rng`) gets a
    key derived from `key` and its name, but keeps its default in evaluation if it has one. The
    first of the others gets "inputs"; the rest keep their defaults, or get None if the annotation
    allows it.

    Raises:
        UsageError: an argument has no source.
    """
    mode, first = modes(train), True
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for i, p in enumerate(inspect.signature(call).parameters.values()):
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            if i == 0 and "inputs" in batch:  # a Sequential's __call__(*args)
                positional.append(batch["inputs"])
            continue
        optional, annotation = p.default is not p.empty, str(p.annotation)
        if p.name in batch:
            value, first = batch[p.name], False
        elif p.name in mode:
            value = mode[p.name]
        elif RANDOM_TYPE.search(annotation) or RANDOM.fullmatch(p.name):
            if optional and not train:
                continue
            value = randomness(p, key)
        elif first and "inputs" in batch:
            value, first = batch["inputs"], False
        elif first:
            raise UsageError(
                f"model: the data has neither {p.name!r} nor 'inputs' for its first argument {p.name!r}, only "
                f"{sorted(batch)}"
            )
        elif optional:
            continue
        elif re.search(r"\b(None|Optional)\b", annotation):
            value = None
        else:
            raise UsageError(
                f"model: no value for its argument {p.name!r}; the data has {sorted(batch)}: rename an entry, or "
                "give the argument a default"
            )
        if p.kind is not p.KEYWORD_ONLY and i == len(positional):
            positional.append(value)
        else:
            keywords[p.name] = value
    return tuple(positional), keywords


def randomness(p: inspect.Parameter, key: jax.Array) -> Any:
    """Return an argument's source of randomness: `key` itself if the argument is named key, else a
    key folded with its name; wrapped in `nnx.Rngs` if annotated so, or if named rngs without an
    annotation."""
    key = key if p.name == "key" else jax.random.fold_in(key, zlib.crc32(p.name.encode()))
    if "RngStream" in str(p.annotation):
        return nnx.Rngs(key).default
    plain = p.name == "rngs" and p.annotation is p.empty
    return nnx.Rngs(key) if plain or "Rngs" in str(p.annotation) else key


def bind_axes(model: Model) -> Model:
    """Return the model with every mapped axis that it names bound with size 1 around each
    microbatch.

    `pmean(x, "batch")` then returns x: statistics are per microbatch, whatever the number of
    devices. The axis names come from JAX's "unbound axis name" error when the model is first
    traced.

    Raises:
        UsageError: the model names an axis of the device mesh.
    """
    axes: list[str] = []

    def bound(f: Callable) -> Callable:
        @functools.wraps(f)
        def call(*args: Any, **more: Any) -> Any:
            while True:
                run = f
                for name in axes:
                    run = _inside(name, run)
                try:
                    return run(*args, **more)
                except NameError as error:
                    unbound = named(UNBOUND, error)
                    if unbound in MESH:
                        raise UsageError(
                            f"model: it uses the axis {unbound!r} of the device mesh; use 'batch' instead, for "
                            "statistics per microbatch"
                        ) from error
                    if not unbound or unbound in axes:
                        raise
                axes.append(unbound)

        return call

    return model._replace(init=bound(model.init), apply=bound(model.apply))


def named(pattern: str, error: Exception) -> str:
    """Return the text that the pattern's group matches in an error message, else ''."""
    match = re.search(pattern, str(error))
    return match[1] if match else ""


def _inside(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with the axis `name` of size 1 bound."""

    def call(*args: Any, **more: Any) -> Any:
        mapped = jax.vmap(lambda _: f(*args, **more), axis_name=name)
        return jax.tree.map(lambda x: x[0], mapped(jnp.zeros(1)))

    return call


def rehearse(apply: Callable, params: Any, model_state: Any, batch: Batch, key: jax.Array) -> None:
    """Trace a training call of `Model.apply` once, to discover the axes and RNG streams that it
    uses before the real trace, which then reports the error if there is one."""
    dtypes = (jnp.asarray(x).dtype for x in batch.values())
    dtype = next((x for x in dtypes if jnp.issubdtype(x, jnp.floating)), jnp.dtype(jnp.float32))
    state = cast_floats(model_state, wide(dtype))

    def training(params: Any, state: Any) -> Any:
        return apply(params, state, batch, key, True)

    try:
        jax.eval_shape(training, cast_floats(params, dtype), state)
    except NameError as error:
        if named(UNBOUND, error) not in MESH:  # `bind_axes` reports these
            raise
    except Exception:
        pass


def nest(pairs: Iterable[tuple[Sequence[Any], Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (params, model_state) as nested dicts, of pairs (path, value). A path starts with
    PARAMS or STATE. Raises UsageError for paths that are equal as texts, as those of 0 and "0".
    """
    flat: dict[tuple[str, ...], Any] = {}
    for path, value in pairs:
        names = tuple(map(str, path))
        if names in flat:
            raise UsageError(
                f"model: 2 of its arrays have the path {'/'.join(names[1:])!r}; rename all but one"
            )
        flat[names] = value
    tree = unflatten_dict(flat)
    return tree.get(PARAMS, {}), tree.get(STATE, {})


def at(path: Sequence[Any], params: Any, model_state: Any) -> Any:
    """Return the value at a path, as in `nest`."""
    value = {PARAMS: params, STATE: model_state}
    for part in path:
        value = value[str(part)]
    return value


def for_each_example(model_state: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Broadcast the carry, declared for one example [...], to [example, ...]."""
    if CARRY not in model_state:
        return model_state
    examples = len(next(iter(batch.values())))
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (examples, *x.shape)), model_state[CARRY])
    return model_state | {CARRY: carry}


def keep_dtypes(old: Any, new: Any) -> Any:
    """Cast `new` to the dtypes of `old`: running averages keep their stored dtype, whatever the
    compute dtype.

    Raises UsageError if the cast would drop a fraction or an imaginary part, or if a shape changes.
    """

    def kind(x: Any) -> int:
        """Return 0 for an integer, 1 for a float, 2 for a complex number."""
        return jnp.issubdtype(x.dtype, jnp.inexact) + jnp.iscomplexobj(x)

    def cast(path: Any, old: Any, new: Any) -> Any:
        if old.shape != new.shape:
            raise UsageError(
                f"model: its state {path_string(path)!r} changes from shape {old.shape} to {new.shape}; keep its shape"
            )
        if kind(new) > kind(old):
            raise UsageError(
                f"model: its state {path_string(path)!r} changes from {old.dtype} to {new.dtype}; initialize it with "
                "the dtype that it gets"
            )
        return new.astype(old.dtype)

    return jax.tree_util.tree_map_with_path(cast, old, new)


def refuse_losses(sown: Iterable[tuple[str, str]]) -> None:
    """Raise UsageError if any of the values that a model sows (path, type) is a loss, by its path
    or type.
    """
    for path, kind in sown:
        if "loss" in f"{path} {kind}".lower():
            raise UsageError(
                f"model: what it sows into {path!r} would not be part of the loss; return it among the outputs, and "
                "add it in the loss"
            )
