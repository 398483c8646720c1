"""Runs the cases, prints what was measured beside what is claimed, and writes all samples as JSON.

    python -m benchmarks.run [--only NAME ...] [--repeats 7] [--root FOLDER_OF_CIFAR10] [--out benchmarks/results]

PyTorch is taken from the Python that JAXDP_BENCH_TORCH names, else from .venv-torch; without either, it is left out.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import harness
from benchmarks.cases import CPU, SCRIPTS, Case, Claim, Entry, Script
from jaxdp.config import Config
from jaxdp.environment import tunables

ROOT = harness.ROOT
TORCH = "JAXDP_BENCH_TORCH"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[case.name for case in (*CPU, *SCRIPTS)])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--root", default="random", help="of CIFAR-10; left out, random images")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for case in (*CPU, *SCRIPTS):
        if options.only and case.name not in options.only:
            continue
        began = time.monotonic()
        try:
            if isinstance(case, Script):
                found, text = run_script(case, options.root)
            else:
                found = measure(case, options.repeats, options.root)
                text = table(case, found)
        except harness.Unfair as error:
            print(f"\n{case.name}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        found |= {"case": case.name, "took_s": time.monotonic() - began}
        (options.out / f"{case.name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(text, flush=True)
    return 1 if failed else 0


def measure(case: Case, repeats: int, root: str) -> dict[str, Any]:
    """What the harness finds, and a verdict on each claim; UsageErrors of a contender are in its last words."""
    torch, total = torch_python(), case.check + (repeats + 1) * (case.updates + 1)
    left_out = [entry.name for entry in case.contenders if not available(entry, torch)]
    entries = [entry for entry in case.contenders if entry.name not in left_out]
    own = list(case.args)
    if "benchmarks.data.Images" in own:
        own += ["--data.args.root", root]
    config = ["--config", str(ROOT / case.config), "--microbatches", str(case.processes), *own]
    with tempfile.TemporaryDirectory() as folder:
        material = pathlib.Path(folder) / "material"
        make_material(material, total, config)
        contenders = []
        for i, entry in enumerate(entries):
            run = pathlib.Path(folder) / f"run{i}"
            contenders.append(contender_of(case, entry, material, run, [*config, "--steps", str(total)], torch))
        found = harness.measure(
            contenders,
            pathlib.Path(folder) / "logs",
            updates=case.updates,
            repeats=repeats,
            check=case.check,
            tolerance=case.tolerance,
        )
    present = [c for c in case.claims if not {c.a, c.b} & set(left_out)]
    return {**found, "left_out": left_out, "claims": [judge(claim, found) for claim in present]}


def make_material(folder: pathlib.Path, updates: int, config: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.material", str(folder), str(updates), *config]
    done = subprocess.run(command, env=harness.environment(), text=True, capture_output=True, timeout=300)
    if done.returncode:
        raise harness.Unfair(f"no material: {done.stderr[-2000:]}")


def contender_of(
    case: Case, entry: Entry, material: pathlib.Path, run: pathlib.Path, config: list[str], torch: str | None
) -> harness.Contender:
    python, launcher = sys.executable, "mpirun" if case.processes > 1 else "none"
    words = [str(material), *entry.args]
    if entry.script == "jaxdp_loop":
        words = [str(run), *config, "--epochs", "null", *entry.args]
    elif entry.script.startswith("torch"):
        assert torch is not None
        python, launcher = torch, "ranks" if case.processes > 1 else "none"
    command = [python, "-m", "benchmarks.contender", f"benchmarks.{entry.script}", *words]
    env = {"GLIBC_TUNABLES": tunables()} if entry.malloc else {}
    return harness.Contender(entry.name, command, case.processes, launcher, env)


def available(entry: Entry, torch: str | None) -> bool:
    """Whether there is PyTorch for it, or the key that it sets."""
    if entry.script.startswith("torch"):
        return torch is not None
    keys = {field.name for field in dataclasses.fields(Config)}
    return all(word[2:].partition(".")[0] in keys for word in entry.args if word.startswith("--")) or (
        entry.script != "jaxdp_loop"
    )


def run_script(case: Script, root: str) -> tuple[dict[str, Any], str]:
    """(what it printed, with a verdict on its claims; the same as text)."""
    launch = ["mpirun", "-np", str(case.processes), "--bind-to", "none", "--oversubscribe"] * (case.processes > 1)
    command = [*launch, sys.executable, *case.command, *(["--root", root] if case.root else [])]
    done = subprocess.run(command, cwd=ROOT, env=harness.environment(), text=True, capture_output=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise harness.Unfair(f"it ended with code {done.returncode}: {done.stderr[-2000:]}")
    found = {**json.loads(lines[-1]), **harness.machine()}
    text = [f"\n{case.name}: {' '.join(case.command)}, {found['date']}"]
    for name, word, bound in case.claims:
        holds = found[name] >= bound if word == "at least" else found[name] <= bound
        text.append(f"  {name}: {found[name]:.3f}; asked: {word} {bound}: {VERDICT[holds]}")
    return found, "\n".join(text)


def torch_python() -> str | None:
    """The Python that has PyTorch, if there is one."""
    own = pathlib.Path(os.environ.get(TORCH, ROOT / ".venv-torch" / "bin" / "python"))
    return str(own) if own.exists() else None


def judge(claim: Claim, found: dict[str, Any]) -> dict[str, Any]:
    """The claim's number, and whether it holds (None where nothing is claimed)."""
    speed = harness.ratio(found, claim.a, claim.b)
    a, b = (found["contenders"][name]["median"] for name in (claim.a, claim.b))
    number = {
        "speed": speed["of_medians"],
        "overhead": a / b - 1,
        "microseconds": 1e6 * (a - b),
        "within": abs(a / b - 1),
    }[claim.kind]
    holds = None if claim.bound is None else number >= claim.bound if claim.kind == "speed" else number <= claim.bound
    return {"kind": claim.kind, "a": claim.a, "b": claim.b, "bound": claim.bound, "speed": speed} | {
        "number": number,
        "holds": holds,
    }


