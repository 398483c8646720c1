"""A folder of Hugging Face by its path: logits of NumPy and of transformers, or a refusal by key."""

import collections
import dataclasses
import json
import pathlib
import shlex
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

import jaxdp
import pretrained_folders
import published_models
import tokenizer_files
from cli_runs import ended
from commands import blocks
from jaxdp.checkpoint import published
from jaxdp.checkpoint.weights import named, open_weights
from jaxdp.cli.export import export
from jaxdp.config.parsing import from_mapping
from jaxdp.data.tokenizers import Byte
from jaxdp.errors import UsageError
from jaxdp.folders.pretrained import read_folder
from jaxdp.losses import compute_logits
from jaxdp.run.components import make_parts
from jaxdp.run.datasets import shapes_of_model
from jaxdp.run.initial_weights import fitted
from launch import ROOT
from pretrained_folders import FAMILIES, LENGTH, VOCABULARY
from published_models import with_transformers

TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=(10, LENGTH + 1)).astype(np.int32)
EXAMPLES = [{"inputs": row[:-1], "labels": row[1:]} for row in TOKENS]
INPUTS = TOKENS[:3, :-1]
NUMBER = 50


def config_of(folder, **args):
    return from_mapping(
        {
            "model": {"target": "HuggingFace", "args": args},
            "init_from": str(folder),
            "data": {"target": f"{__name__}.EXAMPLES"},
            "loss": {"target": "CausalLM"},
            "steps": 1,
            "batch_size": 8,
        },
        "it",
    )


def parameters(config):
    """({path: array} that a config starts from, its parts and the lines about its weights)."""
    parts = make_parts(config)
    shapes = named(*shapes_of_model(parts.forward, parts.dataset, 2))
    path = pathlib.Path(config.init_from)
    loaded = fitted(config, parts, {}, open_weights(path, False), path, shapes)
    assert set(loaded.matched.pairs) == set(shapes) and not loaded.matched.unused
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        theirs: jax.ShapeDtypeStruct(shapes[ours].shape, np.float32, sharding=place)
        for ours, theirs in loaded.matched.pairs.items()
    }
    return loaded.weights.read(wanted), (parts, loaded.text)


def logits(folder, **args):
    """(the logits of INPUTS by the model of a folder, the lines about its weights)."""
    params, (parts, text) = parameters(config_of(folder, **args))

    @jax.jit
    def forward(params):
        batch = {"inputs": INPUTS, "mask": np.ones(len(INPUTS), bool)}
        return compute_logits(
            parts.forward.model.apply(params, {}, batch, jax.random.key(0), False)[0]
        )

    return np.asarray(forward(unflatten_dict(params, sep="/"))), text


def refusal(folder, **args):
    return refusal_of(config_of(folder, **args))


def refusal_of(config):
    with pytest.raises(UsageError) as error:
        parameters(config)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    return text


def tensors_of(folder):
    return [name for file in folder.glob("*.safetensors") for name in load_file(file)]


@pytest.mark.quick(12)
@pytest.mark.parametrize("seed", range(NUMBER))
def test_a_folder_equals_numpy_or_is_refused_by_key(seed, tmp_path):
    folder = tmp_path / "folder"
    made = pretrained_folders.make(folder, seed)
    if made.refused is not None:
        assert f" has {made.refused}: " in refusal(folder)
        return
    got, text = logits(folder)
    want = published_models.logits(folder, INPUTS)
    vocabulary = want.shape[-1]
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got[..., :vocabulary], want, rtol=0, atol=1e-5)
    assert "without effect, of its config.json: " in text and "not compared" not in text


# --- refusals


