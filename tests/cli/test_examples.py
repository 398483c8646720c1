"""The examples of docs/callbacks.md, small, on one device."""

import base64
import importlib.util
import io
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from cli_runs import DIGITS, jaxdp, records
from jaxdp.checkpoint.weights import from_checkpoint, on_host
from jaxdp.report.read import read_run
from launch import ROOT

EXAMPLES = {"PYTHONPATH": f"{ROOT}/examples:{ROOT}"}
GPT = [
    "--data.args.max_mb",
    "0.2",
    "--data.args.length",
    "16",
    "--model.args.layers",
    "2",
    "--model.args.dim",
    "16",
]


def arrays(run_dir):
    (last,) = sorted(
        pathlib.Path(run_dir, "checkpoints").glob("[0-9]*"), key=lambda x: int(x.name)
    )[-1:]
    return on_host(from_checkpoint(last, False))


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_accuracy_of_a_class_is_that_of_its_examples(capsys):
    callbacks = module("callbacks")
    logits = jnp.eye(3)[jnp.array([0, 1, 1, 2, 0])]
    batch = {"labels": jnp.array([0, 1, 2, 2, 1]), "mask": jnp.array([1.0, 1, 1, 1, 0])}
    loss, weight, metrics = callbacks.PerClass()(logits, batch)
    assert weight == 4 and metrics["accuracy"] == 3 and np.isfinite(loss)
    pairs = {name: tuple(map(float, pair)) for name, pair in metrics.items() if "/" in name}
    assert pairs == {"accuracy/0": (1, 1), "accuracy/1": (1, 1), "accuracy/2": (1, 2)}
    callbacks.WorstClasses(1).evaluated(7, {"accuracy": 0.75, "accuracy/0": 1.0, "accuracy/2": 0.5})
    assert capsys.readouterr().out == "step 7: accuracy/2 0.500\n"


@pytest.mark.slow
def test_each_evaluation_prints_the_worst_classes(tmp_path):
    argv = [
        "--steps",
        "4",
        "--eval.every",
        "2",
        "--loss.target",
        "callbacks.PerClass",
        "--run_dir",
        tmp_path / "run",
    ]
    done = jaxdp(*DIGITS, *argv, "--callbacks", "[callbacks.WorstClasses]", env=EXAMPLES)
    assert re.findall(r"^step (\d): accuracy/\d 0\.\d+, accuracy/", done.stdout, re.MULTILINE) == [
        "2",
        "4",
    ]
    final = records(tmp_path / "run", "final")[0]
    assert len([name for name in final if name.startswith("accuracy/")]) == 10


@pytest.mark.slow
def test_text_is_sampled_at_each_evaluation(tmp_path):
    callbacks = "[{target: callbacks.TextSamples, args: {prompt: 'def ', tokens: 5}}]"
    argv = [
        "--steps",
        "4",
        "--eval.every",
        "2",
        "--checkpoint.every",
        "2",
        "--log.every",
        "2",
        "--callbacks",
        callbacks,
    ]
    config = ROOT / "configs" / "python_gpt.yaml"
    done = jaxdp("--config", config, *GPT, *argv, "--run_dir", tmp_path / "run", env=EXAMPLES)
    texts = re.findall(r"step (\d): (['\"])def (.*)\2$", done.stdout, re.MULTILINE)
    assert [step for step, _, _ in texts] == ["2", "4"] and all(text for _, _, text in texts)
    shown = read_run(tmp_path / "run")["media"]["items"]
    assert [(x["step"], x["name"], x["text"][:4]) for x in shown] == [
        (2, "sample", "def "),
        (4, "sample", "def "),
    ]


@pytest.mark.slow
def test_the_report_has_histograms_of_parameters(tmp_path):
    argv = [
        "--steps",
        "4",
        "--eval.every",
        "2",
        "--checkpoint.every",
        "2",
        "--run_dir",
        tmp_path / "run",
    ]
    jaxdp(
        *DIGITS,
        *argv,
        "--callbacks",
        "[{target: callbacks.Histograms, args: {bins: 5}}]",
        env=EXAMPLES,
    )
    shown, last = read_run(tmp_path / "run")["histograms"], arrays(tmp_path / "run")
    assert shown.keys() == last.keys() and {
        tuple(h["step"] for h in x) for x in shown.values()
    } == {(2, 4)}
    for name, array in last.items():
        counts, edges = np.histogram(array, 5)
        assert shown[name][-1]["counts"] == counts.tolist() and shown[name][-1]["low"] == edges[0]


@pytest.mark.slow
def test_pictures_are_in_the_report(tmp_path):
    argv = ["--steps", "2", "--eval.every", "1", "--run_dir", tmp_path / "run"]
    jaxdp(
        *DIGITS,
        *argv,
        "--callbacks",
        "[{target: callbacks.Pictures, args: {count: 3}}]",
        env=EXAMPLES,
    )
    shown = read_run(tmp_path / "run")["media"]["items"]
    assert [(x["step"], x["name"]) for x in shown] == [(1, "inputs"), (2, "inputs")]
    png = base64.b64decode(shown[0]["image"].removeprefix("data:image/png;base64,"))
    with PIL.Image.open(io.BytesIO(png)) as image:
        assert image.size == (24, 8) and image.getextrema() == (0, 255)
    assert shown[0]["image"] in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_lora_trains_its_matrices_alone(tmp_path):
    """From a run of GPT, whose weights stay as they are; the first loss is that of the source."""
    config, base = ROOT / "configs" / "python_gpt.yaml", tmp_path / "base"
    argv = [
        *GPT,
        "--steps",
        "6",
        "--log.every",
        "1",
        "--eval.every",
        "6",
        "--optimizer.warmup_steps",
        "0",
    ]
    jaxdp("--config", config, *argv, "--run_dir", base)
    lora = [
        "--model",
        "{target: lora.LoRAGPT, args: {rank: 2, layers: 2, heads: 4, dim: 16, bias: false}}",
    ]
    frozen = [
        "--init_from",
        base,
        "--init.skip",
        "[lora_]",
        "--optimizer.frozen",
        "['^(?!.*lora_)']",
        "--data.args.max_mb",
        "0.2",
    ]
    argv = [
        *lora,
        *frozen,
        "--data.args.length",
        "16",
        "--optimizer.lr",
        "0.05",
        *argv[len(GPT) :],
        "--steps",
        "30",
    ]
    done = jaxdp("--config", config, *argv, "--run_dir", tmp_path / "lora", env=EXAMPLES)
    before, after = arrays(base), arrays(tmp_path / "lora")
    assert f"loaded {len(before)} of {len(after)} parameters" in done.stdout
    added = after.keys() - before.keys()
    assert len(added) == 8 and all(
        re.search(r"attention/(query|value)/lora_[ab]$", name) for name in added
    )
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
    assert all(after[name].any() for name in added)
    first, last = (
        [records(run, split)[0]["loss"] for run in (tmp_path / "lora", base)]
        for split in ("train", "final")
    )
    assert first[0] < first[1] and last[0] < last[1] - 0.005


@pytest.mark.slow
def test_optuna_finds_a_rate(capsys):
    pytest.importorskip("optuna")
    study = module("optuna_search").study
    assert (
        len(study.trials) == 8
        and study.best_value > 0.8
        and 1e-4 <= study.best_params["lr"] <= 1e-1
    )
    assert "accuracy" in capsys.readouterr().out
