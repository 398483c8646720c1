"""Texts stay texts: YAML 1.2, the types of annotations, and files in UTF-8 whatever the locale."""

import dataclasses
import datetime
import math
import os
import pathlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from jaxdp.cli import load
from jaxdp.config import Config, values
from jaxdp.config.parsing import from_mapping
from jaxdp.config.validation import flatten
from jaxdp.errors import UsageError
from jaxdp.run import rundir
from jaxdp.targets import bind

ODD = [
    "null", "~", "1e3", "0x10", "0o17", "2026-01-01", "[", "{a", "- a", "é", "#", ": ", "yes", "no", "on", "Off", "y",
    "'", '"', "a\nb", "\n", " a", "a ", "", "!!python/x", "&a", "*a", "%", "true", "False", "1_0", "0123", "16:9", "<<",
    "1:30", "1.10", ".5", "5.", ".inf", ".nan", "=", "@a", "`a", "|", ">", "? a", "- ", "---", "...", "a: b", "a #b",
    "\t", "\x00", "\x85", "\u2028", "\ufeff", "\ud800", "🙂", "[1, 2]", "{a: 1}", "0b1", "+1", "-0", "1e-3", "NULL",
    "1" * 90,
]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(ODD), st.text(max_size=8), st.text("0123456789+-_.:exobnulyt~ ", max_size=6)
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS)
VALUES = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXTS, x, max_size=3), max_leaves=6
)
BASE = {"steps": 1, "model": {"target": "MLP"}, "data": {"target": "Digits"}}


def with_args(args: dict[str, Any]) -> Config:
    return from_mapping({**BASE, "data": {"target": "Digits", "args": args}}, "fit")


