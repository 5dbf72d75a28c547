"""A checkpoint's tokenizer: find it, load it, identify it by a hash, ask it about single tokens.

The `tokenizers` library is an extra, imported only when a tokenizer is loaded. Untrusted tokenizers run in a
subprocess; see `sandbox`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unicodedata import normalize
from weakref import WeakKeyDictionary

from weightscope.checkpoint.config import Config, read_json, read_small
from weightscope.checkpoint.gguf import header_of
from weightscope.checkpoint.opening import (
    LARGEST_SMALL_FILE,
    TOKENIZER_FILES,
    TOKENIZERS,
    lone_gguf,
    resolve_folder,
    transformer_in,
)
from weightscope.embedded import FOLDER
from weightscope.errors import CheckpointError
from weightscope.text.sandbox import MOST_TOKENS, Added, Encoding, Kind, asked, served
from weightscope.text.sandbox_child import byte_level_bpe, from_json, pieces_of, word_piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from weightscope.model import Model


def _bytes_of_symbols() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(unprintable)}


BYTES = _bytes_of_symbols()
SYMBOLS = {byte: symbol for symbol, byte in BYTES.items()}


def bytes_of(token: str) -> bytes:
    """The bytes of a token in GPT-2's spelling; an added token may be plain text instead."""
    if all(symbol in BYTES for symbol in token):
        return bytes(BYTES[symbol] for symbol in token)
    return token.encode()


def symbols_of(text: str) -> str:
    """A text in GPT-2's spelling."""
    return "".join(SYMBOLS[byte] for byte in text.encode(errors="surrogatepass"))


# Lists of tokens without splitting rules, from a SentencePiece model, a GGUF file or a vocab.txt: enough to name tokens
# and to find one by its text. Both formats are parsed strictly here, without a library.

BEGINS_A_WORD = "▁"
CONTINUES = "##"
TOKENS, KIND = "tokenizer.ggml.tokens", "tokenizer.ggml.model"
BYTE_LEVEL = {"type": "ByteLevel"}
PARSED_HERE = 100_000  # bytes of a SentencePiece model that take no time; published ones have a few million


class TokenList:
    """Tokens in the order of their ids, with the methods of `tokenizers.Tokenizer` that need no splitting rules.

    `kind` is the spelling: a space as ▁ (Unigram), bytes as GPT-2's symbols (BPE), ## before word parts (WordPiece).
    """

    normalizer = pre_tokenizer = None

    def __init__(self, file: object, tokens: Sequence[str], kind: str) -> None:
        if not tokens or len(tokens) > MOST_TOKENS:
            raise CheckpointError(f"lists {len(tokens)} tokens; from 1 to {MOST_TOKENS} are read", file=file)
        self.file, self._tokens = file, tokens
        self._ids = {token: index for index, token in reversed([*enumerate(tokens)])}
        self.model = Kind(kind, None, CONTINUES if kind == "WordPiece" else None)
        self.decoder = BYTE_LEVEL if kind == "BPE" else None

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def get_vocab_size(self) -> int:
        return len(self._tokens)

    def get_added_tokens_decoder(self) -> dict[int, Added]:
        return {}

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, index: int) -> str | None:
        return self._tokens[index] if 0 <= index < len(self._tokens) else None

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoding:
        """A text that is one token."""
        spelled = {"BPE": symbols_of(text), "Unigram": text.replace(" ", BEGINS_A_WORD)}.get(self.model.name, text)
        if pair is not None or (index := self._ids.get(spelled)) is None:
            self._refuse(f"has no token {text!r}")
        return Encoding([index], [0])

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> NoReturn:
        self._refuse("cannot split texts")

    def decode(self, ids: Sequence[int]) -> NoReturn:
        self._refuse("cannot join tokens")

    def _refuse(self, problem: str) -> NoReturn:
        how = "only its list of tokens is read, not its rules; a tokenizer.json has both (`tokenizer`)"
        raise CheckpointError(f"{problem}: {how}", file=self.file)


