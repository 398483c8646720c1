"""Modules beside a run that have the names of libraries: libraries do not see them, and the user's
own are found.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from cli_runs import records
from jaxdp.errors import UsageError, import_optional
from jaxdp.process import imports
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
COMMANDS = {
    "the command": ("bin/jaxdp", *TRAIN),
    "python -m jaxdp": ("-m", "jaxdp", *TRAIN),
    "python train.py": ("train.py", *TRAIN[1:]),
    "a script": ("script.py",),
    "launch": ("bin/jaxdp", "launch", "-n", "2", *TRAIN),
    "elastic": ("bin/jaxdp", "launch", "-n", "2", *TRAIN, "--elastic.enabled", "true"),
    "sweep": ("bin/jaxdp", "sweep", "--config", "config.yaml", "--run_dir", "run", "--seed", "0,1"),
    "verify": (
        "bin/jaxdp",
        "verify",
        "--config",
        "config.yaml",
        "--updates",
        "1",
        "--verify.strategies",
        "1",
        "--devices",
        "2",
    ),
}


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


@pytest.mark.quick(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_modules_of_the_user_hide_no_library(tmp_path, command):
    folder = folder_of(tmp_path)
    if command == "python -m jaxdp":  # Python itself imports these before any code of jaxdp
        for name in ("zipfile", "bisect", "struct"):
            (folder / f"{name}.py").unlink(missing_ok=True)
    run(folder, *COMMANDS[command])
    if command == "verify":
        return
    trained = next(folder.glob("run/*seed=0")) if command == "sweep" else folder / "run"
    assert records(trained, "final")[-1]["step"] == 2
    assert (trained / "checkpoints" / "2" / "manifest.json").is_file()


@pytest.mark.slow
def test_later_commands_see_no_module_of_the_user_either(tmp_path):
    folder = folder_of(tmp_path)
    run(folder, *COMMANDS["the command"], "--log.writers", "[TensorBoard]")
    for verb in ("eval", "export", "report"):
        run(folder, "bin/jaxdp", verb, *["--run_dir"][: verb != "report"], "run")
    run(folder, "bin/jaxdp", "doctor", code=0)
    run(folder, "bin/jaxdp", *TRAIN, "--steps", "3")  # resumes


def test_a_module_of_the_user_that_libraries_have_is_refused_before_training(tmp_path):
    """In a folder that the user has put on the path, and in a script that has imported it before
    jaxdp.
    """
    folder = folder_of(tmp_path, [])
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "humanize.py").write_text("NOTHING = 0\n")
    done = run(
        folder,
        *COMMANDS["the command"],
        code=2,
        PYTHONPATH=f"{ROOT}{os.pathsep}{folder / 'elsewhere'}",
    )
    assert (
        f"{folder / 'elsewhere' / 'humanize.py'} hides the library 'humanize', which a run needs"
        in done.stderr
    )
    assert done.stderr.count("\n") == 1 and not (folder / "run" / "metrics.jsonl").exists()


def finds(name, importer, monkeypatch, folder, code="import {0}"):
    """Return the file that an import of `name` in the code of a file gives."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    values = {"__name__": "importer"}
    exec(compile(code.format(name), importer, "exec"), values)
    monkeypatch.delitem(sys.modules, name)
    return pathlib.Path(values[name].__file__)


@pytest.mark.parametrize("name", ["turtle", "humanize", "wandb"])
def test_who_imports_decides_where_python_looks_first(tmp_path, monkeypatch, name):
    file = tmp_path / f"{name}.py"
    file.touch()
    installed = f"{os.path.dirname(pytest.__file__)}/x.py"
    assert finds(name, installed, monkeypatch, tmp_path) != file
    assert finds(name, f"{imports.PACKAGE}x.py", monkeypatch, tmp_path) != file
    assert finds(name, str(tmp_path / "own.py"), monkeypatch, tmp_path) == file
    assert finds(name, "<stdin>", monkeypatch, tmp_path) == file
    file.rename(tmp_path / "only_mine.py")
    with pytest.raises(
        ModuleNotFoundError, match="No module named 'only_mine' among the libraries"
    ):
        finds(
            "only_mine", installed, monkeypatch, tmp_path
        )  # as they try what need not be installed
    call = "import importlib; {0} = importlib.import_module({0!r})"
    assert finds("only_mine", installed, monkeypatch, tmp_path, call) == tmp_path / "only_mine.py"


def test_hiding_names_libraries_only(tmp_path, monkeypatch):
    for name in (
        "turtle.py",
        "mymodel.py",
        "wandb/__init__.py",
        "datasets/a.bin",
        "numpy/__init__.py",
        "numpy/exceptions.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    mine = {name: file for name, file in imports.hiding().items() if file.startswith(str(tmp_path))}
    assert mine == {
        "turtle": str(tmp_path / "turtle.py"),
        "wandb": str(tmp_path / "wandb" / "__init__.py"),
    }


def test_an_optional_library_is_blamed_rightly(tmp_path, monkeypatch):
    (tmp_path / "surely_missing.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(
        UsageError,
        match=r"^x needs the library surely_missing, whose name .*/surely_missing.py has",
    ):
        import_optional("surely_missing", "x", "extra")
    monkeypatch.delitem(sys.modules, "surely_missing")
    with pytest.raises(
        UsageError, match=r"^x needs missing_too, which is not installed; pip install -e '.*\[e\]'$"
    ):
        import_optional("missing_too", "x", "e")
