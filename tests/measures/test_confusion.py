"""The confusion matrix of a run: every example of its evaluation once, on any devices, in the report."""

import dataclasses
import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from browser import CHROMIUM, Browser
from cli_runs import ended
from jaxdp.data import Digits
from jaxdp.errors import UsageError
from jaxdp.measures.confusion import Counts, confusion
from jaxdp.report import html
from jaxdp.report.read import read_run

SETTINGS = {"steps": 20, "batch_size": 50, "microbatches": 8, "precision.compute": "float32"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose last batch of the evaluation has padding."""
    directory = tmp_path_factory.mktemp("confusion") / "run"
    argv = ["--model", "{target: MLP, args: {hidden: [16]}}", "--data.target", "Digits"]
    argv += ["--eval.also", "{train: {target: Digits, args: {split: train}}}"]
    argv += ["--checkpoint.best", "accuracy"]  # a metric of the run's own loss
    for key, value in SETTINGS.items():
        argv += [f"--{key}", str(value)]
    ended("train", *argv, "--run_dir", directory)
    return directory


def expected(directory):
    """Counted by NumPy, from the outputs of one device."""
    test = Digits("test")
    examples = test.read(np.arange(len(test)))
    outputs = jaxdp.load(directory).predict(examples["inputs"])
    counts = np.zeros((10, 10), int)
    np.add.at(counts, (examples["labels"], outputs.argmax(-1)), 1)
    return counts


def test_the_command_counts_each_example_once_on_any_devices(run):
    counts = expected(run)
    assert counts.sum() == len(Digits("test")) and 0 < counts.trace() < counts.sum()
    printed = []
    for devices in (1, 4):
        (run / "confusion.json").unlink(missing_ok=True)
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        argv = [sys.executable, "-m", "jaxdp", "confusion", "--run_dir", run]
        printed.append(
            subprocess.check_output(argv, text=True, env=os.environ | flags, timeout=300)
        )
        found = json.loads((run / "confusion.json").read_text())
        assert found == {"step": 20, "names": [*"0123456789"], "counts": counts.tolist()}
    assert printed[0] == printed[1]
    head, *rows, last = printed[0].splitlines()
    assert head.split() == [*"0123456789"] and last == f"{counts.trace()} of {counts.sum()} right"
    assert [[int(x) for x in row.split()[1:]] for row in rows] == counts.tolist()
    page = html.render([read_run(run)])
    assert json.dumps(counts.tolist(), separators=(",", ":")) in page


def test_the_run_is_left_as_it_was(run):
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    fitted = jaxdp.load(run)
    np.testing.assert_array_equal(confusion(fitted), expected(run))
    assert fitted.config.loss.target == "SoftmaxCrossEntropy"
    assert before == {file: file.read_bytes() for file in run.iterdir() if file.is_file()}


def test_masked_examples_do_not_count_and_tokens_do():
    logits = jnp.eye(3)[jnp.array([[0, 1], [2, 2]])]
    labels, mask = jnp.array([[0, 0], [2, -100]]), jnp.array([[1.0, 1.0], [1.0, 0.0]])
    loss, weight, sums = Counts()(logits, {"labels": labels, "mask": mask})
    assert loss == weight == 3
    np.testing.assert_array_equal(sums["sums:confusion"], [[1, 1, 0], [0, 0, 0], [0, 0, 1]])


def model(outputs):
    return {"target": "MLP", "args": {"hidden": [4], "num_classes": outputs}}


def test_a_regression_has_no_classes(tmp_path):
    rows = {"inputs": np.ones((32, 3), np.float32), "labels": np.ones((32, 1), np.float32)}
    settings = {"steps": 1, "batch_size": 8, "run_dir": tmp_path / "run"}
    fitted = jaxdp.fit(model(1), rows, "MeanSquaredError", eval_data=rows, **settings)
    with pytest.raises(UsageError, match=r"is of classes, .* as of a regression"):
        confusion(fitted)


def test_outputs_that_are_not_finite_are_refused(tmp_path):
    """In the evaluation data alone, so that the run ends."""
    rows = {"inputs": np.ones((32, 3), np.float32), "labels": np.arange(32, dtype=np.int32) % 2}
    settings = {"steps": 1, "batch_size": 8, "run_dir": tmp_path / "run"}
    fitted = jaxdp.fit(model(2), rows, eval_data=rows, **settings)
    huge = {**rows, "inputs": np.full((32, 3), np.nan, np.float32)}
    objects = {**fitted.objects, "eval.data": dict.fromkeys(fitted.objects["eval.data"], huge)}
    with pytest.raises(UsageError, match="outputs are not finite, so they name no class"):
        confusion(dataclasses.replace(fitted, objects=objects))


def test_a_vocabulary_is_refused():
    """Its table would fill the memory."""
    batch = {"labels": jnp.zeros(2, int), "mask": jnp.ones(2)}
    with pytest.raises(UsageError, match="1,001 classes; a table has at most 1,000"):
        Counts()(jnp.zeros((2, 1001)), batch)


def test_a_run_without_evaluation_data_is_refused(tmp_path):
    rows = {"inputs": np.ones((32, 3), np.float32), "labels": np.ones(32, np.int32)}
    fitted = jaxdp.fit(model(2), rows, steps=1, batch_size=8, run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="the run has no evaluation data"):
        confusion(fitted)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_report_draws_it(tmp_path, classes):
    """A cell for each count but zero, with names and numbers."""
    names = [f"<b>{i}" for i in range(classes)]
    counts = (3 * np.eye(classes, dtype=int)).tolist()
    counts[0][1] = 1
    (tmp_path / "confusion.json").write_text(
        json.dumps({"step": 1200, "names": names, "counts": counts})
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.0}\n')
    html.write(tmp_path / "page.html", html.render([read_run(tmp_path)]))
    with Browser() as page:
        page.open(tmp_path / "page.html")
        assert page("document.querySelectorAll('#confusion g').length") == classes + 1
        assert page("document.querySelectorAll('#confusion g title')[1].textContent") == (
            "<b>0 as <b>1: 1 of 4"
        )
        text = page("document.getElementById('confusion').textContent")
        assert text.count("<b>1") >= 2 and "Step 1,200" in text and page.errors == []
