"""The data that a config names: data sets, the transform, the order of examples."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxdp.config import Config, Target
from jaxdp.core.carry import split_carry
from jaxdp.core.state import Batch, Transform
from jaxdp.data import SOURCES
from jaxdp.data.base import Dataset, as_dataset, check_dtypes
from jaxdp.data.cursor import Cursor, Order, Streams
from jaxdp.data.transforms import TRANSFORMS, as_transform
from jaxdp.errors import UsageError
from jaxdp.models.base import Model
from jaxdp.precision import Policy
from jaxdp.targets import bind, call, locate, parameters

Given = Mapping[str, Mapping[str, Any]]
NOTHING: Given = {}
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")


def make_data(
    config: Config, sources: Mapping[str, Any] = SOURCES, eval_sources: Mapping[str, Any] = SOURCES
) -> tuple[Dataset, Dataset | None]:
    """(the training set, what to evaluate on or None)."""
    x64 = config.precision.params == "float64"
    found = locate("data", config.data.target, sources)
    splits = callable(found) and "split" in parameters(found) and "split" not in config.data.args
    dataset = read_set("data", config.data, "train", x64, sources)
    if config.eval.data is not None:
        return dataset, read_set("eval.data", config.eval.data, "test", x64, eval_sources)
    return dataset, read_set("data", config.data, "test", x64, sources) if splits else None


def read_set(key: str, target: Target, split: str, x64: bool, sources: Mapping[str, Any]) -> Dataset:
    """The data set that a target makes, or is: the path of a sized sequence of examples will do."""
    found = locate(key, target.target, sources)
    if not callable(found) and not hasattr(found, "__len__"):
        raise UsageError(
            f"{key}.target: {target.target!r} is {type(found).__name__}, neither examples nor what makes them"
        )
    made = call(key, bind(key, found, target.args, {"split": split})) if callable(found) else found
    dataset = as_dataset(made)
    check_dtypes(dataset, x64)
    return dataset


def facts_of(dataset: Dataset) -> dict[str, Any]:
    """What a model may want to know: input_shape and num_classes, of text the tokenizer's spec; all JSON."""
    first = dataset.read(np.zeros(1, np.int64))
    shape = first.get("inputs", next(iter(first.values()))).shape[1:]
    spec = getattr(dataset, "tokenizer_spec", None)  # one that is made when it is needed
    if spec is None and getattr(dataset, "tokenizer", None) is not None:
        spec = dataset.tokenizer.spec()  # type: ignore[attr-defined]
    if spec is not None and "path" in spec:
        spec = {**spec, "path": os.path.abspath(spec["path"])}
    return {
        "input_shape": list(getattr(dataset, "input_shape", shape)),
        "num_classes": int(getattr(dataset, "classes", 0)),
        "tokenizer": spec,
    }


def make_transform(config: Config, table: Mapping[str, Any] = TRANSFORMS) -> Transform | None:
    """What the config asks to be run on microbatches."""
    own = config.data.transform
    if own is None:
        return None
    found = locate("data.transform", own.target, table)
    bound = bind("data.transform", found, own.args)
    made = call("data.transform", bound) if isinstance(found, type) else bound
    return as_transform(made)


def is_sequential(config: Config, model: Model, dataset: Dataset, transform: Transform | None, casts: Policy) -> bool:
    """Whether rows go on from batch to batch: as the config says, else where the model carries something."""
    if config.data.order is not None:
        return config.data.order == "sequential"
    example = dataset.read(np.zeros(1, np.int64))
    places = make_order(config, dataset, sequential=False).examples_per_microbatch

    def init() -> Any:  # as `init_state` calls it: traced once for both
        inputs = first_microbatch(example, places, transform)
        return model.init(jax.random.key(config.seed), casts.inputs(inputs))

    return split_carry(jax.eval_shape(init)[1])[1] is not None


def first_microbatch(example: dict[str, np.ndarray], places: int, transform: Transform | None) -> Batch:
    """Copies of an example [1, ...], as the model gets them."""
    inputs: Batch = {k: jax.numpy.broadcast_to(v[0], (places, *v.shape[1:])) for k, v in example.items()}
    inputs.setdefault("mask", jax.numpy.ones(places, bool))
    return inputs if transform is None else transform(inputs, jax.random.key(0), True)


def make_order(config: Config, dataset: Dataset, sequential: bool, shuffle: bool = True) -> Order:
    """Which examples each microbatch of each step holds."""
    if sequential:
        return Streams(len(dataset), config.batch_size, config.microbatches)
    return Cursor(len(dataset), config.batch_size, config.microbatches, config.seed if shuffle else 0, shuffle)
