"""The table of architectures: the TOML files in this folder, and the user's own."""

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from weightscope.architectures.family import Family
from weightscope.architectures.stanzas import File, read_rows
from weightscope.errors import CheckpointError
from weightscope.tables import Table

# The built-in table: a stanza is parsed when it is asked for.

UNSUPPORTED = "unsupported.toml"
FIRST = ("gpt", "qwen", "llama")  # files whose rows come first
HEADER = re.compile(r"^(\[([^\[\]\n]+)\]\n(?:(?!\[[^\[\n]+\]\n).*\n?)*)", re.MULTILINE)
NAMES = re.compile(r"^(types|alias|name|like) = (\[[^\]]*\]|\"[^\"]*\")", re.MULTILINE)
GGUF = re.compile(r"^gguf\b", re.MULTILINE)


class Rows(Sequence[Family]):
    """The files of a folder. They are scanned for the headers of stanzas; only what somebody asks for is parsed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stanzas: dict[str, File] = {}

    @cached_property
    def texts(self) -> dict[str, str]:
        """The text of each file by its name."""
        files = {path.stem: path for path in sorted(self.folder.glob("*.toml"))}
        files = {stem: files[stem] for stem in FIRST} | files
        return {path.name: path.read_text(encoding="utf-8") for path in files.values() if path.name != UNSUPPORTED}

    @cached_property
    def unsupported(self) -> dict[str, str]:
        """Why no row can describe an architecture, by model_type."""
        stanzas = tomllib.loads((self.folder / UNSUPPORTED).read_text(encoding="utf-8")).values()
        return {kind: stanza["refused"] for stanza in stanzas for kind in stanza["types"]}

    @cached_property
    def places(self) -> dict[str, str]:
        """The file of each stanza."""
        return {title: file for title, (file, _) in self._blocks.items()}

    @cached_property
    def asked(self) -> dict[str, set[str]]:
        """What the rows of each stanza can be asked for by: names and model_types."""
        return {title: {name, *types, *aliases} for title, (name, types, aliases) in self._named.items()}

    @cached_property
    def reads(self) -> set[tuple[str, str]]:
        """Every model_type that a row reads, with the row's tower."""
        return {
            (kind, title.partition(".")[2])
            for title, (_, types, aliases) in self._named.items()
            for kind in (*types, *aliases)
        }

    @cached_property
    def _named(self) -> dict[str, tuple[str, list[str], list[str]]]:
        """Each stanza's name, model_types and aliases."""
        lists = {
            title: {key: re.findall(r'"([^"]+)"', listed) for key, listed in NAMES.findall(block)}
            for title, (_, block) in self._blocks.items()
        }

        def name(title: str) -> str:
            return lists[title].get("name", [title.partition(".")[0]])[0]

        def types(title: str) -> list[str]:
            like = lists[title].get("like", [""])[0]
            same = like in lists and name(like) == name(title)
            return lists[title].get("types") or (types(like) if same else [name(title)])

        return {title: (name(title), types(title), lists[title].get("alias", [])) for title in lists}

    @cached_property
    def _blocks(self) -> dict[str, tuple[str, str]]:
        """The file of each stanza and its text, two first: of rows that are as near, the earlier one is named."""
        blocks = {
            ".".join(part.strip('"') for part in title.split(".", 1)): (name, block)
            for name, text in self.texts.items()
            for block, title in HEADER.findall(text)
        }
        return {title: blocks[title] for title in ("gpt2", "llama")} | blocks

    def stanza(self, title: str) -> File:
        """One stanza, parsed."""
        if title not in self._stanzas:
            name, block = self._blocks[title]
            path, text = self.folder / name, self.texts[name]
            self._stanzas[title] = File(block, path, self.row, trusted=True, whole=text)
        return self._stanzas[title]

    def row(self, title: str) -> Family | None:
        """The row of a stanza for another to start from; None where there is none."""
        return self.stanza(title).row(title) if title in self._blocks else None

    def rows(self, kinds: Collection[str]) -> tuple[Family, ...]:
        """The rows of these model_types or names, in order."""
        return tuple(
            row
            for stanza, names in self.asked.items()
            if not names.isdisjoint(kinds)
            for row in self.stanza(stanza).named(stanza)
            if not {row.name, *row.model_types}.isdisjoint(kinds)
        )

    def of_gguf(self) -> tuple[Family, ...]:
        """The rows that read GGUF files."""
        stanzas = [title for title, (_, block) in self._blocks.items() if GGUF.search(block)]
        return tuple(next(self.stanza(stanza).named(stanza)) for stanza in stanzas)

    @cached_property
    def all(self) -> tuple[Family, ...]:
        """Every row, file by file."""
        return tuple(row for stanza in self.places for row in self.stanza(stanza).named(stanza))

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Family]:
        return iter(self.all)

    def __getitem__(self, index: Any) -> Any:
        return self.all[index]


