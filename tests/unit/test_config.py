"""A config is typed, complete and says what is wrong with it in one line."""

import dataclasses
import json
import os
import pathlib
import sys
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import check_refused
from cli_runs import DIGITS
from jaxdp.cli import help_of, load
from jaxdp.config import validation
from jaxdp.config.parsing import from_mapping
from jaxdp.errors import UsageError, nearest
from jaxdp.run import rundir

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_shipped_configs_load_and_say_how_they_are_run(file):
    config, path, _ = load(["--config", str(file)])
    assert rundir.directory_of(config, path) == pathlib.Path("runs") / file.stem
    head = file.read_text().split("\nmodel:")[0]
    assert f"configs/{file.name}" in head and ("easured" in head or "accuracy" in head)


def test_the_contract_of_keys_and_defaults():
    config, *_ = load(["--steps", "5", "--model.target", "MLP", "--data.target", "Digits"])
    flat = validation.flatten(config)
    want = {
        "seed": 0, "run_dir": None, "steps": 5, "epochs": None, "batch_size": 128, "microbatches": 8,
        "init_from": None, "model.target": "MLP", "model.args": {}, "data.target": "Digits", "data.args": {},
        "loss.target": "SoftmaxCrossEntropy", "optimizer.target": "adamw", "optimizer.lr": 1e-3,
        "optimizer.schedule": "cosine", "optimizer.warmup_steps": 0, "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": None, "parallel.backend": "pmap", "parallel.zero": 0, "parallel.reduction": "auto",
        "parallel.bucket_mb": 25.0, "parallel.shard_size": None, "parallel.accumulate": "auto",
        "precision.params": "float32", "precision.compute": "float32", "precision.reduce": "float32",
        "precision.matmul": "default", "precision.loss_scale": None, "eval.every": None, "log.every": 50,
        "profile.start": None, "profile.steps": 5, "checkpoint.every": None, "checkpoint.every_minutes": None,
        "checkpoint.asynchronous": True, "checkpoint.keep": 3, "checkpoint.keep_every": None,
        "checkpoint.best": None, "checkpoint.mode": None, "checkpoint.local": False, "resume.force": False,
        "watchdog.step_timeout": 600.0, "watchdog.straggler_factor": 2.0,
        "nonfinite.max_consecutive": 10, "spike.factor": None,
        "spike.decay": 0.98, "spike.after": 100, "spike.action": "skip", "spike.every": 100, "spike.max_rollbacks": 3,
    }  # fmt: skip
    assert {k: flat[k] for k in want} == want


def test_arguments_of_the_command_override_the_file():
    config, *_ = load(
        [
            *DIGITS,
            "--model.args.hidden",
            "[64, 32]",
            "--optimizer.lr",
            "3e-4",
            "--model.args.dropout=0.5",
        ]
    )
    assert config.model.args == {"hidden": [64, 32], "dropout": 0.5}
    assert config.optimizer.lr == 3e-4 and config.epochs == 60
    config, *_ = load([*DIGITS, "--steps", "7"])
    assert (config.steps, config.epochs) == (7, None)


def test_the_command_overrides_files_in_any_order(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "seed: 1\nsteps: 2\nmodel: {target: MLP, args: {hidden: [4]}}\ndata: {target: Digits}"
    )
    second.write_text("seed: 2\nbatch_size: 32\nmodel: {args: {dropout: 0.5}}")
    before, between = ["--optimizer.lr", "0.5", "--model.args.hidden=[8]"], ["--batch_size", "16"]
    config, path, _ = load(
        [*before, "--config", str(first), *between, f"--config={second}", "--epochs", "3"]
    )
    assert (config.optimizer.lr, config.batch_size, config.steps, config.epochs) == (
        0.5,
        16,
        None,
        3,
    )
    assert config.seed == 2 and path == str(second)  # of two files, the later one counts
    assert config.model.args["hidden"] == [8]


