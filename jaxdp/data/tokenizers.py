"""Tokenizers: convert text to token ids and back; a tokenizer's spec, a JSON object, is enough to
rebuild it.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxdp.errors import UsageError, import_optional, one_line, suggest

# Names of end_of_text in known vocabularies.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer:
    """A tokenizer, which is made again, in another process too, from its kind and its arguments.

    size: of the vocabulary; ids are below it. end_of_text: the token that ends a document. reserved:
    its character, which no document may contain, "" if there is none.

    encode(text) returns integers [token]; decode(ids) returns the text; spec() returns the argument
    of `from_spec`."""

    kind: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]] = ()
    reserved: ClassVar[str] = ""
    size: int
    end_of_text: int | None

    def encode(self, text: str) -> np.ndarray:
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind} | {name: getattr(self, name) for name in self.arguments}

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, name) for name in self.arguments)


class Byte(Tokenizer):
    """The bytes of UTF-8. Byte 0, which does not occur in text, ends a document."""

    kind = "byte"
    reserved = "\0"
    size = 256
    end_of_text: int | None = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; invalid UTF-8, such as half a character, becomes U+FFFD."""
        return bytes(map(int, ids)).decode(errors="replace")


class Char(Tokenizer):
    """One token per character; alphabet: the distinct characters, in the order of their ids.

    If the alphabet has U+0000, it ends a document.
    """

    kind = "char"
    arguments = ("alphabet",)
    reserved = "\0"

    def __init__(self, alphabet: str):
        if not alphabet:
            raise UsageError(
                "data.args.tokenizer: char has an empty alphabet; give it a text that is not empty"
            )
        self.alphabet, self.size = alphabet, len(alphabet)
        self._ids = np.full(sys.maxunicode + 1, -1, np.int32)  # by code point
        self._ids[_codes(alphabet)] = np.arange(self.size)
        self.end_of_text = alphabet.index("\0") if "\0" in alphabet else None

    @classmethod
    def of(cls, text: str) -> "Char":
        """Return the tokenizer of a text's characters, sorted by code point as in nanoGPT's
        `shakespeare_char`.
        """
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        ids = self._ids[_codes(text)]
        if (ids < 0).any():
            at = int(np.argmax(ids < 0))
            raise UsageError(
                f"data.args.tokenizer: character {text[at]!r} at {at:,} (line {text.count(chr(10), 0, at) + 1:,}) is "
                f"not in the alphabet of {self.size}; use another tokenizer, such as byte, or remove the character"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.alphabet[int(i)] for i in ids)


class Words(Tokenizer):
    """One token per word between spaces, and <eos> at the end of each line; vocabulary: the words,
    in the order of ids.

    The usual reading of the Penn Treebank (Mikolov et al. 2010; PyTorch's `word_language_model`). A
    word outside the vocabulary becomes <unk>, or raises UsageError if the vocabulary has no <unk>.
    """

    kind = "words"
    arguments = ("vocabulary",)
    end_of_text: int | None = None  # <eos> ends a sentence

    def __init__(self, vocabulary: Iterable[str]):
        self.vocabulary = list(vocabulary)
        self.size = len(self.vocabulary)
        self._numbers = {word: number for number, word in enumerate(self.vocabulary)}

    @classmethod
    def of(cls, text: str) -> "Words":
        """Return the tokenizer of a text's words, in order of appearance."""
        return cls(dict.fromkeys(_words(text)))

    def encode(self, text: str) -> np.ndarray:
        words = _words(text)
        unknown = self._numbers.get("<unk>")
        ids = [self._numbers.get(word, unknown) for word in words]
        if unknown is None and None in ids:
            at = ids.index(None)
            raise UsageError(
                f"data.args.tokenizer: word {words[at]!r} (line {words[:at].count('<eos>') + 1:,}) is not in the "
                f"vocabulary of {self.size:,}, which has no '<unk>' either; remove it, or replace it by '<unk>'"
            )
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return re.sub(" ?<eos> ?", "\n", " ".join(self.vocabulary[int(i)] for i in ids))


