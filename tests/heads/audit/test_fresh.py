"""Models straight from transformers' initialisation are told as such, and nothing else is."""

from pathlib import Path

import pytest

import weightscope as ws

pytestmark = pytest.mark.check  # imports PyTorch

LAYERS = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
TEXT = LAYERS | {"vocab_size": 500, "max_position_embeddings": 64, "pad_token_id": 0}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 32}
GPT2 = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 500, "n_positions": 64}
TYPES = {
    "gpt2": GPT2, "llama": GROUPED, "qwen2": GROUPED, "qwen3": GROUPED, "gemma": GROUPED, "gemma2": GROUPED,
    "gemma3_text": GROUPED, "gpt_oss": GROUPED | {"num_local_experts": 4}, "mixtral": GROUPED, "bert": TEXT,
    "roberta": TEXT, "mpnet": TEXT, "deberta-v2": TEXT, "gpt_neox": TEXT, "falcon": TEXT, "phi3": TEXT, "olmo2": TEXT,
    "bloom": {"hidden_size": 128, "n_layer": 3, "n_head": 4, "vocab_size": 500},
    "vit": LAYERS | {"image_size": 32, "patch_size": 8}, "dinov2": LAYERS | {"image_size": 28, "patch_size": 14},
}  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_a_new_model_is_told_as_initialised_and_nothing_else(model_type: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the initialisation is PyTorch's, in the extra `runner`")
    transformers = pytest.importorskip("transformers", reason="the initialisation is transformers'")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **TYPES[model_type])
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    findings = ws.audit(tmp_path, directions=0).findings
    assert [finding.kind for finding in findings if finding.severity != "note"] == ["untrained"]
