"""A folder of Hugging Face as a model: a `GPT` of the shape that its config.json describes.

Every key of config.json is taken over, is known not to change the logits (`HARMLESS`), or is
refused by its name. Keys, defaults and what they mean are those of `transformers` 5.24:
`GPT2Config`, `LlamaConfig`, `MistralConfig`, `Qwen2Config`, and the modules made of them.
"""

import json
import pathlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxdp.checkpoint import manifest, published, safetensors
from jaxdp.checkpoint.published import GPT2, LLAMA, Json, Key, Layout
from jaxdp.errors import UsageError
from jaxdp.models.gpt import GPT

GPT2_KEYS = {
    **published.GPT2_KEYS,
    "dim": Key("n_embd", 768),
    "layers": Key("n_layer", 12),
    "hidden": Key("n_inner", None),
    "length": Key("n_positions", 1024),
}
LLAMA_KEYS = {
    **published.LLAMA_KEYS,
    "dim": Key("hidden_size", 4096),
    "layers": Key("num_hidden_layers", 32),
    "hidden": Key("intermediate_size", 11008),
    "rotary_base": Key("rope_theta", 10_000.0),
}
MISTRAL_KEYS = {
    **LLAMA_KEYS,
    **published.MISTRAL_KEYS,
    "hidden": Key("intermediate_size", 14336),
}
QWEN2_KEYS = {
    **LLAMA_KEYS,
    "hidden": Key("intermediate_size", 22016),
    "kv_heads": Key("num_key_value_heads", 32),
    "num_classes": Key("vocab_size", 151936),
}
OPTIONAL = ("n_inner", "num_key_value_heads")  # may be null
NUMBER = (int, float)
TYPES: dict[str, Any] = {  # of arguments of `GPT`; the others: int
    "epsilon": NUMBER,
    "rotary_base": NUMBER,
    "tied": bool,
}
WORDS = {bool: "true or false", int: "an integer above 0", NUMBER: "a number above 0"}


class Family(NamedTuple):
    """What one model_type has. keys: {argument of `GPT`: key}. architecture: the class of
    `transformers`. switches: keys that a `GPT` computes, false by default and true.
    """

    layout: Layout
    keys: Mapping[str, Key]
    architecture: str
    switches: Sequence[str] = ()


FAMILIES = {
    "gpt2": Family(GPT2, GPT2_KEYS, "GPT2LMHeadModel"),
    "llama": Family(LLAMA, LLAMA_KEYS, "LlamaForCausalLM", ["attention_bias", "mlp_bias"]),
    "mistral": Family(LLAMA, MISTRAL_KEYS, "MistralForCausalLM"),
    "qwen2": Family(LLAMA, QWEN2_KEYS, "Qwen2ForCausalLM", ["use_sliding_window"]),
}
# Keys that must be false.
OFF = "is_encoder_decoder", "add_cross_attention", "rope_interleaved", "use_mrope"
ROTARY = {"rope_theta", "rope_scaling", "rope_parameters", "sliding_window"}
# Keys that do not change the logits: of tokens, of training, of limits (plain rotary positions have none,
# and a window that matters is refused), of storage, of speed, of outputs, of other tasks, of generation.
WITHOUT_EFFECT = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    tokenizer_class prefix task_specific_params

    attention_dropout attn_pdrop embd_pdrop resid_pdrop summary_first_dropout
    initializer_range

    max_position_embeddings n_ctx max_window_layers

    dtype torch_dtype torchscript transformers_version _commit_hash _name_or_path
    name_or_path transformers.js_config is_llama_config unsloth_fixed unsloth_version

    use_cache pretraining_tp chunk_size_feed_forward reorder_and_upcast_attn
    attn_implementation use_bfloat16

    output_attentions output_hidden_states output_scores return_dict

    id2label label2id num_labels _num_labels problem_type finetuning_task
    summary_activation summary_proj_to_labels summary_type summary_use_proj tf_legacy_loss

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
HARMLESS = {*WITHOUT_EFFECT.split()}


class Folder(NamedTuple):
    """A folder with a config.json.

    args: of `GPT`, and the number of learned positions as `length`. biased: the linear modules of a
    block that have a bias, such as attention/query. unused: the keys that change nothing. defaults:
    the keys that it leaves out, with the values of `transformers`."""

    path: pathlib.Path
    config: Json
    layout: Layout
    args: dict[str, Any]
    biased: Collection[str]
    unused: str
    defaults: str


