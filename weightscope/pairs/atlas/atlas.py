"""An atlas of many checkpoints: fingerprints, families with trees, neighbours of heads, errors.

An engine gets a task per checkpoint, then one per pair of relatives that are small enough to be
read whole. What is finished is kept; nothing that is wrong with a checkpoint stops the run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.engine import Engine, Finished, ThisProcess
from weightscope.core.errors import CheckpointError, counted, one_line, printable
from weightscope.core.files import Files, OutputFolder
from weightscope.core.progress import bar, phase
from weightscope.core.results import Result
from weightscope.core.tables import Link, Table, as_json, column, columns_of
from weightscope.model.sources import Source, as_file_name, lines_of
from weightscope.pairs.atlas.descent import Direction, direction_of, find_direction
from weightscope.pairs.atlas.families import FamilyTree, TreeEdge, families_of
from weightscope.pairs.atlas.neighbours import Neighbours, neighbours_of
from weightscope.pairs.atlas.parquet import check_parquet, write_parquet
from weightscope.pairs.atlas.prints import Outline, Print, make_print
from weightscope.pairs.atlas.sampling import MOST_WEIGHTS
from weightscope.pairs.atlas.store import Store

PROVED_BYTES = 100_000_000  # size of checkpoints that are read whole for their order
PAGES = "checkpoints"  # folder of the pages
LOADED = 256  # fingerprints in memory
TABLES: dict[str, Callable[["Atlas"], Any]] = {
    "checkpoints.csv": lambda atlas: atlas.checkpoints,
    "families.csv": lambda atlas: atlas.family_table,
    "tree.csv": lambda atlas: atlas.tree,
    "errors.csv": lambda atlas: atlas.errors,
    "atlas.json": lambda atlas: atlas.as_json(),
}
HEADS = "heads.parquet"
RESULTS = (*TABLES, HEADS, "index.html", "index.json")
TWICE = "is in the list twice; the first line counts"


class ListedCheckpoint(NamedTuple):
    """A checkpoint of the list."""

    name: str  # its line in the list
    source: Source
    page: str  # name of its page, without the suffix


class CheckpointRow(NamedTuple):
    """A checkpoint of the atlas, as a row of checkpoints.csv."""

    name: Link = column(symbol="checkpoint")
    family: int = column()
    relatives: int = column("Other checkpoints of its family.")
    architecture: str = column()
    layers: int = column()
    heads: int = column()
    kv_heads: int = column(symbol="KV heads")
    d_model: int = column(symbol="width")
    dtypes: str = column()
    bytes: int = column("Of its tensors.")
    weights_read: int = column(symbol="weights read")
    heads_read: int = column(symbol="heads read")
    read: str = column("Whether all heads were read, or some.")
    commit: str = column()


class FamilyRow(NamedTuple):
    """A family of several checkpoints, as a row of families.csv."""

    family: int = column()
    checkpoints: int = column()
    architectures: str = column()
    first: str = column(
        "The one that all others are proved to come from; empty where that is not proved."
    )
    names: str = column()


class Likeness(NamedTuple):
    """Likeness of two relatives, as columns of tree.csv and of the pages of checkpoints."""

    by: str = column(
        "What joins the pair: bits of blocks, heads, or the order of value dimensions."
    )
    bits: float = column("Bits of 16 in which blocks of W_K differ on average.", format=".2f")
    likeness: float = column(
        "Mean cosine of the maps of counterpart heads; by values, mean correlation of ranks.",
        format=".3f",
    )
    p: float = column(
        "By values, the chance that any strangers of the list are this alike.", format=".1e"
    )


class TreeRow(NamedTuple):
    """An edge of a family's tree, as a row of tree.csv."""

    family: int = column()
    a: Link = column()
    b: Link = column()
    alike: Likeness = columns_of(Likeness)  # type: ignore[assignment]
    first: str = column("Which of the two came first, where the weights prove it.")
    how: str = column("How the other one can be recomputed from it.")
    differs: str = column("What differs, of pairs that were read whole.")


