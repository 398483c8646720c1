"""Each extra can be deleted: all that does not ask for it works without."""

import ast
import os
import re
import shutil
import subprocess
import sys
from concurrent import futures

import pytest

from launch import ROOT, environment

NEEDS = {
    "exact": (),
    "outer": ("exact",),
    "audit": ("exact",),
    "elastic": (),
    "mirror": (),
    "mpi": (),
    "check": (),
    "staged": (),
    "starter": (),
}
"""The extras with a door, and which others with one each of them imports; it goes with those."""
ASKED = {  # the other extras, and those of the first week: what asks for it -> how the refusal begins
    "verify": ("verify --config configs/digits.yaml", "jaxdp verify needs the folder jaxdp/verify"),
    "plan": ("plan --config configs/digits.yaml", "jaxdp plan needs the folder jaxdp/plan"),
    "doctor": ("doctor", "jaxdp doctor needs the folder jaxdp/doctor"),
    "sweep": (
        "sweep --config configs/digits.yaml --seed 0,1",
        "jaxdp sweep needs the folder jaxdp/sweep",
    ),
    "report": ("report runs/digits", "jaxdp report needs the folder jaxdp/report"),
    "rewind": (
        "rewind --run_dir runs/digits --step 1",
        "jaxdp rewind needs the folder jaxdp/rewind",
    ),
    "tables": (
        "predict --run_dir runs/digits --data rows.csv",
        "jaxdp predict needs the folder jaxdp/tables",
    ),
    "measures": (
        "confusion --run_dir runs/digits",
        "jaxdp confusion needs the folder jaxdp/measures",
    ),
    "recipes": (
        "train --config configs/digits.yaml --data.target Augmented",
        "data.target: 'Augmented' cannot be imported",
    ),
    "sampling": (
        "train --config configs/digits.yaml --data.target Balanced",
        "data.target: 'Balanced' cannot be imported",
    ),
    "archives": (
        "train --config configs/digits.yaml --data.target ImageZip",
        "data.target: 'ImageZip' cannot be imported",
    ),
    "folders": (
        "train --config configs/digits.yaml --model.target HuggingFace",
        "model.target: 'HuggingFace' cannot be imported",
    ),
    "observers": (
        "train --config configs/digits.yaml --callbacks [{target:\xa0TimeLimit,args:\xa0{minutes:\xa01}}]",
        "callbacks.target: 'TimeLimit' cannot be imported",
    ),
    "interop": None,  # asked for in Python
}
REFUSED = {  # what asks for a deleted extra: what the refusal begins with
    ("--parallel.reduction", "exact"): "parallel.reduction: exact needs the folder jaxdp/exact",
    ("--parallel.reduction", "exact8"): "parallel.reduction: exact8 needs the folder jaxdp/exact",
    ("--elastic.enabled", "true"): "elastic.enabled: true needs the folder jaxdp/elastic",
    ("--checkpoint.mirror", "x"): "checkpoint.mirror: x needs the folder jaxdp/mirror",
    ("--outer.replicas", "2"): "outer.replicas: 2 needs the folder jaxdp/outer",
    ("--audit.every", "2", "--parallel.reduction", "exact"): (
        "parallel.reduction: exact needs the folder jaxdp/exact"
    ),
    (
        "--batch_size",
        "{0: 64, 9: 128}",
    ): "batch_size: {0: 64, 9: 128} needs the folder jaxdp/staged",
    ("--check",): "--check needs the folder jaxdp/check",
    ("--audit.every", "2"): "audit.every: 2 needs the folder jaxdp/audit",
}
# An editable install finds modules of jaxdp in the folder that it was made from, deleted ones too.
ONLY_HERE = """import sys

sys.meta_path[:] = [x for x in sys.meta_path if "__editable__" not in getattr(x, "__module__", "")]
"""
# The pages, the bounds of the house and the table of scripts are those of all of it.
OF_ALL = (
    "docs",
    "unit/test_house.py",
    "unit/test_deletion.py",
    "unit/test_benchmark_scripts.py::test_no_script_is_left_out",
)


def imported(folder):
    """The other extras that an extra imports."""
    names = set()
    for file in (ROOT / "jaxdp" / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition("jaxdp.")[2].partition(".")[0])
    return names & NEEDS.keys() - {folder}


def copy_without(folder, *deleted):
    """Copy the tree without these extras, and those that need them, into an empty folder."""
    gone = {x for x in NEEDS if x in deleted or {*NEEDS[x]} & {*deleted}}
    gone |= ASKED.keys() & deleted
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        top, _, rest = name.partition("/")
        if top in ("jaxdp", "tests") and rest.partition("/")[0] in gone:
            continue
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "sitecustomize.py").write_text(ONLY_HERE)
    there = {x for x in NEEDS if (folder / "jaxdp" / x).exists()}
    assert there == NEEDS.keys() - gone and (folder / "jaxdp" / "train").is_dir()
    return folder


