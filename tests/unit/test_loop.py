"""The loop from plain objects, without a config: evaluation, faults of a reader, resuming with
carried state.
"""

import contextlib
import dataclasses
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from covering import first, only
from jaxdp.checkpoint.leaves import params_sha256
from jaxdp.data.dataset import Arrays
from jaxdp.errors import RunFailed, UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.metrics.jsonl import ENOUGH, JsonLines, read
from jaxdp.process.monitor import Monitor, Stopped
from jaxdp.train.evaluate import evaluate
from jaxdp.train.loop import BEHIND, EXAMINED
from plain_runs import fit, make_run


@pytest.mark.slow
@pytest.mark.parametrize("where", first(1, [("pjit", 3), ("pmap", 1), ("pmap", 8)]), ids=str)
def test_evaluation_counts_every_example_once(tmp_path, where):
    backend, devices = where
    model, held_out = toys.MODELS["resnet"](), toys.data(33, seed=5)  # batches of 20 and 13
    run = make_run(tmp_path, model, backend, devices, held_out=held_out, eval_every=3)
    final, _ = fit(run)
    state = run.checkpoints.restore(6, run.strategy.abstract())
    batch = {**held_out, "mask": np.ones(33, bool)}
    logits, _ = model.apply(state.params, state.model_state, batch, jax.random.key(0), False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, held_out["labels"])
    assert final["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert final["accuracy"] == pytest.approx(
        float((logits.argmax(-1) == held_out["labels"]).mean()), abs=1e-6
    )
    assert final["params_sha256"] == params_sha256(state.params)
    kinds = [(r["split"], r["step"]) for r in run.log.writer.records]
    assert kinds == [("train", 2), ("eval", 3), ("train", 4), ("train", 6), ("final", 6)]


class Broken(Arrays):
    def read(self, indices):
        if len(indices) > 3:  # a batch, not the probe
            raise OSError("the disk is gone")
        return super().read(indices)


def test_an_evaluation_does_not_go_on_from_training(tmp_path):
    """Of a data set that says itself where what is carried begins anew, which may be later than its
    first example.
    """
    examples = {**toys.data(60), "reset": np.arange(60) == 33}
    run = make_run(tmp_path, toys.summing(), examples=examples, held_out=examples)
    program, state = run.strategy.compile(run.step), run.strategy.init()
    trained = state.replace(kept=jax.tree.map(jnp.ones_like, state.kept))
    assert evaluate(run, program, state) == evaluate(run, program, trained)


@pytest.mark.slow
def test_a_readers_fault_keeps_its_traceback(tmp_path):
    with pytest.raises(OSError, match="the disk is gone") as fault:
        fit(make_run(tmp_path, train=Broken(**toys.data(60))))
    assert any(entry.name == "read" for entry in fault.traceback)


class Counting(Monitor):
    """Counts the updates that the loop has sent to the device."""

    made = 0

    def after(self, updates, state, metrics):
        self.made += metrics["loss"].size


@pytest.mark.slow
@pytest.mark.parametrize("where", first(1, [("pjit", 3), ("pmap", 1)]), ids=str)
@pytest.mark.parametrize("steps_per_call", only([1, 3], [1, 3, 16]))
def test_a_run_that_is_halted_ends_a_few_updates_later(tmp_path, steps_per_call, where):
    """Also where nothing is logged, evaluated or saved until the end; the state is that before the
    halt.
    """
    backend, devices = where
    data = toys.data(60)
    data["inputs"][:, 0] = np.nan
    run = make_run(
        tmp_path, toys.MODELS["mlp"](), backend, devices, examples=data, steps=400, log_every=1000,
        steps_per_call=steps_per_call, watch=(watch := Counting()), directory=tmp_path,
    )  # fmt: skip
    words = "updates 1 to 10 were not finite, 10 in a row .* there is no checkpoint; "
    words += "in the batch of update 1: inputs not "
    with pytest.raises(
        RunFailed, match=words + "finite in examples .* and 12 more .counted from 0.;"
    ):
        fit(run)
    assert watch.made <= 10 + BEHIND + 2 * steps_per_call and not run.checkpoints.steps()


