"""Tensors of two checkpoints, read once each: their size, digest and a sample."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.checkpoint.blocks import Block, blocks_of, row_width
from weightscope.checkpoint.checkpoint import Tensor
from weightscope.core.progress import bar
from weightscope.heads.tensors.measure import why_unread
from weightscope.model.model import Model
from weightscope.model.rows.names import NamedTensor
from weightscope.pairs.changes.counterparts import counterparts

SMALLEST = 1000  # values of a matrix whose cosine and equality are evidence by themselves
SAMPLED = 1 << 13  # values of a matrix's first rows; cosines of strangers' are 0 +- 0.03 or less
SAMPLED_OF_TOKENS = 1 << 16  # values of a table's first rows, which a cut vocabulary keeps
DISTINCT = 16  # values that a tensor must hold: ones, zeros and masks are equal without any origin
WAVES = 1 / 2  # mean square of a table of sines and cosines, which strangers share
NEAR_WAVES = 1e-3  # distance from it
ATTENTION, FEED_FORWARD, TOKENS = "attention", "feed_forward", "tokens"
NORMS, OTHERS = "norms", "others"
PART_OF = {  # parts by role; the first match counts
    FEED_FORWARD: re.compile(r"(first\.|shared_expert\.|expert\.)?(gate|up|down|router)\b.*"),
    TOKENS: re.compile("tokens|unembedding"),
    NORMS: re.compile(r"norm\..*|.*_norm(\..*)?"),
}


class Facts(NamedTuple):
    """A tensor after reading it once."""

    name: str
    part: str  # ATTENTION, FEED_FORWARD, TOKENS, NORMS or OTHERS
    layer: int | None
    shape: tuple[int, ...]
    digest: bytes
    rms: float
    sample: np.ndarray  # centred rows, unit length; empty if it is too small

    @property
    def content(self) -> tuple[tuple[int, ...], bytes]:
        """Shape and digest, equal for tensors with the same values."""
        return self.shape, self.digest

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True if it is a matrix that is large enough to be evidence by itself."""
        return len(self.shape) > 1 and self.size >= SMALLEST


def facts_of_both(
    suspect: Model, base: Model, *, heads: bool = False
) -> tuple[list[Facts], list[Facts]]:
    """Facts of both checkpoints, in parts where one stores in parts what the other fuses.

    Attention matrices only with `heads`.
    """
    of_suspect, of_base = [], []
    for each in counterparts(suspect, base):
        pair = each.pair()
        if pair and pair.is_converted:
            if each.a:
                of_suspect.append((each.label, each.a, pair.a))
            if each.b:
                of_base.append((each.label, each.b, pair.b))
    here = list(_facts(suspect, of_suspect, heads=heads))
    return here, list(_facts(base, of_base, heads=heads))


def _facts(
    model: Model, converted: Sequence[tuple[str, NamedTensor, Tensor]], *, heads: bool
) -> Iterator[Facts]:
    """Read every tensor that is not the same in all models; some as they were converted."""
    attention = {
        tensor.name for i in model.attention_layers for tensor in model.attention_tensors(i)
    }
    inside = {
        name: i
        for i in range(model.config.n_layers)
        for name in model.checkpoint.names_under(model.stem(i))
    }
    replaced = {tensor.name for _, tensor, _ in converted}
    stored = [
        (tensor.name, tensor, model.checkpoint.get(tensor.name) or tensor.tensor)
        for tensor in model.unchecked().tensors
        if tensor.name not in replaced
    ]
    for name, named, tensor in bar([*stored, *converted], "tensors outside heads", "tensor"):
        if not tensor.shape or tensor.dtype.startswith(("I", "U", "BOOL")) or why_unread(tensor):
            continue
        of_heads = named.name in attention and len(tensor.shape) > 1
        if of_heads and not heads:
            continue
        part = ATTENTION
        if not of_heads:
            part = _part_of(named, len(tensor.shape), is_inside=named.name in inside)
        fact = _fact(name, part, inside.get(named.name, named.layer), tensor)
        if fact is not None:
            yield fact


def _part_of(named: NamedTensor, n_axes: int, *, is_inside: bool) -> str:
    """The part of a tensor by its role; an unnamed matrix in a layer counts as feed-forward."""
    if named.has_role:
        parts = (part for part, roles in PART_OF.items() if roles.fullmatch(named.role))
        return next(parts, OTHERS)
    return FEED_FORWARD if is_inside and n_axes > 1 else OTHERS


