"""Metrics for any loss: each is a function of sums over all examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from cli_runs import jaxdp as train
from cli_runs import records
from jaxdp.data.dataset import Arrays
from jaxdp.errors import UsageError
from jaxdp.losses import (
    CausalLM,
    Contrastive,
    Logits,
    MeanSquaredError,
    MultiTask,
    SoftmaxCrossEntropy,
    make_loss,
)
from jaxdp.measures.measured import AUC, F1, METRICS, Measured, Precision, Recall
from jaxdp.metrics.numbers import LARGER, SMALLER, known_sign, sign
from jaxdp.run.callbacks import EarlyStopping
from jaxdp.sampling.example_losses import PerExample
from jaxdp.train.evaluate import np as host
from jaxdp.train.state import check_result, divide, make_record

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(120, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, 120).astype(np.int32)
MASK = (np.arange(120) % 7 != 0).astype(np.float32)
BATCH = {"labels": LABELS, "mask": MASK}
REAL = MASK > 0
PREDICTED = LOGITS.argmax(-1)


def record_of(loss, outputs, batch, parts=(slice(None),)):
    """The record of an evaluation in these parts: the sums of all, divided once."""
    totals = {}
    for part in parts:
        rows = {name: jnp.asarray(x[part]) for name, x in batch.items()}
        checked = jax.jit(lambda outputs, rows: check_result(loss(outputs, rows)))
        total, weight, metrics = checked(jnp.asarray(outputs[part]), rows)
        for name, x in {"loss": total, "weight": weight, **metrics}.items():
            totals[name] = totals.get(name, 0.0) + np.float64(x)
    means = divide(totals, totals.pop("weight"), host)
    return make_record(means, loss.derive)


def auc_of(scores, is_class):
    """The probability that an example of the class is ahead of another, by ranks (Mann and Whitney)."""
    ranks = stats.rankdata(scores)[is_class]
    n = is_class.sum()
    return (ranks.sum() - n * (n + 1) / 2) / (n * (~is_class).sum())


def odds_of(logits, number):
    others = np.delete(np.float64(logits), number, 1)
    return logits[:, number] - np.log(np.exp(others).sum(1))


def test_each_metric_is_the_same_over_any_split():
    loss = Measured(SoftmaxCrossEntropy(top_k=[2]), ["F1", "Precision", "Recall", AUC(2)])
    parts = [slice(0, 7), slice(7, 50), slice(50, 120)]
    outputs = np.where(REAL[:, None], LOGITS, np.nan)
    found = record_of(loss, outputs, {**BATCH, "labels": np.where(REAL, LABELS, -100)}, parts)
    whole = record_of(loss, LOGITS, BATCH)
    assert found.keys() == whole.keys()
    right = ((PREDICTED == 1) & (LABELS == 1) & REAL).sum()
    predicted, labelled = ((PREDICTED == 1) & REAL).sum(), ((LABELS == 1) & REAL).sum()
    order = np.argsort(-LOGITS, -1)[:, :2]
    expected = {
        "precision": right / predicted,
        "recall": right / labelled,
        "f1": 2 * right / (predicted + labelled),
        "top2_accuracy": (order == LABELS[:, None]).any(-1)[REAL].mean(),
        "accuracy": (PREDICTED == LABELS)[REAL].mean(),
    }
    for name, value in expected.items():
        assert found[name] == whole[name] == pytest.approx(value, rel=1e-6), name
    exact = auc_of(odds_of(LOGITS, 2)[REAL], LABELS[REAL] == 2)
    assert found["auc"] == whole["auc"]
    assert abs(found["auc"] - exact) <= found["auc_error"] + 1e-9 and found["auc_error"] < 2e-3


@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("shift", [0.0, -5.0, 3.0])
def test_the_auc_is_within_its_stated_error(scale, shift):
    """Of small log-odds, large ones, and those of a rare class."""
    labels = (RNG.uniform(size=3000) < 0.1).astype(np.int32)
    odds = (scale * (RNG.normal(size=3000) + labels) + shift).astype(np.float32)
    logits = np.stack([np.zeros_like(odds), odds], 1)
    found = record_of(Measured(metrics=["AUC"]), logits, {"labels": labels, "mask": np.ones(3000)})
    error = abs(found["auc"] - auc_of(odds, labels == 1))
    assert error <= found["auc_error"] + 1e-9
    if scale >= 1 or (not shift and scale >= 0.01):
        assert found["auc_error"] < 0.004 and error < 4e-4
    tied = record_of(
        Measured(metrics=["AUC"]), logits * 0, {"labels": labels, "mask": np.ones(3000)}
    )
    assert tied["auc"] == pytest.approx(0.5) and tied["auc_error"] == pytest.approx(0.5)


def test_an_auc_without_examples_of_a_class_is_omitted():
    found = record_of(Measured(metrics=["AUC", "Recall"]), LOGITS, {**BATCH, "labels": LABELS * 0})
    assert not {"auc", "auc_error", "recall"} & found.keys() and "accuracy" in found


def test_all_classes_and_their_mean():
    found = record_of(Measured(metrics=[F1(None), Recall(None)]), LOGITS, BATCH)
    recalls = [(c == PREDICTED)[REAL & (c == LABELS)].mean() for c in range(4)]
    assert [found[f"recall_{c}"] for c in range(4)] == pytest.approx(recalls, rel=1e-6)
    assert found["macro_recall"] == pytest.approx(np.mean(recalls), rel=1e-6)
    assert found["macro_f1"] == pytest.approx(np.mean([found[f"f1_{c}"] for c in range(4)]))


def test_tokens_lazy_logits_and_soft_labels_count():
    """Of tokens with a mask of tokens, and of Mixup's labels."""
    kernel = RNG.normal(size=(4, 5)).astype(np.float32)
    x = RNG.normal(size=(6, 8, 5)).astype(np.float32)
    labels = RNG.integers(0, 4, (6, 8)).astype(np.int32)
    mask = (RNG.uniform(size=(6, 8)) > 0.3).astype(np.float32)
    loss = Measured(CausalLM(), [{"target": "Precision", "args": {"positive": 0}}])
    batch = {"labels": jnp.asarray(labels), "mask": jnp.asarray(mask)}
    total, weight, metrics = loss(Logits(jnp.asarray(x), jnp.asarray(kernel), 4), batch)
    own = CausalLM()(jnp.asarray(x @ kernel.T), batch)
    np.testing.assert_allclose([total, weight], own[:2], rtol=1e-5)
    predicted = (x @ kernel.T).argmax(-1)
    assert metrics["accuracy"] == ((predicted == labels) * mask).sum()
    assert metrics["precision"][0] == ((predicted == 0) & (labels == 0) & (mask > 0)).sum()
    assert "perplexity" in loss.derive({"loss": 1.0})
    mixed = jax.nn.one_hot(LABELS, 4) * 0.8 + 0.05
    soft = Measured(metrics=["F1"])(LOGITS, {"labels": mixed, "mask": MASK})
    hard = Measured(metrics=["F1"])(LOGITS, BATCH)
    assert soft[2]["f1"] == hard[2]["f1"]


