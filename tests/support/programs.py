"""Updates of a small GPT under every layout, compiled and not run."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.tree_util import Partial

from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models import as_model
from jaxdp.models.gpt import GPT
from jaxdp.parallel.layout import Sharding
from jaxdp.plan.hlo import Collective, collectives
from jaxdp.precision import Policy
from jaxdp.run.components import STRATEGIES, make_reduction
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step

DEVICES, LAYERS, TOKENS, SLOTS = 8, 16, 16, 4  # SLOTS: microbatches of a device
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "sgd": lambda: optax.sgd(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
}
USUAL = {
    "backend": "pjit", "zero": 0, "gradient_buffer": "sharded", "place": "8", "reduction": "xla", "optimizer": "adamw",
    "accumulate": "scan", "slots": SLOTS, "remat": None, "policy": Policy(), "layers": LAYERS, "tokens": TOKENS,
    "pad": False,
}  # fmt: skip


def build(
    backend, zero, gradient_buffer, place, reduction, optimizer, accumulate, slots, remat, policy, layers, tokens, pad
):  # fmt: skip
    """(strategy, step, the shapes of a program's arguments); nothing is computed."""
    model = as_model(lambda rngs: GPT((tokens,), 256, layers=layers, heads=4, dim=256, rngs=rngs))
    tx, microbatches = OPTIMIZERS[optimizer](), slots * DEVICES
    example = {k: np.zeros((1, tokens), np.int32) for k in ("inputs", "labels")}
    remat = remat or ("full" if zero == 3 else "none")
    forward, rule = Forward(model, SoftmaxCrossEntropy(), policy, remat=remat), UpdateRule(tx)
    make = Partial(lambda: init_state(forward, rule, microbatches, example))
    strategy = STRATEGIES[backend](
        make,
        microbatches,
        make_reduction(reduction),
        None if policy.reduce == policy.params else policy.reduce,
        jax.devices()[: int(place.partition("/")[0])],
        Sharding(
            zero, int(place[2:]) if "/" in place else None, gradient_buffer, model.blocks, pad=pad
        ),
    )
    return (
        strategy,
        make_step(forward, rule, accumulate),
        strategy.argument_shapes({**example, "mask": np.zeros(1, np.float32)}),
    )


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Compiled(NamedTuple):
    found: list[Collective]
    memory: object
    params: int  # bytes
    strategy: object
    text: str


def compiled(**settings):
    """The update's program, of `USUAL` settings but for these."""
    return _compiled(**USUAL | settings)


@functools.cache
def _compiled(**settings):
    strategy, step, arguments = build(**settings)
    lowered = strategy.compile(step).lowered(*arguments)
    program = lowered.compile()
    text, params = program.as_text(), size(strategy.shapes.params)
    found = collectives(text, lowered.as_text())
    return Compiled(found, program.memory_analysis(), params, strategy, text)
