"""A GGUF file of an architecture that no row reads is compared with nothing but its like."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

import weightscope as ws
from tests.support.tiny_models import FIXTURES

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_file(path: Path, architecture: str, factor: float = 1.0) -> Path:
    """The tiny Llama under ggml's names; no row reads the architecture."""
    gguf = pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    for name, array in load_file(FIXTURES / "llama" / "model.safetensors").items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, array * factor if "attn_q" in name else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("swapped", [False, True])
def test_unknown_architecture_is_undecided_not_different(swapped: bool, tmp_path: Path) -> None:
    """Names alone convict nobody: one sentence says why, and no tensor is called dropped or added."""
    pair = [FIXTURES / "llama", gguf_file(tmp_path / "b.gguf", "llama-of-tomorrow")]
    result = ws.same(*(reversed(pair) if swapped else pair))
    assert result.verdict == "undecided" and {each.verdict for each in result.tensors} == {"undecided"}
    assert not result.config
    assert "the meaning of b.gguf's tensors is not known (is of architecture 'llama-of-tomorrow')" in result.lead
    assert result.lead.count(".") < 5


def test_two_files_of_an_unknown_architecture_are_compared_by_name(tmp_path: Path) -> None:
    """They are one model, or one tensor of theirs differs; of two architectures nothing is known."""
    first, twice = gguf_file(tmp_path / "a.gguf", "unknown"), gguf_file(tmp_path / "b.gguf", "unknown", 2.0)
    third = gguf_file(tmp_path / "c.gguf", "unknown too")
    again = gguf_file(tmp_path / "d.gguf", "unknown")
    assert ws.same(first, again).verdict.startswith("same")
    changed = ws.same(first, twice)
    assert changed.verdict == "different" and {each.name.split(".")[2] for each in changed.differing} == {"attn_q"}
    assert ws.same(first, third).verdict == "undecided"
