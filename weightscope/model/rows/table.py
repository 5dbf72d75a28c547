"""The table of architectures: the TOML files in this folder, and the user's own; and which rows
were proved.
"""

import csv
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from weightscope.checkpoint.config import read_json
from weightscope.core.errors import CheckpointError
from weightscope.core.files import regular_file
from weightscope.core.tables import Table
from weightscope.model.rows.family import Family
from weightscope.model.rows.stanzas import File, read_rows

# The built-in table: a file is parsed when a row of it is asked for, and a row is made of its
# stanza then.

UNSUPPORTED = "unsupported.toml"
NETWORKS = "networks.json"  # modules around attention; written by tests.model.rows.make_networks
FIRST = ("gpt", "qwen", "llama")  # files whose rows come first
FIRST_ROWS = ("gpt2", "llama")  # of rows that are as near, the earlier one is named


class Rows(Sequence[Family]):
    """The files of a folder, each parsed once somebody asks for a row that its text names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, File] = {}

    @cached_property
    def texts(self) -> dict[str, str]:
        """The text of each file by its name."""
        files = {path.stem: path for path in sorted(self.folder.glob("*.toml"))}
        files = {stem: files[stem] for stem in FIRST} | files
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in files.values()
            if path.name != UNSUPPORTED
        }

    @cached_property
    def unsupported(self) -> dict[str, str]:
        """Why no row can describe an architecture, by model_type."""
        return tomllib.loads((self.folder / UNSUPPORTED).read_text(encoding="utf-8"))

    @cached_property
    def networks(self) -> dict[str, dict[str, list[str]]]:
        """Modules by role around attention, by the title of the row whose models were seen to use
        them so.
        """
        return read_json(self.folder / NETWORKS)

    def file(self, name: str) -> File:
        """One file, parsed."""
        if name not in self._files:
            self._files[name] = File(self.texts[name], self.folder / name, self.row, trusted=True)
        return self._files[name]

    def _naming(self, kind: str) -> list[str]:
        """The files that have a stanza of this name, or name it in another way than as the row that
        one is like.
        """
        return [
            name
            for name, text in self.texts.items()
            if f"[{kind}" in text
            or (
                f'"{kind}"' in text
                and any(f'"{kind}"' in line for line in text.split("\n") if line[:4] != "like")
            )
        ]

    def _stanzas(self, files: Iterable[str]) -> list[tuple[File, str]]:
        """The stanzas of these files, in order."""
        stanzas = [
            (file, title)
            for file in (self.file(name) for name in self.texts if name in files)
            for title in sorted(file.stanzas, key=lambda title: _place(file.text, title))
        ]
        return sorted(stanzas, key=lambda stanza: (*FIRST_ROWS, stanza[1]).index(stanza[1]))

    def row(self, title: str) -> Family | None:
        """The row of a stanza for another to start from; None where there is none."""
        name = title.partition(".")[0]
        files = (
            self.file(file)
            for file, text in self.texts.items()
            if f"[{name}]" in text or f"[{name}." in text
        )
        return next((file.row(title) for file in files if title in file.stanzas), None)

    @lru_cache(100)  # noqa: B019 - a table lives as long as the process
    def rows(self, kinds: frozenset[str]) -> tuple[Family, ...]:
        """The rows of these model_types or names, in order."""
        stanzas = self._stanzas({file for kind in kinds for file in self._naming(kind)})
        rows = (row for file, title in stanzas for row in file.named(title))
        return tuple(row for row in rows if not {row.name, *row.types}.isdisjoint(kinds))

    def of_gguf(self) -> tuple[Family, ...]:
        """The rows that read GGUF files."""
        files = [name for name, text in self.texts.items() if "\ngguf" in text]
        stanzas = (
            (file, title) for file, title in self._stanzas(files) if "gguf" in file.stanzas[title]
        )
        return tuple(next(file.named(title)) for file, title in stanzas)

    @cached_property
    def all(self) -> tuple[Family, ...]:
        """Every row, file by file."""
        return tuple(row for file, title in self._stanzas(self.texts) for row in file.named(title))

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Family]:
        return iter(self.all)

    def __getitem__(self, index: Any) -> Any:
        return self.all[index]


def _place(text: str, title: str) -> int:
    """Where a stanza begins; of a stage that has none of its own, where the first stage's does."""
    place = text.find(f"\n[{title}]\n")
    return text.find(f"\n[{title[:-1]}1]\n") if place < 0 and ".stage" in title else place


