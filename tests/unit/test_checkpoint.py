"""Checkpoints: whole or not at all, asynchronous, the same for every strategy, and damage is seen
before it is read.
"""

import itertools
import json
import os
import random
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import launch
import toys
from checkpoints import META, WAYS, digest, strategy
from jaxdp.checkpoint import manifest, orbax
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.errors import UsageError
from jaxdp.losses import SoftmaxCrossEntropy
from jaxdp.precision import LossScaling
from jaxdp.process import membership
from jaxdp.process.context import Context
from jaxdp.split import path_string
from jaxdp.train.step import Forward, UpdateRule, init_state


def states(n=2, seed=0):
    """Small states of a few dtypes, one device."""

    def make(i):
        return toys_state(jax.random.key(seed + i))

    return [make(i) for i in range(n)]


def toys_state(key):
    model = toys.MODELS["mlp"]()
    forward, rule = (
        Forward(model, SoftmaxCrossEntropy()),
        UpdateRule(optax.adam(1e-2), ema_decay=0.9),
    )
    state = init_state(forward, rule, 8, {k: v[:3] for k, v in toys.data(12).items()}).replace(
        seed=None
    )
    leaves, tree = jax.tree.flatten(state)

    def noise(i, x):
        return x + jax.random.normal(jax.random.fold_in(key, i), x.shape, jnp.float32).astype(
            x.dtype
        )

    return jax.tree.unflatten(tree, [noise(i, x) for i, x in enumerate(leaves)])


def equal(a, b):
    """Bit for bit, path by path."""
    a, b = (
        {path_string(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(t)}
        for t in (a, b)
    )
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes()
        for k in a
    )


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def saved(directory, n=2, **settings):
    """(checkpoints at steps 1 to n, their states, what was said)."""
    made, said = states(n), []
    checkpoints = Checkpoints(directory, **{"keep": 10, **settings})
    for step, state in enumerate(made, 1):
        checkpoints.save(step, state, META, said.append)
    assert checkpoints.wait() is None
    return checkpoints, made, said


@pytest.mark.parametrize("slice_bytes, compiles", [(orbax.SLICE, False), (8, True)])
def test_small_arrays_are_saved_without_compiling(
    tmp_path, monkeypatch, caplog, slice_bytes, compiles
):
    monkeypatch.setattr(orbax, "SLICE", slice_bytes)
    mesh = jax.make_mesh((8,), ("data",))
    x = jax.device_put(np.zeros((8, 6)), jax.NamedSharding(mesh, jax.P()))
    with jax.log_compiles():
        orbax.save(tmp_path / "1", {"x": x}).result()
    assert ("compilation of jit(slice)" in caplog.text) == compiles


@pytest.mark.slow
def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    checkpoints, made, said = saved(tmp_path)
    assert (
        said == ["saved step 1", "saved step 2"]
        and checkpoints.steps() == [1, 2]
        and checkpoints.latest() == 2
    )
    for step, state in enumerate(made, 1):
        assert equal(checkpoints.restore(step, abstract(state)), state)
    meta = checkpoints.meta(2)
    assert meta["step"] == 2 and meta["state"]["step"] == ["int32", []] and meta["config"] == {}


def test_a_random_key_of_the_optimizer_is_saved(tmp_path):
    """As `optax.noisy_sgd` has one; Orbax stores its data."""
    checkpoints, said = Checkpoints(tmp_path, keep=1), []
    state = states(1)[0].replace(opt_state={"keys": jax.random.split(jax.random.key(3), 2)})
    checkpoints.save(1, state, META, said.append)
    assert checkpoints.wait() is None and said == ["saved step 1"]
    restored = checkpoints.restore(1, abstract(state)).opt_state["keys"]
    data = jax.random.key_data(state.opt_state["keys"])
    assert np.array_equal(jax.random.key_data(restored), data)


