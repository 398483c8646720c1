"""Break off the collectives of this process when a generation of an elastic job has ended."""

import contextlib
import os
import pathlib
import socket

_services: set[int] = set()  # ports of the coordinator, and of JAX's service for each generation


def spare(*ports: int) -> None:
    """Never break connections to these ports."""
    _services.update(ports)


def break_collectives() -> None:
    """Shut down this process's TCP connections for reading, but those to the job's services.

    A collective over Gloo then fails at once. Otherwise it waits as long as the connections to a
    lost process are open: those of a process that is stopped, cut off, or waits itself. A
    connection that is shut down for writing would make Gloo forget a send: it queues what could not
    be written, and its error reaches receivers only (gloo/transport/tcp, Pair::signalException).
    """
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_tcp and connection.getpeername()[1] not in _services:
                        connection.shutdown(socket.SHUT_RD)
