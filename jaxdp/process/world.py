"""Read the rank and the number of processes from a launcher's environment variables, and check
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxdp.errors import UsageError

Env = Mapping[str, str]
MPI = ("openmpi", "mvapich", "hydra")  # launchers whose ranks agree on rank 0's address over MPI


@dataclass(frozen=True)
class World:
    """The rank of this process and the size of its job.

    local_rank, local_size: rank and number of the processes on this host; None if the launcher does
    not set them. coordinator: "host:port" of rank 0; None if the processes agree on it in another
    way (MPI)."""

    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    launcher: str = "none"
    coordinator: str | None = None

    @property
    def speaker(self) -> int:
        """Return the rank that prints what is wrong on this host: that of its first process."""
        return self.rank - (self.local_rank or 0)


def integer(env: Env, name: str, least: int = 0) -> int:
    try:
        number = int(env[name])
    except ValueError:
        raise UsageError(
            f"{name}={env[name]!r} is not a whole number: set it to one, or unset it"
        ) from None
    if number < least:
        raise UsageError(
            f"{name}={number} is less than {least}: set it to {least} or more, or unset it"
        )
    return number


def optional(env: Env, name: str | None, least: int = 0) -> int | None:
    return integer(env, name, least) if name and env.get(name) else None


def partners(env: Env, launcher: str, names: tuple[str, ...]) -> None:
    missing = [n for n in names if not env.get(n)]
    if missing:
        present = ", ".join(f"{n}={env[n]}" for n in names if env.get(n))
        raise UsageError(
            f"{', '.join(missing)} is not set, but {present} is ({launcher}): set all of them, or none"
        )


def within(rank: int, rank_name: str, size: int, size_name: str) -> None:
    if rank >= size:
        raise UsageError(
            f"{rank_name}={rank}, but {size_name}={size}: ranks run from 0 to {size - 1}"
        )


def address(text: str, name: str) -> str:
    """Return `text` ("host:port", "tcp://host:port", "[v6]:port") as "host:port". Raises UsageError
    naming `name`.
    """
    plain = str(text).removeprefix("tcp://").rstrip("/")
    host, _, port = plain.rpartition(":")
    v6 = host.startswith("[") and host.endswith("]")
    if not host or "/" in plain or (":" in host and not v6):
        raise UsageError(
            f"{name}={text!r} has no port: write it as host:port, such as 10.0.0.1:12355"
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{name}={text!r}: the port {port!r} is not a number from 1 to 65535")
    return plain


@dataclass(frozen=True)
class Variables:
    """A launcher that sets one variable for each value."""

    name: str
    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    also: tuple[str, ...] = ()
    coordinator: Callable[[Env], str | None] = lambda env: None
    unless: Callable[[Env], bool] = lambda env: False

    def detect(self, env: Env) -> World | None:
        if self.unless(env):
            return None
        partners(env, self.name, (self.rank, self.size, *self.also))
        rank = integer(env, self.rank)
        size = integer(env, self.size, 1)
        within(rank, self.rank, size, self.size)
        local_rank = optional(env, self.local_rank)
        local_size = optional(env, self.local_size, 1)
        if local_rank is not None and local_size is not None:
            within(local_rank, str(self.local_rank), local_size, str(self.local_size))
        return World(rank, size, local_rank, local_size, self.name, self.coordinator(env))


def seconds_of(variable: str, default: float, value: float | None = None) -> float:
    """Return `value`, else the environment variable's, else the default. Raises UsageError if it is
    not above 0.

    Infinity becomes 30 years, since JAX counts in whole seconds.
    """
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text if value is None else value)
        if not seconds > 0:
            raise ValueError
    except (ValueError, TypeError):
        source = f"{variable}={text!r}" if value is None else f"timeout={value!r}"
        raise UsageError(f"{source} is not a number of seconds above 0") from None
    return min(seconds, 1e9)
