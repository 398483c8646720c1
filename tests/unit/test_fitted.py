"""What `jaxdp.fit` returns: metrics at a glance, history, predictions, evaluations, and the trained
module.
"""

import equinox
import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxdp
from jaxdp.data import Stream
from jaxdp.errors import RunFailed, UsageError
from jaxdp.models.nnx import Carry
from jaxdp.run.fitted import fitting
from jaxdp.run.objects import name_it

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)


class Net(nnx.Module):
    """BatchNorm and dropout: training and evaluation differ."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(jax.nn.relu(self.norm(self.first(x)))))


def fit(model=Net, **more):
    base = {
        "steps": 6,
        "batch_size": 30,
        "eval": {"every": 2},
        "log": {"every": 2},
        "parallel": {"devices": 1},
    }
    return jaxdp.fit(model, (X, Y), **{**base, "eval_data": (X[:50], Y[:50]), **more})


@pytest.fixture(scope="module")
def fitted():
    return fit(optimizer={"target": "adamw", "lr": 0.01, "ema": 0.9})


CLASH = (
    lambda key, inputs: {"a/b": np.ones((4, 2), np.float32), "a": {"b": np.zeros(2, np.float32)}},
    lambda params, inputs: inputs @ params["a/b"] + params["a"]["b"],
)
GROWING = (
    lambda key, inputs: ({"w": np.ones((4, 2), np.float32)}, {"seen": np.zeros(2, np.float32)}),
    lambda params, inputs, state: (inputs @ params["w"], {"seen": state["seen"][:1]}),
)
PHASE = (
    lambda key, inputs: {"w": np.ones((4, 2), np.float32), "phase": np.ones(2, np.complex64)},
    lambda params, inputs: inputs @ params["w"] * params["phase"].real,
)
ORDER = (
    lambda key, inputs: {"w": np.ones((4, 2), np.float32), "order": np.arange(2)},
    lambda params, inputs: (inputs @ params["w"])[:, params["order"]],
)
EMPTY = (
    lambda key, inputs: ({"w": np.ones((4, 2), np.float32)}, {"seen": np.zeros(0, np.float32)}),
    lambda params, inputs, state: (inputs @ params["w"], state),
)


@pytest.mark.parametrize(
    "model, words",
    [
        (EMPTY, "model: its state 'seen' has shape .0,.; it is empty"),
        (
            PHASE,
            "parameter 'phase' is complex64.*; store its real and imaginary parts as two arrays",
        ),
        (ORDER, "parameter 'order' is int32.*; make it part of the model's state, or a constant"),
        (CLASH, "2 arrays of params have the path 'a/b'"),
        (GROWING, "'seen' changes from"),
    ],
)
def test_a_model_that_would_fail_later_is_refused(model, words):
    with pytest.raises(UsageError, match=words):
        fit(model)


def test_it_is_printed_in_a_line_and_shown_as_a_table(fitted):
    text = repr(fitted)
    loss, accuracy = f"{fitted.final['loss']:.4f}", f"{fitted.final['accuracy']:.4f}"
    assert (
        text == f"Fitted(step 6, loss {loss}, accuracy {accuracy}; 74 parameters; {fitted.run_dir})"
    )
    table = fitted._repr_html_()
    assert f"<tr><th>accuracy</th><td>{accuracy}</td></tr>" in table and "<td>74</td>" in table


def test_a_section_without_target_has_the_default():
    assert name_it({}, "optimizer", {"lr": 0.5}) == {"lr": 0.5} and name_it({}, "loss", {}) == {}
    with pytest.raises(UsageError, match=r"model.target: missing"):
        fit({"args": {"width": 3}})


def test_the_history_ends_with_the_last_evaluation(fitted):
    train, evaluated = fitted.history["train"], fitted.history["eval"]
    assert train["step"] == evaluated["step"] == [2, 4, 6]
    assert evaluated["loss"][-1] == fitted.final["loss"] and len(train["loss"]) == 3
    assert all(len(column) == 3 for column in (*train.values(), *evaluated.values()))


def test_predictions_are_those_the_evaluation_scored(fitted):
    outputs = fitted.predict(X[:50], batch_size=16)
    assert isinstance(outputs, np.ndarray) and outputs.shape == (50, 2)
    assert (outputs.argmax(1) == Y[:50]).mean() == pytest.approx(fitted.final["accuracy"])
    np.testing.assert_allclose(
        fitted.predict({"inputs": X[:1].astype(np.float64)}), outputs[:1], rtol=1e-5
    )
    assert not np.allclose(fitted.predict(X[:50], ema=True), outputs)


@pytest.mark.slow
def test_it_evaluates_any_data_as_the_run_did(fitted):
    assert fitted.evaluate() == {k: fitted.final[k] for k in ("loss", "accuracy")}
    assert fitted.evaluate((X[:50], Y[:50])) == fitted.evaluate()
    rest, full = fitted.evaluate((X[50:], Y[50:])), fitted.evaluate({"inputs": X, "labels": Y})
    for name, value in full.items():
        assert value == pytest.approx((50 * fitted.final[name] + 40 * rest[name]) / 90, rel=1e-5)
    assert fitted.evaluate(ema=True)["loss"] != fitted.final["loss"]


class Scaled:
    """Examples with a transform of their own."""

    def __init__(self, factor=1.0):
        self.factor, self.transform = factor, self.scale if factor != 1 else None

    def __len__(self):
        return 50

    def read(self, indices):
        return {"inputs": X[indices], "labels": Y[indices]}

    def scale(self, batch, key, train):
        return {**batch, "inputs": batch["inputs"] * self.factor}


@pytest.mark.slow
def test_each_evaluation_set_has_its_own_transform():
    """Also if the first has one and another none, or they have one class."""
    also = {
        k: {"target": f"{__name__}.Scaled", "args": {"factor": x}}
        for k, x in (("same", 1.0), ("half", 0.5))
    }
    trained = fit(eval={"also": also}, eval_data=Scaled(-3.0))
    apart = {
        name: trained.evaluate(Scaled(x))
        for name, x in (("", -3.0), ("same/", 1.0), ("half/", 0.5))
    }
    assert {
        name + k: x for name, numbers in apart.items() for k, x in numbers.items()
    }.items() <= trained.final.items()
    assert len({numbers["loss"] for numbers in apart.values()}) == 3


@pytest.mark.slow
def test_predictions_may_have_the_training_transform():
    trained = jaxdp.fit(Net, Scaled(-3.0), steps=1, batch_size=30, parallel={"devices": 1})
    np.testing.assert_allclose(trained.predict(X), trained.model(-3 * X), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_it_evaluates_no_other_runs_checkpoint(tmp_path):
    more = {"run_dir": tmp_path, "steps": 1, "eval_data": None}
    first = fit(**more)
    fit(**more, seed=1, overwrite=True)
    with pytest.raises(
        UsageError, match="no longer has this run's checkpoint of step 1; call fit again"
    ):
        first.evaluate((X, Y))
    assert first.predict(X).shape == (90, 2)


@pytest.mark.slow
def test_a_finished_run_of_loss_nan_is_returned_again(tmp_path):
    """Its metrics.jsonl has the text "nan"."""
    base = {"steps": 3, "batch_size": 30, "parallel": {"devices": 1}, "run_dir": tmp_path}
    x = np.where(
        np.arange(90)[:, None] < 89, X, np.float32("nan")
    )  # the last update has the last row
    data = {"target": (x, Y), "order": "sequential"}
    losses = [jaxdp.fit(Net, data, **base).final["loss"] for _ in range(2)]
    assert all(isinstance(loss, float) and np.isnan(loss) for loss in losses)


@pytest.mark.slow
def test_a_lost_final_record_loses_no_last_loss(tmp_path):
    first = fit(eval_data=None, steps=2, run_dir=tmp_path)
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(line for line in file.read_text().splitlines(True) if '"final"' not in line)
    )
    final = fit(eval_data=None, steps=2, run_dir=tmp_path).final
    assert {**final, "goodput": 0} == {
        **first.final,
        "goodput": 0,
    } and '"final"' in file.read_text()


@pytest.mark.slow
def test_a_lengthened_run_equals_one_of_all_its_steps(tmp_path):
    """As docs/notebook.md does it: the learning rates of `schedule_steps` do not depend on the
    steps.
    """
    more = {"optimizer": {"target": "adamw", "lr": 0.01, "schedule_steps": 8}}
    fit(**more, steps=4, run_dir=tmp_path / "parts")
    longer = fit(**more, steps=8, run_dir=tmp_path / "parts")
    assert longer.final["params_sha256"] == fit(**more, steps=8).final["params_sha256"]
    assert longer.history["train"]["step"] == longer.history["eval"]["step"] == [2, 4, 6, 8]


@pytest.mark.slow
def test_the_history_omits_a_shorter_runs_final_eval(tmp_path):
    more = {"optimizer": {"schedule": "constant"}, "eval": {"every": 3}, "run_dir": tmp_path}
    fit(**more, steps=4)
    assert fit(**more, steps=8).history["eval"]["step"] == [3, 6, 8]


@pytest.mark.parametrize("train, other", [(np.uint8, np.float32), (np.float32, np.int32)])
def test_evaluation_data_of_another_kind_of_numbers_is_refused(fitted, train, other):
    """A model of pixels from 0 to 255 would be evaluated on those from 0 to 1, or the other way round."""
    pixels = RNG.integers(0, 255, (60, 4))

    def data(dtype):
        return pixels.astype(dtype), Y[:60]

    net = (
        lambda key, inputs: {"w": np.ones((4, 2), np.float32)},
        lambda params, inputs: inputs.astype(np.float32) @ params["w"],
    )
    more = {"steps": 1, "batch_size": 30, "microbatches": 2, "parallel": {"devices": 1}}
    said = r"'inputs' has integers in one of them; make them alike"
    with pytest.raises(
        UsageError, match=rf"^eval\.data: its examples \(.*\) do not match .*{said}"
    ):
        jaxdp.fit(net, data(train), eval_data=data(other), **more)
    trained = jaxdp.fit(net, data(train), eval_data=data(train), **more)
    with pytest.raises(UsageError, match=said):
        trained.evaluate(data(other))
    labels = Y[:60].astype(np.int8)  # those of another width are read as before
    assert trained.evaluate((pixels.astype(train), labels)) == trained.evaluate(data(train))


def test_the_number_of_skipped_updates_that_end_a_run_may_change(tmp_path):
    """It decides no number: also with objects, which are compared by what they compute."""
    more = {"optimizer": optax.sgd(0.1), "run_dir": tmp_path / "run", "eval": {}, "log": {}}
    fit(steps=2, **more)
    longer = fit(steps=4, nonfinite={"max_consecutive": 3}, **more)
    assert longer.final["step"] == 4


def test_a_forced_resume_says_what_differs_and_a_refused_one_writes_nothing(tmp_path, capsys):
    more = {"run_dir": tmp_path / "run", "eval": {}, "resume": {"force": True}}
    fit(steps=2, optimizer={"target": "adamw"}, **more)
    written = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(UsageError, match=r"checkpoint 2 "):
        fit(steps=4, optimizer={"target": "sgd"}, **more)
    assert (tmp_path / "run" / "config.yaml").read_bytes() == written
    said = capsys.readouterr().out
    assert "warning: resume.force: " in said and "'adamw' -> 'sgd'" in said, said
    assert fit(steps=4, optimizer={"target": "adamw"}, **more).final["step"] == 4


@pytest.mark.parametrize("overwrite", ["no", None, 2])
def test_overwrite_is_true_or_false(overwrite, tmp_path):
    with pytest.raises(UsageError, match=r"overwrite: .* is not one of True, False"):
        fit(run_dir=tmp_path, overwrite=overwrite)


@jax.tree_util.register_pytree_node_class
class Pair:
    """A tree of a user's own, without `__eq__`."""

    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias

    def tree_flatten(self):
        return (self.kernel, self.bias), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_parameters_may_be_a_tree_of_a_users_own():
    trees = (
        (lambda kernel, bias: {"bias": bias, "kernel": kernel}, lambda p: (p["kernel"], p["bias"])),
        (Pair, lambda p: (p.kernel, p.bias)),
    )

    def loss_of(make, parts):
        def apply(params, inputs):
            kernel, bias = parts(params)
            return inputs @ kernel + bias

        init = make(np.zeros((4, 2), np.float32), np.zeros(2, np.float32))
        return fit((lambda key, inputs: init, apply), eval={}).final["loss"]

    assert loss_of(*trees[0]) == loss_of(*trees[1])


