"""What watches over a run, without a launcher: where all stop, who is behind, what a guard's halt
does to the loop.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import toys
from jaxdp.data.dataset import Arrays
from jaxdp.errors import RunFailed
from jaxdp.process.context import Context
from jaxdp.process.monitor import Agreement, RunMonitor, Stopped
from jaxdp.process.watchdog import verdict
from jaxdp.run.callbacks import Callbacks
from jaxdp.run.datasets import Source
from jaxdp.train.skip import Spike
from plain_runs import fit, make_run
from spiked_runs import guarded_run

ALONE = Context(hosts=("here",))


def test_one_process_stops_before_its_next_point():
    agreement = Agreement(ALONE)
    assert [agreement.point() for _ in range(3)] == [None] * 3
    agreement.request("save")
    agreement.request("preempt", "SIGTERM")
    agreement.request("preempt", "SIGUSR1")
    assert agreement.point() == {"kind": "save", "why": "", "rank": 0}
    assert agreement.point() == {"kind": "preempt", "why": "SIGTERM", "rank": 0}
    assert agreement.point() is None and agreement.passed == 4


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        ({0: 5, 1: 4, 2: 5}, r"rank 1 \(host b\) is behind: at 4; rank 0 \(host a\): at 5"),
        ({0: 5, 2: 5}, r"rank 1 \(host b\) does not answer, no stacks"),
        ({1: 3}, r"rank 0 \(host a\), rank 2 \(host c\) do not answer"),
        ({0: 5, 1: 5, 2: 5}, r"all are at the same point, such as rank 0 \(host a\): at 5"),
    ],
)
def test_who_is_behind(passed, words):
    import re

    answers = {rank: {"passed": n, "where": f"at {n}"} for rank, n in passed.items()}
    assert re.match(words, verdict(answers, Context(size=3, hosts=("a", "b", "c"))))


def test_nonfinite_updates_end_a_run_and_name_examples(tmp_path):
    run = guarded_run(tmp_path, range(5, 100), "nan", steps=40)
    with pytest.raises(
        RunFailed,
        match=r"updates 5 to 14 were not finite, 10 in a row .* checkpoint 12 is the last",
    ):
        fit(run)
    run.more["watch"].stop()
    found = json.loads((tmp_path / "halted.json").read_text())["updates"]
    assert list(found) == [str(n) for n in range(5, 15)]
    indices, rows = run.data.train.order.rows(4, np.arange(8))
    assert found["5"] == sorted(indices[rows].tolist())
    restored = run.checkpoints.restore(12, run.strategy.abstract())
    assert int(restored.guard.in_a_row) == 8 and all(
        np.isfinite(x).all() for x in jax.tree.leaves(restored.params)
    )


@pytest.mark.parametrize("at", [[5], []])
def test_a_run_ends_with_the_number_of_skipped_updates(tmp_path, at):
    run = guarded_run(tmp_path, at, "nan", steps=8)
    fit(run)
    run.more["watch"].stop()
    said = [text for text in run.log.writer.said if "skipped" in text]
    assert len(said) == len(at)
    assert all(text.startswith("warning: skipped updates: 1 of 8: ") for text in said)


@pytest.mark.slow
def test_a_spike_rolls_back_and_its_data_is_left_out(tmp_path):
    spike = Spike(factor=3.0, after=2, action="rollback")
    run = guarded_run(tmp_path, [8], spike=spike)
    final, _ = fit(run)
    run.more["watch"].stop()
    assert (
        "the loss of update 8 is a spike: back to step 6, continuing with the data after it"
        in run.log.writer.said
    )
    meta = run.checkpoints.meta(12)
    assert (meta["offset"], meta["rollbacks"]) == (2, 1) and np.isfinite(final["loss"])
    steps = [r["step"] for r in run.log.writer.records if r["split"] == "train"]
    assert steps == sorted(set(steps))
    # The same as a run whose data had never held updates 7 and 8.
    clean = guarded_run(tmp_path / "clean", [], spike=spike)
    shifted = clean.replace(steps=6)
    fit(shifted)
    resumed = guarded_run(tmp_path / "clean", [], spike=spike, start=6, offset=2, rollbacks=1)
    assert fit(resumed)[0]["params_sha256"] == final["params_sha256"]
    for r in (clean, resumed):
        r.more["watch"].stop()


@pytest.mark.slow
def test_too_many_spikes_end_the_run(tmp_path):
    spike = Spike(factor=3.0, after=2, action="rollback")
    run = guarded_run(tmp_path, range(8, 100), spike=spike, max_rollbacks=1)
    with pytest.raises(RunFailed, match=r"is a spike, and the run was rolled back 1 times already"):
        fit(run)
    run.more["watch"].stop()


class Evaluated:
    """A callback whose state is the list of the updates that were evaluated."""

    def __init__(self):
        self.steps = []

    def on_eval(self, step, metrics):
        self.steps.append(step)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [4, None])
def test_a_rollback_restores_the_callbacks(tmp_path, save_every):
    """The evaluations of discarded updates do not count; without a checkpoint the state is that of
    the start.
    """
    spike, callback = Spike(factor=3.0, after=2, action="rollback"), Evaluated()
    more = {"held_out": toys.data(33, seed=5), "eval_every": 2, "callbacks": Callbacks([callback])}
    run = guarded_run(tmp_path, [7], spike=spike, **more).replace(save_every=save_every)
    fit(run)
    run.more["watch"].stop()
    assert any("is a spike: back to step" in text for text in run.log.writer.said)
    assert callback.steps == [2, 4, 6, 8, 10, 12]


@pytest.mark.slow
def test_an_evaluation_is_not_remade_after_preemption(tmp_path):
    held_out = toys.data(33, seed=5)
    run = make_run(tmp_path, toys.MODELS["mlp"](), held_out=held_out, eval_every=2, steps=6)
    watch = RunMonitor(run.checkpoints.context, tmp_path, None)
    run = run.replace(watch=watch)
    write = run.log.writer.write
    run.log.writer.write = lambda record: (
        write(record),
        record["split"] == "eval" and watch._preempt("SIGTERM"),
    )
    with pytest.raises(Stopped, match="SIGTERM on rank 0"):
        fit(run)
    watch.stop()
    meta = run.checkpoints.meta(2)
    assert meta["evaluated"] and meta["metrics"]["loss"] == run.log.writer.records[-1]["loss"]
    assert run.log.writer.said[-1].startswith(
        "preempted by SIGTERM on rank 0, after update 2: saved step 2"
    )
    again = make_run(
        tmp_path, toys.MODELS["mlp"](), held_out=held_out, eval_every=2, start=2, evaluated=2
    )
    fit(again)
    assert [(r["split"], r["step"]) for r in again.log.writer.records] == [
        ("train", 4), ("eval", 4), ("train", 6), ("final", 6)
    ]  # fmt: skip


@pytest.mark.slow
def test_time_alone_makes_it_save(tmp_path):
    run = make_run(tmp_path, toys.MODELS["mlp"](), steps=60)
    watch = RunMonitor(run.checkpoints.context, tmp_path, None, minutes=0.3 / 60)
    slow = Slow(**toys.data(60))
    run = run.replace(watch=watch, train=Source(slow, run.data.train.order))
    fit(run)
    watch.stop()
    assert 2 <= len(run.log.writer.said) <= 12 and run.log.writer.said[-1] == "saved step 60"


def test_time_since_a_save_runs_on_in_a_new_generation(tmp_path):
    run = make_run(tmp_path, toys.MODELS["mlp"](), steps=60)
    before = time.monotonic() - 601
    watch = RunMonitor(run.checkpoints.context, tmp_path, None, minutes=10, last_save=before)
    run = run.replace(watch=watch, train=Source(Slow(**toys.data(60)), run.data.train.order))
    fit(run)
    watch.stop()
    assert len(run.log.writer.said) == 2 and run.log.writer.said[-1] == "saved step 60"
    assert watch.last_save > before


class Slow(Arrays):
    def read(self, indices):
        time.sleep(0.03)
        return super().read(indices)


CHILD = """
import multiprocessing, os, signal, time
from jaxdp.process import signals
heard = []
signals.listen()
signals.subscribe(heard.append)
multiprocessing.set_start_method("fork")
started = multiprocessing.Event()
child = multiprocessing.Process(target=lambda: (started.set(), time.sleep(60)))
child.start()
assert started.wait(30)
child.terminate()
child.join(10)
assert child.exitcode == -signal.SIGTERM and not heard, (child.exitcode, heard)
os.kill(os.getpid(), signal.SIGUSR1)
deadline = time.monotonic() + 30
while not heard and time.monotonic() < deadline:
    time.sleep(0.01)
