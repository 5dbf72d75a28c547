"""Static Sink Patching: the sink's update replaced by a constant while a model runs (sink-as-bias paper, eq. 7)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from weightscope.progress import bar
from weightscope.runner.runner import Activations, Observer, Runner
from weightscope.sinks.bias import sink_update
from weightscope.sinks.perplexity import change_interval, perplexity

EARLY, LATE = 0.3, 0.3  # of the layers; the middle ones are the rest
PATCHED, ABLATED = "SSP", "ablation"
STARTS = (0, 1)  # eq. 7 as it stands, and token 0's own update left alone

# A layer and u_sink (n, d) there -> what to put in its place, (n, d) or (d,).
Replacement = Callable[[int, np.ndarray], np.ndarray]


def replacing_sink(replacement: Replacement, layers: Sequence[int], start: int = 0) -> Observer:
    """An observer that puts y - u_sink + replacement in place of attention's output y (eq. 7).

    u_sink is that of the model as it runs, layers below already patched.

    Parameters
    ----------
    replacement : callable
    layers : sequence of int
        Where; elsewhere the output stays.
    start : int
        The first position that is patched. Eq. 7 says every one, so 0: what token 0 sends itself, all of its own update
        but b, is replaced too, and the sink that later layers see is another. From 1 on the sink stays what it is.
    """
    wanted = frozenset(layers)

    def observer(seen: Activations) -> np.ndarray | None:
        if seen.layer.index not in wanted:
            return None
        new = seen.output.copy()
        for output, (x, attention) in zip(new, seen.each(), strict=True):
            update = sink_update(seen.layer, attention, x).rows()
            output[start:] += (replacement(seen.layer.index, update) - update)[start:]
        return new

    return observer


def constant(mu: Mapping[int, np.ndarray]) -> Replacement:
    """mu_sink of each layer: Static Sink Patching."""
    return lambda layer, _: mu[layer]


def nothing(layer: int, update: np.ndarray) -> np.ndarray:
    """Zero: the ablation that the paper compares with."""
    return np.zeros_like(update)


def layer_ranges(layers: Sequence[int]) -> dict[str, list[int]]:
    """Early (30 %), middle (40 %) and late (30 %) layers, and all; a range that would be empty is left out."""
    early, late = round(EARLY * len(layers)), round(LATE * len(layers))
    ranges = {
        "early": list(layers[:early]),
        "middle": list(layers[early : len(layers) - late]),
        "late": list(layers[len(layers) - late :]),
        "all": list(layers),
    }
    return {name: chosen for name, chosen in ranges.items() if chosen}


@dataclass(frozen=True)
class Patching:
    """One intervention's row of Table 1.

    Attributes
    ----------
    layers : str
        Which: "early", "middle", "late" or "all".
    intervention : {"SSP", "ablation"}
    start : int
        The first position that is patched.
    perplexity : float
    change : float
        Against the model as it is.
    interval : (float, float)
        95 % of `change` over texts drawn anew.
    """

    layers: str
    intervention: str
    start: int
    perplexity: float
    change: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class PatchingTable:
    """Table 1 for one model.

    Attributes
    ----------
    baseline : float
        Perplexity of the model as it is.
    tokens : int
        Predicted tokens that perplexities are over.
    rows : list of Patching
    """

    baseline: float
    tokens: int
    rows: list[Patching]


def patching_table(runner: Runner, mu: Mapping[int, np.ndarray], texts: Sequence[np.ndarray]) -> PatchingTable:
    """Perplexity with the sink's update replaced by mu_sink, and with it taken away, in each range of layers (Table 1).

    Parameters
    ----------
    runner : Runner
        Opened with `language=True`.
    mu : mapping of layer to (d,) array
        mu_sink, from other texts than these.
    texts : sequence of (n,) int arrays
    """
    tokens = np.array([len(text) - 1 for text in texts])
    plain = runner.losses(texts)
    baseline, rows = float(perplexity(plain, tokens)), []
    means = {layer: mean.astype(np.float32) for layer, mean in mu.items()}
    interventions = {PATCHED: constant(means), ABLATED: nothing}
    work = list(product(STARTS, layer_ranges(sorted(mu)).items(), interventions))
    for start, (name, chosen), how in bar(work, "interventions", "run"):
        losses = runner.losses(texts, replacing_sink(interventions[how], chosen, start))
        found = float(perplexity(losses, tokens))
        rows.append(Patching(name, how, start, found, found - baseline, change_interval(losses, plain, tokens)))
    return PatchingTable(baseline, int(tokens.sum()), rows)
