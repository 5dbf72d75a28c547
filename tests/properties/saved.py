"""Cases that once failed, as the sweep prints them."""

from tests.properties.cases import ALIKE, BROKEN, CONFIG, Case
from tests.properties.originals import Writing

SAVED = (
    Case(  # names that no row knows: `learned` said that nothing was trained
        "wide/mpnet", BROKEN, "one added", ("encoder.layer.0.intermediate.dense.bias",), writing=Writing(prefix="x.x.")
    ),
    Case(  # one value between GPTQ's levels, all others on them
        "compressed_tensors/older_int4_act_order", BROKEN, "one value", ("down_proj.weight",), asks="claim"
    ),
    Case(  # `learned` took a matrix times 1.5, of a file that was unpacked, for a conversion
        "mlx/tied", BROKEN, "scaled", ("model.layers.0.self_attn.k_proj.weight",), asks="claim"
    ),
    Case("falcon_h1", CONFIG, places=("mlp_multipliers",), number=3.0, asks="claim"),  # null is the default's name
    Case(  # `compare` saw no change of what no head contains
        "phi_qk_norm", BROKEN, "negated", ("model.layers.0.self_attn.q_layernorm.bias",), asks="claim"
    ),
    Case("modelopt/fp8", BROKEN, "one added", ("model.layers.0.self_attn.k_proj.input_scale",), asks="claim"),
    Case(  # NumPy raised an error
        "quark/mxfp4", ALIKE, "queries and keys", ("text", "0"), 2.0, Writing(dtype="F64"), asks="lineage"
    ),
)
