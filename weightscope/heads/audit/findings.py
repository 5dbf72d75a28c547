"""Find what stands out in one model: faulty and unusual heads, outlier dimensions, rows."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.errors import CheckpointError, counted, printable
from weightscope.core.progress import phase
from weightscope.heads.audit.duplicates import duplicates
from weightscope.heads.audit.factor_findings import factor_findings, looks_random, untrained
from weightscope.heads.audit.measure import MAPS, MeasuredHeads
from weightscope.heads.audit.reference import Standing
from weightscope.heads.tensors.config_readers import reader_findings
from weightscope.heads.tensors.findings import (
    not_finite,
    offset_findings,
    scale_finding,
    scale_findings,
    untied_head,
)
from weightscope.heads.tensors.tied_head import tied_head_finding
from weightscope.model.embeddings import BLOCK_BYTES
from weightscope.model.metrics.outliers import (
    Blocks,
    judge_rows,
    known_median,
    layer_medians,
    log_measure,
    off_trend,
    robust_z,
    row_norms,
)
from weightscope.model.metrics.spectra import effective_rank
from weightscope.model.model import Model, largest_weight, unchecked_blocks
from weightscope.model.text.tokenizer import Tokenizer
from weightscope.report.findings import (
    Finding,
    FindingKind,
    Findings,
    Member,
    aggregated,
    finding,
    heads_and_tensors,
    indexed,
)

SQUARE_OVERFLOWS = 1.8e19  # in float32; no weight is this large on purpose
NEAR_DEAD = 1e-3  # times the median Frobenius norm; a head below it does next to nothing
COLLAPSED = 1e-3  # times the first singular value; smaller ones do not count in a rank
COLLAPSED_TO = 0.25  # share of the head's width; a collapse if fewer singular values count
BULK = 0.15  # share of the width; a collapse if the effective rank after the first value is less
LOST = 1e-6  # times the first singular value; directions below it were cut off, not trained
OF_ITS_LAYER = 0.25  # times the layer's median rank; less is unlike the layer, if it is the first
SPIKE = 3.0  # sigma_1 / sigma_2; random products of width 8 stay under 1.9, GPT-2's W_QK under 2.1
WIDE = 8  # narrower heads have larger gaps by chance; their limit grows in proportion
HEAD_Z = 5.0  # robust z of an outlier head among all heads; HEAD_FACTOR is exceeded too
HEAD_FACTOR = 3.0  # times the layer's median, or as many times less
LAYER_Z = 6.0  # robust z of a layer against its neighbours; LAYER_FACTOR is exceeded too
LAYER_FACTOR = 2.0  # times the neighbours' median, or as many times less
# measures by which heads and layers are judged
COMPARED = ("sigma1", "frobenius", "effective_rank", "bias_norm")
OUTSIZED = 16.0  # times its even share of W_QK's energy that makes a residual dimension an outlier
OUTSIZED_SHARE = 0.02  # and at least this much of the energy
SHARE_THAT_EXPLAINS = 0.25  # share of W_QK's energy that explains its layer's spikes and scale
GAIN_Z, GAIN_FACTOR = 8.0, 8.0  # an outlier gain exceeds both
NAMED = 20  # dimensions that a text lists; findings.csv has all
TOKENS_NAMED = 6  # tokens that it lists

Place = tuple[int, int]  # position among the measured layers, and head


def findings_of(model: Model, heads: MeasuredHeads, standing: Standing | None = None) -> Findings:
    """Findings about a model's heads and embeddings; at initialisation only that it is so.

    With `standing`, collapsed ranks are judged among the ranks of other checkpoints.
    """
    stream = "Residual" if model.family.memory is None else "Memory"
    dimensions = list(outlier_dimensions(heads, stream))
    with phase("looking at embedding rows"):
        rows = list(embedding_rows(model))
    with phase("comparing heads that look alike"):
        alike = list(duplicates(model, heads))
    layers = heads.layers.tolist()
    explained = [layers.index(f.layer) for f in dimensions if f.number >= SHARE_THAT_EXPLAINS]
    inputs = model.family.inputs
    names = {"token_rows": inputs.tokens, "position_rows": inputs.positions}
    reported = {model.prefix + names[row.measure] for row in rows if row.measure in names}
    reported |= {name for in_layer in heads.broken.values() for name in in_layer}
    return Findings(
        [
            *broken_layers(model, heads),
            *overflowing_layers(model, heads),
            *head_findings(heads, explained, standing),
            *large_logits(heads),
            *alike,
            *dimensions,
            *factor_findings(model, heads),
            *untrained(model, heads),
            *outlier_gains(model, layers),
            *untied_head(model),
            *tied_head_finding(model),
            *reader_findings(model),
            *scale_findings(model),
            *(() if looks_random(model, heads) else offset_findings(model, layers)),
            *rows,
            *(  # the last, when all else has been read
                _not_finite({name: count_not_finite(model.checkpoint[name])}, " outside the layers")
                for name in sorted((model.checkpoint.noted or set()) - reported)
            ),
        ]
    )


# Weights that are not finite or overflow.


def broken_layers(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """NaN and infinity in the attention tensors of each layer, and the heads that they reach."""
    for i, layer in enumerate(heads.layers.tolist()):
        counts = {name: count_not_finite(model.checkpoint[name]) for name in heads.broken[layer]}
        if not counts:
            continue
        reached = _without_numbers(heads, i)
        for name, broken in reached.items():
            yield _not_finite(counts, f" reach {indexed('head', broken)}", layer, name, broken)
        if not reached:
            what = " change the layer's attention, but none of these numbers"
            yield _not_finite(counts, what, layer)


def broken_mixers(model: Model, broken: Mapping[int, Collection[str]]) -> Iterator[Finding]:
    """NaN and infinity in tensors of layers without a softmax, by layer."""
    for layer, names in broken.items():
        counts = {name: count_not_finite(model.checkpoint[name]) for name in sorted(names)}
        yield _not_finite(counts, " are in the layer's part without a softmax", layer)


def _not_finite(
    counts: dict[str, int],
    where: str,
    layer: int | None = None,
    name: str | None = None,
    reached: Sequence[int] = (),
) -> Finding:
    tensors = ", ".join(f"{count:,} in {tensor}" for tensor, count in counts.items())
    broken = (Member("tensor", None, name=tensor, number=n) for tensor, n in counts.items())
    return not_finite(
        layer=layer,
        head=reached[0] if len(reached) == 1 else None,
        map=name,
        measure="values_not_finite",
        number=float(sum(counts.values())),
        usual=0.0,
        text=f"NaN or infinite weights ({tensors}){where}.",
        members=(*(Member("head", head) for head in reached), *broken),
    )


overflow = finding(
    "overflow",
    "weights that overflow",
    severity="error",
    rank=20,
    look_next="Read the tensor again from its source; if it is the same there, the run diverged "
    "or a scale is wrong.",
)


def overflowing_layers(model: Model, heads: MeasuredHeads) -> Iterator[Finding]:
    """Layers with heads whose finite weights are too large to compute with."""
    for i, layer in enumerate(heads.layers.tolist()):
        without = _without_numbers(heads, i)
        if not without:
            continue
        tensors = model.attention_tensors(layer)
        largest, name_of_largest = largest_weight(tensors)
        noted = {*heads.broken[layer], *(model.checkpoint.noted or ())}
        if noted.intersection(tensor.name for tensor in tensors) and largest < SQUARE_OVERFLOWS:
            continue  # NaN or infinity is the reason, and has a finding of its own
        for name, reached in without.items():
            where = f"Weights as large as {largest:.3g}, in {name_of_largest}, overflow"
            yield overflow(
                layer=layer,
                map=name,
                measure="largest_weight",
                number=largest,
                text=f"{where}: {indexed('head', reached)} cannot be measured.",
                **heads_and_tensors(reached, [name_of_largest]),
            )


def heads_without_numbers(heads: MeasuredHeads, i: int, name: str) -> list[int]:
    """Heads of the i-th layer whose map or bias is not finite."""
    sizes, biases = heads.grid(f"{name}_frobenius")[i], heads.grid(f"{name}_bias_norm")[i]
    return np.flatnonzero(~(np.isfinite(sizes) & np.isfinite(biases))).tolist()


def _without_numbers(heads: MeasuredHeads, i: int) -> dict[str, list[int]]:
    by_map = {name: heads_without_numbers(heads, i, name) for name in MAPS}
    return {name: broken for name, broken in by_map.items() if broken}


def count_not_finite(tensor: Tensor) -> int:
    """Count the values of a tensor that are NaN or infinite."""
    return sum(int(np.count_nonzero(~np.isfinite(block))) for block in unchecked_blocks(tensor))


# Heads that are dead, collapsed, spiked or far from the others.


def head_findings(
    heads: MeasuredHeads, explained: Collection[int] = (), standing: Standing | None = None
) -> Iterator[Finding]:
    """At most one finding per head and map, the most severe; heads with one fault share a finding.

    Layers (by position) that an outlier dimension has `explained` are not judged by spikes and
    scale.
    """
    for name in MAPS:
        faulty = _faulty_heads(heads, name, explained, standing)
        layers, far = _far_from_others(heads, name, explained)
        outliers = [far[i, h] for i, h in far if (i, h) not in faulty and i not in explained]
        yield from aggregated([*faulty.values(), *outliers], heads.n_heads)
        yield from layers


class Fault(NamedTuple):
    """A fault of one head."""

    kind: FindingKind
    measure: str
    number: float
    usual: float
    text: str


spectral_spike = finding(
    "spectral_spike",
    "spectral spike",
    rank=80,
    look_next="See which tokens lie along its first direction. It is no sign of an attention sink.",
)


def _faulty_heads(
    heads: MeasuredHeads, name: str, explained: Collection[int], standing: Standing | None
) -> dict[Place, Finding]:
    """Zero, near-dead, collapsed and spiked heads of one map, except those that are not finite."""
    norms, gaps = heads.grid(f"{name}_frobenius"), heads.grid(f"{name}_gap")
    alive = norms[np.isfinite(norms) & (norms > 0)]
    usual = float(np.median(alive)) if len(alive) else float("nan")
    spectra = heads.arrays[f"{name}_singular_values"]
    finite = np.where(np.isfinite(spectra), spectra, 0.0)
    alone = (finite[..., 0] > 0) & ~finite[..., 1:].any(axis=-1)
    ranks = np.where(alone, 0.0, effective_rank(finite[..., 1:]))  # without the first direction
    findings = {}
    for i, h in np.argwhere(np.isfinite(norms)).tolist():
        s, gap = spectra[i, h], float(gaps[i, h])
        s = s[np.isfinite(s)]
        fault = _dead(MAPS[name], float(norms[i, h]), usual)
        if fault is None:
            fault = _collapse(heads, name, (i, h), s, ranks, standing)
        if fault is None and gap >= SPIKE * max(1.0, WIDE / len(s)) and i not in explained:
            rest = known_median(gaps)
            first = f"The first singular value of {MAPS[name]}"
            text = f"{first} is {gap:.1f} times the second (the median head: {rest:.2f})."
            if name == "qk" and "sink_share" in heads.table.names:
                share = heads.grid("sink_share")[i, h]
                sentence = f" The head gives the first token {share:.2f} of its attention."
                text += sentence * bool(np.isfinite(share))
            fault = Fault(spectral_spike, "gap", gap, rest, text)
        if fault is not None:
            about = fault._asdict() | {"measure": f"{name}_{fault.measure}"}
            findings[i, h] = about.pop("kind").of_head(heads.layers[i], h, map=name, **about)
    return findings


zero_head = finding(
    "zero_head",
    "zero head",
    severity="warning",
    rank=10,
    look_next="Check whether the head was pruned on purpose; if not, compare with the checkpoint "
    "before it.",
)
near_dead_head = finding(
    "near_dead_head",
    "near-dead head",
    severity="warning",
    rank=20,
    look_next="Zero the head and measure the loss: it may be pruned, or its learning rate was too "
    "small.",
)


def _dead(w: str, norm: float, usual: float) -> Fault | None:
    """Detect a map that is zero or nearly so by its Frobenius norm."""
    if norm == 0:
        return Fault(zero_head, "frobenius", 0.0, usual, f"{w} is exactly zero.")
    if norm < NEAR_DEAD * usual:
        times = f"{usual / norm:,.0f} times below the checkpoint's median"
        text = f"The Frobenius norm of {w} is {norm:.3g}, {times}."
        return Fault(near_dead_head, "frobenius", norm, usual, text)
    return None


rank_collapsed = finding(
    "rank_collapsed",
    "rank-collapsed head",
    severity="warning",
    rank=30,
    look_next="Look at its spectrum in the report and at the singular values of its two factors: "
    "which one collapsed?",
)
low_rank_heads = finding(
    "low_rank_heads",
    "heads of low rank",
    rank=30,
    look_next="Usual in the first layer of decoders; compare with another checkpoint of the same "
    "architecture.",
)


def _collapse(
    heads: MeasuredHeads,
    name: str,
    place: Place,
    s: np.ndarray,
    ranks: np.ndarray,
    standing: Standing | None,
) -> Fault | None:
    """Detect a map of singular values s (r,) with a low rank: a fault, or usual at its depth.

    In the first layer of trained decoders queries and keys tell few directions apart. A head is a
    fault there if directions were cut off, or if its layer is not of low rank; deeper, unless
    another checkpoint has such a head.
    """
    i, w, r = place[0], MAPS[name], len(s)
    layer, rank, measure = heads.layers[i], float(ranks[place]), f"{name}_effective_rank"
    large = int((s > COLLAPSED * s[0]).sum())
    if large > COLLAPSED_TO * r and not rank < BULK * r:
        return None
    percentile, among = float("nan"), 0
    if standing is not None:
        value = float(heads.grid(measure)[place])
        percentile, among = standing.percentile(measure, layer, value)
    cut_off = int((s > LOST * s[0]).sum()) <= COLLAPSED_TO * r
    if layer == 0:
        usual = known_median(ranks[i])
        unusual = rank < OF_ITS_LAYER * usual and usual >= BULK * r
    else:
        unusual = not percentile > 0
    text = f"The effective rank of {w}, its first direction aside, is {rank:.1f} of {r}"
    if large <= COLLAPSED_TO * r:
        text = f"Only {large} of {r} singular values of {w} exceed a thousandth of the first"
    if percentile == 0:
        text += f"; no head at this depth of {counted(among, 'other checkpoint')} has so low a rank"
    kind = rank_collapsed if cut_off or unusual else low_rank_heads
    return Fault(kind, "effective_rank_of_the_rest", rank, known_median(ranks), f"{text}.")


outlier_head = finding(
    "outlier_head",
    "head outside the distribution",
    rank=90,
    look_next="Compare its spectrum with its layer's other heads, and with the same head at "
    "another training step.",
)
layer_off_trend = finding(
    "layer_off_trend",
    "layer off the trend",
    rank=100,
    look_next="Compare the layer with its neighbours: another norm gain, learning rate or merge "
    "may be the cause.",
)


def _far_from_others(
    heads: MeasuredHeads, name: str, explained: Collection[int]
) -> tuple[list[Finding], dict[Place, Finding]]:
    """Layers off their neighbours' trend and heads far from their layer's median, once each."""
    layers: dict[int, tuple[float, Finding]] = {}  # with |z|
    far: dict[Place, tuple[float, Finding]] = {}
    for compared in COMPARED:
        measure = f"{name}_{compared}"
        logs = log_measure(heads.grid(measure))  # (L, H)
        medians = layer_medians(logs)  # (L,)
        trend = medians.copy()
        trend[list(explained)] = np.nan  # neither judged nor part of the trend
        differences = off_trend(trend)
        z = robust_z(differences)
        strange = (np.abs(z) >= LAYER_Z) & (np.abs(differences) >= np.log(LAYER_FACTOR))
        for i in np.flatnonzero(strange).tolist():
            value, usual = np.exp(medians[i]), np.exp(medians[i] - differences[i])
            among = f"its neighbours' is {usual:.3g} (z = {z[i]:.1f})"
            if i not in layers or abs(z[i]) > layers[i][0]:
                text = f"The median {measure} of its heads is {value:.3g}; {among}."
                about = {"map": name, "measure": measure, "usual": usual, "text": text}
                layers[i] = abs(z[i]), layer_off_trend(layer=heads.layers[i], number=value, **about)
        distances = logs - medians[:, None]
        z = robust_z(distances)
        strange = (np.abs(z) >= HEAD_Z) & (np.abs(distances) >= np.log(HEAD_FACTOR))
        for i, h in np.argwhere(strange).tolist():
            value, usual = np.exp(logs[i, h]), np.exp(medians[i])
            score = f"z = {z[i, h]:.1f} among this checkpoint's heads"
            if (i, h) not in far or abs(z[i, h]) > far[i, h][0]:
                text = (
                    f"{measure} is {value:.3g}; the median of its layer is {usual:.3g} ({score})."
                )
                about = {"map": name, "measure": measure, "usual": usual, "text": text}
                outlier = outlier_head.of_head(heads.layers[i], h, number=value, **about)
                far[i, h] = abs(z[i, h]), outlier
    return [off for _, off in layers.values()], {place: each for place, (_, each) in far.items()}


FLOAT16 = 65_504.0  # the largest number that it holds

beyond_float16 = finding(
    "large_logits",
    "logits beyond float16",
    rank=85,
    look_next="Run attention in bfloat16 or float32, or with a kernel that adds up scores in "
    "float32; or measure the largest score on text, since the bound is for any input.",
)


def large_logits(heads: MeasuredHeads) -> Iterator[Finding]:
    """Heads whose products of queries and keys may be too large for float16."""
    bounds = heads.grid("qk_logit_bound")  # (L, H)
    products, usual = bounds / heads.arrays["score_scale"], known_median(bounds)
    large = []
    for i, h in np.argwhere(products > FLOAT16).tolist():
        bound, product = bounds[i, h], products[i, h]
        text = (
            f"The weights allow scores of up to {bound:,.0f} (the median head: {usual:,.0f}): "
            f"products of queries and keys of up to {product:,.0f}, and float16 holds at most "
            f"{FLOAT16:,.0f}."
        )
        about = {"map": "qk", "measure": "qk_logit_bound", "usual": usual, "text": text}
        large.append(beyond_float16.of_head(heads.layers[i], h, number=bound, **about))
    yield from aggregated(large, heads.n_heads)


# Residual dimensions with an outsized share or gain.


def outlier_dimensions(heads: MeasuredHeads, stream: str = "Residual") -> Iterator[Finding]:
    """Dimensions of the keys' input with an outsized column of W_QK, norm gain included."""
    shares = heads.arrays["qk_column_share"]  # (L, d) share of W_QK's squared norm, over heads
    even = 1 / shares.shape[1]
    for layer, row in zip(heads.layers.tolist(), shares, strict=True):
        order = np.argsort(-row, kind="stable")
        outsized = order[row[order] > max(OUTSIZED * even, OUTSIZED_SHARE)]
        if len(outsized):
            share = row[outsized[0]]
            text = (
                f"{stream} dimension {outsized[0]} carries {share:.1%} of W_QK's squared norm on "
                f"the keys' side, {share / even:.0f} times its even share"
            )
            yield _dimensions(
                outsized, row, text, layer=layer, map="qk", measure="qk_column_share", usual=even
            )


