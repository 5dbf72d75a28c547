"""What every command says of a checkpoint and its copy: each is asked once, when a relation needs it."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import weightscope as ws
from tests.properties.cases import Case
from tests.properties.originals import original, write
from weightscope.core.errors import CheckpointError
from weightscope.model.model import open_tensors
from weightscope.pairs.card.card import Card
from weightscope.pairs.claims.claim import statement
from weightscope.pairs.claims.verify import Verification, verify
from weightscope.pairs.compare.compare import Comparison
from weightscope.pairs.identity.identity import Identity
from weightscope.pairs.learned.learned import Learned
from weightscope.pairs.lineage.lineage import Lineage
from weightscope.pairs.same.same import Same

NONCE = "0" * 32  # probes of every lineage, so that a case is the same each time
T = TypeVar("T")


class NoAnswerError(Exception):
    """A command does not answer, in one line."""


def asked(command: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """The answer of a command."""
    try:
        return command(*arguments, **options)
    except CheckpointError as error:
        raise NoAnswerError(f"{command.__name__}: {error}") from None


class Pair:
    """A checkpoint a and its copy b, as files."""

    def __init__(self, case: Case, copy: tuple[Mapping[str, Any], Mapping[str, Any]], folder: Path) -> None:
        self.case, self.folder, sound = case, folder, original(case.source)
        self.a = sound.stored or write(folder / "a", sound.config, sound.tensors)
        self.b = write(folder / "b", *copy, case.writing)

    @cached_property
    def same(self) -> Same:
        return asked(ws.same, self.a, self.b)

    @cached_property
    def back(self) -> Same:
        return asked(ws.same, self.b, self.a)

    @cached_property
    def has_heads(self) -> bool:
        """The original is a model; some packed fixtures are a tensor without a model_type."""
        return isinstance(open_tensors(self.a), ws.Model)

    @cached_property
    def is_read(self) -> bool:
        """The copy's config says how its heads are read."""
        return isinstance(open_tensors(self.b), ws.Model)

    @cached_property
    def ids(self) -> tuple[Identity, Identity]:
        return asked(ws.identity, self.a), asked(ws.identity, self.b)

    @cached_property
    def by_identity(self) -> Same:
        """What is said of b where of a only the identity is known."""
        path = self.folder / "a.id.json"
        path.write_text(json.dumps(self.ids[0].as_json()))
        return asked(ws.same, path, self.b)

    @cached_property
    def compare(self) -> Comparison:
        return asked(ws.compare, self.a, self.b, all_tensors=True)

    @cached_property
    def lineage(self) -> Lineage:
        return asked(ws.lineage, self.b, self.a, nonce=NONCE)

    @cached_property
    def lineage_back(self) -> Lineage:
        return asked(ws.lineage, self.a, self.b, nonce=NONCE)

    @cached_property
    def lineage_of_itself(self) -> str:
        """The verdict on two copies of the original."""
        return _lineage_of_itself(self.case.source)

    @cached_property
    def claim(self) -> Verification:
        """The lineage of b, claimed and verified."""
        path = self.folder / "claim.json"
        path.write_text(json.dumps(asked(statement, self.lineage)))
        return asked(verify, path, self.b, [self.a])

    @cached_property
    def learned(self) -> str:
        """The kind of training between a and b."""
        found: Learned = asked(ws.learned, self.a, self.b)
        return found.tunes[0].training.kind

    @cached_property
    def card(self) -> Card:
        return asked(ws.card, self.b, base=self.a, original=self.a)

    @cached_property
    def items(self) -> dict[str, str]:
        """States of the card's items."""
        return {each.item: each.state for each in self.card.items}

    @cached_property
    def items_of_a(self) -> dict[str, str]:
        return _items(self.case.source)

    @cached_property
    def findings(self) -> list[Any]:
        """Findings of an audit of b that an exit status may depend on."""
        return _findings(self.b)

    @cached_property
    def findings_of_a(self) -> list[Any]:
        return _findings_of(self.case.source)


def _findings(source: Path) -> list[Any]:
    audited = asked(ws.audit, source, directions=0, sinks=False, all_tensors=True)
    return sorted((each.kind, each.severity, str(each.layer), str(each.head)) for each in audited.findings)


def _of_original(source: str, ask: Callable[[Path], T]) -> T:
    sound = original(source)
    if sound.stored is not None:
        return ask(sound.stored)
    with TemporaryDirectory() as folder:
        return ask(write(Path(folder) / "a", sound.config, sound.tensors))


@lru_cache(None)
def _lineage_of_itself(source: str) -> str:
    return _of_original(source, lambda a: asked(ws.lineage, a, a, nonce=NONCE).verdict)


@lru_cache(None)
def _items(source: str) -> dict[str, str]:
    return _of_original(source, lambda a: {each.item: each.state for each in asked(ws.card, a).items})


@lru_cache(None)
def _findings_of(source: str) -> list[Any]:
    return _of_original(source, _findings)
