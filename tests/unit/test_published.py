"""GPT-2's published weights: a checkpoint in their layout, and a GPT-2 of plain NumPy that reads it
as it stands.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file, save_file

import toys
from cli_runs import jaxdp, records, write
from covering import first
from jaxdp.checkpoint.initialize_from import begin_with, describe, match
from jaxdp.checkpoint.published import GPT2, arrays_of, to_published
from jaxdp.checkpoint.safetensors import Array, Part
from jaxdp.checkpoint.weights import as_published, named, open_weights
from jaxdp.cli.export import export
from jaxdp.cli.parse import parse
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.models import as_model
from jaxdp.models.gpt import GPT
from jaxdp.split import path_string
from published_models import with_transformers

VOCABULARY, LENGTH, LAYERS, HEADS, DIM = 13, 8, 2, 2, 8
ROWS = 16  # of our embedding
TEXT = np.random.default_rng(1).integers(VOCABULARY, size=(16, LENGTH + 1)).astype(np.int32)
EXAMPLES = [{"inputs": row[:-1], "labels": row[1:]} for row in TEXT]


def published(prefix="", seed=0):
    """A checkpoint of random numbers."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return 0.3 * rng.normal(size=shape).astype(np.float32)

    arrays = {"wte.weight": draw(VOCABULARY, DIM), "wpe.weight": draw(LENGTH, DIM)}
    for i in range(LAYERS):
        block = {
            "ln_1.weight": 1 + draw(DIM), "ln_1.bias": draw(DIM), "ln_2.weight": 1 + draw(DIM), "ln_2.bias": draw(DIM),
            "attn.c_attn.weight": draw(DIM, 3 * DIM), "attn.c_attn.bias": draw(3 * DIM),
            "attn.c_proj.weight": draw(DIM, DIM), "attn.c_proj.bias": draw(DIM),
            "mlp.c_fc.weight": draw(DIM, 4 * DIM), "mlp.c_fc.bias": draw(4 * DIM),
            "mlp.c_proj.weight": draw(4 * DIM, DIM), "mlp.c_proj.bias": draw(DIM),
            "attn.bias": np.tri(LENGTH, dtype=np.float32)[None, None],
        }  # fmt: skip
        arrays |= {f"h.{i}.{name}": x for name, x in block.items()}
    arrays |= {"ln_f.weight": 1 + draw(DIM), "ln_f.bias": draw(DIM)}
    return {prefix + name: x for name, x in arrays.items()}


def oracle(w, tokens):
    """The logits of tokens [example, token]: GPT-2 in NumPy, by its published names, biases of keys
    and all.
    """

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"]
            + w[f"{name}.bias"]
        )

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    for i in range(LAYERS):
        heads = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").reshape(
            *tokens.shape, 3, HEADS, DIM // HEADS
        )
        query, key, value = np.moveaxis(heads, 2, 0).swapaxes(2, 3)  # [example, head, token, width]
        scores = query @ key.swapaxes(2, 3) / np.sqrt(DIM / HEADS)
        weights = np.exp(np.where(np.tri(tokens.shape[1], dtype=bool), scores, -np.inf))
        mixed = (weights / weights.sum(-1, keepdims=True) @ value).swapaxes(1, 2).reshape(x.shape)
        x = x + linear(mixed, f"h.{i}.attn.c_proj")
        up = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + linear(up, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def nats(logits, labels):
    """The mean cross-entropy of the next tokens."""
    logits = logits - logits.max(-1, keepdims=True)
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log, labels[..., None], -1).mean()


def model(**args):
    sizes = {
        "input_shape": (LENGTH,),
        "num_classes": VOCABULARY,
        "layers": LAYERS,
        "heads": HEADS,
        "dim": DIM,
    }
    return as_model(lambda rngs: GPT(**{**sizes, **args}, rngs=rngs))


