"""Find where a checkpoint comes from: the verdict, matching layers and changes as one result."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.files import REPORT
from weightscope.core.progress import progress_shown
from weightscope.core.results import Result
from weightscope.core.tables import Column, Table, as_json, column
from weightscope.model.model import Model
from weightscope.pairs.changes.all_tensors import TensorChanges
from weightscope.pairs.changes.head import Basis
from weightscope.pairs.deeds.deed import What
from weightscope.pairs.deeds.thresholds import EXPLAINED
from weightscope.pairs.lineage.differences import (
    FOLDS,
    NEURONS,
    RESIZED,
    SAME,
    VOCABULARY,
    Kind,
    WeightChanges,
    structure_kinds,
    weight_changes,
    weight_kinds,
)
from weightscope.pairs.lineage.direction import HOW, Derivation, merge_share, prove, without_layers
from weightscope.pairs.lineage.initial import TURNED, initial_ones, learnt_alike
from weightscope.pairs.lineage.matching import BACKGROUND, ROUTES, Match
from weightscope.pairs.lineage.neurons import permutation_log_p
from weightscope.pairs.lineage.parts import (
    CALLED,
    NOTHING,
    PartVerdict,
    compare_parts,
    unread_parts,
)
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
BY_PRINTS = (
    " This rests on fingerprints, and a checkpoint can be made to fit public probes; its weights "
    "would decide."
)
BY_KEYED_PRINTS = " This rests on fingerprints, drawn with a key."
FORGEABLE = "only an original forged for this would show the same"
UNKNOWN_ORDER = "the weights do not show which came first"
COMPARED_TOO = "Feed-forward networks, embeddings and norms were compared too: nothing is shared."
OUT_OF_REACH = (
    "Distillation, or training a new model on another's answers, copies no weights, so it cannot "
    "be detected here."
)


def lineage(
    suspect: Base,
    bases: Base | Iterable[Base],
    *,
    probe_key: str | Path | None = None,
    nonce: str | None = None,
    progress: bool | None = None,
) -> "Lineage":
    """Find out whether a checkpoint shares an origin with one of several others.

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
    progress : bool, optional
        Show a bar; by default in a notebook only.

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
    listed_bases = [bases] if isinstance(bases, Model | Sketches | str | Path) else list(bases)
    if not listed_bases:
        raise CheckpointError("lineage needs at least one base")
    key = keyed_probes(probe_key) if probe_key else PUBLIC
    with progress_shown(progress):
        result = _lineage(suspect, listed_bases, key, nonce)
    read = [result.suspect.read, *(each.base.read for each in result.compared)]
    return replace(result, provenance=result.provenance.of_all(read))


def _lineage(suspect: Base, bases: Sequence[Base], key: Probes, nonce: str | None) -> "Lineage":
    """Compute a lineage, without its record of files read."""
    pairs, looked_at, unread, probes = candidates(suspect, bases, key, nonce)
    compared = [judge(sketches, base) for sketches, base in pairs]
    result = _judged(pairs[0][0], compared, looked_at, unread)
    return replace(result, probes=probes, by_neurons=_by_neurons(pairs))


def _by_neurons(pairs: Sequence[tuple[Sketches, Sketches]]) -> dict[str, float]:
    """P-value of the permutation test of neurons by base, for weights of equal shapes."""
    log_p = {
        base.name: permutation_log_p(suspect.source, base.source)
        for suspect, base in pairs
        if suspect.source is not None and base.source is not None
    }
    return {name: exp(value) for name, value in log_p.items() if value is not None}


def p_value_of(log_p: Sequence[float], comparisons: int) -> float:
    """The smallest of some probabilities times the number of comparisons; at most 1."""
    return exp(min(0.0, max(-700.0, min(log_p, default=0.0) + log(comparisons))))


