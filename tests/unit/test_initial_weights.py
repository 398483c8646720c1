"""What `init_from` compares before it reads: files and tensors that are missing, and models that
compute another thing with the same shapes."""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

from jaxdp.checkpoint import published
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.checkpoint.weights import locate, named, open_weights
from jaxdp.config import Init
from jaxdp.config.parsing import from_mapping
from jaxdp.errors import UsageError
from jaxdp.models.gpt import GPT
from jaxdp.run.components import make_parts
from jaxdp.run.datasets import shapes_of_model
from jaxdp.run.initial_weights import fitted
from jaxdp.train.state import TrainState

LENGTH, TOKENS = 8, 13
EXAMPLES = [
    {"inputs": row[:-1], "labels": row[1:]}
    for row in np.arange(90, dtype=np.int32).reshape(10, 9) % TOKENS
]
SIZES = {"num_classes": TOKENS, "layers": 2, "heads": 4, "dim": 16}
GPT2 = {**SIZES, "hidden": 24}
LLAMA = {
    **GPT2,
    "norm": "rms",
    "mlp": "swiglu",
    "positions": "rotary",
    "tied": False,
    "bias": False,
    "kv_heads": 2,
}
FORMS = {"gpt2": GPT2, "llama": LLAMA}


class Half(nnx.Module):
    """A model of the user: a rate that changes its outputs, one of dropout, a size, and BatchNorm."""

    def __init__(self, width: int = 4, scale: float = 1.0, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.first, self.norm = (
            nnx.Linear(LENGTH, width, rngs=rngs),
            nnx.BatchNorm(width, rngs=rngs),
        )
        self.last, self.dropout, self.scale = (
            nnx.Linear(width, 3, rngs=rngs),
            nnx.Dropout(dropout, rngs=rngs),
            scale,
        )

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x * self.scale)))))


class Wrapped(GPT):
    """A GPT of the user, which hands arguments on."""

    def __init__(self, input_shape, num_classes, *, rngs, **args):
        super().__init__(input_shape, num_classes, rngs=rngs, **args)


FLOATS = [
    {"inputs": np.arange(LENGTH, dtype=np.float32) + i, "labels": np.int32(i % 3)} for i in range(8)
]


BUILT = {}


def built(args, target="GPT", data="EXAMPLES"):
    """(the config, its parts, the shapes of its parameters and state) of a model."""
    model = {"target": target if target == "GPT" else f"{__name__}.{target}", "args": args}
    if (key := json.dumps(model)) not in BUILT:
        loss = {"target": "CausalLM" if data == "EXAMPLES" else "SoftmaxCrossEntropy"}
        values = {
            "model": model,
            "data": {"target": f"{__name__}.{data}"},
            "loss": loss,
            "steps": 1,
            "batch_size": 8,
        }
        config = from_mapping(values, "it")
        parts = make_parts(config)
        BUILT[key] = config, parts, named(*shapes_of_model(parts.forward, parts.dataset, 2))
    return BUILT[key]


def fit(source, args, target="GPT", data="EXAMPLES", **init):
    """What `init_from: source` and `init` give to a model of these arguments."""
    config, parts, shapes = built(args, target, data)
    config = dataclasses.replace(config, init_from=str(source), init=Init(**init))
    path = locate(str(source))
    return fitted(config, parts, {}, open_weights(path, False), path, shapes)


def load(*args, **more):
    """The text of `fit`."""
    return fit(*args, **more).text


def refused(source, args, **more):
    with pytest.raises(UsageError) as error:
        load(source, args, **more)
    text = str(error.value)
    assert "\n" not in text and len(text) < 900, text
    return text


