"""The coordinator: a small process on rank 0's host that every rank connects to; no rank's death ends
it. It authenticates connections and passes their messages (`channel`, `protocol`) to the current
`Generation` of ranks.

python -m jaxdp.process.coordinator_process    reads `Settings` as JSON from standard input; prints "ready", or
                                                   the reason if it cannot listen"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import pkgutil
import resource
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any

from jaxdp.process import channel, private_jax
from jaxdp.process.channel import Message, checked, printable
from jaxdp.process.generation import TICK, Generation, Member
from jaxdp.process.hosts import BACKLOG, listen, raise_open_files
from jaxdp.process.protocol import Settings

FIRST_MESSAGE = 10.0  # seconds until a connection must have sent its first message
UNAUTHENTICATED = (
    4096  # open connections without a first message, at most; beyond that, the oldest is closed
)


class Coordinator:
    """The connections of a job, and the current generation of its ranks."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.done = asyncio.Event()
        self.generation: Generation = pkgutil.resolve_name(settings.generation)(self)
        self.unauthenticated: collections.OrderedDict[asyncio.StreamWriter, None] = (
            collections.OrderedDict()
        )
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        spare = files // 2 - settings.size if files != resource.RLIM_INFINITY else UNAUTHENTICATED
        # The others are for ranks, here and in JAX's service.
        self.most = min(UNAUTHENTICATED, max(50, spare))
        self.reported = False
        self.services: list[Any] = []  # JAX's, one for each generation
        self.jax_loaded = threading.Thread(target=private_jax.load)
        self.jax_loaded.start()  # takes a large part of a second, while the ranks connect

    def report(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self.settings.stderr, f"jaxdp: {line}\n".encode())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it closes."""
        self.unauthenticated[writer] = None
        if len(self.unauthenticated) > self.most:
            self.unauthenticated.popitem(last=False)[0].close()
        member: Member | None = None
        try:
            nonce = secrets.token_bytes(channel.NONCE)
            writer.write(channel.MAGIC + nonce)
            sealer = channel.to_coordinator(self.settings.secret, nonce)
            async with asyncio.timeout(FIRST_MESSAGE):
                first = await self.receive(reader, sealer, channel.FIRST_LIMIT)
            if probe := checked(first, {"nonce": str, "probe": True}):
                nonces = nonce, probe["nonce"].encode()
                writer.write(
                    channel.to_rank(self.settings.secret, *nonces).seal(
                        channel.encode({"pid": os.getpid()})
                    )
                )
                return
            member = self.generation.join(first, nonce, writer)
            self.unauthenticated.pop(writer, None)
            while True:
                # Meanwhile the member may pass to another generation.
                message = await self.receive(reader, sealer)
                member.generation.handle(member, message)
        except channel.Refused as error:
            if member is None:
                writer.write(channel.REFUSAL)
            peer = writer.get_extra_info("peername") or ["?"]
            self.refuse(f"a message from {peer[0]}", str(error))
        except (OSError, EOFError, TimeoutError):
            pass
        finally:
            self.unauthenticated.pop(writer, None)
            if member is not None:
                member.generation.disconnected(member)
            writer.close()

    async def receive(
        self, reader: asyncio.StreamReader, sealer: channel.Sealer, limit: int = channel.PAYLOAD
    ) -> Message:
        head = await reader.readexactly(channel.HEAD)
        return sealer.open(head, await reader.readexactly(channel.length(head, limit)))

    def refuse(self, source: str, value: str) -> None:
        """Report a message that does not belong to this job, once for the job."""
        if not self.reported:
            self.reported = True
            self.report(
                f"rank 0: refused {printable(source, 200)}: {printable(value, 80)}: not a message of this job; the "
                "job continues, and refuses further ones silently (who can reach its port? see docs/hosts.md)"
            )

    async def watch(self) -> None:
        """Check the generation until the job is over."""
        checked_at = time.monotonic()
        while not self.done.is_set():
            await asyncio.sleep(TICK)
            now = time.monotonic()
            elapsed = now - checked_at
            checked_at = now
            self.generation.tick(elapsed)
            if self.generation.is_empty():
                self.done.set()


ACCEPTED = 32  # new connections, at most, that asyncio accepts before it serves those that are open


async def run(settings: Settings, server: socket.socket) -> None:
    coordinator = Coordinator(settings)
    loop = asyncio.get_running_loop()

    def parent_gone():
        return None if coordinator.generation.admitted else coordinator.done.set()

    threading.Thread(
        target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(parent_gone)), daemon=True
    ).start()
    listener = await asyncio.start_server(coordinator.serve, sock=server, backlog=ACCEPTED)
    server.listen(BACKLOG)
    with contextlib.suppress(BrokenPipeError):  # rank 0 has ended
        print("ready", flush=True)
    await coordinator.watch()
    listener.close()
    await asyncio.sleep(0.05)  # flush the last messages


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # Launchers send them to all their processes, but mean the ranks.
        signal.signal(number, signal.SIG_IGN)
    raise_open_files()
    settings = Settings(**json.loads(sys.stdin.readline()))
    try:
        server = listen(
            settings.address or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"), settings.port
        )
    except OSError as error:
        print(os.strerror(error.errno) if error.errno else error, flush=True)
        os._exit(1)
    try:
        asyncio.run(run(settings, server))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(
                settings.stderr,
                f"jaxdp: the coordinator failed: {type(error).__name__}: {error}\n".encode(),
            )
    os._exit(0)


if __name__ == "__main__":
    main()
