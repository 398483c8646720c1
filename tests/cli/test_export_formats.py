"""docs/finetune.md: exported models are run without jaxdp: by NumPy, by transformers, and by JAX
alone.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import published_models
from cli_runs import ended
from jaxdp import fit
from jaxdp.checkpoint import published
from jaxdp.checkpoint.weights import as_published, named, open_weights
from jaxdp.data import Digits
from jaxdp.data.tokenizers import Byte, Char
from jaxdp.errors import UsageError
from jaxdp.losses import compute_logits
from jaxdp.models import as_model
from jaxdp.models.base import CARRY
from jaxdp.models.cnn import CNN
from jaxdp.models.gpt import GPT
from jaxdp.models.mlp import MLP
from jaxdp.models.recurrent import LSTM
from jaxdp.models.resnet9 import ResNet9
from jaxdp.models.vit import ViT
from jaxdp.train.carry import split_carry
from launch import ROOT
from published_models import with_transformers

SIZES = {"num_classes": 13, "input_shape": [8], "layers": 2, "heads": 4, "dim": 16}
LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary", "tied": False, "bias": False}
FORMS = {
    "gpt2": {"hidden": 24},
    "gpt2 without biases": {"bias": False, "tied": False, "scan": False},
    "llama": {**LLAMA, "kv_heads": 2, "hidden": 24, "rotary_base": 5e5},
    "tied llama with biases": {**LLAMA, "tied": True, "bias": True, "scan": False},
}
TOKENS = np.random.default_rng(0).integers(13, size=(3, 8)).astype(np.int32)
DATA = {"num_classes": 13, "input_shape": [8]}


def make(args):
    """(the model, its parameters with noise in each)."""
    model = as_model(lambda rngs: GPT(**{**SIZES, **args}, rngs=rngs))
    params = jax.eval_shape(model.init, jax.random.key(0), {"inputs": TOKENS})[0]
    rng = np.random.default_rng(1)

    def draw(path, x):
        return (0.3 * rng.normal(size=x.shape) + ("scale" in str(path))).astype(np.float32)

    return model, jax.tree_util.tree_map_with_path(draw, params)


def meta(args, tokenizer=None):
    return {
        "config": {"model": {"target": "GPT", "args": {**SIZES, **args}}},
        "data": {"tokenizer": tokenizer, **DATA},
    }


def outputs(model, params, inputs):
    """Logits in float32. The cast is in the program: without it, XLA rounds them to bfloat16 first."""

    @jax.jit
    def forward(params, inputs):
        batch = {"inputs": inputs, "mask": np.ones(len(inputs), bool)}
        return compute_logits(model.apply(params, {}, batch, jax.random.key(0), False)[0]).astype(
            jnp.float32
        )

    return forward(params, inputs)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
def test_an_exported_folder_has_equal_logits_and_loads(form, tmp_path):
    model, params = make(FORMS[form])
    arrays = named(params, {})
    about = published.write(tmp_path, arrays, meta(FORMS[form]))
    want = outputs(model, params, TOKENS)
    np.testing.assert_allclose(published_models.logits(tmp_path, TOKENS), want, rtol=0, atol=1e-4)
    assert np.abs(want).max() > 1 and about.endswith("no tokenizer")
    file = tmp_path / "model.safetensors"
    weights = as_published(open_weights(file, False), file, arrays)
    names = weights.arrays.keys() & arrays.keys()
    assert {re.sub(r".*/", "", name) for name in arrays.keys() - names} <= {"bias"}
    mesh = jax.sharding.Mesh(
        jax.devices()[:4], "d"
    )  # columns of our kernels are rows of a transposed tensor

    def place(x):
        return jax.sharding.NamedSharding(mesh, jax.P(*(None,) * (x.ndim - 1), "d"))

    wanted = {
        k: jax.ShapeDtypeStruct(arrays[k].shape, np.float32, sharding=place(arrays[k]))
        for k in names
    }
    for name, x in weights.read(wanted).items():
        rows = {"embed/embedding": np.s_[:13], "head/kernel": np.s_[:, :13]}.get(name, np.s_[:])
        np.testing.assert_array_equal(np.asarray(x)[rows], arrays[name][rows], err_msg=name)
        assert name != "head/kernel" or not np.asarray(x)[:, 13:].any()
    assert ("columns 13 to 127 of head/kernel are zeros" in weights.note) == (
        not FORMS[form].get("tied", True)
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"norm": "rms"}, "a GPT of rms, gelu, learned has no published layout"),
        ({"kv_heads": 2}, "it has fewer heads of keys than of queries"),
        ({"target": "MLP"}, "'MLP' has no published layout"),
    ],
)
def test_other_models_are_refused_by_name(args, words, tmp_path):
    described = meta({k: v for k, v in args.items() if k != "target"})
    described["config"]["model"]["target"] = args.get("target", "GPT")
    arrays = named(make({"kv_heads": 2})[1], {}) if "kv_heads" in args else {}
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        published.write(tmp_path / "new", arrays, described)
    assert "rms, swiglu, rotary (Llama)" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


TEXT = "To be, or not\n\tto be: déjà vu 🙂 "


@pytest.mark.parametrize("tokenizer", [Byte(), Char.of(TEXT)], ids=["byte", "char"])
def test_the_written_tokenizer_has_the_same_tokens(tokenizer, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    assert published.write_tokenizer(tmp_path, tokenizer.spec()) == f"tokenizer: {tokenizer.kind}"
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = written.encode(TEXT).ids
    assert ids == tokenizer.encode(TEXT).tolist() and written.decode(ids) == TEXT
    assert written.get_vocab_size() == tokenizer.size
    named = published.write_tokenizer(tmp_path, {"kind": "named", "name": "gpt2"})
    assert named == "no tokenizer: gpt2 has no tokenizer.json here"
    assert not [*tmp_path.iterdir()]  # those of the first export
    (tmp_path / "tokenizer.json").write_text("from elsewhere")
    published.write_tokenizer(tmp_path, {})
    assert (tmp_path / "tokenizer.json").is_file()


TRANSFORMERS = """
import json, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, text = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(text)["input_ids"]
assert tokenizer.decode(ids) == text, tokenizer.decode(ids)
with torch.no_grad():
    logits = model.eval()(torch.tensor([ids])).logits.numpy()
