"""The contract of a group of processes: what a run may ask of it."""

import pytest

from groups import check_group


@pytest.mark.mpi
def test_a_group_answers_alike_on_all_ranks(tmp_path):
    check_group(tmp_path, "None")
