"""A checkpoint's tokenizer: find it, load it, identify it by a hash; tokens of texts and back.

The `tokenizers` library is an extra, imported only when a tokenizer is loaded. It reads untrusted
files in a subprocess; see `sandbox`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self
from unicodedata import normalize
from weakref import WeakKeyDictionary

from weightscope.checkpoint.config import Config, read_json, read_small
from weightscope.checkpoint.gguf import first_part, header_of
from weightscope.checkpoint.opening import (
    LARGEST_SMALL_FILE,
    TOKENIZER_FILES,
    TOKENIZERS,
    lone_gguf,
    resolve_folder,
)
from weightscope.core.embedded import FOLDER
from weightscope.core.errors import CheckpointError, first_line, printable
from weightscope.model.text.sandbox import (
    MOST_TOKENS,
    Sandbox,
    byte_level_bpe,
    description,
    encode,
    encode_batch,
    from_json,
    parsed,
    word_piece,
)
from weightscope.model.text.splitting import (
    BEGINS_A_WORD,
    GPT2,
    LLAMA3,
    QWEN2,
    gguf_problem,
    gguf_tokenizer,
    pieces_of,
    sentencepiece_tokenizer,
)

if TYPE_CHECKING:
    from weightscope.model.model import Model

INSTALL = "pip install tokenizers"
ONLY_LISTED = "only its list of tokens is read, not its rules"
END_OF_TEXT = "<|endoftext|>"
LONGEST_TOKEN = 200  # characters shown; a page has thousands of tokens, and some have 20 kB
PARSED_HERE = 100_000  # bytes of a SentencePiece model; published ones have a few million
CONTINUES = "##"
BYTE_LEVEL = {"type": "ByteLevel"}
GGUF_TOKENS, GGUF_KIND = "tokenizer.ggml.tokens", "tokenizer.ggml.model"
GGUF_KINDS = {"llama": "Unigram", "t5": "Unigram", "gpt2": "BPE", "bert": "WordPiece"}
# Classes that split text as their SentencePiece model says, and the tokens before and after it.
AS_SENTENCEPIECE = {"": ("", ""), "T5Tokenizer": ("", "</s>"), "LlamaTokenizer": ("<s>", "")}
# Classes that split text as BERT's does.
LIKE_BERTS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")


class AddedToken(NamedTuple):
    """A token that is found in a text before any other step."""

    content: str
    rstrip: bool
    special: bool


class Tokenizer:
    """Tokens and their ids, and how a text splits into them.

    Parameters
    ----------
    file : path-like
        Named in errors.
    facts : dict
        The `description` by sandbox.
    ask : callable
        Calls a function of sandbox on the library's own tokenizer, wherever that is.
    """

    def __init__(self, file: object, facts: dict[str, Any], ask: Callable[..., bytes]) -> None:
        self.file, self.facts, self._ask = file, facts, ask
        self.ids: dict[str, int] = facts["vocab"]  # by token, as the vocabulary spells it
        self.tokens: dict[int, str] = {index: token for token, index in self.ids.items()}
        self.added = {index: AddedToken(*rest) for index, *rest in facts["added"]}

    @classmethod
    def find(cls, source: str | Path, revision: str | None = None) -> Path:
        """The file that says most of a source's tokenizer; downloaded if it is on the Hub."""
        return cls.find_at(resolve_folder(source, revision), source)

    @staticmethod
    def find_at(path: Path, source: str | Path = "") -> Path:
        """The file that says most of the tokenizer at a folder or file; errors name `source`."""
        if path.is_file() and path.name != "vocab.json" and path.suffix in (".json", ".model"):
            return path
        folder = path if path.is_dir() else path.parent
        for name, *companions in TOKENIZERS:
            if all((folder / each).is_file() for each in (name, *companions)):
                return folder / name
        gguf = first_part(path) if path.suffix == ".gguf" else lone_gguf(folder)
        if gguf is None:
            looked = ", ".join(" with ".join(names) for names in TOKENIZERS)
            raise CheckpointError(f"no tokenizer in {source or path} (looked for {looked})")
        return gguf

    @classmethod
    def load(cls, source: str | Path, revision: str | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint."""
        return _read(cls.find(source, revision))

    @staticmethod
    def at_hand(model: Model) -> Tokenizer | None:
        """A model's tokenizer if it is named or on this machine; None if none can be read."""
        return _at_hand(model)[0]

    @staticmethod
    def why_unreadable(model: Model) -> str:
        """Why a model's own tokenizer cannot be read; empty if it can, or if there is none."""
        return _at_hand(model)[1]

    @classmethod
    def place_of(cls, model: Model) -> Path:
        """The place of a model's tokenizer: a folder, or a file with an unusual name."""
        if model.tokenizer == model.source:
            return model.checkpoint.folder
        file = cls.find(model.tokenizer)
        return file.parent if file.name in TOKENIZER_FILES else file

    @staticmethod
    def sandboxed(file: object, load: Any, *arguments: Any) -> Tokenizer:
        """A stranger's tokenizer in a child process; a file is loaded once, or refused once."""
        tokenizer = _sandboxed(str(file), load, *arguments)
        if isinstance(tokenizer, CheckpointError):
            raise tokenizer.with_traceback(None)
        return tokenizer

    @classmethod
    def of_library(cls, tokenizer: Any, file: object = None) -> Self:
        """A `tokenizers.Tokenizer` of this process, which is trusted."""

        def ask(function: Callable[..., bytes], *arguments: Any, characters: int) -> bytes:
            try:
                return function(tokenizer, *arguments)
            except Exception as error:  # the library has no error class of its own
                raise CheckpointError(first_line(error)) from error

        return cls(file, description(tokenizer), ask)

    @cached_property
    def size(self) -> int:
        """The rows that an embedding needs: one more than the largest token id."""
        return 1 + max(self.ids.values())

    @property
    def unknown(self) -> int | None:
        """The id of the token for text outside the vocabulary; None without one."""
        return self.ids.get(self.facts["model"][1] or "")

    def check_known(self, unknown: int, tokens: int) -> None:
        """Refuse a text of so many tokens if most of them are the unknown one."""
        if unknown > tokens / 2:
            token, file = self.text(self.unknown or 0), str(self.file) if self.file else None
            problem = f"{unknown:,} of the {tokens:,} tokens of this text are {token!r}"
            raise CheckpointError(
                f"{problem}; give one in the language of the tokenizer", file=file
            )

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the mapping from ids to tokens, in hexadecimal.

        Two tokenizers with the same hash agree on every id, whatever files they came from and
        whichever version of the library wrote them.
        """
        tokens = sorted((index, token) for token, index in self.ids.items())
        return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        special: bool = True,
        longest: int | None = None,
    ) -> list[int]:
        """The tokens of a text, or of two, at most `longest` (the longer text is cut first)."""
        return self._encoding((text,) if pair is None else (text, pair), special, longest)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of many texts, without special ones around them."""
        answer = self._ask(encode_batch, texts, characters=sum(map(len, texts)))
        numbers = memoryview(answer).cast("q").tolist()
        start, batch = 1 + numbers[0], []
        for length in numbers[1:start]:
            batch.append(numbers[start : start + length])
            start += length
        return batch

    def single_tokens(self, texts: Sequence[str]) -> list[int | None]:
        """The one token that each text is; None for a text that splits."""
        return [ids[0] if len(ids) == 1 else None for ids in self.encode_batch(texts)]

    @cached_property
    def around(self) -> tuple[int, ...]:
        """The special tokens that it adds to a pair of texts, each once, in their order."""
        ids, marks = self._encoding(("a", "a"))
        special = (token for token, mark in zip(ids, marks, strict=True) if mark)
        return tuple(dict.fromkeys(special))

    def _encoding(
        self, texts: tuple[str, ...], special: bool = True, longest: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids, and 1 for each that is special."""
        characters = sum(map(len, texts))
        ids, marks = json.loads(self._ask(encode, texts, special, longest, characters=characters))
        return ids, marks

    def id_of(self, text: str) -> int:
        """The id of the one token that `text` is."""
        try:
            ids = self.encode(text, special=False)
        except CheckpointError as error:  # an unpaired surrogate, or no unknown token
            raise CheckpointError(f"the tokenizer cannot encode {text!r}: {error}") from error
        if len(ids) == 1 and (text == self.facts["model"][1] or ids[0] != self.unknown):
            return ids[0]
        if text not in self.ids:
            parts = " + ".join(repr(self.text(index)) for index in ids) or "nothing"
            problem = f"{text!r} is not one token of this tokenizer"
            raise CheckpointError(f"{problem}; it splits into {parts}")
        return self.ids[text]

    def text(self, *ids: int) -> str:
        """The text of consecutive tokens, with their spaces; kilobytes end in an ellipsis.

        Bytes that form no whole character are spelled out ("\\xe9"), and so is an id without a
        token ("<id 50300>").
        """
        tokens = [self.tokens.get(index) or f"<id {index}>" for index in ids]
        kind, _, prefix = self.facts["model"]
        steps = self.steps("decoder") + self.steps("pre_tokenizer")
        if any(step["type"] == "ByteLevel" for step in steps):
            text = b"".join(map(bytes_of, tokens)).decode(errors="backslashreplace")
        elif kind == "WordPiece":
            text = "".join(tokens[:1])
            for token in tokens[1:]:
                text += token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
        else:
            text = "".join(tokens).replace(BEGINS_A_WORD, " ")
        return shortened(text, len(ids))

    def steps(self, name: str) -> list[dict[str, Any]]:
        """The steps of its normalizer, pre_tokenizer or decoder, as tokenizer.json has them."""
        described = self.facts[name]
        if described is None or described["type"] != "Sequence":
            return [] if described is None else [described]
        return next(value for key, value in described.items() if key != "type")


def token_names(tokenizer: Tokenizer | None) -> Callable[..., str]:
    """A function that names tokens: by text, or by id without a tokenizer."""
    return tokenizer.text if tokenizer else lambda *ids: " ".join(f"#{index}" for index in ids)


def shortened(text: str, n_tokens: int = 1) -> str:
    """The text of `n_tokens` tokens, shortened for a page."""
    longest = LONGEST_TOKEN * n_tokens
    return text if len(text) <= longest else f"{text[:longest]}…"


# GPT-2 spells every byte of a token as one symbol.

PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
UNPRINTABLE = (byte for byte in range(256) if byte not in PRINTABLE)
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + n): byte for n, byte in enumerate(UNPRINTABLE)
}
SYMBOLS = {byte: symbol for symbol, byte in BYTES.items()}


def bytes_of(token: str) -> bytes:
    """The bytes of a token in GPT-2's spelling; an added token may be plain text instead."""
    if all(symbol in BYTES for symbol in token):
        return bytes(BYTES[symbol] for symbol in token)
    return token.encode()


def symbols_of(text: str) -> str:
    """A text in GPT-2's spelling."""
    return "".join(SYMBOLS[byte] for byte in text.encode(errors="surrogatepass"))


# Lists of tokens: parsed strictly here, without a library.


class TokenList(Tokenizer):
    """Tokens without splitting rules: enough to name tokens and to find one by its text.

    `kind` is the spelling: a space as ▁ (Unigram), bytes as GPT-2's symbols (BPE), ## before word
    parts (WordPiece).
    """

    reason = ONLY_LISTED  # why it cannot split texts

    def __init__(self, file: object, tokens: Sequence[str], kind: str) -> None:
        if not tokens or len(tokens) > MOST_TOKENS:
            problem = f"lists {len(tokens)} tokens; from 1 to {MOST_TOKENS} are read"
            raise CheckpointError(problem, file=file)
        facts = {
            "vocab": {token: index for index, token in reversed([*enumerate(tokens)])},
            "added": [],
            "model": [kind, None, CONTINUES if kind == "WordPiece" else None],
            "normalizer": None,
            "pre_tokenizer": None,
            "decoder": BYTE_LEVEL if kind == "BPE" else None,
        }
        super().__init__(file, facts, lambda *_, **__: self._refuse("cannot split texts"))
        self.tokens = dict(enumerate(tokens))

    @classmethod
    def of_gguf(cls, path: Path) -> TokenList:
        """The token list of a GGUF file, with the reason why its rules are not read, if any."""
        keys = Config(header_of(path, (GGUF_TOKENS,)), path)
        tokens, kind = keys.get(GGUF_TOKENS), str(keys.get(GGUF_KIND))
        if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
            raise CheckpointError("has no list of tokens", file=path)
        if kind == "bert":
            tokens = [_as_word_piece(token) for token in tokens]
        if kind not in GGUF_KINDS:
            problem = f"spells tokens as '{kind[:40]}' does, which is not known here"
            raise CheckpointError(problem, file=path)
        listed = cls(path, tokens, GGUF_KINDS[kind])
        listed.reason = gguf_problem(keys) or ONLY_LISTED
        return listed

    @classmethod
    def of_lines(cls, content: bytes, file: object) -> TokenList:
        """The tokens of a vocab.txt, one per line, whose splitting rules are unknown."""
        if (count := content.count(b"\n")) > MOST_TOKENS:  # before there is a list of them
            problem = f"lists {count} tokens; from 1 to {MOST_TOKENS} are read"
            raise CheckpointError(problem, file=file)
        try:
            lines = content.decode().removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            raise CheckpointError("is not UTF-8", file=file) from None
        return cls(file, [line.rstrip("\r") for line in lines], "WordPiece")

    @classmethod
    def of_sentencepiece(cls, content: bytes, file: object) -> TokenList:
        """The pieces of a SentencePiece model; a large one is parsed in a child process."""
        if len(content) > PARSED_HERE:
            return cls(file, parsed(str(file), pieces_of, content), "Unigram")
        try:
            tokens = pieces_of(content)
        except CheckpointError as error:
            raise CheckpointError(str(error), file=file) from None
        return cls(file, tokens, "Unigram")

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        special: bool = True,
        longest: int | None = None,
    ) -> list[int]:
        """A text that is one token."""
        (token,) = self.single_tokens([text])
        if pair is not None or token is None:
            self._refuse(f"has no token {text!r}")
        return [token]

    def single_tokens(self, texts: Sequence[str]) -> list[int | None]:
        """The token that each text is in the list's spelling; None for a text that is not in it."""
        spelled: dict[str, Callable[[str], str]] = {
            "BPE": symbols_of,
            "Unigram": lambda text: text.replace(" ", BEGINS_A_WORD),
        }
        spell = spelled.get(self.facts["model"][0], str)
        return [self.ids.get(spell(text)) for text in texts]

    def _refuse(self, problem: str) -> NoReturn:
        advice = "a tokenizer.json has both (`tokenizer`)"
        raise CheckpointError(f"{problem}: {self.reason}; {advice}", file=self.file)


def _as_word_piece(token: str) -> str:
    """BERT's spelling: ggml marks the start of a word, BERT its continuation."""
    if token.startswith("[") and token.endswith("]"):
        return token
    begins = token.startswith(BEGINS_A_WORD)
    return token.removeprefix(BEGINS_A_WORD) if begins else CONTINUES + token


# Reading files


def _read(file: Path) -> Tokenizer:
    """The tokenizer that a file describes, together with the files that belong to it.

    Where only the list of tokens can be read, it says why.
    """
    if file.suffix not in (".gguf", ".model"):
        return _of_rules(file)
    listed = _listed(file)
    if listed.reason != ONLY_LISTED:
        return listed
    try:
        return _of_rules(file)
    except CheckpointError as error:
        listed.reason = str(error).removeprefix(f"{file.name}: ")
        return listed


def _listed(file: Path) -> TokenList:
    """The list of tokens in a GGUF file or a SentencePiece model."""
    if file.suffix == ".gguf":
        return TokenList.of_gguf(file)
    if file.name == "spiece.model":
        _sentencepiece_settings(file)  # other classes number the pieces in ways of their own
    return TokenList.of_sentencepiece(read_small(file, LARGEST_SMALL_FILE), file)


def _of_rules(file: Path) -> Tokenizer:
    """A tokenizer that splits texts; a list of tokens for a vocab.txt of unknown rules."""
    content = b"" if file.suffix == ".gguf" else read_small(file, LARGEST_SMALL_FILE)
    settings = _word_piece_settings(file.parent) if file.name == "vocab.txt" else ()
    if settings is None:
        return TokenList.of_lines(content, file)
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"a tokenizer needs the tokenizers library: {INSTALL}") from error
    if file.parent == FOLDER:  # ours, so that it needs no child
        return Tokenizer.of_library(from_json(content)[0], file)
    if file.suffix == ".gguf":
        stat = file.stat()
        written = stat.st_size, stat.st_mtime_ns
        tokenizer = Tokenizer.sandboxed(file, gguf_tokenizer, str(file), written)
    elif file.suffix == ".model":
        tokenizer = Tokenizer.sandboxed(
            file, sentencepiece_tokenizer, content, *_sentencepiece_settings(file)
        )
    elif file.name == "vocab.txt":
        tokenizer = Tokenizer.sandboxed(file, word_piece, content, *settings)
    elif file.name == "vocab.json":
        merges = read_small(file.with_name("merges.txt"), LARGEST_SMALL_FILE)
        tokenizer = Tokenizer.sandboxed(file, byte_level_bpe, content, merges, END_OF_TEXT)
    else:
        tokenizer = Tokenizer.sandboxed(file, from_json, content)
    if not tokenizer.ids:
        raise CheckpointError("the tokenizer's vocabulary is empty", file=file)
    return tokenizer


