"""Windows of tokens: an example is a window of a long token array; its labels are the window one
token later.
"""

from collections.abc import Sequence

import numpy as np

from jaxdp.data.dataset import Batch, Part, array_part, by_member
from jaxdp.errors import UsageError, check_sizes

# up to this many tokens are checked at once in the beginning; otherwise each window when it is read
SMALL = 1 << 24


class Windows:
    """A data set of token windows: "inputs" and "labels" int32 [length], one token apart.

    shards: arrays of tokens uint8, uint16, uint32 or int32, in memory or memory-mapped; no window
    crosses a shard boundary. Example i of a shard is `tokens[i * stride : i * stride + length +
    1]`; drops the last tokens, too few for another example. stride: tokens between the starts of
    two examples, `length` by default; text data sets use it for training only, so that an
    evaluation counts each token once. classes: the size of the vocabulary; raises UsageError with
    the position of a token beyond it. names: the shards' names in this error.

    end_of_text: the token that ends a document and belongs to it. If set, examples also have
    "segments" int32 [length], the number of the document within the window, and "mask" float32
    [length], 0 where the label is the first token of the next document.
    """

    def __init__(
        self,
        shards: Sequence[np.ndarray],
        length: int,
        stride: int | None = None,
        classes: int = 0,
        names: Sequence[str] = (),
        end_of_text: int | None = None,
        unit: str = "tokens",
    ):
        check_sizes("data.args", length=length, stride=stride)
        self.length, self.stride = length, length if stride is None else stride
        self.shards, self.names, self.end_of_text = list(shards), list(names), end_of_text
        self.classes, self.input_shape = classes, (length,)
        counts = [max(0, (len(tokens) - 1 - length) // self.stride + 1) for tokens in self.shards]
        self.starts = np.cumsum([0, *counts])
        if not self.starts[-1]:
            longest = max(map(len, self.shards), default=0)
            raise UsageError(
                f"data.args.length: {length}, but there are {longest:,} {unit}; make it smaller"
            )
        if sum(map(len, self.shards)) <= SMALL:
            for shard, tokens in enumerate(self.shards):
                self._check(tokens[None], np.zeros(1, np.int64), shard)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, indices: np.ndarray) -> Batch:
        rows = np.empty((len(indices), self.length + 1), np.int32)
        for shard, chosen, numbers in by_member(self.starts, np.asarray(indices, np.int64)):
            firsts, tokens = numbers * self.stride, self.shards[shard]
            windows = np.lib.stride_tricks.sliding_window_view(tokens, rows.shape[1])[firsts]
            self._check(windows, firsts, shard)
            rows[chosen] = windows
        batch = {"inputs": rows[:, :-1], "labels": rows[:, 1:]}
        if self.end_of_text is not None:
            ends = batch["inputs"] == self.end_of_text
            batch["segments"] = np.cumsum(ends, 1, dtype=np.int32) - ends
            batch["mask"] = 1 - ends.astype(np.float32)
        return batch

    def parts(self) -> dict[str, Part]:
        return {
            f"{i} {tokens.dtype.name}": array_part(tokens) for i, tokens in enumerate(self.shards)
        }

    def _check(self, windows: np.ndarray, firsts: np.ndarray, shard: int) -> None:
        """Raise UsageError for a token outside the vocabulary; a model would look up another
        token's weights for it.
        """
        if (
            not self.classes
            or self.classes > np.iinfo(windows.dtype).max
            or windows.max(initial=0) < self.classes
        ):
            return
        row, column = np.argwhere(windows >= self.classes)[0]
        prefix, token = f"{self.names[shard]}: " if self.names else "", windows[row, column]
        raise UsageError(
            f"data.args.vocabulary: {prefix}token {firsts[row] + column:,} is {token}, and the vocabulary "
            f"has {self.classes:,}; give a larger one"
        )


def cut(shards: Sequence[np.ndarray], fraction: float, test: bool) -> list[np.ndarray]:
    """Return views of all but the last `fraction` of the tokens, or of the last `fraction` for the
    test split.
    """
    check_fraction(fraction)
    starts = np.cumsum([0, *map(len, shards)])
    boundaries = np.maximum(0, int(starts[-1] * (1 - fraction)) - starts)
    return [
        tokens[boundary:] if test else tokens[:boundary]
        for tokens, boundary in zip(shards, boundaries)
    ]


def check_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise UsageError(f"data.args.test_fraction: {fraction} is not between 0 and 1; e.g. 0.1")