def confident(outputs, batch, above=0.5):
    """The share of examples whose largest probability is above this."""
    sure = jax.nn.softmax(outputs).max(-1) > above
    return {"confident": (jnp.sum(sure * batch["mask"]), jnp.sum(batch["mask"]))}


@pytest.mark.parametrize("above", [0.5, 0.7])
def test_a_function_by_its_dotted_path(above):
    entry = {"target": f"{__name__}.confident", "args": {"above": above}}
    loss = make_loss("Measured", {"metrics": [entry if above != 0.5 else entry["target"]]})
    expected = np.float64(jax.nn.softmax(LOGITS).max(-1) > above)[REAL].mean()
    for parts in ([slice(None)], [slice(0, 11), slice(11, 120)]):
        found = record_of(loss, LOGITS, BATCH, parts)["confident"]
        assert found == pytest.approx(expected) and 0 < found < 1


class Median:
    """A metric with an array of sums, from which it derives its number."""

    def __call__(self, outputs, batch):
        counts = jnp.zeros(100).at[(outputs[:, 0] * 10 + 50).astype(int)].add(batch["mask"])
        return {"sums:median": counts}

    def derive(self, means):
        counts = means["sums:median"]
        return {"median": (np.argmax(np.cumsum(counts) >= counts.sum() / 2) - 49.5) / 10}


