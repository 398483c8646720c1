"""Conversion between GPT-2's published weights and the parameters of `GPT`: pure functions of names and arrays.

The layout of the checkpoints at huggingface.co/openai-community/gpt2 (Radford et al. 2019): `wte.weight`, `wpe.weight`,
`h.0.ln_1.weight`, ..., `ln_f.bias`, sometimes with the prefix `transformer.`; kernels are [in, out], and query, key and
value share one kernel [dim, 3 dim]. `GPT` has no key bias: it shifts all scores of a query equally, which softmax
cancels. `lm_head.weight` repeats the embedding; the buffers `attn.bias` and `attn.masked_bias` are the causal mask.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdp.checkpoint.safetensors import Array, Part

PREFIX = "transformer."
STACK, MODULES = "blocks/stack", "blocks/modules"  # the path of the blocks with scan: true, and with scan: false
THIRDS = ("query", "key", "value")
OUTSIDE = {
    "embed/embedding": "wte.weight",
    "positions": "wpe.weight",
    "norm/scale": "ln_f.weight",
    "norm/bias": "ln_f.bias",
}
INSIDE = {
    "norm1/scale": "ln_1.weight",
    "norm1/bias": "ln_1.bias",
    "attention/query/kernel": "attn.c_attn.weight",
    "attention/query/bias": "attn.c_attn.bias",
    "attention/key/kernel": "attn.c_attn.weight",
    "attention/value/kernel": "attn.c_attn.weight",
    "attention/value/bias": "attn.c_attn.bias",
    "attention/back/kernel": "attn.c_proj.weight",
    "attention/back/bias": "attn.c_proj.bias",
    "norm2/scale": "ln_2.weight",
    "norm2/bias": "ln_2.bias",
    "mlp/up/kernel": "mlp.c_fc.weight",
    "mlp/up/bias": "mlp.c_fc.bias",
    "mlp/back/kernel": "mlp.c_proj.weight",
    "mlp/back/bias": "mlp.c_proj.bias",
}


def is_published(names: Iterable[str]) -> bool:
    """Return True for the names of the published layout."""
    plain = {name.removeprefix(PREFIX) for name in names}
    return {"wte.weight", "wpe.weight", "h.0.attn.c_attn.weight"} <= plain


def is_gpt(paths: Iterable[str]) -> bool:
    """Return True for the parameter paths of a `GPT` with learned positions."""
    paths = set(paths)
    blocks = (f"{STACK}/attention/query/kernel", f"{MODULES}/0/attention/query/kernel")
    return {"embed/embedding", "positions"} <= paths and any(name in paths for name in blocks)


def arrays_of(tensors: Mapping[str, Array], stacked: bool) -> dict[str, Array]:
    """Return {our path: its array} for the published tensors of a file. stacked: the blocks are, as with scan: true.

    Raises ValueError if the blocks differ in shape.
    """
    prefix = PREFIX if f"{PREFIX}wte.weight" in tensors else ""
    sources = {ours: ([f"{prefix}{theirs}"], f"{prefix}{theirs}") for ours, theirs in OUTSIDE.items()}
    for ours, theirs in INSIDE.items():
        blocks = [f"{prefix}h.{i}.{theirs}" for i in range(count(tensors))]
        if stacked:
            sources[f"{STACK}/{ours}"] = (blocks, f"{prefix}h.*.{theirs}")
        else:
            sources |= {f"{MODULES}/{i}/{ours}": ([name], name) for i, name in enumerate(blocks)}
    return {
        ours: _array(ours, [tensors[name] for name in names], label)
        for ours, (names, label) in sources.items()
        if names and tensors.keys() >= set(names)
    }


def _array(ours: str, tensors: Sequence[Array], label: str) -> Array:
    """Return the array of our path `ours`: one tensor or a stack of them, or a third of each."""
    first, third = tensors[0], next((i for i, part in enumerate(THIRDS) if f"/{part}/" in ours), None)
    for other in tensors:
        if other.shape != first.shape:
            raise ValueError(f"{first.label!r} of {first.shape}, but {other.label!r} of {other.shape}")
    shape, stacked = first.shape, ours.startswith(STACK)
    if third is not None:
        shape, label = (*shape[:-1], shape[-1] // 3), f"{label}[{THIRDS[third]}]"
    parts = tuple(Part(tensor.label, third) for tensor in tensors)
    return Array((len(parts), *shape) if stacked else shape, first.dtype, parts, label, stacked)


def used(names: Iterable[str]) -> set[str]:
    """Return the published names that `arrays_of` can use, and the redundant ones (`lm_head`, masks)."""
    inside = {*INSIDE.values(), "attn.bias", "attn.masked_bias"}
    known = {*OUTSIDE.values(), "lm_head.weight"}
    plain = lambda name: re.sub(r"^h\.\d+\.", "", name.removeprefix(PREFIX))
    return {name for name in names if plain(name) in inside | known}


def count(names: Iterable[str]) -> int:
    """Return the number of blocks."""
    matches = (re.match(r"h\.(\d+)\.", name.removeprefix(PREFIX)) for name in names)
    return 1 + max((int(m[1]) for m in matches if m), default=-1)


def to_published(params: Mapping[str, Any], vocabulary: int | None = None) -> dict[str, np.ndarray]:
    """Convert {our path: array} to {published name: array}; key biases become zeros, which do not change the outputs.

    Args:
        params: the parameters of a `GPT`; its embedding may have padding rows.
        vocabulary: the number of rows of `wte.weight` to keep; None for all rows.

    Raises:
        ValueError: the GPT's parameters differ from GPT-2's (rotary positions, rms norms).
    """
    params = {name: np.asarray(x) for name, x in params.items()}
    for name in [name for name in params if name.startswith(f"{STACK}/")]:
        for i, block in enumerate(params.pop(name)):
            params[name.replace(STACK, f"{MODULES}/{i}")] = block
    blocks = {int(name.split("/")[2]) for name in params if name.startswith(f"{MODULES}/")}
    expected = {ours: (ours, theirs) for ours, theirs in OUTSIDE.items()}
    for i in blocks:
        expected |= {f"{MODULES}/{i}/{ours}": (ours, f"h.{i}.{theirs}") for ours, theirs in INSIDE.items()}
    if expected.keys() != params.keys():
        other = sorted(expected.keys() ^ params.keys())[0]
        raise ValueError(f"it is not GPT-2's model: {other!r} is in only one of them")
    tensors: dict[str, np.ndarray] = {}
    for name, (ours, theirs) in expected.items():
        if ours == "attention/query/bias":
            bias = params[name]
            tensors[theirs] = np.concatenate([bias, np.zeros_like(bias), params[name.replace("query", "value")]])
        elif ours == "attention/query/kernel":
            tensors[theirs] = np.concatenate([params[name.replace("query", part)] for part in THIRDS], -1)
        elif theirs not in tensors and "attn.c_attn" not in theirs:
            tensors[theirs] = params[name][:vocabulary] if theirs == "wte.weight" else params[name]
    return tensors
