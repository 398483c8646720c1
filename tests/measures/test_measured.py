"""Metrics for any loss: each is a function of sums over all examples."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from scipy import stats

import jaxdp
from cli_runs import ended, records
from cli_runs import jaxdp as train
from jaxdp.errors import UsageError
from jaxdp.losses import CausalLM, Contrastive, Logits, MeanSquaredError, make_loss
from jaxdp.measures.measured import METRICS, Measured, States
from jaxdp.measures.of_classes import AUC, F1, Precision, Recall, TopK
from jaxdp.metrics.numbers import LARGER, SMALLER, sign
from jaxdp.sampling.per_example import PerExample
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
        total, weight, metrics = check_result(jax.jit(loss)(jnp.asarray(outputs[part]), rows))
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


def test_each_metric_is_that_of_all_unmasked_examples_however_they_are_split():
    loss = Measured("SoftmaxCrossEntropy", ["F1", "Precision", "Recall", TopK(2), AUC(2)])
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


def test_an_auc_without_examples_of_the_class_is_omitted():
    found = record_of(Measured(metrics=["AUC", "Recall"]), LOGITS, {**BATCH, "labels": LABELS * 0})
    assert not {"auc", "auc_error", "recall"} & found.keys() and "accuracy" in found


def test_all_classes_and_their_mean():
    found = record_of(Measured(metrics=[F1(None), Recall(None)]), LOGITS, BATCH)
    recalls = [(c == PREDICTED)[REAL & (c == LABELS)].mean() for c in range(4)]
    assert [found[f"recall_{c}"] for c in range(4)] == pytest.approx(recalls, rel=1e-6)
    assert found["macro_recall"] == pytest.approx(np.mean(recalls), rel=1e-6)
    assert found["macro_f1"] == pytest.approx(np.mean([found[f"f1_{c}"] for c in range(4)]))


def test_tokens_lazy_logits_and_probabilities_as_labels():
    """Of tokens with a mask of tokens, and of Mixup's labels."""
    kernel = RNG.normal(size=(4, 5)).astype(np.float32)
    x = RNG.normal(size=(6, 8, 5)).astype(np.float32)
    labels = RNG.integers(0, 4, (6, 8)).astype(np.int32)
    mask = (RNG.uniform(size=(6, 8)) > 0.3).astype(np.float32)
    loss = Measured(CausalLM(), ["Accuracy", {"target": "Precision", "args": {"positive": 0}}])
    batch = {"labels": jnp.asarray(labels), "mask": jnp.asarray(mask)}
    total, weight, metrics = loss(Logits(jnp.asarray(x), jnp.asarray(kernel), 4), batch)
    own = CausalLM()(jnp.asarray(x @ kernel.T), batch)
    np.testing.assert_allclose([total, weight], own[:2], rtol=1e-5)
    predicted = (x @ kernel.T).argmax(-1)
    hits, of = metrics["accuracy"]
    assert hits == ((predicted == labels) * mask).sum() and of == mask.sum()
    hits, of = metrics["precision"]
    assert hits == ((predicted == 0) & (labels == 0) & (mask > 0)).sum()
    assert "perplexity" in loss.derive({"loss": 1.0})
    mixed = jax.nn.one_hot(LABELS, 4) * 0.8 + 0.05
    soft = Measured(metrics=["F1"])(LOGITS, {"labels": mixed, "mask": MASK})
    hard = Measured(metrics=["F1"])(LOGITS, BATCH)
    assert soft[2]["f1"] == hard[2]["f1"]


class Mean:
    """A metric as clu's: the share of confident examples, whatever the mask says."""

    def __init__(self, total, count):
        self.total, self.count = total, count

    @classmethod
    def from_model_output(cls, logits, labels, **_):
        return cls((jax.nn.softmax(logits).max(-1) > 0.5).mean(), jnp.int32(1))

    def merge(self, other):
        return type(self)(self.total + other.total, self.count + other.count)

    def compute(self):
        return self.total / self.count


