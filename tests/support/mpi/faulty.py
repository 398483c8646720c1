"""Data, a loss and a model with a fault to order: which, on which rank, at which read. For
test_faults.
"""

import os
import pathlib
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp.data.digits import Digits
from jaxdp.losses import SoftmaxCrossEntropy

POISON = 255  # pixels are at most 16


class Faulty(Digits):
    """The digits; each read of a batch of the split `where` takes 5 ms, and read number `at` on
    `rank` has a fault.
    """

    def __init__(
        self, split="train", what="none", rank=0, at=0, where="train", run_dir="", then=""
    ):
        super().__init__(split)
        self.what, self.rank, self.at, self.run_dir = what, rank, at, pathlib.Path(run_dir)
        self.reads, self.split, self.then = 0, split, then
        self.armed = split == where

    def read(self, indices):
        values = super().read(indices)
        if self.what == "a label is 10":
            return {
                **values,
                "labels": np.where((indices == self.at) & self.armed, 10, values["labels"]),
            }
        if len(indices) in (1, 18, 64):  # an example, a microbatch to rehearse with, a fingerprint
            return values
        time.sleep(0.005)
        self.reads += 1
        if self.armed and self.reads == self.at and jaxdp.current().rank == self.rank:
            values = self.fault(values) or values
        return values

    def transform(self, batch, key, train):
        poisoned = (batch["inputs"] == POISON).all()
        batch = super().transform(batch, key, train)
        return {**batch, "inputs": jnp.where(poisoned, jnp.nan, batch["inputs"])}

    def fault(self, values):
        if self.what.startswith("SIG"):
            for name in self.what.split(","):
                os.kill(os.getpid(), getattr(signal, name))
                time.sleep(0.05)
        elif self.what == "stop the next, then SIGTERM":
            context = jaxdp.current()
            os.kill(context.pids[(context.rank + 1) % context.size], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.what == "raise":
            raise ValueError("the loader fails")
        elif self.what == "sleep":
            time.sleep(1000)
        elif self.what == "slow":
            self.at += 1
            time.sleep(0.03)
        elif self.what == "nan":
            return {**values, "inputs": np.full_like(values["inputs"], POISON)}
        elif self.what == "nan from now on":
            self.at += 1
            return {**values, "inputs": np.full_like(values["inputs"], POISON)}
        elif self.what == "garbage":
            threading.Thread(target=self.spoil, daemon=True).start()
        elif self.what == "die in a save":
            threading.Thread(target=self.die_in_a_save, daemon=True).start()
        return None

    def spoil(self):
        import spoil

        spoil.spoil(jaxdp.current())
        (self.run_dir / "spoiled").touch()
        if self.then:
            self.what, self.at = self.then, self.reads + 2

    def die_in_a_save(self):
        while not list((self.run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


class FailsInLoss(SoftmaxCrossEntropy):
    """Fails when it is traced, on one rank."""

    def __init__(self, rank=0):
        super().__init__()
        self.rank, self.calls = rank, 0

    def __call__(self, outputs, batch):
        self.calls += 1
        if self.calls > 2 and jaxdp.current().rank == self.rank:
            raise ValueError("the loss fails")
        return super().__call__(outputs, batch)
