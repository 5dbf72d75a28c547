"""What was trained into a checkpoint: what its changes are, what they read and write, and which words they raise."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from weightscope.changes.all_tensors import TensorChanges, changes_with_directions
from weightscope.changes.counterparts import counterparts
from weightscope.changes.tensor import UNKNOWN_SIZE, Change
from weightscope.checkpoint.adapters import is_adapter
from weightscope.errors import CheckpointError, counted, printable
from weightscope.files import REPORT
from weightscope.findings import listed, spans
from weightscope.learned.changed_matrices import INTRUDER, TOP, Update, updates_of
from weightscope.learned.spaces import Overlap, Shared, overlap, shared_directions
from weightscope.learned.words import Words, why_no_words, words
from weightscope.model import Model, TensorsOnly, open_tensors
from weightscope.progress import bar, progress_shown
from weightscope.provenance import Provenance
from weightscope.results import Result, ShowsShapes
from weightscope.tables import Column, Table, as_json

Readable = Model | TensorsOnly
MOSTLY = 0.9  # of the changed matrices in layers, for what they are to be said of the training
CONVERTED = ("rounded", "quantised")  # kinds of change that a conversion makes
ROWS = ("tokens", "positions", "unembedding", "types")  # looked up by row: they have no directions
NAMED = 8  # words in the lead
BEYOND_CHANCE = 3.0  # times the overlap of random spaces, from which two tunes are said to collide


@dataclass(frozen=True)
class Training:
    """What the changes say of the training."""

    kind: str  # "low rank", "one direction", "full", "few rows", "vectors", "conversion", "none" or "mixed"
    rank: int | None  # of a LoRA: the most common rank
    evidence: str  # in words


@dataclass(frozen=True, eq=False, repr=False)
class Tune(ShowsShapes):
    """What was trained into one checkpoint."""

    name: str
    changes: TensorChanges
    training: Training
    updates: Sequence[Update]  # of every matrix that changed
    shared: Sequence[Shared]
    words: Words | None
    no_words: str  # why there are none

    @property
    def looked_at(self) -> list[Update]:
        """The matrices in which intruder dimensions were looked for."""
        return [update for update in self.updates if update.intruders]

    @property
    def intruders(self) -> int:
        """How many intruder dimensions they have together."""
        return sum(update.intruders.count for update in self.looked_at if update.intruders)

    @property
    def lead(self) -> str:
        """How it was trained, how far it moved, and the words that rose."""
        name = printable(self.name)
        matrices = [update for update in self.updates if np.isfinite(update.change)]
        how = {
            "low rank": f"was trained by a low-rank update, as a LoRA, of rank {self.training.rank}",
            "one direction": "was edited along one direction", "full": "was trained in full",
            "few rows": "changed in a few rows of its embeddings only", "vectors": "changed in biases and norms only",
            "conversion": "was rounded or quantised; what else was trained does not show",
            "none": "holds the base's values: nothing was trained",
            "mixed": "changed in several ways",
        }[self.training.kind]  # fmt: skip
        sizes = spread_of(matrices)
        parts = [f"{name} {how} ({self.training.evidence}{f'; {sizes}' if sizes else ''})."]
        if self.looked_at:
            text = (
                f"{counted(self.intruders, 'intruder dimension')} in {counted(len(self.looked_at), 'changed matrix')}"
            )
            parts.append(f"{text.replace('matrixs', 'matrices')}.")
        if self.words:
            parts.append(f"Tokens that it says more often: {' '.join(map(repr, self.words.names[:NAMED]))}.")
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Its part of learned.json."""
        training = {"kind": self.training.kind, "rank": self.training.rank, "evidence": self.training.evidence}
        words = [] if self.words is None else [
            {"token": name, "id": int(token), "before": float(self.words.before[token]),
             "after": float(self.words.after[token])}
            for name, token in zip(self.words.names, self.words.top, strict=True)
        ]  # fmt: skip
        return {
            "name": self.name, "training": training, "changed": len(self.updates),
            "intruders": {"count": self.intruders, "matrices": len(self.looked_at), "top": TOP, "below": INTRUDER},
            "shared": [
                {"side": each.side, "strength": each.strength, "chance": each.chance, "matrices": len(each.matrices),
                 "layers": list(each.layers)} for each in self.shared
            ],
            "words": words, "no_words": self.no_words,
        }  # fmt: skip


def spread_of(updates: Sequence[Update]) -> str:
    """`relative change 0.01 to 0.02`; empty without updates."""
    if not updates:
        return ""
    sizes = [f"{size:.2g}" for size in (min(u.change for u in updates), max(u.change for u in updates))]
    return f"relative change {' to '.join(dict.fromkeys(sizes))}"


