"""The tokens along every head's first singular directions, embeddings streamed once for a group of layers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from weightscope.attention.head import Head
from weightscope.audits.findings import Finding, Findings
from weightscope.audits.measures import MAPS, MeasuredHeads
from weightscope.errors import CheckpointError, printable
from weightscope.metrics.spaces import Block, Directions, Nearest, directions_from, nearest_rows
from weightscope.model import Model
from weightscope.parallel import in_threads
from weightscope.progress import bar
from weightscope.text.tokenizer import token_names, tokenizer_at_hand, unread_tokenizer

DEFAULT = 2  # directions or blocks of each map that are read unless another number is asked for
AFFORDABLE = 4e11  # multiply-adds of reading them all, a few seconds; a larger model has to be asked
VECTOR_BYTES = 64 << 20  # of singular vectors held at a time
TOKENS = 8  # named for each side
TOKENS_TOLD = 3  # of these, in a finding
WRITES = "writes"
SIDES = {"qk": ("query", "key"), "vo": ("reads", WRITES)}


@dataclass(frozen=True)
class TokenRows:
    """What one side of the heads' maps is read through: a row a token.

    Attributes
    ----------
    tensor : str
        The rows' name in the file.
    n_tokens : int
    blocks : function
        Streams them, each block with the index of its first row.
    unit : {"cosines", "logits"}
        Rows count by direction alone, or are what a direction of length one adds to each logit.
    centred : bool
        Means are taken off first.
    """

    tensor: str
    n_tokens: int
    blocks: Callable[[], Iterable[tuple[int, np.ndarray]]]
    unit: str = "cosines"
    centred: bool = False

    def nearest(self, spaces: Sequence[np.ndarray]) -> list[tuple[Nearest, Nearest]]:
        """The rows along each space, and against it."""
        if not spaces:
            return []
        with bar(what="tokens along directions", unit="row", total=self.n_tokens, unit_scale=True) as done:

            def blocks() -> Iterator[tuple[int, np.ndarray]]:
                for first, rows in self.blocks():
                    yield first, rows
                    done.update(len(rows))

            return nearest_rows(blocks(), spaces, TOKENS, self.centred, by_cosine=self.unit == "cosines")


@dataclass(frozen=True)
class Line:
    """What one direction, or one block of near-equal ones, of a head's map reads and writes.

    Attributes
    ----------
    map : {"qk", "vo"}
    block : Block
        The singular values; their vectors are not kept.
    sides : tuple of (str, TokenRows, Nearest, list of str)
        What the side is, what it is read through, the rows nearest, and their tokens.
    """

    map: str
    block: Block
    sides: tuple[tuple[str, TokenRows, Nearest, list[str]], ...]

    @property
    def title(self) -> str:
        """`W_QK, σ1 = 3.12`, or what is to be said of a block."""
        w, own = MAPS[self.map], self.block
        first, last, values = own.start + 1, own.stop, own.values
        if own.single:
            return f"{w}, σ{first} = {values[0]:.3g}"
        block = f"{w}, σ{first} to σ{last} = {values[0]:.3g} to {values[-1]:.3g}: near-equal, one space"
        return f"{block} of {len(values)} directions, too wide to name tokens" if own.wide else block

    def as_json(self) -> dict[str, Any]:
        """As directions.json has it."""
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
        own = self.block
        return {"map": self.map, "first": own.start + 1, "last": own.stop, "title": self.title, "sides": sides}


@dataclass(frozen=True)
class HeadDirections:
    """The lines of one head."""

    layer: int
    head: int
    lines: tuple[Line, ...]

    def as_json(self) -> dict[str, Any]:
        """As directions.json has it."""
        return {"layer": self.layer, "head": self.head, "lines": [line.as_json() for line in self.lines]}


def how_many_read(model: Model, layers: Sequence[int], asked: int | None) -> int:
    """Directions or blocks of each map that are read through tokens, 0 where none are; no token is read.

    Parameters
    ----------
    model : Model
    layers : sequence of int
    asked : int or None
        None for two where that takes seconds, else none.
    """
    if asked == 0 or model.family.memory is not None:
        return 0
    n_tokens = []
    for rows in ("embeddings", "unembedding"):
        with suppress(CheckpointError):
            n_tokens.append(getattr(model, rows).n_tokens)
    if not n_tokens:
        return 0
    vectors = len(layers) * model.config.n_heads  # of each of four sides, for each direction
    multiplications = (3 * n_tokens[0] + n_tokens[-1]) * model.config.d_model * DEFAULT * vectors
    return asked or (DEFAULT if multiplications <= AFFORDABLE else 0)


def directions_of(
    model: Model, heads: MeasuredHeads, asked: int | None
) -> tuple[list[HeadDirections], tuple[str, ...]]:
    """For every head, the tokens along the first directions of W_QK and W_VO, and notes of what they are read through.

    Where they are not read, a note of why.

    Parameters
    ----------
    model : Model
    heads : MeasuredHeads
        Of this model; what they keep of singular vectors is used.
    asked : int or None
        As for `how_many_read`.
    """
    if asked == 0:
        return [], ("Tokens along singular directions were not asked for.",)
    if model.family.memory is not None:
        return [], ("Directions have no tokens: cross-attention reads what an encoder made of them.",)
    read, written, note = token_rows(model)
    if read is None or written is None:
        return [], (note,)
    how_many = how_many_read(model, heads.layers.tolist(), asked)
    if not how_many:
        return [], ("In a model of this size, tokens along singular directions are read only when they are asked for.",)
    tokenizer = tokenizer_at_hand(model)
    name = token_names(tokenizer)
    problem = "" if tokenizer is not None else unread_tokenizer(model)
    notes = (note, f"Tokens have numbers for names: {problem}.") if problem else (note,)
    groups = _groups(model, heads, how_many)
    return [one for own in groups for one in _through_tokens(own, name, read, written)], notes


def token_rows(model: Model) -> tuple[TokenRows | None, TokenRows | None, str]:
    """What heads read, and what they write, is read through, and a sentence that says so; None: neither is there."""
    norm = model.layer(model.attention_layers[-1]).norm
    centred = norm is not None and norm.centred
    read = written = None
    through, lacking = "", ""
    try:
        embeddings = model.embeddings
        name = embeddings.token_tensor.name
        read = TokenRows(name, embeddings.n_tokens, partial(_in_stream, model), centred=centred)
    except CheckpointError as error:
        lacking = _problem(model, error)
    try:
        unembedding = model.unembedding
        written = TokenRows(unembedding.tensor.name, unembedding.n_tokens, unembedding.blocks, "logits")
        through = unembedding.described
    except CheckpointError as error:
        lacking = lacking or _problem(model, error)
    if read is not None and written is not None:
        said = (
            f"what heads read is compared with the input embedding ({read.tensor}); what they write is read as logits"
        )
        return read, written, f"Tokens: {said}, through {through}."
    if read is not None:
        return (
            read,
            read,
            f"Tokens: the input embedding ({read.tensor}) for what heads read and for what they write: {lacking}.",
        )
    if written is not None:
        return written, written, f"Tokens: {through}, for what heads write and for what they read: {lacking}."
    return None, None, f"Directions have no tokens: {lacking}."


def _problem(model: Model, error: CheckpointError) -> str:
    """An error's message without the checkpoint's name."""
    return str(error).removeprefix(f"{model.checkpoint.name}: ")


def _in_stream(model: Model) -> Iterable[tuple[int, np.ndarray]]:
    """The token embedding as it enters the residual stream."""
    return ((first, model.into_stream(block)) for first, block in model.embeddings.blocks())


Found = dict[tuple[int, int], list[tuple[str, Directions]]]  # a head's maps and their directions, by layer and head


def _groups(model: Model, measured: MeasuredHeads, how_many: int) -> Iterator[Found]:
    """The directions of all heads, in groups of layers that hold about `VECTOR_BYTES`."""
    layers = measured.layers.tolist()

    def of_head(head: Head) -> list[tuple[str, Directions]]:
        found, at = [], (layers.index(head.layer.index), head.index)
        for name in MAPS:
            w, spectra = getattr(head, name), measured.arrays[f"{name}_singular_values"]  # (L, H, r)
            none = np.empty((*spectra.shape, 0))
            sides = (measured.arrays.get(f"{name}_{side}", none) for side in ("left", "right"))  # (L, H, r, k)
            s, left, right = (kept[at][: w.rank_bound] for kept in (spectra, *sides))
            found += [(name, own) for own in directions_from(w, s, left, right, how_many)]
        return found

    group: Found = {}
    for layer in bar(layers, "directions", "layer"):
        heads = model.layer(layer).heads
        group |= {(layer, head.index): own for head, own in zip(heads, in_threads(of_head, heads), strict=True)}
        held = sum(own.left.nbytes + own.right.nbytes for of_head in group.values() for _, own in of_head)
        if held >= VECTOR_BYTES or layer == layers[-1]:
            yield group
            group = {}


def _through_tokens(
    group: Found, name: Callable[[int], str], read: TokenRows, written: TokenRows
) -> list[HeadDirections]:
    """What a group of heads reads and writes, for which the rows are gone through once."""
    sides = [
        (written if side == WRITES else read, space)
        for directions in group.values()
        for map_name, own in directions
        for side, space in zip(SIDES[map_name], (own.left, own.right), strict=True)
        if not own.block.wide
    ]
    nearest = {rows: iter(rows.nearest([space for of, space in sides if of is rows])) for rows in {read, written}}

    def line(map_name: str, block: Block) -> Line:
        found: list[tuple[str, TokenRows, Nearest, list[str]]] = []
        for side in () if block.wide else SIDES[map_name]:
            rows = written if side == WRITES else read
            for pole, pairs in zip(("+", "−"), next(nearest[rows]), strict=True):
                if len(pairs.rows):
                    tokens = [printable(name(int(row))) for row in pairs.rows]
                    found.append((f"{side} {pole}" if block.single else side, rows, pairs, tokens))
        return Line(map_name, block, tuple(found))

    return [
        HeadDirections(layer, head, tuple(line(map_name, own.block) for map_name, own in directions))
        for (layer, head), directions in group.items()
    ]


def with_tokens(findings: Findings, directions: Sequence[HeadDirections]) -> Findings:
    """The findings, spectral spikes with the tokens along the direction that rules."""
    first: dict[tuple[int | None, int | None, str | None], Line] = {
        (own.layer, own.head, line.map): line for own in directions for line in reversed(own.lines)
    }

    def told(finding: Finding) -> Finding:
        head = next((one.index for one in finding.members if one.number == finding.number), finding.head)
        line = first.get((finding.layer, head, finding.map))
        if finding.kind != "spectral_spike" or line is None or not line.sides:
            return finding
        sides = (f"{name} {', '.join(map(repr, tokens[:TOKENS_TOLD]))}" for name, _, _, tokens in line.sides)
        return replace(finding, text=f"{finding.text} Along it: {'; '.join(sides)}.")

    return Findings(map(told, findings))
