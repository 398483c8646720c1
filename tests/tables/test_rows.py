"""Tables as data: columns by name, classes by name, and new rows for `predict`."""

import decimal

import numpy as np
import pytest

import jaxdp
from cli_runs import ended
from jaxdp.data import Table
from jaxdp.errors import UsageError

pandas = pytest.importorskip("pandas")
RNG = np.random.default_rng(0)


def frame(rows=200):
    age = RNG.integers(18, 90, rows).astype(float)
    city = RNG.choice(["Rome", "Oslo", "Lima"], rows)
    income = RNG.normal(50_000, 9_000, rows)
    churn = np.where((age > 75) & (income > 45_000), "yes", "no")
    return pandas.DataFrame({"age": age, "city": city, "income": income, "churn": churn})


@pytest.mark.parametrize("kind", ["csv", "parquet", "DataFrame"])
def test_columns_and_classes_go_by_name(tmp_path, kind):
    table = frame()
    source = table if kind == "DataFrame" else tmp_path / f"table.{kind}"
    if kind == "csv":
        table.to_csv(source, index=False)
    elif kind == "parquet":
        table.to_parquet(source)
    made = Table(source, "churn")
    assert made.class_names == ["no", "yes"] and made.classes == 2 and made.input_shape == (5,)
    assert made.names == ["age", "city", "city", "city", "income"]
    assert made.values == {"city": ["Lima", "Oslo", "Rome"]}
    test = Table(source, "churn", split="test")
    assert (len(made), len(test)) == (180, 20) and not {*made.rows} & {*test.rows}
    batch = made.read(np.arange(len(made)))
    rows = table.iloc[made.rows]
    np.testing.assert_array_equal(batch["labels"], (rows.churn == "yes").to_numpy())
    inputs = batch["inputs"]
    np.testing.assert_array_equal(inputs[:, 3], rows.city == "Rome")
    np.testing.assert_allclose(inputs[:, [0, 4]].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(inputs[:, [0, 4]].std(0), 1, rtol=1e-5)
    assert inputs.dtype == np.float32 and {*np.unique(inputs[:, 1:4])} == {0, 1}
    np.testing.assert_array_equal(made.encode(rows), inputs)


def test_kinds_of_labels():
    table = frame()
    table["grade"], table["price"] = RNG.integers(3, 6, 200), RNG.normal(size=200)
    assert Table(table, "grade", ["age"]).class_names == ["3", "4", "5"]
    prices = Table(table, "price", ["age"])
    assert prices.arrays["labels"].dtype == np.float32 and not hasattr(prices, "classes")
    assert Table(table.assign(whole=1.0 * table.grade), "whole", ["age"]).classes == 3


def test_the_best_checkpoint_predicts_uneven_new_rows(tmp_path, monkeypatch):
    """In a few lines: a CSV with few of one class, balanced, the best F1, and new rows."""
    frame(2000).to_csv(tmp_path / "train.csv", index=False)
    new = frame(300)
    new.drop(columns="churn").to_csv(tmp_path / "new.csv", index=False)
    (tmp_path / "run.yaml").write_text(
        "model: {target: MLP, args: {hidden: [16]}}\n"
        "data:\n  target: Balanced\n"
        "  args: {data: {target: Table, args: {table: train.csv, label: churn}}}\n"
        "eval: {every: 50, data: {target: Table, args: {table: train.csv, label: churn, split: test}}}\n"
        "loss: {target: WeightedCrossEntropy, args: {positive: 'yes'}}\nsteps: 300\nbatch_size: 96\nmicrobatches: 8\n"
        "optimizer: {target: adam, lr: 1.0e-2}\ncheckpoint: {every: 50, best: f1}\n"
    )
    monkeypatch.chdir(tmp_path)
    ended("train", "--config", "run.yaml", "--run_dir", "run", code=0)
    run = jaxdp.load(tmp_path / "run", "best")
    outputs = run.predict(run.data.encode(tmp_path / "new.csv"))
    names = np.array(run.data.class_names)[outputs.argmax(-1)]
    found = (names == "yes") & (new.churn == "yes")
    assert run.final["f1"] > 0.8
    assert 2 * found.sum() / ((names == "yes").sum() + (new.churn == "yes").sum()) > 0.8


def two_tables(tmp_path, train, test):
    """A data set of two files. Returns a function of the split."""
    train.to_csv(tmp_path / "train.csv", index=False)
    test.to_parquet(tmp_path / "test.parquet")
    files = {"train": tmp_path / "train.csv", "test": tmp_path / "test.parquet"}
    return lambda split, **args: Table(files, **{"label": "churn", **args}, split=split)


def test_two_tables_are_one_data_set(tmp_path):
    """The test table is encoded and standardized as the training table, of which it may have a part."""
    rows = frame()
    later = frame(30).query("city != 'Lima' and churn == 'no'")
    made = two_tables(tmp_path, rows, later)
    train, test = made("train"), made("test", test_fraction=0.5)
    assert (len(train), len(test)) == (200, len(later)) and test.class_names == ["no", "yes"]
    assert train.encoding == test.encoding and train.inventory == test.inventory
    np.testing.assert_array_equal(train.rows, np.arange(200))
    examples = test.read(np.arange(len(test)))
    np.testing.assert_array_equal(examples["inputs"], train.encode(later))
    assert examples["labels"].dtype == np.int32 and not examples["labels"].any()
    means = [train.moments[name][0] for name in ("age", "income")]
    np.testing.assert_allclose(means, rows[["age", "income"]].mean(), rtol=1e-6)
    assert Table.has_split({"table": {"train": 1, "test": 2}, "test_fraction": 0})


def test_labels_of_two_tables_are_of_one_kind(tmp_path):
    """Of the training table's kind, however the test table spells them."""
    rows = frame().assign(grade=RNG.integers(9, 12, 200), price=RNG.normal(size=200))
    later = rows.assign(grade=rows.grade * 1.0, price=np.arange(200) % 2)
    made = two_tables(tmp_path, rows, later)
    grades = made("test", label="grade", columns=["age"])
    assert grades.class_names == ["9", "10", "11"]
    np.testing.assert_array_equal(grades.arrays["labels"], rows.grade - 9)
    prices = made("test", label="price", columns=["age"])
    assert prices.arrays["labels"].dtype == np.float32
    np.testing.assert_array_equal(prices.arrays["labels"][:, 0], np.arange(200) % 2)


@pytest.mark.parametrize(
    "change, args, said",
    [
        ({"churn": "maybe"}, {}, "data.args.table.test: 'churn' has 'maybe', which train lacks"),
        ({"city": "Bern"}, {}, "data.args.table.test: 'city' has 'Bern', which train lacks; add"),
        ({"grade": 0.5}, {"label": "grade"}, "table.test: 'grade' has '0.5', which train lacks"),
        ({"age": "old"}, {}, "'age' has texts, such as 'old', but numbers in training"),
        ({"age": np.nan}, {}, "data.args.columns: 'age' is nan in row 0"),
        ({"churn": None}, {}, "data.args.label: 'churn' has no value in row 0"),
    ],
)  # fmt: skip
def test_what_a_test_table_has_beyond_train_is_named(tmp_path, change, args, said):
    rows = frame().assign(grade=RNG.integers(3, 6, 200))
    made = two_tables(tmp_path, rows, rows.assign(**change))
    assert len(made("train", **args)) == 200
    with pytest.raises(UsageError, match=said):
        made("test", **args)


def test_a_text_that_is_missing_in_a_test_table_is_none_of_the_values(tmp_path):
    test = two_tables(tmp_path, frame(), frame().assign(city=None))("test")
    assert not test.read(np.arange(200))["inputs"][:, 1:4].any()


@pytest.mark.parametrize("table", [{"train": "a.csv"}, {"test": "a.csv"}, {"train": 1, "tset": 2}])
def test_two_tables_are_train_and_test(table):
    with pytest.raises(UsageError, match=r"data.args.table: \[.*\] are not two splits; give {tr"):
        Table(table, "churn")


def test_a_run_of_two_tables_is_evaluated_on_the_second(tmp_path, monkeypatch):
    two_tables(tmp_path, frame(), frame(31))
    (tmp_path / "run.yaml").write_text(
        "model: {target: MLP, args: {hidden: [8]}}\n"
        "data:\n  target: Table\n"
        "  args: {table: {train: train.csv, test: test.parquet}, label: churn}\n"
        "eval: {every: 10}\nsteps: 10\nbatch_size: 32\nmicrobatches: 8\n"
    )
    monkeypatch.chdir(tmp_path)
    ended("train", "--config", "run.yaml", "--run_dir", "run", code=0)
    run = jaxdp.load(tmp_path / "run")
    assert run.data.rows.tolist() == [*range(200)] and 0 <= run.final["accuracy"] * 31 <= 31
    assert run.final["accuracy"] * 31 == pytest.approx(round(run.final["accuracy"] * 31), abs=1e-4)


def test_missing_numbers_are_refused_or_filled():
    table = frame()
    table.loc[7, "age"] = np.nan
    with pytest.raises(
        UsageError, match=r"data.args.columns: 'age' is nan in row 7; set data.args.fill"
    ):
        Table(table, "churn")
    made = Table(table, "churn", fill=-1.0)
    mean, deviation = made.moments["age"]
    assert made.arrays["inputs"][7, 0] == np.float32((-1 - mean) / deviation)


@pytest.mark.parametrize(
    "args, said",
    [
        ({"label": "Churn"}, "data.args.label: the table has no column 'Churn', only age, city"),
        ({"label": "churn", "columns": ["Age"]}, "data.args.columns: the table has no column 'Age'"),
        ({"label": "churn", "columns": ["churn"]}, "data.args.columns: .'churn'.; name inputs, without"),
        ({"label": "churn", "columns": []}, "data.args.columns: ..; name inputs"),
        ({"label": "churn", "test_fraction": 1.0}, "data.args.test_fraction: 1.0 is not"),
        ({"label": "churn", "test_fraction": 0, "split": "test"}, "of 200 rows: no test split"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(args, said):
    with pytest.raises(UsageError, match=said):
        Table(frame(), **args)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"price": np.inf}, "data.args.label: 'price' has no value in row 3; remove the row"),
        ({"price": np.nan}, "data.args.label: 'price' has no value in row 3; remove the row"),
        (
            {"age": 1e300},
            "data.args.columns: 'age' is 1e.300 in row 3; set data.args.fill, or leave",
        ),
        ({"age": np.inf}, "data.args.columns: 'age' is inf in row 3; set data.args.fill"),
    ],
)
def test_numbers_that_are_none_in_float32(change, said):
    table = frame().assign(price=RNG.normal(size=200))
    [(name, value)] = change.items()
    table.loc[3, name] = value
    with pytest.raises(UsageError, match=said):
        Table(table, "price")


