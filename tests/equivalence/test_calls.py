"""Several updates in one compiled call, and data that lives on the devices: the same numbers,
nothing is passed by.
"""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import toys
from checks import check_padding
from covering import first
from jaxdp.cli import load
from jaxdp.config import validation
from jaxdp.data.dataset import Arrays
from jaxdp.data.example_order import EpochOrder, Streams
from jaxdp.data.prefetch import read_batches
from jaxdp.data.resident import Resident, gather
from jaxdp.errors import UsageError
from jaxdp.parallel.placement import assign_microbatches
from jaxdp.run.build import is_padded
from jaxdp.run.components import make_parts
from jaxdp.train.skip import Spike
from launch import mpirun
from plain_runs import fit, make_run

DIGITS = pathlib.Path(__file__).parents[2] / "configs" / "digits.yaml"


@pytest.mark.parametrize(
    "start, steps, k", [(0, 50, 4), (3, 41, 16), (0, 5, 8), (7, 7, 2), (20, 40, 1)]
)
def test_what_is_due_is_due_between_calls(tmp_path, start, steps, k):
    run = make_run(
        tmp_path,
        steps=steps,
        steps_per_call=k,
        save_every=10,
    )
    run = run.replace(eval={"": run.data.train}, eval_every=7)
    calls = run.run.calls(start, (22, 25))  # a profile's window
    groups = [range(of.start + 99, of.stop + 99) for of in calls]  # batches after 100 skipped ones
    assert [step for group in groups for step in group] == list(range(start + 100, steps + 100))
    assert {len(group) for group in groups} <= {1, k}
    due = {s for s in range(start + 1, steps) if s % 10 == 0 or s % 7 == 0 or s in (22, 25)}
    ends = {group[-1] + 1 - 100 for group in groups}
    assert due <= ends
    assert (len(groups) < steps - start) == ((start, steps, k) == (0, 50, 4))


