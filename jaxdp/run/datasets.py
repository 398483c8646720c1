"""The data of a config: datasets, the transform, the order of examples."""

import os
import re
from typing import Any

import jax
import numpy as np

from jaxdp.config import Config
from jaxdp.config.training import Target
from jaxdp.data import SOURCES
from jaxdp.data.dataset import (
    UNKNOWN,
    Dataset,
    as_dataset,
    check_dtypes,
    check_labels,
    class_names,
    first_example,
    tokenizer_spec,
)
from jaxdp.data.example_order import ExampleOrder, Streams, order_of
from jaxdp.data.mixture import has_test_split
from jaxdp.data.transforms import TRANSFORMS, as_transform
from jaxdp.data.windows import Windows
from jaxdp.errors import UsageError
from jaxdp.targets import Args, Table, bind, call, locate, targets_in
from jaxdp.train.carry import split_carry
from jaxdp.train.step import Forward, Transform, first_microbatch


def make_data(
    config: Config, sources: Table = SOURCES, eval_sources: Table = SOURCES
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return (the training set, the evaluation sets by name; "" is that of `eval.data`, or of the
    training data).
    """
    x64 = config.precision.params == "float64"
    dataset = read_set("data", config.data, "train", x64, sources)
    sets: dict[str, Dataset] = {}
    if config.eval.data is not None:
        sets[""] = read_set("eval.data", config.eval.data, "test", x64, eval_sources)
    elif has_test_split(locate("data", config.data.target, sources), config.data.args):
        sets[""] = read_set("data", config.data, "test", x64, sources)
    for name, target in named_sets(config).items():
        sets[name] = read_set(f"eval.also.{name}", target, "test", x64, SOURCES)
    for name, other in sets.items():
        check_meaning(eval_key(name), dataset, other)
    return dataset, sets


def eval_key(name: str) -> str:
    """Return the key of the config of an evaluation set."""
    return f"eval.also.{name}" if name else "eval.data"


def check_meaning(key: str, dataset: Dataset, other: Dataset) -> None:
    """Raise UsageError if an evaluation set has other ids for the same text, or labels for the same
    classes.
    """
    names, others = map(class_names, (dataset, other))
    for label, its in enumerate(others if names else []):
        if (name := names[label] if label < len(names) else None) != its:
            raise UsageError(
                f"{key}: label {label} is {its!r}, but {name!r} in the training data; make them alike"
            )
    one, two = ({**(tokenizer_spec(x) or {}), "path": None} for x in (dataset, other))
    if one != two and len(one) > 1 < len(two):
        raise UsageError(
            f"{key}: its tokenizer ({two.get('kind')}) differs from that of the training data ({one.get('kind')}), so "
            "the same text has other token ids; use the same file, byte, or a spec with the alphabet of both"
        )


def named_sets(config: Config) -> dict[str, Target]:
    """Return the targets of `eval.also`. Raises UsageError if an entry or its name is malformed."""
    for name in config.eval.also:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise UsageError(
                f"eval.also: {name!r} is not a name; use letters, digits, - and _, such as valid"
            )
    sets = dict[str, Target]()
    for name, entry in config.eval.also.items():
        [parts] = targets_in(f"eval.also.{name}", [entry], "data set", "Digits")
        sets[name] = Target(*parts)
    return sets


def read_set(key: str, target: Target, split: str, x64: bool, sources: Table) -> Dataset:
    """Return the dataset of a target: a callable that returns one, or a sized sequence of examples."""
    source = locate(key, target.target, sources)
    if not callable(source) and not hasattr(source, "__len__"):
        raise UsageError(
            f"{key}.target: {target.target!r} is {type(source).__name__}, neither examples nor a function that "
            "returns them"
        )
    make = bind(key, source, target.args, {"split": split}) if callable(source) else None
    args = make.keywords if make is not None else {}
    asked = str(args.get("split", split))
    path = path_of(args)
    name = f"the {asked} split of {target.target}{path}"
    try:
        made = source if make is None else call(key, make)
        if made is None:
            raise UsageError(f"data: {name} is None; return the examples")
        check_dtypes(dataset := as_dataset(made), x64)
        if len(dataset) < UNKNOWN:
            check_labels(
                lambda rows: dataset.read(rows).get("labels", ()), len(dataset), f"data: {name}"
            )
    except UsageError as error:  # sources name the key of the training data
        text = re.sub(r"^data\b", key, str(error))
        is_named = asked in text and path.removeprefix(" in ").strip("'") in text
        raise UsageError(text if is_named else f"{text} ({name})") from error.__cause__
    if split == "test" and len(dataset) >= UNKNOWN:
        raise UsageError(
            f"{key}.args.size: a stream needs it to be evaluated; set it to a number of examples"
        )
    return dataset


def path_of(args: Args) -> str:
    """Return " in PATH" if the arguments of a data set have a path, else ""."""
    path = args.get("path", args.get("root"))
    return f" in {path!r}" if isinstance(path, str) else ""


def facts_of(dataset: Dataset) -> dict[str, Any]:
    """Return facts about the data that a model may need, as JSON: input_shape, num_classes, the
    tokenizer's spec.
    """
    first = first_example(dataset)
    shape = first.get("inputs", next(iter(first.values()))).shape[1:]
    spec = tokenizer_spec(dataset)
    if spec is not None and "path" in spec:
        spec = {**spec, "path": os.path.abspath(spec["path"])}
    return {
        "input_shape": list(getattr(dataset, "input_shape", shape)),
        "num_classes": int(getattr(dataset, "classes", 0)),
        "tokenizer": spec,
    }


def make_transform(section: Target, table: Table = TRANSFORMS) -> Transform:
    """Return the transform of microbatches that a section of the config names."""
    target = locate("data.transform", section.target, table)
    bound = bind("data.transform", target, section.args)
    return as_transform(call("data.transform", bound) if isinstance(target, type) else bound)


def is_sequential(config: Config, forward: Forward, dataset: Dataset) -> bool:
    """Return True if rows continue from batch to batch: by the config's order, else if the model
    has a carry.
    """
    if config.data.order is not None:
        return config.data.order == "sequential"
    size = make_order(config, dataset, sequential=False).examples_per_microbatch
    return split_carry(shapes_of_model(forward, dataset, size)[1])[1] is not None


def shapes_of_model(forward: Forward, dataset: Dataset, size: int) -> tuple[Any, Any]:
    """Return the shapes of a model's parameters and of its state, made from `size` examples.

    Its `init` is called as in `init_state`, so that JAX traces it once for both.
    """
    example = first_example(dataset)

    def init():
        inputs = first_microbatch(example, size, forward.transform)
        return forward.model.init(jax.random.key(forward.seed), forward.policy.inputs(inputs))

    params, model_state = jax.eval_shape(init)
    return params, model_state


def make_order(
    config: Config, dataset: Dataset, sequential: bool, shuffle: bool = True
) -> ExampleOrder:
    """Return the order: which examples each microbatch of each step contains."""
    if len(dataset) >= UNKNOWN and config.epochs is not None:
        raise UsageError(
            f"epochs: {config.epochs}, but the stream's length is unknown; set steps, or data.args.size"
        )
    if not sequential:
        return order_of(dataset, config.batch_size, config.microbatches, config.seed, shuffle)
    return sequential_order(config, dataset, shuffle)


def sequential_order(config: Config, dataset: Dataset, shuffle: bool) -> Streams:
    """Return the order in which rows continue from batch to batch. shuffle: it is for training."""
    if len(dataset) >= UNKNOWN or (shuffle and hasattr(dataset, "example_order")):
        raise UsageError(
            f"data.order: {config.data.target} defines its own order, not the sequential one that the model's "
            "carried state needs; set it to shuffled, and give the examples a true 'reset' to begin at zero"
        )
    chosen = config.data.order is not None
    if not chosen and isinstance(dataset, Windows) and dataset.stride != dataset.length:
        fix = f"for a model with carried state, set it to length: {dataset.length}"
        raise UsageError(
            f"data.args.stride: {dataset.stride}: windows do not follow one another in the text; {fix}"
        )
    return Streams(len(dataset), config.batch_size, config.microbatches)


def shapes_of(dataset: Dataset) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return {name: (shape [1, ...], dtype)} of an example."""
    return {k: (v.shape, v.dtype) for k, v in first_example(dataset).items()}
