"""Makes the golden: a run of 2 processes with 2 devices each, ZeRO-3, as it stood after update 10
of 20.

    python tests/support/golden/make_golden.py

It is made once for each format of checkpoints, and then stays as it is; jaxdp must read it from
then on. run/ is the run directory; expected.json says what it holds (dtype, shape and SHA-256 of
every leaf) and how it went on."""

import hashlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
STEP = 10


def leaf(value):
    """(dtype, shape, SHA-256 of the little-endian bytes)."""
    import numpy as np

    value = np.asarray(value)
    little = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("<"), copy=False))
    return str(value.dtype), list(value.shape), hashlib.sha256(little.tobytes()).hexdigest()


def leaves(state):
    """{path: leaf} of an exported state."""
    import jax

    from jaxdp.checkpoint.leaves import ADDED, all_fields_of
    from jaxdp.split import path_string

    fields = {name: x for name, x in all_fields_of(state).items() if name not in ADDED}
    return {path_string(path): leaf(x) for path, x in jax.tree_util.tree_leaves_with_path(fields)}


def train(folder):
    """The whole run, by hand on two processes, in folder/golden: Orbax writes the path into the
    files.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
    }
    env |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    env |= {"JAXDP_COORDINATOR": address, "JAXDP_NUM_PROCESSES": "2"}
    argv = [
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        str(HERE / "golden.yaml"),
        "--run_dir",
        "golden",
    ]
    argv += ["--parallel.backend", "pjit", "--parallel.zero", "3"]
    both = [
        subprocess.Popen(argv, cwd=folder, env=env | {"JAXDP_PROCESS_ID": str(rank)})
        for rank in range(2)
    ]
    if sum(process.wait() != 0 for process in both):
        sys.exit("the run failed")


def restored(run):
    """The checkpoint as one process on one device reads it."""
    from jaxdp.cli import load
    from jaxdp.process.context import current
    from jaxdp.run.build import make_run, restore

    config, *_ = load(["--config", str(HERE / "golden.yaml")])
    made = make_run(config, run, current())
    assert made.checkpoints.latest() == STEP
    return leaves(made.strategy.export(restore(made, STEP)))


def main():
    run = HERE / "run"
    made = pathlib.Path(tempfile.gettempdir()) / "golden"
    shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(made, ignore_errors=True)
    train(made.parent)
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    shutil.copytree(made / "checkpoints" / str(STEP), run / "checkpoints" / str(STEP))
    shutil.rmtree(made)
    before = [line for line in lines if line["step"] <= STEP]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in before))
    sys.path.insert(0, str(HERE))
    expected = {
        "leaves": restored(run),
        "losses": {
            line["step"]: line["loss"]
            for line in lines
            if line["split"] == "train" and line["step"] > STEP
        },
        "final": {name: lines[-1][name] for name in ("loss", "accuracy")},
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
