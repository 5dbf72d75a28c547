"""The census as it is committed: a row a stack, and what is said of them all."""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from weightscope.regular import regular_file
from weightscope.writing import new_file

OF = "# transformers "
RECORD = Path(__file__).with_name("architectures.csv")
QUOTED = re.compile(r"'[^']*'|\([^()]*\)|\b\d+\b", re.ASCII)  # what differs where the same is said of two stacks

PAGE = """\
# Which architectures are read exactly

Of every model_type that transformers {version} builds, two tiny random models were made, of two sizes and with two
seeds, and run at positions near and far. Every layer of every attention stack was compared: attention probabilities and
outputs agree with eager attention to 1e-4, or weightscope says in a line why it does not read the stack. None may be
wrong.

**{counts[exact]} of {stacks} stacks in {types} types are exact**; {whole} types are so in every stack,
{counts[refused]} stacks are refused, {counts[WRONG]} are wrong.

Made by `python -m weightscope.adoption.census --out weightscope/adoption/architectures.csv --page
docs/architectures.md`, which needs PyTorch and takes half an hour; with `--against` it says what a newer transformers
adds. Every stack has its line in [architectures.csv](../weightscope/adoption/architectures.csv).

## Exact

By type; (2) and the like where it has several such stacks.

{exact}.

## Refused, by mechanism

| why | stacks | which |
| --- | --- | --- |
{refused}

## Not looked at

Types that cannot be built so small, need other packages, or have no attention: {unbuilt}.
"""


@dataclass(frozen=True)
class Row:
    """One line of the census: a stack of a type, or a type that was not seen to have any.

    Attributes
    ----------
    type : str
        The model_type.
    stack : str
        Where its attention modules are in transformers' model, `{}` for every index; empty where none was seen.
    kind : str
        self, causal or cross.
    layers : int
        In the tiny model.
    verdict : str
        exact, refused, WRONG, or "not built".
    reason : str
    """

    type: str
    stack: str
    kind: str
    layers: int
    verdict: str
    reason: str


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write a census as CSV, after a line that says which transformers it is of."""
    text = io.StringIO()
    text.write(f"{OF}{version('transformers')}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows(map(astuple, rows))
    with new_file(path) as file:
        file.write(text.getvalue().encode())


def read(path: Path = RECORD) -> list[Row]:
    """The rows of a census that was written before; by default of the one that comes with weightscope."""
    with regular_file(path) as file:
        lines = file.read().decode().splitlines(keepends=True)
        rows = csv.DictReader(line for line in lines if not line.startswith(OF))
        return [
            Row(row["type"], row["stack"], row["kind"], int(row["layers"]), row["verdict"], row["reason"])
            for row in rows
        ]


def standing(path: Path = RECORD) -> str:
    """How many stacks of how many types are read, in a sentence, and of which transformers."""
    with regular_file(path) as file:
        first = file.read().decode().partition("\n")[0]
    of = first.removeprefix(OF) if first.startswith(OF) else ""
    rows = read(path)
    counts, types = tally(rows), {row.type for row in rows if row.stack}
    unbuilt = len({row.type for row in rows} - types)
    return (
        f"Of {sum(counts.values())} attention stacks in {len(types)} types of transformers{of and f' {of}'}, held "
        f"against its eager attention on tiny models, {counts['exact']} are exact, {counts['refused']} are refused and "
        f"{counts['WRONG'] or 'none'} wrong; {unbuilt} types more have none or are not built so small."
    )


def tally(rows: Sequence[Row]) -> Counter[str]:
    """How many stacks have each verdict."""
    return Counter(row.verdict for row in rows if row.stack)


def changes(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """What a census has that an earlier one had not, and what is read otherwise, of the types looked at."""
    known, kinds = {(row.type, row.stack): row for row in before}, {row.type for row in before}
    lines = []
    for row in after:
        old = known.get((row.type, row.stack))
        if old is None:
            new = "new stack" if row.type in kinds else "new type"
            lines.append(f"{new}: {row.type} {row.stack}: {row.verdict} {row.reason}".rstrip())
        elif old.verdict != row.verdict:
            lines.append(f"{row.type} {row.stack}: {old.verdict} -> {row.verdict} {row.reason}".rstrip())
    seen, there = {row.type for row in after}, {(row.type, row.stack) for row in after}
    gone = [row for row in before if row.type in seen and (row.type, row.stack) not in there]
    return lines + [f"gone: {row.type} {row.stack}" for row in gone]


def mechanism(reason: str) -> str:
    """Why a stack is refused, in words that are the same for every stack that it is refused for alike."""
    if "unknown model_type" in reason:
        return "no row yet"
    if reason.startswith("no row reads this stack") or "no row reads it" in reason:
        return "another stack of the file is read, this one has no row yet"
    said = reason.rpartition("safetensors: ")[2] or reason
    return QUOTED.sub("…", said)


def page(rows: Sequence[Row], version: str) -> str:
    """The page of a census, in Markdown: the tally, what is exact by type, what is refused by mechanism."""
    counts, types = tally(rows), {row.type for row in rows if row.stack}
    whole = {kind for kind in types if all(row.verdict == "exact" for row in rows if row.type == kind)}
    refused: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.stack and row.verdict != "exact":
            refused[mechanism(row.reason)].append(f"{row.type} ({row.kind})")
    exact: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.verdict == "exact":
            exact[row.type].append(row.kind)
    listed = ", ".join(f"{kind} ({len(own)})" if len(own) > 1 else kind for kind, own in sorted(exact.items()))
    table = []
    for why, which in sorted(refused.items(), key=lambda one: (-len(one[1]), one[0])):
        named = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(which).items())
        table.append(f"| {why.replace('|', '/')} | {len(which)} | {named} |")
    return PAGE.format(
        version=version, counts=counts, stacks=sum(counts.values()), types=len(types), whole=len(whole), exact=listed,
        refused="\n".join(table), unbuilt=", ".join(sorted({row.type for row in rows if not row.stack})),
    )  # fmt: skip
