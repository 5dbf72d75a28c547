"""The tokens along every head's first singular directions, the embedding streamed once for a group of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope.errors import CheckpointError, printable
from weightscope.metrics.directions import Directions, Nearest, leading_directions, nearest_rows
from weightscope.model import Model

DEFAULT = 2  # directions or blocks of each map that are read unless another number is asked for
AFFORDABLE = 4e11  # multiply-adds of reading them all, a few seconds; a larger model has to be asked
VECTOR_BYTES = 64 << 20  # of singular vectors held at a time
TOKENS = 8  # named for each side


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
        w, own = {"qk": "W_QK", "vo": "W_VO"}[self.map], self.directions
        if own.single:
            return f"{w}, σ{own.start + 1} = {own.values[0]:.3g}"
        said = f"{w}, σ{own.start + 1} to σ{own.stop} = {own.values[0]:.3g} to {own.values[-1]:.3g}: near-equal, one space"
        return said if self.sides else said + f" of {own.stop - own.start} directions, too wide to name tokens"

    def as_json(self) -> dict[str, Any]:
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


def can_read_directions(model: Model, layers: Sequence[int]) -> str | None:
    """Why the directions are not read unless asked for: no tokens, or too many; None where they are.

    Returns
    -------
    str or None
    """
    try:
        rows = model.embeddings.n_tokens
    except CheckpointError:
        return "no token embedding in this checkpoint, so its directions have no tokens"
    vectors = 4 * DEFAULT * len(layers) * model.config.n_heads  # two maps, two sides
    if rows * model.config.d_model * vectors > AFFORDABLE:
        return "tokens along singular directions left out: in a model of this size they take a --directions"
    return None


def read_directions(
    model: Model, layers: Sequence[int], how_many: int, token_text: Callable[[int], str]
) -> list[HeadDirections]:
    """For every head, the tokens along the first directions of W_QK and W_VO.

    Parameters
    ----------
    model : Model
    layers : sequence of int
    how_many : int
        Directions or blocks of each map.
    token_text : function of a token id
        What to call it.
    """
    vectors = 4 * how_many * model.config.n_heads * model.config.d_model * 8  # bytes a layer, were all of them single
    group = max(1, VECTOR_BYTES // vectors)
    found: list[HeadDirections] = []
    for start in range(0, len(layers), group):
        found += _read_group(model, layers[start : start + group], how_many, token_text)
    return found


def _read_group(
    model: Model, layers: Sequence[int], how_many: int, token_text: Callable[[int], str]
) -> list[HeadDirections]:
    wanted = [
        (layer, head.index, name, directions)
        for layer in layers
        for head in model.layer(layer).heads()
        for name, w in (("qk", head.qk), ("vo", head.vo))
        for directions in leading_directions(w, how_many)
    ]
    named = [item for item in wanted if item[3].left.shape[1]]
    spaces = [space for *_, directions in named for space in (directions.left, directions.right)]
    pairs = iter(nearest_rows(model.embeddings.blocks(), spaces, TOKENS, _centred(named)) if spaces else [])
    lines: dict[tuple[int, int], list[Line]] = {(layer, h): [] for layer in layers for h in range(model.config.n_heads)}
    for layer, head, name, directions in wanted:
        sides: list[tuple[str, Nearest, list[str]]] = []
        if directions.left.shape[1]:
            for side in SIDES[name]:
                for pole, nearest in zip(("+", "−"), next(pairs), strict=True):
                    if len(nearest.rows):
                        tokens = [printable(token_text(int(row))) for row in nearest.rows]
                        sides.append((f"{side} {pole}" if directions.single else side, nearest, tokens))
        lines[layer, head].append(Line(name, directions, tuple(sides)))
    return [HeadDirections(layer, head, tuple(own)) for (layer, head), own in lines.items()]


SIDES = {"qk": ("query", "key"), "vo": ("reads", "writes")}


def _centred(named: Sequence[tuple[int, int, str, Directions]]) -> bool:
    """A folded LayerNorm makes every direction that reads the residual stream orthogonal to the all-ones vector."""
    reading = [directions.left.sum(axis=0) for *_, directions in named]
    return bool(reading) and float(np.abs(np.concatenate(reading)).max()) < 1e-3
