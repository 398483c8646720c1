"""Arrays of .npz files and folders of .npy files."""

import pickle

import numpy as np
import pytest

import jaxdp
from jaxdp.config.training import Target
from jaxdp.data import SOURCES, Npz
from jaxdp.data.dataset import as_dataset
from jaxdp.errors import UsageError
from jaxdp.run.datasets import read_set

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
    assert got[1].dtype == np.int32 and isinstance(train.arrays["inputs"].base, np.memmap) == (
        how != "compressed"
    )
    again = pickle.loads(pickle.dumps(train))
    assert (
        np.array_equal(rows(again)["inputs"], rows(train)["inputs"])
        and len(pickle.dumps(train)) < 300
    )


def test_arrays_for_the_test_split_are_used_in_full(tmp_path):
    path = save(tmp_path, "stored", x_train=X, y_train=Y, x_test=X[:7], y_test=Y[:7])
    arrays = {"inputs": "x_train", "labels": "y_train"}
    train, test = Npz(path, arrays=arrays), Npz(path, "test", arrays)
    assert np.array_equal(rows(train)["inputs"], X) and np.array_equal(rows(test)["labels"], Y[:7])
    assert rows(Npz(path))["x"].shape == X.shape


@pytest.mark.parametrize("how", ["stored", "folder"])
@pytest.mark.parametrize(
    ("train", "test", "key"),
    [
        ("train_images", "test_images", "images"),
        ("trainX", "testX", "X"),
        ("X_TRAIN", "X_TEST", "X"),
        ("xtrain", "xtest", "x"),
        ("inputs", "inputs_val", "inputs"),
        ("inputs-training", "inputs-Validation", "inputs"),
        ("inputsTrain", "inputsDev", "inputs"),
        ("trn.inputs", "eval.inputs", "inputs"),
        ("train", "test", "inputs"),
        ("x", "xtest", "x"),
        ("train_Inputs", "testing_inputs", "Inputs"),
    ],
)
def test_a_split_in_any_spelling_is_no_training_data(how, train, test, key, tmp_path):
    if how == "folder" and train.lower() == test.lower():
        pytest.skip("one file")
    path = save(tmp_path, how, **{train: X, test: X[:7] + 1})
    assert np.array_equal(rows(Npz(path))[key], X) and np.array_equal(
        rows(Npz(path, "test"))[key], X[:7] + 1
    )
    assert Npz.has_split({"path": path, "test_fraction": 0})
    assert Npz(path).inventory == f"train: {train}; test: {test}"


@pytest.mark.parametrize(
    ("names", "split", "words"),
    [
        (
            "train_images test_pictures",
            "train",
            "no array to train on is the same but for its split; the arrays of",
        ),
        (
            "age test_score",
            "train",
            "no array to train on is the same .* are 'age', 'test_score'; name those to train",
        ),
        (
            "train_x x_train x_test",
            "train",
            "'train_x' and 'x_train' are the same array for training; the arrays of",
        ),
        ("x x_train x_test", "train", "'x' and 'x_train' are the same array for training"),
        ("x_train_val x_test", "train", "'x_train_val' may be either of two splits; the arrays of"),
        (
            "x_test y_val",
            "train",
            "has only 'x_test', 'y_val', nothing to train on; name those to train on in data.arg",
        ),
    ],
)
def test_ambiguous_arrays_are_refused_by_name(names, split, words, tmp_path):
    path = save(tmp_path, "stored", **dict.fromkeys(names.split(), X))
    with pytest.raises(UsageError, match=f"data.args.arrays: .*{words}"):
        Npz(path, split)
    first, *_ = names.split()
    assert len(Npz(path, arrays={"inputs": first}, test_fraction=0)) == 40  # named by the argument


def test_an_unread_evaluation_split_is_named(tmp_path):
    path = save(
        tmp_path,
        "stored",
        x_train=X,
        x_val=X[:3],
        x_test=X[:7],
        y_train=Y,
        y_val=Y[:3],
        y_test=Y[:7],
    )
    assert len(Npz(path, "test")) == 7 and len(Npz(path)) == 40
    assert (
        Npz(path).inventory
        == "train: x_train, y_train; test: x_test, y_test; not read: x_val, y_val"
    )
    chosen = Npz(path, arrays={"inputs": "x_val", "labels": "y_val"}, test_fraction=0)
    assert len(chosen) == 3
    only = save(tmp_path, "folder", x_test=X[:7], y_test=Y[:7])
    assert len(Npz(only, "test")) == 7