@pytest.mark.quick(30)
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--modle.target", "MLP"], ["'modle.target'", "did you mean 'model.target'"]),
        (["--optimizer.learning_rate", "1"], ["unknown key 'optimizer.learning_rate'"]),
        (["--parallel.bakend", "pjit"], ["did you mean 'parallel.backend'"]),
        (["--model.arg.width", "3"], ["unknown key 'model.arg.width'"]),
        (["--batch_size", "many"], ["batch_size: 'many' is not an integer"]),
        (
            ["--model", "MLP"],
            ["model: 'MLP' is not a mapping; set its keys, as in --model.target VALUE"],
        ),
        (
            ["--model", "null"],
            ["model: 'null' is not a mapping; set its keys, as in --model.target VALUE"],
        ),
        (
            ["--parallel=pmap"],
            ["parallel: 'pmap' is not a mapping; set its keys, as in --parallel.backend VALUE"],
        ),
        (["--epochs", "many"], ["epochs: 'many' is not a number or null"]),
        (["--log.every", "1.5"], ["log.every: '1.5' is not an integer"]),
        (
            ["--eval.every", "0 epochs"],
            ["eval.every: '0 epochs' is not an integer or epochs (such as 2 epochs) or null"],
        ),
        (["--checkpoint.every", "1.5 epochs"], ["checkpoint.every: '1.5 epochs' is not an int"]),
        (["--log.every", "1 epoch"], ["log.every: '1 epoch' is not an integer"]),
        (["--optimizer.lr", ".nan"], ["optimizer.lr: nan is not a finite number"]),
        (["--optimizer.lr", "1e999"], ["optimizer.lr: inf is not a finite number"]),
        (
            ["--optimizer.no_decay", "bias"],
            ["optimizer.no_decay: 'bias' is not a list of texts or auto"],
        ),
        (
            ["--optimizer.no_decay", "['(']"],
            ["optimizer.no_decay: '(' is not a regular expression"],
        ),
        (
            ["--batch_size", "99999999999999999999"],
            ["batch_size: 99999999999999999999 is too large"],
        ),
        (["--batch_size", "0"], ["batch_size: 0", "at least 1"]),
        (["--optimizer.lr", "-1"], ["optimizer.lr: -1.0"]),
        (["--optimizer.clip_norm", "0"], ["optimizer.clip_norm: 0.0", "greater than 0"]),
        (["--parallel.backend", "tpu"], ["parallel.backend: 'tpu' is not one of pmap, pjit"]),
        (["--parallel.zero", "4"], ["parallel.zero: 4 is too large; it must be at most 3"]),
        (
            ["--parallel.zero", "2"],
            ["parallel.zero: 2 does not work under pmap; set parallel.backend to pjit"],
        ),
        (
            ["--parallel.zero", "1", "--parallel.shard_size", "2"],
            ["parallel.shard_size: 2 does not work under pmap"],
        ),
        (["--parallel.shard_size", "2"], ["parallel.shard_size: 2 with zero: 0"]),
        (
            ["--parallel.zero", "1", "--parallel.rules", "{a: [null, x]}"],
            ["parallel.rules: 'a' has [None, 'x']"],
        ),
        (
            ["--parallel.zero", "1", "--parallel.rules", "{'(': [shard]}"],
            ["parallel.rules: '(' is not a regular exp"],
        ),
        (["--parallel.rules", "{a: [shard]}"], ["parallel.rules: {'a': ['shard']} with zero: 0"]),
        (["--parallel.remat", "some"], ["parallel.remat: 'some' is not one of auto, none, full"]),
        (
            ["--precision.loss_scale", "often"],
            ["precision.loss_scale: 'often' is not a number or dynamic or null"],
        ),
        (["--precision.loss_scale", "0"], ["precision.loss_scale: 0.0 must be greater than 0"]),
        (["--optimizer.ema", "1"], ["optimizer.ema: 1.0 must be below 1"]),
        (
            ["--nonfinite.max_consecutive", "0"],
            ["nonfinite.max_consecutive: 0 is too small", "at least 1"],
        ),
        (["--spike.factor", "1"], ["spike.factor: 1.0 must be greater than 1"]),
        (["--spike.factor", "-2"], ["spike.factor: -2.0 must be greater than 1"]),
        (["--spike.decay", "1"], ["spike.decay: 1.0 must be below 1"]),
        (["--spike.decay", "0"], ["spike.decay: 0.0 must be greater than 0"]),
        (["--spike.after", "0"], ["spike.after: 0 is too small", "at least 1"]),
        (["--spike.action", "stop"], ["spike.action: 'stop' is not one of skip, rollback"]),
        (["--spike.max_rollbacks", "-1"], ["spike.max_rollbacks: -1 is too small", "at least 0"]),
        (["--eval.ema", "true"], ["eval.ema: True, but no average is kept; set optimizer.ema"]),
        (["--eval.ema", "perhaps"], ["eval.ema: 'perhaps' is not true or false"]),
        (["--optimizer.frozen", "['[']"], ["optimizer.frozen: '[' is not a regular expression"]),
        (
            ["--optimizer.lr_scale", "{head: -1}"],
            ["optimizer.lr_scale: 'head' has -1.0; give a factor"],
        ),
        (
            ["--parallel.accumulator", "whole"],
            ["parallel.accumulator is now called parallel.gradient_buffer"],
        ),
        (
            ["--parallel.gradient_buffer", "whole"],
            ["'whole' is not one of sharded, replicated", "is now replicated"],
        ),
        (
            ["--parallel.accumulate", "loop"],
            ["'loop' is not one of auto, vmap, scan (loop is now scan)"],
        ),
        (
            ["--parallel.exact_group", "2"],
            ["parallel.exact_group: 2 with reduction: auto", "set reduction to exact"],
        ),
        (["--steps", "10", "--epochs", "2"], ["steps: 10", "epochs: 2", "one of the two"]),
        (["--seed", "-1"], ["seed: -1"]),
        (["--run_dir", ""], ["run_dir: '' is empty"]),
        (
            ["--run_dir", "gs://bucket/run"],
            ["run_dir: 'gs://bucket/run' is not in the file system; mount the store"],
        ),
        (["--init_from", " "], ["init_from: ' ' is empty"]),
        (
            ["--optimizer.warmup_steps", "2147483648"],
            ["optimizer.warmup_steps: 2147483648 is too large"],
        ),
        (["--config", "nowhere.yaml"], ["--config: no file 'nowhere.yaml'"]),
        (["--config"], ["--config: expected one argument; see", "train --help"]),
        (["extra"], ["extra"]),
        (["--precision.compute", "float64"], ["precision.params: 'float32'", "float64"]),
    ],
)
def test_bad_arguments_are_one_clear_line(argv, words):
    check_refused(argv, words)


