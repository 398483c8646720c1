"""Warnings at the start about data that does not suit the model: padding, few rows for BatchNorm,
unscaled pixels.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxdp.config import Config
from jaxdp.data.dataset import probes, tokenizer_spec
from jaxdp.data.example_order import RESET
from jaxdp.models.base import CARRY
from jaxdp.optim.interpreter import inside
from jaxdp.run.components import Parts, apply_model
from jaxdp.run.preflight import carry_of_one
from jaxdp.train.carry import split_carry
from jaxdp.train.state import TrainState
from jaxdp.train.step import first_microbatch

# warn if BatchNorm normalizes by the statistics of fewer rows (Wu and He, arXiv 1803.08494, figure
# 1)
FEW = 8
EXAMPLES = 8  # examples whose values are looked at
BRIGHT, WHITE, PIXELS = (
    100,
    255,
    64,
)  # pixels exceed 100, not 255, and are at least 64 in an example
NOT_INPUTS = ("labels", "mask", "segments", RESET)
MOVES = {  # operations that change no value of their first operand
    "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather", "pad", "reduce_precision", "reshape",
    "rev", "slice", "split", "squeeze", "transpose",
}  # fmt: skip
JOINS = {"concatenate", "optimization_barrier", "select_n"}  # the same, of all operands
PRODUCTS = {"conv_general_dilated", "dot_general"}


def data_warnings(config: Config, parts: Parts, state: TrainState, devices: int) -> list[str]:
    """Return the warnings. state: the shapes of the state."""
    warnings = list[str]()
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(state.model_state)]
    if any(floats):
        warnings += warnings_of_state(config, parts, state, devices, floats)
    if pixels := pixels_of(parts):
        warnings += warnings_of_scale(parts, state, pixels)
    return warnings


def warnings_of_state(
    config: Config, parts: Parts, state: TrainState, devices: int, floats: list[bool]
) -> Iterator[str]:
    """Warn if averages in the model state count padding, or if BatchNorm normalizes by few rows.

    Computes nothing: the traced model shows what its new state and its outputs depend on. floats:
    which arrays of the model state are averages.
    """
    order = parts.order
    size = order.size
    batch = order.batch_size
    count = order.microbatches
    ragged = size % batch if parts.steps > size // batch else 0
    rows = batch // count * (devices if config.model.args.get("sync") is True else 1)
    if not (ragged or batch % count or rows < FEW):
        return
    program, entries = trace(parts, state, True)
    own = slice(1 + len(entries), 1 + len(entries) + len(floats))  # the state, among the arguments
    of_state = floats + [False] * (len(program.outvars) - len(floats))
    masked, *others = dce_jaxpr(program, of_state)[1]
    if not any(others[: len(entries)]):  # the averages are not of examples
        return
    if (ragged or batch % count) and not masked:
        where = [
            f"{batch} examples are {count} microbatches of {order.examples_per_microbatch}"
        ] * bool(batch % count)
        where += [f"the last batch of an epoch has {ragged} of {batch} examples"] * bool(ragged)
        yield (
            f"model: its state, such as the averages of BatchNorm, counts padding ({' and '.join(where)}); give the "
            f"module an argument mask, or set batch_size to a multiple of {count} that divides {size:,}"
        )
    if rows < FEW:
        training, evaluation = (
            dce_jaxpr(x, [False] * len(floats) + [True] * (len(x.outvars) - len(floats)))[1][own]
            for x in (program, trace(parts, state, False)[0])
        )
        if any(f and e and not t for f, t, e in zip(floats, training, evaluation, strict=True)):
            fewer = f"microbatches to {batch // FEW} or " if batch // FEW >= devices else ""
            yield (
                f"microbatches: {count} of {max(rows, 1)} examples: BatchNorm normalizes each by its own statistics, "
                f"which are poor for fewer than {FEW}; set {fewer}batch_size to {FEW * count} (this changes the "
                "numbers), or use GroupNorm or LayerNorm"
            )


def trace(parts: Parts, state: TrainState, train: bool) -> tuple[jex.Jaxpr, list[str]]:
    """Return the program (mask, other entries of a microbatch, model state, carry, parameters) ->
    (new model state, outputs) of the transform and the model, and the names of the entries."""
    mask, batch = microbatch(parts)

    def apply(mask, batch, model_state, carry, params):
        model_state = model_state if carry is None else {**model_state, CARRY: carry}
        inputs = {**transformed(parts, batch, mask), "mask": mask}
        outputs, new = apply_model(parts.forward, params, model_state, inputs, train)
        return split_carry(new)[0], outputs

    return jax.make_jaxpr(apply)(
        mask, batch, state.model_state, carry_of_one(state), state.params
    ).jaxpr, sorted(batch)


def microbatch(parts: Parts) -> tuple[Any, dict[str, Any]]:
    """Return the shapes of a microbatch's mask, and of its other entries by name, before the
    transform.
    """
    example, size = parts.first
    batch = jax.eval_shape(lambda: first_microbatch(example, size, None))
    return jax.ShapeDtypeStruct(batch.pop("mask").shape, bool), batch


def transformed(parts: Parts, batch: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Return a microbatch as the transform leaves it, which sees no padding: what depends on `mask`
    does so in the model."""
    transform = parts.forward.transform
    batch = {**batch, "mask": jnp.ones(mask.shape, bool)}
    return batch if transform is None else transform(batch, jax.random.key(0), True)


