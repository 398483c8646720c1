"""The coordination service carries short texts between processes by a deadline; JAX's private parts stay in here."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdp.distributed import hosts, service
from jaxdp.distributed.messages import exchange_verdict, exchanged, integer, report_refused
from jaxdp.errors import DistributedError, UsageError, one_line

_turns: collections.Counter[str] = collections.Counter()
_lock = threading.Lock()
Read = Callable[[str], Any]  # makes a value of a text that came over the network; None of one that is not ours
LEFT = "left"
TIMEOUT = 60.0  # seconds
SLICE = 0.5  # seconds: a wait is cut into these, so that Python's signal handlers run in between


def seconds(timeout: float | None = None) -> float:
    """How long to wait for others: `timeout`, else JAXDP_TIMEOUT, else 60; UsageError where that is no time."""
    text = os.environ.get("JAXDP_TIMEOUT") or str(TIMEOUT)
    try:
        seconds = float(text) if timeout is None else timeout
        if not seconds > 0:
            raise ValueError
    except ValueError:
        raise UsageError(f"JAXDP_TIMEOUT={text!r} (or timeout={timeout}) is not a number of seconds above 0") from None
    return seconds


def client() -> Any:
    """JAX's client of the coordination service; None where this process is alone."""
    from jax._src.distributed import global_state

    return global_state.client


