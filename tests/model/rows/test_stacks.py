"""Checkpoints of several attention models: which there are, what they are called, and an audit of each."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.cases import LLAMA, VIT
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES, fixture


def joined(folder: Path, config: dict, **parts: str) -> Path:
    """Fixtures' tensors in one checkpoint, each under a prefix (dots as double underscores), and a wrapper's config."""
    weights = {}
    for prefix, name in parts.items():
        stem, stored = fixture(name).model.prefix, load_file(FIXTURES / name / "model.safetensors")
        weights |= {prefix.replace("__", ".") + key.removeprefix(stem): w for key, w in stored.items()}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


def same(opened: ws.Model, name: str) -> bool:
    x = fixture(name).arrays["x1"]
    return np.array_equal(opened.layer(1).scores(x), fixture(name).model.layer(1).scores(x))


SEES = {"model_type": "mystery", "text_config": config_of("llama"), "vision_config": config_of("vit")}


def test_every_stack_is_listed_and_opens_by_its_name_its_part_or_its_prefix(tmp_path: Path) -> None:
    folder = joined(tmp_path / "sees", SEES, model__language_model__="llama", vision_tower__="vit")
    opened = ws.open_model(folder)
    assert opened.family.name == "llama" and list(opened.stacks) == ["text", "vision"]
    vision = opened.stacks["vision"]
    assert (vision.model_type, vision.part, vision.prefix) == ("vit", "vision_config", "vision_tower.")
    assert (vision.n_layers, vision.n_heads, vision.refusal) == (2, 2, "")
    for tower in ("vision", "vision_config", "vision_tower"):
        assert same(ws.open_model(folder, tower=tower), "vit")
    with pytest.raises(ws.CheckpointError, match="mystery has no tower 'sound'; it has text and vision"):
        ws.open_model(folder, tower="sound")


def test_stacks_of_one_kind_are_named_by_their_place(tmp_path: Path) -> None:
    config = {
        "model_type": "mystery",
        "speaker_config": {"text_config": config_of("llama_linear")},
        "thinker_config": {"text_config": config_of("llama")},
    }
    folder = joined(tmp_path / "two", config, thinker__model__="llama", speaker__model__="llama_linear")
    with pytest.raises(ws.CheckpointError, match=r"say `tower='speaker\.text'` or `tower='thinker\.text'`"):
        ws.open_model(folder)
    assert same(ws.open_model(folder, tower="thinker.text"), "llama")
    assert same(ws.open_model(folder, tower="speaker"), "llama_linear")


def test_one_part_of_a_config_may_describe_two_towers(tmp_path: Path) -> None:
    folder = joined(tmp_path / "two", SEES, model__language_model__="llama", image_tower__="vit", video_tower__="vit")
    assert list(ws.open_model(folder).stacks) == ["text", "vision", "video_tower"]
    assert same(ws.open_model(folder, tower="video_tower"), "vit")


def test_layers_may_stand_in_a_list_of_another_name(tmp_path: Path) -> None:
    folder = joined(tmp_path / "sees", SEES, language_model__="llama", vision_tower__="vit")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {key.replace("model.layers.", "model.blocks."): w for key, w in weights.items()}, folder / "model.safetensors"
    )
    assert same(ws.open_model(folder), "llama") and ws.open_model(folder).family.layer == "blocks.{i}."


def test_a_stack_that_no_row_reads_is_listed_and_refused_by_its_model_type(tmp_path: Path) -> None:
    config = SEES | {"vision_config": VIT | {"model_type": "newcomer_vision"}}
    folder = joined(tmp_path / "sees", config, language_model__="llama", vision_tower__="vit")
    opened = ws.open_model(folder)
    assert list(opened.stacks) == ["text", "vision"] and opened.stacks["vision"].family is None
    with pytest.raises(ws.CheckpointError, match=r"vision stack is not read: .*'newcomer_vision'; 'vision_tower\.enc"):
        ws.open_model(folder, tower="vision")
    lines = run("inspect", folder).stdout
    assert "text: 2 layers x 4 heads, llama" in lines and "vision: not read: no row reads it" in lines


def test_part_without_model_type_takes_its_wrappers_default(tmp_path: Path) -> None:
    nameless = {key: value for key, value in config_of("llama").items() if key != "model_type"}
    folder = joined(
        tmp_path / "llava", {"model_type": "llava", "text_config": nameless}, language_model__model__="llama"
    )
    assert same(ws.open_model(folder), "llama")


@pytest.mark.check
def test_vision_tower_of_a_known_wrapper_matches_transformers(tmp_path: Path) -> None:
    """Gemma 3's tower is SigLIP's; a layer by itself on any rows."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = LLAMA | {"head_dim": 8, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    vision = VIT | {"num_channels": 3, "num_attention_heads": 4, "model_type": "siglip_vision_model"}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    sees = ws.open_model(tmp_path, tower="vision")
    assert list(sees.stacks) == ["text", "vision"] and ws.open_model(tmp_path).family.name == "gemma3"
    theirs = model.model.vision_tower.encoder.layers[1]
    x = torch.randn(1, 5, VIT["hidden_size"])
    with torch.no_grad():
        output, attention = theirs.self_attn(theirs.layer_norm1(x))
    rows, layer = x[0].numpy(), sees.layer(1)
    scores = layer.scores(rows)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(weights / weights.sum(-1, keepdims=True), attention[0].numpy(), atol=1e-5)
    np.testing.assert_allclose(layer.output(attention[0].numpy(), rows), output[0].numpy(), atol=1e-5)


def test_audit_names_the_other_stacks(tmp_path: Path) -> None:
    folder = joined(tmp_path / "sees", SEES, language_model__="llama", vision_tower__="vit")
    note = "The file has other attention stacks, each a `tower` of its own: vision."
    result = audit_of(folder, tmp_path / "out")
    assert note in result.stdout and note in (tmp_path / "out" / "report.html").read_text()
    assert "other stacks" not in ws.audit(ws.open_model(FIXTURES / "llama"), layers=[0]).lead
    assert " vision: " in run("inspect", folder).stdout


def test_an_audit_of_all_stacks_has_a_folder_each_and_one_summary(tmp_path: Path) -> None:
    folder = joined(tmp_path / "sees", SEES, language_model__="llama", vision_tower__="vit")
    result = audit_of(folder, tmp_path / "out", "--tower", "all")
    assert result.exit_code == 0, result.output
    assert {path.parent.name for path in (tmp_path / "out").glob("*/heads.csv")} == {"text", "vision"}
    assert (tmp_path / "out" / "summary.csv").read_text().count("\n") == 3
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/report.html")}
    assert audit_of(folder, tmp_path / "out", "--tower", "all", "--resume").exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}
    (tmp_path / "list.txt").write_text(f"{folder}\n{FIXTURES / 'gpt2'}\n{tmp_path / 'nowhere'}\n")
    result = audit_of(tmp_path / "list.txt", tmp_path / "lists", "--tower", "all", "--json")
    assert result.exit_code == 2
    folders = [entry["folder"] for entry in json.loads(result.stdout)]
    assert folders == ["sees-text", "sees-vision", "gpt2-text", "nowhere"]
