"""docs/finetune.md: ONNX Runtime (by jax2onnx) and lm-eval run exported models.

They are not among the requirements of the tests: jax2onnx is made for another Orbax, lm-eval needs
PyTorch."""

import json
import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxdp import fit
from launch import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TEXT = {"target": "PythonSource", "args": {"length": 24, "max_mb": 1}}
GPT = {"layers": 2, "heads": 2, "dim": 16}
MODELS = {
    "MLP": ({"hidden": [8]}, "Digits"),
    "CNN": ({}, "Digits"),
    "ResNet9": ({}, "Digits"),
    "LSTM": ({"dim": 8, "hidden": 8}, TEXT),
    "GPT": (GPT, TEXT),
    "GPT of Llama's form": (
        {**GPT, "norm": "rms", "mlp": "swiglu", "positions": "rotary", "bias": False},
        TEXT,
    ),
}
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def trained(name, folder):
    """Train a model for two updates; return (inputs -> its outputs, inputs of an example)."""
    sys.path.append(str(ROOT / "examples"))
    from export_stablehlo import make_forward, read

    args, data = MODELS[name]
    fit(
        {"target": name.partition(" ")[0], "args": args}, data, "CausalLM" if data is TEXT else "SoftmaxCrossEntropy",
        run_dir=folder, batch_size=4, steps=2, microbatches=1, parallel={"devices": 1}, compilation_cache=None,
    )  # fmt: skip
    meta, arrays = read(folder)
    forward, names, example = make_forward(meta, arrays)
    return lambda inputs: np.asarray(
        jax.jit(forward)([arrays[name] for name in names], inputs)
    ), example


@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_has_the_outputs_of_the_model(name, tmp_path):
    """For any number of examples."""
    pytest.importorskip("jax2onnx", reason="see docs/finetune.md")
    onnxruntime = pytest.importorskip("onnxruntime")
    forward, example = trained(name, tmp_path)
    command = [sys.executable, ROOT / "examples" / "export_onnx.py", tmp_path]
    subprocess.run([*map(str, command)], check=True, timeout=300, env=ENV, capture_output=True)
    session = onnxruntime.InferenceSession(tmp_path / "forward.onnx")
    for count in (1, 5):
        inputs = (
            np.random.default_rng(count)
            .integers(16, size=(count, *example.shape[1:]))
            .astype(example.dtype)
        )
        (outputs,) = session.run(None, {session.get_inputs()[0].name: inputs})
        want = forward(inputs)
        assert outputs.shape == want.shape and want.std() > 0.01
        np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-5)


def test_lm_eval_scores_an_exported_model(tmp_path):
    """Its perplexity is that of the model's own outputs."""
    pytest.importorskip("lm_eval", reason="pip install 'lm-eval[hf]'")
    forward, _ = trained("GPT", tmp_path)
    pairs = [("def f", "(x):"), ("import", " sys"), ("return", " self")]
    lines = [json.dumps({"context": context, "last": last}) for context, last in pairs]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(lines))
    task = {
        "task": "lines", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{last}}",
        "target_delimiter": "", "metric_list": [{"metric": "perplexity"}],
    }  # fmt: skip
    (tmp_path / "lines.yaml").write_text(json.dumps(task))
    jaxdp = [
        sys.executable,
        "-m",
        "jaxdp",
        "export",
        "--run_dir",
        str(tmp_path),
        "--layout",
        "huggingface",
    ]
    subprocess.run(jaxdp, check=True, timeout=300, env=ENV)
    model = f"pretrained={tmp_path}/huggingface,dtype=float32,prefix_token_id=10"
    command = [
        "lm_eval",
        "--model",
        "hf",
        "--model_args",
        model,
        "--tasks",
        "lines",
        "--include_path",
        tmp_path,
    ]
    options = ["--device", "cpu", "--output_path", tmp_path / "scores.json"]
    subprocess.run(
        [sys.executable, "-m", *map(str, command + options)], check=True, timeout=300, env=ENV
    )
    (scores,) = tmp_path.glob("scores*.json")
    scored = json.loads(scores.read_text())["results"]["lines"]["perplexity,none"]
    total = 0.0
    for context, last in pairs:
        tokens = np.frombuffer((context + last).encode(), np.uint8)
        inputs = np.zeros((1, 24), np.int32)
        inputs[0, : len(tokens)] = tokens
        logs = jax.nn.log_softmax(forward(inputs)[0])
        total += sum(float(logs[i - 1, tokens[i]]) for i in range(len(context), len(tokens)))
    assert math.log(scored) == pytest.approx(-total / len(pairs), rel=1e-5)