@pytest.mark.slow
def test_the_state_may_be_donated_while_it_is_written(tmp_path):
    """The next update writes into the same buffers as soon as `save` returns."""
    update = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    state = toys_state(jax.random.key(3))
    big = state.replace(params={"w": jax.random.normal(jax.random.key(0), (256, 1024))})
    checkpoints = Checkpoints(tmp_path, keep=20)
    kept = []
    for step in range(1, 9):
        kept.append(np.array(big.params["w"]))
        checkpoints.save(step, big, META, lambda text: None)
        for _ in range(3):
            big = big.replace(params=jax.tree.map(update, big.params))
    assert checkpoints.wait() is None
    for step, value in enumerate(kept, 1):
        assert (
            np.asarray(checkpoints.restore(step, abstract(big)).params["w"]).tobytes()
            == value.tobytes()
        )


def test_saving_an_update_again_removes_no_checkpoint(tmp_path):
    """A job that continues from an earlier copy in memory does; after a rollback the state is
    another one.
    """
    (first, second), said = states(2), []
    for state, meta in ((first, META), (second, {**META, "metrics": {"loss": 1.0}})):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.repeated = 1
        checkpoints.save(1, state, meta, said.append)
        assert checkpoints.wait() is None and checkpoints.last == 1
    assert said == ["saved step 1"] and checkpoints.meta(1)["metrics"] == {"loss": 1.0}
    assert equal(checkpoints.restore(1, abstract(first)), first)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.repeated = 1
    checkpoints.save(1, second, {**META, "offset": 7}, said.append)
    assert checkpoints.wait() is None and len(said) == 2
    assert equal(checkpoints.restore(1, abstract(second)), second)


def test_a_repeated_save_writes_into_another_folder(tmp_path, monkeypatch, caplog):
    """In a job that continues without a lost process, another may still write into that of a save
    which the lost one has interrupted.
    """
    caplog.set_level("INFO", logger="absl")  # Orbax logs the folders that it creates
    for generation in (0, 1):
        turns = itertools.count(3)
        member = SimpleNamespace(
            turn=lambda name, turns=turns: next(turns), job=SimpleNamespace(generation=generation)
        )
        monkeypatch.setattr(membership, "current", lambda member=member: member)
        for run in ("a", "b"):
            checkpoints = Checkpoints(tmp_path / run, context=Context())
            checkpoints.save(7, states(1)[0], META, print)
            assert checkpoints.wait() is None
    names = re.findall(rf"Creating tmp directory {re.escape(str(tmp_path))}/./(\S+)", caplog.text)
    assert names == [
        f"7.orbax-checkpoint-tmp-{attempt}.orbax-checkpoint-tmp"
        for attempt in ("0-3", "0-4", "1-3", "1-4")
    ]


MODES = (("min", "accuracy"), ("max", "loss"))


def test_which_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=4, best="accuracy")
    state, said = states(1)[0], []
    for step, accuracy in enumerate([0.1, 0.2, 0.9, 0.3, 0.4, 0.9, 0.5, 0.6, 0.7, float("nan")], 1):
        found = {"accuracy": accuracy}
        better = checkpoints.is_best(found)
        assert better == (step in (1, 2, 3))
        checkpoints.save(step, state, META, said.append)
        if accuracy == accuracy:
            checkpoints.annotate(step, {"metrics": found})
    assert checkpoints.wait() is None
    assert checkpoints.steps() == [3, 4, 8, 9, 10]  # best, multiples of 4, the last two
    assert checkpoints.best_step() == 3 and checkpoints.meta(3)["metrics"] == {"accuracy": 0.9}
    for name in (
        "valid/loss",
        "a_loss",
        "cross_entropy",
        "valid/perplexity",
        "top5_error",
        "rmse",
        "mae",
    ):
        checkpoints.annotate(10, {"metrics": {name: 0.5}})
        lowest = Checkpoints(tmp_path, keep=2, best=name)
        assert lowest.is_best({name: 0.4}) and not lowest.is_best({name: 0.6})
    others = [Checkpoints(tmp_path / mode, keep=2, best=word, mode=mode) for mode, word in MODES]
    for other in others:
        other.save(1, state, META, said.append)
    for other, (mode, word) in zip(others, MODES, strict=True):
        assert other.wait() is None  # each save has its own signals
        other.annotate(1, {"metrics": {word: 0.5}})
        assert other.is_best({word: 0.4}) == (mode == "min") and other.is_best({word: 0.6}) == (
            mode == "max"
        )
    again = Checkpoints(tmp_path, keep=2, best="loss")
    assert (
        again.best_step() is None
        and again.is_best({"loss": 1e9})
        and not again.is_best({"loss": float("inf")})
    )


