"""A start calls the update that the last one kept, and nothing is saved if that is not what it would trace itself."""

import hashlib
import json

import jax
import pytest

import jaxdp
from jaxdp import compilation_cache, untraced
from jaxdp.build.known import files_of, has_own_code
from jaxdp.build.parts import NOTHING
from jaxdp.cli import load, verbs
from jaxdp.config.reading import from_mapping
from jaxdp.errors import RunFailed
from jaxdp.models import MODELS
from test_start import ROOT

RUN = [
    *("--config", str(ROOT / "configs" / "digits.yaml"), "--batch_size", "16", "--microbatches", "8", "--steps", "5"),
    *("--model.args.hidden", "[4]", "--log.every", "1"),
]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(run_dir, *more) -> (digest of the parameters, losses, whether what was kept was called)."""
    before, real, called = compilation_cache.settings(), untraced.by, []
    jax.config.update("jax_compilation_cache_dir", None)
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)

    def by(*args):
        call = real(*args)

        def checked(state, batch):
            called.append(1)
            result = call(state, batch)
            assert all(x.is_deleted() for x in jax.tree.leaves(state.params)), "its state was not donated"
            return result

        return checked

    monkeypatch.setattr(untraced, "by", by)

    def run(name, *more):
        jax.clear_caches()
        jax.config.update("jax_compilation_cache_dir", None)
        called.clear()
        folder = tmp_path / name
        config, path, _ = load([*RUN, "--compilation_cache", str(tmp_path / "cache"), "--run_dir", str(folder), *more])
        record, _ = verbs.train(config, path, jaxdp.init())
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return record["params_sha256"], [x["loss"] for x in lines if x["split"] == "train"], bool(called)

    yield run
    compilation_cache.leave(before)


def files(folder):
    return sorted((folder / "cache").glob(f"*/*{compilation_cache.PROGRAM}*"))


LAYOUTS = {
    "pmap": (),
    "pmap, zero 1": ("--parallel.zero", "1"),
    "pjit, zero 3": ("--parallel.backend", "pjit", "--parallel.zero", "3"),
    "one device": ("--parallel.devices", "1"),
    "two of eight devices": ("--parallel.devices", "2", "--parallel.backend", "pjit"),
    "several in a call": ("--steps_per_call", "2"),
    "on the devices": ("--data.on_device", "true", "--parallel.zero", "1"),
    "guarded": ("--spike.factor", "9", "--optimizer.ema", "0.9", "--precision.loss_scale", "1024"),
}


OFTEN = ("pmap", "pjit, zero 3", "several in a call")


@pytest.mark.parametrize(
    "more", [pytest.param(LAYOUTS[k], id=k, marks=[] if k in OFTEN else pytest.mark.slow) for k in LAYOUTS]
)
def test_a_second_start_calls_what_the_first_kept_and_gives_the_same_bits(start, tmp_path, more):
    first, second = start("one", *more), start("two", *more)
    assert first[:2] == second[:2] and len(first[1]) == 5
    assert (first[2], second[2]) == (False, True)
    layouts = [json.loads((tmp_path / name / "layout.json").read_text()) for name in ("one", "two")]
    assert layouts[0] == layouts[1] and layouts[0]["program"]["temporaries"] > 0


def test_what_was_kept_under_other_facts_is_not_called(start, tmp_path):
    digest, losses, _ = start("one")
    # no number, but it is in the program
    assert start("two", "--nonfinite.max_consecutive", "3")[1:] == (losses, False)
    assert start("three", "--optimizer.lr", "0.5")[1] != losses
    assert start("four")[2] and len(files(tmp_path)) == 3
    jax.config.update("jax_debug_nans", True)
    try:
        assert start("five") == (digest, losses, False)
    finally:
        jax.config.update("jax_debug_nans", False)


def test_a_run_goes_on_with_what_was_kept(start):
    steps = lambda n: ("--steps", str(n), "--optimizer.schedule_steps", "5", "--resume.force", "true")
    digest, losses, _ = start("whole", *steps(5))
    start("parts", *steps(2))
    assert start("parts", *steps(5)) == (digest, losses, True)
    assert start("again", *steps(5)) == (digest, losses, True)


def test_only_the_first_call_takes_what_was_kept(start):
    """What is called later would not be checked."""
    more = ("--steps_per_call", "2")
    digest, losses, _ = start("one", *more)  # keeps that of two updates
    assert start("two", *more, "--profile.start", "0", "--profile.steps", "1") == (digest, losses, False)
    assert start("three", *more) == (digest, losses, True)


def test_settings_of_a_thread_are_not_taken_for_those_of_all(start):
    with jax.default_matmul_precision("highest"):
        first, second = start("one"), start("two")
    assert first == second and not second[2]


def test_what_a_start_died_of_twice_is_left_alone(start, tmp_path):
    digest, losses, _ = start("one")
    (file,) = files(tmp_path)
    content = file.read_bytes()
    for name, called in ((".tried1", True), (".tried2", False)):  # as processes that were killed leave it
        file.with_name(file.name + name).write_bytes(content)
        file.unlink(missing_ok=True)
        assert start(f"after{name}") == (digest, losses, called)
    assert file.with_name(f"{file.name}.tried2").exists()


def test_what_is_damaged_is_traced(start, tmp_path):
    digest, losses, _ = start("one")
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    assert start("two") == (digest, losses, False)


def test_nothing_is_saved_of_an_update_that_this_code_would_not_make(start, tmp_path):
    digest, *_ = start("one")
    (file,) = files(tmp_path)
    head, _, executable = file.read_bytes().partition(b"\n")[2].partition(b"\n")
    content = json.dumps(json.loads(head) | {"lowered": "of another"}).encode() + b"\n" + executable
    file.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    with pytest.raises(RunFailed, match=r"is not what this code makes now; it is removed.*run the same command again"):
        start("two")
    assert not files(tmp_path) and not list((tmp_path / "two").glob("checkpoints/[0-9]*"))
    assert start("two")[:1] == (digest,)


def test_an_update_that_this_code_would_not_make_ends_the_run_at_once(start, tmp_path):
    """As soon as the check is through, and not where something is saved: that is after the last of many updates."""
    more = ("--steps", "6000", "--log.every", "100", "--parallel.devices", "1")
    start("one", *more)
    (file,) = files(tmp_path)
    head, _, executable = file.read_bytes().partition(b"\n")[2].partition(b"\n")
    content = json.dumps(json.loads(head) | {"lowered": "of another"}).encode() + b"\n" + executable
    file.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    with pytest.raises(RunFailed, match="is not what this code makes now"):
        start("two", *more)
    steps = [json.loads(line)["step"] for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps, default=0) < 5900 and not files(tmp_path)


class Own:
    """A class of a script's own."""


