"""The components that a config names: model, loss, optimizer, step and state; each can be built
separately. And the names by which a config can contain the objects of a script."""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import Partial

from jaxdp.checkpoint.orbax import import_all
from jaxdp.config import Config
from jaxdp.config.training import EXACT
from jaxdp.cpu import on_cpu
from jaxdp.data import SOURCES
from jaxdp.data.dataset import Dataset, class_names, first_example
from jaxdp.data.example_order import ExampleOrder
from jaxdp.data.transforms import TRANSFORMS, as_transform, both
from jaxdp.errors import UsageError, nearest, user_code
from jaxdp.extras import extras_of
from jaxdp.losses import LOSSES, compute_logits, make_loss
from jaxdp.models import MODELS, as_model, is_given
from jaxdp.models.base import Model
from jaxdp.optim import OPTIMIZERS, checked, decay_mask, find_roles, make_optimizer, make_schedule
from jaxdp.optim.optimizers import MASKS, taken_by, with_master
from jaxdp.optim.roles import AUTO, Role, describe, role_of
from jaxdp.parallel.layout import Sharding
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.placement import can_pad, group_size, state_shapes
from jaxdp.parallel.pmap import PMap
from jaxdp.parallel.reduction import Reduction, bucket, on_any_devices, xla
from jaxdp.parallel.strategy import Strategy
from jaxdp.precision import LossScaling, cast_floats, policy
from jaxdp.process import imports, membership
from jaxdp.run.datasets import (
    facts_of,
    make_data,
    make_order,
    shapes_of_model,
)
from jaxdp.split import leaves_by_path, path_string
from jaxdp.targets import Table, attribute, bind, call, locate, parameters, require
from jaxdp.train.carry import split_carry
from jaxdp.train.skip import Spike
from jaxdp.train.state import Batch, TrainState
from jaxdp.train.step import (
    Forward,
    Step,
    Transform,
    UpdateRule,
    first_microbatch,
    init_state,
    make_step,
)

KEY = "parallel.reduction"
STRATEGIES: dict[str, Callable[..., Strategy]] = {"pmap": PMap, "pjit": PJit}
STAGES = {"pmap": (0, 1), "pjit": (0, 1, 2, 3)}
"""The ZeRO stages that each strategy supports."""

REDUCTIONS: dict[str, Any] = {
    "xla": xla,
    "bucket": bucket,
    **EXACT,
}
"""A function that returns each reduction, or its dotted path, which an extra may lack."""


def make_reduction(name: str, bucket_mb: float = 25.0, group: int = 1) -> Reduction:
    """Return the reduction of a name, or of the dotted path of a function that returns a
    `Reduction`.

    'auto' means bucket for CPU processes over Gloo, where XLA's combined all-reduce of many
    operands is slow, else xla. A function gets those of bucket_mb, safe (no scatters) and group
    (microbatches to compute at once) that it has parameters for. Raises UsageError for anything
    else.

    Over Gloo a scatter is an all-reduce and a slice: Gloo's reduce-scatter fails after 30 s
    whatever the timeout, and was reported to return wrong results (jax#40831, jax#40830).
    """
    gloo = jax.process_count() > 1 and jax.default_backend() == "cpu"
    if is_auto := name == "auto":
        name = "bucket" if gloo else "xla"
    bound = bind(
        KEY,
        locate(KEY, name, REDUCTIONS, KEY),
        {},
        {"bucket_mb": bucket_mb, "safe": gloo, "group": group},
    )
    require(KEY, bound)
    reduction = call(KEY, bound)
    if not isinstance(reduction, Reduction):
        raise UsageError(
            f"{KEY}: {name!r} must return a jaxdp.parallel.reduction.Reduction; see docs/exact.md"
        )
    if is_auto and on_cpu():  # where nothing is computed beside a collective
        reduction = reduction._replace(overlaps=False)
    return on_any_devices(reduction)


