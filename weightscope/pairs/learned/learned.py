"""Training that a checkpoint shows: changes, what they read and write, words that they raise."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weightscope.checkpoint.adapters.diffusion import is_adapter
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted, naming, printable
from weightscope.core.files import REPORT
from weightscope.core.progress import bar, progress_shown
from weightscope.core.results import Result, ShowsShapes
from weightscope.core.tables import Table, as_json, column
from weightscope.model.model import Model, TensorsOnly, open_tensors
from weightscope.pairs.changes.all_tensors import (
    TensorChanges,
    changes_with_directions,
    lone_tensors,
    only_in_one,
)
from weightscope.pairs.changes.counterparts import Counterparts, counterparts
from weightscope.pairs.deeds.catalogue import exceeds_rounding
from weightscope.pairs.deeds.change import UNKNOWN_SIZE, Change
from weightscope.pairs.deeds.deed import Deed, Proof, What, sentence
from weightscope.pairs.deeds.quantised import mostly_unpacked
from weightscope.pairs.learned.changed_matrices import INTRUDER, TOP, Update, updates_of
from weightscope.pairs.learned.spaces import Shared, SpaceOverlap, overlap, shared_directions
from weightscope.pairs.learned.structure import dora_rank, kronecker_shapes
from weightscope.pairs.learned.words import RaisedWords, why_no_words, words
from weightscope.pairs.same import SAME_FUNCTION
from weightscope.pairs.same.judge import explained_deed
from weightscope.pairs.same.same import compared, same
from weightscope.pairs.same.sentences import joined
from weightscope.report.findings import listed, spans

Readable = Model | TensorsOnly
MOSTLY = 0.9  # share of changed matrices that must agree before training is named
CONVERTED = (
    What.ROUNDED,
    What.ROUNDED_OTHERWISE,
    What.QUANTISED,
)  # kinds of change that a conversion makes
ROWS = ("tokens", "positions", "unembedding", "types")  # looked up by row: they have no directions
HIDING = (What.QUANTISED, What.QUANTISED_IN_PART)  # kinds that may hide what was trained
UNCHANGED = (What.IDENTICAL, What.MISSING, What.NEW)
# Kinds of change in which no direction is looked for.
NO_DIRECTIONS = (*UNKNOWN_SIZE, What.IDENTICAL, What.NOT_FINITE, What.RESIZED)
# share of changed tensors with a deed, or unlike the base's; from here functions are compared
ASKED = 0.5
ONE_SCALE = 10.0  # largest over least relative change of a LoRA's matrices, at most
# a LoRA's usual ranks, which a few steps of training rarely leave
USUAL_RANKS = {1, 2, 4, 8, 16, 32, 64, 128, 256}
NO_TRAINING = ("same function", "deed", "unrelated", "noise", "merge", "in part")
SHARES_DIFFER = 0.1  # relative difference of the base's share between a merge's matrices
NEARLY_ALL = 0.1  # distance from 1 of the base's share in a tune
OUTSIDE = {
    "tokens": "token embeddings",
    "positions": "position embeddings",
    "types": "type embeddings",
    "unembedding": "the head",
}
DORA = "a change of rank up to {} and a factor for each row, as of a DoRA,"
LOKR = "a Kronecker product, as of a LoKr,"
HOW = {
    "low rank": "{name} holds {evidence}",
    "one direction": "{name} was edited along one direction: {evidence}",
    "full": "{name} holds changes as training leaves: {evidence}",
    "few rows": "{name} changed in a few rows of its embeddings only: {evidence}",
    "vectors": "{name} changed in biases and norms only",
    "embeddings": "{name} changed outside its layers only",
    "conversion": "{name} was rounded or quantised; what else was done does not show: {evidence}",
    "none": "{name} holds the base's values: {evidence}, nothing was trained",
    "in part": "{name} shares only some tensors with the base, and these did not change. "
    "{evidence}",
    "mixed": "{name} changed in several ways: {evidence}",
    "same function": "{name} computes what the base does, the same function, with {evidence}: "
    "nothing was trained",
    "deed": "{name} was changed by what is no training: {evidence}",
    "unrelated": "{name} holds other weights: {evidence}, as if drawn again, trained apart or in "
    "another basis",
    "merge": "{name} holds {evidence}, as a merge leaves",
    "noise": "{name} differs by what independent noise would leave: {evidence}; no training shows",
}
BEYOND_CHANCE = 3.0  # times the overlap of random spaces: two tunes collide


@dataclass(frozen=True)
class Training:
    """The kind of training that the changes show."""

    # "low rank", "one direction", "full", "few rows", "vectors", "embeddings", "conversion",
    # "none", "in part", "mixed"; or, of what is no training, one of NO_TRAINING.
    kind: str
    rank: int | None  # the largest of a change of low rank
    evidence: str  # in words
    is_adapter: bool = False  # True for an adapter, or what looks like a merged one

    @property
    def is_training(self) -> bool:
        """True if weights may have been trained."""
        return self.kind not in (*NO_TRAINING, "conversion", "none")


@dataclass(frozen=True, eq=False, repr=False)
class Tune(ShowsShapes):
    """The training of one checkpoint."""

    name: str
    changes: TensorChanges
    training: Training
    updates: Sequence[Update]  # one per changed matrix
    shared: Sequence[Shared]
    words: RaisedWords | None
    no_words: str  # why there are none
    also: str = ""  # a sentence on what changed besides matrices in layers
    lone: str = ""  # sentences on tensors that only one of the two has

    @property
    def looked_at(self) -> list[Update]:
        """The matrices in which intruder dimensions were looked for."""
        return [update for update in self.updates if update.intruders]

    @property
    def intruders(self) -> int:
        """The number of intruder dimensions in all matrices together."""
        return sum(update.intruders.count for update in self.looked_at if update.intruders)

    @property
    def how(self) -> str:
        """Say how it was changed, and how far, as a sentence without its full stop."""
        how = HOW[self.training.kind].format(
            name=printable(self.name), evidence=self.training.evidence
        )
        sizes = spread_of([update for update in self.updates if np.isfinite(update.change)])
        if sizes and how.endswith(")"):
            return f"{how[:-1]}, {sizes})"
        return f"{how} ({sizes})" if sizes else how

    @property
    def lead(self) -> str:
        """Sentences on how it was changed, how far and where, and the words that rose."""
        parts = [f"{self.how}."]
        if self.also and self.training.is_training:
            parts.append(self.also)
        if self.looked_at and self.training.is_training:
            plural = "matrix" if len(self.looked_at) == 1 else "matrices"
            dimensions = counted(self.intruders, "intruder dimension")
            parts.append(f"{dimensions} in {len(self.looked_at):,} changed {plural}.")
        if self.words:
            parts.append(self.words.sentence)
        if self.lone and self.training.kind != "in part":
            parts.append(self.lone)
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Its part of learned.json."""
        training = {
            "kind": self.training.kind,
            "rank": self.training.rank,
            "evidence": self.training.evidence,
        }
        words = [] if self.words is None else self.words.as_json()
        return {
            "name": self.name,
            "training": training,
            "changed": len(self.updates),
            "intruders": {
                "count": self.intruders,
                "matrices": len(self.looked_at),
                "top": TOP,
                "below": INTRUDER,
            },
            "shared": [
                {
                    "side": each.side,
                    "strength": each.strength,
                    "chance": each.chance,
                    "matrices": len(each.matrices),
                    "layers": list(each.layers),
                }
                for each in self.shared
            ],
            "words": words,
            "no_words": self.no_words,
        }


