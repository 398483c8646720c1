"""A stream that ends before the last update: on all ranks it ends the training, on some of them it
is an error.
"""

import json

import pytest
import yaml

from launch import mpirun

SOURCE = """
import os
import numpy as np

def records(count, start=0):
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
        count -= int(os.environ["SHORT"])
    yield from range(start, count)

def decode(i):
    x = np.random.default_rng(i).normal(size=8).astype(np.float32)
    return x, np.int32(x.sum() > 0)
"""
CONFIG = {
    "model": {"target": "MLP", "args": {"hidden": [4], "num_classes": 2}},
    "data": {
        "target": "Stream",
        "args": {"source": "numbered.records", "decode": "numbered.decode"},
    },
    "steps": 30,
    "batch_size": 16,
    "microbatches": 2,
    "parallel": {"reduction": "exact"},
    "checkpoint": {"every": 4},
}


@pytest.fixture
def train(tmp_path):
    """Train on a stream of `count` examples, fewer of them on rank 1."""
    (tmp_path / "numbered.py").write_text(SOURCE)
    (tmp_path / "stream.yaml").write_text(yaml.safe_dump(CONFIG))

    def run(processes, name, count, short=0, timeout=60):
        command = [
            "train.py",
            "--config",
            str(tmp_path / "stream.yaml"),
            "--run_dir",
            str(tmp_path / name),
        ]
        args = ["--data.args.args", json.dumps({"count": count})]
        env = {"PYTHONPATH": f".:{tmp_path}", "JAXDP_TIMEOUT": str(timeout), "SHORT": str(short)}
        done = mpirun(processes, [*command, *args], env=env)
        records = [
            json.loads(x) for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        return done, records[-1] if records else None

    return run


@pytest.mark.slow
@pytest.mark.mpi
def test_a_stream_ended_on_all_ranks_ends_the_training(train):
    alone, last = train(1, "one", 165)
    assert alone.returncode == 0, alone.output
    assert (
        "data: the stream ends after 165 examples: training ends after update 10 of 30"
        in alone.output
    )
    assert (last["split"], last["step"]) == ("final", 10)
    two, other = train(2, "two", 165)
    assert two.returncode == 0 and other["params_sha256"] == last["params_sha256"], two.output


@pytest.mark.slow
@pytest.mark.mpi
def test_a_stream_ended_on_one_rank_is_one_line(train):
    done, _ = train(2, "short", 480, short=300, timeout=30)
    words = "data: the stream ends after 180 examples, but continues on rank 0; let the source yield the same examples"
    assert done.returncode == 2 and done.output.count(words) == 1, done.output
    assert "Traceback" not in done.output and "saved step 8" in done.output
    done, last = train(2, "short", 480)
    assert "resumes after step 8" in done.output, done.output
    assert (last["split"], last["step"]) == ("final", 30)
