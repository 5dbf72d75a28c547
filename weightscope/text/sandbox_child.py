"""The sandboxed subprocess of an untrusted tokenizer: load it, describe it, encode texts, within limits.

The tokenizers library panics, aborts or exhausts memory on some files and texts; here that ends only this process.
Requests are pickled by the parent, which is trusted; replies are JSON or numbers, because the parent does not trust
this side. The process ends when its input does; the system kills it if a request takes too long.
"""

import json
import os
import pickle
import resource
import signal
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from weightscope.compute.cores import watch_parent
from weightscope.errors import CheckpointError

LONGEST_REASON = 500  # characters of what the library says is wrong
OF_BERT = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
REPLY = struct.Struct("<Q?")  # before each: its length, and whether all went well


class Limits(NamedTuple):
    """Bytes of memory here; what the parent takes: tokens, characters of them together, and of the other steps."""

    memory: int
    tokens: int
    characters: int
    steps: int


def serve(limits: Limits, parent: int) -> None:
    """Answer requests until the parent closes its end. The first one loads, and is answered by a description."""
    watch_parent(parent)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not reach the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for limit, most in ((resource.RLIMIT_DATA, limits.memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    loaded: tuple[Any, ...] = ()
    while True:
        try:
            function, arguments, seconds = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time; the signal is not caught, so it kills
        try:
            answer = function(*loaded, *arguments)
            if isinstance(answer, list):
                _check_tokens(answer, limits)
                answer = json.dumps(answer).encode()
            elif not loaded:
                tokenizer, facts = answer
                described = description(tokenizer) | facts
                _check(described, limits)
                loaded, answer = (tokenizer,), json.dumps(described).encode()
            reply = True, answer
        except BaseException as error:  # the library's panics are not Exceptions
            library = "" if loaded or isinstance(error, CheckpointError) else "the tokenizers library cannot read it: "
            reply = False, f"{library}{one_line(error)}".encode(errors="backslashreplace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(REPLY.pack(len(reply[1]), reply[0]) + reply[1])
        replies.flush()


def _check(described: dict[str, Any], limits: Limits) -> None:
    """Refuse here what would take the parent's memory."""
    tokens, most = described["vocab"], limits.tokens
    _check_tokens(tokens, limits)
    largest = max(tokens, key=tokens.__getitem__, default=None)
    if largest is not None and tokens[largest] >= most:
        raise CheckpointError(f"token {largest[:40]!r} has the id {tokens[largest]}; ids below {most} are read")
    steps = len(json.dumps([described[name] for name in ("model", "normalizer", "pre_tokenizer", "decoder")]))
    if steps > limits.steps:
        raise CheckpointError(
            f"its normalizer and other steps have {steps} characters; at most {limits.steps} are read"
        )


def _check_tokens(tokens: Collection[str], limits: Limits) -> None:
    if len(tokens) > limits.tokens:
        raise CheckpointError(f"has {len(tokens)} tokens; at most {limits.tokens} are read")
    if (characters := sum(map(len, tokens))) > limits.characters:
        raise CheckpointError(f"its tokens have {characters} characters; at most {limits.characters} are read")


def one_line(error: BaseException) -> str:
    """What an error says, in one line; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:LONGEST_REASON]


Loaded = tuple[Any, dict[str, Any]]  # a tokenizer of the library, and what else its file says
Request = Callable[..., bytes] | Callable[..., list[str]] | Callable[..., Loaded]


def from_json(content: bytes) -> Loaded:
    """The tokenizer that a tokenizer.json describes, with truncation and padding switched off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, {}


def pieces_of(content: bytes) -> list[str]:
    """The pieces of a SentencePiece model: field 1 of its protocol buffer, one message a piece."""
    try:
        return [_text(value).decode() for field, value in _fields(content) if field == 1]
    except (ValueError, IndexError, StopIteration):  # the last: a piece without a text
        raise CheckpointError("is not a SentencePiece model") from None


def _text(message: Any) -> bytes:
    return next(text for field, text in _fields(message) if field == 1 and isinstance(text, bytes))


def _fields(message: Any) -> Iterator[tuple[int, bytes | int]]:
    """The numbers and values of a protocol buffer's fields."""
    if not isinstance(message, bytes):
        raise ValueError("a message was expected")
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value, place = _varint(message, place)
            yield field, value
            continue
        if wire not in (1, 2, 5) or not field:
            raise ValueError("no such wire type")
        length, place = (8, place) if wire == 1 else (4, place) if wire == 5 else _varint(message, place)
        if length > len(message) - place:
            raise ValueError("cut short")
        yield field, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (message[place] & 0x7F) << shift
        place += 1
        if message[place - 1] < 0x80:
            return value, place
    raise ValueError("a number that does not end")


def byte_level_bpe(vocab: bytes, merges: bytes, end_of_text: str) -> Loaded:
    """GPT-2's tokenizer, from the two files that make it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    try:
        lines = (line.rstrip("\r") for line in merges.decode().removesuffix("\n").split("\n"))
        pairs: list[Any] = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
        tokenizer = Tokenizer(models.BPE(json.loads(vocab), pairs))
    except Exception as error:
        raise CheckpointError(f"with merges.txt, not a BPE tokenizer: {one_line(error)}") from None
    tokens = tokenizer.get_vocab()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not tokens.keys() >= set(alphabet) or any(token.endswith("</w>") for token in tokens):
        raise CheckpointError("this vocabulary is not GPT-2's byte-level BPE, so its folder needs a tokenizer.json")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if end_of_text in tokens:
        tokenizer.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
    return tokenizer, {}


def word_piece(vocab: bytes, lowercase: bool, strip_accents: bool | None, chinese: bool) -> Loaded:
    """BERT's tokenizer, from the file that lists its tokens and what its config says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    lines = vocab.decode().removesuffix("\n").split("\n")
    ids = {line.rstrip("\r"): index for index, line in enumerate(lines)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in OF_BERT if token in ids])
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if {"[CLS]", "[SEP]"} <= ids.keys():
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return tokenizer, {}


def description(tokenizer: Any) -> dict[str, Any]:
    """All that is asked about a tokenizer but how it splits a text."""
    added = tokenizer.get_added_tokens_decoder()
    steps = ("normalizer", "pre_tokenizer", "decoder")
    return {
        "vocab": tokenizer.get_vocab(),
        "added": [[index, token.content, token.rstrip, token.special] for index, token in added.items()],
        "model": [type(tokenizer.model).__name__]
        + [getattr(tokenizer.model, name, None) for name in ("unk_token", "continuing_subword_prefix")],
    } | {name: json.loads(step.__getstate__()) if (step := getattr(tokenizer, name)) else None for name in steps}


def encode(tokenizer: Any, texts: Sequence[str], special: bool, longest: int | None) -> bytes:
    """The tokens of a text or a pair of texts, at most `longest`, and which of them are special."""
    if longest is not None:
        tokenizer.enable_truncation(longest, strategy="longest_first")
    try:
        encoding = tokenizer.encode(*texts, add_special_tokens=special)
    finally:
        tokenizer.no_truncation()
    return json.dumps([encoding.ids, encoding.special_tokens_mask]).encode()


def encode_batch(tokenizer: Any, texts: Sequence[str]) -> bytes:
    """The tokens of many texts: how many texts, how many tokens each has, and then all tokens; int64."""
    numbers = array("q", [len(texts)])
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    numbers.extend(map(len, encodings))
    for encoding in encodings:
        numbers.fromlist(encoding.ids)
    return numbers.tobytes()
