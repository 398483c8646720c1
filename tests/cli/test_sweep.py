"""`jaxdp sweep`: a grid or a sample of runs, each made once, whatever ends the command."""

import collections
import csv
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from cli_runs import DIGITS, ended, records
from jaxdp.errors import UsageError
from jaxdp.process import environment
from jaxdp.report.read import read_run
from jaxdp.report.table import ranked, table
from jaxdp.run import rundir
from jaxdp.sweep.sweep import (
    array_part,
    make_slots,
    make_trials,
    name_of,
    split_arguments,
    split_values,
)
from launch import ROOT

SMALL = [*DIGITS, "--epochs", "null", "--log.every", "5", "--eval.every", "100"]


def trials(*argv, directory="runs/x"):
    options, fixed, swept = split_arguments(
        [*SMALL, "--steps", "5", "--run_dir", str(directory), *argv]
    )
    return make_trials(options, fixed, swept)


def test_a_grid_has_every_combination_once():
    made = trials(
        "--optimizer.lr", "1e-3,3e-3,1e-3", "--seed=0,1", "--model.args.hidden", "[8, 8],[16]"
    )
    assert len(made) == 8 == len({trial.directory for trial in made})
    configs = {
        (t.config.optimizer.lr, t.config.seed, tuple(t.config.model.args["hidden"])) for t in made
    }
    assert configs == {
        (lr, seed, hidden) for lr in (1e-3, 3e-3) for seed in (0, 1) for hidden in ((8, 8), (16,))
    }
    assert made[0].directory.name == "optimizer.lr=1e-3,seed=0,model.args.hidden=8_8"
    assert all(f"--run_dir={trial.directory}" == trial.arguments[-1] for trial in made)
    assert len(name_of({"model.args.hidden": "1" * 300})) < 255


def test_quotes_around_a_comma_are_not_part_of_a_value():
    made = trials("--init_from", "\"a,b\",'c',it's", "--compilation_cache", '"x,y"')
    assert [(t.config.init_from, t.config.compilation_cache) for t in made] == [
        ("a,b", "x,y"), ("'c'", "x,y"), ("it's", "x,y"),  # the second as in `train`
    ]  # fmt: skip
    assert split_values("k", '["a","b"],"a" + "b"') == ['["a","b"]', '"a" + "b"']


@pytest.mark.slow
def test_a_larger_sample_contains_the_smaller_one():
    keys = ["--optimizer.lr", "1e-3,2e-3,3e-3", "--seed", "0,1"]
    few, more, other, all_ = (
        [trial.directory.name for trial in trials(*keys, "--sample", n, "--sample_seed", seed)]
        for n, seed in (("2", "0"), ("4", "0"), ("4", "1"), ("99", "0"))
    )
    assert len(few) == 2 and len(more) == 4 and more[:2] == few and other != more
    assert len(set(all_)) == 6 and all_[:4] == more


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seed", "1"], "sweep: no key has several values; give one"),
        (
            ["--optimizer.lrr", "1,2"],
            "command line: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?",
        ),
        (["--optimizer.lr", "1e-3,fast"], "optimizer.lr: 'fast' is not a number"),
        (["--batch_size", "8,0"], "batch_size: 0 is too small"),
        (["--seed", "0,,1"], "seed: '0,,1' has an empty value"),
        (["--seed"], "seed: no value given"),
        (["--seed", "0,1", "2"], "command line: '2' belongs to no option"),
        (["--seed", "0,1", "--jobs", "all"], "--jobs: 'all' is not an integer"),
        (["--seed", "0,1", "--jobs", "0"], "--jobs: 0 is too small; it must be at least 1"),
        (
            ["--seed", "0,1", "--seed", "7"],
            "seed: given twice; give it once, with commas between several values",
        ),
        (["--seed", "7", "--seed=0,1"], "seed: given twice"),
        (["--seed", "0,1", "--jobs", "1", "--jobs", "2"], "jobs: given twice"),
        (["--loss.target", "a:b,a_b"], "sweep: two runs have the name 'loss.target=a_b'"),
    ],
)
def test_bad_input_is_one_line_before_any_run(argv, words, tmp_path):
    done = ended("sweep", *SMALL, "--steps", "5", "--run_dir", tmp_path / "s", *argv, code=2)
    assert (
        done.stderr.startswith(f"jaxdp: {words}")
        and len(done.stderr.splitlines()) == 1
        and not done.stdout
    )
    assert not (tmp_path / "s").exists()


