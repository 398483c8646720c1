"""Finetune and export: names matched, arrays in their place to the bit, and every way that it can
be refused.
"""

import contextlib
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import toys
from cli_runs import ended, jaxdp, records, write
from covering import only
from jaxdp import cli
from jaxdp.checkpoint.initialize_from import Match, begin_with, describe, match
from jaxdp.checkpoint.leaves import params_sha256
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.checkpoint.weights import locate, named, open_weights
from jaxdp.cli.export import export
from jaxdp.config import validation
from jaxdp.errors import UsageError
from jaxdp.models import as_model
from jaxdp.models.mlp import MLP
from jaxdp.split import path_string
from launch import mpirun

TX = optax.adamw(1e-2)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def mlp(classes=toys.CLASSES, hidden=8):
    return as_model(lambda rngs: MLP(toys.SHAPE, classes, (hidden,), rngs=rngs))


def save(directory, step, state):
    checkpoints = Checkpoints(directory / "checkpoints")
    checkpoints.save(step, state, {"config": {}})
    assert checkpoints.wait() is None


def saved(directory, model, steps=2, **options):
    """The state of a short run, as NumPy's; its checkpoint is in the directory."""
    strategy, step, batch = toys.build(model, toys.data(24), optimizer=(TX, None), **options)
    state, program = strategy.init(), strategy.compile(step)
    for i in range(steps):
        state, _ = program.update(state, batch(i))
    state = strategy.export(state)
    save(directory, steps, state)
    return jax.tree.map(np.array, state)


def begun(
    source,
    model,
    *,
    average=False,
    tx=TX,
    rename=None,
    load=(".*",),
    skip=(),
    train=True,
    **options,
):
    """(the exported state that a run begins with, its strategy, what was matched, what is said)."""
    strategy, step, batch = toys.build(model, toys.data(24), optimizer=(tx, None), **options)
    weights = open_weights(locate(str(source)), average)
    ours = named(strategy.shapes.params, strategy.shapes.model_state)
    found = match(ours, weights.arrays, weights.title, rename=rename, load=load, skip=skip)
    state = begin_with(strategy, weights, found.pairs, tx, step.trainable)
    exported = strategy.export(state)
    numbers = jax.tree.map(np.array, exported)
    places = jax.tree.map(
        lambda x, want: x.sharding == want.sharding, exported, strategy.abstract()
    )
    assert all(jax.tree.leaves(places.params)) and all(jax.tree.leaves(places.opt_state))
    if train:  # the update donates its state, of which no two arrays may share memory
        assert np.isfinite(strategy.compile(step).update(state, batch(0))[1]["loss"])
    return numbers, strategy, found, describe(found, ours, weights.title)


def write_export(directory, **options):
    """(the file, its metadata)"""
    options = {
        "run_dir": str(directory),
        "output": None,
        "step": None,
        "ema": False,
        "layout": "jaxdp",
        **options,
    }
    export(options)
    file = pathlib.Path(options["output"] or directory / "export.safetensors")
    with safe_open(file, framework="np") as opened:
        return file, opened.metadata()


def same_bits(a, b):
    assert jax.tree.leaves(a) and jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), (
            path_string(path)
        )


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A run of the stacked model: (its directory, its last state, its exported file)."""
    directory = tmp_path_factory.mktemp("blocks")
    state = saved(directory, toys.MODELS["blocks"](), ema=0.9)
    return directory, state, write_export(directory)[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The same of an MLP, with an average."""
    directory = tmp_path_factory.mktemp("small")
    state = saved(directory, mlp(), ema=0.5)
    return directory, state, write_export(directory)[0]


# Names


PARTS = st.sampled_from(["a", "b", "kernel", "0", "1"])
NAMES = st.lists(
    st.lists(PARTS, min_size=1, max_size=3).map("/".join), min_size=1, max_size=8, unique=True
)
ONE = jax.ShapeDtypeStruct((2,), np.float32)


def of(names):
    return dict.fromkeys(names, ONE)