def spread_of(updates: Sequence[Update]) -> str:
    """`relative change 0.01 to 0.02`; empty without updates."""
    if not updates:
        return ""
    sizes = [update.change for update in updates]
    ends = (f"{size:.2g}" for size in (min(sizes), max(sizes)))
    return f"relative change {' to '.join(dict.fromkeys(ends))}"


@dataclass(frozen=True, eq=False, repr=False)
class Learned(Result):
    """Training of tunes of a base: one of `tunes` per tune, one of `overlaps` per pair."""

    base: str
    tunes: Sequence[Tune]
    overlaps: dict[tuple[str, str], list[SpaceOverlap]]
    provenance: Provenance

    FIGURE: ClassVar[str] = "figures:learned_figure"
    PAGE: ClassVar[str] = "page:write_learned_page"
    TABLES: ClassVar[dict[str, Callable[["Learned"], Any]]] = {
        "learned.json": lambda learned: learned.as_json(),
        "updates.csv": lambda learned: learned.table,
        "words.csv": lambda learned: learned.word_table,
        "shared.csv": lambda learned: learned.shared_table,
        "overlaps.csv": lambda learned: learned.overlap_table,
        "directions.npz": lambda learned: learned.directions,
    }
    FILES: ClassVar[tuple[str, ...]] = (
        *TABLES,
        *REPORT,
        "learned.png",
        "learned.svg",
        "learned.figure.csv",
    )

    @property
    def about(self) -> str:
        """The base and its tunes."""
        return f"{self.base} and {listed([tune.name for tune in self.tunes], 3)}"

    @property
    def lead(self) -> str:
        """Sentences on each tune's training, and whether they collide."""
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
            collide = any(
                mean[side] >= BEYOND_CHANCE * mean[f"chance_{side}"] for side in ("reads", "writes")
            )
            parts = [
                f"{side} {mean[side]:.0%} (random {mean[f'chance_{side}']:.0%})"
                for side in ("reads", "writes")
            ]
            which = "the one matrix" if len(each) == 1 else f"the {len(each)} matrices"
            where = f"{'collide' if collide else 'do not collide'} in {which} that both change"
            sentences.append(
                f"{pair} {where}: overlap of {' and '.join(parts)}; their changes have "
                f"cosine {mean['cosine']:.2g}."
            )
        return sentences

    @cached_property
    def table(self) -> Table:
        """One row per changed matrix; its csv() is updates.csv."""
        rows = [_update_row(tune.name, each) for tune in self.tunes for each in tune.updates]
        return Table.of(UpdateRow, rows)

    @cached_property
    def word_table(self) -> Table | None:
        """One row per listed token; its csv() is words.csv."""
        rows = [
            WordRow(
                tune=tune.name,
                rank=rank,
                token_id=int(token),
                token=name,
                before=tune.words.before[token],
                after=tune.words.after[token],
            )
            for tune in self.tunes
            if tune.words
            for rank, (token, name) in enumerate(
                zip(tune.words.top, tune.words.labels, strict=True), 1
            )
        ]
        return Table.of(WordRow, rows) if rows else None

    @cached_property
    def shared_table(self) -> Table | None:
        """One row per direction that matrices of several layers share; its csv() is shared.csv."""
        rows = [
            SharedRow(
                tune=tune.name,
                side=each.side,
                strength=each.strength,
                chance=each.chance,
                matrices=len(each.matrices),
                layers=spans(each.layers),
            )
            for tune in self.tunes
            for each in tune.shared
        ]
        return Table.of(SharedRow, rows) if rows else None

    @cached_property
    def overlap_table(self) -> Table | None:
        """One row per matrix that two tunes change; its csv() is overlaps.csv."""
        rows = [
            OverlapRow(a, b, each.label, **{name: getattr(each, name) for name in MEANS})
            for (a, b), pairs in self.overlaps.items()
            for each in pairs
        ]
        return Table.of(OverlapRow, rows) if rows else None

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
        """The parts that the terminal shows, from top to bottom."""
        parts: list[str | Table] = [*(tune.lead for tune in self.tunes), *self._collisions()]
        parts += [
            f"No words for {printable(tune.name)}: {tune.no_words}."
            for tune in self.tunes
            if tune.no_words
        ]
        if not len(self.table):
            return parts
        named = PRINTED if len(self.tunes) > 1 else PRINTED[1:]
        return [*parts, self.most_changed(12).select(*named)]

    def most_changed(self, most: int) -> Table:
        """The matrices that changed most."""
        order = np.argsort(
            -np.nan_to_num(self.table["change"], nan=0.0, posinf=1e9), kind="stable"
        )[:most]
        return self.table.take([int(i) for i in order])

    def shown(self) -> list[Table]:
        """The matrices that changed most."""
        return [self.most_changed(12)]

    def as_json(self) -> dict[str, Any]:
        """The content of learned.json, which `weightscope learned --json` prints."""
        pairs = [
            {"a": a, "b": b, "matrices": len(each)}
            | (means(each) if each else dict.fromkeys(MEANS))
            for (a, b), each in self.overlaps.items()
        ]
        tunes = [tune.as_json() for tune in self.tunes]
        return dict(
            as_json(
                self.provenance.envelope(self.lead)
                | {"base": self.base, "tunes": tunes, "overlaps": pairs}
            )
        )


