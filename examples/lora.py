"""LoRA (Hu et al., arXiv 2106.09685): train small matrices beside the frozen weights of a GPT.

The folder of this file must be on PYTHONPATH:

    model: {target: lora.LoRAGPT, args: {rank: 8, layers: 4, heads: 4, dim: 128, bias: false}}
    init_from: runs/python_gpt  # a run of GPT with scan: false, a file, or GPT-2's or Llama's published weights
    init: {skip: [lora_]}  # only the new matrices are not in the source
    optimizer: {target: adamw, lr: 1.0e-3, frozen: ['^(?!.*lora_)']}

Paths of the weights stay those of GPT (`.../query/kernel`), so that `init_from` finds them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdp.models.gpt import GPT


class LoRALinear(nnx.Linear):
    """y = x kernel + x lora_a lora_b; lora_b starts at zero, and so does the change."""

    lora_a: nnx.Param
    lora_b: nnx.Param

    @classmethod
    def around(cls, base: nnx.Linear, rank: int, rngs: nnx.Rngs) -> "LoRALinear":
        """Return the layer with two matrices added; its kernel and bias stay the same variables."""
        layer = cls.__new__(cls)
        vars(layer).update(vars(base))
        normal = nnx.initializers.normal(base.in_features**-0.5)
        layer.lora_a = nnx.Param(normal(rngs.params(), (base.in_features, rank), jnp.float32))
        layer.lora_b = nnx.Param(jnp.zeros((rank, base.out_features)))
        return layer

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        low = inputs @ self.lora_a[...].astype(inputs.dtype)
        change = low @ self.lora_b[...].astype(inputs.dtype)
        return super().__call__(inputs, out_sharding) + change


class LoRAGPT(GPT):
    """A GPT whose projections named in `layers_of` have matrices of this rank beside them; other
    arguments: of GPT.
    """

    def __init__(
        self,
        input_shape,
        num_classes,
        rank=8,
        layers_of=("query", "value"),
        *,
        rngs: nnx.Rngs,
        **args,
    ):
        super().__init__(input_shape, num_classes, scan=False, rngs=rngs, **args)
        blocks: Any = self.blocks  # without scan, a list of modules
        for block in blocks.modules:
            for name in layers_of:
                setattr(
                    block.attention,
                    name,
                    LoRALinear.around(getattr(block.attention, name), rank, rngs),
                )
