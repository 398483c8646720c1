"""Data, model and loss are traced one after the other, for what they ask of their surroundings."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp.losses import apply_loss
from jaxdp.precision import cast_floats
from jaxdp.verify.checks import FAILED, NOTE, OK, SUSPECT, Check
from jaxdp.verify.loss import check_form
from jaxdp.verify.oracle import key_of
from jaxdp.verify.subject import Subject, Trial
from jaxdp.verify.trace import Finding, Traced, trace

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}  # by what is computed in
DATA, INIT, MODEL, LOSS = "the data's transform", "the model's init", "the model", "the loss"
WRONG = ("impure", "unbound")  # kinds of findings that cannot be right, whatever the strategies give


class Survey(NamedTuple):
    """findings: what may make numbers depend on devices. random: data or model draw random numbers. epsilon: the last
    digit of what is computed in. runs: it can be trained at all. parameters: how many, where init can be traced."""

    findings: list[Finding]
    checks: list[Check]
    random: bool
    epsilon: float
    tolerance: float
    runs: bool
    parameters: int


def survey(subject: Subject, trial: Trial, tolerance: float | None) -> Survey:
    """What the jaxprs of one microbatch tell; tolerance: as asked for, or None."""
    traced: dict[str, Traced] = {}
    checks = [check_data(subject, trial)]
    for found in look(subject, trial):
        if isinstance(found, Check):
            checks.append(found)
        else:
            traced[found.part] = found
    findings = [finding for one in traced.values() for finding in one.findings]
    checks.insert(1, about(findings))
    casts = [(part, *one.narrow) for part, one in traced.items() if part in (MODEL, LOSS) and one.narrow is not None]
    part, dtype, where = casts[0] if casts else ("", jnp.dtype(jnp.float64), "")
    allowed = TOLERANCE[dtype.name] if tolerance is None else tolerance
    if casts:
        text = (
            f"{part} computes in {dtype.name}{where and f' at {where}'}, whatever it is given; allowed is {allowed:g}"
        )
        checks.append(Check("precision", NOTE, text))
    random = any(one.random for part, one in traced.items() if part in (DATA, MODEL))
    runs = LOSS in traced and traced[LOSS].out is not None
    made = traced[INIT].out if INIT in traced else None
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(made[0])) if made is not None else 0
    return Survey(findings, checks, random, float(jnp.finfo(dtype).eps), allowed, runs, count)


def look(subject: Subject, trial: Trial) -> Iterator[Traced | Check]:
    """What is found of each part, up to the first that cannot be traced."""
    batch: Any = {k: v[0] for k, v in trial.batches[0].items()}
    key, mask = key_of(subject, 0, 0), batch["mask"]
    prepare = subject.transform or (lambda batch, key, train: batch)
    data = trace(DATA, lambda batch, key: prepare(batch, key, True), batch, key)
    yield data
    made = trace(INIT, subject.model.init, key, wide(trial.example), mapped=False)
    yield made
    if data.out is None or made.out is None:
        return
    inputs = {**wide(data.out), "mask": jax.ShapeDtypeStruct(mask.shape, jnp.bool_)}
    model = trace(MODEL, lambda *args: subject.model.apply(*args, True), *wide(made.out), inputs, key)
    yield model
    if model.out is None:
        return
    judged = {**data.out, "mask": jax.ShapeDtypeStruct(mask.shape, jnp.float64)}
    if (form := check_form(subject, wide(model.out[0]), judged)) is not None:
        yield form
        return
    yield trace(LOSS, functools.partial(apply_loss, subject.loss), wide(model.out[0]), judged)


def about(findings: list[Finding]) -> Check:
    """Whether what was found is a failure by itself, or is to be seen in the strategies."""
    if not findings:
        return Check("devices", OK, "data, model and loss see neither devices nor a random generator of their own")
    wrong = any(finding.kind in WRONG for finding in findings)
    return Check("devices", FAILED if wrong else SUSPECT, "; ".join(map(str, findings)))


def check_data(subject: Subject, trial: Trial) -> Check:
    """Whether the data gives the same example for the same index."""
    index = np.arange(min(len(subject.dataset), trial.places), dtype=np.int64)
    one, other = subject.dataset.read(index), subject.dataset.read(index)
    if differ := [name for name in one if not np.array_equal(one[name], other[name], equal_nan=False)]:
        text = f"{differ[0]!r} of an example changes when it is read again; what is random belongs into its transform"
        return Check("data", FAILED, f"the data is not a function of the index: {text}(batch, key, train)")
    return Check("data", OK, "an example is the same when it is read again")


def wide(shapes: Any) -> Any:
    """The same with floats in float64, by shape alone."""
    return jax.eval_shape(lambda tree: cast_floats(tree, jnp.float64), shapes)
