"""`fit`: train your own objects from a script, with the keys of a config as arguments."""

import atexit
import dataclasses
import inspect
import pathlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdp import environment
from jaxdp.config import Config
from jaxdp.config.reading import from_mapping
from jaxdp.errors import UsageError
from jaxdp.supervise import signals
from jaxdp.targets import OBJECT, OF_SCRIPT, name_of

SECTIONS = ("model", "data", "loss", "optimizer")


class Fitted(NamedTuple):
    """The result of a run.

    final: the last record: loss, metrics, params_sha256. params, model_state: trees of NumPy arrays, the same on every
    rank. run_dir: the directory of metrics.jsonl and the checkpoints.
    """

    final: dict[str, Any]
    params: Any
    model_state: Any
    run_dir: pathlib.Path


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
) -> Fitted:
    """Train like `jaxdp train` on all devices of all processes; resume the run in `run_dir`, if any.

        jaxdp.fit(Net, (images, labels), steps=1000, batch_size=64, optimizer={"target": "adamw", "lr": 3e-4},
                  run_dir="runs/net")

    model: a Flax or Equinox class, a function that returns a module, a Linen module, or a pair of functions (init,
    apply). data: a pair (inputs, labels) of arrays, a dict of arrays, a sized sequence of examples, or a Dataset. loss:
    a function or object (outputs, batch) -> (sum, weight, metric sums). optimizer: an Optax transformation. Each of
    them may also be a name as in a config, or {"target": name or object, "args": {...}, ...}. eval_data: the evaluation
    set; by default the dataset's test split, if it has one. transform: see `data.transform`. callbacks: objects with
    methods of `jaxdp.training.callbacks`. The other arguments are keys of a config, with dicts for its sections: steps
    or epochs, batch_size, microbatches, parallel={"zero": 1}, eval={"every": 100} (docs/own_model.md; `jaxdp train
    --help` lists all).

    run_dir: the directory of all output; None: a temporary one, removed when the process ends. An existing run is
    resumed, or returned if it has finished, if it has the same config and objects: objects are compared by code and
    values; those that differ or cannot be compared raise UsageError. overwrite: remove an existing run and start again.

    Under mpirun every process calls `fit`. Raises UsageError for arguments that do not fit, before training starts.
    SIGTERM and SIGUSR1 end the script with exit code 75, after a save; so does SIGINT, which in a single process raises
    KeyboardInterrupt instead.
    """
    objects: dict[str, dict[str, Any]] = {}
    values = dict(config)
    for section, value in zip(SECTIONS, (model, data, loss, optimizer)):
        values[section] = name_it(objects, section, value)
    if eval_data is not None:
        values["eval"] = {**values.get("eval", {}), "data": name_it(objects, "eval.data", eval_data)}
    if transform is not None:
        values["data"] = {**values["data"], "transform": name_it(objects, "data.transform", transform)}
    if callbacks:
        objects["callbacks"] = {f"{type(c).__qualname__} {i}{OBJECT}": c for i, c in enumerate(callbacks)}
        values["callbacks"] = list(objects["callbacks"])
    values["run_dir"] = None if run_dir is None else str(run_dir)
    return run(from_mapping(values, "fit"), objects, overwrite)


def run(config: Config, objects: Mapping[str, Mapping[str, Any]], overwrite: bool = False) -> Fitted:
    """Train a config with the objects of a script, {section: {name: object}}."""
    if config.parallel.exact:
        environment.exact()
    environment.enough_threads()
    if config.outer.replicas > 1:
        environment.tolerate_cuts()
    ignored_flags = environment.use_preset(config.parallel.xla_preset, config.parallel.devices)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signals.listen()
    import jaxdp
    from jaxdp.job.elastic import settings

    context = jaxdp.init(elastic=settings(config))
    context.agree(None)
    if config.run_dir is None:
        config = dataclasses.replace(config, run_dir=context.of_root("run_dir", temporary))
    if ignored_flags and context.is_root:
        print(f"jaxdp: {ignored_flags}", file=sys.stderr)
    import jax

    from jaxdp import compilation_cache
    from jaxdp.assemble.components import SETTINGS
    from jaxdp.distributed.context import leave
    from jaxdp.errors import PREEMPTED
    from jaxdp.job.train import train
    from jaxdp.supervise.monitor import Stopped

    if in_main_thread:
        signals.act()
    before, cache = {name: jax.config.values[name] for name in SETTINGS}, compilation_cache.settings()
    try:
        final, state = train(config, None, context, objects, keep=True, overwrite=overwrite)
        assert state is not None
        params, model_state = jax.device_get(jax.tree.map(readable, (state.params, state.model_state)))
    except Stopped as stop:
        if context.size > 1:
            leave(PREEMPTED, speaker=0)
        raise KeyboardInterrupt if stop.why == "SIGINT" else SystemExit(PREEMPTED) from None
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.leave(cache)
        if in_main_thread:
            signals.restore()
    return Fitted(final, params, model_state, pathlib.Path(str(config.run_dir)))


def temporary() -> str:
    """Return a new directory that is removed when this process ends."""
    directory = tempfile.mkdtemp(prefix="jaxdp-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def readable(x: Any) -> Any:
    """Return the array, replicated if this process cannot read all of it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    return jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)


def name_it(objects: dict[str, dict[str, Any]], section: str, value: Any) -> dict[str, Any]:
    """Return the config section that names an object, and add the object to `objects`."""
    if isinstance(value, str):
        return {"target": value}
    rest: dict[str, Any] = {}
    if isinstance(value, Mapping) and "target" in value:
        rest, value = {k: v for k, v in value.items() if k != "target"}, value["target"]
        if isinstance(value, str):
            return {"target": value, **rest}
    is_factory = isinstance(value, type) or inspect.isroutine(value)
    named = value if is_factory else type(value)
    name = f"{named.__module__}.{named.__qualname__}".removeprefix("builtins.")
    if section == "optimizer":
        if not hasattr(value, "update"):
            raise UsageError(f"optimizer: {name} is not an Optax transformation; give one, such as optax.adam(1e-3)")
        for key in {"lr", "schedule", "warmup_steps", "schedule_steps", "final_lr"} & {*rest}:
            raise UsageError(
                f"optimizer.{key}: {rest[key]!r}, but an Optax transformation has its own learning rate; set it there"
            )
        name = f"{OF_SCRIPT} {name_of(value)}"
        value = _as_factory(value, name)
    elif not importable(named, value):
        name += OBJECT
    objects[section] = {name: value}
    return {"target": name, **rest}


def importable(named: Any, value: Any) -> bool:
    """Return True if another process can import the value by its dotted path."""
    target: Any = sys.modules.get(named.__module__) if named.__module__ != "__main__" else None
    for part in named.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is value


def _as_factory(value: Any, name: str) -> Any:
    """Wrap a transformation in a function of a learning rate, which it ignores."""
    make = lambda learning_rate: value
    make.__name__ = name
    return make
