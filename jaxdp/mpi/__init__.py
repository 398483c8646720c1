"""`jaxdp.init(backend="mpi")`: the eager collectives and the five calls over MPI, for a loop of your
own under mpirun, without JAX's service and without Gloo (docs/own_loop.md)."""

from typing import Any

from jaxdp.errors import UsageError
from jaxdp.extras import Extra
from jaxdp.process import hosts
from jaxdp.process.connection import Joined
from jaxdp.process.launchers import MPI, World, discover
from jaxdp.process.membership import Group
from jaxdp.process.mpi import exchange
from jaxdp.process.protocol import Facts, difference


class Door(Extra):
    """Processes that mpirun started, and that MPI connects."""

    def group(self, objects: Any) -> Group:
        check(discover())
        return MpiGroup()


def check(world: World) -> None:
    """Raise UsageError unless rank and size are those of mpirun."""
    if world.launcher not in MPI:
        raise UsageError(
            "backend: mpi needs mpirun, but rank and size come from another launcher "
            f"({world.launcher}): start the script with `mpirun -np 2 python SCRIPT`"
        )


class MpiGroup(Group):
    """The ranks of mpirun, which MPI connects."""

    kind = "mpi"

    def meet(self, world: World, facts: Facts, timeout: float, group: Group) -> Joined:
        """Start MPI, and compare the facts of all ranks."""
        check(world)
        facts |= {"rank": world.rank, "size": world.size, **hosts.identity()}
        everyone = exchange(world, facts, timeout, finalize=False)
        for other in everyone:
            if error := difference(everyone[0], other):
                raise UsageError(error, rank=0)
        from jaxdp.mpi.mpi_membership import MpiMembership  # needs the MPI that was loaded

        self.membership = MpiMembership
        return Joined(None, everyone, "", world.rank, 0, ("", 0), "")  # type: ignore[arg-type]
