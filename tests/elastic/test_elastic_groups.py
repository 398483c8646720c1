"""An elastic group answers as a fixed one does, and does not mix with it."""

import pytest

from groups import check_group
from jaxdp.elastic import Options
from jaxdp.process.protocol import silence
from launch import port, processes, ranks

GROUPS = {"fixed": "None", "elastic": "jaxdp.elastic.Options()"}


@pytest.mark.mpi
def test_a_group_answers_alike_on_all_ranks(tmp_path):
    check_group(tmp_path, GROUPS["elastic"])


@pytest.mark.mpi
def test_processes_of_different_groups_are_refused():
    script = "import os, jaxdp; jaxdp.init(group=eval(os.environ['GROUP']))"
    environments = [
        x | {"GROUP": group}
        for x, group in zip(ranks(2, f"127.0.0.1:{port()}"), reversed(GROUPS.values()))
    ]
    jobs = processes(["-c", script], environments)
    assert [job.returncode for job in jobs] == [2, 2], [job.output for job in jobs]
    text = "has process group fixed, but rank 0 (host "
    assert sum(text in job.stderr for job in jobs) == 1, [job.output for job in jobs]


def test_silence_is_shorter_in_an_elastic_job(monkeypatch):
    """A process that is expelled there can come back; in another job, its loss ends all."""
    monkeypatch.delenv("JAXDP_SILENCE", raising=False)  # of an earlier test
    assert [silence(timeout, Options.silence) for timeout in (60.0, 1e9, 30.0, 3.0)] == [
        10,
        10,
        10,
        7,
    ]
    monkeypatch.setenv("JAXDP_SILENCE", "120")
    assert silence(60.0, Options.silence) == 120
