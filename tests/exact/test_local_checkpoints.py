"""Hosts that share no file system (`checkpoint.local`): each has a disk of its own at the path of
the run directory.
"""

import re
import shutil
import socket
import subprocess

import pytest

from cli_runs import jaxdp, records, write
from jaxdp.checkpoint import folders
from launch import SUPPORT, mpirun, port, processes, ranks
from planted_faults import option

CONFIG = """
model: {target: MLP, args: {hidden: [16]}}
data: {target: Digits}
steps: 30
batch_size: 72
microbatches: 4
optimizer: {target: adamw, lr: 1.0e-2}
parallel: {reduction: exact}
log: {every: 5}
checkpoint: {every: 10, asynchronous: false, local: true}
"""
HOST = socket.gethostname()
OWN_DISK = str(SUPPORT / "mpi" / "own_disk.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the parameters after 30 updates on one device."""
    folder = tmp_path_factory.mktemp("undisturbed")
    jaxdp("--config", write(folder, CONFIG), "--run_dir", folder / "run", "--parallel.devices", 1)
    return records(folder / "run", "final")[0]["params_sha256"]


class Hosts:
    """Two hosts: folders on which each sees its own disk at the path of the run directory."""

    def __init__(self, folder, size, *options):
        if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
            pytest.skip("mounting in a namespace of one's own is not permitted here")
        self.run_dir, self.disks, self.size = (
            folder / "run",
            [folder / "disk0", folder / "disk1"],
            size,
        )
        for path in (self.run_dir, *self.disks):
            path.mkdir()
        train = ["train.py", "--config", write(folder, CONFIG), "--run_dir", self.run_dir, *options]
        disks = [self.disks[rank * 2 // size] for rank in range(size)]
        self.argv = list(map(str, [OWN_DISK, self.run_dir, *disks, "--", *train]))

    def run(self, fault="", launcher="openmpi5", options=()):
        argv = [*self.argv, *option(fault), *map(str, options)]
        if launcher == "none":
            jobs = processes(argv, ranks(self.size, f"127.0.0.1:{port()}"))
            return jobs[0].returncode, "\n".join(job.output for job in jobs)
        job = mpirun(self.size, argv, launcher)
        assert not job.left, job.output
        return job.returncode, job.output

    def steps(self):
        return [folders.complete(disk / "checkpoints") for disk in self.disks]

    def files(self, disk, step):
        """The files of arrays of a checkpoint."""
        return sorted((self.disks[disk] / "checkpoints" / str(step) / "state" / "d").iterdir())


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("backend", "zero", "size", "launcher"),
    [
        ("pmap", 0, 2, "openmpi5"),
        ("pjit", 3, 3, "openmpi5"),
        ("pmap", 1, 2, "mpich"),
        ("pjit", 0, 2, "none"),
    ],
)
def test_a_lost_disk_and_a_damaged_file_lose_nothing(
    tmp_path, undisturbed, backend, zero, size, launcher
):
    hosts = Hosts(tmp_path, size, "--parallel.backend", backend, "--parallel.zero", zero)
    code, output = hosts.run(f"kill:rank={size - 1}:step=15", launcher)
    assert code not in (0, 2) and hosts.steps() == [[10], [10]], output
    shutil.rmtree(hosts.disks[1] / "checkpoints")

    code, output = hosts.run(f"kill:rank={size - 1}:step=25", launcher)
    assert code not in (0, 2) and hosts.steps() == [[10, 20], [10, 20]], output
    others = f"[{size // 2}{size - 1}]"  # the first of them that makes a file is the writer
    assert re.search(
        rf"checkpoint 10 copied from rank 0 \(host {HOST}\) to rank {others} \(host {HOST}\)",
        output,
    )
    hosts.files(0, 20)[0].write_bytes(b"damaged")

    code, output = hosts.run(launcher=launcher)
    assert code == 0 and hosts.steps() == [[10, 20, 30], [10, 20, 30]], output
    assert (
        "checkpoint 20 is damaged" in output
        and (hosts.disks[0] / "checkpoints" / "20.damaged").is_dir()
    )
    assert re.search(
        rf"checkpoint 20 copied from rank {others} \(host {HOST}\) to rank 0 \(host {HOST}\)",
        output,
    )
    assert records(hosts.disks[0], "final")[0]["params_sha256"] == undisturbed
    assert not (hosts.disks[1] / "metrics.jsonl").exists()

    code, output = hosts.run(launcher=launcher)
    assert code == 0 and "nothing to do" in output and output.count("finished") == 1, output


@pytest.mark.slow
@pytest.mark.mpi
def test_both_hosts_restore_the_newest_save_of_either(tmp_path):
    job = mpirun(2, [str(SUPPORT / "mpi" / "local_checkpoints.py"), str(tmp_path)])
    assert (
        job.returncode == 0 and "rank 0 is done" in job.stdout and "rank 1 is done" in job.stdout
    ), job.output


@pytest.mark.slow
@pytest.mark.mpi
def test_a_directory_that_all_share_has_one_writer(tmp_path, undisturbed):
    argv = [
        "train.py",
        "--config",
        str(write(tmp_path, CONFIG)),
        "--run_dir",
        str(tmp_path / "run"),
    ]
    job = mpirun(2, argv)
    assert job.returncode == 0, job.output
    assert records(tmp_path / "run", "final")[0]["params_sha256"] == undisturbed
    assert not list((tmp_path / "run" / "checkpoints").glob(".writer-*"))
