"""Elastic training: a job continues when processes are lost, and when others join (docs/reliability.md).

`jaxdp.elastic.run` is for training loops of your own, and `Options` for the job that they run in.
"""

import functools
import pkgutil
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.extras import Extra, Train

# They load on first use: the coordinator imports this folder, and needs no training.
_HOME = {"run": "jaxdp.elastic.own_loop.run", "Options": "jaxdp.elastic.regroup.Options"}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return pkgutil.resolve_name(_HOME[name])
    raise AttributeError(f"module 'jaxdp.elastic' has no attribute {name!r}")


class Door(Extra):
    """A job that continues when processes are lost, and when others join."""

    def check(self) -> None:
        if self.config.checkpoint.local:
            raise UsageError(
                "checkpoint.local: true with elastic.enabled: true, whose processes may move to another rank 0 while "
                "its files stay on a lost host; set one of them to false"
            )

    def group(self, objects: Any) -> Any:
        from jaxdp.elastic.elastic_job import options_of

        return options_of(self.config, objects)

    def around(self, train: Train, directory: Any) -> Train:
        from jaxdp.elastic.elastic_job import train_in_generations

        return functools.partial(train_in_generations, self.config, train)
