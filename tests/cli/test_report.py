"""The report as people see it: in a real browser, with the points of the files, whatever became of
the run.
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from browser import CHROMIUM, Browser
from jaxdp.cli.report import read_runs
from jaxdp.config.validation import flatten
from jaxdp.errors import UsageError
from jaxdp.metrics.jsonl import Events, read
from jaxdp.report import html
from jaxdp.report.html import Reports
from jaxdp.report.read import columns, read_run, rounded, seconds, sessions
from launch import environment

ROOT = pathlib.Path(__file__).parents[2]
T0 = 1.7e9
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def make_run(directory, lines=200, seed=0, last="finished"):
    """A run directory as training leaves it: a record each second after ten to start, evaluations,
    a final one.
    """
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    with (directory / "metrics.jsonl").open("w") as file:
        for i in range(1, lines + 1):
            record = {
                "step": 10 * i, "split": "train", "loss": 2 / math.sqrt(i) + 0.1 * rng.random(),
                "accuracy": rng.random(), "lr": 1e-3 * (1 - i / lines), "grad_norm": rng.random(),
                "skipped_updates": float(i > lines // 2),
                "step_time_ms": 80 + rng.random(), "examples_per_s": 1e5 * rng.random(), "input_wait": 0.25,
                "nonfinite_grads": 0.0, "time": T0 + 10 + i,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
            if i % 50 == 0:
                own = {"loss": record["loss"], "accuracy": 0.9}
                file.write(
                    json.dumps({"step": 10 * i, "split": "eval", **own, "time": T0 + 10 + i}) + "\n"
                )
        final = {
            "step": 10 * lines,
            "split": "final",
            "loss": 0.25,
            "accuracy": 0.875,
            "goodput": 0.1 + 0.1 * seed,
            "params_sha256": "ab",
        }
        file.write(json.dumps({**final, "time": T0 + 11 + lines}) + "\n")
    events = [
        {"t": T0, "kind": "start", "step": 0, "devices": 4, "processes": 1, "steps": 10 * lines},
        {"t": T0 + 10, "kind": "first_update", "step": 1},
        {"t": T0 + 20, "kind": "saving", "step": 100, "blocked": 0.5},
        {"t": T0 + 21, "kind": "saved", "step": 100, "seconds": 1.5},
        {"t": T0 + 60, "kind": "evaluation", "step": 500, "seconds": 2.0},
        {"t": T0 + 11 + lines, "kind": last, "reason": "said <so> & </script> so"},
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (directory / "config.yaml").write_text(
        f"seed: {seed}\nsteps: 99\nmodel: {{target: MLP, args: {{hidden: [8, 8]}}}}\noptimizer: {{lr: 1.0e-3}}\n"
        "checkpoint: {best: accuracy}\n"
    )
    (directory / "env.json").write_text(
        '{"versions": {"jax": "0.10.2"}, "devices": {"count": 4, "kind": "cpu"}}'
    )
    layout = {
        "parameters": 85002, "devices": 4, "parts": 1, "microbatches_per_device": 2,
        "bytes_per_device": {"params": 340008, "grads": 340008, "opt_state": 680024, "model_state": 0, "batch": 4416},
        "program": {"temporaries": 7e5, "peak": 1, "collectives": {"all-reduce": {"count": 1, "bytes": 8, "wire": 16}}},
    }  # fmt: skip
    (directory / "layout.json").write_text(json.dumps(layout))
    return directory


def report(*argv, cwd=ROOT, code=0):
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", "report", *map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_columns_have_every_value_in_six_digits():
    records = [
        {"step": i, "loss": math.pi * i, "same": 0.0, "time": T0 + i / 8, "split": "train"}
        for i in range(1, 4)
    ]
    records[1]["loss"] = "nan"
    records[2]["more"] = 1e-12
    found = columns(records)
    assert found == {
        "step": [1, 2, 3], "loss": [3.14159, "nan", 9.42478], "same": [0, 0, 0], "more": [None, None, 1e-12],
        "time": [T0 + 0.125, T0 + 0.25, T0 + 0.375],
    }  # fmt: skip
    assert [rounded(x) for x in (123456789.0, 0.1234567, -2.0, "inf", True)] == [
        123456789,
        0.123457,
        -2,
        "inf",
        None,
    ]
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {
        "a.b": 1,
        "a.c": {},
        "d": [1, {"e": 2}],
    }


def test_time_is_accounted_for(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    found = run["spent"]
    work = (
        sum(r["step_time_ms"] * 10 for r in read(tmp_path / "run" / "metrics.jsonl") if "lr" in r)
        / 1000
    )
    assert found["total"] == 211 and found["starting"] == 10 and found["down"] == 0
    assert found["updates"] == pytest.approx(
        0.75 * work, rel=0.01
    )  # the first update counts as starting
    assert found["input"] == pytest.approx(found["updates"] / 3, abs=1e-3)
    assert (found["evaluation"], found["saving"]) == (2.0, 0.5)
    parts = sum(value for name, value in found.items() if name != "total")
    assert parts == pytest.approx(found["total"], abs=0.01)
    assert run["state"] == {"word": "finished", "reason": "said <so> & </script> so"}
    assert [e["updates"] for e in run["events"] if e["kind"] == "skipped"] == [1]
    assert run["steps"] == 2000 and run["numbers"]["accuracy"] == 0.875


def test_sessions_end_with_the_last_sign_of_life():
    records = [{"step": 5, "split": "train", "time": 14.0, "step_time_ms": 500}]
    events = [
        {"t": 10.0, "kind": "start", "step": 0}, {"t": 12.0, "kind": "first_update", "step": 1},
        {"t": 20.0, "kind": "resume", "step": 4}, {"t": 21.0, "kind": "preempted", "step": 4},
        {"t": 30.0, "kind": "resume", "step": 4},
    ]  # fmt: skip
    found = sessions(records, events)
    assert [(s["start"], s["end"], s["how"]) for s in found] == [
        (10, 14, None),
        (20, 21, "preempted"),
        (30, 30, None),
    ]
    assert seconds(records, events) == {
        "total": 20, "starting": 3, "updates": 2, "input": 0, "evaluation": 0, "saving": 0, "again": 0,
        "down": 15, "other": 0,
    }  # fmt: skip
    assert seconds(records, []) == {}


def test_an_elastic_run_has_generations_and_lost_work():
    records = [
        {"step": n, "split": "train", "time": 10.0 + n, "step_time_ms": 1000} for n in (5, 10)
    ]
    events = [
        {"t": 10.0, "kind": "start", "step": 0, "processes": 3}, {"t": 11.0, "kind": "first_update", "step": 1},
        {"t": 18.0, "kind": "regroup", "reason": "rank 1 was lost"},
        {"t": 18.5, "kind": "resume", "step": 4, "processes": 2, "again": 3},
        {"t": 21.0, "kind": "finished", "step": 10},
    ]  # fmt: skip
    found = sessions(records, events)
    assert [(s["how"], s["processes"]) for s in found] == [("regroup", 3), ("finished", 2)]
    assert seconds(records, events)["again"] == 3.0


TORN = (
    "[" * 100_000,
    '{"a":' * 100_000,
    '{"step": 1, "split": "train", "loss": ' + "9" * 5000 + "}",
    "\0",
    "7",
    '{"s',
)


def test_torn_lines_and_unknown_splits_spoil_no_report(tmp_path):
    run = make_run(tmp_path / "run", lines=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"split": "mine", "x": 1}\n')
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write("\n".join(TORN))
    data = read_run(run)
    assert html.render([data]) and len(data["series"]["train"]["step"]) == 3 and data["sessions"]


OTHERS = [
    ("metrics.jsonl", {"split": "train", "loss": 0.5}),  # no step
    ("metrics.jsonl", {"step": "x", "split": "train"}),
    ("metrics.jsonl", {"step": 4, "split": "train", "step_time_ms": 10**400, "time": T0 + 12}),
    ("events.jsonl", {"kind": "start"}),  # no time
    ("events.jsonl", {"t": "soon", "kind": "start"}),
]


@pytest.mark.parametrize(("name", "line"), OTHERS)
def test_a_line_of_another_program_is_a_one_line_error(tmp_path, name, line):
    run = make_run(tmp_path / "run", lines=3)
    with (run / name).open("a") as file:
        file.write(json.dumps(line))
    with pytest.raises(
        UsageError, match="has lines that this version of jaxdp cannot read"
    ) as error:
        read_run(run)
    assert (
        str(run) in str(error.value)
        and "env.json" in str(error.value)
        and "\n" not in str(error.value)
    )


def test_a_number_that_overflows_is_infinite(tmp_path):
    run = make_run(tmp_path / "run", lines=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 40, "split": "final", "loss": 1e999, "accuracy": -1e999, "time": 1700000020.5}\n'
        )
    with (run / "events.jsonl").open("a") as file:
        file.write('{"t": 1700000020.5, "kind": "saved", "step": 40, "seconds": 1e400}\n')
    data = read_run(run)
    assert (
        data["numbers"]["loss"] == "inf"
        and data["numbers"]["accuracy"] == "-inf"
        and html.render([data])
    )
    with (run / "events.jsonl").open("a") as file:
        file.write('{"t": 1e400, "kind": "start"}\n')
    with pytest.raises(UsageError, match="has lines that this version of jaxdp cannot read"):
        read_run(run)


@pytest.mark.parametrize(
    "text", ["a: &x {b: *x}", "2020-01-01: 1", "- 1", "1: {~: .nan}", "a: [", "\0"]
)
def test_an_edited_config_is_shown_or_a_one_line_error(tmp_path, text):
    run = make_run(tmp_path / "run", lines=3)
    (run / "config.yaml").write_text(text)
    try:
        assert html.render([read_run(run)])
    except UsageError as error:
        assert "\n" not in str(error)


def test_a_clock_that_was_set_back_between_two_starts():
    """The first session has no sign of life from before the second began; no time is accounted for."""
    records = [{"step": 5, "split": "train", "time": 60.0, "step_time_ms": 500}]
    events = [{"t": 100.0, "kind": "start", "step": 0}, {"t": 50.0, "kind": "resume", "step": 4}]
    found = sessions(records, events)
    assert [(s["start"], s["end"]) for s in found] == [(100, 100), (50, 100)] and not seconds(
        records, events
    )


def test_a_run_that_failed_at_its_start_has_a_report(tmp_path):
    run = make_run(tmp_path / "run", lines=1, last="failed")
    (run / "metrics.jsonl").write_text("")
    Reports(run).close()
    assert (
        "said <so>" in read_run(run)["state"]["reason"]
        and read_run(run)["state"]["word"] == "failed"
    )
    assert (run / "report.html").is_file() and "1 run" in report(run)


def test_what_is_no_run_is_named(tmp_path):
    cases = {"missing": "is no run", "empty": "is no run", "new": "no metrics yet"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "env.json").write_text("{}")
    for name, said in cases.items():
        with pytest.raises(UsageError, match=said) as error:
            read_run(tmp_path / name)
        assert name in str(error.value) and "\n" not in str(error.value)
    assert report(code=2).startswith("jaxdp: report: no run given")
    assert "such as" in report(make_run(tmp_path / "run"), "--out", tmp_path, code=2)
    assert f"{str(tmp_path)!r} contains 1 run; name those to show, or {tmp_path}/*" in report(
        tmp_path, code=2
    )


def test_what_is_no_run_among_several_is_left_out(tmp_path):
    """As a shell makes of `runs/*`; alone it is refused, and so is what is not there, since it was
    misspelt.
    """
    runs = tmp_path / "runs"
    make_run(runs / "one"), make_run(runs / "two", seed=1)
    (runs / "empty").mkdir()
    (runs / "new").mkdir()
    (runs / "new" / "env.json").write_text("{}")
    (runs / "notes.txt").write_text("text")
    command = [sys.executable, "-m", "jaxdp", "report", *sorted(map(str, runs.iterdir()))]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env
    )
    assert (
        done.returncode == 0
        and done.stdout.startswith("report.html ")
        and ", 2 runs" in done.stdout
    ), done
    said = done.stderr.splitlines()
    assert len(said) == 3 and all(
        line.startswith("jaxdp: report: ") and line.endswith("; left out") for line in said
    )
    assert [name in line for name, line in zip(("empty'", "new'", "notes.txt'"), said)] == [
        True
    ] * 3, said
    assert (
        '"name":"one"' in (page := (tmp_path / "report.html").read_text())
        and '"name":"two"' in page
    )
    for name in ("empty", "new", "notes.txt"):
        (line,) = report(runs / name, code=2).splitlines()
        assert name in line and "left out" not in line
    assert "none of these 2 is a run" in report(runs / "empty", runs / "notes.txt", code=2)
    assert "no run" in report(runs / "one", runs / "twoo", code=2)


@pytest.mark.parametrize("name", ["env.json", "config.yaml"])
def test_a_damaged_file_is_named_and_its_run_left_out(tmp_path, capsys, name):
    make_run(tmp_path / "one", lines=3), make_run(tmp_path / "two", lines=3)
    (tmp_path / "two" / name).write_text('{"versions": [')
    (line,) = report(tmp_path / "two", code=2).splitlines()
    assert line.startswith(f"jaxdp: report: {str(tmp_path / 'two' / name)!r} is damaged (")
    assert [*read_runs([tmp_path / "one", tmp_path / "two"])] == [tmp_path / "one"]
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and line.endswith("; left out")


def test_events_outlive_a_torn_line_and_are_appended(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'{"t": 1, "kind": "start"}\n{"t": 2, "ki')
    events = Events(tmp_path)
    events.note("saved", 7, seconds=0.5)
    found = read(tmp_path / "events.jsonl")
    assert [e["kind"] for e in found] == ["start", "saved"] and found[1]["step"] == 7
    assert abs(found[1]["t"] - time.time()) < 5


@pytest.mark.slow
def test_the_last_line_of_a_run_names_its_report(tmp_path):
    """Of one that ends, and of one that has ended already."""
    run = [
        sys.executable,
        "-m",
        "jaxdp",
        "train",
        "--config",
        "configs/digits.yaml",
        "--steps",
        "2",
    ]
    command = [*run, "--model.args.hidden", "[4]", "--run_dir", str(tmp_path / "run")]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment({}, 1)
        )
        assert done.returncode == 0, done.stderr
        *_, summary, last = done.stdout.splitlines()
        assert (
            f"files in {tmp_path}/run" in summary
            and last == f"report in {tmp_path}/run/report.html"
        )
        assert (tmp_path / "run" / "report.html").is_file()
    assert "nothing to do" in done.stdout


def test_a_report_that_cannot_be_written_is_said_once(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    (run / "report.html").mkdir()
    reports = Reports(run)
    for _ in range(2):
        reports.refresh(alive=True)
    reports.close()
    said = capsys.readouterr()
    assert said.err.count("report.html could not be written") == 1 and not said.out
    assert not list(run.glob("*.tmp"))


def test_a_report_needs_no_utf8_locale(tmp_path):
    run = make_run(tmp_path / "日本")
    done = subprocess.run(
        [sys.executable, "-m", "jaxdp", "report", str(run)], cwd=ROOT, capture_output=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "LC_ALL": "POSIX", "PYTHONUTF8": "0",
             "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "<title>日本 ·" in (run / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@needs_browser
def test_the_page_has_the_points_in_a_browser(tmp_path):
    """One run and two, in light and dark, on a phone: drawn without an error, and with nothing to
    scroll sideways.
    """
    one, other = (
        make_run(tmp_path / "a" / "run"),
        make_run(tmp_path / "b" / "run", seed=1, last="preempted"),
    )
    bare = tmp_path / "bare"  # as an older version left it, with no evaluation yet
    bare.mkdir()
    losses = [(1, "2.0"), (2, '"nan"'), (3, "1.0")]
    lines = [f'{{"step": {step}, "split": "train", "loss": {loss}}}\n' for step, loss in losses]
    (bare / "metrics.jsonl").write_text("".join(lines))
    print(report(one), report(one, other, cwd=tmp_path), report(bare))
    records = read(one / "metrics.jsonl")
    with Browser() as page:
        page.open(one / "report.html")
        assert page("jaxdp.runs.length") == 1 and page("document.title") == "run · jaxdp"
        for name in ("loss", "lr", "examples_per_s"):
            drawn = page(
                f"jaxdp.view.charts.find(c => c.name == {name!r}).series.find(s => s.split == 'train')"
            )
            want = [(r["step"], r[name]) for r in records if r["split"] == "train"]
            np.testing.assert_allclose(np.array([drawn["step"], drawn["y"]]).T, want, rtol=1e-5)
            np.testing.assert_allclose(drawn["time"], [11 + i for i in range(200)], atol=1e-3)
        evaluated = page("jaxdp.view.charts[0].series[1]")
        assert evaluated["step"] == [500, 1000, 1500, 2000, 2000] and evaluated["y"][-1] == 0.25
        assert page("document.querySelector('[data-name=loss]').dataset.points") == "200 5"
        text = page("document.body.innerText")
        for shown in (
            "finished",
            "0.8750",
            "best accuracy, step 500",
            "2,000",
            "3 min 31 s",
            "said <so> & </script> so",
            "all-reduce",
            "680 kB",
        ):
            assert shown in text, text
        light = colours(page)
        page("document.getElementById('theme').click()")
        assert colours(page)["page"] != light["page"] and colours(page)["ink"] > 0

        page.open(tmp_path / "report.html", dark=True)
        assert page("jaxdp.runs.map(r => r.name)") == ["a/run", "b/run"]
        assert page("jaxdp.view.charts[0].series.map(s => [s.run, s.split])") == [
            [run, split] for run in (0, 1) for split in ("train", "eval")
        ]
        dark = colours(page)
        assert "goodput" not in page("jaxdp.view.charts.map(c => c.name)") and "20.0 %" in page(
            "document.body.innerText"
        )
        assert dark["page"] != light["page"] and dark["ink"] > 0
        text = page("document.body.innerText")
        assert (
            "seed" in page("document.querySelector('#config .differences').innerText")
            and "preempted" in text
        )
        page(
            "document.querySelector('[data-axis=time]').click(); document.querySelector('[data-toggle=log]').click()"
        )
        page(
            "document.getElementById('smooth').value = 0.9; document.getElementById('smooth').oninput"
        )
        page("jaxdp.view.smooth = 0.9; jaxdp.redraw(); jaxdp.zoom([50, 100])")
        assert (
            page("jaxdp.view.charts[0].at.x0") == 50
            and page("jaxdp.view.charts[0].series[0].mean.length") == 200
        )

        for width, columns in ((1280, 3), (900, 2)):  # a curve alone in its row takes all of it
            page.open(one / "report.html", width=width)
            rest = page("document.getElementById('charts').children.length") % columns
            page(
                f"for (let i = {(rest - 1) % columns}; i > 0; i--) document.getElementById('charts').lastChild.remove()"
            )
            wide = page(
                "[...document.getElementById('charts').children].map(c => c.getBoundingClientRect().width)"
            )
            assert (
                len(wide) % columns == 1
                and wide[-1] > columns * wide[0]
                and wide[0] == pytest.approx(wide[-2], abs=1)
            )
        for file in (one / "report.html", tmp_path / "report.html"):
            page.open(file, width=390, height=844, dark=True)
            assert page("document.documentElement.scrollWidth") <= 390

        assert (
            len(set(page("Array.from({length: 40}, (_, i) => colour(i))"))) == 40
        )  # of many runs each has its own

        page.open(bare / "report.html")
        assert page("jaxdp.view.charts.map(c => [c.name, c.series.map(s => s.y)])") == [
            ["loss", [[2, 1]]]
        ]
        text = page("document.body.innerText")
        for shown in ("1 not finite", "stopped"):
            assert shown in text, text
        shown = "[...document.querySelectorAll('.card')].filter((c) => c.offsetHeight)"
        heads = page(f"{shown}.map((c) => c.querySelector('h2, h3, b, .small')?.innerText)")
        assert heads == ["1", "Loss"]  # no card without content
        assert page.errors == []


def make_sweep(directory, count=9):
    """Runs that differ in six keys, with the names that a sweep gives them."""
    for i in range(count):
        lr, batch = f"1e-{i % 3 + 1}", 32 << i // 3
        name = f"optimizer.lr={lr},batch_size={batch},model.args.dropout=0.{i},seed={i}"
        run = make_run(directory / name, seed=i)
        config = {
            "seed": i,
            "batch_size": batch,
            "model": {"target": "MLP", "args": {"hidden": [8 * i, 8 * i], "dropout": i / 10}},
            "optimizer": {"lr": float(lr), "schedule": ("cosine", "one_cycle")[i % 2]},
        }
        (run / "config.yaml").write_text(json.dumps(config))
    return sorted(directory.iterdir())


@pytest.mark.slow
@needs_browser
def test_tables_of_many_runs_fit_a_window(tmp_path):
    """Of 1,300 pixels: nothing has to be scrolled sideways."""
    runs = make_sweep(tmp_path / "sweep")
    report(*runs, "--metric", "loss", cwd=tmp_path)
    with Browser() as page:
        page.open(tmp_path / "report.html", width=1300)
        wide = page(
            "[...document.querySelectorAll('.wide')].map((t) => [t.scrollWidth, t.clientWidth])"
        )
        assert len(wide) > 5 and all(inside <= room for inside, room in wide), wide
        heads = page("[...document.querySelectorAll('.runs th')].map((c) => c.innerText)")
        assert len(heads) == 13 and heads[3] == "model.args.hidden"
        assert page.errors == []


@pytest.mark.slow
@needs_browser
def test_labels_of_axes_are_whole_and_differ(tmp_path):
    """Of numbers that need many digits; a label that begins left of the canvas would be cut."""
    rng = np.random.default_rng(0)
    records = [
        {"step": 123456 + i, "split": "train", "loss": -1.5e-7 * (1 + rng.random()),
         "accuracy": 12345678 + i / 10, "time": T0 + i}
        for i in range(9)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    report(tmp_path)
    with Browser() as page:
        page.open(tmp_path / "report.html")
        drawn = page("""jaxdp.view.charts.map((chart) => {
            const texts = [], draw = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                const wide = this.measureText(text).width;
                const from = this.textAlign === "right" ? x - wide : x - wide / 2;
                texts.push([this.textAlign, text, from >= 0 && from + wide <= chart.width]);
            };
            chart.draw();
            CanvasRenderingContext2D.prototype.fillText = draw;
            return texts;
        })""")
        assert len(drawn) == 2 and page.errors == []
        for texts in drawn:
            for align in ("right", "center"):
                labels = [text for side, text, _ in texts if side == align]
                assert len(labels) > 1 and len(set(labels)) == len(labels), labels
            assert all(whole for *_, whole in texts), texts


NAMES = (
    "</script><script>window.pwned=1</script>", '<img src=x onerror="window.pwned=1">', '"onload="x', "日本", "",
    "n", "__proto__", "constructor", "toString", "length", "[[data]]",
)  # fmt: skip


@pytest.mark.slow
@needs_browser
def test_any_name_is_text(tmp_path):
    """Of a run, a metric, a key and a value of the config, a reason: shown as it is, and never run."""
    run = make_run(tmp_path / "[[data]]<b>", lines=2)
    records = [
        {"step": i, "split": "train", "loss": 1.0 / i, **dict.fromkeys(NAMES, float(i))}
        for i in (1, 2, 3)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (run / "config.yaml").write_text(
        json.dumps({"model": {"target": NAMES[0]}, "constructor": 1, "__proto__": {"x": 2}})
    )
    other = make_run(tmp_path / "other", lines=2)
    with Browser() as page:
        for runs in ([run], [run, other]):
            print(report(*runs, "--out", tmp_path / "page.html"))
            page.open(tmp_path / "page.html")
            drawn = dict(page("jaxdp.view.charts.map(c => [c.name, c.series[0].y])"))
            assert {name: drawn[name] for name in NAMES} == {name: [1, 2, 3] for name in NAMES}
            page("document.querySelectorAll('details').forEach(d => d.open = true)")
            page("new Promise(done => setTimeout(done, 200))")
            text = page("document.body.innerText")
            assert NAMES[0] in text and "[[data]]<b>" in text and "not finite" not in text
            assert page("window.pwned") is None and page.errors == []


def test_a_link_and_a_pipe_are_written_through(tmp_path):
    """What is no file of its own is never replaced: as root that would be the system's /dev/stdout."""
    run = make_run(tmp_path / "run", lines=1)
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    os.mkfifo(tmp_path / "pipe")
    read_end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    html.write(tmp_path / "pipe", "<p>text")
    assert os.read(read_end, 100) == b"<p>text" and (tmp_path / "pipe").is_fifo()
    os.close(read_end)
    html.write(tmp_path / "link.html", html.render([read_run(run)]))
    assert (tmp_path / "link.html").is_symlink() and "</html>" in (
        tmp_path / "real.html"
    ).read_text()


