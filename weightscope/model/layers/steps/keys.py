"""The keys that a query sees: an earlier layer's, or an indexer's choice."""

from dataclasses import dataclass

from weightscope.model.config.config import ModelConfig
from weightscope.model.layers.layer import Layer
from weightscope.model.layers.steps import Place, Reads, Step


@dataclass(frozen=True)
class BorrowedKeys(Step):
    """The last `num_kv_shared_layers` attend to keys and values of an earlier layer (Gemma 3n).

    That layer is the last of their type that makes its own. `read_layer` reads those modules under
    its name, with its norm.
    """

    name = "borrowed_keys"
    place = Place.INPUTS
    portable = True

    def keys_of(self, config: ModelConfig, index: int) -> int:
        makers = config.n_layers - config.count("num_kv_shared_layers")
        if index < makers:
            return index
        alike = [
            i for i in range(max(makers, 0)) if config.layer_types[i] == config.layer_types[index]
        ]
        if not alike:
            raise config.error(
                "num_kv_shared_layers",
                "layers of every type that make keys and values of their own",
            )
        return alike[-1]

    def caveat(self, layer: Layer) -> str:
        if layer.keys_of is None:
            return ""
        return (
            f"keys and values are layer {layer.keys_of}'s: W_QK leads from what enters "
            "this layer to what enters that one, and W_VO back"
        )


@dataclass(frozen=True)
class Indexer(Step):
    """A module that chooses the keys a query sees: part of the mask, not read (DeepSeek-V3.2)."""

    name = "indexer"
    place = Place.MASK

    module: str = "self_attn.indexer"

    def reads(self) -> Reads:
        return Reads(ignored=(self.module,))

    def caveat(self, layer: Layer) -> str:
        return (
            "an indexer chooses which keys a query sees: "
            "scores are the model's where it sees, as with any mask"
        )