@dataclass(frozen=True, eq=False, repr=False)
class Learned(Result):
    """What was trained into one tune of a base, or several. `tunes` has one entry each, `overlaps` one per pair."""

    base: str
    tunes: Sequence[Tune]
    overlaps: dict[tuple[str, str], list[Overlap]]
    provenance: Provenance

    FIGURE: ClassVar[str] = "learned.figures:learned_figure"
    PAGE: ClassVar[str] = "learned.page:write_learned_page"
    TABLES: ClassVar[dict[str, Callable[["Learned"], Any]]] = {
        "learned.json": lambda learned: learned.as_json(),
        "updates.csv": lambda learned: learned.table,
        "words.csv": lambda learned: learned.word_table,
        "shared.csv": lambda learned: learned.shared_table,
        "overlaps.csv": lambda learned: learned.overlap_table,
        "directions.npz": lambda learned: learned.directions,
    }
    FILES: ClassVar[tuple[str, ...]] = (*TABLES, *REPORT, "learned.png", "learned.svg", "learned.figure.csv")

    @property
    def about(self) -> str:
        """The base and its tunes."""
        return f"{self.base} and {listed([tune.name for tune in self.tunes], 3)}"

    @property
    def lead(self) -> str:
        """What was trained into each tune, and whether they collide."""
        return " ".join([*(tune.lead for tune in self.tunes), *self._collisions()])

    def _collisions(self) -> list[str]:
        """A sentence for each pair of tunes."""
        sentences = []
        for (a, b), each in self.overlaps.items():
            pair = f"{printable(a)} and {printable(b)}"
            if not each:
                sentences.append(f"{pair} change no matrix in common.")
                continue
            mean = means(each)
            collide = any(mean[side] >= BEYOND_CHANCE * mean[f"chance_{side}"] for side in ("reads", "writes"))
            parts = [f"{side} {mean[side]:.0%} (random {mean[f'chance_{side}']:.0%})" for side in ("reads", "writes")]
            where = f"{'collide' if collide else 'do not collide'} in the {len(each)} matrices that both change"
            sentences.append(
                f"{pair} {where}: overlap of {' and '.join(parts)}; their changes have cosine {mean['cosine']:.2g}."
            )
        return sentences

    @cached_property
    def table(self) -> Table:
        """One row per changed matrix; its csv() is updates.csv."""
        rows = [
            (tune.name, each.label, each.role, np.nan if each.layer is None else each.layer, each.change,
             np.nan if each.rank is None else each.rank, *_first(each), each.stable_rank, each.noise,
             each.n_directions, *_intruders(each))
            for tune in self.tunes for each in tune.updates
        ]  # fmt: skip
        return Table.of_rows(COLUMNS, rows)

    @cached_property
    def word_table(self) -> Table | None:
        """One row per listed token; its csv() is words.csv."""
        rows = [
            (tune.name, rank, int(token), name, tune.words.before[token], tune.words.after[token])
            for tune in self.tunes if tune.words
            for rank, (token, name) in enumerate(zip(tune.words.top, tune.words.names, strict=True), 1)
        ]  # fmt: skip
        return Table.of_rows(WORD_COLUMNS, rows) if rows else None

    @cached_property
    def shared_table(self) -> Table | None:
        """One row per direction that matrices of several layers share; its csv() is shared.csv."""
        rows = [(tune.name, each.side, each.strength, each.chance, len(each.matrices), spans(each.layers))
                for tune in self.tunes for each in tune.shared]  # fmt: skip
        return Table.of_rows(SHARED_COLUMNS, rows) if rows else None

    @cached_property
    def overlap_table(self) -> Table | None:
        """One row per matrix that two tunes change; its csv() is overlaps.csv."""
        rows = [(a, b, each.label, each.reads, each.writes, each.chance_reads, each.chance_writes, each.cosine)
                for (a, b), pairs in self.overlaps.items() for each in pairs]  # fmt: skip
        return Table.of_rows(PAIR_COLUMNS, rows) if rows else None

    @property
    def directions(self) -> dict[str, np.ndarray] | None:
        """Singular values and vectors of each change by tune and matrix, for directions.npz."""
        arrays = {}
        for i, tune in enumerate(self.tunes):
            for each in tune.updates:
                for what in ("s", "written", "read"):
                    arrays[f"{i} {each.label} {what}"] = getattr(each, what).astype(np.float32)
        return arrays or None

    def printed(self) -> list[str | Table]:
        """What the terminal shows, from top to bottom."""
        parts: list[str | Table] = [*(tune.lead for tune in self.tunes), *self._collisions()]
        parts += [f"No words for {printable(tune.name)}: {tune.no_words}." for tune in self.tunes if tune.no_words]
        return [*parts, self.most_changed(12)] if len(self.table) else parts

    def most_changed(self, most: int) -> Table:
        """The matrices that changed most."""
        order = np.argsort(-np.nan_to_num(self.table["change"], nan=0.0, posinf=1e9), kind="stable")[:most]
        return self.table.take([int(i) for i in order])

    def shown(self) -> list[Table]:
        """The matrices that changed most."""
        return [self.most_changed(12)]

    def as_json(self) -> dict[str, Any]:
        """What `weightscope learned --json` prints and learned.json holds."""
        pairs = [
            {"a": a, "b": b, "matrices": len(each)} | (means(each) if each else dict.fromkeys(OVERLAP_COLUMNS))
            for (a, b), each in self.overlaps.items()
        ]
        tunes = [tune.as_json() for tune in self.tunes]
        return dict(
            as_json(self.provenance.envelope(self.lead) | {"base": self.base, "tunes": tunes, "overlaps": pairs})
        )


