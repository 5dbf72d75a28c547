"""Which readings were compared with transformers' own attention: those of the census, and of the tests' tiny models.

The census is read when the first checkpoint is opened, not when weightscope is imported.
"""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from weightscope.architectures.family import Family
from weightscope.files import regular_file

RECORD = Path(__file__).parent / "architectures.csv"
OF = "# transformers "  # begins the first line of a census, before the version
# model_types that the census does not have, each with a tiny model in `tests/architectures/fixtures`.
IN_FIXTURES = ("squeezebert",)
NOT_COMPARED = "a comparison with transformers' own attention, which this row lacks for such a model"  # as a caveat


def title(row: Family) -> str:
    """What the census calls a row: its name, and its tower if it has one."""
    return f"{row.name}.{row.tower}" if row.tower else row.name


def unproved(row: Family, model_type: object, part_type: object) -> str:
    """Why it is unknown whether a row reads a model_type exactly, and what would prove it; empty if it is known.

    `part_type` is the model_type of the part of a composite that the row reads.
    """
    kind = str(model_type)[:40]
    missing = _missing(title(row), str(model_type), str(part_type))
    command = f"`python -m tests.census {kind}` in a checkout compares it"
    return f"unproved: {missing} was never compared with transformers' attention; {command}" if missing else ""


def _missing(row: str, kind: str, part: str) -> str:
    """What was never found exact, in words: the type, or this stack of it."""
    if kind in IN_FIXTURES:
        return ""
    verdicts = census().get(kind, {})
    if not _any_exact(kind):
        return f"model_type '{kind[:40]}'"
    if row in verdicts:
        exact = "exact" in verdicts[row] <= {"exact", "refused"}
    else:  # other parts than those that the type has by default; an older census does not name rows
        exact = not any(verdicts) or part in IN_FIXTURES or _any_exact(part)
    return "" if exact else f"the {row} stack of model_type '{kind[:40]}'"


def _any_exact(kind: str) -> bool:
    return any("exact" in verdicts for verdicts in census().get(kind, {}).values())


@lru_cache(None)
def census() -> Mapping[str, Mapping[str, set[str]]]:
    """The verdicts of the census by model_type and row."""
    verdicts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in lines(RECORD):
        for row in (line.get("row") or "").split() or [""]:
            verdicts[line["type"]][row].add(line["verdict"])
    return verdicts


def lines(path: Path) -> Iterable[dict[str, str]]:
    """The lines of a census by column."""
    with regular_file(path) as file:
        text = file.read().decode().splitlines(keepends=True)
    return csv.DictReader(line for line in text if not line.startswith(OF))


def standing(path: Path = RECORD) -> str:
    """The result of the census in two sentences, with the version of transformers."""
    with regular_file(path) as file:
        first = file.read().decode().partition("\n")[0]
    release = " " + first.removeprefix(OF) if first.startswith(OF) else ""
    rows = list(lines(path))
    counts = Counter(row["verdict"] for row in rows if row["stack"])
    types = {row["type"] for row in rows if row["stack"]}
    unbuilt = len({row["type"] for row in rows} - types)
    unseen = f", {counts['unseen']} never ran" if counts["unseen"] else ""
    wrong = "none is" if not counts["WRONG"] else f"{counts['WRONG']} are"
    return (
        f"Checked against the eager attention of transformers{release} on tiny random models of {len(types)} "
        f"model types: {counts['exact']} of {sum(counts.values())} attention stacks match exactly, {counts['refused']} "
        f"are refused, {wrong} wrong{unseen}. {unbuilt} more types have no attention or cannot be built this small."
    )