def test_a_directory_that_cannot_be_made_is_one_line():
    done = ended("sweep", *SMALL, "--steps", "5", "--run_dir", "/proc/x", "--seed", "0,1", code=2)
    assert (
        done.stderr.startswith("jaxdp: run_dir: cannot write in '/proc/x': ")
        and done.stderr.count("\n") == 1
    )


def test_the_tasks_of_a_slurm_array_divide_the_runs():
    array = {
        "SLURM_ARRAY_TASK_MIN": "1",
        "SLURM_ARRAY_TASK_STEP": "2",
        "SLURM_ARRAY_TASK_COUNT": "3",
    }
    parts = [
        list(range(8))[array_part({**array, "SLURM_ARRAY_TASK_ID": i})] for i in ("1", "3", "5")
    ]
    assert sorted(i for part in parts for i in part) == list(range(8)) and max(map(len, parts)) == 3
    assert list(range(8))[array_part({})] == list(range(8))
    for task in ("2", "7", "x"):
        with pytest.raises(UsageError, match="is not a task of a Slurm array"):
            array_part({**array, "SLURM_ARRAY_TASK_ID": task})


def test_a_run_with_a_damaged_config_is_not_finished(tmp_path):
    [trial, _] = trials("--seed", "0,1", directory=tmp_path)
    trial.directory.mkdir()
    for text in ("a: b: c", "", "[1]"):
        (trial.directory / "config.yaml").write_text(text)
        assert not trial.is_finished()


@pytest.mark.parametrize("changed", [("--data.args.path", "b.npz"), ("--eval.ema", "true")])
def test_a_run_on_other_data_is_not_finished(tmp_path, changed):
    fixed = ("--seed", "0,1", "--optimizer.ema", "0.9", "--optimizer.schedule", "constant")
    [trial, _], [other, _] = (
        trials(*fixed, directory=tmp_path),
        trials(*fixed, *changed, directory=tmp_path),
    )
    trial.directory.mkdir()
    rundir.write_config(trial.directory, dataclasses.asdict(trial.config))
    assert not trial.is_finished()
    (trial.directory / "metrics.jsonl").write_text('{"step": 5, "split": "final"}\n')
    assert trial.is_finished() and not other.is_finished()