def outlier_gains(model: Model, layers: Sequence[int]) -> Iterator[Finding]:
    """Gains of the norm before attention that are far above the layer's others."""
    for layer in layers:
        norm = model.family.norm_of(layer)
        if norm is None:
            continue
        stem = model.family.stored_name(model.config, layer)
        gains = np.abs(norm.read(model.under(stem), model.config).gamma)  # (d,)
        usual = known_median(gains)
        z = robust_z(log_measure(gains))
        order = np.argsort(-gains, kind="stable")
        outsized = order[(z[order] > GAIN_Z) & (gains[order] > GAIN_FACTOR * usual)]
        if len(outsized):
            by = f"by {gains[outsized[0]]:.3g} (median {usual:.3g})"
            text = f"The norm before attention scales dimension {outsized[0]} {by}"
            yield _dimensions(outsized, gains, text, layer=layer, measure="norm_gain", usual=usual)


outlier_dimension = finding(
    "outlier_dimension",
    "outlier dimension",
    rank=140,
    look_next="Measure the dimension on text (`weightscope outliers`): this is a share of "
    "weights, and only the first token's activations were followed, where the audit names one.",
)


def _dimensions(outsized: np.ndarray, values: np.ndarray, text: str, **about: Any) -> Finding:
    """A finding about dimensions: outsized (k,) indices into values (d,), the largest first."""
    rest = f"; outsized too: {', '.join(map(str, outsized[1:NAMED]))}" if len(outsized) > 1 else ""
    return outlier_dimension(
        number=values[outsized[0]],
        text=f"{text}{rest}.",
        members=tuple(Member("dimension", j, number=float(values[j])) for j in outsized.tolist()),
        **about,
    )


