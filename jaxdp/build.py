"""Config -> Run: the only file that sees both sides. Everything below it takes plain arguments."""

import difflib
import hashlib
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np

from jaxdp import loop
from jaxdp.checkpoint import Checkpoints
from jaxdp.config import Config, Target
from jaxdp.config.check import flatten
from jaxdp.data import SOURCES
from jaxdp.data.base import Dataset, as_dataset, check_dtypes, fingerprint
from jaxdp.data.cursor import Cursor
from jaxdp.data.prefetch import read_batch
from jaxdp.distributed.context import Context
from jaxdp.errors import UsageError
from jaxdp.losses import LOSSES, LossFn
from jaxdp.metrics.writer import Nothing
from jaxdp.models import MODELS, as_model
from jaxdp.models.base import Model
from jaxdp.optim import OPTIMIZERS, make_optimizer, make_schedule
from jaxdp.parallel import STRATEGIES
from jaxdp.parallel.base import slot_table
from jaxdp.parallel.reduction import make_reduction
from jaxdp.precision import LossScaling, policy
from jaxdp.profile import Profile
from jaxdp.split import path_string
from jaxdp.step import Step, TrainState, init_state, make_step
from jaxdp.targets import bind, call, locate, parameters, require

T = TypeVar("T")
SLOW = 600.0  # seconds that one rank may take longer than another to read its data


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

    dtypes = config.precision
    numbers = policy(dtypes.params, dtypes.compute or dtypes.params, dtypes.reduce or dtypes.params)
    devices = choose_devices(config, context)
    slot_table(config.microbatches, len(devices))
    cursor = Cursor(len(dataset), config.batch_size, config.microbatches, config.seed)
    steps = config.steps or math.ceil((config.epochs or 0) * cursor.steps_per_epoch)
    opt, parallel = config.optimizer, config.parallel
    schedule = make_schedule(opt.schedule, opt.lr, opt.schedule_steps or steps, opt.warmup_steps, opt.final_lr)
    tx = make_tx(config, schedule, model.blocks)
    scaling = make_scaling(config)
    step = make_step(
        model,
        loss,
        tx,
        seed=config.seed,
        policy=numbers,
        clip_norm=opt.clip_norm,
        accumulate="vmap" if parallel.accumulate == "auto" else parallel.accumulate,
        remat=choose_remat(config, model),
        frozen=opt.frozen,
        ema_decay=opt.ema,
        loss_scaling=scaling,
        transform=getattr(dataset, "transform", None),
        eval_transform=getattr(eval_set, "transform", None),
        schedule=schedule,
    )
    example = dataset.read(np.zeros(1, np.int64))

    def make_state() -> TrainState:
        places = cursor.examples_per_microbatch
        inputs = {k: jax.numpy.broadcast_to(v[0], (places, *v.shape[1:])) for k, v in example.items()}
        if hasattr(dataset, "transform"):
            inputs = dataset.transform(inputs, jax.random.key(0), False)
        return init_state(
            model,
            tx,
            numbers,
            config.seed,
            config.microbatches,
            inputs,
            frozen=opt.frozen,
            ema=opt.ema is not None,
            loss_scaling=scaling,
        )

    def check() -> None:
        rehearse(step, make_state, read_batch(dataset, cursor, 0, [0]))
        check_paths(config, jax.eval_shape(make_state).params)

    together(context, check)
    strategy = STRATEGIES[parallel.backend](
        make_state,
        config.microbatches,
        make_reduction(parallel.reduction, parallel.bucket_mb),
        None if dtypes.reduce == dtypes.params else numbers.reduce,
        devices,
        zero=parallel.zero,
        shard_size=parallel.shard_size,
        accumulator=parallel.accumulator,
        blocks=model.blocks,
    )
    together(context, lambda: strategy.check(tx, step.trainable(strategy.shapes.params)))
    source = None
    if eval_set is not None:
        source = loop.Source(eval_set, Cursor(len(eval_set), config.batch_size, config.microbatches, 0, shuffle=False))
    return loop.Run(
        strategy=strategy,
        step=step,
        train=loop.Source(dataset, cursor),
        eval=source,
        steps=steps,
        writer=Nothing(),
        checkpoints=Checkpoints(directory / "checkpoints", config.checkpoint.keep),
        log_every=config.log.every,
        eval_every=config.eval.every,
        save_every=config.checkpoint.every,
        averaged=config.eval.ema,
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
    x64 = config.precision.params == "float64"
    found = locate("data", config.data.target, SOURCES)
    splits = callable(found) and "split" in parameters(found) and "split" not in config.data.args
    dataset = read_set("data", config.data, "train", x64)
    if config.eval.data is not None:
        return dataset, read_set("eval.data", config.eval.data, "test", x64)
    return dataset, read_set("data", config.data, "test", x64) if splits else None


def read_set(key: str, target: Target, split: str, x64: bool) -> Dataset:
    """The data set that a target makes, or is: the path of a sized sequence of examples will do."""
    found = locate(key, target.target, SOURCES)
    if not callable(found) and not hasattr(found, "__len__"):
        raise UsageError(
            f"{key}.target: {target.target!r} is {type(found).__name__}, neither examples nor what makes them"
        )
    made = call(key, bind(key, found, target.args, {"split": split})) if callable(found) else found
    dataset = as_dataset(made)
    check_dtypes(dataset, x64)
    return dataset


def make_model(config: Config, target: Any, dataset: Dataset) -> Model:
    """A Flax module, or whatever else a target gives, as a `Model`; it may take input_shape and num_classes."""
    first = dataset.read(np.zeros(1, np.int64))
    shape = first.get("inputs", next(iter(first.values()))).shape[1:]
    known: dict[str, Any] = {
        "input_shape": getattr(dataset, "input_shape", shape),
        "num_classes": getattr(dataset, "classes", 0),
    }
    bound = bind("model", target, config.model.args, {k: v for k, v in known.items() if v})
    wanted = bound.keywords.get("num_classes")
    if isinstance(wanted, int) and wanted < known["num_classes"]:
        raise UsageError(f"model.args.num_classes: {wanted}, but the data has {known['num_classes']} classes")
    if "rngs" in parameters(bound):  # an NNX class, or a function that makes its module
        require("model", bound, "rngs")
        return call("model", bound, lambda: as_model(lambda rngs: bound(rngs=rngs)))
    return call("model", bound, lambda: as_model(call("model", bound)))


def make_loss(config: Config) -> LossFn:
    """A class is made; a function is the loss itself, with its arguments set."""
    factory = locate("loss", config.loss.target, LOSSES)
    bound = bind("loss", factory, config.loss.args)
    return call("loss", bound) if isinstance(factory, type) else bound


def make_scaling(config: Config) -> LossScaling | None:
    scale, interval = config.precision.loss_scale, config.precision.loss_scale_interval
    if scale is None:
        return None
    return LossScaling(interval=interval) if scale == "dynamic" else LossScaling(float(scale), dynamic=False)


def choose_remat(config: Config, model: Model) -> str:
    """The named policy; by itself, stage 3 gathers the parameters of a block again rather than keep them whole."""
    if config.parallel.remat == "auto":
        return "dots_no_batch" if config.parallel.zero == 3 and model.blocks else "none"
    return config.parallel.remat


def check_paths(config: Config, params: Any) -> None:
    """UsageError for an expression that is meant for parameters and matches none, or freezes all of them."""
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for name in ("frozen", "lr_scale"):
        for pattern in getattr(config.optimizer, name):
            if not any(re.search(pattern, path) for path in paths):
                near = (difflib.get_close_matches(pattern, paths, 1, 0.1) or paths)[0]
                raise UsageError(f"optimizer.{name}: {pattern!r} matches no parameter; a path is such as {near!r}")
    if all(any(re.search(pattern, path) for pattern in config.optimizer.frozen) for path in paths):
        raise UsageError(f"optimizer.frozen: {config.optimizer.frozen!r} leaves nothing to train")


def make_tx(config: Config, schedule: Any, blocks: Sequence[str] = ()) -> Any:
    opt = config.optimizer
    target = locate("optimizer", opt.target, OPTIMIZERS)
    bound = bind("optimizer", target, opt.args)
    for arg, own in {"learning_rate": "lr", "weight_decay": "weight_decay", "mask": "no_decay"}.items():
        if arg in opt.args:
            raise UsageError(f"optimizer.args.{arg}: it is set by optimizer.{own}; set that")
    make = lambda: make_optimizer(
        target, schedule, opt.weight_decay, opt.no_decay, lr_scale=opt.lr_scale, blocks=blocks, **opt.args
    )
    return call("optimizer", bound, make)


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


def rehearse(step: Step, make_state: Callable[[], TrainState], batch: dict[str, np.ndarray]) -> None:
    """Traces one update of one microbatch, by shape alone: what does not fit is said before anything is made."""
    state = jax.eval_shape(make_state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            raise UsageError(f"model: parameter {path_string(path)!r} is {leaf.dtype}; only floats have a gradient")
        if not leaf.size:
            raise UsageError(f"model: parameter {path_string(path)!r} has shape {leaf.shape}; it holds nothing")

    def update(state: TrainState, batch: Any) -> Any:
        view = state.view._replace(carry=jax.tree.map(lambda x: x[:1], state.carry))
        return step.apply(state, step.grads(view, batch, jax.numpy.zeros(1, jax.numpy.int32)))

    jax.eval_shape(update, state, batch)


def facts(config: Config, dataset: Dataset) -> dict[str, str]:
    """What must be equal on every rank: every config key, the package's code, the data."""
    keys = {k: repr(v) for k, v in flatten(config).items()}
    code = hashlib.sha256()
    for file in sorted(pathlib.Path(__file__).parent.rglob("*.py")):
        code.update(file.read_bytes())
    return {**keys, "the jaxdp package's code": code.hexdigest()[:16], "data fingerprint": fingerprint(dataset)}