OVERLAP_COLUMNS = ("reads", "writes", "chance_reads", "chance_writes", "cosine")
COLUMNS = (
    Column("tune"), Column("matrix"), Column("role"), Column("layer", format=".0f"),
    Column("change", symbol="$‖ΔW‖/‖W‖$", meaning="Frobenius norm of the change, relative to the base."),
    Column("rank", meaning="Of the change, where it is low.", format=".0f"),
    Column("sigma1", symbol="$σ_1(ΔW)$", meaning="Largest singular value of the change."),
    Column("first_share", symbol="first direction", meaning="Its share of the change's energy."),
    Column("stable_rank", symbol="stable rank", meaning="$‖ΔW‖_F^2 / σ_1^2$."),
    Column("noise", meaning="Spectral norm that rounding to the stored dtype leaves."),
    Column("directions", meaning="How many of the first 16 are more than rounding.", format=".0f"),
    Column("intruders", format=".0f",
           meaning="Intruder dimensions among the first 10; empty where they were not looked for."),
    Column("least_cosine", symbol="least cosine", meaning="Of the first 10 singular vectors with any of the base's."),
    Column("principal", meaning="The change's energy in the base's principal directions, over what chance gives."),
    Column("drift", meaning="How far the base's leading singular values moved, relative."),
)  # fmt: skip
WORD_COLUMNS = (
    Column("tune"), Column("rank"), Column("token_id", symbol="id"), Column("token"),
    Column("before", meaning="Mean probability in the base, after random tokens."),
    Column("after", meaning="The same in the tune."),
)  # fmt: skip
SHARED_COLUMNS = (
    Column("tune"), Column("side"),
    Column("strength", meaning="Mean squared cosine with the leading directions of each matrix."),
    Column("chance", meaning="The largest that random directions reach."),
    Column("matrices", meaning="How many have it."), Column("layers"),
)  # fmt: skip
PAIR_COLUMNS = (
    Column("a"), Column("b"), Column("matrix"),
    Column("reads", meaning="Mean squared cosine of the spaces that both read; 1 for one inside the other."),
    Column("writes", meaning="The same of the spaces that both write."),
    Column("chance_reads", meaning="Of random spaces."), Column("chance_writes", meaning="Of random spaces."),
    Column("cosine", meaning="Of the two changes: 1 where they add up, -1 where they cancel."),
)  # fmt: skip


def means(overlaps: Sequence[Overlap]) -> dict[str, float]:
    """The mean of each number over matrices."""
    return {name: float(np.mean([getattr(each, name) for each in overlaps])) for name in OVERLAP_COLUMNS}


def _first(update: Update) -> tuple[float, float]:
    return float(update.s[0]), update.first_share


def _intruders(update: Update) -> tuple[float, float, float, float]:
    each = update.intruders
    return (np.nan,) * 4 if each is None else (each.count, float(each.cosines.min()), each.principal, each.drift)


