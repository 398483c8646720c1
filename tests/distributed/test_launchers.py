"""Every launcher is a table row of variables; every row that makes no sense is an error that names
the variable.
"""

import numpy as np
import pytest

from jaxdp.errors import UsageError
from jaxdp.process import context, environment, hosts
from jaxdp.process.environment import assign_gpus as bind
from jaxdp.process.launchers import (
    World,
    address,
    discover,
    first_host,
    tasks_per_node,
)
from jaxdp.process.protocol import default_timeout, difference, silence
from pods import run_in_pod

JAXDP = {"JAXDP_COORDINATOR": "10.0.0.1:12355", "JAXDP_NUM_PROCESSES": "4", "JAXDP_PROCESS_ID": "3"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[003-004,009]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "1",
}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
AGENT = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
INDEXED = {"JOB_COMPLETION_INDEX": "2", "JAXDP_NUM_PROCESSES": "4", "HOSTNAME": "train-2.workers"}
SLICE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu"}
SLICES = SLICE | {
    "MEGASCALE_NUM_SLICES": "4",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "s0-0.tpu:8080",
}
SRUN_PORT = 61440 + 8001 % 4096
SRUN = World(4, 5, 0, 1, "slurm", f"node003:{SRUN_PORT}")

GOOD = {
    "alone": ({}, World(0, 1)),
    "tpu": (SLICE, World(1, 2, 0, 1, "tpu", "t-0.tpu:12355")),
    "tpu of one host": (
        {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"},
        World(0, 1, 0, 1, "tpu", "localhost:12355"),
    ),
    "tpu slices": (SLICES, World(5, 8, 0, 1, "tpu", "s0-0.tpu:12355")),
    "no tpu": ({"TPU_WORKER_HOSTNAMES": "WARNING: could not determine"}, World(0, 1)),
    "jaxdp": (JAXDP, World(3, 4, None, None, "jaxdp", "10.0.0.1:12355")),
    "jaxdp local": (
        {**JAXDP, "JAXDP_LOCAL_RANK": "1", "JAXDP_LOCAL_SIZE": "2"},
        World(3, 4, 1, 2, "jaxdp", "10.0.0.1:12355"),
    ),
    "openmpi": (OPENMPI, World(2, 4, 0, 2, "openmpi")),
    "mvapich": (MVAPICH, World(3, 4, 1, 2, "mvapich")),
    "mvapich by Hydra, in a Slurm step": (
        {**SLURM, **HYDRA, **MVAPICH},
        World(3, 4, 1, 2, "mvapich"),
    ),
    "hydra": (HYDRA, World(1, 2, 1, 2, "hydra")),
    "hydra, two variables": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, World(0, 2, None, None, "hydra")),
    "slurm": (SLURM, SRUN),
    "slurm, one task": (
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        World(0, 1, 0, 1, "slurm"),
    ),
    "a batch script": (
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        World(0, 1),
    ),
    "env://": (TORCHRUN, World(5, 8, 1, 4, "torchrun", "10.0.0.1:29500")),
    "torchrun": (AGENT, World(5, 8, 1, 4, "torchrun", "10.0.0.1:29501")),
    "env:// v6": (
        {**TORCHRUN, "MASTER_ADDR": "fd00::1"},
        World(5, 8, 1, 4, "torchrun", "[fd00::1]:29500"),
    ),
    "kubernetes": (INDEXED, World(2, 4, None, None, "kubernetes", "train-0.workers:12355")),
    "kubernetes, given": (
        {**INDEXED, "HOSTNAME": "pod", "JAXDP_COORDINATOR": "head:1"},
        World(2, 4, None, None, "kubernetes", "head:1"),
    ),
    # Who wins where several have left their variables: the innermost.
    "mpirun in a Slurm step": ({**SLURM, **OPENMPI}, World(2, 4, 0, 2, "openmpi")),
    "Hydra over srun": ({**SLURM, **HYDRA}, World(1, 2, 1, 2, "hydra")),
    "srun --mpi=pmi2": ({**SLURM, "PMI_RANK": "4", "PMI_SIZE": "5"}, SRUN),
    "srun torchrun": ({**SLURM, **AGENT}, World(5, 8, 1, 4, "torchrun", "10.0.0.1:29501")),
    "Slurm, and MASTER_ADDR exported": ({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, SRUN),
    "JAXDP_* over mpirun": (
        {**OPENMPI, **JAXDP},
        World(3, 4, None, None, "jaxdp", "10.0.0.1:12355"),
    ),
    "only the coordinator": (
        {**OPENMPI, "JAXDP_COORDINATOR": "a:1"},
        World(2, 4, 0, 2, "openmpi", "a:1"),
    ),
    "one process": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        World(0, 1, None, None, "openmpi"),
    ),
    "only MASTER_ADDR": ({"MASTER_ADDR": "a"}, World(0, 1)),
    "only WORLD_SIZE": ({"WORLD_SIZE": "4"}, World(0, 1)),
    "empty is unset": (dict.fromkeys([*JAXDP, *OPENMPI, *SLURM, *TORCHRUN], ""), World(0, 1)),
}


