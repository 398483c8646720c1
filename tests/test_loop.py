"""The loop from plain objects, without a config: evaluation, faults of a reader, resuming with carried state."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from jaxdp import loop
from jaxdp.checkpoint import Checkpoints
from jaxdp.data.base import Arrays
from jaxdp.data.cursor import Cursor
from jaxdp.digest import params_sha256
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.metrics.jsonl import JsonLines, read
from jaxdp.parallel import STRATEGIES
from jaxdp.parallel.reduction import make_reduction
from jaxdp.precision import Policy
from jaxdp.step import init_state, make_step
from test_sequential import summing
from test_step import counting


class Kept:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.records, self.said = [], []

    def write(self, record):
        self.records.append(record)

    def say(self, text):
        self.said.append(text)

    def rewind(self, step):
        self.records = [r for r in self.records if r["step"] <= step]

    def close(self): ...


def make_run(
    tmp_path, model=None, backend="pmap", devices=1, train=None, held_out=None, spike=None, examples=None, **settings
):
    model, examples = model or toys.MODELS["resnet"](), examples or toys.data(60)
    tx = optax.adam(1e-2)
    cursor = Cursor(60, 20, 8, 0)
    make = lambda: init_state(model, tx, Policy(), 0, 8, {k: v[:3] for k, v in examples.items()}, spike=spike)
    eval_source = None
    if held_out is not None:
        eval_source = loop.Source(Arrays(**held_out), Cursor(len(held_out["labels"]), 20, 8, 0, shuffle=False))
    return loop.Run(
        strategy=STRATEGIES[backend](make, 8, make_reduction("xla"), None, jax.devices()[:devices]),
        step=make_step(model, SoftmaxCrossEntropy(), tx, spike=spike),
        train=loop.Source(train or Arrays(**examples), cursor),
        eval=eval_source,
        writer=Kept(),
        checkpoints=Checkpoints(tmp_path / "checkpoints"),
        **{"steps": 6, "log_every": 2, **settings},
    )


@pytest.mark.parametrize(("backend", "devices"), [("pmap", 1), ("pjit", 3), ("pmap", 8)])
def test_evaluation_counts_every_example_once(tmp_path, backend, devices):
    model, held_out = toys.MODELS["resnet"](), toys.data(33, seed=5)  # batches of 20 and 13
    run = make_run(tmp_path, model, backend, devices, held_out=held_out, eval_every=3)
    final = loop.fit(run)
    state = run.checkpoints.restore(6, run.strategy.abstract())
    batch = {**held_out, "mask": np.ones(33, bool)}
    logits, _ = model.apply(state.params, state.model_state, batch, jax.random.key(0), False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, held_out["labels"])
    assert final["loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert final["accuracy"] == pytest.approx(float((logits.argmax(-1) == held_out["labels"]).mean()), abs=1e-6)
    assert final["params_sha256"] == params_sha256(state.params)
    kinds = [(r["split"], r["step"]) for r in run.writer.records]
    assert kinds == [("train", 2), ("eval", 3), ("train", 4), ("train", 6), ("final", 6)]


class Broken(Arrays):
    def read(self, indices):
        if len(indices) > 3:  # a batch, not the probe
            raise OSError("the disk is gone")
        return super().read(indices)


def test_an_evaluation_does_not_go_on_from_training(tmp_path):
    """Of a data set that says itself where what is carried begins anew, which may be later than its first example."""
    examples = {**toys.data(60), "reset": np.arange(60) == 33}
    run = make_run(tmp_path, summing(), examples=examples, held_out=examples)
    program, state = run.strategy.lower(run.step), run.strategy.init()
    trained = state.replace(carry=jax.tree.map(jnp.ones_like, state.carry))
    assert loop.evaluate(run, program, state) == loop.evaluate(run, program, trained)


def test_a_readers_fault_reaches_the_loop_with_its_traceback(tmp_path):
    with pytest.raises(OSError, match="the disk is gone") as fault:
        loop.fit(make_run(tmp_path, train=Broken(**toys.data(60))))
    assert any(entry.name == "read" for entry in fault.traceback)


def test_garbage_collection_leaves_out_what_a_start_has_made(tmp_path, monkeypatch):
    counts, write = [], Kept.write
    monkeypatch.setattr(Kept, "write", lambda self, record: (counts.append(gc.get_freeze_count()), write(self, record)))
    loop.fit(make_run(tmp_path))
    assert min(counts) > 1000 and gc.get_freeze_count() == 0


def test_counters_that_depend_on_the_examples_end_the_run(tmp_path):
    model = counting(lambda batch: (batch["labels"][0] > 0).astype(jnp.int32))
    with pytest.raises(RuntimeError, match="update 2: integers of the model state differ"):
        loop.fit(make_run(tmp_path, model))


def test_carried_state_resumes_under_another_strategy(tmp_path):
    whole = make_run(tmp_path / "whole", counting())
    loop.fit(whole)
    loop.fit(make_run(tmp_path / "parts", counting(), "pmap", 3, steps=4))
    parts = make_run(tmp_path / "parts", counting(), "pjit", 8, start=4)
    loop.fit(parts)
    a, b = (r.checkpoints.restore(6, r.strategy.abstract()) for r in (whole, parts))
    assert toys.relative_error(a, b)[0] < 1e-5
    assert int(a.step) == int(b.step) == 6
    assert float(jnp.abs(a.carry["seen"]).max()) > 0


def test_old_checkpoints_go_and_stray_directories_are_no_steps(tmp_path):
    run = make_run(tmp_path, toys.MODELS["mlp"](), save_every=1)
    (tmp_path / "checkpoints" / "99").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes").mkdir()
    loop.fit(run)
    assert run.checkpoints.steps() == [4, 5, 6]
    assert run.writer.said[-1] == "saved step 6"


def test_a_resumed_metrics_file_has_no_torn_or_later_lines(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": 1.0}\n{"st')
    lines = JsonLines(file, keep_until=2)
    lines.write({"step": 3, "split": "train", "loss": float("inf")})
    lines.close()
    assert [r["step"] for r in read(file)] == [1, 2, 3]
    assert float(read(file)[2]["loss"]) == np.inf
    file.write_text("".join(f'{{"step": {n}, "split": "{split}"}}\n' for n in (2, 4) for split in ("train", "eval")))
    JsonLines(file, keep_until=4, evaluated=False).close()  # it will be made again
    assert [(r["step"], r["split"]) for r in read(file)] == [(2, "train"), (2, "eval"), (4, "train")]


def test_the_digest_is_of_path_dtype_shape_and_bytes():
    base = {"a": jnp.arange(4.0), "b": {"c": jnp.zeros((2, 2))}}
    same = {"b": {"c": jnp.zeros((2, 2))}, "a": jnp.arange(4.0)}
    others = [
        {**base, "a": jnp.arange(4)}, {**base, "a": jnp.arange(4.0).reshape(2, 2)}, {"a": base["a"], "d": base["b"]},
        {**base, "a": base["a"].at[0].set(-0.0)},
    ]  # fmt: skip
    assert params_sha256(base) == params_sha256(same)
    assert len({params_sha256(x) for x in [base, *others]}) == 5