@pytest.mark.parametrize(
    ("word", "known", "name"),
    [
        ("adamW", ["adam", "adamw"], "adamw"),
        ("mlp", ["LSTM", "MLP"], "MLP"),
        ("Cosin", ["cosine"], "cosine"),
        ("x", ["a"], ""),
    ],
)
def test_the_nearest_name_is_the_one_in_another_case(word, known, name):
    assert nearest(word, known) == name


def test_the_program_that_was_called_is_named(monkeypatch):
    for called, name in (
        ("train.py", "python train.py"),
        ("elsewhere/train.py", "jaxdp train"),
        ("bin/jaxdp", "jaxdp train"),
    ):
        monkeypatch.setattr(sys, "argv", [str(CONFIGS[0].parent.parent / called)])
        with pytest.raises(UsageError, match=rf"unknown key 'zzz'; `{name} --help` lists the keys"):
            load(["--zzz", "1"])
        assert help_of("train").startswith(
            f"usage: {name} --config FILE"
        ) and f"  {name} --config" in help_of("train")
        assert help_of("eval").startswith("usage: jaxdp eval")


def test_an_option_of_another_type_is_named():
    for verb, name in (("plan", "devices"), ("verify", "updates")):
        with pytest.raises(
            UsageError, match=f"^--{name}: 'x' is not an integer; see jaxdp {verb} --help$"
        ):
            load([*DIGITS, f"--{name}", "x"], verb)


@pytest.mark.parametrize(
    ("argv", "verb"), [([], "train"), (["--seed", "0"], "train"), (["--devices", "4"], "plan")]
)
def test_without_a_config_it_is_said_what_to_give(argv, verb):
    with pytest.raises(UsageError, match=f"^--config: no file given; e.g. jaxdp {verb} --config"):
        load(argv, verb)


def test_a_long_value_is_shortened():
    with pytest.raises(UsageError, match=r"^fit: eval.data: .* is not a mapping") as error:
        from_mapping({"eval": {"data": (np.zeros((500, 64)), np.zeros(500))}}, "fit")
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: {target: MLP}", ["unknown key 'modle'; did you mean 'model'"]),
        (
            "model: {target: MLP, arg: {a: 1}}",
            ["unknown key 'model.arg'; did you mean 'model.args'"],
        ),
        ("batch_size: [1, 2", ["not YAML"]),
        ("{" * 3000, ["not YAML"]),
        ("- a\n- b", ["mapping", "list"]),
        (
            "model: {target: MLP}\ndata: {target: Digits}\nsteps: 3\nbatch_size: {a: 1}",
            ["batch_size: {'a': 1} is not a schedule"],
        ),
        ("eval: null", ["eval: None is not a mapping"]),
        ("parallel: [pmap]", ["parallel: ['pmap'] is not a mapping"]),
        ("checkpoint: 5", ["checkpoint: 5 is not a mapping"]),
        ("loss: {args: null}", ["loss.args: None is not a mapping"]),
        ("optimizer: {no_decay: null}", ["optimizer.no_decay: None is not a list"]),
        ("steps: 3\nseed: 1\nsteps: 4", ["line 3: the key 'steps' appears twice"]),
        ("model: &m {args: *m}", ["not YAML: Circular reference detected"]),
        ("1: 2", ["'1' is not a key"]),
        (
            "optimizer.lr: 3\noptimizer: {target: sgd}",
            ["'optimizer.lr' is beside 'optimizer'; write lr inside of it"],
        ),
        (
            "model: {target: MLP}\ndata: {target: Digits}\nsteps: 3\noptimizer: {lr: .nan}",
            ["optimizer.lr: nan"],
        ),
        ("microbatches: none", ["microbatches", "none"]),
        ("steps: 3", ["model.target: missing"]),
        ("", ["mapping"]),
        ("model: MLP\nsteps: 3", ["model"]),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        load(["--config", str(file)])
    assert all(w in str(error.value) for w in words) and "\n" not in str(error.value)