# Columns that fit 80 characters of a terminal; updates.csv has all
PRINTED = ("tune", "matrix", "change", "rank", "stable_rank", "intruders", "least_cosine")


class UpdateRow(NamedTuple):
    """The change of one matrix, as a row of updates.csv; NaN for what was not found."""

    tune: str = column()
    matrix: str = column()
    role: str = column()
    layer: float = column(format=".0f")
    change: float = column(
        "Frobenius norm of the change, relative to the base.", symbol="$‖ΔW‖/‖W‖$"
    )
    rank: float = column("Of the change, where it is low.", format=".0f")
    sigma1: float = column("Largest singular value of the change.", symbol="$σ_1(ΔW)$")
    first_share: float = column("Its share of the change's energy.", symbol="first direction")
    stable_rank: float = column("$‖ΔW‖_F^2 / σ_1^2$.", symbol="stable rank")
    noise: float = column("Spectral norm that rounding to the stored dtype leaves.")
    directions: int = column("How many of the first 16 are more than rounding.", format=".0f")
    intruders: float = column(
        "Intruder dimensions among the first 10; empty where they were not looked for.",
        format=".0f",
    )
    least_cosine: float = column(
        "Of the first 10 singular vectors with any of the base's.", symbol="least cosine"
    )
    principal: float = column(
        "The change's energy in the base's principal directions, over what chance gives."
    )
    drift: float = column("How far the base's leading singular values moved, relative.")


