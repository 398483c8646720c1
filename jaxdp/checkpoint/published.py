"""Conversion between published weights and the parameters of `GPT`: pure functions of names and
arrays.

A `Layout` is a table of names. GPT-2's is that of huggingface.co/openai-community/gpt2 (Radford et
al. 2019): kernels are [in, out], and query, key and value share one kernel [dim, 3 dim]. `GPT` has
no key bias: it shifts all scores of a query equally, which softmax cancels. Llama's is that of
`transformers` (`LlamaForCausalLM`): kernels are [out, in], and rotary embedding pairs dims i and i
+ width / 2, as `GPT` does. `lm_head.weight` repeats the embedding of a tied model.

The config.json of published weights is compared with a `GPT`: what changes the outputs, and not the shapes.
"""

import json
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxdp.checkpoint import manifest, safetensors
from jaxdp.checkpoint.safetensors import Array, rows
from jaxdp.errors import UsageError
from jaxdp.models import MODELS
from jaxdp.models.gpt import GPT, default_hidden
from jaxdp.precision import kind
from jaxdp.targets import OBJECT, Args, locate, parameters

# The path of the blocks with scan: true, and with scan: false.
STACK, MODULES = "blocks/stack", "blocks/modules"
THIRDS = ("query", "key", "value")
HEAD = "lm_head.weight"
FREQUENCIES = "self_attn.rotary_emb.inv_freq"  # in older files: of the rotary embedding


class Layout(NamedTuple):
    """A table of published names.

    Attributes:
        prefix: of all names except `lm_head.weight`; some files leave it out.
        block: the names of block i begin with `block` + "i.".
        outside, inside: {our path: published name}, of the model, and of a block.
        joined: query, key and value are thirds of one array, in which missing biases are zeros.
        redundant: names in a block that carry no parameter.
        norm: that of its models, as in `GPT`.
    """

    title: str
    prefix: str
    block: str
    outside: dict[str, str]
    inside: dict[str, str]
    joined: bool
    redundant: frozenset[str]
    norm: str

    def name(self, theirs: str, prefix: str) -> str:
        return theirs if theirs == HEAD else f"{prefix}{theirs}"

    def transposes(self, ours: str) -> bool:
        return ours == "head/kernel" or (not self.joined and ours.endswith("/kernel"))


GPT2 = Layout(
    "GPT-2",
    "transformer.",
    "h.",
    {
        "embed/embedding": "wte.weight",
        "positions": "wpe.weight",
        "norm/scale": "ln_f.weight",
        "norm/bias": "ln_f.bias",
        "head/kernel": HEAD,
    },
    {
        "norm1/scale": "ln_1.weight",
        "norm1/bias": "ln_1.bias",
        "attention/query/kernel": "attn.c_attn.weight",
        "attention/query/bias": "attn.c_attn.bias",
        "attention/key/kernel": "attn.c_attn.weight",
        "attention/value/kernel": "attn.c_attn.weight",
        "attention/value/bias": "attn.c_attn.bias",
        "attention/back/kernel": "attn.c_proj.weight",
        "attention/back/bias": "attn.c_proj.bias",
        "norm2/scale": "ln_2.weight",
        "norm2/bias": "ln_2.bias",
        "mlp/up/kernel": "mlp.c_fc.weight",
        "mlp/up/bias": "mlp.c_fc.bias",
        "mlp/back/kernel": "mlp.c_proj.weight",
        "mlp/back/bias": "mlp.c_proj.bias",
    },
    joined=True,
    redundant=frozenset({"attn.bias", "attn.masked_bias"}),  # the causal mask
    norm="layer",
)
LINEAR = {
    **{f"attention/{ours}": f"self_attn.{ours[0]}_proj" for ours in THIRDS},
    "attention/back": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/back": "mlp.down_proj",
}
LLAMA = Layout(
    "Llama",
    "model.",
    "layers.",
    {"embed/embedding": "embed_tokens.weight", "norm/scale": "norm.weight", "head/kernel": HEAD},
    {
        "norm1/scale": "input_layernorm.weight",
        "norm2/scale": "post_attention_layernorm.weight",
        **{f"{ours}/kernel": f"{theirs}.weight" for ours, theirs in LINEAR.items()},
        **{f"{ours}/bias": f"{theirs}.bias" for ours, theirs in LINEAR.items()},
    },
    joined=False,
    redundant=frozenset({FREQUENCIES}),
    norm="rms",
)
LAYOUTS = {"gpt2": GPT2, "llama": LLAMA}


