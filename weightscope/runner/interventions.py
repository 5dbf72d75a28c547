"""A model run on each text as it is and under many changes to it, each of them begun where it differs."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from weightscope.progress import bar
from weightscope.runner.runner import Observer, Runner

PROOF = 8  # tokens of a text on which it is tried whether a model can begin above its first layer


class Intervention(NamedTuple):
    """A change to a model as it runs.

    Attributes
    ----------
    layers : collection of int
        Where; one or more.
    observer : Observer
        Shown these layers; what it returns takes the place of attention's output.
    """

    layers: Collection[int]
    observer: Observer


def losses_under(runner: Runner, texts: Sequence[np.ndarray], interventions: Sequence[Intervention]) -> np.ndarray:
    """`Runner.losses` of the model as it is and under each intervention.

    Below the first layer that it changes, an intervention's model is the model as it is: these layers are run once a
    text. Where a model's layers hand each other more than what one returns to the next, all of them are run.

    Parameters
    ----------
    runner : Runner
        Opened with `language=True`.
    texts : sequence of (n,) int arrays
    interventions : sequence of Intervention

    Returns
    -------
    (1 + len(interventions), len(texts)) float64 array
        The first row is of the model as it is.
    """
    found = np.zeros((1 + len(interventions), len(texts)))
    firsts = {min(each.layers) for each in interventions}
    begins = {first: first if _can_begin_at(runner, first, texts[0][:PROOF]) else 0 for first in firsts}
    with bar(what="interventions", unit="run", total=found.size) as done:
        for at, text in enumerate(texts):
            with _kept(runner, firsts) as entering:
                found[0, at] = runner.losses([text])[0]
            done.update()
            for row, (layers, observer) in enumerate(interventions, 1):
                with _begun_at(runner, begins[min(layers)], entering):
                    found[row, at] = runner.losses([text], observer, layers)[0]
                done.update()
    return found


def _can_begin_at(runner: Runner, layer: int, text: np.ndarray) -> bool:
    """Whether a run that begins at a layer ends as a whole one does; not where blocks serve below it and above."""
    if layer == 0:
        return True  # that is a whole one
    if not set(runner.blocks[:layer]).isdisjoint(runner.blocks[layer:]):
        return False
    with _kept(runner, [layer]) as entering:
        whole = runner.losses([text])
    try:
        with _begun_at(runner, layer, entering):
            return np.allclose(runner.losses([text]), whole, rtol=1e-6)
    except Exception:  # of whatever class: what a layer misses, it misses in its own way
        return False


@contextmanager
def _kept(runner: Runner, layers: Collection[int]) -> Iterator[dict[int, Any]]:
    """What enters each of these layers in the block's forward pass: what the one below returned."""
    entering: dict[int, Any] = {}

    def keep(layer: int) -> Any:
        return runner.blocks[layer - 1].register_forward_hook(lambda block, args, made: entering.update({layer: made}))

    handles = [keep(layer) for layer in layers if layer]
    try:
        yield entering
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _begun_at(runner: Runner, layer: int, entering: dict[int, Any]) -> Iterator[None]:
    """Within the block, layers below this one compute nothing: each returns what the last of them did when it ran."""
    skipped = set(runner.blocks[:layer])
    for block in skipped:
        block.forward = lambda *args, **kwargs: entering[layer]
    try:
        yield
    finally:
        for block in skipped:
            del block.forward