FAMILIES = Rows(Path(__file__).parent)


# The rows that may read a checkpoint: of a given file, of the table, and of the user's folder.

MOST_FILES = 1000  # of rows in a user's folder


def own_folder() -> Path:
    """Where a user's rows lie: `families` in the configuration folder of weightscope, as the system
    has these.
    """
    from click import get_app_dir  # a quarter of what opening a checkpoint imports

    return Path(get_app_dir("weightscope")) / "families"


def known_rows(
    families: str | Path | None = None, kinds: Collection[str] | None = None
) -> tuple[Family, ...]:
    """Every row, or the rows of `kinds`, model_types or names; what an earlier row reads, a later
    one does not.

    `families` is a file of rows, which come before the table's; a user's own come after.
    """
    given = () if families is None else read_rows(Path(families), FAMILIES.row)
    table = FAMILIES if kinds is None else FAMILIES.rows(frozenset(kinds))
    rows: list[Family] = []
    taken: set[tuple[str, str]] = set()
    for group in (given, table, _own_rows()):
        left = [
            (row, tuple(kind for kind in row.types if (kind, row.tower) not in taken))
            for row in group
        ]
        rows += [
            row if types == row.types else replace(row, types=types) for row, types in left if types
        ]
        taken |= {(kind, row.tower) for row in group for kind in row.types}
    return tuple(
        row for row in rows if kinds is None or not {row.name, *row.types}.isdisjoint(kinds)
    )


def _own_rows() -> tuple[Family, ...]:
    folder = own_folder()
    try:
        files = sorted([*folder.glob("*.toml"), *folder.glob("*.json")]) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"cannot be looked at ({error.strerror})", file=folder) from None
    if len(files) > MOST_FILES:
        raise CheckpointError(
            f"holds {len(files)} files of rows; at most {MOST_FILES} are read", file=folder
        )
    return tuple(row for file in files for row in read_rows(file, FAMILIES.row))


# The table of architectures as a table to read: `weightscope families`.


def families_table(families: str | Path | None = None) -> Table:
    """A row a family and stack: name, model_types, stack, how projections lie, what is special,
    where it is from.
    """
    return Table.of_rows(
        ["family", "model_types", "stack", "layout", "special", "from"],
        [
            (
                row.name,
                " ".join(row.types),
                row.tower or ("text" if row.inputs.tokens else "vision"),
                row.heads.layout.__name__,
                ", ".join(_special(row)),
                row.origin or "weightscope",
            )
            for row in known_rows(families)
        ],
    )


def _special(row: Family) -> Iterator[str]:
    """What is special about the attention of a row."""
    labels = {
        "norm of queries and keys": row.scores.qk_norm,
        "rotation": row.rope,
        "position bias": row.positions.bias,
        **{step.label: step.label for step in sorted(row.steps, key=lambda step: step.place)},
        "post-norm": row.norms.after,
        "hybrid": row.config.attention_types,
        "by config": any(when.of_attention for when in row.when),
    }
    yield from (label for label, there in labels.items() if there)


# Which readings were compared with transformers' own attention: in the census, and in the tests'
# tiny models. The census is read when the first checkpoint is opened, not when weightscope is
# imported.

RECORD = Path(__file__).parent / "architectures.csv"
OF = "# transformers "  # begins the first line of a census, before the version
# model_types that the census does not have, each with a tiny model in `tests/model/rows/fixtures`.
IN_FIXTURES = ("squeezebert",)
# as a caveat
NOT_COMPARED = (
    "a comparison with transformers' own attention, which this row lacks for such a model"
)


def title(row: Family) -> str:
    """What the census calls a row: its name, and its tower if it has one."""
    return f"{row.name}.{row.tower}" if row.tower else row.name


def unproved(row: Family, model_type: object, part_type: object) -> str:
    """Why it is unknown whether a row reads a model_type exactly, and what would prove it; empty if
    it is known.

    `part_type` is the model_type of the part of a composite that the row reads.
    """
    kind = str(model_type)[:40]
    missing = _missing(title(row), str(model_type), str(part_type))
    command = f"`python -m tests.census {kind}` in a checkout compares it"
    return (
        f"unproved: {missing} was never compared with transformers' attention; {command}"
        if missing
        else ""
    )


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