class ErrorRow(NamedTuple):
    """A checkpoint that could not be read, as a row of errors.csv."""

    name: str = column(symbol="checkpoint")
    error: str = column(symbol="what was wrong")


@dataclass(frozen=True, eq=False, repr=False)
class Atlas(Result):
    """An atlas of checkpoints; `members`, `outlines` and `family_of` are in one order."""

    PAGE = "site:write_site"
    TABLES, FILES = TABLES, RESULTS

    members: list[ListedCheckpoint]
    outlines: list[Outline]
    load: Callable[[int], Print] = field(repr=False)  # the whole fingerprint, from the disk
    families: list[FamilyTree]
    directions: dict[tuple[int, int], Direction]
    relatives: Neighbours  # nearest heads of other checkpoints
    strangers: Neighbours  # nearest heads of other families
    problems: dict[str, str]  # errors by the names of the others
    withdrawn: int = 0  # number of the list that are not shown
    fetched: int = 0  # bytes that this run fetched
    made: int = 0  # fingerprints that this run made
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def about(self) -> str:
        return f"{counted(len(self.members), 'checkpoint')}, {counted(self.n_heads, 'head')}"

    @property
    def n_heads(self) -> int:
        """Heads that were read, of all checkpoints."""
        return sum(len(each.layer) for each in self.outlines)

    @property
    def lead(self) -> str:
        """Numbers of checkpoints, heads, families and failures, in one sentence."""
        several = [family for family in self.families if len(family.members) > 1]
        related = sum(len(family.members) for family in several)
        ordered = sum(bool(each.came_first) for each in self.directions.values())
        alone = counted(len(self.members) - related, "checkpoint")
        pairs = counted(len(self.tree), "pair")
        text = f"{self.about}: {related:,} are in {_families(len(several))} of relatives"
        text += f", {alone} alone. Of {pairs} in their trees, {ordered:,} show which came first."
        return text + (f" {len(self.problems):,} could not be read." if self.problems else "")

    @cached_property
    def family_of(self) -> list[int]:
        """The number of each checkpoint's family, from 1."""
        number = dict[int, int]()
        for k, family in enumerate(self.families, 1):
            number |= dict.fromkeys(family.members, k)
        return [number[place] for place in range(len(self.members))]

    def link(self, place: int, within: str = "") -> Link:
        """A link to a checkpoint's page."""
        return Link(f"{within}{self.members[place].page}.html", self.members[place].name)

    @cached_property
    def checkpoints(self) -> Table:
        """One row per checkpoint."""
        count_of = Counter(self.family_of)
        rows = []
        for place, each in enumerate(self.outlines):
            about, family = each.about, self.family_of[place]
            row = CheckpointRow(
                name=self.link(place, f"{PAGES}/"),
                family=family,
                relatives=count_of[family] - 1,
                architecture=about["family"],
                layers=about["layers"],
                heads=about["heads"],
                kv_heads=about["kv_heads"],
                d_model=about["d_model"],
                dtypes=", ".join(about["dtypes"]),
                bytes=about["bytes"],
                weights_read=about["weights_read"],
                heads_read=len(each.layer),
                read="all" if each.is_whole else "some",
                commit=each.commit,
            )
            rows.append(row)
        return Table.of(CheckpointRow, rows)

    @cached_property
    def family_table(self) -> Table:
        """One row per family of several checkpoints."""
        rows = []
        for number, family in enumerate(self.families, 1):
            places = family.members
            if len(places) < 2:
                continue
            types = dict.fromkeys(self.outlines[place].about["family"] for place in places)
            later = {self.later(edge) for edge in family.edges} - {None}
            first = [place for place in places if place not in later]
            is_rooted = len(first) == 1 and len(later) == len(places) - 1
            root = self.members[first[0]].name if is_rooted else ""
            names = ", ".join(self.members[place].name for place in places)
            rows.append(FamilyRow(number, len(places), ", ".join(types), root, names))
        return Table.of(FamilyRow, rows)

    def direction(self, edge: TreeEdge) -> Direction:
        """The older of two, as far as it is known."""
        return self.directions.get((edge.first, edge.second), Direction())

    def later(self, edge: TreeEdge) -> int | None:
        """The later one of two, where the weights prove it."""
        ends = {"first": edge.second, "second": edge.first, "": None}
        return ends[self.direction(edge).came_first]

    @cached_property
    def tree(self) -> Table:
        """One row per edge of the families' trees."""
        rows = []
        for number, family in enumerate(self.families, 1):
            for edge in family.edges:
                direction = self.direction(edge)
                a, b = (self.link(place, f"{PAGES}/") for place in edge[:2])
                first = {"first": a.text, "second": b.text}.get(direction.came_first, "")
                alike = Likeness(edge.by, edge.bits, edge.likeness, edge.p)
                rows.append(TreeRow(number, a, b, alike, first, *direction[1:]))
        return Table.of(TreeRow, rows)

    @cached_property
    def errors(self) -> Table:
        """One row per checkpoint that could not be read."""
        return Table.of(ErrorRow, sorted(self.problems.items()))

    def heads_of(self, place: int) -> dict[str, Any]:
        """The heads of a checkpoint that were read: columns by name."""
        each, start = self.outlines[place], self.starts[place]
        s, rows = self.load(place).sketches, slice(start, start + len(each.layer))
        share = np.exp(s.spectra[..., 0].astype(np.float32))  # (N, 2) sigma_1 over the norm
        columns: dict[str, Any] = {
            "checkpoint": self.members[place].name,
            "commit": each.commit,
            "family": np.full(len(s.layer), self.family_of[place], np.int32),
            "layer": s.layer.astype(np.int32),
            "head": s.head.astype(np.int32),
            "kv_head": s.kv_head.astype(np.int32),
            "qk_frobenius": s.norms[:, 0],
            "qk_sigma1": share[:, 0] * s.norms[:, 0],
            "qk_stable_rank": 1 / share[:, 0] ** 2,
        }
        known = np.float32(nan if each.is_in_part else 1)  # norms of parts of W_VO say nothing
        columns["vo_frobenius"] = s.norms[:, 1] * known
        columns["vo_sigma1"] = share[:, 1] * s.norms[:, 1] * known
        columns["vo_stable_rank"] = known / share[:, 1] ** 2
        for name, neighbours in (("relative", self.relatives), ("stranger", self.strangers)):
            nearest = neighbours.place[rows]
            owner = np.searchsorted(self.starts, nearest, side="right") - 1
            layer = np.where(nearest >= 0, self.all_layers[nearest], -1)
            head = np.where(nearest >= 0, self.all_heads[nearest], -1)
            columns[name] = [self.members[k].name if k >= 0 else "" for k in owner.tolist()]
            columns[f"{name}_layer"] = layer.astype(np.int32)
            columns[f"{name}_head"] = head.astype(np.int32)
            columns[f"{name}_likeness"] = neighbours.likeness[rows].astype(np.float32)
        return columns

    @cached_property
    def starts(self) -> np.ndarray:
        """The place among all heads of each checkpoint's first one."""
        return np.cumsum([0, *(len(each.layer) for each in self.outlines)])[:-1]

    @cached_property
    def all_layers(self) -> np.ndarray:
        """The layers of all heads."""
        return np.concatenate([np.zeros(0, int), *(each.layer for each in self.outlines)])

    @cached_property
    def all_heads(self) -> np.ndarray:
        """The indices of all heads in their layers."""
        return np.concatenate([np.zeros(0, int), *(each.head for each in self.outlines)])

    def write_tables(self, files: Files) -> None:
        """Write the tables, and all heads as Parquet, a checkpoint at a time."""
        super().write_tables(files)
        facts = {"weightscope": self.provenance.version, "command": self.provenance.command or ""}
        with files.open(HEADS) as file:
            write_parquet(file, map(self.heads_of, range(len(self.members))), facts)

    def printed(self) -> list[str | Table]:
        """The first sentence, the largest families and the errors, for the terminal."""
        lines: list[str | Table] = [self.lead]
        if len(self.family_table):
            table = self.family_table.select("family", "checkpoints", "architectures", "first")
            lines.append(_beginning(table))
        if self.problems:
            lines.append(_beginning(self.errors))
        return lines

    def shown(self) -> list[Table]:
        """The families."""
        return [self.family_table]

    def as_json(self) -> dict[str, Any]:
        """The record that `weightscope atlas --json` prints and atlas.json holds."""
        record = {
            "checkpoints": len(self.members),
            "heads": self.n_heads,
            "withdrawn": self.withdrawn,
            "families": self.family_table.records(),
            "tree": self.tree.records(),
            "errors": self.errors.records(),
            "made": self.made,
            "bytes_fetched": self.fetched,
        }
        return dict(as_json(self.provenance.envelope(self.lead) | record))