class Checked(Arrays):
    """Notes from which thread it is read, one at a time."""

    reading = False

    def read(self, indices):
        assert not self.reading, "two threads read"
        self.reading = True
        time.sleep(0.001)
        try:
            return super().read(indices)
        finally:
            self.reading = False


@pytest.mark.quick(1)
@pytest.mark.parametrize("steps_per_call", first(1, [4, 1]))
@pytest.mark.parametrize("where", ["train", "eval", "last"])
def test_a_label_that_is_no_class_is_named_at_once(tmp_path, where, steps_per_call):
    """One of 60, with batches between that have none; and one of the evaluation, or of the last
    update.
    """
    data, watch, loss = toys.data(60), Counting(), SoftmaxCrossEntropy()
    data["labels"][7] = toys.CLASSES
    sound = toys.data(60)
    held_out = data if where == "eval" else sound
    shapes = jax.ShapeDtypeStruct((3, toys.CLASSES), np.float32)
    run = make_run(
        tmp_path, toys.MODELS["mlp"](), train=Checked(**(sound if where == "eval" else data)), held_out=held_out,
        steps=3 if where == "last" else 400, log_every=1000, eval_every=8, steps_per_call=steps_per_call, watch=watch,
    )  # fmt: skip
    check = functools.partial(loss.check, shapes)

    def checked(source):
        return dataclasses.replace(source, check=check)

    sources = {
        "train": checked(run.data.train),
        "eval": {name: checked(x) for name, x in run.data.eval.items()},
    }
    run = run.replace(**sources)
    batch = "batch 0 of the evaluation" if where == "eval" else r"the batch of update \d"
    words = rf"a label is 3, but the model's outputs are for 3 classes, 0 to 2; number .* \(in {batch}\)"
    with pytest.raises(UsageError, match=words):
        fit(run)
    assert watch.made <= 3 + BEHIND + 2 * steps_per_call


@pytest.mark.slow
def test_a_nonfinite_loss_of_valid_labels_ends_nothing(tmp_path):
    """Its examples are looked at, and training goes on as if they were not, with all that is due."""
    data, made = toys.data(60), []
    data["inputs"][7] = np.nan
    for name in ("looks", "does not"):
        run = make_run(
            tmp_path / name,
            toys.MODELS["mlp"](),
            examples=data,
            steps=30,
            log_every=5,
            save_every=4,
        )
        asked = []
        check = asked.append if name == "looks" else None
        run = run.replace(train=dataclasses.replace(run.data.train, check=check))
        final, _ = fit(run)
        records = [(r["step"], r.get("loss")) for r in run.log.writer.records]
        made.append((final["params_sha256"], records, sorted(run.checkpoints.steps())))
        assert len(asked) == (EXAMINED if check else 0) and all(
            np.isnan(e["inputs"]).any() for e in asked
        )
    np.testing.assert_equal(made[0], made[1])


def test_an_evaluation_without_weight_has_no_loss(tmp_path):
    examples = {**toys.data(60), "mask": np.zeros(60, np.float32)}
    run = make_run(tmp_path, toys.MODELS["mlp"](), examples=examples, held_out=examples)
    record = evaluate(run, run.strategy.compile(run.step), run.strategy.init())
    assert np.isnan(record["loss"]) and np.isnan(record["accuracy"])


def test_counters_that_depend_on_examples_end_the_run(tmp_path):
    model = toys.counting(lambda batch: (batch["labels"][0] > 0).astype(jnp.int32))
    run = make_run(tmp_path, model, log_every=100)
    with pytest.raises(RunFailed, match="update 1: integers of the model state differ"):
        fit(run)
    assert not run.checkpoints.steps()


class Preempting(Monitor):
    def run_step(self, what, f, *args):
        raise Stopped("preempt", "SIGTERM", 0)


@pytest.mark.parametrize("start", [4, 6])
def test_a_recovered_state_is_saved_before_the_end(tmp_path, start):
    """The run is preempted before its next update, or was recovered after its last one."""
    run = make_run(tmp_path, toys.MODELS["mlp"](), start=start, watch=Preempting())
    run = run.replace(state=run.strategy.init())
    with contextlib.suppress(Stopped):
        fit(run)
    assert run.checkpoints.steps() == [start]


