"""Steps: mechanisms that few architectures have, one file each or a few of a kind, named by rows.

A layer is read as its layout says; then the steps of its row are applied to it in the order of
`Place`, and within a place as the row lists them. Between INPUTS and VECTORS the norms before the
layer and of queries and keys are folded.
"""

from dataclasses import MISSING, dataclass, fields
from enum import IntEnum
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar

from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.maps import Norm
from weightscope.model.rows.cells import LayerTensors


class Place(IntEnum):
    """The place in attention where a step acts; steps and caveats are in this order."""

    INPUTS = 1  # inputs of queries, keys and values
    VECTORS = 2  # queries, keys and values
    POSITIONS = 3  # terms of scores that depend on where tokens are
    SCORES = 4  # bounds and sinks of scores
    GATHERED = 5  # weighted sums of values, before W_O
    OUTPUT = 6  # output of W_O
    MASK = 7  # choice of keys that a query sees


@dataclass(frozen=True)
class Reads:
    """Names in a checkpoint that a step reads: so they are counted and not "unread"."""

    modules: tuple[str, ...] = ()  # in the layer
    tensors: tuple[str, ...] = ()  # in the layer, outside its modules
    shared: tuple[str, ...] = ()  # in the model, outside its layers
    ignored: tuple[str, ...] = ()  # modules within attention that are known and not read

    def __add__(self, other: "Reads") -> "Reads":
        return Reads(
            self.modules + other.modules,
            self.tensors + other.tensors,
            self.shared + other.shared,
            self.ignored + other.ignored,
        )


@dataclass(frozen=True)
class Step:
    """A mechanism. A subclass has simple fields, which a row sets, and overrides some methods.

    Fields called `module` and `tensor` name what `reads` lists. A row with a step that has a fault
    (`fault_of`) is refused.
    """

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
        """Numbers that it takes from a config."""
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
        """Add the mechanism to a layer, from the layer's or the model's tensors, or refuse to."""
        return layer

    def caveat(self, layer: Layer) -> str:
        """The part that the heads' matrices leave out, in words; empty where that is nothing."""
        return ""

    @property
    def output_module(self) -> str:
        """The module whose output joins the residual stream, where that is not W_O."""
        return ""


def fault_of(step: Step) -> str:
    """A reason to refuse a step: it would leave out or ignore something silently; else empty."""
    kind, reads = type(step), step.reads()
    values = {part.name: getattr(step, part.name) for part in fields(step)}
    required = [values[part.name] for part in fields(step) if part.default is MISSING]
    all_empty = bool(values) and all(value in ("", ()) for value in values.values())
    if all_empty or any(value in ("", ()) for value in required):
        return "it names nothing to apply"
    listed = [name for name in (*reads.modules, *reads.tensors, *reads.shared) if name]
    for name in (values.get("module"), values.get("tensor")):
        if name and not any(_overlap(name, known) for known in (*listed, *reads.ignored)):
            return f"nothing reads '{name}'"
    if listed and kind.apply is Step.apply:
        return f"nothing reads '{listed[0]}'"
    if not kind.exact and kind.caveat is Step.caveat:
        return "it is neither exact nor has a caveat"
    changes = (kind.apply, kind.on_norm, kind.keys_of)
    if kind.exact and changes == (Step.apply, Step.on_norm, Step.keys_of):
        return "it is exact and applies nothing"
    return ""


def _overlap(a: str, b: str) -> bool:
    """True if one of two names is the other, or lies within it."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


@cache
def step_classes() -> dict[str, type[Step]]:
    """Every step in this folder, by its name in rows; a new file needs no listing."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    classes = [Step]
    for known in classes:  # grows as it goes: subclasses of subclasses too
        classes += known.__subclasses__()
    return {step.name: step for step in classes if hasattr(step, "name")}