def numbers(shapes, seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.normal(size=x.shape).astype(np.float32) for name, x in shapes.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{form: a published folder of it}"""
    made = {}
    for form, args in FORMS.items():
        made[form] = tmp_path_factory.mktemp(form)
        meta = {
            "config": {"model": {"target": "GPT", "args": args}},
            "data": {"input_shape": [LENGTH]},
        }
        published.write(made[form], numbers(built(args)[2]), meta)
    return made


@pytest.fixture
def folder(folders, tmp_path):
    """A function of a form: a copy of its folder."""
    return lambda form="gpt2": shutil.copytree(folders[form], tmp_path / form)


def change(folder, update=None, without=(), config=None):
    """Change tensors and config.json of a folder; None removes a key."""
    file = folder / "model.safetensors"
    tensors = {k: x for k, x in load_file(file).items() if k not in without} | (update or {})
    save_file(tensors, file, {"format": "pt"})
    if config is not None:
        described = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(
            json.dumps({k: v for k, v in described.items() if v != "absent"})
        )
    return folder


def run_of(directory, args, target="GPT", data="EXAMPLES", extra=()):
    """A run directory with a checkpoint of such a model; extra: names of more arrays."""
    config, _, shapes = built(args, target, data)
    arrays = numbers(shapes) | {name: np.ones(2, np.float32) for name in extra}
    state = {
        k.removeprefix("model_state/"): x for k, x in arrays.items() if k.startswith("model_state/")
    }
    params = {k: x for k, x in arrays.items() if not k.startswith("model_state/")}
    trained = TrainState(
        np.int32(1), unflatten_dict(params, sep="/"), unflatten_dict(state, sep="/"), {}
    )
    facts = {"input_shape": [LENGTH], "num_classes": 0}
    model = {"target": config.model.target, "args": config.model.args}
    checkpoints = Checkpoints(
        directory / "checkpoints", facts={"config": {"model": model}, "data": facts}
    )
    checkpoints.save(1, jax.tree.map(jax.numpy.asarray, trained), {})
    assert checkpoints.wait() is None
    return directory


# --- tensors
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_complete_folder_loads_with_nothing_left_out(form, folders):
    text = load(folders[form], FORMS[form])
    assert (
        "left as initialized, skipped" not in text
        and "not used" not in text
        and "not compared" not in text
    )
    count = len(built(FORMS[form])[2])
    assert f"loaded {count} of {count} parameters" in text


def test_a_missing_tensor_is_refused_by_name(folder):
    """With scan: true the blocks are one array, all of which would be random."""
    for form, name, ours in (
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", "blocks/stack/mlp/up/kernel"),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "blocks/stack/attention/key/kernel"),
        ("gpt2", "transformer.wte.weight", "embed/embedding"),
        ("gpt2", "transformer.ln_f.bias", "norm/bias"),
        ("llama", "lm_head.weight", "head/kernel"),
    ):
        source = change(folder(form), without=[name])
        text = refused(source, FORMS[form])
        assert f"it has no {name!r} for {ours!r}" in text and "init.skip, such as '^" in text
        assert f"left as initialized, skipped: {ours}" in load(
            source, FORMS[form], skip=[f"^{ours}$"]
        )
        shutil.rmtree(source)
    source = change(folder(), without=["transformer.h.1.ln_1.bias"])
    text = refused(source, {**GPT2, "scan": False})
    assert "it has no 'transformer.h.1.ln_1.bias' for 'blocks/modules/1/norm1/bias'" in text


def test_an_unused_tensor_is_refused_by_name(folder):
    extra = {"transformer.h.0.attn.q_norm.weight": np.ones(4, np.float32)}
    source = change(folder(), extra)
    assert "no parameter here is its 'transformer.h.0.attn.q_norm.weight'" in refused(source, GPT2)
    assert "not used from the source: transformer.h.0.attn.q_norm.weight" in load(
        source, GPT2, skip=["q_norm"]
    )


def test_only_a_head_that_is_the_embedding_is_dropped(folder):
    source = folder()
    embedding = load_file(source / "model.safetensors")["transformer.wte.weight"]
    change(source, {"lm_head.weight": embedding})
    assert "head/kernel left out, which changes nothing" in load(source, GPT2)
    change(source, {"lm_head.weight": embedding + 1e-3}, config={"tie_word_embeddings": False})
    assert "no parameter here is its 'lm_head.weight'" in refused(source, GPT2)
    assert "not used from the source: head/kernel" in load(source, GPT2, skip=["^head/"])
    assert "loaded 20 of 20" in load(source, {**GPT2, "tied": False})


def test_a_model_with_a_head_of_its_own_needs_one(folder):
    source, untied = folder(), {**GPT2, "tied": False}
    assert "it has no 'lm_head.weight' for 'head/kernel'" in refused(source, untied)
    assert "skipped: head/kernel" in load(source, untied, skip=["^head/"])


def test_only_biases_of_zeros_are_left_out(folder):
    source = folder()
    without = {**GPT2, "bias": False}
    assert "no parameter here is its 'transformer." in refused(source, without)
    change(
        source,
        {
            k: np.zeros_like(x)
            for k, x in load_file(source / "model.safetensors").items()
            if "bias" in k
        },
    )
    assert "left out, which changes nothing" in load(source, without)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"transformer.h.1.mlp.c_fc.bias": np.zeros(24, np.int32)},
         r"'transformer.h.0.mlp.c_fc.bias' of float32[24], but 'transformer.h.1.mlp.c_fc.bias' of int32[24]"),
        ({"transformer.h.1.mlp.c_fc.bias": np.zeros((24, 1), np.float32)}, "of float32[24, 1]; give a file of equal"),
        ({"transformer.wte.weight": np.zeros((13, 16), np.int8)}, "'embed/embedding' is int8 in"),
        ({"transformer.wte.weight": np.zeros((13, 16), ml_dtypes.float8_e4m3fn)}, "'embed/embedding' is F8_E4M3 in"),
        ({f"transformer.h.{i}.attn.c_attn.weight": np.zeros((16, 49), np.float32) for i in range(2)},
         "of [16, 49], which is not query, key and value of equal sizes"),
        ({f"transformer.h.{i}.attn.c_attn.weight": np.zeros((48, 16), np.float32) for i in range(2)}, "of [48, 16]"),
        ({f"transformer.h.{i}.ln_1.bias": np.zeros((1,), np.float32) for i in range(2)}, "has shape (2, 1) in"),
        ({"transformer.h.99999999999.ln_1.bias": np.zeros(16, np.float32)}, "tensors of block 99999999999, but only"),
        ({"wpe.weight": np.zeros((8, 16), np.float32)}, "no parameter here is its 'wpe.weight'"),
        ({"transformer.wte.weight": np.zeros((), np.float32)}, "'embed/embedding' has shape () in"),
        ({"lm_head.weight": np.zeros((13, 16), ml_dtypes.float8_e4m3fn)}, "no parameter here is its 'lm_head.weight'"),
        ({"transformer.h.2.ln_1.bias": np.zeros(16, np.float32)}, "has shape (3, 16) in"),
    ],
    ids=["dtype of a block", "shape of a block", "integers", "float8", "not thirds", "transposed", "one element",
         "block number", "two prefixes", "a scalar", "a head in float8", "a block of one tensor"],
)  # fmt: skip
def test_tensors_of_another_form_are_refused(update, words, folder):
    assert words in refused(change(folder(), update), GPT2)


# --- files
# ----------------------------------------------------------------------------------------------------------


def split(folder, index=True):
    """Split a folder's file into two parts; return their names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    halves = [dict(list(tensors.items())[i::2]) for i in (0, 1)]
    for name, half in zip(names, halves):
        save_file(half, folder / name, {"format": "pt"})
    where = {tensor: name for name, half in zip(names, halves) for tensor in half}
    if index:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where})
        )
    return names, where