Objects = Mapping[str, Mapping[str, Any]]
NOTHING: Objects = {}
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")
NEEDED = {"jax_threefry_partitionable": True, "jax_default_prng_impl": "threefry2x32"}
FORMER_NO_DECAY = r"(^|/)(bias|scale)$"  # the default of optimizer.no_decay, before it was auto


class Parts(NamedTuple):
    """The built components of a config. eval_sets: the evaluation sets by name. order: the order of
    the training data.

    sequential: all sets are read sequentially. transform: the config's, which follows that of a
    set. roles: of the parameters, if an optimizer asks for them.
    """

    forward: Forward
    rule: UpdateRule
    dataset: Dataset
    eval_sets: dict[str, Dataset]
    order: ExampleOrder
    steps: int
    sequential: bool
    transform: Transform | None
    roles: Mapping[str, Role] = {}

    def evaluating(self, dataset: Dataset) -> "Parts":
        """Return the parts that evaluate a set, with its own transform."""
        transform = both(getattr(dataset, "transform", None), self.transform)
        return self._replace(forward=self.forward._replace(eval_transform=transform))

    @property
    def first(self) -> tuple[dict[str, np.ndarray], int]:
        """Return the first example [1, ...], and the number of examples in a microbatch."""
        return first_example(self.dataset), self.order.examples_per_microbatch


def set_jax(config: Config, sums: bool = True) -> None:
    """Set JAX's settings (`SETTINGS`) from the config, before anything is built. sums: gradients
    will be summed.
    """
    jax.config.update("jax_enable_x64", config.precision.params == "float64")
    for extra in extras_of(config) if sums else ():
        extra.check_environment()
    matmul = config.precision.matmul
    jax.config.update("jax_default_matmul_precision", None if matmul == "default" else matmul)
    for name, needed in NEEDED.items():
        if (value := jax.config.values[name]) != needed:
            raise UsageError(
                f"{name}: {value!r} makes numbers depend on the devices; set it to {needed!r}"
            )
    if "" not in sys.path:  # a target may be a module in the folder that the command runs in
        sys.path.insert(0, "")
    if problem := imports.check(import_all):
        raise UsageError(problem)


