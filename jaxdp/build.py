"""Config -> Run: the only file that sees both sides. Everything below it takes plain arguments."""

import dataclasses
import hashlib
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
from flax import nnx

from jaxdp import config as schema
from jaxdp import loop, rundir
from jaxdp.checkpoint import Checkpoints
from jaxdp.config import Config
from jaxdp.data import SOURCES
from jaxdp.data.base import Dataset, as_dataset, check_dtypes, fingerprint
from jaxdp.data.cursor import Cursor
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.losses import LOSSES, LossFn
from jaxdp.metrics.console import Console
from jaxdp.metrics.jsonl import JsonLines, read
from jaxdp.metrics.writer import Many, Nothing, Record, Writer
from jaxdp.models import MODELS, as_model
from jaxdp.models.base import Model
from jaxdp.optim import OPTIMIZERS, make_optimizer, make_schedule
from jaxdp.parallel import STRATEGIES
from jaxdp.parallel.base import slot_table
from jaxdp.parallel.reduction import make_reduction
from jaxdp.precision import policy
from jaxdp.profile import Profile
from jaxdp.step import TrainState, init_state, make_step
from jaxdp.targets import bind, call, locate, parameters, require

T = TypeVar("T")
SLOW = 600.0  # seconds that one rank may take longer than another to read its data


def train(config: Config, path: str | None, context: Context) -> None:
    """The verb `train`: makes the run directory, then trains to the last update."""
    directory = schema.run_dir(config, path)
    run = make_run(config, directory, context)
    share(directory, context)
    start = resume_step(directory, config, context)
    if start > run.steps:
        raise UsageError(f"steps: {run.steps}, but {str(directory)!r} has already made {start}; give more", rank=0)
    final = [record for record in read(directory / "metrics.jsonl") if record.get("split") == "final"]
    if start == run.steps and final:
        if context.is_root:
            print(f"finished: {directory} is at its last step {start}; nothing to do (another --run_dir starts anew)")
            print(summary(final[-1], directory))
        return
    run = dataclasses.replace(run, start=start, profile=make_profile(config, directory, start, run.steps))
    writer = start_writer(directory, config, context, run)
    run = dataclasses.replace(run, writer=writer)
    try:
        writer.say(summary(loop.fit(run), directory))
    finally:
        writer.close()


def summary(final: Record, directory: pathlib.Path) -> str:
    numbers = [f"{name} {final[name]:.4f}" for name in ("loss", "accuracy") if name in final]
    return "  ".join([*numbers, f"params_sha256 {final['params_sha256'][:16]}", f"files in {directory}"])


def eval(config: Config, path: str | None, context: Context) -> None:
    """The verb `eval`: evaluates the last checkpoint of the run directory, and prints the result."""
    directory = schema.run_dir(config, path)
    saved = Checkpoints(directory / "checkpoints").steps()
    step = int(context.exchange("eval", str(saved[-1] if saved else 0))[0])
    if not step:
        raise UsageError(f"run_dir: no checkpoint in {str(directory)!r}; train first, or name another", rank=0)
    run = make_run(config, directory, context)
    if run.eval is None:
        raise UsageError("eval.data: the data has no test split; name what to evaluate on", rank=0)
    record = loop.evaluate(run, run.strategy.lower(run.step), loop.restore(run, step))
    if context.is_root:
        Console(step).write({"step": step, "split": "eval", **record})


def share(directory: pathlib.Path, context: Context) -> None:
    """Makes the run directory on rank 0, and checks that every rank sees the same one."""
    context.agree(rundir.make(directory) if context.is_root else None)
    nonce = context.exchange("run_dir", rundir.nonce(directory) if context.is_root else "")[context.root_rank]
    context.agree(rundir.is_shared(directory, nonce))


def resume_step(directory: pathlib.Path, config: Config, context: Context) -> int:
    """The checkpoint to go on from (0 for none); UsageError where the config would change its numbers."""
    previous = rundir.saved_config(directory)
    context.barrier("config read")  # before rank 0 may write it anew
    saved = Checkpoints(directory / "checkpoints").steps()
    start = int(context.exchange("resume", str(saved[-1] if saved else 0))[context.root_rank])
    if start and previous is not None:
        changed = schema.changed_numbers(previous, config)
        if config.optimizer.schedule == "constant" or config.optimizer.schedule_steps is not None:
            changed = [c for c in changed if not c.startswith(("steps:", "epochs:"))]
        if changed:
            raise UsageError(
                f"{changed[0]}: {str(directory)!r} was trained to step {start} with another value, and this "
                f"one changes the numbers{f' (and {len(changed) - 1} more)' if changed[1:] else ''}; put it back, or "
                "choose another --run_dir",
                rank=0,
            )
    return start


