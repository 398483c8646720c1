"""Decide whether a run directory may be resumed: with the config, the data and the code that it was trained with."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxdp.assemble.identity import NOT_COMPARABLE
from jaxdp.config import Config
from jaxdp.config.check import changed_numbers, flatten
from jaxdp.errors import UsageError
from jaxdp.metrics import aloud

FIX = (
    "choose another run_dir (None is a temporary one), replace the run with overwrite=True, or continue it all the "
    "same with resume={'force': True}"
)


def check_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], config: Config, step: int, objects: Collection[str]
) -> None:
    """Raise UsageError where a run would continue, or return, what other values, data or objects gave.

    saved, now: what the checkpoint of `step` was saved with, and what this run would save. objects: the keys of a
    config for which a script has objects; other code of the user's has a name, and a change of it is a warning.
    """
    changed = changed_numbers(saved["config"], config)
    if saved["data_fingerprint"] != now["data_fingerprint"]:
        changed.append(f"data fingerprint: {saved['data_fingerprint']} -> {now['data_fingerprint']}")
    if changed:
        raise UsageError(
            f"{'; '.join(changed[:8])}{f' (and {len(changed) - 8} more)' if changed[8:] else ''}: this run was trained "
            f"to step {step} with the former, and it changes the numbers; put it back, "
            f"{FIX if objects else 'choose another --run_dir, or continue all the same with --resume.force true'}"
        )
    targets, before = flatten(config), saved.get("fingerprints", {})
    for key, ours in now["fingerprints"].items():
        name, theirs = f"{key}: {targets[f'{key}.target']}", before.get(key)
        if key in objects and (theirs != ours or ours.startswith(NOT_COMPARABLE)):
            raise UsageError(f"{name} {_difference(theirs, ours, step)}")
        if theirs is not None and theirs != ours:
            aloud.say(
                f"warning: {name} has changed since this run was trained to step {step}; what it gives may not be what "
                "the code gives now (another --run_dir starts anew)"
            )


def _difference(theirs: str | None, ours: str, step: int) -> str:
    """How an object differs from the one that a run was trained with, and what to do about it."""
    reason = next((x.removeprefix(NOT_COMPARABLE) for x in (ours, theirs or "") if x.startswith(NOT_COMPARABLE)), None)
    if reason is not None or theirs is None:
        return (
            f"cannot be compared with the one that this run was trained with to step {step} "
            f"({reason or 'it was saved without a fingerprint'}); give its dotted path, such as 'module.name', {FIX}"
        )
    return (
        f"is not the one that this run was trained with to step {step}: its code or values differ; put it back, {FIX}"
    )
