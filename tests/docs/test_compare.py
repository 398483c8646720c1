"""The table of features and the page of results: what they name in this repository exists."""

import ast
import pathlib
import re

from benchmarks.cases import CASES, LONG

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "compare.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.splitlines()
    if re.match(r"\| [^|\-]", line)
]


def test_every_row_has_a_command_and_a_test_or_says_no():
    names = {}
    for file in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(file.read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        names[file.relative_to(ROOT / "tests").as_posix()] = found
    assert len(ROWS) > 60 and len({row[0] for row in ROWS}) == len(ROWS)
    assert f"[{len(ROWS)} features](docs/compare.md)" in (ROOT / "README.md").read_text()
    for feature, command, test, *others in ROWS:
        assert feature and command and len(others) == 5, feature
        path, _, name = test.strip("`").partition("::")
        if test:
            assert name in names.get(path, ()), f"{feature}: no test {test}"
        else:
            assert re.match(r"no\b|.*not tried", command), (
                f"{feature}: names no test, and does not say so"
            )


def test_named_files_exist_and_every_source_is_given():
    named = set(re.findall(r"(?<![\w/.])((?:configs|examples)/\w+\.\w+)", TEXT))
    assert len(named) > 8 and all((ROOT / name).exists() for name in named)
    used, given = (
        set(re.findall(r"\]\[([\w-]+)\]", TEXT)),
        set(re.findall(r"^\[([\w-]+)\]: https://", TEXT, re.MULTILINE)),
    )
    assert used == given and len(given) > 50
    for row in ROWS:
        for cell in row[3:7]:
            assert cell == "*not found*" or re.search(r"\]\[[\w-]+\]", cell), (row[0], cell)


def test_the_results_are_short_and_name_real_commands():
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    scripts = set(re.findall(r"python (?:-m )?(benchmarks[./]\w+)", page))
    assert len(scripts) > 10 and sum(not line.startswith("|") for line in page.splitlines()) <= 90
    for script in scripts:
        assert (ROOT / f"{script.removesuffix('.py').replace('.', '/')}.py").exists(), script
    cases = set(re.findall(r"--only ([a-z]\w+(?: [a-z]\w+)*)", page))
    assert {name for names in cases for name in names.split()} <= {
        case.name for case in (*CASES, *LONG)
    } and cases
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", page):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
