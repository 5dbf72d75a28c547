"""Findings that need more than one head's numbers: outlier dimensions, gains, embedding rows."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from weightscope.audits.broken import SQUARE_OVERFLOWS, broken_elsewhere, broken_layers, overflowing_layers
from weightscope.audits.duplicates import duplicates
from weightscope.audits.findings import Finding, Findings, Member
from weightscope.audits.head_findings import head_findings
from weightscope.audits.measures import MeasuredHeads
from weightscope.embeddings import BLOCK_BYTES
from weightscope.errors import CheckpointError, counted, printable
from weightscope.metrics.medians import known_median
from weightscope.metrics.outliers import log_measure, robust_z, row_norms
from weightscope.metrics.untrained import Blocks, judged_rows
from weightscope.model import Model
from weightscope.progress import phase
from weightscope.text.tokenizer import token_text, tokenizer_at_hand

OUTSIZED = 16.0  # times its even share of W_QK's energy that makes a residual dimension an outlier
OUTSIZED_SHARE = 0.02  # and at least this much of the energy
SHARE_THAT_EXPLAINS = 0.25  # of W_QK's energy in one residual dimension: it explains its layer's spikes and scale
GAIN_Z, GAIN_FACTOR = 8.0, 8.0  # a gain far from the others: both
NAMED = 20  # dimensions that the text of a finding lists; findings.csv has all
TOKENS_NAMED = 6  # tokens that it names


def findings_of(model: Model, heads: MeasuredHeads) -> Findings:
    """Everything about a model's heads that a person should look at; nothing in a fresh initialisation.

    Parameters
    ----------
    model : Model
        Unchecked: values that are not finite are a finding.
    heads : MeasuredHeads
    """
    dimensions = list(outlier_dimensions(heads, "Residual" if model.family.memory is None else "Memory"))
    with phase("looking at embedding rows"):
        rows = list(embedding_rows(model))
    with phase("comparing heads that look alike"):
        equal = list(duplicates(model, heads))
    names = {"token_rows": model.family.inputs.tokens, "position_rows": model.family.inputs.positions}
    layers = heads.layers.tolist()
    explained = [layers.index(finding.layer) for finding in dimensions if finding.number >= SHARE_THAT_EXPLAINS]
    return Findings(
        [
            *broken_layers(model, heads),
            *overflowing_layers(model, heads),
            *head_findings(heads, explained),
            *equal,
            *dimensions,
            *outlier_gains(model, layers),
            *rows,
            *broken_elsewhere(
                model, heads, [model.prefix + names[one.measure] for one in rows if one.measure in names]
            ),
        ]
    )


def outlier_dimensions(heads: MeasuredHeads, stream: str = "Residual") -> Iterator[Finding]:
    """Dimensions of what keys are made of whose column of W_QK, norm gain included, carries an outsized share."""
    shares = heads.arrays["qk_column_share"]  # (L, d) of the squared norm of W_QK, averaged over a layer's heads
    even = 1 / shares.shape[1]
    for layer, row in zip(heads.layers.tolist(), shares, strict=True):
        order = np.argsort(-row, kind="stable")
        outsized = order[row[order] > max(OUTSIZED * even, OUTSIZED_SHARE)]
        if len(outsized):
            share = float(row[outsized[0]])
            others = f"; outsized too: {', '.join(map(str, outsized[1:NAMED]))}" if len(outsized) > 1 else ""
            text = (
                f"{stream} dimension {outsized[0]} carries {share:.1%} of W_QK's squared norm on the keys' side, "
                f"{share / even:.0f} times its even share{others}."
            )
            members = _dimensions(outsized, row)
            yield Finding("outlier_dimension", layer, None, "qk", "qk_column_share", share, even, text, members)


def outlier_gains(model: Model, layers: list[int]) -> Iterator[Finding]:
    """Gains of the norm that feeds attention, far from the layer's others."""
    for layer in layers:
        norm = model.family.norm_of(layer)
        if norm is None:
            continue
        stem = model.family.stored_name(model.config, layer)
        gains = np.abs(norm.read(model.tensors(stem), model.config).gamma)  # (d,)
        usual = known_median(gains)
        z = robust_z(log_measure(gains))
        order = np.argsort(-gains, kind="stable")
        outsized = order[(z[order] > GAIN_Z) & (gains[order] > GAIN_FACTOR * usual)]
        if len(outsized):
            gain, dimension = float(gains[outsized[0]]), int(outsized[0])
            others = f"; outsized too: {', '.join(map(str, outsized[1:NAMED]))}" if len(outsized) > 1 else ""
            text = f"The norm before attention scales dimension {dimension} by {gain:.3g} (median {usual:.3g}){others}."
            members = _dimensions(outsized, gains)
            yield Finding("outlier_dimension", layer, None, None, "norm_gain", gain, usual, text, members)


