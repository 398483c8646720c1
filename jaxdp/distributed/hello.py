"""Before JAX connects, every process says hello to rank 0 and hears who else came: JAX itself would abort, not say.

A missing process, a world size that differs or a wrong address ends JAX's own connection with a C++ abort. So rank 0
listens on the coordinator's port first, with the standard library's HTTP server: each rank posts what it is, the answer
comes when all are there, and is the same for all. Then rank 0 hands the port to JAX.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import http.server
import json
import socket
import socketserver
import threading
import time
from typing import Any

from jaxdp.distributed.hosts import title
from jaxdp.distributed.listening import any_address, bind_everywhere
from jaxdp.distributed.messages import LIMIT, integer, parse, printable, report_refused
from jaxdp.errors import DistributedError, UsageError

PATH = "/jaxdp/hello"
# What rank 0's process and any other must have in common; in the order in which a difference is reported.
COMMON = {
    "size": "world size",
    "jaxdp": "jaxdp version",
    "jax": "JAX version",
    "jaxlib": "jaxlib version",
    "python": "Python version",
}
Hello = dict[str, Any]
SHAPE: dict[str, Any] = {
    **dict.fromkeys(["host", "boot", "jaxdp", "jax", "jaxlib", "python"], str),
    "addresses": [str],
    "spaces": [str],
    "rank": range(1 << 20),
    "size": range(1 << 21),
    "pid": range(1 << 31),
    "gloo": bool,
    "visible": (str, None),
}
VERDICT: dict[str, Any] = {"error?": str, "missing?": [range(1 << 20)], "timeout?": float, "hellos?": [SHAPE]}
UNHEARD = 256  # open connections that have sent no hello yet; the oldest of more is closed


def read(text: bytes | str) -> Hello | None:
    """Return the hello of a process of a job; None where it is none."""
    hello = parse(text, SHAPE)
    return hello if hello and hello["rank"] < hello["size"] and len(hello["spaces"]) == 2 else None


def difference(first: Hello, other: Hello) -> str | None:
    """One line that says where `other` differs from rank 0's hello; None where they agree."""
    for field, label in COMMON.items():
        if first.get(field) != other.get(field):
            return (
                f"{title(other['rank'], other['host'])} has {label} {other.get(field)}, but "
                f"{title(0, first['host'])} has {first.get(field)}: start every process of the job with the same"
            )
    return None


class _Meeting:
    """Who has come; the verdict, once there is one."""

    def __init__(self, own: Hello):
        self.own, self.arrived, self.verdict = own, {0: own}, ""
        self.changed = threading.Condition()
        self.answering = 0

    def join(self, hello: Hello) -> None:
        with self.changed:
            rank, before = hello["rank"], self.arrived.get(hello["rank"])
            error = difference(self.own, hello)
            if not error and before and (before["host"], before["pid"]) != (hello["host"], hello["pid"]):
                error = (
                    f"two processes say they are rank {rank}: {before['pid']} on host {before['host']} and "
                    f"{hello['pid']} on host {hello['host']}: give every process its own rank"
                )
            self.arrived[rank] = hello
            if error:
                self.decide({"error": error})
            elif len(self.arrived) == self.own["size"]:
                self.decide({"hellos": [self.arrived[r] for r in range(self.own["size"])]})

    def decide(self, verdict: dict[str, Any]) -> None:
        with self.changed:
            self.verdict = self.verdict or json.dumps(verdict)
            self.changed.notify_all()


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10
    server: Server

    def do_GET(self) -> None:
        own = self.server.meeting.own
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([own["boot"], own["host"], own["pid"]]).encode())

    def do_POST(self) -> None:
        meeting = self.server.meeting
        text = self.rfile.read(integer(self.headers["Content-Length"], LIMIT) or 0)
        hello = read(text)
        if hello is None or self.path != PATH:
            self.send_error(400, str(text[:80]))
            return
        self.server.unheard.pop(self.request, None)
        with meeting.changed:
            meeting.answering += 1
        try:
            # The head of the answer goes out at once: the other side then knows that this is the right server.
            self.send_response(200)
            self.end_headers()
            meeting.join(hello)
            with meeting.changed:
                meeting.changed.wait_for(lambda: meeting.verdict)
            self.wfile.write(meeting.verdict.encode())
        finally:
            with meeting.changed:
                meeting.answering -= 1
                meeting.changed.notify_all()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        if not self.requestline.startswith("PRI "):  # a rank that asks for JAX's server (`speaks_grpc`)
            report_refused(f"a first message from {self.client_address[0]}", message, "jaxdp: rank 0")
        super().send_error(code)

    def log_message(self, *args: Any) -> None:
        pass


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, address: str | None, port: int, own: Hello, family: socket.AddressFamily):
        self.address_family, self.meeting = family, _Meeting(own)
        self.unheard: collections.OrderedDict[Any, None] = collections.OrderedDict()
        super().__init__((address or any_address(family), port), _Handler, bind_and_activate=False)
        bind_everywhere(self)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.unheard[request] = None
        if len(self.unheard) > UNHEARD + self.meeting.own["size"]:
            oldest, _ = self.unheard.popitem(last=False)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.unheard.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *args: Any) -> None:
        pass  # a rank that hung up; the meeting's deadline names it


