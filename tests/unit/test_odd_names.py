"""Names of folders and of parameters: what is saved comes back, or the run is refused before its
first update.
"""

import os
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, example, given, settings

import odd_names
from checkpoints import META
from jaxdp.checkpoint import orbax
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.checkpoint.weights import from_checkpoint, from_safetensors, locate, named, on_host
from jaxdp.cli.export import export
from jaxdp.errors import UsageError
from jaxdp.process.context import Context
from jaxdp.run import rundir
from jaxdp.run.preflight import check_leaves
from jaxdp.split import path_string
from jaxdp.train.state import TrainState


def state_of(params):
    params = jax.tree.map(jax.numpy.asarray, params)
    tx = optax.adam(1e-3)
    return TrainState(
        jax.numpy.int32(7),
        params,
        {"mean": jax.numpy.ones(2)},
        tx.init(params),
        extra={"ema": params},
    )


def alike(one, other):
    arrays = [
        {path_string(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(t)}
        for t in (one, other)
    ]
    assert (
        jax.tree.structure(one) == jax.tree.structure(other)
        and arrays[0].keys() == arrays[1].keys()
    )
    for name, x in arrays[0].items():
        y = arrays[1][name]
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


def round_trip(parts, params):
    """Return "" once a state is saved in a folder, restored, exported and imported, or why a run
    would be refused.
    """
    top = pathlib.Path(tempfile.mkdtemp())
    try:
        try:
            state = state_of(params)
        except ValueError as error:  # keys that JAX cannot sort
            return f"jax: {error}"
        try:
            check_leaves(state)
        except UsageError as refused:
            return str(refused)
        directory = top.joinpath(*parts)
        file, problem = rundir.make(directory)
        if problem:
            return problem
        file.close()
        said = []
        checkpoints = Checkpoints(directory / "checkpoints", context=Context())
        checkpoints.save(7, state, META, said.append)
        assert checkpoints.wait() is None and said == ["saved step 7"]
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        again = Checkpoints(directory / "checkpoints", context=Context())
        assert again.latest() == 7
        alike(again.restore(7, abstract), state)

        expected = {
            name: np.asarray(x) for name, x in named(state.params, state.model_state).items()
        }
        stored = on_host(from_checkpoint(locate(str(directory)), ema=False))
        assert stored.keys() == expected.keys()
        output = top / "weights.safetensors"
        export(
            {
                "run_dir": str(directory),
                "step": None,
                "output": str(output),
                "ema": True,
                "layout": "jaxdp",
            }
        )
        weights = from_safetensors(output, ema=True)
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def target(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        read = weights.read({name: target(x) for name, x in expected.items()})
        for name, x in expected.items():
            for y in (stored[name], np.asarray(read[name])):
                assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name
        return ""
    finally:
        shutil.rmtree(top, ignore_errors=True)


common = settings(deadline=None, suppress_health_check=list(HealthCheck))
ONE = np.ones(3, np.float32)


@settings(common, max_examples=4)
@given(odd_names.folders, odd_names.trees)
@example(["lr=[1e-3]"], {"a.b": ONE, "a": {"b": 2 * ONE}})
@example(
    ["*", "{a,b}\n"],
    {"": ONE, "0": [ONE, (ONE, 2 * ONE)], "W": ONE, "w": 3 * ONE, "_METADATA": ONE},
)
def test_a_state_of_any_names_in_any_folder_comes_back(parts, params):
    round_trip(parts, params)


@pytest.mark.slow
def test_200_states_of_odd_names_come_back():
    results = []

    @settings(common, max_examples=200, database=None)
    @given(odd_names.folders, odd_names.trees)
    def check(parts, params):
        results.append(round_trip(parts, params))

    check()
    assert len(results) >= 200 and results.count("") > 100, results


@pytest.mark.slow
@pytest.mark.parametrize("name", odd_names.FOLDERS)
def test_each_odd_folder(name):
    problem = round_trip([name, "run"], {"w": ONE})
    assert not problem or name in ("x" * 256, "gs:", "logs:", "\\", "a\\", "a.__lock"), problem


@pytest.mark.slow
@pytest.mark.parametrize("key", odd_names.KEYS)
def test_each_odd_key(key):
    problem = round_trip(["run"], {key: ONE, "a": {key: 2 * ONE, "other": ONE}})
    assert not problem or key in ("a", "model_state", "__metadata__", "\ud800"), problem


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (
            {"a/b": ONE, "a": {"b": ONE}},
            "model: 2 arrays of params have the path 'a/b'; rename all but one",
        ),
        (
            {"model_state": ONE},
            "model: parameter 'model_state' has a name that files of weights use",
        ),
        ({"\ud800": ONE}, "has half a character in its name, which no file can store; rename it"),
    ],
)
def test_names_that_cannot_be_stored_are_refused(params, words):
    with pytest.raises(UsageError) as refused:
        check_leaves(state_of(params))
    assert words in str(refused.value)


def test_a_first_save_that_differs_is_no_success(tmp_path, monkeypatch):
    """Whatever the cause: here Orbax gets another tree."""
    from jaxdp.checkpoint import store

    save = store.save
    for change in (
        lambda tree: {**tree, "params": {"w": 2 * tree["params"]["w"]}},
        lambda tree: {"params": tree["params"]},
    ):
        monkeypatch.setattr(
            store, "save", lambda folder, tree, change=change: save(folder, change(tree))
        )
        said = []
        checkpoints = Checkpoints(tmp_path, context=Context())
        checkpoints.save(1, state_of({"w": ONE}), META, said.append)
        assert (
            "could not be saved: read back, " in str(checkpoints.wait()) and not checkpoints.steps()
        )
        assert not any("saved step" in line for line in said)
    monkeypatch.setattr(store, "save", save)
    checkpoints.save(2, state_of({"w": ONE}), META, said.append)
    assert checkpoints.wait() is None and said[-1] == "saved step 2"


def test_folders_of_orbax_are_taken_literally(tmp_path):
    path = orbax.literal_path()
    assert os.fspath(path("/gs/bucket") / "x") == "/gs/bucket/x" and str(path("/s3/a")) == "/s3/a"
    folder = tmp_path / "[1]"
    (folder / "item_1").mkdir(parents=True)
    children = list(path(folder).glob("item_*"))
    assert children == [path(folder / "item_1")] and type(children[0]) is path
