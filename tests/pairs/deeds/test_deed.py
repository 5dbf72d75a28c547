"""The list of deeds: each has words, and those that every command names are found once."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.small_llama import write_small_llama
from weightscope.pairs.deeds.deed import WORDS, Deed, What, called, sentence
from weightscope.pairs.same import same  # noqa: F401 - all rooms that know deeds are loaded

MATRIX = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("what", What)
def test_every_deed_has_words(what: What) -> None:
    assert what in WORDS
    assert called(what)
    text = sentence(Deed(what, "way", place=3, columns=True))
    assert "{" not in text
    assert bool(text) == (what != What.IDENTICAL)


def test_a_deed_of_one_matrix_is_named_by_every_command(tmp_path: Path) -> None:
    a, b = (write_small_llama(tmp_path / name, 1) for name in "ab")
    weights = load_file(b / "model.safetensors")
    assert weights[MATRIX].shape[0] == weights[MATRIX].shape[1]
    weights[MATRIX] = np.ascontiguousarray(weights[MATRIX].T)
    save_file(weights, b / "model.safetensors", metadata={"format": "pt"})
    assert "transposed" in ws.same(a, b).lead
    assert "Transposed: 1 of" in ws.compare(a, b).lead
    assert "transposed" in [kind.kind for kind in ws.lineage(b, a).kinds]
    assert "'transposed' in 1 of 1" in ws.learned(a, b).lead
