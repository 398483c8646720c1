"""What the control groups of a host allow a process, of version 2 and of version 1."""

import math

import pytest

from jaxdp.process import hosts

GROUPS = {
    "version 2": (
        "0::/a/b\n",
        {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"},
        1.5,
    ),
    "version 2 in a container": ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "version 1": (
        "3:cpu,cpuacct:/docker/x\n1:memory:/docker/x\n",
        {"cpu/docker/x/cpu.cfs_quota_us": "250000\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"},
        2.5,
    ),
    "version 1 in a container": (
        "3:cpu,cpuacct:/docker/x\n",
        {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        4.0,
    ),
    "no limit": (
        "3:cpu,cpuacct:/\n0::/\n",
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "cpu.max": "max 100000\n",
        },
        math.inf,
    ),
}


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Write the files of control groups below a root of their own; `hosts` reads them there."""

    def write(own, files):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(own)
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        found = hosts.control_groups
        monkeypatch.setattr(hosts, "control_groups", lambda controller: found(controller, tmp_path))

    return write


@pytest.mark.parametrize("name", GROUPS)
def test_the_quota_of_cores(groups, name):
    own, files, cores = GROUPS[name]
    groups(own, files)
    assert hosts.core_quota() == cores


@pytest.mark.parametrize(
    ("own", "folder", "most", "used"),
    [
        ("0::/job\n", "job", "memory.max", "memory.current"),
        ("9:memory:/job\n", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("9:memory:/elsewhere\n", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_memory_that_is_free(groups, own, folder, most, used):
    groups(own, {f"{folder}/{most}": "5000\n", f"{folder}/{used}": "1000\n"})
    assert hosts.free_memory() == 4000
