"""Batches read by worker processes: the same in the same order, faults handed over, and no process
left behind.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxdp.data.dataset import Arrays, Examples
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.prefetch import read_batches, read_noted
from jaxdp.data.workers import prefetch_in_workers
from jaxdp.errors import RunFailed, UsageError

X = np.random.default_rng(0).normal(size=(50, 3, 4)).astype(np.float32)
CURSOR = EpochOrder(50, 8, 3, seed=1)
ROOT = pathlib.Path(__file__).parents[2]


class Marked(Arrays):
    """Examples that say which process read them; some of them cannot be read."""

    def __init__(self, bad=None, **arrays):
        super().__init__(**arrays)
        self.bad = bad

    def read(self, indices):
        if self.bad is not None and 7 in indices:
            raise self.bad[0](*self.bad[1:])
        return {**super().read(indices), "pid": np.full(len(indices), os.getpid(), np.int32)}


class Odd(Exception):
    """One that a pickle does not bring back."""

    def __init__(self, here, there):
        super().__init__(f"{here} {there}")


def alive(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pids):
    end = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))


def test_workers_read_what_a_thread_reads_in_its_order():
    dataset = Marked(
        inputs=X[:, :, ::-1], labels=np.arange(50), empty=np.zeros((50, 0), np.float32)
    )
    with prefetch_in_workers(dataset, CURSOR, [2, 0], range(3, 20), 2) as batches:
        found = list(batches)
    pids = [set(np.unique(batch.pop("pid"))) for batch in found]
    assert len(found) == 17 and pids[0] != pids[1] and os.getpid() not in pids[0] | pids[1]
    assert all(pid == pids[i % 2] and len(pid) == 1 for i, pid in enumerate(pids))
    for step, batch in enumerate(found, 3):
        wanted = read_batches(dataset, CURSOR, [step], [2, 0])
        wanted.pop("pid")
        assert batch.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(batch[key], value, strict=True)
            assert batch[key].flags.writeable
    assert gone(pids[0] | pids[1])
    with prefetch_in_workers(dataset, CURSOR, [0], range(5, 5), 2) as batches:
        assert list(batches) == []


@pytest.mark.parametrize(
    "bad", [(UsageError, "data: example 7 is bad"), (ValueError, "seven"), (Odd, "one", "two")]
)
def test_a_fault_arrives_in_order_with_its_traceback(bad):
    fault = bad[0](*bad[1:])
    wanted = RuntimeError if bad[0] is Odd else bad[0]
    first = next(step for step in range(7) if 7 in CURSOR.rows(step, [0, 1, 2])[0])
    got = []
    with (
        pytest.raises(wanted) as caught,
        prefetch_in_workers(Marked(bad, inputs=X), CURSOR, [0, 1, 2], range(7), 1) as batches,
    ):
        for batch in batches:
            got.append(batch)
    assert len(got) == first and str(fault) in str(caught.value) and type(caught.value) is wanted
    assert (
        f"at step {first}" in caught.value.__notes__[0] and "in read" in caught.value.__notes__[0]
    )


@pytest.mark.parametrize("several", [False, True])
def test_a_fault_names_its_example_and_its_step(several):
    class Rows(list):
        def __getitem__(self, index):
            return [0.0] if index != 7 else 1 / 0

    first = next(step for step in range(7) if 7 in CURSOR.rows(step, [0, 1, 2])[0])
    with pytest.raises(ZeroDivisionError) as caught:
        read_noted(
            Examples(Rows(X)), CURSOR, [0, 1, 2], range(7) if several else range(first, first + 1)
        )
    where = "0 to 6" if several else first
    assert caught.value.__notes__ == [
        "as example 7 was read",
        f"as the batch of step {where} was read, counted from 0",
    ]


def test_killed_workers_and_unpicklable_data_are_named():
    with (
        pytest.raises(
            RunFailed, match=r"worker 0 of 1 ended with code -9 while it read step \d+; is there"
        ),
        prefetch_in_workers(Marked(inputs=X), CURSOR, [0], range(10**6), 1) as batches,
    ):
        pid = int(next(batches)["pid"][0, 0])
        os.kill(pid, signal.SIGKILL)
        list(batches)
    dataset = Marked(inputs=X)
    dataset.open = lambda: 0
    with (
        pytest.raises(
            UsageError, match=r"Marked cannot be sent to another process .*set data.workers to 0"
        ),
        prefetch_in_workers(dataset, CURSOR, [0], range(9), 1),
    ):
        pass


PROGRAM = """
import sys, time, numpy as np
from jaxdp.data.example_order import EpochOrder
from jaxdp.data.workers import prefetch_in_workers
from test_workers import Marked
from jaxdp.process import signals
if __name__ == "__main__":
    if sys.argv[1] == "heeds":
        signals.listen()
    data = Marked(inputs=np.zeros((50, 3), np.float32))
    context = prefetch_in_workers(data, EpochOrder(50, 8, 3, seed=1), [0], range(0, 10**9), 2)
    for step, batch in enumerate(context.__enter__()):
        print(int(batch["pid"][0, 0]), flush=True)
        if step == 3 and sys.argv[1] == "leaves":
            sys.exit(3)  # without leaving the context
        time.sleep(0.02)
"""


def start(tmp_path, how):
    """A program that reads in two workers, and their numbers."""
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{pathlib.Path(__file__).parent}"},
    )
    return process, [int(process.stdout.readline()) for _ in range(2)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, None])
def test_workers_die_silently_with_the_run(tmp_path, number):
    """A signal goes to the whole group, as from a terminal or a scheduler, but a kill to the run
    alone.
    """
    process, pids = start(tmp_path, "leaves" if number is None else "runs")
    if number == signal.SIGKILL:
        process.kill()
    elif number is not None:
        os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == {None: 3, signal.SIGINT: -signal.SIGINT}.get(
        number, -(number or 0)
    )
    assert gone(pids)
    lines = [line for line in errors.splitlines() if line]
    if number == signal.SIGINT:  # the run's own
        assert (
            errors.count("Traceback") == 1
            and lines[-1] == "KeyboardInterrupt"
            and "jaxdp-worker" not in errors
        )
    else:
        assert lines == []


def test_a_run_that_heeds_a_signal_goes_on_reading(tmp_path):
    process, pids = start(tmp_path, "heeds")
    os.killpg(process.pid, signal.SIGTERM)
    later = [int(process.stdout.readline()) for _ in range(20)]
    assert later == pids * 10 and all(map(alive, pids))
    process.kill()
    _, errors = process.communicate(timeout=20)
    assert gone(pids) and errors == ""
