"""Two hosts on one machine: network namespaces with their own names, addresses and /etc/hosts, on one bridge."""

from __future__ import annotations

import itertools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest

from launch import Finished, require, together

# What runs a command on a host: its network, its name. Also what mpirun calls instead of ssh.
ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; eval "$*"' "$host" "$@"
"""

PASSED_ON = ("JAX_PLATFORMS", "XLA_FLAGS", "JAXDP_TIMEOUT", "JAXDP_TEST_JOB")
_count = itertools.count()


class TwoHosts:
    """A context in which two hosts exist. loopback: the one whose own name resolves to 127.0.1.1, as on Debian."""

    def __init__(self, folder: pathlib.Path, loopback: int | None = None):
        # Taking down is not at once, so that every pair gets names of its own.
        mark = f"{os.getpid() % 10000}{next(_count)}"
        self.names = [f"jdpa{mark}", f"jdpb{mark}"]
        self.net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.bridge, self.loopback = f"jdpbr{mark}", loopback
        self.enter = folder / "enter"
        self.enter.write_text(ENTER)
        self.enter.chmod(0o755)

    def address(self, host: int) -> str:
        return f"{self.net}.{host + 1}"

    @property
    def prefixes(self) -> list[list[str]]:
        """What runs a command on each host."""
        quote = 'hostname "$0"; exec "$@"'
        return [["ip", "netns", "exec", n, "unshare", "--uts", "sh", "-c", quote, n] for n in self.names]

    def cut(self, host: int) -> None:
        """Unplugs a host's cable."""
        _run("ip", "-n", self.names[host], "link", "set", "eth0", "down")

    def mpirun(
        self,
        argv: Sequence[str],
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        during: Callable[[subprocess.Popen], None] | None = None,
        options: Sequence[str] = (),
        then: str = "",
    ) -> Finished:
        """One rank on each host, started by Open MPI 5 from the first. during, options: as in `launch.mpirun`.

        then: a line of shell that the first host runs as soon as mpirun has ended.
        """
        program = require("openmpi5")
        agent = ["--prtemca", "plm_ssh_agent", str(self.enter)]
        hosts = ["--host", ",".join(f"{n}:1" for n in self.names), "--bind-to", "none"]
        exported = [x for n in (*PASSED_ON, *(env or {})) for x in ("-x", n)]
        command = [*self.prefixes[0], program, *agent, *hosts, *options, *exported, "-np", "2", sys.executable, *argv]
        if then:
            command = [*self.prefixes[0], "sh", "-c", f"{shlex.join(command[len(self.prefixes[0]) :])}; {then}"]
        return together([(command, env or {})], timeout, during=during)[0]

    def from_hostfile(self, which: str, argv: Sequence[str], timeout: float = 120.0) -> Finished:
        """One rank on each host of a hostfile, started by Open MPI 5 or MPICH from the first."""
        program, hostfile = require(which), self.enter.with_name("hosts")
        line = "{} slots=1\n" if which == "openmpi5" else "{}:1\n"
        hostfile.write_text("".join(line.format(name) for name in self.names))
        options = {
            "openmpi5": ["--prtemca", "plm_ssh_agent", self.enter, "--hostfile", hostfile, "--map-by", "ppr:1:node"],
            "mpich": ["-launcher", "ssh", "-launcher-exec", self.enter, "-f", hostfile, "-ppn", "1"],
        }[which]
        if which == "openmpi5":
            options += ["--bind-to", "none", *(x for name in PASSED_ON for x in ("-x", name))]
        command = [*self.prefixes[0], program, *map(str, options), "-np", "2", sys.executable, *argv]
        return together([(command, {})], timeout)[0]

    def __enter__(self) -> TwoHosts:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
            pytest.skip("making hosts needs root, iproute2 and unshare")
        try:
            self._up()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        return self

    def _up(self) -> None:
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "link", "set", self.bridge, "up")
        for i, name in enumerate(self.names):
            others = [f"{self.address(j)} {n}" for j, n in enumerate(self.names) if i != j or i != self.loopback]
            own = [f"127.0.1.1 {name}"] if i == self.loopback else []
            folder = pathlib.Path("/etc/netns") / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *own, *others, ""]))
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", f"{name}v", "master", self.bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def __exit__(self, *args: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(pathlib.Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
