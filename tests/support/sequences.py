"""Training and evaluation of rows that continue from batch to batch, in one layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toys
from jaxdp.losses import SoftmaxCrossEntropy


def evaluated(model, examples, sequential, **way):
    strategy, step, batch = toys.build(model, examples, sequential=sequential, **way)
    state, program, totals = strategy.init(), strategy.compile(step), np.zeros(2)
    for i in range(3):
        sums = program.evaluate(state, batch(i))
        assert bool(sums.kept) == sequential
        if sequential:
            state = state.replace(kept=sums.kept)
        totals += [float(sums.loss), float(sums.weight)]
    return totals[0] / totals[1]


def check_evaluation(way):
    """By hand: the output of each row is that of the sum of what it has seen."""
    model, examples = toys.summing(), toys.data(53)
    params = jax.device_get(model.init(jax.random.key(0), examples)[0])
    total = 0.0
    for part in np.array_split(np.arange(53), 20):
        seen = examples["inputs"][part].reshape(len(part), -1).cumsum(0)
        scores = seen @ params["kernel"]
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        total -= logs[np.arange(len(part)), examples["labels"][part]].sum()
    assert evaluated(model, examples, True, **way) == pytest.approx(total / 53, rel=1e-4)


def check_training_in_order(way):
    """As on one device."""
    ways = [("pmap", 1, "xla"), way]
    with jax.enable_x64(True):
        states = [
            toys.train(
                toys.lstm_model(), toys.data(53, dtype=np.float64), steps=5, dtype="float64", sequential=True,
                backend=backend, devices=devices, reduction=reduction,
            )[1]
            for backend, devices, reduction in ways
        ]  # fmt: skip
    for state in states[1:]:
        assert (
            toys.relative_error(
                (state.params, state.kept["carry"]), (states[0].params, states[0].kept["carry"])
            )[0]
            < 1e-11
        )


def check_skipped(way, own):
    """The first batch of the second epoch is not finite, or some in the middle with resets of the
    data's own; what is carried after it is the sum since then, without what was skipped."""
    backend, devices, reduction = way
    examples, bad = toys.data(60), 1 if own else 3
    examples |= {"odd": np.zeros(60, np.float32)} | (
        {"reset": np.arange(60) % 3 == 1} if own else {}
    )

    def loss(outputs, batch):
        total, weight, metrics = SoftmaxCrossEntropy()(outputs, batch)
        return total + jnp.sum(batch["odd"] * batch["mask"]), weight, metrics

    strategy, step, batch = toys.build(
        toys.summing(), examples, loss=loss, sequential=True, backend=backend, devices=devices, reduction=reduction,
        batch_size=20,
    )  # fmt: skip
    program, state, skipped = strategy.compile(step), strategy.init(), []
    for i in range(bad + 2):
        data = batch(i)
        if i == bad:
            data = {**data, "odd": data["odd"] + np.float32(np.inf)}
        state, metrics = program.update(state, data)
        skipped.append(int(metrics["skipped"]))
    assert skipped == [0] * bad + [1, 0]
    got = np.asarray(strategy.export(state).kept["carry"]["seen"])
    for r, part in enumerate(np.array_split(np.arange(60), 20)):  # three examples each, by update
        want = examples["inputs"][part[(bad + 1) % 3]].ravel()
        np.testing.assert_allclose(got[r % 8, r // 8], want, rtol=1e-5, atol=1e-5)
