"""The mirror: finished checkpoints are copied to another storage while training goes on, and a run
in an empty directory continues from there (docs/reliability.md#another-disk)."""

import functools
import pathlib

from jaxdp.errors import UsageError
from jaxdp.extras import Extra, Train


class Door(Extra):
    """A run whose checkpoints are copied to `checkpoint.mirror`."""

    def check(self) -> None:
        if self.config.checkpoint.local:
            raise UsageError(
                "checkpoint.mirror: with checkpoint.local: true each host has checkpoints of its own, and only those "
                "of rank 0 would be copied; set local to false, or leave the mirror out"
            )

    def around(self, train: Train, directory: pathlib.Path) -> Train:
        from jaxdp.mirror.mirrored import train_mirrored

        return functools.partial(train_mirrored, self.config, directory, train)