def test_a_split_without_labels_or_rows_is_named(tmp_path):
    path = save(
        tmp_path, "stored", inputs=X, labels=Y, inputs_test=X[:3], labels_test=np.full(3, -1)
    )
    assert len(Npz(path)) == 40
    with pytest.raises(
        UsageError,
        match=r"data: 'labels_test' of '.*npz', for its test split, has no labels: all are -1",
    ):
        Npz(path, "test")
    path = save(tmp_path, "folder", inputs=X, labels=Y, inputs_val=X[:0], labels_val=Y[:0])
    with pytest.raises(
        UsageError,
        match=r"^data: the data set is empty; .*'inputs_val' of '.*', for its test split",
    ):
        Npz(path, "test")


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
        (
            {},
            {"path": "nowhere.npz"},
            r"data.args.path: cannot read 'nowhere.npz' \(No such file or directory\)",
        ),
        (
            {},
            {"path": __file__},
            r"data.args.path: cannot read .* \(it is not a .npz file, or its end is missing\); give a",
        ),
        (
            {"x": X},
            {"arrays": {"inputs": "y"}},
            "data.args.arrays.inputs: .* has no array 'y'; its arrays: x",
        ),
        (
            {"x": X},
            {"arrays": {"inputs": 3}},
            "data.args.arrays.inputs: .* has no array 3; its arrays: x",
        ),
        (
            {"x": X, "y": Y, "x_test": X},
            {"split": "test"},
            "data.args.arrays.y: .* has no array 'y_test'",
        ),
        ({"x": X, "y": Y[1:]}, {}, "data: arrays differ in their number of examples"),
        ({"x": np.array([{}])}, {}, r"data.args.path: cannot read .* \(Python objects in it\)"),
        (
            {"x": X},
            {"test_fraction": 1.0},
            "data.args.test_fraction: 1.0 is not at least 0 and below 1",
        ),
        (
            {"x": X},
            {"test_fraction": 0.001, "split": "test"},
            "data.args.test_fraction: 0.001 of 40 rows: no test",
        ),
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
        with pytest.raises(
            UsageError, match=r"data.args.path: cannot read .*; give a .npz file of numbers"
        ):
            Npz(damaged)


def nothing(split="train"):
    return None if split == "test" else (X, Y)


def unlabeled(split="train"):
    return X[:5], np.full(5, -1) if split == "test" else Y[:5]


def test_an_empty_or_unlabeled_set_names_its_split():
    """So does the set of a function of the user's, which may have one label of -1."""
    sources = {
        "mine": nothing,
        "glue": unlabeled,
        "empty": lambda split: [],
        "some": (X[:2], np.array([-1, 0])),
    }
    for name, words in (
        ("mine", "eval.also.a: the test split of mine is None; return the examples"),
        (
            "glue",
            "eval.also.a: the test split of glue has no labels: all are -1; use another split",
        ),
        (
            "empty",
            r"eval.also.a: the data set is empty; give it at least one example \(the test split of empty\)",
        ),
    ):
        with pytest.raises(UsageError, match=f"^{words}"):
            read_set("eval.also.a", Target(name), "test", False, sources)
    for name in ("mine", "glue", "some"):
        assert len(read_set("data", Target(name), "train", False, sources)) > 1


def test_a_dict_of_splits_is_no_example():
    for splits in ({"train": X, "test": X}, {"xTrain": X, "xVal": X}):
        with pytest.raises(
            UsageError,
            match=r"data: a dict of several splits \('.*', '.*'\); give the examples of one",
        ):
            as_dataset(splits)
    assert len(as_dataset({"inputs": X, "test_score": X})) == 40


@pytest.mark.parametrize("key", ["data", "eval.data", "eval.also.small"])
def test_an_error_names_the_key_of_its_set(key, tmp_path):
    path = save(tmp_path, "stored", inputs=X[:0], labels=Y[:0])
    for fraction, words in {
        0.0: ": the data set is empty",
        2: ".args.test_fraction: 2 is not at least 0",
    }.items():
        target = Target("Npz", {"path": path, "split": "train", "test_fraction": fraction})
        with pytest.raises(UsageError, match=f"^{key}{words}"):
            read_set(key, target, "test", False, SOURCES)
