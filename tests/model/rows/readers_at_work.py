"""Ask transformers' AutoConfig what it takes from planted files: readers_at_work.json.

    python -m tests.model.rows.readers_at_work        # under transformers 4.57, then under 5; no PyTorch is needed

One line for each file: its model_type, the plant, and what each version takes otherwise than from a file of sizes alone
("nothing" has all that it takes from that).
"""

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightscope.model.config.config import KEYS, class_says
from weightscope.model.config.dialects import FULL, SLIDING
from weightscope.model.config.readers import ACTIVATIONS, EPS_KEYS

FILE = Path(__file__).with_name("readers_at_work.json")
TYPES = (
    "afmoe", "apertus", "arcee", "bamba", "bert", "bitnet", "bloom", "codegen", "cohere", "cohere2", "dbrx",
    "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "falcon_h1",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid", "helium", "hunyuan_v1_dense", "jamba", "lfm2",
    "llama", "minimax", "ministral3", "mistral", "mixtral", "modernbert", "nemotron", "nemotron_h", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text",
    "qwen3_moe", "qwen3_next", "recurrent_gemma", "roberta", "seed_oss", "smollm3", "stablelm", "starcoder2", "t5",
    "xglm",
)  # fmt: skip
WRAPPERS = {
    "gemma3": "gemma3_text", "llava": "llama", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text",
    "mistral3": "mistral", "qwen3_vl": "qwen3_vl_text", "idefics3": "llama", "paligemma": "gemma",
    "internvl": "qwen2", "qwen3_5": "qwen3_5_text",
}  # fmt: skip
EPS_NAMES = {key for keys in EPS_KEYS.values() for key in keys}
BASE, LOCAL = 37_000.0, 41_000.0
DEFAULT = {"rope_type": "default", "rope_theta": BASE}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
NESTED = {"full_attention": DEFAULT, "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL}}
ROTARY = {
    "parameters alone": {"rope_parameters": DEFAULT},
    "top alone": {"rope_theta": BASE},
    "both agree": {"rope_parameters": DEFAULT, "rope_theta": BASE},
    "both disagree": {"rope_parameters": DEFAULT, "rope_theta": LOCAL},
    "older scaling": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": BASE},
    "scaling": {"rope_scaling": YARN, "rope_theta": BASE},
    "parameters of scaling": {"rope_parameters": {**YARN, "rope_theta": BASE}},
    "both scale": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {**YARN, "rope_theta": BASE},
    },
    "base in scaling": {"rope_scaling": {**YARN, "rope_theta": LOCAL}, "rope_theta": BASE},
    "share at the top": {"partial_rotary_factor": 0.5, "rope_theta": BASE},
    "share in parameters": {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
    "older names": {"rotary_emb_base": BASE, "rotary_pct": 0.5},
    "older and newer names": {"rotary_emb_base": BASE, "rope_theta": BASE, "rope_parameters": DEFAULT},
}
BY_LAYER = {
    "nested": {"rope_parameters": NESTED},
    "local": {"rope_theta": BASE, "rope_local_base_freq": LOCAL},
    "global and local": {"global_rope_theta": BASE, "local_rope_theta": LOCAL},
    "nested and local": {"rope_parameters": NESTED, "rope_theta": BASE, "rope_local_base_freq": LOCAL},
    "scaling and local": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_theta": BASE,
        "rope_local_base_freq": LOCAL,
    },
}
WINDOW = {"sliding_window": 77, "use_sliding_window": True}
TYPES_OF_LAYERS = [FULL, SLIDING, SLIDING, FULL] * 64
OTHERS = {
    "head size": {"head_dim": 24},
    "head size null": {"head_dim": None},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "window": {"sliding_window": 77},
    "window used": {"sliding_window": 77, "use_sliding_window": True},
    "window unused": {"sliding_window": 77, "use_sliding_window": False},
    "window null": {"sliding_window": None},
    "windows from a layer on": {**WINDOW, "max_window_layers": 1},
    "windows by a period": {**WINDOW, "sliding_window_pattern": 3},
    **{key: {key: "relu"} for key in ACTIVATIONS},
    **{key: {key: 3e-4} for key in sorted(EPS_NAMES)},
}


def plants(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and content of each file of a type."""
    part = WRAPPERS.get(kind, kind)
    sizes = class_says(part, "sizes")
    changes = {
        "nothing": {},
        **ROTARY,
        **(BY_LAYER if part in ("gemma3_text", "modernbert", "olmo3") else {}),
        **OTHERS,
    }
    if n_layers := next((sizes[key] for key in KEYS["n_layers"] if key in sizes), 0):
        changes["windows listed"] = {**WINDOW, "layer_types": TYPES_OF_LAYERS[:n_layers]}
        changes["no windows listed"] = {**WINDOW, "layer_types": [FULL] * n_layers}
    for name, change in changes.items():
        inner = {"model_type": part, **sizes, **change}
        yield name, inner if part == kind else {"model_type": kind, "text_config": inner}
    for tied in (True, False) if part != kind else ():
        whole = {"model_type": kind, "text_config": {"model_type": part, **sizes}, "tie_word_embeddings": tied}
        yield f"{'' if tied else 'un'}tied at the top", whole


def asked(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """What AutoConfig takes from a file; None where it refuses it."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        try:
            whole = transformers.AutoConfig.from_pretrained(folder)
        except Exception:
            return None
    is_four = transformers.__version__.startswith("4.")
    text = whole.get_text_config(decoder=True) if "text_config" in content else whole
    keys = (
        "rope_theta global_rope_theta local_rope_theta rope_local_base_freq rope_scaling partial_rotary_factor"
        if is_four
        else "rope_parameters"
    )
    names = (*keys.split(), "head_dim", "sliding_window", "use_sliding_window", *ACTIVATIONS, *sorted(EPS_NAMES))
    facts = {name: getattr(text, name) for name in names if hasattr(text, name)}
    if isinstance(types := getattr(text, "layer_types", None), list):
        facts["layer_types"] = "".join(kind[0] for kind in types)  # s of sliding_attention, f of full_attention
    tied = getattr(text if is_four else whole, "tie_word_embeddings", False)
    return json.loads(json.dumps({**facts, "tied": tied}, default=str))


def lines() -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Type, plant, and what the installed version takes otherwise than from a file of sizes alone."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind in (*TYPES, *WRAPPERS):
        if kind not in CONFIG_MAPPING:
            continue
        usual: dict[str, Any] = {}
        for name, content in plants(kind):
            facts = asked(content)
            usual = (facts or {}) if name == "nothing" else usual
            new = facts and {
                key: value for key, value in facts.items() if name == "nothing" or usual.get(key, ...) != value
            }
            gone = [] if facts is None else [key for key in usual if key not in facts]
            yield kind, name, new if not gone else {**(new or {}), "gone": gone}


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    known[transformers.__version__] = [list(line) for line in lines()]
    texts = [
        f"{json.dumps(version)}: [\n" + ",\n".join(map(json.dumps, these)) + "\n]"
        for version, these in sorted(known.items())
    ]
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n", encoding="utf-8")
