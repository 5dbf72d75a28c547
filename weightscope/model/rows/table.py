"""The table of architectures: TOML files in this folder and the user's, and proofs of rows."""

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

# The built-in table: a file is parsed, and a row made from its stanza, when the row is asked for.

UNSUPPORTED = "unsupported.toml"
NETWORKS = "networks.json"  # modules around attention; written by tests.model.rows.make_networks
FIRST = ("gpt", "qwen", "llama")  # files whose rows come first
FIRST_ROWS = ("gpt2", "llama")  # rows that come first: of equally near rows the earlier is named


class Rows(Sequence[Family]):
    """The rows in a folder's files, each parsed once a row that its text names is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, File] = {}

    @cached_property
    def texts(self) -> dict[str, str]:
        """Text of each file, by its name."""
        files = {path.stem: path for path in sorted(self.folder.glob("*.toml"))}
        files = {stem: files[stem] for stem in FIRST} | files
        return {
            path.name: path.read_text(encoding="utf-8")
            for path in files.values()
            if path.name != UNSUPPORTED
        }

    @cached_property
    def unsupported(self) -> dict[str, str]:
        """Reasons why no row can describe an architecture, by model_type."""
        return tomllib.loads((self.folder / UNSUPPORTED).read_text(encoding="utf-8"))

    @cached_property
    def networks(self) -> dict[str, dict[str, list[str]]]:
        """Modules around attention by role, by title of the row whose models use them so."""
        return read_json(self.folder / NETWORKS)

    def file(self, name: str) -> File:
        if name not in self._files:
            self._files[name] = File(self.texts[name], self.folder / name, self.row, trusted=True)
        return self._files[name]

    def _naming(self, kind: str) -> list[str]:
        """Files with a stanza of this name, or that name it other than in `like`."""
        quoted = f'"{kind}"'

        def is_named(text: str) -> bool:
            if f"[{kind}" in text:
                return True
            lines = text.split("\n") if quoted in text else []
            return any(quoted in line for line in lines if line[:4] != "like")

        return [name for name, text in self.texts.items() if is_named(text)]

    def _stanzas(self, files: Iterable[str]) -> list[tuple[File, str]]:
        """Stanzas of these files, in order."""
        named = (self.file(name) for name in self.texts if name in files)
        stanzas = [
            (file, title)
            for file in named
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
        """Rows of these model_types or names, in order."""
        stanzas = self._stanzas({file for kind in kinds for file in self._naming(kind)})
        rows = (row for file, title in stanzas for row in file.named(title))
        return tuple(row for row in rows if not {row.name, *row.types}.isdisjoint(kinds))

    def of_gguf(self) -> tuple[Family, ...]:
        """Rows that read GGUF files."""
        files = [name for name, text in self.texts.items() if "\ngguf" in text]
        stanzas = self._stanzas(files)
        with_gguf = [(file, title) for file, title in stanzas if "gguf" in file.stanzas[title]]
        return tuple(next(file.named(title)) for file, title in with_gguf)

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
    """The start of a stanza, or of the first stage for a stage without a stanza."""
    place = text.find(f"\n[{title}]\n")
    return text.find(f"\n[{title[:-1]}1]\n") if place < 0 and ".stage" in title else place


FAMILIES = Rows(Path(__file__).parent)


# Rows that may read a checkpoint: from a given file, the table and the user's folder.

MOST_FILES = 1000  # files of rows in a user's folder


def own_folder() -> Path:
    """The folder of a user's rows: `families` in weightscope's configuration folder."""
    from click import get_app_dir  # a quarter of what opening a checkpoint imports

    return Path(get_app_dir("weightscope")) / "families"


def known_rows(
    families: str | Path | None = None, kinds: Collection[str] | None = None
) -> tuple[Family, ...]:
    """Rows of all or of some `kinds` (model_types or names); later rows do not repeat earlier ones.

    `families` is a file of rows, which come before the table's; a user's own come after.
    """
    given = () if families is None else read_rows(Path(families), FAMILIES.row)
    table = FAMILIES if kinds is None else FAMILIES.rows(frozenset(kinds))
    rows: list[Family] = []
    taken: set[tuple[str, str]] = set()
    for group in (given, table, _own_rows()):
        for row in group:
            types = tuple(kind for kind in row.types if (kind, row.tower) not in taken)
            if types:
                rows.append(row if types == row.types else replace(row, types=types))
        taken |= {(kind, row.tower) for row in group for kind in row.types}
    if kinds is None:
        return tuple(rows)
    return tuple(row for row in rows if not {row.name, *row.types}.isdisjoint(kinds))


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
    """One row per family and stack: name, model_types, stack, layout, special parts, origin."""
    rows = []
    for row in known_rows(families):
        stack = row.tower or ("text" if row.inputs.tokens else "vision")
        layout, origin = row.heads.layout.__name__, row.origin or "weightscope"
        special = ", ".join(_special(row))
        rows.append((row.name, " ".join(row.types), stack, layout, special, origin))
    return Table.of_rows(["family", "model_types", "stack", "layout", "special", "from"], rows)


def _special(row: Family) -> Iterator[str]:
    """Labels of the special parts of a row's attention."""
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


