"""One window said in several dialects is one window: each layer's is derived as the model's class derives it."""

from itertools import combinations, product
from typing import Any

import pytest

from tests.support.tiny_models import fixture
from weightscope.checkpoint.config import Config
from weightscope.core.errors import CheckpointError
from weightscope.model.config.computed import differences, stated
from weightscope.model.config.dialects import settings
from weightscope.model.config.effects import NONE
from weightscope.model.rows.table import known_rows

LAYERS = 6
F, S, C = "full_attention", "sliding_attention", "chunked_attention"
USED = {"use_sliding_window": True, "sliding_window": 9}
SIZES = {
    "num_hidden_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4,
    "intermediate_size": 8, "vocab_size": 24, "max_position_embeddings": 64,
}  # fmt: skip


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    epsilon = "layer_norm_eps" if kind == "cohere2" else "norm_epsilon" if kind == "starcoder2" else "rms_norm_eps"
    return {"model_type": kind, **SIZES, epsilon: 1e-6, **more}


def deciding(kind: str, a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    """The keys that are said to decide something, or to do so perhaps."""
    checkpoint, row = fixture("llama").model.checkpoint, next(iter(known_rows(kinds={kind})))
    sides = (stated(checkpoint.with_config(config_of(kind, **each)), row) for each in (a, b))
    return {each.key for each in differences(*sides) if each.effect != NONE}


@pytest.mark.parametrize(("kind", "config", "types"), [
    ("qwen2", {"sliding_window": 9, "max_window_layers": 2}, [F] * 6),
    ("qwen2", USED, [F] * 6),
    ("qwen3", USED | {"max_window_layers": 2}, [F] * 2 + [S] * 4),
    ("qwen2_vl_text", USED | {"max_window_layers": 4}, [F] * 4 + [S] * 2),
    ("qwen2_moe", USED | {"max_window_layers": 4}, [S, F, S, F, F, F]),
    ("qwen3_moe", USED | {"max_window_layers": 4}, [S] * 6),
    ("smollm3", USED | {"no_rope_layer_interval": 2}, [F, S] * 3),
    ("llama4_text", {"no_rope_layer_interval": 3}, [C, C, F] * 2),
    ("gemma2", {}, [S, F] * 3),
    ("gemma3_text", {"sliding_window_pattern": 3}, [S, S, F] * 2),
    ("gemma4_text", {"sliding_window_pattern": 4, "global_head_dim": 4}, [S, S, S, F, S, F]),
    ("cohere2", {}, [S, S, S, F, S, S]),
    ("gpt_oss", {}, [S, F] * 3),
    ("exaone4", {"sliding_window_pattern": 3}, [S, S, F] * 2),
    ("ministral", {}, [S] * 6),
    ("ministral", {"sliding_window": None}, [F] * 6),
])  # fmt: skip
def test_layer_types_are_derived_where_they_are_left_out(kind: str, config: dict[str, Any], types: list[str]) -> None:
    row = next(iter(known_rows(kinds={kind})))
    whole = Config(config_of(kind, **config), "config.json")
    assert [*settings(whole, whole, row).numbers.layer_types] == types


WINDOWS = {"layer_types": [F] * 2 + [S] * 4}
ALIKE = [
    ("qwen2", {"sliding_window": 9}, USED),  # no layer is beyond max_window_layers, which is 28
    ("qwen3", USED | {"max_window_layers": 2}, USED | WINDOWS),
    ("qwen3", USED | {"max_window_layers": 6}, {"use_sliding_window": False, "sliding_window": None}),
    ("qwen2_moe", {"sliding_window": 9, "max_window_layers": 3}, {"max_window_layers": 5}),
    ("qwen3_moe", {"max_window_layers": 48}, {"max_window_layers": 28, "sliding_window": 9}),
    ("qwen2_vl_text", USED | {"max_window_layers": 2}, USED | WINDOWS | {"max_window_layers": 80}),
    ("gemma2", {}, {"layer_types": [S, F] * 3}),
    ("gemma3_text", {"sliding_window_pattern": 3}, {"layer_types": [S, S, F] * 2, "_sliding_window_pattern": 6}),
    ("smollm3", {}, {"no_rope_layers": [1, 1, 1, 0, 1, 1]}),
    ("smollm3", {"sliding_window": 9}, {"sliding_window": None}),
    ("llama4_text", {}, {"no_rope_layers": [1, 1, 1, 0, 1, 1], "layer_types": [C, C, C, F, C, C]}),
    ("gpt_oss", {}, {"layer_types": [S, F] * 3}),
    ("cohere2", {"sliding_window_pattern": 2}, {"layer_types": [S, F] * 3}),
]


@pytest.mark.parametrize(("kind", "a", "b"), ALIKE)
def test_one_window_in_two_dialects_is_no_difference(kind: str, a: dict[str, Any], b: dict[str, Any]) -> None:
    assert deciding(kind, a, b) == deciding(kind, b, a) == set()


UNLIKE = [
    ("qwen3", USED, USED | WINDOWS, "layer_types"),
    ("qwen3", USED | {"max_window_layers": 2}, USED | {"max_window_layers": 3}, "max_window_layers"),
    ("qwen3", USED | WINDOWS, USED | WINDOWS | {"sliding_window": 7}, "sliding_window"),
    ("qwen3_moe", {"sliding_window": 9}, USED, "use_sliding_window"),
    ("mistral", {"sliding_window": 9}, {"sliding_window": None}, "sliding_window"),
    ("smollm3", {}, {"no_rope_layers": [1, 1, 1, 0, 1, 0]}, "no_rope_layers"),
    ("smollm3", {}, {"no_rope_layer_interval": 5}, "no_rope_layer_interval"),
    ("exaone4", {"layer_types": [F] * 6}, {"layer_types": [F] * 6, "sliding_window": None}, "sliding_window"),
]


@pytest.mark.parametrize(("kind", "a", "b", "key"), UNLIKE)
def test_another_window_is_another_computation(kind: str, a: dict[str, Any], b: dict[str, Any], key: str) -> None:
    assert key in deciding(kind, a, b) and deciding(kind, b, a)


KINDS = (
    "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "mistral",
    "mixtral", "ministral", "phi3", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "exaone4", "olmo3", "smollm3",
    "llama4_text", "starcoder2", "dots1", "cwm", "granite_swa", "vaultgemma",
)  # fmt: skip
GATES = {
    "use_sliding_window": (True, False), "sliding_window": (9, 7), "max_window_layers": (2, 4),
    "sliding_window_pattern": (2, 3), "layer_types": ([F] * 3 + [S] * 3,), "no_rope_layer_interval": (2,),
}  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
def test_configs_differ_where_the_class_makes_other_windows_of_them(kind: str) -> None:
    """Of every two configs: their windows are the same to the class, or one of their keys is said to decide."""
    transformers = pytest.importorskip("transformers", reason="the classes are transformers'")
    make, row = type(transformers.AutoConfig.for_model(kind)), next(iter(known_rows(kinds={kind})))
    patterned = {"sliding_window_pattern"} if kind in {"gemma3_text", "cohere2", "exaone4"} else set()
    known = [key for key in GATES if key in {*make().to_dict(), *patterned}]
    made: list[tuple[dict[str, Any], Any]] = []
    for values in product(*((..., *GATES[key]) for key in known)):
        config = {key: value for key, value in zip(known, values, strict=True) if value is not ...}
        whole = config_of(kind, **config)
        try:
            theirs = make(**{key: value for key, value in whole.items() if key != "model_type"})
            stated(fixture("llama").model.checkpoint.with_config(whole), row)
        except (CheckpointError, ValueError, TypeError, ZeroDivisionError):
            continue
        window, types = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None) or [S] * LAYERS
        rotated = getattr(theirs, "no_rope_layers", window is None if kind == "exaone4" else None)
        made.append((config, ([window if each == S else each for each in types], rotated)))
    assert len(made) > 2
    for (a, of_a), (b, of_b) in [*combinations(made, 2)][:: max(1, len(made) // 12)]:
        assert (not deciding(kind, a, b)) == (of_a == of_b), (a, of_a, b, of_b)