@pytest.mark.parametrize("index", [True, False])
def test_all_parts_of_a_folder_are_read(index, folder, folders):
    source = folder("llama")
    split(source, index)
    weights, one = fit(source, LLAMA).weights, fit(folders["llama"], LLAMA).weights
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        k: jax.ShapeDtypeStruct(x.shape, np.float32, sharding=place)
        for k, x in built(LLAMA)[2].items()
    }
    for name, x in one.read(wanted).items():
        np.testing.assert_array_equal(weights.read(wanted)[name], x, err_msg=name)


@pytest.mark.parametrize("index", [True, False])
def test_a_part_that_is_missing_is_named(index, folder):
    source = folder()
    names, _ = split(source, index)
    text = refused(source / names[0], GPT2)
    assert f"is part 1 of 2; give the folder with all of them: {str(source)!r}" in text
    (source / names[1]).unlink()
    assert f"has no {names[1]!r}, which model" in refused(source, GPT2)


def test_parts_that_contradict_each_other_are_refused(folder):
    source = folder()
    names, where = split(source)
    index, tensor = source / "model.safetensors.index.json", next(iter(where))
    index.write_text(json.dumps({"weight_map": {**where, tensor: names[1]}}))
    assert f"names {tensor!r} in {names[1]}, which lacks it" in refused(source, GPT2)
    for content in (
        "{",
        "[]",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
        "",
    ):
        index.write_text(content)
        assert "index.json' " in refused(source, GPT2)
    index.write_text(json.dumps({"weight_map": where}))
    second = load_file(source / names[1]) | {tensor: load_file(source / names[0])[tensor]}
    save_file(second, source / names[1])
    assert f"has {tensor!r} in {names[0]} and in {names[1]}; keep one" in refused(source, GPT2)


