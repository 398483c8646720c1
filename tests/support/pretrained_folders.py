"""Synthetic folders of Hugging Face: four families, with all keys of config.json that differ between
published models drawn by a seed, and random weights in one file or several."""

import json
import shutil
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

FAMILIES = ("gpt2", "llama", "mistral", "qwen2")
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
LENGTH = 12  # of the examples
VOCABULARY = 17  # of the smallest folder
OF_ROTARY = {
    "hidden_act": ["gelu", "relu"],
    "rope_scaling": [
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"type": "default", "full_attention": {"rope_theta": 10.0}},
    ],
    "rope_parameters": [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
            "rope_theta": 10_000.0,
        },
    ],
    "head_dim": [10],
    "num_local_experts": [8],
    "qk_norm": [True],
}
ODD = {  # values that no GPT computes, or keys that are not known
    "gpt2": {
        "activation_function": ["gelu", "relu", "silu"],
        "scale_attn_weights": [False],
        "scale_attn_by_inverse_layer_idx": [True],
        "add_cross_attention": [True],
        "n_positions": [LENGTH - 1],
        "architectures": [["GPT2DoubleHeadsModel"]],
        "num_experts": [4],
    },
    "llama": {**OF_ROTARY, "partial_rotary_factor": [0.5], "attention_multiplier": [0.5]},
    "mistral": {**OF_ROTARY, "sliding_window": [1, 4, LENGTH - 1]},
    "qwen2": {**OF_ROTARY, "sliding_window": [4], "use_mrope": [True]},
}


class Made(NamedTuple):
    """A folder. refused: the key of config.json by which it must be refused; None: it is loaded."""

    family: str
    refused: str | None


