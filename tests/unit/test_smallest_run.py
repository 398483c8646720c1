"""The smallest run, to be read first: a line is fitted to 20 points, by the objects of every run.

A config only builds these objects (`jaxdp/run/build.py`), and the program around them saves and
evaluates between two updates (`jaxdp/run/driver.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial

from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder
from jaxdp.models.base import Model
from jaxdp.parallel.pjit import PJit
from jaxdp.parallel.reduction import xla
from jaxdp.run.datasets import Source
from jaxdp.train.loop import fit
from jaxdp.train.observer import Observer, Observers
from jaxdp.train.run import Data, Host, LoopOptions, Progress, Run
from jaxdp.train.step import Forward, UpdateRule, init_state, make_step

MICROBATCHES, UPDATES, RATE = 4, 6, 0.1
X = np.linspace(-1, 1, 20, dtype=np.float32)
Y = 3 * X + np.float32(1)


def init(key, batch):  # a model is two functions: (key, batch) -> (params, model_state)
    return {"slope": jnp.zeros(()), "offset": jnp.zeros(())}, {}


def apply(params, model_state, batch, key, train):  # -> (outputs, model_state)
    return params["slope"] * batch["inputs"] + params["offset"], model_state


def squared_error(outputs, batch):  # of a microbatch: a sum and a weight, never a mean
    errors = (outputs - batch["labels"]) ** 2 * batch["mask"]
    return errors.sum(), batch["mask"].sum(), {}


class Losses(Observer):  # an observer is called between updates, and never waits for the device
    def start(self, run, progress):
        self.losses = []

    def after(self, updates, state, metrics):
        self.losses.append(metrics["loss"])


def train(devices):
    """Return (the losses, the parameters) of the run on so many devices."""
    # Which examples an update has follows from the seed and its number. Batches of 8, 8 and 4.
    dataset, order = Arrays(inputs=X, labels=Y), EpochOrder(20, 8, MICROBATCHES, seed=0)
    # Two pure functions: `grads` of a device's microbatches -> sums; `apply` divides them, once.
    forward, rule = Forward(Model(init, apply), squared_error), UpdateRule(optax.sgd(RATE))
    step = make_step(forward, rule)
    # Where the state and a batch are: the only object that knows the devices.
    example = dataset.read(np.arange(2))
    state = Partial(lambda: init_state(forward, rule, MICROBATCHES, example))
    strategy = PJit(state, MICROBATCHES, xla(), devices=jax.devices()[:devices])
    data = Data(Source(dataset, order))
    run = Run(strategy, step, data, checkpoints=None, options=LoopOptions(UPDATES), log=None)
    progress, observer = Progress(state=strategy.init()), Losses()
    fit(run, strategy.compile(step), progress, Observers([observer]), Host())
    assert progress.step == UPDATES
    return np.array(observer.losses), jax.tree.map(np.asarray, progress.state.params)


def by_hand():
    """Return the same by NumPy, in a loop over batches, without microbatches or devices."""
    slope, offset, losses = 0.0, 0.0, []
    for update in range(UPDATES):
        rows = EpochOrder(20, 8, MICROBATCHES, seed=0).batch(update)
        errors = slope * X[rows] + offset - Y[rows]
        losses.append(np.mean(errors**2))
        slope -= RATE * np.mean(2 * errors * X[rows])
        offset -= RATE * np.mean(2 * errors)
    return losses, {"slope": slope, "offset": offset}


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_it_is_the_loop_by_hand_on_any_devices(devices):
    (losses, params), (expected, wanted) = train(devices), by_hand()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert params == pytest.approx(wanted, rel=1e-5)