def test_files_that_are_something_else_are_named(tmp_path, folder):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548105171\n"
    for content, words in (
        (b"", "it is empty"),
        (pointer, "git lfs pull"),
        (b"PK\x03\x04" + bytes(99), "of PyTorch"),
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        for source in (tmp_path, tmp_path / "model.safetensors"):
            assert words in refused(source, GPT2)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    assert "is a file of PyTorch; save its tensors with safe" in refused(
        tmp_path / "pytorch_model.bin", GPT2
    )
    assert "has only files of PyTorch (pytorch_model.bin)" in refused(tmp_path, GPT2)
    for name in ("a", "b"):
        save_file({"x": np.zeros(2)}, tmp_path / f"{name}.safetensors")
    assert "several sets of weights (a.safetensors, b.safetensors); give one" in refused(
        tmp_path, GPT2
    )
    source = folder()
    (source / "config.json").write_bytes(pointer)
    assert "config.json' is not a JSON mapping (it is a pointer of Git LFS" in refused(source, GPT2)


# --- config.json
# ----------------------------------------------------------------------------------------------------


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("form", "config", "words"),
    [
        ("gpt2", {"n_head": 2}, "model.args.heads is 4, but n_head: 2 in"),
        ("gpt2", {"n_head": "absent"}, "model.args.heads is 4, but n_head: 12 in"),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, "model.args.epsilon is 1e-05, but layer_norm_epsilon: 1e-06 in"),
        ("gpt2", {"activation_function": "gelu"}, "has activation_function: 'gelu', which GPT does not compute"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx: True, which"),
        ("gpt2", {"tie_word_embeddings": False}, "model.args.tied is True, but tie_word_embeddings: False in"),
        ("gpt2", {"vocab_size": 12}, "model.args.num_classes is 13, but vocab_size: 12 in"),
        ("gpt2", {"model_type": "gpt_bigcode"}, "has model_type: 'gpt_bigcode', but GPT computes gpt2"),
        ("llama", {"num_attention_heads": 8}, "model.args.heads is 4, but num_attention_heads: 8 in"),
        ("llama", {"num_key_value_heads": 4}, "model.args.kv_heads is 2, but num_key_value_heads: 4 in"),
        ("llama", {"num_key_value_heads": None}, "model.args.kv_heads is 2, but num_key_value_heads: 4 in"),
        ("llama", {"rms_norm_eps": "absent"}, "model.args.epsilon is 1e-05, but rms_norm_eps: 1e-06 in"),
        ("llama", {"rope_theta": 5e5, "rope_parameters": "absent"}, "args.rotary_base is 10000.0, but rope_theta"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rotary_base is 10000.0, but"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_scaling: {'type': 'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "has rope_parameters: {"),
        ("llama", {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5e5}}, "has rope_parameters"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "has rope_parameters: {'rope_theta': 1"),
        ("llama", {"hidden_act": "gelu"}, "has hidden_act: 'gelu', which GPT does not compute"),
        ("llama", {"tie_word_embeddings": True}, "model.args.tied is False, but tie_word_embeddings: True in"),
        ("llama", {"model_type": "granite"}, "has model_type: 'granite', but GPT computes llama or mistral"),
        ("llama", {"model_type": "absent"}, "has model_type: None"),
        ("llama", {"model_type": ["llama"]}, "has model_type: ['llama']"),
        ("llama", {"num_attention_heads": None}, "model.args.heads is 4, but num_attention_heads: None in"),
        ("llama", {"rope_parameters": [1]}, "has rope_parameters: [1]"),
        ("llama", {"model_type": "mistral", "sliding_window": 4}, "has sliding_window: 4, but the examples have 8"),
        ("llama", {"partial_rotary_factor": 0.5}, "has partial_rotary_factor: 0.5"),
    ],
)  # fmt: skip
def test_keys_that_only_config_json_has_are_compared(form, config, words, folder):
    source = change(folder(form), config=config)
    for path in (source, source / "model.safetensors"):  # of a file, the config.json beside it
        text = refused(path, FORMS[form])
        assert words in text and "accept it with init.changed: " in text


def test_an_equal_function_in_config_json_is_no_change(folder):
    source = change(
        folder("llama"),
        config={"model_type": "mistral", "sliding_window": 8, "hidden_act": "swish"},
    )
    assert "not compared" not in load(source, LLAMA)
    (source / "config.json").unlink()
    assert (
        "not compared: heads, kv_heads, rotary_base, epsilon, the activation: there is no config.json"
        in load(source, LLAMA)
    )


def test_a_difference_that_is_wanted_is_named(folder):
    source = change(
        folder("llama"),
        config={"rope_theta": 5e5, "rope_parameters": None, "num_attention_heads": 8},
    )
    assert "(and 1 more)" in refused(source, LLAMA)
    assert "heads is 4" in refused(source, LLAMA, changed=["rotary_base"])
    text = load(source, LLAMA, changed=["rotary_base", "heads"])
    assert "differs from the source, as init.changed says: rotary_base, heads" in text
    assert "init.changed: 'hedas' does not differ from" in refused(
        source, LLAMA, changed=["rotary_base", "hedas"]
    )
    assert "loaded 12 of 12" in load(source, {**LLAMA, "rotary_base": 5e5}, changed=["heads"])


def test_tensors_are_compared_without_a_config_json(folder):
    source = folder()
    (source / "config.json").unlink()
    assert "model.args.num_classes is 16, but 'transformer.wte.weight' has 13 rows" in refused(
        source, {**GPT2, "num_classes": 16}
    )
    zeros = {
        k: np.zeros_like(x)
        for k, x in load_file(source / "model.safetensors").items()
        if k.endswith("bias")
    }
    text = refused(change(source, zeros), {**GPT2, "norm": "rms", "bias": False})
    assert "model.args.norm is 'rms', but 'layer' in GPT-2's layout" in text
    other = folder("llama")
    (other / "config.json").unlink()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(other, {name: (1e4 ** (-np.arange(0, 4, 2) / 4)).astype(np.float32)})
    assert "loaded" in load(other, LLAMA)
    assert f"{name!r} in" in refused(other, {**LLAMA, "rotary_base": 5e5})
    assert "rotary_base" in refused(other, {**LLAMA, "heads": 2, "kv_heads": 1})


def test_a_gpt_inside_a_users_class_is_compared_too(folder):
    source = folder()
    assert "loaded" in load(source, GPT2, target="Wrapped")
    assert "model.args.heads is 2, but n_head: 4 in" in refused(
        source, {**GPT2, "heads": 2}, target="Wrapped"
    )


# --- runs
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ({}, {"heads": 2}, "model.args.heads is 2, but 4 in"),
        (
            {"positions": "rotary"},
            {"positions": "rotary", "rotary_base": 5e5},
            "rotary_base is 500000.0, but 10000.0",
        ),
        ({"epsilon": 1e-6}, {}, "model.args.epsilon is 1e-05, but 1e-06 in"),
        (
            {"bias": False},
            {"bias": False, "norm": "rms"},
            "model.args.norm is 'rms', but 'layer' in",
        ),
        ({}, {"num_classes": 14}, "model.args.num_classes is 14, but 13 in"),
        (
            {"kv_heads": 2},
            {"heads": 8, "kv_heads": 4},
            "model.args.kv_heads is 4, but 2 in",
        ),  # equal shapes together
    ],
)
def test_arguments_that_a_run_has_saved_are_compared(theirs, ours, words, tmp_path):
    source, args = run_of(tmp_path, {**SIZES, **theirs}), {**SIZES, **ours}
    text = refused(source, args)
    name = words.split(" ")[0].removeprefix("model.args.")
    assert words in text and f"set model.args.{name} to " in text
    assert "as init.changed says" in load(
        source, args, changed=[*{**theirs, **ours}.keys() - {"positions", "bias"}]
    )
    assert "not compared" not in load(source, {**SIZES, **theirs})


