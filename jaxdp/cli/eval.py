"""The verb `eval`: evaluate a checkpoint of a run directory."""

import pathlib

from jaxdp.checkpoint.store import choose_step
from jaxdp.cli import Call
from jaxdp.errors import RunFailed, UsageError
from jaxdp.metrics.console import Console
from jaxdp.parallel.placement import open_collectives
from jaxdp.run import rundir
from jaxdp.run.build import make_run, restore
from jaxdp.run.components import NOTHING
from jaxdp.run.datasets import not_finite
from jaxdp.run.start import resume_step
from jaxdp.run.training_job import use_compilation_cache
from jaxdp.train.evaluate import evaluate


def run(call: Call) -> None:
    """Evaluate and print the result on root.

    Raises UsageError without the checkpoint or evaluation data, and RunFailed if a loss is not
    finite."""
    config, context, wanted = call.config, call.context, call.options["step"]
    directory = rundir.directory_of(config, call.path).absolute()
    is_saved = (
        call.path is not None and pathlib.Path(call.path).absolute() == directory / "config.yaml"
    )
    with rundir.inside(rundir.folder(directory) if is_saved else None):
        use_compilation_cache(config, context)
        prepared = make_run(config, directory, context)
        only = context.of_root("step", lambda: wanted and choose_step(directory, wanted))
        step, _ = resume_step(prepared, config, context, NOTHING, tidy=False, only=only)
        if not step:
            raise UsageError(
                f"run_dir: no checkpoint in {str(directory)!r}; train first, or name another"
                if only is None
                else f"--step: no undamaged checkpoint {only} in {str(directory)!r}; name another",
                rank=0,
            )
        if not prepared.data.eval:
            raise UsageError(
                "eval.data: the data has no test split; name what to evaluate on", rank=0
            )
        open_collectives(context)
        state = restore(prepared, step)
        record = evaluate(prepared, prepared.strategy.compile(prepared.step), state)
        if context.is_root:
            Console(step, panel=False).write({"step": step, "split": "eval", **record})
        if (problem := not_finite(prepared, record)) is not None:
            raise RunFailed(problem[0], rank=0)
