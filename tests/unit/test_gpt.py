"""GPT against a transformer of plain loops in NumPy, and the published sizes of GPT-2 and Llama."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import toys
from jaxdp.errors import UsageError
from jaxdp.losses import Logits
from jaxdp.models import as_model
from jaxdp.models.attention import causal, fused, same
from jaxdp.models.gpt import GPT, look_up

VOCABULARY, LENGTH = 11, 6
SMALL = {
    "input_shape": (LENGTH,),
    "num_classes": VOCABULARY,
    "layers": 3,
    "heads": 4,
    "dim": 16,
    "hidden": 24,
}
LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary", "tied": False, "bias": False}
VARIANTS = {
    "gpt2": {},
    "llama": {**LLAMA, "kv_heads": 2, "rotary_base": 100.0},
    "between": {"norm": "rms", "positions": "rotary", "kv_heads": 1},
}
KEY = jax.random.key(0)


def model(**args):
    return as_model(lambda rngs: GPT(**{**SMALL, **args}, rngs=rngs))


def tokens(examples=2, seed=0, dtype=np.int32):
    return {
        "inputs": np.random.default_rng(seed)
        .integers(VOCABULARY, size=(examples, LENGTH))
        .astype(dtype)
    }


def draw(made, dtype=np.float32):
    """Parameters without an initial 0 or 1 among them."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(made.init, KEY, tokens())[0]
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * (rng.normal(size=x.shape) + (x.ndim < 3)), dtype), shapes
    )


def logits(made, params, batch, train=False, key=KEY):
    return made.apply(params, {}, batch, key, train)[0].compute()


# --- the numbers
# -----------------------------------------------------------------------------------------------------