SHOWN = 20  # rows that the terminal shows


def _beginning(table: Table) -> Table:
    return table.take(range(min(SHOWN, len(table))))


def _families(count: int) -> str:
    return f"{count:,} {'family' if count == 1 else 'families'}"


# Making one


def members_of(
    names: Sequence[str], families: str | None = None
) -> tuple[list[ListedCheckpoint], dict[str, str]]:
    """The checkpoints of a list by its lines, and what is wrong with the other lines."""
    members, problems = list[ListedCheckpoint](), dict[str, str]()
    seen, taken = set[str](), set[str]()
    for name in names:
        try:
            source = Source.named(name, families=families)
        except CheckpointError as error:
            problems[name] = one_line(error)
            continue
        if name in seen or source.source in seen:
            problems[name] = TWICE
            continue
        seen |= {name, source.source}
        page = as_file_name(name.strip("/").replace("/", "--"))
        if page.casefold() in taken:
            page += f"-{sha256(name.encode()).hexdigest()[:8]}"
        taken.add(page.casefold())
        members.append(ListedCheckpoint(name, source, page))
    return members, problems


@dataclass(frozen=True)
class AtlasOptions:
    """Options of `make_atlas`."""

    most: int = MOST_WEIGHTS  # weights read of a checkpoint
    proved: int = PROVED_BYTES  # bytes of a checkpoint that is read whole for a direction
    families: str | None = None  # file of rows of architectures
    resume: bool = False  # keep what an earlier run has finished
    withdraw: tuple[str, ...] = ()  # checkpoints to remove