@pytest.mark.slow
@needs_browser
def test_a_run_without_numbers_in_a_browser(tmp_path):
    run = make_run(tmp_path / "run", lines=1, last="failed")
    (run / "metrics.jsonl").write_text("")
    print(report(run), report(run, make_run(tmp_path / "other"), "--out", tmp_path / "two.html"))
    with Browser() as page:
        for file in (run / "report.html", tmp_path / "two.html"):
            page.open(file)
            page("document.querySelectorAll('details').forEach(d => d.open = true)")
            text = page("document.body.innerText")
            assert "failed" in text and "said <so> & </script> so" in text and page.errors == []


def colours(page):
    """The colour of the page, and how many pixels of the first chart are neither empty nor grey."""
    script = """(() => {
        const c = document.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const range = (p) => Math.max(...p) - Math.min(...p);
        let ink = 0;
        for (let i = 0; i < d.length; i += 4) ink += range([d[i], d[i + 1], d[i + 2]]) > 60;
        return {page: getComputedStyle(document.body).backgroundColor, ink};
    })()"""
    return page(script)


@needs_browser
@pytest.mark.slow
def test_ten_thousand_lines_open_in_two_seconds(tmp_path):
    """Measured on two CPU cores: 0.7 MB, drawn after 0.24 s."""
    run = make_run(tmp_path / "run", lines=10_000)
    began = time.monotonic()
    reports = Reports(run)
    reports.close()
    assert time.monotonic() - began < 2
    assert (run / "report.html").stat().st_size < 2e6
    with Browser() as page:
        page.open(run / "report.html")
        print(page("[jaxdp.milliseconds, jaxdp.loaded]"), (run / "report.html").stat().st_size)
        assert page("jaxdp.loaded") < 2000 and page.errors == []
        steps = read_run(run)["series"]["train"]["step"]
        assert page("jaxdp.view.charts[0].series[0].step") == steps and len(steps) > 2000


def test_the_page_loads_nothing(tmp_path):
    text = html.render([read_run(make_run(tmp_path / "run"))])
    rest = text.replace("http://www.w3.org/2000/svg", "")  # a name
    assert "http" not in rest and "<link" not in rest and "src=" not in rest


def test_the_page_of_a_long_run_says_what_it_left_out(tmp_path):
    """Evenly spaced records, all evaluations and the last record; memory does not grow with the
    file.
    """
    run = make_run(tmp_path / "run", lines=20_000)
    page = read_run(run)
    steps = page["series"]["train"]["step"]
    assert 2000 <= len(steps) <= 4001 and steps[0] == 10 and steps[-1] == 200_000
    assert {*np.diff(steps[:-1])} == {80}
    assert len(page["series"]["eval"]["step"]) == 400 and page["numbers"]["accuracy"] == 0.875
    assert re.fullmatch(
        r"2,\d+ of 20,401 lines of metrics.jsonl, evenly spaced", page["environment"]["records"]
    )
    assert "records" not in read_run(make_run(tmp_path / "short"))["environment"]
    tracemalloc.start()
    read_run(run)
    assert tracemalloc.get_traced_memory()[1] < 12e6
    tracemalloc.stop()
