"""Adapters of PEFT's DoRA and LoKr, LyCORIS, diffusers and kohya against what each tool merges; the rest is refused.

../golden/make_other_adapters.py wrote them with the tools themselves.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import is_one_line, run
from tests.support.figures import undrawn
from tests.support.two_layers import TWO_LAYERS
from weightscope.checkpoint.adapters.diffusion import adapter_file, is_adapter
from weightscope.pairs.changes.counterparts import counterparts
from weightscope.pairs.learned.changed_matrices import intruders_of

GOLDEN = Path(__file__).parents[1] / "golden"
OTHERS = GOLDEN / "other_adapters"
NAMES = sorted(path.name for path in OTHERS.iterdir() if (path / "merged.safetensors").exists())
WEIGHTS = "adapter.safetensors"


def base_of(name: str) -> Path:
    if name in ("diffusers", "kohya"):
        return OTHERS / "clip-base"
    return GOLDEN / "adapters" / ("gpt2" if "gpt2" in name else "llama") / "base"


def source_of(name: str) -> Path:
    file = OTHERS / name / WEIGHTS
    return file if file.exists() else OTHERS / name


def opened(name: str) -> ws.Model:
    return ws.open_model(source_of(name), base=base_of(name))


def merged(name: str) -> dict[str, np.ndarray]:
    return load_file(base_of(name) / "model.safetensors") | load_file(OTHERS / name / "merged.safetensors")


def test_every_tool_is_here() -> None:
    assert {name.split("-")[0] for name in NAMES} == {"peft", "lycoris", "diffusers", "kohya"} and len(NAMES) == 11


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_as_its_tool_merges_it(name: str) -> None:
    checkpoint, expected = opened(name).checkpoint, merged(name)
    assert {*checkpoint} == {*expected}
    for key, w in expected.items():
        tensor = checkpoint[key]
        np.testing.assert_allclose(tensor.read(), w, rtol=0, atol=2e-6)
        if w.ndim == 2:
            np.testing.assert_array_equal(tensor.rows(1, 3), tensor.read()[1:3])
            np.testing.assert_array_equal(np.concatenate([block for _, block in tensor.blocks(5)]), tensor.read())


@pytest.mark.parametrize("name", NAMES)
def test_the_change_alone_is_the_difference_in_float64(name: str) -> None:
    for tensor in opened(name).checkpoint.values():
        if hasattr(tensor, "delta"):
            base = load_file(base_of(name) / "model.safetensors")[tensor.name].astype(np.float64)
            np.testing.assert_allclose(base + tensor.delta(), tensor.read(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_trained_is_said_by_the_adapter(name: str) -> None:
    learned = ws.learned(base_of(name), source_of(name))
    kind = {"lokr": "LoKr", "dora": "LoRA with DoRA's lengths"}.get((name + "-").split("-")[1], "LoRA")
    assert learned.tunes[0].training.evidence.startswith(f"A {kind} of rank"), learned.lead
    assert len(learned.tunes[0].updates) == 6


def test_other_models_of_a_file_are_said() -> None:
    assert "Its file also changes unet, which the base is not." in opened("diffusers").checkpoint.note


@pytest.mark.parametrize("name", ["diffusers", "kohya"])
def test_names_with_text_model_in_front_are_those_without(name: str, tmp_path: Path) -> None:
    """transformers 4 named the modules of CLIP's text encoder text_model.encoder..., as most published files do."""
    path = adapter_file(source_of(name))
    assert path is not None
    plain = load_file(path)
    longer = {key.replace("text_encoder.", "text_encoder.text_model.").replace("lora_te1_", "lora_te_text_model_"): w
              for key, w in plain.items()}  # fmt: skip
    with_header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    save_file(longer, tmp_path / WEIGHTS, metadata=with_header.get("__metadata__"))
    model = ws.open_model(tmp_path / WEIGHTS, base=base_of(name))
    for key, w in merged(name).items():
        np.testing.assert_allclose(model.checkpoint[key].read(), w, rtol=0, atol=2e-6)


