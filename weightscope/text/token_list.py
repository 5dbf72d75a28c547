"""A list of tokens without the rules that split a text: what a SentencePiece model or a GGUF file says of itself.

It is enough to name tokens and to find one by its text. Both files are read here, strictly, and by no library.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from weightscope.checkpoint.config import Config
from weightscope.checkpoint.gguf_file import header_of
from weightscope.errors import CheckpointError
from weightscope.text.served_tokenizer import MOST_TOKENS, Added, Encoding, Kind
from weightscope.text.symbols import symbols_of

BEGINS_A_WORD = "▁"
CONTINUES = "##"
TOKENS, KIND = "tokenizer.ggml.tokens", "tokenizer.ggml.model"
BYTE_LEVEL = {"type": "ByteLevel"}


class TokenList:
    """What tokens are called, with those methods of `tokenizers.Tokenizer` that need no rules.

    Parameters
    ----------
    file : path-like
        Named in errors.
    tokens : sequence of str
        In the order of their ids.
    kind : {"Unigram", "BPE", "WordPiece"}
        How they are spelled: a space as ▁, bytes as GPT-2's symbols, or ## before what continues a word.
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
        """A text that is one token.

        Raises
        ------
        CheckpointError
            It is not, and nothing says how it is split.
        """
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
    """The tokens that a GGUF file's weights are of.

    Raises
    ------
    CheckpointError
        It lists none, or spells them in a way that is not known.
    """
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
    """A vocab.txt of which it is not known how texts are split: a token a line."""
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise CheckpointError("is not UTF-8", file=file) from None
    return TokenList(file, [line.rstrip("\r") for line in lines], "WordPiece")


def of_sentencepiece(content: bytes, file: object) -> TokenList:
    """The pieces of a SentencePiece model: field 1 of its protocol buffer, one message a piece.

    Raises
    ------
    CheckpointError
        It is no such buffer, or has no pieces.
    """
    try:
        pieces = [_piece(value) for field, value in _fields(content) if field == 1]
        tokens = [piece.decode() for piece in pieces]
    except (ValueError, IndexError, StopIteration):  # the last: a piece without a text
        raise CheckpointError("is not a SentencePiece model", file=file) from None
    return TokenList(file, tokens, "Unigram")


def _piece(message: Any) -> bytes:
    return next(text for field, text in _fields(message) if field == 1 and isinstance(text, bytes))


def _fields(message: Any) -> Iterator[tuple[int, bytes | int]]:
    """The numbers and values of a protocol buffer's fields."""
    if not isinstance(message, bytes):
        raise ValueError("a message was expected")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield field, value
            continue
        if wire not in (1, 2, 5) or not field:
            raise ValueError("no such wire type")
        length, at = (8, at) if wire == 1 else (4, at) if wire == 5 else _varint(message, at)
        if length > len(message) - at:
            raise ValueError("cut short")
        yield field, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return value, at
    raise ValueError("a number that does not end")
