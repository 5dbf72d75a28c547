"""A checkpoint's tokenizer: found, loaded, named by a hash, and asked about single tokens.

The `tokenizers` library is an extra and is imported only when a tokenizer is loaded. What others have written is loaded
in a child process: see `served_tokenizer`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightscope.checkpoint.jsontext import read_small
from weightscope.checkpoint.others import transformer_in
from weightscope.checkpoint.source import LARGEST_SMALL_FILE, from_url, resolve_folder
from weightscope.embedded import FOLDER, resolved
from weightscope.errors import CheckpointError
from weightscope.text.served_tokenizer import served
from weightscope.text.tokenizer_child import byte_level_bpe, from_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INSTALL = "pip install tokenizers"
END_OF_TEXT = "<|endoftext|>"
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


def load_tokenizer(source: str | Path, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer of a checkpoint.

    Parameters
    ----------
    source : str or path
        A folder with tokenizer.json, or with vocab.json and merges.txt (byte-level BPE, as GPT-2's); a file of such a
        folder; a tokenizer.json by any name; or a Hub id.
    revision : str, optional
        Of a Hub id.

    Returns
    -------
    ServedTokenizer
        Whose methods are those of `tokenizers.Tokenizer`, which it keeps in a child process; of the checkpoint that
        comes with weightscope, the library's own. Truncation and padding are switched off: documents are read to
        their end.

    Raises
    ------
    CheckpointError
        No tokenizer there, one that cannot be read or ends the process that reads it, one too large, or the
        `tokenizers` library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CheckpointError(f"a tokenizer needs the tokenizers library: {INSTALL}") from error

    described, vocab, merges = _tokenizer_files(source, revision)
    if described is not None and described.parent == FOLDER:  # ours, so that it needs no child
        return Tokenizer.from_file(str(described))
    tokenizer: Any
    if described is None:
        contents = (read_small(file, LARGEST_SMALL_FILE) for file in (vocab, merges))
        tokenizer = served(vocab, byte_level_bpe, *contents, END_OF_TEXT)
    else:
        tokenizer = served(described, from_json, read_small(described, LARGEST_SMALL_FILE))
    if not tokenizer.get_vocab_size():
        raise CheckpointError("the tokenizer's vocabulary is empty", file=described or vocab)
    return tokenizer


def tokenizer_if_any(source: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where it has none that can be read."""
    try:
        return load_tokenizer(source)
    except CheckpointError:
        return None


def _tokenizer_files(source: str | Path, revision: str | None) -> tuple[Path | None, Path, Path]:
    """Where tokenizer.json (None: there is none), vocab.json and merges.txt are."""
    path = Path(resolved(from_url(source)))
    if path.is_file() and path.suffix == ".json" and path.name != "vocab.json":
        return path, path, path
    if path.is_dir():
        folder = transformer_in(path)
    elif path.is_file():
        folder = path.parent
    else:
        folder = resolve_folder(source, revision)
    described, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if described.is_file():
        return described, vocab, merges
    if not (vocab.is_file() and merges.is_file()):
        looked = "looked for tokenizer.json, and for vocab.json with merges.txt"
        raise CheckpointError(f"no tokenizer in {source} ({looked})")
    return None, vocab, merges


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id: the rows an embedding needs, gaps between the ids included."""
    return 1 + max(tokenizer.get_vocab().values())


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """The SHA-256 of which id is which token, in hexadecimal.

    Two tokenizers with the same hash mean the same by every id, whichever files they came from and whichever version
    of the library wrote them.
    """
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of the one token that `text` is.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    text : str
        As it stands in a document (" the"), or as the vocabulary spells it ("Ġthe", "##ing").

    Raises
    ------
    CheckpointError
        `text` is not one token; the message says what it splits into.
    """
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
    """The text that tokens stand for, one after the other, spaces kept; one of kilobytes ends in an ellipsis.

    Bytes that are no whole character are spelled out ("\\xe9"), and so is an id without a token ("<id 50300>").
    """
    return shortened(_text(tokenizer, ids), len(ids))


def shortened(text: str, n_tokens: int = 1) -> str:
    """The text of so many tokens, as long as a page can show it."""
    longest = LONGEST_TOKEN * n_tokens
    return text if len(text) <= longest else f"{text[:longest]}…"


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """All of it."""
    tokens = [tokenizer.id_to_token(index) or f"<id {index}>" for index in ids]
    if any(part["type"] == "ByteLevel" for part in _parts(tokenizer.decoder) + _parts(tokenizer.pre_tokenizer)):
        return b"".join(map(_byte_level_bytes, tokens)).decode(errors="backslashreplace")
    if getattr(tokenizer.model, "name", type(tokenizer.model).__name__) == "WordPiece":
        prefix = tokenizer.model.continuing_subword_prefix
        words = [token.removeprefix(prefix) if token.startswith(prefix) else f" {token}" for token in tokens[1:]]
        return "".join(tokens[:1] + words)
    return "".join(tokens).replace("▁", " ")


def safe_cut(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """The places where a text may be cut so that its pieces have the tokens of the whole, or None: nowhere for certain.

    Returns
    -------
    re.Pattern or None
        Every match starts where a piece may end and the next begin.
    """
    if {part["type"] for part in _parts(tokenizer.normalizer)} - {"NFC"}:  # NFC joins nothing to a space
        return None
    for added in tokenizer.get_added_tokens_decoder().values():  # found in the text before the pattern is
        if added.rstrip or re.search(r"\S\s", added.content):
            return None
    match _parts(tokenizer.pre_tokenizer):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return SAFE_CUTS[GPT2]
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return SAFE_CUTS.get(pattern)
    return None


def _parts(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, as tokenizer.json has them."""
    if component is None:
        return []
    described = component if isinstance(component, dict) else json.loads(component.__getstate__())
    if described["type"] != "Sequence":
        return [described]
    return next(value for key, value in described.items() if key != "type")


def _bytes_of_symbols() -> dict[str, int]:
    """GPT-2's spelling of bytes: a printable byte is its Latin-1 character, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_of_symbols()


def _byte_level_bytes(token: str) -> bytes:
    """The bytes of a token in GPT-2's spelling; an added token may be plain text instead."""
    if all(symbol in _BYTES for symbol in token):
        return bytes(_BYTES[symbol] for symbol in token)
    return token.encode()
