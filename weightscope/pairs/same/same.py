"""Is this still the same model? One verdict for two checkpoints, and the evidence for it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import Checkpoint, WeightFiles
from weightscope.checkpoint.packings.packed import scales_activations
from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import hand_back, in_threads, keep_freed
from weightscope.core.errors import CheckpointError, counted, naming, printable
from weightscope.core.files import REPORT
from weightscope.core.progress import bar, progress_shown
from weightscope.core.results import Result
from weightscope.core.tables import Table, as_json, column
from weightscope.heads.tensors.config_readers import disagreement_line, readers_disagree
from weightscope.heads.tensors.tied_head import TIED, overwritten_head, says_tied
from weightscope.model.config.computed import Difference, differences
from weightscope.model.config.effects import UNKNOWN
from weightscope.model.layers.read_layer import NO_WEIGHTS
from weightscope.model.model import Model, TensorsOnly, open_tensors
from weightscope.model.rows.mixers import OF_MIXER, heads_of
from weightscope.model.rows.names import NamedTensor
from weightscope.model.rows.own_names import names_sentence
from weightscope.pairs.changes.counterparts import Counterparts, counterparts, unchecked_tensors
from weightscope.pairs.changes.head import Basis
from weightscope.pairs.deeds.catalogue import UNEXPLAINED
from weightscope.pairs.deeds.deed import Deed, What, deed
from weightscope.pairs.deeds.views import Sizes, tolerance_of
from weightscope.pairs.identity.identity import Identity, is_identity
from weightscope.pairs.identity.wsid import TIED as TIED_HEAD
from weightscope.pairs.same import (
    DIFFERENT,
    QUANTISED,
    ROUNDED,
    SAME_BYTES,
    SAME_FUNCTION,
    SAME_VALUES,
    UNDECIDED,
    UP_TO,
    VERDICTS,
)
from weightscope.pairs.same.by_identity import (
    compare_files,
    consistent_part,
    identified,
    judge_by_identity,
)
from weightscope.pairs.same.companions import Companions, compare_companions
from weightscope.pairs.same.config_and_tokens import (
    PACKING,
    ConfigDifferences,
    TokenizerVerdict,
    by_effect,
    compare_settings,
    compare_token_digests,
    compare_tokenizers,
    why_incomparable,
    with_packings,
)
from weightscope.pairs.same.elsewhere import (
    find_elsewhere,
    name_shards,
    name_unread,
    reordered_experts,
)
from weightscope.pairs.same.function import (
    apart,
    basis_of,
    is_shown,
    is_turned,
    is_unknown,
    last_apart,
    renamed,
    where_equal,
    without_gauge,
)
from weightscope.pairs.same.judge import (
    Compared,
    Judged,
    alone,
    few_compensated,
    few_quantised,
    judge,
    rounded_alone,
    shown_ways,
)
from weightscope.pairs.same.multiplied import in_one_convention
from weightscope.pairs.same.sentences import (
    NAMED,
    coarser_lead,
    differing_part,
    digests_of,
    function_lead,
    is_one,
    joined,
    short_names,
)
from weightscope.pairs.same.stored import read_known_digests, same_files
from weightscope.report.findings import listed

# `TensorsOnly`: heads are not read, but tensors are compared
Readable = Model | TensorsOnly

# Deeds that fit what was done to a part of the rows too.
BY_PART = {What.TUNED, What.UNRELATED, What.FEW_ROWS, What.REORDERED, What.HEADS}
deed(What.TIED_HEAD, "head tied in config and not in file")
GIVES_THE_SAME = "the layer gives the same on random inputs"
NOT_RUN = (
    "whether other tensors of the layer make up for it is not known: it is not run, or not in full"
)
LAST = (
    "norm.outputs",
    "norm.outputs.bias",
    "unembedding",
    "unembedding.bias",
    "outputs.projection",
)


class ConfigKey(NamedTuple):
    """A key of the config that decides what is computed, or may, and differs."""

    config: str
    a: Any
    b: Any


@dataclass(frozen=True, eq=False, repr=False)
class Same(Result):
    """The verdict on two checkpoints, and its evidence.

    `verdict` is "same bytes", "same values", "rounded", "quantised", "same function", "undecided"
    or "different"; `tensors` has one entry for each tensor, `differences` those that differ, the
    worst first.
    """

    name_a: str
    name_b: str
    verdict: str
    tensors: Sequence[Judged]
    settings: ConfigDifferences
    tokens: TokenizerVerdict
    not_compared: Sequence[str]  # names of tensors that were not compared, and why
    # a sentence for each checkpoint with a head or with files that are not read by all
    unread_files: Sequence[str]
    sample: float
    provenance: Provenance
    companions: Companions  # files next to weights and config.json that differ
    unloaded: Sequence[str]  # names in B's file that the class of its config would not load
    names: str  # a sentence on these; empty where there are none
    where: str = ""  # on which inputs what computes the same was compared
    digests: Sequence[str] = ()  # a line for each checkpoint whose files have known digests

    FIGURE: ClassVar[str] = "figures:same_figure"
    PAGE: ClassVar[str] = "page:write_same_page"
    TABLES: ClassVar[dict[str, Callable[["Same"], Any]]] = {
        "same.json": lambda same: same.as_json(),
        "tensors.csv": lambda same: same.table,
    }
    FILES: ClassVar[tuple[str, ...]] = (*TABLES, *REPORT, "same.png", "same.svg", "same.figure.csv")

    @property
    def about(self) -> str:
        """The two checkpoints and the verdict."""
        return f"{self.name_a} and {self.name_b}: {self.verdict}"

    @cached_property
    def differing(self) -> list[Judged]:
        """The tensors that are not the same, the worst first."""
        different = [each for each in self.tensors if each.verdict in (DIFFERENT, UNDECIDED)]
        return sorted(different, key=_severity)

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of tensors with each verdict."""
        return Counter(each.verdict for each in self.tensors)

    @property
    def lead(self) -> str:
        """The verdict in a sentence, the evidence for it, and what B's own class would not load."""
        return f"{self._verdict} {self.names}".rstrip()

    @property
    def _verdict(self) -> str:
        a, b = printable(self.name_a), printable(self.name_b)
        total = counted(len(self.tensors), "tensor")
        looked = ""
        if self.sample != 1:
            looked = f" A first look at {self.sample:.0%} of the values; the rest was not read."
        rest = self._rest
        if self.verdict == SAME_BYTES:
            return (
                f"{is_one(self.name_a, self.name_b)}: the weights and config.json hold the same "
                "bytes."
            )
        if self.verdict == SAME_VALUES:
            every = f"all {total} have" if len(self.tensors) > 1 else "the one tensor has"
            return f"{is_one(self.name_a, self.name_b)}: {every} the same values.{rest}{looked}"
        if self.verdict in (ROUNDED, QUANTISED):
            same = self.counts[SAME_VALUES]
            lead = coarser_lead(self.name_a, self.name_b, self.verdict, self.tensors, same)
            return f"{lead}{rest}{looked}"
        if self.verdict == SAME_FUNCTION:
            changed = [each.deed for each in self.tensors if each.verdict == SAME_FUNCTION]
            lead = function_lead(self.name_a, self.name_b, self.tensors, changed, self.where)
            return f"{lead}{rest}{looked}"
        keys = [*self.settings.deciding, *self.settings.unknown]
        if self.verdict == UNDECIDED:
            unknown = [self._unknown(key) for key in keys]
            unknown += map(str, self.companions.deciding)
            whys = {each.detail for each in self.differing if each.what is What.UNNAMED}
            guessed = consistent_part(self.differing)
            tensors = [*whys, *filter(None, [guessed])] or [
                f"{each.name} ({each.deed})" for each in self.differing
            ]
            why = joined(tensors + unknown) or "no tensor of one is in the other"
            return f"Whether {b} is {a} is undecided: {printable(why)}.{rest}{looked}"
        parts = []
        if self.differing:
            parts.append(differing_part(self.differing, len(self.tensors)))
        if self.settings.deciding:
            parts.append(
                "config.json computes something else "
                f"({listed([str(key) for key in self.settings.deciding], NAMED)})"
            )
        parts += map(str, self.companions.deciding[:NAMED])
        return f"{b} is not {a}: {printable('; '.join(parts))}.{rest}{looked}"

    @property
    def _rest(self) -> str:
        """Tensors that were not compared, as a sentence."""
        if not self.not_compared:
            return ""
        return f" Not compared: {listed([*map(printable, self.not_compared)], NAMED)}."

    def holds(self, up_to: str = "function") -> bool:
        """True if the verdict is at least as strong as this."""
        return VERDICTS.index(self.verdict) <= VERDICTS.index(UP_TO[up_to])

    def findings_beyond(self, up_to: str = "function") -> list[dict[str, Any]]:
        """Findings that this verdict does not cover: tensors, the worst first, and config keys."""
        passing = VERDICTS.index(UP_TO[up_to])
        look_next = "`weightscope same A B --out DIR` shows every tensor."
        worst = sorted(self.tensors, key=_severity)
        rows = [
            (
                each.verdict,
                "tensor",
                each.name,
                each.layer,
                each.deed,
                each.size,
                f"{each.name}: {each.deed}",
            )
            for each in worst
            if VERDICTS.index(each.verdict) > passing
        ]
        for verdict, keys in (
            (DIFFERENT, self.settings.deciding),
            (UNDECIDED, self.settings.unknown),
        ):
            rows += [
                (verdict, "config", key.key, None, "config.json", np.nan, f"config.json: {key}")
                for key in keys
            ]
        rows += [
            (UNDECIDED, "file", each.file, None, each.detail, np.nan, str(each))
            for each in self.companions.deciding
        ]
        return [
            dict(
                as_json(
                    {
                        "kind": f"{verdict.replace(' ', '_')}_{what}",
                        "title": f"{verdict} {what}",
                        "look_next": look_next,
                        "severity": "warning" if verdict == UNDECIDED else "error",
                        "text": printable(text),
                        "known": "",
                        "layer": layer,
                        "head": None,
                        "map": "",
                        "measure": deed,
                        "number": size,
                        "usual": None,
                        "members": [{"what": what, "index": None, "layer": layer, "name": name}],
                    }
                )
            )
            for verdict, what, name, layer, deed, size, text in rows
        ]

    def _unknown(self, key: Difference) -> str:
        """Why a key of the config leaves the verdict open."""
        if key.key == PACKING:
            name = self.name_a if key.a else self.name_b
            return f"{name}'s config.json says by {PACKING} how weights are packed, and none is"
        return f"{key.key} in config.json differs, and its effect {_effect(key)}"

    @property
    def config(self) -> list[ConfigKey]:
        """The keys that differ and decide what is computed, or may."""
        return [
            ConfigKey(each.key, each.a, each.b)
            for each in (*self.settings.deciding, *self.settings.unknown)
        ]

    @cached_property
    def table(self) -> Table:
        """One row per tensor; its csv() is tensors.csv."""
        rows = [_row(each, each.name_b) for each in self.tensors]
        return Table.of(TensorRow, rows)

    def printed(self) -> list[str | Table]:
        """The parts that the terminal shows, from top to bottom."""
        parts: list[str | Table] = [self.lead, *self.unread_files, self.tokens.lead, *self.digests]
        if self.settings.idle:
            keys = listed([printable(each.named) for each in self.settings.idle], NAMED)
            parts.append(f"Config keys without effect on what is computed also differ: {keys}.")
        if self.companions.named:
            files = listed([*map(str, self.companions.named)], NAMED)
            parts.append(
                f"Next to the weights, and without effect on what they compute: {printable(files)}."
            )
        return [*parts, self.worst(20)] if self.differing else parts

    def worst(self, most: int) -> Table:
        """The tensors that differ, the worst first."""
        rows = [_row(each, each.name) for each in self.differing[:most]]
        return Table.of(TensorRow, rows).select(*SHOWN)

    def shown(self) -> list[Table]:
        """The tensors that differ."""
        return [self.worst(20)]

    def as_json(self) -> dict[str, Any]:
        """The content of same.json, which `weightscope same --json` prints."""
        differences = [each.as_json() for each in self.differing] + [
            key._asdict() for key in self.config
        ]
        return dict(
            as_json(
                self.provenance.envelope(self.lead)
                | {
                    "verdict": self.verdict,
                    "a": self.name_a,
                    "b": self.name_b,
                    "sample": self.sample,
                    "differences": differences,
                    "compared": {"count": len(self.tensors), "verdicts": dict(self.counts)},
                    "not_compared": {
                        "count": len(self.not_compared),
                        "names": list(self.not_compared),
                    },
                    "tokenizer": {"verdict": self.tokens.verdict, "lead": self.tokens.lead},
                    "idle_config": [each.key for each in self.settings.idle],
                    "names": list(self.unloaded) or "as loaded",
                    "files": [
                        {
                            "file": each.file,
                            "detail": each.detail,
                            "decides": each in self.companions.deciding,
                        }
                        for each in (*self.companions.deciding, *self.companions.named)
                    ],
                    "tensors": [each.as_json() for each in self.tensors],
                }
            )
        )


