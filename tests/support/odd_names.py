"""Strategies of names: whatever a file system takes as a folder, and whatever a pytree takes as a
key.
"""

import numpy as np
from hypothesis import strategies as st

FOLDERS = [
    "lr=[1e-3]", "[a", "a]", "*", "**", "?", "{a,b}", "{}", " ", "a b ", "\n", "a\nb", "\t", "%", "%41", "%2F", "#",
    "#x", "gs:", "logs:", "gs:x", "s3", "gs", "~", "~root", "a~", "-rf", "--run_dir", "x" * 255, "x" * 256, "é" * 127,
    ".hidden", "...", "a.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-0-0", "7.pruned", "checkpoints", "7", "$HOME",
    "`x`", "'", '"', "\\", "a\\", "e\u0301", "\u00e9", "🙂", "\u202e", "\x01", "\x7f", "a.__lock", "a=b,c", "a:b", "!",
    "&", ";", "|", "<",
]  # fmt: skip
KEYS = [
    "", "a", "b", "a.b", "a/b", ".", "..", "/", "a.", ".a", "a/", "/a", "0", "1", "00", "01", "-1", "A", "W", "w",
    "\u00e9", "e\u0301", "\ufb01", "fi", "_METADATA", "manifest.ocdbt", "ocdbt.process_0", ".zarray", "c", "c/0",
    "zarr.json", "%", "%2E", "%41", "#", "?", "*", "[1]", "{}", " ", "a ", "\n", "\\", "\x00", "\x7f", "gs:",
    "x" * 300, "params", "step", "opt_state", "None", "True", "null", "🙂", "\u202e", "key", "name", "d/0", "default",
    "model_state", "__metadata__", "\ud800",
]  # fmt: skip

folder_names = st.one_of(
    st.sampled_from(FOLDERS),
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=12
    ),
).filter(lambda name: name not in (".", ".."))
folders = st.lists(folder_names, min_size=1, max_size=3)
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=5), st.sampled_from(KEYS[:20]))
leaves = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).standard_normal(shape).astype(dtype),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from(["float32", "float16"]),
    st.integers(0, 99),
)


def _nodes(children):
    return st.one_of(
        st.dictionaries(keys, children, min_size=1, max_size=4),
        st.dictionaries(keys, children, min_size=1, max_size=4),
        st.dictionaries(st.integers(-1, 12), children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
    )


trees = _nodes(st.recursive(leaves, _nodes, max_leaves=6))
