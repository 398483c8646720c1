"""The verb `export`: write a checkpoint's parameters, and with them its model, for other programs."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

from jaxdp.checkpoint import manifest, safetensors
from jaxdp.checkpoint.digest import params_sha256
from jaxdp.checkpoint.published import GPT2, to_published
from jaxdp.checkpoint.store import Checkpoints
from jaxdp.checkpoint.weights import FORMAT, MODEL_STATE, from_checkpoint, on_host
from jaxdp.cli import Call, huggingface, stablehlo
from jaxdp.errors import UsageError, one_line
from jaxdp.metrics.numbers import size

# {layout: (arrays, number of classes or None) -> (the arrays under the layout's names, changes to the metadata)}
LAYOUTS: dict[str, Callable[[dict[str, Any], int | None], tuple[dict[str, Any], dict[str, str]]]] = {
    "jaxdp": lambda arrays, _: (arrays, {}),
    "gpt2": lambda arrays, classes: (to_published(GPT2, arrays, classes), {"format": "pt"}),  # as transformers requires
}
# Formats of a folder: (folder, arrays, metadata of the checkpoint) -> a line about it
FOLDERS: dict[str, Callable[[pathlib.Path, dict[str, Any], dict[str, Any]], str]] = {
    "huggingface": huggingface.write,
    "stablehlo": stablehlo.write,
}
FORMATS = ("safetensors", *FOLDERS)


def run(call: Call) -> None:
    """Export a checkpoint, and print a summary."""
    print(export(call.options))


def export(options: dict[str, Any]) -> str:
    """Write the file or the folder, and return a summary. Raises UsageError for options that do not fit.

    The model is built for `stablehlo` only: the checkpoint stores names and shapes.
    """
    if not options["run_dir"]:
        raise UsageError("--run_dir: missing; give the directory of a run, e.g. --run_dir runs/digits")
    layout, directory = options["layout"], pathlib.Path(options["run_dir"])
    for name, known in (("layout", LAYOUTS), ("format", FORMATS)):
        if options[name] not in known:
            raise UsageError(f"--{name}: {options[name]!r} is not known; use one of {', '.join(known)}")
    if options["format"] in FOLDERS and layout != "jaxdp":
        raise UsageError(f"--layout: {layout!r} is for --format safetensors; leave it out")
    step = choose_step(directory, options["step"])
    output = choose_output(directory, options["output"], options["format"])
    checkpoint = directory / "checkpoints" / str(step)
    weights = from_checkpoint(checkpoint, options["ema"], "--run_dir", "--ema")
    arrays = on_host(weights)
    params = {name: x for name, x in arrays.items() if not name.startswith(MODEL_STATE)}
    digest, meta = params_sha256(params), manifest.read(checkpoint)["meta"]
    if options["format"] in FOLDERS:
        about, written = FOLDERS[options["format"]](output, arrays, meta), [*output.iterdir()]
    else:
        about, written = "", [output]
        metadata = {"format": FORMAT, "step": str(step), "params_sha256": digest, "ema": str(options["ema"]).lower()}
        write_file(output, arrays, layout, meta, metadata, directory)
    elements = sum(math.prod(x.shape) for x in params.values())
    state = len(weights.arrays) - len(params)
    return (
        f"{len(params)} parameters{' (running average)' * options['ema']}, {elements:,} elements"
        f"{f', {state} arrays of the model state' * bool(state)}; from {checkpoint}; "
        f"{size(sum(file.stat().st_size for file in written))}\n{about}{chr(10) * bool(about)}"
        f"params_sha256 {digest[:16]}  written to {output}"
    )


def write_file(
    output: pathlib.Path,
    arrays: dict[str, Any],
    layout: str,
    meta: dict[str, Any],
    metadata: dict[str, str],
    directory: pathlib.Path,
) -> None:
    """Write a .safetensors file. meta: of the checkpoint; metadata: of the file, without the config; directory: of the
    run."""
    args = (meta["config"].get("model") or {}).get("args") or {}
    classes = args.get("num_classes") or (meta.get("data") or {}).get("num_classes")
    try:
        arrays, changes = LAYOUTS[layout](arrays, classes)
    except ValueError as error:
        raise UsageError(f"--layout: {layout!r} does not fit the model of {str(directory)!r}: {error}") from None
    try:
        safetensors.write(output, arrays, {**metadata, "config": json.dumps(meta["config"]), **changes})
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"--output: {str(output)!r} cannot be written ({one_line(error)}); choose another") from None


def choose_step(directory: pathlib.Path, step: int | None) -> int:
    """Return `step`, by default the last checkpoint's. Raises UsageError if the directory has no such checkpoint."""
    steps = Checkpoints(directory / "checkpoints").steps()
    if not steps:
        problem = "no checkpoint in it" if directory.is_dir() else "no such directory"
        raise UsageError(f"--run_dir: {str(directory)!r}: {problem}; train first, or name another")
    if step is not None and step not in steps:
        raise UsageError(f"--step: {step} is not in {str(directory)!r}; use one of {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def choose_output(directory: pathlib.Path, name: str | None, form: str = "safetensors") -> pathlib.Path:
    """Return the path of the file or the folder to write. Raises UsageError if it cannot be one."""
    if form in FOLDERS:
        output = pathlib.Path(name) if name else directory / form
        if output.is_file() or not output.parent.is_dir():
            problem = "is a file" if output.is_file() else f"is in {str(output.parent)!r}, which does not exist"
            raise UsageError(f"--output: {str(output)!r} {problem}; give the path of a folder")
        return output
    output = pathlib.Path(name) if name else directory / "export.safetensors"
    if output.suffix != ".safetensors":
        raise UsageError(f"--output: {str(output)!r} does not end in .safetensors; init_from would not know it")
    if output.is_dir() or not output.parent.is_dir():
        problem = "is a directory" if output.is_dir() else f"is in {str(output.parent)!r}, which does not exist"
        raise UsageError(f"--output: {str(output)!r} {problem}; give the path of a file")
    return output
