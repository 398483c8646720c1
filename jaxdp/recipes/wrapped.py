"""The base of a data set that changes another one."""

from collections.abc import Mapping
from typing import Any

from jaxdp.data.dataset import check_split
from jaxdp.data.mixture import make_set, takes_split

DATA = "data.args.data"


class Wrapped:
    """A data set that reads `dataset`, and has all that it has: classes, a transform, a tokenizer.

    data: {target, args}, a target, or data as in `as_dataset`. split: passed to the target. A subclass
    has both as arguments, and defines what it changes. Raises UsageError.
    """

    def __init__(self, data: Any, split: str):
        check_split(split)
        self.dataset = make_set(DATA, data, split)

    @staticmethod
    def has_split(args: Mapping[str, Any]) -> bool:
        return takes_split(DATA, args.get("data"))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of `dataset`."""
        if name == "dataset":  # not made yet
            raise AttributeError(name)
        return getattr(self.dataset, name)