def _judged(
    suspect: Sketches, compared: list[ComparedBase], looked_at: int, unread: list[str]
) -> "Lineage":
    """Judge all bases: by the heads that they share, else by their other parts."""
    comparisons = max(1, looked_at) * len(ROUTES)
    p = p_value_of([each.log_p for each in compared], comparisons)
    unjudged = Lineage(suspect, compared, None, "unrelated", p, comparisons, unread=unread)
    related = [Related(each.base, each.match) for each in compared if each.match]
    if related:
        return _related_by_heads(unjudged, sorted(related, key=lambda each: -each.weight))
    parts = [_parts_without_heads(suspect, each) for each in compared]
    return _related_by_parts(unjudged, parts) or _unrelated(unjudged, parts)


# Bases without shared heads


def _related_by_parts(
    unjudged: "Lineage", parts: Sequence[Mapping[str, PartVerdict]]
) -> "Lineage | None":
    """Judge by the base that shares most of the other parts; None if no base shares any."""
    sharing = []
    for compared, by_part in zip(unjudged.compared, parts, strict=True):
        shared = [name for name, part in by_part.items() if part.is_shared]
        if set(shared) - {NORMS}:  # norms alone do not decide it
            sharing.append((compared.base, by_part))
    if not sharing:
        return None
    base, by_part = max(sharing, key=lambda each: sum(part.share for part in each[1].values()))
    return replace(unjudged, verdict="related", parts=dict(by_part), sharing=base)


def _unrelated(unjudged: "Lineage", parts: Sequence[Mapping[str, PartVerdict]]) -> "Lineage":
    """Judge bases that share no part: undecided if something could not be compared."""
    doubts = []
    for compared, by_part in zip(unjudged.compared, parts, strict=True):
        reasons = _said_of(by_part, "undecided", "related")
        if reasons:
            doubts.append(f"{printable(compared.base.name)}: {'; '.join(dict.fromkeys(reasons))}")
    if unjudged.unread:
        doubts.append(listed(unjudged.unread, NAMED))
    least_certain = {}
    for name in parts[0]:
        verdicts = [by_part[name] for by_part in parts if name in by_part]
        least_certain[name] = min(verdicts, key=lambda part: part.verdict)
    verdict = "undecided" if doubts else "unrelated"
    return replace(unjudged, verdict=verdict, doubts=doubts, parts=least_certain)


def _parts_without_heads(suspect: Sketches, compared: ComparedBase) -> dict[str, PartVerdict]:
    """Parts shared with a base whose heads were not found."""
    attention = PartVerdict("unrelated", NOTHING)
    if compared.doubt:
        attention = PartVerdict("undecided", compared.doubt)
    return _parts(suspect, compared.base, attention)


def _parts(
    suspect: Sketches, base: Sketches, attention: PartVerdict, basis: Basis | None = None
) -> dict[str, PartVerdict]:
    """Compare each part with a base; undecided if the weights of one are not there."""
    if suspect.source is None or base.source is None:
        return unread_parts(attention, NOT_IN_PRINTS)
    return compare_parts(suspect.source, base.source, attention, basis)


def _said_of(parts: Mapping[str, PartVerdict], *verdicts: str) -> list[str]:
    """Sentences about the parts with one of these verdicts."""
    whole_sentences = {NOT_IN_PRINTS}
    if "attention" in parts and parts["attention"].verdict == "undecided":
        whole_sentences.add(parts["attention"].lead)
    chosen = [(name, part.lead) for name, part in parts.items() if part.verdict in verdicts]
    return [lead if lead in whole_sentences else f"{CALLED[name]}: {lead}" for name, lead in chosen]


# A base with shared heads

BY_SPECTRA = (
    "Only the singular values of heads agree; no change of basis alters these. This evidence is "
    "weaker, and it does not show what else was done."
)
BY_TOKENS = "Heads agree when seen through the token embeddings, but not in the stream's own basis."
# A merge of two models minus a third one leaves as much unexplained as training does.
NOT_ALL = "fine-tuned or merged with more"
LEFT_OVER = (
    "The merge leaves {left:.2g} of the suspect's norm unexplained: by training, or by bases not "
    "given."
)
TRAINED = {"fine-tuned", "low-rank update", "values set to zero"}
# kinds that a merge looks like next to one of its bases
OF_A_MERGE = TRAINED | FOLDS
# kinds of losses in the newer one, by whether that is the suspect ("B") or the base ("A")
SMALLER = {
    "B": {"layers removed", "vocabulary cut"},
    "A": {"layers replaced or added", "layers repeated", "vocabulary extended"},
}
OTHER_SIZES = {*RESIZED, "heads removed", "heads added", "layers replaced or added"}