def of_gguf(path: Path) -> TokenList:
    """The token list of a GGUF file."""
    keys = Config(header_of(path, (TOKENS,)), path)
    tokens, kind = keys.get(TOKENS), str(keys.get(KIND))
    if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        raise CheckpointError("has no list of tokens", file=path)
    if kind == "bert":
        tokens = [_as_word_piece(token) for token in tokens]
    kinds = {"llama": "Unigram", "t5": "Unigram", "gpt2": "BPE", "bert": "WordPiece"}
    if kind not in kinds:
        raise CheckpointError(f"spells tokens as '{kind[:40]}' does, which is not known here", file=path)
    return TokenList(path, tokens, kinds[kind])


def _as_word_piece(token: str) -> str:
    """BERT's own spelling: ggml marks what begins a word and not what continues one."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix(BEGINS_A_WORD) if token.startswith(BEGINS_A_WORD) else CONTINUES + token


def of_lines(content: bytes, file: object) -> TokenList:
    """The tokens of a vocab.txt, one per line, whose splitting rules are unknown."""
    if (count := content.count(b"\n")) > MOST_TOKENS:  # before there is a list of them
        raise CheckpointError(f"lists {count} tokens; from 1 to {MOST_TOKENS} are read", file=file)
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise CheckpointError("is not UTF-8", file=file) from None
    return TokenList(file, [line.rstrip("\r") for line in lines], "WordPiece")


def of_sentencepiece(content: bytes, file: object) -> TokenList:
    """The pieces of a SentencePiece model; a large one is parsed in a process of its own, which may be ended."""
    if len(content) > PARSED_HERE:
        return TokenList(file, asked(str(file), pieces_of, content), "Unigram")
    try:
        tokens = pieces_of(content)
    except CheckpointError as error:
        raise CheckpointError(str(error), file=file) from None
    return TokenList(file, tokens, "Unigram")


# Tokenizers in full

INSTALL = "pip install tokenizers"
END_OF_TEXT = "<|endoftext|>"
# Classes that split text as BERT's does.
LIKE_BERTS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
ADDED_UP_TO = 1000  # tokens found before words are: they are looked for one after the other
LONGEST_TOKEN = 200  # characters that are shown; a page shows thousands of tokens, and a file may have them of 20 kB

# Where a text may be cut so that its pieces have the tokens of the whole. Each row is a pre-tokenizer's pattern and the
# places between its words: no alternative of the pattern matches a non-space followed by that space, so a word always
# ends there; and the one look-ahead, (?!\S), only asks what follows a run of spaces, and no run of spaces ends there.
# The later patterns let punctuation take the newlines after it, so they are cut at spaces alone. Python and the library
# might disagree on what a space is: every Unicode character, put before, between and after such cuts, showed no case.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SAFE_CUTS = {
    GPT2: re.compile(r"(?<=\S)[ \n]"),
    LLAMA3: re.compile(r"(?<=\S) "),
    QWEN2: re.compile(r"(?<=\S) "),
}
# The same patterns for a text of ASCII alone, in words that Python's expressions know.
IN_ASCII = (
    (r"[^\s\p{L}\p{N}]", r"[^\t-\r A-Za-z0-9]"),
    (r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]"),
    (r"\p{L}", "[A-Za-z]"),
    (r"\p{N}", "[0-9]"),
    (r"\s", r"[\t-\r ]"),
    (r"\S", r"[^\t-\r ]"),
)


def load_tokenizer(source: str | Path, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint."""
    file = tokenizer_file(source, revision)
    tokenizer: Any = _of_file(file)
    if not tokenizer.get_vocab_size():
        raise CheckpointError("the tokenizer's vocabulary is empty", file=file)
    return tokenizer


def _of_file(file: Path) -> Any:
    """The tokenizer that a file describes, together with the files that belong to it."""
    if file.suffix == ".gguf":
        return of_gguf(file)
    content = read_small(file, LARGEST_SMALL_FILE)
    if file.suffix == ".model":
        return of_sentencepiece(content, file)
    settings = word_piece_settings(file.parent) if file.name == "vocab.txt" else ()
    if settings is None:
        return of_lines(content, file)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CheckpointError(f"a tokenizer needs the tokenizers library: {INSTALL}") from error
    if file.parent == FOLDER:  # ours, so that it needs no child
        return Tokenizer.from_file(str(file))
    if file.name == "vocab.txt":
        return served(file, word_piece, content, *settings)
    if file.name == "vocab.json":
        return served(
            file, byte_level_bpe, content, read_small(file.with_name("merges.txt"), LARGEST_SMALL_FILE), END_OF_TEXT
        )
    return served(file, from_json, content)