def test_an_object_with_an_array_of_sums():
    found = record_of(Measured(metrics=[Median()]), LOGITS, BATCH, [slice(0, 60), slice(60, 120)])
    assert found["median"] == pytest.approx(np.median(LOGITS[REAL, 0]), abs=0.1)
    assert not any("sums" in name for name in found)


def test_a_function_of_the_user():
    def far(outputs, batch):
        return {
            "far": jnp.sum((jnp.abs(outputs[:, 0] - batch["labels"][:, 0]) > 1) * batch["mask"])
        }

    batch = {"labels": np.zeros((120, 1), np.float32), "mask": MASK}
    found = record_of(Measured(MeanSquaredError(), [far]), LOGITS[:, :1], batch)
    assert found["far"] == pytest.approx((np.abs(LOGITS[:, 0]) > 1)[REAL].mean())


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    "loss", [MeanSquaredError(), PerExample(optax.losses.squared_error)], ids=["own", "of optax"]
)
@pytest.mark.parametrize("width", [1, 3])
def test_a_metric_of_another_task_is_refused_in_a_line(name, loss, width):
    labels = RNG.normal(size=(120, width)).astype(np.float32)
    said = (
        rf"loss.args.metrics: {name} is of classes, .*labels float32.* as of a regression; leave it"
    )
    with pytest.raises(UsageError, match=said) as refused:
        Measured(loss, [name])(LOGITS[:, :width], {"labels": labels, "mask": MASK})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "loss, metrics, said",
    [
        (
            "SoftmaxCrossEntropy",
            ["F2"],
            "loss.args.metrics.target: 'F2' is neither built in nor a dotted path; did you mean 'F1'",
        ),
        (
            "SoftmaxCrossEntropy",
            [3],
            "loss.args.metrics: 3 is not a metric; give a name such as F1",
        ),
        ("Cross", ["F1"], "loss.args.loss.target: 'Cross' is neither built in"),
        (Contrastive(), ["F1"], "loss.args.loss: .* couples examples; metrics cannot be added"),
        (
            "SoftmaxCrossEntropy",
            [F1(2), F1(2)],
            "loss.args.metrics: 'f1_2' is there twice; leave one",
        ),
        (
            "SoftmaxCrossEntropy",
            [F1(4)],
            "loss.args.metrics.args.positive: 4 is none of 4 classes; give",
        ),
        ("SoftmaxCrossEntropy", [AUC(-1)], "loss.args.metrics.args.positive: -1 is none of 4"),
        (
            "SoftmaxCrossEntropy",
            [F1("fraud")],
            "metrics.args.positive: 'fraud' is none of 4 classes",
        ),
        (
            "SoftmaxCrossEntropy",
            [{"target": f"{__name__}.confident", "args": {"k": 1}}],
            "loss.args.metrics.args.k: confident takes no such argument",
        ),
    ],
)
def test_what_is_wrong_is_named(loss, metrics, said):
    with pytest.raises(UsageError, match=said):
        Measured(loss, metrics)(LOGITS, BATCH)


