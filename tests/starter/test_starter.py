"""`jaxdp train DATA`: what is found decides the config, which is printed and trains."""

import io
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import yaml
from PIL import Image

from cli_runs import ended, records
from jaxdp.cli import load
from jaxdp.data import TextFile
from jaxdp.errors import UsageError
from launch import environment

pandas = pytest.importorskip("pandas")
RNG = np.random.default_rng(0)
ROWS = 300
SPLITS = ("train", "val", "test")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table():
    """Rows with names and ids, a class, a fraction and a whole number."""
    x = RNG.normal(size=(ROWS, 2)).round(4)
    rows = pandas.DataFrame({"a": x[:, 0], "Köln b": x[:, 1], "number": np.arange(ROWS)})
    rows["name"] = [f'row {i}, "called"\nso' for i in range(ROWS)]
    rows["customer_id"] = np.arange(ROWS) // 2
    rows["label"] = np.where(x[:, 0] > 0, "yes", "no")
    rows["price"] = (200_000 + 50_000 * x[:, 0]).astype(int)
    return rows


def images():
    """{path in a folder of images: a PNG} of two classes, which differ in brightness."""
    files = {}
    for label, low in {"Bär": 0, "dark dog": 130}.items():
        for i in range(20):
            pixels = RNG.integers(low, low + 120, (20 + i, 50 - i, 3)).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            files[f"{label}/bild {i} ö.png"] = file.getvalue()
    return files


def write_images(folder):
    for name, content in images().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_zip(file):
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in images().items():
            archive.writestr(f"top/{name}", content)


def write_arrays(file):
    x = RNG.normal(size=(ROWS, 5, 4)).astype(np.float32)
    y = (x[:, 0, 0] > 0).astype(int)
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y)


def write_medmnist(file, labels):
    """A file of MedMNIST with the same labels in each split."""
    pixels = RNG.integers(0, 255, (len(labels), 28, 28), np.uint8)
    arrays = {f"{split}_images": pixels for split in SPLITS}
    np.savez(file, **arrays, **{f"{split}_labels": labels for split in SPLITS})


def write_texts(folder):
    for name in ("b.txt", "a/x.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"The quick brown fox {name}. " * 50)


SEVERAL = RNG.integers(0, 2, (40, 14))
PerExample = {
    "target": "PerExample",
    "args": {"function": "optax.losses.sigmoid_binary_cross_entropy"},
}
KINDS = {  # the name of data: (how they are written, the data set, the model, the loss)
    "rows.csv": (lambda file: table().to_csv(file, index=False), "Table", "MLP", "SoftmaxCrossEntropy"),
    "semi.csv": (
        lambda file: table().to_csv(file, index=False, sep=";"),
        "Table",
        "MLP",
        "SoftmaxCrossEntropy",
    ),
    "rows.parquet": (lambda file: table().to_parquet(file), "Table", "MLP", "SoftmaxCrossEntropy"),
    "arrays.npz": (write_arrays, "Npz", "MLP", "SoftmaxCrossEntropy"),
    "path.npz": (
        lambda file: write_medmnist(file, (np.arange(40) % 3).astype(np.uint8)[:, None]),
        "MedMNIST",
        "CNN",
        "SoftmaxCrossEntropy",
    ),
    "chest.npz": (
        lambda file: write_medmnist(file, SEVERAL.astype(np.uint8)),
        "MedMNIST",
        "CNN",
        "PerExample",
    ),
    "float.npz": (
        lambda file: np.savez(file, x=np.ones((40, 9, 9, 1), "f"), y=RNG.normal(size=(40, 1)).astype("f")),
        "Npz",
        "CNN",
        "MeanSquaredError",
    ),
    "pets ü": (write_images, "ImageFolder", "ResNet9", "SoftmaxCrossEntropy"),
    "pets.zip": (write_zip, "ImageZip", "ResNet9", "SoftmaxCrossEntropy"),
    "text.txt": (lambda file: file.write_text("The quick brown fox. " * 200), "TextFile", "GPT", "CausalLM"),
    "texts": (write_texts, "TextFile", "GPT", "CausalLM"),
    "lines.jsonl": (
        lambda file: file.write_text('{"text": "The quick brown fox."}\n' * 200),
        "Documents",
        "GPT",
        "CausalLM",
    ),
    "tokens.bin": (
        lambda file: (np.arange(9000) % 50).astype("<u2").tofile(file),
        "TokenFile",
        "GPT",
        "CausalLM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_data_decide_the_config(folder, name, capsys):
    write, data, model, loss = KINDS[name]
    write(folder / name)
    config, path, _ = load([name, "--batch_size", "32", "--log.every", "5"])
    printed = capsys.readouterr().out
    assert path == name and (config.data.target, config.model.target) == (data, model)
    assert config.loss.target == loss and config.batch_size == 32
    # What is printed is a config, with the keys of the command line.
    assert yaml.safe_load(printed)["batch_size"] == 32
    (folder / "mine.yaml").write_text(printed, encoding="utf-8")
    again, *_ = load(["--config", "mine.yaml"])
    assert again == config and again.log.every == 5


TRAINED = {  # the name of data: (more arguments, the split of the metric, the metric, at least this)
    "rows.csv": ((), "final", "accuracy", 0.9),
    "arrays.npz": ((), "train", "accuracy", 0.8),
    "path.npz": ((), "train", "accuracy", 0.3),
    "chest.npz": ((), "train", "loss", -0.75),
    "float.npz": ((), "train", "loss", -9),
    "pets ü": (("--data.args.size", "32"), "train", "accuracy", 0.7),
    "text.txt": (("--model.args.layers", "1", "--data.args.length", "32"), "train", "accuracy", 0.1),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in ("rows.csv", "chest.npz"))) for x in TRAINED],
)  # fmt: skip
def test_the_starter_config_learns(folder, name):
    KINDS[name][0](folder / name)
    more, split, metric, least = TRAINED[name]
    ended("train", *more, "--steps", "60", "--log.every", "20", name)
    value = records(folder / "runs" / name.partition(".")[0], split)[-1][metric]
    assert (value if least > 0 else -value) >= least


