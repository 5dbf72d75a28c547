"""Static Sink Patching: the sink's update replaced by a constant while a model runs (sink-as-bias paper, eq. 7)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from weightscope.metrics.perplexity import change_interval, perplexity
from weightscope.runner.runner import PROGRESS, Activations, Observer, Runner
from weightscope.runner.sink_bias import sink_update

EARLY, LATE = 0.3, 0.3  # of the layers; the middle ones are the rest
PATCHED, ABLATED = "SSP", "ablation"

# A layer and u_sink (n, d) there -> what to put in its place, (n, d) or (d,).
Replacement = Callable[[int, np.ndarray], np.ndarray]


def replacing_sink(replacement: Replacement, layers: Sequence[int]) -> Observer:
    """An observer that puts y - u_sink + replacement in place of attention's output y, at every position (eq. 7).

    Position 0 is no exception: eq. 7 holds for each i, so what token 0 sends itself is replaced too. u_sink is that of
    the model as it runs, layers below already patched.
    """
    wanted = frozenset(layers)

    def observer(seen: Activations) -> np.ndarray | None:
        if seen.layer.index not in wanted:
            return None
        new = seen.output.copy()
        for output, (x, attention) in zip(new, seen.each(), strict=True):
            update = sink_update(seen.layer, attention, x).rows()
            output += replacement(seen.layer.index, update) - update
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
    perplexity : float
    change : float
        Against the model as it is.
    interval : (float, float)
        95 % of `change` over texts drawn anew.
    """

    layers: str
    intervention: str
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
    work = [(name, chosen, how) for name, chosen in layer_ranges(sorted(mu)).items() for how in interventions]
    for name, chosen, how in tqdm(work, desc="interventions", unit="run", **PROGRESS):
        losses = runner.losses(texts, replacing_sink(interventions[how], chosen))
        found = float(perplexity(losses, tokens))
        rows.append(Patching(name, how, found, found - baseline, change_interval(losses, plain, tokens)))
    return PatchingTable(baseline, int(tokens.sum()), rows)
