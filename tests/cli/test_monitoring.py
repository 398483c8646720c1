"""What people look at: the panel, lines, TensorBoard, Weights & Biases, a writer of one's own, and
a trace.
"""

import io
import math
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import time

import pytest
from rich.console import Console as Terminal

from covering import first
from jaxdp.errors import UsageError
from jaxdp.metrics import safe_print
from jaxdp.metrics.console import Clock, Console, Panel, sparkline
from jaxdp.metrics.numbers import duration, number
from jaxdp.metrics.writers import BackgroundWriter, check_writers, make_writers
from jaxdp.run import callbacks
from launch import port, processes, ranks

JAXDP = [sys.executable, "-m", "jaxdp"]
DIGITS = ["--config", "configs/digits.yaml", "--model.args.hidden", "[8]"]
ENVIRONMENT = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def start(*arguments):
    return subprocess.Popen(
        [*JAXDP, "train", *DIGITS, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL
    )


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


TRAIN = {
    "step": 4200, "split": "train", "loss": 0.2129, "accuracy": 0.9, "lr": 1e-3, "grad_norm": 0.4, "step_time_ms": 52.1,
    "examples_per_s": 12431.2, "tokens_per_s": 468000.0, "mfu": 0.412, "input_wait": 0.003, "nonfinite_grads": 0.0,
    "skipped_updates": 2.0, "model_flops_per_s": 9.3e13, "time": 1.0,
}  # fmt: skip


def drawn(panel, width):
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=False)
    terminal.print(panel.render())
    return terminal.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_panel_says_where_a_run_stands(width):
    clock = Clock(10_000)
    facts = {"title": "gpt", "devices": "8 x H200 in 2 processes", "files": "runs/gpt"}
    terminal = Terminal(file=io.StringIO(), width=width, height=40, force_terminal=True)
    panel = Panel(clock, facts, terminal, lambda: "1.0 of 2.0 GB")
    try:
        assert "compiling" in drawn(panel, width)
        clock.at(4200)
        for loss in (3.0, float("nan"), 1.0, 0.2129):
            panel.write({**TRAIN, "loss": loss})
        panel.write({"step": 4000, "split": "eval", "loss": 1.25, "accuracy": 0.93})
        panel.saved(4000)
        text = drawn(panel, width)
        panel.write(
            {"step": 10_000, "split": "final", "loss": 1.125, "goodput": 0.5, "params_sha256": "ab"}
        )
        last = drawn(panel, width)
        assert (
            "loss 1.1250" in last
            and "after 10,000" in last
            and "goodput" not in last
            and "sha" not in last
        )
    finally:
        panel.close()
    assert all(len(line) <= width for line in text.splitlines())
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    for part in (
        "gpt", "4,200 of 10,000 42%", "loss 0.2129 █ ▃▁", "accuracy 0.9000", "lr 1.00e-03", "|grad| 0.4000",
        "metrics accuracy", "93 TFLOP/s", "evaluated loss 1.2500",
        "12,431 examples/s", "468,000 tokens/s", "MFU 41.2%", "waiting for input 0.3%", "loss 1.2500", "after 4,000",
        "1.0 of 2.0 GB", "step 4,000, 0:00:00 ago", "in use 1.0", "8 x H200", "runs/gpt", "left", "2 updates",
    ):  # fmt: skip
        assert part in words, (part, text)


def test_a_low_terminal_keeps_the_numbers_and_frame():
    facts = {"title": "gpt", **{f"fact {i}": "of the run" for i in range(8)}}
    for height in (12, 40):
        terminal = Terminal(file=io.StringIO(), width=80, height=height, force_terminal=True)
        panel = Panel(Clock(10), facts, terminal, lambda: "1.0 of 2.0 GB")
        panel.write(TRAIN)
        lines = drawn(panel, 80).splitlines()
        panel.close()
        assert (
            len(lines) <= height and lines[0].startswith("╭─ gpt ") and lines[-1].startswith("╰")
        ), lines
        assert ("fact 7" in " ".join(lines)) == (height == 40) and "loss" in " ".join(lines)