@dataclass(frozen=True)
class Explanation:
    """Changes from the base, and which came first, as far as heads and weights show them."""

    kinds: list[Kind]
    shares: dict[str, float] = field(default_factory=dict)  # share of each base in a merge
    proof: Derivation | None = None
    is_derived: bool = False  # the proof leads from the base to the suspect
    weights: WeightChanges | None = None  # None if they were not compared


def _related_by_heads(unjudged: "Lineage", related: Sequence[Related]) -> "Lineage":
    """Judge a suspect that shares heads with these bases, the nearest first."""
    suspect, first = unjudged.suspect, related[0]
    of_layers = sources(suspect, related)
    explanation = _explain(unjudged, first, of_layers)
    weights = explanation.weights
    basis = weights.basis if weights else Basis(known=first.match.route == "direct")
    parts = _parts(suspect, first.base, _attention(first.match, weights), basis)

    kinds = [*explanation.kinds, *_shown_by_heads(suspect, first, explanation.kinds, basis)]
    kinds = _with_tokens(kinds, parts[TOKENS], suspect, first.base)
    kinds = _with_networks(kinds, parts[FEED_FORWARD], suspect)
    initial = initial_ones(suspect, first, parts, kinds)
    if initial:  # gains of one are where training began; nothing was folded
        kinds = _without(kinds, FOLDS)

    apart, learnt = learnt_alike(suspect, related)
    verdict = "related"
    if explanation.is_derived:
        verdict = "derived"
        parts = {name: _derived(part) for name, part in parts.items()}
    drift = {layer.layer: layer.drift.maps for layer in weights.layers} if weights else {}
    return replace(
        unjudged,
        origin=first,
        verdict=verdict,
        kinds=kinds,
        weights=explanation.shares,
        drift=drift,
        sources=of_layers,
        proof=explanation.proof,
        parts=parts,
        initial=initial,
        apart=apart,
        learnt=learnt,
        along=weights.along if weights else TensorChanges([]),
    )


def _derived(part: PartVerdict) -> PartVerdict:
    return replace(part, verdict="derived") if part.is_shared else part


def _attention(match: Match, weights: WeightChanges | None) -> PartVerdict:
    """The part of attention: the share of layers with counterparts, and equal tensors."""
    count, total = sum(j is not None for j in match.layers), len(match.layers)
    matrices = []
    if weights is not None:
        matrices = [change for _, change in weights.every if change.name_a in weights.attention]
    if matrices and count == total and all(change.kind is What.IDENTICAL for change in matrices):
        return PartVerdict("related", f"same values in {count} of {counted(total, 'layer')}", 1.0)
    lead = f"{count} of {counted(total, 'layer')} have a counterpart (likeness {match.mean:.2f})"
    return PartVerdict("related", lead, count / total)


def _explain(
    unjudged: "Lineage", first: Related, of_layers: Sequence[Related | None]
) -> Explanation:
    """Explain how the suspect differs from the first base, or from the bases of its layers."""
    suspect, base, match = unjudged.suspect, first.base, first.match
    if len({source.base.name for source in of_layers if source is not None}) > 1:
        return _layers_of_several(suspect, of_layers)
    structure = list(structure_kinds(suspect, base, match))
    if suspect.source is None or base.source is None:
        return Explanation(structure)

    weights = weight_changes(suspect.source, base.source, match)
    names = {kind.kind for kind in structure}
    kinds = weight_kinds(weights, names, suspect.source, base.source)
    shares = Shares({})
    if match.route == "direct":
        shares = shares_of(suspect.source, _summands(first, unjudged.compared))
    if shares.weights:
        merged = _merged(unjudged, shares, kinds, weights.rounding)
        return replace(merged, kinds=[*structure, *merged.kinds], weights=weights)
    for which in ("B", "A"):
        proof = _proved(suspect, first, weights, names, which)
        if proof is not None:
            kinds = [*structure, *_as_proved(kinds, proof, suspect, which)]
            return Explanation(kinds, proof=proof, is_derived=which == "B", weights=weights)
    return Explanation([*structure, *kinds], weights=weights)


