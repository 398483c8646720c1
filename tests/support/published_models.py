"""GPT-2 and Llama in plain NumPy, by the published names and the config.json of a folder; nothing
of jaxdp.
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
        name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()
    }
    return {"gpt2": gpt2, "llama": llama}[config["model_type"]](weights, config, tokens)


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
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return x * w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    def linear(x, name):
        return x @ w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    assert config["activation_function"] == "gelu_new"
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: tokens.shape[1]]
    for i in range(config["n_layer"]):
        parts = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, -1)
        heads = [part.reshape(*part.shape[:2], config["n_head"], -1) for part in parts]
        x = x + linear(attention(*heads), f"h.{i}.attn.c_proj")
        up = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        assert up.shape[-1] == config["n_inner"]
        up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + linear(up, f"h.{i}.mlp.c_proj")
    head = w["transformer.wte.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
    assert head.shape == (config["vocab_size"], config["n_embd"])
    return norm(x, "ln_f") @ head.T


def llama(w, config, tokens):
    def norm(x, name):
        return (
            x
            / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])
            * w[f"model.{name}.weight"]
        )

    def linear(x, name, bias=False):
        assert (f"model.{name}.bias" in w) == bias
        return x @ w[f"model.{name}.weight"].T + w.get(f"model.{name}.bias", 0.0)

    width = config["head_dim"]
    angles = np.outer(
        np.arange(tokens.shape[1]), config["rope_theta"] ** (-np.arange(0, width, 2) / width)
    )
    turn = np.exp(1j * angles)[:, None]

    def rotated(x):
        first, second = np.split(x, 2, -1)
        pairs = (first + 1j * second) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer, bias = f"layers.{i}", config["attention_bias"]
        y = norm(x, f"{layer}.input_layernorm")
        query, key, value = (
            linear(y, f"{layer}.self_attn.{name}_proj", bias).reshape(*y.shape[:2], -1, width)
            for name in "qkv"
        )
        assert (query.shape[2], key.shape[2]) == (
            config["num_attention_heads"],
            config["num_key_value_heads"],
        )
        mixed = attention(rotated(query), rotated(key), value)
        x = x + linear(mixed, f"{layer}.self_attn.o_proj", bias)
        y, bias = norm(x, f"{layer}.post_attention_layernorm"), config["mlp_bias"]
        gate, up = (linear(y, f"{layer}.mlp.{name}_proj", bias) for name in ("gate", "up"))
        assert up.shape[-1] == config["intermediate_size"]
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj", bias)
    head = w["model.embed_tokens.weight"] if config["tie_word_embeddings"] else w["lm_head.weight"]
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
