"""Elastic training by the command: what it refuses, and when its launcher has failed."""

import pytest

from cli_runs import DIGITS, ended
from ends import check_end
from hiding import TRAIN, check_trained, folder_of, run
from jaxdp.cli import load
from jaxdp.errors import UsageError
from jaxdp.process.context import Context
from jaxdp.run.training_job import train


def test_a_job_with_too_few_processes_is_refused(tmp_path):
    config, _, _ = load([*DIGITS, "--elastic.enabled", "true", "--elastic.min_processes", "4"])
    with pytest.raises(
        UsageError, match=r"elastic.min_processes: 4, but the job has 1; start more of them"
    ):
        train(config, str(tmp_path / "run"), Context())


def test_elastic_training_needs_a_shared_directory():
    argv = ["train", *DIGITS, "--checkpoint.local", "true", "--elastic.enabled", "true"]
    assert "checkpoint.local: true with elastic.enabled: true" in ended(*argv, code=2).stderr


@pytest.mark.mpi
def test_an_elastic_job_ends_well_after_a_lost_process(tmp_path):
    """In an elastic job others may have been lost before: it tells its launcher so."""
    join = "import jaxdp; jaxdp.elastic.Options().enter(lambda job: {}, None)"
    check_end(tmp_path, "10", 0, join)


@pytest.mark.slow
def test_modules_of_the_user_hide_no_library(tmp_path):
    folder = folder_of(tmp_path)
    run(folder, "bin/jaxdp", "launch", "-n", "2", *TRAIN, "--elastic.enabled", "true")
    check_trained(folder / "run")
