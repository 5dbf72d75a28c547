"""Copies by the writers of quantised formats, against the models that they were made of, which a seed makes again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import write
from tests.support.plants.deeds import ALL_CONTAINERS
from tests.support.plants.families import random_llama

torch = pytest.importorskip("torch", reason="the originals are built by PyTorch")
transformers = pytest.importorskip("transformers", reason="the originals are built by transformers")

pytestmark = pytest.mark.check

FIXTURES = Path(__file__).parents[2] / "fixtures"
CELLS, COMPENSATED = "quantised", "quantised with compensated errors"
FROM_BF16 = "to BF16 and quantised"
COPIES = {  # how its packed tensors are proved
    "compressed_tensors/int4_tensor": {CELLS},
    "compressed_tensors/int4_channel_zeros": {CELLS},
    "compressed_tensors/int4_group_zeros": {FROM_BF16},  # in sums of bfloat16, which the scales are in too
    "compressed_tensors/int3_group_zeros": {CELLS},
    "compressed_tensors/int8_packed": {CELLS},
    "compressed_tensors/mixed": {CELLS},
    "llmcompressor/gptq_act_order": {COMPENSATED},
    "llmcompressor/gptq_channel": {COMPENSATED},
    "modelopt/fp8": {CELLS, FROM_BF16},
    "modelopt/nvfp4_file_only": {CELLS},
    "auto_round/as_awq": {CELLS, FROM_BF16},
    "auto_round/as_gptq": {CELLS, FROM_BF16},
    "auto_round/awq": {CELLS, FROM_BF16},
    "auto_round/gptq_zeros": {CELLS, FROM_BF16},
    "auto_round/symmetric": {CELLS, FROM_BF16},
    "hqq/rows": {CELLS},
    "hqq/columns": {CELLS, FROM_BF16},
}


def damaged(copy: Path) -> str:
    """A module with at least four bits, or three: with two, a row times 1.5 is within what a search may do."""
    return "model.layers.0.self_attn.o_proj" if copy.parent.name == "hqq" else "model.layers.0.mlp.up_proj"


def original(copy: Path, folder: Path, fault: str = "") -> Path:
    """The model that a fixture was written of, as its make.py builds it; with a fault in one of its matrices."""
    config = json.loads((copy / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "dtype")}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**kept))
    if copy.parent.name in ("auto_round", "hqq"):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        weight = model.get_submodule(damaged(copy)).weight
        if fault == "row scaled":
            weight[3] *= 1.5
        if fault == "rows exchanged":
            weight[[1, 2]] = weight[[2, 1]]
        if fault == "sign":
            weight[:, 5] *= -1
        if fault == "noise":
            weight += 0.3 * weight.std() * torch.randn_like(weight).clamp(-1, 1)
        if fault == "outlier":
            weight[4, 7] = 40 * weight.abs().max()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_quantised(name: str, tmp_path: Path) -> None:
    same = ws.same(original(FIXTURES / name, tmp_path / "a"), FIXTURES / name)
    assert same.verdict == "quantised", same.lead
    packed = [each for each in same.tensors if each.verdict == "quantised"]
    assert len(packed) >= 3
    assert {each.deed.removeprefix("B ").rpartition(" (")[0] for each in packed} <= COPIES[name]
    inside = [float(each.detail.partition("%")[0]) for each in packed if "%" in each.detail]
    assert len(inside) == sum(not each.detail.startswith("every value in") for each in packed)
    assert all(50 < share <= 100 for share in inside)


@pytest.mark.parametrize("fault", ["row scaled", "rows exchanged", "sign", "outlier"])
@pytest.mark.parametrize("name", COPIES)
def test_a_fault_is_not_quantisation(name: str, fault: str, tmp_path: Path) -> None:
    same = ws.same(original(FIXTURES / name, tmp_path / "a", fault), FIXTURES / name)
    assert same.verdict == "different", same.lead
    assert [each.name for each in same.differing] == [f"{damaged(FIXTURES / name)}.weight"]


@pytest.mark.parametrize(
    ("values", "name", "verdict"),
    [
        ([0.5], "self_attn.q_proj.input_scale", "quantised"),
        ([0.0], "self_attn.q_proj.input_scale", "different"),
        ([np.inf], "self_attn.q_proj.input_scale", "different"),
        ([0.5], "self_attn.q_proj.scale", "different"),  # no key of a packing
        ([0.5], "input_layernorm.input_scale", "different"),  # of a weight that is not packed
    ],
)
def test_a_scale_of_activations_is_no_difference(values: list[float], name: str, verdict: str, tmp_path: Path) -> None:
    copy, added = FIXTURES / "compressed_tensors/float8_alone", f"model.layers.0.{name}"
    shutil.copytree(copy, tmp_path / "b")
    parts = [tmp_path / "b" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (tmp_path / "b" / "model.safetensors").rename(parts[0])
    write(parts[1], {added: np.float32(values)})
    index = {each: file.name for file in parts for each in _names(file)}
    (tmp_path / "b" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    same = ws.same(original(copy, tmp_path / "a"), tmp_path / "b")
    assert same.verdict == verdict, same.lead
    noted = [each for each in same.not_compared if each.startswith(added)]
    assert bool(noted) == (verdict == "quantised")


def _names(file: Path) -> list[str]:
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def test_a_few_tensors_are_not_compensated(tmp_path: Path) -> None:
    """Noise within GPTQ's bound, in one matrix of a file whose other matrices are rounded to the nearest."""
    copy = FIXTURES / "compressed_tensors/int4_tensor"
    a = original(copy, tmp_path / "a", "noise")
    same = ws.same(a, copy)
    assert same.verdict == "different", same.lead
    assert [each.name for each in same.differing] == [f"{damaged(copy)}.weight"]


def test_one_scale_that_differs_among_unpacked_values_is_no_quantisation(tmp_path):
    """A matrix of four bits, times 1.02, where the others have the very values of the copy."""
    gguf = pytest.importorskip("gguf")
    llama, number = random_llama(), gguf.GGMLQuantizationType.Q4_0
    name = "model.layers.1.mlp.up_proj.weight"
    for each, w in llama.tensors.items():
        if w.ndim == 2 and ".layers." in each:
            llama.tensors[each] = gguf.quants.dequantize(gguf.quants.quantize(w, number), number)
    copy = tmp_path / "copy"
    ALL_CONTAINERS["GGUF, Q4_0"].write(llama, copy)
    llama.tensors[name] = llama.tensors[name] * np.float32(1.02)
    a = tmp_path / "a"
    a.mkdir()
    write(a / "model.safetensors", dict(llama.tensors))
    (a / "config.json").write_text(json.dumps(llama.config))
    for pair in ((a, copy / "model.gguf"), (copy / "model.gguf", a)):
        same = ws.same(*pair)
        assert same.verdict == "different" and [each.layer for each in same.differing] == [1]
