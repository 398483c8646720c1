"""Data that has changed since a run was trained or evaluated, and evaluation data that is not
finite.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from cli_runs import ended, records, write
from jaxdp.checkpoint import manifest
from jaxdp.data.dataset import Arrays, probes
from jaxdp.errors import RunFailed, UsageError
from jaxdp.run.callbacks import EarlyStopping

CONFIG = """
model: {{target: MLP, args: {{hidden: [8]}}}}
data: {{target: Npz, args: {{path: {0}/train.npz, test_fraction: 0}}}}
eval: {{every: 10, data: {{target: Npz, args: {{path: {0}/eval.npz, test_fraction: 0, split: train}}}}}}
steps: 30
batch_size: 32
microbatches: 2
optimizer: {{lr: 1.0e-2}}
parallel: {{devices: 1}}
compilation_cache: null
"""
CHANGED = "eval.data: the examples have changed since step 30 was evaluated"


def made(size, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 8)).astype(np.float32)
    return {"inputs": x, "labels": (x.sum(1) > 0).astype(np.int32)}


@pytest.fixture
def files(tmp_path):
    """Return the arguments of a run on two files, and the arrays of the files."""
    sets = {"train": made(450, 0), "eval": made(200, 1)}
    for name, arrays in sets.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)
    arguments = [
        "--config",
        write(tmp_path, CONFIG.format(tmp_path)),
        "--run_dir",
        tmp_path / "run",
    ]
    return [*map(str, arguments)], sets


def between_probes(arrays):
    """Return the examples that a fingerprint of 64 does not read."""
    return np.setdiff1d(np.arange(len(arrays["labels"])), probes(Arrays(**arrays)))


def test_changed_data_is_evaluated_but_not_trained_on(files, tmp_path):
    arguments, sets = files
    ended("train", *arguments)
    before = records(tmp_path / "run", "final")[0]
    sets["eval"]["labels"][between_probes(sets["eval"])] ^= 1
    np.savez(tmp_path / "eval.npz", **sets["eval"])
    evaluated = ended("eval", *arguments).stdout
    assert CHANGED in evaluated and "accuracy" in evaluated
    again = ended("train", *arguments).stdout
    assert CHANGED in again and "nothing to do" not in again
    (after,) = records(tmp_path / "run", "final")
    assert (
        after["accuracy"] < 0.5 < before["accuracy"]
        and after["params_sha256"] == before["params_sha256"]
    )
    done = ended("train", *arguments).stdout
    assert "nothing to do" in done and CHANGED not in done and "compared only in part" not in done
    sets["train"]["labels"][between_probes(sets["train"])] ^= 1
    np.savez(tmp_path / "train.npz", **sets["train"])
    assert "data fingerprint: " in ended("train", *arguments, code=2).stderr


@pytest.mark.slow
def test_an_older_versions_checkpoint_compares_in_part(files, tmp_path, monkeypatch):
    arguments, sets = files
    names, save = ("data_contents", "eval_contents"), manifest.write

    def without(meta):
        return {name: value for name, value in meta.items() if name not in names}

    with monkeypatch.context() as patched:
        patched.setattr(
            manifest, "write", lambda folder, files, meta: save(folder, files, without(meta))
        )
        ended("train", *arguments)
    words = "compared only in part with the data of step 30: data (64 examples, since it was saved "
    words += "by an earlier version)"
    done = ended("train", *arguments).stdout
    assert f"{words}, eval.data (none of it)" in done and "nothing to do" in done
    sets["train"]["labels"][0] ^= 1
    np.savez(tmp_path / "train.npz", **sets["train"])
    assert "data fingerprint: " in ended("train", *arguments, code=2).stderr


WRONG = "inputs not finite in rows 17, 150 (counted from 0); correct them, or set their mask to 0"


@pytest.mark.slow
def test_nonfinite_evaluation_data_is_named(files, tmp_path):
    """The state is saved, from which a run on corrected data resumes, with the evaluation that
    failed.
    """
    arguments, sets = files
    sound = sets["eval"]["inputs"].copy()
    sets["eval"]["inputs"][[17, 150], 3] = np.nan
    np.savez(tmp_path / "eval.npz", **sets["eval"])
    words = f"evaluation after update 10: the loss of the evaluation data is nan: {WRONG}; step 10 is saved"
    assert words in ended("train", *arguments, code=1).stderr
    assert records(tmp_path / "run")[-1]["loss"] == "nan"
    assert words in (tmp_path / "run/events.jsonl").read_text().splitlines()[-1]
    np.savez(tmp_path / "eval.npz", **sets["eval"] | {"inputs": sound})
    done = ended("train", *arguments).stdout
    assert "resumes after step 10" in done and "eval.data: the examples have changed" in done
    assert [r["step"] for r in records(tmp_path / "run", "eval")] == [10, 20]


@pytest.mark.slow
def test_a_nonfinite_evaluation_fails_again_unchanged(files, tmp_path):
    arguments, sets = files
    sound = sets["eval"]["inputs"].copy()
    sets["eval"]["inputs"][[17, 150], 3] = -np.inf
    np.savez(tmp_path / "eval.npz", **sets["eval"])
    for verb in ("train", "train", "eval"):
        assert WRONG in ended(verb, *arguments, code=1).stderr
    np.savez(tmp_path / "eval.npz", **sets["eval"] | {"inputs": sound})
    for name in ("run", "other"):
        ended("train", *arguments, "--run_dir", str(tmp_path / name))
    ours, other = (records(tmp_path / name, "final")[0] for name in ("run", "other"))
    assert ours["params_sha256"] == other["params_sha256"] and ours["loss"] == other["loss"]


def overflowing(outputs, batch):
    """The loss of an example whose label is 1 is infinite in evaluation, which has larger inputs."""
    values = jnp.where(outputs[:, 0] ** 2 < 1e30, outputs[:, 0] ** 2, jnp.inf)
    return (
        jnp.sum(values * batch["mask"]),
        jnp.sum(batch["mask"]),
        {"size": jnp.sum(jnp.sqrt(values) * batch["mask"])},
    )


@pytest.mark.parametrize("best", [None, pytest.param("size", marks=pytest.mark.slow)])
def test_an_overflowing_evaluation_fails_at_the_end(tmp_path, capsys, best):
    """Early stopping counts it as no improvement, and says so."""
    train, held_out = made(64, 0), made(64, 1)
    held_out["inputs"][5] = 1e30
    model = {"target": "MLP", "args": {"hidden": [8], "num_classes": 2}}
    settings = {
        "steps": 8,
        "batch_size": 32,
        "microbatches": 2,
        "eval": {"every": 2},
        "parallel": {"devices": 1},
    }

    def run():
        return jaxdp.fit(
            model, train, eval_data=held_out, loss=overflowing, callbacks=[EarlyStopping(patience=2)], run_dir=tmp_path,
            checkpoint={"best": best, "mode": best and "min"}, compilation_cache=None, **settings,
        )  # fmt: skip

    reason = "loss was never finite (it is inf at step 4)"
    for _ in range(1 + bool(best)):
        with pytest.raises(
            RunFailed,
            match=r"the last evaluation, after update 4, has no finite loss .*never finite",
        ):
            run()
    said = capsys.readouterr().out
    assert (
        said.count(
            "warning: evaluation after update 2: the loss of the evaluation data is inf: its examples are f"
        )
        == 1
    )
    assert said.count(f"training ends after update 4 of 8: {reason}") == 1
    assert said.count(
        "checkpoint.best: size is inf after update 2, which is never the best"
    ) == bool(best)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["reason"] for e in events if e["kind"] == "stopped_early"] == [reason]
    assert events[-1]["kind"] == "failed" and [r["split"] for r in records(tmp_path)] == [
        "eval",
        "eval",
    ]


def stopped_at(values, **settings):
    """Return the evaluation after which training is stopped, and the reason."""
    stopping = EarlyStopping(**settings)
    for step, value in enumerate(values, 1):
        try:
            stopping.evaluated(step, {} if value is None else {stopping.metric: value})
        except Exception as stop:
            return step, str(stop)
    return None


def test_early_stopping_says_what_was_not_finite():
    nan, inf = np.nan, np.inf
    assert stopped_at([1.0, nan, 0.5, nan, nan], patience=2) == (
        5,
        "loss has not improved since step 3 (it is nan at step 5)",
    )
    assert stopped_at([nan], patience=1) == (1, "loss was never finite (it is nan at step 1)")
    assert stopped_at([inf, 3.0, 3.0], metric="size", mode="min", patience=1) == (
        1,
        "size was never finite (it is inf at step 1)",
    )
    assert stopped_at([-inf, 3.0, 3.0, 3.0], patience=2) == (
        4,
        "loss has not improved since step 2",
    )
    assert stopped_at([1.0, None, None], metric="size", mode="max", patience=2)[0] == 3
    assert (
        stopped_at([1.0, 1.5, 1.9, 2.1], metric="size", mode="max", patience=3, min_delta=1.0)
        is None
    )
    assert "'size' is not among" in stopped_at([None], metric="size", mode="max")[1]
    for wrong in (-1.0, nan, inf):
        with pytest.raises(
            UsageError, match=r"callbacks.args.min_delta: .* is not a finite number of at least 0"
        ):
            EarlyStopping(min_delta=wrong)
