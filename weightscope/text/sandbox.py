"""Runs an untrusted tokenizer in a sandboxed subprocess.

Some tokenizer files crash the process that reads them: on loading, or only when a certain text is split. So the
tokenizers library never loads a stranger's file in this process. A child loads it, reports its ids and splits texts; if
the child dies, or takes too much time or memory, a CheckpointError is raised.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from weakref import finalize

from weightscope.errors import CheckpointError
from weightscope.text.sandbox_child import REPLY, Limits, Request

MEMORY = 4 << 30  # bytes that a child may take: a vocabulary of 256,000 needs a tenth of it
SECONDS = 60  # of processor time for a request: loading the largest vocabularies takes a few
CHARACTERS_A_SECOND = 10_000  # more for a long text; the slowest tokenizers split ten times as many
MOST_TOKENS = 1 << 21  # ids: arrays are as long as the largest, and the largest published vocabulary has half of it
MOST_CHARACTERS = 1 << 25  # of all tokens together: the largest published vocabulary has a tenth of it
LARGEST_STEPS = 1 << 22  # characters of normalizer, pre-tokenizer and decoder: XLM-R's map of characters has 316,000
LARGEST_DESCRIPTION = 400_000_000  # bytes: what may be read of a tokenizer.json, every character of it escaped
IDS_A_CHARACTER = 64  # the longest that a normaliser makes of one has 33 bytes, and each may be a token
IDS_ADDED = 4096  # special tokens around a text
MOST_CHILDREN = 16  # each has the vocabulary in memory; more threads wait for one to be free
PROGRAM = "from weightscope.text.sandbox_child import Limits, serve; serve({}, {})"


class Sandbox:
    """A stranger's tokenizer in as many processes as threads ask at once; `facts` is its description."""

    def __init__(self, file: object, load: Any, *arguments: Any) -> None:
        self.file, self._load = file, (load, arguments)
        self._idle: list[_Child] = []
        self._room = BoundedSemaphore(MOST_CHILDREN)
        child, self.facts = self._loaded()
        self._idle.append(child)

    def ask(self, function: Request, *arguments: Any, characters: int) -> bytes:
        """Have a child that is idle, or a new one, call a function. One that fails in any way is not used again."""
        longest = 16 * (IDS_A_CHARACTER * characters + IDS_ADDED)
        with self._room:
            try:
                child = self._idle.pop()
            except IndexError:
                child = self._loaded()[0]
            try:
                answer = child.call(function, arguments, SECONDS + characters / CHARACTERS_A_SECOND, longest)
            except _RefusedError as refused:
                raise CheckpointError(f"cannot encode this text: {refused}", file=self.file) from None
            self._idle.append(child)
        return answer

    def _loaded(self) -> tuple["_Child", dict[str, Any]]:
        """A new child that has loaded the tokenizer, and how it describes it."""
        child = _Child()
        try:
            return child, json.loads(child.call(*self._load, SECONDS, LARGEST_DESCRIPTION))
        except _RefusedError as refused:
            raise CheckpointError(str(refused), file=self.file) from None


@lru_cache(2)
def parsed(file: str, parse: Request, content: bytes) -> list[str]:
    """The list of texts that a function makes of a stranger's file in a process of its own, within the same limits."""
    try:
        tokens: list[str] = json.loads(_Child().call(parse, (content,), SECONDS, LARGEST_DESCRIPTION))
    except _RefusedError as refused:
        raise CheckpointError(str(refused), file=file) from None
    return tokens


class _RefusedError(Exception):
    """Why a request failed."""


class _Child:
    """The process and its two pipes; it ends when this object does."""

    def __init__(self) -> None:
        path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                PROGRAM.format(Limits(MEMORY, MOST_TOKENS, MOST_CHARACTERS, LARGEST_STEPS), os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # panics print there
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
        finalize(self, _end, self._process)

    def call(self, function: Request, arguments: Sequence[Any], seconds: float, longest: int) -> bytes:
        """Call a function in the child, with limits on processor time and on the bytes of the answer."""
        assert self._process.stdin and self._process.stdout
        try:
            pickle.dump((function, arguments, seconds), self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _RefusedError(self._end_of_it(seconds)) from None
        head = self._process.stdout.read(REPLY.size)
        if len(head) < REPLY.size:
            raise _RefusedError(self._end_of_it(seconds))
        length, well = REPLY.unpack(head)
        if length > longest:
            raise _RefusedError(f"its answer has {length} bytes; at most {longest} are read")
        answer = self._process.stdout.read(length)
        if len(answer) < length:
            raise _RefusedError(self._end_of_it(seconds))
        if not well:
            raise _RefusedError(answer.decode(errors="backslashreplace"))
        return answer

    def _end_of_it(self, seconds: float) -> str:
        """Why the process is gone."""
        status = self._process.wait()
        if status == -signal.SIGPROF:
            return f"it takes the tokenizers library more than {seconds:.0f} seconds"
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"the tokenizers library does not survive it ({name}), or needs more than {MEMORY / 2**30:.3g} GB"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
