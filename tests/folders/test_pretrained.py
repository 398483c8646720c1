"""A folder of Hugging Face by its path: logits of NumPy and of transformers, or a refusal by key."""

import collections
import json
import pathlib

import jax
import numpy as np
import pytest

import pretrained_folders
import published_models
from jaxdp.checkpoint.weights import named, open_weights
from jaxdp.config.parsing import from_mapping
from jaxdp.errors import UsageError
from jaxdp.folders.pretrained import read_folder
from jaxdp.losses import compute_logits
from jaxdp.run.components import make_parts
from jaxdp.run.datasets import shapes_of_model
from jaxdp.run.initial_weights import fitted
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


def nested(params):
    tree = {}
    for name, x in params.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = x
    return tree


def logits(folder, **args):
    """(the logits of INPUTS by the model of a folder, the lines about its weights)."""
    config = config_of(folder, **args)
    parts = make_parts(config)
    shapes = named(*shapes_of_model(parts.forward, parts.dataset, 2))
    path = pathlib.Path(folder)
    loaded = fitted(config, parts, {}, open_weights(path, False), path, shapes)
    assert set(loaded.matched.pairs) == set(shapes) and not loaded.matched.unused
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        theirs: jax.ShapeDtypeStruct(shapes[ours].shape, np.float32, sharding=place)
        for ours, theirs in loaded.matched.pairs.items()
    }
    params = nested(loaded.weights.read(wanted))

    @jax.jit
    def forward(params):
        batch = {"inputs": INPUTS, "mask": np.ones(len(INPUTS), bool)}
        return compute_logits(
            parts.forward.model.apply(params, {}, batch, jax.random.key(0), False)[0]
        )

    return np.asarray(forward(params)), loaded.text


def refusal(folder, **args):
    with pytest.raises(UsageError) as error:
        logits(folder, **args)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500, text
    return text


@pytest.mark.quick(12)
@pytest.mark.parametrize("seed", range(NUMBER))
def test_a_folder_has_the_logits_of_numpy_or_is_refused_by_its_key(seed, tmp_path):
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
def test_no_key_of_transformers_changes_the_logits_in_silence(family, tmp_path):
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
