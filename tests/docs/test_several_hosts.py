"""The commands for several hosts (README, hosts.md, reliability.md), as they stand there, on
simulated hosts.

What a launcher starts on a host has a clean environment, as ssh gives it: neither PATH nor a
variable of the shell in which the command was typed.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import uuid

import pytest

from commands import commands, shortened
from launch import ROOT, _survivors, environment, find, port
from slurm import Slurm

BIN = pathlib.Path(sys.executable).parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = {
    c.text: c for page in PAGES for c in commands(page) if c.tested == pathlib.Path(__file__).name
}
NODES = ["node1", "node2"]
RUN = (
    "model: {target: MLP, args: {hidden: [16]}}\ndata: {target: Digits}\nsteps: 2\nbatch_size: 64\n"
)
# In place of ssh: the command runs on this machine. Options of ssh come before the host's name.
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
shift
exec env -i HOME="$HOME" {variables} sh -c "$*"
"""


def kind_of(text):
    first = shlex.split(text.splitlines()[0])[0]
    if first != "mpirun":
        return (
            first
            if first in ("srun", "torchrun")
            else "by hand"
            if "JAXDP_PROCESS_ID" in text
            else "shell"
        )
    return "mpich" if " -f hosts" in text else "openmpi5"


def number(text, *patterns):
    """The product of the numbers behind these options; 1 for an option that is not there."""
    found = [re.search(rf"{pattern}[ =](\d+)", text) for pattern in patterns]
    return int(found[0][1]) * number(text, *patterns[1:]) if found and found[0] else 1


def processes_of(text):
    """How many processes a command starts."""
    counts = {"srun": ("--nodes", "--ntasks-per-node"), "torchrun": ("--nnodes", "--nproc_per_node"),
              "by hand": ("JAXDP_NUM_PROCESSES",)}  # fmt: skip
    return number(text, *counts.get(kind_of(text), ("-np",)))


@pytest.fixture(scope="module")
def cluster():
    with Slurm(NODES, cpus=8) as slurm:
        yield slurm


@pytest.fixture
def folder(tmp_path):
    """What a clone has, the hostfile that a command needs, and what stands for ssh."""
    for name in ("train.py", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def finish(texts, folder, env):
    """Run command lines at the same time in a folder; return their outputs. All must end well, with
    nothing left.
    """
    mark = uuid.uuid4().hex
    running = [
        subprocess.Popen(["bash", "-ec", text], cwd=folder, env=env | {"JAXDP_TEST_JOB": mark}, text=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for text in texts
    ]  # fmt: skip
    try:
        outputs = [job.communicate(timeout=900)[0] for job in running]
    finally:
        for job in running:
            job.kill()
        left = _survivors(mark)
    assert [job.returncode for job in running] == [0] * len(texts) and not left, (
        texts,
        outputs,
        left,
    )
    return outputs


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.xdist_group("several hosts")
@pytest.mark.parametrize("text", COMMANDS, ids=lambda text: text[:60])
def test_a_command_for_several_hosts_runs(text, folder, request):
    kind, count = kind_of(text), processes_of(text)
    devices = 16 // count if "--microbatches 16" in text else 1
    env = environment({"JAXDP_TIMEOUT": "300", "JAXDP_SECRET": "one"}, devices)
    env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    if kind in ("openmpi5", "mpich"):
        if (program := find(kind)) is None:
            pytest.skip(f"no mpirun of {kind}")
        hostfile = "{} slots=8\n" if kind == "openmpi5" else "{}:8\n"
        (folder / "hosts").write_text("".join(hostfile.format(name) for name in NODES))
        on_hosts = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": env["XLA_FLAGS"], "JAXDP_TIMEOUT": "300"}
        on_hosts |= {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        agent = folder / "agent"
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in on_hosts.items())
        agent.write_text(AGENT.format(variables=f'{variables} JAXDP_TEST_JOB="$JAXDP_TEST_JOB"'))
        agent.chmod(0o755)
        env["PATH"] = f"{pathlib.Path(program).parent}:{env['PATH']}"
        env |= {
            "PRTE_MCA_plm_ssh_agent": str(agent),
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(agent),
        }
        env["OMPI_MCA_btl"] = (
            "tcp,self"  # shared memory is named after the host, and both have this machine's name
        )
    elif kind == "srun":
        slurm = request.getfixturevalue("cluster")
        env |= slurm.env | {
            "PATH": f"{BIN}:{slurm.env['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": env["XLA_FLAGS"],
        }
        env |= {
            "JAXDP_COORDINATOR": f"127.0.0.1:{port()}",
            "JAXDP_TIMEOUT": "300",
            "JAXDP_SECRET": "one",
        }
    elif kind == "torchrun" and not shutil.which("torchrun", path=env["PATH"]):
        pytest.skip("no torchrun: pip install torch")
    trains = re.search(r"jaxdp train |train\.py ", text)
    texts = [text.replace(" --gpus-per-node=8", "")]  # there are none here
    if ";" not in text:  # a loop is around run.yaml, which is short
        texts = [shortened(texts[0])]
    if kind == "by hand":
        assert (
            "JAXDP_PROCESS_ID=0" in text or text.replace("PROCESS_ID=1", "PROCESS_ID=0") in COMMANDS
        )
        where = re.sub(r"node1:\d+", f"127.0.0.1:{port()}", texts[0])
        texts = [re.sub(r"PROCESS_ID=\d+", f"PROCESS_ID={i}", where) for i in range(count)]
    elif kind == "torchrun":  # one agent on each host
        texts = [texts[0].replace("node1:29400", f"127.0.0.1:{port()}")] * number(text, "--nnodes")
    outputs = finish(texts, folder, env)
    if trains:
        (run,) = (folder / "runs").iterdir() if (folder / "runs").is_dir() else ()
        facts = json.loads((run / "env.json").read_text())
        assert (
            facts["topology"]["processes"] == count and facts["devices"]["count"] == count * devices
        ), facts
        assert any("final 2/2" in output for output in outputs)


def test_every_launcher_has_a_command_that_fits():
    """Two hosts have 16 GPUs, whether there is one process for each or one for each host."""
    assert {kind_of(text) for text in COMMANDS} >= {
        "openmpi5",
        "mpich",
        "srun",
        "torchrun",
        "by hand",
    }
    for text, command in COMMANDS.items():
        if processes_of(text) > 3 or "gpus-per-node" in text:
            assert "--microbatches 16" in text and processes_of(text) <= 16, command


def test_open_mpi_gets_the_full_path_of_its_program():
    """Over ssh a host has no activated environment: "unable to find the specified executable"."""
    for text in COMMANDS:
        assert kind_of(text) != "openmpi5" or re.search(
            r"\$\(which (python|jaxdp)\)|-x PATH", text
        ), text