@pytest.mark.parametrize("env, world", GOOD.values(), ids=GOOD)
def test_a_launcher_is_known_by_its_variables(env, world):
    assert discover(env) == world


BAD = {  # environment, and what the one line must say
    "rank not a number": (
        {**OPENMPI, "OMPI_COMM_WORLD_RANK": "two"},
        ["OMPI_COMM_WORLD_RANK='two'", "unset it"],
    ),
    "rank too large": (
        {**JAXDP, "JAXDP_PROCESS_ID": "4"},
        ["JAXDP_PROCESS_ID=4", "JAXDP_NUM_PROCESSES=4", "0 to 3"],
    ),
    "rank negative": ({**HYDRA, "PMI_RANK": "-1"}, ["PMI_RANK=-1"]),
    "size zero": ({**HYDRA, "PMI_SIZE": "0"}, ["PMI_SIZE=0"]),
    "no size": (
        {"OMPI_COMM_WORLD_RANK": "0"},
        ["OMPI_COMM_WORLD_SIZE is not set", "OMPI_COMM_WORLD_RANK=0"],
    ),
    "no process id": (
        {"JAXDP_NUM_PROCESSES": "2"},
        ["JAXDP_PROCESS_ID is not set", "JAXDP_NUM_PROCESSES=2"],
    ),
    "no coordinator": (
        {"JAXDP_NUM_PROCESSES": "2", "JAXDP_PROCESS_ID": "0"},
        ["set JAXDP_COORDINATOR"],
    ),
    "only the coordinator": ({"JAXDP_COORDINATOR": "a:1"}, ["a:1", "JAXDP_PROCESS_ID"]),
    "coordinator without port": (
        {**JAXDP, "JAXDP_COORDINATOR": "10.0.0.1"},
        ["JAXDP_COORDINATOR='10.0.0.1'", "port"],
    ),
    "port not a number": (
        {**JAXDP, "JAXDP_COORDINATOR": "a:b"},
        ["JAXDP_COORDINATOR='a:b'", "'b'"],
    ),
    "port too large": ({**JAXDP, "JAXDP_COORDINATOR": "a:70000"}, ["70000", "65535"]),
    "v6 without brackets": ({**JAXDP, "JAXDP_COORDINATOR": "fd00::1:80"}, ["JAXDP_COORDINATOR"]),
    "local rank too large": (
        {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
        ["OMPI_COMM_WORLD_LOCAL_RANK=2", "OMPI_COMM_WORLD_LOCAL_SIZE=2"],
    ),
    "no MASTER_PORT": (
        {k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"},
        ["MASTER_PORT is not set"],
    ),
    "no RANK": (
        {k: v for k, v in TORCHRUN.items() if k != "RANK"},
        ["RANK is not set", "WORLD_SIZE=8"],
    ),
    "MASTER_PORT not a number": ({**TORCHRUN, "MASTER_PORT": "x"}, ["MASTER_PORT='x'"]),
    "no SLURM_PROCID": ({"SLURM_STEP_NUM_TASKS": "2"}, ["SLURM_PROCID is not set"]),
    "no node list": ({**SLURM, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST is not set"]),
    "broken node list": (
        {**SLURM, "SLURM_STEP_NODELIST": "node[1-2"},
        ["SLURM_STEP_NODELIST='node[1-2'"],
    ),
    "broken tasks": (
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x2"},
        ["SLURM_STEP_TASKS_PER_NODE='2x2'"],
    ),
    "node outside": ({**SLURM, "SLURM_NODEID": "3"}, ["SLURM_NODEID=3"]),
    "odd pod name": ({**INDEXED, "HOSTNAME": "pod"}, ["'pod'", "JAXDP_COORDINATOR"]),
    "worker too large": ({**SLICE, "TPU_WORKER_ID": "2"}, ["TPU_WORKER_ID=2", "HOSTNAMES"]),
    "worker unnamed": ({"TPU_WORKER_HOSTNAMES": "a,b"}, ["TPU_WORKER_ID"]),
    "slice outside": ({**SLICES, "MEGASCALE_SLICE_ID": "4"}, ["MEGASCALE_SLICE_ID=4"]),
    "slice unnamed": (
        {**SLICE, "MEGASCALE_NUM_SLICES": "4"},
        ["MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"],
    ),
    "index too large": ({**INDEXED, "JOB_COMPLETION_INDEX": "4"}, ["JOB_COMPLETION_INDEX=4"]),
}


@pytest.mark.parametrize("env, parts", BAD.values(), ids=BAD)
def test_variables_that_make_no_sense_are_named(env, parts):
    with pytest.raises(UsageError) as caught:
        discover(env)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_come_first():
    assert discover(OPENMPI, coordinator="a:1", rank=1, size=2) == World(
        1, 2, None, None, "explicit", "a:1"
    )
    assert discover(
        {}, init_method="tcp://a:1", rank=0, size=2, local_rank=0, local_size=1
    ) == World(0, 2, 0, 1, "explicit", "a:1")
    assert discover(OPENMPI, init_method="tcp://a:1") == World(2, 4, 0, 2, "openmpi", "a:1")
    assert discover({**OPENMPI, **TORCHRUN}, init_method="env://").launcher == "torchrun"
    assert discover({}, rank=0, size=1) == World(0, 1, None, None, "explicit")
    assert discover(OPENMPI, local_rank=1).local_rank == 1


@pytest.mark.parametrize(
    "arguments, part",
    [
        ({"rank": 0}, "give both"),
        ({"rank": 2, "size": 2, "coordinator": "a:1"}, "0 to size - 1"),
        ({"rank": 0, "size": 2}, "coordinator"),
        ({"rank": 0, "size": 2, "coordinator": "a"}, "coordinator='a'"),
        ({"rank": 0, "size": 2, "init_method": "tcp://a"}, "init_method='tcp://a'"),
        ({"rank": 0, "size": 2, "init_method": "file:///x"}, "neither"),
        (
            {"rank": 0, "size": 2, "coordinator": "a:1", "local_rank": 2, "local_size": 2},
            "local_rank=2",
        ),
        ({"init_method": "env://"}, "RANK and WORLD_SIZE"),
    ],
)
def test_arguments_that_make_no_sense(arguments, part):
    with pytest.raises(UsageError) as caught:
        discover({}, **arguments)
    assert part in str(caught.value)


def test_an_infinite_time_is_one_that_jax_can_count(monkeypatch):
    monkeypatch.setenv("JAXDP_TIMEOUT", "inf")
    assert 1e9 <= round(default_timeout()) < 2**31 > round(default_timeout(float("inf")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": "0", "size": 2}, r"init\(rank='0'\): not a whole number"),
        ({"rank": 0, "size": 2.0}, r"init\(size=2.0\): not a whole number"),
        ({"rank": True, "size": 2}, r"init\(rank=True\): not a whole number"),
        ({"coordinator": 4123}, "coordinator=4123 has no port|coordinator='4123' has no port"),
        ({"init_method": 4123}, "init_method=4123 is neither"),
        (
            {"rank": 0, "size": 2, "local_rank": 5},
            r"init\(local_rank=5, local_size=None\): local ranks run from 0",
        ),
        (
            {"rank": 0, "size": 2, "local_size": 7},
            r"local_size=7\): .* and local_size to the 2 processes",
        ),
        ({"local_rank": 9, "local_size": 4}, r"init\(local_rank=9, local_size=4\)"),
    ],
    ids=str,
)
def test_arguments_of_init_must_be_numbers_and_ranks(arguments, message):
    with pytest.raises(UsageError, match=message):
        discover(
            {"JAXDP_PROCESS_ID": "0", "JAXDP_NUM_PROCESSES": "2"},
            **{"coordinator": "a:1", **arguments},
        )


def test_numpy_numbers_and_the_address_of_env(monkeypatch):
    world = discover(
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, rank=np.int64(0), size=2, init_method="env://"
    )
    assert (world.rank, type(world.rank), world.size, world.coordinator) == (0, int, 2, "a:1")
    with pytest.raises(UsageError, match="MASTER_PORT is not set"):
        discover({"MASTER_ADDR": "a"}, rank=0, size=2, init_method="env://")
    with pytest.raises(UsageError, match="timeout='abc' is not a number of seconds above 0"):
        default_timeout("abc")
    assert default_timeout(np.float32(6)) == 6


def test_the_rank_is_not_known_while_the_job_is_joined(monkeypatch):
    """A process may build its run before it joins a job: code of the user must not take it
    for rank 0 of 1.
    """
    monkeypatch.setattr(context, "_current", None)
    monkeypatch.setattr(context, "_joining", discover(coordinator="a:1", rank=1, size=2))
    with pytest.raises(UsageError, match="this process has not joined its job yet"):
        context.current()
    monkeypatch.setattr(context, "_current", context.Context(rank=1, size=2))
    assert context.current().rank == 1


def test_the_silence_that_means_loss_follows_timeout(monkeypatch):
    monkeypatch.delenv("JAXDP_SILENCE", raising=False)  # of an earlier test
    assert [silence(timeout) for timeout in (60.0, 1e9, 30.0, 3.0)] == [20, 20, 10, 7]
    monkeypatch.setenv("JAXDP_SILENCE", "120")
    assert silence(60.0) == 120


def test_slurms_lists():
    hosts = {
        "a": "a",
        "node[003-007,9]": "node003",
        "r[1-2]n[3,4],x": "r1n3",
        "a,b[1]": "a",
        "n[9,1]-ib": "n9-ib",
    }
    assert {text: first_host(text) for text in hosts} == hosts
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1] and tasks_per_node("4") == [4]


@pytest.mark.parametrize(
    ("hosts", "rank_0"),
    [
        ("10.1.2.3 train-2.workers.svc.cluster.local train-2", "train-0.workers.svc.cluster.local"),
        ("127.0.0.1 localhost train-2", "train-0"),
    ],
)
def test_a_pods_full_name_gives_the_subdomain(tmp_path, hosts, rank_0):
    env = {**INDEXED, "HOSTNAME": "train-2"}
    code = f"from jaxdp.process.launchers import kubernetes; print(kubernetes({env}))"
    world = World(2, 4, None, None, "kubernetes", f"{rank_0}:12355")
    assert run_in_pod(tmp_path, "train-2", hosts, code) == f"{world}\n"


def test_addresses():
    assert address("tcp://a:1/", "x") == "a:1"
    assert address("[fd00::1]:80", "x") == "[fd00::1]:80"


BIND = [  # local_rank, local_size, gpus, visible, neighbours -> devices, sharers
    (0, 1, 8, None, (), None, 1),  # one process per host has all
    (0, 1, 0, None, (), None, 1),
    (3, 4, 0, None, (), None, 1),  # no GPU
    (0, 8, 8, None, (), [0], 1),
    (7, 8, 8, None, (), [7], 1),
    (1, 2, 8, None, (), [4, 5, 6, 7], 1),  # several GPUs for each: a contiguous slice
    (2, 3, 8, None, (), [4, 5], 1),  # equal shares; two are left over
    (1, 2, 8, "4,5,6,7", ("4,5,6,7",) * 2, [2, 3], 1),  # indices into what is visible
    (1, 2, 8, "1", ("0", "1"), None, 1),  # the launcher has dealt them: one each
    (1, 2, 8, "2,3", ("0,1", "2,3"), None, 1),  # or two each
    (1, 2, 8, "0", ("0", "0"), None, 2),  # all share one
    (1, 2, 1, None, (), None, 2),
    (2, 3, 2, None, (), [0], 2),  # more processes than GPUs: in turn
    (4, 5, 2, None, (), [0], 3),
    (0, 2, 8, "", (), None, 1),  # all hidden
    (0, 2, 8, "-1", (), None, 1),
]


@pytest.mark.parametrize(
    "local_rank, local_size, count, visible, neighbours, devices, shared", BIND
)
def test_gpus_are_dealt_by_local_rank(
    local_rank, local_size, count, visible, neighbours, devices, shared
):
    assert bind(local_rank, local_size, count, visible, neighbours) == (devices, shared)


def test_gpus_are_counted_without_opening_one(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert environment.gpu_count({}, str(tmp_path)) == 3
    assert environment.gpu_count({"JAX_PLATFORMS": "cuda,cpu"}, str(tmp_path)) == 3
    assert environment.gpu_count({"JAX_PLATFORMS": "cpu"}, str(tmp_path)) == 0


def hello(host, addresses, gloo=True, boot="b", **more):
    return {"host": host, "addresses": addresses, "boot": boot, "gloo": gloo, "pid": 1, **more}


def test_rank_0_is_met_where_all_can_reach_it():
    one, two = hello("a", ["127.0.1.1", "10.0.0.1"]), hello("b", ["10.0.0.2"])
    assert hosts.meeting_address([one, one], 5) == "127.0.0.1:5"
    assert hosts.meeting_address([one, two], 5) == "10.0.0.1:5"
    assert (
        hosts.meeting_address([hello("a", ["127.0.1.1"], outward="10.9.9.9"), two], 5)
        == "10.9.9.9:5"
    )
    assert hosts.meeting_address([hello("a", ["fd00::1"]), two], 5) == "[fd00::1]:5"
    with pytest.raises(UsageError, match="no address"):
        hosts.meeting_address([hello("a", ["127.0.0.1"], outward=None), two], 5)


def test_host_names_that_others_cannot_use():
    good, loop = hello("a", ["10.0.0.1"]), hello("b", ["127.0.1.1"])
    hosts.check_reachable([good, good])
    hosts.check_reachable([loop, loop])  # one host: its own loopback serves
    hosts.check_reachable([good, hello("b", ["127.0.1.1"], gloo=False)])  # NCCL asks the interfaces
    with pytest.raises(
        UsageError, match=r"rank 1: its host name b resolves to 127\.0\.1\.1.*/etc/hosts of b"
    ) as caught:
        hosts.check_reachable([good, loop])
    assert caught.value.rank == 0
    with pytest.raises(UsageError, match="rank 0: its host name c does not resolve"):
        hosts.check_reachable([hello("c", [])])


def test_hosts_are_told_apart_by_name_and_kernel():
    a, other_kernel, pod = hello("a", []), hello("a", [], boot="c"), hello("p", [])
    assert [hosts.local_ranks([a, other_kernel, pod, a], r) for r in range(4)] == [
        (0, 2),
        (0, 1),
        (0, 1),
        (1, 2),
    ]


def test_what_ranks_must_have_in_common():
    first = {
        "rank": 0,
        "host": "a",
        "size": 2,
        "jaxdp": "1",
        "jax": "2",
        "jaxlib": "3",
        "python": "3.11",
    }
    assert difference(first, {**first, "rank": 1}) is None
    assert "rank 1 (host b) has world size 3, but rank 0 (host a) has 2" in difference(
        first, {**first, "rank": 1, "host": "b", "size": 3, "jax": "x"}
    )
    assert "JAX version x" in difference(first, {**first, "rank": 1, "jax": "x"})
    kinds = {**first, "group": "elastic"}, {**first, "rank": 1, "group": "fixed"}
    assert "has process group fixed, but rank 0 (host a) has elastic" in difference(*kinds)