assert heard == ["SIGUSR1"], heard
print("right")
"""


def test_a_forked_child_dies_of_its_own_signals_alone():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "right\n", done.stdout + done.stderr


@pytest.mark.slow
def test_a_process_that_stands_still_ends_itself(tmp_path):
    """One process alone: its stacks, one line, code 1; a suspension is no standstill."""
    code = (
        "import sys, time, pathlib\n"
        "from jaxdp.process.context import Context\n"
        "from jaxdp.process.watchdog import Watchdog\n"
        f"dog = Watchdog(Context(hosts=('here',)), pathlib.Path({str(tmp_path)!r}), 3.0)\n"
        "dog.at('update 7')\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdout.readline() == "ready\n"
    threading.Timer(1.0, process.send_signal, [signal.SIGSTOP]).start()
    threading.Timer(6.0, process.send_signal, [signal.SIGCONT]).start()
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - began > 8.5
    assert "jaxdp: no progress for 3 s (watchdog.step_timeout: 3): update 7 (<string>:" in err
    assert (
        "time.sleep" not in err and "<string>" in (tmp_path / "stacks" / "rank_0.txt").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("updates, ends", [(1, 1), (60, 0)])
def test_each_update_of_a_call_has_its_time(tmp_path, updates, ends):
    """A call of about 3 s, where one update may take 1 s."""
    code = (
        "import time, pathlib, jax, jax.numpy as jnp\n"
        "from jaxdp.process.context import Context\n"
        "from jaxdp.process.watchdog import Watchdog\n"
        f"dog = Watchdog(Context(hosts=('here',)), pathlib.Path({str(tmp_path)!r}), 1.0)\n"
        f"ones = lambda x: jnp.zeros({updates}) + x[0, 0]\n"
        "call = jax.jit(lambda n: ones(jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ x), jnp.eye(64))))\n"
        "with dog.suspend_timeout('compiles'):\n"
        "    call(1).block_until_ready()\n"
        "    began = time.monotonic(); call(3000).block_until_ready(); took = time.monotonic() - began\n"
        "loss = call(int(9000 / took))\n"
        "dog.sent(loss)\n"
        "loss.block_until_ready()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == ends, done.stderr
    assert ("(watchdog.step_timeout: 1)" in done.stderr) == bool(ends)
