"""Relay the connection of this process to JAX's coordination service, so that the service may end before the process.

JAX aborts a process 5 ms after that connection has closed. The relay leaves it open, so that the process can leave the
service before it misses a heartbeat.
"""

import contextlib
import socket
import threading

_sockets: list[socket.socket] = []


def close_relay() -> None:
    """Close the relay after this process has left the service: calls that wait for an answer fail."""
    while _sockets:
        with contextlib.suppress(OSError, IndexError):  # two threads may call this
            _sockets.pop().shutdown(socket.SHUT_RDWR)


def open_relay(host: str, port: int) -> str:
    """Return an address of gRPC's that relays to a port."""
    server = socket.socket(socket.AF_UNIX)
    server.bind("")  # an unused name that is no file
    server.listen()
    threading.Thread(target=_accept, args=(server, host, port), name="relay", daemon=True).start()
    _sockets.append(server)
    return f"unix-abstract:{server.getsockname()[1:].decode()}"


def _accept(server: socket.socket, host: str, port: int) -> None:
    with server, contextlib.suppress(OSError):  # it is closed
        while True:
            client = server.accept()[0]
            _sockets.append(client)
            threading.Thread(target=_connect, args=(client, host, port), name="relay", daemon=True).start()


def _connect(client: socket.socket, host: str, port: int) -> None:
    """Relay a connection until this process closes it."""
    try:
        service = socket.create_connection((host, port))
        service.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        service = socket.socket()  # the service has ended: nothing is received, and what is sent is lost
    with client, service:
        threading.Thread(target=_copy, args=(service, client), name="relay", daemon=True).start()
        _copy(client, service)
        with contextlib.suppress(OSError):
            service.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source closes; what the target no longer receives is lost."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            with contextlib.suppress(OSError):
                target.sendall(data)