@lru_cache(2)  # by the files' content; two, so that tokenizers can be compared
def _sandboxed(file: str, load: Any, *arguments: Any) -> Tokenizer | CheckpointError:
    try:
        sandbox = Sandbox(file, load, *arguments)
    except CheckpointError as error:
        return error
    return Tokenizer(file, sandbox.facts, sandbox.ask)


def _word_piece_settings(folder: Path) -> tuple[bool, bool | None, bool] | None:
    """A vocab.txt's rules for case, accents and Chinese characters; None if not of BERT's kind."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if str(settings.get("tokenizer_class", "BertTokenizer")).removesuffix("Fast") not in LIKE_BERTS:
        return None
    lowercase = settings.get("do_lower_case", True) is True
    accents = settings.get("strip_accents")
    chinese = settings.get("tokenize_chinese_chars", True) is True
    return lowercase, accents if isinstance(accents, bool) else None, chinese


def _sentencepiece_settings(file: Path) -> tuple[bool, str, str]:
    """A SentencePiece model's case, and the tokens around a text, by the class next to it."""
    path = file.with_name("tokenizer_config.json")
    settings = read_json(path) if path.is_file() else {}
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in AS_SENTENCEPIECE:
        problem = f"a {printable(kind[:40])} has rules of its own, which are not read"
        raise CheckpointError(problem, file=file)
    return settings.get("do_lower_case") is True, *AS_SENTENCEPIECE[kind]


