"""`jaxdp.fit` from scripts, as a user would run them."""

import json
import pathlib
import subprocess
import sys

import pytest

from launch import environment, mpirun

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "fit_script.py"
SCRIPT = """
import numpy as np, optax, jaxdp
from flax import linen
x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int32)
base = dict(model=linen.Dense(2), data={"inputs": x, "labels": y}, steps=30, batch_size=30, run_dir="run")
"""


def script(folder, code, code_expected=0):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + code], cwd=folder, text=True, capture_output=True, env=environment({}, 2)
    )
    assert done.returncode == code_expected, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_it_trains_and_gives_back_what_the_run_saved(tmp_path):
    """Two devices, ZeRO 3; a second call with the same arguments finds the run at its end."""
    code = """
more = dict(optimizer={"target": "adamw", "lr": 0.05}, eval_data=(x, y), parallel={"backend": "pjit", "zero": 3})
one = jaxdp.fit(**base, **more)
two = jaxdp.fit(**base, **more)
assert one.final == two.final and one.final["accuracy"] > 0.9, one.final
kernel = one.params["kernel"]
assert isinstance(kernel, np.ndarray) and kernel.shape == (4, 2) and (kernel == two.params["kernel"]).all()
assert ((x @ kernel + one.params["bias"]).argmax(1) == y).mean() - one.final["accuracy"] < 1e-6
print(one.run_dir)
"""
    out, _ = script(tmp_path, code)
    assert out.splitlines()[-1] == "run" and out.count("finished: ") == 1
    final = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert final["split"] == "final" and final["accuracy"] > 0.9


BAD = {
    "batchsize=3": "fit: unknown key 'batchsize'; did you mean 'batch_size'?",
    "parallel={'zero': 9}": "parallel.zero: 9 is too large; it must be at most 3",
    "eval={'every': 'x'}": "eval.every: 'x' is not an integer",
    "optimizer=3": "optimizer: int is no Optax transformation",
    "loss='MeanSquaredError'": "loss: outputs (4, 2) do not fit labels (4,)",
    "loss=lambda outputs, batch: outputs.mean()": "loss: it returned float32[]; a loss returns (sum [], weight []",
    "eval_data=(x[:0], y[:0])": "data: the data set is empty",
    "data=iter(x)": "data.target: 'iterator' is",
    "optimizer={'target': optax.sgd(1.0), 'weight_decay': 0.1}": "optimizer.weight_decay: 0.1 but",
}


def test_bad_input_is_an_error_in_one_line(tmp_path):
    code = f"""
for arguments in {list(BAD)}:
    try:
        jaxdp.fit(**{{**base, **eval("dict(" + arguments + ")")}})
    except jaxdp.UsageError as error:
        print(error)
"""
    out, _ = script(tmp_path, code)
    lines = out.splitlines()
    assert len(lines) == len(BAD) and not (tmp_path / "run").exists(), out
    for line, words in zip(lines, BAD.values()):
        assert words in line


def test_an_interrupt_saves_and_then_interrupts_and_the_next_call_goes_on(tmp_path):
    code = """
import os, signal, threading
before = signal.getsignal(signal.SIGTERM)
threading.Timer(4, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    jaxdp.fit(**base | dict(steps=10**6, optimizer={"schedule": "constant", "target": "sgd"}))
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGTERM) == before and signal.getsignal(signal.SIGINT) == signal.default_int_handler
steps = max(int(p) for p in os.listdir("run/checkpoints") if p.isdigit())
more = jaxdp.fit(**base | dict(steps=steps + 2, optimizer={"schedule": "constant", "target": "sgd"}))
print(more.final["step"] - steps)
"""
    out, err = script(tmp_path, code)
    assert "preempted by SIGINT on rank 0" in out and "interrupted\n" in out and out.endswith("2\n"), out + err


@pytest.mark.mpi
def test_the_example_is_the_same_alone_and_in_two_processes(tmp_path):
    alone = subprocess.run([sys.executable, EXAMPLE, "one"], cwd=tmp_path, text=True, capture_output=True, check=True)
    assert "mean absolute error 0.1" in alone.stdout
    two = mpirun(2, [str(EXAMPLE), str(tmp_path / "two")])
    assert two.returncode == 0 and two.stdout.count("mean absolute error") == 1, two.output
    last = [json.loads((tmp_path / d / "metrics.jsonl").read_text().splitlines()[-1])["loss"] for d in ("one", "two")]
    assert last[0] == pytest.approx(last[1], rel=1e-4)
