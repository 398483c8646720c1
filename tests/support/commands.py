"""The commands of a page: what stands in its blocks of shell, one by one, with what the page says
of them.

A comment ahead of a block says what its commands need (`<!-- needs: a cluster -->`), or which test
runs them (`<!-- tested: test_restart.py -->`). Blocks are fenced, without a language or with that
of a shell, or indented."""

import pathlib
import re
import shlex
from typing import NamedTuple

from jaxdp import cli

SHELL = ("sh", "bash", "console")
PROGRAMS = "python|mpirun|mpiexec|srun|sbatch|scancel|scontrol|torchrun|make|pip|kubectl|tensorboard|source|export|kill"
COMMAND = re.compile(
    rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:(?:{PROGRAMS}) |jaxdp (?:{'|'.join(cli.VERBS)})\b)"
)
SCRIPT = re.compile(r"^#!|^(?:until|for|trap|wait)\b|&$", re.MULTILINE)
# What a command needs by what stands in it; others say it on their page.
NEEDS = {
    r"^(sbatch|scancel|scontrol|kubectl) ": "a cluster",
    r"^tensorboard ": "somebody who looks",
}
# What another test runs with all its options, on something small, or on several hosts.
TESTED = {
    r"jaxdp verify .*--exact": "exact/test_exact_checks.py",
    r"jaxdp verify .*gpt": "test_verify.py",
    r"jaxdp launch .*--elastic": "test_elastic.py",
    r"^(srun|torchrun) |--hostfile|-f hosts|node1": "test_several_hosts.py",
}


class Command(NamedTuple):
    """text: of one command, or of a script; needs: what this machine lacks; tested: by this file."""

    page: str
    text: str
    needs: str = ""
    tested: str = ""

    @property
    def by_name(self) -> bool:
        """Not run, but what it names is looked up."""
        return bool(re.match(r"make |pip |source |python benchmarks/", self.text))


def blocks(text: str) -> list[tuple[str, str, str]]:
    """(mark, language, content) of each block of code, in order."""
    fenced = re.compile(
        r"(?:<!-- ([^\n]+) -->\n+)?^```(\w*)\n(.*?)^```|(?:(?<=\n\n)((?: {4}.*\n+)+))",
        re.DOTALL | re.MULTILINE,
    )
    found = []
    for match in fenced.finditer(text):
        if match[4] is not None:
            found.append(("", "", re.sub(r"^ {4}", "", match[4], flags=re.MULTILINE)))
        else:
            found.append((match[1] or "", match[2], match[3]))
    return found


def commands(page: pathlib.Path) -> list[Command]:
    """Those of a page, in order. In a block of a shell each line is one, unless it is a script;
    elsewhere those lines that begin like one."""
    found = []
    for mark, language, content in blocks(page.read_text()):
        kind, _, value = mark.partition(": ")
        said = {kind: value} if kind in ("needs", "tested") else {}
        if language in SHELL and SCRIPT.search(content):
            texts = [content.strip()]
        elif language in (*SHELL, ""):
            lines = [
                re.sub(r"\s{2,}#.*|^# .*", "", line).strip()
                for line in content.replace("\\\n", " ").splitlines()
            ]
            texts = [
                line.removeprefix("$ ")
                for line in lines
                if line and (language in SHELL or COMMAND.match(line))
            ]
        else:
            continue
        for text in texts:
            need = next(
                (n for pattern, n in NEEDS.items() if re.search(pattern, text, re.MULTILINE)), ""
            )
            test = next(
                (t for pattern, t in TESTED.items() if re.search(pattern, text, re.MULTILINE)), ""
            )
            found.append(Command(page.name, text, **(said or {"needs": need, "tested": test})))
    return found


# What makes a training small: more arguments by the name of its config; of all: two updates.
SMALLER = {
    "python_gpt": "--model.args.layers 1 --model.args.dim 16 --model.args.heads 2 --data.args.max_mb 0.2",
    "gpt_10m": "--model.args.layers 2 --model.args.dim 16 --model.args.heads 2 --data.args.max_mb 0.2",
    "gpt_3m": "--data.args.max_mb 0.2",
    "gpt2_124m": "--model.args.layers 2 --devices 8",
    "llama_7b": "--model.args.layers 2 --devices 8",
}


def shortened(text: str) -> str:
    """The command as a test runs it: two updates, a small model, few tokens; options that are there
    stay.
    """
    name = re.search(r"--config \S*?(\w+)\.yaml", text)
    more = [SMALLER.get(name[1], "")] if name else []
    if re.search(r"jaxdp train |train\.py ", text):
        more.append(
            "--steps 2 --log.every 1" + (" --outer.every 2" if "--outer.every" in text else "")
        )
    if "jaxdp verify " in text:
        more.append("--updates 1 --verify.strategies 1 --devices 2 --microbatches 2")
    if "jaxdp sample " in text:
        more.append("--tokens 3")
    if text.startswith("mpirun ") and "hosts" not in text:
        text = text.replace("mpirun ", "mpirun --oversubscribe ", 1)
    end = " &" if text.endswith(" &") else ""
    return " ".join(filter(None, [text.removesuffix(end), *more])) + end


def trains_in(text: str) -> str | None:
    """The run directory of a command that trains; None for another."""
    if not re.search(r"jaxdp train |train\.py ", text):
        return None
    words = shlex.split(text.removesuffix("&"))
    if "--run_dir" in words:
        return words[words.index("--run_dir") + 1]
    return f"runs/{pathlib.Path(words[words.index('--config') + 1]).stem}"