@settings(max_examples=100, deadline=None)
@given(ours=NAMES, theirs=NAMES, skip=st.lists(PARTS, max_size=2, unique=True))
def test_every_name_is_in_one_place(ours, theirs, skip):
    skip = [s for s in skip if any(s in name for name in [*ours, *theirs])]
    left, offered = (
        {n for n in names if not any(s in n for s in skip)} for names in (ours, theirs)
    )
    if not left & offered or left != offered:
        words = "does not fit the model: " if left & offered else "has none of the arrays to load"
        with pytest.raises(UsageError, match=rf"^init_from: the source {words}"):
            match(of(ours), of(theirs), "the source", skip=skip)
        return
    found = match(of(ours), of(theirs), "the source", skip=skip)
    assert found.pairs == {name: name for name in ours if name in left}
    assert sorted([*found.pairs, *found.skipped]) == sorted(ours)
    assert sorted([*found.pairs.values(), *found.unused]) == sorted(theirs)


@settings(max_examples=50, deadline=None)
@given(names=NAMES)
def test_renaming_there_and_back_loads_everything(names):
    there = of([f"model.{name}.w" for name in names])
    found = match(
        of(names),
        there,
        "it",
        rename={r"^model\.(.*)\.w$": r"\1", "model": "the second, so not used"},
    )
    assert found == Match({name: f"model.{name}.w" for name in names}, [], [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load": ["trunk"]}, r"init.load: 'trunk' matches no parameter; a path is such as '.*'"),
        ({"skip": ["^heaf/"]}, r"init.skip: '^heaf/' matches no parameter; a path is such as 'head/.*'"),
        ({"rename": {"^tail": "x"}}, r"init.rename: '^tail' matches nothing in SOURCE; a path there is such as '.*'"),
        ({"rename": {"^head": r"\1"}}, r"init.rename: '^head' cannot be replaced by '.*' \(invalid group ref.*"),
        ({"rename": {"kernel|bias": "w"}},
         r"init.rename: 'head/kernel' and 'head/bias' of SOURCE both become 'head/w'; narrow the expressions"),
        ({"load": []}, r"init_from: SOURCE has none of the arrays to load; widen init.load, or skip less"),
        ({"rename": {"^": "x/"}}, r"init_from: SOURCE has none .*; a path here is 'head/kernel', there 'x/head/.*"
                                  r"'; map them with init.rename"),
        ({"theirs": {}}, r"init_from: SOURCE has none .*"),
        ({"theirs": {"head/kernel": ((3, 5), np.float32)}},
         r"init_from: 'head/kernel' has shape \(3, 5\) in SOURCE, but \(4, 3\) here; leave it as initialized with "
         r"init.skip, such as '^head/kernel\$'"),
        ({"theirs": {"k": ((3, 5), np.float32), "head/bias": ((1,), np.float32)}, "rename": {"^k": "head/kernel"}},
         r"init_from: 'head/kernel' has shape \(3, 5\) in SOURCE as 'k', but \(4, 3\) here \(and 1 more do not fit\);"
         ".*"),
        ({"theirs": {"head/kernel": ((4, 3), np.float32)}},
         r"init_from: SOURCE does not fit the model: it has no 'head/bias'; leave out what may differ with init.skip, "
         r"such as '^head/bias\$'"),
        ({"theirs": {"head/kernel": ((4, 3), np.float32), "head/b": ((3,), np.float32), "x": ((1,), np.float32)}},
         r"init_from: SOURCE does not fit the model: it has no 'head/bias', and no parameter here is its 'head/b' "
         r"\(and 1 more\); map them with init.rename, or leave out what may differ with init.skip, such as '.*'"),
        ({"theirs": {"head/kernel": ((4, 3), np.int8)}},
         r"init_from: 'head/kernel' is int8 in SOURCE, but float32 here; leave it as initialized .*"),
    ],
)  # fmt: skip
def test_what_does_not_match_is_said_in_one_line(arguments, message):
    arrays = {"head/kernel": ((4, 3), np.float32), "head/bias": ((3,), np.float32)}

    def shapes(arrays):
        return {k: jax.ShapeDtypeStruct(*v) for k, v in arrays.items()}

    theirs = {k: jax.ShapeDtypeStruct(*v) for k, v in arguments.pop("theirs", arrays).items()}
    with pytest.raises(UsageError) as error:
        match(shapes(arrays), theirs, "SOURCE", **arguments)
    assert re.fullmatch(message.replace("'^", r"'\^"), str(error.value)), error.value


