"""A folder of Hugging Face by its path: logits of NumPy and of transformers, or a refusal by key."""

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
from jaxdp.losses import compute_logits
from jaxdp.run.components import make_parts
from jaxdp.run.datasets import shapes_of_model
from jaxdp.run.initial_weights import fitted
from pretrained_folders import LENGTH, VOCABULARY

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