def test_scalars_of_numpy_and_paths_are_as_in_a_file():
    values = {
        "steps": np.int64(3),
        "optimizer": {"lr": np.float32(0.5)},
        "run_dir": pathlib.Path("~/x"),
    }
    values |= {
        "model": {"target": "MLP", "args": {"hidden": [np.int32(8)]}},
        "data": {"target": "Digits"},
    }
    config = from_mapping(values, "fit")
    assert (config.steps, config.optimizer.lr, config.model.args) == (3, 0.5, {"hidden": [8]})
    assert config.run_dir == os.path.expanduser("~/x")
    with pytest.raises(UsageError, match=r"fit: 'optimizer.lr' is beside 'optimizer'"):
        from_mapping({"optimizer.lr": 0.1, **values}, "fit")


def test_every_field_says_what_it_decides():
    for key, value in {
        "seed": "numbers", "batch_size": "numbers", "microbatches": "numbers", "model.args.width": "numbers",
        "parallel.backend": "speed", "parallel.zero": "speed", "log.every": "speed", "run_dir": "speed",
        "precision.compute": "numbers", "optimizer.lr": "numbers", "eval.every": "speed",
        "eval.data.target": "speed", "eval.data.args.root": "speed", "eval.also.valid.args.root": "speed",
        "nonfinite.max_consecutive": "speed", "spike.factor": "numbers", "spike.max_rollbacks": "numbers",
        "spike.every": "numbers",
    }.items():  # fmt: skip
        assert validation.decides(key) == value, key
    assert {validation.decides(k) for k in validation.known_keys()} == {"numbers", "speed"}


def test_a_change_of_speed_is_no_change_of_numbers():
    before = dataclasses.asdict(load(DIGITS)[0])
    assert (
        validation.changed_numbers(
            before, load([*DIGITS, "--parallel.backend", "pjit", "--log.every", "7"])[0]
        )
        == []
    )
    for data in (
        ["--eval.data.target", "Digits"],
        ["--eval.data.target", "Npz", "--eval.data.args.path", "a.npz"],
    ):
        assert validation.changed_numbers(before, load([*DIGITS, *data])[0]) == []
    changed = validation.changed_numbers(
        before, load([*DIGITS, "--seed", "7", "--model.args.hidden", "[3]"])[0]
    )
    assert changed == ["seed: 0 -> 7", "model.args.hidden: [256, 256] -> [3]"]


@pytest.mark.parametrize(
    "optimizer", [{"target": "optax chain(scale_by_adam, scale)"}, {"schedule_steps": 9}]
)
def test_more_steps_are_no_change_if_rates_ignore_them(optimizer):
    """An Optax transformation has its own; its config has an unused cosine schedule."""
    base = {"model": {"target": "MLP"}, "data": {"target": "Digits"}, "optimizer": optimizer}
    before, after = (from_mapping({**base, "steps": steps}, "fit") for steps in (4, 8))
    assert validation.changed_numbers(dataclasses.asdict(before), after) == []


def test_a_schedule_of_the_steps_that_it_had_is_no_change():
    """A longer run that keeps the schedule of the run before; another length is named."""
    base = {"model": {"target": "MLP"}, "data": {"target": "Digits"}}
    before = dataclasses.asdict(from_mapping({**base, "steps": 4}, "fit"))

    def changed(length):
        more = {"steps": 8, "optimizer": {"schedule_steps": length}}
        return validation.changed_numbers(before, from_mapping({**base, **more}, "fit"))

    assert changed(4) == [] and changed(None) == ["steps: 4 -> 8"]
    assert changed(6) == ["optimizer.schedule_steps: None -> 6"]
    before["optimizer"]["schedule_steps"] = 3
    assert changed(4) == ["optimizer.schedule_steps: 3 -> 4"] and changed(3) == []