def test_a_report_names_eight_and_counts_the_others():
    ours = of([f"layers/{i}" for i in range(20)]) | of(["model_state/mean"])
    skip = ["/1.", "^model_state/", "^other"]
    found = match(ours, of([f"layers/{i}" for i in range(10)] + ["other"]), "runs/a", skip=skip)
    assert describe(found, ours, "runs/a").splitlines() == [
        "loaded 10 of 20 parameters, 0 of 1 arrays of the model state, 20 elements, from runs/a",
        "  left as initialized, skipped: "
        + ", ".join(f"layers/{i}" for i in range(10, 18))
        + " and 3 others",
        "  not used from the source: other",
    ]


# Values


LAYOUTS = {
    "pmap 8": {"backend": "pmap", "devices": 8},
    "pmap 8, stage 1": {"backend": "pmap", "devices": 8, "layout": {"zero": 1}},
    "pjit 3": {"backend": "pjit", "devices": 3},
    "pjit 8, stage 2": {"backend": "pjit", "devices": 8, "layout": {"zero": 2}},
    "pjit 8, stage 3": {"backend": "pjit", "devices": 8, "layout": {"zero": 3}},
    "pjit 8, stage 3 in groups": {
        "backend": "pjit",
        "devices": 8,
        "layout": {"zero": 3, "shard_size": 4},
    },
}


WANTED = {"skip": ["^head/"], "ema": 0.9}


@pytest.fixture(scope="module")
def one(blocks):
    """The state that a run on one device begins with."""
    return begun(blocks[0], toys.MODELS["blocks"](), **WANTED, train=False)[0]


@pytest.mark.slow
def test_all_but_the_head_is_loaded(blocks, one):
    """The head is as a run without a source initializes it."""
    _, source, _ = blocks
    model = toys.MODELS["blocks"]()
    fresh = toys.build(model, toys.data(24), optimizer=(TX, None))[0].init()
    same_bits(
        {k: v for k, v in one.params.items() if k != "head"},
        {k: v for k, v in source.params.items() if k != "head"},
    )
    same_bits(one.params["head"], jax.tree.map(np.array, fresh.params["head"]))
    assert not np.array_equal(one.params["head"]["kernel"], source.params["head"]["kernel"])


@pytest.mark.slow
@pytest.mark.parametrize("name", only(["pjit 8, stage 3 in groups"], LAYOUTS))
def test_every_strategy_begins_with_the_same_bits(blocks, one, name):
    """From a checkpoint and from a file."""
    directory, _, file = blocks
    model = toys.MODELS["blocks"]()
    same_bits(one, begun(directory, model, **WANTED, **LAYOUTS[name], train="groups" in name)[0])
    same_bits(one, begun(file, model, **WANTED, **LAYOUTS[name], train=False)[0])


