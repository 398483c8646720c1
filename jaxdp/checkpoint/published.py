"""Conversion between published weights and the parameters of `GPT`: pure functions of names and
arrays.

A `Layout` is a table of names. GPT-2's is that of huggingface.co/openai-community/gpt2 (Radford et
al. 2019): kernels are [in, out], and query, key and value share one kernel [dim, 3 dim]. `GPT` has
no key bias: it shifts all scores of a query equally, which softmax cancels. Llama's is that of
`transformers` (`LlamaForCausalLM`): kernels are [out, in], and rotary embedding pairs dims i and i
+ width / 2, as `GPT` does. `lm_head.weight` repeats the embedding of a tied model."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdp.checkpoint.safetensors import Array
from jaxdp.precision import kind

STACK, MODULES = (
    "blocks/stack",
    "blocks/modules",
)  # the path of the blocks with scan: true, and with scan: false
THIRDS = ("query", "key", "value")
HEAD = "lm_head.weight"
FREQUENCIES = "self_attn.rotary_emb.inv_freq"  # in older files: of the rotary embedding


class Layout(NamedTuple):
    """A table of published names.

    Attributes:
        prefix: of all names except `lm_head.weight`; some files leave it out.
        block: the names of block i begin with `block` + "i.".
        outside, inside: {our path: published name}, of the model, and of a block.
        joined: query, key and value are thirds of one array, in which missing biases are zeros.
        redundant: names in a block that carry no parameter.
        norm: that of its models, as in `GPT`.
    """

    title: str
    prefix: str
    block: str
    outside: dict[str, str]
    inside: dict[str, str]
    joined: bool
    redundant: frozenset[str]
    norm: str

    def name(self, theirs: str, prefix: str) -> str:
        return theirs if theirs == HEAD else f"{prefix}{theirs}"

    def transposes(self, ours: str) -> bool:
        return ours == "head/kernel" or (not self.joined and ours.endswith("/kernel"))


GPT2 = Layout(
    "GPT-2",
    "transformer.",
    "h.",
    {
        "embed/embedding": "wte.weight",
        "positions": "wpe.weight",
        "norm/scale": "ln_f.weight",
        "norm/bias": "ln_f.bias",
        "head/kernel": HEAD,
    },
    {
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
    },
    joined=True,
    redundant=frozenset({"attn.bias", "attn.masked_bias"}),  # the causal mask
    norm="layer",
)
LINEAR = {
    **{f"attention/{ours}": f"self_attn.{ours[0]}_proj" for ours in THIRDS},
    "attention/back": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/back": "mlp.down_proj",
}
LLAMA = Layout(
    "Llama",
    "model.",
    "layers.",
    {"embed/embedding": "embed_tokens.weight", "norm/scale": "norm.weight", "head/kernel": HEAD},
    {
        "norm1/scale": "input_layernorm.weight",
        "norm2/scale": "post_attention_layernorm.weight",
        **{f"{ours}/kernel": f"{theirs}.weight" for ours, theirs in LINEAR.items()},
        **{f"{ours}/bias": f"{theirs}.bias" for ours, theirs in LINEAR.items()},
    },
    joined=False,
    redundant=frozenset({FREQUENCIES}),
    norm="rms",
)
LAYOUTS = {"gpt2": GPT2, "llama": LLAMA}


def layout_of(names: Iterable[str], paths: Iterable[str]) -> Layout | None:
    """Return the layout of the published names if the parameter paths are those of a `GPT` of its
    form; else None.

    One tensor of a block tells the layout, so that an incomplete file is recognized, too.
    """
    names, paths = list(names), set(paths)
    for layout in LAYOUTS.values():
        kernel = "mlp/up/kernel" if layout.joined else "mlp/gate/kernel"
        blocks = {f"{place}/{kernel}" for place in (STACK, f"{MODULES}/0")}
        ours = (
            "embed/embedding" in paths
            and ("positions" in paths) == layout.joined
            and paths & blocks
        )
        inside = {*layout.inside.values()}
        if ours and any(name in inside for _, name in blocks_of(layout, names)):
            return layout
    return None


def blocks_of(layout: Layout, names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield (the number of the block, the name in it) of each tensor of a block."""
    pattern = re.compile(rf"(?:{re.escape(layout.prefix)})?{re.escape(layout.block)}(\d+)\.(.+)")
    for name in names:
        if match := pattern.fullmatch(name):
            yield int(match[1]), match[2]


def count(layout: Layout, names: Iterable[str]) -> int:
    """Return the number of blocks."""
    return 1 + max((i for i, _ in blocks_of(layout, names)), default=-1)


def sources_of(
    layout: Layout, names: Collection[str], stacked: bool
) -> dict[str, tuple[list[str], str]]:
    """Return {our path: (the published tensors that it consists of, their name in messages)}, also
    of missing ones.
    """
    prefix = prefix_of(layout, names)
    named = {ours: layout.name(theirs, prefix) for ours, theirs in layout.outside.items()}
    sources = {ours: ([theirs], theirs) for ours, theirs in named.items()}
    for ours, theirs in layout.inside.items():
        blocks = [f"{prefix}{layout.block}{i}.{theirs}" for i in range(count(layout, names))]
        if stacked:
            sources[f"{STACK}/{ours}"] = (blocks, f"{prefix}{layout.block}*.{theirs}")
        else:
            sources |= {f"{MODULES}/{i}/{ours}": ([name], name) for i, name in enumerate(blocks)}
    return sources


