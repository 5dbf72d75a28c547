"""Models within models: wrappers of any make, and checkpoints that lack what stands before the first layer."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.bigram_counts import embedded_counts
from tests.support.cases import LLAMA, VIT
from tests.support.tiny_models import FIXTURES, fixture
from tests.support.two_layers import FOLDER
from weightscope.model.config.config import class_says


def wrapped(folder: Path, config: dict, prefix: str, name: str = "llama", **more: np.ndarray) -> Path:
    """A fixture's tensors under another prefix, and a wrapper's config."""
    stem = fixture(name).model.prefix
    weights = load_file(FIXTURES / name / "model.safetensors")
    folder.mkdir()
    save_file({prefix + key.removeprefix(stem): w for key, w in weights.items()} | more, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


def same(opened: ws.Model, name: str = "llama") -> bool:
    x = fixture(name).arrays["x1"]
    return np.array_equal(opened.layer(1).scores(x), fixture(name).model.layer(1).scores(x))


@pytest.mark.parametrize("prefix", ["model.brain.", "base_model.model.model.", "net.", "a.b.c.d.text_model.model."])
def test_unknown_wrapper_opens_by_its_tensor_names(prefix: str, tmp_path: Path) -> None:
    text = config_of("llama")
    for number, key in enumerate(("text_config", "llm_config", "thinker_config")):
        inner = {"text_config": text} if key == "thinker_config" else text
        config = {"model_type": "mystery", key: inner, "vision_config": VIT | {"model_type": "mystery_vision"}}
        opened = ws.open_model(wrapped(tmp_path / str(number), config, prefix))
        assert opened.family.name == "llama" and opened.prefix == prefix and same(opened)


def test_a_family_that_is_asked_for_finds_its_part_by_the_tensors_sizes(tmp_path: Path) -> None:
    text = config_of("llama_linear") | {"model_type": "mystery_text"}
    deeper = text | {"num_hidden_layers": 3}
    config = {
        "model_type": "mystery",
        "sound_config": deeper,
        "text_config": text,
        "vision_config": VIT | {"hidden_size": 8},
    }
    folder = wrapped(tmp_path / "wrapped", config, "model.brain.", "llama_linear")
    with pytest.raises(ws.CheckpointError, match=r"'mystery'.*`weightscope adopt SOURCE`"):
        ws.open_model(folder)
    assert same(ws.open_model(folder, family="llama"), "llama_linear")
    (folder / "config.json").write_text(json.dumps(config | {"other_config": text}))
    with pytest.raises(ws.CheckpointError, match="several parts could be the llama's: text_config, other_config"):
        ws.open_model(folder, family="llama")


def test_two_models_of_one_family_are_not_guessed_between(tmp_path: Path) -> None:
    again = {f"b.{key}": w for key, w in load_file(FIXTURES / "llama" / "model.safetensors").items()}
    folder = wrapped(tmp_path / "two", config_of("llama"), "a.model.", **again)
    with pytest.raises(ws.CheckpointError, match=r"several models of family llama \(a\.model\.layers\.0.*b\.model\."):
        _ = ws.open_model(folder).prefix


def test_two_models_of_two_families_are_not_guessed_between(tmp_path: Path) -> None:
    gpt2_tensors = {f"b.{key}": w for key, w in load_file(FIXTURES / "gpt2" / "model.safetensors").items()}
    config = {
        "model_type": "mystery",
        "a_config": config_of("llama"),
        "b_config": config_of("gpt2"),
        "c": {"model_type": []},
    }
    folder = wrapped(tmp_path / "two", config, "a.model.", **gpt2_tensors)
    with pytest.raises(ws.CheckpointError, match="mystery has several towers: say `tower='a'` or `tower='b'`"):
        ws.open_model(folder)
    assert same(ws.open_model(folder, tower="a")) and list(ws.open_model(folder, tower="b").stacks) == ["a", "b"]
    assert (
        same(ws.open_model(folder, family="llama")) and ws.open_model(folder, family="gpt2").prefix == "b.transformer."
    )


@pytest.mark.check
def test_llava_as_transformers_writes_it_has_a_language_model_and_one_that_sees(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**LLAMA),
        vision_config=transformers.CLIPVisionConfig(**VIT | {"num_channels": 3}),
        image_token_index=20,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    opened, sees = ws.open_model(tmp_path), ws.open_model(tmp_path, tower="vision")
    assert (opened.family.name, sees.family.name, sees.family.tower) == ("llama", "clip", "vision")
    theirs = model.model.language_model.layers[1].self_attn
    w_v, gamma = theirs.v_proj.weight.detach().numpy(), model.model.language_model.layers[1].input_layernorm.weight
    head = opened.layer(1).head(3)
    np.testing.assert_allclose(head.w_v, (w_v * gamma.detach().numpy()).T[:, 4:], atol=1e-6)
    assert opened.unembedding.tensor.name.endswith("lm_head.weight")
    assert sees.layer(1).n_heads == VIT["num_attention_heads"]


@pytest.mark.parametrize("name", ["clip_vision", "siglip_text"])
def test_unknown_wrapper_of_two_known_towers_opens_by_tower(name: str, tmp_path: Path) -> None:
    case = fixture(name).case
    (tmp_path / "config.json").write_text(json.dumps(config_of(name) | {"model_type": "newcomer"}))
    (tmp_path / "model.safetensors").write_bytes((FIXTURES / name / "model.safetensors").read_bytes())
    assert same(ws.open_model(tmp_path, tower=case.tower), name)
    assert ws.open_model(tmp_path).family.tower == "text"


def test_sizes_that_are_left_out_are_held_to_the_tensors(tmp_path: Path) -> None:
    text = {key: value for key, value in config_of("llama").items() if key != "hidden_size"}
    folder = wrapped(tmp_path / "wrapped", {"model_type": "mystery", "text_config": text}, "language_model.model.")
    with pytest.raises(ws.CheckpointError, match=r"has shape .* needs"):
        ws.open_model(folder).layer(0)


def lacking(name: str, folder: Path, *ends: str) -> Path:
    weights = load_file(FIXTURES / name / "model.safetensors")
    folder.mkdir()
    save_file({k: w for k, w in weights.items() if not k.endswith(ends)}, folder / "model.safetensors")
    (folder / "config.json").write_text((FIXTURES / name / "config.json").read_text())
    return folder


MISSING = [
    ("gpt_neo", ("wpe.weight",), "Position rows were not looked at: .*'transformer.wpe.weight' is missing"),
    ("gpt_neo", ("wte.weight",), "Directions have no tokens: .*no token embedding"),
    ("gpt_neo", ("wte.weight", "wpe.weight", "ln_f.weight"), "Position rows were not looked at"),
    ("gpt2", ("wpe.weight",), "Position rows were not looked at"),
    ("bert", ("token_type_embeddings.weight",), "token_type_embeddings.weight' is missing"),
    ("bert", ("embeddings.LayerNorm.weight",), "No findings"),  # no head needs it, nor do tokens
    ("opt", ("embed_positions.weight",), "Position rows were not looked at"),
]


@pytest.mark.parametrize(("name", "ends", "message"), MISSING)
def test_audit_needs_no_tensors_outside_attention(
    name: str, ends: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    folder = lacking(name, tmp_path / "lacking", *ends)
    result = audit_of(folder, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "report.html").exists()
    audit = ws.audit(ws.open_model(folder))
    assert re.search(message, audit.lead)
    complete = ws.audit(ws.open_model(FIXTURES / name), directions=0)
    np.testing.assert_allclose(audit.heads["qk_sigma1"], complete.heads["qk_sigma1"], rtol=1e-13)  # by another route
    assert ws.circuits(ws.open_model(folder)).caveats
    assert len(ws.compare(ws.open_model(folder), ws.open_model(FIXTURES / name)).heads)


@pytest.mark.parametrize("command", ["positions", "detok", "neighbours"])
def test_missing_positions_end_in_one_line(command: str, tmp_path: Path) -> None:
    from tests.support.commands import run

    folder = lacking("gpt2", tmp_path / "lacking", "wpe.weight")
    (folder / "tokenizer.json").write_text((FOLDER / "tokenizer.json").read_text())
    counts = tmp_path / "counts.npz"
    embedded_counts().save(counts)
    options = {"detok": ["--counts", str(counts)], "neighbours": ["!"], "positions": ["--unscaled"]}[command]
    out = [] if command == "neighbours" else ["--out", str(tmp_path / "out")]
    result = run(command, folder, *options, *out)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert command == "detok" or "'transformer.wpe.weight' is missing" in result.stderr


def test_sigma_at_positions_that_are_missing_is_refused(tmp_path: Path) -> None:
    embeddings = ws.open_model(lacking("gpt2", tmp_path / "lacking", "wpe.weight")).embeddings
    assert np.isfinite(embeddings.sigma(np.arange(3))).all()
    with pytest.raises(ws.CheckpointError, match=r"'transformer\.wpe\.weight' is missing"):
        embeddings.sigma(np.arange(3), np.arange(3))


@pytest.mark.check
def test_defaults_that_a_wrapper_may_leave_out_are_those_of_transformers() -> None:
    """Of the oldest wrappers' parts; all of them would take a minute."""
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.model.rows.make_defaults import inner, size_keys, sizes

    keys = size_keys()
    for kind in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma3_text",
        "phi3",
        "opt",
        "clip_vision_model",
        "vit",
    ):
        assert class_says(kind, "sizes") == sizes(CONFIG_MAPPING[kind], keys)
    assert class_says("llava", "parts") == {"vision_config": "clip_vision_model", "text_config": "llama"}
    assert dict(inner({"a": {"b": {"model_type": "c"}}})) == {"a.b": "c"}
