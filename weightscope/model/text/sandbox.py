"""Load, describe and run an untrusted tokenizer in a subprocess, within limits.

Some tokenizer files crash the process that reads them: on loading, or only when a certain text is
split; the library panics, aborts or exhausts memory. So it never loads a stranger's file in this
process. A child loads it, reports its ids and splits texts; if the child dies, or takes too much
time or memory, a CheckpointError is raised.

Requests are pickled by the parent, which is trusted; replies are JSON or numbers, because the
parent does not trust the child. The child ends when its input does; the system kills it if a
request takes too long.
"""

import hashlib
import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, NamedTuple
from weakref import finalize

from weightscope.core.compute.cores import watch_parent
from weightscope.core.errors import CheckpointError, first_line

MEMORY = 4 << 30  # bytes that a child may take: a vocabulary of 256,000 needs a tenth of it
SECONDS = 60  # processor time for a request: loading the largest vocabularies takes a few
CHARACTERS_A_SECOND = 10_000  # more for a long text; the slowest tokenizers split ten times as many
MOST_TOKENS = 1 << 21  # ids, and arrays by id; the largest published vocabulary has half
MOST_CHARACTERS = 1 << 25  # in all tokens together; the largest published vocabulary has a tenth
LARGEST_STEPS = 1 << 22  # characters of all steps but the model: XLM-R's normalizer has 316,000
LARGEST_DESCRIPTION = 400_000_000  # bytes; a tokenizer.json with every character escaped
IDS_A_CHARACTER = 64  # a normaliser makes at most 33 bytes of one, and each may be a token
IDS_ADDED = 4096  # special tokens around a text
MOST_CHILDREN = 16  # each has the vocabulary in memory; more threads wait for one to be free
PROGRAM = "from weightscope.model.text.sandbox import Limits, serve; serve({}, {})"
LONGEST_REASON = 500  # characters of what the library says is wrong
OF_BERT = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
REPLY = struct.Struct("<Q?")  # header of a reply: its length, and True if all went well

Loaded = tuple[Any, dict[str, Any]]  # a tokenizer of the library, and further facts of its file
Request = Callable[..., bytes] | Callable[..., list[str]] | Callable[..., Loaded]


# In the parent


class Limits(NamedTuple):
    """Limits of a child: bytes of its memory, and sizes of what the parent takes."""

    memory: int
    tokens: int
    characters: int  # in all tokens together
    steps: int  # characters of the description's other parts


class Sandbox:
    """A stranger's tokenizer in as many processes as threads use it at once."""

    def __init__(self, file: object, load: Any, *arguments: Any) -> None:
        self.file, self._load = file, (load, arguments)
        self._idle: list[_Child] = []
        self._room = BoundedSemaphore(MOST_CHILDREN)
        child, self.facts = self._loaded()
        self._idle.append(child)

    def ask(self, function: Request, *arguments: Any, characters: int) -> bytes:
        """Call a function in an idle child, or a new one; a child that fails is not used again."""
        longest = 16 * (IDS_A_CHARACTER * characters + IDS_ADDED)
        with self._room:
            try:
                child = self._idle.pop()
            except IndexError:
                child = self._loaded()[0]
            seconds, problem = (
                SECONDS + characters / CHARACTERS_A_SECOND,
                "cannot encode this text: ",
            )
            answer = child.call(function, arguments, seconds, longest, self.file, problem)
            self._idle.append(child)
        return answer

    def _loaded(self) -> tuple["_Child", dict[str, Any]]:
        """A new child that has loaded the tokenizer, and its description."""
        child = _Child()
        return child, json.loads(child.call(*self._load, SECONDS, LARGEST_DESCRIPTION, self.file))


@lru_cache(2)
def parsed(file: str, parse: Request, content: bytes) -> list[str]:
    """The texts that a function makes of a stranger's file, in a child with the same limits."""
    answer = _Child().call(parse, (content,), SECONDS, LARGEST_DESCRIPTION, file)
    tokens: list[str] = json.loads(answer)
    return tokens


class _Child:
    """The process and its two pipes; it ends when this object does."""

    def __init__(self) -> None:
        path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
        limits = Limits(MEMORY, MOST_TOKENS, MOST_CHARACTERS, LARGEST_STEPS)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM.format(limits, os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # panics print there
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
        finalize(self, _end, self._process)

    def call(
        self,
        function: Request,
        arguments: Sequence[Any],
        seconds: float,
        longest: int,
        file: object,
        what: str = "",
    ) -> bytes:
        """Call a function in the child, with limits on processor time and on the answer's bytes.

        A CheckpointError about `file` begins with `what`.
        """
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):  # it has ended, so that there is no answer either
            pickle.dump((function, arguments, seconds), self._process.stdin)
            self._process.stdin.flush()
        head = self._process.stdout.read(REPLY.size)
        length, well = REPLY.unpack(head) if len(head) == REPLY.size else (1, False)
        if length > longest:
            reason = f"its answer has {length} bytes; at most {longest} are read"
        elif len(answer := self._process.stdout.read(length)) < length:
            reason = self._end_of_it(seconds)
        elif well:
            return answer
        else:
            reason = answer.decode(errors="backslashreplace")
        raise CheckpointError(f"{what}{reason}", file=file)

    def _end_of_it(self, seconds: float) -> str:
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes the tokenizers library more than {seconds:.0f} seconds"
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        most = f"{MEMORY / 2**30:.3g} GB"
        return f"the tokenizers library does not survive it ({name}), or needs more than {most}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# In the child


