"""The committed census: read and write its rows, one per attention stack, and summarise them in prose."""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from tests.census import downloads
from tests.census.layout_record import Line, disagreements, written
from weightscope.core.files import new_file
from weightscope.model.rows.table import OF, RECORD, lines

SUBJECT = re.compile(
    r"^(its text stack is not read: )?(no row can describe \S+: it |\S+ is not supported: it "
    r"|\w+ (?=with |is not a model|has no tower))"
)  # the type that a reason is about, which the page names in a column of its own
# What an error of reading means, for people; architectures.csv keeps the error.
PLAIN = (
    (
        re.compile(r"has no layer of a "),
        "a part saved alone, under names that the row of the whole model does not know",
    ),
    (re.compile(r"tensor '.*' is missing"), "its tensors have other names than its row expects"),
    (re.compile(r"tensor '.*' has shape"), "its fused tensor has fewer keys and values than its row expects"),
)
QUOTED = re.compile(r"'[^']*'|\([^()]*\)|\b\d+\b", re.ASCII)  # parts of a reason that differ between stacks

PAGE = """\
# Supported architectures

For every model_type that transformers {version} can build, two tiny random models of different sizes and seeds were run
at positions near and far, and attention and outputs of every layer were compared with eager attention (with fused
attention for types whose eager code misreads its mask). A stack is *exact* if they agree to 1e-4 in all layers. It is
*refused* if weightscope does not read it, or if no query saw two keys. No stack may be wrong.

**{counts[exact]} of {stacks} stacks in {types} types are exact.** {counts[refused]} are refused, {counts[WRONG]} are
wrong. {whole} types are exact in every stack.

| | types | stacks | saved as |
| --- | --- | --- | --- |
| exact | {exact_types} | {counts[exact]} | {exact_classes} |
| refused | {refused_types} | {counts[refused]} | |
| wrong | {wrong_types} | {counts[WRONG]} | |
| read, never seen at work | {unseen_types} | {counts[unseen]} | |
| not built | {unbuilt_types} | | |

A stack is saved as every public class of transformers that holds it (`BertModel`, `BertForMaskedLM` ...), because each
names its tensors differently. It counts as exact if all are read alike. Configs in older dialects are tested separately
([rows](rows.md#dialects-of-configjson)). What weightscope reads but no comparison covers opens with the label
*unproved*. For an architecture that is not listed, see [Adopt an architecture](adopting.md).

`weightscope families` prints the types that are read;
[architectures.csv](../weightscope/model/rows/architectures.csv) has one line per stack.
`python -m tests.census --out weightscope/model/rows/architectures.csv --page docs/architectures.md` makes this page
again (half an hour, PyTorch); `--against` reports what a newer transformers adds.

## Roles of tensors

[`inspect --tensors`](tensors.md) names tensors by their role. In {named_types} of {opened_types} types, all tensors
that transformers' class saves have one; of all types' {tensors:,} tensors, {share:.0%} do. `unnamed` and `where` in
architectures.csv say how many tensors of a type have none, and in which modules they are. The modules of most types:

| module | types |
| --- | --- |
{unnamed}

## Refused, by mechanism

| reason | stacks | types |
| --- | --- | --- |
{refused}

A checkpoint whose heads are refused opens for its tensors: `inspect --tensors` lists them, and `compare --all` compares
them, under roles as far as a row knows them and by name otherwise.

## Where other projects read otherwise

An eager model is a witness, not the last one. The rotary layout, the norms that add 1 and the scale of scores of
{compared} types were compared with llama.cpp (as in llama-cpp-python 0.3.36) and vLLM 0.33.0, read as text:
[layouts.csv](../tests/census/layouts.csv), made by `python -m tests.census.layouts`. Their readings differ for:

| type | here, as in transformers {version} | llama.cpp | vLLM |
| --- | --- | --- | --- |
{differing}

A row of these says so among its notes.

## What share of models this is

{downloads}

## Not checked

These stacks are read and were not seen at work: {unseen}.

Types that were not built, or have no attention:

| reason | types |
| --- | --- |
{unbuilt}
"""
COMMON = ("has no attention", "needs the package")  # of types that are not built: reasons that many share
ERRORS = ("cannot be built", "model does not run")  # followed by an error, which architectures.csv has
MOST_MODULES = 12  # whose tensors have no role, which the page lists
MOST_NAMED = 4  # types of one reason, which the page names
FAILS = "transformers fails on a model this small"