def learned(
    base: Readable | str | Path, *tuned: Readable | str | Path, exact: bool = False, progress: bool = False
) -> Learned:
    """Find out what was trained into tunes of a base: directions, intruder dimensions, words, how it was done.

    Parameters
    ----------
    base : Model, str or Path
        A model, or what `open_model` opens.
    *tuned : Model, str or Path
        Tunes of the base, or LoRA adapters for it.
    exact : bool
        Look for intruder dimensions in matrices of any size.
    progress : bool
        Show a progress bar.

    Raises
    ------
    CheckpointError
        One of them cannot be read, or has no matrix in common with the base.

    Examples
    --------
    >>> import weightscope as ws
    >>> ws.learned("embedded", "embedded").tunes[0].training.kind
    'none'
    """
    if not tuned:
        raise CheckpointError("`learned` needs a base and at least one tune")
    of_base = base if isinstance(base, str | Path) else base.checkpoint.folder
    tunes = [open_tensors(each, base=of_base if is_adapter(str(each)) else None)
             if isinstance(each, str | Path) else each for each in tuned]  # fmt: skip
    base = open_tensors(base) if isinstance(base, str | Path) else base
    with progress_shown(progress):
        results = [tune_of(base, each, exact=exact) for each in tunes]
    overlaps = {}
    for a, b in combinations(results, 2):
        of_a, of_b = ({update.label: update for update in tune.updates} for tune in (a, b))
        overlaps[a.name, b.name] = [overlap(of_a[label], of_b[label]) for label in of_a if label in of_b]
    provenance = Provenance.of(base.checkpoint, *(each.checkpoint for each in tunes))
    return Learned(base.name, results, overlaps, provenance)


def tune_of(base: Readable, tuned: Readable, *, exact: bool = False, with_words: bool = True) -> Tune:
    """What was trained into one checkpoint."""
    entries = [entry for entry in counterparts(base, tuned) if entry.pair()]
    if not any(len(entry.a.shape) > 1 for entry in entries if entry.a):
        raise CheckpointError("has no matrix in common with the base", file=tuned.name)
    pairs = [pair for entry in entries if (pair := entry.pair())]
    changes = TensorChanges(changes_with_directions(base, tuned, pairs))
    moved = [(entry, change) for entry, change in zip(entries, changes.changes, strict=True) if _is_update(change)]
    updates = [
        update
        for entry, change in bar(moved, "directions", "matrix")
        for update in updates_of(entry, change, exact=exact)
    ]
    why = "its heads are not read"
    raised = None
    if not with_words:
        why = "they were not asked for"
    elif isinstance(base, Model) and isinstance(tuned, Model):
        why = why_no_words(base, tuned) if updates else "nothing changed"
        raised = None if why else words(base, tuned)
    training = training_of(changes.changes, tuned.checkpoint.note)
    return Tune(tuned.name, changes, training, updates, shared_directions(updates), raised, why)


def _is_update(change: Change) -> bool:
    """Whether directions are looked for in a change: a matrix outside of tables of rows, of one shape, and finite."""
    return (
        change.is_matrix and change.kind not in (*UNKNOWN_SIZE, "identical", "not finite", "resized")
        and change.role not in ROWS and bool(np.isfinite(change.moved))
    )  # fmt: skip


def training_of(changes: Sequence[Change], note: str = "") -> Training:
    """How a tune was trained: its changes, and what an adapter's own files say.

    A LoRA's change has its rank exactly up to rounding, whatever is merged; training all weights never gives a rank
    below half of a matrix. Reinforcement and supervised learning are not told apart (see docs/learned.md).
    """
    matrices = [each for each in changes if each.is_matrix and each.kind not in ("identical", "missing", "new")]
    in_layers = [each for each in matrices if each.role not in ("tokens", "unembedding", "positions")]
    kinds = Counter(each.kind for each in in_layers)
    total = sum(kinds.values())
    ranks = Counter(each.rank for each in in_layers if each.kind in ("low rank", "one direction") and each.rank)
    if note:
        return Training("low rank", ranks.most_common(1)[0][0] if ranks else None, note)
    if not any(each.kind != "identical" for each in changes):
        return Training("none", None, "no tensor changed")
    if not total:
        kind = "few rows" if any(each.kind == "few rows" for each in matrices) else "vectors"
        return Training(kind if not matrices or kind == "few rows" else "full", None, "no matrix in a layer changed")
    if kinds["one direction"] >= MOSTLY * total:
        evidence = f"{kinds['one direction']} of {total} changed matrices in layers changed along one direction"
        return Training("one direction", 1, evidence)
    low = kinds["low rank"] + kinds["one direction"]
    if low >= MOSTLY * total:
        evidence = f"the change of {low} of {total} changed matrices in layers has rank {spans(sorted(ranks))}"
        return Training("low rank", ranks.most_common(1)[0][0], evidence)
    if sum(kinds[kind] for kind in CONVERTED) >= MOSTLY * total:
        return Training("conversion", None, f"{total} matrices were rounded or quantised, which hides what was trained")
    if kinds["changed"] >= MOSTLY * total:
        evidence = f"the change of {kinds['changed']} of {total} changed matrices in layers has no low rank"
        return Training("full", None, evidence)
    parts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return Training("mixed", None, f"matrices in layers changed in several ways: {parts}")
