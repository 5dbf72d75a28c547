"""Steps: mechanisms that few architectures have, one file for each or for a few of a kind, named by
the rows.

A layer is read as its layout says; then the steps of its row are applied to it in the order of
`Place`, and within a place as the row lists them. Between INPUTS and VECTORS the norms before the
layer and of queries and keys are folded.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar

from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.norms import Norm
from weightscope.model.rows.cells import LayerTensors


class Place(IntEnum):
    """Where in attention a step acts: the order in which steps are applied and their caveats are
    listed.
    """

    INPUTS = 1  # what queries, keys and values are made of
    VECTORS = 2  # queries, keys and values
    POSITIONS = 3  # terms of scores that depend on where tokens are
    SCORES = 4  # bounds and sinks of scores
    GATHERED = 5  # what heads gather, before W_O
    OUTPUT = 6  # what W_O gives
    MASK = 7  # which keys a query sees


@dataclass(frozen=True)
class Reads:
    """What a step reads of a checkpoint, so that its bytes are counted and nothing of it is called
    unread.
    """

    modules: tuple[str, ...] = ()  # of the layer
    tensors: tuple[str, ...] = ()  # of the layer, in none of its modules
    shared: tuple[str, ...] = ()  # of the model
    ignored: tuple[str, ...] = ()  # modules within attention that are known and not read

    def __add__(self, other: "Reads") -> "Reads":
        """Both."""
        return Reads(
            self.modules + other.modules,
            self.tensors + other.tensors,
            self.shared + other.shared,
            self.ignored + other.ignored,
        )


@dataclass(frozen=True)
class Step:
    """A mechanism. A subclass has simple fields, which a row sets, and overrides some methods."""

    name: ClassVar[str]  # in rows: `steps.gate = "attention.g_proj"`; one step of a name per row
    place: ClassVar[Place]
    # in the table of `weightscope families`; empty where that does not list it
    label: ClassVar[str] = ""
    # `adopt` tries it in architectures whose modules have other names
    portable: ClassVar[bool] = False
    exact: ClassVar[bool] = False  # the matrices of heads hold all of it; otherwise it has a caveat
    # `apply` compares values of tensors with a formula and needs more than shapes
    compares: ClassVar[bool] = False

    def reads(self) -> Reads:
        """Its tensors."""
        return Reads()

    def takes(self, config: ModelConfig, index: int) -> Any:
        """The numbers that it takes from a config."""
        return None

    def keys_of(self, config: ModelConfig, index: int) -> int:
        """The layer whose keys and values a layer attends to."""
        return index

    def on_norm(self, norm: Norm, config: ModelConfig) -> Norm:
        """The norm before the layer as the mechanism changes it."""
        return norm

    def apply(
        self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors
    ) -> Layer:
        """The layer with the mechanism, of the layer's tensors or the model's; what cannot be read
        is refused.
        """
        return layer

    def caveat(self, layer: Layer) -> str:
        """What of it the matrices of the layer's heads leave out; empty where that is nothing."""
        return ""

    @property
    def output_module(self) -> str:
        """The module whose output joins the residual stream, where that is not W_O."""
        return ""


@cache
def step_classes() -> dict[str, type[Step]]:
    """Every step in this folder, by its name in rows: a new file is found here without being
    listed.
    """
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    classes = [Step]
    for known in classes:
        classes += known.__subclasses__()
    return {step.name: step for step in classes if hasattr(step, "name")}
