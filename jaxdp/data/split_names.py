"""The one place that recognizes the names of splits: of arrays, folders, files and saved data sets.

A word of a name is its split, in any case and at any position: x_train, trainX, TRAIN-images,
my.test.set, val2017. Part of a word is, as in xtrain or testset, if another name is the same but
for its split."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdp.errors import UsageError, check_one_of

WORDS = {
    "train": ("train", "training", "trn"),
    "valid": ("val", "valid", "validation", "dev", "eval", "evaluation"),
    "test": ("test", "testing", "tst"),
}
SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
EVALUATED = ("test", "valid")  # what the test split is: the first that exists
UNCLEAR = "?"
LETTER = r"[^\W\d_]"
WORD = rf"(?<!{LETTER})({'|'.join(SPLIT_OF)})(?!{LETTER})"
CAMEL = re.compile(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
SHOWN = 8  # names in a message


class SplitName(NamedTuple):
    """The split in a name, "" if there is none, and the name without it, such as ("test",
    "images").
    """

    split: str
    rest: str

    @property
    def same(self) -> str:
        """The rest without case and separators: equal for the arrays of two splits, such as trainX
        and x_test.
        """
        return re.sub(r"[\W_]+", "", self.rest).casefold()


def split_names(names: Iterable[str]) -> dict[str, SplitName]:
    """Return {name: its split and rest}. The split of a name of two, such as train_test, is
    `UNCLEAR`.
    """
    parsed = {}
    for name in names:
        text = _separated(name)
        splits = {SPLIT_OF[word.lower()] for word in re.findall(WORD, text, re.IGNORECASE)}
        # The word goes with the separators before it; after it, if it is the first.
        rest = re.sub(rf"^{WORD}[\W_]*|[\W_]*{WORD}", "", text, flags=re.IGNORECASE)
        split = UNCLEAR if len(splits) > 1 else "".join(splits)
        parsed[name] = SplitName(split, rest.replace("\0", ""))
    parts = {name: [*_parts_of_words(name)] for name, entry in parsed.items() if not entry.split}
    splits_of = defaultdict[str, set[str]](set)
    for name, entry in parsed.items():
        splits_of[entry.same].add(entry.split or "train")  # x beside xtest
        for part in parts.get(name, []):
            splits_of[part.same].add(part.split)
    for name in parts:
        paired = (part for part in parts[name] if len(splits_of[part.same]) > 1)
        parsed[name] = next(paired, parsed[name])
    return parsed


def check_clear(names: Mapping[str, SplitName], key: str, fix: str) -> None:
    """Raise UsageError for a name of two splits. key: the config's. fix: how to correct it."""
    if wrong := of_split(names, UNCLEAR):
        raise UsageError(f"{key}: {listed(wrong)} may be either of two splits; {fix}")


def check_one_split(names: Iterable[str]) -> None:
    """Raise UsageError if the arrays of examples in memory are of several splits by their names."""
    parsed = split_names(names)
    if of_split(parsed, "train") and of_split(parsed, "test"):
        raise UsageError(
            f"data: a dict of several splits ({listed(parsed)}); give the examples of one, by other names"
        )


def of_split(names: Mapping[str, SplitName], split: str) -> list[str]:
    """Return the names of a split; of "test", those of the first of `EVALUATED` that has any."""
    kinds = EVALUATED if split == "test" else (split,)
    groups = ([name for name, entry in names.items() if entry.split == kind] for kind in kinds)
    return next(filter(None, groups), [])


def choose_split(names: Mapping[str, SplitName], split: str, key: str, fix: str) -> str | None:
    """Return the name of a split: the one that is nothing else, such as Train, or else the only
    one; None if there is none. Raises UsageError if there are several, or one of two splits."""
    check_clear(names, key, fix)
    candidates = of_split(names, split)
    candidates = [name for name in candidates if not names[name].same] or candidates
    if len(candidates) > 1:
        raise UsageError(f"{key}: {listed(candidates)} may each be the {split} split; {fix}")
    return candidates[0] if candidates else None


def named_splits(
    splits: Mapping[str, str | None], names: Collection[str], path: str
) -> dict[str, str]:
    """Return the splits that the argument `splits`, {train: NAME, test: NAME}, has a name for.
    Raises UsageError for another key, or a name that is not among `names`, those in `path`."""
    chosen = {key: name for key, name in splits.items() if name is not None}
    for key in splits:
        check_one_of("data.args.splits", key, ("train", "test"))
        if key in chosen and chosen[key] not in names:
            raise UsageError(
                f"data.args.splits.{key}: no {chosen[key]!r} in {path!r}, only {listed(names)}"
            )
    return chosen


def files_by_split(files: Sequence[Path], key: str, fix: str) -> dict[str, list[Path]]:
    """Return the files of each split, "train" and those of `EVALUATED`, by their names. Raises
    UsageError for a name of two splits; key, fix: as in `check_clear`."""
    names = split_names(file.stem for file in files)
    check_clear(names, key, fix)
    return {
        split: [file for file in files if names[file.stem].split == split]
        for split in ("train", *EVALUATED)
    }


def listed(names: Iterable[object]) -> str:
    """Return names in a message, abbreviated if there are many."""
    return abbreviated([repr(str(name)) for name in names])


def abbreviated(texts: Sequence[str], others: str = "more") -> str:
    """Return the first texts of a list, and the number of the others."""
    more = f" and {len(texts) - SHOWN:,} {others}" if texts[SHOWN:] else ""
    return ", ".join(texts[:SHOWN]) + more


def normalized(name: str) -> str:
    """Return a name in Unicode's form NFC: file systems and archives differ in how they store an é."""
    return unicodedata.normalize("NFC", name)


def _separated(name: str) -> str:
    """Return a name with U+0000 between the words of camelCase."""
    return CAMEL.sub("\0", normalized(name))


def _parts_of_words(name: str) -> Iterator[SplitName]:
    """Yield what a name may mean if a split begins or ends one of its words, as in xtrain or
    testset.
    """
    text = _separated(name)
    for part, split in SPLIT_OF.items():
        ends = rf"(?<!{LETTER}){part}(?={LETTER})|(?<={LETTER}){part}(?!{LETTER})"
        for match in re.finditer(ends, text, re.IGNORECASE):
            rest = text[: match.start()] + text[match.end() :]
            yield SplitName(split, rest.replace("\0", ""))