def test_a_run_that_made_no_update_fails():
    data = {"inputs": X, "labels": Y, "mask": np.zeros(90, np.float32)}
    with pytest.raises(RunFailed, match=r"skipped updates: 4 of 4: .*their examples all masked"):
        jaxdp.fit(Net, data, steps=4, batch_size=30, parallel={"devices": 1})


@pytest.mark.slow
def test_an_optax_object_starts_from_another_run(fitted):
    begun = fit(init_from=fitted.run_dir, optimizer=optax.sgd(0.0), steps=1, eval={})
    assert jax.tree.all(jax.tree.map(np.array_equal, begun.params, fitted.params))


def test_the_module_is_trained_and_in_evaluation_mode(fitted):
    assert isinstance(fitted.model, Net) and fitted.model is fitted.model
    np.testing.assert_allclose(fitted.model(X), fitted.predict(X), rtol=1e-5, atol=1e-6)
    assert np.array_equal(fitted.model.first.kernel[...], fitted.params["first"]["kernel"])


class Tree(equinox.Module):
    layer: equinox.nn.Linear

    def __init__(self, key):
        self.layer = equinox.nn.Linear(4, 2, key=key)

    def __call__(self, x):
        return self.layer(x)


def plain_init(key, inputs):
    return {"w": jax.random.normal(key, (4, 2))}


