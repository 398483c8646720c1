"""The context of a process in its job: its rank, the number of ranks, and small exchanges between
them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax

from jaxdp.errors import (
    INTERRUPTED,
    DistributedError,
    ReportedError,
    UsageError,
    is_consequence,
    one_line,
    record_fault,
)
from jaxdp.extras import backend_group
from jaxdp.metrics.safe_print import drain
from jaxdp.process import enter, hosts, membership, private_jax
from jaxdp.process.launchers import World, discover
from jaxdp.process.membership import Group

# seconds that one process may take longer than another, such as to compile or to read its data
SLOW = 600.0
# Seconds that an ending process waits for the others, and for the one that prints for it.
GRACE, LATE = 2.0, 8.0


@dataclasses.dataclass(frozen=True)
class Context:
    """One process of a job.

    local_rank, local_size: rank and number of the processes on this host. root_rank: the rank that
    prints and saves. hosts[rank]: host names; pids[rank]: process ids. launcher: the program that
    started the processes; "none" for a single process. backend: see `init`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    hosts: tuple[str, ...] = ("",)
    root_rank: int = 0
    pids: tuple[int, ...] = ()
    backend: str | None = None

    @property
    def is_root(self) -> bool:
        return self.rank == self.root_rank

    def title(self, rank: int) -> str:
        """Return the name of a rank in messages, with its host."""
        return hosts.title(rank, self.hosts[rank])

    def exchange(self, name: str, text: str, timeout: float = 60.0) -> list[str]:
        """Return every rank's short `text`, by rank. Raises DistributedError that names the ranks
        that time out.
        """
        if self.size == 1:
            return [text]
        return membership.joined().exchange(name, text, range(self.size), timeout)

    def of_root(self, name: str, make: Callable[[], Any], timeout: float = 60.0) -> Any:
        """Run `make` on root and return its result (JSON) on every rank, so that all share root's
        view of the files.
        """
        return json.loads(
            self.exchange(name, json.dumps(make()) if self.is_root else "", timeout)[self.root_rank]
        )

    def barrier(self, name: str = "", timeout: float = 60.0) -> None:
        """Wait for every rank. Raises DistributedError, with the missing ranks, after `timeout`
        seconds, whatever JAXDP_TIMEOUT says.
        """
        self.exchange(f"barrier {name}".strip(), "", timeout)

    def compute(self, work: Callable[[], Any]) -> Any:
        """Return what the processes compute together; see `Membership.compute`."""
        member = membership.current()
        return jax.block_until_ready(work()) if member is None else member.compute(work)

    def agree(self, error: str | None, timeout: float = 60.0) -> None:
        """Raise UsageError on every rank if any rank passes an error: that of the lowest such rank,
        which prints it.
        """
        for rank, text in enumerate(self.exchange("agree", error or "", timeout)):
            if text:
                raise UsageError(
                    f"{self.title(rank)}: {text}" if self.size > 1 else text, rank=rank
                )

    def check_same(self, name: str, facts: Mapping[str, str], timeout: float = 60.0) -> None:
        """Raise UsageError on every rank, for rank 0 to print, if a rank's `facts` differ from
        those of rank 0.

        The error names the first such rank, the fact and both values.
        """
        texts = self.exchange(f"check_same {name}", json.dumps(dict(facts)), timeout)
        first = json.loads(texts[0])
        for rank, text in enumerate(texts):
            other = first if text == texts[0] else json.loads(text)
            for fact in dict.fromkeys([*first, *other]):
                if first.get(fact) != other.get(fact):
                    raise UsageError(
                        f"{name}: {self.title(rank)} has {fact}={other.get(fact)}, but {self.title(0)} has "
                        f"{fact}={first.get(fact)}: they must be the same",
                        rank=rank if membership.joined().is_new(rank) else 0,
                    )


_current: Context | None = None
_joining: World | None = None
_arguments: dict[str, Any] = {}
_hooked = False


def current() -> Context:
    """Return the context that `init` created; before `init`, that of a single process.

    Raises UsageError while this process joins its job: its rank is not known yet.
    """
    if _current is None and _joining is not None:
        raise UsageError("jaxdp.current(): this process has not joined its job yet")
    return _current or Context(hosts=(socket.gethostname(),))


def alone() -> bool:
    """Return whether this process is the only one of its job."""
    return process().size == 1


def process() -> membership.Membership | Context | World:
    """Return what has this process's rank and the number of ranks, as far as it has joined its job."""
    return membership.current() or _current or _joining or Context()


def joined() -> Context:
    """Return the current context. Raises UsageError if a launcher started several processes and
    `init` did not run.
    """
    if _current is None and (size := discover().size) > 1:
        _hook()
        raise UsageError(
            f"call jaxdp.init() first: there are {size} processes, and each would train alone"
        )
    return current()


