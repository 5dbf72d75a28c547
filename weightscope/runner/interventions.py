"""Runs a model on each text unchanged and under many changes, starting each run where it first differs."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from weightscope.progress import bar
from weightscope.runner.runner import Observer, Runner

PROOF = 8  # tokens of a text on which it is tried whether a model can begin above its first layer


class Intervention(NamedTuple):
    """A change to a model as it runs."""

    layers: Collection[int]  # One or more layers
    observer: Observer  # Shown these layers; what it returns takes the place of attention's output


def losses_under(runner: Runner, texts: Sequence[np.ndarray], interventions: Sequence[Intervention]) -> np.ndarray:
    """`Runner.losses` of the model as it is and under each intervention: texts (n,).

    Layers below the first changed one are unaffected, so they run once per text. If layers pass each other more than
    their return values, all of them run every time.
    """
    losses = np.zeros((1 + len(interventions), len(texts)))
    firsts = {min(each.layers) for each in interventions}
    begins = {first: first if _can_begin_at(runner, first, texts[0][:PROOF]) else 0 for first in firsts}
    with bar(what="interventions", unit="run", total=losses.size) as done:
        for place, text in enumerate(texts):
            with _kept(runner, firsts) as entering:
                losses[0, place] = runner.losses([text])[0]
            done.update()
            for row, (layers, observer) in enumerate(interventions, 1):
                with _begun_at(runner, begins[min(layers)], entering):
                    losses[row, place] = runner.losses([text], observer, layers)[0]
                done.update()
    return losses


def _can_begin_at(runner: Runner, layer: int, text: np.ndarray) -> bool:
    """Whether a run that begins at a layer gives the same result as a full run; not if blocks are shared across it."""
    if layer == 0:
        return True  # a full run
    if not set(runner.blocks[:layer]).isdisjoint(runner.blocks[layer:]):
        return False
    with _kept(runner, [layer]) as entering:
        complete = runner.losses([text])
    try:
        with _begun_at(runner, layer, entering):
            return np.allclose(runner.losses([text]), complete, rtol=1e-6)
    except Exception:  # any class: each layer fails in its own way without what it needs
        return False


@contextmanager
def _kept(runner: Runner, layers: Collection[int]) -> Iterator[dict[int, Any]]:
    """Within the block, keep the input of each of these layers: what the layer below returned."""
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
    """Within the block, layers below this one compute nothing and return what the last of them returned before."""
    skipped = set(runner.blocks[:layer])
    for block in skipped:
        block.forward = lambda *args, **kwargs: entering[layer]
    try:
        yield
    finally:
        for block in skipped:
            del block.forward
