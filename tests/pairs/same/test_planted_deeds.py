"""Deeds planted in tiny checkpoints: `same` says "different" where the eager model's logits are, and names the deed."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.plants.deeds import ALL_CONTAINERS, cases, rows_of, summary
from tests.support.plants.families import FAMILIES, random_llama

SOME = (
    "nothing", "q and k to neighbours", "one norm plus 1", "square matrix transposed", "heads of W_O turned",
    "scales inverted", "truncated write", "NaN", "low-rank update", "rope base",
)  # fmt: skip


@pytest.mark.parametrize("deed", SOME)
def test_deed_in_a_llama_is_named(deed: str, tmp_path: Path) -> None:
    """Random weights under a Llama's names: the right tensors, and words for each."""
    case = next(cases("llama", lambda *_: False, [deed], random_llama()))
    for name, planted in (("a", random_llama()), ("b", case.planted)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(planted.config))
        save_file(planted.tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    result = ws.same(tmp_path / "a", tmp_path / "b")
    assert result.verdict == ("same bytes" if deed == "nothing" else "different")
    assert {each.name_a for each in result.differing} == {*case.words}
    for each in result.differing:
        assert any(word in each.deed for word in case.words[each.name_a]), each
    assert {key.config for key in result.config} == {f"{key}.rope_theta" for key in case.keys}


@pytest.mark.census
@pytest.mark.parametrize("container", ALL_CONTAINERS)
def test_all_deeds(container: str) -> None:
    """Every deed, in every family: never "same" where logits differ, and named in 95 of 100."""
    pytest.importorskip("transformers", reason="tiny models are made by transformers; install the extra `runner`")
    if container.startswith("GGUF"):
        pytest.importorskip("gguf", reason="GGUF files are written by the package gguf")
    counts = summary([*rows_of([*FAMILIES], [container])])
    assert counts["same function and logits differ"] == 0
    assert counts["missed, by more than the container's rounding"] == 0
    assert counts["called different"] >= 0.99 * counts["logits differ"]
    assert counts["tensors right"] >= 0.98 * counts["logits differ"]
    assert counts["deed named"] >= 0.95 * counts["logits differ"]