def plain_apply(params, inputs):
    return inputs @ params["w"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [linen.Dense(2), Tree, (plain_init, plain_apply)], ids=["linen", "equinox", "pair"]
)
def test_every_library_has_its_own_kind_of_module(model):
    fitted = fit(model, steps=2)
    call = jax.vmap(fitted.model) if model is Tree else fitted.model
    np.testing.assert_allclose(call(X), fitted.predict(X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_without_evaluation_data_a_loss_says_its_batch(capsys):
    fitted = fit(eval_data=None, steps=2)
    assert (
        fitted.final["loss_of"] == "the last batch"
        and fitted.final["loss"] == fitted.history["train"]["loss"][-1]
    )
    assert (
        "(of the last batch: no evaluation data)" in capsys.readouterr().out
        and "of the last batch" in repr(fitted)
    )
    assert fitted.history["eval"] == {}
    with pytest.raises(
        UsageError, match="evaluate: the run has no evaluation data; give a data set"
    ):
        fitted.evaluate()
    with pytest.raises(UsageError, match="ema: True, but the run has no running average"):
        fitted.predict(X, ema=True)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (
            X[0],
            r"predict: 'inputs' is float32\[4\], but the model was trained on rows of float32\[4\]",
        ),
        (X.astype(complex), "predict: 'inputs' is complex128"),
        ({"x": X}, r"predict: the training data has no 'x', only \['inputs', 'labels'\]"),
        (X[:, :3], "model: .*it failed at|model: its arguments do not fit the data"),
        (X[:0], "data: the data set is empty"),
    ],
    ids=["one row", "dtype", "name", "width", "empty"],
)
def test_what_does_not_fit_is_one_line(fitted, x, text):
    with pytest.raises(UsageError, match=text):
        fitted.predict(x)