class Largest(Mean):
    def merge(self, other):
        return type(self)(np.maximum(self.total, other.total), self.count + other.count)


class Names(Mean):
    def compute(self):
        return np.ones(3)


for state in (Mean, Largest, Names):
    jax.tree_util.register_pytree_node(
        state, lambda x: ((x.total, x.count), None), lambda _, xs, cls=state: cls(*xs)
    )


def test_states_that_merge_are_added_example_by_example():
    """So a metric that is a mean of its batch, and ignores the mask, is right all the same."""
    loss = Measured(metrics=[f"{__name__}.Mean"])
    confident = np.float64(jax.nn.softmax(LOGITS).max(-1) > 0.5)[REAL].mean()
    for parts in ([slice(None)], [slice(0, 11), slice(11, 120)]):
        assert record_of(loss, LOGITS, BATCH, parts)["mean"] == pytest.approx(confident)


@pytest.mark.parametrize("name", ["Largest", "Names"])
def test_a_metric_that_is_no_sum_is_refused_by_name(name):
    with pytest.raises(
        UsageError, match=f"loss.args.metrics: {name.lower()} is no number from sums"
    ):
        Measured(metrics=[f"{__name__}.{name}"])(LOGITS, BATCH)


def test_metrics_of_clu():
    clu = pytest.importorskip("clu.metrics")
    own = types.ModuleType("metrics_of_ours")
    own.Largest = clu.Average.from_fun(lambda logits, **_: logits.max(-1))
    own.Last = clu.LastValue.from_fun(lambda logits, **_: logits.max(-1))
    own.All = clu.CollectingMetric.from_outputs(("logits",))
    sys.modules[own.__name__] = own
    loss = Measured(metrics=["clu.metrics.Accuracy", own.Largest])
    found = record_of(loss, LOGITS, BATCH, [slice(0, 11), slice(11, 120)])
    assert found["accuracy"] == pytest.approx((PREDICTED == LABELS)[REAL].mean(), rel=1e-6)
    assert found["fromfun"] == pytest.approx(LOGITS.max(-1)[REAL].mean(), rel=1e-6)
    for name, why in {
        "metrics_of_ours.Last": "its states do not merge by addition",
        "metrics_of_ours.All": "from sums of logits",
        "clu.metrics.Average": "values",
    }.items():
        with pytest.raises(UsageError, match=f"loss.args.metrics: .*{why}"):
            Measured(metrics=[name])(LOGITS, BATCH)


def test_a_function_of_the_user_and_an_object():
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
        ("SoftmaxCrossEntropy", ["F2"], "loss.args.metrics: 'F2' is neither built in nor"),
        (
            "SoftmaxCrossEntropy",
            [3],
            "loss.args.metrics: 3 is not a metric; give a name such as F1",
        ),
        ("Cross", ["F1"], "loss.args.loss.target: 'Cross' is neither built in"),
        (Contrastive(), ["F1"], "loss.args.loss: .* couples examples; metrics cannot be added"),
        ("SoftmaxCrossEntropy", [F1(0), F1(2)], "loss.args.metrics: two of them return 'f1'"),
        ("SoftmaxCrossEntropy", [F1(4)], "loss.args.metrics.args.positive: 4 is none of 4 classes"),
        ("SoftmaxCrossEntropy", [AUC(-1)], "loss.args.metrics.args.positive: -1 is none of 4"),
        (
            "SoftmaxCrossEntropy",
            [{"target": f"{__name__}.Mean", "args": {"k": 1}}],
            "loss.args.metrics.args.k: Mean takes no such argument",
        ),
    ],
)
def test_what_is_wrong_is_named(loss, metrics, said):
    with pytest.raises(UsageError, match=said):
        Measured(loss, metrics)(LOGITS, BATCH)


def test_precision_is_of_the_config():
    loss = make_loss("Measured", {"metrics": ["AUC", {"target": "TopK", "args": {"k": 3}}]})
    assert [type(metric) for metric in loss.metrics] == [AUC, TopK] and loss.metrics[
        1
    ].loss.top_k == (3,)
    assert issubclass(F1, Precision) and isinstance(
        make_loss("Measured", {"metrics": [Mean]}).metrics[0], States
    )