def test_the_printed_config_trains_the_same(folder):
    table().to_csv("rows.csv", index=False)
    first = ended("train", "rows.csv", "--steps", "5").stdout
    printed = re.search(r"(?s)^# A starter config.*?\n\n", first)[0]
    (folder / "mine.yaml").write_text(printed, encoding="utf-8")
    second = ended("train", "--config", "mine.yaml").stdout
    digests = {re.search(r"params_sha256 (\w+)", text)[1] for text in (first, second)}
    assert len(digests) == 1 and (folder / "runs" / "mine").is_dir()
    assert "finished" in ended("train", "rows.csv", "--steps", "5").stdout


def test_ids_and_names_are_left_out_by_name(folder, capsys):
    table().to_csv("rows.csv", index=False)
    config, *_ = load(["rows.csv"])
    assert config.data.args["columns"] == ["a", "Köln b", "price"]
    assert "values: ['customer_id', 'name', 'number']\n" in capsys.readouterr().out
    config, *_ = load(["rows.csv", "--data.args.columns", "[number]"])
    assert config.data.args["columns"] == ["number"]


def test_a_table_that_is_given_is_not_replaced(folder):
    table().to_csv("rows.csv", index=False)
    config, *_ = load(["rows.csv", "--data.args.table", "{train: rows.csv, test: rows.csv}"])
    assert config.data.args["table"] == {"train": "rows.csv", "test": "rows.csv"}


def test_a_label_of_many_numbers_is_a_regression(folder):
    table().to_csv("rows.csv", index=False)
    config, *_ = load(["rows.csv", "--data.args.label", "price"])
    assert config.loss.target == "MeanSquaredError" and config.data.args["regression"] is True
    assert config.model.args == {"num_classes": 1}
    with pytest.raises(UsageError, match="no column 'label', only"):
        table().drop(columns="label").to_csv("other.csv", index=False)
        load(["other.csv"])


def test_arrays_that_are_not_clear_are_named(folder):
    x = np.ones((40, 3), np.float32)
    np.savez("unclear.npz", foo=x, bar=np.arange(40) % 4)
    with pytest.raises(
        UsageError, match=r"data.args.arrays: .*'foo', 'bar'.* name the arrays as in"
    ):
        load(["unclear.npz"])
    config, *_ = load(["unclear.npz", "--data.args.arrays", "{inputs: foo, labels: bar}"])
    assert config.loss.target == "SoftmaxCrossEntropy"
    for labels in (x[:, 0], np.arange(40)[:, None]):
        np.savez("shape.npz", x=x, y=labels)
        with pytest.raises(
            UsageError, match=r"data.args.arrays: .* classes are integers \[example\]"
        ):
            load(["shape.npz"])


