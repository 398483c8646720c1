"""A config is right or says in one line what is wrong; and two configs differ in numbers, or in speed alone."""

import dataclasses
import difflib
from typing import Any, get_type_hints

from jaxdp.config import Config
from jaxdp.errors import UsageError


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of a config or of a dict; dicts of arguments count as one level more."""
    items = dataclasses.asdict(tree) if dataclasses.is_dataclass(tree) and not isinstance(tree, type) else tree
    flat: dict[str, Any] = {}
    for name, value in items.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return flat


def decides(key: str) -> str:
    """'numbers' or 'speed' for a dotted key."""
    cls: Any = Config
    mark = "numbers"
    for part in key.split("."):
        fields = {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
        if part not in fields:
            break
        mark = fields[part].metadata["decides"]
        cls = get_type_hints(cls)[part]
    return mark


def changed_numbers(before: dict[str, Any], after: "Config") -> list[str]:
    """One line per key that changes the numbers and differs: `key: before -> after`."""
    old, new = flatten(before), flatten(after)
    keys = [k for k in {**old, **new} if decides(k) == "numbers" and old.get(k) != new.get(k)]
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in keys]


def known_keys(cls: Any = Config, prefix: str = "") -> dict[str, bool]:
    """{dotted key: whether any key may follow it}."""
    keys: dict[str, bool] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = next(
            (
                k
                for k in (hints[field.name], *getattr(hints[field.name], "__args__", ()))
                if dataclasses.is_dataclass(k)
            ),
            None,
        )
        keys[f"{prefix}{field.name}"] = field.name == "args"
        if kind is not None:
            keys |= known_keys(kind, f"{prefix}{field.name}.")
    return keys


def check_key(key: str, where: str) -> None:
    """Raises `UsageError` with the nearest known key, where `key` is not one."""
    known = known_keys()
    if key in known or any(free and key.startswith(f"{k}.") for k, free in known.items()):
        return
    leaf = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    near = difflib.get_close_matches(key, known, 1, 0.6) or [
        leaf[m] for m in difflib.get_close_matches(key.rsplit(".", 1)[-1], leaf, 1, 0.7)
    ]
    hint = f"did you mean {near[0]!r}?" if near else "`train.py --help` lists the keys"
    raise UsageError(f"{where}: unknown key {key!r}; {hint}")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise UsageError(f"{key}: {value} is too small; it must be at least {least}")


def _not_yet(key: str, value: Any, only: Any) -> None:
    if value != only:
        raise UsageError(f"{key}: {value!r} is not supported yet; use {'null' if only is None else only}")


def resolve(config: Config) -> Config:
    """The checked config with everything that was left out and follows from the rest filled in."""
    check(config)
    dtypes = config.precision
    compute, reduce = dtypes.compute or dtypes.params, dtypes.reduce or dtypes.params
    return dataclasses.replace(config, precision=dataclasses.replace(dtypes, compute=compute, reduce=reduce))


def check(config: Config) -> None:
    """Raises `UsageError` that names the first field whose value cannot work."""
    if (config.steps is None) == (config.epochs is None):
        raise UsageError(f"steps: {config.steps} with epochs: {config.epochs}; give one of the two, e.g. steps: 1000")
    for key, least in {
        "steps": 1, "batch_size": 1, "microbatches": 1, "seed": 0, "optimizer.warmup_steps": 0, "optimizer.lr": 0,
        "optimizer.schedule_steps": 1, "optimizer.weight_decay": 0, "eval.every": 1, "log.every": 1, "profile.start": 0,
        "profile.steps": 1, "checkpoint.every": 1, "checkpoint.keep": 1, "parallel.devices": 1,
    }.items():  # fmt: skip
        _at_least(key, _get(config, key), least)
    for key in ("epochs", "optimizer.clip_norm", "parallel.bucket_mb"):
        if (value := _get(config, key)) is not None and not value > 0:
            raise UsageError(f"{key}: {value} must be greater than 0")
    if config.seed >= 2**32:
        raise UsageError(f"seed: {config.seed} does not fit 32 bits; use one below {2**32}")
    for key in ("model", "data", "loss", "optimizer"):
        if not _get(config, key).target:
            raise UsageError(f"{key}.target: missing; name a built-in or a dotted path, e.g. {key}: {{target: ...}}")
    for key, only in {
        "parallel.zero": 0, "parallel.shard_size": None, "precision.loss_scale": None, "init_from": None,
        "checkpoint.every_minutes": None, "checkpoint.best": None,
    }.items():  # fmt: skip
        _not_yet(key, _get(config, key), only)
    if config.parallel.reduction == "exact":
        raise UsageError("parallel.reduction: 'exact' is not supported yet; use auto, xla or bucket")
    if "float64" in (config.precision.compute, config.precision.reduce) and config.precision.params != "float64":
        raise UsageError(f"precision.params: {config.precision.params!r} with float64 elsewhere; set it to float64 too")


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
