"""Find the checkpoint to resume from, and check that config, data and code are unchanged."""

import pathlib
from collections.abc import Collection, Mapping
from typing import IO, Any

from jaxdp import rundir
from jaxdp.assemble.components import Objects
from jaxdp.assemble.identity import NOT_COMPARABLE
from jaxdp.assemble.run import on_all_ranks
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.config import Config
from jaxdp.config.check import changed_numbers, flatten
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.metrics import safe_print
from jaxdp.training.run import Run

FIX = (
    "choose another run_dir (None is a temporary one), replace the run with overwrite=True, or continue it anyway "
    "with resume={'force': True}"
)


def check_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], config: Config, step: int, objects: Collection[str]
) -> None:
    """Raise UsageError if the checkpoint of `step` was trained with other values, data or objects.

    saved, now: the metadata of that checkpoint, and of this run. objects: the config keys for which a script passed
    objects; other code of the user has a dotted path, and a change of it is only a warning.
    """
    changed = changed_numbers(saved["config"], config)
    if saved["data_fingerprint"] != now["data_fingerprint"]:
        changed.append(f"data fingerprint: {saved['data_fingerprint']} -> {now['data_fingerprint']}")
    if changed:
        raise UsageError(
            f"{'; '.join(changed[:8])}{f' (and {len(changed) - 8} more)' if changed[8:] else ''}: this run was trained "
            f"to step {step} with the old value, which changes the numbers; put it back, "
            f"{FIX if objects else 'choose another --run_dir, or continue anyway with --resume.force true'}"
        )
    targets, saved_fingerprints = flatten(config), saved.get("fingerprints", {})
    for key, new in now["fingerprints"].items():
        target = targets.get(f"{key}.target", targets.get(key))  # a path alone, or with arguments
        name, old = f"{key}: {target}", saved_fingerprints.get(key)
        if key in objects and (old != new or new.startswith(NOT_COMPARABLE)):
            raise UsageError(f"{name} {_difference(old, new, step)}")
        if old is not None and old != new:
            safe_print.say(
                f"warning: {name} has changed since this run was trained to step {step}; the result may not be that of "
                "the current code (another --run_dir starts over)"
            )


def _difference(old: str | None, new: str, step: int) -> str:
    """Describe how an object differs from the one that a run was trained with, and how to continue."""
    reason = next((x.removeprefix(NOT_COMPARABLE) for x in (new, old or "") if x.startswith(NOT_COMPARABLE)), None)
    if reason is not None or old is None:
        return (
            f"cannot be compared with the one that this run was trained with to step {step} "
            f"({reason or 'it was saved without a fingerprint'}); give its dotted path, such as 'module.name', {FIX}"
        )
    return (
        f"is not the one that this run was trained with to step {step}: its code or values differ; put it back, {FIX}"
    )


def lock_run_dir(directory: pathlib.Path, context: Context, checkpoints: Checkpoints) -> IO[str] | None:
    """Create and lock the run directory on rank 0, and check that every rank can use it; return the lock."""
    file, problem = rundir.make(directory) if context.is_root else (None, None)
    context.agree(problem)
    nonce = context.of_root("run_dir", lambda: rundir.nonce(directory))
    context.agree(checkpoints.attach(nonce))
    return file


def resume_step(
    run: Run, config: Config, context: Context, objects: Objects, tidy: bool = True
) -> tuple[int, dict[str, Any]]:
    """Return (the step of the checkpoint to resume from, its metadata), or (0, {}) without a checkpoint.

    Raises UsageError if the config, the data or an object of a script would change the numbers, unless resume.force.
    """
    checkpoints = run.checkpoints
    start = checkpoints.latest(safe_print.say, tidy)
    if not start:
        return 0, {}
    saved = context.of_root("meta", lambda: checkpoints.meta(start))
    if not config.resume.force:
        if run.data.train.order.sequential and "order" not in saved["config"].get("data", {}):
            text = "shuffled, as before this key existed -> sequential, because the model carries state"
            raise UsageError(f"data.order: {text}; set data.order to shuffled, or choose another --run_dir", rank=0)
        compare = lambda: check_same_run(saved, run.checkpoints.facts, config, start, objects)
        on_all_ranks(context, compare if context.is_root else lambda: None)
    return start, saved