def _severity(judged: Judged) -> tuple[int, float]:
    """A key that sorts the worst first."""
    return -VERDICTS.index(judged.verdict), -float(np.nan_to_num(judged.size, nan=np.inf))


class TensorRow(NamedTuple):
    """A tensor and what was done to it, as a row of tensors.csv."""

    tensor: str = column("Its name in B's file.")
    name_a: str = column(symbol="in A")
    role: str = column()
    layer: float = column(format=".0f")  # NaN outside the layers
    verdict: str = column()
    deed: str = column("What was done to it.")
    size: float = column(
        "Frobenius norm of B - A, relative to A.", symbol="$‖ΔW‖/‖W‖$", format=".3g"
    )
    detail: str = column()


SHOWN = ("tensor", "role", "layer", "deed", "size", "detail")


def _row(judged: Judged, name: str) -> TensorRow:
    return TensorRow(
        tensor=name,
        name_a=judged.name_a,
        role=judged.role,
        layer=np.nan if judged.layer is None else judged.layer,
        verdict=judged.verdict,
        deed=judged.deed,
        size=judged.size,
        detail=judged.detail,
    )


def _opened(source: Readable | str | Path) -> Readable:
    if not isinstance(source, str | Path):
        return source
    with naming(source):
        return open_tensors(source)


