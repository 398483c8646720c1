"""Run the cases, print what was measured beside what is claimed, and write all samples as JSON.

    python -m benchmarks.run [--only NAME ...] [--repeats 7] [--minutes 12] [--root FOLDER_OF_CIFAR10] [--markdown FILE]
        [--check] [--record]

--check says at the end which statements of docs/performance.md hold, with a margin of 5 %, and ends
with 1 if one does not, or was not measured. --record writes the results into record.json and into
the tables of RESULTS.md and docs/performance.md. The scripts of `LONG` run only by --only.

PyTorch is taken from the Python that JAXDP_BENCH_TORCH names, else from .venv-torch. A contender or
a case that fails is left out, with the reason; claims about it are not judged, all else is
measured. Exit codes: 0 all was measured, 1 something is missing.
"""

import argparse
import json
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import harness, job, record
from benchmarks.cases import CASES, LONG, SMALLEST, Case, Claim, Entry, Script
from benchmarks.record import SHOWN
from jaxdp.process.environment import tunables

ROOT = job.ROOT
TORCH = "JAXDP_BENCH_TORCH"
# Seconds that a script takes, to share out the time; and when it is ended.
SCRIPT_SECONDS, MOST_SECONDS = 40.0, 1200.0


def main(argv: list[str], cases: tuple[Case | Script, ...] = (*CASES, *LONG)) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[case.name for case in cases])
    parser.add_argument(
        "--smallest", action="store_true", help="instead, in seconds: does everything run?"
    )
    parser.add_argument("--repeats", type=int, default=7, help="at most; at least 3")
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="repeats are left out as this time runs out"
    )
    parser.add_argument("--root", default="random", help="of CIFAR-10; left out, random images")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--check", action="store_true", help="does what the pages say hold?")
    parser.add_argument("--record", action="store_true", help="write the pages' tables")
    parser.add_argument(
        "--markdown", type=pathlib.Path, metavar="FILE", help="write the results as one table"
    )
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    end, missing = time.monotonic() + 60 * options.minutes, []
    results: list[tuple[Case | Script, dict[str, Any]]] = []
    cases = (
        SMALLEST
        if options.smallest
        else tuple(case for case in cases if case.name in (options.only or standard(cases)))
    )
    for i, case in enumerate(cases):
        began = time.monotonic()
        scripts = sum(isinstance(later, Script) for later in cases[i:])
        seconds = (end - began - SCRIPT_SECONDS * scripts) / max(1, len(cases) - i - scripts)
        try:
            if isinstance(case, Script):
                found, text = run_script(case, options.root)
            else:
                found = measure(case, options.repeats, options.root, seconds)
                text = table(case, found)
        except Exception as error:  # whatever it is, the other cases are measured
            found = {
                "failed": str(error)
                if isinstance(error, job.Failed)
                else f"{type(error).__name__}: {error}"
            }
            text = f"\n{case.name}: not measured: {found['failed']}"
            missing.append(f"{case.name}: not measured: {job.first_line(found['failed'])}")
        missing += [
            f"{case.name}: {name}: {job.first_line(why)}"
            for name, why in found.get("left_out", {}).items()
        ]
        found |= {"case": case.name, "took_s": time.monotonic() - began}
        results.append((case, found))
        (options.out / f"{case.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        if options.markdown:
            options.markdown.write_text(markdown(results))
        print(text, flush=True)
    print(
        "\n"
        + "\n  ".join(
            ["missing:", *missing] if missing else [f"all of {len(cases)} cases were measured"]
        )
    )
    if options.record:
        record.keep(results)
    verdicts = record.check(results) if options.check else []
    for verdict, statement in sorted(verdicts):
        print(f"{verdict:14}{statement}")
    return 1 if missing or any(verdict != "holds" for verdict, _ in verdicts) else 0


def standard(cases: Sequence[Case | Script]) -> set[str]:
    """The names of the cases that run where none is named."""
    return {case.name for case in cases if case not in LONG}


def measure(case: Case, repeats: int, root: str, seconds: float = float("inf")) -> dict[str, Any]:
    """Return the figures of a case, and a verdict on each claim whose contenders were measured.
    Raises Failed.

    seconds: after which no repeat begins, except the first few.
    """
    began, torch = time.monotonic(), torch_python()
    total = case.check + (repeats + 1) * (case.updates + 1)
    no_torch = {
        e.name: f"there is no PyTorch; {TORCH} names its Python"
        for e in case.contenders
        if is_torch(e)
    }
    left_out = {} if torch else no_torch
    config = [
        "--config",
        str(ROOT / case.config),
        "--microbatches",
        str(case.processes),
        *case.args,
    ]
    if "benchmarks.data.Images" in case.args:
        config += ["--data.args.root", root]
    with tempfile.TemporaryDirectory() as folder:
        material = pathlib.Path(folder) / "material"
        make_material(material, total, config)
        contenders = [
            contender_of(
                case,
                entry,
                material,
                pathlib.Path(folder) / f"run{i}",
                [*config, "--steps", str(total)],
            )
            for i, entry in enumerate(case.contenders)
            if entry.name not in left_out
        ]
        found = harness.measure(
            contenders,
            pathlib.Path(folder) / "logs",
            updates=case.updates,
            repeats=repeats,
            check=case.check,
            tolerance=case.tolerance,
            seconds=seconds - (time.monotonic() - began),
        )
    found["left_out"] = {**left_out, **found["left_out"]}
    claims = [c for c in case.claims if {c.a, c.b} <= set(found["contenders"])]
    return {
        **found,
        "claims": [judge(c, found) for c in claims],
        "not_judged": len(case.claims) - len(claims),
    }


def make_material(folder: pathlib.Path, updates: int, config: list[str]) -> None:
    job.output(
        [sys.executable, "-m", "benchmarks.material", str(folder), str(updates), *config],
        timeout=300,
    )


def is_torch(entry: Entry) -> bool:
    return entry.script.startswith("torch")


def contender_of(
    case: Case, entry: Entry, material: pathlib.Path, run: pathlib.Path, config: list[str]
) -> job.Contender:
    python, launcher, words = sys.executable, "mpirun", [str(material), *entry.args]
    if entry.script == "jaxdp_loop":
        words = [str(run), *config, "--epochs", "null", *entry.args]
    elif is_torch(entry):
        python, launcher = str(torch_python()), "ranks"
    command = [python, "-m", "benchmarks.contender", f"benchmarks.{entry.script}", *words]
    env = {"GLIBC_TUNABLES": tunables()} if entry.malloc else {}
    return job.Contender(
        entry.name, command, case.processes, launcher if case.processes > 1 else "none", env
    )


def torch_python() -> str | None:
    """Return the Python that has PyTorch, if there is one."""
    path = pathlib.Path(os.environ.get(TORCH, ROOT / ".venv-torch" / "bin" / "python"))
    return str(path) if path.exists() else None


def run_script(case: Script, root: str) -> tuple[dict[str, Any], str]:
    """Return what a script printed as JSON, and the same as text with a verdict on its claims.
    Raises Failed.
    """
    launch = job.mpirun(case.processes) if case.processes > 1 else []
    command = [*launch, sys.executable, *case.command, *(["--root", root] if case.root else [])]
    lines = [x for x in job.output(command, MOST_SECONDS).splitlines() if x.startswith("{")]
    if not lines:
        raise job.Failed("it printed no result")
    printed = job.read(lines[-1])
    if not isinstance(printed, dict):
        raise job.Failed(f"its result is no JSON: {lines[-1][:80]!r}")
    found = {**printed, **harness.machine(), "claims": []}
    text = [f"\n{case.name}: {' '.join(case.command)}, {found['date']}"]
    for figure in case.claims:
        number: Any = printed
        for word in figure.name.split("."):
            number = number.get(word) if isinstance(number, dict) else None
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise job.Failed(f"it printed no number `{figure.name}`: {number!r}")
        goal = f"{figure.word} {figure.bound}"
        met = record.holds(number, figure.bound, figure.word == "at least")
        found["claims"].append({"name": figure.name, "number": number, "asked": goal, "holds": met})
        text.append(f"  {figure.name}: {number:.3f}; {asked(goal, met)}")
    return found, "\n".join(text)


def judge(claim: Claim, found: dict[str, Any]) -> dict[str, Any]:
    """Return the claim's number, and whether it holds (None where nothing is claimed)."""
    speed = harness.ratio(found, claim.a, claim.b)
    a, b = (found["contenders"][name]["median"] for name in (claim.a, claim.b))
    number = record.number_of(claim, {claim.a: 1e3 * a, claim.b: 1e3 * b})
    holds = (
        None
        if number is None or claim.bound is None
        else record.holds(number, claim.bound, claim.kind == "speed")
    )
    fields = {"kind": claim.kind, "a": claim.a, "b": claim.b, "bound": claim.bound}
    return {**fields, "speed": speed, "number": number, "holds": holds}


VERDICT = {True: "holds", False: "DOES NOT HOLD"}


def shown(claim: dict[str, Any]) -> str:
    return SHOWN[claim["kind"]][0].format(**claim)


def verdict(claim: dict[str, Any]) -> str:
    """Return what is asked and whether it holds; nothing for a claim without a bound."""
    return (
        ""
        if claim["holds"] is None
        else asked(SHOWN[claim["kind"]][1].format(**claim), claim["holds"])
    )


def asked(bound: str, holds: bool) -> str:
    return f"asked: {bound}: {VERDICT[holds]}"


def table(case: Case, found: dict[str, Any]) -> str:
    """Return a line for each contender, one for each claim, and one for each contender that was
    left out.
    """
    units, unit = case.per_update
    processes = f"{case.processes} process{'es' * (case.processes > 1)}"
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found["phases_s"].items())
    lines = [
        f"\n{case.name}: {case.config}, {processes}, {found['repeats']} repeats, {found['date']} ({phases})"
    ]
    lines.append(
        f"  {'':28} {'ms/update':>10} {'quartiles':>19} {unit + '/s':>12} {'first':>8} {'loss error':>11}"
    )
    for name, own in found["contenders"].items():
        low, high = (1e3 * x for x in own["quartiles"])
        lines.append(
            f"  {name:28} {1e3 * own['median']:10.3f} {f'{low:.3f} to {high:.3f}':>19} {units / own['median']:12,.0f} "
            f"{own['first_update_s']:6.1f} s {own['relative_loss_error']:11.1e}"
        )
    for claim in found["claims"]:
        low, high = claim["speed"]["quartiles"]
        each = f"each repeat {claim['speed']['median']:.3f}x, quartiles {low:.3f} to {high:.3f}"
        lines.append("; ".join([f"  {shown(claim)} ({each})", *filter(None, [verdict(claim)])]))
    lines += [
        f"  left out: {name}: {why}".replace("\n", "\n  ")
        for name, why in found["left_out"].items()
    ]
    if found["not_judged"]:
        lines.append(
            f"  not judged, because a contender is left out: {found['not_judged']} of {len(case.claims)} claims"
        )
    return "\n".join(lines)