def _dimensions(which: np.ndarray, values: np.ndarray) -> tuple[Member, ...]:
    return tuple(Member("dimension", j, number=float(values[j])) for j in which.tolist())


def embedding_rows(model: Model) -> Iterator[Finding]:
    """Token and position embeddings that training hardly met, or with norms far above the others'."""
    try:
        stored = model.embeddings.token_tensor
    except CheckpointError:  # the checkpoint has no token embedding
        pass
    else:
        rows = max(1, BLOCK_BYTES // (4 * stored.shape[1]))
        padding = model.config.get("pad_token_id")
        tokenizer = tokenizer_at_hand(model)
        called = None if tokenizer is None else partial(token_text, tokenizer)
        padded = padding if type(padding) is int else None
        yield from _rows("token", stored.name, lambda: stored.blocks(rows), model.config.initial_std, padded, called)
    positions, _ = positions_of(model)
    if positions is not None:
        name = model.prefix + model.family.inputs.positions
        yield from _rows("position", name, lambda: [(0, positions)], model.config.initial_std)


def positions_of(model: Model) -> tuple[np.ndarray | None, str]:
    """The position embedding, None where there is none, and what to say where there should be one."""
    try:
        return model.positions, ""
    except CheckpointError as error:
        return None, f"Position rows were not looked at: {error}."


def _rows(
    what: str,
    tensor: str,
    blocks: Blocks,
    initial_std: float | None,
    padding: int | None = None,
    called: Callable[[int], str] | None = None,
) -> Iterator[Finding]:
    """Findings about one embedding, its rows `called` by their tokens; its padding row is zero by design."""
    norms = np.concatenate([np.empty(0), *(row_norms(block) for _, block in blocks())])
    if not len(norms):
        return

    def members(rows: np.ndarray) -> tuple[Member, ...]:
        return tuple(
            Member(what, row, name=called(row) if called else "", number=float(norms[row])) for row in rows.tolist()
        )

    broken = np.flatnonzero(~np.isfinite(norms))
    if len(broken):
        of = members(broken)
        text = f"{counted(len(of), 'row')} of {tensor} hold NaN or infinity, the first {broken[0]}{_named(of)}."
        yield Finding("not_finite", None, None, None, f"{what}_rows", len(of), 0.0, text, of)
    huge = np.flatnonzero(np.isfinite(norms) & (norms > SQUARE_OVERFLOWS))
    if len(huge):
        of, largest = members(huge), float(norms[huge].max())
        text = f"{counted(len(of), 'row')} of {tensor} are too long for float32, the longest {largest:.3g}{_named(of)}."
        yield Finding("overflow", None, None, None, f"{what}_norm", largest, None, text, of)
    kept = np.where(np.isfinite(norms) & (np.arange(len(norms)) != padding), norms, np.nan)
    low, high, usual, initial = judged_rows(kept, blocks, initial_std)
    for kind, rows in (("undertrained_rows", low), ("oversized_rows", high)):
        if not len(rows):
            continue
        extreme, of = float(kept[rows[0]]), members(rows)
        side = "below" if kind == "undertrained_rows" else "above"
        if side == "below" and initial is not None:
            says = (
                f"are as initialisation left them, pointing anywhere with a norm of about {initial:.3g}, or hardly "
                f"met; the trained rows' median is {usual:.3g}"
            )
        else:
            says = (
                f"have a norm far {side} the others'; the farthest is row {rows[0]} with {extreme:.3g} "
                f"(median {usual:.3g})"
            )
        text = f"{len(rows):,} of {len(norms):,} {what} rows {says}{_named(of)}."
        yield Finding(kind, None, None, None, f"{what}_norm", extreme, usual, text, of)


def _named(rows: Sequence[Member]) -> str:
    """The first few rows by their names, for a sentence; nothing where they have none."""
    names = [printable(repr(row.name)) for row in rows[:TOKENS_NAMED] if row.name]
    if not names:
        return ""
    return f": {', '.join(names)}{' ...' if len(rows) > TOKENS_NAMED else ''}"