def same(
    a: Readable | str | Path,
    b: Readable | str | Path,
    *,
    sample: float = 1.0,
    progress: bool | None = None,
) -> Same:
    """Decide if two checkpoints hold the same model, and name each tensor's change.

    Every tensor of both is compared under its role, whatever the container, and the keys of
    config.json that decide what is computed; the tokenizers have a verdict of their own. Memory:
    one tensor of each.

    Parameters
    ----------
    a, b : Model, str or Path
        The original and the copy: models, or what `open_model` opens.
    sample : float
        Share of the values to read, for a first look; 1 reads all.
    progress : bool, optional
        Show a bar; by default in a notebook only.

    Raises
    ------
    CheckpointError
        One of them cannot be read, or `sample` is not above 0 and at most 1.

    Examples
    --------
    >>> import weightscope as ws
    >>> result = ws.same("embedded", "embedded")
    >>> result.verdict
    'same bytes'
    """
    if not 0 < sample <= 1:
        raise CheckpointError(f"`sample` is {sample}; it has to be above 0 and at most 1")
    if is_identity(a) or is_identity(b):
        if sample != 1:
            raise CheckpointError("`sample` cannot be given: an identity is of all values")
        with progress_shown(progress):
            return _same_by_identity(identified(a), identified(b))
    a, b = map(_opened, (a, b))
    keep_freed()
    with progress_shown(progress), np.errstate(all="ignore"):  # values that overflow are different
        read_known_digests(a.checkpoint, b.checkpoint)
        companions = compare_companions(a, b)
        a, b = in_one_convention(a, b)
        judged, left = _judged(a, b, sample, companions)
        tokens = compare_tokenizers(a, b)
    hand_back()
    head = [each for each in judged if each.role == "unembedding"]
    same_head = all(each.verdict != DIFFERENT for each in head) if head else not _needs_head(b)
    settings = compare_settings(a, b, same_head=same_head)
    ties = {
        letter: overwritten_head(each)
        for letter, each in (("A", a), ("B", b))
        if isinstance(each, Model)
    }
    if len({*map(bool, ties.values())}) > 1:  # readers that overwrite it run another model
        settings.unknown.append(Difference(TIED, _tie(a), _tie(b), UNKNOWN))
    verdict = max((each.verdict for each in judged), key=VERDICTS.index, default=UNDECIDED)
    if (
        verdict == SAME_VALUES
        and sample == 1
        and all(each.what is What.IDENTICAL for each in judged)
        and same_files(a.checkpoint, b.checkpoint)
    ):
        verdict = SAME_BYTES
    if settings.unknown or companions.deciding:
        verdict = max(verdict, UNDECIDED, key=VERDICTS.index)
    if settings.deciding:
        verdict = DIFFERENT
    provenance = Provenance.of(a.checkpoint, b.checkpoint)
    unread_files = {
        letter: _unread(each.checkpoint, companions) for letter, each in (("A", a), ("B", b))
    }
    unread = [f"{letter}: {tie}" for letter, tie in ties.items() if tie]
    unread += _readers_lines(a, b)
    unread += [
        f"{letter}: {files.sentence}" for letter, files in unread_files.items() if files.telling
    ]
    computed = [each for each in judged if each.verdict == SAME_FUNCTION]
    where = ""
    if computed and isinstance(a, Model) and isinstance(b, Model):
        where = where_equal(a, b, computed)
    judged = [_as_stored(each, a.checkpoint, b.checkpoint) for each in judged]
    digests = [*filter(None, (digests_of(a.checkpoint, "A"), digests_of(b.checkpoint, "B")))]
    return Same(
        *short_names(a, b),
        verdict,
        judged,
        settings,
        tokens,
        left,
        unread,
        sample,
        provenance,
        companions,
        b.unloaded,
        names_sentence(b.unloaded, len(b.checkpoint), f"{printable(b.name)}'s"),
        where,
        digests,
    )


