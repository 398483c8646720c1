"""The verb `data`: prepare data before a run; `tokenize` converts text to shards of tokens."""

import pathlib

from jaxdp.cli import Call
from jaxdp.data.tokenize import tokenize
from jaxdp.errors import UsageError, one_line


def run(call: Call) -> None:
    """Run the action of the verb, and print a summary of the output."""
    options = call.options
    if options["action"] != "tokenize":
        problem = "no action given" if options["action"] is None else f"unknown action {options['action']!r}"
        raise UsageError(f"jaxdp data: {problem}; it is `jaxdp data tokenize INPUT... --output DIR`")
    inputs = [check_input(name) for name in options["inputs"]]
    if not inputs:
        raise UsageError("INPUT: missing; give .txt or .jsonl files, e.g. jaxdp data tokenize text.txt --output DIR")
    if not 0 <= options["split"] < 1:
        raise UsageError(f"--split: {options['split']} is not in [0, 1); e.g. 0.01")
    output = choose_output(options["output"])
    try:
        result = tokenize(inputs, output, options["tokenizer"], options["split"], options["shard_tokens"])
    except UsageError as error:
        raise UsageError(str(error).replace("data.args.tokenizer", "--tokenizer", 1)) from error
    except OSError as error:
        raise UsageError(f"--output: {str(output)!r} cannot be written ({one_line(error)}); choose another") from None
    counts = result["counts"]
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
    if path.suffix not in (".txt", ".jsonl", ".ndjson"):
        raise UsageError(f"INPUT: {name!r} ends in neither .txt nor .jsonl; rename it to what it is")
    return path


def choose_output(name: str | None) -> pathlib.Path:
    if name is None:
        raise UsageError("--output: missing; name the folder to make, e.g. --output tokens")
    output = pathlib.Path(name).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--output: {name!r} already exists; choose another, or remove it first")
    return output
