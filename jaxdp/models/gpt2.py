"""Conversion between GPT-2's published weights and the parameters of `GPT`: pure functions of names and arrays.

The layout of the checkpoints at huggingface.co/openai-community/gpt2 (Radford et al. 2019): `wte.weight`, `wpe.weight`,
`h.0.ln_1.weight`, ..., `ln_f.bias`, sometimes with the prefix `transformer.`; kernels are [in, out], and query, key and
value share one kernel [dim, 3 dim]. `GPT` has no key bias: it shifts all scores of a query equally, which softmax
cancels. `lm_head.weight` repeats the embedding; the buffers `attn.bias` and `attn.masked_bias` are the causal mask.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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


class Place(NamedTuple):
    """The published source of one of our arrays: the tensor names (one per block if stacked), and which third of their
    last dim (0 to 2), or None for all of it."""

    names: tuple[str, ...]
    stacked: bool = False
    third: int | None = None

    @property
    def label(self) -> str:
        """Return a short name for messages."""
        name = re.sub(r"h\.\d+\.", "h.*.", self.names[0]) if self.stacked else self.names[0]
        return name if self.third is None else f"{name}[{THIRDS[self.third]}]"


def is_published(names: Iterable[str]) -> bool:
    """Return True for the names of the published layout."""
    plain = {name.removeprefix(PREFIX) for name in names}
    return {"wte.weight", "wpe.weight", "h.0.attn.c_attn.weight"} <= plain


def is_gpt(paths: Iterable[str]) -> bool:
    """Return True for the parameter paths of a `GPT` with learned positions."""
    paths = set(paths)
    blocks = (f"{STACK}/attention/query/kernel", f"{MODULES}/0/attention/query/kernel")
    return {"embed/embedding", "positions"} <= paths and any(name in paths for name in blocks)


def places(names: Sequence[str], stacked: bool) -> dict[str, Place]:
    """Return {our path: its `Place`} for all arrays whose tensors are among these published names."""
    prefix = PREFIX if f"{PREFIX}wte.weight" in names else ""
    available = set(names)
    sources = {ours: Place((f"{prefix}{theirs}",)) for ours, theirs in OUTSIDE.items()}
    blocks = range(count(names))
    for ours, theirs in INSIDE.items():
        third = next((i for i, part in enumerate(THIRDS) if f"/{part}/" in ours), None)
        each = [f"{prefix}h.{i}.{theirs}" for i in blocks]
        if stacked:
            sources[f"{STACK}/{ours}"] = Place(tuple(each), True, third)
        else:
            sources |= {f"{MODULES}/{i}/{ours}": Place((name,), False, third) for i, name in enumerate(each)}
    return {ours: source for ours, source in sources.items() if available.issuperset(source.names)}


def used(names: Iterable[str]) -> set[str]:
    """Return the published names that `places` can use, and the redundant ones (`lm_head`, masks)."""
    inside = {*INSIDE.values(), "attn.bias", "attn.masked_bias"}
    known = {*OUTSIDE.values(), "lm_head.weight"}
    plain = lambda name: re.sub(r"^h\.\d+\.", "", name.removeprefix(PREFIX))
    return {name for name in names if plain(name) in inside | known}


def count(names: Iterable[str]) -> int:
    """Return the number of blocks."""
    matches = (re.match(r"h\.(\d+)\.", name.removeprefix(PREFIX)) for name in names)
    return 1 + max((int(m[1]) for m in matches if m), default=-1)


def from_published(arrays: Mapping[str, Any], stacked: bool = True) -> dict[str, np.ndarray]:
    """Convert {published name: array} to {our path: array}; stacked: for a GPT that scans its blocks."""

    def take(place: Place, name: str) -> np.ndarray:
        tensor = np.asarray(arrays[name])
        return tensor if place.third is None else np.split(tensor, 3, -1)[place.third]

    return {
        ours: np.stack([take(place, name) for name in place.names]) if place.stacked else take(place, place.names[0])
        for ours, place in places(list(arrays), stacked).items()
    }


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
