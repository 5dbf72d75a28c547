"""The fixtures notice: with one cell of a row or one value of a config changed, scores are no longer the model's."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import Fixture, centred, fixture
from weightscope.model.config.config import same_layer
from weightscope.model.config.reading import decide
from weightscope.model.model import Model
from weightscope.model.opened import Opened

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 1024}

CONFIGS = [
    ("gpt2_layer_scaled", {"scale_attn_by_inverse_layer_idx": False}),
    ("llama", {"rms_norm_eps": 1e-3}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama_yarn", {"rope_parameters": YARN | {"beta_fast": 16.0}}),
    ("llama_yarn", {"rope_parameters": YARN | {"attention_factor": 1.0}}),
    ("llama_yarn", {"rope_parameters": YARN | {"truncate": False}}),
    ("llama_dynamic", {"max_position_embeddings": 64}),
    ("phi3_longrope", {"original_max_position_embeddings": 16}),
    ("phi3_longrope_short", {"original_max_position_embeddings": 4}),
    ("smollm3", {"no_rope_layers": [1, 1]}),
    ("granite", {"attention_multiplier": 0.5}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 8}),
    ("olmo", {"clip_qkv": None}),
    ("mpt", {"attn_config": {"clip_qkv": None}}),
    ("deepseek_v3_halves", {"rope_interleave": True}),
    ("dinov3_vit", {"rope_theta": 50.0}),
    ("deberta_relative", {"pos_att_type": ["c2p"]}),
]
CELLS = [
    ("cohere", {"positions__rope__interleaved": False}),
    ("gptj", {"positions__rope__interleaved": False}),
    ("glm4", {"positions__rope__interleaved": False}),
    ("glm4_moe", {"positions__rope__interleaved": True}),
    ("gemma", {"norms__before__offset": 0.0}),
    ("gemma3", {"scores__qk_norm__offset": 0.0}),
    ("olmo3", {"scores__qk_norm__scope": "shared"}),
    ("bloom", {"positions__bias": None}),
    ("mpnet", {"positions__bias": None}),
    ("albert_two_groups", {"config__stored_layer": same_layer}),
    ("opt", {"norms__before": None}),
    ("vit", {"scores__scale": lambda config, layer: 1.0}),
]


def error(tiny: Fixture, model: Model) -> float:
    """Largest difference from the eager scores."""
    worst = 0.0
    for index in tiny.layers:
        expected = tiny.arrays[f"scores{index}"]
        seen = np.isfinite(expected)
        ours = model.layer(index).scores(tiny.arrays[f"x{index}"])
        worst = max(worst, float(np.abs(centred(ours, seen) - centred(expected, seen)).max()))
    return worst


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_a_config_value_matters(name: str, config: dict[str, Any]) -> None:
    tiny = fixture(name)
    checkpoint = tiny.model.checkpoint
    changed = checkpoint.with_config({**checkpoint.config, **config})
    assert error(tiny, tiny.model) < 1e-4 < 1e-3 < error(tiny, Model(Opened(changed), decide(changed)))


@pytest.mark.parametrize(("name", "cells"), CELLS)
def test_a_cell_matters(name: str, cells: dict[str, Any]) -> None:
    tiny = fixture(name)
    row = decide(tiny.model.checkpoint, tower=tiny.case.tower or None).row
    with suppress(ws.CheckpointError):  # a changed row may not even find its tensors
        assert error(tiny, Model.of_row(tiny.model.checkpoint, row.but(**cells))) > 1e-3
