"""Labels of wsid1: no two tensors share one, and names cannot pose as lines."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.pairs.identity import by_hand
from tests.pairs.identity.raw_file import Raw, raw, write
from tests.support.tiny_models import FIXTURES
from weightscope.core.errors import CheckpointError
from weightscope.pairs.identity.identity import identity

GOLDEN = Path("tests/model/rows/golden")
LLAMA = Path("tests/fixtures/identity/llama")
QUARTERS = np.full(32, 0.25, np.float32)
ZEROS = np.zeros(32, np.float32)


def copy(folder: Path, source: Path, change) -> Path:
    """A copy of a folder whose tensors went through a function."""
    shutil.copytree(source, folder)
    tensors = {name: raw(w) for name, w in by_hand.tensors_in(folder / "model.safetensors")}
    write(folder / "model.safetensors", change(tensors))
    return folder


def test_order_in_the_file_does_not_matter_where_tensors_share_a_role(tmp_path: Path) -> None:
    def in_reverse(tensors: dict[str, Raw]) -> dict[str, Raw]:
        return dict(reversed(tensors.items()))

    here = identity(GOLDEN / "bart")
    assert any(label.startswith("layer 0 norm.after_attention ") for label in here.tensors)
    assert "layer 0 norm.after_attention" not in here.tensors
    assert identity(copy(tmp_path / "bart", GOLDEN / "bart", in_reverse)).wsid == here.wsid


def test_no_tensor_stands_for_lines_of_others(tmp_path: Path) -> None:
    llama = identity(LLAMA)

    def without_k(tensors: dict[str, Raw]) -> dict[str, Raw]:
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        o = tensors.pop("model.layers.1.self_attn.o_proj.weight")
        norms = [f"layer 1 {norm} {llama.tensors[f'layer 1 {norm}'].line}" for norm in ("norm.before", "norm.mlp")]
        for norm in ("input", "post_attention"):
            del tensors[f"model.layers.1.{norm}_layernorm.weight"]
        lines = [f"layer 1 k {llama.tensors['layer 1 k'].line}", *norms, "layer 1 o"]
        return tensors | {"\n".join(lines): o}

    folder = copy(tmp_path / "short", LLAMA, without_k)
    assert by_hand.wsid_of(folder) == llama.wsid, "the lines alone do not show it"
    with pytest.raises(CheckpointError, match="a space or a control character"):
        identity(folder)


@pytest.mark.parametrize("name", ["layer 0 q", "a\nb", "a\tb", "a\u202eb"])
def test_name_without_a_role_that_reads_like_a_label_is_refused(name: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "named", LLAMA, lambda tensors: tensors | {name: raw(QUARTERS)})
    with pytest.raises(CheckpointError, match="a space or a control character"):
        identity(folder)


def test_second_tensor_under_one_label_is_refused(tmp_path: Path) -> None:
    biases = {"foo.bias": QUARTERS, "model.foo.bias": 2 * QUARTERS}

    def with_both(tensors: dict[str, Raw]) -> dict[str, Raw]:
        return tensors | {name: raw(w) for name, w in biases.items()}

    with pytest.raises(CheckpointError, match=r"several tensors for foo\.bias foo\.bias"):
        identity(copy(tmp_path / "both", LLAMA, with_both))


def test_causal_masks_are_no_tensors_of_gpt2(tmp_path: Path) -> None:
    gpt2 = FIXTURES / "gpt2"
    mask = np.tril(np.ones((1, 1, 8, 8), np.float32))
    name = next(name for name, _ in by_hand.tensors_in(gpt2 / "model.safetensors") if "attn.c_attn.weight" in name)

    def with_mask(tensors: dict[str, Raw]) -> dict[str, Raw]:
        return tensors | {name.replace("c_attn.weight", "bias"): raw(mask)}

    assert identity(copy(tmp_path / "masked", gpt2, with_mask)).wsid == identity(gpt2).wsid


@pytest.mark.parametrize("bias", [ZEROS, -ZEROS])
def test_bias_of_zeros_is_as_none(bias: np.ndarray, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.bias"
    folder = copy(tmp_path / "bias", LLAMA, lambda tensors: tensors | {name: raw(bias)})
    assert identity(folder).wsid == by_hand.wsid_of(folder) == identity(LLAMA).wsid