REFUSED = {
    "LoHa": ({"hada_w1_a": (4, 2)}, "is not a supported part of an adapter"),
    "a convolution": ({"lora_down.weight": (3, 16, 3, 3)}, "a LoRA of a convolution"),
    "Tucker": ({"lora_mid.weight": (3, 3)}, "is not a supported part"),
    "OFT": ({"oft_blocks": (3, 3)}, "is not a supported part"),
    "another width": ({"lora_down.weight": (3, 17)}, "is for a weight of shape"),
    "another rank": ({"lora_down.weight": (4, 16)}, "its counterpart"),
    "no alpha": ({"alpha": (2,)}, "is no alpha"),
    "other lengths": ({"dora_scale": (5, 1)}, "has shape \\(5, 1\\)"),
}


@pytest.mark.parametrize(("tensors", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_read_is_refused_by_name(tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    weights = load_file(OTHERS / "lycoris-dora" / WEIGHTS)
    module = "lycoris_model_layers_0_self_attn_q_proj."
    weights |= {module + part: np.ones(shape, np.float32) for part, shape in tensors.items()}
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ws.CheckpointError, match=message) as caught:
        ws.open_model(tmp_path / WEIGHTS, base=base_of("lycoris-dora"))
    assert "lycoris_model_layers_0_self_attn_q_proj" in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_refused() -> None:
    with pytest.raises(ws.CheckpointError, match="'model_layers_0_self_attn_k_proj' is not in the base"):
        ws.open_model(source_of("lycoris-locon"), base=GOLDEN / "adapters" / "gpt2" / "base")


def test_a_lengths_vector_that_settings_do_not_know_is_refused(tmp_path: Path) -> None:
    shutil.copytree(OTHERS / "peft-dora", tmp_path / "a")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text()) | {"use_dora": False}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ws.CheckpointError, match="says nothing of DoRA"):
        ws.open_model(tmp_path / "a", base=base_of("peft-dora"))


def test_checkpoints_are_no_adapters() -> None:
    assert not is_adapter(TWO_LAYERS) and not is_adapter(base_of("kohya")) and not is_adapter(OTHERS / "nothing")
    assert all(is_adapter(source_of(name)) for name in NAMES)


def test_commands_take_them(tmp_path: Path) -> None:
    base = base_of("lycoris-lokr")
    sources = [source_of("lycoris-lokr"), source_of("peft-dora")]
    with undrawn():
        for command in (["learned", base, *sources], ["compare", base, *sources]):
            result = run(*command, "--out", tmp_path / command[0])
            assert result.exit_code == 0, result.output
    assert run("inspect", sources[0], "--base", base).exit_code == 0
    assert is_one_line(run("inspect", sources[0]))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_intruder_cosines_are_those_that_pefts_own_code_compares(name: str) -> None:
    """intruders.json: what `reduce_intruder_dimension` of PEFT 0.21.2 holds against its threshold."""
    expected = json.loads((OTHERS / "intruders.json").read_text())[name]
    folder = GOLDEN / "adapters" / name
    base, tuned = ws.open_model(folder / "base"), ws.open_model(folder / "adapter", base=folder / "base")
    stored = {entry.a.name: (entry.a.tensor, entry.b.tensor) for entry in counterparts(base, tuned)
              if entry.a and entry.b}  # fmt: skip
    for module, cosines in expected.items():
        a, b = stored[f"{module}.weight"]
        intruders = intruders_of(a.read(), a.read().astype(np.float64) + b.delta())
        np.testing.assert_allclose(intruders.cosines, cosines, rtol=0, atol=1e-6)
        assert intruders.count == sum(cosine < 0.5 for cosine in cosines)
    assert len(expected) == 8 and any(cosine < 0.5 for cosines in expected.values() for cosine in cosines)
