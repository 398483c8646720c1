"""A metric is a sum, divided by the loss's weight, or a pair (sum, its own weight), from the loss
to every record.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from covering import first
from jaxdp.errors import UsageError
from jaxdp.losses import CausalLM, MultiTask, SoftmaxCrossEntropy
from jaxdp.train.evaluate import evaluate
from jaxdp.train.state import WEIGHT, check_result
from jaxdp.verify.oracle import means
from plain_runs import fit, make_run
from weighing import RARE, check_means, examples, per_class


def coupled(outputs, batch):
    return per_class(outputs, batch)


coupled.scope = "global"


WAYS = [
    {"devices": 8, "accumulate": "scan"},
    {"devices": 2, "backend": "pjit", "loss": coupled, "accumulate": "scan"},
    {"devices": 1},
    {"devices": 3, "backend": "pjit"},
    {
        "devices": 4,
        "backend": "pjit",
        "layout": {"zero": 3},
        "accumulate": "scan",
        "reduction": "bucket",
    },
    {"devices": 2, "loss": coupled},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    first(3, WAYS),
    ids=lambda way: " ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in way.items()),
)
def test_each_metric_is_divided_by_its_own_weight(way):
    check_means(**way)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_call", first(1, [3, 1]))
def test_records_leave_out_metrics_of_no_weight(tmp_path, steps_per_call):
    """Of updates, evaluations and the end; what `derive` makes of a mean of nothing is left out
    with it.
    """
    train, held_out = toys.data(60), examples()
    train["labels"] = (np.arange(60) % 2).astype(np.int32)
    run = make_run(
        tmp_path, toys.MODELS["mlp"](), devices=2, examples=train, held_out=held_out, loss=per_class, steps=4,
        log_every=1, eval_every=3, steps_per_call=steps_per_call, derive=per_class.derive,
    )  # fmt: skip
    run.checkpoints.best = f"class{RARE}"
    final, records = fit(run)[0], run.log.writer.records
    assert [(r["step"], r["split"][0]) for r in records] == [
        (1, "t"),
        (2, "t"),
        (3, "t"),
        (3, "e"),
        (4, "t"),
        (4, "f"),
    ]
    for record in (*records[:3], records[4]):
        assert {"class0", "class1", "all"} <= set(record) and not {"class2", "balanced"} & set(
            record
        )
        assert all(
            math.isfinite(v) for v in record.values() if isinstance(v, float)
        ) and WEIGHT not in str(record)
    x, labels = (np.float64(held_out[k]) for k in ("inputs", "labels"))
    means = [x[labels == c, 0, 0, 0].mean() for c in range(3)]
    for record in (records[3], final):
        assert [record[f"class{c}"] for c in range(3)] == pytest.approx(means, rel=1e-5)
        assert record["balanced"] == pytest.approx(np.mean(means), rel=1e-5)
    assert run.checkpoints.meta(4)["metrics"][f"class{RARE}"] == final[f"class{RARE}"]
    empty = run.replace(eval=make_run(tmp_path, held_out=train).data.eval)
    found = evaluate(empty, run.strategy.compile(run.step), run.strategy.init())
    assert "class2" not in found and "class0" in found and not run.checkpoints.is_best(found)


@pytest.mark.slow
def test_a_metric_that_is_not_finite_is_shown_as_it_is(tmp_path):
    """Which is something else than a weight of 0."""

    def broken(outputs, batch):
        total, weight, _ = SoftmaxCrossEntropy()(outputs, batch)
        return (
            total,
            weight,
            {
                "nan": (weight * jnp.nan, weight),
                "inf": (weight, 0 * weight),
                "sum": weight * jnp.nan,
            },
        )

    run = make_run(tmp_path, toys.MODELS["mlp"](), loss=broken, steps=2, log_every=1)
    fit(run)
    record = run.log.writer.records[0]
    assert math.isnan(record["nan"]) and math.isnan(record["sum"]) and "inf" not in record


def rare(outputs, batch):
    """Of examples of one class alone."""
    own = batch["mask"] * (batch["labels"] == RARE)
    return (
        jnp.sum(outputs[:, 0] * own),
        jnp.sum(own),
        {"own": (jnp.sum(outputs[:, 1] * own), 2 * jnp.sum(own))},
    )


def test_metrics_of_tasks_are_means_of_their_elements():
    loss = MultiTask({"a": {"target": f"{__name__}.rare", "outputs": "x"}})
    outputs = {"x": np.arange(12.0).reshape(6, 2)}
    batch = {"a": np.array([RARE, RARE, 0, RARE, 0, 0]), "mask": np.ones(6)}
    for parts in ([slice(0, 6)], [slice(0, 1), slice(1, 4), slice(4, 6)]):

        def rows(tree, part):
            return jax.tree.map(lambda x: jnp.asarray(x[part]), tree)

        found = [check_result(loss(rows(outputs, part), rows(batch, part)))[2] for part in parts]
        total = {name: sum(float(one[name]) for one in found) for name in found[0]}
        assert total["a_loss"] / total[f"{WEIGHT}a_loss"] == pytest.approx((0 + 2 + 6) / 3)
        assert total["a_own"] / total[f"{WEIGHT}a_own"] == pytest.approx((1 + 3 + 7) / 6)


@pytest.mark.slow
def test_perplexity_leaves_label_smoothing_out():
    scores, labels = (
        np.random.default_rng(0).normal(size=(4, 3, 7)),
        (np.arange(12, dtype=np.int32) % 7).reshape(4, 3),
    )
    batch = {"labels": labels, "mask": np.array([[1.0, 1, 0]] * 4)}
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    nats = -np.take_along_axis(logs, labels[..., None], -1)[..., 0][:, :2].mean()
    for loss in (CausalLM(), CausalLM(label_smoothing=0.3)):
        total, weight, metrics = loss(jnp.asarray(scores, jnp.float32), batch)
        means = {name: float(value / weight) for name, value in {"loss": total, **metrics}.items()}
        assert loss.derive(means)["perplexity"] == pytest.approx(np.exp(nats), rel=1e-5)
        assert (means["loss"] == pytest.approx(nats, rel=1e-5)) == (not loss.label_smoothing)
    assert math.isnan(CausalLM().derive({"loss": math.nan})["perplexity"])


ONE = jnp.ones(())


@pytest.mark.parametrize(
    "metrics", [{"a": (ONE, ONE, ONE)}, {"a": (ONE,)}, {"a": (ONE, 1.0)}, {"a": (jnp.ones(2), ONE)}, {"a": {"b": ONE}}],
    ids=str,
)  # fmt: skip
def test_what_is_neither_a_sum_nor_a_pair_is_refused(metrics):
    with pytest.raises(
        UsageError, match=r"a loss returns \(sum \[\], weight \[\], {name: sum \[\] or"
    ):
        check_result((ONE, ONE, metrics))
    assert check_result((ONE, ONE, {"a": [ONE, ONE], "b": ONE}))[2].keys() == {
        "a",
        f"{WEIGHT}a",
        "b",
    }


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_narrow_sums_of_a_loss_are_added_in_float32(dtype):
    """Where 256 + 1 is 256, the weight would depend on how the microbatches are split over devices."""
    one = jnp.ones((), dtype)
    total, weight, metrics = check_result(
        (one, one, {"hits": one, "of": (one, one), "count": jnp.int32(1)})
    )
    assert {x.dtype.name for x in (total, weight, *metrics.values())} == {"float32", "int32"}
    assert metrics["count"].dtype == jnp.int32
    with pytest.raises(UsageError, match=r"^loss: its sum is int32, which has no gradient"):
        check_result((jnp.int32(1), one, {}))


@pytest.mark.parametrize("name", ["loss", "weight/a", 3])
def test_metrics_named_as_a_records_keys_are_refused(name):
    with pytest.raises(UsageError, match="which every record contains already"):
        check_result((ONE, ONE, {name: ONE}))


def test_verifys_oracle_divides_by_the_same_weights():
    metrics = {"loss": 8.0, "a": 8.0, "weight/a": 4.0, "b": np.float64(0), "weight/b": 0.0}
    with np.errstate(invalid="ignore"):
        divided = means(metrics, 2.0)
    assert divided["loss"] == 4 and divided["a"] == 2 and math.isnan(divided["b"])
    assert divided["weight/a"] == 4
