"""`jaxdp train DATA`: what is found decides the config, which is printed and trains."""

import io
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from PIL import Image

from cli_runs import ended, records
from launch import environment

pandas = pytest.importorskip("pandas")
RNG = np.random.default_rng(0)
ROWS = 600


def table(share=0.5):
    """Rows with a name each, of which `share` are of the class yes."""
    x = RNG.normal(size=(ROWS, 2))
    names = [f'row {i}, "called"\nso' for i in range(ROWS)]
    made = pandas.DataFrame({"a": x[:, 0], "Köln b": x[:, 1], "name": names, "same": 1})
    made[" Class "] = np.where(x[:, 0] > np.quantile(x[:, 0], 1 - share), "yes", "no")
    return made


def images():
    """{path in a folder of images: a PNG}, gray and of three channels, of two classes that differ in
    brightness."""
    made = {}
    for label, low in {"Bär": 0, "dark dog": 130}.items():
        for i in range(30):
            pixels = RNG.integers(low, low + 120, (20 + i, 50 - i, 3)).astype(np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).convert("L" if i % 3 else "RGB").save(file, "PNG")
            made[f"{label}/bild {i} ö.png"] = file.getvalue()
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder, kind):
    """Write data of a kind; return their path."""
    made = table()
    if kind == "semicolons.csv":
        made.to_csv(kind, sep=";", index=False)
    elif kind == "numbers.parquet":
        made["price"] = (200_000 + 50_000 * (made.a + made["Köln b"])).astype(int)
        made.drop(columns=" Class ").to_parquet(kind)
    elif kind == "arrays.npz":
        x = RNG.normal(size=(ROWS, 5, 4)).astype(np.float32)
        np.savez(
            kind,
            y_train=(x[:, 0, 0] > 0).astype(int),
            x_train=x,
            x_test=x,
            y_test=np.arange(ROWS) % 2,
        )
    elif kind == "medmnist.npz":
        x = {
            f"{s}_images": RNG.integers(0, 99, (200, 28, 28), np.uint8)
            for s in ("train", "val", "test")
        }
        for name in [*x]:
            labels = (np.arange(200) % 2).astype(np.uint8)[:, None]
            x[name] += 99 * labels[..., None]
            x[name.replace("images", "labels")] = labels
        np.savez(kind, **x)
    elif kind == "pets ü":
        for name, content in images().items():
            (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / kind / name).write_bytes(content)
    elif kind == "pets.zip":
        with zipfile.ZipFile(kind, "w") as archive:
            for name, content in images().items():
                archive.writestr(f"top/{name}", content)
    elif kind == "text.txt":
        (folder / kind).write_text("The quick brown fox jumps over the lazy dog. " * 200)
    elif kind == "tokens":
        (folder / kind).mkdir()
        (np.arange(9000) % 50).astype("<u2").tofile(folder / kind / "all.bin")
    return kind


KINDS = {  # the data set, the model, the metric, and what it is at least or at most
    "semicolons.csv": ("Table", "MLP", "accuracy", 0.9),
    "numbers.parquet": ("Table", "MLP", "loss", -0.1),
    "arrays.npz": ("Npz", "MLP", "train accuracy", 0.8),
    "medmnist.npz": ("MedMNIST", "CNN", "accuracy", 0.9),
    "pets ü": ("ImageFolder", "ResNet9", "train accuracy", 0.8),
    "pets.zip": ("ImageZip", "ResNet9", "train accuracy", 0.8),
    "text.txt": ("TextFile", "GPT", "accuracy", 0.3),
    "tokens": ("TokenFile", "GPT", "accuracy", 0.3),
}
SMALLER = {
    "ResNet9": ["--data.args.size", "32"],
    "GPT": ["--model.args.layers", "1", "--model.args.dim", "64", "--data.args.length", "32"],
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[pytest.mark.slow] * (kind in ("pets.zip", "tokens", "medmnist.npz"))
        )
        for kind in KINDS
    ],
)
def test_every_kind_of_data_is_learned(folder, kind):
    target, model, metric, bound = KINDS[kind]
    argv = ["--steps", "60", "--log.every", "20", *SMALLER.get(model, [])]
    said = ended("train", write(folder, kind), *argv).stdout
    assert f"target: {target}" in said and f"model: {{target: {model}" in said, said
    split, _, name = metric.rpartition(" ")
    found = records(folder / "runs" / kind.partition(".")[0], split or "final")[-1][name]
    assert found >= bound if bound > 0 else found <= -bound