def layout_of(names: Iterable[str], paths: Iterable[str]) -> Layout | None:
    """Return the layout of the published names if the parameter paths are those of a `GPT` of its
    form; else None.

    One tensor of a block tells the layout, so that an incomplete file is recognized, too.
    """
    names, paths = list(names), set(paths)
    for layout in LAYOUTS.values():
        kernel = "mlp/up/kernel" if layout.joined else "mlp/gate/kernel"
        blocks = {f"{place}/{kernel}" for place in (STACK, f"{MODULES}/0")}
        ours = (
            "embed/embedding" in paths
            and ("positions" in paths) == layout.joined
            and paths & blocks
        )
        inside = {*layout.inside.values()}
        if ours and any(name in inside for _, name in blocks_of(layout, names)):
            return layout
    return None


def blocks_of(layout: Layout, names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (the number of the block, the name in it) of each tensor of a block."""
    pattern = re.compile(rf"(?:{re.escape(layout.prefix)})?{re.escape(layout.block)}(\d+)\.(.+)")
    for name in names:
        if match := pattern.fullmatch(name):
            yield int(match[1]), match[2]


def count(layout: Layout, names: Iterable[str]) -> int:
    """Return the number of blocks."""
    return 1 + max((i for i, _ in blocks_of(layout, names)), default=-1)


def sources_of(
    layout: Layout, names: Collection[str], stacked: bool
) -> dict[str, tuple[list[str], str]]:
    """Return {our path: (the published tensors that it consists of, their name in messages)}, also
    of missing ones.
    """
    prefix = prefix_of(layout, names)
    named = {ours: layout.name(theirs, prefix) for ours, theirs in layout.outside.items()}
    sources = {ours: ([theirs], theirs) for ours, theirs in named.items()}
    for ours, theirs in layout.inside.items():
        blocks = [f"{prefix}{layout.block}{i}.{theirs}" for i in range(count(layout, names))]
        if stacked:
            sources[f"{STACK}/{ours}"] = (blocks, f"{prefix}{layout.block}*.{theirs}")
        else:
            sources |= {f"{MODULES}/{i}/{ours}": ([name], name) for i, name in enumerate(blocks)}
    return sources


def prefix_of(layout: Layout, names: Iterable[str]) -> str:
    return layout.prefix if any(name.startswith(layout.prefix) for name in names) else ""


def arrays_of(layout: Layout, tensors: Mapping[str, Array], stacked: bool) -> dict[str, Array]:
    """Return {our path: its array} for the published tensors of a file. stacked: the blocks are, as
    with scan: true.

    Raises ValueError if the blocks differ in shape or kind of dtype.
    """
    return {
        ours: _array(layout, ours, [tensors[name] for name in names], label)
        for ours, (names, label) in sources_of(layout, tensors, stacked).items()
        if tensors.keys() >= set(names)
    }


def absent(layout: Layout, names: Collection[str], stacked: bool) -> dict[str, str]:
    """Return {our path: the first of its published tensors that the file does not have}."""
    sources = sources_of(layout, names, stacked)
    lacking = {ours: [x for x in theirs if x not in names] for ours, (theirs, _) in sources.items()}
    return {ours: missing[0] for ours, missing in lacking.items() if missing}


def _array(layout: Layout, ours: str, tensors: Sequence[Array], label: str) -> Array:
    """Return the array of our path `ours`: one tensor or a stack of them, or a third of each, or
    their transposes.
    """
    first = tensors[0]
    third = next(
        (i for i, part in enumerate(THIRDS) if layout.joined and f"/{part}/" in ours), None
    )
    for other in tensors:
        if other.shape != first.shape or kind(other.dtype) != kind(first.dtype):

            def form(x):
                return f"{x.dtype}{list(x.shape)}"

            raise ValueError(
                f"{first.label!r} of {form(first)}, but {other.label!r} of {form(other)}"
            )
    shape = first.shape
    stacked = ours.startswith(STACK)
    transposed = layout.transposes(ours)
    if transposed:
        shape = shape[::-1]
    if third is not None:
        if not shape or shape[-1] % 3:
            raise ValueError(
                f"{first.label!r} of {list(shape)}, which is not query, key and value of equal sizes"
            )
        shape = (*shape[:-1], shape[-1] // 3)
        label = f"{label}[{THIRDS[third]}]"
    parts = tuple(
        tensor.parts[0]._replace(third=third, transposed=transposed) for tensor in tensors
    )
    return Array((len(parts), *shape) if stacked else shape, first.dtype, parts, label, stacked)


def used(layout: Layout, names: Collection[str]) -> set[str]:
    """Return the published names that `arrays_of` can use, and the redundant ones."""
    prefix = prefix_of(layout, names)
    known = {name for theirs, _ in sources_of(layout, names, False).values() for name in theirs}
    blocks = range(count(layout, names))
    return known | {
        f"{prefix}{layout.block}{i}.{name}" for i in blocks for name in layout.redundant
    }


def to_published(
    layout: Layout, params: Mapping[str, Any], vocabulary: int
) -> dict[str, np.ndarray]:
    """Convert {our path: array} to {published name: array}.

    In GPT-2's layout, key biases and the biases of a model without any become zeros, which do not
    change the outputs.

    Args:
        params: the parameters of a `GPT`; its embedding and head may have padding rows.
        vocabulary: the number of rows of both to keep.

    Raises:
        ValueError: the parameters are not those of this layout's model.
    """
    params = {name: np.asarray(x) for name, x in params.items()}
    for name in [name for name in params if name.startswith(f"{STACK}/")]:
        for i, block in enumerate(params.pop(name)):
            params[name.replace(STACK, f"{MODULES}/{i}")] = block
    blocks = {int(name.split("/")[2]) for name in params if name.startswith(f"{MODULES}/")}
    prefix = layout.prefix
    names = {ours: layout.name(theirs, prefix) for ours, theirs in layout.outside.items()}
    for i in blocks:
        names |= {
            f"{MODULES}/{i}/{k}": f"{prefix}{layout.block}{i}.{name}"
            for k, name in layout.inside.items()
        }
    optional = {name for name in names if name.endswith("/bias")} | {"head/kernel"}
    if wrong := sorted((params.keys() - names.keys()) | (names.keys() - params.keys() - optional)):
        raise ValueError(f"it is not {layout.title}'s model: {wrong[0]!r} is in only one of them")

    def read(ours):
        if ours in params:
            return params[ours]
        scale = ours.replace("/bias", "/scale")
        return np.zeros_like(
            params[scale] if scale in params else params[ours.replace("/bias", "/kernel")][0]
        )

    tensors: dict[str, np.ndarray] = {}
    for ours, theirs in names.items():
        if layout.joined and "/attention/query/" in ours:
            parts = [read(ours.replace("/query/", f"/{part}/")) for part in THIRDS]
            if parts[0].shape != parts[1].shape:
                raise ValueError(
                    f"it is not {layout.title}'s model: it has fewer heads of keys than of queries"
                )
            tensors[theirs] = np.concatenate(parts, -1)
        elif theirs not in tensors and (
            ours in params or (layout.joined and ours != "head/kernel")
        ):
            x = read(ours)
            x = x.T if layout.transposes(ours) else x
            tensors[theirs] = x[:vocabulary] if ours in ("embed/embedding", "head/kernel") else x
    return tensors


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
    key = next(x for name, x in shapes.items() if name.endswith("attention/key/kernel"))
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
            yield unlike(name, value, file)
    if not layout.joined:
        yield from of_positions(config, ours, length, file)


def unlike(name: str, value: Any, file: str) -> Difference:
    """Return the difference of a key of config.json whose value no GPT computes."""
    problem = f"{file} has {name}: {value!r}, which GPT does not compute"
    return Difference(name, problem, "take other weights")


def rotary_base(config: Json) -> Any:
    """Return the base of the rotary embedding that a config.json describes."""
    base = config.get("rope_theta", 10_000.0)
    rope = config.get("rope_scaling") or config.get("rope_parameters")  # as in `transformers`
    return rope.get("rope_theta", base) if isinstance(rope, Mapping) else base


def of_positions(
    config: Json, ours: Mapping[str, Any], length: int, file: str
) -> Iterator[Difference]:
    """Yield the differences in rotary positions, and in how far a token sees."""
    base = rotary_base(config)
    plain = {
        "rope_type": "default",
        "type": "default",
        "partial_rotary_factor": 1.0,
        "rope_theta": base,
    }
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        if not isinstance(rope, Mapping) or {**plain, **rope} != plain:
            yield unlike(name, rope, file)
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


OF_DATA = ("input_shape", "num_classes")  # arguments whose default is a fact of the data


def arguments(target: Callable[..., Any], args: Args, data: Args) -> dict[str, Any]:
    """Return the arguments that a target is called with, as JSON: defaults, facts of the data,
    those of the config.
    """
    takes = parameters(target)
    values = {name: p.default for name, p in takes.items() if p.default is not p.empty}
    values |= {name: data[name] for name in OF_DATA if name in takes and data.get(name)}
    called: dict[str, Any] = json.loads(json.dumps({**values, **args}, default=str))
    return called


SETTINGS = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
# {(norm, mlp, positions): layout}.
FORMS = {("layer", "gelu", "learned"): GPT2, ("rms", "swiglu", "rotary"): LLAMA}


def model_sha256(config: Json) -> str | None:
    """Return the SHA-256 of the config.json that describes a model beside its arguments, or None.

    config: as a checkpoint stores it. Relative paths begin here.
    """
    name = config["model"]["target"]
    if name.endswith(OBJECT) or not hasattr(target := locate("model", name, MODELS), "description"):
        return None
    return manifest.digest(target.description(config))[1]


def check_unchanged(saved: Json) -> None:
    """Raise UsageError if that file is not the one of a checkpoint. saved: its metadata."""
    if saved.get("model_sha256") not in (None, model_sha256(saved["config"])):
        raise UsageError(
            "init_from: config.json, which decides what the model computes, has changed since this "
            "run was trained; put the old one back (or resume with --resume.force true)"
        )


def write(folder: pathlib.Path, arrays: Mapping[str, np.ndarray], meta: Json) -> str:
    """Write model.safetensors, config.json and the tokenizer; return a line about them. meta: of
    the checkpoint.

    Raises UsageError for a model without a published layout; OSError or SafetensorError if it
    cannot write."""
    check_unchanged(meta)
    data = meta.get("data") or {}
    model = meta["config"]["model"]
    target = locate("model", model["target"], MODELS)
    if hasattr(target, "write_published"):  # it knows the folder that it started from
        return str(target.write_published(folder, arrays, meta))
    forms = " or ".join(f"{', '.join(form)} ({layout.title})" for form, layout in FORMS.items())
    use = f"huggingface is for a GPT of norm, mlp, positions {forms}; use the layout jaxdp"
    if target is not GPT:
        raise UsageError(f"--layout: {model['target']!r} has no published layout; {use}")
    args = arguments(GPT, model.get("args") or {}, data)
    form = (args["norm"], args["mlp"], args["positions"])
    if form not in FORMS:
        raise UsageError(f"--layout: a GPT of {', '.join(form)} has no published layout; {use}")
    layout = FORMS[form]
    try:
        tensors = to_published(layout, arrays, args["num_classes"])
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
    # As transformers requires.
    safetensors.write(folder / "model.safetensors", tensors, {"format": "pt"})
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