def _same_by_identity(a: Identity, b: Identity) -> Same:
    """The verdict where the values of one are known by their digests alone."""
    judged = judge_by_identity(a, b)
    heads = [each.verdict for each in judged if each.role == "unembedding"]
    is_tied = any(side.left_out.get("unembedding") == TIED_HEAD for side in (a, b))
    same_head = DIFFERENT not in heads and (bool(heads) or is_tied)
    settings = by_effect(differences(a.settings, b.settings), same_head=same_head)
    settings = with_packings(settings, a.says_packed, b.says_packed)
    if a.overwritten_head != b.overwritten_head:  # readers that overwrite it run another model
        settings.unknown.append(Difference(TIED, a.ties, b.ties, UNKNOWN))
    companions = compare_files(a, b)
    verdict = max((each.verdict for each in judged), key=VERDICTS.index, default=UNDECIDED)
    if settings.unknown or companions.deciding:
        verdict = max(verdict, UNDECIDED, key=VERDICTS.index)
    if settings.deciding:
        verdict = DIFFERENT
    return Same(
        a.name,
        b.name,
        verdict,
        judged,
        settings,
        compare_token_digests(a.tokenizer, b.tokenizer),
        not_compared=[],
        unread_files=[],
        sample=1.0,
        provenance=Provenance().of_all((*a.provenance.sources, *b.provenance.sources)),
        companions=companions,
        unloaded=(),
        names="",
    )