def damage(kind, folder):
    """One fault in a checkpoint's directory; what the message must say."""
    data = max(
        (p for p in folder.rglob("*") if p.is_file() and p.parent.name == "d"),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(data.read_bytes())
    if kind == "flipped bit":
        content[len(content) // 2] ^= 4
        data.write_bytes(content)
    elif kind == "truncated file":
        data.write_bytes(content[:-1])
    elif kind == "longer file":
        data.write_bytes(content + b"0")
    elif kind == "missing file":
        data.unlink()
    elif kind == "missing manifest":
        (folder / manifest.NAME).unlink()
    elif kind == "empty manifest":
        (folder / manifest.NAME).write_text("")
    elif kind == "torn manifest":
        (folder / manifest.NAME).write_bytes((folder / manifest.NAME).read_bytes()[:-9])
    elif kind == "edited manifest":
        found = json.loads((folder / manifest.NAME).read_text())
        found["meta"]["step"] = 7
        (folder / manifest.NAME).write_text(json.dumps(found))
    elif kind in ("a directory for a file", "a pipe for a file", "a link that leads out"):
        data.unlink()
        {
            "d": data.mkdir,
            "p": lambda: os.mkfifo(data),
            "l": lambda: data.symlink_to("/etc/passwd"),
        }[kind.split()[1][0]]()
    elif kind.startswith("names "):
        found = manifest.read(folder)
        manifest.write(
            folder, {**found["files"], kind.removeprefix("names "): (1, "0")}, found["meta"]
        )
    elif kind in NAMES:
        found = manifest.read(folder)
        manifest.write(folder, {NAMES[kind]: (1, "0"), **found["files"]}, found["meta"])
    return {
        "flipped bit": "has changed since",
        "truncated file": "bytes instead of",
        "longer file": "bytes instead of",
        "missing file": "No such file",
        "missing manifest": "was not finished",
        "a directory for a file": "Is a directory",
        "edited manifest": "has changed since",
        "a pipe for a file": "has 0 bytes instead of",
        "a terminal escape": "names '!\\x1b[31m\\n', which is not a file name",
        "a long name": "which is too long for a file",
    }.get(
        kind,
        "outside of the checkpoint" if "link" in kind or "names " in kind else "cannot be read",
    )


NAMES = {"a terminal escape": "!\x1b[31m\n", "a long name": "a/" * 3000}
KINDS = [
    *NAMES,
    "flipped bit", "truncated file", "longer file", "missing file", "missing manifest", "empty manifest",
    "torn manifest", "edited manifest", "a directory for a file", "a pipe for a file",
    "a link that leads out", "names ../../etc/passwd", "names /etc/passwd", "names d/../../1/manifest.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(a directory with checkpoints 1 and 2, their states); to be copied."""
    directory = tmp_path_factory.mktemp("two")
    return directory, saved(directory)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_yields_to_the_one_before(two, tmp_path, kind):
    shutil.copytree(two[0], tmp_path / "c")
    words = damage(kind, tmp_path / "c" / "2")
    before = sorted(p.name for p in (tmp_path / "c" / "2").rglob("*"))
    looking = []
    assert (
        Checkpoints(tmp_path / "c").latest(looking.append, tidy=False) == 1
        and (tmp_path / "c" / "2").is_dir()
    )
    said = []
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest(said.append) == 1
    aside = "2.unfinished" if kind == "missing manifest" else "2.damaged"
    assert len(said) == 1 and words in said[0] and said[0].endswith(f"set aside as {aside}")
    assert (
        sorted(p.name for p in (tmp_path / "c" / aside).rglob("*")) == before
    )  # nothing is thrown away
    assert equal(checkpoints.restore(1, abstract(two[1][0])), two[1][0])
    assert checkpoints.latest(said.append) == 1 and len(said) == 1


def test_what_is_no_checkpoint_is_not_taken_for_one(two, tmp_path):
    shutil.copytree(two[0], tmp_path / "c")
    for stray in ("3", "04", "5.tmp", "notes", "-6", "٣"):
        (tmp_path / "c" / stray).mkdir()
    (tmp_path / "c" / "7").write_text("a file")
    (tmp_path / "c" / "8.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    said = []
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest(said.append) == 2 and not said
    assert not (tmp_path / "c" / "8.orbax-checkpoint-tmp").exists()  # what a killed save has left
    assert (tmp_path / "c" / "3").is_dir() and (tmp_path / "c" / "notes").is_dir()
    checkpoints.save(3, two[1][0], META, said.append)  # where a stray directory has its name
    assert checkpoints.wait() is None and checkpoints.latest() == 3


def test_no_directory_no_checkpoint(tmp_path):
    assert (
        Checkpoints(tmp_path / "none").latest() == 0
        and Checkpoints(tmp_path / "none").steps() == []
    )


def corrupt(random, folder):
    """One random flip, truncation, deletion or swap; False where it changed nothing."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    file = random.choice(files)
    content = bytearray(file.read_bytes())
    kind = random.choice(["flip", "flip", "flip", "truncate", "delete", "swap"])
    if kind == "flip" and content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    elif kind == "truncate" and content:
        content = content[: random.randrange(len(content))]
    elif kind == "swap":
        other = random.choice(files)
        content, theirs = bytearray(other.read_bytes()), content
        if content == theirs:
            return False
    elif kind == "delete":
        file.unlink()
        return True
    else:
        return False
    file.write_bytes(content)
    return True


@pytest.mark.slow
def test_a_thousand_corruptions_are_all_seen(two, tmp_path):
    """Never restored wrong, never a crash: the checkpoint before is used, or the whole one if
    nothing is changed.
    """
    chance, seen = random.Random(0), 0
    for i in range(1000):
        folder = tmp_path / str(i)
        shutil.copytree(two[0], folder)
        changed = corrupt(chance, folder / "2")
        said = []
        checkpoints = Checkpoints(folder)
        found = checkpoints.latest(said.append)
        if changed and found == 2:  # white space of the manifest
            assert manifest.read(folder / "2") == manifest.read(two[0] / "2")
        else:
            assert (found, len(said)) == ((1, 1) if changed else (2, 0)), said
            seen += changed
        if i % 40 == 0 or (changed and found == 2):
            assert equal(checkpoints.restore(found, abstract(two[1][found - 1])), two[1][found - 1])
        shutil.rmtree(folder)
    assert seen > 900


def test_both_damaged_is_a_new_start_and_says_so(two, tmp_path):
    shutil.copytree(two[0], tmp_path / "c")
    damage("flipped bit", tmp_path / "c" / "1")
    damage("truncated file", tmp_path / "c" / "2")
    said = []
    assert Checkpoints(tmp_path / "c").latest(said.append) == 0 and len(said) == 2


def test_a_state_of_another_shape_is_refused_by_name(two):
    checkpoints = Checkpoints(two[0])
    ours = abstract(two[1][0])
    with pytest.raises(
        UsageError, match=r"has no carry/x, but this config makes carry/x float32\[3\]"
    ):
        checkpoints.restore(
            1, ours.replace(kept={"carry": {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}})
        )
    with pytest.raises(UsageError, match="but this config makes no ema/"):
        checkpoints.restore(1, ours.replace(extra={}))


def pairs(ways, counts):
    return list(itertools.product(itertools.product(ways, counts), repeat=2))


def host(strategy, state):
    return jax.tree.map(np.asarray, strategy.export(state))


def check_pairs(tmp_path, chosen, model):
    """Saved by one way on some devices, restored by another on others: the same bits, and it
    exports them again.
    """
    of = {}
    for source, target in chosen:
        for way, devices in (source, target):
            if (way, devices) not in of:
                of[way, devices] = strategy(way, devices, model, LossScaling(weight=24.0))
    whole = of[chosen[0][0]].init()
    reference = toys_noise(host(of[chosen[0][0]], whole))
    for source in {s for s, _ in chosen}:
        checkpoints = Checkpoints(tmp_path / f"{source[0][0]}{source[0][1]}x{source[1]}")
        placed = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), reference, of[source].abstract()
        )
        state = of[source].adopt(placed)
        checkpoints.save(1, of[source].export(state), META, lambda text: None)
        assert checkpoints.wait() is None
        for target in (t for s, t in chosen if s == source):
            restored = of[target].adopt(checkpoints.restore(1, of[target].abstract()))
            assert equal(host(of[target], restored), reference), (source, target)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("which", "devices"), [("openmpi5", 1), ("mpich", 2)])
def test_one_process_restores_twos_save_and_vice_versa(tmp_path, which, devices):
    model = toys.MODELS["mlp"]()
    one = strategy(("pjit", 3), 8, model)
    placed = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        toys_noise(host(one, one.init())),
        one.abstract(),
    )
    checkpoints = Checkpoints(tmp_path / "one")
    checkpoints.save(1, placed, META, lambda text: None)
    assert checkpoints.wait() is None
    done = launch.mpirun(
        2, ["tests/support/mpi/pairs.py", str(tmp_path), digest(placed)], which, devices=devices
    )
    assert done.returncode == 0 and f"6 ways on {2 * devices} devices" in done.stdout, done.output
    back = [(WAYS[(i + 3) % 6], 2 ** (i % 4)) for i in range(6)]
    for (backend, zero), (way, count) in zip(WAYS, back):
        own, saved_by_two = (
            strategy(way, count, model),
            Checkpoints(tmp_path / f"{2 * devices}-{backend}{zero}"),
        )
        assert saved_by_two.latest() == 1
        assert digest(own.export(own.adopt(saved_by_two.restore(1, own.abstract())))) == digest(
            placed
        )


def toys_noise(tree):
    chance = np.random.default_rng(0)
    return jax.tree.map(lambda x: (x + chance.normal(size=x.shape) * 7).astype(x.dtype), tree)


def test_what_one_strategy_saved_any_other_restores(tmp_path):
    """Every way is source and target, on several counts; all pairs are in the slow test."""
    counts = [8, 2, 4, 1, 8, 4]
    ring = [
        ((WAYS[i], counts[i]), (WAYS[(i + k) % 6], counts[(i + 2 * k) % 6]))
        for i in range(6)
        for k in (1, 3)
    ]
    check_pairs(tmp_path, ring, toys.MODELS["mlp"]())


@pytest.mark.slow
def test_all_pairs_of_strategies_and_device_counts(tmp_path):
    check_pairs(tmp_path, pairs(WAYS, [1, 2, 4, 8]), toys.MODELS["mlp"]())


@pytest.mark.slow
def test_carried_state_and_loss_scale_are_saved_too(tmp_path):
    check_pairs(
        tmp_path, [((WAYS[0], 4), (WAYS[5], 2)), ((WAYS[5], 2), (WAYS[1], 8))], toys.counting()
    )


def test_a_full_disk_keeps_old_saves_and_tries_again(small_disk):
    small = toys_state(jax.random.key(0))

    def noise(n, seed):
        return {"w": jax.random.bits(jax.random.key(seed), (n,), jnp.uint32)}

    big = small.replace(params=noise(500_000, 1))
    said = []
    checkpoints = Checkpoints(small_disk, keep=2)
    checkpoints.save(1, big, META, said.append)
    checkpoints.save(2, big, META, said.append)  # no room for a second
    assert checkpoints.wait() == "checkpoint 2 could not be saved: no space left on the device"
    assert (
        said[0] == "saved step 1"
        and "checkpoint 2 could not be saved: no space left on the device" in said[1]
    )
    assert "the last one is 1" in said[1] and len(said) == 2
    checkpoints.save(3, small, META, said.append)
    assert (
        checkpoints.wait() is None and checkpoints.steps() == [1, 3] and said[2] == "saved step 3"
    )
    assert equal(checkpoints.restore(1, abstract(big)), big)
    assert (
        checkpoints.latest() == 3
    )  # by now what Orbax wrote on, after its failure, is swept up too
    assert sorted(p.name for p in small_disk.iterdir()) == ["1", "3"]
