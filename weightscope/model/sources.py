"""SOURCE as a user writes it, in a form that another process can open, and lists of sources."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.config import MAX_BYTES, read_small
from weightscope.checkpoint.opening import (
    EMBEDDED,
    at_revision,
    existing,
    open_checkpoint,
    resolved,
)
from weightscope.checkpoint.provenance import read_digests
from weightscope.core.errors import CheckpointError, printable
from weightscope.model.config.reading import stacks_of
from weightscope.model.model import Model, TensorsOnly, open_model, open_tensors
from weightscope.model.opened import open_source
from weightscope.model.rows.own_names import unwrapped
from weightscope.model.run_identity import RunIdentity

HOW = tuple(signature(open_model).parameters)[1:]  # the options that say how to open a source
KEPT = 8  # models that a worker keeps open (headers, no tensors)
RESERVED = ("summary.csv", "summary.html")


@dataclass(frozen=True)
class Source:
    """A source with the options to open it, here or on another machine."""

    source: str  # as the user wrote it, but a local path is absolute
    _: KW_ONLY
    revision: str | None = None  # this and the next as in `open_model`
    family: str | None = None
    tower: str | None = None
    tokenizer: str | None = None
    base: str | None = None
    families: str | None = None
    given: str = ""  # as the user wrote it
    digest: bool = False  # True reads its files whole for their SHA-256
    seen: RunIdentity | None = None  # the checkpoint's when first opened; None before `as_seen`

    @classmethod
    def named(cls, source: str, **options: Any) -> "Source":
        """A source from a user's words; options as of `open_model`, and `digest`."""

        def absolute(text: str) -> str:
            path = None
            with suppress(CheckpointError):  # opening reports it
                path = existing(text)
            return str(path or (text if text == EMBEDDED else resolved(text)))

        base = options.pop("base", None)
        return cls(absolute(source), base=base and absolute(base), given=source, **options)

    def open(self) -> Model:
        """The model; see `open_model`."""
        model = open_model(self.source, **{name: getattr(self, name) for name in HOW})
        self._as_asked(model.checkpoint)
        return model

    def open_tensors(self) -> Model | TensorsOnly:
        """The model, or its tensors alone where its heads are not read."""
        opened = open_tensors(self.source, **{name: getattr(self, name) for name in HOW})
        self._as_asked(opened.checkpoint)
        return opened

    def of_stacks(self) -> dict[str, "Source"]:
        """One source for each attention stack that is supported, by name."""
        stacks = stacks_of(open_source(self.source, self.revision, self.base).checkpoint)
        names = [name for name, stack in stacks.items() if not stack.refusal]
        if not names:
            replace(self, tower=None, digest=False).open()  # says why, where it is known
        return {name: replace(self, tower=name) for name in names}

    def checkpoint(self) -> Checkpoint:
        """The checkpoint as stored, whatever its family, without wrappers' segments."""
        checkpoint = unwrapped(open_checkpoint(self.source, self.revision))
        self._as_asked(checkpoint)
        return checkpoint

    def _as_asked(self, checkpoint: Checkpoint) -> None:
        """Give a checkpoint the name that the user wrote, and the digests that were asked for."""
        checkpoint.given = at_revision(self.given or self.source, self.revision)
        if self.digest:
            read_digests(checkpoint)

    def as_seen(self, model: Model) -> "Source":
        """Bind the source to this checkpoint: a machine with another one refuses to open it."""
        return replace(self, seen=RunIdentity.of_model(model), digest=False)

    def elsewhere(self) -> Model:
        """The model on a worker, which opens it once and keeps it open."""
        return _kept(self)


@lru_cache(maxsize=KEPT)
def _kept(source: Source) -> Model:
    if source.seen and Path(source.source).is_absolute() and not Path(source.source).exists():
        raise CheckpointError(
            f"{source.source} is not there on a worker; workers read a shared file system"
        )
    model = source.open()
    if source.seen is not None:
        source.seen.refuse_other(RunIdentity.of_model(model), model.checkpoint.name)
    return model


def is_list(source: str) -> bool:
    """True if a SOURCE names a list of sources: it ends in .txt and is no folder."""
    try:
        return source.lower().endswith(".txt") and not Path(source).is_dir()
    except OSError:  # reading reports it
        return True


def read_list(path: Path) -> list[str]:
    """The sources of a list, each once: one per line, # begins a comment."""
    sources = lines_of(path)
    for source, times in Counter(sources).items():
        if times > 1:
            raise CheckpointError(f"names {printable(source)} {times} times", file=path)
    return sources


def lines_of(path: Path) -> list[str]:
    """The lines of a list that are not empty, without comments."""
    if not os.path.lexists(path):
        problem = "there is no such list; a SOURCE in .txt is a file with one source per line"
        raise CheckpointError(problem, file=path)
    try:  # utf-8-sig, since editors on Windows write a mark first
        lines = read_small(path, MAX_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot be read as a list of sources ({error})", file=path) from None
    sources = [source for line in lines if (source := re.sub(r"(^|\s)#.*", "", line).strip())]
    if not sources:
        raise CheckpointError("names no source; one per line is expected", file=path)
    return sources


def folder_names(sources: Sequence[str]) -> list[str]:
    """A folder name per source: as many last parts of its path as make it unique."""

    def split(source: str) -> list[str]:
        return [part for part in re.split(r"[/\\]", source) if part not in ("", ".")] or ["root"]

    parts = [split(source) for source in sources]
    lengths = [1] * len(sources)
    while True:
        names = [as_file_name("--".join(path[-n:])) for path, n in zip(parts, lengths, strict=True)]
        times = Counter(name.casefold() for name in names)  # some file systems ignore case
        clash = [times[name.casefold()] > 1 for name in names]
        grown = [
            n + 1 if clashes and n < len(path) else n
            for clashes, path, n in zip(clash, parts, lengths, strict=True)
        ]
        if grown == lengths:
            break
        lengths = grown
    if any(clash):
        alike = ", ".join(printable(source) for source, c in zip(sources, clash, strict=True) if c)
        raise CheckpointError(f"these sources would share a folder of results: {alike}")
    return names


def as_file_name(text: str) -> str:
    """A short, visible name without a shell's or file system's special characters."""
    name = re.sub(r"[^\w.@+=,-]", "_", text)[-150:].lstrip(".-") or "_"
    return f"{name}_" if name in RESERVED else name