def markdown(results: Sequence[tuple[Case | Script, dict[str, Any]]]) -> str:
    """Return date, machine and versions, and one table: a row for each contender, each claim and
    each failure.
    """
    machine = harness.machine()
    versions: dict[str, str] = {}
    for _, found in results:
        for own in found.get("contenders", {}).values():
            versions |= own["versions"]
    where, packages = (
        machine["machine"],
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    )
    lines = [
        f"{machine['date']}; {where['cpu']}, {where['cores']} cores, {where['system']}; "
        + (packages or f"python {machine['python']}"),
        "",
        "| case | | median | quartiles | per second | first update | verdict |",
        "|---" * 7 + "|",
    ]
    for case, found in results:
        rows: list[tuple[str, ...]] = []
        units, unit = case.per_update if isinstance(case, Case) else (1, "")
        for name, own in found.get("contenders", {}).items():
            median, low, high = (f"{1e3 * x:.3f}" for x in (own["median"], *own["quartiles"]))
            rate, first = f"{units / own['median']:,.0f} {unit}", f"{own['first_update_s']:.1f} s"
            rows.append((name, f"{median} ms", f"{low} to {high}", rate, first, ""))
        for claim in found.get("claims", ()):
            if isinstance(case, Script):
                rows.append(
                    (
                        claim["name"],
                        f"{claim['number']:.3f}",
                        "",
                        "",
                        "",
                        asked(claim["asked"], claim["holds"]),
                    )
                )
            else:
                low, high = claim["speed"]["quartiles"]
                of_repeats = f"{low:.3f} to {high:.3f}x"
                rows.append(
                    (
                        shown(claim),
                        f"{claim['speed']['of_medians']:.3f}x",
                        of_repeats,
                        "",
                        "",
                        verdict(claim),
                    )
                )
        left_out = {
            **found.get("left_out", {}),
            **({"": found["failed"]} if "failed" in found else {}),
        }
        rows += [
            (name, "", "", "", "", f"not measured: {job.first_line(why)}")
            for name, why in left_out.items()
        ]
        lines += [
            f"| {' | '.join(cell.replace('|', '/') for cell in (case.name, *row))} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