def test_a_tuple_is_the_list_that_a_checkpoint_has():
    args = {"hidden": (8,), "names": {1: (2, (3,))}}
    config = from_mapping(
        {"model": {"target": "Net", "args": args}, "data": {"target": "Digits"}, "steps": 1}, "fit"
    )
    saved = json.loads(json.dumps(dataclasses.asdict(config)))
    assert config.model.args == args and validation.changed_numbers(saved, config) == []


def test_the_order_of_lr_scale_is_compared():
    scales = [{"kernel": 0.1, ".*": 1.0}, {".*": 1.0, "kernel": 0.1}]
    before, after = (
        load([*DIGITS, "--optimizer.lr_scale", json.dumps(scale)])[0] for scale in scales
    )
    assert validation.changed_numbers(dataclasses.asdict(before), before) == []
    changed = validation.changed_numbers(dataclasses.asdict(before), after)
    assert changed == [
        "optimizer.lr_scale: [('kernel', 0.1), ('.*', 1.0)] -> [('.*', 1.0), ('kernel', 0.1)]"
    ]


@settings(max_examples=30)
@given(st.text(min_size=1, max_size=20))
def test_any_unknown_key_is_refused(key):
    free = [
        f"{known}."
        for known, hint in validation.known_keys().items()
        if typing.get_origin(hint) is dict
    ]
    if key not in validation.known_keys() and not key.startswith(tuple(free)):
        with pytest.raises(UsageError, match="unknown key"):
            validation.check_key(key, "test")


def test_the_readme_shows_the_config_that_is_shipped():
    readme = (CONFIGS[0].parent.parent / "README.md").read_text()
    assert pathlib.Path(DIGITS[1]).read_text() in readme
    commands = [line for line in readme.splitlines() if "--config configs/" in line]
    assert all(
        pathlib.Path(CONFIGS[0].parent.parent / line.split("--config ")[1].split()[0]).is_file()
        for line in commands
    )


def test_a_key_of_a_nested_dict_is_set_by_itself(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {target: MLP, args: {block: {dim: 8, heads: 2}}}\ndata: {target: Digits}\nsteps: 1\n"
    )
    argv = [
        "--config",
        str(file),
        "--model.args.block.dim",
        "64",
        "--model.args.block.rates=[0.5, 1e-3]",
    ]
    more = ["--model.args.new.deep.name", "a: b: c", "--model.args.width", "3", "--run_dir", "7"]
    config, *_ = load([*argv, *more])
    block = {"dim": 64, "heads": 2, "rates": [0.5, 1e-3]}
    assert config.model.args == {"block": block, "new": {"deep": {"name": "a: b: c"}}, "width": 3}
    assert config.run_dir == "7"
    with pytest.raises(
        UsageError,
        match=r"model.args.block.dim.x: model.args.block.dim is 8, which has no keys; set",
    ):
        load([*argv[:2], "--model.args.block.dim.x", "1"])
    with pytest.raises(UsageError, match=r"model.args.block.dim: no value given"):
        load([*argv[:2], "--model.args.block.dim"])
    with pytest.raises(UsageError, match=r"model.args.block.dim: no value given"):
        load([*argv[:2], "--model.args.block.dim", "--steps", "3"])


def test_yaml_may_repeat_itself(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "steps: 2\nmodel: {target: MLP, args: {hidden: &h [8, 8], more: *h, block: &b {a: 1}, other: {<<: *b, c: 2}}}\n"
        "data: {target: Digits}"
    )
    args = load(["--config", str(tmp_path / "run.yaml")])[0].model.args
    assert args == {"hidden": [8, 8], "more": [8, 8], "block": {"a": 1}, "other": {"a": 1, "c": 2}}


def test_a_removed_key_is_read_in_a_saved_config_only(tmp_path):
    """Each run of a former version has saved it, with its default."""
    file = tmp_path / "config.yaml"
    former = "parallel: {xla_preset: default, zero: 0}\nwatchdog: {slow_factor: null}\n"
    digits = (pathlib.Path(__file__).parents[2] / "configs" / "digits.yaml").read_text()
    file.write_text(digits + former)
    for argv in (["--parallel.xla_preset", "overlap"], ["--config", str(file)]):
        with pytest.raises(UsageError, match=r"no parallel\.xla_preset; set XLA_FLAGS"):
            load(argv, "train")
    (tmp_path / "env.json").write_text("{}")
    config, *_ = load(["--config", str(file)], "train")
    assert config.parallel.zero == 0
