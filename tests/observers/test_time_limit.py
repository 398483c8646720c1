"""A wall-clock limit saves and ends with 75, and the same command goes on."""

import json

import pytest

from cli_runs import jaxdp, records
from jaxdp.errors import UsageError
from jaxdp.observers.time_limit import TimeLimit

CONFIG = """
model: {target: MLP, args: {hidden: [8]}}
data: {target: benchmarks.data.SlowDigits, args: {sleep: 0.02}}
steps: 100
batch_size: 64
callbacks: [{target: TimeLimit, args: {minutes: 0.01}}]
"""


def test_a_run_is_saved_at_its_limit_and_goes_on(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    argv = ["train", "--config", tmp_path / "run.yaml", "--run_dir", tmp_path / "run"]
    done = jaxdp(*argv[1:], code=75)
    assert "preempted" in done.stdout + done.stderr
    first = int(max((tmp_path / "run" / "checkpoints").iterdir(), key=lambda x: int(x.name)).name)
    assert 0 < first < 100
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds[-1] == "preempted"
    jaxdp(*argv[1:], "--callbacks", "[]", code=0)
    assert records(tmp_path / "run", "final")[-1]["step"] == 100


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_a_limit_is_positive(minutes):
    with pytest.raises(UsageError, match=r"callbacks.args.minutes: .* is not a positive number"):
        TimeLimit(minutes)