def test_a_class_is_known_by_its_name(tmp_path):
    """Before its number, and anew for other data with the same loss."""
    loss = Measured(metrics=[Recall("b"), Recall(1), AUC("b")])
    inputs = RNG.normal(size=(90, 4)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int32) + (inputs[:, 1] > 1)

    for names, b, one in (("abc", 1, 1), ("c1b", 2, 1), ("1b0", 1, 0)):
        data = Arrays(inputs=inputs, labels=labels)
        data.class_names = [*names]
        fitted = jaxdp.fit(
            {"target": "MLP", "args": {"hidden": [], "num_classes": 3}},
            data,
            loss,
            {"target": "sgd", "lr": 1e-3},
            steps=1,
            batch_size=30,
            microbatches=8,
            eval_data=data,
            run_dir=tmp_path / names,
        )
        outputs = fitted.predict(inputs)
        right = outputs.argmax(-1) == labels
        each = [right[labels == number].mean() for number in range(3)]
        assert len({*each}) == 3, "or this test tells no class from another"
        assert fitted.final["recall_b"] == pytest.approx(each[b])
        assert fitted.final["recall_1"] == pytest.approx(each[one])
        area = auc_of(odds_of(outputs, b), labels == b)
        assert fitted.final["auc"] == pytest.approx(area, abs=fitted.final["auc_error"] + 1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("row", np.flatnonzero(REAL)[[0, -1]])
def test_outputs_that_are_no_numbers_have_no_metric(value, row):
    """Not an AUC of a half, or the recall of the first class; in any of the parts."""
    outputs = LOGITS.copy()
    outputs[row, 2] = value
    loss = Measured(metrics=[AUC(), Precision(3), Recall(None), F1()])
    for parts in ([slice(None)], [slice(0, 60), slice(60, 120)]):
        found = record_of(loss, outputs, BATCH, parts)
        names = {"auc", "auc_error", "precision", "f1", "macro_recall", "recall_0", "recall_3"}
        assert {name for name, x in found.items() if np.isnan(x)} >= names
    masked = {**BATCH, "mask": MASK * (np.arange(120) != row)}
    assert record_of(loss, outputs, masked) == record_of(loss, LOGITS, masked)


def test_a_class_of_probability_0_is_never_predicted():
    outputs = np.where(np.arange(4) == 3, -np.inf, LOGITS)
    found = record_of(Measured(metrics=[AUC(3), Recall(3), Recall(0)]), outputs, BATCH)
    assert found["recall_3"] == 0 < found["recall_0"] and found["auc"] == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_metrics_of_16_bit_outputs_count_every_row(dtype):
    outputs = jnp.asarray(3 * RNG.normal(size=(5000, 2)), dtype)
    outputs = outputs.at[::7, 1].set(600)  # in one bin, at the end
    labels = (RNG.uniform(size=5000) > 0.3).astype(np.int32)
    batch = {"labels": labels, "mask": np.ones(5000, np.float32)}
    for metric in (AUC(), F1(None), Precision(), Recall(0)):
        found, wide = metric(outputs, batch), metric(outputs.astype("float32"), batch)
        for a, b in zip(*map(jax.tree.leaves, (found, wide)), strict=True):
            assert a.dtype == b.dtype == jnp.float32
            np.testing.assert_array_equal(a, b)
    assert AUC()(outputs, batch)["sums:auc"].sum() == 5000
    assert F1(None)(outputs, batch)["f1_1"][1] > 4096


def test_metrics_of_a_kind_have_their_class_number():
    metrics = [{"target": name, "args": {"positive": c}} for name in METRICS for c in (3, 0)]
    found = record_of(make_loss("Measured", {"metrics": metrics}), LOGITS, BATCH)
    for kind in (Precision, Recall, F1, AUC):
        for number in (0, 3):
            one = record_of(Measured(metrics=[kind(number)]), LOGITS, BATCH)
            assert found[f"{kind.name}_{number}"] == one[kind.name]
    assert found["auc_3_error"] > 0 and "f1" not in found
    mixed = record_of(Measured(metrics=[F1(None), Recall(2), AUC()]), LOGITS, BATCH)
    assert mixed["f1_2"] > 0 and mixed["recall"] > 0 and mixed["auc"] > 0


def test_the_mean_of_classes_is_of_no_other_metric():
    def f1_weighted(outputs, batch):
        return {"f1_weighted": (jnp.sum(batch["mask"]) * 100, jnp.sum(batch["mask"]))}

    found = record_of(Measured(metrics=[F1(None), f1_weighted]), LOGITS, BATCH)
    assert found["macro_f1"] == pytest.approx(np.mean([found[f"f1_{c}"] for c in range(4)]))
    assert found["f1_weighted"] == 100


def test_tasks_have_all_metrics_of_their_losses():
    """Also those that are derived, from the sums and means of the own task."""
    measured = {"target": "Measured", "args": {"metrics": ["AUC", F1(None)]}, "outputs": "y"}
    tasks = {
        "a": {**measured, "labels": "labels"},
        "a_b": {"target": "CausalLM", "outputs": "z", "labels": "labels"},
    }
    loss, totals = MultiTask(tasks), {}
    for part in (slice(0, 50), slice(50, 120)):
        rows = {name: jnp.asarray(x[part]) for name, x in BATCH.items()}
        outputs = {"y": jnp.asarray(LOGITS[part]), "z": jnp.asarray(LOGITS[part])[:, ::-1]}
        total, weight, metrics = check_result(loss(outputs, rows))
        for name, x in {"loss": total, "weight": weight, **metrics}.items():
            totals[name] = totals.get(name, 0.0) + np.float64(x)
    found = make_record(divide(totals, totals.pop("weight"), host), loss.derive)
    alone = record_of(Measured(metrics=["AUC", F1(None)]), LOGITS, BATCH)
    assert {f"a_{name}": x for name, x in alone.items()}.items() <= found.items()
    assert found["a_b_perplexity"] == pytest.approx(np.exp(found["a_b_loss"]))
    assert not any("sums" in name for name in found)


def nothing(outputs, batch):
    return None


def one_number(outputs, batch):
    return jnp.sum(outputs)


class Derived:
    """A metric that derives anything."""

    def __init__(self, derived="none"):
        self.derived = derived

    def __call__(self, outputs, batch):
        return {"sums:x": jnp.ones(3)}

    def derive(self, means):
        kinds = {"none": None, "list": [1.0], "text": {"a": "much"}, "array": {"a": np.ones(3)}}
        kinds |= {"step": {"step": 1.0}, "number": {3: 1.0}}
        return kinds[self.derived]


@pytest.mark.parametrize(
    "metric, said",
    [
        (
            nothing,
            "loss.args.metrics: <function nothing .* returned a NoneType; a metric returns {name",
        ),
        (one_number, "loss.args.metrics: <function one_number.* returned a .*; a metric returns {"),
        (
            lambda outputs, batch: [1, 2],
            "loss.args.metrics: <function .*> returned a list; a metric",
        ),
        (lambda outputs, batch: {"a": [1, 2, 3]}, "loss: it returned .*{a: .a Python int"),
        (
            lambda outputs, batch: {3: jnp.sum(outputs)},
            "loss: a metric is called 3, which .*no text",
        ),
        (
            Derived("none"),
            "loss.args.metrics: .*Derived.* returned a NoneType; .* its derive {name",
        ),
        (Derived("list"), "loss.args.metrics: .*Derived.* returned a list; a metric returns"),
        (Derived("text"), "loss: derive failed: ValueError: .*'much'; return {name: number}"),
        (Derived("array"), "loss: derive failed: TypeError: .*; return {name: number}"),
        (Derived("step"), "loss: a metric is called 'step', which every record contains already"),
        (Derived("number"), "loss: a metric is called 3, which every record contains .* no text"),
        (Derived("fails"), "loss: derive failed.*: KeyError: 'fails'; return {name: number}"),
    ],
)
def test_a_metric_that_is_wrong_is_refused_in_a_line(metric, said):
    with pytest.raises(UsageError, match=said) as refused:
        record_of(Measured(metrics=[metric]), LOGITS, BATCH)
    assert "\n" not in str(refused.value)


def test_a_run_with_such_a_metric_ends_in_a_line(tmp_path):
    """When the first record is due: what is derived follows from numbers of the run."""
    for name, said in (("text", "loss: derive failed: ValueError"), ("list", "returned a list")):
        with pytest.raises(UsageError, match=said):
            jaxdp.fit(
                {"target": "MLP", "args": {"hidden": [8], "num_classes": 2}},
                (X, Y),
                Measured(metrics=[Derived(name)]),
                run_dir=tmp_path / name,
                steps=4,
                batch_size=40,
                log={"every": 2},
            )


def test_a_metric_that_is_never_rated_is_said_once(tmp_path, capsys):
    """The AUC of one class."""
    rest = Y == 0
    jaxdp.fit(
        {"target": "MLP", "args": {"hidden": [8], "num_classes": 2}},
        (X, Y),
        Measured(metrics=["AUC"]),
        eval_data=(X[rest], Y[rest]),
        run_dir=tmp_path / "one",
        steps=12,
        batch_size=42,
        eval={"every": 3},
        checkpoint={"best": "auc"},
    )
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("checkpoint.best")]
    assert lines == ["checkpoint.best: auc is missing after update 3, which is never the best"]