def from_published(tensors, stacked=True):
    """{our path: array} of the tensors of a file."""
    stored = {name: Array(x.shape, x.dtype, (Part(name),), name) for name, x in tensors.items()}

    def take(part):
        return (
            tensors[part.tensor]
            if part.third is None
            else np.split(tensors[part.tensor], 3, -1)[part.third]
        )

    arrays = arrays_of(GPT2, stored, stacked)
    return {
        k: np.stack([*map(take, x.parts)]) if x.stacked else take(x.parts[0])
        for k, x in arrays.items()
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("scan", [True, False])
def test_logits_and_loss_equal_the_published_models(scan, prefix):
    made, (inputs, labels) = model(scan=scan), (TEXT[:4, :-1], TEXT[:4, 1:])
    params = unflatten_dict(from_published(published(prefix), scan), sep="/")
    got = jax.jit(
        lambda p: made.apply(p, {}, {"inputs": inputs}, jax.random.key(0), False)[0].compute()
    )(params)
    got, want = np.asarray(got)[..., :VOCABULARY], oracle(published(), inputs)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    total, weight, _ = SoftmaxCrossEntropy()(
        jnp.asarray(got), {"labels": labels, "mask": jnp.ones(labels.shape)}
    )
    np.testing.assert_allclose(total / weight, nats(want, labels), rtol=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_what_is_written_in_the_layout_reads_back(scan):
    arrays = from_published(published(), scan)
    written = to_published(GPT2, arrays, VOCABULARY)
    for name, x in published("transformer.").items():
        if name.endswith("attn.bias"):
            continue
        if name.endswith("c_attn.bias"):
            x, y = (
                np.delete(x.reshape(3, DIM), 1, 0),
                np.delete(written[name].reshape(3, DIM), 1, 0),
            )
            assert not written[name].reshape(3, DIM)[1].any()
        else:
            y = written[name]
        np.testing.assert_array_equal(x, y)
    assert len(written) == len(published()) - LAYERS  # but for the masks
    with pytest.raises(ValueError, match="not GPT-2's model: 'head/bias' is in only one of them"):
        to_published(GPT2, {**arrays, "head/bias": np.zeros(1)}, VOCABULARY)


def begun(file, made, **options):
    """(the exported state that a run begins with, what is said of it, its state before)."""
    examples = {"inputs": TEXT[:, :-1], "labels": TEXT[:, 1:]}
    strategy, step, _ = toys.build(made, examples, batch_size=16, optimizer="momentum", **options)
    ours = named(strategy.shapes.params, strategy.shapes.model_state)
    weights = as_published(open_weights(file, False), file, ours)
    found = match(ours, weights.arrays, weights.title)
    tx = toys.OPTIMIZERS["momentum"][0]()
    state = strategy.export(begin_with(strategy, weights, found.pairs, tx, step.trainable))
    first = strategy.export(strategy.init())

    def numbers(tree):
        return {path_string(k): np.array(x) for k, x in jax.tree_util.tree_leaves_with_path(tree)}

    return (
        numbers(state.params),
        f"{describe(found, ours, weights.title, weights.rows)}\n{weights.note}",
        numbers(first.params),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    first(1, [{"backend": "pjit", "devices": 4, "layout": {"zero": 3}}, {}]),
    ids=["zero 3", "one"],
)
def test_a_file_is_read_in_its_place(tmp_path, layout):
    """Split over devices or not; rows of the embedding beyond the file's stay as they were."""
    file = tmp_path / "model.safetensors"
    save_file({**published(), "lm_head.weight": published()["wte.weight"]}, file, {"format": "pt"})
    params, said, first = begun(file, model(num_classes=ROWS), **layout)
    want = from_published(published())
    rows = len(params["embed/embedding"])
    assert rows >= ROWS and set(params) == set(want)
    for name, x in want.items():
        np.testing.assert_array_equal(params[name][: len(x)], x)
    kept = params["embed/embedding"][VOCABULARY:]
    np.testing.assert_array_equal(kept, first["embed/embedding"][VOCABULARY:])
    assert (
        kept[: ROWS - VOCABULARY].any(1).all()
        and "not used" not in said
        and "not in the source" not in said
    )
    assert f"19 of 19 parameters, {sum(x.size for x in want.values()):,} elements" in said
    assert re.search(
        rf"rows {VOCABULARY} to {rows - 1} of embed/embedding left as initialized; key biases", said
    )


@pytest.mark.slow
def test_fewer_positions_and_blocks_of_their_own(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(published("transformer."), file)
    params, said, _ = begun(file, model(input_shape=(LENGTH - 2,), scan=False))
    np.testing.assert_array_equal(params["positions"], published()["wpe.weight"][: LENGTH - 2])
    third = published()["h.1.attn.c_attn.bias"][2 * DIM :]
    np.testing.assert_array_equal(params["blocks/modules/1/attention/value/bias"], third)
    assert f"the first {LENGTH - 2} of {LENGTH} positions" in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"layers": 3}, r"has shape \(2, 8\) in .* as 'h.\*.attn.c_proj.bias', but \(3, 8\) here"),
        (
            {"num_classes": 12, "dim": 8},
            r"'embed/embedding' has shape \(13, 8\) in .* as 'wte.weight', but \(12, 8\)",
        ),
        (
            {"hidden": 16},
            r"has shape \(2, 32, 8\) in .* as 'h.\*.mlp.c_proj.weight', but \(2, 16, 8\)",
        ),
        (
            {"input_shape": (9,)},
            r"'positions' has shape \(8, 8\) in .* as 'wpe.weight', but \(9, 8\) here",
        ),
    ],
    ids=["layers", "vocabulary", "hidden", "positions"],
)
def test_a_tensor_that_does_not_fit_names_both_shapes(tmp_path, args, words):
    file = tmp_path / "model.safetensors"
    save_file(published(), file)
    made = model(**args)
    ours = jax.eval_shape(made.init, jax.random.key(0), {"inputs": TEXT[:1, :-1]})
    ours = named(ours[0], ours[1])
    if args.get("num_classes"):  # the embedding may be padded; the file's is larger all the same
        rows = jax.ShapeDtypeStruct((args["num_classes"], DIM), np.float32)
        ours = {**ours, "embed/embedding": rows}
    weights = as_published(open_weights(file, False), file, ours)
    with pytest.raises(UsageError, match=words) as error:
        match(ours, weights.arrays, weights.title)
    assert "\n" not in str(error.value)