@contextlib.contextmanager
def jax_settings(config: Config) -> Iterator[None]:
    """Use `set_jax` inside this context, then restore the settings."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    try:
        set_jax(config)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@user_code()
def make_parts(config: Config, objects: Objects = NOTHING) -> Parts:
    """Build all components that the config names. Names are checked before any data is read.

    objects: {section: {name: object}} of a script, in addition to built-in names and dotted paths.
    """

    def table(section, built_in):
        return {**built_in, **objects.get(section, {})}

    target = locate("model", config.model.target, table("model", MODELS))
    if not is_given(target):
        bind("model", target, config.model.args)
    loss = make_loss(config.loss.target, config.loss.args, table=table("loss", LOSSES))
    named_transform = None
    if (section := config.data.transform) is not None:
        key = "data.transform"
        made = locate(key, section.target, table(key, TRANSFORMS))
        bound = bind(key, made, section.args)
        named_transform = as_transform(call(key, bound) if isinstance(made, type) else bound)
    optimizers = table("optimizer", OPTIMIZERS)
    make_tx(config, lambda step: 0.0, table=optimizers)
    dataset, eval_sets = make_data(config, table("data", SOURCES), table("eval.data", SOURCES))
    names = class_names(dataset)
    for metric in attribute(loss, "metrics", ()):
        if hasattr(metric, "number"):
            name = str(metric.positive)
            metric.number = names.index(name) if name in names else metric.positive
    model = make_model(config, target, facts_of(dataset))
    model = model._replace(init=jax.jit(model.init))  # traced only once
    transform = both(getattr(dataset, "transform", None), named_transform)
    dtypes = config.precision
    casts = policy(dtypes.params, dtypes.compute or dtypes.params, dtypes.reduce or dtypes.widest)
    remat = choose_remat(config, model)
    scaling = None if dtypes.loss_scale is None else make_scaling(config, dataset)
    forward = Forward(model, loss, casts, config.seed, remat, scaling, transform)
    # Whether rows continue from batch to batch: as the config says, else if the model has a carry.
    sequential = config.data.order == "sequential"
    if config.data.order is None:
        rows = make_order(config, dataset, sequential=False).examples_per_microbatch
        sequential = split_carry(shapes_of_model(forward, dataset, rows)[1])[1] is not None
    order = make_order(config, dataset, sequential)
    for extra in extras_of(config):
        order = extra.order(order)
    steps = config.steps or order.updates(config.epochs or 0)
    schedule = schedule_of(config, steps)
    opt, spike = config.optimizer, config.spike
    roles = roles_of(forward, dataset, order) if needs_roles(config) else {}
    rule = UpdateRule(
        make_tx(config, schedule, model.blocks, optimizers, roles),
        opt.clip_norm,
        opt.frozen,
        opt.ema,
        max_nonfinite=config.nonfinite.max_consecutive,
        spike=None
        if spike.factor is None
        else Spike(spike.factor, spike.decay, spike.after, spike.action),
    )
    parts = Parts(
        forward, rule, dataset, eval_sets, order, steps, sequential, named_transform, roles
    )
    return parts.evaluating(next(iter(eval_sets.values()), dataset))


def needs_roles(config: Config) -> bool:
    """Return whether weight decay, or Muon, depends on the roles of the parameters."""
    opt = config.optimizer
    decays = bool(opt.weight_decay and opt.no_decay == AUTO)
    return opt.target == "muon" or decays or any(x.needs_roles() for x in extras_of(config))


def spared(config: Config, parts: Parts, params: Any) -> list[str]:
    """Return the paths of the parameters without weight decay."""
    mask = decay_mask(config.optimizer.no_decay, parts.forward.model.blocks, parts.roles)(params)
    return [path for path, decays in leaves_by_path(mask).items() if not decays]


def describe_groups(config: Config, parts: Parts, params: Any, table: Table = OPTIMIZERS) -> str:
    """Return in one line what weight decay and Muon apply to; "" if they are not used. params:
    shapes.
    """
    opt = config.optimizer
    blocks = parts.forward.model.blocks
    texts = list[str]()
    trained = parts.rule.trainable(params)
    if opt.weight_decay and {*MASKS} & taken_by(locate("optimizer", opt.target, table)):
        names = spared(config, parts, trained)

        def decays(path, x):
            return path_string(path) not in names

        decayed, others = describe(trained, decays, blocks, parts.roles)
        excluded = f", not for {others}" if others != "none" else ""
        texts.append(f"weight decay {opt.weight_decay:g} for {decayed}{excluded}")
    if opt.target == "muon":

        def is_matrix(path, x):
            return role_of(path, x, blocks, parts.roles).matrix is not None

        matrices, others = describe(trained, is_matrix, blocks, parts.roles)
        texts.append(f"muon for {matrices}, adam for {others}")
    return "; ".join(texts)


def roles_of(forward: Forward, dataset: Dataset, order: ExampleOrder) -> dict[str, Role]:
    """Return {path: role} of the parameters in a training call, or {} if the model cannot be
    traced: the rehearsal (`jaxdp.run.preflight`), which follows, reports why."""
    size = max(order.examples_per_microbatch, 2)
    example = first_example(dataset)

    def call(params, model_state):
        batch = first_microbatch(example, size, forward.transform)
        return compute_logits(apply_model(forward, params, model_state, batch, True)[0])

    try:
        params, model_state = shapes_of_model(forward, dataset, size)
        program = jax.make_jaxpr(call)(params, model_state)
    except Exception:
        return {}
    return find_roles(program, params, forward.model.blocks)


def apply_model(
    forward: Forward, params: Any, model_state: Any, batch: Batch, train: bool
) -> tuple[Any, Any]:
    """Return the outputs of a model and its new state, for a transformed microbatch, in the dtypes
    of a run."""
    casts = forward.policy
    return forward.model.apply(
        cast_floats(params, casts.compute),
        cast_floats(model_state, casts.state),
        casts.inputs(batch),
        jax.random.key(0),
        train,
    )


def make_the_step(config: Config, parts: Parts, padded: bool = True) -> Step:
    """Build the step. padded: see `make_step`. Raises UsageError if an extra refuses the parts."""
    for extra in extras_of(config):
        parts = extra.change_parts(parts)
    # The config may have another strategy than that of which the parts were made.
    forward = parts.forward._replace(remat=choose_remat(config, parts.forward.model))
    return make_step(forward, parts.rule, choose_accumulate(config), padded)


def state_maker(config: Config, parts: Parts) -> Partial:
    """Return a function that computes the state before the first update, with its seed; JAX traces
    it once.
    """
    example, size = parts.first

    def make_state(seed):
        inputs = first_microbatch(example, size, parts.forward.transform)
        return init_state(
            parts.forward._replace(seed=seed), parts.rule, config.microbatches, inputs
        )

    make: Callable[..., TrainState] = make_state
    for extra in extras_of(config):
        make = extra.initial_state(make, parts)
    return Partial(jax.jit(make, inline=True), np.uint32(config.seed))


def make_strategy(
    config: Config, parts: Parts, make_state: Partial, devices: Sequence[jax.Device]
) -> Strategy:
    """Build the strategy of the config's `parallel`, or that of an extra."""
    parallel = config.parallel
    reduction = make_reduction(parallel.reduction, parallel.bucket_mb, parallel.exact_group)
    for extra in extras_of(config):
        if (own := extra.strategy(parts, make_state, reduction, devices)) is not None:
            return own
    blocks = parts.forward.model.blocks
    rules = tuple(parallel.rules.items())
    size = parallel.shard_size
    number = len(devices)
    member = membership.current()
    if size is not None and member is not None and member.job.generation:
        # another number of devices may be left
        size = min((k for k in range(size, number) if number % k == 0), default=None)
    sharding = Sharding(parallel.zero, size, parallel.gradient_buffer, blocks, True, rules)
    if parallel.zero:
        rule, shapes = parts.rule, state_shapes(make_state)
        pad = can_pad(rule.tx, rule.trainable, shapes, sharding, group_size(size, number))
        sharding = sharding._replace(pad=pad)
    dtype = parts.forward.policy.reduce
    return STRATEGIES[parallel.backend](
        make_state, config.microbatches, reduction, dtype, devices, sharding
    )


