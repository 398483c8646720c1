"""jaxdp: a data-parallel trainer for JAX. The config decides the numbers; the hardware only decides
the speed.
"""

from jaxdp.process import imports  # noqa: F401  # first: other imports go through its finder

# isort: split
import importlib
import importlib.util
from typing import Any

__version__ = "0.2.0.dev0"

# Public names load on first use, so that `jaxdp --help` and a config error need no jax.
_HOME = {
    "init": "jaxdp.process.context",
    "current": "jaxdp.process.context",
    "Context": "jaxdp.process.context",
    **dict.fromkeys(
        [
            "allreduce",
            "allgather",
            "reduce",
            "reduce_scatter",
            "broadcast",
            "gather",
            "scatter",
            "send",
            "recv",
            "all_to_all",
        ],
        "jaxdp.interop.collectives",
    ),
    "fit": "jaxdp.api",
    "load": "jaxdp.run.fitted",
    "partition_dataset": "jaxdp.interop.partition",
    "DistributedSampler": "jaxdp.interop.partition",
    "broadcast_parameters": "jaxdp.interop.parameters",
    "distributed_optimizer": "jaxdp.interop.optimizer",
    "allreduce_metrics": "jaxdp.interop.metrics",
    "Observer": "jaxdp.train.observer",
    "StopTraining": "jaxdp.run.callbacks",
    "UsageError": "jaxdp.errors",
    "DistributedError": "jaxdp.errors",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"jaxdp.{name}"):
        return importlib.import_module(f"jaxdp.{name}")  # a folder, such as jaxdp.checkpoint
    raise AttributeError(f"module 'jaxdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
