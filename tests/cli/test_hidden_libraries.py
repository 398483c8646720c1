"""Modules beside a run that have the names of libraries: libraries do not see them, and the user's
own are found.
"""

import os
import pathlib
import sys

import pytest

from hiding import TRAIN, check_trained, folder_of, run
from jaxdp.errors import UsageError, import_optional
from jaxdp.process import imports
from launch import ROOT

COMMANDS = {
    "the command": ("bin/jaxdp", *TRAIN),
    "python -m jaxdp": ("-m", "jaxdp", *TRAIN),
    "python train.py": ("train.py", *TRAIN[1:]),
    "a script": ("script.py",),
    "launch": ("bin/jaxdp", "launch", "-n", "2", *TRAIN),
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
    check_trained(trained)


@pytest.mark.slow
def test_later_commands_see_no_user_module_either(tmp_path):
    folder = folder_of(tmp_path)
    run(folder, *COMMANDS["the command"], "--log.writers", "[TensorBoard]")
    for verb in ("eval", "export", "report"):
        run(folder, "bin/jaxdp", verb, *["--run_dir"][: verb != "report"], "run")
    run(folder, "bin/jaxdp", "doctor", code=0)
    run(folder, "bin/jaxdp", *TRAIN, "--steps", "3")  # resumes


def test_a_module_named_as_a_librarys_is_refused(tmp_path):
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
