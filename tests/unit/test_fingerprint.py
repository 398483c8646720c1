"""Fingerprints of objects: equal in any process, different where numbers differ, refused where neither is known."""

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import objects
from jaxdp.fingerprint import NotComparable, fingerprint
from launch import environment


@pytest.mark.parametrize("key", objects.rows)
def test_objects_that_differ_have_different_fingerprints(key):
    row = [fingerprint(x, pure=key != "data") for x in objects.rows[key]]
    assert len({*row}) == len(row), [(row.index(x), i) for i, x in enumerate(row) if row.index(x) < i]


@pytest.mark.slow
def test_they_are_the_same_in_any_process(tmp_path):
    start = lambda seed: subprocess.Popen(
        [sys.executable, objects.__file__],
        text=True,
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        env=environment({"PYTHONHASHSEED": seed}, 1),
    )
    first, second = [json.loads(job.communicate()[0]) for job in [start("1"), start("2")]]
    assert first == second and list(map(len, first.values())) == list(map(len, objects.rows.values()))


def environment_variable(outputs, batch):
    import os

    return outputs * float(os.environ["SCALE"])


def file(outputs, batch):
    with open("scale") as scale:
        return outputs * float(scale.read())


REFUSED = {
    "a lock": threading.Lock(),
    "a generator": (i for i in range(3)),
    "an open file": sys.__stdout__,
    "in a list in a closure": (lambda x: lambda: x)([{"a": (i for i in range(2))}]),
    "a variable of the environment": environment_variable,
    "a file": file,
    "a nameless ufunc": np.frompyfunc(file, 2, 1),
    "the clock": lambda o, b: o * time.time(),
    "global random numbers": lambda o, b: o * np.random.normal(),  # noqa: NPY002
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused(name):
    with pytest.raises(NotComparable):
        fingerprint(REFUSED[name])


def test_code_that_reads_files_can_be_compared_where_that_is_allowed():
    assert fingerprint(file, pure=False) != fingerprint(environment_variable, pure=False)