X = RNG.normal(size=(203, 6)).astype(np.float32)
Y = ((X[:, 0] + 0.5 * RNG.normal(size=203)) > 0.8).astype(np.int32)
NAMES = {"f1", "auc", "auc_error", "accuracy", "top2_accuracy", "loss", "mean"}


def fit(run_dir=None, **more):
    settings = {"steps": 24, "batch_size": 42, "microbatches": 8, "log": {"every": 4}, **more}
    metrics = ["F1", "AUC", TopK(2), "ConfusionMatrix", f"{__name__}.Mean"]
    return jaxdp.fit(
        {"target": "MLP", "args": {"hidden": [8], "num_classes": 2}},
        (X, Y),
        Measured("SoftmaxCrossEntropy", metrics),
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
    matrix = fitted.evaluate()["sums:confusion"]
    expected = np.zeros((2, 2))
    np.add.at(expected, (Y, predicted), 1)
    np.testing.assert_array_equal(matrix, expected)


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
    "name", [*SMALLER, "RMSE", "top1_error", "valid/loss", "perplexity", "auc_error"]
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
]


@pytest.mark.parametrize("name", [*LARGER, *LARGEST])
def test_the_larger_of_these_is_the_better(name):
    assert sign(name) == -1 and sign(name, "min") == 1


@pytest.mark.parametrize("key", ["checkpoint.best", "callbacks.args.metric"])
def test_a_metric_of_unknown_direction_needs_a_mode(tmp_path, key):
    """Its name does not say so: the worst would be kept as the best."""
    more = {"checkpoint": {"best": "mean"}}
    if key != "checkpoint.best":
        more = {"callbacks": [{"target": "EarlyStopping", "args": {"metric": "mean"}}]}
    with pytest.raises(UsageError, match=f"{key}: the name 'mean' does not say whether"):
        fit(tmp_path / "a", **more)
    with pytest.raises(UsageError, match=r"checkpoint.best: 'sums:auc' is not among the numbers"):
        fit(tmp_path / "b", checkpoint={"best": "sums:auc"})
    more.get("checkpoint", {}).update(mode="min")
    more.get("callbacks", [{"args": {}}])[0]["args"]["mode"] = "min"
    fitted = fit(tmp_path / "c", **more)
    assert "checkpoint" not in more or fitted.best.final["mean"] == min(
        fitted.history["eval"]["mean"]
    )


def test_the_confusion_matrix_of_each_evaluation_is_a_table(tmp_path):
    run = tmp_path / "run"
    more = {"also": {"other": {"target": "Digits", "args": {"split": "train"}}}, "every": 20}
    config = {
        "model": {"target": "MLP", "args": {"hidden": [16]}},
        "data": {"target": "Digits"},
        "loss": {"target": "Measured", "args": {"metrics": ["ConfusionMatrix"]}},
        "callbacks": ["Confusion"],
        "eval": more,
        "steps": 40,
        "batch_size": 60,
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    ended("train", "--config", file, "--run_dir", run)
    evaluated = jaxdp.load(run).evaluate()
    for name, key in {"confusion": "", "confusion_other": "other/"}.items():
        first, head, *rows = (run / f"{name}.txt").read_text().splitlines()
        assert first.startswith("update 40: ") and head.split() == [*"0123456789"]
        table = np.array([row.split() for row in rows], float)
        np.testing.assert_array_equal(table[:, 1:], evaluated[f"{key}sums:confusion"])
        hits = evaluated[f"{key}accuracy"] * table[:, 1:].sum()
        assert np.trace(table[:, 1:]) == pytest.approx(hits) and hits > 40
    config["loss"]["args"]["metrics"] = ["F1"]
    file.write_text(yaml.safe_dump(config))
    said = ended("train", "--config", file, "--run_dir", tmp_path / "without", code=1).stderr
    assert "Confusion needs loss: {target: Measured, args: {metrics: [ConfusionMatrix]}}" in said
