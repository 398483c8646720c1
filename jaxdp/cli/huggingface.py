"""`jaxdp export --format huggingface`: a folder that `transformers` loads, with the config and the tokenizer."""

import inspect
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdp.checkpoint import published, safetensors
from jaxdp.errors import UsageError
from jaxdp.models import MODELS
from jaxdp.models.gpt import EPSILON, GPT, MLPS
from jaxdp.targets import locate

Json = dict[str, Any]
FORMS = {  # (norm, mlp, positions) -> layout
    ("layer", "gelu", "learned"): "gpt2",
    ("rms", "swiglu", "rotary"): "llama",
}


def write(folder: pathlib.Path, arrays: Mapping[str, np.ndarray], meta: Json) -> str:
    """Write model.safetensors, config.json and the tokenizer; return a line about them.

    Raises UsageError for a model without a published layout, or a folder that cannot be written.
    """
    data, model = meta.get("data") or {}, meta["config"]["model"]
    args = settings(model, data)
    form = tuple(args[name] for name in ("norm", "mlp", "positions"))
    if form not in FORMS:
        raise UsageError(
            f"--format: GPT of {', '.join(form)} (norm, mlp, positions) has no published layout; {known_forms()}"
        )
    layout = published.LAYOUTS[FORMS[form]]
    try:
        tensors = published.to_published(layout, arrays, args["num_classes"], layout.prefix)
    except ValueError as error:
        raise UsageError(f"--format: huggingface does not fit this GPT: {error}; {known_forms()}") from None
    dtype = str(next(iter(tensors.values())).dtype)
    content = CONFIGS[FORMS[form]](args) | {"dtype": dtype, "torch_dtype": dtype}
    try:
        folder.mkdir(exist_ok=True)
        safetensors.write(folder / "model.safetensors", tensors, {"format": "pt"})  # as transformers requires
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        tokenizer = write_tokenizer(folder, data.get("tokenizer") or {})
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"--output: {str(folder)!r} cannot be written ({error}); choose another") from None
    return f"{layout.title}'s layout, {len(tensors)} tensors; {tokenizer}"


def settings(model: Json, data: Json) -> Json:
    """Return all arguments of the model. Raises UsageError if it is not `GPT`."""
    if locate("model", model["target"], MODELS) is not GPT:
        raise UsageError(f"--format: {model['target']!r} has no published layout; {known_forms()}")
    defaults = {name: parameter.default for name, parameter in inspect.signature(GPT).parameters.items()}
    facts = {name: data.get(name) for name in ("num_classes", "input_shape")}
    return {**defaults, **facts, **(model.get("args") or {})}


def known_forms() -> str:
    forms = [f"{', '.join(form)} ({published.LAYOUTS[name].title})" for form, name in FORMS.items()]
    return f"huggingface is for a GPT of norm, mlp, positions {' or '.join(forms)}; use another --format"


def hidden(args: Json) -> int:
    return args["hidden"] or MLPS[args["mlp"]].hidden(args["dim"])


def gpt2_config(args: Json) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": args["num_classes"],
        "n_positions": args["input_shape"][0],
        "n_embd": args["dim"],
        "n_layer": args["layers"],
        "n_head": args["heads"],
        "n_inner": hidden(args),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": EPSILON,
        "tie_word_embeddings": args["tied"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop"), args["dropout"]),
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def llama_config(args: Json) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args["num_classes"],
        "max_position_embeddings": args["input_shape"][0],
        "hidden_size": args["dim"],
        "intermediate_size": hidden(args),
        "num_hidden_layers": args["layers"],
        "num_attention_heads": args["heads"],
        "num_key_value_heads": args["kv_heads"] or args["heads"],
        "head_dim": args["dim"] // args["heads"],
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": args["rotary_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": args["rotary_base"]},
        "attention_bias": args["bias"],
        "mlp_bias": args["bias"],
        "tie_word_embeddings": args["tied"],
        "bos_token_id": None,
        "eos_token_id": None,
    }


CONFIGS = {"gpt2": gpt2_config, "llama": llama_config}


def write_tokenizer(folder: pathlib.Path, spec: Json) -> str:
    """Write tokenizer.json, if the spec of `jaxdp.data.tokenizers` can be one; return what was done."""
    file, kind = folder / "tokenizer.json", spec.get("kind")
    if kind == "file":
        if not pathlib.Path(spec["path"]).is_file():
            return f"no tokenizer: {spec['path']} is not here; copy it to {file}"
        shutil.copyfile(spec["path"], file)
    elif kind == "byte":
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        file.write_text(bpe({char: i for i, char in enumerate(byte_characters())}, level, level))
    elif kind == "char":
        file.write_text(bpe({char: i for i, char in enumerate(spec["alphabet"])}, None, {"type": "Fuse"}))
    elif kind == "named":
        return f"no tokenizer: tiktoken's {spec['name']} has no tokenizer.json; take that of its model on the hub"
    else:
        return "no tokenizer"
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    return f"tokenizer: {kind}"


def bpe(vocabulary: dict[str, int], pre_tokenizer: Json | None, decoder: Json) -> str:
    """Return a tokenizer.json with one token for each character."""
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    parts = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None}
    return json.dumps({**parts, "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model})


def byte_characters() -> str:
    """Return the character that stands for each byte in GPT-2's byte-level vocabulary (`bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(i if i in printable else next(others)) for i in range(256))
