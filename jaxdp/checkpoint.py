"""A checkpoint is the logical state under checkpoints/STEP, written by Orbax and the same for every strategy."""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxdp.step import TrainState


class Checkpoints:
    """The checkpoints of one run directory. directory: shared by all processes; keep: how many of the last to keep."""

    def __init__(self, directory: pathlib.Path, keep: int = 3):
        self.directory, self.keep = directory.resolve(), keep

    def steps(self) -> list[int]:
        """The steps that are wholly there, in order."""
        found = self.directory.glob("*") if self.directory.is_dir() else []
        # Orbax takes an empty directory for a checkpoint; the file that marks one is written with its commit.
        return sorted(int(p.name) for p in found if p.name.isdigit() and (p / "orbax.checkpoint").is_file())

    def save(self, step: int, state: TrainState) -> None:
        """Writes an exported state; returns when it is durable. Every process must call."""
        ocp.save(self.directory / str(step), _tree(state), overwrite=True)
        if jax.process_index() == 0:
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self.directory / str(old))

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state saved at `step`, placed as `abstract` says. Every process must call."""
        restored = ocp.load(self.directory / str(step), _tree(abstract))
        return abstract.replace(**restored)


def _tree(state: TrainState) -> dict[str, Any]:
    """The fields that are in use, by name."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    return {name: tree for name, tree in fields.items() if tree is not None}
