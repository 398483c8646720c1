"""The parts of the report beside its curves: what the page is given, and what a browser makes of it."""

import json
import time

import pytest

from browser import CHROMIUM, Browser
from jaxdp.report import html
from jaxdp.report.read import read_run
from jaxdp.report.writer import Reports

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def make_run(directory, config="{}", last="finished", **final):
    """A run directory with three updates and a final record."""
    directory.mkdir(parents=True)
    records = [{"step": i, "split": "train", "loss": 2.0 / i, "time": 1.7e9 + i} for i in (1, 2, 3)]
    records.append({"step": 3, "split": "final", "loss": 0.5, **final, "time": 1.7e9 + 4})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    events = [{"t": 1.7e9, "kind": "start", "step": 0, "steps": 3}, {"t": 1.7e9 + 4, "kind": last, "step": 3}]
    (directory / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (directory / "config.yaml").write_text(config)
    (directory / "env.json").write_text("{}")
    return directory


def data_of(page):
    """The JSON in a page."""
    text = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(text)


def test_a_report_is_rewritten_during_the_run(tmp_path, monkeypatch):
    """After a pause, from records of either split; the final one is left to the end of the run."""
    run, clock = make_run(tmp_path / "run"), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    reports, file = Reports(run), run / "report.html"
    written = []
    for split, now in (("train", 109), ("train", 111), ("eval", 111.5), ("eval", 112.5), ("final", 999)):
        clock[0] = now
        reports.write({"step": 1, "split": split})
        written.append(file.is_file())
        if file.is_file():
            assert data_of(file.read_text())["runs"][0]["state"]["word"] == "running"
            file.unlink()
    reports.close()
    assert written == [False, True, False, True, False]
    page = data_of(file.read_text())
    assert page["runs"][0]["state"]["word"] == "finished" and abs(page["written"] - time.time()) < 60


@pytest.mark.slow
@needs_browser
def test_the_page_of_a_run_reloads_itself_until_it_has_ended(tmp_path):
    """What was chosen stays chosen, and the page stays where it was scrolled to."""
    run = make_run(tmp_path / "run")
    file = run / "report.html"
    html.write(file, html.render([read_run(run, alive=True)]))
    with Browser() as page:
        page.open(file, height=300)
        assert page("document.documentElement.dataset.live") == "yes"
        assert "this page reloads itself" in page("document.body.innerText")
        page("document.querySelector('[data-axis=time]').click(); jaxdp.zoom([0, 2]); scrollTo(0, 200)")
        html.write(file, html.render([read_run(run, alive=False)]))
        deadline = time.monotonic() + 30
        while page("document.documentElement.dataset.ready && document.documentElement.dataset.live") == "yes":
            assert time.monotonic() < deadline, "the page did not reload"
            time.sleep(0.1)
        while page("document.documentElement.dataset.ready") != "yes":
            assert time.monotonic() < deadline
        text = page("document.body.innerText")
        assert "finished" in text and "reloads itself" not in text
        assert page("[jaxdp.view.axis, jaxdp.view.zoom, scrollY]") == ["time", [0, 2], 200] and page.errors == []