# Rows of the token and position embeddings.


def embedding_rows(model: Model) -> Iterator[Finding]:
    """Rows of token and position embeddings with unusual norms, or rarely trained."""
    initial_std = model.config.initial_std
    try:
        stored = model.embeddings.token_tensor
    except CheckpointError:  # the checkpoint has no token embedding
        pass
    else:
        rows = max(1, BLOCK_BYTES // (4 * stored.shape[1]))
        padding = model.config.get("pad_token_id")
        tokenizer = Tokenizer.at_hand(model)
        name_of = None if tokenizer is None else tokenizer.text
        padded = padding if type(padding) is int else None
        yield from _rows(
            "token", stored.name, lambda: stored.blocks(rows), initial_std, padded, name_of
        )
    positions, _ = positions_of(model)
    if positions is not None:
        name = model.prefix + model.family.inputs.positions
        yield from _rows("position", name, lambda: [(0, positions)], initial_std)


def positions_of(model: Model) -> tuple[np.ndarray | None, str]:
    """The position embedding or None, and a note if it cannot be read."""
    try:
        return model.positions, ""
    except CheckpointError as error:
        return None, f"Position rows were not looked at: {error}."


undertrained_rows = finding(
    "undertrained_rows",
    "undertrained embedding rows",
    rank=150,
    look_next="Run the model on these tokens, or at these positions: rows that training rarely "
    "saw may give erratic output. Padding rows may be removed.",
)
oversized_rows = finding(
    "oversized_rows",
    "oversized embedding rows",
    rank=160,
    look_next="See which tokens or positions these are: the first position and special tokens "
    "often carry a sink's norm.",
)


def _rows(
    what: str,
    tensor: str,
    blocks: Blocks,
    initial_std: float | None,
    padding: int | None = None,
    name_of: Callable[[int], str] | None = None,
) -> Iterator[Finding]:
    """Findings about the rows of one embedding; its padding row is zero by design."""
    norms = np.concatenate([np.empty(0), *(row_norms(block) for _, block in blocks())])
    if not len(norms):
        return

    def members_of(rows: np.ndarray) -> tuple[Member, ...]:
        names = {i: name_of(i) if name_of else "" for i in rows.tolist()}
        return tuple(Member(what, i, name=n, number=float(norms[i])) for i, n in names.items())

    broken = members_of(np.flatnonzero(~np.isfinite(norms)))
    if broken:
        where = f"{counted(len(broken), 'row')} of {tensor}, the first {broken[0].index}"
        yield not_finite(
            measure=f"{what}_rows",
            number=len(broken),
            usual=0.0,
            text=f"NaN or infinity in {where}{_names(broken)}.",
            members=broken,
        )
    huge = members_of(np.flatnonzero(np.isfinite(norms) & (norms > SQUARE_OVERFLOWS)))
    if huge:
        longest = max(float(norms[member.index]) for member in huge)
        where = f"Norm too large for float32 in {counted(len(huge), 'row')} of {tensor}"
        text = f"{where}, the longest {longest:.3g}{_names(huge)}."
        yield overflow(measure=f"{what}_norm", number=longest, text=text, members=huge)
    if not huge and not broken:
        width = next(iter(blocks()))[1].shape[1]
        strange = list(scale_finding(tensor, float(np.sqrt(np.mean(norms**2) / width))))
        if strange:
            yield from strange
            return
    kept = np.where(np.isfinite(norms) & (np.arange(len(norms)) != padding), norms, np.nan)
    low, high, usual, initial = judge_rows(kept, blocks, initial_std)
    for kind, side, rows in ((undertrained_rows, "below", low), (oversized_rows, "above", high)):
        if not len(rows):
            continue
        extreme, members = kept[rows[0]], members_of(rows)
        farthest = f"the farthest is row {rows[0]} with {extreme:.3g} (median {usual:.3g})"
        problem = f"have a norm far {side} the others'; {farthest}"
        if side == "below" and initial is not None:
            problem = (
                "are as initialised, or hardly trained: random directions with a norm of about "
                f"{initial:.3g}; the trained rows' median is {usual:.3g}"
            )
        yield kind(
            measure=f"{what}_norm",
            number=extreme,
            usual=usual,
            text=f"{len(rows):,} of {len(norms):,} {what} rows {problem}{_names(members)}.",
            members=members,
        )


def _names(rows: Sequence[Member]) -> str:
    """The first few rows by their names, to end a sentence; empty where they have none."""
    names = [printable(repr(row.name)) for row in rows[:TOKENS_NAMED] if row.name]
    more = " ..." if len(rows) > TOKENS_NAMED else ""
    return f": {', '.join(names)}{more}" if names else ""


def with_roles(findings: Findings, roles: Mapping[tuple[int, int], str]) -> Findings:
    """Name the heads of findings by their roles."""

    def name_heads(finding: Finding) -> Finding:
        members = []
        for member in finding.members:
            layer = finding.layer if member.layer is None else member.layer
            if member.what == "head" and member.index is not None and layer is not None:
                member = replace(member, name=roles.get((layer, member.index), member.name))
            members.append(member)
        return replace(finding, members=tuple(members))

    return Findings(map(name_heads, findings))
