"""The verb `data`: prepare and check data before a run.

`tokenize` converts text to shards of tokens; `check` lists all files that cannot be read.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from jaxdp.cli import Call, load
from jaxdp.data.check import Finding, check_path
from jaxdp.data.documents import LINES
from jaxdp.data.tokenize import held_out, tokenize
from jaxdp.errors import UsageError, one_line

USAGE = "`jaxdp data tokenize INPUT... --output DIR` or `jaxdp data check FOLDER`"
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")


def run(call: Call) -> None:
    """Run the action of the verb, and print a summary of the output."""
    actions = {"tokenize": run_tokenize, "check": run_check}
    action = call.options["action"]
    if action not in actions:
        problem = "no action given" if action is None else f"unknown action {action!r}"
        raise UsageError(f"jaxdp data: {problem}; it is {USAGE}")
    actions[action](call.options)


def run_check(options: dict[str, Any]) -> None:
    """Print what cannot be read in the data of folders, text files and configs. Raises UsageError
    if there is any.
    """
    inputs = [*options["inputs"], *([options["config"]] if options["config"] else [])]
    if not inputs:
        raise UsageError("INPUT: missing; give a folder of images, a text file, or --config FILE")
    count = 0
    for name in inputs:
        for finding in findings(name):
            count += finding.problem
            print(finding.text, flush=True)
    if count:
        raise UsageError(
            f"data check: {count:,} problem{'s' * (count > 1)}, listed above; correct them before a run"
        )


def findings(name: str) -> Iterator[Finding]:
    """Yield the findings about a path or a config."""
    if not name.lower().endswith((".yaml", ".yml")):
        yield from check_path(pathlib.Path(name).expanduser())
        return
    from jaxdp.run.datasets import check_config  # imports JAX

    if "" not in sys.path:  # a target may be a module in the folder that the command runs in
        sys.path.insert(0, "")
    yield from check_config(load(["--config", name])[0])


def run_tokenize(options: dict[str, Any]) -> None:
    """Write the tokens of text files, and print a summary."""
    inputs = [check_input(name) for name in options["inputs"]]
    if not inputs:
        raise UsageError(
            "INPUT: missing; give .txt or .jsonl files, e.g. jaxdp data tokenize text.txt --output DIR"
        )
    if not 0 <= options["split"] < 1:
        raise UsageError(f"--split: {options['split']} is not in [0, 1); e.g. 0.01")
    if (name := options["output"]) is None:
        raise UsageError("--output: missing; name the folder to make, e.g. --output tokens")
    output = pathlib.Path(name).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output: {name!r} already exists; choose another, or remove it first")
    try:
        result = tokenize(
            inputs, output, options["tokenizer"], options["split"], options["shard_tokens"]
        )
    except UsageError as error:
        raise UsageError(str(error).replace("data.args.tokenizer", "--tokenizer", 1)) from error
    except OSError as error:
        raise UsageError(
            f"--output: {str(output)!r} cannot be written ({one_line(error)}); choose another"
        ) from None
    counts = result["counts"]
    for path in held_out(inputs):
        print(f"for validation, as its name says, instead of a share of each file: {path}")
    for path in inputs:
        if not path.stat().st_size:
            print(f"without text: {path} is empty")
    print(
        f"{counts['train']:,} tokens to train on, {counts['val']:,} for validation, in {len(result['shards'])} shards; "
        f"{options['tokenizer']}, vocabulary {result['vocabulary']:,}, {result['dtype']}\n"
        f"written to {output}; data: {{target: TokenFile, args: {{path: {output}, length: 1024}}}}"
    )


def check_input(name: str) -> pathlib.Path:
    """Return the path of a text file. Raises UsageError if it is missing or of an unknown type."""
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"INPUT: no file {name!r}; give .txt or .jsonl files")
    if path.suffix.lower() in COMPRESSED:
        raise UsageError(f"INPUT: {name!r} is compressed; decompress it first")
    if path.suffix.lower() not in (".txt", *LINES):
        raise UsageError(
            f"INPUT: {name!r} ends in neither .txt nor .jsonl; rename it to what it is"
        )
    return path
