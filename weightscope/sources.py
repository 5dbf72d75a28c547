"""What a user calls SOURCE, in a form that another process can open, and lists of it."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from weightscope.checkpoint import Checkpoint, open_checkpoint
from weightscope.checkpoint.jsontext import MAX_BYTES, read_small
from weightscope.checkpoint.source import existing, from_url
from weightscope.embedded import resolved
from weightscope.errors import CheckpointError, printable
from weightscope.families import stacks_of
from weightscope.fingerprint import Fingerprint
from weightscope.model import Model, open_model

KEPT = 8  # models that a worker keeps open: headers, no tensors
RESERVED = ("summary.csv", "summary.html")


@dataclass(frozen=True)
class Source:
    """How to open a checkpoint, here or on another machine.

    Attributes
    ----------
    source : str
        As the user wrote it, a path on this machine made absolute.
    revision, family, tower, tokenizer, base, families : str or None
        As in `open_model`.
    seen : Fingerprint or None
        Of the checkpoint when it was first opened; None until `as_seen`.
    """

    source: str
    revision: str | None = None
    family: str | None = None
    tower: str | None = None
    tokenizer: str | None = None
    base: str | None = None
    families: str | None = None
    seen: Fingerprint | None = None

    @classmethod
    def named(
        cls,
        source: str,
        revision: str | None = None,
        family: str | None = None,
        tower: str | None = None,
        tokenizer: str | None = None,
        base: str | None = None,
        families: str | None = None,
    ) -> "Source":
        """Of what a user wrote."""

        def found(text: str) -> str:
            path = None
            with suppress(CheckpointError):  # it cannot be looked at; opening it says why
                path = existing(text)
            return str(path or from_url(text))

        return cls(found(source), revision, family, tower, tokenizer, base and found(base), families)

    def open(self) -> Model:
        """The model; see `open_model`."""
        return open_model(self.source, self.revision, self.family, self.tower, self.tokenizer, self.base, self.families)

    def of_stacks(self) -> dict[str, "Source"]:
        """How to open each of its attention models, by name; those that no row reads are not among them."""
        try:
            stacks = replace(self, tower=None).open().stacks
        except CheckpointError:  # several are there, and none of them is the one that is meant unless another is
            stacks = stacks_of(self.checkpoint())
            if all(stack.refusal for stack in stacks.values()):
                raise
        return {name: replace(self, tower=name) for name, stack in stacks.items() if not stack.refusal}

    def checkpoint(self) -> Checkpoint:
        """The checkpoint as it is stored, whatever its family; see `open_checkpoint`."""
        return open_checkpoint(resolved(self.source), self.revision)

    def as_seen(self, model: Model) -> "Source":
        """The same, to be opened elsewhere only if it is the same checkpoint there."""
        return replace(self, seen=Fingerprint.of_model(model))

    def elsewhere(self) -> Model:
        """The model on a worker, which opens it once and keeps it.

        Raises
        ------
        CheckpointError
            As for `open_model`, and if this is not the checkpoint or the weightscope that the task came from.
        """
        return _kept(self)


@lru_cache(maxsize=KEPT)
def _kept(source: Source) -> Model:
    if source.seen and Path(source.source).is_absolute() and not Path(source.source).exists():
        raise CheckpointError(f"{source.source} is not there on a worker; workers read a shared file system")
    model = source.open()
    if source.seen is not None:
        source.seen.refuse_other(Fingerprint.of_model(model), model.checkpoint.name)
    return model


def is_list(source: str) -> bool:
    """Whether a SOURCE names a list of sources; a folder called so is a checkpoint."""
    try:
        return source.lower().endswith(".txt") and not Path(source).is_dir()
    except OSError:  # it cannot be looked at; reading it says why
        return True


def read_list(path: Path) -> list[str]:
    """The sources of a list: one a line, # begins a comment.

    Raises
    ------
    CheckpointError
        The file is not there, cannot be read, names nothing, or names a source twice.
    """
    if not os.path.lexists(path):
        raise CheckpointError("there is no such list; a SOURCE in .txt is a file with a source a line", file=path)
    try:
        lines = read_small(path, MAX_BYTES).decode("utf-8-sig").splitlines()  # Windows' editors write a mark first
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot be read as a list of sources ({error})", file=path) from None
    sources = [found for line in lines if (found := re.sub(r"(^|\s)#.*", "", line).strip())]
    if not sources:
        raise CheckpointError("names no source; one a line is expected", file=path)
    for source, times in Counter(sources).items():
        if times > 1:
            raise CheckpointError(f"names {printable(source)} {times} times", file=path)
    return sources


def folder_names(sources: Sequence[str]) -> list[str]:
    """A folder's name for each of some different sources: its last part, and as many before it as tell it apart.

    Raises
    ------
    CheckpointError
        Nothing tells two of them apart.
    """
    parts = [[part for part in re.split(r"[/\\]", source) if part not in ("", ".")] or ["root"] for source in sources]
    lengths = [1] * len(sources)
    while True:
        names = [_as_file_name("--".join(own[-n:])) for own, n in zip(parts, lengths, strict=True)]
        times = Counter(name.casefold() for name in names)  # some file systems know no case
        clash = [times[name.casefold()] > 1 for name in names]
        grown = [n + (c and n < len(own)) for c, own, n in zip(clash, parts, lengths, strict=True)]
        if grown == lengths:
            break
        lengths = grown
    if any(clash):
        alike = ", ".join(printable(source) for source, c in zip(sources, clash, strict=True) if c)
        raise CheckpointError(f"these sources would share a folder of results: {alike}")
    return names


def _as_file_name(text: str) -> str:
    """Nothing hidden, nothing that means something to a shell or a file system, not too long."""
    name = re.sub(r"[^\w.@+=,-]", "_", text)[-150:].lstrip(".-") or "_"
    return f"{name}_" if name in RESERVED else name