AT_HAND: WeakKeyDictionary[Model, tuple[Tokenizer | None, str]] = WeakKeyDictionary()


def _at_hand(model: Model) -> tuple[Tokenizer | None, str]:
    """A model's tokenizer, or None and the reason it cannot be read ("" without one); kept."""
    if model not in AT_HAND:
        AT_HAND[model] = _look_for(model)
    return AT_HAND[model]


def _look_for(model: Model) -> tuple[Tokenizer | None, str]:
    if model.tokenizer != model.source:
        return Tokenizer.load(model.tokenizer), ""
    place = Path(model.checkpoint.files[0].path)
    if place.suffix == ".gguf":  # the file's own list matches its ids; ignore files next to it
        with suppress(CheckpointError):
            return TokenList.of_gguf(place), ""
    else:
        place = model.checkpoint.folder
    try:
        file = Tokenizer.find_at(place)
    except CheckpointError:
        return None, ""
    try:  # a list names tokens as well, and needs no library
        return (_listed if file.suffix == ".model" else _read)(file), ""
    except CheckpointError as error:
        return None, str(error)


# Where a text may be cut so that its pieces have the tokens of the whole. Each row is a
# pre-tokenizer's pattern and the places between its words: no alternative of the pattern matches a
# non-space followed by that space, so a word always ends there; and the one look-ahead, (?!\S),
# only asks what follows a run of spaces, and no run of spaces ends there. The later patterns let
# punctuation take the newlines after it, so they are cut at spaces alone. Python and the library
# might disagree on what a space is: every Unicode character, put before, between and after such
# cuts, showed no case.
# With single digits, runs of spaces end before a digit as they do at the end of a text.
SMOLLM_WORDS = GPT2.replace(r" ?\p{N}+", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])")
SAFE_CUTS = {
    GPT2: re.compile(r"(?<=\S)[ \n]"),
    SMOLLM_WORDS: re.compile(r"(?<=\S)[ \n]"),
    LLAMA3: re.compile(r"(?<=\S) "),
    QWEN2: re.compile(r"(?<=\S) "),
}
# Replacements that make these patterns Python's, for texts of ASCII alone.
IN_ASCII = (
    (r"[^\s\p{L}\p{N}]", r"[^\t-\r A-Za-z0-9]"),
    (r"[^\s\p{N}]", r"[^\t-\r 0-9]"),
    (r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]"),
    (r"\p{L}", "[A-Za-z]"),
    (r"\p{N}", "[0-9]"),
    (r"\s", r"[\t-\r ]"),
    (r"\S", r"[^\t-\r ]"),
)
ADDED_UP_TO = 1000  # added tokens, which are looked for one after the other


