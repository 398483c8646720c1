"""Several hosts on one machine: network namespaces with their own names, addresses and /etc/hosts,
on one bridge.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Collection

_count = itertools.count()


class Hosts:
    """A context in which hosts exist; their network can be cut.

    loopback: the host whose own name resolves to 127.0.1.1, as on Debian. Raises OSError if hosts
    cannot be made here."""

    def __init__(self, count: int, loopback: int | None = None):
        # Taking down is not at once, so that every network gets names of its own.
        mark = f"{os.getpid() % 10000}{next(_count)}"
        self.names = [f"jdp{chr(ord('a') + i)}{mark}" for i in range(count)]
        self.net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.bridge, self.other, self.loopback = f"jdpbr{mark}", f"jdpot{mark}", loopback

    def address(self, host: int) -> str:
        return f"{self.net}.{host + 1}"

    @property
    def prefixes(self) -> list[list[str]]:
        """What runs a command on each host."""
        quote = 'hostname "$0"; exec "$@"'
        return [
            ["ip", "netns", "exec", n, "unshare", "--uts", "sh", "-c", quote, n] for n in self.names
        ]

    def cut(self, host: int) -> None:
        """Take a host off the network; it notices."""
        _run("ip", "-n", self.names[host], "link", "set", "eth0", "down")

    def split(self, hosts: Collection[int]) -> None:
        """Separate these hosts from the others; packets between them are lost."""
        for host in hosts:
            _run("ip", "link", "set", f"{self.names[host]}v", "master", self.other)

    def heal(self) -> None:
        """Undo `cut` and `split`."""
        for name in self.names:
            _run("ip", "link", "set", f"{name}v", "master", self.bridge)
            _run("ip", "-n", name, "link", "set", "eth0", "up")

    def pids(self, host: int) -> list[int]:
        """Return the processes of a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.names[host]).split()]

    def kill(self, host: int) -> None:
        """Kill all processes of a host."""
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Hosts:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
            raise OSError("making hosts needs root, iproute2 and unshare")
        try:
            self._up()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise OSError(
                f"network namespaces are not permitted here: {error.stderr.strip()}"
            ) from None
        return self

    def _up(self) -> None:
        for bridge in (self.bridge, self.other):
            _run("ip", "link", "add", bridge, "type", "bridge")
            _run("ip", "link", "set", bridge, "up")
        for i, name in enumerate(self.names):
            others = [
                f"{self.address(j)} {n}"
                for j, n in enumerate(self.names)
                if i != j or i != self.loopback
            ]
            own = [f"127.0.1.1 {name}"] if i == self.loopback else []
            folder = pathlib.Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *own, *others, ""]))
            _run("ip", "netns", "add", name)
            _run(
                "ip",
                "link",
                "add",
                f"{name}v",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            _run("ip", "link", "set", f"{name}v", "master", self.bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def __exit__(self, *args: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(pathlib.Path("/etc/netns") / name, ignore_errors=True)
        for bridge in (self.bridge, self.other):
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
