"""A start imports what it needs, compiles what no start before it did, and is none the worse
without a cache.
"""

import json
import pathlib
import subprocess
import sys

import filelock
import jax
import jax.numpy as jnp
import pytest

from jaxdp.cli import load
from jaxdp.errors import UsageError
from jaxdp.process import compilation_cache
from jaxdp.process.environment import processor
from launch import environment, mpirun
from pods import run_in
from starts import RUN, SCRIPT, check_second_start, home

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="pmap"),
        pytest.param(
            ["--parallel.backend", "pjit", "--parallel.zero", "3"],
            id="zero 3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_second_start_compiles_nothing_equal_bits(tmp_path, more):
    check_second_start(tmp_path, *more)


@pytest.mark.mpi
@pytest.mark.slow
def test_each_of_several_cpu_processes_uses_the_cache(tmp_path):
    """JAX lets rank 0 alone write, though the keys differ by process: the other stores its state
    and its update.
    """
    digests = []
    for name in ("one", "two"):
        command = ["-c", SCRIPT, *RUN, "--run_dir", str(tmp_path / name)]
        done = mpirun(2, command, env=home(tmp_path / "cache"))
        assert done.returncode == 0, done.output
        digests.append(
            json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])[
                "params_sha256"
            ]
        )
        lines = [
            line.split(maxsplit=2)[1:]
            for line in done.stdout.splitlines()
            if line.startswith("events ")
        ]
        counts = {int(rank): json.loads(counts) for rank, counts in lines}
        assert sorted(counts) == [0, 1]
    assert digests[0] == digests[1]
    assert counts[0][1] > 3 and counts[1][1] >= 3, (
        counts
    )  # the initial state, its broadcast, the update


@pytest.fixture
def no_cache(monkeypatch):
    """As JAX is where nobody has given it a cache."""
    before = compilation_cache.settings()
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    yield
    compilation_cache.leave(before)
    assert compilation_cache.settings() == before


def programs(folder):
    return sorted((folder / processor()).glob("*-cache"))


def compute():
    jax.clear_caches()
    return float(jax.jit(lambda x: jnp.sin(x) * 3.25)(1.0))


@pytest.mark.slow
def test_a_damaged_cache_entry_is_compiled_again(tmp_path, no_cache):
    assert compilation_cache.use(str(tmp_path)) is None
    value = compute()
    (program,) = programs(tmp_path)
    program.write_bytes(program.read_bytes()[:100])
    assert compute() == value  # warnings are errors here
    unfinished = program.with_name("jit_f-0123-cache")  # as a process that was killed leaves it
    unfinished.write_bytes(b"half")
    compilation_cache.tidy(program.parent)
    assert programs(tmp_path) == [program]


def test_a_cache_that_is_given_to_jax_stands(tmp_path, no_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    before = compilation_cache.settings()
    assert compilation_cache.use(str(tmp_path / "ours")) is None
    assert compilation_cache.settings() == before and not (tmp_path / "ours").exists()


def test_without_a_cache_there_is_none(tmp_path, no_cache):
    assert compilation_cache.use(None) is None
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.parametrize(
    "setting, value", [("jax_compilation_cache_dir", ""), ("jax_enable_compilation_cache", False)]
)
def test_where_jax_is_to_keep_nothing_nothing_is_kept(
    tmp_path, no_cache, monkeypatch, setting, value
):
    """An empty JAX_COMPILATION_CACHE_DIR is no folder, and above all not the one that a process
    happens to be in.
    """
    monkeypatch.chdir(tmp_path)
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        compilation_cache.use(str(tmp_path / "cache"))
        assert compute() and not list(tmp_path.rglob("*-cache"))
    finally:
        jax.config.update(setting, before)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, no_cache):
    (tmp_path / "file").write_text("")
    problem = compilation_cache.use(str(tmp_path / "file"))
    assert (
        problem is not None
        and problem.startswith("compilation_cache: cannot write in ")
        and "\n" not in problem
    )
    assert "Not a directory" in problem and jax.config.values["jax_compilation_cache_dir"] is None


def test_a_cache_that_is_no_folder_is_refused():
    for where, fix in (
        ("gs://bucket/cache", "set JAX_COMPILATION_CACHE_DIR"),
        ("off", "null disables the cache"),
    ):
        with pytest.raises(
            UsageError, match=f"compilation_cache: '{where}' is not a folder; .*{fix}"
        ):
            load([*RUN[1:], "--compilation_cache", where])


WITHOUT_HOME = """
import jax
from jaxdp.process import compilation_cache

for where in ("auto", "~nobody_here/cache"):
    print(compilation_cache.use(where))
print(jax.config.jax_compilation_cache_dir)
"""


def test_a_user_without_a_home_is_one_line():
    """As in a container that runs under a number which no password file knows."""
    names = ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR")
    nobody = ["unshare", "--user", "--map-user=54321"]
    first, second, where = run_in(nobody, WITHOUT_HOME, dict.fromkeys(names)).splitlines()
    assert "cannot write in 'auto' (Could not determine home directory" in first
    assert "cannot write in '~nobody_here/cache' (Could not determine home" in second
    assert where == "None"


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(tmp_path, no_cache):
    folder = tmp_path / processor()
    folder.mkdir()
    (folder / ".probe").symlink_to("/dev/full")
    problem = compilation_cache.use(str(tmp_path))
    assert problem is not None and "No space left on device" in problem


def test_a_cache_that_another_process_holds_is_used(tmp_path, no_cache):
    folder = tmp_path / processor()
    folder.mkdir()
    with filelock.FileLock(folder / ".lockfile"):
        assert compilation_cache.use(str(tmp_path)) is None
    assert jax.config.values["jax_compilation_cache_dir"] == str(folder)


@pytest.mark.slow
def test_help_imports_no_jax_and_training_no_orbax():
    code = """
import sys
from jaxdp.cli import main
from jaxdp.cli.option_table import VERBS
helps = [[verb, "--help"] for verb in VERBS]
for argv in ([], ["--help"], ["--version"], ["tarin"], ["train", "--config", "nowhere.yaml"], *helps):
    try:
        main(argv)
    except SystemExit:
        assert not {"jax", "numpy", "flax", "optax", "orbax"} & set(sys.modules), argv
import jaxdp.cli.train
assert not {"orbax.checkpoint", "jaxdp.verify", "jaxdp.checkpoint.weights", "torch"} & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment({}, 1)
    )
    assert done.returncode == 0, done.stderr
