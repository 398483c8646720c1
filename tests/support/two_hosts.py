"""Two hosts on one machine, for tests: skipped where they cannot be made; mpirun starts ranks on
both.
"""

from __future__ import annotations

import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest

import netns
from launch import Finished, require, together

# What runs a command on a host: its network, its name. Also what mpirun calls instead of ssh.
ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; eval "$*"' "$host" "$@"
"""

PASSED_ON = ("JAX_PLATFORMS", "XLA_FLAGS", "JAXDP_TIMEOUT", "JAXDP_TEST_JOB")


class TwoHosts(netns.Hosts):
    """A context in which two hosts, or `count`, exist; see `netns.Hosts`."""

    def __init__(self, folder: pathlib.Path, loopback: int | None = None, count: int = 2):
        super().__init__(count, loopback)
        self.enter = folder / "enter"
        self.enter.write_text(ENTER)
        self.enter.chmod(0o755)

    def mpirun(
        self,
        argv: Sequence[str],
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        during: Callable[[subprocess.Popen], None] | None = None,
        options: Sequence[str] = (),
        then: str = "",
    ) -> Finished:
        """One rank on each host, started by Open MPI 5 from the first. during, options: as in
        `launch.mpirun`.

        then: a line of shell that the first host runs as soon as mpirun has ended.
        """
        program = require("openmpi5")
        agent = ["--prtemca", "plm_ssh_agent", str(self.enter)]
        hosts = ["--host", ",".join(f"{n}:1" for n in self.names), "--bind-to", "none"]
        exported = [x for n in (*PASSED_ON, *(env or {})) for x in ("-x", n)]
        command = [
            *self.prefixes[0],
            program,
            *agent,
            *hosts,
            *options,
            *exported,
            "-np",
            "2",
            sys.executable,
            *argv,
        ]
        if then:
            command = [
                *self.prefixes[0],
                "sh",
                "-c",
                f"{shlex.join(command[len(self.prefixes[0]) :])}; {then}",
            ]
        return together([(command, env or {})], timeout, during=during)[0]

    def from_hostfile(self, which: str, argv: Sequence[str], timeout: float = 300.0) -> Finished:
        """One rank on each host of a hostfile, started by Open MPI 5 or MPICH from the first."""
        program, hostfile = require(which), self.enter.with_name("hosts")
        line = "{} slots=1\n" if which == "openmpi5" else "{}:1\n"
        hostfile.write_text("".join(line.format(name) for name in self.names))
        options = {
            "openmpi5": [
                "--prtemca",
                "plm_ssh_agent",
                self.enter,
                "--hostfile",
                hostfile,
                "--map-by",
                "ppr:1:node",
            ],
            "mpich": [
                "-launcher",
                "ssh",
                "-launcher-exec",
                self.enter,
                "-f",
                hostfile,
                "-ppn",
                "1",
            ],
        }[which]
        if which == "openmpi5":
            options += ["--bind-to", "none", *(x for name in PASSED_ON for x in ("-x", name))]
        command = [
            *self.prefixes[0],
            program,
            *map(str, options),
            "-np",
            "2",
            sys.executable,
            *argv,
        ]
        return together([(command, {})], timeout)[0]

    def __enter__(self) -> TwoHosts:
        try:
            super().__enter__()
        except OSError as error:
            pytest.skip(str(error))
        return self
