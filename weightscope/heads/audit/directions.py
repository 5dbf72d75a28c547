"""Tokens along every head's first singular directions; embeddings are streamed in few passes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from weightscope.core.compute.cores import hand_back, in_threads
from weightscope.core.errors import CheckpointError, printable
from weightscope.core.progress import bar
from weightscope.heads.audit.measure import MAPS, Arrays, MeasuredHeads
from weightscope.model.layers.layer import Head
from weightscope.model.metrics.spaces import (
    Directions,
    Nearest,
    SpectrumBlock,
    directions_from,
    nearest_rows,
)
from weightscope.model.model import Model
from weightscope.model.text.tokenizer import Tokenizer, token_names
from weightscope.report.findings import Finding, Findings

DEFAULT = 2  # directions or blocks of each map whose tokens are found, if none are requested
AFFORDABLE = 4e11  # multiply-adds, a few seconds; beyond, tokens are found on request only
VECTOR_BYTES = 64 << 20  # bytes of singular vectors in memory at a time
TOKENS = 8  # tokens named per side
TOKENS_IN_FINDING = 3
WRITES = "writes"
SIDES = {"qk": ("query", "key"), "vo": ("reads", WRITES)}


@dataclass(frozen=True)
class TokenRows:
    """Rows of an embedding or unembedding, one per token, to compare one side of maps with."""

    tensor: str  # its name in the file
    n_tokens: int
    blocks: Callable[[], Iterable[tuple[int, np.ndarray]]]  # index of the first row, and rows
    unit: str = "cosines"  # or "logits": what a direction of length one adds to each logit
    centred: bool = False  # the mean of each row is subtracted first

    def nearest(self, spaces: Iterable[np.ndarray]) -> list[tuple[Nearest, Nearest]]:
        """The rows along each space, and against it."""
        what, by_cosine = "tokens along directions", self.unit == "cosines"
        with bar(what=what, unit="row", total=self.n_tokens, unit_scale=True) as progress:

            def blocks() -> Iterator[tuple[int, np.ndarray]]:
                for first, rows in self.blocks():
                    yield first, rows
                    progress.update(len(rows))

            return nearest_rows(blocks(), spaces, TOKENS, self.centred, by_cosine=by_cosine)


@dataclass(frozen=True)
class Line:
    """Tokens of a direction, or of a block of directions with near-equal singular values."""

    map: str
    block: SpectrumBlock  # the singular values; their vectors are not kept
    # A side, the rows that it is compared with, the nearest of them, their tokens.
    sides: tuple[tuple[str, TokenRows, Nearest, list[str]], ...]

    @property
    def title(self) -> str:
        """`W_QK, σ1 = 3.12`, or the range of a block."""
        block, values, first = self.block, self.block.values, f"σ{self.block.start + 1}"
        if block.single:
            return f"{MAPS[self.map]}, {first} = {values[0]:.3g}"
        span = f"{first} to σ{block.stop} = {values[0]:.3g} to {values[-1]:.3g}"
        title = f"{MAPS[self.map]}, {span}: near-equal, one space"
        wide = f" of {len(values)} directions, too wide to name tokens"
        return title + wide * block.wide

    def as_json(self) -> dict[str, Any]:
        """Its entry in directions.json."""
        sides = [
            {
                "name": name,
                "through": through.tensor,
                "rows": nearest.rows.tolist(),
                through.unit: [float(f"{score:.3g}") for score in nearest.scores],
                "tokens": tokens,
            }
            for name, through, nearest, tokens in self.sides
        ]
        first, last = self.block.start + 1, self.block.stop
        return {"map": self.map, "first": first, "last": last, "title": self.title, "sides": sides}


@dataclass(frozen=True)
class HeadDirections:
    """The lines of one head."""

    layer: int
    head: int
    lines: tuple[Line, ...]

    def as_json(self) -> dict[str, Any]:
        """Its entry in directions.json."""
        lines = [line.as_json() for line in self.lines]
        return {"layer": self.layer, "head": self.head, "lines": lines}


def how_many_read(model: Model, layers: Sequence[int], asked: int | None) -> int:
    """Number of directions or blocks per map whose tokens are found; reads headers only."""
    if asked == 0 or model.family.memory is not None:
        return 0
    n_tokens = []
    for matrix in ("embeddings", "unembedding"):
        with suppress(CheckpointError):
            n_tokens.append(getattr(model, matrix).n_tokens)
    if not n_tokens:
        return 0
    vectors = len(layers) * model.config.n_heads  # per direction, for each of four sides
    multiplications = (3 * n_tokens[0] + n_tokens[-1]) * model.config.d_model * DEFAULT * vectors
    return asked or (DEFAULT if multiplications <= AFFORDABLE else 0)


def directions_of(
    model: Model, heads: MeasuredHeads, asked: int | None
) -> tuple[list[HeadDirections], tuple[str, ...]]:
    """Tokens along the first directions of every head's W_QK and W_VO, and notes on how."""
    if asked == 0:
        return [], ("Tokens along singular directions were not requested.",)
    if model.family.memory is not None:
        return [], ("Directions have no tokens: cross-attention reads the output of an encoder.",)
    read, written, note = token_rows(model)
    if read is None or written is None:
        return [], (note,)
    how_many = how_many_read(model, heads.layers.tolist(), asked)
    if not how_many:
        size = "For a model of this size"
        return [], (f"{size}, tokens along singular directions are found only on request.",)
    tokenizer = Tokenizer.at_hand(model)
    names = token_names(tokenizer)
    name = cache(lambda row: printable(names(row)))  # many directions share their tokens
    problem = Tokenizer.why_unreadable(model)
    notes = (note, f"Tokens are shown as numbers: {problem}.") if problem else (note,)
    groups = _groups(model, heads, how_many)
    return [head for group in groups for head in _with_tokens(group, name, read, written)], notes