def test_other_files_and_models_are_left_as_they_are(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(published(), file)
    weights, other = open_weights(file, False), {"a": np.zeros(2)}
    assert as_published(weights, file, other) is weights
    save_file({"embed.embedding": np.zeros((2, 2), np.float32)}, file)
    weights = open_weights(file, False)
    params = jax.eval_shape(model().init, jax.random.key(0), {"inputs": TEXT[:1, :-1]})[0]
    assert as_published(weights, file, named(params, {})) is weights


@pytest.mark.slow
def test_published_weights_are_trained_and_exported(tmp_path):
    """The loss of the first update is that of the published model on the data; so is that of what
    is written.
    """
    save_file(published(), tmp_path / "model.safetensors", {"format": "pt"})
    config = {
        "model": {
            "target": "GPT",
            "args": {"num_classes": VOCABULARY, "layers": LAYERS, "heads": HEADS, "dim": DIM},
        },
        "data": {"target": f"{__name__}.EXAMPLES"},
        "steps": 2,
        "batch_size": 16,
        "init_from": str(tmp_path / "model.safetensors"),
        "log": {"every": 1},
        "optimizer": {"target": "sgd", "lr": 0.1},
    }
    file = write(tmp_path, json.dumps(config))
    done = jaxdp(
        "--config", file, "--run_dir", tmp_path / "run", env={"PYTHONPATH": "tests/support:."}
    )
    assert (
        "loaded 19 of 19 parameters" in done.stdout and "in GPT-2's published layout" in done.stdout
    )
    losses = [record["loss"] for record in records(tmp_path / "run", "train")]
    np.testing.assert_allclose(
        losses[0], nats(oracle(published(), TEXT[:, :-1]), TEXT[:, 1:]), rtol=1e-5
    )
    assert losses[1] < losses[0]
    export(parse(["--run_dir", str(tmp_path / "run"), "--layout", "huggingface"], "export")[0])
    trained = load_file(tmp_path / "run" / "huggingface" / "model.safetensors")
    trained = {name.removeprefix("transformer."): x for name, x in trained.items()}
    final = records(tmp_path / "run", "train")[-1]
    assert (
        trained.keys() == published().keys() - {f"h.{i}.attn.bias" for i in range(LAYERS)}
        and final["step"] == 2
    )
    assert trained["wte.weight"].shape == (VOCABULARY, DIM)  # without the rows that pad ours
    after = nats(oracle(trained, TEXT[:, :-1]), TEXT[:, 1:])
    assert losses[0] - after > 1.2 * (losses[0] - losses[1])  # two updates on


TRANSFORMERS = """
import sys
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

directory, verb, dtype = sys.argv[1:]
tokens = torch.arange(48).reshape(4, 12) * 5 % 257
if verb == "make":
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=12, n_embd=32, n_layer=2, n_head=2))
    for name, x in model.named_parameters():
        x.data += 0.2 * torch.randn_like(x)
        if name.endswith("c_attn.bias"):
            x.data[32:64] = 0
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory)
else:
    model = GPT2LMHeadModel.from_pretrained(directory, dtype=getattr(torch, dtype))
state = {name: x.float().numpy() for name, x in model.state_dict().items()}
logits = model.eval()(tokens).logits.detach().float().numpy()
labels = tokens.roll(-1, 1)
loss = torch.nn.functional.cross_entropy(torch.tensor(logits).flatten(0, 1), labels.flatten()).item()
np.savez(f"{directory}/{verb}.npz", logits=logits, loss=loss, **state)
"""
SENTENCES = {"inputs": np.arange(48).reshape(4, 12) * 5 % 257}
SENTENCES = {
    k: v.astype(np.int32)
    for k, v in {**SENTENCES, "labels": np.roll(SENTENCES["inputs"], -1, 1)}.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_an_export_with_its_logits(tmp_path, dtype):
    """257 tokens, no multiple of what our embedding is padded to; an update with a rate of zero."""
    with_transformers(TRANSFORMERS, tmp_path, "make", dtype)
    config = {
        "model": {
            "target": "GPT",
            "args": {"num_classes": 257, "layers": 2, "heads": 2, "dim": 32},
        },
        "data": {"target": f"{__name__}.SENTENCES"},
        "loss": {"target": "CausalLM"},
        "steps": 1,
        "batch_size": 4,
        "init_from": str(tmp_path / "model.safetensors"),
        "optimizer": {"target": "sgd", "lr": 0.0},
        "precision": {"params": dtype, "compute": "float32"},
    }
    done = jaxdp("--config", write(tmp_path, json.dumps(config)), "--run_dir", tmp_path / "run",
                 env={"PYTHONPATH": "tests/support:."})  # fmt: skip
    assert "rows 257 to 383 of embed/embedding left as initialized" in done.stdout
    argv = [
        "--run_dir",
        str(tmp_path / "run"),
        "--layout",
        "huggingface",
        "--output",
        str(tmp_path / "folder"),
    ]
    export(parse(argv, "export")[0])
    with_transformers(TRANSFORMERS, tmp_path / "folder", "load", dtype)
    made, loaded = (np.load(tmp_path / name) for name in ("make.npz", "folder/load.npz"))
    assert made.files == loaded.files
    for name in made.files:
        np.testing.assert_array_equal(loaded[name], made[name], err_msg=name)
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(
        records(tmp_path / "run", "train")[0]["loss"], made["loss"], rtol=tolerance
    )