def make_run(config: Config, directory: pathlib.Path, context: Context) -> loop.Run:
    """The built objects of a config, nothing of them computed yet; writes nothing."""
    if config.precision.params == "float64":
        jax.config.update("jax_enable_x64", True)
    jax.config.update(
        "jax_default_matmul_precision", None if config.precision.matmul == "default" else config.precision.matmul
    )
    settings = jax.config.values
    if not settings["jax_threefry_partitionable"] or settings["jax_default_prng_impl"] != "threefry2x32":
        raise UsageError("jax_default_prng_impl: keys must be partitionable threefry, or numbers depend on the devices")
    if "" not in sys.path:  # a target may be a module in the folder that the command runs in
        sys.path.insert(0, "")
    (dataset, eval_set), model, loss = together(context, lambda: make_parts(config))
    context.check_same("the run", facts(config, dataset))

    devices = choose_devices(config, context)
    slot_table(config.microbatches, len(devices))  # more devices than microbatches: said before anything is built
    cursor = Cursor(len(dataset), config.batch_size, config.microbatches, config.seed)
    steps = config.steps or math.ceil((config.epochs or 0) * cursor.steps_per_epoch)
    opt = config.optimizer
    schedule = make_schedule(opt.schedule, opt.lr, opt.schedule_steps or steps, opt.warmup_steps, opt.final_lr)
    dtypes = config.precision
    numbers = policy(dtypes.params, dtypes.compute or dtypes.params, dtypes.reduce or dtypes.params)
    tx = make_tx(config, schedule)
    step = make_step(
        model, loss, tx, seed=config.seed, policy=numbers, clip_norm=opt.clip_norm, schedule=schedule,
        accumulate="vmap" if config.parallel.accumulate == "auto" else config.parallel.accumulate,
        transform=getattr(dataset, "transform", None),
    )  # fmt: skip
    strategy = STRATEGIES[config.parallel.backend](
        config.microbatches,
        make_reduction(config.parallel.reduction, config.parallel.bucket_mb),
        None if config.precision.reduce == config.precision.params else numbers.reduce,
        devices,
    )
    example = probe(dataset, cursor)

    def make_state() -> TrainState:
        inputs = {k: jax.numpy.asarray(v) for k, v in example.items()}
        if hasattr(dataset, "transform"):
            inputs = dataset.transform(inputs, jax.random.key(0), False)
        return init_state(model, tx, numbers, config.seed, config.microbatches, inputs)

    source = None
    if eval_set is not None:
        source = loop.Source(eval_set, Cursor(len(eval_set), config.batch_size, config.microbatches, 0, shuffle=False))
    return loop.Run(
        strategy=strategy,
        step=step,
        make_state=make_state,
        train=loop.Source(dataset, cursor),
        eval=source,
        steps=steps,
        writer=Nothing(),
        checkpoints=Checkpoints(directory / "checkpoints", config.checkpoint.keep),
        log_every=config.log.every,
        eval_every=config.eval.every,
        save_every=config.checkpoint.every,
    )


def make_profile(config: Config, directory: pathlib.Path, start: int, steps: int) -> Profile:
    """The traced window, where it lies in what is left to do."""
    first = config.profile.start
    if first is None or not start <= first < steps:
        return Profile()
    return Profile(str(directory / "profile"), first, min(config.profile.steps, steps - first))


def together(context: Context, make: Callable[[], T]) -> T:
    """What `make` gives on this rank; where it is refused on any, every rank raises the `UsageError` of the lowest."""
    try:
        made, problem = make(), None
    except UsageError as error:
        made, problem = None, str(error)
    context.agree(problem, SLOW)
    return cast(T, made)


def make_parts(config: Config) -> tuple[tuple[Dataset, Dataset | None], Model, LossFn]:
    """((training set, what to evaluate on or None), model, loss). Names are checked before any data is read."""
    target = locate("model", config.model.target, MODELS)
    bind("model", target, config.model.args)
    loss = make_loss(config)
    make_tx(config, lambda step: 0.0)
    data = make_data(config)
    return data, make_model(config, target, data[0]), loss