def in_file(tmp_path: pathlib.Path, text: str, *argv: str) -> Any:
    """Return the data's arguments of a config file with these, in YAML's flow style."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"steps: 1\nmodel: {{target: MLP}}\ndata: {{target: Digits, args: {text}}}\n",
        encoding="utf-8",
    )
    return load(["--config", str(file), *argv])[0].data.args


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types: 1, 1.0 and True differ."""
    if isinstance(a, dict):
        return isinstance(b, dict) and all(map(same, a.items(), b.items())) and len(a) == len(b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(values.plain(a)) is type(values.plain(b)) and a == b


@settings(max_examples=30, deadline=None)
@given(TEXTS)
@example("no")
def test_a_text_of_python_stays_what_it_is(text):
    config = with_args({"a": text, "b": [text], "c": {"d": text, text: 1}})
    assert same(config.data.args, {"a": text, "b": [text], "c": {"d": text, text: 1}})


@settings(deadline=None)
@given(st.dictionaries(TEXTS, VALUES))
@example({text: text for text in ODD})
def test_yaml_keeps_every_value(value):
    text = values.dump(value)
    assert same(values.load(text, "test"), value)
    assert same(values.load(values.dump(values.load(text, "test")), "test"), value)


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
@example({"a": "\ud800", "b": "2026-01-01", "c": {"1e3": "1e3"}})
@example({f"a{number}": text for number, text in enumerate(ODD)})
def test_a_run_directory_has_the_values_of_the_run(tmp_path_factory, args):
    # A number of an argument that is not finite is refused at a start.
    assume(all(math.isfinite(x) for x in flatten(args).values() if isinstance(x, float)))
    directory = tmp_path_factory.mktemp("run")
    config = dataclasses.replace(
        with_args(args), callbacks=[{"target": "a.B", "args": args}], init_from="~1e3"
    )
    rundir.write_config(directory, dataclasses.asdict(config))
    again = load(["--run_dir", str(directory)], "eval")[0]
    for name in ("data", "callbacks", "model", "optimizer"):
        before, after = (values.plain(dataclasses.asdict(x)[name]) for x in (config, again))
        assert same(before, after)
    text = (directory / "config.yaml").read_text(encoding="utf-8")
    args = yaml.safe_load(text)["data"]["args"]  # other programs read YAML 1.1
    assert all(
        isinstance(args[name], str)
        for name, value in config.data.args.items()
        if isinstance(value, str)
    )


@pytest.mark.parametrize(
    "text",
    ["no", "on", "Yes", "y", "0123", "-007", "16:9", "1:30", "1_0", "2026-01-01", "=", "0b1"],
)
def test_scalars_that_yaml_1_1_would_convert_are_texts(tmp_path, text):
    assert same(
        in_file(tmp_path, f"{{a: {text}, b: [{text}], c: {{{text}: 1}}}}"),
        {"a": text, "b": [text], "c": {text: 1}},
    )
    assert same(
        in_file(tmp_path, "{}", "--data.args.a", text, f"--data.args.b.c=[{text}]"),
        {"a": text, "b": {"c": [text]}},
    )


NUMBERS = {
    "1e-3": 1e-3,
    "-1e3": -1e3,
    "1.10": 1.1,
    ".5": 0.5,
    "5.": 5.0,
    "0x10": 16,
    "0o17": 15,
    "+3": 3,
    "-0": 0,
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_those_of_yaml_1_2(tmp_path, text, value):
    assert same(in_file(tmp_path, f"{{a: {text}}}")["a"], value)
    assert same(in_file(tmp_path, "{}", "--data.args.a", text)["a"], value)
    assert same(in_file(tmp_path, f"{{a: '{text}'}}")["a"], text)  # but in quotes it is a text
    assert same(in_file(tmp_path, "{}", "--data.args.a", f'"{text}"')["a"], text)


NO_ARGUMENTS = ("null", "~", "NULL", "true", "False", "\x00", "\ud800", ".inf", ".nan")


@pytest.mark.parametrize("text", [t for t in ODD if t not in NO_ARGUMENTS])
def test_a_text_on_the_command_line_is_itself(tmp_path, text):
    """Unless it is a number, null, true or false, or YAML in brackets or quotes."""
    got = in_file(tmp_path, "{}", f"--data.args.a={text}", f"--run_dir=x{text}")["a"]
    if text in NUMBERS or text in ("1e3", "+1", "1" * 90):
        assert isinstance(got, int | float)
    else:
        assert same(got, {"[1, 2]": [1, 2], "{a: 1}": {"a": 1}}.get(text, text))


def test_a_path_may_look_like_another_value(tmp_path):
    for text in ("2026", "1.10", "1e3", "0x10", "true", "no", "[a]", "{a", "0123", "'a", "-1e-3"):
        config = load(
            [
                "--steps=1",
                "--model.target=MLP",
                "--data.target=Digits",
                "--run_dir",
                text,
                "--init_from",
                text,
            ]
        )[0]
        assert (config.run_dir, config.init_from) == (text, text)
    file = tmp_path / "config.yaml"
    file.write_text(
        "run_dir: 2026\ninit_from: 1.10\nparallel: {reduction: 1e3}\noptimizer: {frozen: [2, 1.10]}\nsteps: 1"
    )
    config = load(["--config", str(file), "--model.target=MLP", "--data.target=Digits"])[0]
    assert (config.run_dir, config.init_from, config.parallel.reduction) == ("2026", "1.10", "1e3")
    assert config.optimizer.frozen == ["2", "1.10"]
    file.write_text("run_dir: true\nsteps: 1")
    with pytest.raises(UsageError, match=r"^run_dir: True is not a text or null$"):
        load(["--config", str(file), "--model.target=MLP", "--data.target=Digits"])


def reads(
    path: str = "", root: str | os.PathLike[str] = "", shift: float = 0.0, size: int | str = 0, flag: bool = False,
    names: Sequence[str] = (), also: "Mapping[str, str] | None" = None, kind: Literal["1", "2.0"] = "1", free=None,
) -> Any:  # fmt: skip
    return path, root, shift, size, flag, names, also, kind, free


def test_an_annotation_decides_on_an_unquoted_scalar(tmp_path):
    text = "{path: 1.10, root: 2026, shift: 1e-3, size: 0x10, names: [1, 2.50, a], "
    text += "also: {a: 1e3}, kind: 2.0, free: 1.10}"
    args = in_file(tmp_path, text)
    made = bind("data", reads, args)()
    assert same(
        made, ("1.10", "2026", 1e-3, 16, False, ["1", "2.50", "a"], {"a": "1e3"}, "2.0", 1.1)
    )
    assert [type(x) for x in made[2:4]] == [float, int] and type(made[-1]) is float
    assert args["path"].text == "1.10" and args["shift"].text == "1e-3"  # as they are saved
    assert same(bind("data", reads, {"shift": 2, "size": "all"})()[2:4], (2, "all"))
    shift = in_file(tmp_path, "{}", "--data.args.shift", "-1e-3", "--data.args.path", "2026")
    assert same(bind("data", reads, shift)()[:3], ("2026", "", -1e-3))


WRONG = {
    "{flag: no}": r"^data.args.flag: 'no' is a text, unlike reads's default, False$",
    "{path: true}": r"^data.args.path: True is not a text, which reads takes; put it in quotes$",
    "{shift: '1e-3'}": r"^data.args.shift: '1e-3' is a text, unlike reads's default, 0.0$",
    "{names: a}": r"^data.args.names: 'a' is not a list of texts, which reads takes$",
    "{kind: 3}": r"^data.args.kind: 3 is not one of 1, 2.0, which reads takes$",
}


@pytest.mark.parametrize(("args", "message"), WRONG.items())
def test_a_value_of_another_type_is_one_line(tmp_path, args, message):
    with pytest.raises(UsageError, match=message):
        bind("data", reads, in_file(tmp_path, args))


def test_nested_targets_are_read_by_their_annotations(tmp_path):
    text = "{sets: {a: {target: x, args: {path: 1.10, free: 1e-3}}}, weights: {a: 1e-1}, args: {path: 2.50}}"

    def mixture(sets: Mapping[str, Any], weights: Mapping[str, float], args: dict[str, Any]) -> Any:
        return sets, weights, args

    args = in_file(tmp_path, text)
    sets, weights, more = bind("data", mixture, args)()
    assert type(weights["a"]) is float
    assert (
        bind("data", reads, sets["a"]["args"])()[0] == "1.10"
        and bind("data", reads, more)()[0] == "2.50"
    )


def test_a_number_remembers_how_it_was_written():
    number = values.load("[1.10, 0x10]", "test")
    for copy in (
        number,
        pickle.loads(pickle.dumps(number)),
        dataclasses.asdict(with_args({"a": number}))["data"]["args"]["a"],
    ):
        assert [x.text for x in copy] == ["1.10", "0x10"] and same(copy, [1.1, 16])
    assert values.dump(number) == "- 1.10\n- 0x10\n"


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object:os.system x",
        "!!set {a}",
        "!!timestamp 2026-01-01",
        "!x y",
        "!!int x",
        "*a",
        "%",
    ],
)
def test_yaml_beyond_the_core_schema_is_one_line(tmp_path, tag):
    with pytest.raises(UsageError, match=r"config.yaml: not YAML: ") as error:
        in_file(tmp_path, f"{{a: {tag}}}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [b"x", {1, 2}, datetime.date(2026, 1, 1), object()])
def test_a_value_that_would_not_come_back_is_refused(value):
    with pytest.raises(
        UsageError,
        match=rf"^data.args.a: config.yaml cannot store a value of type {type(value).__name__}",
    ):
        with_args({"a": value})


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-be", "not UTF-8"),
        ("latin-1", "line 2 has byte 0xe9"),
        ("cp1252", "line 2 has byte 0xe9"),
    ],
)
def test_a_config_in_another_encoding_is_one_line(tmp_path, encoding, words):
    file = tmp_path / "config.yaml"
    file.write_bytes("steps: 1\nrun_dir: é\n".encode(encoding))
    with pytest.raises(UsageError, match=words) as error:
        load(["--config", str(file)])
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