class File(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library; encodes all of a text, without special tokens
    or padding.
    """

    kind = "file"
    arguments = ("path", "sha256")

    def __init__(self, path: str | Path, sha256: str | None = None):
        self.path = str(Path(path).expanduser())
        library = _library("tokenizers")
        try:
            content = Path(self.path).read_bytes()
            self._tokenizer = library.Tokenizer.from_str(content.decode())
        except FileNotFoundError:
            raise UsageError(
                f"data.args.tokenizer: no file {str(path)!r}; give the path of a tokenizer.json"
            ) from None
        except Exception as error:  # the library raises plain Exceptions for invalid files
            raise UsageError(
                f"data.args.tokenizer: {str(path)!r} is not a tokenizer.json: {one_line(error)}"
            ) from None
        self._tokenizer.no_truncation()  # a file may store the settings of a model's inputs
        self._tokenizer.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in (None, self.sha256):
            raise UsageError(
                f"data.args.tokenizer: {str(path)!r} is not the file that was used before; put it back"
            )
        self.size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)  # ids may have gaps
        ends = map(self._tokenizer.token_to_id, ENDS)
        self.end_of_text = next((token for token in ends if token is not None), None)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)


class Named(Tokenizer):
    """A vocabulary of the `tiktoken` library by its name, such as gpt2; downloaded once, then
    cached by tiktoken.
    """

    kind = "named"
    arguments = ("name",)

    def __init__(self, name: str):
        library = _library("tiktoken")
        known = library.list_encoding_names()
        if name not in known:
            hint = suggest(
                name,
                ["byte", "char", "words", *known],
                otherwise="give byte, char, a tokenizer.json",
            )
            raise UsageError(
                f"data.args.tokenizer: {name!r} is not known; {hint} or one of {', '.join(known)}"
            )
        try:
            self._encoding = library.get_encoding(name)
        except Exception as error:  # network errors have many types
            raise UsageError(
                f"data.args.tokenizer: {name!r} could not be fetched ({type(error).__name__}); run once with a "
                "network, or set TIKTOKEN_CACHE_DIR to a folder where it is"
            ) from error
        self.name, self.size = name, self._encoding.n_vocab
        self.end_of_text = self._encoding._special_tokens.get("<|endoftext|>")

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode(list(map(int, ids)))


KINDS = {made.kind: made for made in (Byte, Char, Words, File, Named)}


def make_tokenizer(
    name: str | Mapping[str, Any], text: Callable[[], str] | None = None
) -> Tokenizer:
    """Return the tokenizer named byte, char or words, of a `tokenizer.json`, of a tiktoken name, or
    of a spec.

    text: returns the text from which char and words build their vocabulary; UsageError if they need
    it and it is None."""
    if not isinstance(name, str):
        return from_spec(name)
    if name == "byte":
        return Byte()
    if name in ("char", "words"):
        if text is None:
            raise UsageError(
                f"data.args.tokenizer: {name!r} needs a text to take its vocabulary from; give a spec"
            )
        return (Char if name == "char" else Words).of(text())
    return File(name) if name.endswith(".json") else Named(name)


def compact(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the tokens of a text in the smallest dtype of unsigned integers."""
    dtype = np.min_scalar_type(tokenizer.size - 1)
    return tokenizer.encode(text).astype(dtype, copy=False)


def reserved(name: str | Mapping[str, Any]) -> str:
    """Return the character that no document may contain, "" if there is none. name: as in
    `make_tokenizer`.
    """
    kind = name if isinstance(name, str) else str(name.get("kind"))
    return KINDS[kind].reserved if kind in KINDS else ""


def from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that `spec()` described. Raises UsageError."""
    args = dict(spec)
    kind = args.pop("kind", None)
    try:
        return KINDS[kind](**args)
    except (KeyError, TypeError):
        raise UsageError(
            f"data.args.tokenizer: {one_line(dict(spec))[:200]} is not a spec; its kind is one of {', '.join(KINDS)}"
        ) from None


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")


def _words(text: str) -> list[str]:
    return text.replace("\n", " <eos> ").split()


def _library(name: str) -> Any:
    return import_optional(name, "data.args.tokenizer: it", "bpe", ", or use byte or char")
