"""The process that runs the coordinator.

python -m jaxdp.process.coordinator_process    reads `Settings` as JSON from standard input; prints "ready", or
                                                   the reason if it cannot listen
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading

from jaxdp.process.coordinator import Coordinator
from jaxdp.process.hosts import BACKLOG, listen, raise_open_files
from jaxdp.process.protocol import Settings

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
        signal.signal(
            number, signal.SIG_IGN
        )  # launchers send them to all their processes, but mean the ranks
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
