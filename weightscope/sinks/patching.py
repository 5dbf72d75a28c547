"""Static Sink Patching: the sink's update replaced by a constant while a model runs (sink-as-bias paper, section 4)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np

from weightscope.runner.interventions import Intervention, losses_under
from weightscope.runner.runner import Activations, Observer, Runner
from weightscope.sinks.updates import sink_update
from weightscope.tables import Column, Table

EARLY, LATE = 0.3, 0.3  # of the layers; the middle ones are the rest
PATCHED, ABLATED, NONE = "SSP", "ablation", "none"
STARTS = (0, 1)  # eq. 7 as it stands, and token 0's own update kept
RESAMPLES = 1000
INTERVAL = (2.5, 97.5)  # percentiles

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
    patched = frozenset(layers)

    def observer(seen: Activations) -> np.ndarray | None:
        if seen.layer.index not in patched:
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


def perplexity(losses: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """exp of the mean negative log-likelihood a token, all texts together.

    Parameters
    ----------
    losses : (..., n) array
        Of each text the sum over its predicted tokens, in nats.
    tokens : (..., n) int array
        How many were predicted.
    """
    return np.exp(losses.sum(axis=-1) / tokens.sum(axis=-1))


def change_interval(losses: np.ndarray, baseline: np.ndarray, tokens: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a change in perplexity: the texts drawn anew with replacement 1,000 times.

    Parameters
    ----------
    losses, baseline : (n,) arrays
        Of the same texts, with and without a change to the model.
    tokens : (n,) int array
    seed : int
    """
    drawn = np.random.default_rng(seed).integers(len(tokens), size=(RESAMPLES, len(tokens)))
    changes = perplexity(losses[drawn], tokens[drawn]) - perplexity(baseline[drawn], tokens[drawn])
    low, high = np.percentile(changes, INTERVAL)
    return float(low), float(high)


def patching_table(runner: Runner, mu: Mapping[int, np.ndarray], texts: Sequence[np.ndarray]) -> Table:
    """Perplexity with the sink's update replaced by mu_sink, and with it taken away, in each range of layers (Table 1).

    Parameters
    ----------
    runner : Runner
        Opened with `language=True`.
    mu : mapping of layer to (d,) array
        mu_sink, from other texts than these.
    texts : sequence of (n,) int arrays

    Returns
    -------
    Table
        A row an intervention; the first is the model as it is. `change` is against that one, and lies between
        `change_low` and `change_high` for 95 % of the sets of texts drawn anew.
    """
    tokens = np.array([len(text) - 1 for text in texts])
    means = {layer: mean.astype(np.float32) for layer, mean in mu.items()}
    replacements = {PATCHED: constant(means), ABLATED: nothing}
    work = list(product(STARTS, layer_ranges(sorted(mu)).items(), replacements))
    interventions = [
        Intervention(chosen, replacing_sink(replacements[how], chosen, start)) for start, (_, chosen), how in work
    ]
    plain, *patched = losses_under(runner, texts, interventions)
    baseline = float(perplexity(plain, tokens))
    rows: list[tuple[object, ...]] = [(NONE, NONE, 0, baseline, 0.0, np.nan, np.nan)]
    for (start, (name, _), how), losses in zip(work, patched, strict=True):
        changed = float(perplexity(losses, tokens))
        rows.append((name, how, start, changed, changed - baseline, *change_interval(losses, plain, tokens)))
    names = ("layers", "intervention", "first_position", "perplexity", "change", "change_low", "change_high")
    symbols = ("", "", "first position", "", "change in perplexity", "from", "to")
    header = [Column(name, symbol=symbol) for name, symbol in zip(names, symbols, strict=True)]
    return Table.of_rows(header, rows)
