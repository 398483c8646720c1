"""The names of mesh axes, as models, reductions and strategies share them."""

from typing import NamedTuple

import jax

DATA = "data"  # one entry per device: every replica's share of the batch
REPLICA, SHARD = "replica", "shard"  # the same devices in groups: state is split inside a group, the same in each


class Axes(NamedTuple):
    """shard: the axis that state is split over; replica: the one over which it is the same (None: there is none)."""

    shard: str = DATA
    replica: str | None = None

    @property
    def all(self) -> str | tuple[str, ...]:
        return self.shard if self.replica is None else (self.replica, self.shard)


FLAT = Axes()


def data_axes() -> str | tuple[str, ...] | None:
    """Inside a strategy's program, the axes of all devices, as `jax.lax.psum` takes them; elsewhere None."""
    for axes in (DATA, (REPLICA, SHARD)):
        try:
            jax.lax.axis_size(axes)
        except NameError:
            continue
        return axes
    return None