class WordRow(NamedTuple):
    """A token that a tune says more often, as a row of words.csv."""

    tune: str = column()
    rank: int = column()
    token_id: int = column(symbol="id")
    token: str = column()
    before: float = column("Mean probability in the base, after random tokens.")
    after: float = column("The same in the tune.")


class SharedRow(NamedTuple):
    """A direction that matrices of several layers share, as a row of shared.csv."""

    tune: str = column()
    side: str = column()
    strength: float = column("Mean squared cosine with the leading directions of each matrix.")
    chance: float = column("The largest that random directions reach.")
    matrices: int = column("How many have it.")
    layers: str = column()


class OverlapRow(NamedTuple):
    """A matrix that two tunes change, as a row of overlaps.csv."""

    a: str = column()
    b: str = column()
    matrix: str = column()
    reads: float = column(
        "Mean squared cosine of the spaces that both read; 1 for one inside the other."
    )
    writes: float = column("The same of the spaces that both write.")
    chance_reads: float = column("Of random spaces.")
    chance_writes: float = column("Of random spaces.")
    cosine: float = column("Of the two changes: 1 where they add up, -1 where they cancel.")


MEANS = OverlapRow._fields[3:]  # numbers whose means over matrices are reported


def means(overlaps: Sequence[SpaceOverlap]) -> dict[str, float]:
    """The mean of each number over matrices."""
    return {name: float(np.mean([getattr(each, name) for each in overlaps])) for name in MEANS}


