"""`jaxdp.fit` from scripts, as a user would run them."""

import json
import pathlib
import subprocess
import sys

import pytest

from launch import environment, mpirun

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fit_script.py"
SCRIPT = """
import numpy as np, optax, jaxdp
from flax import linen
x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int32)
base = dict(model=linen.Dense(2), data={"inputs": x, "labels": y}, steps=30, batch_size=30, run_dir="run")
"""


def script(folder, code, code_expected=0, seed="0"):
    env = environment({"PYTHONHASHSEED": seed}, 2)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + code], cwd=folder, text=True, capture_output=True, env=env
    )
    assert done.returncode == code_expected, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
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


OBJECTS = """
import functools, jax, threading
def closure(scale, lock=None):
    def loss(outputs, batch):
        loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]) * batch["mask"]
        return (loss * scale).sum() * (lock is None), batch["mask"].sum(), {}
    return loss
def renamed(lock):
    def loss(outputs, batch):
        with lock:
            return closure(np.float32(2))(outputs, batch)
    loss.__qualname__ = "closure.<locals>.loss"
    return loss
noise = lambda example, key, amount: {**example, "inputs": example["inputs"] * amount}
line = lambda rate: optax.linear_schedule(rate, 0.0, 9)
chain = lambda rate: optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(line(rate)))
changed = y.copy()
changed[3] = 1 - y[3]  # none of the examples that the fingerprint of a data set reads
base |= dict(loss=closure(np.float32(2)), optimizer=chain(1.0), data=(x, y), eval_data=(x, y), steps=1)
base |= dict(transform=functools.partial(noise, amount=2.0))
"""
CHANGES = {
    "optimizer=chain(1e-3)": "the optimizer is not the one",
    "optimizer=optax.adam(1.0)": "optimizer.target: 'optax chain(clip",
    "model=linen.Dense(3)": "the model, the loss or a transform is not the one",
    "model=linen.Dense(2, use_bias=False)": "the model, the loss or a transform is not the one",
    "model=linen.Dense(2, kernel_init=jax.nn.initializers.ones)": "the initial state of the model or the optimizer is",
    "loss=closure(np.float32(3))": "the model, the loss or a transform is not the one",
    "loss=closure(np.float32(2), threading.Lock())": "the model, the loss or a transform is not the one",
    "loss=lambda o, b: (o.sum(), b['mask'].sum(), {})": "loss.target: '__main__.closure.<locals>.loss (object)' -> ",
    "transform=functools.partial(noise, amount=3.0)": "the model, the loss or a transform is not the one",
    "data=(x, changed)": "data fingerprint: ",
    "eval_data=(x, changed)": "the evaluation data is not the one",
}


@pytest.mark.slow
def test_a_run_belongs_to_the_objects_that_trained_it(tmp_path):
    first = """
one = jaxdp.fit(**base)
for arguments in CHANGES:
    try:
        print("trained", jaxdp.fit(**base | eval("dict(" + arguments + ")")).final)
    except jaxdp.UsageError as error:
        print("refused", error)
""".replace("CHANGES", str(list(CHANGES)))
    out, _ = script(tmp_path, OBJECTS + first)
    lines = [
        line for line in out.splitlines() if line.startswith(("refused", "trained", "finished"))
    ]
    assert len(lines) == len(CHANGES), out
    for line, words in zip(lines, CHANGES.values()):
        assert (
            line.startswith(f"refused {words}")
            and "run_dir (None is" in line
            and "overwrite=True" in line
        ), line
    second = """
import os
same, other = jaxdp.fit(**base | dict(loss=renamed(threading.Lock()))), base | dict(optimizer=chain(1e-3))
apart = jaxdp.fit(**other | dict(run_dir=None))
digest = lambda fitted: fitted.final["params_sha256"]
assert apart.run_dir.is_dir() and digest(apart) != digest(same)
open("run/mine.txt", "w").close()
os.mkdir("run/checkpoints/1-backup")
assert digest(jaxdp.fit(**other, overwrite=True)) == digest(apart) == digest(jaxdp.fit(**other))
assert os.path.isfile("run/mine.txt")
os.rmdir("run/checkpoints/1-backup")
os.remove("run/env.json")
try:
    jaxdp.fit(**other, overwrite=True)
except jaxdp.UsageError as error:
    print(error)
assert os.listdir("run/checkpoints") == ["1"]
print(apart.run_dir)
"""
    out, _ = script(tmp_path, OBJECTS + second, seed="1")
    *_, problem, temporary = out.splitlines()
    assert (
        out.count("finished: run ") == 2
        and "'run' is not the directory of a run of jaxdp" in problem
    )
    assert not pathlib.Path(temporary).exists()