# Merges


def _layers_of_several(suspect: Sketches, of_layers: Sequence[Related | None]) -> Explanation:
    """Explain a merge that takes whole layers from several bases."""
    layers: dict[str, list[int]] = defaultdict(list)
    for layer, source in zip(suspect.layers, of_layers, strict=True):
        if source is not None:
            layers[source.base.name].append(layer)
    parts = "; ".join(f"{spans(taken)} from {printable(name)}" for name, taken in layers.items())
    every = sorted(layer for taken in layers.values() for layer in taken)
    count = len(suspect.layers)
    kind = Kind("merge of layers", every, f"Layers {parts}.", len(every) / count)
    return Explanation([kind], {name: len(taken) / count for name, taken in layers.items()})


def _summands(first: Related, compared: Sequence[ComparedBase]) -> list[Related]:
    """Bases with the first one's sizes; products of factors hide a small share of a merge."""

    def sizes(base: Sketches) -> tuple[int, int, int]:
        return base.about["d_model"], len(base.layers), len(base.layer)

    summands = []
    for each in compared:
        if sizes(each.base) == sizes(first.base):
            is_direct = each.match is not None and each.match.route == "direct"
            match = each.match if each.match is not None and is_direct else first.match
            summands.append(Related(each.base, match))
    return summands


def _merged(
    unjudged: "Lineage", shares: Shares, kinds: Sequence[Kind], rounding: float
) -> Explanation:
    """Explain a suspect as a sum of several bases; exact if rounding is all that is left."""
    suspect = unjudged.suspect
    explained = [_sum_of_bases(suspect, shares)]
    explained += [kind for kind in kinds if kind.kind not in OF_A_MERGE]
    if min(shares.left, shares.by_tensor) > EXPLAINED * rounding:
        evidence = LEFT_OVER.format(left=shares.left)
        return Explanation([*explained, Kind(NOT_ALL, suspect.layers, evidence)], shares.weights)
    exact = _exact_shares(suspect, unjudged.compared, shares.weights)
    if exact:
        return Explanation(explained, exact, Derivation(Counter({"merge": 1})), is_derived=True)
    return Explanation(explained, shares.weights)


def _sum_of_bases(suspect: Sketches, shares: Shares) -> Kind:
    parts = ", ".join(f"{share:.2f} of {printable(name)}" for name, share in shares.weights.items())
    left = f"{shares.left:.2g} of the suspect's norm is left over"
    alone = f"{shares.alone:.2g} with one base"
    evidence = f"{parts}. On rows outside the fit, {left}, against {alone}"
    if shares.by_tensor < shares.left / 2:
        evidence += f", and {shares.by_tensor:.2g} with shares of its own for each tensor"
        evidence += ", as slerp has"
    return Kind("merge", suspect.layers, f"{evidence}.", 1 - shares.left / shares.alone)


def _exact_shares(
    suspect: Sketches, compared: Sequence[ComparedBase], names: Collection[str]
) -> dict[str, float]:
    """Shares of two bases whose rounded sum is every value of the suspect; empty if not shown."""
    summed = [each.base for each in compared if each.base.name in names]
    models = [base.source for base in summed if base.source is not None]
    if suspect.source is None or len(names) != 2 or len(models) != 2:
        return {}
    share = merge_share(suspect.source, *models)
    if share is None:
        return {}
    first, second = [base.name for base in summed if base.source is not None]
    return {first: share, second: 1 - share}


# Proofs of the order


def _proved(
    suspect: Sketches, first: Related, weights: WeightChanges, structure: set[str], which: str
) -> Derivation | None:
    """Prove that the suspect follows from the base (`which` "B") or the reverse, with a loss."""
    assert first.base.source is not None
    losses = SMALLER[which] & structure
    if (OTHER_SIZES & structure) or losses - {"layers removed"}:
        return None
    proof = prove(weights, which)
    if proof is None:
        return None
    if losses:
        gone = [layer for j, layer in enumerate(first.base.layers) if j not in first.match.layers]
        if not without_layers(first.base.source, gone):
            return None
        proof.ways["layers removed"] = len(gone)
    return proof if proof.ways else None