def test_what_is_said_shows_no_markup():
    """A line above the panel has the panel drawn anew, by the console's rules for that line:
    without markup.
    """
    file = io.StringIO()
    panel = Panel(
        Clock(10),
        {"title": "[gpt]", "run": "in [dir]"},
        Terminal(file=file, width=80, force_terminal=True),
    )
    panel.write({"step": 4, "split": "eval", "loss": 1.25, "[f1]": 0.5})
    panel.say("saved step 4 [x]")
    panel.close()
    text = file.getvalue()
    assert "[f1] 0.5000" in text and "after 4" in text and "[dim]" not in text and "[/" not in text
    assert "in [dir]" in text and " [gpt] " in text and "saved step 4 [x]" in text


def test_a_sparkline_has_a_character_a_value():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0]) == "▁ ▁" and sparkline([]) == sparkline([math.inf]) == ""


def test_lines_on_a_pipe_stay_in_their_columns(capsys):
    console = Console(10_000)
    for step, loss, rate in ((50, 2.30259, 900.0), (100, 0.01, 12431.2), (9950, 12345.678, 1e6)):
        console.write(
            {**TRAIN, "step": step, "loss": loss, "examples_per_s": rate, "skipped_updates": 0.0}
        )
    console.write({"step": 10_000, "split": "eval", "loss": 1.0, "accuracy": 0.5})
    lines = capsys.readouterr().out.splitlines()
    for column in ("loss", "lr", "examples/s", "left"):
        assert len({line.index(column) for line in lines[:3]}) == 1, lines
    assert lines[0].startswith("train    50/10000  loss    2.3026") and lines[3].startswith(
        "eval  10000/10000"
    )
    assert re.search(r"left \d+:\d\d:\d\d$", lines[1])


def test_numbers_and_durations():
    assert (
        number("mfu", 0.4123) == "41.2%"
        and number("lr", 3e-4) == "3.00e-04"
        and number("loss", 123456.0) == "1.235e+05"
    )
    assert number("loss", 2.134e-4) == "2.13e-04" and number("loss", 0.0) == "0.0000"
    assert (
        number("model_flops_per_s", 9.9996e11) == "1000 G"
        and number("model_flops_per_s", 2.97e10) == "29.7 G"
    )
    assert number("examples_per_s", 1234567.8) == "1,234,568" and number("straggler", "x") == "x"
    assert (
        duration(59.9) == "0:00:59"
        and duration(90061) == "1 day, 1:01:01"
        and duration(None) == "?"
    )


def test_time_left_does_not_count_compilation():
    clock = Clock(1000)
    assert clock.left() is None
    for name in ("began", "paced", "seen"):  # a minute of compilation
        setattr(clock, name, getattr(clock, name) - 60.0)
    clock.at(10, 150.0)
    assert clock.left() == pytest.approx(
        148.5
    )  # by what an update took of late: the minute was no update's
    clock.seen -= 1.0  # a second for ten updates, and the time of this test
    clock.at(20, 150.0)
    seconds = clock.seen - clock.paced
    assert clock.left() == pytest.approx(98.0 * seconds) and 1 <= seconds <= clock.elapsed() - 59
    clock.rewind(10)
    assert clock.left() is None


def events(folder):
    """(tag, step, value) of the scalars in event files: records of a length, two checksums, and the
    bytes between.
    """
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(pathlib.Path(folder).glob("events.*")):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    return found


def test_tensorboard_has_every_number(tmp_path):
    pytest.importorskip("tensorboardX")
    (writer,) = make_writers(["TensorBoard"], tmp_path, 0, {})
    writer.write(TRAIN)
    writer.write({"step": 4200, "split": "eval", "loss": 1.5})
    writer.close()
    found = {(tag, step): value for tag, step, value in events(tmp_path / "tensorboard")}
    assert (
        found[("train/loss", 4200)] == pytest.approx(0.2129) and found[("eval/loss", 4200)] == 1.5
    )
    assert {tag for tag, _ in found} == {
        f"train/{k}" for k in TRAIN if k not in ("step", "split", "time")
    } | {"eval/loss"}


