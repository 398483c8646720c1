"""The keys of a config and the types of their values; suggestions for unknown keys."""

import dataclasses
import functools
import pathlib
import reprlib
import sys
from typing import Any, get_args, get_origin, get_type_hints

from jaxdp.config import Config
from jaxdp.config.values import in_words
from jaxdp.errors import UsageError, nearest, one_line, suggest

RENAMED = {"parallel.accumulator": "parallel.gradient_buffer"}  # former key -> key
FORMER_VALUES = {
    "parallel.accumulate": "loop is now scan",
    "parallel.gradient_buffer": "split is now sharded, whole is now replicated",
}


def inner(hint: Any) -> Any:
    """Return the dataclass in a type hint, alone or in a union with None; None if there is none."""
    return next((k for k in (hint, *get_args(hint)) if dataclasses.is_dataclass(k)), None)


def known_keys() -> dict[str, Any]:
    """Return {dotted key: type hint} of all keys."""
    return {key: field.type for key, field in known_fields().items()}


@functools.cache
def known_fields(cls: Any = Config, prefix: str = "") -> dict[str, "dataclasses.Field[Any]"]:
    """Return {dotted key: field} of all keys."""
    hints, fields = get_type_hints(cls), dict[str, Any]()
    for field in dataclasses.fields(cls):
        fields[f"{prefix}{field.name}"] = field
        if (section := inner(hints[field.name])) is not None:
            fields |= known_fields(section, f"{prefix}{field.name}.")
    return fields


# Names of keys in other trainers.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val"), "optimizer.clip_norm"),
    **{name: f"optimizer.args.{name}" for name in ("momentum", "b1", "b2", "eps")},
    **dict.fromkeys(("scheduler", "lr_scheduler"), "optimizer.schedule"),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "iterations"), "steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "microbatches"),
    **dict.fromkeys(("output_dir", "out_dir", "workdir", "logdir"), "run_dir"),
    "batch": "batch_size",
    "num_workers": "data.workers",
    "dataset": "data.target",
    "criterion": "loss.target",
    "eval_every": "eval.every",
    "log_every": "log.every",
    "save_every": "checkpoint.every",
}


def check_key(key: str, where: str) -> None:
    """Raise `UsageError` with the nearest known key if `key` is unknown; after `args`, any name is
    allowed.
    """
    known = known_keys()
    if key in known or any(
        get_origin(hint) is dict and key.startswith(f"{k}.") and key[-1] != "."
        for k, hint in known.items()
    ):
        return
    if key in RENAMED:
        now = RENAMED[key]
        raise UsageError(f"{where}: {key} is now called {now}, and is {expected(now)}")
    leaf = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    section, _, name = key.rpartition(".")
    if (meant := ELSEWHERE.get(name)) and (not section or meant.startswith(f"{section}.")):
        raise UsageError(f"{where}: unknown key {key!r}; did you mean {meant!r}?")
    if f"{section}.args" in known:  # usually an argument of the target
        in_section = [k for k in known if k.startswith(f"{section}.")]
        meant = suggest(key, in_section, 0.85, f"did you mean {f'{section}.args.{name}'!r}?")
        raise UsageError(f"{where}: unknown key {key!r}; {meant}")
    near = nearest(key, known, 0.6) or leaf.get(nearest(name, leaf, 0.7))
    hint = f"did you mean {near!r}?" if near else f"`{program('train')} --help` lists the keys"
    raise UsageError(f"{where}: unknown key {key!r}; {hint}")


def expected(key: str) -> str:
    """Describe the type of a known key's value for an error message."""
    former = f" ({FORMER_VALUES[key]})" if key in FORMER_VALUES else ""
    return f"{in_words(known_keys()[key])}{former}"


def program(verb: str) -> str:
    """Return the command that runs a verb, as this program was called."""
    script = pathlib.Path(__file__).parents[2] / "train.py"
    is_script = verb == "train" and pathlib.Path(sys.argv[0]).resolve() == script
    return "python train.py" if is_script else f"jaxdp {verb}"


def check_structure(values: dict[str, Any], where: str, prefix: str = "") -> None:
    """Raise `UsageError` for an unknown key, or if a value is a mapping, list or scalar where
    another is expected.
    """
    known = known_keys()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if not isinstance(name, str) or ("." in name and name not in known):
            raise UsageError(
                f"{where}: {key!r} is not a key; nest its words, as in parallel: {{zero: 1}}"
            )
        section, _, leaf = name.partition(".")
        if leaf and section in values:
            raise UsageError(f"{where}: {name!r} is beside {section!r}; write {leaf} inside of it")
        check_key(key, where)
        hint = known[key]
        if value is None and type(None) in get_args(hint):
            continue
        if isinstance(value, dict | list) and any(
            get_origin(kind) is type(value) for kind in get_args(hint)
        ):
            continue
        mapping = inner(hint) is not None or get_origin(hint) is dict
        listing = get_origin(hint) is list
        if (
            value is None
            or isinstance(value, dict) != mapping
            or isinstance(value, list) != listing
        ):
            keys = (
                f"; set its keys, as in {name}: {{{next(iter(get_type_hints(inner(hint))))}: ...}}"
                if inner(hint)
                else ""
            )
            raise UsageError(
                f"{where}: {key}: {one_line(reprlib.repr(value))} is not {expected(key)}{keys}"
            )
        if inner(hint) is not None:
            check_structure(value, where, f"{key}.")