def test_two_columns_of_a_name_are_refused():
    """Else the names of the columns would be rows."""
    table = frame()
    for name in ("age", "churn"):
        with pytest.raises(
            UsageError, match=f"data.args.table: two columns are called '{name}'; ren"
        ):
            Table(pandas.concat([table, table[[name]]], axis=1), "churn")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_two_columns_of_a_name_in_a_file_are_refused(tmp_path, separator):
    """The second would be called age.1, as an input: that of a label gives the label away."""
    (tmp_path / "two.csv").write_text(
        "age,churn,churn\n1,no,no\n2,yes,yes\n".replace(",", separator)
    )
    with pytest.raises(
        UsageError, match=r"data.args.table: .*two.csv' cannot be read: Duplicate na"
    ):
        Table(tmp_path / "two.csv", "churn")


def test_names_are_read_as_they_are_written(tmp_path):
    (tmp_path / "odd.csv").write_text('NA,"a\nb",,1,y\n1,2,3,4,no\n2,3,4,5,yes\n')
    assert Table(tmp_path / "odd.csv", "y", test_fraction=0).columns == ["NA", "a\nb", "", "1"]


def test_a_column_of_lists_is_refused():
    for values in ([[1, 2]] * 200, [None, [1]] * 100):
        table = frame().assign(several=values)
        said = r"columns: 'several' is object; make numbers of it, or"
        with pytest.raises(UsageError, match=said):
            Table(table, "churn")
    assert len(Table(table, "churn", ["age"])) == 180


