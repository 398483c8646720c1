"""Arrays of .npz files and folders of .npy files."""

import pickle

import numpy as np
import pytest

import jaxdp
from jaxdp.assemble.data import read_set
from jaxdp.config.training import Target
from jaxdp.data import SOURCES, Npz
from jaxdp.errors import UsageError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 5)).astype(np.float32), RNG.integers(0, 3, 40)
Y[0] = 2


def save(folder, how, **arrays):
    if how == "folder":
        (folder / "data").mkdir()
        for name, array in arrays.items():
            np.save(folder / "data" / f"{name}.npy", array)
        return str(folder / "data")
    (np.savez_compressed if how == "compressed" else np.savez)(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def rows(source):
    return source.read(np.arange(len(source)))


@pytest.mark.parametrize("how", ["stored", "compressed", "folder"])
def test_each_row_is_in_one_split_and_read_from_disk(how, tmp_path):
    path = save(tmp_path, how, inputs=np.asfortranarray(X), labels=Y)
    train, test = Npz(path, test_fraction=0.2), Npz(path, "test", test_fraction=0.2)
    assert (len(train), len(test), train.classes, test.classes) == (32, 8, 3, 3)
    got = [np.concatenate([rows(train)[key], rows(test)[key]]) for key in ("inputs", "labels")]
    order, expected = np.lexsort(got[0].T), np.lexsort(X.T)
    assert np.array_equal(got[0][order], X[expected]) and np.array_equal(got[1][order], Y[expected])
    assert got[1].dtype == np.int32 and isinstance(train.arrays["inputs"].base, np.memmap) == (how != "compressed")
    again = pickle.loads(pickle.dumps(train))
    assert np.array_equal(rows(again)["inputs"], rows(train)["inputs"]) and len(pickle.dumps(train)) < 300


def test_arrays_for_the_test_split_are_used_in_full(tmp_path):
    path = save(tmp_path, "stored", x_train=X, y_train=Y, x_test=X[:7], y_test=Y[:7])
    arrays = {"inputs": "x_train", "labels": "y_train"}
    train, test = Npz(path, arrays=arrays), Npz(path, "test", arrays)
    assert np.array_equal(rows(train)["inputs"], X) and np.array_equal(rows(test)["labels"], Y[:7])
    assert rows(Npz(path))["x"].shape == X.shape


@pytest.mark.slow
def test_a_model_trains_on_it_by_name(tmp_path):
    path = save(tmp_path, "stored", inputs=X, labels=Y)
    more = {"steps": 1, "batch_size": 8, "parallel": {"devices": 1}, "run_dir": tmp_path / "run"}
    fitted = jaxdp.fit("MLP", {"target": "Npz", "args": {"path": path}}, **more)
    assert fitted.predict(X).shape == (40, 3) and "loss_of" not in fitted.final
    assert Npz.has_split({"path": path}) and not Npz.has_split({"path": path, "test_fraction": 0})
    assert len(Npz(path, test_fraction=0.0)) == 40


@pytest.mark.parametrize(
    ("arrays", "args", "text"),
    [
        ({}, {"path": "nowhere.npz"}, r"data.args.path: cannot read 'nowhere.npz' \(No such file or directory\)"),
        ({}, {"path": __file__}, r"data.args.path: cannot read .*; give a .npz file of numbers or a folder"),
        ({"x": X}, {"arrays": {"inputs": "y"}}, "data.args.arrays.inputs: .* has no array 'y'; its arrays: x"),
        ({"x": X}, {"arrays": {"inputs": 3}}, "data.args.arrays.inputs: .* has no array 3; its arrays: x"),
        ({"x": X, "y": Y, "x_test": X}, {"split": "test"}, "data.args.arrays.y: .* has no array 'y_test'"),
        ({"x": X, "y": Y[1:]}, {}, "data: arrays differ in their number of examples"),
        ({"x": np.array([{}])}, {}, "data.args.path: cannot read .*objects"),
        ({"x": X}, {"test_fraction": 1.0}, "data.args.test_fraction: 1.0 is not at least 0 and below 1"),
        ({"x": X}, {"test_fraction": 0.001, "split": "test"}, "data.args.test_fraction: 0.001 of 40 rows: no test"),
    ],
)
def test_what_is_missing_is_one_line(arrays, args, text, tmp_path):
    path = save(tmp_path, "stored", **arrays)
    with pytest.raises(UsageError, match=text):
        Npz(**{"path": path, **args})


def test_a_damaged_file_is_one_line(tmp_path):
    path = save(tmp_path, "compressed", x=np.zeros((40, 5), np.float32))
    content = bytearray((tmp_path / "data.npz").read_bytes())
    content[50:60] = b"\xff" * 10  # in the compressed bytes of x
    (tmp_path / "data.npz").write_bytes(content)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "inputs.npy").touch()
    for damaged in (path, str(tmp_path / "empty")):
        with pytest.raises(UsageError, match=r"data.args.path: cannot read .*; give a .npz file of numbers"):
            Npz(damaged)


@pytest.mark.parametrize("key", ["data", "eval.data", "eval.also.small"])
def test_an_error_names_the_key_of_its_set(key, tmp_path):
    path = save(tmp_path, "stored", inputs=X[:0], labels=Y[:0])
    for fraction, words in {0.0: ": the data set is empty", 2: ".args.test_fraction: 2 is not at least 0"}.items():
        target = Target("Npz", {"path": path, "split": "train", "test_fraction": fraction})
        with pytest.raises(UsageError, match=f"^{key}{words}"):
            read_set(key, target, "test", False, SOURCES)
