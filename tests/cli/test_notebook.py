"""The notebook of the examples, its cells run in order, as Jupyter runs them: in `__main__` of one
interpreter.
"""

import json
import subprocess
import sys

import pytest

from launch import ROOT, environment

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
RUNNER = """
import ast, json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        *before, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(before, []), cell["id"], "exec"))
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), cell["id"], "eval"))
            if shown is not None:
                print("html", shown._repr_html_())
        else:
            exec(compile(ast.Module([last], []), cell["id"], "exec"))
"""


def test_its_outputs_are_cleared():
    code = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert len(code) > 4 and all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in code
    )


@pytest.mark.slow
def test_the_notebook_runs_again_and_trains_longer(tmp_path):
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RUNNER, NOTEBOOK],
            cwd=tmp_path,
            env=environment({}, 2),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    tables = [line for line in lines if line.startswith("html <table>")]
    results = [line for line in lines if line.startswith("Fitted(step ")]
    assert [line.split(",")[0] for line in results] == [
        "Fitted(step 230",
        "Fitted(step 460",
    ] and len(tables) == 2
    assert all("<th>accuracy</th><td>0.9" in line for line in tables)
    assert any("resumes after step 230" in line for line in lines) and "(64, 128)" in lines
    assert any(" of 360 digits are wrong" in line for line in lines)
