"""Export the forward pass of a run as a program that JAX alone runs, with its parameters and a
script.

Needs flatbuffers, for the files of jax.export: pip install flatbuffers

python examples/export_stablehlo.py runs/digits [FOLDER]
python runs/digits/stablehlo/run.py inputs.npy outputs.npy
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxdp.checkpoint import manifest
from jaxdp.checkpoint.weights import MODEL_STATE, from_checkpoint, locate, on_host
from jaxdp.config.parsing import from_mapping
from jaxdp.errors import one_line
from jaxdp.losses import compute_logits
from jaxdp.models.base import CARRY
from jaxdp.precision import cast_floats
from jaxdp.run.components import make_parts, set_jax
from jaxdp.split import path_string
from jaxdp.train.carry import split_carry

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
SCRIPT = '''"""Run the exported forward pass: python run.py inputs.npy outputs.npy"""
import pathlib
import sys

import jax
import numpy as np
from jax import export

folder = pathlib.Path(__file__).parent
forward = export.deserialize(bytearray((folder / "forward.stablehlo").read_bytes()))
jax.config.update("jax_enable_x64", {x64})
stored = np.load(folder / "params.npz")
params = [stored[name].view(like.dtype) for name, like in zip(stored.files, forward.in_avals)]
outputs = forward.call(params, np.load(sys.argv[1]))
np.save(sys.argv[2], np.asarray(outputs, np.result_type(np.float32, outputs.dtype)))
'''


def write(folder: pathlib.Path, meta: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Write forward.stablehlo, params.npz and run.py; return a line about them.

    The program maps (parameters, inputs [example, ...]) to the model's outputs, as an evaluation
    computes them, for any number of examples if the model can be traced so, else for one.
    """
    forward, names, example = make_forward(meta, arrays)
    params = [jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in names]

    def shape(examples):
        return jax.ShapeDtypeStruct((examples, *example.shape[1:]), example.dtype)

    examples = "any number of examples"
    try:
        program = export.export(jax.jit(forward), platforms=PLATFORMS)(
            params, shape(export.symbolic_shape("n")[0])
        )
    except Exception as error:  # the model's code may ask for the number of examples
        examples = f"1 example at a time ({one_line(error)[:100]})"
        program = export.export(jax.jit(forward), platforms=PLATFORMS)(params, shape(1))
    folder.mkdir(exist_ok=True)
    (folder / "forward.stablehlo").write_bytes(program.serialize())
    stored: dict[str, Any] = {name: arrays[name] for name in names}
    np.savez(folder / "params.npz", **stored)
    (folder / "run.py").write_text(
        SCRIPT.format(x64=jax.config.read("jax_enable_x64")), encoding="utf-8"
    )
    return f"inputs {example.dtype}[n, {', '.join(map(str, example.shape[1:]))}], {examples}; run.py runs it"


def read(run_dir: str | pathlib.Path) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
    """Return (the description, the arrays by path) of the run's last checkpoint."""
    checkpoint = locate(str(run_dir))
    return manifest.read(checkpoint)["meta"], on_host(from_checkpoint(checkpoint, ema=False))


def make_forward(
    meta: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> tuple[Any, list[str], np.ndarray]:
    """Return (forward(parameters in the order of the names, inputs), the names, inputs of an
    example).

    A carried state starts at zero in every call.
    """
    config = from_mapping(meta["config"], "the checkpoint")
    # No reduction is in the program, and the exact ones need flags in the environment of the
    # process.
    config = dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, reduction="auto")
    )
    set_jax(config)
    parts = make_parts(config)
    options, dataset = parts.forward, next(iter(parts.eval_sets.values()), parts.dataset)
    example = {
        name: x for name, x in dataset.read(np.zeros(1, np.int64)).items() if name != "labels"
    }
    example["mask"] = np.ones(1, bool)

    def prepare(batch):
        return (
            batch
            if options.eval_transform is None
            else options.eval_transform(batch, jax.random.key(0), False)
        )

    like = jax.eval_shape(
        lambda: options.model.init(jax.random.key(0), options.policy.inputs(prepare(example)))
    )
    state, carry = split_carry(like[1])
    trees, names = (like[0], state), [*arrays]

    def forward(values: list[jax.Array], inputs: jax.Array) -> Any:
        stored = dict(zip(names, values))

        def fill(tree, prefix):
            return jax.tree_util.tree_map_with_path(
                lambda path, _: stored[prefix + path_string(path)], tree
            )

        params, state = fill(trees[0], ""), fill(trees[1], MODEL_STATE)
        if carry is not None:
            state = {
                **state,
                CARRY: jax.tree.map(
                    lambda x: jnp.zeros((inputs.shape[0], *x.shape[1:]), x.dtype), carry
                ),
            }
        batch = prepare({"inputs": inputs, "mask": jnp.ones(inputs.shape[:1], bool)})
        params = cast_floats(params, options.policy.compute)
        outputs, _ = options.model.apply(
            params, state, options.policy.inputs(batch), jax.random.key(0), False
        )
        return options.policy.outputs(compute_logits(outputs))

    return forward, names, np.asarray(example["inputs"])


if __name__ == "__main__":
    run_dir = pathlib.Path(sys.argv[1])
    output = pathlib.Path(sys.argv[2]) if sys.argv[2:] else run_dir / "stablehlo"
    print(write(output, *read(run_dir)))