def init(
    coordinator: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    init_method: str | None = None,
    timeout: float | None = None,
    group: Group | None = None,
    backend: str | None = None,
) -> Context:
    """Join the job that this process belongs to, and open its devices together with the other
    processes; call it before anything touches a device.

    Rank and size come from the arguments, else from the launcher's variables
    (`launchers.discover`); a process without either is alone, and `jax.distributed` stays
    untouched. coordinator: "host:port" of rank 0; init_method: "tcp://host:port" or "env://", as in
    torch.distributed. timeout: seconds, for the rendezvous and for detecting a dead process; by
    default JAXDP_TIMEOUT, or 60. group: how the processes belong together; by default the death of
    one ends the others. backend: "mpi" for a loop of your own over MPI, without JAX's service (of
    the folder jaxdp/mpi); by default that of JAX: Gloo between CPUs, NCCL between GPUs. A second
    call returns the same context.

    Raises UsageError (wrong or different variables, addresses, host names, versions or sizes; other
    arguments in a second call) and DistributedError (a process did not come). In a job of several
    processes, an uncaught exception then ends this process at once: JAX would wait for the others,
    and they for it."""
    global _current, _joining, _arguments
    arguments = {k: v for k, v in locals().items() if v is not None}
    if _current is not None:
        if arguments and arguments != _arguments:
            raise UsageError(
                f"init({arguments}), but this process already joined with init({_arguments})"
            )
        return _current
    _hook()
    if backend is not None:
        group = backend_group(backend)
    world = discover(
        **{k: v for k, v in arguments.items() if k not in ("timeout", "group", "backend")}
    )
    if world.size > 1 and (private_jax.backends_initialized() or private_jax.is_connected()):
        raise UsageError(
            "jaxdp.init() comes too late to join other processes: JAX's devices are in use, or jax.distributed is "
            "initialized; call it first"
        )
    if world.size == 1:
        context = Context(
            launcher=world.launcher, hosts=(socket.gethostname(),), pids=(os.getpid(),)
        )
    else:
        _joining = world
        fields = enter.join(world, timeout, group or Group())
        context = Context(launcher=world.launcher, backend=backend, **fields)
    _current, _arguments = context, arguments
    return context


def renew(**fields: Any) -> Context:
    """Return the context of this process in a group that has changed. fields: those of `enter`."""
    global _current
    _current = dataclasses.replace(current(), **fields)
    return _current


def _hook() -> None:
    """End this process at once on an uncaught exception: JAX would wait for the others at exit, and
    they for it.
    """
    global _hooked
    if _hooked:
        return
    previous, _hooked = sys.excepthook, True

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt) and not alone():
            fail(DistributedError("interrupted by Ctrl-C (SIGINT)"), INTERRUPTED)
        if not isinstance(error, ReportedError):
            if membership.current() is not None:
                crash(error)
            previous(kind, error, trace)
            if alone():
                return
        fail(error)

    sys.excepthook = excepthook


def crash(error: BaseException) -> NoReturn:
    """End this process after an unexpected error; print its rank, host and traceback once for the
    job.

    If the error is a consequence of another rank's fault, print that fault instead.
    """
    member = membership.current()
    trace = "".join(traceback.format_exception(error))
    if member is None:
        sys.stderr.write(trace)
        leave(1, process().rank)
    text = f"{member.name(member.rank)} failed: {type(error).__name__}: {one_line(error)[:300]}"
    if is_consequence(error):
        with contextlib.suppress(DistributedError):
            # Meanwhile the reader thread ends this process if the coordinator knows the cause.
            reply = member.silent()
            if ranks := reply["silent"] or reply["left"]:
                has = "has" if len(ranks) == 1 else "have"
                text = f"{member.name(*ranks)} {has} gone: killed, stopped, or cut off"
                trace = ""
                text = (
                    text
                    if reply["silent"]
                    else f"{member.name(*ranks)} {has} ended before the others"
                )
    if member.report_fault(text) or member.ends_alone:
        member.ending.set()
        if not trace:
            record_fault(text)
        sys.stderr.write(f"{trace}jaxdp: {text}\n")
    else:
        time.sleep(2.0)  # the reader thread prints the cause and ends this process
    leave(1)


def fail(error: BaseException, code: int | None = None) -> NoReturn:
    """Print `error` on its rank and end this process with `code`, or with 2 for UsageError and 1
    otherwise.
    """
    speaker = error.rank if isinstance(error, ReportedError) else None
    text = str(error)
    codes = code, getattr(error, "code", None), 2 if isinstance(error, UsageError) else 1
    code = next(code for code in codes if code is not None)
    rank = process().rank
    member = membership.current()
    if member is not None and (speaker is None or (speaker == rank and member.is_new(rank))):
        name, speaker = member.name(rank), None
        text = f"{name}: {text.removeprefix(f'{name}: ')}"
        if not member.report_fault(text, code) and not member.ends_alone:
            # The reader thread prints the cause, that of another rank, and ends this process.
            time.sleep(2.0)
    if isinstance(error, ReportedError) and speaker in (None, rank):
        sys.stderr.write(f"jaxdp: {text}\n")  # in one piece, among what other ranks write
    leave(code, speaker)


def shutdown() -> None:
    """Leave the job together with the other processes. Does nothing in a single process."""
    global _current, _joining
    if private_jax.is_connected():
        jax.distributed.shutdown()
    if (member := membership.current()) is not None:
        member.leave()
        membership.forget()
    _current = _joining = None


def leave(code: int, speaker: int | None = None) -> NoReturn:
    """Flush the output and end this process now, without waiting in JAX's barrier at exit.

    speaker: a rank that prints for all; the others wait for it, at most GRACE seconds, or LATE
    under mpirun, which kills all ranks when one has ended, the speaker too, and may then report the
    kill instead of `code`."""
    drain()
    rank = process().rank
    size = process().size
    member = membership.current()
    if size > 1 and member is None:  # the ranks never connected
        if speaker is None:
            time.sleep(0.0 if rank else GRACE / 2)
        elif rank != speaker:
            time.sleep(LATE if _joining is not None and _joining.coordinator is None else GRACE / 2)
    elif member is not None:
        if speaker is not None:
            with contextlib.suppress(DistributedError):
                member.exchange("leave", "", range(size), GRACE)
        common_end = time.monotonic() + 0.1
        # Once the cause is printed, ranks in other calls may end.
        member.leave(code if speaker in (None, rank) else 0)
        if speaker is not None:
            time.sleep(max(0.0, common_end - time.monotonic()))
    os._exit(code)
