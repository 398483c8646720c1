"""Find the checkpoint to resume a run from, and decide whether it may be: same config, data and code."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Collection, Mapping
from typing import IO, Any

from jaxdp import rundir
from jaxdp.assemble.components import Given
from jaxdp.assemble.identity import NOT_COMPARABLE
from jaxdp.assemble.run import together
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.config import Config
from jaxdp.config.check import changed_numbers, flatten
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.metrics import aloud
from jaxdp.training.run import Run

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


def as_begun(config: Config, directory: pathlib.Path, context: Context) -> Config:
    """The config, with what a run that is there did of its own accord before there was a key for it."""

    def older() -> bool:
        checkpoints = Checkpoints(directory / "checkpoints")
        with contextlib.suppress(Exception):  # what is damaged is told of where it is restored
            return "order" not in checkpoints.meta(checkpoints.steps()[-1])["config"]["data"]
        return False

    if config.data.order is None and context.of_root("begun", older):
        return dataclasses.replace(config, data=dataclasses.replace(config.data, order="shuffled"))
    return config


def share(directory: pathlib.Path, context: Context) -> IO[str] | None:
    """Make and lock the run directory on rank 0, and check that every rank sees the same one; return the lock."""
    held, problem = rundir.make(directory) if context.is_root else (None, None)
    context.agree(problem)
    nonce = context.of_root("run_dir", lambda: rundir.nonce(directory))
    context.agree(rundir.is_shared(directory, nonce))
    return held


def resume_step(
    run: Run, config: Config, context: Context, given: Given, tidy: bool = True
) -> tuple[int, dict[str, Any]]:
    """(the checkpoint to go on from, what was saved with it), or (0, {}).

    UsageError where the config, the data or an object of a script would change its numbers, unless it is forced.
    """
    checkpoints = run.checkpoints
    start = checkpoints.latest(aloud.say, tidy)
    if not start:
        return 0, {}
    found = context.of_root("meta", lambda: checkpoints.meta(start))
    if not config.resume.force:
        compare = lambda: check_same_run(found, run.meta, config, start, given)
        together(context, compare if context.is_root else lambda: None)
    return start, found
