"""Compare the model of a source of parameters with ours: arguments that change the outputs, and not
the shapes.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.checkpoint import published_config, published_files
from jaxdp.checkpoint.published_config import Difference, argument
from jaxdp.checkpoint.weights import Weights, named
from jaxdp.config import Config
from jaxdp.data.dataset import first_example
from jaxdp.errors import UsageError
from jaxdp.logits import compute_logits
from jaxdp.models import MODELS, is_given
from jaxdp.models.base import Model
from jaxdp.models.gpt import GPT
from jaxdp.process.hosts import listed
from jaxdp.run.components import Objects, Parts, apply_model, make_model
from jaxdp.run.datasets import facts_of, shapes_of_model
from jaxdp.run.programs import digest, lines
from jaxdp.targets import OBJECT, Args, locate, parameters
from jaxdp.train.step import first_microbatch

SPEED = ("attention", "scan")  # arguments of jaxdp's models that do not change what is computed
OF_DATA = ("input_shape", "num_classes")  # arguments whose default is a fact of the data
ABSENT = object()


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
    ours = published_config.arguments_of(modules[0], shapes)
    found = [
        *published_config.of_tensors(layout, weights.tensors, weights.arrays, ours, weights.title)
    ]
    file = (source if source.is_dir() else source.parent) / "config.json"
    if not file.exists():
        names = [
            "heads",
            *(() if layout.joined else ("kv_heads", "rotary_base")),
            "epsilon",
            "the activation",
        ]
        return Comparison(
            found, not_compared(f"{', '.join(names)}: there is no config.json beside the weights")
        )
    length = facts_of(parts.dataset)["input_shape"][0]
    described = published_files.read_json(file)
    return Comparison(
        [*published_config.differences(layout, described, ours, length, str(file)), *found]
    )


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
    given = {*saved, *config.model.args}
    names = [
        name
        for name in dict.fromkeys((*there, *here))
        if there.get(name, ABSENT) != here.get(name, ABSENT)
        and (name in given or (name in there and name in here))
        and not (name in OF_DATA and name not in there)
        and not (name in SPEED and is_built_in(ours))
    ]
    if not names:
        return Comparison()
    hint = f"; the source has model.args {listed(f'{name}: {there[name]!r}' for name in names if name in there)}"

    def swapped(names: Sequence[str]) -> Program:
        args = dict(config.model.args)
        data = dict(facts)
        for name in names:
            args.pop(name, None)
            if name in there:
                (data if name in OF_DATA else args)[name] = there[name]
        changed = dataclasses.replace(config, model=dataclasses.replace(config.model, args=args))
        return program(parts, make_model(changed, ours, data))

    own = program(parts, parts.forward.model)
    single = {name: attempt(functools.partial(swapped, [name])) for name in names}
    both = attempt(functools.partial(swapped, [name for name in names if name != "input_shape"]))
    joint = (
        both is not None and both.arrays == own.arrays and both.digest != own.digest
    )  # two may cancel in the shapes
    count = [
        name
        for name, its in single.items()
        if its is not None and its.digest != own.digest and (joint or its.arrays == own.arrays)
    ] or (names if joint else [])

    def place(name):
        return (
            f"{there[name]!r} in {weights.title}"
            if name in there
            else f"not set in {weights.title}"
        )

    failed = [name for name, its in single.items() if its is None]
    return Comparison(
        [argument(name, there.get(name), here.get(name), place(name)) for name in count],
        not_compared(f"model.args {', '.join(failed)}") if failed and not joint else "",
        hint,
    )


def arguments(target: Callable[..., Any], args: Args, data: Args) -> dict[str, Any]:
    """Return the arguments that a target is called with, as JSON: defaults, facts of the data,
    those of the config.
    """
    defaults = {
        name: p.default for name, p in parameters(target).items() if p.default is not p.empty
    }
    known = {name: data[name] for name in OF_DATA if name in parameters(target) and data.get(name)}
    values: dict[str, Any] = json.loads(json.dumps({**defaults, **known, **args}, default=str))
    return values


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

    def outputs(params: Any, model_state: Any) -> Any:
        batch = first_microbatch(example, 2, None)
        if forward.eval_transform is not None:
            batch = forward.eval_transform(batch, jax.random.key(0), False)
        return compute_logits(apply_model(forward, params, model_state, batch, False)[0])

    state = shapes_of_model(forward, parts.dataset, 2)
    arrays = {name: x.shape for name, x in named(*state).items()}
    return Program(arrays, digest(lines(jax.make_jaxpr(outputs)(*state)))[0])


def attempt(make: Callable[[], Program]) -> Program | None:
    """Return the program, or None if our model cannot be made or called with other arguments."""
    try:
        return make()
    except Exception:
        return None