np.savez(f"{folder}/outputs.npz", ids=ids, logits=logits)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "tokenizer"), [*zip(FORMS, [Byte(), Char.of(TEXT)] * 2, strict=True)], ids=FORMS
)
def test_transformers_loads_a_folder_with_equal_logits(form, tokenizer, tmp_path):
    sizes = {"num_classes": tokenizer.size, "input_shape": [64]}
    model, params = make({**FORMS[form], **sizes})
    published.write(tmp_path, named(params, {}), meta({**FORMS[form], **sizes}, tokenizer.spec()))
    with_transformers(TRANSFORMERS, tmp_path, TEXT)
    theirs = np.load(tmp_path / "outputs.npz")
    ids = tokenizer.encode(TEXT).astype(np.int32)
    np.testing.assert_array_equal(theirs["ids"], ids)
    ours = outputs(model, params, ids[None])
    assert np.abs(ours).max() > 1
    np.testing.assert_allclose(theirs["logits"], ours, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["mlp", "gpt2", "llama"])
def test_jax_alone_runs_the_forward_pass_bit_for_bit(form, dtype, tmp_path):
    """In a fresh process in which jaxdp cannot be imported; the program takes any number of
    examples.
    """
    pytest.importorskip("flatbuffers", reason="jax.export writes files with flatbuffers")
    if form == "mlp":
        target, args, data = (
            MLP,
            {"num_classes": 10, "hidden": [8], "input_shape": [8, 8, 1]},
            {"target": "Digits"},
        )
        model = as_model(lambda rngs: MLP(**args, rngs=rngs))
        inputs = Digits("test").read(np.arange(5))["inputs"]
    else:
        args = {**FORMS[form], **SIZES}
        data, model, inputs = {"target": f"{__name__}.EXAMPLES"}, make(args)[0], TOKENS
        target = GPT
    loss = "SoftmaxCrossEntropy" if form == "mlp" else "CausalLM"
    fitted = fit(
        {"target": target.__name__, "args": args}, data, loss, run_dir=tmp_path / "run", steps=2, batch_size=4,
        microbatches=1, precision={"compute": dtype}, parallel={"devices": 1}, log={"every": 1},
        compilation_cache=None,
    )  # fmt: skip
    command = [sys.executable, ROOT / "examples" / "export_stablehlo.py", tmp_path / "run"]
    paths = [
        str(ROOT),
        *(str(ROOT / "tests" / name) for name in ("cli", "support")),
        os.environ.get("PYTHONPATH", ""),
    ]
    env = {**os.environ, "PYTHONPATH": ":".join(paths)}
    done = subprocess.run(
        [*map(str, command)], check=True, timeout=300, env=env, capture_output=True, text=True
    )
    assert "any number of examples; run.py runs it" in done.stdout

    def cast(tree):
        return jax.tree.map(lambda x: jnp.asarray(x, dtype) if x.dtype == np.float32 else x, tree)

    batch = (
        Digits().transform({"inputs": inputs}, None, False) if form == "mlp" else {"inputs": inputs}
    )
    want = outputs(model, cast(fitted.params), cast(batch["inputs"]))
    folder = tmp_path / "run" / "stablehlo"
    np.save(tmp_path / "inputs.npy", inputs)
    alone = "import sys, runpy; sys.modules['jaxdp'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    files = [folder / "run.py", tmp_path / "inputs.npy", tmp_path / "outputs.npy"]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-c", alone, *map(str, files)],
        check=True,
        timeout=300,
        cwd=tmp_path,
        env=env,
    )
    np.testing.assert_array_equal(np.load(tmp_path / "outputs.npy"), want)
    assert len((folder / "run.py").read_text().splitlines()) <= 15


