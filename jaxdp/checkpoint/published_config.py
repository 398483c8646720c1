"""The config.json of published weights, compared with a `GPT`: what changes the outputs, and not
the shapes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxdp.checkpoint.published import FREQUENCIES, Layout
from jaxdp.checkpoint.safetensors import Array, rows
from jaxdp.models.gpt import GPT
from jaxdp.precision import kind

Json = Mapping[str, Any]


class Difference(NamedTuple):
    """A difference between the source's model and ours. name: the argument of our model, or the key
    of config.json.

    problem: names both values. fix: what makes them equal.
    """

    name: str
    problem: str
    fix: str


class Key(NamedTuple):
    """A key of config.json. default: what `transformers` takes if it is left out, as it leaves out
    its defaults.
    """

    name: str
    default: Any


GPT2_KEYS = {
    "heads": Key("n_head", 12),
    "epsilon": Key("layer_norm_epsilon", 1e-5),
    "tied": Key("tie_word_embeddings", True),
    "num_classes": Key("vocab_size", 50257),
}
LLAMA_KEYS = {
    "heads": Key("num_attention_heads", 32),
    "kv_heads": Key("num_key_value_heads", None),
    "epsilon": Key("rms_norm_eps", 1e-6),
    "tied": Key("tie_word_embeddings", False),
    "num_classes": Key("vocab_size", 32000),
}
MISTRAL_KEYS = {**LLAMA_KEYS, "kv_heads": Key("num_key_value_heads", 8)}
KEYS = {  # title of a layout -> model_type -> {argument of GPT: key of config.json}
    "GPT-2": {"gpt2": GPT2_KEYS},
    "Llama": {"llama": LLAMA_KEYS, "mistral": MISTRAL_KEYS},
}
FIXED: dict[
    str, dict[str, tuple[Any, ...]]
] = {  # values that a GPT computes; the first is the default
    "GPT-2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    "Llama": {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,)},
}


def arguments_of(model: GPT, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model that change its outputs and not the shapes. shapes: of its
    parameters by path.
    """
    (key, *_) = [x for name, x in shapes.items() if name.endswith("attention/key/kernel")]
    return {
        "heads": shapes["embed/embedding"].shape[-1] // model.width,
        "kv_heads": key.shape[-1] // model.width,
        "epsilon": model.norm.epsilon,
        "rotary_base": model.base,
        "tied": model.head is None,
        "num_classes": model.classes,
        "norm": "rms" if isinstance(model.norm, nnx.RMSNorm) else "layer",
        "width": model.width,
    }


def differences(
    layout: Layout, config: Json, ours: Mapping[str, Any], length: int, file: str
) -> Iterator[Difference]:
    """Yield the differences between a config.json and our arguments, from `arguments_of`.

    length: the number of tokens of our examples. file: the name of config.json in messages.
    """

    def unlike(key, value):
        return Difference(
            key, f"{file} has {key}: {value!r}, which GPT does not compute", "take other weights"
        )

    types = KEYS[layout.title]
    model_type = config.get("model_type")
    if str(model_type) not in types:
        problem = f"{file} has model_type: {model_type!r}, but GPT computes {' or '.join(types)}"
        yield Difference("model_type", problem, "take other weights")
    keys = types.get(str(model_type), next(iter(types.values())))
    heads = config.get(keys["heads"].name, keys["heads"].default)
    for name, key in keys.items():
        theirs = config.get(key.name, key.default)
        theirs = heads if name == "kv_heads" and theirs is None else theirs
        if theirs != ours[name]:
            yield argument(name, theirs, ours[name], f"{key.name}: {theirs!r} in {file}")
    for name, values in FIXED[layout.title].items():
        if (value := config.get(name, values[0])) not in values:
            yield unlike(name, value)
    if not layout.joined:
        yield from of_positions(config, ours, length, file)


def of_positions(
    config: Json, ours: Mapping[str, Any], length: int, file: str
) -> Iterator[Difference]:
    """Yield the differences in rotary positions, and in how far a token sees."""
    base = config.get("rope_theta", 10_000.0)
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        plain = isinstance(rope, Mapping) and rope.get("partial_rotary_factor", 1.0) == 1.0
        if not plain or rope.get("rope_type", rope.get("type", "default")) != "default":
            yield Difference(
                name,
                f"{file} has {name}: {rope!r}, which GPT does not compute",
                "take other weights",
            )
        elif "rope_theta" in rope:
            base = rope["rope_theta"]
    if base != ours["rotary_base"]:
        yield argument("rotary_base", base, ours["rotary_base"], f"rope_theta: {base!r} in {file}")
    window = config.get("sliding_window", 4096 if config.get("model_type") == "mistral" else None)
    if window is not None and (not isinstance(window, int) or window < length):
        problem = (
            f"{file} has sliding_window: {window!r}, but the examples have {length} tokens, and GPT "
            "attends to all"
        )
        yield Difference("sliding_window", problem, f"shorten the examples to {window}")


def of_tensors(
    layout: Layout,
    tensors: Mapping[str, Array],
    arrays: Mapping[str, Array],
    ours: Mapping[str, Any],
    source: str,
) -> Iterator[Difference]:
    """Yield the differences that the tensors themselves show. arrays: {our path: array}."""
    if layout.norm != ours["norm"]:
        yield argument(
            "norm", layout.norm, ours["norm"], f"{layout.norm!r} in {layout.title}'s layout"
        )
    embedding = arrays.get("embed/embedding")
    if embedding is not None:
        name = embedding.parts[0].tensor
        for number in tensors[name].shape[:1]:
            if number != ours["num_classes"]:
                yield argument(
                    "num_classes",
                    number,
                    ours["num_classes"],
                    f"{name!r} has {number} rows in {source}",
                )
    for name, tensor in tensors.items():
        if name.endswith(f".{FREQUENCIES}"):
            expected = ours["rotary_base"] ** (-np.arange(0, ours["width"], 2) / ours["width"])
            alike = tensor.shape == expected.shape and kind(tensor.dtype) == "float"
            if not alike or not np.allclose(
                np.concatenate([*rows(tensor.parts[0])]), expected, rtol=0.02
            ):
                problem = (
                    f"{name!r} in {source} is not that of heads: {ours['heads']} and "
                    f"rotary_base: {ours['rotary_base']}"
                )
                yield Difference(
                    "rotary_base", problem, "set both as in the config.json of the weights"
                )
            return


def argument(name: str, theirs: Any, ours: Any, place: str) -> Difference:
    """Return the difference of an argument of the model. place: says their value, and where it is."""
    return Difference(
        name, f"model.args.{name} is {ours!r}, but {place}", f"set model.args.{name} to {theirs!r}"
    )