def pixels_of(parts: Parts) -> dict[str, np.ndarray]:
    """Return the inputs that look like pixels from 0 to 255, by name, of some examples."""
    if tokenizer_spec(parts.dataset) is not None:
        return {}
    index = probes(parts.dataset)
    examples = parts.dataset.read(index[:: -(-len(index) // EXAMPLES)])
    inputs = {name: np.asarray(x) for name, x in examples.items() if name not in NOT_INPUTS}
    return {name: values for name, values in inputs.items() if is_pixels(values)}


def warnings_of_scale(
    parts: Parts, state: TrainState, pixels: Mapping[str, np.ndarray]
) -> Iterator[str]:
    """Warn about pixels from 0 to 255 that the model multiplies by weights as they are."""
    names = [*pixels]
    if parts.forward.transform is not None:  # most scale them, which is seen at once
        mask, batch = microbatch(parts)
        program = jax.make_jaxpr(lambda batch: transformed(parts, batch, mask))(batch).jaxpr
        names = [
            name
            for name in names
            if any(follow(program, [key == name for key in sorted(batch)])[0])
        ]
    for name in names:
        program, entries = trace(parts, state, True)
        marks = [False, *(key == name for key in entries)]
        if follow(program, marks + [False] * (len(program.invars) - len(marks)))[1]:
            values = pixels[name]
            fix = (
                "in the transform"
                if parts.forward.transform
                else "as with data.transform: {target: Scale}"
            )
            yield (
                f"data: the model multiplies {name!r} ({values.dtype} up to {values.max():g}) by its weights as it is, "
                f"which trains poorly; divide it by 255, {fix}"
            )


def is_pixels(values: np.ndarray) -> bool:
    """Return whether values [example, ...] look like pixels from 0 to 255."""
    if values.dtype in (np.uint8, np.int8):
        return bool(values.size) and values.max() > BRIGHT
    if (
        not jnp.issubdtype(values.dtype, jnp.number)
        or jnp.iscomplexobj(values)
        or values[0].size < PIXELS
    ):
        return False
    return bool(
        values.min() >= 0 and BRIGHT < values.max() <= WHITE and (values == np.floor(values)).all()
    )


def follow(jaxpr: jex.Jaxpr, marks: list[bool]) -> tuple[list[bool], bool]:
    """Follow the marked arguments through operations that do not change their values.

    Return which results are such values, and whether a matrix product or convolution has one as an
    operand."""
    marked = {v for v, mark in zip(jaxpr.invars, marks, strict=True) if mark}
    product = False

    def is_marked(v):
        return not isinstance(v, jex.Literal) and v in marked

    for eqn in jaxpr.eqns:
        operands = [is_marked(v) for v in eqn.invars]
        if not any(operands):
            continue
        name = eqn.primitive.name
        results = [False] * len(eqn.outvars)
        product |= name in PRODUCTS
        if name in JOINS or (name in MOVES and operands[0]):
            results = [True] * len(eqn.outvars)
        for inner in inside(eqn):
            inner = inner.jaxpr if isinstance(inner, jex.ClosedJaxpr) else inner
            if len(inner.invars) == len(operands):
                inner_results, inner_product = follow(inner, operands)
                product |= inner_product
                results = inner_results if len(inner_results) == len(results) else results
        marked |= {v for v, result in zip(eqn.outvars, results, strict=True) if result}
    return [is_marked(v) for v in jaxpr.outvars], product