def test_the_classes_are_counted(tmp_path):
    table = frame()
    table.loc[:1, "churn"] = "Yes"
    assert "label churn: " in (text := Table(table, "churn").inventory) and "2 of Yes" in text


def test_a_text_that_training_lacks_is_not_encoded():
    made = Table(frame(), "churn")
    with pytest.raises(UsageError, match="encode: 'city' has 'Bern', which train lacks; add a row"):
        made.encode(frame().assign(city="Bern"))


DATES = pandas.date_range("2020", periods=200)


@pytest.mark.parametrize(
    "values",
    [DATES, DATES.date, np.arange(200) * 1j, [decimal.Decimal(1)] * 200],
)
def test_dates_and_complex_numbers_are_no_texts(values):
    with pytest.raises(
        UsageError, match=r"data.args.columns: 'when' is .*; make numbers of it, or"
    ):
        Table(frame().assign(when=values), "churn")
    with pytest.raises(UsageError, match=r"'when' is .*; make numbers of it"):
        Table(frame().assign(when=values), "when")


def test_a_word_among_numbers_is_seen(tmp_path):
    """Its values are texts, each of one spelling, however long the file is."""
    rows = [f"{i % 7}.50,{i % 2}\n" for i in range(300_000)]
    (tmp_path / "long.csv").write_text("x,y\n" + "".join(rows) + "none,1\n")
    made = Table(tmp_path / "long.csv", "y")
    assert [*made.values["x"]][:2] == ["0.50", "1.50"] and 7 <= len(made.values["x"]) <= 8
    assert (
        made.inventory
        == f"1 columns, {len(made.names)} inputs; label y: 150,001 of 1, 150,000 of 0, {len(made.names)} values of x"
    )


