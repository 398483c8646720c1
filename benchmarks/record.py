"""What was measured last on each machine, and the tables of the pages that are written from it.

    python -m benchmarks.record          # writes the tables again, from record.json
    python -m benchmarks.run --record    # measures, keeps it in record.json, writes the tables

record.json has, for each processor, the newest result of each case. A table stands in its page
between `<!-- NAME: written by benchmarks/record.py -->` and `<!-- end -->`: whoever edits it there
finds it overwritten, and a test compares the two.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.cases import CASES, CPU, LONG, Case, Claim, Script
from benchmarks.job import ROOT

FILE = ROOT / "benchmarks" / "record.json"
MARGIN = 0.05
"""The share by which a measurement may miss what a page says, before it does not hold."""

Record = dict[str, dict[str, dict[str, Any]]]
"""{processor: {case: result}}; a result has `date`, and what `kept` and `kept_script` return."""

SHOWN = {
    "speed": ("{a}: {number:.3f}x as fast as {b}", "at least {bound:.2f}x"),
    "overhead": ("{a}: {number:+.1%} time over {b}", "at most {bound:+.0%}"),
    "microseconds": ("{a}: {number:+.0f} us an update over {b}", "at most {bound:+.0f} us"),
    "within": ("{a} and {b} differ by {number:.1%}", "at most {bound:.0%}"),
}
UNITS = {
    "speed": "{:.2f}x",
    "overhead": "{:+.1%}",
    "microseconds": "{:+.0f} us",
    "within": "{:.1%}",
}


def load() -> Record:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def keep(results: Iterable[tuple[Case | Script, dict[str, Any]]]) -> None:
    """Put results in place of the older ones of this processor, and write the tables again.

    A case that failed keeps its older result: the failure is in what `run` prints.
    """
    record = load()
    for case, found in results:
        if "failed" not in found:
            cpu = found["machine"]["cpu"]
            record.setdefault(cpu, {})[case.name] = kept(case, found)
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    write(record)


def kept(case: Case | Script, found: dict[str, Any]) -> dict[str, Any]:
    """What the tables need of a result: medians in ms, the number of each claim, and the date."""
    short: dict[str, Any] = {"date": found["date"][:10], "cores": found["machine"]["cores"]}
    if isinstance(case, Script):
        return short | {"numbers": {c["name"]: c["number"] for c in found["claims"]}}
    own = found["contenders"]
    medians = {name: round(1e3 * x["median"], 4) for name, x in own.items()}
    versions: dict[str, str] = {}
    for x in own.values():
        versions |= x["versions"]
    return short | {"ms": medians, "versions": versions, "repeats": found["repeats"]}


# ------------------------------------------------------------------------------------- numbers


def number_of(claim: Claim, ms: dict[str, float]) -> float | None:
    """The number of a claim from medians in ms; None where a contender was left out."""
    if claim.a not in ms or claim.b not in ms:
        return None
    a, b = ms[claim.a], ms[claim.b]
    return {
        "speed": b / a,
        "overhead": a / b - 1,
        "microseconds": 1e3 * (a - b),
        "within": abs(a / b - 1),
    }[claim.kind]


def holds(number: float, bound: float, larger_is_better: bool, margin: float = 0.0) -> bool:
    slack = margin * abs(bound)
    return number >= bound - slack if larger_is_better else number <= bound + slack


def check(results: Sequence[tuple[Case | Script, dict[str, Any]]]) -> list[tuple[str, str]]:
    """(verdict, statement) for everything that a page says and these cases measure.

    The verdict is "holds", "DOES NOT HOLD" or "not measured"; a case that is not among the results
    is not measured. What a page says may be missed by `MARGIN`.
    """
    found_of = {case.name: found for case, found in results}
    rows = []
    for case in CASES:
        found = found_of.get(case.name, {"failed": ""})
        own = None if "failed" in found else kept(case, found)
        for text, number, bound, larger in stated(case, own):
            statement = f"{case.name}: {text}"
            if number is None:
                rows.append(("not measured", statement))
            else:
                verdict = "holds" if holds(number, bound, larger, MARGIN) else "DOES NOT HOLD"
                rows.append((verdict, f"{statement}: now {number:.3g}"))
    return rows


def stated(
    case: Case | Script, own: dict[str, Any] | None
) -> Iterable[tuple[str, float | None, float, bool]]:
    """What the page of performance says of a case: text, number (None: not measured), bound, and
    whether larger is better.
    """
    if isinstance(case, Script):
        for figure in case.claims:
            if figure.stated is not None:
                number = own["numbers"].get(figure.name) if own else None
                text = f"{figure.text}: {figure.word} {figure.stated:g}"
                yield text, number, figure.stated, figure.word == "at least"
        return
    for claim in case.claims:
        if claim.stated is not None:
            number = number_of(claim, own["ms"]) if own else None
            text = f"{claim.a} at least {claim.stated:g}x as fast as {claim.b}"
            yield text, number, claim.stated, True


# -------------------------------------------------------------------------------------- tables


def newest_first(record: Record) -> list[str]:
    """The processors, that with the newest result first."""
    dates = {cpu: max(own["date"] for own in cases.values()) for cpu, cases in record.items()}
    return sorted(dates, key=lambda cpu: (dates[cpu], cpu), reverse=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machines(record: Record) -> str:
    """Letter, processor, cores, packages and dates of each machine that is in the record."""
    rows = []
    for letter, cpu in zip("ABCDEFGH", newest_first(record)):
        own = record[cpu].values()
        dates = sorted({x["date"] for x in own})
        versions: dict[str, str] = {}
        for x in own:
            versions |= x.get("versions", {})
        packages = ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))
        cores = str(max(x["cores"] for x in own))
        rows.append(
            (letter, cpu, cores, packages, " to ".join(dict.fromkeys([dates[0], dates[-1]])))
        )
    return table(("", "processor", "cores", "packages", "measured"), rows)


def times(record: Record) -> str:
    """The median milliseconds of an update: a row for each contender, a column for each machine."""
    cpus = newest_first(record)
    rows = []
    for case in CPU:
        for entry in case.contenders:
            cells = [record[cpu].get(case.name, {}).get("ms", {}).get(entry.name) for cpu in cpus]
            if any(cells):
                shown = ["" if x is None else f"{x:.4g}" for x in cells]
                rows.append((f"`{case.name}`", entry.name, *shown))
    return table(("case", "ms an update", *"ABCDEFGH"[: len(cpus)]), rows)


def goals(record: Record, cases: Sequence[Case | Script]) -> str:
    """Each number that is asked for: a column for each machine, bold where it is missed."""
    cpus = newest_first(record)
    rows = []
    for case in cases:
        results = [record[cpu].get(case.name) for cpu in cpus]
        if not any(results):
            continue
        for text, bound, shown in goals_of(case, results):
            rows.append((f"`{case.name}`", text, bound, *shown))
    return table(("case", "number", "goal", *"ABCDEFGH"[: len(cpus)]), rows)


def goals_of(
    case: Case | Script, results: Sequence[dict[str, Any] | None]
) -> Iterable[tuple[str, str, list[str]]]:
    """Text, goal and a cell for each result, of each number of a case that has a goal."""
    if isinstance(case, Script):
        for figure in case.claims:
            values = [r["numbers"].get(figure.name) if r else None for r in results]
            cells = [
                cell(x, f"{x:.4g}", figure.bound, figure.word == "at least")
                if x is not None
                else ""
                for x in values
            ]
            yield figure.text or figure.name, f"{figure.word} {figure.bound:g}", cells
        return
    for claim in case.claims:
        if claim.bound is None:
            continue
        values = [number_of(claim, r["ms"]) if r else None for r in results]
        cells = [
            cell(x, UNITS[claim.kind].format(x), claim.bound, claim.kind == "speed")
            if x is not None
            else ""
            for x in values
        ]
        if any(cells):
            bound = SHOWN[claim.kind][1].format(bound=claim.bound)
            yield f"{claim.a}, {claim.b}", bound, cells


def cell(number: float, text: str, bound: float, larger_is_better: bool) -> str:
    return text if holds(number, bound, larger_is_better) else f"**{text}**"


def speeds(record: Record) -> str:
    """What the page of performance says, and what was measured on each machine."""
    cpus = newest_first(record)
    rows = []
    for case in CASES:
        results = [record[cpu].get(case.name) for cpu in cpus]
        columns = [list(stated(case, own)) for own in results]
        for i, (text, _, _, _) in enumerate(stated(case, None)):
            numbers = [column[i][1] for column in columns]
            shown = ["" if x is None else f"{x:.2f}" for x in numbers]
            title = f": {case.title}" if isinstance(case, Case) else ""
            rows.append((f"`{case.name}`{title}", text, *shown))
    return table(("case", "what holds", *"ABCDEFGH"[: len(cpus)]), rows)


def tables(record: Record) -> dict[str, str]:
    """{name of the mark: the table that stands there}."""
    return {
        "machines": machines(record),
        "times": times(record),
        "goals": goals(record, CASES),
        "long": goals(record, LONG),
        "speeds": speeds(record),
    }


PAGES = ("benchmarks/RESULTS.md", "benchmarks/history.md", "docs/performance.md")


def mark(script: str) -> re.Pattern[str]:
    """The places of the tables that a script writes: its groups are the first line, the name of the
    table and the last line.
    """
    line = rf"(<!-- (\w+): written by benchmarks/{script}\.py -->\n\n)"
    return re.compile(line + r".*?(<!-- end -->)", re.DOTALL)


MARK = mark("record")


def rendered(page: str, record: Record) -> str:
    """The text of a page with the tables of a record between its marks."""
    return filled(page, "record", tables(record))


def filled(page: str, script: str, made: dict[str, str]) -> str:
    """The text of a page with the tables of a script between its marks."""
    return mark(script).sub(lambda found: f"{found[1]}{made[found[2]]}\n\n{found[3]}", page)


def write(record: Record) -> None:
    """Write the tables into the pages."""
    for name in PAGES:
        fill(ROOT / name, "record", tables(record))


def fill(page: pathlib.Path, script: str, made: dict[str, str]) -> None:
    """Write the tables of a script between its marks on a page, and say whether it changed."""
    before = page.read_text()
    after = filled(before, script, made)
    name = page.relative_to(ROOT)
    print(f"{name}: {'as it was' if after == before else 'written'}")
    page.write_text(after)


if __name__ == "__main__":
    write(load())