def serve(limits: Limits, parent: int) -> None:
    """Answer requests until the parent closes its end; the first one loads the tokenizer."""
    watch_parent(parent)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints must not reach the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    for limit, most in ((resource.RLIMIT_DATA, limits.memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (soft, hard))
    loaded: tuple[Any, ...] = ()
    while True:
        try:
            function, arguments, seconds = pickle.load(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time; its signal is uncaught and kills
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
            reason = first_line(error)[:LONGEST_REASON]
            if not loaded and not isinstance(error, CheckpointError):
                reason = f"the tokenizers library cannot read it: {reason}"
            reply = False, reason.encode(errors="backslashreplace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(REPLY.pack(len(reply[1]), reply[0]) + reply[1])
        replies.flush()


def _check(described: dict[str, Any], limits: Limits) -> None:
    """Refuse here what would take the parent's memory."""
    tokens, most = described["vocab"], limits.tokens
    _check_tokens(tokens, limits)
    largest = max(tokens, key=tokens.__getitem__, default=None)
    if largest is not None and tokens[largest] >= most:
        problem = f"token {largest[:40]!r} has the id {tokens[largest]}"
        raise CheckpointError(f"{problem}; ids below {most} are read")
    names = ("model", "normalizer", "pre_tokenizer", "decoder")
    steps = len(json.dumps([described[name] for name in names]))
    if steps > limits.steps:
        problem = f"its normalizer and other steps have {steps} characters"
        raise CheckpointError(f"{problem}; at most {limits.steps} are read")


def _check_tokens(tokens: Collection[str], limits: Limits) -> None:
    if len(tokens) > limits.tokens:
        raise CheckpointError(f"has {len(tokens)} tokens; at most {limits.tokens} are read")
    if (characters := sum(map(len, tokens))) > limits.characters:
        problem = f"its tokens have {characters} characters"
        raise CheckpointError(f"{problem}; at most {limits.characters} are read")


def from_json(content: bytes) -> Loaded:
    """The tokenizer that a tokenizer.json describes, with truncation and padding switched off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, {}


def byte_level_bpe(vocab: bytes, merges: bytes, end_of_text: str) -> Loaded:
    """GPT-2's tokenizer, from the two files that make it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    try:
        lines = (line.rstrip("\r") for line in merges.decode().removesuffix("\n").split("\n"))
        merged = (line for line in lines if line and not line.startswith("#version"))
        pairs: list[Any] = [tuple(line.split(" ")) for line in merged]
        tokenizer = Tokenizer(models.BPE(json.loads(vocab), pairs))
    except Exception as error:
        reason = first_line(error)[:LONGEST_REASON]
        raise CheckpointError(f"with merges.txt, not a BPE tokenizer: {reason}") from None
    tokens = tokenizer.get_vocab()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not tokens.keys() >= set(alphabet) or any(token.endswith("</w>") for token in tokens):
        raise CheckpointError(
            "this vocabulary is not GPT-2's byte-level BPE, so its folder needs a tokenizer.json"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if end_of_text in tokens:
        tokenizer.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
    return tokenizer, {}


def word_piece(vocab: bytes, lowercase: bool, strip_accents: bool | None, chinese: bool) -> Loaded:
    """BERT's tokenizer, from the file that lists its tokens and what its config says."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    lines = vocab.decode().removesuffix("\n").split("\n")
    ids = {line.rstrip("\r"): index for index, line in enumerate(lines)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    special = [AddedToken(token, special=True) for token in OF_BERT if token in ids]
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    if {"[CLS]", "[SEP]"} <= ids.keys():
        sep, cls = ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
        tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return tokenizer, {}


def description(tokenizer: Any) -> dict[str, Any]:
    """All facts about a tokenizer but how it splits a text."""
    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder()
    unknown = getattr(model, "unk_token", None)
    prefix = getattr(model, "continuing_subword_prefix", None)
    facts = {
        "vocab": tokenizer.get_vocab(),
        "added": [[index, t.content, t.rstrip, t.special] for index, t in added.items()],
        "model": [type(model).__name__, unknown, prefix],
        "model_sha256": hashlib.sha256(model.__getstate__()).hexdigest(),  # vocabulary, merges ...
    }
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        step = getattr(tokenizer, name)
        facts[name] = json.loads(step.__getstate__()) if step else None
    return facts


def encode(tokenizer: Any, texts: Sequence[str], special: bool, longest: int | None) -> bytes:
    """The tokens of a text or pair, at most `longest`, and 1 for each that is special, as JSON."""
    if longest is not None:
        tokenizer.enable_truncation(longest, strategy="longest_first")
    try:
        encoding = tokenizer.encode(*texts, add_special_tokens=special)
    finally:
        tokenizer.no_truncation()
    return json.dumps([encoding.ids, encoding.special_tokens_mask]).encode()


def encode_batch(tokenizer: Any, texts: Sequence[str]) -> bytes:
    """The tokens of many texts as int64: their number, each text's length, then all tokens."""
    numbers = array("q", [len(texts)])
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    numbers.extend(map(len, encodings))
    for encoding in encodings:
        numbers.fromlist(encoding.ids)
    return numbers.tobytes()
