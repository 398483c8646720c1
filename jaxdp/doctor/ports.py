"""The coordinator's port has to be free where rank 0 runs; whoever has it is named."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
from collections.abc import Iterator, Mapping

from jaxdp.distributed import hosts, launchers
from jaxdp.distributed.rendezvous import split
from jaxdp.distributed.world import World
from jaxdp.doctor.check import Check, failure, ok, warning
from jaxdp.errors import one_line


def check_port(world: World | None, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """The coordinator's port, where one is set: it must be free on the host of rank 0, which is to listen there."""
    for name, address in coordinators(env, world).items():
        host, port = split(launchers.address(address, name))
        if not hosts.resolve(host):
            yield failure(
                "port", f"{name}={address}: {host} does not resolve", f"set {name} to an address of rank 0's host"
            )
        elif not hosts.is_own(host):
            if world is None or world.rank == 0 < world.size - 1:
                found = f"{name}={address}: {host} is no address of this host, {hosts.hostname()}"
                yield warning("port", found, f"set {name} to rank 0's host, or start rank 0 there")
        elif world is None or world.rank == 0:
            problem = taken(port)
            if problem:
                yield failure(
                    "port", f"{name}={address}: port {port} {problem}", "choose another port, or end that program"
                )
            else:
                yield ok("port", f"{name}={address}: port {port} is free")


def coordinators(env: Mapping[str, str], world: World | None) -> dict[str, str]:
    """{variable: "host:port"} of what says where rank 0 is to serve."""
    found = {}
    if env.get("JAXDP_COORDINATOR"):
        found["JAXDP_COORDINATOR"] = env["JAXDP_COORDINATOR"]
    elif env.get("MASTER_ADDR") and env.get("MASTER_PORT") and not env.get("TORCHELASTIC_RUN_ID"):
        found["MASTER_ADDR:MASTER_PORT"] = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    elif world is not None and world.coordinator:
        found[f"the coordinator ({world.launcher})"] = world.coordinator
    return found


def taken(port: int) -> str | None:
    """Why this process cannot listen on `port`; None where it can. A port that is closing may be had."""
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()
            except PermissionError:
                return "may only be had by root"
            except OSError as error:
                if family == socket.AF_INET:
                    return f"is taken{owner(port)} ({error.strerror})"
                continue
            return None
    return "cannot be listened on"


def owner(port: int) -> str:
    """ " by process N (its command)", as far as /proc tells."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if inodes & {os.readlink(f) for f in (process / "fd").iterdir()}:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                return f" by process {process.name} ({one_line(command)[:60]})"
    return ""