@pytest.mark.slow
def test_weights_and_biases_goes_on_in_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_RUN_ID", "another")
    monkeypatch.setenv("WANDB_RESUME", "must")
    entry = [{"target": "WandB", "args": {"mode": "offline", "project": "test"}}]
    (tmp_path / "other").mkdir()
    for step in (1, 2):
        (writer,) = make_writers(entry, tmp_path, step - 1, {"batch_size": 64})
        writer.write({**TRAIN, "step": step})
        writer.close()
        assert not writer.failed
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    known = (tmp_path / "wandb_id").read_text().strip()
    assert len(runs) == 2 and all(f"-{known}" in run.name for run in runs)
    for run in runs:
        (log,) = run.glob("run-*.wandb")
        wait_for(
            lambda log=log: b"train/loss" in log.read_bytes()
        )  # wandb's own process writes it, after finish
        assert b"batch_size" in log.read_bytes()
    (writer,) = make_writers(entry, tmp_path / "other", 0, {})
    writer.write({**TRAIN, "step": 1})
    writer.close()
    assert len({known, (tmp_path / "other" / "wandb_id").read_text().strip(), "another"}) == 3


class Own:
    """A writer of one's own."""

    made: list = []

    def __init__(self, directory, config, more=1):
        self.records, self.more, self.config = [], more, config
        Own.made.append(self)

    def write(self, record):
        if record["step"] > 2:
            raise OSError("no route to host")
        self.records.append(record)

    def say(self, text): ...
    def rewind(self, step): ...
    def close(self): ...


def test_a_writer_of_ones_own_may_fail(tmp_path, capsys):
    check_writers([{"target": f"{__name__}.Own"}])
    (writer,) = make_writers(
        [{"target": f"{__name__}.Own", "args": {"more": 7}}], tmp_path, 0, {"seed": 1}
    )
    for step in (1, 2, 3, 4):
        writer.write({"step": step, "split": "train", "loss": 1.0})
    writer.close()
    own = Own.made[-1]
    assert (
        [r["step"] for r in own.records] == [1, 2] and own.more == 7 and own.config == {"seed": 1}
    )
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and f"log.writers: {__name__}.Own failed" in error
        and "no route to host" in error
    )
    assert isinstance(writer, BackgroundWriter) and writer.failed


class Bad(Own):
    """Goes wrong in one of its calls."""

    def __init__(self, when, how="raises"):
        self.when, self.how = when, how
        self._maybe("start")

    def _maybe(self, call):
        if call == self.when and self.how == "hangs":
            time.sleep(1000)
        if call == self.when:
            raise {"raises": ValueError, "exits": SystemExit}[self.how]("no\nroute")

    def write(self, record):
        record.clear()  # its own copy
        self._maybe("write")

    def rewind(self, step):
        self._maybe("rewind")

    def close(self):
        self._maybe("close")


@pytest.mark.parametrize("how", ["raises", "exits", "hangs"])
@pytest.mark.parametrize("when", ["start", "write", "rewind", "close"])
def test_a_writer_holds_nothing_up(tmp_path, capsys, monkeypatch, when, how):
    """Whatever it does in whichever call: one warning, and the calls of the run return at once."""
    monkeypatch.setattr("jaxdp.metrics.writers.START", 0.2)
    monkeypatch.setattr("jaxdp.metrics.writers.LONGEST_CALL", 0.5)
    began = time.monotonic()
    (writer,) = make_writers(
        [{"target": f"{__name__}.Bad", "args": {"when": when, "how": how}}], tmp_path, 0, {}
    )
    record = {"step": 1, "split": "train", "loss": 1.0}
    for _ in range(3):
        writer.write(record)
    writer.rewind(0)
    writer.close()
    assert time.monotonic() - began < 5 and record["loss"] == 1.0 and writer.failed
    error = capsys.readouterr().err.splitlines()
    said = "did not answer for 0.5 s" if how == "hangs" else "no route"
    assert said in error[-1] and "training continues without it" in error[-1]
    assert len(error) == 1 + (when == "start" and how == "hangs") and all(
        f"{__name__}.Bad" in e for e in error
    )


def test_a_writer_that_takes_nothing_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxdp.metrics.writers.WAITING", 5)
    (writer,) = make_writers(
        [{"target": f"{__name__}.Bad", "args": {"when": "write", "how": "hangs"}}], tmp_path, 0, {}
    )
    for step in range(20):
        writer.write({"step": step, "split": "train", "loss": 1.0})
    writer.close()
    assert capsys.readouterr().err.count("has 5 queued records and accepts none") == 1


