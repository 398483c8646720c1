"""Export the forward pass of a run as an ONNX file. Needs the package jax2onnx (docs/finetune.md).

python examples/export_onnx.py runs/digits [FILE]
"""

import pathlib
import sys

import jax
import jax.extend.core as jex
from export_stablehlo import make_forward, read
from jax.interpreters.partial_eval import dce_jaxpr
from jax2onnx import to_onnx


def without_unused(f):
    """Return f without the operations that its output does not need, such as those on random keys."""

    def run(x: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(f)(x)
        jaxpr, _ = dce_jaxpr(closed.jaxpr, [True], instantiate=True)
        (output,) = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, closed.consts))(x)
        return output

    return run


if __name__ == "__main__":
    run_dir = pathlib.Path(sys.argv[1])
    meta, arrays = read(run_dir)
    forward, names, example = make_forward(meta, arrays)
    params = [arrays[name] for name in names]
    inputs = jax.ShapeDtypeStruct(("n", *example.shape[1:]), example.dtype)
    options = {
        "return_mode": "file",
        "output_path": sys.argv[2] if sys.argv[2:] else str(run_dir / "forward.onnx"),
    }
    double = jax.config.read("jax_enable_x64")
    to_onnx(
        without_unused(lambda x: forward(params, x)),
        [inputs],
        enable_double_precision=double,
        **options,
    )
    print(
        f"{options['output_path']}: inputs {example.dtype}[n, {', '.join(map(str, example.shape[1:]))}]"
    )
