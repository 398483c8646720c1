"""Find the checkpoint to resume from, and check that config, data and code are unchanged."""

import os
import pathlib
import re
from collections.abc import Collection
from typing import IO, Any

from jaxdp.checkpoint.manifest import Meta
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.config import Config
from jaxdp.config.validation import as_saved, changed_numbers, flatten
from jaxdp.data.contents import EARLIER, difference, partly
from jaxdp.errors import UsageError
from jaxdp.metrics import safe_print
from jaxdp.process.context import Context
from jaxdp.run import rundir
from jaxdp.run.build import on_all_ranks
from jaxdp.run.components import Objects
from jaxdp.train.run import Run

FIX = (
    "choose another run_dir (None is a temporary one), replace the run with overwrite=True, or continue it anyway "
    "with resume={'force': True}"
)
FIX_OF_COMMAND = "choose another --run_dir, or continue anyway with --resume.force true"
CODE = {  # what is compared -> what decides it; the first one that differs is named
    "the gradients": "the model, the loss or a transform",
    "the update": "the optimizer",
    "the initial state": "the initial state of the model or the optimizer",
    "the evaluation data": "the evaluation data",
}


def check_same_run(
    saved: Meta,
    now: Meta,
    config: Config,
    step: int,
    objects: Collection[str],
) -> None:
    """Raise UsageError if the checkpoint of `step` was trained with other values, data or objects.

    saved, now: the metadata of that checkpoint, and of this run. objects: the config keys for which
    a script passed objects; other code of the user has a dotted path, and a change of it is only a
    warning. Code is compared by what JAX traces of it, which another version or platform may trace
    differently."""
    spares = config.optimizer.weight_decay and sorted(spared_by(saved)) != sorted(now["spared"])
    changed = changed_numbers(saved["config"], config, () if spares else ("optimizer.no_decay",))
    if digests := difference(saved_contents(saved), now["data_contents"]):
        changed += [f"data fingerprint: {digests}", *moved(config, saved.get("folder"))]
    if changed:
        more = f" (and {len(changed) - 8} more)" if changed[8:] else ""
        growing = ""
        if any(line.startswith(("steps: ", "epochs: ")) for line in changed):
            growing = (
                ", as the schedule ends there unless optimizer.schedule_steps is set from the start"
            )
        fix = FIX if objects else FIX_OF_COMMAND
        raise UsageError(
            f"{'; '.join(changed[:8])}{more}: this run was trained to step {step} with the old value, which changes "
            f"the numbers{growing}; put it back, {fix}"
        )
    if any(saved.get(key) != now[key] for key in ("versions", "traced")):
        if objects:
            text = "as JAX, another package, the platform, accumulate or remat differs"
            safe_print.say(
                f"warning: the script's objects are not compared with those trained to step {step}, {text}"
            )
        return
    old, new = saved["programs"], now["programs"]
    differing = [key for key in CODE if key in new and old.get(key, new[key]) != new[key]]
    if not differing:
        return
    name = CODE[differing[0]]
    if objects:
        raise UsageError(
            f"{name} is not the one that this run was trained with to step {step}; put it back, {FIX}"
        )
    safe_print.say(
        f"warning: {name} has changed since this run was trained to step {step}; the result may not be that of the "
        "current code (another --run_dir starts over)"
    )


def moved(config: Config, folder: str | None, lost: bool = False) -> list[str]:
    """Return "KEY: PATH is FILE, but was FILE" of relative paths that mean other files than where
    the run started.

    folder: the working directory of that start, None if it is unknown. lost: only those that mean
    no file here."""
    texts, here = list[str](), os.getcwd()
    for key, value in flatten(config).items():
        if folder is None or ".args." not in key or not isinstance(value, str) or not value:
            continue
        old, new = (os.path.join(top, os.path.expanduser(value)) for top in (folder, here))
        exists = os.path.exists(new)
        if os.path.exists(old) and not (exists and (lost or os.path.samefile(old, new))):
            texts.append(
                f"{key}: {value!r} is {new!r} here, but was {old!r} where the run was started ({folder!r})"
            )
    return texts


