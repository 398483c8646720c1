"""GPT-2, Llama, Mistral and Qwen2 in plain NumPy, by the published names and the config.json of a
folder, with the defaults of `transformers`; nothing of jaxdp.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file


def logits(folder, tokens):
    """The logits of tokens [example, token], in float64."""
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: x.astype(np.float64)
        for file in folder.glob("*.safetensors")
        for name, x in load_file(file).items()
    }
    model = gpt2 if config["model_type"] == "gpt2" else llama
    return model(weights, config, tokens)


def attention(query, key, value):
    """Of [example, token, head, width], causal; keys and values are repeated for their groups of
    queries.
    """
    groups = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, groups, 2), np.repeat(value, groups, 2)
    scores = np.einsum("bqhw,bkhw->bhqk", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhw->bqhw", shares / shares.sum(-1, keepdims=True), value)
    return mixed.reshape(*mixed.shape[:2], -1)


def gpt2(w, config, tokens):
    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.get("layer_norm_epsilon", 1e-5))
        return x * w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    def linear(x, name):
        return x @ w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    assert config.get("activation_function", "gelu_new") in ("gelu_new", "gelu_pytorch_tanh")
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: tokens.shape[1]]
    for i in range(config["n_layer"]):
        parts = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, -1)
        heads = [part.reshape(*part.shape[:2], config.get("n_head", 12), -1) for part in parts]
        x = x + linear(attention(*heads), f"h.{i}.attn.c_proj")
        up = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        assert up.shape[-1] == (config.get("n_inner") or 4 * config["n_embd"])
        up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + linear(up, f"h.{i}.mlp.c_proj")
    tied = config.get("tie_word_embeddings", True)
    head = w["transformer.wte.weight"] if tied else w["lm_head.weight"]
    assert head.shape == (config["vocab_size"], config["n_embd"])
    return norm(x, "ln_f") @ head.T


def llama(w, config, tokens):
    def norm(x, name):
        return (
            x
            / np.sqrt((x * x).mean(-1, keepdims=True) + config.get("rms_norm_eps", 1e-6))
            * w[f"model.{name}.weight"]
        )

    def linear(x, name, bias=False):
        assert (f"model.{name}.bias" in w) == bias
        return x @ w[f"model.{name}.weight"].T + w.get(f"model.{name}.bias", 0.0)

    family = config["model_type"]
    heads = config.get("num_attention_heads", 32)
    width = config.get("head_dim") or config["hidden_size"] // heads
    missing = {"llama": heads, "mistral": 8, "qwen2": 32}[family]
    kv_heads = config.get("num_key_value_heads", missing) or heads
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    base = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    angles = np.outer(np.arange(tokens.shape[1]), base ** (-np.arange(0, width, 2) / width))
    turn = np.exp(1j * angles)[:, None]

    def rotated(x):
        first, second = np.split(x, 2, -1)
        pairs = (first + 1j * second) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        bias = family == "qwen2" or config.get("attention_bias", False)
        y = norm(x, f"{layer}.input_layernorm")
        query, key, value = (
            linear(y, f"{layer}.self_attn.{name}_proj", bias).reshape(*y.shape[:2], -1, width)
            for name in "qkv"
        )
        assert (query.shape[2], key.shape[2]) == (heads, kv_heads)
        mixed = attention(rotated(query), rotated(key), value)
        x = x + linear(mixed, f"{layer}.self_attn.o_proj", bias and family != "qwen2")
        y = norm(x, f"{layer}.post_attention_layernorm")
        bias = config.get("mlp_bias", False)
        gate, up = (linear(y, f"{layer}.mlp.{name}_proj", bias) for name in ("gate", "up"))
        assert up.shape[-1] == config["intermediate_size"]
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj", bias)
    tied = config.get("tie_word_embeddings", False)
    head = w["model.embed_tokens.weight"] if tied else w["lm_head.weight"]
    assert head.shape == (config["vocab_size"], config["hidden_size"])
    return norm(x, "norm") @ head.T


def with_transformers(script, *args):
    """Run a script by an interpreter that has transformers and torch; skip without one."""
    for python in (".venv-torch/bin/python", sys.executable):
        if (
            os.path.exists(python)
            and not subprocess.run([python, "-c", "import torch, transformers"]).returncode
        ):
            return subprocess.run([python, "-c", script, *map(str, args)], check=True, timeout=300)
    return pytest.skip("needs transformers and torch: pip install -e '.[transformers]'")
