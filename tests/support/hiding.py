"""A folder of a user whose modules have the names of libraries."""

import subprocess
import sys

from cli_runs import records
from launch import ROOT, environment

# Of the standard library, of what jaxdp needs, and of what these import late, in a thread or in
# another process.
HIDING = [
    "humanize", "google", "orbax", "tensorstore", "etils", "absl", "msgpack", "nest_asyncio", "aiofiles", "psutil",
    "simplejson", "safetensors", "filelock", "rich",
    "datasets", "tokenizers", "tiktoken", "PIL", "tensorboardX", "wandb", "grain", "torch", "fsspec", "uvloop",
    "tensorflow", "attr", "pydantic", "zstandard",
    "secrets", "queue", "random", "socket", "tempfile", "subprocess", "concurrent", "asyncio", "ssl", "csv", "uuid",
    "platform", "statistics", "bisect", "heapq", "struct",
    "selectors", "select", "multiprocessing", "resource", "pickle", "difflib", "json", "logging", "hashlib", "glob",
    "html", "webbrowser", "zipfile", "gzip",
]  # fmt: skip


FILES = {
    "requests.py": """
import numpy
from flax import nnx
import words

class Net(nnx.Linear):
    def __init__(self, *, rngs):
        super().__init__(words.INPUTS, 2, rngs=rngs)
""",
    "turtle.py": """
import numpy
import words

class Data:
    def __init__(self, split="train"):
        self.labels = numpy.arange(16) % 2
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"inputs": numpy.ones(words.INPUTS, numpy.float32), "labels": numpy.int32(self.labels[index])}
""",
    "words.py": "INPUTS = 3\n",
    "config.yaml": """
model: {target: requests.Net}
data: {target: turtle.Data, workers: 1}
loss: {target: SoftmaxCrossEntropy}
optimizer: {schedule: constant}
eval: {every: 1}
checkpoint: {every: 1}
batch_size: 8
steps: 2
""",
    "script.py": """
import jaxdp
from jaxdp.config.validation import flatten

if __name__ == "__main__":
    import requests, turtle
    final = jaxdp.fit(requests.Net, turtle.Data(), steps=2, batch_size=8, run_dir="run", checkpoint={"every": 1})
    assert final.final["step"] == 2
""",
    "bin/jaxdp": "from jaxdp.__main__ import command\n\nif __name__ == '__main__':\n    command()\n",
}


TRAIN = ("train", "--config", "config.yaml", "--run_dir", "run")


def folder_of(tmp_path, names=HIDING):
    for name in names:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the module of the user')\n")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text((ROOT / "train.py").read_text())
    return tmp_path


def run(folder, *argv, code=0, **env):
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, capture_output=True, text=True, timeout=300,
        env=environment({"PYTHONPATH": str(ROOT), **env}, 2),
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "the module of the user" not in done.stderr, done.stderr
    return done


def check_trained(run_dir):
    """It has made and saved its two updates."""
    assert records(run_dir, "final")[-1]["step"] == 2
    assert (run_dir / "checkpoints" / "2" / "manifest.json").is_file()