def split(coordinator: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def opened() -> bool:
    """Whether JAX has opened its devices, after which it cannot join other processes."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def connect(
    coordinator: str, rank: int, size: int, timeout: float, devices: Sequence[int] | None, one_host: bool
) -> None:
    """Starts (rank 0) and joins JAX's distributed runtime: collectives over Gloo on CPU, no preemption service.

    timeout: seconds for connecting. Leaving waits for the others for 20 s at most. Must come before the first use of a
    device. one_host: whether all processes are on one, so that Gloo listens at its loopback address alone.
    """
    host, port = split(coordinator)
    address = hosts.listening_address(host, one_host) if rank == 0 else None
    if one_host:
        service.gloo_at("127.0.0.1")
    for option, value in {"jax_enable_preemption_service": False, "jax_cpu_collectives_implementation": "gloo"}.items():
        with contextlib.suppress(AttributeError):  # an option of another release
            jax.config.update(option, value)
    with service.apart():
        jax.distributed.initialize(
            coordinator,
            size,
            rank,
            local_device_ids=devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"[{address}]:{port}" if ":" in (address or "") else f"{address or '[::]'}:{port}",
            initialization_timeout=max(1, round(timeout)),
            heartbeat_timeout_seconds=round(3 * silence(timeout)),  # it counts from a beat that may be half as old
            shutdown_timeout_seconds=max(1, min(20, round(timeout))),
        )


def silence(timeout: float) -> float:
    """Seconds after which a process that is not heard of is named as gone (`sentinel`): 20, less for short timeouts."""
    return max(7.0, min(20.0, timeout / 3))


def tell_service(**message: Any) -> None:
    """On rank 0: tell the service's process what it is to report of this one's end (`service.Witness`)."""
    from jax._src.distributed import global_state

    if isinstance(global_state.service, service.Service):
        global_state.service.tell(**message)


def disconnect() -> None:
    """Leaves JAX's distributed runtime, together with the others."""
    jax.distributed.shutdown()


def refuse(key: str, text: str) -> None:
    """Report, once for the job, a value that no process of the job has written."""
    try:
        client().key_value_set("jaxdp/refused", "")
    except jax.errors.JaxRuntimeError:
        return  # another process has reported one
    report_refused(f"the value of {key}", text)


def _get(key: str, deadline: float, members: Sequence[int], read: Read) -> Any:
    """What `read` makes of the value of `key`, once it makes something; None at the deadline.

    DistributedError where a member has left.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            text = client().blocking_key_value_get(key, max(1, int(1000 * min(left, SLICE))))
            if (value := read(text)) is not None:
                return value
            refuse(key, text)
            time.sleep(0.1)
            if left <= 0:
                return None
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise _gone(error) from None
            if left <= SLICE:
                return None
            if gone := leavers().keys() & set(members):
                names = ", ".join(map(str, sorted(gone)))
                raise DistributedError(f"rank {names} has left the job: see what it printed") from None


def post(key: str, text: str, read: Read = str) -> None:
    """Makes `text` known under `key`; what is there already stays, unless `read` makes nothing of it."""
    try:
        client().key_value_set(key, text)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("ALREADY_EXISTS"):
            raise _gone(error) from None
        if (there := peek(key)) is not None and read(there) is None:
            refuse(key, there)
            put(key, text)


def checked(key: str, text: str | None, read: Read) -> Any:
    """What `read` makes of the text that stands under `key`; None where nothing does, or what is refused."""
    value = None if text is None else read(text)
    if value is None and text is not None:
        refuse(key, text)
    return value


def peek(key: str, patience: float = 0.0, read: Read = str) -> Any:
    """What is known under `key`, as `read` makes it, waiting for it `patience` seconds; None where nothing is."""
    try:
        if patience:
            return checked(key, client().blocking_key_value_get(key, max(1, int(1000 * patience))), read)
        return checked(key, client().key_value_try_get(key), read)
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
            return None
        raise _gone(error) from None


def put(key: str, text: str) -> None:
    """Makes `text` known under `key`, in the place of what is there."""
    try:
        client().key_value_set(key, text, allow_overwrite=True)
    except jax.errors.JaxRuntimeError as error:
        raise _gone(error) from None


def post_text(key: str, text: str) -> None:
    """As `post`, of any text."""
    post(key, json.dumps(text), exchanged)


def peek_text(key: str, patience: float = 0.0) -> str | None:
    """What `post_text` made known under `key`, as `peek` gives it."""
    text: str | None = peek(key, patience, exchanged)
    return text


def directory(prefix: str) -> dict[str, str]:
    """All that is known under keys that begin so."""
    try:
        return dict(client().key_value_dir_get(prefix))
    except jax.errors.JaxRuntimeError as error:
        raise _gone(error) from None


def by_rank(prefix: str, size: int, read: Read) -> dict[int, Any]:
    """What ranks below `size` have made known under prefix/RANK, as `read` makes it of their texts."""
    values = {}
    for key, text in directory(f"{prefix}/").items():
        rank, value = integer(key.removeprefix(f"{prefix}/"), size), read(text)
        if rank is None or value is None:
            refuse(key, text)
        else:
            values[rank] = value
    return values


def forget(prefix: str) -> None:
    """Removes all keys that begin so."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client().key_value_delete(prefix)


def _gone(error: Exception) -> DistributedError:
    return DistributedError(f"the coordination service is gone, so rank 0 is: {one_line(error)}")


def leavers() -> dict[int, str]:
    """The ranks that have said that they leave."""
    from jax._src.distributed import global_state

    return by_rank("jaxdp/left", global_state.num_processes, lambda text: text if text == LEFT else None)


def exchange(name: str, text: str, rank: int, members: Sequence[int], timeout: float) -> list[str]:
    """Every member's `text`, in the order of `members`; all of them must call this with the same name and members.

    The first member collects and publishes, so that all hear the same. Raises DistributedError that names who did not
    come within `timeout` seconds. Calls of one name are told apart by their number; use few names, many times.
    """
    if len(members) == 1:
        return [text]
    channel = f"jaxdp/{name}/{'.'.join(map(str, members))}"
    with _lock:
        turn = _turns[channel]
        _turns[channel] += 1
    base, leader, deadline = f"{channel}/{turn}", members[0], time.monotonic() + timeout
    put(f"{base}/{rank}", json.dumps(text))
    if rank == leader:
        texts = [_get(f"{base}/{m}", deadline, members, exchanged) for m in members]
        missing = [m for m, t in zip(members, texts) if t is None]
        kinds = list(dict.fromkeys(texts))  # the texts are mostly equal, and published once
        verdict: dict[str, Any] = (
            {"missing": missing} if missing else {"kinds": kinds, "of": [kinds.index(t) for t in texts]}
        )
        put(f"{base}/all", json.dumps(verdict))
        verdict = exchange_verdict(json.dumps(verdict), members) or {}
        if turn and not missing:  # that all are here means that all have read the turn before
            client().key_value_delete(f"{channel}/{turn - 1}/")
    else:
        # The leader's own deadline comes first, as a rule.
        verdict = _get(f"{base}/all", deadline + 5.0, members, lambda text: exchange_verdict(text, members))
        if verdict is None:
            came = by_rank(base, max(members) + 1, exchanged)
            raise _absent(name, [m for m in members if m not in came], timeout, None)
    if "missing" in verdict:
        # One that comes too late hears of it here, when the others have long said so.
        raise _absent(name, verdict["missing"], timeout, None if rank in verdict["missing"] else leader)
    return verdict["texts"]


def _absent(name: str, missing: Sequence[int], timeout: float, speaker: int | None) -> DistributedError:
    who = f"rank {', '.join(map(str, missing))}" if missing else "an answer"
    return DistributedError(f"{who} did not come to {name!r} within {timeout:g} s", rank=speaker)


def leave(code: int, rank: int, size: int, speaker: int | None, grace: float) -> None:
    """Ends this process now, with what it printed and without JAX's barrier at exit, which waits for the others.

    A launcher kills all when one has ended, and may then report the kill instead of `code`. So where all end by the
    same error, which `speaker` prints, they end at the same moment. Where one ends by itself, rank 0, whose end takes
    the coordination service away and aborts the others, goes last. Nobody waits longer than `grace` seconds.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if size > 1:
        tell_service(over=True)
        with contextlib.suppress(Exception):
            if client() is None:  # the meeting itself failed
                time.sleep(0.0 if rank == speaker or (rank and speaker is None) else grace / 2)
            else:
                put(f"jaxdp/left/{rank}", LEFT)
                if speaker is not None:
                    client().wait_at_barrier("jaxdp/leave", int(1000 * grace))
                    together = time.monotonic() + 0.1
                    client().shutdown()  # all are here: a client that is shut down outlives rank 0's service
                    time.sleep(max(0.0, together - time.monotonic()))
                elif rank == 0:
                    deadline = time.monotonic() + grace
                    while len(leavers()) < size and time.monotonic() < deadline:
                        time.sleep(0.02)
                    time.sleep(0.05)
    os._exit(code)