@pytest.mark.slow
def test_a_device_reads_only_what_it_holds(blocks, monkeypatch):
    """Of the file, in stage 3 on 8 devices: each element once; and from a checkpoint nothing is
    whole anywhere.
    """
    read = []
    make = jax.make_array_from_callback

    def counted(shape, where, part):
        return make(shape, where, lambda i: (read.append(part(i).size), part(i))[1])

    monkeypatch.setattr(jax, "make_array_from_callback", counted)
    _, strategy, found, _ = begun(blocks[2], toys.MODELS["blocks"](), **LAYOUTS["pjit 8, stage 3"])
    sizes = {name: x.size for name, x in named(strategy.shapes.params, {}).items()}
    whole = [n for n, d in named(strategy.state_dims.params, {}).items() if d < 0]
    assert sum(read) == sum(sizes[name] for name in found.pairs) and len(read) > len(sizes)
    assert all(sizes[name] < 8 for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_export_and_back_keeps_every_bit(tmp_path, dtype):
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        model = mlp()
        state = saved(tmp_path / "a", model, dtype=dtype)
        digest = params_sha256(state.params)
    file, metadata = write_export(
        tmp_path / "a"
    )  # without x64, which a process that exports need not have
    assert metadata == {
        "format": "jaxdp",
        "step": "2",
        "params_sha256": digest,
        "ema": "false",
        "config": "{}",
    }
    held = load_file(file)
    assert {x.dtype for x in held.values()} == {np.dtype(DTYPES[dtype])}
    np.testing.assert_array_equal(held["head/kernel"], state.params["head"]["kernel"])
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        back, strategy, *_ = begun(file, model, dtype=dtype)
        same_bits(back.params, state.params)
        save(tmp_path / "b", 0, strategy.export(begin(strategy, file)))
    again, metadata = write_export(tmp_path / "b")
    assert metadata["params_sha256"] == digest and metadata["step"] == "0"
    same_bits(load_file(again), held)


def begin(strategy, file):
    weights = open_weights(file, False)
    return begin_with(
        strategy, weights, {name: name for name in weights.arrays}, TX, lambda tree: tree
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_what_is_loaded_is_cast_to_our_dtype(tmp_path, kind):
    """float64 to float32 and bfloat16, as NumPy rounds, in a process without x64."""
    with jax.enable_x64(True):
        state = saved(tmp_path, mlp(), dtype="float64")
    place = tmp_path if kind == "checkpoint" else write_export(tmp_path)[0]
    for dtype in ("float32", "bfloat16"):
        cast = jax.tree.map(lambda x, dtype=dtype: x.astype(DTYPES[dtype]), state.params)
        layout = {"backend": "pjit", "devices": 4, "layout": {"zero": 3}}
        got, *_ = begun(place, mlp(), dtype=dtype, ema=0.9, **layout, train=False)
        same_bits(got.params, cast)
        assert {x.dtype for x in jax.tree.leaves(got.extra["ema"])} == {
            np.dtype(np.float32)
        } or dtype == "bfloat16"
        same_bits(
            got.extra["ema"], jax.tree.map(lambda x, e: x.astype(e.dtype), cast, got.extra["ema"])
        )


@pytest.mark.slow
def test_a_new_head(small):
    directory, source, file = small
    with pytest.raises(
        UsageError,
        match=r"'head/bias' has shape \(3,\) in .*, but \(7,\) here \(and 1 more do not fit\)",
    ):
        begun(directory, mlp(classes=7))
    state, _, _, said = begun(directory, mlp(classes=7), skip=["^head/"], train=False)
    same_bits(state.params["layers"], source.params["layers"])
    assert (
        state.params["head"]["kernel"].shape == (8, 7)
        and np.abs(state.params["head"]["kernel"]).sum() > 0
    )
    assert said.splitlines() == [
        f"loaded 2 of 4 parameters, 264 elements, from {directory}/checkpoints/2",
        "  left as initialized, skipped: head/bias, head/kernel",
        "  not used from the source: head/bias, head/kernel",
    ]
    assert begun(file, mlp(), load=["^head/kernel"], train=False)[2].skipped == [
        "head/bias",
        "layers/0/bias",
        "layers/0/kernel",
    ]


@pytest.mark.slow
def test_names_of_another_are_renamed(small, tmp_path):
    """As another library would write them: joined by dots, with names of its own, in float16."""
    params = {name: np.asarray(x) for name, x in named(small[1].params, {}).items()}

    def words(name):
        return "net." + name.replace("/", ".").replace("kernel", "weight")

    save_file(
        {words(name): x.astype(np.float16) for name, x in params.items()},
        tmp_path / "their.safetensors",
    )
    rename = {r"^net/(.*)weight$": r"\1kernel", "^net/": ""}
    state, _, found, _ = begun(tmp_path / "their.safetensors", mlp(), rename=rename)
    assert (
        found.pairs["head/kernel"] == "net/head/weight" and not found.skipped and not found.unused
    )
    same_bits(
        named(state.params, {}),
        {k: x.astype(np.float16).astype(np.float32) for k, x in params.items()},
    )
    nested, *_ = begun(small[0], mlp(), rename={"^(layers)/0": r"\1/0", "^head": "head"})
    same_bits(nested.params, small[1].params)


@pytest.mark.slow
def test_the_average_is_taken_and_exported(small, tmp_path):
    directory, source, _ = small
    assert not np.array_equal(
        source.extra["ema"]["head"]["kernel"], source.params["head"]["kernel"]
    )
    plain, *_ = begun(directory, mlp(), ema=0.5)
    same_bits(plain.extra["ema"], plain.params)
    same_bits(plain.params, source.params)
    average, *_, said = begun(directory, mlp(), average=True, ema=0.5)
    same_bits(average.params, source.extra["ema"])
    same_bits(average.extra["ema"], source.extra["ema"])
    assert f"from the running average in {directory}" in said
    file, metadata = write_export(directory, ema=True, output=str(tmp_path / "average.safetensors"))
    assert metadata["ema"] == "true" and metadata["params_sha256"] == params_sha256(
        source.extra["ema"]
    )
    same_bits(begun(file, mlp(), average=True)[0].params, source.extra["ema"])


@pytest.mark.slow
def test_batchnorms_averages_come_too(tmp_path):
    model = toys.MODELS["resnet"]()
    state = saved(tmp_path, model)
    file, _ = write_export(tmp_path)
    assert sum(name.startswith("model_state/") for name in load_file(file)) == len(
        jax.tree.leaves(state.model_state)
    )
    for place in (tmp_path, file):
        got, _, found, said = begun(
            place, model, backend="pjit", devices=8, layout={"zero": 3}, train=False
        )
        same_bits((got.params, got.model_state), (state.params, state.model_state))
        assert not found.unused and "6 of 6 arrays of the model state" in said
    got, *_ = begun(file, model, skip=["^model_state/"], train=False)
    assert np.all(got.model_state["stem"]["norm"]["mean"] == 0) and np.any(
        state.model_state["stem"]["norm"]["mean"]
    )


@pytest.mark.slow
def test_optimizer_state_starts_from_loaded_parameters(small):
    """One that begins with a copy of them; and what is frozen has none."""
    keeps = optax.GradientTransformation(
        lambda params: (jnp.zeros((), jnp.int32), params),
        lambda updates, state, params=None: (updates, state),
    )
    tx = optax.chain(keeps, optax.sgd(0.1))
    state, *_ = begun(
        small[0], mlp(), tx=tx, frozen=["^layers/"], backend="pjit", devices=8, layout={"zero": 3}
    )
    same_bits(state.opt_state[0][1]["head"], small[1].params["head"])
    assert jax.tree.leaves(state.opt_state[0][1]["layers"]) == []


@pytest.mark.slow
def test_carried_state_begins_anew(tmp_path):
    saved(tmp_path, toys.lstm_model())
    for layout in ({"backend": "pmap", "devices": 3}, {"backend": "pjit", "devices": 8}):
        state, _, found, _ = begun(tmp_path, toys.lstm_model(), **layout, train=False)
        assert not any("carry" in name for name in found.pairs) and not np.any(
            state.kept["carry"]["cell"]
        )


# What is refused


def test_every_place_that_holds_nothing_is_refused(tmp_path, small, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "weights.npz").write_bytes(b"PK")
    (tmp_path / "torn.safetensors").write_bytes(small[2].read_bytes()[:200])
    shutil.copytree(small[0] / "checkpoints" / "2", tmp_path / "damaged")
    for file in (tmp_path / "damaged").rglob("_METADATA"):
        file.write_text("{")
    save_file({"a.b": np.zeros(2), "a/b": np.zeros(2)}, tmp_path / "both.safetensors")
    from orbax.checkpoint import v1 as ocp

    ocp.save(tmp_path / "other", {"weights": jnp.ones(3)})
    for path, message in {
        "nix": "'nix' does not exist; give a run directory, one of its checkpoints (.../checkpoints/STEP) or a .safe",
        5000 * "x": f"'{5000 * 'x'}' cannot be opened ([Errno 36] File name too long",
        "weights.npz/a": "'weights.npz/a' cannot be opened (",
        "empty": "'empty' contains no checkpoint; give a run",
        "empty/checkpoints/3": "'empty/checkpoints/3' contains no checkpoint; give",
        "weights.npz": "'weights.npz' is not a .safetensors file; give",
        "torn.safetensors": "'torn.safetensors' cannot be read as safetensors (",
        "damaged": "'damaged' is not a complete jaxdp checkpoint (",
        "other": "'other' contains no checkpoint; give a run",
    }.items():
        with pytest.raises(UsageError) as error:
            open_weights(locate(path), False)
        assert str(error.value).startswith(f"init_from: {message}") and "\n" not in str(error.value)
    assert set(open_weights(locate("both.safetensors"), False).arrays) == {"a.b", "a/b"}


@pytest.mark.slow
def test_an_average_that_is_not_there_is_refused(tmp_path, small):
    saved(tmp_path, mlp())
    with pytest.raises(
        UsageError, match=r"^init.ema: '.*checkpoints/2' has no running average; leave it out"
    ):
        open_weights(locate(str(tmp_path)), True)
    with pytest.raises(
        UsageError, match=r"^init.ema: '.*export.safetensors' has no running average; leave it out"
    ):
        open_weights(locate(str(small[2])), True)
    with pytest.raises(UsageError, match=r"^--ema: '.*' has no running average"):
        write_export(tmp_path, ema=True)


def test_complex_numbers_of_a_state_are_read_from_file(tmp_path):
    ours = {"a": np.arange(4, dtype=np.complex64) * 1j}
    save_file(ours, tmp_path / "state.safetensors")
    weights = open_weights(tmp_path / "state.safetensors", False)
    match(ours, weights.arrays, "it")
    wanted = {
        "a": jax.ShapeDtypeStruct(
            (4,), np.complex64, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
    }
    same_bits(weights.read(wanted), ours)


def test_numbers_that_numpy_cannot_hold_are_refused(tmp_path):
    save_file({"a": np.zeros(2, ml_dtypes.float8_e4m3fn)}, tmp_path / "small.safetensors")
    weights = open_weights(tmp_path / "small.safetensors", False)
    with pytest.raises(UsageError, match="'a' is F8_E4M3 in it, but float32 here"):
        match({"a": ONE}, weights.arrays, "it")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--run_dr", "x"], "command line: unknown option 'run_dr'; did you mean 'run_dir'?"),
        (
            ["--zzz"],
            "command line: unknown option 'zzz'; known: run_dir, output, step, ema, layout",
        ),
        (
            ["--run_dir", "run", "--step", "two"],
            "--step: two is not in 'run'; use one of 2, last, best",
        ),
        (["--run_dir"], "--run_dir: expected one argument; see jaxdp export --help"),
        ([], "--run_dir: missing; give the directory of a run, e.g. --run_dir runs/digits"),
        (["--run_dir", "nix"], "--run_dir: 'nix': no such directory; train first, or name another"),
        (["--run_dir", "."], "--run_dir: '.': no checkpoint in it; train first, or name another"),
        (["--run_dir", "run", "--step", "3"], "--step: 3 is not in 'run'; use one of 2"),
        (
            ["--run_dir", "run", "--layout", "llama"],
            "--layout: 'llama' is not one of 'jaxdp', 'huggingface'",
        ),
        (
            ["--run_dir", "run", "--output", "x.pt"],
            "--output: 'x.pt' does not end in .safetensors; init_from would",
        ),
        (
            ["--run_dir", "run", "--output", "no/x.safetensors"],
            "--output: 'no/x.safetensors' is in 'no', which does not",
        ),
        (
            ["--run_dir", "run", "--output", "d.safetensors"],
            "--output: 'd.safetensors' is a directory; give the path",
        ),
        (
            ["--run_dir", "run", "--output", "/proc/x.safetensors"],
            "--output: '/proc/x.safetensors' cannot be written (",
        ),
    ],
)
def test_export_refuses_in_one_line(argv, message, tmp_path, small, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(small[0])
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(UsageError) as error:
        export(cli.parse(argv, "export")[0])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert not list(tmp_path.glob("*.tmp"))


BASE = ["--steps", "2", "--model.target", "MLP", "--data.target", "Digits"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--init.skip", '["^head/"]'],
            "init.skip: ['^head/'], but nothing is loaded; set init_from",
        ),
        (
            ["--init_from", "x", "--init.load", '["("]'],
            "init.load: '(' is not a regular expression: missing )",
        ),
        (
            ["--init_from", "x", "--init.rename", '{"[": "a"}'],
            "init.rename: '[' is not a regular expression: unterm",
        ),
        (
            ["--init_from", "x", "--init.skp", "[]"],
            "command line: unknown key 'init.skp'; did you mean 'init.skip'?",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(argv, message):
    with pytest.raises(UsageError) as error:
        cli.load([*BASE, *argv])
    assert str(error.value).startswith(message)


def test_a_saved_config_has_the_default_of_a_new_key():
    config, *_ = cli.load(BASE)

    def flat(**changed):
        return {**json.loads(json.dumps(vars(config), default=vars)), **changed}

    old = flat()
    del old["init"], old["init_from"]
    assert validation.changed_numbers(old, config) == []
    old = flat(init_from="runs/a", init={"skip": ["^head/"]})
    assert validation.changed_numbers(old, config) == [
        "init_from: 'runs/a' -> None",
        "init.skip: ['^head/'] -> []",
    ]


# The command


CONFIG = """
model: {target: MLP, args: {hidden: [16]}}
data: {target: Digits}
steps: 3
batch_size: 32
optimizer: {target: sgd, lr: 0.0, schedule: constant}
"""


def digest(run_dir):
    return records(run_dir, "final")[-1]["params_sha256"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    jaxdp("--config", write(folder, CONFIG), "--run_dir", folder / "a", "--optimizer.lr", 0.1)
    return folder


@pytest.mark.slow
def test_the_command_finetunes_and_outlives_its_source(trained, tmp_path):
    """With a learning rate of zero, a run ends with what it began with."""
    shutil.copytree(trained / "a", tmp_path / "a")
    config = write(tmp_path, CONFIG + "init: {skip: [^head/bias$]}\n")
    run = ["--config", config, "--run_dir", tmp_path / "b", "--init_from", tmp_path / "a"]
    out = jaxdp(*run).stdout
    assert f"loaded 3 of 4 parameters, 1,200 elements, from {tmp_path}/a/checkpoints/3\n" in out
    assert "left as initialized, skipped: head/bias" in out
    shutil.rmtree(tmp_path / "a")
    before = digest(tmp_path / "b")
    out = jaxdp(*run, "--steps", 4).stdout
    assert "resumes after step 3" in out and "loaded" not in out
    assert digest(tmp_path / "b") == before != digest(trained / "a")
    refused = ended("train", *run[:4], "--init_from", trained / "a", "--steps", 5, code=2).stderr
    assert (
        "init_from: " in refused and "changes the numbers" in refused and refused.count("\n") == 1
    )

    done = ended("export", "--run_dir", tmp_path / "b", "--output", tmp_path / "b.safetensors")
    assert f"params_sha256 {before[:16]}" in done.stdout
    with safe_open(tmp_path / "b.safetensors", framework="np") as file:
        metadata = file.metadata()
    assert metadata["params_sha256"] == before and metadata["step"] == "4"
    assert json.loads(metadata["config"])["init"]["skip"] == ["^head/bias$"]
    refused = ended(
        "train",
        "--config",
        config,
        "--run_dir",
        tmp_path / "c",
        "--init_from",
        tmp_path / "gone",
        code=2,
    ).stderr
    assert re.fullmatch(
        r"jaxdp: init_from: '.*gone' does not exist; give a run directory.*\n", refused
    )


@pytest.mark.slow
@pytest.mark.mpi
def test_two_processes_begin_with_the_same_bits(trained, tmp_path):
    """Stage 3 split over two processes, from a checkpoint; and what does not fit is said once."""
    config = [
        "train.py",
        "--config",
        str(write(tmp_path, CONFIG)),
        "--init_from",
        str(trained / "a"),
    ]
    split = ["--parallel.backend", "pjit", "--parallel.zero", "3"]
    done = mpirun(2, [*config, *split, "--run_dir", str(tmp_path / "b")], devices=2)
    assert done.returncode == 0 and not done.left, done.output
    assert done.stdout.count("loaded 4 of 4 parameters, 1,210 elements") == 1
    assert digest(tmp_path / "b") == digest(trained / "a")
    export(
        {
            "run_dir": str(tmp_path / "b"),
            "output": None,
            "step": None,
            "ema": False,
            "layout": "jaxdp",
        }
    )
    from_file = [
        *config[:4],
        str(tmp_path / "b" / "export.safetensors"),
        "--run_dir",
        str(tmp_path / "c"),
    ]
    done = mpirun(2, from_file, devices=2)
    assert done.returncode == 0 and digest(tmp_path / "c") == digest(trained / "a"), done.output
    done = mpirun(2, [*config, "--run_dir", str(tmp_path / "d"), "--model.args.hidden", "[8]"])
    assert (
        done.returncode == 2
        and done.stderr.count("init_from: 'head/kernel' has shape (16, 10)") == 1
    ), done.output
