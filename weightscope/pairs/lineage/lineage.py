"""Where a checkpoint comes from: the verdict, the layers that match, and what was done, as one
result.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.files import REPORT
from weightscope.core.progress import progress_shown
from weightscope.core.results import Result
from weightscope.core.tables import Column, Table, as_json
from weightscope.model.model import Model
from weightscope.pairs.changes.all_tensors import TensorChanges
from weightscope.pairs.changes.head import Basis
from weightscope.pairs.deeds.deed import What
from weightscope.pairs.deeds.thresholds import EXPLAINED
from weightscope.pairs.lineage.differences import (
    RESIZED,
    Kind,
    WeightChanges,
    structure_kinds,
    weight_changes,
    weight_kinds,
)
from weightscope.pairs.lineage.direction import HOW, Proof, merge_share, prove, without_layers
from weightscope.pairs.lineage.initial import initial_ones, learnt_alike
from weightscope.pairs.lineage.matching import BACKGROUND, ROUTES, Match
from weightscope.pairs.lineage.parts import CALLED, NOTHING, Part, compare_parts, unread_parts
from weightscope.pairs.lineage.permutation_p import permutation_log_p
from weightscope.pairs.lineage.probes import PUBLIC, Probes, keyed_probes
from weightscope.pairs.lineage.shared_tensors import FEED_FORWARD, NORMS, TOKENS
from weightscope.pairs.lineage.shares import Shares, shares_of
from weightscope.pairs.lineage.sketches import Sketches
from weightscope.pairs.lineage.verdict import (
    CLEARLY,
    Base,
    ComparedBase,
    Related,
    candidates,
    judge,
    sources,
)
from weightscope.report.findings import listed, spans

NAMED = 3  # damaged fingerprints that a sentence names
SMALLEST = 1e-99  # probability that is shown as a number
NOT_ALIKE = 0.97  # likeness below which fingerprints alone show that weights differ
NOT_IN_PRINTS = (
    "feed-forward networks and embeddings were not compared, since a fingerprint does not hold them"
)
TABLES: dict[str, Callable[["Lineage"], Any]] = {
    "lineage.json": lambda lineage: lineage.as_json(),
    "alignment.csv": lambda lineage: lineage.alignment,
    "directions.csv": lambda lineage: lineage.along.directions,
    "directions.npz": lambda lineage: lineage.along.direction_vectors,
}
RESULTS = (*TABLES, *REPORT, "lineage.png", "lineage.svg", "lineage.figure.csv")
BY_PRINTS = {  # by whether the signs were drawn from a key
    False: " This rests on fingerprints, and a checkpoint can be made to fit public probes; its weights would decide.",
    True: " This rests on fingerprints, drawn with a key.",
}
FORGEABLE = "only an original forged for this would show the same"
UNKNOWN_ORDER = "the weights do not show which came first"
COMPARED_TOO = "Feed-forward networks, embeddings and norms were compared too: nothing is shared."
OUT_OF_REACH = "Distillation, or training a new model on another's answers, copies no weights, so it cannot be detected here."


def lineage(
    suspect: Base,
    bases: Base | Iterable[Base],
    *,
    probe_key: str | Path | None = None,
    nonce: str | None = None,
    progress: bool = False,
) -> "Lineage":
    """Find out from weights whether a checkpoint has an origin in common with one of several
    others, and what differs.

    Parameters
    ----------
    suspect : Model, Sketches, str or Path
        A model, anything that `open_model` opens, a fingerprint or its file (`weightscope
        fingerprint`).
    bases : Model, Sketches, str or Path, or several
        The same, or a folder of fingerprint files; those most like the suspect are compared.
    probe_key : str or Path, optional
        The key file that fingerprints were made with (`weightscope fingerprint --probe-key`).
    nonce : str, optional
        What the probes of checkpoints are drawn with, to make an earlier result again; drawn anew
        without it.
    progress : bool
        Show a progress bar.

    Returns
    -------
    Lineage
        `verdict` "derived" (from `base`), "related" (the weights do not show which came first),
        "unrelated" or "undecided"; `base`, `p_value`, `kinds`, `weights`, `alignment`.

    Raises
    ------
    CheckpointError
        A checkpoint or a fingerprint cannot be read.

    Examples
    --------
    >>> import weightscope as ws
    >>> result = ws.lineage("embedded", "embedded")
    >>> result.verdict, [kind.kind for kind in result.kinds]
    ('related', ['same bytes'])
    """
    named = [bases] if isinstance(bases, Model | Sketches | str | Path) else list(bases)
    if not named:
        raise CheckpointError("lineage needs at least one base")
    with progress_shown(progress):
        result = _lineage(suspect, named, keyed_probes(probe_key) if probe_key else PUBLIC, nonce)
    read = [result.suspect.read, *(each.base.read for each in result.compared)]
    return replace(result, provenance=result.provenance.of_all(read))


def _lineage(suspect: Base, named: Sequence[Base], key: Probes, nonce: str | None) -> "Lineage":
    """The same without the files that were read."""
    pairs, looked_at, unread, probes = candidates(suspect, named, key, nonce)
    compared = [judge(sketches, base) for sketches, base in pairs]
    result = _judged(pairs[0][0], compared, looked_at, unread)
    return replace(result, probes=probes, by_neurons=_by_neurons(pairs))


def _by_neurons(pairs: Sequence[tuple[Sketches, Sketches]]) -> dict[str, float]:
    """The p-value of the permutation test of neurons by base, where weights are there and shapes
    agree.
    """
    log_p = {
        base.name: permutation_log_p(suspect.source, base.source)
        for suspect, base in pairs
        if suspect.source is not None and base.source is not None
    }
    return {name: exp(value) for name, value in log_p.items() if value is not None}


def p_value_of(log_p: Sequence[float], comparisons: int) -> float:
    """The smallest of some probabilities, times the number of comparisons by which it may be small
    by chance.
    """
    return exp(min(0.0, max(-700.0, min(log_p, default=0.0) + log(comparisons))))


def _judged(
    sketches: Sketches, compared: list[ComparedBase], looked_at: int, unread: list[str]
) -> "Lineage":
    """The verdict on all bases."""
    comparisons = max(1, looked_at) * len(ROUTES)
    p = p_value_of([each.log_p for each in compared], comparisons)
    related = sorted(
        (Related(j.base, j.match) for j in compared if j.match), key=lambda each: -each.weight
    )
    if related:
        return replace(_related(sketches, compared, related, p, comparisons), unread=unread)
    parts = [_parts_without_heads(sketches, each) for each in compared]
    shared = [
        (each.base, by_part)
        for each, by_part in zip(compared, parts, strict=True)
        if any(part.is_shared for name, part in by_part.items() if name != NORMS)
    ]
    if shared:
        base, of_base = max(shared, key=lambda each: sum(part.share for part in each[1].values()))
        return Lineage(
            sketches,
            compared,
            None,
            "related",
            p,
            comparisons,
            unread=unread,
            parts=of_base,
            sharing=base,
        )
    doubts = [
        f"{printable(each.base.name)}: {'; '.join(reasons)}"
        for each, by_part in zip(compared, parts, strict=True)
        # norms alone do not decide it
        if (reasons := list(dict.fromkeys(_said_of(by_part, "undecided", "related"))))
    ]
    doubts += [listed(unread, NAMED)] if unread else []
    verdict = "undecided" if doubts else "unrelated"
    least = {
        name: min(
            (by_part[name] for by_part in parts if name in by_part), key=lambda part: part.verdict
        )
        for name in parts[0]
    }
    return Lineage(
        sketches, compared, None, verdict, p, comparisons, doubts=doubts, unread=unread, parts=least
    )


def _parts_without_heads(suspect: Sketches, compared: ComparedBase) -> dict[str, Part]:
    """What each part shares with a base whose heads were not found."""
    attention = Part("undecided", compared.doubt) if compared.doubt else Part("unrelated", NOTHING)
    return _parts(suspect, compared.base, attention)


def _parts(
    suspect: Sketches, base: Sketches, attention: Part, basis: Basis | None = None
) -> dict[str, Part]:
    """What each part shares with a base, if the weights of both are there."""
    if suspect.source is None or base.source is None:
        return unread_parts(attention, NOT_IN_PRINTS)
    return compare_parts(suspect.source, base.source, attention, basis)


def _said_of(parts: Mapping[str, Part], *verdicts: str) -> list[str]:
    """What is said of the parts with one of these verdicts; a doubt about heads is a sentence
    already.
    """
    bare = {
        part.lead
        for name, part in parts.items()
        if part.verdict == "undecided" and name == "attention"
    }
    return [
        part.lead if part.lead in {*bare, NOT_IN_PRINTS} else f"{CALLED[name]}: {part.lead}"
        for name, part in parts.items()
        if part.verdict in verdicts
    ]


TURNED = "stream rotated or permuted"  # where weights do not tell which
# a merge of two models minus a third one leaves as much as training does
NOT_ALL = "fine-tuned or merged with more"
LEFT_OVER = "The merge leaves {left:.2g} of the suspect's norm unexplained: by training, or by bases not given."
TRAINED = ("fine-tuned", "low-rank update", "values set to zero")
# what a merge looks like next to one of its bases
OF_A_MERGE = (*TRAINED, "norms folded", "norms folded: the base")
SMALLER = {"B": {"layers removed", "vocabulary cut"}, "A": {"layers replaced or added", "layers repeated",
           "vocabulary extended"}}  # fmt: skip  # what the newer one lacks, by whether that is the suspect
OTHER_SIZES = {*RESIZED, "heads removed", "heads added", "layers replaced or added"}


def _related(
    suspect: Sketches,
    compared: list[ComparedBase],
    related: Sequence[Related],
    p: float,
    comparisons: int,
) -> "Lineage":
    """How the suspect differs from the first of these bases, or from several, and which came
    first.
    """
    first, of_layers = related[0], sources(suspect, related)
    shares, drift, older, verdict, basis = (
        Shares({}),
        {},
        None,
        "related",
        Basis(known=first.match.route == "direct"),
    )
    along = TensorChanges([])
    attention = _attention(first.match)
    if len({each.base.name for each in of_layers if each is not None}) > 1:
        kinds, shares = _layers_of_several(suspect, of_layers)
    else:
        kinds = list(structure_kinds(suspect, first.base, first.match))
        if suspect.source is not None and first.base.source is not None:
            weights = weight_changes(suspect.source, first.base.source, first.match)
            drift, basis = (
                {layer.layer: layer.drift.maps for layer in weights.layers},
                weights.basis,
            )
            along = weights.along
            attention = _attention(first.match, weights)
            structure = {kind.kind for kind in kinds}
            done = weight_kinds(weights, structure, suspect.source, first.base.source)
            shares = (
                shares_of(suspect.source, _summands(first, compared))
                if first.match.route == "direct"
                else shares
            )
            if shares.weights:
                kinds.append(_merge(suspect, shares))
                done = [kind for kind in done if kind.kind not in OF_A_MERGE]
                if min(shares.left, shares.by_tensor) > EXPLAINED * weights.rounding:
                    done.append(Kind(NOT_ALL, suspect.layers, LEFT_OVER.format(left=shares.left)))
                elif exact := _exact_shares(suspect.source, compared, list(shares.weights)):
                    verdict, older, shares = (
                        "derived",
                        Proof(Counter({"merge": 1})),
                        replace(shares, weights=exact),
                    )
            elif derivation := _proved(suspect, first, weights, structure, "B"):
                verdict, older = "derived", derivation
                done = _as_proved(done, derivation, suspect, "suspect")
            elif reverse := _proved(suspect, first, weights, structure, "A"):
                older = reverse
                done = _as_proved(done, reverse, suspect, "base")
            kinds += done
    kinds += _unnamed(suspect, first, kinds, basis)
    parts = _parts(suspect, first.base, attention, basis)
    kinds = _with_parts(kinds, parts, suspect, first)
    begun = initial_ones(suspect, first, parts, {kind.kind for kind in kinds})
    if begun:  # gains of one are where training began; nothing was folded
        kinds = [kind for kind in kinds if not kind.kind.startswith("norms folded")]
    apart, learnt = learnt_alike(suspect, related)
    if verdict == "derived":
        parts = {
            name: replace(part, verdict=verdict) if part.is_shared else part
            for name, part in parts.items()
        }
    return Lineage(
        suspect,
        compared,
        first,
        verdict,
        p,
        comparisons,
        kinds,
        shares.weights,
        drift,
        [],
        of_layers,
        proof=older,
        parts=parts,
        initial=begun,
        apart=apart,
        learnt=learnt,
        along=along,
    )


def _with_parts(
    kinds: Sequence[Kind], parts: Mapping[str, Part], suspect: Sketches, first: Related
) -> list[Kind]:
    """Kinds with what the comparison of parts says of the vocabulary and of feed-forward
    networks.
    """
    networks, tokens = parts[FEED_FORWARD], parts[TOKENS]
    kept = [
        kind for kind in kinds if not (kind.kind.startswith("vocabulary") and _other_rows(tokens))
    ]
    if _other_rows(tokens):
        sizes = [side.about["vocabulary"] for side in (first.base, suspect)]
        name = "vocabulary reordered" if tokens.is_moved else "vocabulary replaced"
        kept.append(
            Kind(name, [], f"{sizes[0]:,} tokens in the base, {sizes[1]:,} here: {tokens.lead}.")
        )
    if networks.verdict == "unrelated":
        text = "Heads match, and no neuron of the feed-forward networks does."
        kept.append(Kind("feed-forward networks replaced", suspect.layers, text))
    if networks.is_moved and not any(kind.kind.startswith(("neurons", "experts")) for kind in kept):
        kept.append(
            Kind("neurons permuted", suspect.layers, f"Feed-forward networks: {networks.lead}.")
        )
    return kept


def _other_rows(tokens: Part) -> bool:
    """Whether the rows of an embedding are others, or of other tokens."""
    return tokens.verdict == "unrelated" or tokens.is_moved


def _attention(match: Match, weights: WeightChanges | None = None) -> Part:
    """What heads share, by their match, and whether their tensors are equal."""
    count, total = sum(j is not None for j in match.layers), len(match.layers)
    matrices = (
        [change for _, change in weights.every if change.name_a in weights.attention]
        if weights
        else []
    )
    if matrices and count == total and all(change.kind is What.IDENTICAL for change in matrices):
        return Part("related", f"same values in {count} of {counted(total, 'layer')}", 1.0)
    lead = f"{count} of {counted(total, 'layer')} have a counterpart (likeness {match.mean:.2f})"
    return Part("related", lead, count / total)


def _proved(
    suspect: Sketches, first: Related, weights: WeightChanges, structure: set[str], which: str
) -> Proof | None:
    """How the suspect follows from the base, for `which` "B", or the base from the suspect, with
    something lost.
    """
    assert suspect.source is not None and first.base.source is not None
    smaller = SMALLER[which] & structure
    if (OTHER_SIZES & structure) or smaller - {"layers removed"}:
        return None
    derivation = prove(weights, which)
    if derivation is not None and smaller:
        gone = [layer for j, layer in enumerate(first.base.layers) if j not in first.match.layers]
        if not without_layers(first.base.source, gone):
            return None
        derivation.ways["layers removed"] = len(gone)
    return derivation if derivation is not None and derivation.ways else None


def _as_proved(done: Sequence[Kind], proof: Proof, suspect: Sketches, smaller: str) -> list[Kind]:
    """Kinds, where proved ones replace those that they may look like."""
    mine = smaller == "suspect"
    looks = ("fine-tuned",) if proof.ways["direction removed"] else TRAINED
    kept = [
        kind
        for kind in done
        if not kind.kind.startswith(looks) and (mine or not kind.kind.startswith("cast"))
    ]
    for way in (way for way in HOW if way != "layers removed"):
        if proof.ways[way] and not any(each.kind.startswith(way) for each in kept):
            larger = "the base's" if mine else "the suspect's"
            tensors = f"{counted(proof.ways[way], 'tensor')} of the {smaller}"
            text = f"{tensors} can be recomputed from {larger} by {HOW[way]}."
            name = way if mine else f"{way}: the base"
            kept.append(Kind(name, sorted(proof.layers.get(way, ())) or suspect.layers, text))
    return kept


def _summands(first: Related, compared: Sequence[ComparedBase]) -> list[Related]:
    """Every base with the first one's sizes: products of two factors do not show a small share of a
    merge.
    """
    sizes = [
        (each.base.about["d_model"], len(each.base.layers), len(each.base.layer))
        for each in compared
    ]
    needed = (first.base.about["d_model"], len(first.base.layers), len(first.base.layer))
    same = [each for each, size in zip(compared, sizes, strict=True) if size == needed]
    return [
        Related(
            each.base, each.match if each.match and each.match.route == "direct" else first.match
        )
        for each in same
    ]


def _exact_shares(
    suspect: Model, compared: Sequence[ComparedBase], names: Sequence[str]
) -> dict[str, float]:
    """The shares of two bases whose rounded sum every value of the suspect is; empty where that is
    not shown.
    """
    models = [
        (each.base.name, each.base.source)
        for each in compared
        if each.base.name in names and each.base.source
    ]
    if len(names) != 2 or len(models) != 2:
        return {}
    (first, a), (second, b) = models
    share = merge_share(suspect, a, b)
    return {} if share is None else {first: share, second: 1 - share}


def _layers_of_several(
    suspect: Sketches, of_layers: Sequence[Related | None]
) -> tuple[list[Kind], Shares]:
    """A merge that takes whole layers from several bases."""
    layers: dict[str, list[int]] = {}
    for layer, source in zip(suspect.layers, of_layers, strict=True):
        if source is not None:
            layers.setdefault(source.base.name, []).append(layer)
    parts = "; ".join(f"{spans(taken)} from {printable(name)}" for name, taken in layers.items())
    every = sorted(layer for taken in layers.values() for layer in taken)
    kind = Kind("merge of layers", every, f"Layers {parts}.", len(every) / len(suspect.layers))
    return [kind], Shares(
        {name: len(taken) / len(suspect.layers) for name, taken in layers.items()}
    )


def _merge(suspect: Sketches, shares: Shares) -> Kind:
    """A sum of several bases."""
    parts = ", ".join(f"{share:.2f} of {printable(name)}" for name, share in shares.weights.items())
    left = f"{shares.left:.2g} of the suspect's norm is left over, against {shares.alone:.2g} with one base"
    if shares.by_tensor < shares.left / 2:
        left += f", and {shares.by_tensor:.2g} with shares of its own for each tensor, as slerp has"
    text = f"{parts}. On rows outside the fit, {left}."
    return Kind("merge", suspect.layers, text, 1 - shares.left / shares.alone)


def _unnamed(suspect: Sketches, first: Related, kinds: Sequence[Kind], basis: Basis) -> list[Kind]:
    """What the match of heads shows, if no other kind says so."""
    match, names = first.match, " ".join(kind.kind for kind in kinds)
    if match.route == "spectra":
        text = (
            "Only the singular values of heads agree; no change of basis alters these. This evidence is weaker, and it "
            "does not show what else was done."
        )
        return [
            Kind(
                TURNED, suspect.layers, text, float(np.mean([j is not None for j in match.layers]))
            )
        ]
    if (
        match.route == "tokens"
        and not basis.same
        and "stream" not in names
        and "width" not in names
    ):
        text = (
            "Heads agree when seen through the token embeddings, but not in the stream's own basis."
        )
        return [Kind(TURNED, suspect.layers, text)]
    if not kinds and suspect.source is None and match.mean < NOT_ALIKE:
        return [
            Kind("fine-tuned", suspect.layers, f"The mean likeness of heads is {match.mean:.2f}.")
        ]
    return []


@dataclass(frozen=True, eq=False, repr=False)
class Lineage(Result):
    """Where a checkpoint comes from.

    `verdict` is "derived" where the suspect can be recomputed from the base, which holds more;
    "related" where they have an origin in common, and the weights do not show that the base came
    first; "unrelated" where nothing is shared, in heads, feed-forward networks, embeddings or
    norms; "undecided" where not everything could be compared.
    """

    FIGURE, PAGE = "pairs.lineage.figures:lineage_figure", "pairs.lineage.page:write_lineage_page"
    TABLES, FILES = TABLES, RESULTS

    suspect: Sketches
    compared: list[ComparedBase]  # every base
    origin: Related | None  # the base that it shares heads with, and the match that shows this
    verdict: str  # "derived", "related", "unrelated" or "undecided"; as above
    # bound of the probability that strangers are this alike, times the comparisons; at most 1
    p_value: float
    comparisons: int  # number of bases times routes
    # How the suspect differs from the base; neither needs to come first
    kinds: list[Kind] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)  # share of each base in a merge
    # |S - B| / |B| of heads' maps by layer, if weights were read
    drift: dict[int, float] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)  # why the verdict is "undecided"
    # the base that has each layer's counterpart
    sources: list[Related | None] = field(default_factory=list)
    # fingerprints of a folder that were skipped, and why
    unread: list[str] = field(default_factory=list)
    # how the newer can be recomputed from the older, if the weights show it
    proof: Proof | None = None
    # "attention", "feed_forward", "tokens", "norms", perhaps more
    parts: dict[str, Part] = field(default_factory=dict)
    sharing: Sketches | None = None  # a base that shares no heads but another part
    # p-value of the permutation test of neurons, by base
    by_neurons: dict[str, float] = field(default_factory=dict)
    initial: str = ""  # what speaks for an initialisation that both share, as a sentence
    apart: str = ""  # how alike what was learnt from a base as initialised is, as a sentence
    # by base, cosine of the changes from a base as initialised
    learnt: dict[str, float] = field(default_factory=dict)
    # where the signs of sketches of the pairs come from whose weights are both there
    probes: Probes = PUBLIC
    along: TensorChanges = field(
        default_factory=lambda: TensorChanges([]), repr=False
    )  # for directions that were removed
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @property
    def about(self) -> str:
        return f"{printable(self.suspect.name)}: {self.verdict}"

    @property
    def base(self) -> str | None:
        """The name of the base that the suspect shares weights with, or None."""
        if self.sharing is not None:
            return self.sharing.name
        return None if self.origin is None else self.origin.base.name

    @property
    def came_first(self) -> str | None:
        """Which of the two holds more, as the weights show it: "base" or "suspect"; None if they do
        not.
        """
        return None if self.proof is None else "base" if self.verdict == "derived" else "suspect"

    @property
    def lead(self) -> str:
        """The verdict in words, with its evidence."""
        name, n = printable(self.suspect.name), len(self.compared)
        bases = printable(self.compared[0].base.name) if n == 1 else f"any of {counted(n, 'base')}"
        none = f"No shared attention heads were found between {name} and {bases}"
        if self.sharing is not None:
            both = f"{name} and {printable(self.sharing.name)}"
            known = f"No shared attention heads were found between {both}, but they share an origin"
            if self.parts["attention"].is_shared:
                known = f"{both} share an origin, although other norms make other heads of their attention"
            return f"{known}: {'; '.join(_said_of(self.parts, 'related'))}. {UNKNOWN_ORDER.capitalize()}."
        if self.verdict == "undecided":
            names = [printable(each.base.name) for each in self.compared]
            cleared = [
                name
                for name in names
                if not any(doubt.startswith(f"{name}: ") for doubt in self.doubts)
            ]
            nothing = f" Nothing is shared with {listed(cleared, NAMED)}." if cleared else ""
            return f"{none}.{nothing} It is undecided whether they share anything else: {'; '.join(self.doubts)}."
        if self.origin is None:
            return f"{none}. {COMPARED_TOO} {OUT_OF_REACH}"
        match, base_name = self.origin.match, printable(self.origin.base.name)
        count = sum(j is not None for j in match.layers)
        p = f"p < {SMALLEST:g}" if self.p_value < SMALLEST else f"p = {self.p_value:.1g}"
        numbers = (
            f"{count} of {counted(len(match.layers), 'layer')} have a counterpart, with a mean likeness of "
            f"{match.mean:.2f} ({p}, {counted(self.comparisons, 'comparison')})"
        )
        what = f"{self._difference}.{self._parts_apart}{self._caution}"
        parents = " and ".join(
            f"{printable(base)} ({share:.2f})" for base, share in self.weights.items()
        )
        if self.verdict == "derived" and self.proof is not None:
            bases, them = (parents, "them") if self.weights else (base_name, base_name)
            how = f"it can be recomputed from {them} by {self.proof.how}"
            return f"{name} was derived from {bases}: {how}, and {numbers}; {FORGEABLE}. {what}"
        order = UNKNOWN_ORDER
        if self.proof is not None:
            order = f"{base_name} can be recomputed from {name} by {self.proof.how}, so {name} came first"
        if self.initial:
            return f"{name} and {base_name} share an origin: {numbers}. {self.initial}{self.apart} {what}"
        if len(self.weights) > 1:
            return f"{name} shares its origin with {parents}, as a merge does: {numbers}; {order}. {what}"
        return f"{name} and {base_name} share an origin: {numbers}; {order}.{self.apart} {what}"

    @cached_property
    def ties(self) -> list[str]:
        """Other bases that the suspect is as near to as to the first one."""
        first = self.origin
        if first is None or self.weights:
            return []
        related = [Related(each.base, each.match) for each in self.compared if each.match]
        return [
            each.base.name
            for each in related
            if each.base is not first.base
            and each.match.route == first.match.route
            and each.weight >= first.weight - CLEARLY
        ]

    @property
    def _caution(self) -> str:
        """What else fits as well, and what rests on fingerprints alone."""
        assert self.origin is not None
        base, text = self.origin.base, ""
        if self.ties:
            text += f" {printable(listed(self.ties, NAMED))} {'fits' if len(self.ties) == 1 else 'fit'} as well."
        if base.source is not None and self.suspect.source is not None:
            return text
        text += BY_PRINTS[bool(self.origin.base.probes.seed)]
        if base.source is None:
            text += f" {printable(base.name)} is what the fingerprint calls itself."
        return text

    @property
    def _difference(self) -> str:
        """How the suspect differs from the base, as a sentence without its full stop."""
        assert self.origin is not None
        if len(self.kinds) == 1 and self.kinds[0].kind.startswith("same "):
            (same,) = self.kinds
            complete = same.kind == "same bytes" and same.strength == 1
            return "Nothing differs: same bytes" if complete else same.evidence.removesuffix(".")
        if self.kinds:
            return f"What differs: {'; '.join(kind.kind for kind in self.kinds)}"
        if self.suspect.source is not None and self.origin.base.source is not None:
            return "No known kind of change explains how they differ"
        return "To see how they differ, compare the weights: fingerprints hold too little for that"

    @property
    def _parts_apart(self) -> str:
        """The parts that the match of heads says nothing of: those without an origin in common."""
        apart = {
            name: part
            for name, part in self.parts.items()
            if part.verdict in ("unrelated", "undecided")
        }
        if not apart or self.suspect.source is None or self.sharing is not None:
            return ""
        return f" By part: {'; '.join(f'{CALLED[name]}: {part.lead}' for name, part in self.parts.items())}."

    @cached_property
    def alignment(self) -> Table:
        """One row per layer of the suspect; its csv() is alignment.csv."""
        rows = []
        for i, layer in enumerate(self.suspect.layers):
            source = self.sources[i] if self.sources else None
            j = None if source is None else source.match.layers[i]
            if source is None or j is None:
                rows.append((layer, "", *[np.nan] * 5))
                continue
            match, heads = source.match, source.match.heads[i]
            numbers = (
                match.likeness[i, j],
                match.z[i],
                float((heads == np.arange(len(heads))).sum()),
            )
            rows.append(
                (
                    layer,
                    source.base.name,
                    float(source.base.layers[j]),
                    *numbers,
                    self.drift.get(layer, np.nan),
                )
            )
        return Table.of_rows(ALIGNMENT, rows)

    @cached_property
    def background(self) -> Table:
        """What the likeness was judged against: one row per base and route."""
        rows = []
        for compared in self.compared:
            for route, match in compared.matches.items():
                mean, spread = BACKGROUND.get(route, (np.nan, np.nan))
                unpaired = match.unpaired
                rest = float(np.nanmean(unpaired)) if np.isfinite(unpaired).any() else np.nan
                count = sum(j is not None for j in match.layers)
                rows.append(
                    (
                        compared.base.name,
                        ROUTES[route],
                        count,
                        match.mean,
                        rest,
                        mean,
                        spread,
                        match.log_p / log(10),
                    )
                )
        return Table.of_rows(BACKGROUND_COLUMNS, rows)

    @cached_property
    def part_table(self) -> Table:
        """One row per part of the suspect."""
        rows = [(CALLED[name], part.verdict, part.lead) for name, part in self.parts.items()]
        return Table.of_rows(PARTS, rows)

    @cached_property
    def no_evidence(self) -> Table:
        """What the suspect and the bases say about themselves; this proves nothing."""
        names = ("family", "layers", "heads", "kv_heads", "d_model", "vocabulary", "config")
        prints = [self.suspect, *(compared.base for compared in self.compared)]
        rows = [(p.name, *(str(p.about.get(name, "")) for name in names)) for p in prints]
        return Table.of_rows([Column("name"), *map(Column, names)], rows)

    def _judged_alone(self, compared: ComparedBase) -> dict[str, Any]:
        """What is known of one base by itself, whatever the others show."""
        base, match = compared.base, compared.match
        return {
            "name": base.name,
            "heads": "related" if match else "undecided" if compared.doubt else "unrelated",
            "likeness": match.mean if match else None,
            "doubt": compared.doubt,
            "known_by": "weights" if base.source is not None else "fingerprint",
            "heads_sha256": base.about.get("heads_sha256"),
            "permutation_p": self.by_neurons.get(base.name),
            "learnt": self.learnt.get(base.name),
        }

    def printed(self) -> list[str | Table]:
        """What the terminal shows, from top to bottom."""
        lines: list[str | Table] = [printable(self.lead)]
        lines += [f"{kind.kind}: {printable(kind.evidence)}" for kind in self.kinds]
        if self.unread and self.origin:
            lines.append(f"Not compared: {listed(self.unread, NAMED)}.")
        return [*lines, self.part_table, self.alignment if self.origin else self.background]

    def shown(self) -> list[Table]:
        """The layers and their counterparts."""
        return [self.alignment]

    def as_json(self) -> dict[str, Any]:
        """What `weightscope lineage --json` prints and lineage.json holds."""
        return dict(
            as_json(
                self.provenance.envelope(self.lead)
                | {
                    "suspect": self.suspect.name,
                    "verdict": self.verdict,
                    "base": self.base,
                    "p_value": self.p_value,
                    "parts": {
                        name: {"verdict": part.verdict, "lead": part.lead}
                        for name, part in self.parts.items()
                    },
                    "kinds": [vars(kind) for kind in self.kinds],
                    "weights": self.weights,
                    "doubts": self.doubts,
                    "comparisons": self.comparisons,
                    "alignment": self.alignment.records(),
                    "directions": self.along.directions.records() if self.along.directions else [],
                    "background": self.background.records(),
                    "no_evidence": self.no_evidence.records(),
                    "bases": [self._judged_alone(each) for each in self.compared],
                    "ties": self.ties,
                    "unread": self.unread,
                    "probe_seed": self.probes.seed if self.probes.nonce else None,
                    "nonce": self.probes.nonce or None,
                    "probe_digests": self.probes.digests,
                }
            )
        )


PARTS = (
    Column("part"),
    Column("verdict"),
    Column("evidence", meaning="What the suspect shares with the base in this part."),
)
ALIGNMENT = (
    Column("layer", meaning="The suspect's layer."),
    Column("base", meaning="The base that has its counterpart."),
    Column("base_layer", symbol="base's layer", format=".0f"),
    Column("likeness", meaning="Mean cosine of the maps of matched heads.", format=".3f"),
    Column("z", meaning="Distance from strangers, in standard deviations.", format=".1f"),
    Column(
        "heads_in_place",
        symbol="heads in place",
        meaning="Heads that kept their index.",
        format=".0f",
    ),
    Column(
        "drift",
        symbol="$‖ΔW‖/‖W‖$",
        meaning="How far apart the heads' maps are; median.",
        format=".2g",
    ),
)
BACKGROUND_COLUMNS = (
    Column("base"),
    Column("route", meaning="What was compared."),
    Column("layers_found", symbol="layers found"),
    Column("likeness", meaning="Mean over counterparts.", format=".3f"),
    Column(
        "other_pairs",
        symbol="other pairs",
        meaning="Mean likeness of all other pairs of layers.",
        format=".3f",
    ),
    Column(
        "strangers", meaning="Mean likeness of unrelated checkpoints, above chance.", format=".3f"
    ),
    Column("spread", meaning="Standard deviation of their likeness.", format=".3f"),
    Column(
        "log10_p",
        symbol="$log_10 p$",
        meaning="Of the probability that strangers are this alike.",
        format=".1f",
    ),
)
