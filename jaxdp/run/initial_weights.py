"""Initialization of a run from another run's parameters; misfits are reported before anything is
read.

The models are compared, too: arguments that change the outputs, and not the shapes."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxdp.checkpoint import published, safetensors
from jaxdp.checkpoint.initialize_from import (
    Match,
    begin_with,
    check_differences,
    describe,
    match,
    matches,
)
from jaxdp.checkpoint.published import OF_DATA, Difference, argument, arguments
from jaxdp.checkpoint.weights import Weights, as_published, named, open_weights
from jaxdp.checkpoint.weights import locate as locate_source
from jaxdp.config import Config
from jaxdp.data.dataset import first_example
from jaxdp.errors import UsageError
from jaxdp.extras import extras_of
from jaxdp.losses import compute_logits
from jaxdp.models import MODELS, is_given
from jaxdp.models.base import Model
from jaxdp.models.gpt import GPT
from jaxdp.precision import is_key
from jaxdp.process.context import Context
from jaxdp.process.hosts import listed
from jaxdp.run.build import on_all_ranks
from jaxdp.run.components import Objects, Parts, apply_model, make_model
from jaxdp.run.datasets import facts_of, shapes_of_model
from jaxdp.run.programs import digest, lines
from jaxdp.targets import OBJECT, Args, locate
from jaxdp.train.run import Run
from jaxdp.train.state import TrainState
from jaxdp.train.step import first_microbatch

SPEED = ("attention", "scan")  # arguments of jaxdp's models that do not change what is computed
ABSENT = object()


class Fitting(NamedTuple):
    """Weights that fit the model. matched: their names and ours. text: what is loaded, and what is
    not, in lines.
    """

    weights: Weights
    matched: Match
    text: str


def initialize_from(
    run: Run, config: Config, context: Context, parts: Parts, objects: Objects
) -> Callable[[], TrainState]:
    """Return a function that computes the initial state of `init_from` and `init`. parts, objects:
    of the run. Raises UsageError on every rank."""
    path = config.init_from
    strategy = run.strategy
    assert path is not None
    local = on_all_ranks(context, lambda: str(locate_source(path)))
    # ranks may differ while its run is going on
    source = pathlib.Path(context.of_root("init_from", lambda: local))
    weights = on_all_ranks(context, lambda: open_weights(source, config.init.ema))
    context.check_same("init_from", weights.facts)
    shapes = named(strategy.shapes.params, strategy.shapes.model_state)
    weights, matched, text = on_all_ranks(
        context, lambda: fitted(config, parts, objects, weights, source, shapes)
    )

    def begin():
        run.log.writer.say(text)
        rule = parts.rule

        def complete(state):
            for extra in extras_of(config):
                state = extra.initial_state(lambda state=state: state, parts)()
            return strategy.completed(state)

        return begin_with(strategy, weights, matched.pairs, rule.tx, rule.trainable, complete)

    return begin


def fitted(
    config: Config,
    parts: Parts,
    objects: Objects,
    weights: Weights,
    source: pathlib.Path,
    shapes: Mapping[str, Any],
) -> Fitting:
    """Match weights with our parameters, and their model with ours. shapes: {our name: object with
    shape and dtype}.

    Raises UsageError if an array that `init` selects is missing, does not fit or is not used, and
    if the models differ in an argument that changes the outputs.
    """
    init = config.init
    ours = {name: x for name, x in shapes.items() if not is_key(x)}
    if not init.rename:  # expressions apply to the file's own names
        weights = as_published(weights, source, ours)
    compared = compare(config, parts, objects, weights, source, ours)
    matched = match(
        ours,
        weights.arrays,
        weights.title,
        rename=init.rename,
        load=init.load,
        skip=init.skip,
        absent=weights.absent,
        hint=compared.hint,
    )
    differences = [
        x for x in compared.differences if x.name != "tied" or not matches(init.skip, "head/kernel")
    ]
    accepted = check_differences(differences, init.changed, weights.title)
    loaded = describe(matched, ours, weights.title, weights.rows)
    text = "\n".join(filter(None, [loaded, weights.note, accepted, compared.note]))
    return Fitting(weights, matched, text)


class Comparison(NamedTuple):
    """differences: those that change the outputs. note: a line about what was not compared. hint:
    more for an error about names or shapes."""

    differences: list[Difference] = []
    note: str = ""
    hint: str = ""


def compare(
    config: Config,
    parts: Parts,
    objects: Objects,
    weights: Weights,
    source: pathlib.Path,
    shapes: Mapping[str, Any],
) -> Comparison:
    """Compare the model of the source with ours. shapes: of our parameters by path."""
    if weights.layout is not None:
        return with_published(parts, weights, source, shapes)
    saved = (weights.meta.get("config") or {}).get("model")
    if not saved:
        return Comparison(
            note=not_compared("the arguments of its model, which the source does not have")
        )
    table = {**MODELS, **objects.get("model", {})}
    ours = locate("model", config.model.target, table)
    try:
        theirs = locate("model", saved["target"], table)
    except UsageError:
        theirs = None
    if theirs is None or is_given(theirs) or is_given(ours):
        return Comparison(
            note=not_compared(
                f"the arguments of its model, the object {saved['target']!r} of a script"
            )
        )
    comparison = with_saved(config, parts, ours, theirs, saved.get("args") or {}, weights)
    note = ""
    if theirs is not ours:
        note = not_compared(
            f"{saved['target']} with {config.model.target}, but for arguments of equal names"
        )
    elif saved["target"].endswith(OBJECT):
        note = not_compared(f"the code of {saved['target']}, which only a script has")
    return comparison._replace(note="\n".join(filter(None, [comparison.note, note])))


def not_compared(what: str) -> str:
    return f"  not compared: {what}"


def with_published(
    parts: Parts, weights: Weights, source: pathlib.Path, shapes: Mapping[str, Any]
) -> Comparison:
    """Compare published weights, and the config.json beside them, with our GPT."""
    layout = weights.layout
    make = parts.forward.model.module
    assert layout is not None
    modules: list[Any] = []
    if make is not None:
        jax.eval_shape(
            lambda *state: modules.append(make(*state)),
            *shapes_of_model(parts.forward, parts.dataset, 2),
        )
    if not modules or not isinstance(modules[0], GPT):
        return Comparison(
            note=not_compared("heads, epsilon and rotary_base, since the model is no GPT of jaxdp")
        )
    module: Any = modules[0]
    ours = published.arguments_of(module, shapes)
    found = [*published.of_tensors(layout, weights.tensors, weights.arrays, ours, weights.title)]
    if getattr(module, "folder", None) == str(source):  # its arguments are from there
        return Comparison(found, module.note, module.hint)
    file = (source if source.is_dir() else source.parent) / "config.json"
    if not file.exists():
        rotary = "" if layout.joined else "kv_heads, rotary_base, "
        names = (
            f"heads, {rotary}epsilon, the activation: there is no config.json beside the weights"
        )
        return Comparison(found, not_compared(names))
    length = facts_of(parts.dataset)["input_shape"][0]
    described = published.differences(layout, safetensors.read_json(file), ours, length, str(file))
    return Comparison([*described, *found])


def with_saved(
    config: Config, parts: Parts, ours: Any, theirs: Any, saved: Args, weights: Weights
) -> Comparison:
    """Compare the arguments that a run has saved with ours.

    An argument counts if our model with their value of it has the same arrays, and another program
    in evaluation. So the rate of dropout does not count, and a size does not: the shapes show it.
    ours, theirs: the targets."""
    facts = facts_of(parts.dataset)
    here = arguments(ours, config.model.args, facts)
    there = arguments(theirs, saved, weights.meta.get("data") or {})
    names = [
        name
        for name in {**there, **here}
        if there.get(name, ABSENT) != here.get(name, ABSENT)
        and (name in saved or name in config.model.args or (name in there and name in here))
        and not (name in OF_DATA and name not in there)
        and not (name in SPEED and is_built_in(ours))
    ]
    if not names:
        return Comparison()
    hint = f"; the source has model.args {listed(f'{name}: {there[name]!r}' for name in names if name in there)}"

    def swapped(names):
        """Return the program of our model with their arguments; None if it cannot be made."""
        args = dict(config.model.args)
        data = dict(facts)
        for name in names:
            args.pop(name, None)
            if name in there:
                (data if name in OF_DATA else args)[name] = there[name]
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, args=args))
        try:
            return program(parts, make_model(changed, ours, data))
        except Exception:
            return None

    own = program(parts, parts.forward.model)
    both = swapped([name for name in names if name != "input_shape"])
    # two may cancel in the shapes
    joint = both is not None and both.arrays == own.arrays and both.digest != own.digest
    count, failed = list[str](), list[str]()
    for name in names:
        single = swapped([name])
        if single is None:
            failed.append(name)
        elif single.digest != own.digest and (joint or single.arrays == own.arrays):
            count.append(name)
    if joint:
        count, failed = count or names, []

    def place(name):
        value = repr(there[name]) if name in there else "not set"
        return f"{value} in {weights.title}"

    return Comparison(
        [argument(name, there.get(name), here.get(name), place(name)) for name in count],
        not_compared(f"model.args {', '.join(failed)}") if failed else "",
        hint,
    )


def is_built_in(target: Any) -> bool:
    """Return whether a target is one of jaxdp's models, or a class derived from one."""
    return any(
        x.__module__.startswith("jaxdp.models.") for x in getattr(target, "__mro__", [target])
    )


class Program(NamedTuple):
    """arrays: {path: shape} of parameters and state. digest: of the program that evaluates them."""

    arrays: dict[str, tuple[int, ...]]
    digest: str


def program(parts: Parts, model: Model) -> Program:
    """Trace an evaluation of our data by a model."""
    forward = parts.forward._replace(model=model)
    example = first_example(parts.dataset)

    def outputs(params, model_state):
        batch = first_microbatch(example, 2, None)
        if forward.eval_transform is not None:
            batch = forward.eval_transform(batch, jax.random.key(0), False)
        return compute_logits(apply_model(forward, params, model_state, batch, False)[0])

    state = shapes_of_model(forward, parts.dataset, 2)
    arrays = {name: x.shape for name, x in named(*state).items()}
    return Program(arrays, digest(lines(jax.make_jaxpr(outputs)(*state)))[0])
