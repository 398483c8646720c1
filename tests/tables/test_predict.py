"""`jaxdp predict`: rows of a table, with the class and its probability."""

import re

import numpy as np
import pytest

from cli_runs import ended

pandas = pytest.importorskip("pandas")
CONFIG = """
model: {target: MLP, args: {hidden: [8]}}
data: {target: Table, args: {table: train.csv, label: LABEL}}
steps: 40
batch_size: 80
optimizer: {target: adam, lr: 2.0e-2}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    table = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1]})
    table["kind"], table["price"] = np.where(x[:, 0] > 0, "up", "down"), 0.5 + x.sum(1) / 3
    table.to_csv(tmp_path / "train.csv", index=False)
    table[["a", "b"]].head(30).to_csv(tmp_path / "new.csv", index=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_classes_and_their_probabilities(folder):
    text = CONFIG.replace("LABEL", "kind, columns: [a, b]")
    (folder / "run.yaml").write_text(text)
    ended("train", "--config", "run.yaml", "--run_dir", "run")
    words = ["predict", "--run_dir", "run", "--data", "new.csv", "--output"]
    said = ended(*words, "out.csv").stdout
    assert re.search(
        r"30 rows of update 40: \d+ (up|down), \d+ (up|down); written to out.csv", said
    )
    out = pandas.read_csv(folder / "out.csv")
    assert [*out.columns] == ["a", "b", "predicted", "p_down", "p_up"]
    assert (out.predicted == np.where(out.p_up > 0.5, "up", "down")).all()
    np.testing.assert_allclose(out.p_up + out.p_down, 1)
    assert ((out.predicted == "up") == (out.a > 0)).mean() > 0.9
    ended(*words, "out.parquet")
    assert len(pandas.read_parquet(folder / "out.parquet")) == 30
    for more, said in {
        ("--output", "none/out.csv"): "--output: 'none/out.csv' cannot be written",
        ("--output", "train.csv"): "--output: 'train.csv' cannot be written (it exists); choose",
        ("--data", "none.csv"): "--data: 'none.csv' cannot be read",
        ("--step", "7"): "step: 7 is not in",
        ("--run_dir", ""): "--run_dir: missing",
    }.items():
        assert said in ended(*words, "o.csv", *more, code=2).stderr


def test_rows_that_would_be_wrong_are_refused(folder):
    """A text that training lacks, and columns that the output would replace."""
    table = pandas.read_csv("train.csv")
    (folder / "run.yaml").write_text(CONFIG.replace("LABEL", "city, columns: [kind, a]"))
    table.assign(city=np.where(table.b > 0, "Oslo", "Rome")).to_csv("train.csv", index=False)
    ended("train", "--config", "run.yaml", "--run_dir", "run")
    for change, said in {
        (
            "kind",
            "side",
        ): "--data: 'kind' has 'side', which train lacks; add a row with it to train",
        ("predicted", 1): "--data: it has a column 'predicted', as the output will; rename it",
        ("p_Rome", 1): "--data: it has a column 'p_Rome', as the output will; rename it",
    }.items():
        table.assign(**dict([change])).to_csv("new.csv", index=False)
        words = ["predict", "--run_dir", "run", "--data", "new.csv", "--output", "out.csv"]
        assert said in ended(*words, code=2).stderr and not (folder / "out.csv").exists()


def test_a_regression(folder):
    text = CONFIG.replace("LABEL", "price, columns: [a, b]").replace("[8]}", "[8], num_classes: 1}")
    (folder / "run.yaml").write_text(text + "loss: {target: MeanSquaredError}\n")
    ended("train", "--config", "run.yaml", "--run_dir", "run")
    ended("predict", "--run_dir", "run", "--data", "new.csv", "--output", "out.csv")
    out = pandas.read_csv(folder / "out.csv")
    assert np.corrcoef(out.predicted, out.a + out.b)[0, 1] > 0.9


def test_a_run_without_a_table_is_refused(folder):
    (folder / "run.yaml").write_text(
        "model: {target: MLP, args: {hidden: [8]}}\ndata: {target: Digits}\nsteps: 1\nbatch_size: 80\n"
    )
    ended("train", "--config", "run.yaml", "--run_dir", "run")
    done = ended("predict", "--run_dir", "run", "--data", "new.csv", code=2)
    assert "was not trained on a Table; in Python" in done.stderr