@pytest.mark.slow
def test_carried_state_resumes_under_another_strategy(tmp_path):
    whole = make_run(tmp_path / "whole", toys.counting())
    fit(whole)
    fit(make_run(tmp_path / "parts", toys.counting(), "pmap", 3, steps=4))
    parts = make_run(tmp_path / "parts", toys.counting(), "pjit", 8, start=4)
    fit(parts)
    a, b = (r.checkpoints.restore(6, r.strategy.abstract()) for r in (whole, parts))
    assert toys.relative_error(a, b)[0] < 1e-5
    assert int(a.step) == int(b.step) == 6
    assert float(jnp.abs(a.kept["carry"]["seen"]).max()) > 0


def test_old_checkpoints_go_and_stray_folders_are_none(tmp_path):
    run = make_run(tmp_path, toys.MODELS["mlp"](), save_every=1)
    (tmp_path / "checkpoints" / "99").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    fit(run)
    assert run.checkpoints.steps() == [4, 5, 6]
    assert run.log.writer.said[-1] == "saved step 6"


def test_resumed_metrics_have_no_torn_or_later_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": 1.0}\n{"st'
    )
    lines = JsonLines(file, keep_until=2)
    lines.write({"step": 3, "split": "train", "loss": float("inf")})
    lines.close()
    assert [r["step"] for r in read(file)] == [1, 2, 3]
    assert float(read(file)[2]["loss"]) == np.inf
    file.write_text(
        "".join(
            f'{{"step": {n}, "split": "{split}"}}\n' for n in (2, 4) for split in ("train", "eval")
        )
    )
    JsonLines(file, keep_until=4, evaluated=False).close()  # it will be made again
    assert [(r["step"], r["split"]) for r in read(file)] == [
        (2, "train"),
        (2, "eval"),
        (4, "train"),
    ]


def test_a_long_metrics_file_is_read_from_its_end(tmp_path):
    file, line = tmp_path / "metrics.jsonl", '{{"step": {}, "split": "train"}}\n'.format
    begin = "not read, and kept\n" + "".join(map(line, range(1, 9_990)))
    late = [
        *range(9_991, 10_100),
        9_990,
        *range(10_100, 10_300),
    ]  # update 9,990 came late, from another process
    file.write_text(begin + "".join(map(line, late)))
    assert [r["step"] for r in read(file, 10_200)] == late[-100 - ENOUGH :]
    JsonLines(file, keep_until=9_995).close()
    assert file.read_text() == begin + "".join(map(line, [*range(9_991, 9_996), 9_990]))


@pytest.mark.parametrize(
    ("final", "evaluated", "kept"),
    [
        (
            {"loss": 0.5},
            True,
            [{"step": 4, "split": "eval", "time": 1.0, "loss": 0.5}],
        ),  # it is not made again
        ({"loss": 0.5}, False, []),
        ({"loss": 0.5, "stopped": "enough"}, True, []),  # it has a line of its own
        ({"loss": 0.5, "loss_of": "the last batch"}, True, []),
    ],
)
def test_a_lengthened_run_keeps_its_last_evaluation(tmp_path, final, evaluated, kept):
    file = tmp_path / "metrics.jsonl"
    other = {"params_sha256": "0", "goodput": 0.5, "time": 1.0}
    file.write_text(json.dumps({"step": 4, "split": "final", **final, **other}) + "\n")
    JsonLines(file, 4, evaluated, due=True).close()
    assert read(file) == kept


def test_the_digest_is_of_path_dtype_shape_and_bytes():
    base = {"a": jnp.arange(4.0), "b": {"c": jnp.zeros((2, 2))}}
    same = {"b": {"c": jnp.zeros((2, 2))}, "a": jnp.arange(4.0)}
    others = [
        {**base, "a": jnp.arange(4)}, {**base, "a": jnp.arange(4.0).reshape(2, 2)}, {"a": base["a"], "d": base["b"]},
        {**base, "a": base["a"].at[0].set(-0.0)},
    ]  # fmt: skip
    assert params_sha256(base) == params_sha256(same)
    assert len({params_sha256(x) for x in [base, *others]}) == 5
