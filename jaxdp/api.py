"""`fit`: train your own objects from a script, with the keys of a config as arguments."""

import atexit
import dataclasses
import os
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.config import Config
from jaxdp.config.parsing import from_mapping
from jaxdp.errors import PREEMPTED, DistributedError, UsageError, check_one_of
from jaxdp.extras import extras_of
from jaxdp.process import environment, launchers, signals
from jaxdp.run.objects import name_it
from jaxdp.targets import OBJECT

if TYPE_CHECKING:
    from jaxdp.process.context import Context
    from jaxdp.run.fitted import Fitted

SECTIONS = ("model", "data", "loss", "optimizer")


def fit(
    model: Any,
    data: Any,
    loss: Any = "SoftmaxCrossEntropy",
    optimizer: Any = "adamw",
    *,
    eval_data: Any = None,
    transform: Any = None,
    callbacks: Sequence[Any] = (),
    run_dir: str | pathlib.Path | None = None,
    overwrite: bool = False,
    **config: Any,
) -> "Fitted":
    """Train like `jaxdp train` on all devices of all processes; resume the run in `run_dir`, if
    any.

        jaxdp.fit(Net, (images, labels), steps=1000, batch_size=64, optimizer={"target": "adamw", "lr": 3e-4},
                  run_dir="runs/net")

    model: a Flax or Equinox class, a function that returns a module, a Linen module, or a pair of
    functions (init, apply). data: a pair (inputs, labels) of arrays, a dict of arrays, a sized
    sequence of examples, or a Dataset. loss: a function or object (outputs, batch) -> (sum, weight,
    metric sums). optimizer: an Optax transformation. Each of them may also be a name as in a
    config, or {"target": name or object, "args": {...}, ...}. eval_data: the evaluation set; by
    default the dataset's test split, if it has one. transform: see `data.transform`. callbacks:
    objects with methods of `jaxdp.Observer`, or entries as in a config. The other
    arguments are keys of a config, with dicts for its sections: steps or epochs, batch_size,
    microbatches, parallel={"zero": 1}, eval={"every": 100} (docs/own_model.md; `jaxdp train --help`
    lists all).

    run_dir: the directory of all output; None: a temporary one, removed when the process ends. An
    existing run is resumed, or returned if it has finished, if it has the same config and objects:
    objects are compared by what they compute; those that differ raise UsageError. overwrite: remove
    an existing run and start again.

    Returns a `jaxdp.run.fitted.Fitted`: predict, evaluate, model, history, params. Under mpirun
    every process calls `fit`. Raises UsageError for arguments that do not fit, before training
    starts. SIGTERM, SIGUSR1 and SIGHUP end the script with exit code 75, after a save; so does
    SIGINT, which in a single process raises KeyboardInterrupt instead.
    """
    objects: dict[str, dict[str, Any]] = {}
    values = dict(config)
    for section, value in zip(SECTIONS, (model, data, loss, optimizer)):
        values[section] = name_it(objects, section, value)
    if eval_data is not None and isinstance(section := values.get("eval", {}), Mapping):
        values["eval"] = {**section, "data": name_it(objects, "eval.data", eval_data)}
    if transform is not None:
        values["data"] = {
            **values["data"],
            "transform": name_it(objects, "data.transform", transform),
        }
    if callbacks:
        if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
            raise UsageError(
                f"callbacks: {callbacks!r} is not a list; give one, such as [EarlyStopping()]"
            )

        def named(i, c):
            return c if isinstance(c, str | Mapping) else f"{type(c).__qualname__} {i}{OBJECT}"

        values["callbacks"] = [named(i, c) for i, c in enumerate(callbacks)]
        objects["callbacks"] = {
            name: c for name, c in zip(values["callbacks"], callbacks) if name is not c
        }
    values["run_dir"] = run_dir
    check_one_of("overwrite", overwrite, (True, False))
    return run(from_mapping(values, "fit"), objects, overwrite)


def run(
    config: Config, objects: Mapping[str, Mapping[str, Any]], overwrite: bool = False
) -> "Fitted":
    """Train a config with the objects of a script, {section: {name: object}}."""
    set_environment(config)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signals.listen(end_start, interrupts=launchers.discover().size == 1)
    context = join(config, objects)
    if config.run_dir is None:
        config = dataclasses.replace(config, run_dir=context.of_root("run_dir", temporary))
    from jaxdp.process.context import leave
    from jaxdp.process.monitor import Stopped
    from jaxdp.run.fitted import make_fitted, settings
    from jaxdp.run.training_job import train

    if in_main_thread:
        signals.act()
    try:
        with settings(config):
            final, state = train(config, None, context, objects, keep=True, overwrite=overwrite)
            assert state is not None
            return make_fitted(final, state, config, objects)
    except Stopped as stop:
        if context.size > 1:
            leave(PREEMPTED, speaker=0)
        raise KeyboardInterrupt if stop.why == "SIGINT" else SystemExit(PREEMPTED) from None
    finally:
        if in_main_thread:
            signals.restore()


def join(
    config: Config | None,
    objects: Mapping[str, Mapping[str, Any]] | None = None,
    error: str | None = None,
) -> "Context":
    """Set XLA's flags and join the job. Raises UsageError on every rank if any rank passes an
    error: that of its config, which is None then."""
    from jaxdp.process.context import init

    left_out = None
    if config is not None:
        left_out = environment.set_gpu_flag(config.parallel.devices)
    groups = (extra.group(objects or {}) for extra in extras_of(config))
    context = init(group=next(filter(None, groups), None))
    if context.backend is not None:
        raise UsageError(
            f"backend: {context.backend} serves loops of your own, and training needs JAX's service; "
            "leave backend out of jaxdp.init"
        )
    context.agree(error)
    if left_out and context.is_root:
        print(f"jaxdp: {left_out}", file=sys.stderr)
    return context


def end_start(name: str) -> None:
    """End this process, and its job, after a signal before the first update: there is nothing to
    save.

    Runs in a thread, since the main thread may wait for something that never comes.
    """
    text = f"{name} before the first update: nothing to save; run the same command to start again"
    if (context := sys.modules.get("jaxdp.process.context")) is None:
        os.write(2, f"jaxdp: {text}\n".encode())
        os._exit(PREEMPTED)
    context.fail(DistributedError(text), PREEMPTED)


def set_environment(config: Config | None, simulated: bool = True) -> None:
    """Set the environment variables for threads, and those of extras, before JAX opens its devices.

    simulated: whether programs run on simulated devices.
    """
    for extra in extras_of(config):
        extra.set_environment()
    if simulated:
        environment.enough_threads()


def temporary() -> str:
    """Return a new directory that is removed when this process ends."""
    directory = tempfile.mkdtemp(prefix="jaxdp-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
