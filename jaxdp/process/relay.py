"""Relay connections to JAX's coordination service: its end, or a cut of the network, must not end a
process.

JAX aborts a process 5 ms after that connection has closed. The relay of a process that may leave its
job keeps it open until the process has left the service. The relay beside the service lets the network
be cut for as long as TCP tries again: gRPC's server closes a connection of its own after 20 s.
"""

import contextlib
import socket
import threading

from jaxdp.process import hosts


class Relay:
    """A relay to a port, from an address of this host or, without one, from a name. address: the
    one to connect to.
    """

    def __init__(self, host: str, port: int, listen: tuple[str, int] | None = None):
        self.target = (host, port)
        if listen is not None:
            self.server = hosts.listen(*listen)
            self.address = "{}:{}".format(*listen)
        else:
            self.server = socket.socket(socket.AF_UNIX)
            self.server.bind("")  # an unused name that is no file
            self.server.listen()
            self.address = f"unix-abstract:{self.server.getsockname()[1:].decode()}"
        self.sockets = [self.server]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def close(self) -> None:
        """Close the relay after this process has left the service: calls that wait for an answer
        fail.
        """
        for connection in self.sockets:
            with contextlib.suppress(OSError):  # it is closed
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self.server, contextlib.suppress(OSError):  # the relay is closed
            while True:
                client = self.server.accept()[0]
                self.sockets.append(client)
                threading.Thread(
                    target=self._connect, args=(client,), name="relay", daemon=True
                ).start()

    def _connect(self, client: socket.socket) -> None:
        """Relay a connection until this process closes it."""
        try:
            service = socket.create_connection(self.target)
            service.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            # The service has ended: nothing is received, and what is sent is lost.
            service = socket.socket()
        with client, service:
            threading.Thread(
                target=_copy, args=(service, client), name="relay", daemon=True
            ).start()
            _copy(client, service)
            with contextlib.suppress(OSError):
                service.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source closes; what the target no longer receives is lost."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            with contextlib.suppress(OSError):
                target.sendall(data)