def atlas(
    sources: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    megabytes: int = MOST_WEIGHTS // 500_000,
    prove: int = PROVED_BYTES // 1_000_000,
    resume: bool = False,
) -> Atlas:
    """Map many checkpoints: families with their trees, and one table of all heads.

    Parameters
    ----------
    sources : sequence of str or Path, or str or Path
        What `open_model` opens, each by its name, or a text file with one on each line.
    out : str or Path
        Folder that is written as `weightscope atlas` writes it.
    megabytes : int
        Attention weights to read of a checkpoint, in MB at 16 bits each.
    prove : int
        Read relatives of up to so many MB whole, to prove which came first.
    resume : bool
        Keep what an earlier run has finished, and fetch only what has changed.

    Raises
    ------
    CheckpointError
        The list cannot be read, the folder cannot be written to, or pyarrow is not installed.

    Examples
    --------
    >>> import weightscope as ws
    >>> from weightscope.core.files import scratch_folder
    >>> with scratch_folder() as out:
    ...     ws.atlas(["embedded"], out)
    Atlas(1 checkpoint, 24 heads)
    """
    options = AtlasOptions(megabytes * 500_000, prove * 1_000_000, None, resume)
    names = sources if isinstance(sources, str | Path) else [str(source) for source in sources]
    if not names:
        raise CheckpointError("the list names no source")
    with ThisProcess() as engine:
        return make_atlas(names, Path(out), engine, options)


