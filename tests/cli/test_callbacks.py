"""Callbacks are called at known points, on every rank; early stopping is one of them."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import jaxdp
import toys
from jaxdp.errors import RunFailed, UsageError
from jaxdp.process.context import Context
from jaxdp.run.callbacks import Callbacks, EarlyStopping, StopTraining, make_callbacks
from jaxdp.train.observer import Observers
from launch import launched

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = {
    "steps": 6,
    "batch_size": 20,
    "microbatches": 4,
    "parallel": {"devices": 1},
    "log": {"every": 2},
    "compilation_cache": None,
}


class Recorder:
    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(("start", run.checkpoints.last or 0))

    def on_update(self, step, metrics):
        self.calls.append(("update", step, float(metrics["loss"])))

    def on_eval(self, step, metrics):
        self.calls.append(("eval", step, metrics["accuracy"]))

    def on_save(self, step, path):
        self.calls.append(("save", step, path.name))

    def on_end(self, record):
        self.calls.append(("end", record["step"], record["params_sha256"]))


class Atfer(jaxdp.Observer):
    def atfer(self, updates, state, metrics):
        pass

    def measure(self):
        pass


class Wants(jaxdp.Observer):
    def __init__(self, words, step=7):
        self.words, self.step = words, step

    def wants(self, step):
        return self.words if step == self.step else ()


def observed(callbacks):
    return Observers(callbacks.observers)


def fit(*callbacks, **config):
    data = toys.data(60)
    data = (data["inputs"], data["labels"])
    model = {"target": "MLP", "args": {"num_classes": 10, "hidden": [8]}}
    more = {"eval_data": data, **CONFIG, **config}
    return jaxdp.fit(model, data, callbacks=callbacks, **more)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_each_point_is_called_in_order(steps_per_call, tmp_path):
    recorder, other = Recorder(), Recorder()
    done = fit(
        recorder,
        other,
        eval={"every": 3},
        checkpoint={"every": 4},
        steps_per_call=steps_per_call,
        run_dir=tmp_path,
    )
    names = [call[:2] for call in recorder.calls]
    assert names == [
        ("start", 0), *(("update", i) for i in (1, 2, 3)), ("eval", 3), ("update", 4), ("save", 4), ("update", 5),
        ("update", 6), ("save", 6), ("eval", 6), ("end", 6),
    ]  # fmt: skip
    assert recorder.calls == other.calls
    assert recorder.calls[-1][2] == done.final["params_sha256"]
    assert recorder.calls[-2][2] == done.final["accuracy"]
    losses = [call[2] for call in recorder.calls if call[0] == "update"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [record["loss"] for record in records if record["split"] == "train"]
    np.testing.assert_allclose(losses[1::2], logged, rtol=1e-5)


class Watching(jaxdp.Observer):
    """Has the methods of an observer; it wants an evaluation after update 5."""

    def __init__(self):
        self.calls = []

    def start(self, run, progress):
        self.calls.append(("start", progress.step))

    def before(self, updates, batch):
        self.calls.append(("before", updates[0]))

    def after(self, updates, state, metrics):
        self.calls.append(("after", updates[-1]))

    def wants(self, step):
        return ("evaluate",) if step == 5 else ()

    def evaluated(self, step, record):
        self.calls.append(("evaluated", step))

    def saved(self, step, path):
        self.calls.append(("saved", int(path.name)))

    def finished(self, record):
        self.calls.append(("finished", record["step"]))

    def end(self, step):
        self.calls.append(("end", step))


def test_a_callback_may_be_an_observer(tmp_path, capsys):
    watching = Watching()
    fit(watching, eval={"every": 3}, checkpoint={"every": 4}, run_dir=tmp_path)
    updates = {i: [("before", i), ("after", i)] for i in range(1, 7)}
    assert watching.calls == [
        ("start", 0), *updates[1], *updates[2], *updates[3], ("evaluated", 3), *updates[4], ("saved", 4),
        *updates[5], ("evaluated", 5), *updates[6], ("end", 6), ("saved", 6), ("evaluated", 6), ("finished", 6),
    ]  # fmt: skip
    assert "the new name" not in capsys.readouterr().out
    lines = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert "Watching" in next(line for line in lines if line["kind"] == "start")["observers"]


def test_the_old_names_are_reported_once(capsys):
    fit(Failing(7), Counting())
    out = capsys.readouterr().out
    assert out.count("callbacks: on_update still works") == 1
    assert "the new name is after(updates, state, metrics)\n" in out


def test_stop_training_is_found_in_its_old_module():
    from jaxdp.training.callbacks import EarlyStopping as early
    from jaxdp.training.callbacks import StopTraining as stop

    assert (early, stop) == (EarlyStopping, StopTraining) and jaxdp.StopTraining is StopTraining


class Failing:
    def __init__(self, step):
        self.step = step

    def on_update(self, step, metrics):
        if step == self.step:
            raise ValueError(f"no {step}")


def test_an_error_names_its_callback():
    with pytest.raises(
        RunFailed,
        match=r"callbacks: .*Failing\.on_update failed at .*_callbacks.py:\d+ \(in on_update: .*\): ValueError: no 1",
    ):
        fit(Failing(1))


@pytest.mark.slow
@pytest.mark.mpi
def test_an_error_in_on_end_of_one_rank_ends_all_ranks(tmp_path):
    (tmp_path / "ending.py").write_text(
        "import jaxdp\n\n\nclass Failing:\n    def on_end(self, record):\n"
        "        assert jaxdp.current().rank == 0, 'no room'\n"
    )
    words = [
        "train",
        "--config",
        str(ROOT / "configs/digits.yaml"),
        "--steps",
        "1",
        "--run_dir",
        "run",
    ]
    words = ["launch", "-n", "2", *words, "--callbacks", "[{target: ending.Failing}]"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", *words],
        cwd=tmp_path,
        env=env,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert (
        "ends: rank 1" in done.stderr
        and "ending.Failing.on_end failed at ending.py:" in done.stderr
        and "AssertionError: no room" in done.stderr
    )


class StopsIn(jaxdp.Observer):
    """End training after `step`."""

    def __init__(self, step):
        self.step = step

    def wants(self, step):
        if step == self.step:
            raise StopTraining(f"it is update {step}")
        return ()


def test_a_callback_ends_a_run_at_a_saved_update(tmp_path):
    config = {"eval": {"every": 4}, "checkpoint": {"every": 4}, "run_dir": tmp_path}
    done = fit(StopsIn(8), steps=12, **config)
    assert done.final["step"] == 8 and done.final["stopped"] == "it is update 8"


@pytest.mark.parametrize("evaluates", [True, False])
def test_a_callback_ends_a_run_after_any_update(evaluates, tmp_path, capsys):
    config = {"steps": 12, "eval": {"every": 4}, "checkpoint": {"every": 3}, "run_dir": tmp_path}
    if not evaluates:
        config["eval_data"] = None
    done = fit(StopsIn(5), **config)
    assert done.final["step"] == 5 and done.final["stopped"] == "it is update 5"
    assert ("accuracy" in done.final) == evaluates
    assert "training ends after update 5 of 12: it is update 5" in capsys.readouterr().out
    again = fit(StopsIn(5), **config)
    assert again.final["params_sha256"] == done.final["params_sha256"]
    assert "nothing to do" in capsys.readouterr().out
    assert fit(**config).final["step"] == 12  # without the callback it goes on


def test_all_processes_end_at_the_update_of_the_page(tmp_path):
    page = (ROOT / "docs" / "callbacks.md").read_text()
    (tmp_path / "low.py").write_text(page.split("# low.py\n")[1].split("```")[0])
    words = ["--config", ROOT / "configs" / "digits.yaml", "--steps", "200", "--epochs", "null"]
    words += ["--callbacks", "[{target: low.LossBelow, args: {threshold: 1.0}}]"]
    words += ["--log.every", "1", "--run_dir", tmp_path / "run"]
    done = subprocess.run(
        **launched(tmp_path, "-n", 2, "train", *words), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(x["step"] for x in records if x["split"] == "train" and x["loss"] < 1.0)
    assert records[-1]["step"] == first + 8
    assert records[-1]["stopped"].startswith(f"the loss of update {first} is 0.")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pmap", "pjit"])
def test_one_rank_of_two_ends_training(backend, tmp_path):
    """The other rank is asked: nothing but the observer of rank 1 knows that training is to end."""
    (tmp_path / "alone.py").write_text(
        "import jaxdp\n\n\nclass Alone(jaxdp.Observer):\n    def wants(self, step):\n"
        "        if step == 5 and jaxdp.current().rank == 1:\n"
        "            raise jaxdp.StopTraining('rank 1 has seen enough')\n        return ()\n"
    )
    words = ["--config", ROOT / "configs" / "digits.yaml", "--steps", "2000", "--epochs", "null"]
    words += ["--callbacks", "[alone.Alone]", "--parallel.backend", backend]
    words += ["--run_dir", tmp_path / "run"]
    done = subprocess.run(
        **launched(tmp_path, "-n", 2, "train", *words), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["split"] == "final" and 5 <= records[-1]["step"] < 2000
    assert records[-1]["stopped"] == "rank 1 has seen enough"


def test_stop_training_raised_in_on_update_is_an_error():
    class Stopping:
        def on_update(self, step, metrics):
            raise StopTraining("enough")

    with pytest.raises(RunFailed, match=r"Stopping\.on_update failed at .*: StopTraining: enough"):
        observed(Callbacks([Stopping()])).after(range(1, 2), None, {})


def test_a_callback_stops_a_run_that_resumes(tmp_path):
    (tmp_path / "limits.py").write_text(
        "import jaxdp\n\n\nclass Limit(jaxdp.Observer):\n    def wants(self, step):\n"
        "        return {'stop'} if step == 7 else ()\n"
    )
    words = ["--config", str(ROOT / "configs" / "digits.yaml"), "--steps", "12", "--epochs", "null"]
    command = [sys.executable, str(ROOT / "train.py"), *words, "--run_dir", "run"]
    codes = {}
    for part, more in {"stopped": ["--callbacks", "[limits.Limit]"], "resumed": []}.items():
        done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)
        codes[part] = done.returncode
    assert codes == {"stopped": 75, "resumed": 0}
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == 12
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "a callback on rank 0" in events


@pytest.mark.parametrize("words", ["save", {"sav"}, None, 3])
def test_a_wrong_wish_names_its_callback(words):
    (callback,) = Callbacks([Wants(words)]).observers
    assert callback.wants(1) == ()
    with pytest.raises(
        RunFailed, match=r"callbacks: .*Wants\.wants failed.*: ValueError: it returned"
    ):
        callback.wants(7)


@pytest.mark.slow
def test_a_start_after_an_early_stop_does_nothing(tmp_path, capsys):
    stopping = EarlyStopping("accuracy", patience=2, min_delta=10.0)  # nothing improves by so much
    done = fit(stopping, steps=40, eval={"every": 2}, log={"every": 4}, run_dir=tmp_path)
    assert (
        done.final["step"] == 6
        and done.final["stopped"] == "accuracy has not improved since step 2"
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["split"] == "train"] == [
        4
    ]  # 6 is not due
    again = fit(
        EarlyStopping("accuracy", 2, min_delta=10.0), steps=40, eval={"every": 2}, run_dir=tmp_path
    )
    assert again.final["params_sha256"] == done.final["params_sha256"]
    assert "accuracy has not improved since step 2" in capsys.readouterr().out
    longer = fit(steps=40, eval={"every": 2}, run_dir=tmp_path)  # without the callback it resumes
    assert longer.final["step"] == 40


@pytest.mark.slow
def test_a_resumed_run_stops_where_a_full_one_does(tmp_path):
    """The callback's state is that of the checkpoint, also where the evaluation came after it was
    written.
    """
    stopping = [EarlyStopping("accuracy", patience=3, min_delta=10.0) for _ in range(2)]
    config = {"steps": 40, "eval": {"every": 2}, "checkpoint": {"every": 4}, "run_dir": tmp_path}
    with pytest.raises(RunFailed, match="no 5"):
        fit(stopping[0], Failing(5), **config)
    done = fit(stopping[1], Failing(41), **config)
    assert done.final["step"] == 8 and stopping[1].best_step == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [None, 2], ids=["saved at the stop", "saved before the evaluation"]
)
def test_an_early_stop_survives_a_lost_final_record(every, tmp_path, monkeypatch):
    config = {
        "steps": 40,
        "eval": {"every": 2},
        "checkpoint": {"every": every},
        "run_dir": tmp_path,
    }

    def stopping():
        return EarlyStopping("accuracy", patience=2, min_delta=10.0)

    with monkeypatch.context() as patched:
        patched.setattr("jaxdp.run.driver.params_sha256", lambda params: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(stopping(), **config)
    done = fit(stopping(), **config)
    assert (
        done.final["step"] == 6
        and done.final["stopped"] == "accuracy has not improved since step 2"
    )
    assert done.final["accuracy"] == done.history["eval"]["accuracy"][-1] and done.history["eval"][
        "step"
    ] == [2, 4, 6]
    assert fit(**config).final["step"] == 40


class Counting:
    """Returns its own state, which changes in place."""

    def __init__(self, **state):
        self.seen = state

    def on_update(self, step, metrics):
        self.seen["updates"] = step

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = dict(state)


def test_a_checkpoint_has_the_state_of_its_own_update():
    """It is written while later updates run."""
    callback = Counting(updates=0)
    callbacks = Callbacks([callback])
    state = callbacks.state()
    observed(callbacks).after(range(1, 2), None, {})
    assert callback.seen == {"updates": 1}
    callbacks.load(state)
    assert callback.seen == {"updates": 0}


def made(*entries):
    """Build callbacks from entries of a config or objects of a script."""
    named = [
        entry if isinstance(entry, dict) else f"{type(entry).__name__} {i}"
        for i, entry in enumerate(entries)
    ]
    return make_callbacks(
        named, {name: x for name, x in zip(named, entries) if name is not x}, Context()
    )


STOPPING = {"target": "EarlyStopping", "args": {"metric": "accuracy"}}


@pytest.mark.parametrize(
    ("before", "after", "restored", "lost"),
    [
        (
            [STOPPING],
            [{**STOPPING, "args": {"metric": "loss"}}],
            [],
            "EarlyStopping {'metric': 'accuracy'",
        ),
        ([EarlyStopping("loss")], [EarlyStopping("error")], [], "EarlyStopping {'metric': 'loss'"),
        ([Counting(x=1)], [EarlyStopping()], [], "Counting {}"),
        (
            [EarlyStopping("loss"), Counting(x=1), Failing(1)],
            [Counting()],
            [0],
            "EarlyStopping {'metric': 'loss'",
        ),
        ([STOPPING, Counting(x=1)], [Counting(), STOPPING], [0, 1], ""),
        ([EarlyStopping("loss", patience=2)], [EarlyStopping("loss", patience=5)], [0], ""),
        ([Counting(x=1), Counting(x=2)], [Counting(), Counting()], [0, 1], ""),
    ],
)
def test_a_state_is_restored_to_the_same_callback_only(before, after, restored, lost, capsys):
    before, after = made(*before), made(*after)
    for callback in before.callbacks:
        if isinstance(callback, EarlyStopping):
            callback.waited = 1
    after.load(json.loads(json.dumps(before.state())))
    states = [getattr(x, "seen", None) or getattr(x, "waited", 0) for x in after.callbacks]
    assert [i for i, state in enumerate(states) if state] == restored
    assert states[:2] != [{"x": 2}, {"x": 1}]
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(lost) and lost in printed
    assert not lost or "is not restored: no such callback loads it" in printed


def test_states_of_older_versions_restore_by_position():
    new, state = [Failing(1), EarlyStopping("accuracy")], {"best": 0.5, "best_step": 2, "waited": 1}
    made(*new).load({"callbacks": [None, state]})
    assert new[1].state_dict() == state
    fewer = EarlyStopping("accuracy")
    made(fewer).load({"callbacks": [None, state]})
    assert fewer.waited == 0


@pytest.mark.parametrize(
    "state", [{"seen": {1, 2}}, {"best": np.float32(1)}], ids=["set", "scalar"]
)
def test_a_state_that_is_not_json_is_refused_at_once(state):
    with pytest.raises(
        UsageError,
        match=r"callbacks: .*Counting\.state_dict failed: TypeError: .*; return numbers, te",
    ):
        fit(Failing(1), Counting(**state))


def test_a_state_that_an_update_makes_no_json_is_named():
    class Growing(Counting):
        def on_update(self, step, metrics):
            self.seen["loss"] = metrics["loss"]

    with pytest.raises(
        UsageError, match=r"Growing\.state_dict failed: .* is not JSON serializable; return numbers"
    ):
        fit(Growing(), Failing(2))


def test_early_stopping_follows_the_better_direction():
    smaller, larger = EarlyStopping("loss", 1), EarlyStopping("accuracy", 1)
    smaller.evaluated(1, {"loss": 2.0})
    smaller.evaluated(2, {"loss": 1.0})
    larger.evaluated(1, {"accuracy": 0.1})
    larger.evaluated(2, {"accuracy": 0.2})
    assert [
        EarlyStopping(name).sign for name in ("valid/loss", "cross_entropy", "top1_accuracy")
    ] == [-1, -1, 1]
    for callback, metrics in ((smaller, {"loss": 1.5}), (larger, {"accuracy": 0.1})):
        with pytest.raises(StopTraining, match="since step 2"):
            callback.evaluated(3, metrics)
    with pytest.raises(
        RunFailed,
        match=r"EarlyStopping\.evaluated failed: KeyError: .*'lost' is not among \['loss'\]",
    ):
        observed(Callbacks([EarlyStopping("lost", mode="min")])).evaluated(1, {"loss": 1.0})


class Misspelled:
    def on_update(self, step, metrics): ...

    def on_evaluate(self, step, metrics): ...


class TooFew:
    on_time = True  # not a method

    def on_eval(self, metrics): ...


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("EarlyStoping", "did you mean 'EarlyStopping'"),
        ({"target": "EarlyStopping", "args": {"patienc": 3}}, "patienc"),
        ({"name": "EarlyStopping"}, "is not a callback; give a name such as EarlyStopping"),
        (
            {"target": "EarlyStopping", "args": {"mode": "minimum"}},
            "args.mode: 'minimum' is not min, max or null",
        ),
        (
            {"target": "EarlyStopping", "args": {"patience": 0}},
            "args.patience: 0 is too small; it must be at least 1",
        ),
        ("collections.OrderedDict", "has none of the methods start"),
        (
            Misspelled(),
            "has a method 'on_evaluate', which is never called; did you mean 'evaluated'",
        ),
        (TooFew(), r"on_eval is called with \(step, metrics\), but too many positional arguments"),
        (object(), "has none of the methods start"),
        (jaxdp.Observer(), "has none of the methods start"),
        (Atfer(), "has a method 'atfer', which is never called; did you mean 'after'"),
    ],
)
def test_a_wrong_callback_is_one_line(entry, words):
    scripted = {} if isinstance(entry, (str, dict)) else {"an object": entry}
    with pytest.raises(UsageError, match=words) as error:
        make_callbacks([entry] if not scripted else ["an object"], scripted, Context())
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_command_takes_callbacks(tmp_path):
    callbacks = "[{target: EarlyStopping, args: {metric: accuracy, patience: 1, min_delta: 2}}]"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "jaxdp",
                "train",
                "--config",
                "configs/digits.yaml",
                "--run_dir",
                str(tmp_path),
            ),
            *("--epochs", "null", "--steps", "50", "--eval.every", "5", "--callbacks", callbacks),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    final = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["step"] == 10 and final["stopped"] == "accuracy has not improved since step 5"


def test_evaluating_a_run_makes_none_of_its_callbacks(tmp_path):
    """Of the commands, `train` alone makes and calls them."""
    config = (
        "steps: 2\nlog: {every: 1}\ncallbacks: [{target: nowhere.Callback}]\nmodel: {target: MLP}\n"
    )
    (tmp_path / "config.yaml").write_text(config + "data: {target: Digits}\n")
    from jaxdp.cli import load
    from jaxdp.run.build import make_run

    make_run(load(["--config", str(tmp_path / "config.yaml")])[0], tmp_path, Context())