@pytest.mark.parametrize(
    ("values", "dtype"), [(np.uint16([[300]]), np.uint8), (np.int32([[200]]), np.int8)]
)
def test_integers_that_would_wrap_around_do_not_fit(values, dtype):
    assert (
        fitting({"inputs": np.ones_like(values)}, {"inputs": ((1, 1), dtype)})["inputs"].dtype
        == dtype
    )
    with pytest.raises(UsageError, match="but the model was trained on"):
        fitting({"inputs": values}, {"inputs": ((1, 1), dtype)})


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_floats_beyond_those_of_training_do_not_fit(fitted):
    with pytest.raises(UsageError, match=r"predict: 'inputs' is float64"):
        fitted.predict(X.astype(np.float64) * 1e300)
    np.testing.assert_array_equal(fitted.predict(X.astype(np.float64)), fitted.predict(X))


@pytest.mark.parametrize("batch_size", [0, 2.5, None, "8"])
def test_a_batch_size_that_is_none_is_one_line(fitted, batch_size):
    with pytest.raises(
        UsageError, match=f"predict: batch_size {batch_size!r} is not an integer of at least 1"
    ):
        fitted.predict(X, batch_size=batch_size)


class Cell(nnx.Module):
    """A state for each example, added to its inputs."""

    def __init__(self, rngs: nnx.Rngs):
        self.last, self.out = Carry(jax.numpy.zeros(4)), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        self.last[...] = jax.lax.stop_gradient(x + self.last[...])
        return self.out(self.last[...])