@pytest.mark.quick(3)
@pytest.mark.parametrize("target", [CNN, GPT, LSTM, MLP, ResNet9, ViT])
def test_an_export_takes_any_number_of_examples(target):
    args = (
        SIZES
        if target is GPT
        else {"num_classes": 13, "input_shape": [8] if target is LSTM else [8, 8, 1]}
    )
    model = as_model(lambda rngs: target(**args, rngs=rngs))
    one = TOKENS[:1] if target in (GPT, LSTM) else np.zeros((1, 8, 8, 1), np.float32)
    params, state = jax.eval_shape(model.init, jax.random.key(0), {"inputs": one})
    state, carry = split_carry(state)
    any_number = jax.ShapeDtypeStruct((*export.symbolic_shape("n"), *one.shape[1:]), one.dtype)

    def forward(params, state, inputs):
        zeros = jax.tree.map(lambda x: jnp.zeros((inputs.shape[0], *x.shape[1:]), x.dtype), carry)
        state = state if carry is None else {**state, CARRY: zeros}
        batch = {"inputs": inputs, "mask": jnp.ones(inputs.shape[:1], bool)}
        return compute_logits(model.apply(params, state, batch, jax.random.key(0), False)[0])

    program = export.export(jax.jit(forward))(params, state, any_number)
    assert str(program.out_avals[0].shape[0]) == "n" and program.out_avals[0].shape[-1] == 13


EXAMPLES = [{"inputs": row, "labels": np.roll(row, -1)} for row in np.tile(TOKENS, (4, 1))]


def test_options_that_do_not_fit_are_one_line(tmp_path):
    cases = {
        ("--layout", "onnx"): "--layout: 'onnx' is not one of 'jaxdp', 'huggingface'",
        ("--layout", "huggingface"): "no checkpoint in it; train first, or name another",
    }
    for argv, words in cases.items():
        assert words in ended("export", "--run_dir", tmp_path, *argv, code=2).output