# Comparisons with transformers' own attention: in the census, and in the tests' tiny models. The
# census is read when the first checkpoint is opened, not when weightscope is imported.

RECORD = Path(__file__).parent / "architectures.csv"
# The same of types that only remote code has: tiny models after what other projects publish.
PUBLISHED = Path(__file__).parent / "published.csv"
OF = "# transformers "  # start of a census' first line, before the version
# model_types that the census does not have, each with a tiny model in `tests/model/rows/fixtures`.
IN_FIXTURES = ("squeezebert",)
# Caveat of rows that were not compared.
NOT_COMPARED = (
    "a comparison with transformers' own attention, which this row lacks for such a model"
)


def title(row: Family) -> str:
    """A row's title in the census: its name, and its tower if it has one."""
    return f"{row.name}.{row.tower}" if row.tower else row.name


def unproved(row: Family, model_type: object, part_type: object) -> str:
    """The reason why a row may not read a model_type exactly, with the way to prove it, or ""."""
    kind = str(model_type)[:40]
    if text := published().get((kind, title(row))):
        return f"proved against a tiny model after {text}, not against the code of '{kind}' itself"
    missing = _missing(title(row), str(model_type), str(part_type))
    if not missing:
        return ""
    command = f"`python -m tests.census {kind}` in a checkout compares it"
    return f"unproved: {missing} was never compared with transformers' attention; {command}"


def _missing(row: str, kind: str, part: str) -> str:
    """The type, or the stack of it, that was never found exact, in words."""
    if kind in IN_FIXTURES:
        return ""
    verdicts = census().get(kind, {})
    if not _any_exact(kind):
        return f"model_type '{kind[:40]}'"
    if row in verdicts:
        exact = "exact" in verdicts[row] <= {"exact", "refused"}
    else:  # parts that the type does not have by default; an older census does not name rows
        exact = not any(verdicts) or part in IN_FIXTURES or _any_exact(part)
    return "" if exact else f"the {row} stack of model_type '{kind[:40]}'"


def _any_exact(kind: str) -> bool:
    return any("exact" in verdicts for verdicts in census().get(kind, {}).values())


@lru_cache(None)
def census() -> Mapping[str, Mapping[str, set[str]]]:
    """Verdicts of the census by model_type and row."""
    verdicts: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in lines(RECORD):
        for row in (line.get("row") or "").split() or [""]:
            verdicts[line["type"]][row].add(line["verdict"])
    return verdicts


@lru_cache(None)
def published() -> Mapping[tuple[str, str], str]:
    """Texts after which a row was proved, by model_type and row."""
    exact = [line for line in lines(PUBLISHED) if line["verdict"] == "exact"]
    return {(line["type"], row): line["reason"] for line in exact for row in line["row"].split()}


def lines(path: Path) -> Iterable[dict[str, str]]:
    """Lines of a census by column."""
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
        f"Checked against the eager attention of transformers{release} on tiny random models of "
        f"{len(types)} model types: {counts['exact']} of {sum(counts.values())} attention stacks "
        f"match exactly, {counts['refused']} are refused, {wrong} wrong{unseen}. {unbuilt} more "
        "types have no attention or cannot be built this small."
    )