def plain(tmp_path, family="llama", **changes):
    """A folder that loads but for these changes to its config.json; "absent" removes a key."""
    seeds = range(FAMILIES.index(family), NUMBER, 4)
    folder = tmp_path / family
    next(seed for seed in seeds if pretrained_folders.make(folder, seed).refused is None)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"model_type": "granite"}, "'granite', but HuggingFace reads gpt2, llama, mistral, qwen2"),
        ("llama", {"model_type": "absent"}, "model_type: 'None', but HuggingFace reads"),
        ("llama", {"hidden_size": "8"}, "hidden_size: '8', which is not an integer above 0"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers: 0, which is not an integer above 0"),
        ("llama", {"num_attention_heads": True}, "num_attention_heads: True, which is not an integer above 0"),
        ("llama", {"num_attention_heads": 5}, "num_attention_heads: 5, which does not divide hidden_size: "),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: 3, which does not divide num_attention_heads: "),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps: '1e-5', which is not a number above 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: nan, which is not a number above 0"),
        ("llama", {"rope_parameters": {"rope_theta": None}, "rope_scaling": None}, "rope_theta: None, which is not a"),
        ("llama", {"rope_parameters": [1], "rope_scaling": None}, "rope_parameters: [1], which GPT does not compute"),
        ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings: None, which is not true or false"),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config: {'0': {}}, "
         "which is not known; if it does not matter, add the key to model.args.ignore"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4}, which is not known"),
        ("gpt2", {"n_positions": 11}, "n_positions: 11, but the examples have 12 tokens"),
        ("gpt2", {"rope_theta": 10_000.0}, "rope_theta: 10000.0, which is not known"),
        ("gpt2", {"num_attention_heads": 1}, "num_attention_heads: 1, which is not known"),
        ("mistral", {"sliding_window": 11}, "sliding_window: 11, but the examples have 12 tokens"),
        ("mistral", {"attention_bias": True}, "attention_bias: True, which is not known"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "layer_types: ['sliding_attention'], which GPT does not"),
        ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window: 'no', which GPT does not compute"),
    ],
)  # fmt: skip
def test_a_key_that_does_not_fit_is_named_with_value(family, changes, words, tmp_path):
    assert words in refusal(plain(tmp_path, family, **changes))


def test_an_unknown_key_is_accepted_by_name(tmp_path):
    folder = plain(tmp_path, my_note="by hand")
    assert "my_note: 'by hand', which is not known" in refusal(folder)
    got, text = logits(folder, ignore=["my_note"])
    assert "my_note" in text and np.isfinite(got).all()
    for name in ("my_notes", "hidden_size"):
        text = refusal(folder, ignore=["my_note", name])
        assert f"model.args.ignore: '{name}' is no unknown key of " in text


def test_data_with_more_tokens_than_it_has_is_refused(tmp_path):
    text = refusal(plain(tmp_path), num_classes=61)
    assert "has vocab_size: " in text and "data has 61 tokens; use the tokenizer of the fo" in text


def test_what_is_no_folder_is_named(tmp_path):
    hint = "is not a folder with a config.json; download the files of the model"
    assert f"'openai-community/gpt2' {hint}" in refusal("openai-community/gpt2")
    with pytest.raises(UsageError, match="init_from: HuggingFace needs a folder; set init_from"):
        make_parts(dataclasses.replace(config_of(tmp_path), init_from=None))
    folder = plain(tmp_path)
    (folder / "config.json").write_text("{")
    assert "config.json' is not a JSON mapping" in refusal(folder)


def test_a_key_that_is_left_out_is_named(tmp_path):
    """With the value of transformers; with the fix, if the weights have another one."""
    folder = plain(tmp_path, rms_norm_eps="absent")
    _, text = logits(folder)
    assert "left out there, so as in transformers: " in text and "rms_norm_eps 1e-06" in text
    folder = plain(tmp_path, num_hidden_layers="absent")
    text = refusal(folder)
    assert (
        ", or correct its config.json (left out there, so as in " in text
        and "num_hidden_layers 32" in text
    )


@pytest.mark.parametrize("there", [True, False])
def test_another_config_json_is_refused_later(there, tmp_path, monkeypatch):
    """By a run that resumes, by what reads its checkpoint, and by an export."""
    folder = plain(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    tuned("llama", run_dir="run")
    changed = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.25}
    words = "config.json, which decides what the model computes, has changed since"
    if not there:
        words = "so it must stay there"
        folder.rename(tmp_path / "elsewhere")
    else:
        (folder / "config.json").write_text(json.dumps(changed))
    options = {"run_dir": "run", "step": None, "ema": False, "layout": "huggingface"}
    with pytest.raises(UsageError, match=words):
        tuned("llama", run_dir="run", resume={"force": False})
    with pytest.raises(UsageError, match=words):
        jaxdp.load("run")
    with pytest.raises(UsageError, match=words):
        export({**options, "output": "new"})


def test_the_weights_must_fit_config_json(tmp_path):
    folder = plain(tmp_path, vocab_size=100)
    assert "num_classes is 100, but 'model.embed_tokens.weight' has" in refusal(folder)
    folder = plain(tmp_path, attention_bias="absent", mlp_bias="absent")
    biased = [name for name in tensors_of(folder) if name.endswith(".bias")]
    assert biased and "no parameter here is its 'model.layers." in refusal(folder)
    other = plain(tmp_path / "other", rms_norm_eps=0.5)
    folder = plain(tmp_path)
    config = config_of(other, init_from=str(folder))  # the model of one, the weights of another
    assert "epsilon is 1e-0" in refusal_of(config) and "rms_norm_eps: 0.5 in" in refusal_of(config)


# --- export


