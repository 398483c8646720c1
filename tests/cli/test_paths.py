"""Paths: run directories with links, `..` and `~`, and those in the config of a run that is used
elsewhere.
"""

import os
import shutil

import numpy as np
import pytest

from cli_runs import ended, records
from jaxdp.run import rundir

CONFIG = """
model: {{target: MLP, args: {{hidden: [4]}}}}
data: {{target: Npz, args: {{path: data.npz}}}}
eval: {{data: {{target: Npz, args: {{path: held_out.npz}}}}}}
loss: {{target: SoftmaxCrossEntropy}}
optimizer: {{schedule: constant}}
batch_size: 8
microbatches: 8
steps: {steps}
"""


def write_data(folder, seed=0):
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    for name in ("data.npz", "held_out.npz"):
        inputs, labels = (
            random.standard_normal((32, 3)).astype(np.float32),
            random.integers(0, 3, 32, np.int32),
        )
        np.savez(folder / name, inputs=inputs, labels=labels)
    for steps in (2, 4):
        (folder / f"{steps}.yaml").write_text(CONFIG.format(steps=steps))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder in which a run was trained, beside another one."""
    write_data(tmp_path / "home")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    ended("train", "--config", "2.yaml", "--run_dir", "run")
    return tmp_path / "home"


def evaluation(done):
    return done.stdout.partition("loss")[2].split()[0]


def test_a_run_is_used_and_resumed_from_another_folder(home, monkeypatch):
    expected = evaluation(ended("eval", "--run_dir", "run"))
    other = home.parent / "other"
    monkeypatch.chdir(other)
    assert evaluation(ended("eval", "--run_dir", "../home/run")) == expected
    assert os.getcwd() == str(other)
    write_data(other, seed=1)
    argv = ["eval", "--run_dir", "../home/run", "--eval.data.args.path", "held_out.npz"]
    done = ended(*argv)  # a path on the command line is of the folder where the command runs
    assert evaluation(done) != expected and "eval.data: the examples have changed" in done.stdout

    ended("export", "--run_dir", "../home/../home/run", "--output", "../other/weights.safetensors")
    assert (other / "weights.safetensors").is_file()
    ended("train", "--config", "4.yaml", "--run_dir", "new", "--init_from", "../home/run")
    assert records(other / "new", "final")[-1]["step"] == 4

    done = ended(
        "train", "--config", "4.yaml", "--run_dir", "../home/run", code=2
    )  # other files of the same names
    assert "data fingerprint: " in done.stderr and done.stderr.count("\n") == 1
    paths = f"{str(other / 'data.npz')!r} here, but was {str(home / 'data.npz')!r} where the run was started"
    assert paths in done.stderr
    (other / "data.npz").unlink()
    done = ended("train", "--config", "4.yaml", "--run_dir", "../home/run", code=2)
    assert (
        done.stderr.startswith(f"jaxdp: data.args.path: 'data.npz' is {paths}")
        and done.stderr.count("\n") == 1
    )
    assert done.stderr.endswith("; run the command there, or choose another --run_dir\n")

    shutil.copy(home / "data.npz", other / "data.npz")  # the same contents
    ended("train", "--config", "4.yaml", "--run_dir", "../home/run")
    assert records(home / "run", "final")[-1]["step"] == 4


def test_a_run_without_its_folder_says_where_it_looks(home, monkeypatch):
    moved = home.parent / "moved"
    os.rename(home, moved)
    monkeypatch.chdir(moved)
    done = ended("eval", "--run_dir", "run")
    text = f"jaxdp: the run was started in {str(home)!r}, which does not exist here: relative paths of its config"
    assert done.stderr.startswith(f"{text} are taken from {str(moved)!r}\n")


@pytest.mark.slow
def test_text_is_sampled_in_another_folder(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("what is relative stays where it was\n" * 40)
    (tmp_path / "text" / "own_gpt_of_paths.py").write_text(
        "from jaxdp.models.gpt import GPT as Net\n"
    )
    (tmp_path / "text" / "c.yaml").write_text(
        "model: {target: own_gpt_of_paths.Net, args: {layers: 1, dim: 8, heads: 1}}\n"
        "data: {target: TextFile, args: {path: a.txt, tokenizer: char, length: 8}}\n"
        "loss: {target: SoftmaxCrossEntropy}\nbatch_size: 8\nsteps: 1\n"
    )
    monkeypatch.chdir(tmp_path / "text")
    ended("train", "--config", "c.yaml", "--run_dir", "run")
    argv = ["sample", "--run_dir", "../text/run", "--prompt", "what", "--tokens", 3]
    expected = ended(*argv).stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_gpt_of_paths")
    assert ended("sample", "--run_dir", "text/../text/run", *argv[3:]).stdout == expected


def link_checkpoints(top, target="../disk"):
    (top / "run").mkdir()
    (top / "disk").mkdir()
    (top / "run" / "checkpoints").symlink_to(target)
    return "run"


def link_run(top):
    (top / "disk").mkdir()
    (top / "run").symlink_to(top / "disk")
    return "run/"


def link_parent(top):
    (top / "disk").mkdir()
    (top / "runs").symlink_to("disk")
    return "runs/a/run"


def link_and_back(top):
    (top / "disk" / "deep").mkdir(parents=True)
    (top / "link").symlink_to("disk/deep")
    return "link/../run"  # disk/run


PLACES = {
    "checkpoints is a relative link": link_checkpoints,
    "checkpoints is a link": lambda top: link_checkpoints(top, top / "disk"),
    "the run is a link, with a slash": link_run,
    "a parent is a link": link_parent,
    "back over a link": link_and_back,
    "the current folder": lambda top: ".",
    "the folder above": lambda top: "../run",
    "home": lambda top: "~/run",
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_directory_of_any_path_resumes(tmp_path, monkeypatch, place):
    monkeypatch.setenv("HOME", str(tmp_path / "own"))
    write_data(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    run = PLACES[place](tmp_path / "own")
    assert "saved step 2" in ended("train", "--config", "2.yaml", f"--run_dir={run}").stdout
    assert "resumes after step 2" in ended("train", "--config", "4.yaml", f"--run_dir={run}").stdout
    ended("eval", f"--run_dir={run}")
    ended("export", f"--run_dir={run}", "--output", "a.safetensors")
    ended("train", "--config", "2.yaml", "--run_dir", "new", f"--init_from={run}")
    ended("report", run)


def test_links_that_lead_nowhere_are_named(tmp_path):
    (tmp_path / "run").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").symlink_to("/gone/for/good")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "checkpoints").touch()
    nowhere = f"run_dir: {str(tmp_path / 'run')!r} is a link to 'gone', which does not exist; create that folder"
    cases = {
        "run": nowhere,
        "run/below": nowhere,
        "other": "/checkpoints' is a link to '/gone/for/good', which does not exist; create that folder",
        "file": f"cannot write in {str(tmp_path / 'file' / 'checkpoints')!r}: it is not a folder; choose another",
        "loop": f"run_dir: cannot write in {str(tmp_path / 'loop')!r}: Too many levels of symbolic links; choose ",
        "x" * 256: ": File name too long; choose another with --run_dir",
        "/".join(["x" * 200] * 20): " is too long for its files (4096 bytes); choose a shorter one",
    }
    for name, words in cases.items():
        file, problem = rundir.make(tmp_path / name)
        assert file is None and words in problem and "\n" not in problem, problem
