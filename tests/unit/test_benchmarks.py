"""The harness of the benchmarks: what is compared trains the same thing, and nobody drops out
unseen.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys

import pytest

from benchmarks import gpu, gpu_bench, harness, published, record, run, targets
from benchmarks.cases import CASES, OURS, PLAIN, Case, Claim, Entry, Figure, Script
from benchmarks.job import Contender, Failed

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ["--config", str(ROOT / "benchmarks/configs/digits_mlp.yaml"), "--steps", "45"]
CORES = [0]


def ours(name, folder, *more):
    return Contender(name, [*start("benchmarks.jaxdp_loop"), str(folder / name), *CONFIG, *more])


def start(module):
    return [sys.executable, "-m", "benchmarks.contender", module]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.fixture
def material(tmp_path):
    run.make_material(tmp_path / "material", 45, CONFIG)
    return tmp_path / "material"


@pytest.mark.slow
def test_the_loop_and_one_by_hand_have_one_curve(tmp_path, material):
    contenders = [
        ours("jaxdp", tmp_path),
        Contender("plain", [*start("benchmarks.plain.jit_loop"), str(material)]),
        Contender("flax", [*start("benchmarks.plain.nnx_loop"), str(material)]),
    ]
    found = harness.measure(
        contenders, tmp_path / "logs", updates=5, repeats=2, cores=CORES, timeout=60
    )
    assert json.loads(json.dumps(found))["repeats"] == 2
    for own in found["contenders"].values():
        assert len(own["seconds_per_update"]) == 2 and min(own["seconds_per_update"]) > 0
        assert own["cores"] == CORES and own["relative_loss_error"] < 1e-5
        assert len(own["losses"]) == 15 and own["losses"][-1] < own["losses"][0]
    speed = harness.ratio(found, "plain", "jaxdp")
    first, second = (found["contenders"][name]["seconds_per_update"] for name in ("jaxdp", "plain"))
    assert speed["of_medians"] == pytest.approx(sum(first) / sum(second))


FAULTS = {  # of tests/support/faulty_contender.py: the reason that is reported
    "differs": r"its losses differ from those of good by 1\.5e-04 \(at most 1\.0e-04\); at update 10 it has",
    "import": r"(?s)it ended with code 1 before it began.*No module named 'a_package_that_is_not_installed'",
    "nan": r"its losses differ from those of good by inf .* at update 1 it has nan",
    "crash": r"a process ended during `run`",
    "busy": r"it uses \d+% of a core while it waits",
}
QUICK_FAULTS = {
    "exits": r"it ended with code 5 before it began",
    "half a hello": r"it began with \{'name': 'half a hello'\}",
    "few losses": r"it has 11 losses of 12 updates",
    "killed": r"a process ended during `run`",
    "garbage": r"it answered '.* what\?' to `run`",
    "no seconds": r"it answered '\{\"seconds\": \"soon\"\}' to `run`",
    "no time": r"it took 0 s for \d+ updates",
}
SLOW_FAULTS = {
    "begins late": r"it did not begin, and no other did for 8 s",
    "no hello": r"it did not begin, and no other did for 8 s",
    "hang": r"no answer to `run` within 8 s",
    "half": r"no answer to `run` within 8 s",
}


def faulty(fault, name=None):
    return Contender(
        name or fault, [sys.executable, str(ROOT / "tests/support/faulty_contender.py"), fault]
    )


def measured(contenders, folder, **more):
    settings = {
        "updates": 40,
        "repeats": 4,
        "check": 12,
        "cores": CORES,
        "timeout": 60.0,
        "idle": 0.05,
    }
    return harness.measure(contenders, folder / "logs", **{**settings, **more})


@pytest.mark.slow
def test_a_failed_contender_is_left_out_with_a_reason(tmp_path):
    absent = Contender("absent", ["a-program-that-does-not-exist"])
    good = [faulty("none", "good"), faulty("none", "also good")]
    found = measured([good[0], absent, *map(faulty, FAULTS), good[1]], tmp_path)
    assert list(found["contenders"]) == ["good", "also good"]
    for own in found["contenders"].values():
        assert len(own["seconds_per_update"]) == found["repeats"] == 4 and own["median"] > 1e-4
    assert "No such file" in found["left_out"].pop("absent")
    assert found["left_out"].keys() == FAULTS.keys()
    for name, reason in FAULTS.items():
        assert re.match(reason, found["left_out"][name]), found["left_out"][name]


def test_a_faulty_contender_leaves_others_measured(tmp_path):
    found = measured([*map(faulty, QUICK_FAULTS), faulty("none", "good")], tmp_path, idle=1.0)
    assert list(found["contenders"]) == ["good"] and found["left_out"].keys() == QUICK_FAULTS.keys()
    for name, reason in QUICK_FAULTS.items():
        assert re.match(reason, found["left_out"][name]), found["left_out"][name]


def test_one_contender_with_too_few_losses_is_left_out(tmp_path):
    with pytest.raises(
        Failed, match="no contender is left: few losses: it has 11 losses of 12 updates"
    ):
        measured([faulty("few losses")], tmp_path)


@pytest.mark.slow
def test_a_contender_that_hangs_is_left_out(tmp_path):
    found = measured([faulty("none", "good"), *map(faulty, SLOW_FAULTS)], tmp_path, timeout=8.0)
    assert list(found["contenders"]) == ["good"] and found["left_out"].keys() == SLOW_FAULTS.keys()
    for name, reason in SLOW_FAULTS.items():
        assert re.match(reason, found["left_out"][name]), found["left_out"][name]


@pytest.mark.slow
def test_if_the_first_is_wrong_the_others_are_compared(
    tmp_path,
):
    found = measured(
        [faulty("differs"), faulty("none", "good"), faulty("none", "also good")], tmp_path
    )
    assert (
        list(found["contenders"]) == ["good", "also good"]
        and "those of good" in found["left_out"]["differs"]
    )


def test_a_case_without_contenders_names_all_reasons(tmp_path):
    with pytest.raises(
        Failed,
        match=r"(?s)no contender is left.*import: it ended with.*nan: its losses are not finite",
    ):
        measured([faulty("import"), faulty("nan")], tmp_path)


@pytest.mark.slow
def test_repeats_end_if_times_are_steady_or_time_is_up(tmp_path, monkeypatch):
    good = [faulty("none", "good")]
    monkeypatch.setattr(harness, "STEADY", float("inf"))
    assert measured(good, tmp_path, repeats=9)["repeats"] == harness.STEADY_REPEATS
    monkeypatch.setattr(harness, "STEADY", 0.0)
    assert measured(good, tmp_path, repeats=9, seconds=0)["repeats"] == harness.LEAST_REPEATS


def test_a_failed_case_leaves_others_and_an_exit_code(tmp_path, capsys):
    cases = (
        Script("broken", ("-c", "raise SystemExit('no disk')"), (Figure("share", "at most", 0.5),)),
        Script("silent", ("-c", "pass"), ()),
        Script("other", ("-c", "print('{}')"), (Figure("share", "at most", 0.5),)),
        Script("text", ("-c", "print('{oops')"), (Figure("share", "at most", 0.5),)),
        Script("nan", ("-c", "print('{\"share\": NaN}')"), (Figure("share", "at most", 0.5),)),
        Script("good", ("-c", "print('{\"share\": 0.2}')"), (Figure("share", "at most", 0.5),)),
    )
    table = tmp_path / "table.md"
    assert run.main(["--out", str(tmp_path), "--markdown", str(table)], cases) == 1
    assert (
        "| broken |  |  |  |  |  | not measured: -c raise SystemExit('no disk')"
        in table.read_text()
    )
    assert table.read_text().endswith(
        "| good | share | 0.200 |  |  |  | asked: at most 0.5: holds |\n"
    )
    text = capsys.readouterr().out
    assert "broken: not measured" in text and "no disk" in text and "it printed no result" in text
    assert "share: 0.200; asked: at most 0.5: holds" in text
    assert text.partition("missing:\n")[2].splitlines() == [
        "  broken: not measured: -c raise SystemExit('no disk') ended with code 1",
        "  silent: not measured: it printed no result",
        "  other: not measured: it printed no number `share`: None",
        "  text: not measured: its result is no JSON: '{oops'",
        "  nan: not measured: it printed no number `share`: nan",
    ]
    assert json.loads((tmp_path / "good.json").read_text())["share"] == 0.2
    assert "no disk" in json.loads((tmp_path / "broken.json").read_text())["failed"]
    assert run.main(["--out", str(tmp_path)], cases[5:]) == 0
    assert capsys.readouterr().out.endswith("all of 1 cases were measured\n")


@pytest.mark.slow
def test_no_claim_on_a_left_out_contender_is_printed(tmp_path, monkeypatch, capsys):
    """Real contenders: two that agree, one with another learning rate, one misconfigured, and an
    absent PyTorch.
    """
    monkeypatch.setenv(run.TORCH, str(tmp_path / "nowhere"))
    wrong, mistaken = (
        Entry(f"lr {lr}", "jaxdp_loop", ("--optimizer.lr", lr)) for lr in ("9e-4", "high")
    )
    entries = (OURS, wrong, mistaken, PLAIN, Entry("torch", "torch_ddp.train"))
    claims = tuple(Claim("speed", "jaxdp", entry.name, 1e-3) for entry in entries[1:])
    case = Case("small", "benchmarks/configs/digits_mlp.yaml", entries, claims, updates=5)
    assert run.main(["--out", str(tmp_path), "--repeats", "3"], (case,)) == 1
    text = capsys.readouterr().out
    assert "left out: torch: there is no PyTorch" in text and "optimizer.lr" in text
    assert "left out: lr 9e-4: its losses differ from those of jaxdp" in text
    assert "left out: lr high: it ended with code" in text and "is left out: 3 of 4 claims" in text
    assert re.findall(r"x as fast as (.+?) \(", text) == ["plain jit"]
    assert len(text.partition("missing:")[2].splitlines()) == 4


def test_quartiles_and_the_worst_difference():
    assert harness.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert harness.worst([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert harness.worst([float("nan")], [1.0]) == float("inf")


def test_a_failed_part_of_the_gpu_set_loses_nothing(tmp_path):
    options = argparse.Namespace(tiny=True, root="random", repeats=2, out=tmp_path)
    bench = gpu.Bench(options, {})

    def interrupted(bench, own):
        own["first"] = 1.0
        raise KeyboardInterrupt

    bench.run("wrong", lambda bench, own: 1 / 0)
    with pytest.raises(KeyboardInterrupt):
        bench.run("long", interrupted)
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["wrong"]["failed"] == "ZeroDivisionError: division by zero"
    assert kept["long"]["failed"].startswith("interrupted") and kept["long"]["first"] == 1.0
    options.tiny, bench.began = False, bench.began - gpu_bench.BUDGET
    bench.run("late", interrupted)
    assert bench.found["late"]["left_out"].startswith("no time")


@pytest.mark.slow
def test_a_failed_gpu_contender_leaves_others_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "torch_python", lambda tiny: (sys.executable, "nowhere"))
    bench = gpu.Bench(
        argparse.Namespace(tiny=True, root="random", repeats=2, out=tmp_path), {"ceilings": {}}
    )
    bench.run("gpt2_124m", gpu.gpt2)
    own = json.loads((tmp_path / "gpu.json").read_text())["gpt2_124m"]
    assert list(own["contenders"]) == ["jaxdp", "plain jit"] and "failed" not in own
    assert "torch compiled: it ended with code" in own["summary"]["torch compiled"]["failed"]
    for name in own["contenders"]:
        figures = own["summary"][name]
        assert figures["units_per_s"] > 0 and figures["relative_loss_error"] < gpu.TOLERANCE
        assert figures["flops_per_s"] == pytest.approx(
            own["flops_per_update"] * figures["units_per_s"] / 512
        )
    parameters = 512 * 96 + 2 * 12 * 96**2
    assert own["flops_per_update"] == pytest.approx(
        512 * 6 * (parameters + 2 * 2 * 96 * 64), rel=0.03
    )
    bench.run("seconds_to_94", gpu.seconds_to_94)
    assert (
        bench.found["seconds_to_94"]["accuracy"] < 0.94
        and not bench.found["seconds_to_94"]["reached"]
    )


def test_tables_of_the_pages_are_those_of_the_record():
    marked = set()
    for name in record.PAGES:
        page = (record.ROOT / name).read_text()
        assert record.rendered(page, record.load()) == page, f"python -m benchmarks.record: {name}"
        marked |= {mark for _, mark, _ in record.MARK.findall(page)}
    assert marked == record.tables({}).keys()


def compiled(**figures):
    """A result of `benchmarks.targets`, without a compiler."""
    made = {"compile_seconds": 9.6, "processor_seconds": 3.0, "rss": 7e8, "date": "2026-01-02"}
    speed = {"step_seconds": 2e-3, "hidden_share": 0.5, "mfu": 0.25, "peak_bytes": 3_000_000}
    return {**made, **speed, "fits": True, **figures}


def test_tables_of_what_was_compiled_are_those_of_the_record():
    page = targets.PAGE.read_text()
    tables = targets.tables(targets.read_results(targets.RECORD))
    assert record.filled(page, "targets", tables) == page, "python -m benchmarks.targets --record"
    assert {name for _, name, _ in record.mark("targets").findall(page)} == tables.keys()
    assert all(f"| {name}" in tables["compiled"] for name in targets.CONFIGS)


def test_the_table_of_splits_is_that_of_the_record():
    page, tables = published.PAGE.read_text(), published.tables()
    assert record.filled(page, "published", tables) == page, (
        "python -m benchmarks.published --splits"
    )
    assert [name for _, name, _ in record.mark("published").findall(page)] == ["published"]
    rule, *seeds = json.loads(published.RECORD.read_text())
    _, judged = published.halves()
    median = published.median_error(judged, published.off)
    assert rule["split"] == "by rule" and rule["after"]["median"] == pytest.approx(median, abs=1e-4)
    for seed, kept in enumerate(seeds):
        fitted, judged = published.halves(seed)
        assert kept["split"] == f"seed {seed}" and kept["judged"] == len(judged) == 31
        assert {*fitted, *judged} == {*published.RUNS}
    assert len(seeds) >= 10 and published.halves(0) != published.halves(1)
    before, after = ([x[which]["median"] for x in seeds] for which in ("before", "after"))
    low, middle, high, old = (
        f"{100 * x:.1f}"
        for x in (min(after), statistics.median(after), max(after), statistics.median(before))
    )
    said = f"is {middle} % ({low} to {high} %) after and {old} % before"
    assert said in (ROOT / "docs/plan.md").read_text(), said
    above = {x["after"]["run"] for x in seeds if x["after"]["largest"] > 0.25}
    assert above <= {rule["after"]["run"]} and all(x["after"]["second"] < 0.25 for x in seeds)


def test_a_compiled_program_has_a_row_for_both_backends():
    programs = targets.configs(("digits", "gpt_3m"), ("h100:8",))
    keys = [program.key for program in programs]
    assert keys[0] == "h100:8 digits --parallel.backend pjit"
    other = {"date": "2026-01-03", "refused": "a | b"}
    found = [compiled(), compiled(fits=False), compiled(date="2026-01-03"), other]
    header, _, *rows = targets.table(programs, dict(zip(keys, found)), scale=False).splitlines()
    assert header.startswith("| compiled 2026-01-02 to 2026-01-03 | target |")
    figures = "10 s (3) | {} | 2 ms | 50% | 25.0% |"
    fits, too_large = figures.format("3 MB"), figures.format("3 MB: does not fit")
    assert rows == [
        f"| digits | h100:8 | {fits} 10 s (3) | the same |",
        f"| gpt_3m | h100:8 | {too_large} - | no: a / b |",
    ]
    found[2] = compiled(step_seconds=0.25)
    _, _, row, _ = targets.table(programs, dict(zip(keys, found)), scale=False).splitlines()
    assert row.endswith("| 10 s (3) | 3 MB; 250 ms; 50%; 25.0% |")


def test_a_model_that_is_cut_in_depth_says_so(monkeypatch):
    monkeypatch.setattr(targets, "SHALLOW", {("gpt_3m", "v5e"): (2, 4)})
    cut = targets.config_program("gpt_3m", "v5e:4x4", "pmap")
    assert cut.name == "gpt_3m, 2 of 4 layers" and cut.words[-2:] == ("--model.args.layers", "2")
    assert targets.config_program("gpt_3m", "h100:8", "pjit").name == "gpt_3m"


def test_the_newest_result_of_a_program_counts(tmp_path):
    file = tmp_path / "results.jsonl"
    assert targets.read_results(file) == {}
    lines = [{"key": "a", "date": "1"}, {"key": "b", "date": "1"}, {"key": "a", "date": "2"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    dates = {key: row["date"] for key, row in targets.read_results(file).items()}
    assert dates == {"a": "2", "b": "1"}


def of_speed(speed):
    """A result of each case: ours takes 1 ms, all others `speed` ms."""
    machine = {"date": "2026-01-02T03:04:05", "machine": {"cpu": "new", "cores": 2}}
    for case in CASES:
        if isinstance(case, Script):
            claims = [{"name": f.name, "number": f.bound} for f in case.claims]
            yield case, machine | {"claims": claims}
        else:
            own = {
                entry.name: {
                    "median": 1e-3 if entry.name.startswith("jaxdp") else 1e-3 * speed,
                    "versions": {"jax": "1.2"},
                }
                for entry in case.contenders
            }
            yield case, machine | {"contenders": own, "repeats": 3}


def test_a_check_names_each_statement_with_its_verdict():
    stated = [x for case in CASES for x in record.stated(case, None)]
    assert len(stated) > 15
    fast = record.check(list(of_speed(20.0)))
    assert [verdict for verdict, _ in fast] == ["holds"] * len(stated)
    slow = record.check(list(of_speed(0.1)))
    assert ("DOES NOT HOLD", "gpt_1: jaxdp at least 0.8x as fast as torch: now 0.1") in slow
    least = next(c.stated for c in CASES[2].claims if c.b == "torch")
    almost = record.check(list(of_speed(least * (1 - record.MARGIN) + 1e-9)))
    assert ("holds", "gpt_1: jaxdp at least 0.8x as fast as torch: now 0.76") in almost
    missing = record.check([(CASES[0], {"failed": "no disk"})])
    assert [verdict for verdict, _ in missing] == ["not measured"] * len(stated)


def test_a_result_takes_the_place_of_an_older_one(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "FILE", tmp_path / "record.json")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    page = (
        "# A page\n\n<!-- {}: written by benchmarks/record.py -->\n\nold\n\n<!-- end -->\n\nText.\n"
    )
    for name, mark in zip(record.PAGES, ("goals", "times", "speeds")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(page.format(mark))
    record.keep(of_speed(2.0))
    record.keep([(CASES[0], {"failed": "no disk"})])
    assert "| `gpt_1` | torch | 2 |" in (tmp_path / record.PAGES[1]).read_text()
    record.keep(of_speed(3.0))
    goals, times, speeds = ((tmp_path / name).read_text() for name in record.PAGES)
    assert "| `gpt_1` | torch | 3 |" in times and times.endswith("<!-- end -->\n\nText.\n")
    assert "jaxdp at least 0.8x as fast as torch | 3.00 |" in speeds and "\nold\n" not in speeds
    assert "| `gpt_1` | jaxdp, torch | at least 1.00x | 3.00x |" in goals and "**" not in goals
