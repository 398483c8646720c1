"""No observer waits for the device: the loop goes on while an update is still running.

The device is held up in the middle of an update, by a loss that waits for the test."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp

HELD = 6  # the update in which the device is held up; the first ones compile
LIMIT = 120.0  # seconds until a test fails
MODEL = {"target": "MLP", "args": {"hidden": [8], "num_classes": 2}}
X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)


class Device:
    """Holds up the device in update HELD, and notes that the loop has come to the one after."""

    def __init__(self):
        self.free, self.came = threading.Event(), threading.Event()
        self.free.set()

    def loss(self, outputs, batch):
        logp = jax.nn.log_softmax(outputs)
        losses = -jnp.take_along_axis(logp, batch["labels"][:, None], -1)[:, 0]

        def hold(x):
            assert self.free.wait(LIMIT)
            return x

        losses = losses + jax.lax.stop_gradient(
            jax.pure_callback(
                hold,
                jax.ShapeDtypeStruct(losses.shape, losses.dtype),
                jnp.zeros_like(losses),
                vmap_method="sequential",
            )
        )
        return (losses * batch["mask"]).sum(), batch["mask"].sum(), {}

    def before(self, updates, batch):
        """The first of the callbacks: the batch of update `step` is there."""
        if HELD in updates:
            self.free.clear()


class Last:
    """The last of the callbacks."""

    def __init__(self, device):
        self.device = device

    def before(self, updates, batch):
        if HELD + 1 in updates and not self.device.free.is_set():
            self.device.came.set()
            self.device.free.set()


class Reads:
    """Reads a result that is not there yet."""

    def __init__(self, device):
        self.device = device

    def after(self, updates, state, metrics):
        if HELD in updates:
            threading.Thread(target=self.device.free.set).start()
        float(metrics["loss"])


def train(device, *others, **config):
    callbacks = [device, *others, Last(device)]
    common = {"microbatches": 2, "log": {"every": 2}, "parallel": {"devices": 2}}
    return jaxdp.fit(
        MODEL,
        (X, Y),
        device.loss,
        steps=HELD + 4,
        batch_size=16,
        callbacks=callbacks,
        **common | config,
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"watchdog": {"step_timeout": 600.0}, "spike": {"factor": 3.0}, "optimizer": {"ema": 0.9}},
    ],
    ids=["plain", "watched"],
)
def test_the_loop_goes_on_while_the_device_is_held_up(config):
    device = Device()
    fitted = train(device, **config)
    assert device.came.is_set() and np.isfinite(fitted.final["loss"])


def test_an_observer_that_waits_for_a_device_is_found():
    device = Device()
    train(device, Reads(device))
    assert not device.came.is_set()