AT_HAND: WeakKeyDictionary[Model, Tokenizer | None] = WeakKeyDictionary()


def tokenizer_at_hand(model: Model) -> Tokenizer | None:
    """A model's tokenizer if it is named or on this machine, loaded once; None if none can be read."""
    if model not in AT_HAND:
        AT_HAND[model] = _at_hand(model)
    return AT_HAND[model]


def _at_hand(model: Model) -> Tokenizer | None:
    if model.tokenizer != model.source:
        return load_tokenizer(model.tokenizer)
    if (place := _beside(model)).suffix == ".gguf":  # the file's own list matches its ids; ignore files next to it
        with suppress(CheckpointError):
            tokens: Any = of_gguf(place)
            return tokens
    return tokenizer_if_any(place)


def tokenizer_at(model: Model) -> Path:
    """Where a model's tokenizer is or would be: a folder, or a file by a name of its own."""
    if model.tokenizer == model.source:
        return model.checkpoint.folder
    file = tokenizer_file(model.tokenizer)
    return file.parent if file.name in TOKENIZER_FILES else file


def unread_tokenizer(model: Model) -> str:
    """Why a model's tokenizer cannot be read; empty if it can, or if there is none."""
    try:
        tokenizer_file(_beside(model))
    except CheckpointError:
        return ""
    try:
        load_tokenizer(_beside(model))
    except CheckpointError as error:
        return str(error)
    return ""


def _beside(model: Model) -> Path:
    """Where a model's own tokenizer is: in its file or its folder."""
    file = Path(model.checkpoint.files[0].path)
    return file if file.suffix == ".gguf" else model.checkpoint.folder


def word_piece_settings(folder: Path) -> tuple[bool, bool | None, bool] | None:
    """How a vocab.txt's tokenizer treats case, accents and Chinese characters; None where it is not of BERT's kind."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    if str(settings.get("tokenizer_class", "BertTokenizer")).removesuffix("Fast") not in LIKE_BERTS:
        return None
    accents = settings.get("strip_accents")
    return (
        settings.get("do_lower_case", True) is True,
        accents if isinstance(accents, bool) else None,
        settings.get("tokenize_chinese_chars", True) is True,
    )


def tokenizer_if_any(source: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where it has none that can be read."""
    try:
        return load_tokenizer(source)
    except CheckpointError:
        return None


def tokenizer_file(source: str | Path, revision: str | None = None) -> Path:
    """The file that says most of a source's tokenizer."""
    path = resolve_folder(source, revision)
    if path.is_file() and path.name != "vocab.json" and path.suffix in (".json", ".model"):
        return path
    folder = transformer_in(path) if path.is_dir() else path.parent
    for name, *companions in TOKENIZERS:
        if all((folder / each).is_file() for each in (name, *companions)):
            return folder / name
    gguf = path if path.suffix == ".gguf" else lone_gguf(folder)
    if gguf is None:
        looked = ", ".join(" with ".join(names) for names in TOKENIZERS)
        raise CheckpointError(f"no tokenizer in {source} (looked for {looked})")
    return gguf


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id: the rows an embedding needs, gaps between the ids included."""
    return 1 + max(tokenizer.get_vocab().values())


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """The SHA-256 of the mapping from ids to tokens, in hexadecimal.

    Two tokenizers with the same hash agree on every id, whatever files they came from and whichever version
    of the library wrote them.
    """
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of the one token that `text` is."""
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # an unpaired surrogate, or a vocabulary without its unknown token
        raise CheckpointError(f"the tokenizer cannot encode {text!r}: {error}") from error
    unknown = getattr(tokenizer.model, "unk_token", None)
    if len(ids) == 1 and (text == unknown or ids[0] != tokenizer.token_to_id(unknown or "")):
        return ids[0]
    spelled: int | None = tokenizer.token_to_id(text)
    if spelled is None:
        parts = " + ".join(repr(token_text(tokenizer, index)) for index in ids) or "nothing"
        raise CheckpointError(f"{text!r} is not one token of this tokenizer; it splits into {parts}")
    return spelled


