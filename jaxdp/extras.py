"""The extras: folders of the package that the rest of it works without.

A config asks for them by its keys (`Config.extras`). Each has a class `Door`, a subclass of `Extra`.
The program calls its methods where an extra may add something, and names no extra itself. So a
folder can be deleted: a config that asks for it is refused in one line.
"""

import importlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxdp.config import Config
from jaxdp.errors import UsageError

Train = Callable[..., Any]  # (a `Context`, a `Continuation`) -> a final record, and the state


class Extra:
    """What an extra adds to a run; this base class adds nothing.

    The methods are in the order in which a run calls them. `check` and `set_environment` must not
    import JAX. All raise UsageError for what does not work together.
    """

    def __init__(self, config: Config):
        self.config = config

    def check(self) -> None:
        """Check the keys of the config."""

    def set_environment(self) -> None:
        """Set environment variables before JAX opens its devices."""

    def group(self, objects: Any) -> Any:
        """Return the argument `group` of `jaxdp.init`, or None. objects: see `make_parts`."""

    def check_environment(self) -> None:
        """Check, before anything is built, that `set_environment` was called in time."""

    def needs_roles(self) -> bool:
        """Return whether it asks for the roles of the parameters."""
        return False

    def order(self, order: Any) -> Any:
        """Return the `ExampleOrder` of the training data. order: with the largest batch size."""
        return order

    def initial_state(self, make: Callable[..., Any], parts: Any) -> Callable[..., Any]:
        """Return a function that makes the initial `TrainState`, with what the extra remembers in
        it. parts: the built `Parts`."""
        return make

    def change_parts(self, parts: Any) -> Any:
        """Return the `Parts` of which the step is made."""
        return parts

    def strategy(self, parts: Any, make: Any, reduction: Any, devices: Any) -> Any:
        """Return a `Strategy` in the place of that of `parallel`; None: that one.

        make: returns the initial state. reduction: of gradients. devices: a sequence.
        """

    def around(self, train: Train, directory: pathlib.Path) -> Train:
        """Return a function that trains in a run directory with what `train` does, perhaps more than
        once."""
        return train

    def misfit(self, devices: int) -> str:
        """Return why a run cannot go on with this number of devices, or ""."""
        return ""

    def advice(self, run: Any) -> Iterator[str]:
        """Yield warnings before the first update of a `Run`."""
        yield from ()

    def observers(self, training: Any) -> list[Any]:
        """Return each `Observer` of a `Training`; they come after the callbacks, before anything
        copies the state."""
        return []


def extras_of(config: Config | None) -> list[Extra]:
    """Return what a config asks for. Raises UsageError for an extra that was deleted."""
    if config is None:
        return []
    return [door(name, key)(config) for name, key in config.extras.items()]


def backend_group(backend: str) -> Any:
    """Return the argument `group` of `jaxdp.init` for a backend. Raises UsageError."""
    if backend != "mpi":
        raise UsageError(
            f"backend: {backend!r} is not known; give 'mpi', or leave it out for that of JAX (Gloo "
            "between CPUs, NCCL between GPUs)"
        )
    return door(backend, "backend: mpi")(Config()).group({})


def door(name: str, key: str) -> type[Extra]:
    """Return the door of an extra. key: the key and the value that ask for it. Raises UsageError."""
    module = load_extra(name, key)
    if module.__file__ is None:  # only the folder is left, and no module of it is found
        load_extra(f"{name}.code", key)
    return module.Door


def load_extra(name: str, key: str = "") -> Any:
    """Return a module of an extra, by its name in the package.

    key: what asks for it; "": every run uses it, if it is there. Raises UsageError if its folder
    was deleted, or that of another extra which it needs; without a key, returns None.
    """
    try:
        return importlib.import_module(f"jaxdp.{name}")
    except ModuleNotFoundError as error:
        if not f"{error.name}".startswith("jaxdp."):
            raise
        if not key:
            return None
        raise UsageError(
            f"{key} needs the folder jaxdp/{str(error.name).split('.')[1]}, which was deleted from this "
            "installation; restore it, or do without"
        ) from None
