"""The door of elastic training: a group that may change, and a run in each of its generations."""

import functools
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.extras import Extra, Train


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

    def around(self, train: Train) -> Train:
        from jaxdp.elastic.elastic_job import train_in_generations

        return functools.partial(train_in_generations, self.config, train)