def make_data(config: Config) -> tuple[Dataset, Dataset | None]:
    """(the training set, what to evaluate on or None)."""
    cls = locate("data", config.data.target, SOURCES)
    splits = "split" in parameters(cls) and "split" not in config.data.args
    dataset = as_dataset(call("data", bind("data", cls, config.data.args, {"split": "train"})))
    check_dtypes(dataset, config.precision.params == "float64")
    if config.eval.data is not None:
        other = locate("eval.data", config.eval.data.target, SOURCES)
        eval_set: Any = call("eval.data", bind("eval.data", other, config.eval.data.args, {"split": "test"}))
    elif splits:
        eval_set = call("data", bind("data", cls, config.data.args, {"split": "test"}))
    else:
        return dataset, None
    eval_set = as_dataset(eval_set)
    check_dtypes(eval_set, config.precision.params == "float64")
    return dataset, eval_set


def make_model(config: Config, target: Any, dataset: Dataset) -> Model:
    """A Flax module, or whatever else a target gives, as a `Model`; it may take input_shape and num_classes."""
    shape = next(iter(dataset.read(np.zeros(1, np.int64)).values())).shape[1:]
    known = {"input_shape": getattr(dataset, "input_shape", shape), "num_classes": getattr(dataset, "classes", None)}
    bound = bind("model", target, config.model.args, {k: v for k, v in known.items() if v is not None})
    if isinstance(target, type) and issubclass(target, nnx.Module):
        require("model", bound, "rngs")
        return call("model", bound, lambda: as_model(lambda rngs: bound(rngs=rngs)))
    return as_model(call("model", bound))


def make_loss(config: Config) -> LossFn:
    """A class is made; a function is the loss itself, with its arguments set."""
    factory = locate("loss", config.loss.target, LOSSES)
    bound = bind("loss", factory, config.loss.args)
    return call("loss", bound) if isinstance(factory, type) else bound


def make_tx(config: Config, schedule: Any) -> Any:
    opt = config.optimizer
    target = locate("optimizer", opt.target, OPTIMIZERS)
    bind("optimizer", target, opt.args)
    try:
        return make_optimizer(target, schedule, opt.weight_decay, opt.no_decay, **opt.args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"optimizer.args: {opt.target} with {opt.args} failed: {error}") from error


def choose_devices(config: Config, context: Context) -> list[jax.Device]:
    devices, wanted = jax.devices(), config.parallel.devices
    if wanted is None:
        return devices
    if context.size > 1 and wanted != len(devices):
        raise UsageError(
            f"parallel.devices: {wanted}, but {context.size} processes use all {len(devices)}; leave it null", rank=0
        )
    if wanted > len(devices):
        raise UsageError(f"parallel.devices: {wanted}, but there are {len(devices)}; make it smaller")
    return devices[:wanted]


def probe(dataset: Dataset, cursor: Cursor) -> dict[str, np.ndarray]:
    """One microbatch [example, ...] in the shape and dtype of the data, for initialization by shape."""
    return dataset.read(np.zeros(cursor.examples_per_microbatch, np.int64))


def facts(config: Config, dataset: Dataset) -> dict[str, str]:
    """What must be equal on every rank: every config key, the package's code, the data."""
    keys = {k: repr(v) for k, v in schema.flatten(config).items()}
    code = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        code.update(file.read_bytes())
    return {**keys, "the jaxdp package's code": code.hexdigest()[:16], "data fingerprint": fingerprint(dataset)}


def start_writer(directory: pathlib.Path, config: Config, context: Context, run: loop.Run) -> Writer:
    """Writes config.yaml and env.json, and opens the writers; a rank other than root writes nothing."""
    if not context.is_root:
        return Nothing()
    devices = run.strategy.devices
    rundir.write_config(directory, dataclasses.asdict(config))
    rundir.write_env(
        directory,
        {
            "devices": {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform},
            "topology": {
                "processes": context.size,
                "local_processes": context.local_size,
                "hosts": list(context.hosts),
            },
            "launcher": context.launcher,
            "backend": config.parallel.backend,
        },
    )
    shapes = jax.eval_shape(run.make_state)
    begin = f"goes on after step {run.start}" if run.start else "starts"
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes.params))
    writer = Many([JsonLines(directory / "metrics.jsonl", run.start), Console(run.steps, run.start, context.size == 1)])
    writer.say(
        f"{config.model.target} {count:,} parameters; {config.data.target} {len(run.train.dataset):,} examples; "
        f"batch {config.batch_size} in {config.microbatches} microbatches; {config.optimizer.target}\n"
        f"{len(devices)} x {devices[0].device_kind} in {context.size} process{'es' * (context.size > 1)} "
        f"({context.launcher}), {config.parallel.backend}; {begin} in {directory}"
    )
    return writer
