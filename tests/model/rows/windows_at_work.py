"""Run tiny models and see which layers have a window: windows_at_work.json.

    python -m tests.model.rows.windows_at_work        # under transformers 4.57, then under 5; PyTorch is needed

One line for each file: its model_type, the plant, and the layers in which no query of a random model saw a key as far
back as the window, as readers.py writes them.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weightscope.model.config.dialects import FULL, SLIDING
from weightscope.model.config.readers import FILE as READERS
from weightscope.model.config.readers import FIVE, FOUR, _ranges

FILE = Path(__file__).with_name("windows_at_work.json")
LAYERS, SEEN, TOKENS = 6, 3, 9
MOST = 1 << 22  # parameters
SIZES = {
    "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "vocab_size": 64, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8, "pad_token_id": 0, "num_kv_shared_layers": 0, "laurel_rank": 4,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
USED = {"sliding_window": SEEN, "use_sliding_window": True}
PLANTS = {
    "window": USED,
    "no window": {"sliding_window": None},
    "unused": {**USED, "use_sliding_window": False},
    "listed": {**USED, "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]},
    "from layer 2 on": {**USED, "max_window_layers": 2},
}


def windowed(kind: str, plant: dict[str, Any]) -> str | None:
    """The layers with a window of a tiny model; None where it is not built or run."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    for make in (AutoModel, AutoModelForCausalLM):
        try:
            config = AutoConfig.for_model(kind, **SIZES, **plant)
            with torch.device("meta"):
                size = sum(part.numel() for part in make.from_config(config).parameters())
            if size > MOST:
                continue
            model = make.from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                seen = model(torch.arange(1, TOKENS + 1)[None], output_attentions=True, use_cache=False).attentions
        except Exception:  # whatever transformers raises of sizes that are not its own
            continue
        if seen and len(seen) == LAYERS and all(each is not None for each in seen):
            return _ranges([not each[0, :, -1, : TOKENS - SEEN].any() for each in seen])
    return None


def lines() -> Iterator[tuple[str, str, str | None]]:
    """Type, plant and layers of what the installed version has code for."""
    import transformers

    table = json.loads(READERS.read_text(encoding="utf-8"))
    section = table[FOUR if transformers.__version__.startswith("4.") else FIVE]["windows"]
    for kind in sorted(" ".join(section.values()).split()):
        for name, plant in PLANTS.items():
            yield kind, name, windowed(kind, plant)


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    known[transformers.__version__] = [list(line) for line in lines() if line[2] is not None]
    texts = [
        f"{json.dumps(version)}: [\n" + ",\n".join(map(json.dumps, these)) + "\n]"
        for version, these in sorted(known.items())
    ]
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n", encoding="utf-8")
