"""The tasks of a probe that loads JAX, in this order: begin, join (one of several processes), devices, all_reduce."""

import importlib
import os
import time
from typing import Any

from jaxdp.errors import UsageError

PACKAGES = {"jax": "jax", "jaxlib": "jaxlib", "flax": "flax", "optax": "optax", "orbax-checkpoint": "orbax.checkpoint"}


def begin() -> dict[str, str]:
    """{package: __version__} of what a run imports, as it is imported."""
    found = {}
    for name, module in PACKAGES.items():
        package = importlib.import_module(module)
        found[name] = getattr(package, "__version__", "")
        if not found[name]:
            raise UsageError(f"{name} is no release of it, but {package.__file__ or package.__path__}: rename that")
    return found


def join(variables: dict[str, str]) -> dict[str, Any]:
    """Joins the other processes as a run does, by `jaxdp.init`, with these variables."""
    os.environ.update(variables)
    import jaxdp

    context = jaxdp.init()
    return {"rank": context.rank, "size": context.size, "hosts": list(context.hosts)}


def devices() -> dict[str, Any]:
    """This process's devices: platform, kind, count, and bytes of memory of one, where it says; JAX's x64 setting."""
    import jax

    local = jax.local_devices()
    return {
        "platform": local[0].platform,
        "kind": local[0].device_kind,
        "count": len(local),
        "global": jax.device_count(),
        "memory": (local[0].memory_stats() or {}).get("bytes_limit"),
        "uuids": [getattr(d, "uuid", None) or f"{d.device_kind} {d.id}" for d in local],
    }


def all_reduce(elements: int, times: int) -> dict[str, Any]:
    """The best seconds of an all-reduce of so many float32 over all devices, as a step does it, and if it was right."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("all",))
    count = jax.device_count()
    split = NamedSharding(mesh, PartitionSpec("all"))
    ranks = jax.make_array_from_callback(
        (count, 1), split, lambda index: np.arange(count, dtype=np.float32)[:, None][index]
    )
    spread = jax.jit(lambda r: jnp.broadcast_to(r + 1.0, (count, elements)), out_shardings=split)
    local = lambda x: jax.lax.psum(x, "all")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("all"), out_specs=PartitionSpec(), check_vma=False)
    reduce, x = jax.jit(mapped), spread(ranks)
    out, seconds = reduce(x).block_until_ready(), []
    for _ in range(times):
        began = time.perf_counter()
        out = reduce(x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    got = np.asarray(out.addressable_data(0))
    return {"seconds": min(seconds), "devices": count, "right": bool((got == count * (count + 1) / 2).all())}
