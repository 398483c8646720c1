"""Batch sizes that change during training: `batch_size: {0: 64, 1000: 128}`
(docs/numbers.md#batch-sizes-that-change)."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxdp.errors import UsageError
from jaxdp.extras import Extra


class Door(Extra):
    """A run whose `batch_size` maps numbers of finished updates to sizes."""

    def check(self) -> None:
        sizes: Any = self.config.batch_size
        right = {
            int(update)
            for update, size in sizes.items()
            if re.fullmatch("[0-9]+", f"{update}") and type(size) is int and 0 < size < 2**31
        }
        spellings = {isinstance(update, str) for update in sizes}  # all are texts in JSON
        if 0 not in right or len(right) < len(sizes) or len(spellings) > 1:
            raise UsageError(
                f"batch_size: {sizes} is not a schedule; give 0 and each other number of finished updates once, as "
                "integers, each with at least 1 example, such as {0: 64, 1000: 128}"
            )

    def order(self, order: Any) -> Any:
        from jaxdp.staged.staged_order import Staged

        sizes: Any = self.config.batch_size
        by_update = {int(update): size for update, size in sizes.items()}
        return Staged(order.size, order.batch_size, order.microbatches, order, by_update)

    def initial_state(self, make: Callable[..., Any], parts: Any) -> Callable[..., Any]:
        import jax

        if parts.sequential or jax.eval_shape(make, 0).kept:
            raise UsageError(
                f"batch_size: {self.config.batch_size}, but rows of a batch continue in the next one (data.order: "
                "sequential, or a model that carries state); give one size"
            )
        return make

    def advice(self, run: Any) -> Iterator[str]:
        for update, size in run.data.train.order.batch_sizes.items():
            if update >= run.options.steps:
                yield (
                    f"batch_size: {size} after update {update} is not reached: the run ends after update "
                    f"{run.options.steps}; leave it out, or train longer"
                )

    def observers(self, training: Any) -> list[Any]:
        from jaxdp.staged.changes import Changes

        return [Changes()]
