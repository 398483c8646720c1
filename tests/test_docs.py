"""The pages for people who bring their own: every file and command on them is tried, as a new user would."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from launch import environment, find

ROOT = pathlib.Path(__file__).parent.parent
BIN = pathlib.Path(sys.executable).parent


def blocks(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)


def write_files(page, folder):
    """The blocks that begin with a comment of a file name alone."""
    for kind in ("python", "yaml"):
        for block in blocks(page, kind):
            if name := re.match(r"# (\w+\.\w+)\n", block):
                (folder / name[1]).write_text(block)


def run(command, folder):
    words = shlex.split(command)
    env = environment({}, 1) | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    if words[0] == "jaxdp":
        words = [sys.executable, "-m", *words]
    elif words[0] == "mpirun":
        words[1:1] = ["--bind-to", "none", "--oversubscribe"]
        words = [sys.executable if w == "python" else w for w in words]
    done = subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(find("openmpi5") is None, reason="no mpirun of openmpi5")
def test_the_page_of_ones_own_model_works_as_it_stands(tmp_path):
    """A class outside the repository trains by its dotted path, to what the page says."""
    write_files("own_model.md", tmp_path)
    commands = [line for block in blocks("own_model.md", "sh") for line in block.splitlines()]
    train, *more, alone, two = commands
    last = r"final 600/600 .* accuracy (\S+)"
    shown = re.search(last, (ROOT / "docs" / "own_model.md").read_text())
    final = re.search(last, run(train, tmp_path))
    assert shown and final and float(final[1]) > float(shown[1]) - 0.03
    for command in (alone, two):
        accuracy, shape = run(command, tmp_path).splitlines()[-1].split(" ", 1)
        assert float(accuracy) > 0.9 and shape == "(2, 64)"
    found = {command.split()[1]: run(command, tmp_path) for command in more}
    assert "agree with the oracle" in found["verify"] and "accuracy" in found["eval"]
    loss = "--loss.target absolute.absolute_error --loss.args.scale 10 --steps 2 --run_dir runs/x"
    assert "final 2/2" in run(f"jaxdp train --config spiral.yaml {loss}", tmp_path)
