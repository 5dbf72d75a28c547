"""Meta's files of a model in parallel parts, joined as transformers' own script joins them.

tests/fixtures/meta has parts and what convert_llama_weights_to_hf.py of transformers 4.46.3 made of them; its make.py
wrote both.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import encode
from tests.support.hub_server import Hub
from weightscope.checkpoint.consolidated import JoinedTensor
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.errors import CheckpointError
from weightscope.model.rows.original import config_of_params, spelling_of
from weightscope.pairs.same import SAME_VALUES

META = Path(__file__).parents[1] / "fixtures" / "meta"
SECOND = "consolidated.01.safetensors"
VERSIONS = ["llama2", "llama3"]
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def parts_in(folder: Path, version: str = "llama2") -> Path:
    """A copy of the parts alone."""
    return Path(shutil.copytree(META / version, folder / "parts", ignore=shutil.ignore_patterns("converted")))


@pytest.mark.parametrize("version", VERSIONS)
def test_joined_parts_are_what_transformers_makes_of_them(version: str, tmp_path: Path) -> None:
    converted = Path(shutil.copytree(META / version / "converted", tmp_path / "converted"))
    config = json.loads((converted / "config.json").read_text())
    del config["bos_token_id"], config["eos_token_id"]  # the script's; params.json has none
    (converted / "config.json").write_text(json.dumps(config))
    theirs, ours = ws.open_model(converted), ws.open_model(parts_in(tmp_path, version))
    labels = {theirs.tensors.label(tensor) for tensor in theirs.tensors}
    assert labels == {ours.tensors.label(tensor) for tensor in ours.tensors}
    for label in labels:
        np.testing.assert_array_equal(theirs.tensors[label].array(), ours.tensors[label].array(), err_msg=label)
    audits = [ws.audit(model).heads for model in (theirs, ours)]
    for column in audits[0].names:
        values = [heads[column].astype(str) if heads[column].dtype == object else heads[column] for heads in audits]
        np.testing.assert_array_equal(*values, err_msg=column)


@pytest.mark.parametrize("version", VERSIONS)
def test_same_accepts_the_conversion(version: str, tmp_path: Path) -> None:
    same = ws.same(parts_in(tmp_path, version), META / version / "converted")
    assert same.verdict == SAME_VALUES, same.lead


def test_scaled_rotation_is_the_one_of_llama_3(tmp_path: Path) -> None:
    config = ws.open_model(parts_in(tmp_path, "llama3")).checkpoint.config
    written = json.loads((META / "llama3" / "converted" / "config.json").read_text())["rope_parameters"]
    assert {**config["rope_scaling"], "rope_theta": config["rope_theta"]} == written


@pytest.mark.parametrize(("sizes", "factor"), [((2048, 16), 32.0), ((3072, 28), 32.0), ((4096, 32), 8.0)])
def test_factor_of_llama_3_2_is_32(sizes: tuple[int, int], factor: float, tmp_path: Path) -> None:
    """By its published sizes."""
    folder = parts_in(tmp_path, "llama3")
    params = json.loads((folder / "params.json").read_text()) | {"dim": sizes[0], "n_layers": sizes[1]}
    (folder / "params.json").write_text(json.dumps(params))
    checkpoint = open_checkpoint(folder)
    del checkpoint._tensors["layers.0.feed_forward.w1.weight"]  # of other widths
    assert config_of_params(checkpoint, spelling_of("meta"))["rope_scaling"]["factor"] == factor


@pytest.mark.parametrize("name", ["layers.0.attention.wo.weight", "layers.1.feed_forward.w1.weight", "norm.weight"])
def test_rows_blocks_and_16_bits_are_the_tensor(name: str) -> None:
    tensor = open_checkpoint(META / "llama2")[name]
    assert isinstance(tensor, JoinedTensor)
    values = tensor.read()
    assert values.shape == tensor.shape
    np.testing.assert_array_equal(np.asarray(tensor.weights(), np.float32), values)
    for n_rows in (1, 5, 1000):
        np.testing.assert_array_equal(np.concatenate([block for _, block in tensor.blocks(n_rows)]), values)
    np.testing.assert_array_equal(tensor.rows(3, 11), values[3:11])


def _edited(folder: Path, edit: Callable[[Stored], object]) -> None:
    """Change the second part."""
    file = LocalFile(folder / SECOND)
    stored = {
        name: (entry.dtype, entry.shape, file.bytes_of(entry, 0, entry.stop - entry.start).tobytes())
        for name, entry in file.tensors.items()
    }
    edit(stored)
    (folder / SECOND).write_bytes(encode(stored))


WQ, NORM = "layers.0.attention.wq.weight", "layers.1.ffn_norm.weight"


def half_the_rows(stored: Stored) -> None:
    dtype, (rows, columns), content = stored[WQ]
    stored[WQ] = dtype, (rows // 2, columns), content[: len(content) // 2]


def other_dtype(stored: Stored) -> None:
    stored[WQ] = "F16", *stored[WQ][1:]


def unknown_matrix(stored: Stored) -> None:
    stored["layers.0.adapter.weight"] = stored[WQ]


def other_norm(stored: Stored) -> None:
    dtype, shape, content = stored[NORM]
    stored[NORM] = dtype, shape, content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(("edit", "message"), [
    (half_the_rows, f"{SECOND}: tensor '{WQ}' is BF16 (4, 16), and BF16 (8, 16) in consolidated.00.safetensors"),
    (other_dtype, "is F16 (8, 16), and BF16 (8, 16) in consolidated.00.safetensors"),
    (lambda stored: stored.pop(WQ), f"'{WQ}' is not in {SECOND}; every part of a model has its part of it"),
    (unknown_matrix, "is not in consolidated.00.safetensors"),
    (other_norm, f"{SECOND}: tensor '{NORM}' differs from its copy in consolidated.00.safetensors"),
])  # fmt: skip
def test_parts_that_do_not_belong_together_are_refused(
    edit: Callable[[Stored], object], message: str, tmp_path: Path
) -> None:
    folder = parts_in(tmp_path)
    _edited(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        for tensor in open_checkpoint(folder).values():
            tensor.read()
    assert message in str(caught.value)


def test_matrix_of_unknown_parts_is_refused(tmp_path: Path) -> None:
    folder = parts_in(tmp_path)
    _edited(folder, unknown_matrix)
    shutil.copy(folder / SECOND, folder / "consolidated.00.safetensors")
    with pytest.raises(CheckpointError, match="is in every part of the model, and nothing says how they are joined"):
        open_checkpoint(folder)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    folder = parts_in(tmp_path)
    (folder / SECOND).rename(folder / "consolidated.02.safetensors")
    with pytest.raises(
        CheckpointError, match=r"has consolidated\.02\.safetensors, and no consolidated\.01\.safetensors"
    ):
        open_checkpoint(folder)
    (folder / "consolidated.02.safetensors").unlink()
    with pytest.raises(CheckpointError, match="1 of the model's 2 parts is here"):
        ws.open_model(folder)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_place_of_a_value_that_is_not_finite_is_that_of_the_whole(value: float, tmp_path: Path) -> None:
    folder = parts_in(tmp_path)

    def spoil(stored: Stored) -> None:
        bits = np.frombuffer(stored[WQ][2], "<u2").copy()
        bits[16 + 3] = np.float32(value).view("<u4") >> 16
        stored[WQ] = *stored[WQ][:2], bits.tobytes()

    _edited(folder, spoil)
    tensor = open_checkpoint(folder)[WQ]
    for read in (tensor.read, tensor.weights, lambda: tensor.rows(8, 12)):
        with pytest.raises(CheckpointError, match=r"at \(9, 3\)"):
            read()
    noted: set[str] = set()
    assert not np.isfinite(tensor.unchecked(noted).read()).all() and noted == {WQ}


def test_parts_on_the_hub_are_joined(hub: Hub) -> None:
    hub.repositories["meta/llama2"] = {
        file.name: file.read_bytes() for file in (META / "llama2").iterdir() if file.is_file()
    }
    remote, local = open_checkpoint("meta/llama2"), open_checkpoint(META / "llama2")
    assert remote.keys() == local.keys()
    for name in local:
        np.testing.assert_array_equal(remote[name].read(), local[name].read())
