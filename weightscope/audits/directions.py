"""The tokens along every head's first singular directions, the embedding streamed once for a group of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightscope.errors import CheckpointError, printable
from weightscope.metrics.directions import Directions, Nearest, leading_directions, nearest_rows
from weightscope.model import Model
from weightscope.text.tokenizer import load_tokenizer, token_text

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
        w, own = {"qk": "W_QK", "vo": "W_VO"}[self.map], self.directions
        if own.single:
            return f"{w}, σ{own.start + 1} = {own.values[0]:.3g}"
        said = (
            f"{w}, σ{own.start + 1} to σ{own.stop} = {own.values[0]:.3g} to {own.values[-1]:.3g}: near-equal, one space"
        )
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

    def as_json(self) -> dict[str, Any]:
        return {"layer": self.layer, "head": self.head, "lines": [line.as_json() for line in self.lines]}


def token_names(folder: Path) -> Callable[[int], str]:
    """What to call a token: its text where the folder has a tokenizer that can be read, else its number."""
    try:
        tokenizer = load_tokenizer(folder)
    except CheckpointError:
        return lambda token: f"#{token}"
    return lambda token: token_text(tokenizer, token)


def can_read_directions(model: Model, layers: Sequence[int], how_many: int | None) -> str | None:
    """Why tokens along singular directions are not read; None where they are.

    Parameters
    ----------
    model : Model
    layers : sequence of int
    how_many : int or None
        As asked for; None leaves it to the size of the model.
    """
    if how_many == 0:
        return "tokens along singular directions were not asked for"
    try:
        rows = model.embeddings.n_tokens
    except CheckpointError:
        return "no token embedding in this checkpoint, so its directions have no tokens"
    vectors = 4 * DEFAULT * len(layers) * model.config.n_heads  # two maps, two sides
    if how_many is None and rows * model.config.d_model * vectors > AFFORDABLE:
        return "tokens along singular directions were left out: in a model of this size they are read on --directions"
    return None


def read_directions(
    model: Model, layers: Sequence[int], how_many: int, name: Callable[[int], str]
) -> list[HeadDirections]:
    """For every head, the tokens along the first directions of W_QK and W_VO.

    Parameters
    ----------
    model : Model
    layers : sequence of int
    how_many : int
        Directions or blocks of each map.
    name : function of a token id
        What to call it.
    """
    vectors = 4 * how_many * model.config.n_heads * model.config.d_model * 8  # bytes a layer, were all of them single
    group = max(1, VECTOR_BYTES // vectors)
    found: list[HeadDirections] = []
    for start in range(0, len(layers), group):
        found += _read_group(model, layers[start : start + group], how_many, name)
    return found


def _read_group(model: Model, layers: Sequence[int], how_many: int, name: Callable[[int], str]) -> list[HeadDirections]:
    wanted = [
        (layer, head.index, which, directions)
        for layer in layers
        for head in model.layer(layer).heads()
        for which, w in (("qk", head.qk), ("vo", head.vo))
        for directions in leading_directions(w, how_many)
    ]
    named = [item for item in wanted if item[3].left.shape[1]]
    spaces = [space for *_, directions in named for space in (directions.left, directions.right)]
    divisor = model.layer(layers[-1]).divisor
    centred = divisor is not None and divisor.centred
    pairs = iter(nearest_rows(model.embeddings.blocks(), spaces, TOKENS, centred) if spaces else [])
    lines: dict[tuple[int, int], list[Line]] = {(layer, h): [] for layer in layers for h in range(model.config.n_heads)}
    for layer, head, which, directions in wanted:
        sides: list[tuple[str, Nearest, list[str]]] = []
        if directions.left.shape[1]:
            for side in SIDES[which]:
                for pole, nearest in zip(("+", "−"), next(pairs), strict=True):
                    if len(nearest.rows):
                        tokens = [printable(name(int(row))) for row in nearest.rows]
                        sides.append((f"{side} {pole}" if directions.single else side, nearest, tokens))
        lines[layer, head].append(Line(which, directions, tuple(sides)))
    return [HeadDirections(layer, head, tuple(own)) for (layer, head), own in lines.items()]