SHOWN = {
    "speed": ("{a}: {number:.3f}x as fast as {b}", "at least {bound:.2f}x"),
    "overhead": ("{a}: {number:+.1%} time over {b}", "at most {bound:+.0%}"),
    "microseconds": ("{a}: {number:+.0f} us an update over {b}", "at most {bound:+.0f} us"),
    "within": ("{a} and {b} differ by {number:.1%}", "at most {bound:.0%}"),
}


def table(case: Case, found: dict[str, Any]) -> str:
    """A line for each contender, one for each claim."""
    units, unit = case.per_update
    lines = [f"\n{case.name}: {case.config}, {case.processes} process{'es' * (case.processes > 1)}, {found['date']}"]
    lines.append(f"  {'':28} {'ms/update':>10} {'quartiles':>19} {unit + '/s':>12} {'first':>8} {'loss error':>11}")
    for name, own in found["contenders"].items():
        low, high = (1e3 * x for x in own["quartiles"])
        lines.append(
            f"  {name:28} {1e3 * own['median']:10.3f} {f'{low:.3f} to {high:.3f}':>19} {units / own['median']:12,.0f} "
            f"{own['first_update_s']:6.1f} s {own['relative_loss_error']:11.1e}"
        )
    for claim in found["claims"]:
        shown, asked = SHOWN[claim["kind"]]
        verdict = "" if claim["holds"] is None else f"; asked: {asked.format(**claim)}: {VERDICT[claim['holds']]}"
        low, high = claim["speed"]["quartiles"]
        each = f"each repeat {claim['speed']['median']:.3f}x, quartiles {low:.3f} to {high:.3f}"
        lines.append(f"  {shown.format(**claim)} ({each}){verdict}")
    if found["left_out"]:
        lines.append(f"  left out, as there is no PyTorch ({TORCH}) or no such key: {', '.join(found['left_out'])}")
    return "\n".join(lines)


VERDICT = {True: "holds", False: "DOES NOT HOLD"}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
