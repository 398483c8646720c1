"""A server that listens on all addresses of this host, IPv4 and IPv6."""

import socket
import socketserver


def any_address(family: socket.AddressFamily) -> str:
    """Return the wildcard address of a family. With `bind_everywhere`, that of IPv6 includes IPv4."""
    return "::" if family == socket.AF_INET6 else ""


def bind_everywhere(server: socketserver.TCPServer) -> None:
    """Bind and activate an unbound server. Close it and raise OSError if that fails."""
    try:
        if server.address_family == socket.AF_INET6:
            server.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.server_bind()
        server.server_activate()
    except OSError:
        server.server_close()
        raise
