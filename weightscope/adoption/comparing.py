"""A layer against what it was seen to do: how far its attention and its output are off."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, permutations, product

import numpy as np

from weightscope.adoption.observed import NO_SCORE, Observed
from weightscope.attention.layer import Layer
from weightscope.attention.maps import Affine
from weightscope.errors import CheckpointError

TOLERANCE = 1e-4  # of probabilities, and of outputs relative to the largest
ROUNDING = 2.0**-21  # of float32 scores relative to the largest, and so of probabilities where scores are hundreds


@dataclass(frozen=True)
class Errors:
    """How far a layer is from what was seen.

    Attributes
    ----------
    attention : float
        The largest error of a probability.
    output : float
        Of what the model's own attention makes of the values, relative to the largest number.
    here : float
        Of the scores of a token with itself, relative to the largest: what no rotation changes.
    rounding : float
        What float32 leaves open of a probability, where scores are hundreds.
    where : str
        In how many heads attention is off, in words, where it is not in all.
    """

    attention: float
    output: float
    here: float
    rounding: float = 0.0
    where: str = ""

    def words(self, tolerance: float) -> str:
        """What is wrong; nothing where nothing is."""
        right = self.attention <= max(tolerance, self.rounding), self.output <= tolerance
        if right == (True, True):
            return ""
        if right == (True, False):
            return f"attention is right, the output is off by {self.output:.2g} of its largest"
        values = "values are right" if right[1] else "the output is wrong too"
        near = "; scores are right at distance 0 only: what is wrong is position" if self.here <= tolerance else ""
        return f"{values}; attention is off by {self.attention:.2g}{self.where}{near}"


def compare(layer: Layer, one: Observed, tolerance: float = TOLERANCE) -> str:
    """What is wrong with a layer, in words; nothing where it does what was seen.

    Parameters
    ----------
    layer : Layer
    one : Observed
    tolerance : float
    """
    problems = []
    for found in measured(layer, one):
        problem = found if isinstance(found, str) else found.words(tolerance)
        if not problem or problem.startswith("refused: "):
            return problem
        problems.append(problem)
    return min(problems, key=len, default="nothing was seen to enter it")


def measured(layer: Layer, one: Observed) -> Iterator[Errors | str]:
    """How far a layer is from what was seen, for each of what may have entered; or why that cannot be said."""
    for given in _given(layer, one):
        try:
            yield _measure(layer, one, *given)
        except CheckpointError as error:
            yield f"refused: {error}"
        except (ValueError, TypeError, IndexError) as error:
            yield f"does not run on what entered: {type(error).__name__}: {error}".splitlines()[0]


Given = tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]


def _given(layer: Layer, one: Observed) -> Iterator[Given]:
    """What may have entered: streams, positions, and by name what else the layer takes.

    Some models count the tokens of a run, whatever the positions that they are given.
    """
    positions = (None,) if one.positions is None else (one.positions, None)
    takes = [name for name, taken in layer.added.taken(cross=layer.cross).items() if taken]
    n, m = one.attention.shape[1:]
    streams = (*one.streams, *_of(one, n, layer.d_model)) if takes or (layer.cross and n == m) else one.streams
    found: Iterable[tuple[np.ndarray, dict[str, np.ndarray]]] = ((x, {}) for x in streams)
    if layer.cross:
        memories = one.memories if one.memories and not takes else _of(one, m, layer.k.shape[1])
        found = ((x, {"memory": memory}) for memory in memories for x in streams)
    if takes:
        found = (given for given in found if _output_off(layer, one, *given) <= TOLERANCE)
        found = chain.from_iterable(_with_positions(layer, one, *given) for given in found)
    for x, more in found:
        yield from ((x, where, more) for where in positions)


def _of(one: Observed, rows: int, width: int) -> list[np.ndarray]:
    return [given for given in one.entered if given.shape == (rows, width)]


def _with_positions(
    layer: Layer, one: Observed, x: np.ndarray, more: dict[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The same, and what may have been added before queries and keys: it was given, or it is a difference."""
    taken, memory = layer.added.taken(cross=layer.cross), more.get("memory")
    choices: list[list[dict[str, np.ndarray]]] = [[more]]
    if taken["added"]:
        z = x if layer.norm is None else layer.norm(x)
        choices.append([{"added": p} for p in _positions(one, z, layer.added.of_queries or layer.added.of_keys)])
    if taken["added_to_memory"] and memory is not None:
        y = memory if layer.memory_norm is None else layer.memory_norm(memory)
        choices.append([{"added_to_memory": p} for p in _positions(one, y, layer.added.of_keys)])
    for chosen in product(*choices):
        yield x, {name: array for part in chosen for name, array in part.items()}


