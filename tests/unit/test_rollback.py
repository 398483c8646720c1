"""Which state a rollback returns to follows from keys of numbers alone, whatever was saved beside
it.
"""

import contextlib
import json
import os
import shutil
import signal

import numpy as np
import pytest

import jaxdp
from covering import first
from jaxdp.data.dataset import Arrays
from jaxdp.errors import RunFailed

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(400, 4)).astype(np.float32), RNG.integers(2, size=400).astype(np.int32)
SPIKES = (6, 17)  # batches, from 0
for batch in SPIKES:
    X[batch::40] *= 1e4  # in sequential order, batch i has the rows i, 40 + i, ...
MODEL = {"target": "MLP", "args": {"num_classes": 2, "hidden": [8]}}
SPIKE = {"factor": 20, "after": 2, "action": "rollback", "every": 4}


class StopAt:
    """Ask the run to stop once, after an update."""

    def __init__(self, step):
        self.step = step

    def on_update(self, step, metrics):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


def fit(run_dir, spike=SPIKE, **more):
    base = {
        "steps": 24,
        "batch_size": 10,
        "microbatches": 2,
        "parallel": {"devices": 1},
        "log": {"every": 1},
    }
    data, rate = (
        {"target": Arrays(inputs=X, labels=Y), "order": "sequential"},
        {"target": "sgd", "lr": 0.01},
    )
    return jaxdp.fit(
        MODEL, data, optimizer=rate, **{**base, "run_dir": run_dir, "spike": spike, **more}
    )


def curve(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["split"] == "train"]


def events(run_dir):
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [(line["step"], line["to"]) for line in lines if line["kind"] == "rolled_back"]


VARIANTS = {
    "every 5, one is kept": {"checkpoint": {"every": 5, "keep": 1}},
    "every 3": {"checkpoint": {"every": 3}},
    "calls of 3 updates": {"steps_per_call": 3, "checkpoint": {"every": 6}},
    "by the clock": {"checkpoint": {"every_minutes": 1e-6}},
    "not asynchronous": {"checkpoint": {"every": 7, "asynchronous": False, "keep": 1}},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rollback") / "plain"
    return fit(directory).final["params_sha256"], curve(directory), events(directory)


def test_a_rollback_returns_to_the_last_interval(plain):
    assert plain[2] == [
        (7, 4),
        (15, 12),
    ]  # batches 4 to 6 are skipped: the second spike is that of update 15
    assert [step for step, _ in plain[1]] == [*range(1, 25)]


@pytest.mark.parametrize("name", first(1, [*VARIANTS]))
def test_numbers_do_not_depend_on_other_checkpoints(plain, tmp_path, name):
    final = fit(tmp_path / "run", **VARIANTS[name]).final
    assert (final["params_sha256"], curve(tmp_path / "run"), events(tmp_path / "run")) == plain


class EndsOnce(jaxdp.Observer):
    """Wish to end training after update 7, the first time: it has the spike."""

    wished = False

    def wants(self, step):
        if step == 7 and not self.wished:
            self.wished = True
            raise jaxdp.StopTraining("the spike")
        return ()


def test_what_is_rolled_back_does_not_end_training(plain, tmp_path):
    more = {"eval_data": (X, Y), "eval": {"every": 5}, "callbacks": [EndsOnce()]}
    final = fit(tmp_path / "run", **more).final
    assert "stopped" not in final and final["params_sha256"] == plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("step", [6, 11, 14])
def test_nor_on_a_stop_between(plain, tmp_path, step):
    """After a stop at the update before the spike, the rollback is made before the save, and again
    after the start.
    """
    for callback in (StopAt(step), StopAt(-1)):
        with contextlib.suppress(SystemExit):
            final = fit(tmp_path / "run", checkpoint={"keep": 1}, callbacks=[callback]).final
    assert "preempted" in (tmp_path / "run" / "events.jsonl").read_text()
    assert (final["params_sha256"], curve(tmp_path / "run")) == plain[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "step, lost, words", [(13, 12, "warning: no checkpoint of update 12"), (5, 4, None)]
)
def test_without_the_state_to_return_to_it_says_so(tmp_path, capsys, step, lost, words):
    """It goes back to the one before it; without any, the run ends."""
    with pytest.raises(SystemExit):
        fit(tmp_path, callbacks=[StopAt(step)])
    shutil.rmtree(tmp_path / "checkpoints" / str(lost))
    if words is None:
        with pytest.raises(RunFailed, match="the checkpoint of update 4 to return to is not in"):
            fit(tmp_path, callbacks=[StopAt(-1)])
    else:
        fit(tmp_path, callbacks=[StopAt(-1)])
        assert words in capsys.readouterr().out and events(tmp_path)[-1] == (15, 8)
