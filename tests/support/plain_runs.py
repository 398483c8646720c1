"""Runs made of plain objects, without a config."""

import contextlib
import dataclasses

import jax
import numpy as np
import optax
from jax.tree_util import Partial

import toys
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.extras import Extra
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.run.build import Log
from jaxdp.run.components import STRATEGIES, make_reduction
from jaxdp.run.datasets import Source
from jaxdp.run.driver import Training
from jaxdp.train.run import Data, LoopOptions, Progress, Run
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step


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


class Given(Extra):
    """An extra with one observer. make(a `Training`) -> the observer."""

    def __init__(self, make):
        self.make = make

    def observers(self, training):
        return [self.make(training)]


def make_run(
    tmp_path, model=None, backend="pmap", devices=1, train=None, held_out=None, spike=None, examples=None, loss=None,
    step=None, accumulate="vmap", **settings,
):  # fmt: skip
    """A run, and what trains it: see `Plain`."""
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
    log = Log(writer=Kept())
    run = Run(
        strategy=STRATEGIES[backend](make, 8, make_reduction("xla"), None, jax.devices()[:devices]),
        step=make_step(forward, rule, accumulate),
        data=Data(Source(train or Arrays(**examples), cursor), sets),
        checkpoints=Checkpoints(tmp_path / "checkpoints"),
        options=LoopOptions(6, log_every=2),
        log=log,
    )
    return Plain(run, {}, {}).replace(**settings)


class Plain:
    """A run with where it starts, `progress`, and what `Training` gets beside it, `more`."""

    def __init__(self, run, progress, more):
        self.run, self.progress, self.more = run, progress, more

    def __getattr__(self, name):
        return getattr(self.run, name)

    def replace(self, **settings):
        """With other values of the fields of the run, its records, its progress, and `Training`."""
        run, progress, more = self.run, dict(self.progress), dict(self.more)
        if "directory" in settings:
            run.log.directory = settings.pop("directory")
        if "events" in settings:
            run.log.events = settings.pop("events")
        for section in ("data", "options"):
            record = getattr(run, section)
            names = {f.name for f in dataclasses.fields(record)} & settings.keys()
            changed = dataclasses.replace(record, **{name: settings.pop(name) for name in names})
            run = dataclasses.replace(run, **{section: changed})
        for name in [*settings]:
            if name in {f.name for f in dataclasses.fields(Run)}:
                run = dataclasses.replace(run, **{name: settings.pop(name)})
            elif name in {f.name for f in dataclasses.fields(Progress)}:
                progress[name] = settings.pop(name)
        return Plain(run, progress, more | settings)

    def training(self):
        start = self.progress.get("start", 0)
        progress = Progress(**{**self.progress, "step": start})
        if progress.state is not None:
            progress.recovered = True
        training = Training(self.run, progress)
        for name, value in self.more.items():
            setattr(training, name, value)
        return training


def fit(run):
    """Train a plain run: return the final record and the last state."""
    return run.training().train()


@contextlib.contextmanager
def metering(meter):
    """A meter between its start and its end, of updates of 10 examples."""
    source = Source(Arrays(inputs=np.zeros(10)), EpochOrder(10, 10, 1))
    run = Run(None, None, Data(source), None, LoopOptions(meter.last), None)
    meter.start(run, Progress())
    try:
        yield meter
    finally:
        meter.end(0)