def _positions(one: Observed, z: np.ndarray, of: Affine | None) -> list[np.ndarray]:
    """What may have been added to z: all that entered, side by side where that is as wide; or what is more than z."""
    width = z.shape[1] if of is None else of.shape[1]
    given = [array for array in one.entered if len(array) == len(z)]
    found = [array for array in given if array.shape[1] == width]
    found += [np.hstack(pair) for pair in permutations(given, 2) if sum(array.shape[1] for array in pair) == width]
    return found + [array - z for array in given if array.shape == z.shape and z.shape[1] == width]


def _output_off(layer: Layer, one: Observed, x: np.ndarray, more: Mapping[str, np.ndarray]) -> float:
    """How far the layer's output is off, by the attention that was seen: values know of no added positions."""
    if x.shape[-1] != layer.d_model or len(more.get("memory", x)) != one.attention.shape[2]:
        return np.inf
    gathered = layer.output(np.nan_to_num(one.attention), x, **more)
    return min((_off(gathered, out) for out in one.outputs if out.shape == gathered.shape), default=np.inf)


def _measure(
    layer: Layer, one: Observed, x: np.ndarray, positions: np.ndarray | None, more: dict[str, np.ndarray]
) -> Errors | str:  # fmt: skip
    if x.shape[-1] != layer.d_model:
        return f"reads a stream of width {layer.d_model}, and {x.shape[-1]} enter"
    scores = layer.scores(x, positions, **more)
    expected = one.attention
    keys = scores.shape[-1]
    if expected.shape[-1] == keys + 1 and layer.sinks is not None:
        expected = expected[..., :keys]
    if expected.shape != scores.shape:
        return f"scores are {scores.shape}, attention {expected.shape}"
    seen = expected > NO_SCORE
    rows = one.scores.max(-1) > -1e4  # a query that sees nothing has no attention that means anything
    read = rows.all(axis=0)
    if not read.any():
        return "refused: no query sees anything, so that nothing is compared"
    expected = np.nan_to_num(expected)
    masked = scores if one.mask is None else scores + one.mask[:, :keys]
    found = softmax(np.where(seen, masked, -np.inf), layer.sinks)
    error = np.abs(found - expected)[rows].max(initial=0.0)
    memory = {name: array for name, array in more.items() if name == "memory"}
    gathered = layer.output(expected, x, **memory)
    outputs = [out for out in one.outputs if out.shape == gathered.shape]
    off = min((_off(gathered[read], out[read]) for out in outputs), default=np.inf)
    where = _where(found, expected, seen & rows[..., None])
    rounding = ROUNDING * float(np.abs(scores).max(initial=0.0))
    return Errors(float(error), float(off), _here(scores, one.scores, seen), rounding, where)


def _here(found: np.ndarray, expected: np.ndarray, seen: np.ndarray) -> float:
    """The largest error of a token's scores with itself, relative to the largest; infinite in cross-attention."""
    if found.shape[1] != found.shape[2]:
        return np.inf
    own = (np.diagonal(each[..., : found.shape[1]], axis1=1, axis2=2) for each in (found, expected, seen))
    a, b, both = own
    return _off(a[both], b[both]) if both.any() else np.inf


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, relative to the largest number expected."""
    return float(np.abs(found - expected).max(initial=0.0) / max(1.0, np.abs(expected).max(initial=0.0)))


def _where(found: np.ndarray, expected: np.ndarray, seen: np.ndarray) -> str:
    """In how many heads the attention is off, where it is not in all."""
    wrong = (np.abs(found - expected) > TOLERANCE) & seen
    heads = wrong.any(axis=(1, 2))
    return "" if heads.all() else f" in {heads.sum()} of {len(heads)} heads"


def softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Probabilities of scores (H, n, m), with a learned sink (H,) as one more key that takes mass and gives nothing."""
    if sinks is not None:
        more = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        return softmax(np.concatenate((scores, more), axis=-1), None)[..., :-1]
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30))
