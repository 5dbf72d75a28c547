"""How projections lie in a file: one function a layout, each returning matrices split by head."""

from weightscope.families.config import ModelConfig
from weightscope.families.family import Family, Projections
from weightscope.families.tensors import LayerTensors


def conv1d_fused(tensors: LayerTensors, family: Family, config: ModelConfig) -> Projections:
    """GPT-2's Conv1D, stored [in, out]: the columns of one (d, 3d) tensor are [Q | K | V], each (H, d')."""
    d, h, r = config.d_model, config.n_heads, config.head_dim
    fused = tensors.read(family.query + ".weight", (d, 3 * d)).reshape(d, 3, h, r).transpose(1, 2, 0, 3)  # (3, H, d, r)
    bias = tensors.read(family.query + ".bias", (3 * d,)).reshape(3, h, r)
    w_o = tensors.read(family.output + ".weight", (d, d)).reshape(h, r, d)
    b_o = tensors.read(family.output + ".bias", (d,))
    return Projections(fused[0], bias[0], fused[1], bias[1], fused[2], bias[2], w_o, b_o)
