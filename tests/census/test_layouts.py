"""Where llama.cpp or vLLM reads a type otherwise, its row says so; the comparison itself reads small texts here."""

from pathlib import Path

import pytest

from tests.census.layout_record import Line, disagreements, written
from tests.census.layouts import LlamaCpp, Vllm
from tests.census.record import read
from weightscope.model.rows.table import FAMILIES, title

ROWS = {title(row): row for row in FAMILIES}


@pytest.mark.parametrize("line", [line for line in written() if disagreements(line)], ids=lambda line: line.type)
def test_a_row_that_others_read_otherwise_has_a_caveat(line: Line) -> None:
    notes = " ".join(ROWS[line.row].notes)
    assert "llama.cpp" in notes or "vLLM" in notes


def test_the_comparison_is_of_rows_that_are_there() -> None:
    lines = written()
    rows = {(row.type, row.row) for row in read()}
    assert len(lines) > 100 and all((line.type, line.row) in rows for line in lines)
    assert all((line.agree == "no") == bool(disagreements(line)) for line in lines)
    assert all(line.agree != "no" or line.type == "hy_v4" for line in lines)
    layouts = {line.type: line.rotary for line in lines}
    assert (layouts["llama"], layouts["cohere"], layouts["gpt_neox"]) == ("halves", "neighbours", "halves")


CONVERTER = """
class ModelBase: ...
@ModelBase.register("FirstForCausalLM")
class First(ModelBase):
    model_arch = gguf.MODEL_ARCH.FIRST
    undo_permute = True
    def norm_shift(self, name): return 1.0 if name.endswith("norm.weight") else 0.0
    def modify_tensors(self, data_torch, name, bid):
        shift = self.norm_shift(name)
        data_torch = data_torch + shift
        if self.undo_permute: data_torch = First.permute(data_torch, 2, 2)
@ModelBase.register("SecondForCausalLM")
class Second(First):
    model_arch = gguf.MODEL_ARCH.SECOND
    undo_permute = False
    def norm_shift(self, name): return 0.0
@ModelBase.register("ThirdForCausalLM")
class Third(First):
    model_arch = gguf.MODEL_ARCH.THIRD
    def modify_tensors(self, data_torch, name, bid): pass
"""
ROPE_TYPES = """
llama_rope_type llama_model_rope_type(const llama_model * model) {
    switch (model->arch) {
        case LLM_ARCH_FIRST:
        case LLM_ARCH_SECOND:
            return LLAMA_ROPE_TYPE_NORM;
        case LLM_ARCH_THIRD: return LLAMA_ROPE_TYPE_NEOX;
    }
}
"""


def test_what_a_converter_does_is_read_from_its_text(tmp_path: Path) -> None:
    """Rows that are put in ggml's order were halves; those that are not were neighbours already."""
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "first.py").write_text(CONVERTER)
    (tmp_path / "src" / "models").mkdir(parents=True)
    (tmp_path / "src" / "llama-model.cpp").write_text(ROPE_TYPES)
    (tmp_path / "src" / "models" / "first.cpp").write_text("const float kq_scale = 1.0f/sqrtf(float(n_embd_head));")
    project = LlamaCpp(tmp_path)
    names = [project.registered[f"{name}ForCausalLM"] for name in ("First", "Second", "Third")]
    assert [project.rotary(name) for name in names] == ["halves", "neighbours", "halves"]
    assert [project.norm_adds(name) for name in names] == ["1", "0", "0"]
    assert [project.scale(name) for name in names] == ["1/sqrt(head_dim)", "", ""]


def test_what_a_module_of_vllm_does_is_read_from_its_text(tmp_path: Path) -> None:
    folder = tmp_path / "model_executor" / "models"
    folder.mkdir(parents=True)
    names = {"A": "get_rope(8)", "B": "get_rope(8, is_neox_style=False)", "C": "get_rope(8, is_neox_style=style)"}
    registry = "".join(f'    "{name}ForCausalLM": ("{name.lower()}", "x"),\n' for name in names)
    (folder / "registry.py").write_text(registry)
    for name, call in names.items():
        norm = "GemmaRMSNorm as Norm" if name == "A" else "RMSNorm as Norm"
        text = f"from layers import {norm}\nstyle = False\nself.input_layernorm = Norm(8)\nr = {call}\n"
        (folder / f"{name.lower()}.py").write_text(text)
    project = Vllm(tmp_path)
    assert [project.rotary(f"{name}ForCausalLM") for name in names] == ["halves", "neighbours", "neighbours"]
    assert [project.norm_adds(f"{name}ForCausalLM") for name in names] == ["1", "0", "0"]
    assert project.rotary("DForCausalLM") == ""
