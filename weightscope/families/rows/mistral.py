"""Mistral's line since Ministral: attention sharpens beyond the positions first trained on."""

from weightscope.attention.temperature import Logarithm, Temperature
from weightscope.families.config import ModelConfig
from weightscope.families.rope import Rope
from weightscope.families.rows.llama import DEEPSEEK_V3, MISTRAL

YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def beyond_training(config: ModelConfig, layer: int) -> Temperature | None:
    """1 + llama_4_scaling_beta log(1 + floor(p / original_max_position_embeddings))."""
    given = config.rope[config.layer_types[layer]]
    if not given.has("llama_4_scaling_beta"):
        return None
    return Logarithm(given.number("llama_4_scaling_beta"), given.number("original_max_position_embeddings", smallest=1))


MINISTRAL = MISTRAL.but(name="ministral", model_types=("ministral",))

MINISTRAL3 = MISTRAL.but(
    name="ministral3",
    model_types=("ministral3",),
    rope=Rope(theta=1e6),
    temperature=beyond_training,
    defaults={
        "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
        "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, **YARN},
    },
)  # fmt: skip

MISTRAL4 = DEEPSEEK_V3.but(
    name="mistral4",
    model_types=("mistral4",),
    rope__fraction=1.0,  # of a whole head, which is what the other cells of a latent's rotation say
    temperature=beyond_training,
    defaults={
        "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "max_position_embeddings": 1048576,
        "rope_scaling": {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, **YARN},
    },
)  # fmt: skip

MISTRAL_DECODERS = (MINISTRAL, MINISTRAL3, MISTRAL4)