def _readers_lines(a: Readable, b: Readable) -> list[str]:
    """A line for a config.json that readers disagree on, unless they do so on both alike."""
    found = [readers_disagree(each) if isinstance(each, Model) else [] for each in (a, b)]
    if found[0] == found[1]:
        return []
    sides = zip("AB", found, strict=True)
    return [f"{letter}: {disagreement_line(these)}" for letter, these in sides if these]


def _as_stored(judged: Judged, a: Checkpoint, b: Checkpoint) -> Judged:
    """A verdict under the names that the files have."""
    names = (
        checkpoint.stored_names.get(name, name)
        for checkpoint, name in ((a, judged.name_a), (b, judged.name_b))
    )
    name_a, name_b = names
    return replace(judged, name_a=name_a, name_b=name_b)


def _tie(model: Readable) -> bool:
    return isinstance(model, Model) and says_tied(model)


def _effect(key: Difference) -> str:
    return "depends on the reader" if key.key.rpartition(".")[2] == TIED else "is not known"


def _unread(checkpoint: Checkpoint, companions: Companions) -> WeightFiles:
    """The files next to a checkpoint's weights, except files of modules that were compared."""
    compared = {file.path for each in companions.modules or () for file in each.checkpoint.files}
    files = checkpoint.weight_files
    return replace(
        files, names=[name for name in files.names if checkpoint.folder / name not in compared]
    )