FAMILIES = Rows(Path(__file__).parent)


# The rows that a checkpoint may be read by: those of a file that was asked for, the table's, and a user's own.

MOST_FILES = 1000  # of rows in a user's folder


def own_folder() -> Path:
    """Where a user's rows lie: `families` in the configuration folder of weightscope, as the system has these."""
    return Path(click.get_app_dir("weightscope")) / "families"


def known_rows(families: str | Path | None = None, kinds: Collection[str] | None = None) -> tuple[Family, ...]:
    """Every row, or those of `kinds`, model_types or names; what an earlier row reads, a later one does not.

    `families` is a file of rows, which come before the table's; a user's own come after.
    """
    given = () if families is None else read_rows(Path(families), FAMILIES.row)
    table = FAMILIES if kinds is None else FAMILIES.rows(kinds)
    rows: list[Family] = []
    taken: set[tuple[str, str]] = set()
    for group, reads in ((given, _reads(given)), (table, FAMILIES.reads), (_own_rows(), set())):
        left = [(row, tuple(kind for kind in row.model_types if (kind, row.tower) not in taken)) for row in group]
        rows += [row if types == row.model_types else replace(row, model_types=types) for row, types in left if types]
        taken |= reads
    return tuple(row for row in rows if kinds is None or not {row.name, *row.model_types}.isdisjoint(kinds))


def _reads(rows: Iterable[Family]) -> set[tuple[str, str]]:
    return {(kind, row.tower) for row in rows for kind in row.model_types}


def _own_rows() -> tuple[Family, ...]:
    folder = own_folder()
    try:
        files = sorted([*folder.glob("*.toml"), *folder.glob("*.json")]) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"cannot be looked at ({error.strerror})", file=folder) from None
    if len(files) > MOST_FILES:
        raise CheckpointError(f"holds {len(files)} files of rows; at most {MOST_FILES} are read", file=folder)
    return tuple(row for file in files for row in read_rows(file, FAMILIES.row))


# The table of architectures as a table to read: `weightscope families`.

BEFORE_STEPS = {"qk_norm": "norm of queries and keys", "rope": "rotation", "additive": "position bias"}
AFTER_STEPS = {"closing": "post-norm", "attention_types": "hybrid"}


def families_table(families: str | Path | None = None) -> Table:
    """A row a family and stack: name, model_types, stack, how projections lie, what is special, where it is from."""
    return Table.of_rows(
        ["family", "model_types", "stack", "layout", "special", "from"],
        [
            (
                row.name, " ".join(row.model_types), row.tower or ("text" if row.inputs.tokens else "vision"),
                row.layout.__name__, ", ".join(_special(row)),
                row.origin or "weightscope",
            )
            for row in known_rows(families)
        ],
    )  # fmt: skip


def _special(row: Family) -> Iterator[str]:
    """What is special about the attention of a row."""
    yield from (label for cell, label in BEFORE_STEPS.items() if getattr(row, cell))
    yield from (step.label for step in sorted(row.steps, key=lambda step: step.place) if step.label)
    yield from (label for cell, label in AFTER_STEPS.items() if getattr(row, cell))
    if any(when.of_attention for when in row.variants):
        yield "by config"