def make(folder, seed, vocabulary=None):
    """Write the folder of a seed. vocabulary: its size; None: one that is drawn."""
    draw = np.random.default_rng(seed)

    def one_of(*values):
        return values[draw.integers(len(values))]

    family = FAMILIES[seed % 4]
    config = {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    refused = None
    kv_heads = one_of(1, 2)
    heads = kv_heads * one_of(1, 2)
    width = one_of(4, 6, 8)
    sizes = {
        "layers": one_of(1, 2, 3),
        "dim": heads * width,
        "kv_dim": kv_heads * width,
        "hidden": one_of(20, 24),
        "vocabulary": vocabulary or int(draw.integers(VOCABULARY, 60)),
        "positions": int(draw.integers(LENGTH, 30)),
    }
    optional = {  # keys that a file may leave out
        "initializer_range": 0.02,
        "use_cache": one_of(True, False),
        "torch_dtype": one_of("float32", "bfloat16"),
        "transformers_version": one_of("4.31.0", "5.24.0"),
        "bos_token_id": 1,
        "eos_token_id": one_of(2, [2, 3]),
        "vocab_size": sizes["vocabulary"],
    }
    if family == "gpt2":
        config |= {"n_embd": sizes["dim"], "n_layer": sizes["layers"], "n_head": heads}
        config |= {"n_positions": sizes["positions"], "vocab_size": sizes["vocabulary"]}
        config["n_inner"] = one_of(None, sizes["hidden"])
        sizes["hidden"] = config["n_inner"] or 4 * sizes["dim"]
        optional |= {
            "activation_function": one_of("gelu_new", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": one_of(1e-5, 1e-3),
            "resid_pdrop": 0.1,
            "embd_pdrop": one_of(0.0, 0.1),
            "attn_pdrop": 0.1,
            "n_ctx": sizes["positions"],
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": one_of(True, False),
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        }
    else:
        config |= {"hidden_size": sizes["dim"], "intermediate_size": sizes["hidden"]}
        config |= {"num_hidden_layers": sizes["layers"], "num_attention_heads": heads}
        config |= {"vocab_size": sizes["vocabulary"]}
        if family != "llama" or kv_heads < heads or one_of(True, False):
            config["num_key_value_heads"] = kv_heads
        base = one_of(100.0, 10_000.0, 500_000.0, 1_000_000)
        config |= one_of(
            {},
            {"rope_theta": base},
            {"rope_theta": base, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": base}},
            {"rope_theta": 3.0, "rope_parameters": {"rope_theta": base}},
            {"rope_theta": base, "rope_scaling": {"type": "default"}},
            {"rope_scaling": {"rope_type": "default", "rope_theta": base}, "rope_parameters": None},
        )
        optional |= {
            "hidden_act": one_of("silu", "swish"),
            "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
            "head_dim": one_of(width, width if family == "qwen2" else None),
            "max_position_embeddings": one_of(8, 2048),
            "attention_dropout": one_of(0.0, 0.1),
            "pretraining_tp": 1,
        }
        if family == "llama":
            optional |= {"rope_interleaved": False}
            config |= {"attention_bias": one_of(True, False), "mlp_bias": one_of(True, False)}
        if family == "mistral":
            config |= one_of({}, {"sliding_window": None}, {"sliding_window": LENGTH})
        if family == "qwen2":
            config |= one_of(
                {},
                {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0},
                {"sliding_window": LENGTH, "use_sliding_window": True, "max_window_layers": 0},
                {"layer_types": ["full_attention"] * sizes["layers"]},
            )
    tied = one_of(True, False, None)
    if tied is not None:
        config["tie_word_embeddings"] = tied
    config |= {name: value for name, value in optional.items() if one_of(True, True, False)}
    if draw.random() < 0.4:
        refused = one_of(*ODD[family])
        config[refused] = one_of(*ODD[family][refused])
        if (family, refused) == ("qwen2", "sliding_window"):
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    is_tied = (family == "gpt2") if tied is None else tied
    tensors = of_gpt2 if family == "gpt2" else of_llama
    write(folder, config, tensors(config, sizes, is_tied, draw), draw)
    return Made(family, refused)


def write(folder, config, tensors, draw):
    """Write config.json, and the tensors into one file, or with an index into several."""
    shutil.rmtree(folder, ignore_errors=True)  # of another seed
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    dtype = [np.float32, np.float16, ml_dtypes.bfloat16][draw.integers(3)]
    tensors = {name: x.astype(dtype) for name, x in tensors.items()}
    parts = int(draw.integers(1, 4))
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = [*tensors]
    where = {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = {name: tensors[name] for name in names[i::parts]}
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def of_gpt2(config, sizes, tied, draw):
    dim, hidden = sizes["dim"], sizes["hidden"]
    prefix = ["", "transformer."][draw.integers(2)]
    shapes = {"wte.weight": (sizes["vocabulary"], dim), "wpe.weight": (config["n_positions"], dim)}
    for i in range(sizes["layers"]):
        shapes |= {
            f"h.{i}.ln_1.weight": (dim,), f"h.{i}.ln_1.bias": (dim,),
            f"h.{i}.attn.c_attn.weight": (dim, 3 * dim), f"h.{i}.attn.c_attn.bias": (3 * dim,),
            f"h.{i}.attn.c_proj.weight": (dim, dim), f"h.{i}.attn.c_proj.bias": (dim,),
            f"h.{i}.ln_2.weight": (dim,), f"h.{i}.ln_2.bias": (dim,),
            f"h.{i}.mlp.c_fc.weight": (dim, hidden), f"h.{i}.mlp.c_fc.bias": (hidden,),
            f"h.{i}.mlp.c_proj.weight": (hidden, dim), f"h.{i}.mlp.c_proj.bias": (dim,),
        }  # fmt: skip
    shapes |= {"ln_f.weight": (dim,), "ln_f.bias": (dim,)}
    tensors = {f"{prefix}{name}": values(name, shape, draw) for name, shape in shapes.items()}
    return tensors | head(tensors[f"{prefix}wte.weight"], tied, draw)


def of_llama(config, sizes, tied, draw):
    dim, hidden, kv_dim = sizes["dim"], sizes["hidden"], sizes["kv_dim"]
    of_attention = config["model_type"] == "qwen2" or config.get("attention_bias")
    of_output, of_mlp = config.get("attention_bias"), config.get("mlp_bias")
    shapes = {"embed_tokens.weight": (sizes["vocabulary"], dim), "norm.weight": (dim,)}
    for i in range(sizes["layers"]):
        for name, shape, biased in (
            ("self_attn.q_proj", (dim, dim), of_attention),
            ("self_attn.k_proj", (kv_dim, dim), of_attention),
            ("self_attn.v_proj", (kv_dim, dim), of_attention),
            ("self_attn.o_proj", (dim, dim), of_output),
            ("mlp.gate_proj", (hidden, dim), of_mlp),
            ("mlp.up_proj", (hidden, dim), of_mlp),
            ("mlp.down_proj", (dim, hidden), of_mlp),
        ):
            shapes[f"layers.{i}.{name}.weight"] = shape
            if biased:
                shapes[f"layers.{i}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (dim,)
    tensors = {f"model.{name}": values(name, shape, draw) for name, shape in shapes.items()}
    return tensors | head(tensors["model.embed_tokens.weight"], tied, draw)


def head(embedding, tied, draw):
    """Return the head of an untied model; a file of a tied one may repeat the embedding, or not."""
    if not tied:
        return {"lm_head.weight": values("lm_head", embedding.shape, draw)}
    return {"lm_head.weight": embedding.copy()} if draw.integers(2) else {}


def values(name, shape, draw):
    """Return random numbers of a size that keeps activations and logits near 1."""
    if len(shape) == 1:
        return draw.normal(size=shape) * 0.2 + ("norm.weight" in name or "ln_" in name)
    fan_in = shape[0] if "c_" in name else shape[1]
    return draw.normal(size=shape) / np.sqrt(fan_in)
