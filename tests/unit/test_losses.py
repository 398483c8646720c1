"""Losses by themselves: their sums, logits in pieces, several tasks; and one that couples examples,
on any devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import toys
from jaxdp import losses as pieces
from jaxdp.errors import UsageError
from jaxdp.losses import (
    CausalLM,
    Contrastive,
    Logits,
    MeanSquaredError,
    MultiTask,
    SoftmaxCrossEntropy,
    rows_at_once,
)

RNG = np.random.default_rng(0)
ROWS, CLASSES = 12, 7


def some(shape=(ROWS,)):
    scores = RNG.normal(size=(*shape, CLASSES))
    return scores, {
        "labels": RNG.integers(CLASSES, size=shape).astype(np.int32),
        "mask": RNG.integers(2, size=shape).astype(np.float32),
    }


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_numpy_s(smoothing):
    scores, batch = some((4, 3))
    with jax.enable_x64(True):
        total, weight, metrics = SoftmaxCrossEntropy(smoothing, top_k=[1, 3])(
            jnp.asarray(scores), batch
        )
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    target = np.eye(CLASSES)[batch["labels"]] * (1 - smoothing) + smoothing / CLASSES
    mask = batch["mask"]
    np.testing.assert_allclose(total, -(target * logs).sum(-1).ravel() @ mask.ravel(), rtol=1e-12)
    assert float(weight) == mask.sum()
    best = np.argsort(-scores, -1)
    for k, name in ((1, "accuracy"), (1, "top1_accuracy"), (3, "top3_accuracy")):
        hits = (best[..., :k] == batch["labels"][..., None]).any(-1)
        assert float(metrics[name]) == (hits * mask).sum()


def test_equal_logits_are_ranked_as_by_argmax():
    labels = np.arange(CLASSES, dtype=np.int32)
    batch = {"labels": labels, "mask": np.ones(CLASSES, np.float32)}
    metrics = SoftmaxCrossEntropy(top_k=[1, 3])(jnp.zeros((CLASSES, CLASSES)), batch)[2]
    assert [float(metrics[name]) for name in ("accuracy", "top1_accuracy", "top3_accuracy")] == [
        1,
        1,
        3,
    ]


def test_outputs_that_are_no_numbers_are_no_hits():
    batch = {"labels": np.zeros(2, np.int32), "mask": np.ones(2, np.float32)}
    scores = jnp.array([[2.0, 1.0, 0.0], [jnp.nan] * 3])
    loss, _, metrics = SoftmaxCrossEntropy(top_k=[1])(scores, batch)
    assert np.isnan(loss) and metrics["accuracy"] == metrics["top1_accuracy"] == 1
    directions = jnp.full((2, 3), jnp.nan)
    assert Contrastive()((directions, directions), batch)[2]["accuracy"] == 0


@pytest.mark.slow
def test_only_an_unmasked_label_must_be_a_class():
    scores, batch = (
        jnp.zeros((4, 3)),
        {"labels": np.array([0, 2, -100, 7], np.int32), "mask": np.array([1.0, 0.5, 0, 0])},
    )
    run = jax.value_and_grad(lambda scores, batch: SoftmaxCrossEntropy()(scores, batch)[0])
    value, grad = run(scores, batch)
    assert (
        float(value) == pytest.approx(1.5 * np.log(3))
        and not grad[2:].any()
        and np.isfinite(grad).all()
    )
    SoftmaxCrossEntropy().check(scores, batch)
    for label, kind in ((-1, np.int32), (3, np.uint8)):
        wrong = {**batch, "labels": np.array([0, label, 0, 0], kind)}
        assert np.isnan(run(scores, wrong)[0])
        with pytest.raises(
            UsageError,
            match=f"tasks.a: a label is {label}, but the model's outputs are for 3 classes",
        ):
            task = {"target": "SoftmaxCrossEntropy", "labels": "labels"}
            MultiTask({"a": task}).check({"a": scores}, wrong)


@pytest.mark.slow
def test_probabilities_are_labels_too():
    scores, batch = some()
    hard = SoftmaxCrossEntropy(0.1)(jnp.asarray(scores), batch)
    soft = SoftmaxCrossEntropy(0.1)(
        jnp.asarray(scores), {**batch, "labels": np.eye(CLASSES)[batch["labels"]]}
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), hard, soft)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_logits_in_pieces_are_the_whole(monkeypatch, dtype):
    """Values and gradients, with rows beyond the vocabulary; and no array of the program is as
    large as all logits.
    """
    tokens, dim, rows, classes = 40, 8, 128, 100
    tolerance = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.02}[dtype]
    with jax.enable_x64(True):
        x, kernel = (
            jnp.asarray(RNG.normal(size=s), dtype) for s in ((2, tokens // 2, dim), (rows, dim))
        )
        labels = RNG.integers(classes, size=x.shape[:2])
        mask = RNG.integers(2, size=labels.shape).astype(np.float32)
        loss = CausalLM(0.1, top_k=[5])

        def sums(x, kernel, whole):
            outputs = Logits(x, kernel, classes)
            total, weight, metrics = loss(
                outputs.compute() if whole else outputs, {"labels": labels, "mask": mask}
            )
            return total, (weight, metrics)

        run = jax.jit(jax.value_and_grad(sums, argnums=(0, 1), has_aux=True), static_argnums=2)
        want = run(x, kernel, True)
        for at_once in (3 * rows, 7 * rows, 10**9):
            monkeypatch.setattr(pieces, "AT_ONCE", at_once)
            jax.clear_caches()
            got = run(x, kernel, False)
            assert toys.relative_error(got, want)[0] < tolerance
            assert np.all(np.asarray(got[1][1], np.float64)[classes:] == 0)
            text = run.lower(x, kernel, False).compile().as_text()
            assert (f"{tokens},{rows}" in text or f"{tokens},{classes}" in text) == (
                at_once > tokens * rows
            )


def test_pieces_of_logits_are_larger_on_accelerators():
    """Where each costs another pass over the kernel, of GPT-2 77 MB in bfloat16; there in rows that
    fill tiles.
    """
    assert [rows_at_once(50_304, cpu) for cpu in (True, False)] == [333, 5_248]
    assert rows_at_once(2**29, False) == 1 and rows_at_once(2**22, False) == 64


def test_perplexity_is_the_exponential_of_the_loss():
    assert CausalLM().derive({"loss": np.log(42.0)})["perplexity"] == pytest.approx(42)
    assert CausalLM().derive({"loss": 1e4})["perplexity"] == np.inf


def test_tasks_add_up_by_their_weights():
    """One over examples, one over tokens: each counts as the mean over its own elements."""
    scores, batch = some()
    tokens = RNG.normal(size=(ROWS, 5))
    batch |= {
        "class": batch.pop("labels"),
        "height": RNG.normal(size=(ROWS, 5)),
        "mask": np.ones(ROWS),
    }
    loss = MultiTask(
        {
            "class": {"target": "SoftmaxCrossEntropy"},
            "depth": {"target": "MeanSquaredError", "weight": 0.5, "labels": "height"},
        }
    )
    total, weight, metrics = loss(
        {"class": jnp.asarray(scores), "depth": jnp.asarray(tokens)}, batch
    )
    own, _, accuracy = SoftmaxCrossEntropy()(
        jnp.asarray(scores), {**batch, "labels": batch["class"]}
    )
    other, *_ = MeanSquaredError()(jnp.asarray(tokens), {**batch, "labels": batch["height"]})
    np.testing.assert_allclose(total, own + 0.5 * other, rtol=1e-5)
    assert float(weight) == ROWS and set(metrics) == {"class_loss", "class_accuracy", "depth_loss"}
    assert metrics["class_accuracy"] == (accuracy["accuracy"], ROWS)


SOFT = np.full((2, 4, CLASSES), 1 / CLASSES, np.float32)
TASKS = {
    "a": {"target": "SoftmaxCrossEntropy"},
    "b": {"target": "MeanSquaredError", "labels": "heights"},
}
EXCLUDED = {  # name: (the loss, outputs [example, token, ...] -> its outputs, labels)
    "tokens": (CausalLM(0.1, top_k=[1, 3]), lambda x: x, np.ones((2, 4), np.int32)),
    "lazy": (CausalLM(), lambda x: Logits(x, jnp.ones((8, CLASSES)), 7), np.ones((2, 4), np.int32)),
    "soft": (SoftmaxCrossEntropy(0.1, top_k=[2]), lambda x: x, SOFT),
    "lazy soft": (SoftmaxCrossEntropy(), lambda x: Logits(x, jnp.ones((8, CLASSES)), 7), SOFT),
    "squares": (MeanSquaredError(), lambda x: x, 2 * SOFT),
    "squares of tokens": (MeanSquaredError(), lambda x: x[..., 0], SOFT[..., 0]),
    "pairs": (Contrastive(), lambda x: (x[0], x[1]), SOFT[..., 0]),
    "tasks": (MultiTask(TASKS), lambda x: {"a": x, "b": x}, np.ones((2, 4), np.int32)),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", EXCLUDED)
def test_masked_outputs_and_labels_are_not_read(name):
    """Neither by the loss and its metrics nor by its gradient, which is 0 there; of some, and of
    all.
    """
    loss, form, labels = EXCLUDED[name]
    x = np.random.default_rng(0).normal(size=(2, 4, CLASSES)).astype(np.float32)

    @jax.jit
    @jax.grad
    def of_outputs(outputs, batch):
        return loss(outputs, batch)[0]

    @jax.jit
    def run(x, batch, excluded, bad):
        def outputs(x):
            return form(jnp.where(excluded[..., None], bad, x))

        def summed(x):
            return (lambda total, *more: (total, more))(*loss(outputs(x), batch))

        return jax.value_and_grad(summed, has_aux=True)(x), of_outputs(outputs(x), batch)

    for mask in (
        np.array([[1, 0, 0.5, 1], [0, 1, 1, 0]], np.float32),
        np.zeros((2, 4), np.float32),
    ):
        mask = mask[0] if name == "pairs" else mask
        excluded, results = np.broadcast_to(mask == 0, (2, 4)), []
        for bad in np.array([0.1, np.nan, np.inf, -np.inf, 1e38], np.float32):
            wrong = np.int32(-100) if labels.dtype == np.int32 else bad
            wide = excluded.reshape(*excluded.shape, *[1] * (labels.ndim - 2))
            heights = np.where(excluded[..., None], bad, 2 * SOFT)
            batch = {"labels": np.where(wide, wrong, labels), "heights": heights, "mask": mask}
            results.append(run(x, batch | {"a": batch["labels"]}, excluded, bad))
            assert all(np.isfinite(g).all() for g in jax.tree.leaves(results[-1]))
            jax.tree.map(np.testing.assert_array_equal, results[0], results[-1])
        assert not np.asarray(results[0][0][1])[excluded].any()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: MultiTask({}), "loss.args.tasks: it is empty"),
        (lambda: MultiTask({"a": {"weight": 1}}), "loss.args.tasks.a: .* has no target"),
        (lambda: MultiTask({"a": {"target": "Nope"}}), "loss.args.tasks.a.target: 'Nope'"),
        (lambda: MultiTask({"a": {"target": "Contrastive"}}), "couples examples"),
        (lambda: MultiTask({"a": {"target": "CausalLM", "scale": 2}}), "tasks.a.scale: not known"),
        (lambda: SoftmaxCrossEntropy(1.5), "label_smoothing: 1.5"),
        (lambda: SoftmaxCrossEntropy(top_k=5), "top_k: 5 is not a list"),
        (lambda: Contrastive(0), "temperature: 0 must be greater"),
    ],
)
def test_arguments_that_make_no_loss(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_unfit_outputs_are_named_with_both_shapes():
    batch = {"labels": np.zeros(4, np.int32), "mask": np.ones(4), "other": np.zeros(4)}
    for loss, outputs, words in (
        (
            SoftmaxCrossEntropy(),
            jnp.zeros((4, 2, 3)),
            r"outputs \(4, 2, 3\) do not fit labels \(4,\)",
        ),
        (
            SoftmaxCrossEntropy(),
            Logits(jnp.zeros((4, 2, 3)), jnp.zeros((8, 3)), 5),
            r"outputs \(4, 2, 5\) do not fit",
        ),
        (
            SoftmaxCrossEntropy(),
            jnp.zeros(4),
            r"outputs \(4,\) do not fit .* logits \[4, classes\], or use MeanSq",
        ),
        (MeanSquaredError(), jnp.zeros((4, 2)), r"outputs \(4, 2\) do not fit labels \(4,\)"),
        (
            SoftmaxCrossEntropy(),
            {"a": jnp.zeros((4, 2))},
            r"returns {'a': \(4, 2\)}, not one array; return that alone",
        ),
        (MeanSquaredError(), (jnp.zeros(4), None), "the model returns tuple, not one array"),
        (Contrastive(), jnp.zeros((4, 2)), "no pair of embeddings"),
        (
            MultiTask({"a": {"target": "CausalLM"}}),
            {"b": 0},
            r"no outputs 'a'; the model returns \['b'\]",
        ),
        (MultiTask({"a": {"target": "CausalLM"}}), {"a": 0}, r"no labels 'a'; the data has"),
    ):
        with pytest.raises(UsageError, match=words):
            loss(outputs, batch)
    with pytest.raises(UsageError, match=r"logits \[4, classes\], or use MeanSquaredError"):
        SoftmaxCrossEntropy()(jnp.zeros(4), {**batch, "labels": jnp.zeros(4)})
    with pytest.raises(UsageError, match="one-hot labels must be floats"):
        SoftmaxCrossEntropy()(jnp.zeros((4, 2)), {**batch, "labels": np.zeros((4, 2), np.int32)})


# --- a loss over the whole batch
# -------------------------------------------------------------------------------------


def whole_batch(examples, model, params, steps, batch_size=20, microbatches=8):
    """The oracle: one function of the whole batch, real rows alone, plain Optax."""
    tx = optax.sgd(0.5)
    opt, losses, size = tx.init(params), [], len(examples["inputs"])
    per_epoch = -(-size // batch_size)

    def value(params, rows, step):
        outputs = []
        for m in range(microbatches):
            own = {k: v[rows[m::microbatches]] for k, v in examples.items()}
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), m)
            places = -(-batch_size // microbatches)
            pad = places - len(own["inputs"])
            x = np.concatenate([own["inputs"], np.zeros((pad, *own["inputs"].shape[1:]))])
            batch = {"inputs": jnp.asarray(x), "mask": jnp.ones(places)}
            out = model.apply(params, {"mean": 0.0}, batch, jax.random.split(key)[0], True)[0]
            outputs.append(jax.tree.map(lambda y, n=places - pad: y[:n], out))
        a, b = (jnp.concatenate(x) for x in zip(*outputs))
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
        scores = a @ b.T / 0.07
        both = [
            jnp.diagonal(s - jax.nn.logsumexp(s, -1, keepdims=True)).mean()
            for s in (scores, scores.T)
        ]
        return -0.5 * sum(both)

    for step in range(steps):
        rows = np.arange(
            step % per_epoch * batch_size, min((step % per_epoch + 1) * batch_size, size)
        )
        loss, grads = jax.value_and_grad(value)(params, rows, step)
        updates, opt = tx.update(grads, opt)
        params, losses = optax.apply_updates(params, updates), [*losses, loss]
    return params, losses


@pytest.mark.slow
def test_a_contrastive_loss_couples_the_whole_batch():
    """53 examples in batches of 20: the last has 13, some microbatches one, with padding beside it."""
    examples, model = toys.data(53, dtype=np.float64), toys.two_towers()
    ways = [
        {"backend": "pmap", "devices": 1},
        {"backend": "pmap", "devices": 8, "accumulate": "scan"},
        {"backend": "pjit", "devices": 3},
        {"backend": "pjit", "devices": 4, "layout": {"zero": 3}, "accumulate": "scan"},
    ]
    tx = (optax.sgd(0.5), None)
    with jax.enable_x64(True):
        for i, way in enumerate(ways):
            first, last, metrics, *_ = toys.train(
                model, examples, steps=4, dtype="float64", loss=Contrastive(), optimizer=tx, **way
            )
            if not i:
                want, losses = whole_batch(examples, model, first.params, 4)
                averages = last.model_state
                assert losses[-1] < losses[0]
            assert toys.relative_error(last.params, want)[0] < 1e-12
            assert toys.relative_error(last.model_state, averages)[0] < 1e-12
            np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-12)
            assert [float(m["weight"]) for m in metrics] == pytest.approx(
                [20, 20, 13, 20], rel=1e-12
            )


@pytest.mark.slow
def test_a_contrastive_evaluation_couples_a_batch_too():
    examples, found = toys.data(20), []
    for devices in (1, 4):
        strategy, step, batch = toys.build(
            toys.two_towers(), examples, loss=Contrastive(), devices=devices
        )
        state = strategy.init()
        sums = strategy.compile(step).evaluate(state, batch(0))
        found.append(
            (float(sums.loss / sums.weight), float(sums.metrics["accuracy"] / sums.weight))
        )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