def tuned(family, **more):
    """Three updates of the model of a folder."""
    return jaxdp.fit(
        {"target": "HuggingFace"}, {"target": f"{__name__}.EXAMPLES"}, "CausalLM", init_from=str(family), steps=3,
        batch_size=5, microbatches=1, parallel={"devices": 1}, optimizer={"target": "adamw", "lr": 1e-2},
        compilation_cache=None, **more,
    )  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_finetuned_folder_is_written_again(family, tmp_path, monkeypatch):
    folder = plain(tmp_path, family)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    monkeypatch.chdir(tmp_path)
    fitted = tuned(family, run_dir="run")
    options = {"run_dir": "run", "step": None, "ema": False, "layout": "huggingface"}
    with pytest.raises(UsageError, match="is the folder that the run started from; give another"):
        export({**options, "output": family})
    got, new = fitted.predict(INPUTS), tmp_path / "new"
    monkeypatch.chdir(folder)  # the run remembers where its relative paths begin
    options["run_dir"] = str(tmp_path / "run")
    assert f"tokenizer: that of {family}" in export({**options, "output": str(new)})
    want = published_models.logits(new, INPUTS)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    before = published_models.logits(folder, INPUTS)
    assert np.abs(want - before).max() > 0.01
    old, written = (json.loads((x / "config.json").read_text()) for x in (folder, new))
    assert written == {**old, "dtype": "float32", "torch_dtype": "float32"}
    assert {x.name for x in new.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    np.testing.assert_allclose(logits(new)[0][..., : got.shape[-1]], got, rtol=0, atol=1e-5)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(jaxdp.load("run").predict(INPUTS), got)
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match=f"'{family}' is not a folder with a config.json"):
        jaxdp.load("run")


