"""An output gate: what a head has gathered is multiplied by a function of the query token.

Its caveat is in `architectures.layer`, since the layout that splits queries and gates of one tensor has it too.
"""

from dataclasses import dataclass, replace

from weightscope.architectures.cells import LayerTensors
from weightscope.architectures.config import ModelConfig
from weightscope.architectures.layouts import by_head, linear
from weightscope.architectures.steps import Place, Reads, Step
from weightscope.attention.layer import Layer


@dataclass(frozen=True)
class Gate(Step):
    """A Linear of the query token with one output for each dimension of a head, or one for each head."""

    name = "gate"
    place = Place.GATHERED

    module: str
    bias: bool | str = False  # or the config key that says whether it has one
    of_heads: str = ""  # tensor of a further bias, one for each head
    kind: str = "sigmoid"  # one of `attention.gathered.GATES`

    def reads(self) -> Reads:
        return Reads(modules=(self.module,), tensors=tuple(filter(None, (self.of_heads,))))

    def apply(self, layer: Layer, tensors: LayerTensors, config: ModelConfig, model: LayerTensors) -> Layer:
        h, r_v, _ = layer.w_o.shape
        stored = tensors.checkpoint.get(f"{tensors.prefix}{self.module}.weight")
        rows = h if stored and stored.shape[:1] == (h,) else h * r_v
        gate = by_head(*linear(tensors, config, self.module, (rows, config.d_model), self.bias), h)
        if self.of_heads:
            gate = replace(gate, bias=gate.bias + tensors.read(self.of_heads, (h,))[:, None])
        return replace(layer, gate=gate if layer.norm is None else gate.after_norm(layer.norm), gate_kind=self.kind)