def test_a_config_is_utf_8_with_or_without_a_mark(tmp_path):
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "config.yaml").write_bytes("# é\nrun_dir: é\nsteps: 1\n".encode(encoding))
        config = load(
            [
                "--config",
                str(tmp_path / "config.yaml"),
                "--model.target=MLP",
                "--data.target=Digits",
            ]
        )[0]
        assert config.run_dir == "é"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{a: &a {n: 5}, b: &b {<<: *a, n: 7}, c: {<<: *b}}", {"n": 7}),
        ("{a: &a {every: 5}, b: &b {<<: *a, every: 7}, c: {<<: *b}}", {"every": 7}),
        ("{c: {<<: [{every: 3}, {every: 4, more: 1}]}}", {"every": 3, "more": 1}),
        (
            "{a: &a {every: 1}, b: {x: &b {<<: *a, every: 2}}, c: {<<: *b, own: 1}}",
            {"every": 2, "own": 1},
        ),
        ("{a: &a {<<: *a, n: 1}, c: {<<: *a}}", {"n": 1}),
    ],
)
def test_of_merged_keys_the_own_then_the_earliest_counts(text, want):
    """PyYAML 6.0.4 takes another one where two keys' texts are, or are not, one object."""
    assert values.load(text, "x")["c"] == want


@pytest.mark.parametrize("text", ["{a: &a {n: 1, n: 2}, c: {<<: *a}}", "{c: {<<: {n: 1, n: 2}}}"])
def test_a_key_is_not_twice_in_what_is_merged(text):
    with pytest.raises(UsageError, match=r"the key 'n' appears twice"):
        values.load(text, "x")
