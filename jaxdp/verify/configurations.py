"""The configurations to compare: a small set in which every two values of two settings occur
together.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from jaxdp.config import Config
from jaxdp.errors import UsageError
from jaxdp.parallel.layout import ZERO, Sharding
from jaxdp.run.components import choose_accumulate
from jaxdp.run.strategies import EXACT, REDUCTIONS, STAGES, STRATEGIES, make_reduction
from jaxdp.train.state import TrainState

ODD = 3  # a number of devices that divides neither the microbatches nor most dims


class Configuration(NamedTuple):
    """One way to spread training over devices. gradient_buffer matters from ZeRO stage 2,
    shard_size from stage 1.
    """

    devices: int
    backend: str
    zero: int = 0
    reduction: str = "xla"
    accumulate: str = "vmap"
    gradient_buffer: str = "sharded"
    shard_size: int | None = None

    @property
    def cells(self) -> list[str]:
        """Return the values as text, with "-" for a setting that has no effect."""
        values = self._asdict() | ({} if ZERO[self.zero].grads else {"gradient_buffer": None})
        return ["-" if value is None else str(value) for value in values.values()]

    @property
    def title(self) -> str:
        return " ".join(
            f"{name} {cell}" for name, cell in zip(self._fields, self.cells) if cell != "-"
        )


ONE_DEVICE = Configuration(1, max(STAGES, key=lambda name: len(STAGES[name])))


def configuration_of(config: Config) -> Configuration:
    parallel = config.parallel
    return Configuration(
        devices=parallel.devices or 0,
        backend=parallel.backend,
        zero=parallel.zero,
        reduction="xla" if parallel.reduction == "auto" else parallel.reduction,
        accumulate=choose_accumulate(config),
        gradient_buffer=parallel.gradient_buffer,
        shard_size=parallel.shard_size,
    )


def clip(configuration: Configuration, devices: Sequence[jax.Device]) -> Configuration:
    """Return a run's configuration on at most these devices, all of them if it has no number (0).
    Raises UsageError.
    """
    clipped = configuration._replace(
        devices=min(configuration.devices or len(devices), len(devices))
    )
    check_layout(clipped, devices)
    return clipped


def choose_configurations(
    first: Configuration, devices: Sequence[jax.Device], exact: bool = False
) -> list[Configuration]:
    """Return one device, `first`, and what pairs of values remain, in a fixed order.

    A job of several processes uses all its devices, or one of each process. exact: with the
    reduction of `first` only."""
    number, others = len(devices), set() if exact else REDUCTIONS.keys() - EXACT.keys()
    fewer = [n for n in ((ODD, 2) if exact else (ODD,)) if n < number and jax.process_count() == 1]
    settings: list[Sequence[Any]] = [
        [number, *fewer],
        [(name, zero) for name, stages in STAGES.items() for zero in stages],
        sorted({first.reduction, *others}),
        ("vmap", "scan"),
        ("sharded", "replicated"),
        [None, number // 2] if number % 2 == 0 and number > 2 else [None],
    ]
    every = [Configuration(n, *stage, *rest) for n, stage, *rest in itertools.product(*settings)]
    possible = [c for c in every if is_meaningful(c) and is_possible(c, devices)]
    chosen = list(dict.fromkeys([ONE_DEVICE._replace(reduction=first.reduction), first]))
    missing = set().union(*map(pairs, possible)).difference(*map(pairs, chosen))
    while missing:
        best = max(possible, key=lambda c: len(pairs(c) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(configuration: Configuration) -> set[tuple[Any, ...]]:
    """Return every two settings with their values; backend and stage count as one setting."""
    values = {"stage": (configuration.backend, configuration.zero), **configuration._asdict()}
    return set(
        itertools.combinations(
            [(k, v) for k, v in values.items() if k not in ("backend", "zero")], 2
        )
    )


def is_meaningful(configuration: Configuration) -> bool:
    """Return whether every setting that differs from its default has an effect."""
    layout, c = ZERO[configuration.zero], configuration
    if c.accumulate == "scan" and c.reduction in EXACT:
        return False
    return (c.gradient_buffer == "sharded" or layout.grads) and (
        c.shard_size is None or layout.opt_state
    )


def is_possible(configuration: Configuration, devices: Sequence[jax.Device]) -> bool:
    try:
        check_layout(configuration, devices)
    except UsageError:
        return False
    return True


def devices_of(configuration: Configuration, devices: Sequence[jax.Device]) -> Sequence[jax.Device]:
    """Return the devices that a configuration uses; one device is one of this process."""
    if configuration.devices == 1:
        devices = [device for device in devices if device.process_index == jax.process_index()]
    return devices[: configuration.devices]


def check_layout(configuration: Configuration, devices: Sequence[jax.Device]) -> None:
    """Raise UsageError if the configuration's strategy does not work on these devices, whatever is
    trained.
    """
    c, make = configuration, Partial(TrainState, jnp.zeros((), jnp.int32), {}, {}, {})
    sharding = Sharding(c.zero, c.shard_size, c.gradient_buffer)
    STRATEGIES[c.backend](
        make, c.devices, make_reduction(c.reduction), None, devices_of(c, devices), sharding
    )
