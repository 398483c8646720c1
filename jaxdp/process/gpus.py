"""Assign the GPUs of a host to its processes by local rank, before any of them opens one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def count(env: Mapping[str, str] | None = None, dev: str = "/dev") -> int:
    """Count the NVIDIA GPUs of this host without opening one; 0 if JAX_PLATFORMS selects another
    platform.
    """
    platforms = (os.environ if env is None else env).get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return 0
    return sum(p.name[6:].isdigit() for p in Path(dev).glob("nvidia[0-9]*"))


def listed(visible: str) -> list[str]:
    return [d for d in (d.strip() for d in visible.split(",")) if d and d != "-1"]


def bind(
    local_rank: int,
    local_size: int,
    gpus: int,
    visible: str | None = None,
    neighbours: Sequence[str | None] = (),
) -> tuple[list[int] | None, int]:
    """Return the GPUs of one process, and the largest number of processes that share one of the
    host's.

    The GPUs are indices into those that the process can see; None for all of these. A single
    process gets all GPUs; p processes get gpus // p adjacent ones each; if there are more processes
    than GPUs, they are assigned round-robin. gpus: number on this host. visible: this process's
    CUDA_VISIBLE_DEVICES. neighbours: that of every process on the host; if they differ, the
    launcher has assigned the GPUs already."""
    usable = gpus if visible is None else len(listed(visible))
    if usable == 0 or len(set(neighbours)) > 1:
        return None, 1
    sharers = -(-local_size // usable)
    if local_size == 1 or usable == 1:
        return None, sharers
    if local_size > usable:
        return [local_rank % usable], sharers
    each = usable // local_size
    return list(range(local_rank * each, (local_rank + 1) * each)), 1
