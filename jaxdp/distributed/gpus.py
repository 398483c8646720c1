"""The GPUs of a host are dealt to its processes by local rank, before any of them opens one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def visible_devices(env: Mapping[str, str] | None = None) -> str | None:
    """CUDA_VISIBLE_DEVICES, where it is set."""
    return (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")


def count(env: Mapping[str, str] | None = None, dev: str = "/dev") -> int:
    """How many NVIDIA GPUs this host has, without opening one; 0 where JAX is told to use another platform."""
    platforms = (os.environ if env is None else env).get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return 0
    return sum(p.name[6:].isdigit() for p in Path(dev).glob("nvidia[0-9]*"))


def _listed(visible: str) -> list[str]:
    return [d for d in (d.strip() for d in visible.split(",")) if d and d != "-1"]


def bind(
    local_rank: int,
    local_size: int,
    gpus: int,
    visible: str | None = None,
    neighbours: Sequence[str | None] = (),
) -> list[int] | None:
    """The GPUs of one process, as indices into those it can see; None: all it can see.

    gpus: on this host. visible: its CUDA_VISIBLE_DEVICES. neighbours: that of every process on the host; where they
    differ, the launcher has dealt them already. One process gets all; p processes get gpus // p each, side by side;
    more processes than GPUs share them in turn.
    """
    seen = gpus if visible is None else len(_listed(visible))
    if local_size == 1 or seen <= 1 or len(set(neighbours)) > 1:
        return None
    if local_size > seen:
        return [local_rank % seen]
    each = seen // local_size
    return list(range(local_rank * each, (local_rank + 1) * each))


def sharers(local_size: int, gpus: int, visible: str | None = None, neighbours: Sequence[str | None] = ()) -> int:
    """How many processes `bind` gives the same GPU, at most; 1 where there is no GPU."""
    seen = gpus if visible is None else len(_listed(visible))
    if seen == 0 or len(set(neighbours)) > 1:
        return 1
    return -(-local_size // seen)
