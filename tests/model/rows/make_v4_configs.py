"""Write config_v4.json next to every fixture's config.json: the same model as transformers 4 spelled it.

    python -m tests.model.rows.make_v4_configs        # under transformers 4.57

The tensors are the same in both; what differs is rotary parameters, which 4 wrote flat, and what is left out.
A model_type that transformers 4 does not know has none.
"""

from pathlib import Path
from typing import Any

import transformers

from tests.support.cases import CASES

FIXTURES = Path(__file__).parent / "fixtures"
BASE = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
LOCAL = {"gemma3_text": ("rope_theta", "rope_local_base_freq"), "modernbert": ("global_rope_theta", "local_rope_theta")}


def dialect_4(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same config with rotary parameters as transformers 4 took them."""
    flat = {key: value for key, value in config.items() if key != "rope_parameters"}
    rope = dict(config.get("rope_parameters", {}))
    if "full_attention" in rope:
        base, local = LOCAL.get(model_type, ("rope_theta", "rope_theta"))
        flat[local] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
        flat[base] = rope.pop("rope_theta")
    base, share = BASE.get(model_type, ("rope_theta", "partial_rotary_factor"))
    if "rope_theta" in rope:
        flat[base] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        flat[share] = rope.pop("partial_rotary_factor")
    if rope.get("rope_type", "default") != "default":
        flat["rope_scaling"] = rope
        if model_type == "phi3":
            rope["type"] = rope.pop("rope_type")
    return flat


if __name__ == "__main__":
    assert transformers.__version__.startswith("4."), f"this needs transformers 4, found {transformers.__version__}"
    transformers.logging.set_verbosity_error()
    for case in (case for case in CASES if case.model_type in transformers.CONFIG_MAPPING):
        given = {k: dialect_4(k, v) if k == "text_config" else v for k, v in case.config.items()}
        config = transformers.AutoConfig.for_model(case.model_type, **dialect_4(case.model_type, given))
        text = config.to_json_string()
        (FIXTURES / case.name / "config_v4.json").write_text(text)
