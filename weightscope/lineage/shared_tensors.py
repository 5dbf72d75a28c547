"""What two checkpoints share outside their attention heads: feed-forward networks, embeddings, norms and biases."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod, sqrt
from typing import NamedTuple

import numpy as np

from weightscope.changes.counterparts import counterparts
from weightscope.changes.thresholds import MAYBE_SHARED, SAME_SIZE, SAME_SIZES, SHARED_ROWS
from weightscope.checkpoint import Tensor
from weightscope.checkpoint.blocks import Block, blocks_of, row_width
from weightscope.errors import counted, printable
from weightscope.findings import listed
from weightscope.model import Model
from weightscope.progress import bar
from weightscope.tensors.measure import why_unread

SAMPLED = {"feed-forward networks": 1 << 13, "embeddings": 1 << 16}  # values of a matrix's first rows: those that a cut
# or extended vocabulary keeps; the cosine of strangers' is 0, give or take 0.03 in the smallest
SMALLEST = 1000  # values of a matrix that is compared by its cosine, and whose equality is evidence by itself
DISTINCT = 16  # values that a tensor must hold: ones, zeros and masks are equal without any origin
WAVES = 0.5, 1e-3  # mean square of a table of sines and cosines, which strangers share, and how near to it
NETWORKS, EMBEDDINGS, VECTORS = "feed-forward networks", "embeddings", "norms and biases"
NAMED = 3  # tensors in a sentence


class Facts(NamedTuple):
    """A tensor outside heads, after reading it once."""

    name: str
    part: str
    shape: tuple[int, ...]
    digest: bytes
    rms: float
    sample: np.ndarray  # centred rows, unit length; empty if it is too small

    @property
    def size(self) -> int:
        return prod(self.shape)


class SharedTensors(NamedTuple):
    """What is shared outside heads, and why something may have been missed."""

    equal: Sequence[str]  # tensors of the suspect that the base has too, value by value
    alike: Sequence[str]  # and those whose rows are alike
    cosine: float  # the least of these
    share: float  # of the suspect's values outside attention matrices
    compared: int
    doubt: str

    @property
    def is_shared(self) -> bool:
        """Whether the two have an origin in common."""
        return bool(self.share)

    @property
    def text(self) -> str:
        """What is shared, as part of a sentence."""
        what = []
        if self.equal:
            what.append(f"{_named(self.equal, self.compared)} equal, value by value")
        if self.alike:
            what.append(f"{_named(self.alike, self.compared)} alike (cosine of rows at least {self.cosine:.3g})")
        return " and ".join(what) + f": {self.share:.0%} of the values that are not attention's"


def _named(names: Sequence[str], total: int) -> str:
    verb = "is" if len(names) == 1 else "are"
    return f"{len(names)} of {counted(total, 'other tensor')} ({printable(listed(list(names), NAMED))}) {verb}"


def find_shared_tensors(suspect: Model, base: Model) -> SharedTensors:
    """Compare all tensors outside attention matrices, whatever layer they are in."""
    stored_apart = [pair for each in counterparts(suspect, base) if (pair := each.pair()) and pair.is_converted]
    here = list(facts_of(suspect, [(pair.part or pair.a.name, pair.a) for pair in stored_apart]))
    there = list(facts_of(base, [(pair.part or pair.b.name, pair.b) for pair in stored_apart]))
    digests = {(fact.shape, fact.digest) for fact in there}
    equal = [fact for fact in here if (fact.shape, fact.digest) in digests]
    rest = [fact for fact in here if (fact.shape, fact.digest) not in digests and fact.sample.size]
    cosines = _cosines(rest, there)
    alike = [fact for fact in rest if cosines[fact.name] >= SHARED_ROWS]
    matrices = [fact for fact in here if fact.size >= SMALLEST and len(fact.shape) > 1]
    is_evidence = bool(alike) or any(fact in matrices for fact in equal)
    shared = [*equal, *alike] if is_evidence else []
    doubt = _doubt(here, there, equal, cosines, matrices)
    share = sum(fact.size for fact in shared) / max(1, sum(fact.size for fact in here))
    least = min((cosines[fact.name] for fact in alike), default=1.0)
    names = [fact.name for fact in equal], [fact.name for fact in alike]
    return SharedTensors(*names, least, share, len(here), doubt)


def _doubt(
    here: Sequence[Facts], there: Sequence[Facts], equal: Sequence[Facts], cosines: dict[str, float],
    matrices: Sequence[Facts],
) -> str:  # fmt: skip
    """Why something shared may have been missed; empty if every part was compared."""
    if equal:
        return f"{_named([fact.name for fact in equal], len(here))} equal, value by value, and no matrix is"
    near = max(cosines.values(), default=0.0)
    if near >= MAYBE_SHARED:
        return f"rows of other tensors are more alike than strangers' (cosine {near:.2g})"
    sizes = {shape: np.array([fact.rms for fact in there if fact.shape == shape]) for shape in {f.shape for f in there}}
    same = [m for m in matrices if m.shape in sizes and (np.abs(sizes[m.shape] / (m.rms or 1) - 1) < SAME_SIZE).any()]
    if matrices and len(same) > SAME_SIZES * len(matrices):
        return "matrices outside the heads have equal norms, as they have after a change of basis"
    widths = {(fact.part, fact.shape[-1]) for fact in there}
    for part in (NETWORKS, EMBEDDINGS):
        ours = [fact for fact in here if fact.part == part]
        if ours and any(fact.part == part for fact in there) and not any((part, f.shape[-1]) in widths for f in ours):
            return f"{part} could not be compared: their sizes differ"
    return ""


def facts_of(model: Model, converted: Sequence[tuple[str, Tensor]] = ()) -> Iterator[Facts]:
    """Every tensor that is no attention matrix, nor the same in all models; some as they were converted, by name."""
    attention = {tensor.name for i in model.attention_layers for tensor in model.attention_tensors(i)}
    inside = {name for i in range(model.config.n_layers) for name in model.checkpoint.names_under(model.stem(i))}
    replaced = {tensor.name for _, tensor in converted}
    stored = [(name, tensor) for name, tensor in model.checkpoint.items() if name not in replaced]
    tensors = [each for each in (*stored, *converted) if not (each[1].name in attention and len(each[1].shape) > 1)]
    for name, tensor in bar(tensors, "other tensors", "tensor"):
        if not tensor.shape or tensor.dtype.startswith(("I", "U", "BOOL")) or why_unread(tensor):
            continue
        part = VECTORS if len(tensor.shape) < 2 else NETWORKS if tensor.name in inside else EMBEDDINGS
        fact = _fact(name, tensor, part)
        if fact is not None:
            yield fact


def _fact(name: str, tensor: Tensor, part: str) -> Facts | None:
    """A tensor's digest, size and sample; None if it says nothing of where it comes from."""
    digest, squares, largest, distinct = blake2b(digest_size=16), 0.0, 0.0, 0
    for block in blocks_of(tensor):
        values = np.ascontiguousarray(block.values(), np.float32)
        digest.update(values + np.float32(0))  # -0 is 0
        squares += float(np.vecdot(values, values))
        largest = max(largest, float(np.abs(values).max(initial=0)))
        distinct = max(distinct, len(np.unique(values[: 1 << 12])))
    size = prod(tensor.shape)
    mean = squares / max(1, size)
    if distinct <= DISTINCT or (abs(mean - WAVES[0]) < WAVES[1] and largest <= 1 + WAVES[1] and len(tensor.shape) > 1):
        return None
    if not (len(tensor.shape) > 1 or tensor.name.endswith((".weight", ".bias"))):
        return None  # frequencies, slopes
    sample = _sample(tensor, part) if size >= SMALLEST and len(tensor.shape) > 1 else np.empty(0)
    return Facts(name, part, tensor.shape, digest.digest(), sqrt(mean), sample)