def _fact(name: str, part: str, layer: int | None, tensor: Tensor) -> Facts | None:
    """A tensor's digest, size and sample; None if it is no evidence of an origin."""
    digest, squares, largest, distinct = blake2b(digest_size=16), 0.0, 0.0, 0
    for block in blocks_of(tensor):
        values = np.ascontiguousarray(block.values(), np.float32)
        digest.update(values + np.float32(0))  # -0 is 0
        squares += float(np.vecdot(values, values))
        largest = max(largest, float(np.abs(values).max(initial=0)))
        distinct = max(distinct, len(np.unique(values[: 1 << 12])))
    size = prod(tensor.shape)
    mean = squares / max(1, size)
    is_matrix = len(tensor.shape) > 1
    is_wave = abs(mean - WAVES) < NEAR_WAVES and largest <= 1 + NEAR_WAVES and is_matrix
    if distinct <= DISTINCT or is_wave:
        return None
    if not is_matrix and not tensor.name.endswith((".weight", ".bias")):
        return None  # frequencies, slopes
    sample = _sample(tensor, part)
    return Facts(name, part, layer, tensor.shape, digest.digest(), sqrt(mean), sample)


def _sample(tensor: Tensor, part: str) -> np.ndarray:
    """Some of the first rows, centred, as one vector of unit length; empty if nothing is left.

    Of a vector, such as a norm's gain, all values.
    """
    count = prod(tensor.shape)
    if len(tensor.shape) == 1:
        taken = Block(tensor, 0, count).values().astype(np.float64)[None]
    else:
        width = row_width(tensor.shape)
        if not width or count < SMALLEST:
            return np.empty(0)
        values = SAMPLED_OF_TOKENS if part == TOKENS else SAMPLED
        rows = min(count // width, max(2, values // width))
        taken = Block(tensor, 0, rows * width).values().reshape(rows, width).astype(np.float64)
        taken -= taken.mean(axis=0)
    taken -= taken.mean(axis=1, keepdims=True)
    length = float(np.linalg.norm(taken))
    is_long = len(tensor.shape) == 1 or taken.size >= SMALLEST
    if not is_long or not length > 0:
        return np.empty(0)
    return (taken.ravel() / length).astype(np.float32)


def nearest(here: Sequence[Facts], there: Sequence[Facts]) -> dict[str, tuple[float, Facts]]:
    """The base's tensor with the most similar sample for each tensor, with the cosine.

    Only tensors of one part and width are compared.
    """
    best: dict[str, tuple[float, Facts]] = {}
    theirs = _by_shape(there)
    for (*shape, of_mine), mine in _by_shape(here).items():
        for (*its_shape, of_theirs), candidates in theirs.items():
            if shape != its_shape:
                continue
            common = min(of_mine, of_theirs)
            for some, rows in _unit_rows(mine, common):
                for facts, columns in _unit_rows(candidates, common):
                    cosines = rows @ columns.T
                    highest = cosines.max(axis=1)
                    first = (cosines >= highest[:, None] - TIE).argmax(axis=1)
                    for fact, cosine, k in zip(some, highest.tolist(), first.tolist(), strict=True):
                        if fact.name not in best or cosine > best[fact.name][0] + TIE:
                            best[fact.name] = cosine, facts[k]
    return best


BLOCK = 256  # samples that are multiplied at a time
TIE = 1e-6  # cosines of equal samples differ by less, as products are rounded


def _by_shape(facts: Sequence[Facts]) -> dict[tuple[str, int, int, int], list[Facts]]:
    """The tensors that have a sample, by part, width, number of axes and length of the sample."""
    groups: dict[tuple[str, int, int, int], list[Facts]] = defaultdict(list)
    for fact in facts:
        if length := len(fact.sample):
            groups[fact.part, fact.shape[-1], len(fact.shape), length].append(fact)
    return groups


def _unit_rows(facts: Sequence[Facts], common: int) -> Iterator[tuple[Sequence[Facts], np.ndarray]]:
    """Blocks of the tensors with what their samples have in common, as unit vectors."""
    for start in range(0, len(facts), BLOCK):
        some = facts[start : start + BLOCK]
        rows = np.stack([fact.sample[:common] for fact in some])
        yield some, rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