def make_atlas(
    listing: Sequence[str] | str | Path | None,
    out: Path,
    engine: Engine,
    options: AtlasOptions = AtlasOptions(),
) -> Atlas:
    """Make an atlas of the checkpoints in a list and write it into a folder.

    Without a list, the fingerprints kept by the last run are written again, less the withdrawn
    ones; nothing is fetched.

    Raises
    ------
    CheckpointError
        The list cannot be read, the folder cannot be written to, or the engine has failed.
    """
    check_parquet()
    names = lines_of(Path(listing)) if isinstance(listing, str | Path) else listing
    store = Store(out, options.most, options.families)
    with OutputFolder(out, names=RESULTS) as folder:
        if names is not None and not options.resume and len(store):
            kept = f"has {counted(len(store), 'fingerprint')} of an earlier run"
            how = "`resume` keeps them, or choose another folder"
            raise CheckpointError(f"{kept}; {how}", file=out)
        earlier, errors = store.listed
        wanted = earlier if names is None else names
        _withdraw(store, options.withdraw, {*wanted, *earlier})
        withdrawn = store.withdrawn
        shown = [name for name in wanted if not store.is_withdrawn(name, withdrawn)]
        members, problems = members_of(shown, options.families)
        if names is None:
            prints = _kept(members, store, errors)
        else:
            prints = _made(members, store, engine, options)
        problems |= prints.problems
        store.remember(shown, problems)
        members = [each for each in members if each.name in prints.outlines]
        outlines = [prints.outlines[each.name] for each in members]
        atlas = _of(members, outlines, _from(store, members), problems)
        # pages show the command, and it names withdrawn checkpoints
        command = None if options.withdraw else atlas.provenance.command
        atlas = replace(
            atlas,
            fetched=prints.fetched,
            made=prints.n_made,
            provenance=replace(atlas.provenance, command=command),
            withdrawn=len(wanted) - len(shown),
            directions=_directions(atlas, store, engine, options.proved, anew=names is not None),
        )
        atlas.write_files(folder)
    return atlas


class Fingerprints(NamedTuple):
    """Outlines of fingerprints by name, and the errors of the others."""

    outlines: dict[str, Outline]
    problems: dict[str, str]
    fetched: int = 0  # bytes
    n_made: int = 0  # fingerprints that this run made


def _kept(
    members: Sequence[ListedCheckpoint], store: Store, errors: Mapping[str, str]
) -> Fingerprints:
    """The fingerprints that an earlier run kept."""
    outlines, problems = dict[str, Outline](), dict[str, str]()
    for member in members:
        kept = store.get(member.name)
        if kept is None:
            problems[member.name] = errors.get(member.name, "was not read")
        else:
            outlines[member.name] = kept.outline()
    return Fingerprints(outlines, problems)


def _made(
    members: Sequence[ListedCheckpoint], store: Store, engine: Engine, options: AtlasOptions
) -> Fingerprints:
    """Make the fingerprints that are not kept, or of checkpoints that have changed."""
    outlines, problems = dict[str, Outline](), dict[str, str]()
    fetched, n_made = 0, 0

    def tasks() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
        for member in members:
            kept = store.get(member.name)
            state = kept.sketches.about["state"] if kept else ""
            yield member.name, make_print, (member.source, state, options.most)

    with bar(what="checkpoints", unit="checkpoint", total=len(members)) as shown:
        for ended in engine.each(tasks()):
            shown.update()
            try:
                is_kept = ended.error is None and ended.value is None
                kept = store.get(ended.key) if is_kept else None
                if kept is None:
                    arrays, size = _value_of(ended)
                    kept = Print.of_arrays(arrays, printable(ended.key))
                    store.put(ended.key, arrays)
                    fetched, n_made = fetched + max(0, size), n_made + 1
                outlines[ended.key] = kept.outline()
            except CheckpointError as error:
                problems[ended.key] = one_line(error)
    return Fingerprints(outlines, problems, fetched, n_made)