def _needs_head(model: Readable) -> bool:
    """True if config.json names a language model; a head neither stored nor tied is random."""
    names = model.checkpoint.config.get("architectures")
    return isinstance(names, list) and any("LM" in str(name) for name in names)


def _judged(
    a: Readable, b: Readable, sample: float, companions: Companions
) -> tuple[list[Judged], list[str]]:
    """Every tensor of both with its verdict, and the names of those that were not compared."""
    tensors = [
        *counterparts(a, b),
        *(counterparts(*companions.modules) if companions.modules else ()),
    ]
    if why := why_incomparable(a, b):
        unknown = Deed(What.UNNAMED, detail=why)
        sides = [(each.a or each.b, each.label, each.a is not None) for each in tensors]
        lone = [alone(tensor, label, in_a=in_a) for tensor, label, in_a in sides if tensor]
        return [replace(each, verdict=UNDECIDED, done=unknown) for each in lone], []
    parts = [compared(a, b, each, sample) for each in tensors if each.a and each.b]
    only_a = [(each.a, each.label) for each in tensors if each.a and not each.b]
    only_b = [(each.b, each.label) for each in tensors if each.b and not each.a]
    judged, notes = [], []
    with bar(what="tensors", total=len(parts), unit="tensor") as shown:
        for each in in_threads(judge, parts):
            judged.append(each)
            shown.update()
    for i in few_compensated(judged):
        judged[i] = judge(parts[i], may_compensate=False)
    for i in few_quantised(judged, parts):
        judged[i] = judge(parts[i], may_quantise=False)
    ways = shown_ways(judged)
    for i in rounded_alone(judged):
        judged[i] = judge(parts[i], ways=ways)
    judged = [_by_part(a, b, *each) for each in zip(judged, parts, strict=True)]
    judged = name_shards(find_elsewhere(judged, parts), parts)
    judged = reordered_experts(a, judged, parts)
    heads = [_tied_head(a, b, *each) for each in ((only_a, True), (only_b, False))]
    for lost, in_a, tied in ((only_a, True, heads[0]), (only_b, False, heads[1])):
        packed = (a if in_a else b).checkpoint
        for tensor, label in lost:
            if NO_WEIGHTS.fullmatch(tensor.role):
                continue
            if scales_activations(tensor.name, packed) and _is_scale(tensor):
                whose = "A's" if in_a else "B's"
                notes.append(f"{tensor.name} (the scale of activations, a part of {whose} packing)")
                continue
            if tied is not None and tensor.role == "unembedding":
                judged.append(tied)
            else:
                judged.append(alone(tensor, label, in_a=in_a))
    judged = name_unread(judged, a.checkpoint, b.checkpoint)
    left = [
        f"{each.name} ({each.detail or each.deed})" for each in judged if each.verdict == UNDECIDED
    ]
    return _same_function(a, b, judged), left + notes


