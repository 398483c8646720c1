"""A start imports what it needs, compiles what no start before it did, and is none the worse without a cache."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import filelock
import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache as module  # not public, as what is tested says

from jaxdp import ahead, compilation_cache, xla_presets
from jaxdp.cli import load
from jaxdp.environment import processor
from jaxdp.errors import UsageError
from launch import environment, mpirun

ROOT = pathlib.Path(__file__).parent.parent
# Trains, and says what became of the programs that were to be compiled.
SCRIPT = """
import collections, functools, json, sys, threading
import jax
from jax._src import compilation_cache
found = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **more: found.update([name.rpartition("/")[2]]))
read = compilation_cache.get_executable_and_time
@functools.wraps(read)
def counted(*args):
    found.update(["read by " + threading.current_thread().name.partition("_")[0]])
    return read(*args)
compilation_cache.get_executable_and_time = counted
from jaxdp.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print("\\nfound", json.dumps(found), flush=True)
    raise
"""
RUN = [
    "train", "--config", str(ROOT / "configs" / "digits.yaml"), "--steps", "1", "--batch_size", "16",
    "--microbatches", "2", "--model.args.hidden", "[4]",
]  # fmt: skip


def home(folder):
    """The environment of a user whose caches are in `folder`, without what the tests have set."""
    ours = dict.fromkeys(["JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
    return {**ours, "XDG_CACHE_HOME": str(folder)}


def start(folder, run_dir, *more):
    """(digest of the parameters, programs found, compiled, and loaded ahead, what it said on standard error)"""
    command = [sys.executable, "-c", SCRIPT, *RUN, "--run_dir", str(run_dir), *more]
    done = subprocess.run(command, env=environment(home(folder), 1), cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.rpartition("found ")[2])
    final = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    counts = [found.get(name, 0) for name in ("cache_hits", "cache_misses", "read by jaxdp-programs")]
    return final["params_sha256"], *counts, done.stderr


@pytest.mark.parametrize("reduction", ["auto", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_second_start_compiles_nothing_and_gives_the_same_bits(tmp_path, reduction):
    more = ["--parallel.reduction", reduction]
    digest, found, compiled, early, said = start(tmp_path / "cache", tmp_path / "one", *more)
    assert compiled > 3 and not found and not early and "cache" not in said
    second = start(tmp_path / "cache", tmp_path / "two", *more)  # what a rehearsal computes, it need not even look for
    assert second == (digest, second[1], 0, second[3], said) and 2 < second[1] <= compiled and second[3] >= 1
    (folder,) = (tmp_path / "cache" / "jaxdp" / "xla").iterdir()
    if reduction == "exact":
        none = start(tmp_path / "other", tmp_path / "three", *more, "--compilation_cache", "null")
        assert none[:4] == (digest, 0, 0, 0) and not (tmp_path / "other").exists()
    else:
        (note,) = (n for n in folder.glob("*-note") if "[" in n.read_text())
        programs = json.loads(note.read_text().partition("\n")[2])
        assert {"key", "options", "devices"} == set(programs[0]) and len(programs) <= second[1]
        (folder / f"{programs[-1]['key']}-cache").write_bytes(b"nothing")  # is compiled again
        note.write_text(note.read_text().replace('"options": "', '"options": "00'))  # is not believed
        third = start(tmp_path / "cache", tmp_path / "three", *more)
        assert (third[0], third[2:4]) == (digest, (1, 0)), third
    assert folder.name == processor() and len(list(folder.glob("*-note"))) == 2  # a rehearsal's, and a start's


@pytest.mark.mpi
@pytest.mark.slow
def test_each_of_several_processes_finds_its_programs(tmp_path):
    """JAX gives each CPU process keys of its own, and would let rank 0 alone write."""
    digests = []
    for name in ("one", "two"):
        command = ["-c", SCRIPT, *RUN, "--run_dir", str(tmp_path / name)]
        done = mpirun(2, command, env=home(tmp_path / "cache"))
        assert done.returncode == 0, done.output
        digests.append(json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["params_sha256"])
        found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert digests[0] == digests[1] and len(found) == 2
    assert all(process.get("cache_hits", 0) > 3 for process in found)
    assert not any(process.get("cache_misses", 0) for process in found)  # which count what is written


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


def test_what_is_compiled_is_kept_and_what_is_damaged_is_compiled_again(tmp_path, no_cache):
    assert compilation_cache.use(str(tmp_path)) is None
    value = compute()
    (program,) = programs(tmp_path)
    program.write_bytes(program.read_bytes()[:100])
    assert compute() == value  # warnings are errors here
    unfinished = program.with_name("jit_f-0123-cache")  # as a process that was killed leaves it
    unfinished.write_bytes(b"half")
    old, new = program.with_name("a-note"), program.with_name("b-note")
    for note in (old, new):
        note.touch()
    os.utime(old, (0, time.time() - compilation_cache.KEPT - 60))
    compilation_cache.tidy(program.parent)
    assert programs(tmp_path) == [program] and new.exists() and not old.exists()


def test_a_cache_that_is_given_to_jax_stands(tmp_path, no_cache):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    before = compilation_cache.settings()
    assert compilation_cache.use(str(tmp_path / "ours")) is None
    assert compilation_cache.settings() == before and not (tmp_path / "ours").exists()


def test_without_a_cache_there_is_none(tmp_path, no_cache):
    assert compilation_cache.use(None) is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    compilation_cache.Note("facts").write("text")
    assert compilation_cache.Note("facts").read() is None


@pytest.mark.parametrize("setting, value", [("jax_compilation_cache_dir", ""), ("jax_enable_compilation_cache", False)])
def test_where_jax_is_to_keep_nothing_nothing_is_kept(tmp_path, no_cache, monkeypatch, setting, value):
    """An empty JAX_COMPILATION_CACHE_DIR is no folder, and above all not the one that a process happens to be in."""
    monkeypatch.chdir(tmp_path)
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        compilation_cache.use(str(tmp_path / "cache"))
        note = compilation_cache.Note("facts")
        note.write("text")
        assert note.file is None and note.read() is None
        assert not [file for file in tmp_path.rglob("*") if "facts" in file.name or file.name.endswith("-note")]
    finally:
        jax.config.update(setting, before)


def test_what_a_full_disk_did_not_take_is_not_left(tmp_path, no_cache, monkeypatch):
    compilation_cache.use(str(tmp_path / "cache"))
    note = compilation_cache.Note("facts")
    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    note.write(b"text")
    assert not list(note.file.parent.glob("*-note*"))


def full(file, content):
    file.touch()
    raise OSError(28, "No space left on device")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, no_cache):
    (tmp_path / "file").write_text("")
    problem = compilation_cache.use(str(tmp_path / "file"))
    assert problem is not None and problem.startswith("compilation_cache: cannot write in ") and "\n" not in problem
    assert "Not a directory" in problem and jax.config.values["jax_compilation_cache_dir"] is None


def test_a_cache_that_is_no_folder_is_refused():
    for where, fix in (("gs://bucket/cache", "set JAX_COMPILATION_CACHE_DIR"), ("off", "null keeps no cache")):
        with pytest.raises(UsageError, match=f"compilation_cache: '{where}' is no folder; .*{fix}"):
            load([*RUN[1:], "--compilation_cache", where])


def test_a_user_without_a_home_is_one_line(monkeypatch, no_cache):
    """As in a container that runs under a number which no password file knows."""
    import pwd

    def nobody(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    problem = compilation_cache.use("auto")
    assert problem is not None and "cannot write in 'auto' (Could not determine home directory" in problem
    problem = compilation_cache.use("~nobody_here/cache")
    assert problem is not None and "cannot write in '~nobody_here/cache' (Could not determine home" in problem
    assert xla_presets.probed({}) == (set(), True)
    assert jax.config.values["jax_compilation_cache_dir"] is None


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


def test_a_note_is_of_its_facts(tmp_path, no_cache):
    compilation_cache.use(str(tmp_path))
    compilation_cache.Note("facts").write("text")
    assert compilation_cache.Note("facts").read() == "text"
    assert compilation_cache.Note("others").read() is None and compilation_cache.Note(None).read() is None


def test_what_was_noted_is_read_by_a_thread_and_not_again(tmp_path, no_cache, monkeypatch):
    compilation_cache.use(str(tmp_path))
    monkeypatch.setattr(ahead, "LEAST", 0)
    read, by = module.get_executable_and_time, []

    @functools.wraps(read)
    def counted(key, *args):
        by.append((key, threading.current_thread().name.partition("_")[0]))
        return read(key, *args)

    monkeypatch.setattr(module, "get_executable_and_time", counted)
    found = []
    for _ in range(2):
        jax.clear_caches()
        by.clear()
        with ahead.loading("facts") as asked:
            answer = jax.jit(lambda x: jnp.sin(x) @ x)(jnp.eye(3) + 1)
            asked.note(asked.programs)
        assert module.get_executable_and_time is counted  # JAX is left as it was
        found.append((dict(by), len(by), answer.tolist()))
    (first, reads, answer), (second, again, same) = found
    assert set(first.values()) == {"MainThread"} and len(first) == reads > 0
    assert second == dict.fromkeys(first, "jaxdp-programs") and again == reads and same == answer


def test_nothing_is_loaded_ahead_where_jax_looks_programs_up_otherwise(tmp_path, no_cache, monkeypatch):
    compilation_cache.use(str(tmp_path))
    other = lambda key: (None, None)
    monkeypatch.setattr(module, "get_executable_and_time", other)
    with ahead.loading("facts") as asked:
        asked.note(asked.programs)
        assert module.get_executable_and_time is other
    assert compilation_cache.Note("facts").read() is None


def test_help_and_errors_need_no_jax_and_training_no_orbax():
    code = """
import sys
from jaxdp.cli import main
for argv in ([], ["--help"], ["--version"], ["tarin"], ["train", "--config", "nowhere.yaml"], ["train", "--help"]):
    try:
        main(argv)
    except SystemExit:
        assert not {"jax", "numpy", "flax", "optax", "orbax"} & set(sys.modules), argv
import jaxdp.cli.verbs
assert not {"orbax.checkpoint", "jaxdp.verify", "jaxdp.weights", "torch"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment({}, 1))
    assert done.returncode == 0, done.stderr