def test_another_tokenizer_of_the_data_is_written(tmp_path):
    folder = plain(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    params, _ = parameters(config_of(folder))
    meta = {
        "config": {"model": {"target": "HuggingFace", "args": {}}, "init_from": str(folder)},
        "data": {"tokenizer": Byte().spec()},
    }
    arrays = {name: np.asarray(x) for name, x in params.items()}
    assert published.write(tmp_path / "new", arrays, meta).endswith("tokenizer: byte")
    assert json.loads((tmp_path / "new" / "tokenizer.json").read_text())["model"]["type"] == "BPE"


@pytest.mark.slow
def test_a_run_starts_from_one_of_a_folder(tmp_path, capfd):
    """The shape is the folder's, the weights are those of the first run."""
    folder = plain(tmp_path, "qwen2")
    first = tuned(folder, run_dir=tmp_path / "first")
    second = jaxdp.fit(
        {"target": "HuggingFace", "args": {"init_from": str(folder)}}, {"target": f"{__name__}.EXAMPLES"}, "CausalLM",
        init_from=str(tmp_path / "first"), steps=1, batch_size=5, microbatches=1, optimizer={"lr": 0.0},
        run_dir=tmp_path / "second", compilation_cache=None, parallel={"devices": 1},
    )  # fmt: skip
    assert f"parameters, {1808:,} elements, from {tmp_path / 'first'}" in capfd.readouterr().out
    np.testing.assert_array_equal(second.predict(INPUTS), first.predict(INPUTS))


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch):
    """Those of docs/finetune.md: a folder by its path, finetuned and written again."""
    page = (ROOT / "docs" / "finetune.md").read_text()
    (config,) = (text for _, _, text in blocks(page) if text.startswith("# tuned.yaml"))
    (lines,) = (text for _, _, text in blocks(page) if "--run_dir runs/tuned" in text)
    train, export = (shlex.split(line, comments=True)[1:] for line in lines.splitlines())
    folder = tmp_path / "SmolLM2-135M"
    assert pretrained_folders.make(folder, 1, vocabulary=300) == ("llama", None)
    pytest.importorskip("tokenizers")
    tokenizer_files.bpe(folder)
    (tmp_path / "tuned.yaml").write_text(config)
    (tmp_path / "notes.txt").write_text(tokenizer_files.TEXT * 99)
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "2", "--data.args.length", "16", "--parallel.devices", "1"]
    assert "in Llama's published layout" in ended(*train, *small).output
    assert "tokenizer: that of SmolLM2-135M" in ended(*export).output
    new = tmp_path / "runs" / "tuned" / "huggingface"
    assert (new / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    got = jaxdp.load("runs/tuned").predict(INPUTS)
    np.testing.assert_allclose(published_models.logits(new, INPUTS), got, rtol=0, atol=1e-5)


TRANSFORMERS = """
import pathlib, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
for folder in map(pathlib.Path, sys.argv[1:]):
    tokens = torch.tensor(np.load(folder / "tokens.npy").astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        np.save(folder / "logits.npy", model.eval()(tokens).logits.numpy())
"""


def theirs(*folders):
    """The logits of INPUTS that transformers computes from each folder."""
    for folder in folders:
        np.save(folder / "tokens.npy", INPUTS)
    with_transformers(TRANSFORMERS, *folders)
    return [np.load(folder / "logits.npy") for folder in folders]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_finetuned_folder_has_transformers_logits(family, tmp_path):
    fitted = tuned(plain(tmp_path, family), run_dir=tmp_path / "run")
    new = tmp_path / "new"
    options = {"run_dir": str(tmp_path / "run"), "step": None, "ema": False, "output": str(new)}
    export({**options, "layout": "huggingface"})
    (want,) = theirs(new)
    np.testing.assert_allclose(fitted.predict(INPUTS), want, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_folders_have_the_logits_of_transformers(tmp_path):
    folders = {
        tmp_path / str(seed): pretrained_folders.make(tmp_path / str(seed), seed)
        for seed in range(NUMBER)
    }
    loaded = [folder for folder, made in folders.items() if made.refused is None]
    assert {made.family for made in folders.values()} == {*FAMILIES} and len(loaded) >= NUMBER / 2
    refused = collections.Counter(
        f"{made.family} {made.refused}" for made in folders.values() if made.refused
    )
    largest = 0.0
    for folder, want in zip(loaded, theirs(*loaded), strict=True):
        got = logits(folder)[0][..., : want.shape[-1]]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5, err_msg=str(folders[folder]))
        largest = max(largest, float(np.abs(got - want).max()))
    print(f"{len(loaded)} equal, largest difference {largest:.2g}; refused: {dict(refused)}")


VARIANTS = """
import json, pathlib, shutil, sys
import numpy as np, torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
base, output = map(pathlib.Path, sys.argv[1:])
config = json.loads((base / "config.json").read_text())
default = AutoConfig.for_model(config["model_type"]).to_dict()


def others(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1] if isinstance(value, int) else [value / 2]
    if isinstance(value, str):
        return ["gelu", "other"]
    if isinstance(value, dict):
        return [None, {"rope_theta": 5.0}, {"rope_type": "linear", "factor": 2.0}]
    return [1, True, "other", ["sliding_attention"] * config.get("num_hidden_layers", 1)]


tokens = torch.tensor(np.load(base / "tokens.npy").astype(np.int64))
weights = [file for file in base.iterdir() if "safetensors" in file.name]
number = 0
for key in sorted(default.keys() - {"model_type"}):
    for value in others(config.get(key, default[key])):
        folder = output / f"{number}"
        folder.mkdir()
        number += 1
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        (folder / "changed.json").write_text(json.dumps([key, value]))
        for file in weights:
            shutil.copyfile(file, folder / file.name)
        try:
            torch.manual_seed(number)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                logits = model(tokens, return_dict=True).logits.numpy()
        except Exception:
            continue
        np.save(folder / "logits.npy", logits)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_of_transformers_is_ignored_in_silence(family, tmp_path):
    """Each key that a config of transformers has, with other values: either the logits are those of
    transformers, or the folder is refused. Where transformers itself fails, ours may do either."""
    base = tmp_path / "base"
    seeds = (seed for seed in range(NUMBER) if FAMILIES[seed % 4] == family)
    next(seed for seed in seeds if pretrained_folders.make(base / str(seed), seed).refused is None)
    base = max(base.iterdir(), key=lambda folder: int(folder.name))  # that of the last seed
    np.save(base / "tokens.npy", INPUTS)
    variants = tmp_path / "variants"
    variants.mkdir()
    with_transformers(VARIANTS, base, variants)
    plain, _ = logits(base)
    same = read_folder(str(base), LENGTH, ())
    counts = collections.Counter()
    for folder in sorted(variants.iterdir()):
        key, value = json.loads((folder / "changed.json").read_text())
        try:
            read = read_folder(str(folder), LENGTH, ())
            changed = (read.args, read.biased) != (same.args, same.biased)
            got = logits(folder)[0] if changed else plain
        except UsageError as error:
            assert "\n" not in str(error)
            counts["refused"] += 1
            continue
        if not (folder / "logits.npy").exists():
            counts["transformers fails"] += 1
            continue
        want = np.load(folder / "logits.npy")
        counts["equal"] += 1
        np.testing.assert_allclose(
            got[..., : want.shape[-1]], want, rtol=0, atol=1e-5, err_msg=f"{key}: {value!r}"
        )
    print(family, dict(counts))
    assert counts["refused"] > 10 and counts["equal"] > 10
