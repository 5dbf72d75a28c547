"""What `same` says of each key of a config is what the eager model says: its outputs move or not."""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import LLAMA, TEXT, Case, case_of
from tests.support.commands import with_tokenizer
from tests.support.config_edits import edited, edits, leaves
from tests.support.slow import one_in
from weightscope.core.errors import CheckpointError
from weightscope.model.config.effects import COMPUTATION, NONE, UNKNOWN, Reader, effect_of
from weightscope.model.model import open_tensors
from weightscope.pairs.same import SAME_BYTES, UNDECIDED
from weightscope.pairs.same.config_and_tokens import compare_settings

SEQ2SEQ = {
    "vocab_size": 24, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def like(name: str, **config: Any) -> Case:
    """A fixture's case with more in its config."""
    case = case_of(name)
    return replace(case, config={**case.config, **config})


FAMILIES = [
    like("gpt2"), like("gpt_neo"), like("gptj"), like("gpt_neox"), like("opt"), like("bloom"), like("falcon_grouped"),
    like("falcon_alibi"), like("llama"), like("llama_yarn"), like("mistral"), like("mixtral"), like("granite"),
    like("smollm3"), like("qwen2", **WINDOWED), like("qwen2_moe", **WINDOWED), like("qwen3", **WINDOWED),
    like("qwen3_moe", use_sliding_window=True, sliding_window=4), like("gemma"), like("gemma2"), like("gemma3"),
    like("phi"), like("phi3"), like("olmo2"), like("olmo3"), like("starcoder2"), like("cohere"), like("gpt_oss"),
    Case("cohere2", "cohere2", LLAMA | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    Case("exaone4", "exaone4", LLAMA | {"sliding_window": 4, "sliding_window_pattern": 2}),
    like("llama4", attention_chunk_size=4), like("glm4"), like("stablelm"), like("granite_swa"), like("nanochat"),
    like("bert"), like("roberta"), like("electra"), like("distilbert"), like("albert"), like("modernbert"),
    like("esm"), like("xglm"), like("codegen"), like("clip_text"), like("siglip_text"), like("t5_encoder"),
    Case("clip_text_alone", "clip_text_model", TEXT | {"projection_dim": 16, "eos_token_id": 5}, head="CLIPTextModel"),
    Case("bart", "bart", SEQ2SEQ, head="BartForConditionalGeneration"),
    Case("marian", "marian", SEQ2SEQ, head="MarianMTModel"),
    like("vit"), like("dinov2"),
]  # fmt: skip
# Keys that other classes read, each with a value that would matter there.
OF_OTHERS: dict[str, Any] = {
    "is_decoder": True, "is_causal": False, "projection_dim": 7, "decoder_vocab_size": 9, "max_window_layers": 1,
    "use_sliding_window": True, "sliding_window": 2, "_sliding_window_pattern": 2, "partial_rotary_factor": 0.5,
    "rope_theta": 77.0, "pad_token_id": 3, "eos_token_id": 7, "bos_token_id": 7, "mask_token_id": 7,
    "attn_logit_softcapping": 1.0, "logit_scale": 3.0, "attention_multiplier": 3.0, "residual_multiplier": 3.0,
    "query_pre_attn_scalar": 3, "attention_chunk_size": 2, "use_bidirectional_attention": True, "pretraining_tp": 2,
}  # fmt: skip
# Keys that the code reads, and that could have an effect where these tiny models have none.
READ_IN_VAIN: dict[str, set[str]] = defaultdict(set) | {
    "gpt_neo": {"is_causal"},  # a stored mask hides what comes after, too
    "bloom": {"pretraining_tp", "slow_but_exact"},  # only both together, and they sum in another order
    "falcon_grouped": {"multi_query"},  # not in the new architecture
    "falcon_alibi": {"num_ln_in_parallel_attn"},  # not where attention comes first
    "qwen2_moe": {"intermediate_size"},  # of dense layers, as the next one: all have experts
    "qwen3_moe": {"intermediate_size"},
    "llama4": {"intermediate_size_mlp"},
    "gemma3": {"attn_logit_softcapping"},  # the function of attention has a cap, and is not given it
    "gpt_oss": {"hidden_act", "rope_parameters.beta_fast"},  # of all mixtures' shared code; ends are rounded
    "electra": {"is_causal", "num_attention_heads"},  # of a decoder; the row needs the number
    "dinov2": {"apply_layernorm", "image_size"},  # of a backbone; only whole patches count
    "siglip_text": {"is_causal", "vision_config.image_size"},
    "t5_encoder": {"scale_decoder_outputs", "pad_token_id"},  # the class sets it; of labels
    "esm": {"is_causal", "pad_token_id"},  # of a decoder; of positions that rotation replaces
    "bert": {"is_causal"}, "roberta": {"is_causal"},
    "marian": {"decoder_start_token_id", "pad_token_id"},  # where no tokens are given to the decoder
    "bart": {"decoder_start_token_id", "pad_token_id"},
    "clip_text": {"is_causal"},  # of the text's part, and not of the whole
}  # fmt: skip
LEFT_OUT = {"model_type", "tie_word_embeddings", "architectures", "dtype"}  # other classes, other tensors


def inputs_for(case: Case, torch: Any) -> dict[str, Any]:
    """Several texts with every token, an image; whichever the model takes."""
    rng = np.random.default_rng(5)
    image = {"pixel_values": torch.from_numpy(rng.normal(size=(4, 1, 12, 12)).astype(np.float32))}
    if case.model_type in {"vit", "dinov2"}:
        return image
    rows = [*(rng.permutation(24)[:12] for _ in range(3)), np.array([7, 3, 0, 9, 2, 11, 1, 5, 23, 6, 2, 5])]
    tokens = torch.from_numpy(np.stack(rows))
    more = {"decoder_input_ids": tokens.flip(1)} if case.model_type in {"t5", "bart", "marian"} else {}
    return {"input_ids": tokens} | more | (image if case.model_type in {"clip", "siglip"} else {})


def tensors_in(output: Any) -> Iterator[np.ndarray]:
    """Every tensor of an output, caches left out."""
    if hasattr(output, "numpy"):
        yield output.float().numpy()
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from () if key == "past_key_values" else tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)


def run(kind: type, folder: Path, inputs: Mapping[str, Any], torch: Any) -> list[np.ndarray]:
    """Hidden states and whatever else the eager model gives; an error where it has other tensors."""
    model, loaded = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    if any(loaded[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError("other tensors")
    with torch.no_grad():
        return [*tensors_in(dict(model.eval()(**inputs, output_hidden_states=True)))]


def moved(before: list[np.ndarray], after: list[np.ndarray]) -> bool:
    """Whether outputs of the same shapes are others, beyond what the order of a sum rounds."""
    if [x.shape for x in before] != [y.shape for y in after]:
        raise ValueError("other shapes")
    sizes = [(np.abs(y - x).max(), np.abs(x).max()) for x, y in zip(before, after, strict=True) if x.size]
    if not all(np.isfinite(size).all() for size in sizes):
        raise ValueError("not finite")
    return any(change > 64 * np.finfo(np.float32).eps * (1 + size) for change, size in sizes)


@pytest.mark.parametrize("key", ["pad_token_id", "eos_token_id", "mask_token_id", "text_config.pad_token_id"])
def test_effect_of_a_token_is_not_known_where_no_row_and_no_class_is(key: str) -> None:
    """Longformer and LayoutLMv3 count positions from their padding."""
    place = key.rpartition(".")[0]
    assert effect_of(key, frozenset(), {place: Reader("longformer")}) == UNKNOWN
    assert effect_of(key, frozenset({"hidden_size"}), {place: Reader("of a row")}) == NONE


def test_padding_of_a_known_class_without_a_row_is_as_its_code_says() -> None:
    assert effect_of("pad_token_id", frozenset(), {"": Reader("bert")}) == NONE


@pytest.mark.check
@pytest.mark.parametrize("case", one_in(6, FAMILIES), ids=lambda case: case.name)
def test_key_decides_what_the_eager_model_says(case: Case, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """A key that moves an output is never idle; one that moves none is never called another computation."""
    torch = pytest.importorskip("torch", reason="runs the eager models")
    transformers = pytest.importorskip("transformers", reason="the eager models are transformers'")
    from tests.support.random_models import random_model

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    network = random_model(case)
    network.save_pretrained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "b")
    inputs, config = inputs_for(case, torch), json.loads((tmp_path / "a" / "config.json").read_text())
    before, original = run(type(network), tmp_path / "a", inputs, torch), open_tensors(tmp_path / "a")
    asked = [(path, value) for path, usual in leaves(config) for value in edits(usual) if value != usual]
    asked += [((key,), value) for key, value in OF_OTHERS.items() if key not in config]
    said, left = defaultdict(list), {}
    for path, value in asked:
        (tmp_path / "b" / "config.json").write_text(json.dumps(edited(config, path, value)))
        try:
            moves = moved(before, run(type(network), tmp_path / "b", inputs, torch))
            settings = compare_settings(original, open_tensors(tmp_path / "b"), same_head=True)
        except CheckpointError as refusal:
            left[path, str(value)] = f"refused: {refusal}"
            continue
        except Exception as error:  # its class or its code do not take this value, or it has other shapes
            left[path, str(value)] = f"not loaded: {error}"
            continue
        effect = COMPUTATION if settings.deciding else "unknown" if settings.unknown else NONE
        said[path].append((value, moves, effect))
    assert len(said) > len(left) / 10
    for path, answers in said.items():
        key = ".".join(path)
        if LEFT_OUT & {*path}:
            continue
        with subtests.test(key=key):
            assert all(effect != NONE for _, moves, effect in answers if moves), answers
            if not any(moves for _, moves, _ in answers) and key not in READ_IN_VAIN[case.name]:
                assert all(effect != COMPUTATION for _, _, effect in answers), answers


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
    ],
    ids=lambda method: method["quant_method"],
)
def test_packing_that_is_said_of_floats_proves_nothing(method: dict[str, Any], tmp_path: Path) -> None:
    """A copy that was unpacked, or never packed, with the settings of another: loaders refuse it or quantise it."""
    plain, claiming = tmp_path / "plain", tmp_path / "claiming"
    for folder in (plain, claiming):
        with_tokenizer("llama", folder)
    values = json.loads((claiming / "config.json").read_text())
    (claiming / "config.json").write_text(json.dumps(values | {"quantization_config": method}))
    known = tmp_path / "plain.id.json"
    known.write_text(json.dumps(ws.identity(plain).as_json()))
    for a, b in ((plain, claiming), (claiming, plain), (known, claiming), (claiming, known)):
        same = ws.same(a, b)
        assert same.verdict == UNDECIDED and "claiming's config.json says by quantization_config" in same.lead
        assert [key.config for key in same.config] == ["quantization_config"] and not same.settings.idle
    assert ws.same(claiming, claiming).verdict == SAME_BYTES