def make_model(config: Config, target: Any, data: Mapping[str, Any]) -> Model:
    """Build the `Model` of a target: an object, or a function that may take input_shape,
    num_classes and init_from.
    """
    if is_given(target):
        if config.model.args:
            raise UsageError(
                f"model.args: {config.model.target!r} is an object and takes no args; leave them out"
            )
        return as_model(target)
    known = {
        "input_shape": tuple(data["input_shape"]),
        "num_classes": data["num_classes"],
        "init_from": config.init_from,
    }
    bound = bind("model", target, config.model.args, {k: v for k, v in known.items() if v})
    num_classes = bound.keywords.get("num_classes")
    if isinstance(num_classes, int) and num_classes < known["num_classes"]:
        raise UsageError(
            f"model.args.num_classes: {num_classes}, but the data has {known['num_classes']} classes"
        )
    for name, make in {
        "rngs": lambda rngs: bound(rngs=rngs),
        "key": lambda key: bound(key=key),
    }.items():
        if name in parameters(
            bound
        ):  # a class of Flax NNX or Equinox, or a function that makes its module
            require("model", bound, name)
            return call("model", bound, functools.partial(as_model, make))
    return call("model", bound, lambda: as_model(call("model", bound)))


def schedule_of(config: Config, steps: int) -> Callable[[Any], Any]:
    """Return the learning-rate schedule of a run of `steps` updates."""
    opt = config.optimizer
    return make_schedule(
        opt.schedule, opt.lr, opt.schedule_steps or steps, opt.warmup_steps, opt.final_lr
    )