def _withdraw(store: Store, wanted: Sequence[str], known: set[str]) -> None:
    """Withdraw checkpoints; a name that no list has is refused."""
    for name in wanted:
        if name not in known and not store.is_withdrawn(name, store.withdrawn):
            where = "in the list or in what was kept"
            raise CheckpointError(f"no checkpoint '{printable(name)}' {where}, to withdraw")
    if wanted:
        store.withdraw(wanted)


def _value_of(ended: Finished) -> Any:
    """A task's value; any exception becomes one clear error."""
    if ended.error is None:
        value = ended.value
        if not isinstance(value, tuple) or len(value) != 2 or type(value[1]) is not int:
            raise CheckpointError("a worker answers with something else than a fingerprint")
        return value
    if isinstance(ended.error, CheckpointError):
        raise ended.error
    problem = f"cannot be read ({type(ended.error).__name__}: {one_line(ended.error)})"
    raise CheckpointError(problem) from ended.error


def _from(store: Store, members: Sequence[ListedCheckpoint]) -> Callable[[int], Print]:
    """A function that reads fingerprints from the disk and keeps a few in memory."""

    @lru_cache(maxsize=LOADED)
    def load(place: int) -> Print:
        kept = store.get(members[place].name)
        if kept is None:
            problem = "a fingerprint was removed by another run; run one at a time"
            raise CheckpointError(problem, file=store.folder)
        return kept

    return load


def _of(
    members: list[ListedCheckpoint],
    outlines: list[Outline],
    load: Callable[[int], Print],
    problems: Mapping[str, str],
) -> Atlas:
    """The atlas of these fingerprints, without directions."""
    with phase("finding families"):
        families = families_of(outlines, load)
    nothing = Neighbours(np.empty(0, int), np.empty(0))
    provenance = Provenance().of_all(each.read for each in outlines)
    # neighbours follow from families
    atlas = Atlas(
        *(members, outlines, load, families),
        directions={},
        relatives=nothing,
        strangers=nothing,
        problems=dict(problems),
        provenance=provenance,
    )
    relatives, strangers = neighbours_of(outlines, load, range(len(outlines)), atlas.family_of)
    return replace(atlas, relatives=relatives, strangers=strangers)


def _directions(
    atlas: Atlas, store: Store, engine: Engine, most: int, *, anew: bool
) -> dict[tuple[int, int], Direction]:
    """Find which came first of each small pair in the trees; look it up unless `anew`."""
    known, left = dict[tuple[int, int], Direction](), list[tuple[int, int]]()
    for pair in [(edge.first, edge.second) for family in atlas.families for edge in family.edges]:
        is_small = max(atlas.outlines[place].about["bytes"] for place in pair) <= most
        kept = store.direction(*_named(atlas, pair)) if is_small or not anew else None
        if kept is not None:
            known[pair] = kept
        elif is_small and anew:
            left.append(pair)

    def tasks() -> Iterator[tuple[tuple[int, int], Callable[..., Any], tuple[Any, ...]]]:
        for pair in left:
            sources = [atlas.members[place].source for place in pair]
            states = tuple(atlas.outlines[place].about["state"] for place in pair)
            yield pair, find_direction, (*sources, states)

    with bar(what="pairs", unit="pair", total=len(left)) as shown:
        for ended in engine.each(tasks()):
            shown.update()
            if ended.error is None:
                known[ended.key] = direction_of(ended.value)
                store.put_direction(_named(atlas, ended.key), known[ended.key])
    return known


def _named(atlas: Atlas, pair: tuple[int, int]) -> list[str]:
    """The key that a pair is kept under: both names and states."""
    key = []
    for place in pair:
        key += [atlas.members[place].name, atlas.outlines[place].about["state"]]
    return key