def listen(address: str | None, port: int, own: Hello) -> Server:
    """Rank 0's server, as a context that closes it. UsageError where the port is taken: JAX would crash on it.

    address: where it listens; None: at all of this host's.
    """
    families = [socket.AF_INET6, socket.AF_INET] if socket.has_ipv6 else [socket.AF_INET]
    if address is not None:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET]
    problem = None
    for family in families:
        try:
            return Server(address, port, own, family)
        except OSError as error:
            problem = error
    raise UsageError(
        f"rank 0 cannot listen on port {port} of {own['host']} ({problem}): choose another coordinator port"
    )


def leads_back(host: str, port: int, own: Hello) -> bool:
    """Whether what answers at that address is this very process, as through a forwarded port or a service's address."""
    line = http.client.HTTPConnection(host, port, timeout=3.0)
    try:
        line.request("GET", PATH)
        return bool(json.loads(line.getresponse().read(LIMIT)) == [own["boot"], own["host"], own["pid"]])
    except (OSError, http.client.HTTPException, json.JSONDecodeError):
        return False
    finally:
        line.close()


def gather(server: Server, own: Hello, timeout: float) -> list[Hello]:
    """Rank 0's side: waits for all hellos. Raises what every rank raises, with rank=0."""
    meeting = server.meeting
    with meeting.changed:
        if own["size"] > 1 and not meeting.changed.wait_for(lambda: meeting.verdict, timeout):
            missing = [r for r in range(own["size"]) if r not in meeting.arrived]
            meeting.decide({"missing": missing, "timeout": timeout})
    with meeting.changed:
        meeting.changed.wait_for(lambda: meeting.answering == 0, 2.0)
    return _verdict(meeting.verdict, own)


def _verdict(text: str | bytes, own: Hello) -> list[Hello]:
    verdict = parse(text, VERDICT, limit=1 << 28)
    failed = verdict and verdict.keys() & {"error", "missing"}
    if verdict is None or not (failed or len(verdict.get("hellos", [])) == own["size"]):
        raise http.client.HTTPException(f"it answered {text[:80]!r}")
    if "error" in verdict:
        raise UsageError(verdict["error"], rank=0)
    if "missing" in verdict:
        names, waited = ", ".join(map(str, verdict["missing"])), round(verdict.get("timeout", 0), 1)
        raise DistributedError(
            f"rank {names} of {own['size']} did not come within {waited:g} s: see whether it was started "
            "and what it printed (JAXDP_TIMEOUT sets how long to wait, in seconds)",
            rank=0,
        )
    return verdict["hellos"]


def attend(host: str, port: int, own: Hello, timeout: float) -> list[Hello]:
    """The other ranks' side: keeps trying until rank 0 is there. Raises what rank 0 says, or that it is not there."""
    began, strange, problem = time.monotonic(), 0, "not tried"
    while (left := began + timeout - time.monotonic()) > 0:
        line, connected = http.client.HTTPConnection(host, port, timeout=min(left, 5.0)), False
        try:
            line.connect()
            connected = True
            sock = line.sock  # the answer keeps it open after `line` has let go of it
            sock.settimeout(min(left, 5.0))
            line.request("POST", PATH, json.dumps(own))
            answer = line.getresponse()
            if answer.status != 200:
                raise http.client.HTTPException(f"HTTP status {answer.status}")
            sock.settimeout(left + 10.0)  # rank 0's own deadline comes first, and says who is missing
            return _verdict(answer.read(1 << 28), own)
        except (OSError, http.client.HTTPException) as error:
            problem = printable(error, 200) or type(error).__name__
            strange += connected  # nothing listening is not strange yet; something that does not answer as rank 0 is
        finally:
            line.close()
        if strange >= 3:
            raise UsageError(
                f"rank {own['rank']}: what listens at the coordinator's address {host}:{port} is not rank 0 of this "
                f"job ({problem}): another program has that port; choose another"
            )
        time.sleep(0.1 if not strange else 1.0)
    raise DistributedError(
        f"{title(own['rank'], own['host'])} found no rank 0 at the coordinator's address {host}:{port} within "
        f"{round(timeout, 1):g} s ({problem}): see whether rank 0 was started there "
        "(JAXDP_TIMEOUT sets how long to wait)"
    )


def speaks_grpc(host: str, port: int, timeout: float = 2.0) -> bool:
    """Whether what listens there is JAX's coordinator: gRPC answers the preface of HTTP/2 with a SETTINGS frame."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout) as line:
        line.settimeout(timeout)
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        return line.recv(9)[3:4] == b"\4"
    return False


def await_grpc(host: str, port: int, who: str, timeout: float) -> None:
    """Waits until rank 0 has handed the port to JAX; DistributedError where that does not happen."""
    deadline = time.monotonic() + timeout
    while not speaks_grpc(host, port):
        if time.monotonic() > deadline:
            raise DistributedError(f"{who}: rank 0 went away from {host}:{port} after all had come")
        time.sleep(0.02)