@pytest.mark.slow
@pytest.mark.parametrize("output", first(1, ["/dev/full", "closed", "head"]))
def test_a_run_outlives_its_output(tmp_path, output):
    """A disk that is full of its own log, no standard output, a reader that left: the run ends as
    it would.
    """
    command = [
        *JAXDP,
        "train",
        *DIGITS,
        "--steps",
        "4",
        "--log.every",
        "1",
        "--run_dir",
        str(tmp_path / "run"),
    ]
    redirect = {
        "/dev/full": "> /dev/full 2>&1",
        "closed": ">&-",
        "head": "| head -n 1; exit ${PIPESTATUS[0]}",
    }[output]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirect}', "bash", *command], capture_output=True, text=True, timeout=100,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert '"final"' in lines[-1] and (tmp_path / "run/report.html").is_file()


@pytest.mark.slow
def test_what_is_no_terminal_to_draw_on_gets_lines(tmp_path):
    """A dumb terminal, and one without the panel's characters, as a terminal that says so."""
    code = "from jaxdp.metrics.console import Console; c = Console(9); print(c.panel is not None); c.close()"
    for more, panel in (
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"PYTHONIOENCODING": "latin-1"}, False),
    ):
        ours, theirs = os.openpty()
        variables = {**ENVIRONMENT, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **more}
        subprocess.run(
            [sys.executable, "-c", code], env=variables, stdout=theirs, check=True, timeout=60
        )
        os.close(theirs)
        assert (b"True" in os.read(ours, 10_000)) == panel, more
        os.close(ours)


def test_characters_that_the_output_has_not(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    safe_print.say("files in runs/\u00e9t\u00e9")
    assert raw.getvalue() == b"files in runs/?t?\n"


def test_names_of_metrics_are_no_markup():
    panel = Panel(
        Clock(10), {}, Terminal(file=io.StringIO(), width=100, force_terminal=True), lambda: ""
    )
    panel.write({**TRAIN, "a[/b]": 1.0, "[red]c": 2.0})
    panel.write({"step": 1, "split": "eval", "loss": 1.0, "[/dim]d": 3.0})
    text = drawn(panel, 100)
    panel.close()
    assert "a[/b] 1.0000" in text and "[red]c 2.0000" in text and "[/dim]d 3.0000" in text


@pytest.mark.parametrize(
    "entry, text",
    [
        ("TensorBord", r"log.writers.target: 'TensorBord' .* did you mean 'TensorBoard'"),
        (
            {"target": "TensorBoard", "args": {"foldr": "x"}},
            r"log.writers.args.foldr: .* did you mean 'folder'",
        ),
        (
            {"targt": "TensorBoard"},
            r"log.writers: .* is not a writer; give a name such as TensorBoard",
        ),
        (3, r"log.writers: 3 is not a writer"),
        ("builtins.open", r"log.writers.args.file: open needs it; set log.writers.args.file"),
    ],
)
def test_writers_that_are_none_are_named(entry, text):
    with pytest.raises(UsageError, match=text):
        check_writers([entry])


# --- a trace
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_asks_for_a_trace(tmp_path):
    """SIGUSR2 ends nothing: the next updates are traced, and the run goes on to its end."""
    run = start(
        "--steps",
        "100000",
        "--log.every",
        "50",
        "--eval.every",
        "null",
        "--run_dir",
        str(tmp_path / "run"),
    )
    wait_for(
        lambda: (
            (tmp_path / "run/metrics.jsonl").is_file()
            and (tmp_path / "run/metrics.jsonl").stat().st_size
        )
    )
    run.send_signal(signal.SIGUSR2)
    wait_for(lambda: list((tmp_path / "run/profile").rglob("*.xplane.pb")))
    before = len((tmp_path / "run/metrics.jsonl").read_text().splitlines())
    wait_for(lambda: len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) > before)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 75


FOLDER = """
import pathlib, jaxdp
from jaxdp.run import callbacks

jaxdp.init()
print(callbacks.folder(pathlib.Path("run")))
"""


@pytest.mark.mpi
def test_each_process_has_its_own_folder_of_traces():
    assert callbacks.folder(pathlib.Path("run")) == pathlib.Path("run/profile")
    jobs = processes(["-c", FOLDER], ranks(2, f"127.0.0.1:{port()}"), timeout=120)
    assert [job.stdout for job in jobs] == ["run/profile/rank_0\n", "run/profile/rank_1\n"], jobs