def run(folder, *words, timeout=120, devices=1, **env):
    """Run Python in a copy, where `jaxdp` is that of the copy."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment({"PYTHONPATH": str(folder), **env}, devices),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


IMPORTS = """
import importlib, importlib.util, pathlib, sys
for name in sys.argv[1:]:
    assert importlib.util.find_spec(f"jaxdp.{name}") is None, name
files = sorted(pathlib.Path("jaxdp").rglob("*.py"))
for file in files:
    is_verb = file.parent.name == "cli" and file.stem in sys.argv
    if file.stem != "__main__" and not is_verb:  # a verb without its extra is refused
        parts = file.with_suffix("").parts
        importlib.import_module(".".join(parts[: -1 if file.stem == "__init__" else None]))
import jaxdp
assert pathlib.Path(jaxdp.__file__) == pathlib.Path("jaxdp/__init__.py").resolve()
print(len(files))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree without any of these extras."""
    return copy_without(tmp_path_factory.mktemp("copy"), *NEEDS, *ASKED)


def test_an_extra_needs_no_others_than_it_says():
    """What an extra imports only if it is there counts, too: `outer.reduction` may be exact."""
    assert {name: imported(name) for name in NEEDS} == {k: {*v} for k, v in NEEDS.items()}


def test_every_other_module_is_imported(copy):
    done = run(copy, "-c", IMPORTS, *NEEDS, *ASKED)
    assert done.returncode == 0 and int(done.stdout) > 100, done.stdout + done.stderr


def test_the_main_job_ends_with_the_same_digest(copy, tmp_path):
    """That of the tree with all extras, on the same machine with the same libraries."""
    argv = ["train.py", "--config", "configs/digits.yaml", "--run_dir"]
    with futures.ThreadPoolExecutor() as pool:
        folders = {"without": copy, "with": ROOT}
        runs = [
            pool.submit(run, folder, *argv, str(tmp_path / name), XLA_FLAGS=None)
            for name, folder in folders.items()
        ]
    digests = [re.findall(r"params_sha256 ([0-9a-f]{16})\b", x.result().stdout) for x in runs]
    assert all(x.result().returncode == 0 for x in runs), [x.result().stderr for x in runs]
    assert digests[0] == digests[1] and len(digests[0]) == 1


@pytest.mark.parametrize("asked", REFUSED, ids=" ".join)
def test_asking_for_a_deleted_extra_is_one_line(copy, asked, tmp_path):
    argv = ["train.py", "--config", "configs/digits.yaml", "--run_dir", tmp_path / "run", *asked]
    done = run(copy, *map(str, argv))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    assert done.stderr.startswith(f"jaxdp: {REFUSED[asked]}"), done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("extra", [name for name, line in ASKED.items() if line])
def test_asking_for_another_deleted_extra_is_one_line(copy, extra, tmp_path):
    line, said = ASKED[extra]
    where = ["--run_dir", str(tmp_path / "run")] * line.startswith("train")
    done = run(copy, "-m", "jaxdp", *[x.replace("\xa0", " ") for x in line.split(" ")], *where)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    assert done.stderr.startswith(f"jaxdp: {said}"), done.stderr
    assert not (tmp_path / "run").exists()


def test_a_deleted_backend_is_refused_in_a_line(copy):
    done = run(copy, "-c", "import jaxdp; jaxdp.init(backend='mpi')")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    assert done.stderr.startswith("jaxdp: backend: mpi needs the folder jaxdp/mpi"), done.stderr


def test_data_without_a_config_are_refused_in_a_line(copy):
    done = run(copy, "train.py", "rows.csv")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stdout + done.stderr
    said = "jaxdp: DATA: rows.csv needs the folder jaxdp/starter"
    assert done.stderr.startswith(said), done.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("deleted", NEEDS)
def test_the_quick_tests_of_the_rest_pass(deleted, tmp_path):
    """Those of what trains, of the program, and of the extras without a door."""
    folder = copy_without(tmp_path / "copy", deleted)
    mpich = os.environ.get("JAXDP_TEST_MPICH_PREFIX", str(ROOT / ".mpich"))
    without = [f"--ignore=tests/{name}" for name in NEEDS]
    without += [f"--deselect=tests/{name}" for name in OF_ALL]
    words = ["-m", "not slow", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", *without]
    more = {"JAXDP_TEST_MPICH_PREFIX": mpich}
    done = run(folder, "-m", "pytest", *words, timeout=3000, devices=8, **more)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