def check_paths(config: Config, directory: pathlib.Path) -> None:
    """Raise UsageError if relative paths of a run that resumes mean files that are only where it
    was started.
    """
    if Checkpoints(directory / "checkpoints").steps() and (
        texts := moved(config, rundir.folder(directory), lost=True)
    ):
        raise UsageError(f"{'; '.join(texts)}; run the command there, or choose another --run_dir")


def saved_contents(saved: Meta) -> Meta:
    """Return the contents of the training data in the metadata of a checkpoint."""
    return saved.get("data_contents", {**EARLIER, "probes": saved["data_fingerprint"]})


def compare_contents(saved: Meta, now: Meta, step: int) -> list[str]:
    """Return the keys of the evaluation sets that have changed since the checkpoint of `step`;
    print a line about them, and one about what was not compared."""
    old = saved.get("eval_contents")
    new = now["eval_contents"]
    pairs = {"data": (saved_contents(saved), now["data_contents"])}
    pairs |= {key: (old[key], content) for key, content in new.items() if old and key in old}
    unknown = [f"{key} (none of it)" for key in new if old is None]
    some = [f"{key} ({text})" for key, pair in pairs.items() if (text := partly(*pair))]
    if some or unknown:
        safe_print.say(
            f"compared only in part with the data of step {step}: {', '.join(some + unknown)}"
        )
    changed = [key for key, pair in pairs.items() if key != "data" and difference(*pair)]
    if changed:
        safe_print.say(
            f"warning: {' and '.join(changed)}: the examples have changed since step {step} was evaluated; earlier "
            "metrics are of the old ones, the next evaluation is of the new ones"
        )
    return changed


def spared_by(saved: Meta) -> list[str]:
    """Return the paths of the parameters without weight decay; a checkpoint older than this fact
    has expressions.
    """
    if "spared" in saved:
        return saved["spared"]
    names = [path.removeprefix("params/") for path in saved["state"] if path.startswith("params/")]
    patterns = saved["config"]["optimizer"]["no_decay"]
    return [name for name in names if any(re.search(x, name) for x in patterns)]


def lock_run_dir(
    directory: pathlib.Path, context: Context, checkpoints: Checkpoints
) -> IO[str] | None:
    """Create and lock the run directory on rank 0, and check that every rank can use it; return the
    lock.
    """
    file, problem = rundir.make(directory) if context.is_root else (None, None)
    context.agree(problem)
    nonce = context.of_root("run_dir", lambda: rundir.nonce(directory))
    context.agree(checkpoints.attach(nonce))
    return file


def resume_step(
    run: Run,
    config: Config,
    context: Context,
    objects: Objects,
    tidy: bool = True,
    only: int | None = None,
) -> tuple[int, dict[str, Any]]:
    """Return (the step of the checkpoint to resume from, its metadata), or (0, {}) without a
    checkpoint.

    tidy, only: see `Checkpoints.latest`.
    The metadata has "changed" if `eval`, the evaluation data or `callbacks` differ from those that
    it was saved with. Raises UsageError if the config, the data or an object of a script would
    change the numbers, unless resume.force."""
    start = run.checkpoints.latest(safe_print.say, tidy, only=only)
    return (start, compared(run, config, context, objects, start)) if start else (0, {})


def compared(
    run: Run, config: Config, context: Context, objects: Objects, start: int
) -> dict[str, Any]:
    """Return the metadata of the checkpoint to resume from; see `resume_step`."""
    checkpoints = run.checkpoints
    saved = context.of_root("meta", lambda: checkpoints.meta(start))
    if not config.resume.force:
        if run.data.train.order.sequential and "order" not in saved["config"].get("data", {}):
            text = "shuffled, as before this key existed -> sequential, because the model carries state"
            raise UsageError(
                f"data.order: {text}; set data.order to shuffled, or choose another --run_dir",
                rank=0,
            )

        def check():
            if context.is_root:
                check_same_run(saved, checkpoints.facts, config, start, objects)

        on_all_ranks(context, check)
    changed = context.of_root("contents", lambda: compare_contents(saved, checkpoints.facts, start))
    old, new = as_saved(saved["config"] | saved.get("evaluated_with", {}), config)
    if changed or old["eval"] != new["eval"] or old["callbacks"] != new["callbacks"]:
        # the callback that stopped it may be gone
        saved |= {"stopped": None, "evaluated": False, "changed": True}
    return saved
