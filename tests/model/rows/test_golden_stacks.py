"""Layers that take a memory, added positions or distances besides their stream, against golden files of eager models.

make_golden.py makes the files: the three stacks of encoder-decoders, cross-attention that a decoder was given, DETR and
its line, a fusion of image and text, positions of speech.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.tiny_models import softmax
from weightscope.model.layers.layer import Layer

GOLDEN = Path(__file__).parent / "golden"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir())
TOWERS = {"t5": {"encoder", "decoder", "cross"}, "bart": {"encoder", "decoder", "cross"}}


def layers_of(name: str) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """The arrays of one golden folder by tower and layer."""
    layers: dict[tuple[str, int], dict[str, np.ndarray]] = defaultdict(dict)
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        for key, array in arrays.items():
            tower, index, what = key.split(".")
            layers[tower, int(index)][what] = array
    return layers


def layer_of(name: str, tower: str, index: int) -> Layer:
    return ws.open_model(GOLDEN / name, tower=tower or None).layer(index)


def split(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    more = {key: array for key, array in arrays.items() if key in {"memory", "added", "added_to_memory"}}
    return arrays["x"], arrays["attention"], arrays["output"], more


@pytest.mark.parametrize("name", FOLDERS)
def test_attention_and_output_are_the_eager_models(name: str) -> None:
    layers = layers_of(name)
    assert layers and TOWERS.get(name, set()) <= {tower for tower, _ in layers}
    for (tower, index), arrays in layers.items():
        layer = layer_of(name, tower, index)
        x, attention, output, more = split(arrays)
        scores = layer.scores(x, **more)
        ours = softmax(np.where(attention > 0, scores, -np.inf), layer.sinks)
        np.testing.assert_allclose(ours, attention, atol=1e-5, err_msg=f"{tower} {index}")
        memory = {"memory": more["memory"]} if "memory" in more else {}
        bound = 1e-5 * max(1.0, np.abs(output).max())
        np.testing.assert_allclose(layer.output(attention, x, **memory), output, atol=bound, err_msg=f"{tower} {index}")


@pytest.mark.parametrize("name", ["detr", "table_transformer", "conditional_detr"])
def test_scores_need_the_added_positions(name: str) -> None:
    for (tower, index), arrays in layers_of(name).items():
        layer = layer_of(name, tower, index)
        x, _, _, more = split(arrays)
        assert all(np.ptp(array) > 0.1 for array in more.values())
        assert any("what positions add to scores" in caveat for caveat in layer.caveats)
        memory = {"memory": more["memory"]} if "memory" in more else {}
        with pytest.raises(ws.CheckpointError, match=r"adds positions .* say which, `added"):
            layer.scores(x, **memory)


@pytest.mark.parametrize("name", ["vits", "wavlm"])
def test_distance_terms_change_scores_and_have_a_caveat(name: str) -> None:
    (arrays,) = layers_of(name).values()
    layer, (x, attention, output, _) = layer_of(name, "", 0), split(arrays)
    caveats = " ".join(layer.caveats)
    if name == "wavlm":
        ungated = replace(layer, additive_gate=None)
        assert np.abs(softmax(ungated.scores(x), None) - attention).max() > 1e-2
        assert "a factor of the query" in caveats
    else:
        plain = replace(layer, relative_values=None)
        assert np.abs(plain.output(attention, x) - output).max() > 1e-2 * np.abs(output).max()
        assert "values of distances" in caveats and layer.modulated


def test_both_ways_of_a_fusion_share_their_scores() -> None:
    arrays = layers_of("grounding_dino")["image_to_text", 0]
    there, back = (layer_of("grounding_dino", tower, 0) for tower in ("image_to_text", "text_to_image"))
    image, text = arrays["x"], arrays["memory"]
    forth = there.scores(image, memory=text)
    difference = forth - back.scores(text, memory=image).transpose(0, 2, 1)
    assert np.abs(difference - difference.mean(axis=(1, 2), keepdims=True)).max() < 1e-4 * np.abs(forth).max()


def test_a_cross_heads_matrix_is_its_projections_multiplied_out() -> None:
    model = ws.open_model(GOLDEN / "t5", tower="cross")
    stem = "decoder.block.1.layer.1."
    names = ("EncDecAttention.q", "EncDecAttention.k", "EncDecAttention.v", "EncDecAttention.o", "layer_norm")
    q, k, v, o, gamma = (model.checkpoint[f"{stem}{name}.weight"].read().astype(np.float64) for name in names)
    r = model.config.head_dim
    for head in model.layer(1).heads:
        rows = slice(head.index * r, (head.index + 1) * r)
        np.testing.assert_allclose(head.qk.dense(), gamma[:, None] * q[rows].T @ k[rows], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(head.vo.dense(), v[rows].T @ o[:, rows].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tower", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("name", ["t5", "conditional_detr"])
def test_audit_runs_on_each_stack(name: str, tower: str, tmp_path: Path) -> None:
    result = audit_of(GOLDEN / name, tmp_path, "--tower", tower)
    assert result.exit_code == 0, result.output
    assert ("cross-attention's maps lead from one space to another" in result.output) == (tower == "cross")
    assert ("what positions add to scores" in result.output) == (name != "t5")


def test_the_decoder_opens_where_no_stack_is_named() -> None:
    for name in ("t5", "bart", "whisper"):
        model = ws.open_model(GOLDEN / name)
        assert model.family.tower == "decoder" and {"encoder", "decoder", "cross"} <= {*model.stacks}
    assert ws.open_model(GOLDEN / "gpt2_cross").family.memory is None


def test_heads_of_cross_attention_are_not_wired() -> None:
    with pytest.raises(ws.CheckpointError, match="is cross-attention: its heads read what an encoder made"):
        ws.circuits(ws.open_model(GOLDEN / "t5", tower="cross"))


@pytest.mark.check
def test_golden_files_are_what_their_script_makes(tmp_path: Path, subtests: pytest.Subtests) -> None:
    pytest.importorskip("torch", reason="the files are made by torch, which is not installed")
    transformers = pytest.importorskip("transformers", reason="the files are made by transformers")
    if not transformers.__version__.startswith("5."):
        pytest.skip(f"the files are made by transformers 5, not {transformers.__version__}")
    from safetensors.numpy import load_file

    from tests.model.rows.make_golden import NAMES, make

    assert sorted(NAMES) == FOLDERS
    for name in FOLDERS:
        with subtests.test(name=name):
            make(name, tmp_path / name)
            made, kept = (load_file(folder / name / "model.safetensors") for folder in (tmp_path, GOLDEN))
            assert made.keys() == kept.keys()
            for key, tensor in made.items():
                np.testing.assert_array_equal(tensor, kept[key], err_msg=key)
            with np.load(tmp_path / name / "expected.npz") as made, np.load(GOLDEN / name / "expected.npz") as kept:
                assert set(made) == set(kept)
                for key, array in kept.items():
                    scale = float(np.abs(array).max())
                    np.testing.assert_allclose(made[key], array, rtol=1e-4, atol=1e-5 * max(1.0, scale), err_msg=key)