def _as_proved(
    kinds: Sequence[Kind], proof: Derivation, suspect: Sketches, which: str
) -> list[Kind]:
    """Replace kinds by the proved ones that they may look like."""
    is_suspect = which == "B"
    smaller, larger = ("suspect", "base") if is_suspect else ("base", "suspect")
    looks = {"fine-tuned"} if proof.ways["direction removed"] else TRAINED
    kept = _without(kinds, looks if is_suspect else looks | {"cast"})
    for way, how in HOW.items():
        count = proof.ways[way]
        if not count or way == "layers removed" or _is_among(kept, {way}):
            continue
        tensors = f"{counted(count, 'tensor')} of the {smaller}"
        layers = sorted(proof.layers.get(way, ())) or suspect.layers
        name = way if is_suspect else f"{way}: the base"
        evidence = f"{tensors} can be recomputed from the {larger}'s by {how}."
        kept.append(Kind(name, layers, evidence, family=way))
    return kept


# Kinds that heads and other parts show


def _without(kinds: Iterable[Kind], names: Collection[str]) -> list[Kind]:
    """Kinds that have none of these names, nor their families."""
    return [kind for kind in kinds if not kind.is_one_of(names)]


def _is_among(kinds: Iterable[Kind], names: Collection[str]) -> bool:
    return any(kind.is_one_of(names) for kind in kinds)


def _shown_by_heads(
    suspect: Sketches, first: Related, kinds: Sequence[Kind], basis: Basis
) -> Iterator[Kind]:
    """The kind that the match of heads shows, if no other kind says so."""
    match, names = first.match, " ".join(kind.kind for kind in kinds)
    if match.route == "spectra":
        share = float(np.mean([j is not None for j in match.layers]))
        yield Kind(TURNED, suspect.layers, BY_SPECTRA, share)
    elif match.route == "tokens" and not basis.same:
        if "stream" not in names and "width" not in names:
            yield Kind(TURNED, suspect.layers, BY_TOKENS)
    elif not kinds and suspect.source is None and match.mean < NOT_ALIKE:
        evidence = f"The mean likeness of heads is {match.mean:.2f}."
        yield Kind("fine-tuned", suspect.layers, evidence)


def _with_tokens(
    kinds: list[Kind], tokens: PartVerdict, suspect: Sketches, base: Sketches
) -> list[Kind]:
    """Replace what is known of the vocabulary if its rows are others, or of other tokens."""
    if not tokens.is_moved and tokens.verdict != "unrelated":
        return kinds
    name = "vocabulary reordered" if tokens.is_moved else "vocabulary replaced"
    before, after = (side.about["vocabulary"] for side in (base, suspect))
    evidence = f"{before:,} tokens in the base, {after:,} here: {tokens.lead}."
    return [*_without(kinds, VOCABULARY), Kind(name, [], evidence)]


def _with_networks(kinds: list[Kind], networks: PartVerdict, suspect: Sketches) -> list[Kind]:
    """Add what neurons show, if no kind says so."""
    if networks.verdict == "unrelated":
        evidence = "Heads match, and no neuron of the feed-forward networks does."
        return [*kinds, Kind("feed-forward networks replaced", suspect.layers, evidence)]
    if networks.is_moved and not _is_among(kinds, NEURONS):
        evidence = f"Feed-forward networks: {networks.lead}."
        return [*kinds, Kind("neurons permuted", suspect.layers, evidence)]
    return kinds


