"""A callback for runs that are disturbed: it slows them down, and shows and harms their state."""

import gc
import os
import pathlib
import time

import numpy as np


class Wait:
    """Wait `pause` seconds in each update until a file `finish` exists; touch a file before a save
    or an evaluation; flip a bit of a snapshot where a file asks for it. All files are in the
    current folder."""

    def __init__(self, pause: float = 0.02, save: int = 100, evaluation: int = 50):
        self.pause, self.every = pause, {"save": save, "evaluation": evaluation}

    def start(self, run, progress):
        found = (x for x in gc.get_objects() if type(x).__name__ == "Snapshots")
        self.snapshots = next(found, None)  # of an elastic job

    def after(self, updates, state, metrics):
        time.sleep(0 if os.path.exists("finish") else self.pause)
        for name, every in self.every.items():
            if any(step % every == 0 for step in updates):
                pathlib.Path(name).touch()
        file = pathlib.Path(f"damage.{os.getpid()}")
        newest = self.snapshots and self.snapshots.newest
        if newest and file.exists():
            file.unlink()
            for arrays in newest.parts.values():
                arrays[0] = np.array(arrays[0])
                arrays[0].reshape(-1).view("uint8")[0] ^= 8