def oracle(p, tokens, heads=4, norm="layer", mlp="gelu", kv_heads=None, rotary_base=1e4, **_):
    """The logits of one row of tokens by loops over blocks, heads and tokens, from the papers;
    NumPy alone.
    """

    def normalize(x, p):
        if norm == "rms":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def linear(x, p):
        return x @ p["kernel"] + p.get("bias", 0)

    def turned(vector, place):
        half = len(vector) // 2
        pairs = vector[:half] + 1j * vector[half:]
        pairs = pairs * np.exp(1j * place * rotary_base ** (-np.arange(half) / half))
        return np.concatenate([pairs.real, pairs.imag])

    def attention(x, p):
        query, key, value = (linear(x, p[name]) for name in ("query", "key", "value"))
        width, out = query.shape[1] // heads, np.zeros_like(query)
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            shared = h * (kv_heads or heads) // heads
            theirs = slice(shared * width, (shared + 1) * width)
            for t in range(len(x)):
                q, ks = query[t, own], key[: t + 1, theirs]
                if rotary:
                    q, ks = turned(q, t), np.array([turned(k, s) for s, k in enumerate(ks)])
                weights = np.exp(ks @ q / np.sqrt(width))
                out[t, own] = weights / weights.sum() @ value[: t + 1, theirs]
        return linear(out, p["back"])

    def feed(x, p):
        if mlp == "swiglu":
            gate = linear(x, p["gate"])
            return linear(gate / (1 + np.exp(-gate)) * linear(x, p["up"]), p["back"])
        up = linear(x, p["up"])
        return linear(
            0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))), p["back"]
        )

    p, rotary = jax.tree.map(np.asarray, p), "positions" not in p
    x = p["embed"]["embedding"][tokens]
    if not rotary:
        x = x + p["positions"][: len(x)]
    for i in range(3):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], p["blocks"]["stack"])
        x = x + attention(normalize(x, block["norm1"]), block["attention"])
        x = x + feed(normalize(x, block["norm2"]), block["mlp"])
    kernel = p["head"]["kernel"] if "head" in p else p["embed"]["embedding"].T
    return normalize(x, p["norm"]) @ kernel[:, :VOCABULARY]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_plain_loops(name):
    made, batch = model(**VARIANTS[name]), tokens()
    with jax.enable_x64(True):
        params = draw(made, np.float64)
        got = jax.jit(lambda p: logits(made, p, batch))(params)
        assert got.dtype == np.float64 and got.shape == (2, LENGTH, VOCABULARY)
        want = np.stack([oracle(params, row, **VARIANTS[name]) for row in batch["inputs"]])
        assert np.abs(want).max() > 0.5
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_dtypes_are_those_of_the_parameters(name):
    made, batch = model(**VARIANTS[name]), tokens()
    params = draw(made)
    with jax.numpy_dtype_promotion("strict"):
        exact = logits(made, params, batch)
    assert exact.dtype == jnp.float32
    np.testing.assert_array_equal(exact, logits(made, params, tokens(dtype=np.uint8)))
    rough = logits(made, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)
    assert rough.dtype == jnp.float32  # for the loss
    np.testing.assert_allclose(rough, exact, rtol=0, atol=0.1 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_have_wide_logits_narrow_grads(dtype):
    x, kernel = (jax.random.normal(key, (4, 8, 64)).astype(dtype) for key in jax.random.split(KEY))
    found = Logits(x, kernel[0], 7).compute()
    want = np.einsum("...d,vd->...v", *(np.asarray(a, np.float64) for a in (x, kernel[0, :7])))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, atol=1e-5)

    def squares(x, kernel):
        return jnp.sum(Logits(x, kernel, 7).compute() ** 2)

    gradients = jax.grad(squares, (0, 1))(x, kernel[0])
    wanted = np.einsum("btv,vd->btd", 2 * want, np.asarray(kernel[0, :7], np.float64))
    np.testing.assert_allclose(
        np.asarray(gradients[0], np.float64), wanted, atol=0.02 * np.abs(wanted).max()
    )
    assert {g.dtype for g in gradients} == {jnp.dtype(dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_later_token_leaves_earlier_logits(name):
    made, batch = model(**VARIANTS[name]), tokens(1)
    params = draw(made)
    run = jax.jit(lambda inputs: logits(made, params, {"inputs": inputs}))
    before = run(batch["inputs"])
    for place in range(LENGTH):
        changed = batch["inputs"].copy()
        changed[0, place] = (changed[0, place] + 1) % VOCABULARY
        after = run(changed)
        np.testing.assert_array_equal(after[0, :place], before[0, :place])
        assert (np.abs(after[0, place:] - before[0, place:]).max(-1) > 1e-4).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_see_their_own_segment_only(name):
    """Two documents packed into one example; under learned positions the second stands where it
    does alone.
    """
    made = model(**VARIANTS[name])
    params, text = draw(made), tokens(2)["inputs"]
    run = jax.jit(
        lambda inputs, segments: logits(made, params, {"inputs": inputs, "segments": segments})
    )
    segments = np.array([[5, 5, 5, 2, 2, 2], [0, 0, 0, 0, 0, 0]], np.int32)
    got = run(text, segments)
    np.testing.assert_allclose(got[1], logits(made, params, {"inputs": text})[1], atol=1e-5)
    other = text.copy()
    other[0, :3] = (text[0, :3] + 1) % VOCABULARY
    np.testing.assert_array_equal(run(other, segments)[0, 3:], got[0, 3:])
    assert np.abs(run(other, np.zeros_like(segments))[0, 3:] - got[0, 3:]).max() > 1e-3
    moved = np.concatenate([text[:1, 3:], text[:1, :3]], 1)
    if "rotary" in VARIANTS[name].get(
        "positions", ""
    ):  # only distances count, so a document may stand anywhere
        np.testing.assert_allclose(run(moved, segments[:1])[0, :3], got[0, 3:], atol=1e-5)


@pytest.mark.slow
def test_cudnns_mask_is_that_of_the_segments():
    """By JAX's own attention, whose arguments `fused` uses; cuDNN itself needs a GPU."""
    rng = np.random.default_rng(0)
    query, key, value = jnp.asarray(rng.normal(size=(3, 2, 5, 4, 8)), jnp.float32)
    segments = jnp.asarray([[0, 0, 1, 1, 1], [3, 3, 3, 3, 4]])
    want = jax.nn.dot_product_attention(
        query, key, value, mask=same(segments), is_causal=True, implementation="xla"
    )
    np.testing.assert_allclose(causal(query, key, value, same(segments)), want, atol=1e-5)


@pytest.mark.slow
def test_scanned_blocks_are_a_loop_over_their_slices():
    module = GPT(**SMALL, dropout=0.3, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module.blocks.stack)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, LENGTH, 16)), jnp.float32)
    want = x
    for i in range(3):
        want = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(want, None)
    np.testing.assert_allclose(module.blocks(x, None), want, atol=1e-6)