def token_rows(model: Model) -> tuple[TokenRows | None, TokenRows | None, str]:
    """Rows for what heads read and for what they write, None if there are none, and a note."""
    norm = model.family.norm_of(model.attention_layers[-1])
    centred = norm is not None and norm.centred
    read = written = None
    described, problems = "", []
    try:
        embeddings = model.embeddings
        name = embeddings.token_tensor.name
        read = TokenRows(name, embeddings.n_tokens, partial(_in_stream, model), centred=centred)
    except CheckpointError as error:
        problems.append(str(error))
    try:
        rows = model.unembedding
        written = TokenRows(rows.tensor.name, rows.n_tokens, rows.blocks, "logits")
        described = rows.described
    except CheckpointError as error:
        problems.append(str(error))
    problem = problems[0].removeprefix(f"{model.checkpoint.name}: ") if problems else ""
    if read is not None and written is not None:
        input_side = f"what heads read is compared with the input embedding ({read.tensor})"
        output_side = f"what they write is read as logits, through {described}"
        return read, written, f"Tokens: {input_side}; {output_side}."
    if read is not None:
        both = "for what heads read and for what they write"
        return read, read, f"Tokens: the input embedding ({read.tensor}) {both}: {problem}."
    if written is not None:
        both = "for what heads write and for what they read"
        return written, written, f"Tokens: {described}, {both}: {problem}."
    return None, None, f"Directions have no tokens: {problem}."


def _in_stream(model: Model) -> Iterable[tuple[int, np.ndarray]]:
    """The token embedding as it enters the residual stream."""
    return ((first, model.ends.into_stream(block)) for first, block in model.embeddings.blocks())


# by layer and head: a head's maps and their directions
Group = dict[tuple[int, int], list[tuple[str, Directions]]]


