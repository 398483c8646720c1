"""Runs made of plain objects, without a config."""

import jax
import optax
from jax.tree_util import Partial

import toys
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.run.source import Source
from jaxdp.run.strategies import STRATEGIES, make_reduction
from jaxdp.train.options import Forward, UpdateRule
from jaxdp.train.run import Data, Log, LoopOptions, Run
from jaxdp.train.step import init_state, make_step


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.records, self.said = [], []

    def write(self, record):
        self.records.append(record)

    def say(self, text):
        self.said.append(text)

    def rewind(self, step):
        self.records = [r for r in self.records if r["step"] <= step]

    def close(self): ...


def make_run(
    tmp_path, model=None, backend="pmap", devices=1, train=None, held_out=None, spike=None, examples=None, loss=None,
    step=None, accumulate="vmap", **settings,
):  # fmt: skip
    model, examples = model or toys.MODELS["resnet"](), examples or toys.data(60)
    tx = optax.adam(1e-2)
    cursor = EpochOrder(60, 20, 8, 0)
    forward, rule = (
        Forward(model, loss or SoftmaxCrossEntropy()),
        UpdateRule(tx, spike=spike, **(step or {})),
    )
    make = Partial(lambda: init_state(forward, rule, 8, {k: v[:3] for k, v in examples.items()}))
    sets = {}
    if held_out is not None:
        sets[""] = Source(
            Arrays(**held_out), EpochOrder(len(held_out["labels"]), 20, 8, 0, shuffle=False)
        )
    run = Run(
        STRATEGIES[backend](make, 8, make_reduction("xla"), None, jax.devices()[:devices]),
        make_step(forward, rule, accumulate),
        Data(Source(train or Arrays(**examples), cursor), sets),
        Checkpoints(tmp_path / "checkpoints"),
        LoopOptions(6, log_every=2),
        Log(Kept()),
    )
    return run.replace(**settings)