@pytest.mark.slow
def test_an_embeddings_gradient_is_that_of_differences():
    """Tied: what comes through the look-up and through the logits adds up."""
    made, batch = model(), tokens()
    with jax.enable_x64(True):
        params = draw(made, np.float64)
        weights = np.random.default_rng(3).normal(size=(2, LENGTH, VOCABULARY))
        step = np.random.default_rng(4).normal(size=(128, 16))

        @jax.jit
        def total(embedding):
            return jnp.sum(
                weights * logits(made, {**params, "embed": {"embedding": embedding}}, batch)
            )

        at = params["embed"]["embedding"]
        slope = (total(at + 1e-5 * step) - total(at - 1e-5 * step)) / 2e-5
        np.testing.assert_allclose(jnp.sum(jax.grad(total)(at) * step), slope, rtol=1e-7)


def test_a_common_token_keeps_its_gradient_in_bfloat16():
    """A sum in bfloat16 stops at 256 ones."""
    gradient = jax.grad(lambda e: jnp.sum(look_up(e, jnp.zeros((4, 250), jnp.uint8), 3)))(
        jnp.ones((3, 2), jnp.bfloat16)
    )
    assert gradient.dtype == jnp.bfloat16 and gradient.tolist() == [[1000, 1000], [0, 0], [0, 0]]


def test_tokens_outside_the_vocabulary_are_not_finite():
    """Also those for which the table has rows, up to a multiple of the vocabulary."""
    rows = look_up(jnp.ones((16, 2)), jnp.array([0, 9, -1, 10, 15, 16, 200]), 10)
    assert np.isfinite(rows).all(1).tolist() == [True, True] + [False] * 5


@pytest.mark.slow
def test_dropout_follows_the_key_evaluation_has_none():
    made, plain, batch = model(dropout=0.5), model(), tokens()
    params = draw(made)
    run = jax.jit(lambda key, train: logits(made, params, batch, train, key), static_argnums=1)
    first, again, other = run(KEY, True), run(KEY, True), run(jax.random.key(1), True)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other) and not np.allclose(first, run(KEY, False))
    np.testing.assert_allclose(run(KEY, False), logits(plain, params, batch), atol=1e-6)


@pytest.mark.slow
def test_training_is_the_same_on_any_devices():
    batch = tokens(24)
    examples = {**batch, "labels": np.roll(batch["inputs"], -1, 1)}
    made = model(layers=2, dropout=0.1, **VARIANTS["llama"])
    with jax.enable_x64(True):
        one, four = (
            toys.train(
                made, examples, backend=backend, devices=n, steps=3, batch_size=12, dtype="float64"
            )
            for backend, n in (("pmap", 1), ("pjit", 4))
        )
    assert four[2][-1]["loss"] < four[2][0]["loss"]
    assert toys.relative_error(four[1].params, one[1].params)[0] < 1e-10


# --- sizes, initialization, errors
# -----------------------------------------------------------------------------------


def shapes(**args):
    made = as_model(lambda rngs: GPT(**args, rngs=rngs))
    assert made.blocks == ("blocks/stack",)
    return jax.eval_shape(made.init, KEY, {"inputs": np.zeros((1, 4), np.int32)})[0]


def test_gpt2_has_its_published_size_less_key_biases():
    params = shapes(input_shape=(1024,), num_classes=50257, vocabulary_multiple=1)
    assert sum(x.size for x in jax.tree.leaves(params)) == 124_439_808 - 12 * 768
    assert "bias" not in params["blocks"]["stack"]["attention"]["key"]
    params = shapes(input_shape=(1024,), num_classes=50257)
    assert sum(x.size for x in jax.tree.leaves(params)) == 124_466_688
    # Under a rotation a bias of the keys is no constant, and stays.
    turned = shapes(input_shape=(1024,), num_classes=50257, positions="rotary")
    assert "bias" in turned["blocks"]["stack"]["attention"]["key"]