def prefix_of(layout: Layout, names: Iterable[str]) -> str:
    return layout.prefix if any(name.startswith(layout.prefix) for name in names) else ""


def arrays_of(layout: Layout, tensors: Mapping[str, Array], stacked: bool) -> dict[str, Array]:
    """Return {our path: its array} for the published tensors of a file. stacked: the blocks are, as
    with scan: true.

    Raises ValueError if the blocks differ in shape or kind of dtype.
    """
    return {
        ours: _array(layout, ours, [tensors[name] for name in names], label)
        for ours, (names, label) in sources_of(layout, tensors, stacked).items()
        if tensors.keys() >= set(names)
    }


def absent(layout: Layout, names: Collection[str], stacked: bool) -> dict[str, str]:
    """Return {our path: the first of its published tensors that the file does not have}."""
    sources = sources_of(layout, names, stacked)
    lacking = {ours: [x for x in theirs if x not in names] for ours, (theirs, _) in sources.items()}
    return {ours: missing[0] for ours, missing in lacking.items() if missing}


def _array(layout: Layout, ours: str, tensors: Sequence[Array], label: str) -> Array:
    """Return the array of our path `ours`: one tensor or a stack of them, or a third of each, or
    their transposes.
    """
    first = tensors[0]
    third = next(
        (i for i, part in enumerate(THIRDS) if layout.joined and f"/{part}/" in ours), None
    )
    for other in tensors:
        if other.shape != first.shape or kind(other.dtype) != kind(first.dtype):

            def form(x):
                return f"{x.dtype}{list(x.shape)}"

            raise ValueError(
                f"{first.label!r} of {form(first)}, but {other.label!r} of {form(other)}"
            )
    shape = first.shape
    stacked = ours.startswith(STACK)
    transposed = layout.transposes(ours)
    if transposed:
        shape = shape[::-1]
    if third is not None:
        if not shape or shape[-1] % 3:
            raise ValueError(
                f"{first.label!r} of {list(shape)}, which is not query, key and value of equal sizes"
            )
        shape = (*shape[:-1], shape[-1] // 3)
        label = f"{label}[{THIRDS[third]}]"
    parts = tuple(
        tensor.parts[0]._replace(third=third, transposed=transposed) for tensor in tensors
    )
    return Array((len(parts), *shape) if stacked else shape, first.dtype, parts, label, stacked)


def used(layout: Layout, names: Collection[str]) -> set[str]:
    """Return the published names that `arrays_of` can use, and the redundant ones."""
    prefix = prefix_of(layout, names)
    known = {name for theirs, _ in sources_of(layout, names, False).values() for name in theirs}
    blocks = range(count(layout, names))
    return known | {
        f"{prefix}{layout.block}{i}.{name}" for i in blocks for name in layout.redundant
    }


def to_published(
    layout: Layout, params: Mapping[str, Any], vocabulary: int | None = None, prefix: str = ""
) -> dict[str, np.ndarray]:
    """Convert {our path: array} to {published name: array}.

    In GPT-2's layout, key biases and the biases of a model without any become zeros, which do not
    change the outputs.

    Args:
        params: the parameters of a `GPT`; its embedding and head may have padding rows.
        vocabulary: the number of rows of both to keep; None for all rows.
        prefix: of the names, "" or the layout's.

    Raises:
        ValueError: the parameters are not those of this layout's model.
    """
    params = {name: np.asarray(x) for name, x in params.items()}
    for name in [name for name in params if name.startswith(f"{STACK}/")]:
        for i, block in enumerate(params.pop(name)):
            params[name.replace(STACK, f"{MODULES}/{i}")] = block
    blocks = {int(name.split("/")[2]) for name in params if name.startswith(f"{MODULES}/")}
    names = {ours: layout.name(theirs, prefix) for ours, theirs in layout.outside.items()}
    for i in blocks:
        names |= {
            f"{MODULES}/{i}/{k}": f"{prefix}{layout.block}{i}.{name}"
            for k, name in layout.inside.items()
        }
    optional = {name for name in names if name.endswith("/bias")} | {"head/kernel"}
    if wrong := sorted((params.keys() - names.keys()) | (names.keys() - params.keys() - optional)):
        raise ValueError(f"it is not {layout.title}'s model: {wrong[0]!r} is in only one of them")

    def read(ours):
        if ours in params:
            return params[ours][:, :vocabulary].T if ours == "head/kernel" else params[ours]
        scale = ours.replace("/bias", "/scale")
        return np.zeros_like(
            params[scale] if scale in params else params[ours.replace("/bias", "/kernel")][0]
        )

    tensors: dict[str, np.ndarray] = {}
    for ours, theirs in names.items():
        if layout.joined and "/attention/query/" in ours:
            parts = [read(ours.replace("/query/", f"/{part}/")) for part in THIRDS]
            if parts[0].shape != parts[1].shape:
                raise ValueError(
                    f"it is not {layout.title}'s model: it has fewer heads of keys than of queries"
                )
            tensors[theirs] = np.concatenate(parts, -1)
        elif theirs not in tensors and (
            ours in params or (layout.joined and ours != "head/kernel")
        ):
            x = read(ours)
            flip = layout.transposes(ours) and ours != "head/kernel"
            tensors[theirs] = x[:vocabulary] if ours == "embed/embedding" else x.T if flip else x
    return tensors