@pytest.mark.slow
@pytest.mark.slow
def test_a_stream_end_within_a_call_is_read_to_its_end():
    def rows():
        return ((X[i], Y[i]) for i in range(64))

    digests = set()
    for several in (1, 4, 8):
        more = {
            "steps_per_call": several,
            "batch_size": 10,
            "steps": 8,
            "eval": {},
            "parallel": {"devices": 1},
        }
        final = jaxdp.fit(Net, Stream(rows), **more).final
        digests.add((final["step"], final["params_sha256"]))
    assert len(digests) == 1 and digests.pop()[0] == 6


@pytest.mark.slow
def test_a_changed_evaluation_is_made_again(tmp_path, capsys):
    more = {"optimizer": {"target": "adam", "lr": 0.1, "ema": 0.9}, "run_dir": tmp_path}
    first, ema = fit(**more), {"eval": {"every": 2, "ema": True}}
    second = fit(**more, **ema)
    assert second.final["loss"] == first.evaluate(ema=True)["loss"] != first.final["loss"]
    assert second.final["params_sha256"] == first.final["params_sha256"]
    assert (
        second.history["eval"]["step"] == [2, 4, 6]
        and "nothing to do" not in capsys.readouterr().out
    )
    assert fit(**more, **ema).final == second.final and "nothing to do" in capsys.readouterr().out


class Events:
    """A source of `count` examples from `start` on."""

    count = 64

    def __new__(cls, start=0):
        return ((X[i], Y[i]) for i in range(start, cls.count))