def _is_scale(tensor: NamedTensor) -> bool:
    """True if all values are positive numbers."""
    values = tensor.array()
    return bool(np.isfinite(values).all() and (values > 0).all())


def _by_part(a: Readable, b: Readable, judged: Judged, fused: Compared) -> Judged:
    """The verdict, with a deed for each part of a fused tensor where no single deed explains it."""
    if judged.verdict != DIFFERENT or judged.what not in BY_PART:
        return judged
    of_a, of_b = map(unchecked_tensors, (a, b))
    pairs = [*zip(of_a.parts(fused.a), of_b.parts(fused.b), strict=False)]
    if not pairs or any(x.role != y.role for x, y in pairs):
        return judged
    parts = [
        compared(a, b, Counterparts(of_a.label(x), x, y, "role"), fused.share) for x, y in pairs
    ]
    deeds = find_elsewhere([judge(each) for each in parts], parts)
    rounding = tolerance_of(fused.tensors)  # a part in one convention has no cells of its own
    done = {
        each.deed: (each.done, each.role)
        for each in deeds
        if each.verdict == DIFFERENT and not each.size <= rounding
    }
    if not done or any(each.what in UNEXPLAINED for each, _ in done.values()):
        return judged
    (first, _), *_ = done.values()
    return replace(judged, done=replace(first, detail=judged.detail, parts=(*done.values(),)))


def compared(a: Readable, b: Readable, paired: Counterparts, sample: float) -> Compared:
    """Two counterparts, and what a deed has to know of the row that they belong to."""
    x, y = paired.a, paired.b
    pair = paired.pair()
    assert x is not None
    assert y is not None
    assert pair is not None
    sizes = Sizes(y.role)
    if isinstance(b, Model):
        rotation, config = b.rotations.get(y.layer) if y.layer is not None else None, b.config
        turned = 0 if rotation is None else 2 * len(rotation.frequencies)
        sizes = Sizes(y.role, config.n_heads, config.n_kv_heads, config.head_dim, turned)
        if y.role.startswith(OF_MIXER):
            of_a = a.config if isinstance(a, Model) else config  # a GGUF file may not say it
            sizes = Sizes(y.role, *(heads_of(config) or heads_of(of_a)))
    return Compared(paired.label, x, y, pair, sizes, sample)


def _tied_head(
    a: Readable, b: Readable, lost: Sequence[tuple[NamedTensor, str]], in_a: bool
) -> Judged | None:
    """The head of one file against the other's token embedding, where the other ties them."""
    head = next((tensor for tensor, _ in lost if tensor.role == "unembedding"), None)
    tying = b if in_a else a
    if head is None or not isinstance(tying, Model) or "tokens" not in tying.tensors:
        return None
    # encoders' heads have more than a norm and a matrix
    ties = tying.ends.tied or "unembedding" in tying.family.also
    if not ties or tying.config.get("tie_word_embeddings", True) is not True:
        return None
    tokens = tying.tensors["tokens"]
    x, y = (head, tokens) if in_a else (tokens, head)
    judged = judge(compared(a, b, Counterparts("unembedding", x, y, "role"), 1.0), ways=())
    judged = replace(
        judged, role="unembedding", name_b=judged.name_b if not in_a else "", label="unembedding"
    )
    if judged.verdict == DIFFERENT:
        return replace(judged, done=Deed(What.TIED_HEAD, detail=judged.deed))
    detail = "tied to the token embedding in the other file"
    return replace(judged, done=replace(judged.done, detail=detail))