class AlignmentRow(NamedTuple):
    """A layer of the suspect and its counterpart, as a row of alignment.csv."""

    layer: int = column("The suspect's layer.")
    base: str = column("The base that has its counterpart.")
    base_layer: float = column(symbol="base's layer", format=".0f")
    likeness: float = column("Mean cosine of the maps of matched heads.", format=".3f")
    z: float = column("Distance from strangers, in standard deviations.", format=".1f")
    heads_in_place: float = column(
        "Heads that kept their index.", symbol="heads in place", format=".0f"
    )
    drift: float = column(
        "How far apart the heads' maps are; median.", symbol="$‖ΔW‖/‖W‖$", format=".2g"
    )


class BackgroundRow(NamedTuple):
    """A base compared by one route, next to what strangers show."""

    base: str = column()
    route: str = column("What was compared.")
    layers_found: int = column(symbol="layers found")
    likeness: float = column("Mean over counterparts.", format=".3f")
    other_pairs: float = column(
        "Mean likeness of all other pairs of layers.", symbol="other pairs", format=".3f"
    )
    strangers: float = column("Mean likeness of unrelated checkpoints, above chance.", format=".3f")
    spread: float = column("Standard deviation of their likeness.", format=".3f")
    log10_p: float = column(
        "Of the probability that strangers are this alike.", symbol="$log_10 p$", format=".1f"
    )


class PartRow(NamedTuple):
    """A part of the suspect and its verdict."""

    part: str = column()
    verdict: str = column()
    evidence: str = column("What the suspect shares with the base in this part.")