def _update_row(tune: str, update: Update) -> UpdateRow:
    each = update.intruders
    intruders = least_cosine = principal = drift = np.nan
    if each is not None:
        intruders, least_cosine = each.count, float(each.cosines.min())
        principal, drift = each.principal, each.drift
    return UpdateRow(
        tune=tune,
        matrix=update.label,
        role=update.role,
        layer=np.nan if update.layer is None else update.layer,
        change=update.change,
        rank=np.nan if update.rank is None else update.rank,
        sigma1=float(update.s[0]),
        first_share=update.first_share,
        stable_rank=update.stable_rank,
        noise=update.noise,
        directions=update.n_directions,
        intruders=intruders,
        least_cosine=least_cosine,
        principal=principal,
        drift=drift,
    )


def learned(
    base: Readable | str | Path,
    *tuned: Readable | str | Path,
    exact: bool = False,
    progress: bool | None = None,
) -> Learned:
    """Find out what was trained into tunes of a base: directions, intruders, words, method.

    Parameters
    ----------
    base : Model, str or Path
        A model, or what `open_model` opens.
    *tuned : Model, str or Path
        Tunes of the base, or LoRA adapters for it.
    exact : bool
        Look for intruder dimensions in matrices of any size.
    progress : bool, optional
        Show a bar; by default in a notebook only.

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
    tunes: list[Readable] = []
    for each in tuned:
        if isinstance(each, str | Path):
            with naming(each):
                tunes.append(open_tensors(each, base=of_base if is_adapter(str(each)) else None))
        else:
            tunes.append(each)
    if isinstance(base, str | Path):
        with naming(base):
            base = open_tensors(base)
    with progress_shown(progress):
        results = [tune_of(base, each, exact=exact) for each in tunes]
    overlaps = {}
    for a, b in combinations(results, 2):
        of_a, of_b = ({update.label: update for update in tune.updates} for tune in (a, b))
        overlaps[a.name, b.name] = [
            overlap(of_a[label], of_b[label]) for label in of_a if label in of_b
        ]
    provenance = Provenance.of(base.checkpoint, *(each.checkpoint for each in tunes))
    return Learned(base.name, results, overlaps, provenance)


def tune_of(
    base: Readable, tuned: Readable, *, exact: bool = False, with_words: bool = True
) -> Tune:
    """The training of one checkpoint."""
    every_tensor = [*counterparts(base, tuned)]
    entries = [entry for entry in every_tensor if entry.pair()]
    lone = only_in_one(lone_tensors(every_tensor, base, tuned))
    if not any(len(entry.a.shape) > 1 for entry in entries if entry.a):
        raise CheckpointError("has no matrix in common with the base", file=tuned.name)
    pairs = [pair for entry in entries if (pair := entry.pair())]
    measured = changes_with_directions(base, tuned, pairs)
    every = [*not_quantised(base, tuned, [*zip(entries, measured, strict=True)])]
    changes = TensorChanges([change for _, change in every])
    note = tuned.checkpoint.note
    tried = {} if note else deeds_tried(base, tuned, every)
    training = same_function(base, tuned, every, tried) or one_deed(tried, changes.changes)
    known = {i: done for i, done in tried.items() if done}
    left = [each for i, each in enumerate(every) if training is not None or i not in known]
    moved = [(entry, change) for entry, change in left if _is_update(change)]
    updates = [
        update
        for entry, change in bar(moved, "directions", "matrix")
        for update in updates_of(entry, change, exact=exact)
    ]
    if training is None:
        training = training_of([change for _, change in left], updates, note)
        if known:
            training = _beside(training, [*known.values()], len(tried), updates)
    if training.kind == "none" and lone:
        training = Training("in part", None, lone.removesuffix("."))
    if training.kind == "full" and (form := adapter_form(moved, updates)):
        training = Training("full", None, form, is_adapter=True)
    raised, why = None, "its heads are not read"
    if not with_words:
        why = "they were not asked for"
    elif not training.is_training:
        why = "nothing shows that it was trained"
    elif isinstance(base, Model) and isinstance(tuned, Model):
        why = why_no_words(base, tuned)
        try:
            raised = None if why else words(base, tuned)
        except CheckpointError as error:  # values too large for texts to pass
            why = str(error)
    also = changed_outside(changes.changes)
    return Tune(
        tuned.name, changes, training, updates, shared_directions(updates), raised, why, also, lone
    )


def _beside(
    training: Training, deeds: Sequence[Deed], tried: int, updates: Sequence[Update]
) -> Training:
    """The training of what no deed explains, with the deeds of the others.

    One matrix shows no adapter, and fewer matrices than others have a deed show no training.
    """
    words_of_deeds = in_words(deeds, tried)
    is_adapter = training.kind == "low rank" and len(updates) > 1
    if is_adapter or len(updates) > len(deeds):
        return replace(training, evidence=f"{training.evidence}; besides, {words_of_deeds}")
    if not updates:
        return Training("mixed", None, words_of_deeds)
    count = len(updates)
    rest = f"no deed explains {count} {'matrix' if count == 1 else 'matrices'} that changed"
    return Training("mixed", None, f"{words_of_deeds}; {rest}")


def _is_update(change: Change) -> bool:
    """True if directions are looked for: a finite matrix, no table of rows, of one shape."""
    return (
        change.is_matrix
        and change.kind not in NO_DIRECTIONS
        and change.role not in ROWS
        and bool(np.isfinite(change.moved))
    )


def training_of(changes: Sequence[Change], updates: Sequence[Update], note: str = "") -> Training:
    """The kind of training, by a tune's changes and by what an adapter's own files say.

    A LoRA's change has its rank exactly up to rounding, whatever is merged, and so have a few steps
    on few tokens. Reinforcement and supervised learning are not told apart (see docs/learned.md).
    """
    changed = [each for each in changes if each.kind not in UNCHANGED]
    matrices = [each for each in changed if each.is_matrix]
    in_layers = [each for each in matrices if each.role not in ROWS]
    kinds, total = Counter(each.kind for each in in_layers), len(in_layers)
    low = [update for update in updates if update.rank is not None]
    largest = max((update.rank for update in low if update.rank), default=None)
    if note:
        return Training("low rank", largest, note, is_adapter=True)
    if not changed:
        return Training("none", None, "no tensor changed")
    if not total:
        rows = [each for each in matrices if each.kind is What.FEW_ROWS]
        kind = "embeddings" if matrices else "vectors"
        if rows and len(rows) == len(changed):
            kind = "few rows"
        details = "; ".join(each.detail for each in rows)
        return Training(kind, None, details or "no matrix in a layer changed")
    along = kinds[What.ONE_DIRECTION]
    if along >= MOSTLY * total:
        evidence = f"{along} of {total} changed matrices in layers changed along one direction"
        return Training("one direction", 1, evidence)
    if sum(kinds[kind] for kind in CONVERTED) >= MOSTLY * total:
        count = f"{total} matri{'x was' if total == 1 else 'ces were'}"
        evidence = f"{count} rounded or quantised, which hides what was trained"
        return Training("conversion", None, evidence)
    if sum(not each.is_tuned for each in in_layers) >= MOSTLY * total:
        evidence = f"{total} changed matrices in layers no longer resemble the base's"
        return Training("unrelated", None, evidence)
    if 2 * len(low) >= len(updates) and largest:
        low = [
            update for update in updates if update.rank is not None or min(update.shape) <= largest
        ]
    if (share := share_kept(in_layers)) is not None:
        evidence = f"{share:.2g} times the base's weights and others in each of {total} matrices"
        return Training("merge", None, evidence)
    if low and len(low) >= MOSTLY * len(updates):
        return _of_low_rank(low, len(updates), len(changed))
    if updates and sum(update.is_noise for update in updates) >= MOSTLY * len(updates):
        evidence = f"no direction stands out in any of {len(updates)} changed matrices"
        return Training("noise", None, evidence)
    if kinds[What.TUNED] + kinds[What.LOW_RANK] >= MOSTLY * total:
        full = len(updates) - len(low)
        some = f"; {len(low)} are of rank {ranks_by_role(low)}" if low else ""
        return Training("full", None, f"of full rank in {full} of {len(updates)} matrices{some}")
    parts = ", ".join(f"{count} {kind.value}" for kind, count in kinds.most_common())
    return Training("mixed", None, f"matrices in layers changed in several ways: {parts}")


def _of_low_rank(low: Sequence[Update], total: int, changed: int) -> Training:
    """A low-rank change and its source; a LoRA has one rank and scale, and changes nothing else."""
    ranks = Counter(update.rank for update in low if update.rank is not None)
    (usual, count), *_ = ranks.most_common()
    is_one = count >= MOSTLY * sum(ranks.values())  # rounding raised the rest
    largest = usual if is_one else max(ranks)
    within = [update for update in low if (update.rank or 0) <= largest]
    sizes = [update.change for update in within]
    is_lora = is_one and len(low) == total == changed and max(sizes) <= ONE_SCALE * min(sizes)
    where = "" if is_one else f" ({ranks_by_role(low)})"
    evidence = f"a change of rank up to {largest} in {len(within)} of {total} matrices{where}"
    what = f"as a few steps of training leave{'' if is_one else ', or adapters of several ranks'}"
    if is_lora:
        what = "as of a LoRA"
        if largest not in USUAL_RANKS:
            what += ", or of a few steps of training"
    return Training("low rank", largest, f"{evidence}, {what}", is_adapter=is_lora)


def share_kept(matrices: Sequence[Change]) -> float | None:
    """The factor of the base that most matrices hold; None if it is near one or differs."""
    if not all(each.squares for each in matrices):
        return None
    with np.errstate(all="ignore"):
        shares = np.array(
            [(each.squares + each.squares_b - each.moved) / (2 * each.squares) for each in matrices]
        )
    middle = float(np.median(shares))
    alike = np.abs(shares - middle) <= SHARES_DIFFER * abs(middle)
    return middle if alike.mean() >= MOSTLY and abs(middle - 1) > NEARLY_ALL else None


def ranks_by_role(updates: Sequence[Update]) -> str:
    """`8 in q and v, 16 to 32 in down`: the ranks of roles, grouped."""
    roles: dict[str, set[int]] = {}
    for update in updates:
        roles.setdefault(update.role, set()).add(update.rank or min(update.shape))
    spread: dict[str, list[str]] = {}
    for role, ranks in roles.items():
        ends = dict.fromkeys((min(ranks), max(ranks)))
        spread.setdefault(" to ".join(map(str, ends)), []).append(role)
    return ", ".join(f"{ranks} in {joined(names, 6)}" for ranks, names in spread.items())


def changed_outside(changes: Sequence[Change]) -> str:
    """A sentence on changes besides matrices in layers (embeddings, head, norms); else empty."""
    kinds: dict[str, list[Change]] = {}
    for each in changes:
        if each.kind in UNCHANGED or (each.is_matrix and each.role not in ROWS):
            continue
        kind = "norms" if "norm" in (each.role or each.name) else "biases and other vectors"
        kinds.setdefault(OUTSIDE.get(each.role, kind), []).append(each)
    parts = []
    for named, members in kinds.items():
        sizes = [each.change for each in members if np.isfinite(each.change)]
        spread = "unknown"
        if sizes:
            ends = (f"{size:.2g}" for size in (min(sizes), max(sizes)))
            spread = " to ".join(dict.fromkeys(ends))
        number = f"{len(members)} " if named not in OUTSIDE.values() else ""
        parts.append(f"{number}{named} ({spread})")
    return f"Also changed: {joined(parts, len(parts))}." if parts else ""


def not_quantised(
    base: Readable, tuned: Readable, every: Sequence[tuple[Counterparts, Change]]
) -> Iterator[tuple[Counterparts, Change]]:
    """The changes; what looks quantised among unpacked tensors is asked for another deed."""
    dtypes = [change.dtypes for _, change in every]
    equal = [change.kind is What.IDENTICAL for _, change in every]
    unpacked = {*mostly_unpacked(dtypes, equal)}
    for i, (entry, change) in enumerate(every):
        is_guess = change.kind is What.QUANTISED and change.deed.proof is Proof.NONE
        if is_guess and i in unpacked:
            done = explained_deed(compared(base, tuned, entry, 1.0))[0]
            yield entry, replace(change, deed=done or Deed(What.TUNED))
        else:
            yield entry, change


def deeds_tried(
    base: Readable, tuned: Readable, every: Sequence[tuple[Counterparts, Change]]
) -> dict[int, Deed | None]:
    """Proved deeds of the changed tensors that no conversion explains, by place; None without."""
    left_out = {*UNKNOWN_SIZE, *CONVERTED, What.IDENTICAL, What.RESIZED}
    tried = {}
    for i, (entry, change) in enumerate(every):
        if change.kind in left_out:
            continue
        tried[i] = proved(change.deed)
        if exceeds_rounding(change):
            tried[i] = proved(explained_deed(compared(base, tuned, entry, 1.0))[0]) or tried[i]
    return tried


def proved(done: Deed | None) -> Deed | None:
    """The deed, unless it is only a likeness; values may have become NaN too."""
    if done is None or (done.proof is Proof.NONE and done.what is not What.NOT_FINITE):
        return None
    return done


def in_words(deeds: Sequence[Deed], tried: int) -> str:
    """`'negated' in 2 of 21 changed tensors`: the deeds of some tensors."""
    named = Counter(map(sentence, deeds))
    of_all = counted(tried, "changed tensor")
    return joined([f"'{name}' in {count} of {of_all}" for name, count in named.most_common()])


def same_function(
    base: Readable,
    tuned: Readable,
    every: Sequence[tuple[Counterparts, Change]],
    tried: dict[int, Deed | None],
) -> Training | None:
    """The training of what computes the same; else deeds that only whole checkpoints show.

    These are added to `tried`. Asked where half of the tensors have a deed, or are unlike the
    base's.
    """
    known = sum(done is not None for done in tried.values())
    unlike = sum(not every[i][1].is_tuned for i in tried)
    if not tried or max(known, unlike) < ASKED * len(tried):
        return None
    result = same(base, tuned)
    if result.verdict == SAME_FUNCTION:
        what = dict.fromkeys(each.deed for each in result.tensors if each.verdict == SAME_FUNCTION)
        return Training("same function", None, joined([*what]))
    elsewhere = {each.label: proved(each.done) for each in result.tensors}
    for i, done in tried.items():
        tried[i] = done or elsewhere.get(every[i][0].label)
    return None


def one_deed(tried: Mapping[int, Deed | None], changes: Sequence[Change]) -> Training | None:
    """The deeds of all changed tensors, no training if they leave no value open; None without."""
    known = [done for done in tried.values() if done]
    hidden = any(change.kind in HIDING for change in changes)
    if not known or len(known) < len(tried) or hidden:
        return None
    details = Counter(done.detail for done in known)
    (most, times), *_ = details.most_common()
    detail = f" ({most})" if most and times == len(tried) else ""
    kind = "mixed" if any(done.proof is Proof.MOST for done in known) else "deed"
    return Training(kind, None, in_words(known, len(tried)) + detail)


def adapter_form(moved: Sequence[tuple[Counterparts, Change]], updates: Sequence[Update]) -> str:
    """A phrase if changes of full rank come from a DoRA or a LoKr; else empty.

    A Kronecker product has full rank only where both of its factors have: some changes may lack it.
    """
    if len(updates) != len(moved):
        return ""
    forms = []
    for (entry, _), update in zip(moved, updates, strict=True):
        assert entry.a is not None
        assert entry.b is not None
        x, y = (each.array().astype(np.float64) for each in (entry.a, entry.b))
        rank = dora_rank(x, y) if update.rank is None else None
        shapes = None if rank is not None else kronecker_shapes(y - x)
        if rank is None and shapes is None:
            return ""
        forms.append(DORA.format(rank) if shapes is None else LOKR)
    return f"{forms[0]} in {len(forms)} of {len(moved)} matrices" if len({*forms}) == 1 else ""