def _sample(tensor: Tensor, part: str) -> np.ndarray:
    """Some of the first rows, centred, as one vector of unit length; empty if nothing is left."""
    width = row_width(tensor.shape)
    if not width:
        return np.empty(0)
    rows = min(prod(tensor.shape) // width, max(2, SAMPLED[part] // width))
    taken = Block(tensor, 0, rows * width).values().reshape(rows, width).astype(np.float64)
    taken -= taken.mean(axis=0)
    taken -= taken.mean(axis=1, keepdims=True)
    length = float(np.linalg.norm(taken))
    return (taken.ravel() / length).astype(np.float32) if length > 0 and taken.size >= SMALLEST else np.empty(0)


def _cosines(here: Sequence[Facts], there: Sequence[Facts]) -> dict[str, float]:
    """The largest cosine of each tensor's sample with one of the base's of its width."""
    by_width: dict[tuple[str, int], list[Facts]] = defaultdict(list)
    for fact in there:
        if fact.sample.size:
            by_width[fact.part, fact.shape[-1]].append(fact)
    largest = {}
    for fact in here:
        candidates = by_width[fact.part, fact.shape[-1]]
        lengths = {len(each.sample) for each in candidates}
        most = 0.0
        for length in lengths:
            common = min(length, len(fact.sample))
            mine = fact.sample[:common]
            theirs = np.stack([each.sample[:common] for each in candidates if len(each.sample) == length])
            sizes = np.linalg.norm(theirs, axis=1) * float(np.linalg.norm(mine))
            most = max(most, float((theirs @ mine / np.maximum(sizes, 1e-30)).max()))
        largest[fact.name] = most
    return largest
