"""A Slurm cluster on this machine, for as long as a test needs it: own key, own ports, own folder."""

from __future__ import annotations

import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence

import pytest

from launch import ROOT, environment
from launch import _survivors as survivors

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MinJobAge=300
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A context in which `run` and `start` give commands to a cluster; whatever it started is gone
    afterwards.

    names: of its nodes, all on this machine; by default one of this host's name. cpus: of each.
    """

    def __init__(self, names: Sequence[str] = (), cpus: int = 4):
        self.host = socket.gethostname().partition(".")[0]
        self.names, self.cpus = names or (self.host,), cpus

    def __enter__(self) -> Slurm:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
        if missing or os.geteuid() != 0:
            pytest.skip(
                f"a Slurm cluster needs root, slurm-wlm and munge (no {', '.join(missing) or 'root'})"
            )
        # munged asks that nobody else may write above its socket: not a folder of pytest's.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxdp-slurm-", dir="/run"))
        self.folder.chmod(0o755)
        self.mark = secrets.token_hex(16)
        self.env = environment({"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path}, 1)
        self.env |= {"JAXDP_TEST_JOB": self.mark}
        self.daemons: list[subprocess.Popen] = []
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _up(self) -> None:
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        node = "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs={} State=UNKNOWN"
        nodes = "\n".join(
            node.format(name, self.host, _free_port(), self.cpus) for name in self.names
        )
        values = {"host": self.host, "folder": folder, "port": _free_port(), "nodes": nodes}
        (folder / "slurm.conf").write_text(CONFIG.format(**values, names=",".join(self.names)))
        names = ("socket", "key", "pid", "seed", "log")
        options = [f"--{n}{'' if n == 'socket' else '-file'}={folder}/munge.{n}" for n in names]
        self._daemon("munged", "--foreground", "--force", "--num-threads=1", *options)
        self._wait("munged", lambda: (folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-i")
        for name in self.names:
            (folder / "spool" / name).mkdir()
            self._daemon("slurmd", "-D", "-N", name)

        def idle():
            return self.run("sinfo", "-h", "-N", "-o", "%T").stdout.split()

        self._wait("the nodes", lambda: idle() == ["idle"] * len(self.names))

    def _daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}{len(self.daemons)}.out").open("w")
        self.daemons.append(
            subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )
        )
        log.close()

    def _wait(self, what: str, there) -> None:
        deadline = time.monotonic() + 30
        while not there():
            if time.monotonic() > deadline or any(d.poll() is not None for d in self.daemons):
                logs = "\n".join(
                    f"{p.name}: {p.read_text()[-2000:]}" for p in self.folder.glob("*.[lo][ou][gt]")
                )
                raise RuntimeError(f"{what} did not come up\n{logs}")
            time.sleep(0.1)

    def start(self, *command: str, cwd: str | pathlib.Path = ROOT, **env: str) -> subprocess.Popen:
        """A command in the cluster, such as srun; standard output and error are one pipe."""
        return subprocess.Popen(
            list(command), env=self.env | env, cwd=cwd, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(
        self, *command: str, timeout: float = 300.0, cwd: str | pathlib.Path = ROOT, **env: str
    ) -> subprocess.CompletedProcess:
        """As `start`, to its end."""
        process = self.start(*command, cwd=cwd, **env)
        try:
            out, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, process.returncode, out, "")

    def __exit__(self, *args: object) -> None:
        if len(self.daemons) == 2 + len(self.names):
            self.run("scancel", "--user=root", timeout=20)
            deadline = time.monotonic() + 15
            while (
                self.run("squeue", "-h", timeout=20).stdout.strip() and time.monotonic() < deadline
            ):
                time.sleep(0.1)
        for daemon in reversed(self.daemons):  # they keep no state that anybody needs
            daemon.kill()
            daemon.wait()
        left = survivors(self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left or args[0:1] != (None,), left


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