def test_metrics_are_of_the_config():
    args = {"metrics": ["AUC", {"target": "F1", "args": {"positive": 3}}]}
    first, second = make_loss("Measured", args).metrics
    assert (type(first), type(second)) == (AUC, F1) and (first.positive, second.positive) == (1, 3)
    assert issubclass(F1, Precision)


X = RNG.normal(size=(203, 6)).astype(np.float32)
Y = ((X[:, 0] + 0.5 * RNG.normal(size=203)) > 0.8).astype(np.int32)
NAMES = {"f1", "auc", "auc_error", "accuracy", "top2_accuracy", "loss", "confident"}


def fit(run_dir=None, **more):
    settings = {"steps": 24, "batch_size": 42, "microbatches": 8, "log": {"every": 4}, **more}
    metrics = ["F1", "AUC", f"{__name__}.confident"]
    return jaxdp.fit(
        {"target": "MLP", "args": {"hidden": [8], "num_classes": 2}},
        (X, Y),
        Measured(SoftmaxCrossEntropy(top_k=[2]), metrics),
        {"target": "adam", "lr": 0.02},
        eval_data=(X, Y),
        run_dir=run_dir,
        **{"eval": {"every": 12}, **settings},
    )


WAYS = {
    "a device": {},
    "pmap": {"parallel": {"devices": 4}},
    "ZeRO 3": {"parallel": {"devices": 4, "backend": "pjit", "zero": 3, "reduction": "bucket"}},
    "scan": {"parallel": {"devices": 2, "accumulate": "scan"}, "steps_per_call": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_has_the_numbers_of_its_evaluation(tmp_path, way):
    fitted = fit(tmp_path / "run", checkpoint={"every": 12, "best": "auc"}, **WAYS[way])
    logits = fitted.predict(X)
    predicted = logits.argmax(-1)
    right = ((predicted == 1) & (Y == 1)).sum()
    final = fitted.final
    assert final["f1"] == pytest.approx(2 * right / ((predicted == 1).sum() + Y.sum()), rel=1e-6)
    exact = auc_of(logits[:, 1] - logits[:, 0], Y == 1)
    assert abs(final["auc"] - exact) <= final["auc_error"] + 1e-6 and final["auc"] > 0.8
    history = fitted.history
    for split, count in (("train", 6), ("eval", 2)):
        assert history[split].keys() >= NAMES and len(history[split]["auc"]) == count
        assert not any("sums" in name for name in history[split])
    assert fitted.best.final["auc"] == max(history["eval"]["auc"])
    assert fitted.evaluate()["auc"] == final["auc"]


@pytest.mark.slow
def test_exact_sums_have_the_same_bits_on_any_devices(tmp_path):
    finals = []
    for devices in (1, 3):
        run = tmp_path / str(devices)
        words = {
            "loss.target": "Measured",
            "loss.args": "{metrics: [AUC, {target: F1, args: {positive: null}}]}",
            "parallel.reduction": "exact",
            "steps": 8,
            "epochs": "null",
            "log.every": 1,
        }
        argv = [x for name, value in words.items() for x in (f"--{name}", value)]
        train("--config", "configs/digits.yaml", *argv, "--run_dir", run, devices=devices)
        finals.append([{**r, "time": 0, "goodput": 0} for r in records(run, "final")])
        kept = ("loss", "auc", "macro_f1", "f1_7")
        finals[-1] += [{k: r[k] for k in kept if k in r} for r in records(run, "train")]
    assert finals[0] == finals[1] and len(finals[0]) == 9 and 0.5 < finals[0][0]["auc"] < 1


@pytest.mark.parametrize(
    "name", [*SMALLER.split("|"), "RMSE", "top1_error", "valid/loss", "valLoss", "mse_3", "a.loss"]
)
def test_the_smaller_of_these_is_the_better(name):
    assert sign(name) == 1 and sign(name, "max") == -1


LARGEST = [
    "f1",
    "macro_f1",
    "auc",
    "precision_3",
    "recall",
    "top5_accuracy",
    "accuracy",
    "valid/f1_0",
    "mIoU",
    "F1Score",
    "acc@5",
    "precision-3",
    "rougeL",
]


@pytest.mark.parametrize("name", [*LARGER.split("|"), *LARGEST])
def test_the_larger_of_these_is_the_better(name):
    assert sign(name) == -1 and sign(name, "min") == 1


UNKNOWN = [
    "accumulated_cost",
    "indices_off",
    "lossless",
    "emaerrors",
    "confident",
    "f1/macro",
    "auc_error",
    "accuracy_loss",
    "hard_errors/cost",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_words_inside_words_and_both_kinds_say_nothing(name):
    """A report then marks no run as the best, and a run asks for the mode in one line."""
    assert (sign(name), sign(name, "min"), sign(name, "max")) == (0, 1, -1)
    said = f"k: the name '{name}' does not say whether its min or its max is best; set mode beside"
    with pytest.raises(UsageError, match=said):
        known_sign("k", name, None)
    with pytest.raises(UsageError, match=f"callbacks.args.metric: the name '{name}' does not say"):
        EarlyStopping(name)
    assert known_sign("k", name, "min") == -EarlyStopping(name, mode="min").sign == 1


def test_the_name_of_a_set_says_nothing_of_a_direction():
    names = ("hard_errors/accuracy", "loss_free/f1", "valid/loss", "loss_free/hits", "f1/loss")
    assert [sign(name) for name in names] == [-1, -1, 1, 0, 1]


def test_a_run_does_not_take_the_direction_of_a_set(tmp_path):
    more = {"eval": {"also": {"loss_free": {"target": "Digits"}}}, "steps": 2}

    def run(best, **mode):
        data = {"data": {"target": "Digits"}, "run_dir": tmp_path / best.replace("/", "_")}
        loss = Measured(metrics=[confident])
        model = {"target": "MLP", "args": {"hidden": [8]}}
        checkpoint = {"best": best, **mode}
        return jaxdp.fit(model, loss=loss, batch_size=60, checkpoint=checkpoint, **data, **more)

    assert run("loss_free/accuracy").best.final["step"] == 2
    with pytest.raises(
        UsageError, match=r"checkpoint.best: the name 'loss_free/confident' does not"
    ):
        run("loss_free/confident")
    assert run("loss_free/confident", mode="max").best.final["step"] == 2


@pytest.mark.parametrize("key", ["checkpoint.best", "callbacks.args.metric"])
def test_a_metric_of_unknown_direction_needs_a_mode(tmp_path, key):
    """Its name does not say so: the worst would be kept as the best."""
    more = {"checkpoint": {"best": "confident"}}
    if key != "checkpoint.best":
        more = {"callbacks": [{"target": "EarlyStopping", "args": {"metric": "confident"}}]}
    with pytest.raises(UsageError, match=f"{key}: the name 'confident' does not say whether"):
        fit(tmp_path / "a", **more)
    with pytest.raises(UsageError, match=r"checkpoint.best: 'sums:auc' is not among the numbers"):
        fit(tmp_path / "b", checkpoint={"best": "sums:auc"})
    more.get("checkpoint", {}).update(mode="min")
    more.get("callbacks", [{"args": {}}])[0]["args"]["mode"] = "min"
    fitted = fit(tmp_path / "c", **more)
    assert "checkpoint" not in more or fitted.best.final["confident"] == min(
        fitted.history["eval"]["confident"]
    )
