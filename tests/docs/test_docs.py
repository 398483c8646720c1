"""The README and the pages: every command on them is run as a new user would, or says what it
needs.
"""

import ast
import importlib
import importlib.util
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml

import jaxdp
from commands import SHELL, Command, commands, shortened, trains_in
from commands import blocks as all_blocks
from jaxdp import cli
from jaxdp.cli.export import export
from jaxdp.config.validation import inner, known_keys
from jaxdp.process import launchers
from launch import environment, find
from pods import run_in_pod

ROOT = pathlib.Path(__file__).parents[2]
BIN = pathlib.Path(sys.executable).parent


def blocks(page, kind):
    return re.findall(
        rf"^```{kind}\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE
    )


def write_files(page, folder):
    """The blocks that begin with a comment of a file name."""
    for kind in ("python", "yaml"):
        for block in blocks(page, kind):
            if name := re.match(r"# (\w+\.\w+)(?:\n|: )", block):
                (folder / name[1]).write_text(block)


def run(command, folder):
    words = shlex.split(command)
    env = environment({"XLA_FLAGS": None}, 1) | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    if words[0] == "jaxdp":
        words = [sys.executable, "-m", *words]
    elif words[0] == "mpirun":
        words[1:1] = ["--bind-to", "none", "--oversubscribe"]
        words = [sys.executable if w == "python" else w for w in words]
    done = subprocess.run(words, cwd=folder, env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(find("openmpi5") is None, reason="no mpirun of openmpi5")
def test_the_program_of_the_readme_prints_its_output(tmp_path):
    """On one device, on eight, and on two processes; the last digits depend on the processor."""
    page = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(# first.py\n.*?)```", page, re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 12
    (tmp_path / "first.py").write_text(program)
    env = environment({"XLA_FLAGS": None}, 1) | {"PYTHONPATH": str(ROOT)}
    env |= {"PATH": f"{BIN}:{os.environ['PATH']}"}
    shown = re.findall(r"^\$ (.*)\n(\[.*)$", page, re.MULTILINE)
    assert len(shown) == 3 and len({line for _, line in shown}) == 1
    printed = []
    for command, line in shown:
        shell = ["bash", "-ec", f"set -o pipefail; {shortened(command)}"]
        done = subprocess.run(
            shell, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        *losses, accuracy = map(float, re.findall(r"[\d.]+", done.stdout))
        *expected, right = map(float, re.findall(r"[\d.]+", line))
        printed.append(losses)
        assert losses == pytest.approx(expected, abs=5e-3), command
        assert accuracy == pytest.approx(right, abs=1e-2), command
        assert losses == pytest.approx(printed[0], abs=2e-4), command


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(find("openmpi5") is None, reason="no mpirun of openmpi5")
def test_the_page_of_ones_own_model_works_as_it_stands(tmp_path):
    """A class outside the repository trains by its dotted path, to what the page says."""
    write_files("own_model.md", tmp_path)
    commands = [line for block in blocks("own_model.md", "sh") for line in block.splitlines()]
    train, *more, alone, two = commands
    last = r"final 600/600 .* accuracy +(\S+)"
    shown = re.search(last, (ROOT / "docs" / "own_model.md").read_text())
    final = re.search(last, run(train, tmp_path))
    assert shown and final and float(final[1]) > float(shown[1]) - 0.03
    for command in (alone, two):
        accuracy, shape = run(command, tmp_path).splitlines()[-1].split(" ", 1)
        assert float(accuracy) > 0.9 and shape == "(2, 64)"
    found = {command.split()[1]: run(command, tmp_path) for command in more}
    run("jaxdp export --run_dir runs/spiral", tmp_path)
    assert float(run("python load_spiral.py", tmp_path)) > 0.9
    assert "agree with the oracle" in found["verify"] and "accuracy" in found["eval"]
    loss = "--loss.target absolute.absolute_error --loss.args.scale 10 --steps 2 --run_dir runs/x"
    assert "final 2/2" in run(f"jaxdp train --config spiral.yaml {loss}", tmp_path)


NORMALIZED = """
class Net(nnx.Module):
    def __init__(self, width=32, num_classes=3, *, rngs):
        self.first, self.last = nnx.Linear(2, width, rngs=rngs), nnx.Linear(width, num_classes, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(width, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))
"""


@pytest.mark.slow
def test_loading_an_export_loads_batch_norm_averages(tmp_path, monkeypatch):
    """The loaded model computes what the run's own evaluation does, also with BatchNorm and
    dropout.
    """
    write_files("own_model.md", tmp_path)
    with (tmp_path / "spiral.py").open("a") as file:
        file.write(NORMALIZED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spiral", raising=False)
    fitted = jaxdp.fit(
        {"target": "spiral.Net", "args": {"width": 64}}, {"target": "spiral.Spiral"}, steps=3, batch_size=60,
        microbatches=1, parallel={"devices": 1}, run_dir="runs/spiral", optimizer={"target": "sgd", "lr": 0.1},
    )  # fmt: skip
    export(cli.parse(["--run_dir", "runs/spiral"], "export")[0])
    loaded = runpy.run_path("load_spiral.py")
    inputs = np.stack([example["inputs"] for example in loaded["examples"]])
    np.testing.assert_allclose(
        loaded["model"](inputs), fitted.predict(inputs), rtol=1e-5, atol=1e-5
    )
    assert np.abs(fitted.model_state["norm"]["var"] - 1).max() > 0.01
    del sys.modules["spiral"]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
COMMANDS = {page.name: commands(page) for page in PAGES}


def test_every_mark_is_that_of_the_block_behind_it():
    """Also where a page has other comments before it."""
    for page in PAGES:
        text = page.read_text()
        marks = re.findall(r"^<!-- ((?:tested|needs): .+) -->$", text, re.MULTILINE)
        found = [mark for mark, _, _ in all_blocks(text) if re.match("tested: |needs: ", mark)]
        assert found == marks, page.name


def test_a_command_is_on_one_page():
    """The README may begin with those of the pages."""
    docs = [
        command.text for name, found in COMMANDS.items() if name != "README.md" for command in found
    ]
    assert len(docs) > 100 and sorted({*docs}) == sorted(docs)


def anchors(page):
    """Those of a page's headings, as its builder makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", x).strip().lower()) for x in headings}


def test_pages_and_sections_that_are_named_exist():
    """Also in messages, comments and other files, which the site's builder does not see."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").glob("*.md")]
    for folder in ("jaxdp", "tests", "examples", "configs", "benchmarks"):
        files += [x for x in (ROOT / folder).rglob("*") if x.suffix in (".py", ".yaml", ".ipynb")]
    named = 0
    for file in files:
        for name, anchor in re.findall(
            r"(?<![\w/])(?:\.\./)?docs/(\w+\.md)(?:#([\w-]+))?", file.read_text()
        ):
            page = ROOT / "docs" / name
            assert page.is_file() and (not anchor or anchor in anchors(page)), (file, name, anchor)
            named += 1
    assert named > 50


def test_the_readme_is_short_with_two_set_up_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90 and "No GPU has been measured" in text
    assert [c.text for c in COMMANDS["README.md"] if "make" in c.text] == [
        "make train",
        "make test",
    ]


def test_every_command_is_run_or_says_what_it_needs():
    text = (ROOT / "Makefile").read_text()
    extras = (ROOT / "pyproject.toml").read_text()
    found = [command for page in COMMANDS.values() for command in page]
    assert len(found) > 50 and sum(not (c.needs or c.tested or c.by_name) for c in found) > 30
    for command in found:
        words = shlex.split(command.text) if "\n" not in command.text else [""]
        if command.tested:
            (file,) = (ROOT / "tests").rglob(command.tested)
            by = file.read_text()
            assert command.page in by or any(
                w in by for w in words if w in cli.VERBS or w.endswith(".py")
            ), command
        if words[0] == "make":
            assert all(re.search(rf"^{target}:", text, re.MULTILINE) for target in words[1:]), (
                command
            )
        if words[:2] == ["pip", "install"]:
            for name in re.findall(r"\.\[(\w+)\]", command.text):
                assert re.search(rf"^{name} = \[", extras, re.MULTILINE), command
        for word in words:
            if re.match(r"(configs|benchmarks|examples)/", word) and not command.needs:
                assert (ROOT / word).exists(), command


def test_no_page_installs_jaxdp_from_a_package_index():
    """It is on none."""
    assert not [
        page.name for page in PAGES if re.search(r"pip install [^`\n]*jaxdp", page.read_text())
    ]


@pytest.mark.parametrize("code", [0, 1])
def test_make_test_fails_if_a_quick_test_fails(tmp_path, code):
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$4" >> ran\nexit {code}\n')
    python.chmod(0o755)
    for file in ("pyproject.toml", ".venv/.base", ".venv/.test"):
        (tmp_path / file).touch()
    env = {
        name: os.environ[name] for name in os.environ if not name.startswith(("MAKE", "MFLAGS"))
    }  # of an outer make
    done = subprocess.run(["make", "test"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (tmp_path / "ran").read_text().splitlines() == ["not slow"]
    assert (done.returncode == 0) == (code == 0), done


def test_commands_of_a_cluster_are_tested_or_marked():
    """Every line of a block that gives a command to Slurm or Kubernetes, wherever in a line, or a
    script, it stands.
    """
    found = 0
    for page in PAGES:
        known = COMMANDS[page.name]
        for _, language, content in all_blocks(page.read_text()):
            for line in content.splitlines() if language in (*SHELL, "") else ():
                if re.search(r"^(?!#)(.*[;&|] *)?(srun|sbatch|scancel|scontrol|kubectl) ", line):
                    found += 1
                    line = re.sub(r"\s{2,}#.*", "", line).strip()
                    own = [
                        c
                        for c in known
                        if line.removeprefix("$ ").removesuffix("\\").strip() in c.text
                    ]
                    assert own and all(c.needs or c.tested for c in own), f"{page.name}: {line}"
    assert found > 5


def test_options_that_are_named_exist():
    """Also those in the middle of a sentence."""
    keys = {*known_keys(), "config", "help", "print_config"}
    for page in PAGES:
        text = page.read_text()
        for line in [
            *re.findall(r"`(jaxdp [^`\n]+)`", text),
            *(c.text for c in COMMANDS[page.name]),
        ]:
            for verb, rest in re.findall(r"jaxdp ([a-z]+)((?: [^\n&|;]*)?)", line):
                if verb not in cli.VERBS:
                    continue
                if cli.VERBS[verb].command:  # what follows is another verb, or a program
                    rest = re.split(rf" (?:{'|'.join(cli.VERBS)}|python) ", rest)[0]
                own = (
                    {*cli.VERBS[verb].options}
                    | (keys if cli.VERBS[verb].has_config else set())
                    | {"help"}
                )
                for option in re.findall(r" --([a-z][\w.]*)", rest):
                    known = option in own or any(
                        option.startswith(f"{k}.") for k in own if k.endswith("args")
                    )
                    assert known, f"{page.name}: {line}: no --{option}"


PREPARED = {
    "data.md": {
        "tinyshakespeare.txt": "To be, or not to be: that is the question.\n" * 200,
        "a.txt": "Some text.\n" * 3000,
        "b.jsonl": '{"text": "A document."}\n' * 100,
    }
}
BEFORE = {  # what a page takes to be there
    "monitoring.md": ["runs/digits", "runs/slower"],
    "hosts.md": ["runs/digits"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What a clone has, and what was run in it."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("train.py", "configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder, {}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize("page", [name for name, found in COMMANDS.items() if found])
def test_the_commands_of_a_page_run(page, place):
    """In their order, in one folder for all pages, made small by the rules of `commands.shortened`.

    A training begins anew, unless it is the one that was there; what ran already on another page is
    not run again."""
    folder, done = place
    if page != "README.md":
        write_files(page, folder)
    for name, text in PREPARED.get(page, {}).items():
        (folder / name).write_text(text)
    env = environment({"XLA_FLAGS": None}, 1) | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}",
    }
    there = [
        f"jaxdp train --config configs/digits.yaml --run_dir {run}" for run in BEFORE.get(page, [])
    ]
    for command in [Command(page, text) for text in there] + COMMANDS[page]:
        text = command.text
        lines = text.splitlines()
        if (
            command.needs
            or command.tested
            or command.by_name
            or (text.startswith("mpirun") and not find("openmpi5"))
        ):
            continue
        if (
            "configs/" in text
            and len(lines) == 1
            and done.get(text)
            and trains_in(text) in (None, done[text])
        ):
            continue
        for line in lines:
            directory = trains_in(line)
            if directory and done.get(directory) != text:
                shutil.rmtree(folder / directory, ignore_errors=True)
                done[directory] = text
        script = "\n".join(shortened(line) for line in lines)
        ran = subprocess.run(
            ["bash", "-ec", script],
            cwd=folder,
            env=env,
            text=True,
            capture_output=True,
            timeout=200,
        )
        assert ran.returncode == 0, f"{page}: {script}\n{ran.stdout}{ran.stderr}"
        assert "Traceback" not in ran.stderr
        done[text] = trains_in(lines[0]) or True


def templates():
    """Every text of the package, with a line break for what is filled in."""
    for file in (ROOT / "jaxdp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(v.value if isinstance(v, ast.Constant) else "\n" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_of_the_page_are_those_of_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(messages) > 50
    known = list(templates())
    unknown = []
    for message in messages:
        fixed = [part for part in message.split("...") if part.strip()]
        pattern = re.compile(".*?".join(re.escape(part) for part in fixed), re.DOTALL)
        if not any(pattern.search(template) for template in known):
            unknown.append(message)
    assert not unknown


def kubernetes():
    """Return (the page's text, its manifests)."""
    text = (ROOT / "docs" / "hosts.md").read_text()
    return text, [
        x
        for _, kind, block in all_blocks(text)
        if kind == "yaml"
        for x in yaml.safe_load_all(block)
        if "kind" in x
    ]


def test_the_manifests_say_what_is_read(tmp_path):
    """Of Kubernetes: the variables, and what the pods' names have to be; see
    jaxdp/process/launchers.py.
    """
    text, manifests = kubernetes()
    service, job, jobset, mpijob = manifests
    assert [d["kind"] for d in manifests] == ["Service", "Job", "JobSet", "MPIJob"]
    inner = jobset["spec"]["replicatedJobs"][0]["template"]
    for spec in (job["spec"], inner["spec"]):
        assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
        (container,) = spec["template"]["spec"]["containers"]
        env = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        secret = next(
            e["valueFrom"]["secretKeyRef"] for e in container["env"] if e["name"] == "JAXDP_SECRET"
        )
        assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in text
        assert (
            int(env["JAXDP_NUM_PROCESSES"]) == spec["completions"]
            and float(env["JAXDP_TIMEOUT"]) > 60
        )
        name = f"run-{spec['completions'] - 1}"
        env |= {"JOB_COMPLETION_INDEX": str(spec["completions"] - 1), "HOSTNAME": name}
        hosts = f"10.1.2.3 {name}.run.default.svc.cluster.local {name}"
        code = f"from jaxdp.process.launchers import kubernetes; print(kubernetes({env}))"
        world = launchers.World(
            1, 2, None, None, "kubernetes", "run-0.run.default.svc.cluster.local:12355"
        )
        assert run_in_pod(tmp_path, name, hosts, code) == f"{world}\n"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
    policy = job["spec"]["podFailurePolicy"]["rules"]
    rules = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in policy if "onExitCodes" in rule
    }
    assert (
        rules == {"Ignore": [75], "FailJob": [2]}
        and job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    )
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    launcher, worker = (mpijob["spec"]["mpiReplicaSpecs"][k] for k in ("Launcher", "Worker"))
    args = launcher["template"]["spec"]["containers"][0]["args"]
    np = int(args[args.index("-np") + 1])
    assert (
        np == worker["replicas"] * mpijob["spec"]["slotsPerWorker"]
        and f"ppr:{np // worker['replicas']}:node" in args
    )
    assert args[args.index("--hostfile") + 1] == "/etc/mpi/hostfile"


@pytest.mark.slow
def test_the_manifests_follow_kubernetes_schemas():
    """Of JobSet and MPIJob, which are extensions of Kubernetes, the jobs and pods in them do."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    service, job, jobset, mpijob = kubernetes()[1]
    named = {"metadata": {"name": "run"}}
    inner = [t["template"] for t in jobset["spec"]["replicatedJobs"]]
    pods = [spec["template"] for spec in mpijob["spec"]["mpiReplicaSpecs"].values()]
    objects = [{"apiVersion": "batch/v1", "kind": "Job", **named, **template} for template in inner]
    objects += [
        {"apiVersion": "v1", "kind": "PodTemplate", **named, "template": pod} for pod in pods
    ]
    assert len(objects) == 3
    for described in [service, job, *objects]:
        validator.validate(described, validator.latest_version(), strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate(
            {**job, "spec": {**job["spec"], "completionz": 2}},
            validator.latest_version(),
            strict=True,
        )


def made_pages():
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_that_are_made_say_everything():
    pages = made_pages()
    rows = re.findall(
        r"^\| `([\w.]+)` \| (.+?) \| (.*?) \| (\w+) \| (.+) \|$", pages.config_page(), re.MULTILINE
    )
    keys = [key for group in pages.groups() for key in group.keys]
    assert not [key.name for key in keys if not key.text]
    assert {key.name for key in keys} == {
        k for k, hint in known_keys().items() if "." in k or inner(hint) is None
    }
    assert [row[0] for row in rows] == [key.name for key in keys]
    assert {row[0]: row[3] for row in rows} == {key.name: key.decides for key in keys}
    assert ("optimizer.lr", "number", "`0.001`", "numbers", "the peak learning rate") in rows
    commands_page = pages.commands_page()
    assert all(f"## jaxdp {verb}\n" in commands_page for verb in cli.VERBS)
    for path in [name for _, names in pages.SECTIONS.values() for name in names]:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__doc__, path


def test_files_that_are_named_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(files) > 25
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):  # elsewhere, a plain name may be a user's
        if page.name != "changelog.md":
            files |= set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()))
    known = {str(x.relative_to(ROOT / "jaxdp")) for x in (ROOT / "jaxdp").rglob("*.py")}
    known |= {x.name for x in (ROOT / "jaxdp").rglob("*.py")}
    assert {x for x in files - known if not (ROOT / x).is_file()} == set()


def test_pages_are_listed_and_their_pictures_exist():
    """What the site's builder does not check."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = {page for section in nav for page in re.findall(r"[\w/]+\.md", str(section))}
    assert {
        f"{name}.md" for name in ("reference/config", "reference/commands", "reference/python")
    } < pages
    files = list((ROOT / "docs").glob("*.md"))
    assert 10 < len(files) <= 23 and {file.name for file in files} == {
        page for page in pages if "/" not in page
    }
    for file in files:
        for picture in re.findall(
            r"!\[[^]]*\]\(([^) ]+)|<img[^>]+src=\"([^\"]+)", file.read_text()
        ):
            assert (file.parent / "".join(picture)).is_file(), (file, picture)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="no zensical: pip install -e '.[docs]'"
)
def test_the_site_builds(tmp_path):
    """Strictly: each link and anchor leads somewhere; and nothing of it comes from the network."""
    for name in ("docs", "jaxdp"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (["docs/pages.py"], ["-m", "zensical", "build", "--strict"]):
        command = [sys.executable, *command]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tmp_path = tmp_path / "site"
    pages = list(tmp_path.rglob("*.html"))
    assert (
        len(pages) >= len([*(ROOT / "docs").glob("*.md")]) + 3
        and (tmp_path / "reference" / "config.html").exists()
    )
    for page in pages:
        html = page.read_text()
        assert not re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//(?!localhost)[^"]+"', html
        ), page
        assert not re.search(r"fonts\.g|cdn\.|unpkg", html), page
