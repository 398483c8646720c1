"""The audit (reliability.md) of several processes: the wrong one is named, ends the job, or leaves it."""

import json
import pathlib
import subprocess

import pytest

from jaxdp.metrics.jsonl import read
from launch import launched
from planted_faults import option

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
model: {target: MLP, args: {hidden: [48], dropout: 0.1}}
data: {target: Digits, args: {augment: true}}
steps: 60
batch_size: 64
optimizer: {target: adamw, lr: 3.0e-3}
log: {every: 20}
checkpoint: {every: 5}
parallel: {reduction: exact}
audit: {every: 10}
elastic: {enabled: true, snapshot_every: 5}
"""


def launch(folder, processes, fault, *arguments, code=0):
    """(the events, the final record, the output) of a job"""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG)
    words = [
        "-n",
        processes,
        "train",
        "--config",
        folder / "config.yaml",
        "--run_dir",
        folder / "run",
        *option(fault),
        *arguments,
    ]
    process = launched(folder, *words)
    done = subprocess.run(**process, capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stdout + done.stderr
    records, events = (read(folder / "run" / f"{name}.jsonl") for name in ("metrics", "events"))
    return events, records[-1], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("fault", "rank", "wrong"),
    [
        ("flip:grads:rank=1:step=25:bit=30:repeat=true", 1, "computes wrongly: grads/"),
        ("flip:params:rank=0:step=25:bit=22", 0, "has a wrong copy of the state: params/"),
    ],
)
def test_after_an_expulsion_the_bits_are_undisturbed(tmp_path, fault, rank, wrong):
    _, undisturbed, _ = launch(tmp_path / "alone", 1, "", "--elastic.enabled", "false")
    events, final, out = launch(tmp_path / "job", 3, fault, "--audit.action", "expel")
    assert final["params_sha256"] == undisturbed["params_sha256"] and final["step"] == 60
    failed = [(e["step"], e["rank"]) for e in events if e["kind"] == "audit_failed"]
    assert failed == [(30, rank)] and wrong in out and "this process leaves the job" in out
    assert f"(cpu 0 of rank {rank} (host " in out and "None" not in out
    assert (
        "checkpoint 25 may be wrong" in out
        and (tmp_path / "job/run/checkpoints/25.suspect").is_dir()
    )
    resumed = [(e["step"], e["processes"]) for e in events if e["kind"] == "resume"]
    assert resumed == [(20, 2)]  # the last audit that passed


@pytest.mark.slow
@pytest.mark.mpi
def test_stop_ends_all_processes_with_the_cause(tmp_path):
    events, _, out = launch(
        tmp_path, 2, "flip:opt_state:rank=1:step=13", "--audit.action", "stop", code=1
    )
    assert [e["step"] for e in events if e["kind"] == "audit_failed"] == [
        20,
        20,
    ]  # both, without a majority
    assert "rank 0" in out and "rank 1" in out and "audit.action: stop ends the job" in out
    assert events[-1]["kind"] == "failed" and "audit after update 20" in events[-1]["reason"]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_damaged_snapshot_is_named_at_the_next_audit(tmp_path):
    events, final, out = launch(
        tmp_path, 3, "flip:snapshot:rank=2:step=13", "--elastic.snapshot_every", "25"
    )
    assert "the snapshot of update 25 in this process is damaged" in out and final["step"] == 60
    reasons = [e["reason"] for e in events if e["kind"] == "audit"]
    assert len(reasons) == 1 and "in the memory of rank 2" in reasons[0]


@pytest.mark.slow
@pytest.mark.mpi
def test_a_fault_that_killed_a_process_spares_the_next(tmp_path):
    (tmp_path / "job").mkdir()
    events, final, out = launch(tmp_path / "job", 2, "kill:rank=1:step=30")
    assert "generation 0 ends: rank 1" in out and final["step"] == 60
    assert json.dumps(events).count('"resume"') == 1