def safe_cut(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Places where cutting a text never changes its tokens; None if no place is certain."""
    return SAFE_CUTS.get(_pattern(tokenizer))


def safe_split(tokenizer: Tokenizer) -> Callable[[str], list[str]] | None:
    """A function that splits a text into short parts without changing its tokens; None as
    `safe_cut`.

    ASCII without a special token in it is split wherever the pre-tokenizer splits it: a match of
    its pattern is matched whole when it stands alone as well, so its tokens do not depend on what
    is around it. What letters and spaces are beyond ASCII, Python and the library need not agree
    on: other words stay as `safe_cut` cuts them.
    """
    if (cut := safe_cut(tokenizer)) is None:
        return None
    words = re.compile(f"(?={cut.pattern})").split
    in_ascii = _pattern(tokenizer)
    for of_library, of_python in IN_ASCII:
        in_ascii = in_ascii.replace(of_library, of_python)
    parts = re.compile(in_ascii).findall
    added = {token.content for token in tokenizer.added.values()}
    added |= {normalize("NFC", content) for content in added}  # some are found after normalising
    if len(added) > ADDED_UP_TO:
        return words

    def split(text: str) -> list[str]:
        present = [content for content in added if content in text]
        if text.isascii() and not present:
            return parts(text)
        split_up: list[str] = []
        for word in words(text):
            splits = word.isascii() and not any(content in word for content in present)
            split_up += parts(word) if splits else [word]
        return split_up

    return split


def _pattern(tokenizer: Tokenizer) -> str:
    """The pattern that alone decides where words end; empty where more than it decides."""
    normalizers = {step["type"] for step in tokenizer.steps("normalizer")}
    if normalizers - {"NFC"}:  # NFC joins nothing to a space
        return ""
    for added in tokenizer.added.values():  # they are found in the text before words are
        if added.rstrip or re.search(r"\S\s", added.content):
            return ""
    match tokenizer.steps("pre_tokenizer"):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return SMOLLM_WORDS
        case [
            {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
    return ""
