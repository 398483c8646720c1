"""Copies of the state in memory: how often they are made, and what is kept of them."""

import contextlib
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp.elastic import regroup
from jaxdp.elastic.snapshots import Snapshot, Snapshots, affordable
from jaxdp.metrics.jsonl import JsonLines, dump
from jaxdp.process.context import Context
from jaxdp.split import WHOLE
from jaxdp.train.run import Progress
from jaxdp.train.skip import Spike
from spiked_runs import guarded_run


@pytest.mark.slow
def test_a_run_takes_snapshots_after_a_rollback(tmp_path):
    compilations, snapshots = [], Snapshots(2)

    @contextlib.contextmanager
    def compiling():
        compilations.append(1)
        yield

    spike = Spike(factor=3.0, after=2, action="rollback")
    run = guarded_run(tmp_path, [8], spike=spike)
    run = run.replace(continuation=snapshots, compiling=compiling)
    training = run.training()
    snapshots.prepare(training)
    training.train()
    run.more["watch"].stop()
    snapshots.settle()
    assert (
        len(compilations) == 3
    )  # the initial state, the first update, and the first one after the rollback
    assert snapshots.newest.step == 11 and json.loads(snapshots.newest.meta)["offset"] == 2


def test_the_parts_of_a_recovered_state_are_kept():
    """The copy of a recovered state has the slices of other devices; a process must have all that
    it says it has.
    """

    def part(*numbers):
        return {n: [np.full(3, n)] for n in (WHOLE, *numbers)}

    snapshots, old = Snapshots(5), Snapshot(15, {}, "{}", [0, WHOLE], 4)
    copies = types.SimpleNamespace(read=lambda parts: parts)
    for offset, kept in (
        (0, {WHOLE, 0, 1, 2}),
        (2, {WHOLE, 2}),
    ):  # 2: rolled back, so another state
        snapshots.kept, snapshots._copies = [old.with_parts(part(0, 1))], copies
        snapshots._pending = Snapshot(15, part(2), "{}", [0, WHOLE], 4, offset)
        snapshots.settle()
        assert set(snapshots.newest.parts) == set(snapshots.newest.checksums) == kept
        assert snapshots.newest.check().parts.keys() == kept


def test_snapshots_take_a_hundredth_of_the_time():
    """Of the seconds of an update, and of a copy."""
    taken = [(9.0, 0.5), (0.1, 0.0495), (0.1, 0.25)]
    assert affordable(taken) == 50
    paused = [(100.0, 0.1), (0.1, 0.1), (100.0, 0.1)]  # twice for 1,000 s
    assert affordable([*taken, *paused]) == 50
    assert affordable([(9.0, 0.001), *taken[1:]]) == 50  # the first reads no copy, and compiles
    assert affordable([(9.0, 0.5), (0.1, 0.0001), (0.1, 0.1)]) == 4  # 0.4 s
    assert affordable([(9.0, 0.5), (0.003, 0.0001), (0.003, 0.04)]) == 134  # of updates of 3 ms


@pytest.mark.slow
def test_snapshots_choose_their_interval(tmp_path):
    snapshots = Snapshots("auto")
    run = guarded_run(tmp_path, [], steps=70).replace(continuation=snapshots)
    training = run.training()
    snapshots.prepare(training)
    training.train()
    run.more["watch"].stop()
    snapshots.settle()
    assert snapshots.newest.step == 60 + (70 - 60) // snapshots.every * snapshots.every


@pytest.mark.slow
def test_devices_stay_open_while_an_old_program_runs(monkeypatch):
    """It may wait for a message that Gloo has lost, for half an hour."""
    monkeypatch.setattr(regroup, "LOST", 0.2)
    multiply = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: x @ x * 1e-3, x))
    multiply(jnp.ones((1000, 1000)), 0).block_until_ready()
    client = jax.local_devices()[0].client
    references, product = sys.getrefcount(client), multiply(jnp.ones((1000, 1000)), 100)
    regroup.wait_for_programs()
    assert not product.is_ready() and sys.getrefcount(client) > references
    del product


def test_old_records_of_a_process_that_was_left_out_are_not_written_again(tmp_path):
    class Recovered(Snapshots):
        def prepare(self, training):
            self.context = training.run.checkpoints.context

    def record(step, split="train"):
        return {"step": step, "split": split, "loss": 1.0}

    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(dump(record(step)) for step in range(10, 3010, 10)))
    snapshots = Recovered(10)
    # It was stopped after update 640, and has joined again shortly before update 3000.
    for step in range(10, 650, 10):
        snapshots.records.write(record(step))
    for newest in (record(3000), record(3000, "eval"), record(3010)):
        snapshots.records.write(newest)

    run = types.SimpleNamespace(
        checkpoints=types.SimpleNamespace(context=Context()),
        log=types.SimpleNamespace(directory=tmp_path),
    )
    progress = Progress(step=3012, start=3012, recovered=True)
    training = types.SimpleNamespace(run=run, progress=progress)
    snapshots.begin(training, lambda: JsonLines(file, 3012)).close()
    written = [(x["step"], x["split"]) for x in map(json.loads, file.read_text().splitlines())]
    every = [(step, "train") for step in range(10, 3010, 10)]
    assert written == [*every, (3000, "eval"), (3010, "train")]