VERDICTS = (
    ("exact", "exact"), ("refused", "refused"), ("wrong", "WRONG"), ("unseen", "unseen"), ("unbuilt", "not built"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the census: a stack of a type, or a type that was not seen to have any."""

    type: str  # The model_type
    # Where its attention modules are in transformers' model, `{}` for every index; empty where none was seen. Of a
    # stack that is unseen, where it is in the file.
    stack: str = ""
    kind: str = ""  # self, causal or cross
    layers: int = 0  # In the tiny model
    verdict: str = ""  # exact, refused, WRONG; unseen of a stack that weightscope reads and that never ran; "not built"
    reason: str = ""
    row: str = ""  # Which row of weightscope's table reads it
    classes: int = 0  # Public classes of transformers as which it was saved, and read alike; 0 where that was not tried
    tensors: int = 0  # In the whole file that the tiny model saves; how many of them have no role, and where they are
    unnamed: int = 0
    where: str = ""


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
    return [
        Row(
            line["type"], line["stack"], line["kind"], int(line["layers"]), line["verdict"], line["reason"],
            line.get("row") or "", int(line.get("classes") or 0), int(line.get("tensors") or 0),
            int(line.get("unnamed") or 0), line.get("where") or "",
        )
        for line in lines(path)
    ]  # fmt: skip


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
    sentence = reason.rpartition("safetensors: ")[2] or reason
    if plain := next((words for error, words in PLAIN if error.match(sentence)), ""):
        return plain
    return QUOTED.sub("…", SUBJECT.sub("", sentence))


def page(rows: Sequence[Row], version: str) -> str:
    """The page of a census, in Markdown: the tally, and what is refused by mechanism."""
    counts, types = tally(rows), {row.type for row in rows if row.stack}
    all_exact = {kind for kind in types if all(row.verdict == "exact" for row in rows if row.type == kind)}
    refused: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.verdict in ("refused", "WRONG"):
            refused[mechanism(row.reason)].append(row.type)
    table = []
    for why, which in sorted(refused.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        named = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in Counter(which).items())
        table.append(f"| {why.replace('|', '/')} | {len(which)} | {named} |")
    tried = [row for row in rows if row.verdict == "exact" and row.classes]
    more = "" if len(tried) == counts["exact"] else f" (of {len(tried)} stacks; the others as one)"
    files = {row.type: row for row in rows if row.tensors}.values()
    return PAGE.format(
        opened_types=len(files), named_types=sum(not row.unnamed for row in files), unnamed="\n".join(_unnamed(files)),
        tensors=sum(row.tensors for row in files),
        share=1 - sum(row.unnamed for row in files) / max(1, sum(row.tensors for row in files)),
        version=version, counts=counts, stacks=sum(counts.values()), types=len(types), whole=len(all_exact),
        refused="\n".join(table), unbuilt="\n".join(_unbuilt(rows)),
        exact_classes=f"{sum(row.classes for row in tried):,} classes{more}",
        compared=len(known := written()), differing="\n".join(map(_differing, filter(disagreements, known))),
        unseen=", ".join(f"{row.type} ({row.row})" for row in rows if row.verdict == "unseen") or "none",
        downloads=downloads.section([{**asdict(row), "unnamed": str(row.unnamed)} for row in rows]),
        **{f"{name}_types": len({row.type for row in rows if row.verdict == verdict}) for name, verdict in VERDICTS},
    )  # fmt: skip


def _unnamed(files: Iterable[Row]) -> list[str]:
    """The modules whose tensors have no role in most types, a line of a table each."""
    counts = Counter(
        (place.partition(":")[0], module)
        for row in files
        for place in row.where.split("; ")
        for module in re.sub(r" and \d+ more$", "", place.partition(": ")[2]).split(", ")
        if module
    )
    return [f"| `{module}` ({place}) | {count} |" for (place, module), count in counts.most_common(MOST_MODULES)]


def _differing(line: Line) -> str:
    """A type that another project reads otherwise, as a line of a table."""
    return f"| {line.type} | {line.rotary} | {line.rotary_llama_cpp or 'unknown'} | {line.rotary_vllm or 'unknown'} |"


def _unbuilt(rows: Sequence[Row]) -> list[str]:
    """The types without a stack by reason, a line of a table each, reasons that many share first."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if not row.stack:
            why = FAILS if row.reason.startswith(ERRORS) else row.reason.replace("|", "/")
            by_reason[why].append(row.type)
    order = sorted(by_reason, key=lambda why: (not why.startswith(COMMON), -len(by_reason[why]), why))
    return [f"| {why} | {_few(sorted(by_reason[why]))} |" for why in order]


def _few(types: Sequence[str]) -> str:
    """The names of a few types, or how many there are."""
    return ", ".join(types) if len(types) <= MOST_NAMED else f"{len(types)} types"