@pytest.mark.slow
def test_arguments_that_change_no_output_may_differ(tmp_path):
    source = run_of(tmp_path, SIZES)
    for args in (
        {"dropout": 0.1},
        {"attention": "xla"},
        {"kv_heads": 4},
        {"epsilon": 1e-5},
        {"hidden": 64},
    ):
        assert "loaded 19 of 19" in load(source, {**SIZES, **args})


def test_arguments_of_the_users_models_are_compared(tmp_path):
    source = run_of(tmp_path, {"dropout": 0.5}, "Half", "FLOATS")
    half = {"target": "Half", "data": "FLOATS"}
    assert "loaded" in load(source, {}, **half)
    assert "model.args.scale is 2.0, but 1.0 in" in refused(source, {"scale": 2.0}, **half)
    text = refused(source, {"width": 6}, **half)
    assert "has shape" in text
    wrapped = run_of(tmp_path / "gpt", {**SIZES, "scan": True})
    text = load(wrapped, SIZES, target="Wrapped")
    assert "not compared: GPT with " in text and "but for arguments of equal names" in text
    assert "heads is 2, but 4 in" in refused(wrapped, {**SIZES, "heads": 2}, target="Wrapped")


@pytest.mark.slow
def test_arrays_that_only_one_run_has_are_refused(tmp_path):
    source = run_of(tmp_path, {**SIZES, "tied": False}, extra=["model_state/count"])
    text = refused(source, SIZES)
    assert (
        "no parameter here is its 'head/kernel' (and 1 more)" in text
        and "the source has model.args tied: False" in text
    )
    text = refused(source, SIZES, skip=["^head/"])
    assert "no parameter here is its 'model_state/count'" in text
    assert "not used from the source: head/kernel, model_state/count" in load(
        source, SIZES, skip=["^head/", "^model_state/"]
    )
    assert "it has no 'positions', and no parameter" not in refused(
        source, {**SIZES, "positions": "rotary"}
    )
    tied = run_of(tmp_path / "tied", SIZES)
    text = refused(tied, {**SIZES, "tied": False})
    assert "it has no 'head/kernel'" in text and "the source has model.args tied: True" in text


def test_an_exported_file_is_compared_like_its_run(tmp_path):
    from jaxdp.cli.export import export

    source = run_of(tmp_path, SIZES)
    file = tmp_path / "a.safetensors"
    export(
        {"run_dir": str(source), "step": None, "output": str(file), "ema": False, "layout": "jaxdp"}
    )
    assert "loaded 19 of 19" in load(file, SIZES)
    assert "model.args.heads is 2, but 4 in" in refused(file, {**SIZES, "heads": 2})
    save_file(load_file(file), file)  # another program's: without metadata
    assert "not compared: the arguments of its model" in load(file, {**SIZES, "heads": 2})