class HuggingFace(GPT):
    """A causal language model of the shape of a folder with a config.json: of GPT-2, Llama, Mistral
    or Qwen2.

    init_from: the folder; by default that of the config, so that the weights are from there too.
    num_classes: of the data; the vocabulary is the folder's. ignore: keys of its config.json that
    are not known here and that do not matter. dropout: as in `GPT`; that of config.json is not
    taken over. attention, scan, vocabulary_multiple: as in `GPT`. There are as many learned
    positions as in the folder, whatever the length of the examples.

    Raises UsageError for a folder without a config.json, for a key that is not known, or has a
    value that no `GPT` computes, and for data that do not fit.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        init_from: str | None = None,
        num_classes: int = 0,
        ignore: Sequence[str] = (),
        dropout: float = 0.0,
        attention: str = "auto",
        scan: bool = True,
        vocabulary_multiple: int = 128,
        *,
        rngs: nnx.Rngs,
    ):
        if init_from is None:
            raise UsageError("init_from: HuggingFace needs a folder; set init_from to its path")
        folder = read_folder(init_from, input_shape[0], ignore)
        if num_classes > folder.args["num_classes"]:
            raise UsageError(
                f"init_from: {init_from!r} has vocab_size: {folder.args['num_classes']}, but the "
                f"data has {num_classes} tokens; use the tokenizer of the folder"
            )
        length = folder.args.pop("length", input_shape[0])
        super().__init__(
            (length,),
            bias=bool(folder.biased),
            dropout=dropout,
            attention=attention,
            scan=scan,
            vocabulary_multiple=vocabulary_multiple,
            rngs=rngs,
            **folder.args,
        )
        for path, part in [*nnx.iter_modules(self.blocks)]:
            name = "/".join(map(str, path[-2:]))
            if isinstance(part, nnx.Linear) and name not in folder.biased:
                part.use_bias, part.bias = False, nnx.data(None)
        self.folder = str(folder.path)
        defaults = f"left out there, so as in transformers: {folder.defaults}"
        self.hint = f", or correct its config.json ({defaults})"
        self.note = (
            f"  without effect, of its config.json: {folder.unused}\n  {defaults}\n  not checked: whether the "
            f"{num_classes:,} tokens of the data are those of the folder, {folder.args['num_classes']:,}"
        )

    @staticmethod
    def description(config: Mapping[str, Any]) -> pathlib.Path:
        """Return the config.json of a run, by its config as a checkpoint stores it."""
        return config_file(config["model"]["args"].get("init_from") or config["init_from"])

    @staticmethod
    def write_published(
        output: pathlib.Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
    ) -> str:
        """Write trained parameters as a folder like that of `init_from`; return a line about it.

        output: the new folder. arrays: {path: array}. meta: of the checkpoint. Raises UsageError if
        the folder of `init_from` is gone, or is the output; OSError or SafetensorError if it cannot
        write."""
        config, spec = meta["config"], meta["data"]["tokenizer"]
        source = HuggingFace.description(config).parent
        folder = read_folder(str(source), 1, config["model"]["args"].get("ignore") or ())
        if output.exists() and output.samefile(folder.path):
            raise UsageError(
                f"--output: {str(output)!r} is the folder that the run started from; give another"
            )
        tensors = published.to_published(folder.layout, arrays, folder.args["num_classes"])
        dtype = str(next(iter(tensors.values())).dtype)
        output.mkdir(exist_ok=True)
        safetensors.write(output / safetensors.SINGLE, tensors, {"format": "pt"})
        (output / "config.json").write_text(
            json.dumps(dict(folder.config, dtype=dtype, torch_dtype=dtype), indent=2),
            encoding="utf-8",
        )
        files = [*folder.path.glob("generation_config.json")]
        tokenizer = folder.path / "tokenizer.json"
        if spec and not (
            tokenizer.is_file() and spec.get("sha256") == manifest.digest(tokenizer)[1]
        ):
            about = published.write_tokenizer(output, spec)  # the data has another one
        else:
            about = f"tokenizer: that of {source}"
            for pattern in ("*token*", "vocab*", "merges.txt", "chat_template*"):
                files += folder.path.glob(pattern)
        for file in files:
            shutil.copyfile(file, output / file.name)
        return f"{folder.layout.title}'s layout, {len(tensors)} tensors; {about}"


def config_file(path: str) -> pathlib.Path:
    """Return the config.json of a folder. Raises UsageError if there is none."""
    file = pathlib.Path(path).expanduser() / "config.json"
    if not file.is_file():
        raise UsageError(
            f"init_from: {path!r} is not a folder with a config.json; download the files of the "
            "model, and give the path of their folder; a run reads its config.json whenever it resumes "
            "or is loaded, so it must stay there"
        )
    return file


def read_folder(path: str, length: int, ignore: Sequence[str]) -> Folder:
    """Read the config.json of a folder.

    Args:
        length: the number of tokens of an example.
        ignore: keys that are accepted although they are not known.

    Raises:
        UsageError: there is none, or it has a key that is not known, or a value that no `GPT`
            computes.
    """
    file = config_file(path)
    config = safetensors.read_json(file)

    def refusal(key, value, problem):
        return UsageError(f"init_from: {str(file)!r} has {key}: {value!r:.80}, {problem}")

    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise refusal("model_type", model_type, f"but HuggingFace reads {', '.join(FAMILIES)}")
    layout, keys, architecture, switches = FAMILIES[model_type]
    args = {name: config.get(key.name, key.default) for name, key in keys.items()}
    if layout is LLAMA:
        args["rotary_base"] = published.rotary_base(config)
    for name, value in args.items():
        key, wanted = keys[name].name, TYPES.get(name, int)
        if value is None and key in OPTIONAL:
            continue
        fits = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
        if not fits or not (wanted is bool or value > 0):
            raise refusal(key, value, f"which is not {WORDS[wanted]}")
    if layout is LLAMA:
        args["kv_heads"] = args["kv_heads"] or args["heads"]
    for divisor, name in (("heads", "dim"), ("kv_heads", "heads")):
        if args[name] % args.get(divisor, 1):
            raise refusal(
                keys[divisor].name,
                args[divisor],
                f"which does not divide {keys[name].name}: {args[name]}",
            )

    # {key: the values that a `GPT` computes, its default first}.
    computed = {
        **published.FIXED[layout.title],
        "architectures": ([architecture],),
        **dict.fromkeys(switches, (False, True)),
        **dict.fromkeys(OFF, (False,)),
    }
    if layout is LLAMA:
        computed["head_dim"] = (None, args["dim"] // args["heads"])
        computed["layer_types"] = (None, ["full_attention"] * args["layers"])
    for name, values in computed.items():
        if config.get(name, values[0]) not in values:
            raise refusal(name, config[name], "which GPT does not compute; take another model")
    known = {"model_type", *computed, *HARMLESS, *(key.name for key in keys.values())}
    if layout is LLAMA:
        known |= ROTARY
        # Llama has no window, whatever the key says; a value that would matter is refused all the same.
        window = config.get("sliding_window", None if model_type == "llama" else 4096)
        if model_type == "qwen2" and not config.get("use_sliding_window"):
            window = None
        described = {**config, "sliding_window": window}
        for difference in published.of_positions(described, args, length, str(file)):
            raise UsageError(f"init_from: {difference.problem}; {difference.fix}")
    elif length > args["length"]:
        raise refusal("n_positions", args["length"], f"but the examples have {length} tokens")
    for name in ignore:
        if name in known or name not in config:
            raise UsageError(f"model.args.ignore: {name!r} is no unknown key of {str(file)!r}")
    for name in sorted(config.keys() - known - {*ignore}):
        raise refusal(
            name,
            config[name],
            "which is not known; if it does not matter, add the key to model.args.ignore",
        )

    def has_bias(part):
        module, name = part.split("/")
        if model_type == "llama":
            return bool(config.get(f"{module}_bias"))
        return model_type == "gpt2" or (model_type == "qwen2" and name in published.THIRDS)

    form = next(form for form, x in published.FORMS.items() if x is layout)
    args |= zip(("norm", "mlp", "positions"), form)
    present = {*config, *(config.get("rope_parameters") or ())}  # of transformers 5
    defaults = ", ".join(
        f"{key.name} {json.dumps(key.default)}" for key in keys.values() if key.name not in present
    )
    unused = ", ".join(sorted(config.keys() & HARMLESS | {*ignore})) or "no key"
    biased = [*filter(has_bias, published.LINEAR)]
    return Folder(file.parent, config, layout, args, biased, unused, defaults or "no key")
