"""The membership of a process in a job that MPI alone connects."""

import atexit
import math
import time
import zlib
from typing import Any

from mpi4py import MPI

from jaxdp.errors import UsageError
from jaxdp.mpi import mpi_collectives
from jaxdp.process.channel import Message
from jaxdp.process.membership import ANSWER_MARGIN, Membership

TOGETHER = 1.0  # seconds within which the ranks of a job end after an error that they share
# Answers without a coordinator: a rank prints its fault itself, and MPI reports none that is silent.
ALONE: dict[str, Message] = {"fault": {"first": True}, "silent": {"silent": [], "left": []}}


class MpiMembership(Membership):
    """The membership of a process that knows the others by MPI: there is no coordinator.

    The first member of an exchange collects the texts, and sends all of them, or who is missing, to
    the others. A member that comes too late receives that, too.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.collectives = mpi_collectives
        self.world = MPI.COMM_WORLD.Dup()
        self._late: list[Any] = []  # requests to send to ranks that did not come, with their data

    def start(self) -> None:
        atexit.register(self.leave)

    def connect(self) -> None:
        """JAX knows no other process."""

    def request(self, op: str, /, *wait: Any, **fields: Any) -> Message:
        """Answer an exchange as the coordinator would. Raises UsageError for what needs one."""
        if op in ALONE:
            return ALONE[op]
        if op != "exchange":
            raise UsageError(
                f"backend: mpi has no coordinator, which {op!r} needs; leave backend out of jaxdp.init"
            )
        first, *others = fields["members"] or range(self.size)
        # Every MPI has 32,768 tags.
        tag = zlib.crc32(f"{fields['name']} {fields['turn']} {first} {others}".encode()) % 32768
        deadline = time.monotonic() + fields["timeout"]
        if self.rank != first:
            requests = [self.world.isend(fields["text"], first, tag)]
            answer = self._receive(first, tag, deadline + ANSWER_MARGIN) or {"missing": [first]}
        else:
            texts = {rank: self._receive(rank, tag, deadline) for rank in others}
            answer = {"kinds": [fields["text"], *texts.values()], "of": [*range(len(texts) + 1)]}
            if missing := [rank for rank in others if texts[rank] is None]:
                answer = {"missing": missing}
            requests = [self.world.isend(answer, rank, tag) for rank in others]
        if "missing" in answer:
            self._late += requests
        else:  # MPI may send a long text only while it is called
            MPI.Request.waitall(requests)
        return answer

    def _receive(self, rank: int, tag: int, deadline: float) -> Any:
        """Return what a rank sends with this tag; None if that does not come in time."""
        while not self.world.iprobe(rank, tag):
            if time.monotonic() > deadline:
                return None
            time.sleep(1e-4)
        return self.world.recv(None, rank, tag)

    def leave(self, code: int = 0) -> None:
        """Finalize MPI together with the other ranks; after an error that they do not share, end
        them all."""
        if MPI.Is_finalized():
            return
        deadline = time.monotonic() + (TOGETHER if code else math.inf)
        barrier = self.world.Ibarrier()
        while not barrier.Test():
            if time.monotonic() > deadline:
                MPI.COMM_WORLD.Abort(code)
            time.sleep(1e-3)
        MPI.Finalize()