def test_runs_at_once_share_no_gpu(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert make_slots(None, None, 100) == [{}] * cores and make_slots(None, None, 1) == make_slots(
        1, None, 5
    ) == [{}]
    monkeypatch.setattr(environment, "gpu_count", lambda: 4)

    def visible(*args):
        return [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(*args)]

    assert visible(None, None, 9) == ["0", "1", "2", "3"] and visible(None, 2, 9) == ["0,1", "2,3"]
    assert visible(1, None, 9) == ["0,1,2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert visible(None, None, 9) == ["3", "1"]
    with pytest.raises(UsageError, match=r"--jobs: 3 runs on 1 GPUs each, but there are 2"):
        make_slots(3, 1, 9)


def make_run(directory, lr, loss, accuracy, **more):
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(f"optimizer: {{lr: {lr}}}\nrun_dir: {directory}\n")
    (directory / "env.json").write_text("{}")
    final = {"step": 5, "split": "final", "loss": loss, "accuracy": accuracy, "time": 1.0, **more}
    (directory / "metrics.jsonl").write_text(json.dumps(final) + "\n")
    return read_run(directory)


def test_the_table_is_sorted_by_a_metric(tmp_path):
    cases = {"a": (0.1, 0.5, 0.8), "b": (0.2, 0.4, 0.7), "c": (0.3, "nan", 0.1)}
    runs = [make_run(tmp_path / name, *values) for name, values in cases.items()]
    assert [run["name"] for run in ranked(runs, "loss")] == ["b", "a", "c"]
    assert [run["name"] for run in ranked(runs, "accuracy")] == ["a", "b", "c"]
    head, *rows = table(ranked(runs, "accuracy"), "accuracy").splitlines()
    assert head.split() == ["accuracy", "loss", "step", "optimizer.lr", "run"]
    assert rows[0].split() == ["0.8", "0.5", "5", "0.1", "a"] and rows[2].split()[1] == "nan"
    assert rows[3] == "best: a, accuracy 0.8" and table(runs, "loss").endswith("best: a, loss 0.5")
    unsound = make_run(tmp_path / "wrong" / "d", 0.1, "nan", 1.0)
    assert [run["name"] for run in ranked([unsound, *runs], "accuracy")] == ["a", "b", "d", "c"]
    named = {
        "config": unsound["config"] | {"audit.action": "warn"},
        "events": [{"kind": "audit_failed"}],
    }
    assert table([unsound | named], "loss").endswith("d (wrong device)")
    with pytest.raises(UsageError, match="no run has 'acuracy'; did you mean 'accuracy'"):
        ranked(runs, "acuracy")
    assert "contains 3 runs" in ended("report", tmp_path, code=2).output
    (tmp_path / "sweep.json").write_text('{"metric": "loss"}')
    done = ended("report", tmp_path).stdout.splitlines()
    assert [line.split()[-1] for line in done[1:4]] == [
        "b",
        "a",
        "c",
    ] and done[4] == "best: b, loss 0.4"
    assert f"{tmp_path / 'report.html'}  " in done[5] and f"{tmp_path / 'report.csv'}" in done[5]
    with open(tmp_path / "report.csv", newline="") as file:
        written = [*csv.DictReader(file)]
    assert [(row["run"], row["loss"], row["optimizer.lr"]) for row in written] == [
        ("b", "0.4", "0.2"),
        ("a", "0.5", "0.1"),
        ("c", "nan", "0.3"),
    ]
    page = (tmp_path / "report.html").read_text()
    assert page.index('"name":"b"') < page.index('"name":"a"') < page.index('"name":"c"')


def test_a_metric_of_unknown_direction_says_so(tmp_path):
    runs = [make_run(tmp_path / x, 0.1, 0.5, 0.8, accumulated_cost=i) for i, x in enumerate("ab")]
    assert [run["name"] for run in ranked(runs, "accumulated_cost")] == ["b", "a"]
    said = "accumulated_cost: its name does not say which is best; the largest is first"
    assert table(runs, "accumulated_cost").splitlines()[-1] == said
    assert "does not say" not in table(runs, "loss") + table(runs, "accuracy")


def test_each_sweep_among_several_stands_for_its_runs(tmp_path):
    """As a shell makes of `runs/*`. A directory of runs that is no sweep is left out, as everything
    that is no run.
    """
    for name, loss in (
        ("one/a", 0.3),
        ("one/b", 0.1),
        ("two/c", 0.2),
        ("alone", 0.4),
        ("group/d", 0.5),
    ):
        make_run(tmp_path / name, 0.1, loss, 0.9)
    for name in ("one", "two", "new"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "sweep.json").write_text('{"metric": "loss"}')
    page, listed = (
        tmp_path / "page.html",
        lambda: re.findall('"name":"(.)[^"]*","path"', page.read_text()),
    )
    ended("report", tmp_path / "one", tmp_path / "two", "--out", page)
    assert listed() == ["b", "c", "a"]  # sorted: both sweeps have the same metric
    done = ended(
        "report",
        *(tmp_path / name for name in ("alone", "group", "new", "one", "two")),
        "--out",
        page,
    )
    assert (
        listed() == [*"aabc"]
        and [line.endswith("; left out") for line in done.stderr.splitlines()] == [True] * 2
    )


def test_a_sweep_of_failed_runs_only_has_a_report(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, 0.1, 0.5, 0.8)
        (tmp_path / name / "metrics.jsonl").write_text("")
        (tmp_path / name / "events.jsonl").write_text(
            '{"t": 1.0, "kind": "failed", "step": 0, "reason": "nan"}\n'
        )
    (tmp_path / "sweep.json").write_text('{"metric": "loss"}')
    _, *rows, last = ended("report", tmp_path).stdout.splitlines()
    assert [row.split()[-2:] for row in rows] == [
        ["a", "(failed)"],
        ["b", "(failed)"],
    ] and "2 runs" in last


@pytest.mark.parametrize(
    "more", [{"split": "train", "examples_per_s": 7.0}, {"loss_of": "the last batch"}]
)
def test_batch_losses_are_not_ranked_with_evaluations(tmp_path, more):
    batch, evaluated = (
        make_run(tmp_path / "a", 0.1, 0.2, 0.9, **more),
        make_run(tmp_path / "b", 0.2, 0.5, 0.8),
    )
    for metric in ("loss", "accuracy"):
        runs = ranked([batch, evaluated], metric)
        assert [run["name"] for run in runs] == ["b", "a"]
        assert table(runs, metric).splitlines()[2].split()[:4] == ["-", "-", "5", "0.1"]
    done = ended(
        "report",
        tmp_path / "a",
        tmp_path / "b",
        "--metric",
        "loss",
        "--out",
        tmp_path / "page.html",
    )
    assert done.stdout.splitlines()[2].split()[:4] == ["-", "-", "5", "0.1"]
    alone = [
        make_run(tmp_path / name, 0.1, loss, 0.9, **more) for name, loss in (("c", 0.3), ("d", 0.2))
    ]
    alone.append({**alone[0], "name": "e", "numbers": {}})  # it has no record yet
    assert [run["name"] for run in ranked(alone, "loss")] == ["d", "c", "e"] and "0.3" in table(
        alone, "loss"
    )
    if "examples_per_s" in more:
        assert (
            table(ranked([evaluated, batch], "examples_per_s"), "examples_per_s")
            .splitlines()[1]
            .split()[0]
            == "7"
        )


def test_a_run_with_a_damaged_config_is_trained_again(tmp_path):
    trial = trials("--seed", "0,1", directory=tmp_path)[0]
    make_run(trial.directory, 0.1, 0.5, 0.8)
    (trial.directory / "config.yaml").write_text("optimizer: {lr")
    assert not trial.is_finished()


def finished(directory):
    return {run.name: run for run in directory.glob("seed=*") if records_of(run, "final")}


def records_of(run, split):
    return records(run, split) if (run / "metrics.jsonl").is_file() else []


@pytest.mark.slow
def test_killed_and_continued_no_run_is_made_twice(tmp_path):
    """SIGKILL of all its processes after the first run has finished; the others go on from where
    they are.
    """
    directory = tmp_path / "sweep"
    command = [sys.executable, "-m", "jaxdp", "sweep", *SMALL, "--steps", "100", "--checkpoint.every", "25",
               "--seed", "0,1,2,3", "--jobs", "2", "--run_dir", str(directory)]  # fmt: skip
    first = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 300

    def is_noted():
        return [
            run
            for run in finished(directory).values()
            if '"finished"' in (run / "events.jsonl").read_text()
        ]

    while not is_noted():
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    before = {name: (run / "events.jsonl").read_text() for name, run in finished(directory).items()}
    assert 1 <= len(before) < 4
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"4 runs in {directory}, 2 at once; {len(before)} are finished already" in again.stdout
    assert (
        len(finished(directory)) == 4 and len(again.stdout.splitlines()) == 1 + 4 - len(before) + 7
    )
    *_, best, table = again.stdout.splitlines()
    assert re.fullmatch(r"best: seed=[0-3], loss [\d.]+", best)
    assert table == f"the table in {directory / 'sweep.csv'}"
    with (directory / "sweep.csv").open(newline="") as file:
        assert f"best: {next(csv.DictReader(file))['run']}, " in best
    for name, run in finished(directory).items():
        events = [
            json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()
        ]
        assert events.count("finished") == 1 == len(records(run, "final"))
        assert name not in before or before[name] == (run / "events.jsonl").read_text()
        steps = collections.Counter(record["step"] for record in records(run, "train"))
        assert len(steps) == 20 and set(steps.values()) == {1}
    third = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (
        third.returncode == 0
        and "; 4 are finished already" in third.stdout
        and "[1/" not in third.stdout
    )
    wrong = ended("sweep", *command[4:], "--metric", "acuracy", code=2)
    assert wrong.stderr == "jaxdp: --metric: no run has 'acuracy'; did you mean 'accuracy'?\n"
    other = ended(
        "sweep",
        *SMALL,
        "--steps",
        "100",
        "--seed",
        "0,1",
        "--batch_size",
        "8",
        "--run_dir",
        directory,
        code=2,
    )
    assert "was trained with another config (batch_size: 64 -> 8)" in other.output


@pytest.mark.slow
def test_a_failed_run_is_named_and_a_signal_saves_all(tmp_path):
    argv = [
        *SMALL,
        "--steps",
        "100000",
        "--checkpoint.every",
        "1000000",
        "--run_dir",
        str(tmp_path / "sweep"),
    ]
    command = [sys.executable, "-m", "jaxdp", "sweep", *argv, "--seed", "0,1,2", "--jobs", "1"]
    sweep = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not records_of(tmp_path / "sweep" / "seed=0", "train"):
        assert sweep.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    sweep.send_signal(signal.SIGTERM)
    assert "seed=0  exit code 75" in sweep.communicate(timeout=200)[0] and sweep.returncode == 75
    assert any((tmp_path / "sweep" / "seed=0" / "checkpoints").glob("[0-9]*"))
    assert not (tmp_path / "sweep" / "seed=1").exists()
    argv[-1] = str(tmp_path / "other")
    command = [sys.executable, "-m", "jaxdp", "sweep", *argv, "--model.args.hiden", "[8],[9]"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (
        done.returncode == 1
        and done.stdout.count("exit code 2 after") == 2
        and "hiden" in done.stdout
    )
