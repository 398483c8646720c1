"""`jaxdp summary`: the arrays of a model from shapes alone."""

import json
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

import jaxdp
from jaxdp.cli import Call, load, summary
from jaxdp.errors import UsageError

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def listed(capsys, config, *argv):
    config, path, options = load(["--config", str(CONFIGS / f"{config}.yaml"), *argv], "summary")
    summary.run(Call(config, path, options))
    return capsys.readouterr().out


def test_seven_billion_parameters_need_no_memory(capsys):
    before = sum(x.nbytes for x in jax.live_arrays())
    result = json.loads(listed(capsys, "llama_7b", "--json"))
    assert (
        result["parameters"] == result["trainable"] == 6_738_415_616
        and result["bytes"] == 4 * result["parameters"]
    )
    assert sum(row["count"] for row in result["arrays"]) == result["parameters"]
    row = next(row for row in result["arrays"] if row["path"] == "embed/embedding")
    assert (row["shape"], row["dtype"], row["kind"]) == ([32000, 4096], "float32", "trainable")
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 1e6


def test_frozen_parameters_are_marked(capsys):
    lines = listed(capsys, "digits", "--optimizer.frozen", "[layers/1/]").splitlines()
    kinds = {line.split()[0]: line.split()[1] for line in lines[1:-3]}
    assert (
        kinds["layers/1/kernel"] == "frozen"
        and kinds["layers/0/kernel"] == "trainable"
        and len(kinds) == 6
    )
    assert lines[-2] == "MLP: 85,002 parameters (19,210 trainable, 65,792 frozen), 340 kB"
    assert (
        lines[-1]
        == "weight decay 0.01 for 2 kernels (18,944 parameters), not for 2 vectors (266 parameters)"
    )
    with pytest.raises(UsageError, match=r"optimizer.frozen: 'nothing' matches no parameter"):
        listed(capsys, "digits", "--optimizer.frozen", "[nothing]")


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.last = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(x))


@pytest.mark.slow
def test_a_run_writes_it_into_its_directory(tmp_path):
    """The statistics of a BatchNorm are state: they are no parameters."""
    data = (np.ones((8, 4), np.float32), np.zeros(8, np.int32))
    jaxdp.fit(Net, data, steps=1, batch_size=8, run_dir=tmp_path, parallel={"devices": 1})
    lines = (tmp_path / "model.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines[1:-2]] == [
        *(["last/bias", "trainable"], ["last/kernel", "trainable"], ["norm/bias", "trainable"]),
        *(["norm/scale", "trainable"], ["norm/mean", "state"], ["norm/var", "state"]),
    ]
    assert lines[-1].endswith("Net: 18 parameters (18 trainable, 0 frozen), 104 B")
