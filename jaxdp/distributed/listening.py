"""A server that others reach at any of this host's addresses, old and new."""

import socket
import socketserver


def any_address(family: socket.AddressFamily) -> str:
    """What a server of a family binds to; of IPv6, those of IPv4 too once `bind_everywhere` was called."""
    return "::" if family == socket.AF_INET6 else ""


def bind_everywhere(server: socketserver.TCPServer) -> None:
    """Binds and activates a server that was made without. Raises OSError, with the server closed, where it cannot."""
    try:
        if server.address_family == socket.AF_INET6:
            server.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.server_bind()
        server.server_activate()
    except OSError:
        server.server_close()
        raise