def _groups(model: Model, measured: MeasuredHeads, how_many: int) -> Iterator[Group]:
    """Directions of all heads, in groups of about `VECTOR_BYTES` that the caller empties."""
    layers = measured.layers.tolist()

    def of_head(head: Head, arrays: Arrays) -> list[tuple[str, Directions]]:
        directions = []
        for name in MAPS:
            w, spectra = getattr(head, name), arrays[f"{name}_singular_values"]  # (H, r)
            none = np.empty((*spectra.shape, 0))
            sides = (arrays.get(f"{name}_{side}", none) for side in ("left", "right"))  # (H, r, k)
            s, left, right = (array[head.index][: w.rank_bound] for array in (spectra, *sides))
            leading = directions_from(w, s, left, right, how_many)
            directions += [(name, direction) for direction in leading]
        return directions

    group: Group = {}
    n_bytes = 0
    steps = pairwise((*layers, None))
    for layer, following in bar(steps, "directions", "layer", total=len(layers)):
        hand_back()
        coming = () if following is None else model.attention_tensors(following)
        with model.checkpoint.prefetching([tensor.name for tensor in coming]):
            of_one = partial(of_head, arrays=measured.by_layer[layer])
            of_heads = in_threads(of_one, copy(model).layer(layer).heads)  # one layer is kept
            for index, directions in enumerate(of_heads):
                group[layer, index] = directions
                n_bytes += sum(each.left.nbytes + each.right.nbytes for _, each in directions)
        if n_bytes >= VECTOR_BYTES or layer == layers[-1]:
            yield group
            n_bytes = 0
    hand_back()


def _with_tokens(
    group: Group, name: Callable[[int], str], read: TokenRows, written: TokenRows
) -> list[HeadDirections]:
    """The tokens of a group of heads, which is emptied; all rows are streamed once."""
    blocks = {
        head: [(map_name, direction.block) for map_name, direction in maps]
        for head, maps in group.items()
    }
    spaces: dict[TokenRows, deque[np.ndarray]] = {read: deque(), written: deque()}  # (d, k)
    for map_name, direction in chain.from_iterable(group.values()):
        if not direction.block.wide:
            of_sides = zip(SIDES[map_name], (direction.left, direction.right), strict=True)
            for side, space in of_sides:
                spaces[written if side == WRITES else read].append(space)
    group.clear()

    def taken(some: deque[np.ndarray]) -> Iterator[np.ndarray]:
        while some:
            yield some.popleft()  # and no longer kept

    nearest = {rows: iter(rows.nearest(taken(some))) for rows, some in spaces.items() if some}

    def line(map_name: str, block: SpectrumBlock) -> Line:
        sides: list[tuple[str, TokenRows, Nearest, list[str]]] = []
        for side in () if block.wide else SIDES[map_name]:
            rows = written if side == WRITES else read
            for pole, pairs in zip(("+", "−"), next(nearest[rows]), strict=True):
                if len(pairs.rows):
                    tokens = [name(int(row)) for row in pairs.rows]
                    sides.append((f"{side} {pole}" if block.single else side, rows, pairs, tokens))
        return Line(map_name, block, tuple(sides))

    return [
        HeadDirections(layer, head, tuple(line(map_name, block) for map_name, block in of_head))
        for (layer, head), of_head in blocks.items()
    ]


def with_tokens(findings: Findings, directions: Sequence[HeadDirections]) -> Findings:
    """The findings; spectral spikes name the tokens along their first direction."""
    first: dict[tuple[int | None, int | None, str | None], Line] = {}
    for each in directions:
        for line in each.lines:
            first.setdefault((each.layer, each.head, line.map), line)

    def with_first(finding: Finding) -> Finding:
        if finding.kind != "spectral_spike":
            return finding
        farthest = (m.index for m in finding.members if m.number == finding.number)
        line = first.get((finding.layer, next(farthest, finding.head), finding.map))
        if line is None or not line.sides:
            return finding
        sides = []
        for name, _, _, tokens in line.sides:
            sides.append(f"{name} {', '.join(map(repr, tokens[:TOKENS_IN_FINDING]))}")
        return replace(finding, text=f"{finding.text} Along it: {'; '.join(sides)}.")

    return Findings(map(with_first, findings))