@pytest.mark.slow
def test_named_code_is_evaluated_and_changes_reported(tmp_path):
    """A change of shape is an error before anything is reported as finished."""
    net = """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, *, rngs): self.layer = nnx.Linear(64, 10, rngs=rngs)
    def __call__(self, x): return self.layer(x.reshape(len(x), 64)) * SCALE
"""
    (tmp_path / "mine.py").write_text(net.replace("SCALE", "1"))

    def command(*argv):
        return subprocess.run(
            [sys.executable, "-m", "jaxdp", *argv],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            env=environment({}, 2),
        )

    script(
        tmp_path,
        "import mine\njaxdp.fit(mine.Net, 'Digits', optimizer='sgd', steps=1, run_dir='run')",
    )
    done = command("eval", "--run_dir", "run")
    assert done.returncode == 0 and "loss" in done.stdout and "warning" not in done.stdout, done
    (tmp_path / "mine.py").write_text(net.replace("SCALE", "2"))
    done = command("train", "--config", "run/config.yaml")
    assert (
        done.returncode == 0
        and "warning: the model, the loss or a transform has changed since" in done.stdout
    ), done
    (tmp_path / "mine.py").write_text(
        net.replace("SCALE", "1").replace("Linear(64, 10", "Linear(64, 11")
    )
    done = command("train", "--config", "run/config.yaml")
    assert (
        done.returncode == 2
        and "finished" not in done.stdout
        and "layer/bias float32[10]" in done.stderr
    ), done


BAD = {
    "batchsize=3": "fit: unknown key 'batchsize'; did you mean 'batch_size'?",
    "parallel={'zero': 9}": "parallel.zero: 9 is too large; it must be at most 3",
    "eval={'every': 'x'}": "eval.every: 'x' is not an integer",
    "optimizer=3": "optimizer: int is not an Optax transformation",
    "loss='MeanSquaredError'": "loss: outputs (4, 2) do not fit labels (4,)",
    "loss=lambda o, b: (o.sum(), b['mask'].sum(), {'step': o.sum()})": "loss: a metric is called 'step', which",
    "loss=lambda outputs, batch: outputs.mean()": "loss: it returned float32[]; a loss returns (sum [], weight []",
    "eval_data=(x[:0], y[:0])": "data: the data set is empty",
    "eval_data=x, eval=3": "fit: eval: 3 is not a mapping; set its keys, as in eval: {every: ...}",
    "callbacks='EarlyStopping'": "callbacks: 'EarlyStopping' is not a list; give one, such as [EarlyStopping()]",
    "callbacks=['EarlyStoping']": "callbacks.target: 'EarlyStoping' is neither built in nor a dotted path; did you",
    "eval_data=x": "eval.data: its examples (inputs float32[4]) do not match the training examples (inputs",
    "eval_data=(x[:, :3], y)": "eval.data: its examples (inputs float32[3], labels int32[]) do not match",
    "data=(x, y + np.int32(1))": "loss: a label is 2, but the model's outputs are for 2 classes, 0 to 1",
    "data=(x, y - np.int32(1))": "loss: a label is -1, but",
    "data=(x, y + np.int32(1)), transform={'target': 'Mixup', 'args': {'classes': 2}}": "loss: a label is 2, but",
    "data=iter(x)": "data.target: 'iterator (object)' is",
    "optimizer={'target': optax.sgd(1.0), 'weight_decay': 0.1}": "optimizer.weight_decay: 0.1 but",
    "loss={'target': 'MeanSquaredError', 'args': {'w': x}}": "loss.args.w: config.yaml cannot store a value of type nd",
}


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_interrupt_saves_and_the_next_call_resumes(tmp_path):
    code = """
import os, pathlib, signal, threading, time
before = signal.getsignal(signal.SIGTERM)
def interrupt():
    metrics = pathlib.Path("run/metrics.jsonl")
    while not metrics.exists() or not metrics.stat().st_size:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
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
    assert (
        "preempted by SIGINT on rank 0" in out and "interrupted\n" in out and out.endswith("2\n")
    ), out + err


@pytest.mark.slow
def test_a_run_sets_jax_up_and_restores_its_settings(tmp_path):
    """Of three runs one after the other the last is the first's again, although the second computes
    in float64.
    """
    code = """
import jax
jax.config.update("jax_default_matmul_precision", "high")
runs = {"a": {}, "b": {"precision": {"params": "float64"}}, "c": {}}
fits = [jaxdp.fit(**base | {"steps": 2, "run_dir": name, **more}) for name, more in runs.items()]
found = [fitted.final["params_sha256"] for fitted in fits]
assert found[0] == found[2] != found[1], found
assert not jax.config.jax_enable_x64 and jax.config.jax_default_matmul_precision == "high"
"""
    script(tmp_path, code)


@pytest.mark.slow
def test_a_transform_may_number_the_labels(tmp_path):
    script(
        tmp_path,
        """
