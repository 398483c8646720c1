"""The verb `data`: what is made of data before a run; `tokenize` makes shards of tokens from text."""

import pathlib

from jaxdp.cli import Call
from jaxdp.data.tokenize import tokenize
from jaxdp.errors import UsageError, one_line


def run(call: Call) -> None:
    """Do the action of the verb, and print what was made."""
    options = call.options
    if options["action"] != "tokenize":
        given = "no action given" if options["action"] is None else f"unknown action {options['action']!r}"
        raise UsageError(f"jaxdp data: {given}; it is `jaxdp data tokenize INPUT... --output DIR`")
    inputs = [check_input(name) for name in options["inputs"]]
    if not inputs:
        raise UsageError("INPUT: missing; give .txt or .jsonl files, e.g. jaxdp data tokenize text.txt --output DIR")
    if not 0 <= options["split"] < 1:
        raise UsageError(f"--split: {options['split']} is not in [0, 1); e.g. 0.01")
    output = choose_output(options["output"])
    try:
        made = tokenize(inputs, output, options["tokenizer"], options["split"], options["shard_tokens"])
    except UsageError as error:
        raise UsageError(str(error).replace("data.args.tokenizer", "--tokenizer", 1)) from error
    except OSError as error:
        raise UsageError(f"--output: {str(output)!r} cannot be written ({one_line(error)}); choose another") from None
    counts = made["counts"]
    print(
        f"{counts['train']:,} tokens to train on, {counts['val']:,} for validation, in {len(made['shards'])} shards; "
        f"{options['tokenizer']}, vocabulary {made['vocabulary']:,}, {made['dtype']}\n"
        f"written to {output}; data: {{target: TokenFile, args: {{path: {output}, length: 1024}}}}"
    )


def check_input(name: str) -> pathlib.Path:
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
        raise UsageError(f"INPUT: no file {name!r}; give .txt or .jsonl files")
    if path.suffix not in (".txt", ".jsonl", ".ndjson"):
        raise UsageError(f"INPUT: {name!r} ends in neither .txt nor .jsonl; rename it to what it is")
    return path


def choose_output(wanted: str | None) -> pathlib.Path:
    if wanted is None:
        raise UsageError("--output: missing; name the folder to make, e.g. --output tokens")
    output = pathlib.Path(wanted).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output: {wanted!r} is there already; choose another, or remove it first")
    return output
