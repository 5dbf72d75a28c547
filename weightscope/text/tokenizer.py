"""A checkpoint's tokenizer: found, loaded, named by a hash, and asked about single tokens.

The `tokenizers` library is an extra and is imported only when a tokenizer is loaded. What others have written is loaded
in a child process: see `served_tokenizer`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from weightscope.checkpoint.folder import lone_gguf
from weightscope.checkpoint.jsontext import read_json, read_small
from weightscope.checkpoint.others import transformer_in
from weightscope.checkpoint.source import LARGEST_SMALL_FILE, from_url, resolve_folder
from weightscope.embedded import FOLDER, resolved
from weightscope.errors import CheckpointError
from weightscope.fingerprint import TOKENIZER_FILES
from weightscope.text.served_tokenizer import served
from weightscope.text.symbols import bytes_of
from weightscope.text.token_list import of_gguf, of_lines, of_sentencepiece
from weightscope.text.tokenizer_child import byte_level_bpe, from_json, word_piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from weightscope.model import Model

INSTALL = "pip install tokenizers"
END_OF_TEXT = "<|endoftext|>"
# Those that split as BERT's does.
LIKE_BERTS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
# Where tokenizers are, the most telling first; a GGUF file's own list is the last resort.
FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",), ("tokenizer.model",))
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
    """Load the tokenizer of a checkpoint.

    Parameters
    ----------
    source : str or path
        A folder with tokenizer.json, with vocab.json and merges.txt (byte-level BPE, as GPT-2's), with vocab.txt
        (WordPiece, as BERT's) or with SentencePiece's tokenizer.model; a file of such a folder; a tokenizer.json or
        .model by any name; a .gguf file; or a Hub id.
    revision : str, optional
        Of a Hub id.

    Returns
    -------
    ServedTokenizer or TokenList
        Of a SentencePiece model and of a GGUF file a list of tokens, which cannot split texts. Of anything else what
        has the methods of `tokenizers.Tokenizer`, which it keeps in a child process; of the checkpoint that comes with
        weightscope the library's own. Truncation and padding are switched off: documents are read to their end.

    Raises
    ------
    CheckpointError
        No tokenizer there, one that cannot be read or ends the process that reads it, one too large, or the
        `tokenizers` library is not installed.
    """
    file = tokenizer_file(source, revision)
    tokenizer: Any = _of_file(file)
    if not tokenizer.get_vocab_size():
        raise CheckpointError("the tokenizer's vocabulary is empty", file=file)
    return tokenizer


def _of_file(file: Path) -> Any:
    """The tokenizer that a file describes, with those beside it that belong to it."""
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


def tokenizer_at_hand(model: Model) -> Tokenizer | None:
    """A model's tokenizer as far as it is on this machine, or is named; None where none can be read."""
    if model.tokenizer != model.source:
        return load_tokenizer(model.tokenizer)
    if (place := _beside(model)).suffix == ".gguf":  # its own list is of its own ids, whatever lies beside it
        with suppress(CheckpointError):
            own: Any = of_gguf(place)
            return own
    return tokenizer_if_any(place)


def tokenizer_at(model: Model) -> Path:
    """Where a model's tokenizer is or would be: a folder, or a file by a name of its own.

    Raises
    ------
    CheckpointError
        The one that was named is not there.
    """
    if model.tokenizer == model.source:
        return model.checkpoint.folder
    file = tokenizer_file(model.tokenizer)
    return file.parent if file.name in TOKENIZER_FILES else file


def unread_tokenizer(model: Model) -> str:
    """What is wrong with a model's tokenizer, where it has one and it cannot be read; else nothing."""
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
    said = read_json(path) if path.is_file() else {}
    if str(said.get("tokenizer_class", "BertTokenizer")).removesuffix("Fast") not in LIKE_BERTS:
        return None
    accents = said.get("strip_accents")
    return (
        said.get("do_lower_case", True) is True,
        accents if isinstance(accents, bool) else None,
        said.get("tokenize_chinese_chars", True) is True,
    )


def tokenizer_if_any(source: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None where it has none that can be read."""
    try:
        return load_tokenizer(source)
    except CheckpointError:
        return None


def tokenizer_file(source: str | Path, revision: str | None = None) -> Path:
    """The file that says most of a source's tokenizer.

    Raises
    ------
    CheckpointError
        There is none, or no such source.
    """
    path = Path(resolved(from_url(source)))
    if not path.exists():
        path = resolve_folder(source, revision)
    if path.is_file() and path.name != "vocab.json" and path.suffix in (".json", ".model"):
        return path
    folder = transformer_in(path) if path.is_dir() else path.parent
    for name, *beside in FILES:
        if all((folder / each).is_file() for each in (name, *beside)):
            return folder / name
    gguf = path if path.suffix == ".gguf" else lone_gguf(folder)
    if gguf is None:
        looked = ", ".join(" with ".join(names) for names in FILES)
        raise CheckpointError(f"no tokenizer in {source} (looked for {looked})")
    return gguf


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
    """The places where a text may be cut so that its pieces have the tokens of the whole, or None: nowhere for certain.

    Returns
    -------
    re.Pattern or None
        Every match starts where a piece may end and the next begin.
    """
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
