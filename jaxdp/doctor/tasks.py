"""The tasks of a probe: with JAX, in this order, begin, join, devices, all_reduce; with MPI library and exchange."""

import importlib
import os
import time
from typing import Any

from jaxdp.distributed.world import World
from jaxdp.errors import UsageError

PACKAGES = {"jax": "jax", "jaxlib": "jaxlib", "flax": "flax", "optax": "optax", "orbax-checkpoint": "orbax.checkpoint"}


def begin() -> dict[str, str]:
    """Import what a run imports, and return {package: __version__}."""
    versions = {}
    for name, module in PACKAGES.items():
        package = importlib.import_module(module)
        versions[name] = getattr(package, "__version__", "")
        if not versions[name]:
            raise UsageError(f"{name} is no release of it, but {package.__file__ or package.__path__}: rename that")
    return versions


def join(variables: dict[str, str]) -> None:
    """Join the other processes by `jaxdp.init` with these variables, as a run does."""
    os.environ.update(variables)
    import jaxdp

    jaxdp.init()


def devices() -> dict[str, Any]:
    """Return this process's devices: platform, kind, count, uuids, and a device's bytes of memory, if JAX tells."""
    import jax

    local = jax.local_devices()
    return {
        "platform": local[0].platform,
        "kind": local[0].device_kind,
        "count": len(local),
        "memory": (local[0].memory_stats() or {}).get("bytes_limit"),
        "uuids": [getattr(d, "uuid", None) or f"{d.device_kind} {d.id}" for d in local],
    }


def all_reduce(elements: int, times: int) -> dict[str, Any]:
    """Return the best seconds of an all-reduce of that many float32 over all devices, and whether its sum is right."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh, count = Mesh(np.array(jax.devices()), ("all",)), jax.device_count()
    split = NamedSharding(mesh, PartitionSpec("all"))
    numbers = np.arange(1, count + 1, dtype=np.float32)[:, None]
    ranks = jax.make_array_from_callback((count, 1), split, lambda index: numbers[index])
    x = jax.jit(lambda r: jnp.broadcast_to(r, (count, elements)), out_shardings=split)(ranks)
    total = lambda x: jax.lax.psum(x, "all")
    mapped = jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec(), check_vma=False)
    reduce = jax.jit(mapped)
    out, seconds = reduce(x).block_until_ready(), []
    for _ in range(times):
        began = time.perf_counter()
        out = reduce(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    right = (np.asarray(out.addressable_data(0)) == numbers.sum()).all()
    return {"seconds": min(seconds), "devices": count, "right": bool(right)}


def library(launcher: str) -> str:
    """Return the first line of the version text of the MPI library that jaxdp loads under such a launcher."""
    from jaxdp.distributed import mpi

    importlib.import_module("mpi4py")  # an error by itself, before that of a library
    return str(mpi.load(World(0, 1, launcher=launcher)).Get_library_version().splitlines()[0].strip(" \0"))


def exchange(world: list[Any], own: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Exchange facts through MPI: see `mpi.exchange`."""
    from jaxdp.distributed import mpi

    return mpi.exchange(World(*world), own, timeout)