@pytest.mark.slow
def test_a_run_of_an_ended_stream_is_returned_again(tmp_path, capsys, monkeypatch):
    more = {
        "batch_size": 10,
        "steps": 9,
        "eval": {"every": 3},
        "parallel": {"devices": 1},
        "run_dir": tmp_path,
    }
    more |= {"optimizer": {"schedule": "constant"}, "eval_data": (X, Y)}
    first = jaxdp.fit(Net, Stream(Events), **more)
    assert first.history["eval"]["step"] == [3, 6]
    lines = (tmp_path / "metrics.jsonl").read_text()
    again = jaxdp.fit(Net, Stream(Events), **more)
    assert again.final == first.final and (tmp_path / "metrics.jsonl").read_text() == lines
    assert (
        "at its last step 6 (data: the stream ends after 64 examples); nothing to do"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(Events, "count", 75)
    longer = jaxdp.fit(Net, Stream(Events), **more)
    assert longer.final["step"] == 7 and longer.history["eval"]["step"] == [3, 6, 7]


@pytest.mark.slow
def test_predictions_of_a_language_model_are_logits(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    data = {"target": "TextFile", "args": {"path": str(tmp_path / "text.txt"), "length": 8}}
    model = {"target": "GPT", "args": {"layers": 1, "heads": 2, "dim": 16}}
    one = jaxdp.fit(model, data, loss="CausalLM", steps=2, batch_size=8, parallel={"devices": 1})
    x = np.arange(24, dtype=np.int32).reshape(3, 8)
    got = one.predict(x)
    assert isinstance(got, np.ndarray) and got.shape == (3, 8, 256)
    np.testing.assert_allclose(got, one.model(jax.numpy.asarray(x)).compute(), atol=1e-5)


def test_carried_state_starts_at_zero_for_every_row():
    fitted = fit(Cell, steps=2, precision={"compute": "bfloat16"})
    kernel, bias = fitted.params["out"]["kernel"], fitted.params["out"]["bias"]
    np.testing.assert_allclose(fitted.predict(X, batch_size=7), X @ kernel + bias, atol=0.05)
    np.testing.assert_allclose(fitted.model(X[0]), X[0] @ kernel + bias, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with three checkpoints, of which an earlier one may be the best."""
    return fit(
        optimizer={"target": "adamw", "lr": 0.05, "ema": 0.9},
        checkpoint={"every": 2, "best": "accuracy"},
        run_dir=tmp_path_factory.mktemp("saved") / "run",
    )


OBJECTS = {"model": Net, "data": (X, Y), "eval_data": (X[:50], Y[:50])}


@pytest.mark.parametrize("ema", [False, True])
def test_a_run_that_is_loaded_is_what_fit_returned(saved, ema):
    loaded = jaxdp.load(saved.run_dir, **OBJECTS)
    assert loaded.final["step"] == 6 and loaded.final["loss"] == saved.final["loss"]
    np.testing.assert_array_equal(loaded.predict(X, ema=ema), saved.predict(X, ema=ema))
    # On other devices, so but for rounding.
    assert loaded.evaluate(ema=ema) == pytest.approx(saved.evaluate(ema=ema), rel=1e-6)
    for one, other in zip(*map(jax.tree.leaves, (loaded.model_state, saved.model_state))):
        np.testing.assert_array_equal(one, other)


def test_the_best_and_any_step_are_loaded(saved):
    accuracy = {
        step: jaxdp.load(saved.run_dir, step, **OBJECTS).final["accuracy"] for step in (2, 4, 6)
    }
    best = jaxdp.load(saved.run_dir, "best", **OBJECTS)
    assert best.final["accuracy"] == max(accuracy.values()) == saved.best.final["accuracy"]
    assert best.final["step"] == max(accuracy, key=lambda step: (accuracy[step], -step))
    assert best.evaluate()["accuracy"] == best.final["accuracy"]


def test_what_cannot_be_loaded_is_said(saved, fitted, tmp_path):
    class Other(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.last = nnx.Linear(8, 3, rngs=rngs)

    for objects, step, said in (
        (OBJECTS, 3, r"step: 3 is not in '.*'; use one of 2, 4, 6, last, best"),
        (
            {},
            "last",
            r"data.target: 'tuple \(object\)' cannot be imported|model.target: .* an object",
        ),
        ({**OBJECTS, "model": Other}, "last", "model.target: .*Other.*, but the run has .*Net"),
    ):
        with pytest.raises(UsageError, match=said):
            jaxdp.load(saved.run_dir, step, **objects)
    with pytest.raises(UsageError, match="no such directory"):
        jaxdp.load(tmp_path / "none")
    with pytest.raises(UsageError, match=r"step: best, but no checkpoint in .*checkpoint.best"):
        jaxdp.load(fitted.run_dir, "best", **OBJECTS)