def make_tx(
    config: Config,
    schedule: Any,
    blocks: Sequence[str] = (),
    table: Table = OPTIMIZERS,
    roles: Mapping[str, Role] = {},
) -> Any:
    """Build the optimizer. blocks, roles: see `make_optimizer`."""
    opt = config.optimizer
    target = locate("optimizer", opt.target, table)
    bound = bind("optimizer", target, opt.args)
    for arg, key in {
        "learning_rate": "lr",
        "weight_decay": "weight_decay",
        "mask": "no_decay",
    }.items():
        if arg in opt.args:
            raise UsageError(f"optimizer.args.{arg}: it is set by optimizer.{key}; set that")
    args = dict(bound.keywords)
    if target is OPTIMIZERS["muon"] and (rate := args.get("adam_learning_rate")) is not None:
        args["adam_learning_rate"] = lambda step: rate * (schedule(step) / (opt.lr or 1))

    def make():
        return make_optimizer(
            target,
            schedule,
            opt.weight_decay,
            opt.no_decay,
            lr_scale=opt.lr_scale,
            blocks=blocks,
            roles=roles,
            **args,
        )

    return in_state_dtype(config, checked(opt.target, call("optimizer", bound, make)))


def in_state_dtype(config: Config, tx: Any) -> Any:
    """Return the optimizer; with a master copy, if its state is to be wider than the parameters."""
    dtypes = config.precision
    return with_master(tx) if dtypes.params == "bfloat16" != dtypes.state else tx


def make_scaling(config: Config, dataset: Dataset) -> LossScaling:
    """Build the loss scaling, for the weight of a full batch: its number of labels, one or more per
    example.
    """
    scale = config.precision.loss_scale
    assert scale is not None
    labels = np.asarray(first_example(dataset).get("labels", 0)).size
    weight = float(config.largest_batch * max(labels, 1))
    if scale == "dynamic":
        return LossScaling(interval=config.precision.loss_scale_interval, weight=weight)
    return LossScaling(float(scale), dynamic=False, weight=weight)


def choose_accumulate(config: Config) -> str:
    """Return the configured accumulation; a reduction in groups calls the step on one of them at a
    time, so 'vmap' there.
    """
    parallel = config.parallel
    return "vmap" if parallel.accumulate == "auto" or parallel.in_groups else parallel.accumulate


def choose_remat(config: Config, model: Model) -> str:
    """Return the configured remat policy. 'auto': in stage 3 the backward pass gathers a block's
    parameters again, so that they are not kept in full; a reduction in groups does so in all stages."""
    parallel = config.parallel
    if parallel.remat != "auto":
        return parallel.remat
    gathers = parallel.zero == 3 or parallel.in_groups
    return "dots_no_batch" if gathers and model.read_by_block else "none"


def check_paths(config: Config, params: Any) -> None:
    """Raise UsageError if an expression matches no parameter, or if all parameters are frozen."""
    paths = [*leaves_by_path(params)]
    if not paths:
        raise UsageError(
            f"model: {config.model.target!r} has no parameters, so there is nothing to train"
        )
    opt = config.optimizer
    patterns = [("frozen", x) for x in opt.frozen] + [("lr_scale", x) for x in opt.lr_scale]
    if opt.weight_decay and opt.no_decay != AUTO:
        patterns += [("no_decay", x) for x in opt.no_decay if x != FORMER_NO_DECAY]
    for name, pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            near = nearest(pattern, paths, 0.1) or paths[0]
            raise UsageError(
                f"optimizer.{name}: {pattern!r} matches no parameter; a path is such as {near!r}"
            )
    if all(any(re.search(pattern, path) for pattern in opt.frozen) for path in paths):
        raise UsageError(f"optimizer.frozen: {opt.frozen!r} leaves nothing to train")
