"""How the weights of matching layers, and of what is outside layers, differ between a suspect and its base."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from weightscope.changes.basis import Basis, basis_by_tokens
from weightscope.changes.layer import LayerChange, TensorsOfBoth, compare_layers, tensors_by_name
from weightscope.changes.tensor import Change
from weightscope.checkpoint import Tensor
from weightscope.lineage.matching import Match
from weightscope.model import Model
from weightscope.progress import bar


@dataclass(frozen=True)
class WeightChanges:
    """All matching layers, and the tensors outside layers."""

    basis: Basis
    layers: Sequence[LayerChange]
    outside: TensorsOfBoth
    attention: frozenset[str] = field(default_factory=frozenset)  # the base's tensors that contain heads

    @property
    def every(self) -> list[tuple[int | None, Change]]:
        """Every compared tensor with the suspect's layer, or None outside layers."""
        inside = [(layer.layer, change) for layer in self.layers for change in layer.tensors.changes]
        return [*inside, *((None, change) for change in self.outside.changes)]

    @property
    def lost(self) -> list[Tensor]:
        """Tensors that only the base has."""
        return [tensor for part in (self.outside, *(layer.tensors for layer in self.layers)) for tensor in part.lost]

    @property
    def gained(self) -> list[Tensor]:
        """Tensors that only the suspect has."""
        return [tensor for part in (self.outside, *(layer.tensors for layer in self.layers)) for tensor in part.gained]

    @property
    def rounding(self) -> float:
        """|error| / |x| that the coarsest float or grid of any layer makes."""
        return max((layer.values.rounding for layer in self.layers), default=0.0)


def weight_changes(suspect: Model, base: Model, match: Match) -> WeightChanges:
    """Compare the weights of all matching layers."""
    basis = _basis_of(suspect, base, match)
    places = [
        (base.attention_layers[j], i, order)
        for i, j, order in zip(suspect.attention_layers, match.layers, match.heads, strict=True)
        if j is not None
    ]
    layers = [
        compare_layers(base, suspect, j, i, order, basis) for j, i, order in bar(places, "layers compared", "layer")
    ]
    outside = _outside(suspect, base) if basis.same else TensorsOfBoth()
    of_heads = frozenset(tensor.name for j, _, _ in places for tensor in base.attention_tensors(j))
    return WeightChanges(basis, layers, outside, of_heads)


def _basis_of(suspect: Model, base: Model, match: Match) -> Basis:
    """The basis that a match by direction, by tokens or by spectra leaves."""
    if match.route == "direct":
        return Basis()
    if match.route == "spectra" or suspect.config.d_model != base.config.d_model:
        return Basis(known=False)
    return basis_by_tokens(base, suspect)


def _outside(suspect: Model, base: Model) -> TensorsOfBoth:
    """How tensors outside layers changed, and in layers without attention if both have as many layers."""
    names, deep = [], base.config.n_layers == suspect.config.n_layers
    for model in (base, suspect):
        compared = model.attention_layers if deep else range(model.config.n_layers)
        inside = {name for i in compared for name in model.checkpoint.names_under(model.stem(i))}
        names.append({name.removeprefix(model.prefix): name for name in model.checkpoint if name not in inside})
    return tensors_by_name(base, suspect, *names)
