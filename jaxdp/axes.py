"""The names of the mesh axes that models, reductions and strategies share."""

from typing import NamedTuple

import jax

DATA = "data"  # one entry per device: every replica's share of the batch
REPLICA, SHARD = (
    "replica",
    "shard",
)  # the devices in groups: state is split inside a group and replicated over groups


class Axes(NamedTuple):
    """shard: the axis over which state is split; replica: the axis over which it is replicated, or
    None.
    """

    shard: str = DATA
    replica: str | None = None

    @property
    def all(self) -> str | tuple[str, ...]:
        return self.shard if self.replica is None else (self.replica, self.shard)


FLAT = Axes()


def data_axes() -> str | tuple[str, ...] | None:
    """Return the axes of the devices that share a batch, inside a strategy's program; None outside."""
    for axes in (DATA, (REPLICA, SHARD)):
        try:
            jax.lax.axis_size(axes)
        except NameError:
            continue
        return axes
    return None