WAYS = [("pjit", 3, 2), ("pmap", 1, 0), ("pmap", 4, 1), ("pjit", 1, 0), ("pjit", 4, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("way", first(1, WAYS), ids=str)
def test_several_updates_a_call_equal_those_one_by_one(way):
    backend, devices, zero = way
    model, examples = toys.MODELS["dropout"](), toys.data(53)
    strategy, step, batch = toys.build(
        model, examples, backend=backend, devices=devices, layout={"zero": zero} if zero else None
    )
    program, one = strategy.compile(step), []
    state = strategy.init()
    for i in range(6):
        state, metrics = program.update(state, batch(i))
        one.append(jax.device_get(metrics))
    want = jax.tree.map(np.array, strategy.export(state))
    cursor = EpochOrder(53, 20, 8, 0, shuffle=False)
    state, several = strategy.init(), []
    for begin in (0, 3):
        read = read_batches(
            Arrays(**examples), cursor, range(begin, begin + 3), strategy.local_microbatches
        )
        state, metrics = program.updates(state, strategy.shard_batch(read, several=True))
        metrics = jax.device_get(metrics)
        several += [{k: v[i] for k, v in metrics.items()} for i in range(3)]
    assert toys.relative_error(jax.tree.map(np.array, strategy.export(state)), want)[0] < 1e-5
    for a, b in zip(several, one, strict=True):
        assert a.keys() == b.keys()
        assert all(np.allclose(a[k], b[k], rtol=1e-5, atol=1e-6) for k in a), (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("resident", first(1, [True, False]))
def test_the_loop_writes_the_same_records(tmp_path, resident):
    """Log, evaluation and save at steps that are no multiples of a call's."""
    held_out, records = toys.data(33, seed=5), []
    for k in (1, 4):
        run = make_run(
            tmp_path / str(k), toys.MODELS["dropout"](), devices=2, held_out=held_out, steps=15, steps_per_call=k,
            log_every=3, eval_every=5, save_every=6,
        )  # fmt: skip
        if resident and k > 1:
            train, held = (
                dataclasses.replace(source, resident=Resident(source.dataset, run.strategy))
                for source in (run.data.train, run.data.eval[""])
            )
            run = run.replace(train=train, eval={"": held})
        fit(run)
        records.append(run.log.writer.records)
        assert run.checkpoints.steps() == [6, 12, 15]
    assert [(r["split"], r["step"]) for r in records[0]] == [
        (r["split"], r["step"]) for r in records[1]
    ]
    for a, b in zip(*records, strict=True):
        for name in ("loss", "accuracy", "grad_norm"):
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-5), (a, b)
    timed = [r for r in records[1] if "step_time_ms" in r]
    assert timed and all(0 <= r["input_wait"] <= 1 for r in timed)


@pytest.mark.slow
def test_what_is_carried_goes_on_inside_a_call(tmp_path):
    model, examples = toys.summing(), toys.data(53)
    strategy, step, _ = toys.build(model, examples, sequential=True, devices=3, backend="pjit")
    program, order = strategy.compile(step), Streams(53, 20, 8)
    read = read_batches(Arrays(**examples), order, range(4), strategy.local_microbatches)
    state, _ = program.updates(strategy.init(), strategy.shard_batch(read, several=True))
    got = strategy.export(state).kept["carry"]["seen"]
    _, want, *_ = toys.train(model, examples, steps=4, sequential=True)
    np.testing.assert_allclose(got, want.kept["carry"]["seen"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("action", first(1, ["rollback", "skip"]))
def test_the_guard_sees_every_update_of_a_call(action):
    """The third batch is not finite, and the sixth a spike: skipped; or halted there, and what
    follows is not made.
    """
    examples = toys.data(53)
    examples["inputs"][45] = np.nan
    model, spike = toys.MODELS["mlp"](), Spike(3.0, 0.5, 2, action)
    strategy, step, _ = toys.build(model, examples, spike=spike)
    program, cursor = strategy.compile(step), EpochOrder(53, 20, 8, 0, shuffle=False)
    read = read_batches(Arrays(**examples), cursor, range(7), strategy.local_microbatches)
    read["inputs"][5] = np.nan_to_num(read["inputs"][5]) * 1e4
    state, metrics = program.updates(strategy.init(), strategy.shard_batch(read, several=True))
    one = strategy.init()
    for i in range(7):
        one, last = program.update(one, strategy.shard_batch({k: v[i] for k, v in read.items()}))
        assert {k: float(v[i]) for k, v in metrics.items()} == pytest.approx(
            {k: float(v) for k, v in last.items()}, rel=1e-5, nan_ok=True
        )
    assert int(state.step) == int(one.step) == (7 if action == "skip" else 6)
    assert list(metrics["skipped"]) == (
        [0, 0, 1, 0, 0, 1, 0] if action == "skip" else [0, 0, 1, 0, 0, 1, 1]
    )
    assert [bool(x) for x in metrics["halted"]] == (
        [False] * 7 if action == "skip" else [False] * 5 + [True] * 2
    )


@pytest.mark.parametrize("backend, devices", [("pmap", 1), ("pmap", 3), ("pjit", 1), ("pjit", 8)])
def test_rows_gathered_on_the_device_equal_those_read(backend, devices):
    examples = toys.data(53) | {
        "mask": np.linspace(0, 1, 53 * 2).reshape(53, 2) > 0.3,
        "reset": np.arange(53) % 9 == 0,
    }
    dataset = Arrays(**examples)
    strategy, _, _ = toys.build(
        toys.MODELS["mlp"](), toys.data(53), backend=backend, devices=devices
    )
    resident = Resident(dataset, strategy)
    for order in (EpochOrder(53, 20, 8, 3), Streams(53, 20, 8)):
        with resident.batches(order, [range(1), range(1, 3), range(3, 4), range(5, 6)]) as batches:
            for steps, got in batches:
                read = read_batches(dataset, order, steps, strategy.local_microbatches)
                want = strategy.shard_batch(read, len(steps) > 1)
                assert got.keys() == want.keys()
                for name, x in want.items():
                    np.testing.assert_array_equal(got[name], x, err_msg=name)
                    assert got[name].dtype == x.dtype, name
                    if devices > 1:
                        assert got[name].sharding.is_equivalent_to(x.sharding, x.ndim), name
    slots = len(strategy.local_microbatches)
    at = {"index": np.zeros((slots, 3), np.int32), "mask": np.ones((slots, 3), np.float32)}
    placed = strategy.shard_batch(at)
    place = getattr(placed["index"], "sharding", None)
    text = jax.jit(gather, out_shardings=place).lower(resident.arrays, placed).compile().as_text()
    assert not any(
        kind in text for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )


class Vast:
    def __len__(self):
        return 10**12

    def read(self, indices):
        return {"inputs": np.zeros((len(indices), 1000), np.float32)}


def test_a_set_that_does_not_fit_is_refused():
    strategy, _, _ = toys.build(toys.MODELS["mlp"](), toys.data(20))
    with pytest.raises(
        UsageError,
        match=r"data.on_device: 1,000,000,000,000 examples take 4000000.0 GB .* to false",
    ):
        Resident(Vast(), strategy)


@pytest.mark.parametrize(
    "extra, text",
    [
        (["--steps_per_call", "0"], r"steps_per_call: 0 is too small; it must be at least 1"),
        (
            ["--data.on_device", "true", "--data.workers", "2"],
            r"data.workers: 2 read nothing where data.on_device",
        ),
    ],
)
def test_what_does_not_go_together_is_said(extra, text):
    with pytest.raises(UsageError, match=text):
        load(["--config", "configs/digits.yaml", *extra])


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys, devices, offset, padded",
    [
        (["--steps", "22"], 1, 0, False),  # 1,437 examples are 22 batches of 64, and a part of one
        (["--steps", "22"], 4, 0, False),
        (["--steps", "22"], 1, 1, True),
        (["--steps", "23"], 1, 0, True),
        (["--steps", "22"], 3, 0, True),  # 8 microbatches in 9 slots
        (["--steps", "22", "--microbatches", "6"], 1, 0, True),
        (["--epochs", "9", "--batch_size", "479", "--microbatches", "1"], 1, 0, False),
        (["--epochs", "9", "--batch_size", "479", "--microbatches", "1"], 1, 50, False),
        (["--steps", "22", "--spike.factor", "3", "--spike.action", "rollback"], 1, 0, True),
    ],
)
def test_padding_is_known_of_beforehand(keys, devices, offset, padded):
    check_padding(keys, devices, offset, padded)


def test_a_mask_of_the_data_is_never_left_out():
    config = validation.resolve(load(["--config", str(DIGITS), "--steps", "22"])[0])
    parts = make_parts(config)
    own = Arrays(**{**toys.data(1437), "mask": np.ones(1437, np.float32)})
    assert is_padded(config, parts._replace(dataset=own), assign_microbatches(8, 1))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pmap", "pjit"])
def test_several_updates_a_call_on_two_processes_agree(tmp_path, backend):
    """Two devices each, a batch that does not fill its microbatches, an evaluation between calls."""
    config = [
        "--config",
        "configs/digits.yaml",
        "--steps",
        "27",
        "--epochs",
        "null",
        "--microbatches",
        "6",
    ]
    config += [
        "--batch_size",
        "50",
        "--eval.every",
        "10",
        "--parallel.backend",
        backend,
        "--model.args.hidden",
        "[8]",
    ]
    records = []
    for name, more in (
        ("one", []),
        ("four", ["--steps_per_call", "4", "--data.on_device", "true"]),
    ):
        command = [
            "train.py",
            *config,
            *more,
            "--run_dir",
            str(tmp_path / name),
            "--log.every",
            "1",
        ]
        done = mpirun(2, command, devices=2)
        assert done.returncode == 0, done.output
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        records.append({(r["split"], r["step"]): r["loss"] for r in lines})
    assert len(records[0]) == 30 and records[0].keys() == records[1].keys()
    assert all(records[1][key] == pytest.approx(loss, rel=1e-5) for key, loss in records[0].items())
