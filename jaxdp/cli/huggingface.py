"""`jaxdp export --layout huggingface`: a folder that `transformers` loads, with the config and the
tokenizer.
"""

import inspect
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdp.checkpoint import safetensors
from jaxdp.checkpoint.published import GPT2, LLAMA, to_published
from jaxdp.errors import UsageError
from jaxdp.models import MODELS
from jaxdp.models.gpt import GPT, default_hidden
from jaxdp.targets import locate

Json = dict[str, Any]
SETTINGS = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
FORMS = {
    ("layer", "gelu", "learned"): GPT2,
    ("rms", "swiglu", "rotary"): LLAMA,
}  # norm, mlp, positions


def write(folder: pathlib.Path, arrays: Mapping[str, np.ndarray], meta: Json) -> str:
    """Write model.safetensors, config.json and the tokenizer; return a line about them. meta: of
    the checkpoint.

    Raises UsageError for a model without a published layout; OSError or SafetensorError if it
    cannot write."""
    data = meta.get("data") or {}
    model = meta["config"]["model"]
    forms = " or ".join(f"{', '.join(form)} ({layout.title})" for form, layout in FORMS.items())
    use = f"huggingface is for a GPT of norm, mlp, positions {forms}; use the layout jaxdp"
    if locate("model", model["target"], MODELS) is not locate("model", "GPT", MODELS):
        raise UsageError(f"--layout: {model['target']!r} has no published layout; {use}")
    args = {
        name: parameter.default
        for name, parameter in inspect.signature(GPT.__init__).parameters.items()
    }
    args |= {name: data.get(name) for name in ("num_classes", "input_shape")} | (
        model.get("args") or {}
    )
    form = (args["norm"], args["mlp"], args["positions"])
    if form not in FORMS:
        raise UsageError(f"--layout: a GPT of {', '.join(form)} has no published layout; {use}")
    layout = FORMS[form]
    try:
        tensors = to_published(layout, arrays, args["num_classes"], layout.prefix)
    except ValueError as error:
        raise UsageError(f"--layout: huggingface does not fit this GPT: {error}; {use}") from None
    args["hidden"] = args["hidden"] or default_hidden(args["mlp"], args["dim"])
    dtype = str(next(iter(tensors.values())).dtype)
    content = {
        "vocab_size": args["num_classes"],
        "tie_word_embeddings": args["tied"],
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **(gpt2_config(args) if layout is GPT2 else llama_config(args)),
    }
    folder.mkdir(exist_ok=True)
    safetensors.write(
        folder / "model.safetensors", tensors, {"format": "pt"}
    )  # as transformers requires
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer = write_tokenizer(folder, data.get("tokenizer") or {})
    return f"{layout.title}'s layout, {len(tensors)} tensors; {tokenizer}"


def gpt2_config(args: Json) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_positions": args["input_shape"][0], "n_embd": args["dim"], "n_layer": args["layers"],
        "n_head": args["heads"], "n_inner": args["hidden"], "layer_norm_epsilon": args["epsilon"],
        "resid_pdrop": args["dropout"], "embd_pdrop": args["dropout"], "attn_pdrop": 0.0,
    }  # fmt: skip


def llama_config(args: Json) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "max_position_embeddings": args["input_shape"][0], "hidden_size": args["dim"],
        "intermediate_size": args["hidden"], "num_hidden_layers": args["layers"],
        "num_attention_heads": args["heads"], "num_key_value_heads": args["kv_heads"] or args["heads"],
        "head_dim": args["dim"] // args["heads"], "rms_norm_eps": args["epsilon"], "rope_theta": args["rotary_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": args["rotary_base"]},
        "attention_bias": args["bias"], "mlp_bias": args["bias"],
    }  # fmt: skip


def write_tokenizer(folder: pathlib.Path, spec: Json) -> str:
    """Write tokenizer.json, if the spec of `jaxdp.data.tokenizers` can be one; return what was
    done.
    """
    file = folder / "tokenizer.json"
    settings = folder / "tokenizer_config.json"
    kind = spec.get("kind")
    if kind == "file" and pathlib.Path(spec["path"]).is_file():
        shutil.copyfile(spec["path"], file)
    elif kind in ("byte", "char"):
        characters = byte_characters() if kind == "byte" else spec["alphabet"]
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        content: Json = {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "post_processor": None,
            "model": {
                "type": "BPE",
                "vocab": {c: i for i, c in enumerate(characters)},
                "merges": [],
            },
            "pre_tokenizer": level if kind == "byte" else None,
            "decoder": level if kind == "byte" else {"type": "Fuse"},
        }
        file.write_text(json.dumps(content), encoding="utf-8")
    else:
        if (
            settings.is_file()
            and settings.read_text(encoding="utf-8", errors="replace") == SETTINGS
        ):  # of an earlier export
            settings.unlink()
            file.unlink(missing_ok=True)
        source = spec.get("path") or spec.get("name") or kind
        return f"no tokenizer{f': {source} has no tokenizer.json here' if source else ''}"
    settings.write_text(SETTINGS, encoding="utf-8")
    return f"tokenizer: {kind}"


def byte_characters() -> str:
    """Return the character that stands for each byte in GPT-2's byte-level vocabulary
    (`bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(i if i in printable else next(others)) for i in range(256))
