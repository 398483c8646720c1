"""Runs of which some batches are wrong."""

import numpy as np

import toys
from jaxdp.data.dataset import Arrays
from jaxdp.process.monitor import RunMonitor
from plain_runs import make_run


class Spiked(Arrays):
    """Batches of 20 whose labels are wrong where the batch is one of `bad`, by its order of being
    read.
    """

    def __init__(self, bad, what="spike", **arrays):
        super().__init__(**arrays)
        self.bad, self.what, self.order = bad, what, []

    def read(self, indices):
        values = super().read(indices)
        if len(indices) > 3:
            self.order.append(len(self.order) + 1)
            if self.order[-1] in self.bad:
                scale = np.float32(np.nan if self.what == "nan" else 1e4)
                values = {**values, "inputs": values["inputs"] * scale}
        return values


def guarded_run(tmp_path, bad, what="spike", spike=None, steps=12, **settings):
    data = Spiked(bad, what, **toys.data(60))
    run = make_run(
        tmp_path,
        toys.MODELS["mlp"](),
        train=data,
        steps=steps,
        save_every=3,
        spike=spike,
        **settings,
    )
    watch = RunMonitor(run.checkpoints.context, tmp_path, None)
    return run.replace(watch=watch, directory=tmp_path)