shift = lambda example, key: {**example, "labels": example["labels"] - 1}
jaxdp.fit(**base | {"data": (x, y + np.int32(1)), "transform": shift, "steps": 1})
make = lambda example, key: {"inputs": example["inputs"], "labels": np.int32(1)}
jaxdp.fit(**base | {"data": {"inputs": x}, "transform": make, "steps": 1, "run_dir": "made"})
""",
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_a_model_error_on_one_rank_ends_all_ranks(tmp_path):
    """The model opens JAX's devices while it is made, which one process waits for the other to do."""
    file = tmp_path / "one.py"
    file.write_text(
        """
import jax, jaxdp, numpy as np, os
def made():
    jax.random.key(0)
    return (lambda key, inputs: {"k": jax.numpy.zeros((4, 2))}, lambda params, inputs: inputs @ params["k"])
y = np.zeros(8, np.uint64 if os.environ["OMPI_COMM_WORLD_RANK"] == "1" else np.int32)
jaxdp.fit(made, (np.ones((8, 4), np.float32), y), steps=1, batch_size=8, run_dir="RUN")
""".replace("RUN", str(tmp_path / "run"))
    )
    two = mpirun(2, [str(file)])
    assert two.returncode == 2, two.output
    assert two.stderr.count("jaxdp: ") == 1 and "data: 'labels' is uint64" in two.stderr, two.output


@pytest.mark.slow
@pytest.mark.mpi
def test_the_example_is_the_same_in_two_processes(tmp_path):
    alone = subprocess.run(
        [sys.executable, EXAMPLE, "one"], cwd=tmp_path, text=True, capture_output=True, check=True
    )
    assert "mean absolute error 0.1" in alone.stdout
    two = mpirun(2, [str(EXAMPLE), str(tmp_path / "two")])
    assert two.returncode == 0 and two.stdout.count("mean absolute error") == 1, two.output
    last = [
        json.loads((tmp_path / d / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        for d in ("one", "two")
    ]
    assert last[0] == pytest.approx(last[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.mpi
def test_every_rank_predicts_and_evaluates_the_same(tmp_path):
    (tmp_path / "fit.py").write_text(f"""{SCRIPT}
base["run_dir"] = {str(tmp_path / "run")!r}
fitted = jaxdp.fit(**base, parallel={{"backend": "pjit", "zero": 3}}, optimizer={{"target": "adamw", "ema": 0.9}})
scores = fitted.evaluate((x[:77], y[:77]))
outputs = fitted.predict(x[:77], batch_size=50)
assert abs((outputs.argmax(1) == y[:77]).mean() - scores["accuracy"]) < 1e-6
alone = fitted.predict(x) if jaxdp.current().rank == 0 else None  # needs no other process
assert fitted.history["train"]["step"] == [30]
print("rank", jaxdp.current().rank, scores, outputs.sum(), repr(fitted))
""")
    done = mpirun(2, [str(tmp_path / "fit.py")])
    lines = [
        line.split(maxsplit=2) for line in done.stdout.splitlines() if line.startswith("rank ")
    ]
    assert done.returncode == 0, done.output
    assert sorted(line[1] for line in lines) == ["0", "1"] and lines[0][2] == lines[1][2]


@pytest.mark.slow
def test_an_optax_object_keeps_its_own_learning_rate(tmp_path):
    code = """
try:
    jaxdp.fit(**base, optimizer={"target": optax.adam(1e-3), "lr": 0.1})
except jaxdp.UsageError as error:
    print(error)
jaxdp.fit(**base, optimizer=optax.adam(1e-3))
"""
    out, _ = script(tmp_path, code)
    assert out.splitlines()[0].startswith(
        "optimizer.lr: 0.1, but an Optax transformation has its own learning rate"
    )
    assert "optimizer  optax chain(scale_by_adam, scale), from the script, 30 updates" in out
    for verb in (
        "eval --run_dir run",
        "plan --config run/config.yaml",
        "verify --config run/config.yaml",
    ):
        argv = [sys.executable, "-m", "jaxdp", *verb.split()]
        done = subprocess.run(
            argv, cwd=tmp_path, text=True, capture_output=True, env=environment({}, 2)
        )
        assert done.returncode == 2
        assert (
            "it names an object that a script passed to jaxdp.fit" in done.stderr
            and done.stderr.count("\n") == 1
        )