def _same_function(a: Readable, b: Readable, judged: Sequence[Judged]) -> list[Judged]:
    """The verdicts, where tensors that differ belong to layers that compute what they did."""
    if not isinstance(a, Model) or not isinstance(b, Model):
        return list(judged)
    mine = [
        i
        for i, each in enumerate(judged)
        if each.verdict == DIFFERENT and each.name_a and each.name_b
    ]
    comparable = (a.config.d_model, a.config.n_layers) == (b.config.d_model, b.config.n_layers)
    if not mine or not comparable or len(mine) != sum(each.verdict == DIFFERENT for each in judged):
        return list(judged)
    basis = basis_of(a, b) if any(judged[i].role == "tokens" for i in mine) else Basis()
    if basis is None:
        return list(judged)
    turned, own = basis.rotation is not None, b.tensors.own
    in_basis = Deed(What.STREAM_BASIS, "permuted" if basis.permuted else "rotated")
    deeds: dict[tuple[str | None, int], list[tuple[str, What]]] = {}
    for each in judged if turned else (judged[i] for i in mine):
        if each.layer is not None:
            deeds.setdefault((each.stack or own, each.layer), []).append((each.role, each.what))
    if not turned:  # one alone shows in what the layer gives
        deeds = {place: changed for place, changed in deeds.items() if len(changed) > 1}
    sizes = {}
    for (stack, layer), changed in deeds.items():
        roles = [role for role, _ in changed]
        is_run = stack == own  # other stacks are not run
        sizes[stack, layer] = apart(a, b, layer, basis, roles) if is_run else np.nan
    moved = {
        place: [judged[i] for i in mine if (judged[i].stack or own, judged[i].layer) == place]
        for place in sizes
    }
    same_ones = [place for place, size in sizes.items() if is_shown(a, basis, size, moved[place])]
    unknown = [
        place
        for place, size in sizes.items()
        if place not in same_ones and is_unknown(a, b, place[1], basis, size, deeds[place])
    ]
    of_last = [judged[i] for i in mine if judged[i].role in LAST]
    last = (turned or bool(of_last)) and is_shown(a, basis, last_apart(a, b, basis), of_last)
    if turned:
        outside = (
            each for each in judged if each.layer is None and not NO_WEIGHTS.fullmatch(each.role)
        )
        if (
            not last
            or not {(own, layer) for layer in range(a.config.n_layers)} <= {*same_ones}
            or not all(each.role in LAST or is_turned(a, b, each, basis) for each in outside)
        ):
            return list(judged)
    with_norms = {judged[i].layer for i in mine if judged[i].role.startswith("norm.")}
    proved = [moved[place] for place in same_ones] + ([of_last] if last else [])
    left = {id(each) for tensors in proved for each in without_gauge(a, b, tensors, basis)}
    result = list(judged)
    for i in mine:
        each = judged[i]
        place, is_folded = (each.stack or own, each.layer), each.layer in with_norms
        if id(each) in left:
            done = Deed(What.NEARLY_A_GAUGE, detail=GIVES_THE_SAME)
            result[i] = replace(each, verdict=UNDECIDED, done=done)
        elif place in same_ones or (each.layer is None and (last if each.role in LAST else turned)):
            now = in_basis if turned else renamed(each.role, each.done, folded=is_folded)
            detail = "; ".join(filter(None, (each.detail, "" if turned else GIVES_THE_SAME)))
            done = replace(now, detail=detail)
            result[i] = replace(each, verdict=SAME_FUNCTION, done=done)
        elif place in unknown:
            detail = f"{NOT_RUN}; {each.detail}".removesuffix("; ")
            done = replace(each.done, detail=detail)
            result[i] = replace(each, verdict=UNDECIDED, done=done)
    return result