def test_the_printed_config_trains_the_same(folder):
    """And the same command again is the same run."""
    argv = [write(folder, "semicolons.csv"), "--steps", "20"]
    said = ended("train", *argv).stdout
    printed = re.search(r"(?s)^# A first config.*?\n\n", said)[0]
    (folder / "mine.yaml").write_text(printed, encoding="utf-8")
    again = ended("train", "--config", "mine.yaml", "--steps", "20").stdout
    digests = {re.search(r"params_sha256 (\w+)", text)[1] for text in (said, again)}
    assert len(digests) == 1 and (folder / "runs" / "mine").is_dir()
    assert "label: ' Class '" in printed and "--data.args.label NAME" in printed
    assert "- a\n    - Köln b\n" in printed.encode().decode("unicode_escape").replace('"', "") or (
        "- a" in printed and "- name" not in printed and "- same" not in printed
    )
    assert "finished" in ended("train", *argv).stdout or "already" in ended("train", *argv).stdout


def test_uneven_classes_are_named(folder):
    table(0.03).to_csv("few.csv", index=False)
    said = ended("train", "few.csv", "--steps", "2").stdout
    assert "# Classes are uneven: the rarest has 18 of 600 examples" in said
    assert "macro_f1" in records("runs/few", "final")[-1]


def test_keys_of_the_command_line_decide(folder):
    """The label too, of which the model follows."""
    table().to_csv("rows.csv", index=False)
    said = ended(
        "train", "rows.csv", "--data.args.label", "a", "--steps", "3", "--batch_size", "32"
    ).stdout
    assert "MeanSquaredError" in said and "regression: true" in said
    assert len(records("runs/rows", "train")) == 1
    printed = ended("train", "rows.csv", "--print_config").stdout
    assert printed.startswith("seed: 0") and "label: ' Class '" in printed


def test_predictions_have_the_unit_of_the_column(folder):
    made = table()
    made["price"] = (200_000 + 50_000 * made.a).astype(int)
    made[["a", "Köln b", "price"]].to_csv("prices.csv", index=False)
    ended("train", "prices.csv", "--steps", "150")
    ended("predict", "--run_dir", "runs/prices", "--data", "prices.csv", "--output", "out.csv")
    out = pandas.read_csv("out.csv")
    assert np.abs(out.predicted - out.price).mean() < 10_000


def test_the_guess_needs_no_jax(folder):
    table().to_csv("rows.csv", index=False)
    code = "import sys, jaxdp.cli; jaxdp.cli.load(sys.argv[1:]); assert 'jax' not in sys.modules"
    argv = [sys.executable, "-c", code, "rows.csv"]
    subprocess.run(argv, check=True, timeout=120, env=environment({}, 1))


def test_what_is_no_data_is_one_line(folder):
    (folder / "empty").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a")
    (folder / "notes.docx").write_text("a")
    np.savez("one.npz", x=np.zeros(9))
    table()[["name", "same"]].to_csv("useless.csv", index=False)
    missing = table()
    missing.loc[7, "a"] = np.nan
    missing.to_csv("missing.csv", index=False)
    for argv, said in {
        ("note.docx",): "DATA: 'note.docx' does not exist; did you mean 'notes.docx'?",
        ("notes.docx",): "DATA: 'notes.docx' has no data of a kind that is known; give a table (",
        ("empty",): "DATA: 'empty' has no data of a kind that is known; give a table (",
        ("model",): "DATA: 'model' has a config, as a run or a model: --run_dir continues a run",
        ("texts",): "DATA: 'texts' is a folder of texts; make tokens of them",
        ("one.npz",): "DATA: 'one.npz' has only ['x']; inputs and labels are two arrays",
        (
            "useless.csv",
        ): "data.args.label: 'same' is no column of classes or numbers; choose one of []",
        ("missing.csv",): "data.args.columns: 'a' is nan in row 7; set data.args.fill",
        ("missing.csv", "--data.args.lable", "a"): "data.args.lable: Table takes no such argument",
        ("missing.csv", "--config", "c.yaml"): "command line: 'missing.csv' and --config c.yaml;",
    }.items():
        done = ended("train", *argv, code=2)
        assert done.stderr.startswith(f"jaxdp: {said}") and done.stderr.count("\n") == 1, (
            done.stderr
        )
        assert not (folder / "runs").exists()
