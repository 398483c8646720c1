"""The parts of the report beside its curves: what the page is given, and what a browser makes of
it.
"""

import base64
import csv
import json
import math
import time
import urllib.parse

import pytest

from browser import CHROMIUM, Browser
from jaxdp.config import Config
from jaxdp.metrics.jsonl import Events
from jaxdp.report import html, media
from jaxdp.report.html import Reports
from jaxdp.report.read import read_run

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def make_run(directory, config="{}", last="finished", **final):
    """A run directory with three updates and a final record."""
    directory.mkdir(parents=True)
    records = [{"step": i, "split": "train", "loss": 2.0 / i, "time": 1.7e9 + i} for i in (1, 2, 3)]
    records.append({"step": 3, "split": "final", "loss": 0.5, **final, "time": 1.7e9 + 4})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    events = [
        {"t": 1.7e9, "kind": "start", "step": 0, "steps": 3},
        {"t": 1.7e9 + 4, "kind": last, "step": 3},
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (directory / "config.yaml").write_text(config)
    (directory / "env.json").write_text("{}")
    return directory


def data_of(page):
    """The JSON in a page."""
    text = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(text)


def test_no_report_is_written_while_processes_regroup(tmp_path):
    """Its time grows with the run, and all processes would wait for rank 0."""
    run = make_run(tmp_path / "run")
    events, file = Events(run), run / "report.html"
    reports = Reports(run, events=events)
    events.note("regroup", reason="rank 1 joins")
    events.note("saved", 3)
    reports.close()
    assert not file.exists()
    events.note("finished", 3)
    reports.close()
    assert data_of(file.read_text())["runs"][0]["state"]["word"] == "finished"


def test_a_report_is_rewritten_during_the_run(tmp_path):
    """After a pause, from records of either split; the final one is left to the end of the run."""
    run = make_run(tmp_path / "run")
    reports, file = Reports(run), run / "report.html"
    written = []
    for split, pause in (("train", 0), ("train", 11), ("eval", 0), ("eval", 2), ("final", 999)):
        reports.took, reports.since = 0.0, time.monotonic() - pause
        reports.write({"step": 1, "split": split})
        written.append(file.is_file())
        if file.is_file():
            assert data_of(file.read_text())["runs"][0]["state"]["word"] == "running"
            file.unlink()
    reports.close()
    assert written == [False, True, False, True, False]
    page = data_of(file.read_text())
    assert (
        page["runs"][0]["state"]["word"] == "finished" and abs(page["written"] - time.time()) < 60
    )


@pytest.mark.slow
@needs_browser
def test_the_page_reloads_until_the_run_has_ended(tmp_path):
    """What was chosen stays chosen, and the page stays where it was scrolled to."""
    run = make_run(tmp_path / "run")
    file = run / "report.html"
    html.write(file, html.render([read_run(run, alive=True)]))
    with Browser() as page:
        page.open(file, height=300)
        assert page("document.documentElement.dataset.live") == "yes"
        assert "this page reloads itself" in page("document.body.innerText")
        page(
            "document.querySelector('[data-axis=time]').click(); jaxdp.zoom([0, 2]); scrollTo(0, 200)"
        )
        html.write(file, html.render([read_run(run, alive=False)]))
        deadline = time.monotonic() + 30
        root = "document.documentElement?.dataset"
        while page(f"document.readyState + {root}.ready + {root}.live") != "completeyesundefined":
            assert time.monotonic() < deadline, "the page did not reload"
            time.sleep(0.1)
        text = page("document.body.innerText")
        assert "finished" in text and "reloads itself" not in text
        assert (
            page("[jaxdp.view.axis, jaxdp.view.zoom, scrollY]") == ["time", [0, 2], 200]
            and page.errors == []
        )


def test_the_page_knows_which_metrics_should_be_small(tmp_path):
    """By the same words as `--metric`."""
    run = read_run(make_run(tmp_path / "run"))
    run["numbers"] |= {"accuracy": 0.5, "indices_off": 1.0}
    known = data_of(html.render([run]))["directions"]
    assert known.keys() == run["numbers"].keys()
    assert (known["loss"], known["accuracy"], known["indices_off"]) == (1, -1, 0)


@pytest.mark.slow
@needs_browser
def test_a_click_sorts_runs_and_draws_them_by_keys(tmp_path):
    """The best of each metric is marked; what is missing or not finite is last in either direction,
    and not drawn.
    """
    table = [
        ("a", 1e-4, 0.9, 0.5),
        ("b", 1e-1, 0.2, 0.7),
        ("c", 1e-3, "nan", 0.6),
        ("d", None, 0.4, 0.6),
    ]
    runs = []
    for name, lr, loss, accuracy in table:
        config = json.dumps({"steps": 3, "run_dir": name, "lr": lr, "target": f"<b>{name}"})
        runs.append(read_run(make_run(tmp_path / name, config, loss=loss, accuracy=accuracy)))
    file = tmp_path / "page.html"
    html.write(file, html.render(runs))
    with Browser() as page:
        page.open(file)
        heads = page("[...document.querySelectorAll('.runs th')].map((c) => c.innerText)")
        assert heads[:5] == ["run", "lr", "target", "loss", "accuracy"] and "steps" not in heads
        best = "[...document.querySelectorAll('.runs td.best')].map((c) => c.innerText + c.parentElement.dataset.run)"
        assert page(best) == ["0.20001", "0.70001"]
        order = "[...document.querySelectorAll('.runs tr[data-run]')].map((r) => r.dataset.run).join('')"
        click = "document.querySelector('[data-sort=\"{}\"]').click()"
        for column, first, second in (
            ("metric loss", "1302", "0312"), ("metric accuracy", "1230", "0231"), ("config lr", "0213", "1203"),
            ("run", "0123", "3210"), ("config target", "0123", "3210"),
        ):  # fmt: skip
            found = []
            for _ in range(2):
                page(click.format(column))
                found.append(page(order))
            assert found == [first, second], column
        points = "[...document.querySelectorAll('[data-key=lr] circle')].map((c) => c.dataset.run).join('')"
        assert page("[...document.querySelectorAll('.scatter')].map((s) => s.dataset.key)") == [
            "lr"
        ]
        assert page(points) == "01" and "2 runs without a number here" in page(
            "document.body.innerText"
        )
        page(
            "const choice = document.querySelector('#against select'); choice.value = 'accuracy';"
            "choice.dispatchEvent(new Event('change'))"
        )
        assert (
            page(points) == "012"
            and page("document.querySelector('[data-key=lr] svg').dataset.log") == "true false"
        )
        x = page(
            "[...document.querySelectorAll('[data-key=lr] circle')].map((c) => +c.getAttribute('cx'))"
        )
        assert (x[1] - x[0]) / (x[2] - x[0]) == pytest.approx(3)  # three decades and one
        page.open(file, width=390, height=844)
        assert page("document.documentElement.scrollWidth") <= 390 and page.errors == []


def test_the_diff_is_in_the_page_of_one_run(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "git.diff").write_bytes(b"+</script>\xff")
    page = html.render([read_run(run)])
    assert data_of(page)["runs"][0]["diff"] == "+</script>\ufffd" and "+</script>" not in page
    assert data_of(html.render([read_run(run, runs=2)]))["runs"][0]["diff"] == ""


def test_the_page_knows_the_defaults(tmp_path):
    run = make_run(tmp_path / "run")
    for page in (html.render([read_run(run)]), written_by(Reports(run))):
        found = data_of(page)["defaults"]
        assert (
            found["batch_size"] == 128
            and found["optimizer.lr"] == Config().optimizer.lr
            and found["eval.also"] == {}
        )


def written_by(reports):
    reports.close()
    return (reports.directory / "report.html").read_text()


@pytest.mark.slow
@needs_browser
def test_keys_that_were_set_come_before_the_defaults(tmp_path):
    run = make_run(
        tmp_path / "run",
        "batch_size: 128\nsteps: 3\neval: {also: {}, every: 7}\nof_an_older_version: .nan\n",
    )
    with Browser() as page:
        html.write(run / "report.html", html.render([read_run(run)]))
        page.open(run / "report.html")
        keys = "[...document.querySelectorAll('#config {} dt')].map((k) => k.innerText || k.textContent)"
        assert page(keys.format("> dl")) == ["steps", "eval.every", "of_an_older_version"]
        assert page(keys.format("details")) == ["batch_size", "eval.also"]
        assert page.errors == []


@pytest.mark.slow
@needs_browser
def test_the_points_of_a_curve_as_csv(tmp_path):
    run, file = make_run(tmp_path / 'a "b", c', accuracy=0.5), tmp_path / "page.html"
    html.write(file, html.render([read_run(run)]))
    with Browser() as page:
        page.open(file)
        page(
            "addEventListener('click', (event) => event.preventDefault()); document.querySelector('.csv').click()"
        )
        link = page(
            "[document.querySelector('.csv').download, document.querySelector('.csv').href]"
        )
        kind, _, text = link[1].partition(",")
        assert link[0] == "loss.csv" and kind == "data:text/csv;charset=utf-8"
        rows = [*csv.reader(urllib.parse.unquote(text).splitlines())]
        assert rows[0] == ["run", "split", "step", "seconds", "loss"] and page.errors == []
        assert [row[1:] for row in rows[1:]] == [
            ["train", "1", "1", "2"], ["train", "2", "2", "1"], ["train", "3", "3", "0.666667"],
            ["eval", "3", "4", "0.5"],
        ]  # fmt: skip
        assert {row[0] for row in rows[1:]} == {'a "b", c'}


def test_media_by_step_limited_in_size(tmp_path):
    run = make_run(tmp_path / "run")
    assert read_run(run)["media"] == {"items": [], "omitted": 0}
    (run / "media" / "8-folder.txt").mkdir(parents=True)
    files = {
        "10-a.txt": b"</script>\xff", "9-a.txt": b"first", "9-b-c.PNG": b"png", "10-big.png": b"x" * 1_000_001,
        "10-long.txt": b"y" * 20_001, "a.txt": b"", "10.txt": b"", "10-.txt": b"", "10-a.svg": b"<svg>",
        "-1-a.txt": b"",
    }  # fmt: skip
    for name, content in files.items():
        (run / "media" / name).write_bytes(content)
    long = {"step": 10, "name": "long", "text": "y" * 20_000 + "\n[cut]"}
    first = {"step": 9, "name": "a", "text": "first"}
    image = {"step": 9, "name": "b-c", "image": "data:image/png;base64,cG5n"}
    text = {"step": 10, "name": "a", "text": "</script>\ufffd"}
    assert read_run(run)["media"] == {"items": [first, image, text, long], "omitted": 1}
    assert media.read(run, 20_016) == {
        "items": [image, text, long],
        "omitted": 2,
    }  # the last steps come first
    page = html.render([read_run(run)])
    assert data_of(page)["runs"][0]["media"]["items"][2] == text and page.count("</script>") == 2


PIXEL = (  # a PNG
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


@pytest.mark.slow
@needs_browser
def test_images_and_texts_in_a_browser(tmp_path):
    """As text, whatever it contains."""
    runs, hostile = (
        [make_run(tmp_path / name) for name in "ab"],
        "<img src=x onerror='window.pwned=1'>",
    )
    for run in runs:
        (run / "media").mkdir()
        (run / "media" / "1-<b>x.png").write_bytes(base64.b64decode(PIXEL))
        (run / "media" / "3-sample.txt").write_text(hostile)
    with Browser() as page:
        for shown in (runs[:1], runs):
            html.write(tmp_path / "page.html", html.render([read_run(run) for run in shown]))
            page.open(tmp_path / "page.html")
            text = page("document.getElementById('media').innerText")
            assert text.count(hostile) == text.count("<b>x") == text.count("step 3") == len(shown)
            assert page("[...document.images].map((i) => i.naturalWidth)") == [1] * len(shown)
            assert page("window.pwned") is None and page.errors == []


def test_histograms_by_name_and_step(tmp_path):
    """One that is not valid is left out, whatever another program wrote; the page stays JSON."""
    run, valid = make_run(tmp_path / "run"), {"step": 2, "low": -1.0, "high": 1, "counts": [0, 2.5]}
    rows = [
        {**valid, "step": 4}, {**valid, "counts": [7]}, valid, {**valid, "step": True}, {**valid, "low": 1},
        {**valid, "high": math.nan}, {**valid, "counts": [math.nan]}, {**valid, "counts": [-1]},
        {**valid, "counts": []}, {**valid, "counts": "12"}, {**valid, "step": None},
        {**valid, "name": ["b"]}, {**valid, "counts": [1] * 1001},
    ]  # fmt: skip
    with (run / "events.jsonl").open("a") as file:
        for row in rows:
            file.write(
                json.dumps({"t": 1.7e9 + 3, "kind": "histogram", "name": "a/b", **row}) + "\n"
            )
        file.write('{"t": 1.7e9, "kind": "mine", "deep": [{"x": NaN}, -Infinity]}\n')
    found = read_run(run)
    assert found["histograms"] == {"a/b": [valid, {**valid, "step": 4}]}
    assert [e["kind"] for e in found["events"]] == ["start", "mine", "finished"]
    assert data_of(html.render([found]))["runs"][0]["events"][1]["deep"] == [
        {"x": "NaN"},
        "-Infinity",
    ]
    assert read_run(run, runs=2)["histograms"] == {}


@pytest.mark.slow
@needs_browser
def test_histograms_in_a_browser(tmp_path):
    run, name = make_run(tmp_path / "run"), "__proto__<b>"
    with (run / "events.jsonl").open("a") as file:
        for step, low, counts in ((1, 0.0, [4, 0]), (2, 0.0, [0, 0]), (3, -2.0, [0, 9, 1])):
            event = {
                "kind": "histogram",
                "name": name,
                "step": step,
                "low": low,
                "high": 2,
                "counts": counts,
            }
            file.write(json.dumps({"t": 1.7e9 + step, **event}) + "\n")
    html.write(tmp_path / "page.html", html.render([read_run(run)]))
    with Browser() as page:
        page.open(tmp_path / "page.html")
        assert (
            name in (text := page("document.getElementById('histograms').innerText"))
            and "step 1 to 3" in text
        )
        alpha = "document.querySelector('#histograms canvas').getContext('2d').getImageData({}, {}, 1, 1).data[3]"
        drawn = [
            [page(alpha.format(x, y)) for x in (100, 320, 540)] for y in (30, 90, 120, 230)
        ]  # from 2 down to -2
        assert drawn == [[0, 0, 85], [255, 0, 255], [0, 0, 255], [0, 0, 0]] and page.errors == []
