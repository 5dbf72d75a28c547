"""The tokens along every head's first singular directions, the embedding streamed once for a group of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weightscope.audits.measures import MAPS
from weightscope.errors import CheckpointError, printable
from weightscope.metrics.spaces import Directions, Nearest, leading_directions, nearest_rows
from weightscope.model import Model
from weightscope.text.tokenizer import token_text, tokenizer_if_any

DEFAULT = 2  # directions or blocks of each map that are read unless another number is asked for
AFFORDABLE = 4e11  # multiply-adds of reading them all, a few seconds; a larger model has to be asked
VECTOR_BYTES = 64 << 20  # of singular vectors held at a time
TOKENS = 8  # named for each side
SIDES = {"qk": ("query", "key"), "vo": ("reads", "writes")}


@dataclass(frozen=True)
class Line:
    """What one direction, or one block of near-equal ones, of a head's map reads and writes.

    Attributes
    ----------
    map : {"qk", "vo"}
    directions : Directions
    sides : tuple of (str, Nearest, list of str)
        What the side is, the rows nearest, and their tokens.
    """

    map: str
    directions: Directions
    sides: tuple[tuple[str, Nearest, list[str]], ...]

    @property
    def title(self) -> str:
        """`W_QK, σ1 = 3.12`, or what is to be said of a block."""
        w, own = MAPS[self.map], self.directions
        first, last, values = own.start + 1, own.stop, own.values
        if own.single:
            return f"{w}, σ{first} = {values[0]:.3g}"
        block = f"{w}, σ{first} to σ{last} = {values[0]:.3g} to {values[-1]:.3g}: near-equal, one space"
        return block if self.sides else f"{block} of {len(values)} directions, too wide to name tokens"

    def as_json(self) -> dict[str, Any]:
        """As directions.json has it."""
        sides = [
            {
                "name": name,
                "rows": nearest.rows.tolist(),
                "cosines": [round(float(c), 3) for c in nearest.cosines],
                "tokens": tokens,
            }
            for name, nearest, tokens in self.sides
        ]
        own = self.directions
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


def token_names(folder: Path) -> Callable[[int], str]:
    """What to call a token: its text where the folder has a tokenizer that can be read, else its number."""
    tokenizer = tokenizer_if_any(folder)
    return (lambda token: f"#{token}") if tokenizer is None else partial(token_text, tokenizer)


def directions_of(
    model: Model, layers: Sequence[int], how_many: int | None
) -> tuple[list[HeadDirections], tuple[str, ...]]:
    """For every head, the tokens along the first directions of W_QK and W_VO; where they are not read, a note of why.

    Parameters
    ----------
    model : Model
    layers : sequence of int
    how_many : int or None
        Directions or blocks of each map; None for two where that takes seconds, else none.
    """
    if how_many == 0:
        return [], ("Tokens along singular directions were not asked for.",)
    try:
        n_tokens = model.embeddings.n_tokens
    except CheckpointError:
        return [], ("No token embedding in this checkpoint, so its directions have no tokens.",)
    vectors = 4 * len(layers) * model.config.n_heads  # two maps, two sides, of each direction
    if how_many is None and n_tokens * model.config.d_model * DEFAULT * vectors > AFFORDABLE:
        return [], ("In a model of this size, tokens along singular directions are read only when they are asked for.",)
    how_many = how_many or DEFAULT
    name = token_names(model.checkpoint.folder)
    bytes_a_layer = 4 * how_many * model.config.n_heads * model.config.d_model * 8  # were all directions single
    group = max(1, VECTOR_BYTES // bytes_a_layer)
    starts = range(0, len(layers), group)
    return [one for start in starts for one in _read_group(model, layers[start : start + group], how_many, name)], ()


def _read_group(model: Model, layers: Sequence[int], how_many: int, name: Callable[[int], str]) -> list[HeadDirections]:
    """The directions of some layers' heads, for which the embedding is gone through once."""
    directions = [
        (layer, head.index, map_name, own)
        for layer in layers
        for head in model.layer(layer).heads
        for map_name in MAPS
        for own in leading_directions(getattr(head, map_name), how_many)
    ]
    spaces = [space for *_, own in directions for space in (own.left, own.right) if space.shape[1]]
    norm = model.layer(layers[-1]).norm
    centred = norm is not None and norm.centred
    rows = ((first, model.into_stream(block)) for first, block in model.embeddings.blocks())
    nearest = iter(nearest_rows(rows, spaces, TOKENS, centred) if spaces else [])
    lines: dict[tuple[int, int], list[Line]] = {(layer, h): [] for layer in layers for h in range(model.config.n_heads)}
    for layer, head, map_name, own in directions:
        sides: list[tuple[str, Nearest, list[str]]] = []
        for side in SIDES[map_name] if own.left.shape[1] else ():
            for pole, pairs in zip(("+", "−"), next(nearest), strict=True):
                if len(pairs.rows):
                    tokens = [printable(name(int(row))) for row in pairs.rows]
                    sides.append((f"{side} {pole}" if own.single else side, pairs, tokens))
        lines[layer, head].append(Line(map_name, own, tuple(sides)))
    return [HeadDirections(layer, head, tuple(own)) for (layer, head), own in lines.items()]
