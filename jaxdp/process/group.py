"""How the processes of a job belong together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jaxdp.process.connection import Joined
from jaxdp.process.membership import Membership
from jaxdp.process.protocol import GENERATION, Facts

Fields = dict[str, Any]  # of a `Context`


class Group:
    """A fixed group of processes: the first fault ends all. A subclass may let them leave and join.

    kind: what all processes of a job must have alike. membership: of a process. generation:
    "module:class" of the ranks in the coordinator. silence: see `protocol.silence`. moves: whether
    any process may start a coordinator in the place of one that has gone. prepare: called by a
    process that joins a running job, before the others stop for it; it may open devices, which are
    closed again."""

    kind: ClassVar[str] = "fixed"
    membership: ClassVar[type[Membership]] = Membership
    generation: ClassVar[str] = GENERATION
    silence: ClassVar[float] = 20.0
    moves: ClassVar[bool] = False
    prepare: Callable[[], None] | None = None

    def options(self) -> dict[str, Any]:
        """Return the settings of `generation`."""
        return {}

    def facts(self) -> Facts:
        """Return what the coordinator compares."""
        return {"group": self.kind}

    def enter(self, enter: Callable[[Joined], Fields], job: Joined) -> Fields:
        """Return what `enter` returns for a job that this process has joined."""
        return enter(job)
