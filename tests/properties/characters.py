"""Claims, identities and cards with one character changed: none may be taken for what was written."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import weightscope as ws
from tests.properties.pair import NONCE
from tests.support.config_edits import leaves
from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.small_llama import write_small_llama
from weightscope.core.errors import CheckpointError
from weightscope.pairs.card.card import section_in, without_version
from weightscope.pairs.claims import verify as verifying
from weightscope.pairs.claims.claim import statement
from weightscope.pairs.identity.identity import read_identity

NOT_COMPARED = {"version", "date"}
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.\d+(?:e[-+]?\d+)?(?![\w])")


def with_another(text: str, place: int) -> str:
    """The text with another character in a place: the next digit or letter, or a letter for anything else."""
    old = text[place]
    new = str((int(old) + 1) % 10) if old in "0123456789" else chr(ord(old) + 1) if old.isalpha() else "x"
    return text[:place] + new + text[place + 1 :]


def missed(text: str, is_taken: Callable[[str], bool], step: int = 1, first: int = 0) -> Iterator[str]:
    """The changed texts that are taken for the text, each with what is around the character."""
    for place in range(first, len(text), step):
        changed = with_another(text, place)
        if is_taken(changed):
            yield f"{place}: {text[max(0, place - 40) : place + 20]!r}, {text[place]!r} is {changed[place]!r}"


# Claims


def claim_of(folder: Path) -> tuple[str, Callable[[str], bool]]:
    """A claim about a Llama of two layers in bfloat16, and whether a changed one is taken for it."""
    base = write_small_llama(folder / "base", layers=2)
    write_weights(DERIVATIONS["bfloat16"].change(read_weights(base)), folder / "suspect")
    suspect, of = ws.open_model(folder / "suspect"), ws.open_model(base)
    text = json.dumps(statement(ws.lineage(suspect, of, nonce=NONCE)))
    path, lineage, true = folder / "claim.json", verifying.lineage, json.loads(text)
    answers: dict[Any, Any] = {}

    def once(renamed: Any, bases: Any, **options: Any) -> Any:
        """The lineage, computed once for each set of names and each nonce."""
        key = (renamed.name, *(each.name for each in bases), *options.values())
        if key not in answers:
            answers[key] = lineage(renamed, bases, **options)
        return answers[key]

    def holds(changed: str) -> bool:
        path.write_text(changed)
        try:
            with patch.object(verifying, "lineage", once):
                return verifying.verify(path, suspect, [of]).holds and not _is_as_good(true, json.loads(changed))
        except CheckpointError:
            return False

    return text, holds


def _is_as_good(true: dict[str, Any], claim: dict[str, Any]) -> bool:
    """A version or date that no check can cover, or a number that another machine may round so."""
    before, after = (dict(leaves(_by_key(each))) for each in (true, claim))
    differ = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    return all(path[-1] in NOT_COMPARED or _is_near(before.get(path), after.get(path)) for path in differ)


def _by_key(value: Any) -> Any:
    if isinstance(value, list):
        return {str(i): _by_key(each) for i, each in enumerate(value)}
    return {key: _by_key(each) for key, each in value.items()} if isinstance(value, dict) else value


def _is_near(x: Any, y: Any) -> bool:
    if isinstance(x, str) and isinstance(y, str):
        numbers = [[*map(float, NUMBER.findall(each.replace(",", "")))] for each in (x, y)]
        return NUMBER.sub("0", x) == NUMBER.sub("0", y) and all(map(_is_near, *numbers))
    return isinstance(x, float) and isinstance(y, float) and isclose(x, y, rel_tol=0.0101, abs_tol=1e-6)


# Identities


def identity_of(folder: Path, source: str | Path = "embedded") -> tuple[str, Callable[[str], bool]]:
    """The file of an identity, and whether a changed one has its values and says so."""
    made = ws.identity(source)
    text = json.dumps(made.as_json())
    path, true = folder / "model.id.json", _of_values(json.loads(text))

    def is_taken(changed: str) -> bool:
        path.write_text(changed)
        try:
            return read_identity(path).wsid == made.wsid and _of_values(json.loads(changed)) != true
        except CheckpointError:
            return False

    return text, is_taken


def _of_values(record: dict[str, Any]) -> Any:
    """What an identity says of values; sketches are no part of it."""
    of_tensors = {
        label: {key: value for key, value in each.items() if key != "sketch"}
        for label, each in record.get("tensors", {}).items()
    }
    return record.get("wsid"), of_tensors


# Cards


def card_of(folder: Path, source: str | Path = "embedded") -> tuple[str, Callable[[str], bool]]:
    """The section of a card, and whether a changed page is taken for it."""
    section = ws.card(source).section
    version = re.search(r'\n  version: "[^"]*"\n', section)
    assert version is not None

    def is_taken(changed: str) -> bool:
        found = section_in(changed)
        is_version = changed[: version.start() + 12] + changed[version.end() - 2 :] == (
            section[: version.start() + 12] + section[version.end() - 2 :]
        )
        return found is not None and without_version(found) == without_version(section) and not is_version

    return section, is_taken


@cache
def kinds() -> dict[str, Callable[[Path], tuple[str, Callable[[str], bool]]]]:
    return {"claim": claim_of, "identity": identity_of, "card": card_of}


def swept(kind: str, step: int = 1, first: int = 0) -> tuple[int, list[str]]:
    """The number of characters changed, and those that are missed."""
    with TemporaryDirectory() as folder:
        text, is_taken = kinds()[kind](Path(folder))
        assert not is_taken(text) or kind == "card"
        return len(range(first, len(text), step)), [*missed(text, is_taken, step, first)]
