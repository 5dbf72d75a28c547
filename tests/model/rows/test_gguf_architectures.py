"""Every architecture that is read from GGUF: tiny models of transformers, converted as llama.cpp does, come back.

The names are the gguf package's own map; the conversion of matrices is llama.cpp's convert_hf_to_gguf.py, told again.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.tiny_models import FIXTURES, fixture
from weightscope.model.config.computed import differences, stated
from weightscope.model.config.config import KEYS
from weightscope.model.config.effects import NONE
from weightscope.model.rows.table import FAMILIES
from weightscope.pairs.changes.all_tensors import compare_tensors
from weightscope.pairs.deeds.deed import What

gguf = pytest.importorskip("gguf")
PAGE = Path(__file__).parents[3] / "docs" / "gguf.md"


def grouped(w: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """FalconModel, GPTNeoXModel and BloomModel: queries first, then keys, then values."""
    r = len(w) // (heads + 2 * kv_heads)
    parts = w.reshape(kv_heads, heads // kv_heads + 2, r, *w.shape[1:])
    of_groups = (parts[:, :-2], parts[:, -2], parts[:, -1])
    return np.concatenate([part.reshape(-1, *w.shape[1:]) for part in of_groups])


def permuted(w: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute."""
    return w.reshape(heads, 2, len(w) // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


PERMUTED = ("llama", "granite", "smollm3")  # GraniteModel and SmolLM3Model are LlamaModels


def converted(name: str, w: np.ndarray, kind: str, heads: int, kv_heads: int) -> np.ndarray:
    """What the converter of an architecture does to one tensor."""
    if kind in PERMUTED and ".q_proj" in name:
        return permuted(w, heads)
    if kind in PERMUTED and ".k_proj" in name:
        return permuted(w, kv_heads)
    if kind in ("falcon", "gptneox", "bloom") and "query_key_value" in name:
        return grouped(w, heads, kv_heads if kind == "falcon" else heads)
    if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return w.T
    return w + 1 if kind.startswith("gemma") and name.endswith("norm.weight") else w


@dataclass(frozen=True)
class Converted:
    """A fixture, the architecture that its GGUF file says, what its converter writes besides, what no key can say."""

    fixture: str
    architecture: str
    keys: dict[str, object] = field(default_factory=dict)
    unsaid: dict[str, object] = field(default_factory=dict)


CASES = (
    Converted("llama", "llama"),
    Converted("mistral", "llama", {"attention.key_length": 6}),
    Converted("qwen2", "qwen2"),
    Converted("qwen2_moe", "qwen2moe", {"expert_count": 2}),
    Converted("qwen3", "qwen3", {"attention.key_length": 6}),
    Converted("qwen3_moe", "qwen3moe", {"expert_count": 2}),
    Converted("gemma", "gemma", {"attention.key_length": 8}),
    Converted(
        "gemma2", "gemma2", {"attention.key_length": 8, "attn_logit_softcapping": 2.0}, {"query_pre_attn_scalar": 8}
    ),
    Converted(
        "gemma3", "gemma3", {"attention.key_length": 8, "rope.freq_base": 1000.0},
        {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention"] * 3,
         "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    Converted("granite", "granite", {"attention.scale": 0.37, "embedding_scale": 3.0}),
    Converted("smollm3", "smollm3", {}, {"no_rope_layers": [1, 1]}),
    Converted("olmo2", "olmo2"),
    Converted("phi", "phi2", {"rope.dimension_count": 4}),
    Converted("phi3", "phi3"),
    Converted("starcoder2", "starcoder2"),
    Converted("stablelm", "stablelm", {"rope.dimension_count": 4}),
    Converted("gpt2", "gpt2"),
    Converted("gpt_neox", "gptneox", {"rope.dimension_count": 4}),
    Converted("bloom", "bloom"),
    Converted("mpt", "mpt", {"attention.clamp_kqv": 0.8}),
    Converted("falcon_multi_query", "falcon"),
    Converted("falcon_grouped", "falcon"),
    Converted("falcon_one_norm", "falcon"),
    Converted("bert", "bert"),
)  # fmt: skip


def size(config: dict[str, object], *names: str) -> int | None:
    return next((config[name] for name in names if config.get(name) is not None), None)  # type: ignore[return-value]


def written(case: Converted, path: Path, **more: np.ndarray) -> Path:
    """The fixture as a GGUF file, as llama.cpp would write it; with other tensors, or some in others' places."""
    config = json.loads((FIXTURES / case.fixture / "config.json").read_text())
    n_layers, d, heads = (size(config, *KEYS[name]) for name in ("n_layers", "d_model", "n_heads"))
    one_group = config.get("multi_query") and not config.get("new_decoder_architecture")
    kv_heads = 1 if one_group else size(config, "num_kv_heads", "num_key_value_heads") or heads
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_block_count(n_layers)
    writer.add_embedding_length(d)
    writer.add_head_count(heads)
    writer.add_feed_forward_length(size(config, "ffn_hidden_size", "intermediate_size") or 4 * d)
    writer.add_context_length(size(config, *KEYS["n_positions"]) or 64)
    if case.architecture not in ("gpt2", "gptneox", "mpt"):
        writer.add_head_count_kv(kv_heads)
    rms = config.get("rms_norm_eps")
    (writer.add_layer_norm_eps if rms is None else writer.add_layer_norm_rms_eps)(
        rms or size(config, *KEYS["norm_eps"])
    )
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    for key, value in {**({"rope.freq_base": theta} if theta else {}), **case.keys}.items():
        adds = {float: writer.add_float32, list: writer.add_array}
        adds.get(type(value), writer.add_uint32)(f"{case.architecture}.{key}", value)
    spelled = "bert" if case.architecture == "bert" and "token_types.weight" not in more else "llama"
    writer.add_tokenizer_model(spelled)
    writer.add_token_list([f"t{i}" for i in range(24)])
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(arch, n_layers)
    for name, w in load_file(FIXTURES / case.fixture / "model.safetensors").items():
        asked = name.removeprefix({"bert": "bert.", "bloom": "transformer."}.get(case.architecture, ""))
        ggml = names.get_name(asked, try_suffixes=(".weight", ".bias"))
        assert ggml, name
        stored = converted(name, w, case.architecture, heads, kv_heads)
        writer.add_tensor(ggml, np.ascontiguousarray(more.pop(ggml, stored)))
    for name, w in more.items():
        writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named(case: Converted) -> str:
    return case.fixture


@pytest.mark.parametrize("case", CASES, ids=named)
def test_weights_and_scores_come_back(case: Converted, tmp_path: Path) -> None:
    """Weights bit for bit (gains of 1 + w to a rounding), and the scores that fixtures are held to transformers by."""
    opened, original = ws.open_model(written(case, tmp_path / "model.gguf")), fixture(case.fixture).model
    theirs = {name: tensor.read() for name, tensor in original.checkpoint.items()}
    assert set(opened.checkpoint) == set(theirs)
    for name, w in theirs.items():
        rounding = 2e-7 if case.architecture.startswith("gemma") and "norm" in name else 0
        np.testing.assert_allclose(opened.checkpoint[name].read(), w, rtol=0, atol=rounding, err_msg=name)
        assert opened.checkpoint[name].shape == w.shape
    stated = dict(original.checkpoint.config) | case.unsaid
    same = ws.Model.of_row(original.checkpoint.with_config(stated), original.row)
    assert opened.attention_layers == same.attention_layers
    assert opened.family.name == {"mistral": "llama"}.get(same.family.name, same.family.name)
    for index in opened.attention_layers:
        x = fixture(case.fixture).arrays[f"x{index}"]
        np.testing.assert_allclose(opened.layer(index).scores(x), same.layer(index).scores(x), atol=1e-5)
        np.testing.assert_allclose(opened.layer(index).values(x), same.layer(index).values(x), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_tensor_has_the_role_and_array_of_its_original(case: Converted, tmp_path: Path) -> None:
    ours, theirs = ws.open_model(written(case, tmp_path / "model.gguf")).tensors, fixture(case.fixture).model.tensors
    roles = [{(tensor.role, tensor.layer, tensor.shape) for tensor in tensors} for tensors in (ours, theirs)]
    assert roles[0] == roles[1]
    for label in theirs.labels:
        np.testing.assert_allclose(ours[label].array(), theirs[label].array(), rtol=0, atol=2e-7, err_msg=label)


def test_experts_of_a_gguf_file_have_roles(tmp_path: Path) -> None:
    """All experts of a layer are in one tensor there, under ggml's names."""
    case = next(case for case in CASES if case.fixture == "qwen3_moe")
    gates, router = np.arange(2 * 8 * 16, dtype=np.float32).reshape(2, 8, 16), np.ones((2, 16), np.float32)
    more = {"blk.0.ffn_gate_exps.weight": gates, "blk.1.ffn_gate_inp.weight": router}
    tensors = ws.open_model(written(case, tmp_path / "model.gguf", **more)).tensors
    assert not [tensor for tensor in tensors if tensor.role == tensor.name]
    assert tensors["blk.0.ffn_gate_exps.weight"].role == "expert.gate" and tensors["layer 1 router"].shape == (2, 16)
    np.testing.assert_array_equal(tensors["layer 0 expert 1 gate"].array(), gates[1])
    assert "layer 0 expert 2 gate" not in tensors


BESIDES = (
    ("granite", "residual_scale", "residual_multiplier"), ("granite", "logit_scale", "logits_scaling"),
    ("granite", "embedding_scale", "embedding_multiplier"), ("granite", "attention.scale", "attention_multiplier"),
    ("gemma2", "attn_logit_softcapping", "attn_logit_softcapping"),
    ("gemma2", "final_logit_softcapping", "final_logit_softcapping"),
    ("gemma3", "attention.sliding_window", "sliding_window"), ("qwen3_moe", "expert_used_count", "num_experts_per_tok"),
    ("qwen2_moe", "expert_count", "num_experts"), ("llama", "attention.temperature_scale", ""),
    ("llama", "final_logit_softcapping", ""),
)  # fmt: skip


@pytest.mark.parametrize(("name", "key", "meaning"), BESIDES)
def test_what_decides_the_computation_is_compared_with_a_config(
    name: str, key: str, meaning: str, tmp_path: Path
) -> None:
    """A key that no config of this class has is reported too."""
    case, original = next(case for case in CASES if case.fixture == name), fixture(name).model
    before = stated(original.checkpoint, original.row)
    usual = before.values[meaning] if meaning else 0.0

    def keys(value: object) -> list[str]:
        path = written(replace(case, keys=case.keys | {key: value}), tmp_path / "model.gguf")
        model = ws.open_model(path)
        changes = differences(stated(model.checkpoint, model.row), before)
        return [change.key for change in changes if change.effect != NONE and change.key not in case.unsaid]

    assert meaning not in keys(usual) and f"{case.architecture}.{key}" not in keys(usual)
    assert (meaning or f"{case.architecture}.{key}") in keys(3 * usual if usual else 0.3)


@pytest.mark.parametrize(("windows", "changes"), [([1, 1, 0], []), ([0, 1, 1], ["layer_types"])])
def test_windows_of_a_file_are_compared_with_the_list_of_layers(
    windows: list[int], changes: list[str], tmp_path: Path
) -> None:
    case, original = next(case for case in CASES if case.fixture == "gemma3"), fixture("gemma3").model
    pattern = {"attention.sliding_window_pattern": [*map(bool, windows)]}
    model = ws.open_model(written(replace(case, keys=case.keys | pattern), tmp_path / "model.gguf"))
    differing = differences(stated(model.checkpoint, model.row), stated(original.checkpoint, original.row))
    keys = [change.key for change in differing if change.effect != NONE]
    assert [key for key in keys if key == "layer_types" or "pattern" in key] == changes


def test_converted_file_differs_in_no_config_value(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for case in CASES:
        with subtests.test(case.fixture):
            a, b = ws.open_model(written(case, tmp_path / "model.gguf")), fixture(case.fixture).model
            changes = differences(stated(a.checkpoint, a.row), stated(b.checkpoint, b.row))
            unsaid = {*case.unsaid, "tie_word_embeddings"}  # fixtures have no unembedding
            telling = [change for change in changes if change.effect != NONE]
            assert not [str(change) for change in telling if change.key.partition(".")[0] not in unsaid]


OWN_READER = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2", "stablelm", "gpt2", "bloom",
    "falcon_multi_query",
)  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("case", [case for case in CASES if case.fixture in OWN_READER], ids=named)
def test_transformers_own_reader_finds_the_same_weights(case: Converted, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = written(case, tmp_path / "model.gguf")
    config = transformers.AutoConfig.from_pretrained(FIXTURES / case.fixture)
    model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = ws.open_model(path).checkpoint
    assert set(theirs) == set(ours)
    for name, w in theirs.items():
        np.testing.assert_array_equal(ours[name].read(), w.numpy(), err_msg=name)


def test_every_gguf_row_is_compared() -> None:
    """Here, or with the converter's own files, whose verdicts are in docs/gguf.md."""
    read = [row.gguf.architecture for row in FAMILIES if row.gguf is not None and not row.refused]
    rows = {name for names in read for name in names} - {"nemotron_h"}  # of nemotron_h_moe, without experts
    table = (line.split(" | ") for line in PAGE.read_text().splitlines() if " | equal | " in line)
    assert rows - {case.architecture for case in CASES} <= {architecture for _, architecture, *_ in table}


def factors(short: np.ndarray, long: np.ndarray) -> dict[str, np.ndarray]:
    return {"rope_factors_short.weight": np.float32(short), "rope_factors_long.weight": np.float32(long)}


def test_phi_3s_factors_are_read(tmp_path: Path) -> None:
    case = Converted("phi3", "phi3", {"rope.scaling.original_context_length": 16})
    path = written(case, tmp_path / "model.gguf", **factors(np.array([1, 2]), np.array([3, 4])))
    config = ws.open_model(path).config
    wanted = {"rope_type": "longrope", "short_factor": [1, 2], "long_factor": [3, 4]}
    assert wanted.items() <= config["rope_parameters"].items()
    assert config["original_max_position_embeddings"] == 16 and config["max_position_embeddings"] == 64


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


REFUSED = {
    "half a rotation": (Converted("llama", "llama", {"rope.dimension_count": 2}), {}, "rotates a part of each head"),
    "a wide rotation": (Converted("stablelm", "stablelm", {"rope.dimension_count": 9}), {}, "from 1 to 8 was expected"),
    "experts": (Converted("gemma", "gemma", {"attention.key_length": 8, "expert_count": 2}), {}, "has experts"),
    "norms": (
        Converted("stablelm", "stablelm"),
        {"blk.0.attn_q_norm.weight": ones(8)},
        "has norms of queries and keys",
    ),
    "another encoder": (Converted("bert", "bert"), {"token_types.weight": ones(2, 16)}, "other tokens than BERT's"),
    "odd heads": (Converted("gpt_neox", "gptneox"), {"blk.0.attn_qkv.weight": ones(97, 32)}, "values do not divide"),
    "endless factors": (Converted("phi3", "phi3"), factors(ones(5000), ones(5000)), "a factor for each pair"),
    "another architecture": (
        Converted("llama", "zebra"),
        {},
        "read are gpt2, llama, ",
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_unsupported_gguf_feature_is_refused(refused: str, tmp_path: Path) -> None:
    case, tensors, stated = REFUSED[refused]
    path = written(Converted(case.fixture, "llama"), tmp_path / "m.gguf") if refused == "another architecture" else None
    if path is not None:
        path.write_bytes(path.read_bytes().replace(b"llama", b"zebra"))
    with pytest.raises(ws.CheckpointError, match=stated):
        ws.open_model(path or written(case, tmp_path / "model.gguf", **tensors))


@pytest.mark.parametrize(("fixture_name", "architecture"), [("gpt_neox", "gptneox"), ("stablelm", "stablelm")])
@pytest.mark.parametrize("parallel", [0, 1])
def test_parallel_residual_follows_the_gguf_metadata(
    fixture_name: str, architecture: str, parallel: int, tmp_path: Path
) -> None:
    case = Converted(fixture_name, architecture, {"use_parallel_residual": parallel})
    model = ws.open_model(written(case, tmp_path / "model.gguf"))
    assert model.family.mlp is not None and model.family.parallel == parallel


def test_olmo2_with_a_window_is_olmo3(tmp_path: Path) -> None:
    """GGUF calls both olmo2; unless the file has a base for them, layers with a window use the base of all layers."""
    windowed = Converted("olmo2", "olmo2", {"attention.sliding_window": 4, "rope.freq_base": 5e5})
    model = ws.open_model(written(windowed, tmp_path / "model.gguf"))
    assert model.family.name == "olmo3"
    assert {each["rope_theta"] for each in model.config.rope.values()} == {5e5}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fixture)
def test_comparing_with_the_original_shows_no_change(case: Converted, tmp_path: Path) -> None:
    original = ws.open_model(FIXTURES / case.fixture)
    converted = ws.open_model(written(case, tmp_path / "model.gguf"))
    changes = compare_tensors(converted, original).changes
    assert {(c.kind, c.paired_by) for c in changes} == {(What.IDENTICAL, "role")} and len(changes) == len(
        original.checkpoint
    )


def test_stacked_and_separate_experts_are_paired(tmp_path: Path) -> None:
    """ggml stacks all experts of a layer; transformers 4 saves each alone."""
    case = next(case for case in CASES if case.fixture == "qwen3_moe")
    weights = load_file(FIXTURES / "qwen3_moe" / "model.safetensors")
    config = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text())
    rng = np.random.default_rng(5)
    d, inner, count = config["hidden_size"], 6, 3
    shapes = {"gate": (count, inner, d), "up": (count, inner, d), "down": (count, d, inner)}
    stacks = {
        f"blk.{i}.ffn_{role}_exps.weight": rng.standard_normal(shape).astype(np.float32)
        for i in range(config["num_hidden_layers"])
        for role, shape in shapes.items()
    }
    for name, stack in stacks.items():
        _, layer, kind, _ = name.split(".")
        for expert, w in enumerate(stack):
            weights[f"model.layers.{layer}.mlp.experts.{expert}.{kind.split('_')[1]}_proj.weight"] = w
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    separate = ws.open_model(tmp_path)
    stacked = ws.open_model(written(case, tmp_path / "model.gguf", **stacks))
    assert len(stacked.checkpoint) < len(weights)
    for a, b in ((separate, stacked), (stacked, separate)):
        changes = compare_tensors(a, b).changes
        assert {(c.kind, c.paired_by) for c in changes} == {(What.IDENTICAL, "role")} and len(changes) == len(weights)