def test_large_numbers_are_standardized():
    table = frame().assign(income=1e30 * RNG.normal(size=200))
    made = Table(table, "churn", ["income"])
    scaled = made.read(np.arange(180))["inputs"]
    assert scaled.dtype == np.float32
    np.testing.assert_allclose([scaled.mean(), scaled.std()], [0, 1], atol=1e-5)


def test_numbers_that_differ_by_less_than_float32_are_told_apart():
    """Times of a minute, in seconds since 1970."""
    seconds = 1.7e9 + RNG.uniform(0, 60, 200)
    made = Table(frame().assign(time=seconds), "churn", ["time"], test_fraction=0)
    expected = (seconds - seconds.mean()) / seconds.std()
    np.testing.assert_allclose(made.arrays["inputs"][:, 0], expected, atol=1e-5)


def test_a_text_stays_a_text_in_any_other_file(tmp_path):
    """However few rows the file has: alone, 007 would be the number 7."""
    train = pandas.DataFrame({"code": ["007", "7", "A1"] * 9, "y": ["a", "b", "c"] * 9})
    train.to_csv(tmp_path / "train.csv", index=False)
    (tmp_path / "test.csv").write_text("code,y\n007,a\n")
    files = {"train": tmp_path / "train.csv", "test": tmp_path / "test.csv"}
    made = Table(files, "y", split="test")
    assert made.values == {"code": ["007", "7", "A1"]}
    assert made.arrays["inputs"].tolist() == [[1, 0, 0]]
    assert made.encode(tmp_path / "test.csv").tolist() == [[1, 0, 0]]
    (tmp_path / "odd.csv").write_text("code\n07\n")
    with pytest.raises(UsageError, match="encode: 'code' has '07', which train lacks"):
        made.encode(tmp_path / "odd.csv")


def test_rows_of_more_fields_than_the_header_are_refused(tmp_path):
    """Their first field would be no column, and each other one that of its neighbour."""
    (tmp_path / "long.csv").write_text("a,y\n1,2,no\n3,4,yes\n")
    with pytest.raises(UsageError, match=r"cannot be read: Length of header .* does not match"):
        Table(tmp_path / "long.csv", "y")
    (tmp_path / "one.csv").write_text("a,y\n1,no\n3,yes,4\n")
    with pytest.raises(UsageError, match=r"cannot be read: .*Expected 2 fields in line 3, saw 3"):
        Table(tmp_path / "one.csv", "y")
    (tmp_path / "comma.csv").write_text("a,y\n1,no,\n3,yes,\n")  # nothing is behind it
    made = Table(tmp_path / "comma.csv", "y", test_fraction=0)
    assert made.columns == ["a"] and made.class_names == ["no", "yes"]