def test_several_labels_as_floats_have_a_sigmoid(folder):
    write_medmnist("chest.npz", SEVERAL.astype(np.float32))
    config, *_ = load(["chest.npz"])
    assert (config.data.target, config.loss.target) == ("Npz", "PerExample")
    assert config.model.args["num_classes"] == SEVERAL.shape[1]


def test_one_label_of_0_or_1_is_one_output(folder):
    """Two outputs would each learn the same label."""
    x = RNG.normal(size=(40, 5)).astype(np.float32)
    np.savez("one.npz", x=x, y=(x[:, :1] > 0).astype(np.int64))
    config, *_ = load(["one.npz"])
    assert config.loss.target == "PerExample" and config.model.args == {"num_classes": 1}


def test_a_label_of_many_texts_is_a_class(folder):
    """And no quantity, as one of many numbers is."""
    table().assign(label=[f"c{i % 100}" for i in range(ROWS)]).to_csv("many.csv", index=False)
    config, *_ = load(["many.csv"])
    assert config.data.args["regression"] is False
    assert config.loss.target == "SoftmaxCrossEntropy"


def test_a_config_that_is_printed_in_full_is_alone(folder):
    table().to_csv("rows.csv", index=False)
    assert ended("train", "rows.csv", "--print_config").stdout.startswith("seed: 0\n")


def test_epochs_replace_the_steps(folder):
    table().to_csv("rows.csv", index=False)
    config, *_ = load(["--epochs", "2", "rows.csv"])
    assert (config.epochs, config.steps) == (2, None)


def test_the_starter_needs_no_jax(folder):
    table().to_csv("rows.csv", index=False)
    code = "import sys, jaxdp.cli; jaxdp.cli.load(sys.argv[1:]); assert 'jax' not in sys.modules"
    argv = [sys.executable, "-c", code, "rows.csv"]
    subprocess.run(argv, check=True, timeout=120, env=environment({}, 1))


def test_what_is_no_data_is_one_line(folder):
    (folder / "empty").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "vocabulary.txt").write_text("a")
    (folder / "notes.docx").write_text("a")
    missing = table()
    missing.loc[7, "a"] = np.nan
    missing.to_csv("missing.csv", index=False)
    for argv, text in {
        ("notes.docx",): "DATA: 'notes.docx' is not data of a known kind; give a table (",
        ("none",): "DATA: 'none' is not data of a known kind; give a table (",
        ("empty",): "DATA: 'empty' is not data of a known kind; give a table (",
        ("model",): "DATA: 'model' is not data of a known kind; give a table (",
        ("missing.csv",): "data.args.columns: 'a' is nan in row 7; set data.args.fill",
        ("missing.csv", "--data.args.lable", "a"): "data.args.lable: Table takes no such argument",
        ("missing.csv", "other.csv"): "command line: 'other.csv' belongs to no option; write --con",
    }.items():
        done = ended("train", *argv, code=2)
        assert done.stderr.startswith(f"jaxdp: {text}"), done.stderr
        assert done.stderr.count("\n") == 1 and not (folder / "runs").exists()


def test_the_texts_of_a_folder_are_joined_in_order(folder):
    write_texts(folder / "texts")
    (folder / "texts" / "notes.md").write_text("not read")
    whole = "The quick brown fox a/x.txt. " * 50 + "\n" + "The quick brown fox b.txt. " * 50
    (folder / "joined.txt").write_text(whole)
    one, two = (TextFile(path, length=16) for path in ("texts", "joined.txt"))
    assert len(one) == len(two)
    for name, values in one.read(np.arange(len(one))).items():
        np.testing.assert_array_equal(values, two.read(np.arange(len(two)))[name])
    with pytest.raises(UsageError, match=r"data.args.length: 16, but there are 0 tokens"):
        (folder / "empty").mkdir()
        TextFile("empty", length=16)
