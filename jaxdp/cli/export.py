"""The verb `export`: write a checkpoint's parameters to a file or a folder for other programs."""

import json
import pathlib
from typing import Any

from jaxdp.checkpoint import published, safetensors
from jaxdp.checkpoint.leaves import params_sha256
from jaxdp.checkpoint.store import choose_step
from jaxdp.checkpoint.weights import DESCRIBED, FORMAT, MODEL_STATE, from_checkpoint, on_host
from jaxdp.cli import Call
from jaxdp.errors import UsageError, check_one_of, one_line
from jaxdp.metrics.numbers import size
from jaxdp.run import rundir

FOLDER = "huggingface"  # the layout that is a folder
LAYOUTS = ("jaxdp", FOLDER)


def run(call: Call) -> None:
    print(export(call.options))


def export(options: dict[str, Any]) -> str:
    """Write the file or folder and return a summary. The model is not built: the checkpoint stores
    names and shapes.
    """
    layout, directory = options["layout"], run_directory(options["run_dir"])
    check_one_of("--layout", layout, LAYOUTS)
    is_folder = layout == FOLDER
    step = choose_step(directory, options["step"])
    output = directory / (FOLDER if is_folder else "export.safetensors")
    if options["output"]:
        output = pathlib.Path(options["output"]).expanduser()
    if not is_folder and output.suffix != ".safetensors":
        raise UsageError(
            f"--output: {str(output)!r} does not end in .safetensors; init_from would not know it"
        )
    is_wrong = output.is_file() if is_folder else output.is_dir()
    if is_wrong or not output.parent.is_dir():
        wrong, right = ("file", "folder") if is_folder else ("directory", "file")
        problem = (
            f"is a {wrong}" if is_wrong else f"is in {str(output.parent)!r}, which does not exist"
        )
        raise UsageError(f"--output: {str(output)!r} {problem}; give the path of a {right}")
    output = output.absolute()
    checkpoint = directory / "checkpoints" / str(step)
    weights = from_checkpoint(checkpoint, options["ema"], "--run_dir", "--ema")
    arrays = on_host(weights)
    params = {name: x for name, x in arrays.items() if not name.startswith(MODEL_STATE)}
    digest = params_sha256(params)
    meta = weights.meta
    metadata = {
        "format": FORMAT,
        "step": str(step),
        "params_sha256": digest,
        "ema": str(options["ema"]).lower(),
        **{key: json.dumps(meta[key]) for key in DESCRIBED if key in meta},
    }
    about = ""
    file = output / "model.safetensors" if is_folder else output
    try:
        if is_folder:
            with rundir.inside(meta.get("folder")):
                about = f"{published.write(output, arrays, meta)}\n"
        else:
            safetensors.write(output, arrays, metadata)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(
            f"--output: {str(output)!r} cannot be written ({one_line(error)}); choose another"
        ) from None
    elements = sum(x.size for x in params.values())
    state = len(weights.arrays) - len(params)
    return (
        f"{len(params)} parameters{' (running average)' * options['ema']}, {elements:,} elements"
        f"{f', {state} arrays of the model state' * bool(state)}; from {checkpoint}; {size(file.stat().st_size)}\n"
        f"{about}params_sha256 {digest[:16]}  written to {output}"
    )


def run_directory(path: str | None) -> pathlib.Path:
    """Return the directory of a run. Raises UsageError if none is given."""
    if not path:
        raise UsageError(
            "--run_dir: missing; give the directory of a run, e.g. --run_dir runs/digits"
        )
    return pathlib.Path(path).expanduser()