def test_llama_7b_has_its_published_size():
    params = shapes(input_shape=(2048,), num_classes=32000, layers=32, heads=32, dim=4096, **LLAMA)
    assert sum(x.size for x in jax.tree.leaves(params)) == 6_738_415_616
    assert params["blocks"]["stack"]["mlp"]["gate"]["kernel"].shape == (32, 4096, 11008)


@pytest.mark.slow
def test_initial_weights_are_gpt2s():
    params = jax.jit(model(dim=64, hidden=256, layers=8).init)(KEY, tokens())[0]
    stack = params["blocks"]["stack"]
    for leaf in (
        params["embed"]["embedding"],
        params["positions"],
        stack["attention"]["query"]["kernel"],
    ):
        assert np.std(leaf) == pytest.approx(0.02, rel=0.1) and abs(np.mean(leaf)) < 0.003
    for part in ("attention", "mlp"):
        kernel = stack[part]["back"]["kernel"]
        assert np.std(kernel) == pytest.approx(0.005, rel=0.05) and not np.array_equal(
            kernel[0], kernel[1]
        )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"dim": 18}, "model.args.dim: 18 does not divide by heads: 4"),
        ({"kv_heads": 3}, "model.args.heads: 4 does not divide by kv_heads: 3"),
        ({"kv_heads": 0}, "model.args.kv_heads: 0 is too small"),
        ({"layers": 0}, "model.args.layers: 0 is too small"),
        ({"norm": "batch"}, "model.args.norm: 'batch' is not one of 'layer', 'rms'"),
        ({"mlp": "relu"}, "model.args.mlp: 'relu' is not one of 'gelu', 'swiglu'"),
        ({"positions": "alibi"}, "model.args.positions: 'alibi' is not one of 'learned', 'rotary'"),
        (
            {"attention": "flash"},
            "model.args.attention: 'flash' is not one of 'auto', 'xla', 'cudnn'",
        ),
        (
            {"positions": "rotary", "dim": 12},
            "model.args.heads: 4 of 3 dims cannot rotate by pairs",
        ),
        ({"dropout": 1.0}, r"model.args.dropout: 1.0 is not in \[0, 1\)"),
        ({"input_shape": (8, 8, 1)}, r"model.args.input_shape: \(8, 8, 1\) is not \(length,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(args, words):
    with pytest.raises(UsageError, match=words):
        model(**args)


def test_inputs_that_do_not_fit_are_named():
    made = model()
    params = draw(made)
    for inputs, words in (
        (np.zeros((2, 3), np.float32), r"reads integers \[example, token\], not float32\[2, 3\]"),
        (np.zeros((2, 3, 1), np.int32), r"not int32\[2, 3, 1\]"),
        (np.zeros((2, LENGTH + 1), np.int32), "7 tokens, but learned positions for 6"),
    ):
        with pytest.raises(UsageError, match=words):
            logits(made, params, {"inputs": inputs})
    with pytest.raises(UsageError, match=r"segments\[2\] do not fit tokens\[2, 3\]"):
        logits(
            made, params, {"inputs": np.zeros((2, 3), np.int32), "segments": np.zeros(2, np.int32)}
        )
    heads = jnp.zeros((1, 2, 4, 8), jnp.float32)
    with pytest.raises(
        UsageError, match="'cudnn' needs bfloat16 on an NVIDIA GPU, not float32 on cpu"
    ):
        fused(heads, heads, heads)


@pytest.mark.slow
def test_separate_blocks_compute_what_scanned_ones_do():
    scanned, chained = model(), model(scan=False)
    params = draw(scanned)
    stack = params["blocks"]["stack"]
    each = {str(i): jax.tree.map(lambda x, i=i: x[i], stack) for i in range(SMALL["layers"])}
    own = {**params, "blocks": {"modules": each}}
    np.testing.assert_allclose(
        logits(scanned, params, tokens()), logits(chained, own, tokens()), rtol=1e-5, atol=1e-6
    )
    assert chained.blocks == () and scanned.blocks == ("blocks/stack",)
