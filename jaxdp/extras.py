"""The extras: folders of the package that the rest of it works without.

A config asks for them by its keys (`Config.extras`). Each has a module `door` with a class `Door`, a
subclass of `Extra`. The program calls its methods where an extra may add something, and names no
extra itself, so that a folder can be deleted: a config that asks for it is refused in one line.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxdp.errors import UsageError

if TYPE_CHECKING:  # the checks of a config need no JAX
    import jax

    from jaxdp.config import Config
    from jaxdp.parallel.reduction import Reduction
    from jaxdp.parallel.strategy import Strategy
    from jaxdp.run.components import Objects, Parts
    from jaxdp.run.driver import Training
    from jaxdp.train.observer import Observer
    from jaxdp.train.run import Run
    from jaxdp.train.state import TrainState

Train = Callable[..., Any]  # (a `Context`, a `Continuation`) -> a final record, and the state


class Extra:
    """What an extra adds to a run; this base class adds nothing.

    The methods are in the order in which a run calls them. `check` and `set_environment` must not
    import JAX. All raise UsageError for what does not work together.
    """

    def __init__(self, config: "Config"):
        self.config = config

    def check(self) -> None:
        """Check the keys of the config."""

    def set_environment(self) -> None:
        """Set environment variables before JAX opens its devices."""

    def group(self, objects: "Objects") -> Any:
        """Return the argument `group` of `jaxdp.init`, or None. objects: see `make_parts`."""

    def check_environment(self) -> None:
        """Check, before anything is built, that `set_environment` was called in time."""

    def needs_roles(self) -> bool:
        """Return whether it asks for the roles of the parameters."""
        return False

    def initial_state(
        self, make: Callable[..., "TrainState"], parts: "Parts"
    ) -> Callable[..., "TrainState"]:
        """Return a function that makes the initial state, with what the extra remembers in it."""
        return make

    def change_parts(self, parts: "Parts") -> "Parts":
        """Return the parts of which the step is made."""
        return parts

    def strategy(
        self,
        parts: "Parts",
        make: Any,
        reduction: "Reduction",
        devices: "Sequence[jax.Device]",
    ) -> "Strategy | None":
        """Return the strategy, in the place of that of `parallel`; None: that one. make: returns the
        initial state. reduction: of gradients."""
        return None

    def misfit(self, devices: int) -> str:
        """Return why a run cannot go on with this number of devices, or ""."""
        return ""

    def around(self, train: "Train") -> "Train":
        """Return a function that trains with what `train` does, perhaps more than once."""
        return train

    def advice(self, run: "Run") -> Iterator[str]:
        """Yield warnings before the first update."""
        yield from ()

    def observers(self, training: "Training") -> "list[Observer]":
        """Return observers; they come after the callbacks, before anything copies the state."""
        return []


def extras_of(config: "Config | None") -> list[Extra]:
    """Return what a config asks for. Raises UsageError for an extra that was deleted."""
    if config is None:
        return []
    asked = config.extras.items()
    return [door(name, key)(config) for name, key in asked if key or is_there(name)]


@functools.cache
def is_there(name: str) -> bool:
    return importlib.util.find_spec(f"jaxdp.{name}") is not None


def door(name: str, key: str) -> type[Extra]:
    """Return the door of an extra. key: the key and the value that ask for it. Raises UsageError."""
    try:
        return importlib.import_module(f"jaxdp.{name}.door").Door
    except ModuleNotFoundError as error:
        missing = (error.name or "").removesuffix(".door")
        if not missing.startswith("jaxdp."):
            raise
    raise UsageError(
        f"{key} needs the folder {missing.replace('.', '/')}, which was deleted from this "
        "installation; restore it, or leave the key out"
    )