def token_text(tokenizer: Tokenizer, *ids: int) -> str:
    """The text of consecutive tokens, with their spaces; a text of kilobytes ends in an ellipsis.

    Bytes that do not form a whole character are spelled out ("\\xe9"), and so is an id without a token ("<id 50300>").
    """
    return shortened(_text(tokenizer, ids), len(ids))


def shortened(text: str, n_tokens: int = 1) -> str:
    """The text of `n_tokens` tokens, shortened for a page."""
    longest = LONGEST_TOKEN * n_tokens
    return text if len(text) <= longest else f"{text[:longest]}…"


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The full text."""
    tokens = [tokenizer.id_to_token(index) or f"<id {index}>" for index in ids]
    if any(part["type"] == "ByteLevel" for part in _parts(tokenizer.decoder) + _parts(tokenizer.pre_tokenizer)):
        return b"".join(map(bytes_of, tokens)).decode(errors="backslashreplace")
    if getattr(tokenizer.model, "name", type(tokenizer.model).__name__) == "WordPiece":
        prefix = tokenizer.model.continuing_subword_prefix
        words = [token.removeprefix(prefix) if token.startswith(prefix) else f" {token}" for token in tokens[1:]]
        return "".join(tokens[:1] + words)
    return "".join(tokens).replace("▁", " ")


def token_names(tokenizer: Tokenizer | None) -> Callable[..., str]:
    """What to call tokens: their text, or their ids where no tokenizer is known."""
    if tokenizer is None:
        return lambda *ids: " ".join(f"#{index}" for index in ids)
    return partial(token_text, tokenizer)


def safe_cut(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Places where cutting a text never changes its tokens; None if no place is certain."""
    return SAFE_CUTS.get(_pattern(tokenizer))


def safe_split(tokenizer: Tokenizer) -> Callable[[str], list[str]] | None:
    """What splits a text into parts that have the tokens of the whole, as short as is certain; None as `safe_cut`.

    ASCII without a special token in it is split wherever the pre-tokenizer splits it: a match of its pattern is matched
    whole when it stands alone as well, so its tokens do not depend on what is around it. What letters and spaces are
    beyond ASCII, Python and the library need not agree on: other words stay as `safe_cut` cuts them.
    """
    if (cut := safe_cut(tokenizer)) is None:
        return None
    words = re.compile(f"(?={cut.pattern})").split
    in_ascii = reduce(lambda pattern, classes: pattern.replace(*classes), IN_ASCII, _pattern(tokenizer))
    parts = re.compile(in_ascii).findall
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added |= {normalize("NFC", content) for content in added}  # some are looked for in text that is normalised
    if len(added) > ADDED_UP_TO:
        return words

    def split(text: str) -> list[str]:
        there = [content for content in added if content in text]
        if text.isascii() and not there:
            return parts(text)
        split_up = (
            parts(word) if word.isascii() and not any(content in word for content in there) else [word]
            for word in words(text)
        )
        return [part for word in split_up for part in word]

    return split


def _pattern(tokenizer: Tokenizer) -> str:
    """The pattern that alone says where words end; empty where something else has a say."""
    if {part["type"] for part in _parts(tokenizer.normalizer)} - {"NFC"}:  # NFC joins nothing to a space
        return ""
    for added in tokenizer.get_added_tokens_decoder().values():  # found in the text before the pattern is
        if added.rstrip or re.search(r"\S\s", added.content):
            return ""
    match _parts(tokenizer.pre_tokenizer):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return GPT2
        case [
            {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern
    return ""


def _parts(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, as tokenizer.json has them."""
    if component is None:
        return []
    described = component if isinstance(component, dict) else json.loads(component.__getstate__())
    if described["type"] != "Sequence":
        return [described]
    return next(value for key, value in described.items() if key != "type")