def test_a_whole_number_beyond_an_integer_is_no_class():
    labels = Table(frame().assign(price=1e19 * (np.arange(200) % 3)), "price", ["age"])
    assert not hasattr(labels, "classes") and labels.arrays["labels"].max() == np.float32(2e19)


def test_files_that_are_no_tables(tmp_path):
    (tmp_path / "empty.csv").write_text("a,b\n")
    (tmp_path / "bad.parquet").write_text("no parquet")
    for name, said in {
        "none.csv": "cannot be read: .*No such file",
        "empty.csv": "has no rows",
        "bad.parquet": "cannot be read",
    }.items():
        with pytest.raises(UsageError, match=f"data.args.table: '.*{name}' {said}"):
            Table(tmp_path / name, "b")
    table = frame()
    table.loc[3, "churn"] = None
    with pytest.raises(UsageError, match=r"data.args.label: 'churn' has no value in row 3"):
        Table(table, "churn")
    with pytest.raises(
        UsageError, match=r"'age' has texts, such as 'old', but numbers in training"
    ):
        Table(frame(), "churn").encode(frame().assign(age="old"))
    wide = pandas.DataFrame(np.zeros((4, 3000)), columns=[f"c{i}" for i in range(3000)])
    with pytest.raises(UsageError, match=r"has no column 'label', only c0, .* and 2,992 more"):
        Table(wide, "label")


@pytest.mark.parametrize("change", [{"age": 7.0}, {"city": "Bern"}])
def test_an_evaluation_table_of_other_values_is_refused(tmp_path, change):
    """It would be encoded and standardized by its own rows."""
    rows = frame()
    rows.to_csv(tmp_path / "train.csv", index=False)
    rows.assign(**change).to_csv(tmp_path / "test.csv", index=False)
    data = {"target": "Table", "args": {"table": str(tmp_path / "train.csv"), "label": "churn"}}
    other = {**data, "args": {**data["args"], "table": str(tmp_path / "test.csv")}}
    settings = {"steps": 1, "batch_size": 32}
    with pytest.raises(UsageError, match=r"eval\.data: it encodes .*put all rows into one table"):
        jaxdp.fit("MLP", data, "SoftmaxCrossEntropy", eval_data=other, **settings)
    jaxdp.fit("MLP", data, "SoftmaxCrossEntropy", eval_data=data, **settings)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_regression_is_standardized_and_predicted_in_its_unit(tmp_path, separator):
    rng = np.random.default_rng(0)
    sizes = rng.uniform(50, 200, 300)
    prices = np.round(3000 * sizes + 1000)  # whole numbers of any size
    rows = [f"{size:.2f}{separator}{price:.0f}" for size, price in zip(sizes, prices)]
    table = tmp_path / "houses.csv"
    table.write_text("\n".join([f"size{separator}price", *rows]))
    data = Table(table, "price", regression=True)
    labels = data.read(np.arange(len(data)))["labels"]
    assert data.columns == ["size"] and labels.dtype == np.float32
    assert abs(labels.mean()) < 1e-5 and abs(labels.std() - 1) < 1e-5
    everyone = Table(table, "price", regression=True, test_fraction=0)
    labels = everyone.read(np.arange(len(everyone)))["labels"]
    np.testing.assert_allclose(
        labels[:, 0] * everyone.scale + everyone.center, prices, rtol=1e-5, atol=1
    )


def test_texts_are_no_labels_of_a_regression(tmp_path):
    table = tmp_path / "kinds.csv"
    table.write_text("size,kind\n1,a\n2,b\n")
    with pytest.raises(UsageError, match=r"'kind' has texts, such as 'a'"):
        Table(table, "kind", regression=True)
