"""The committed comparison of rows with transformers' renaming of tensors, which `spellings` makes."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

RECORD = Path(__file__).with_name("spellings.csv")
ALIKE, UNNAMED, REFUSED, WRONG, UNREAD = "alike", "unnamed", "refused", "WRONG", "not read"
OTHERWISE = "other numbers"


@dataclass(frozen=True)
class Line:
    """A type whose tensors transformers renames."""

    type: str
    # alike; unnamed: more tensors without a role; other numbers: of a role; refused; WRONG; not read: under neither
    verdict: str
    reason: str = ""
    saved: str = ""  # a name as it is saved that memory has not, and one in memory
    in_memory: str = ""
    unmet: str = ""  # rules whose names neither file has


def differences(before: Sequence[Line], after: Sequence[Line]) -> list[str]:
    """What is read otherwise than in the record, of the types looked at, and rules that the record has not."""
    known, lines = {each.type: each for each in before}, []
    for each in after:
        old = known.get(each.type)
        if old is None and each.verdict != ALIKE:
            lines.append(f"spelling of {each.type}: new, {each.verdict} {each.reason}".rstrip())
        elif old is not None and old.verdict != each.verdict:
            lines.append(f"spelling of {each.type}: {old.verdict} -> {each.verdict} {each.reason}".rstrip())
        if each.unmet != (old.unmet if old else ""):
            lines.append(f"spelling of {each.type}: rules that no file met are {each.unmet or 'none'}")
    return lines


def written(path: Path = RECORD) -> list[Line]:
    """The committed lines."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Line(**row) for row in csv.DictReader(file)]


def write(lines: Sequence[Line], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Line))
        writer.writerows(map(astuple, lines))