@pytest.mark.parametrize(
    "keys, own",
    [
        ({}, False),
        ({"model": {"target": "jaxdp.models.mlp.MLP"}}, False),
        ({"model": {"target": "Net"}}, True),  # in the table by a script
        ({"model": {"target": "test_untraced.Own"}}, True),
        ({"loss": {"target": "MultiTask", "args": {"losses": {"a": {"target": "MeanSquaredError"}}}}}, False),
        ({"loss": {"target": "MultiTask", "args": {"losses": {"a": {"target": "test_untraced.Own"}}}}}, True),
        ({"data": {"target": "Digits", "transform": {"target": "test_untraced.Own"}}}, True),
    ],
)
def test_code_of_the_users_is_known(monkeypatch, keys, own):
    monkeypatch.setitem(MODELS, "Net", Own)
    config = from_mapping({"model": {"target": "MLP"}, "data": {"target": "Digits"}, "steps": 1, **keys}, "test")
    assert has_own_code(config, NOTHING) == own


def test_a_package_that_was_changed_in_its_place_is_another(tmp_path, monkeypatch):
    (tmp_path / "around").mkdir()
    file = tmp_path / "around" / "__init__.py"
    monkeypatch.syspath_prepend(tmp_path)
    found = set()
    for content in ("x = 1", "x = 22"):
        file.write_text(content)
        files_of.cache_clear()
        found.add(files_of("around"))
    assert len(found) == 2 and files_of("nowhere_at_all") not in found


def test_what_fails_before_it_is_checked_is_forgotten(start, tmp_path, monkeypatch):
    start("one")
    assert files(tmp_path)

    def broken(*args):
        raise RuntimeError("Function fusion not found")

    monkeypatch.setattr(untraced, "by", lambda *args: broken)
    with pytest.raises(RuntimeError, match="not found"):
        start("two")
    assert not files(tmp_path)


def test_so_many_are_kept(tmp_path):
    for i in range(compilation_cache.UPDATES + 3):
        (tmp_path / f"{i}{compilation_cache.PROGRAM}").touch()
    compilation_cache.tidy(tmp_path)
    assert len(list(tmp_path.iterdir())) == compilation_cache.UPDATES + 1  # and the lock