@dataclass(frozen=True, eq=False, repr=False)
class Lineage(Result):
    """The origin of a checkpoint.

    `verdict` is "derived" where the suspect can be recomputed from the base, which holds more;
    "related" where they have an origin in common, and the weights do not show that the base came
    first; "unrelated" where nothing is shared, in heads, feed-forward networks, embeddings or
    norms; "undecided" where not everything could be compared.
    """

    FIGURE, PAGE = "figures:lineage_figure", "page:write_lineage_page"
    TABLES, FILES = TABLES, RESULTS

    suspect: Sketches
    compared: list[ComparedBase]  # every base
    origin: Related | None  # base that it shares heads with, and the match that shows this
    verdict: str  # "derived", "related", "unrelated" or "undecided"; as above
    p_value: float  # bound of strangers' chance to be this alike, times comparisons; at most 1
    comparisons: int  # number of bases times routes
    kinds: list[Kind] = field(default_factory=list)  # changes, whichever of the two came first
    weights: dict[str, float] = field(default_factory=dict)  # share of each base in a merge
    # |S - B| / |B| of heads' maps by layer, if weights were read
    drift: dict[int, float] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)  # reasons for the verdict "undecided"
    # base of each layer's counterpart
    sources: list[Related | None] = field(default_factory=list)
    # skipped fingerprints of a folder, each with the reason
    unread: list[str] = field(default_factory=list)
    proof: Derivation | None = (
        None  # recomputation of the newer from the older, if weights show one
    )
    # "attention", "feed_forward", "tokens", "norms", perhaps "others"
    parts: dict[str, PartVerdict] = field(default_factory=dict)
    sharing: Sketches | None = None  # a base that shares no heads but another part
    # p-value of the permutation test of neurons, by base
    by_neurons: dict[str, float] = field(default_factory=dict)
    initial: str = ""  # evidence of a shared initialisation, as a sentence
    apart: str = ""  # likeness of what was learnt from an untrained base, as a sentence
    # cosine of the changes from an untrained base, by base
    learnt: dict[str, float] = field(default_factory=dict)
    probes: Probes = PUBLIC  # signs of the pairs whose weights are both there
    # changes of tensors, for directions that were removed
    along: TensorChanges = field(default_factory=lambda: TensorChanges([]), repr=False)
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
        """The one that holds more, "base" or "suspect"; None if the weights do not show it."""
        if self.proof is None:
            return None
        return "base" if self.verdict == "derived" else "suspect"

    @property
    def lead(self) -> str:
        """The verdict in words, with its evidence."""
        if self.sharing is not None:
            return self._shared_parts(self.sharing)
        if self.origin is None:
            return self._nothing_shared
        name, base_name = printable(self.suspect.name), printable(self.origin.base.name)
        parents = [f"{printable(base)} ({share:.2f})" for base, share in self.weights.items()]
        numbers = self._numbers(self.origin.match)
        changes = f"{self._difference}.{self._parts_apart}{self._caution}"
        if self.verdict == "derived" and self.proof is not None:
            bases, them = " and ".join(parents), "them"
            if not parents:
                bases = them = base_name
            recomputed = f"it can be recomputed from {them} by {self.proof.how}"
            derived = f"{name} was derived from {bases}: {recomputed}, and {numbers}"
            return f"{derived}; {FORGEABLE}. {changes}"
        shared = f"{name} and {base_name} share an origin: {numbers}"
        if self.initial:
            return f"{shared}. {self.initial}{self.apart} {changes}"
        order = UNKNOWN_ORDER
        if self.proof is not None:
            recomputed = f"{base_name} can be recomputed from {name} by {self.proof.how}"
            order = f"{recomputed}, so {name} came first"
        if len(parents) > 1:
            merged = f"{name} shares its origin with {' and '.join(parents)}, as a merge does"
            return f"{merged}: {numbers}; {order}. {changes}"
        return f"{shared}; {order}.{self.apart} {changes}"

    def _numbers(self, match: Match) -> str:
        """The evidence of heads: layers with a counterpart, their likeness and its probability."""
        count = sum(j is not None for j in match.layers)
        p = f"p < {SMALLEST:g}" if self.p_value < SMALLEST else f"p = {self.p_value:.1g}"
        chance = f"({p}, {counted(self.comparisons, 'comparison')})"
        layers = f"{count} of {counted(len(match.layers), 'layer')}"
        return f"{layers} have a counterpart, with a mean likeness of {match.mean:.2f} {chance}"

    def _shared_parts(self, base: Sketches) -> str:
        """The verdict on a base that shares other parts, although no heads match."""
        both = f"{printable(self.suspect.name)} and {printable(base.name)}"
        known = f"No shared attention heads were found between {both}, but they share an origin"
        if self.parts["attention"].is_shared:
            why = "although other norms make other heads of their attention"
            known = f"{both} share an origin, {why}"
        shared = "; ".join(_said_of(self.parts, "related"))
        return f"{known}: {shared}. {UNKNOWN_ORDER.capitalize()}."

    @property
    def _nothing_shared(self) -> str:
        """The verdict "unrelated" or "undecided" in words."""
        names = [printable(each.base.name) for each in self.compared]
        bases = names[0] if len(names) == 1 else f"any of {counted(len(names), 'base')}"
        suspect = printable(self.suspect.name)
        nothing = f"No shared attention heads were found between {suspect} and {bases}."
        if self.verdict != "undecided":
            return f"{nothing} {COMPARED_TOO} {OUT_OF_REACH}"
        cleared = [
            name for name in names if not any(why.startswith(f"{name}: ") for why in self.doubts)
        ]
        if cleared:
            nothing += f" Nothing is shared with {listed(cleared, NAMED)}."
        doubts = "; ".join(self.doubts)
        return f"{nothing} It is undecided whether they share anything else: {doubts}."

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
        """Other bases that fit as well, and a caution about fingerprints."""
        assert self.origin is not None
        base, text = self.origin.base, ""
        if self.ties:
            fit = "fits" if len(self.ties) == 1 else "fit"
            text += f" {printable(listed(self.ties, NAMED))} {fit} as well."
        if base.source is not None and self.suspect.source is not None:
            return text
        text += BY_KEYED_PRINTS if base.probes.seed else BY_PRINTS
        if base.source is None:
            text += f" {printable(base.name)} is what the fingerprint calls itself."
        return text

    @property
    def _difference(self) -> str:
        """The difference from the base, as a sentence without its full stop."""
        assert self.origin is not None
        if len(self.kinds) == 1 and self.kinds[0].kind in SAME:
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
        """The parts, if one has no origin in common although heads match."""
        is_apart = any(part.verdict in ("unrelated", "undecided") for part in self.parts.values())
        if not is_apart or self.suspect.source is None or self.sharing is not None:
            return ""
        by_part = [f"{CALLED[name]}: {part.lead}" for name, part in self.parts.items()]
        return f" By part: {'; '.join(by_part)}."

    @cached_property
    def alignment(self) -> Table:
        """One row per layer of the suspect; its csv() is alignment.csv."""
        rows = []
        for i, layer in enumerate(self.suspect.layers):
            source = self.sources[i] if self.sources else None
            j = None if source is None else source.match.layers[i]
            if source is None or j is None:
                rows.append(AlignmentRow(layer, "", *[np.nan] * 5))
                continue
            heads = source.match.heads[i]
            row = AlignmentRow(
                layer=layer,
                base=source.base.name,
                base_layer=float(source.base.layers[j]),
                likeness=source.match.likeness[i, j],
                z=source.match.z[i],
                heads_in_place=float((heads == np.arange(len(heads))).sum()),
                drift=self.drift.get(layer, np.nan),
            )
            rows.append(row)
        return Table.of(AlignmentRow, rows)

    @cached_property
    def background(self) -> Table:
        """The reference that likeness was judged against: one row per base and route."""
        rows = []
        for compared in self.compared:
            for route, match in compared.matches.items():
                strangers, spread = BACKGROUND.get(route, (np.nan, np.nan))
                unpaired = match.unpaired
                mean_unpaired = (
                    float(np.nanmean(unpaired)) if np.isfinite(unpaired).any() else np.nan
                )
                row = BackgroundRow(
                    base=compared.base.name,
                    route=ROUTES[route],
                    layers_found=sum(j is not None for j in match.layers),
                    likeness=match.mean,
                    other_pairs=mean_unpaired,
                    strangers=strangers,
                    spread=spread,
                    log10_p=match.log_p / log(10),
                )
                rows.append(row)
        return Table.of(BackgroundRow, rows)

    @cached_property
    def part_table(self) -> Table:
        """One row per part of the suspect."""
        parts = self.parts.items()
        rows = [PartRow(CALLED[name], part.verdict, part.lead) for name, part in parts]
        return Table.of(PartRow, rows)

    @cached_property
    def no_evidence(self) -> Table:
        """Descriptions by the checkpoints themselves, which prove nothing."""
        names = ("family", "layers", "heads", "kv_heads", "d_model", "vocabulary", "config")
        prints = [self.suspect, *(compared.base for compared in self.compared)]
        rows = [(p.name, *(str(p.about.get(name, "")) for name in names)) for p in prints]
        return Table.of_rows([Column("name"), *map(Column, names)], rows)

    def _judged_alone(self, compared: ComparedBase) -> dict[str, Any]:
        """The record of one base, whatever the others show."""
        base, match = compared.base, compared.match
        heads = "related" if match else "unrelated"
        if not match and compared.doubt:
            heads = "undecided"
        return {
            "name": base.name,
            "heads": heads,
            "likeness": match.mean if match else None,
            "doubt": compared.doubt,
            "known_by": "weights" if base.source is not None else "fingerprint",
            "heads_sha256": base.about.get("heads_sha256"),
            "permutation_p": self.by_neurons.get(base.name),
            "learnt": self.learnt.get(base.name),
        }

    def printed(self) -> list[str | Table]:
        """The lines and tables of the terminal, from top to bottom."""
        lines: list[str | Table] = [printable(self.lead)]
        lines += [f"{kind.kind}: {printable(kind.evidence)}" for kind in self.kinds]
        if self.unread and self.origin:
            lines.append(f"Not compared: {listed(self.unread, NAMED)}.")
        return [*lines, self.part_table, self.alignment if self.origin else self.background]

    def shown(self) -> list[Table]:
        """The layers and their counterparts."""
        return [self.alignment]

    def as_json(self) -> dict[str, Any]:
        """The record that `weightscope lineage --json` prints and lineage.json holds."""
        record = {
            "suspect": self.suspect.name,
            "verdict": self.verdict,
            "base": self.base,
            "p_value": self.p_value,
            "parts": {
                name: {"verdict": part.verdict, "lead": part.lead}
                for name, part in self.parts.items()
            },
            "kinds": [kind.as_json() for kind in self.kinds],
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
        return dict(as_json(self.provenance.envelope(self.lead) | record))
