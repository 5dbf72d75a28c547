"""Quantised weights against implementations that share no line with the one tested.

FP8 against torch and transformers; bitsandbytes against a file that it wrote itself (golden/make.py); GPTQ and AWQ
against numbers packed here, one at a time, by the loops of AutoGPTQ's and AutoAWQ's own pack().
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files import encode, write
from tests.support.hub_server import Hub
from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.checkpoint.packings.bitsandbytes import blockwise
from weightscope.checkpoint.packings.scaled import decode_fp8
from weightscope.core.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden" / "bitsandbytes.safetensors"
RANDOM = np.random.default_rng(0)


def checkpoint_of(folder: Path, tensors: dict[str, Any], **quantization: Any) -> Checkpoint:
    write(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization} if quantization else {}))
    return open_checkpoint(folder)


# FP8


@pytest.mark.check
@pytest.mark.parametrize(
    ("dtype", "torch_name"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("F8_E8M0", "float8_e8m0fnu")]
)
def test_all_256_values_of_fp8_are_torchs(dtype: str, torch_name: str) -> None:
    torch = pytest.importorskip("torch")
    raw = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(raw).view(getattr(torch, torch_name)).float().numpy()
    np.testing.assert_array_equal(decode_fp8(raw, dtype), expected)


@pytest.mark.parametrize(("dtype", "exponent_bits", "bias"), [("F8_E4M3", 4, 7), ("F8_E5M2", 5, 15)])
def test_the_values_of_fp8_are_those_of_its_definition(dtype: str, exponent_bits: int, bias: int) -> None:
    """(-1)^s 2^(e - bias) (1 + f), and 2^(1 - bias) f where e is 0 (Micikevicius et al. 2022)."""
    fraction_bits = 7 - exponent_bits
    for byte in range(128):
        e, f = divmod(byte, 2**fraction_bits)
        f = f / 2**fraction_bits
        last = e == 2**exponent_bits - 1
        if last and dtype == "F8_E5M2":
            value = np.inf if f == 0 else np.nan
        elif byte == 127:
            value = np.nan
        else:
            value = 2.0 ** (e - bias) * (1 + f) if e else 2.0 ** (1 - bias) * f
        decoded = decode_fp8(np.array([byte, byte + 128], np.uint8), dtype)
        np.testing.assert_array_equal(decoded, np.float32([value, -value]))


def fp8(*shape: int) -> np.ndarray:
    """Bytes of finite E4M3 values."""
    raw = RANDOM.integers(0, 256, shape, dtype=np.uint8)
    return np.where(raw & 127 == 127, 0, raw).astype(np.uint8)


def f8(raw: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return "F8_E4M3", raw.shape, raw.tobytes()


@pytest.mark.check
@pytest.mark.parametrize(
    ("shape", "block"), [((256, 384), [128, 128]), ((200, 300), [128, 128]), ((96, 64), [32, 16]), ((130, 5), [64, 4])]
)
def test_fp8_with_block_scales_is_what_transformers_makes_of_it(
    shape: tuple[int, int], block: list[int], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    raw = fp8(*shape)
    scale = RANDOM.uniform(0.5, 2, [-(-n // side) for n, side in zip(shape, block, strict=True)]).astype(np.float32)
    checkpoint = checkpoint_of(
        tmp_path,
        {"q_proj.weight": f8(raw), "q_proj.weight_scale_inv": scale, "norm.weight": np.ones(3, np.float32)},
        quant_method="fp8",
        weight_block_size=block,
    )
    w = torch.from_numpy(raw).view(torch.float8_e4m3fn)
    expected = finegrained._dequantize_fp8_weight(w, torch.from_numpy(scale), block, torch.float32).numpy()
    assert set(checkpoint) == {"q_proj.weight", "norm.weight"}
    tensor = checkpoint["q_proj.weight"]
    assert tensor.shape == shape and tensor.nbytes == raw.nbytes + scale.nbytes
    np.testing.assert_array_equal(tensor.read(), expected)
    np.testing.assert_array_equal(tensor.rows(3, 70), expected[3:70])
    np.testing.assert_array_equal(np.concatenate([block for _, block in tensor.blocks(33)]), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (48,), (48, 1)])
def test_fp8_with_one_scale_or_one_a_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    raw, scale = fp8(48, 64), RANDOM.uniform(0.5, 2, shape).astype(np.float32)
    parts = {"q_proj.weight": f8(raw), "q_proj.weight_scale": scale, "q_proj.input_scale": np.ones(1, np.float32)}
    checkpoint = checkpoint_of(tmp_path, parts, quant_method="compressed-tensors", format="float-quantized")
    values = decode_fp8(raw, "F8_E4M3")
    expected = np.stack([row * scale.reshape(-1)[i % scale.size] for i, row in enumerate(values)])
    np.testing.assert_array_equal(checkpoint["q_proj.weight"].read(), expected)


def test_fp8_with_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    raw, exponents = fp8(128, 256), np.array([[126, 129]], np.uint8)
    parts = {"w": f8(raw), "w_scale_inv": ("F8_E8M0", (1, 2), exponents.tobytes())}
    expected = decode_fp8(raw, "F8_E4M3") * np.repeat([0.5, 4.0], 128).astype(np.float32)
    checkpoint = checkpoint_of(tmp_path, parts, quant_method="fp8", weight_block_size=[128, 128])
    np.testing.assert_array_equal(checkpoint["w"].read(), expected)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def test_fp8_in_blocks_as_compressed_tensors_names_them(tmp_path: Path) -> None:
    raw, scale = fp8(24, 64), RANDOM.uniform(0.5, 2, (2, 4)).astype(np.float32)
    group = {"weights": {"strategy": "block", "block_structure": [16, 16]}, "targets": ["Linear"]}
    checkpoint = checkpoint_of(
        tmp_path, {"w": f8(raw), "w_scale": scale}, **COMPRESSED, config_groups={"group_0": group}
    )
    rows, columns = np.arange(24) // 16, np.arange(64) // 16
    expected = decode_fp8(raw, "F8_E4M3") * scale[rows[:, None], columns]
    np.testing.assert_array_equal(checkpoint["w"].read(), expected)


@pytest.mark.parametrize(("settings", "message"), [
    ({"quant_method": "fp8"}, "has 2 x 4 scales for a weight of 24 x 64, and config.json does not give the block size"),
    ({}, "does not give the block size: quantization_config needs weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": None}, "does not give the block size"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "blocks of 128 x 128, which need 1 x 1"),
    ({"quant_method": "fp8", "weight_block_size": [16, 32]}, "blocks of 16 x 32, which need 2 x 2"),
    (COMPRESSED | {"config_groups": {"a": {"weights": {"block_structure": [16, 16]}},
                                     "b": {"weights": {"block_structure": [12, 16]}}}}, "does not give the block size"),
])  # fmt: skip
def test_fp8_in_blocks_of_a_size_that_config_does_not_say_or_denies_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    parts = {"w": f8(fp8(24, 64)), "w_scale_inv": np.ones((2, 4), np.float32)}
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint_of(tmp_path, parts, **settings)
    assert len(str(caught.value).splitlines()) == 1


def test_fp8_with_a_scale_per_row_needs_no_block_size(tmp_path: Path) -> None:
    raw, scale = fp8(24, 64), RANDOM.uniform(0.5, 2, (24, 1)).astype(np.float32)
    checkpoint = checkpoint_of(tmp_path, {"w": f8(raw), "w_scale": scale}, quant_method="fbgemm_fp8")
    np.testing.assert_array_equal(checkpoint["w"].read(), decode_fp8(raw, "F8_E4M3") * scale)


def test_fp8_in_blocks_larger_than_the_weight_costs_no_more(tmp_path: Path) -> None:
    raw, scale = fp8(8, 16), np.array([[2.0], [2.0]], np.float32)
    parts = {"w": f8(raw), "w_scale_inv": scale}
    checkpoint = checkpoint_of(tmp_path, parts, quant_method="fp8", weight_block_size=[4, 2**60])
    np.testing.assert_array_equal(checkpoint["w"].read(), 2 * decode_fp8(raw, "F8_E4M3"))


def test_bitsandbytes_in_a_block_larger_than_the_weight_costs_no_more() -> None:
    codes = np.arange(16, dtype=np.uint8)
    values = blockwise(codes, np.arange(16, dtype=np.float32), np.array([3], np.float32), 2**39)
    np.testing.assert_array_equal(values, 3 * codes)


# GPTQ


def pack_gptq(q: np.ndarray, bits: int) -> np.ndarray:
    """AutoGPTQ's pack(): input k of output j goes to bits (k % per_word) * bits of word k // per_word."""
    per_word = 32 // bits
    words = np.zeros((q.shape[0] // per_word, q.shape[1]), np.uint64)
    for k in range(q.shape[0]):
        for j in range(q.shape[1]):
            words[k // per_word, j] |= np.uint64(int(q[k, j]) << bits * (k % per_word))
    return words.astype(np.uint32).view(np.int32)


def gptq_parts(
    bits: int, inputs: int, outputs: int, group: int, offset: int, act_order: bool
) -> tuple[dict, np.ndarray]:
    """A quantised layer and the weight (out, in) that it represents, one element at a time."""
    n_groups = -(-inputs // group)
    q = RANDOM.integers(0, 2**bits, (inputs, outputs))
    zeros = RANDOM.integers(offset, 2**bits, (n_groups, outputs))
    scales = RANDOM.uniform(0.01, 0.1, (n_groups, outputs)).astype(np.float16)
    g_idx = np.arange(inputs, dtype=np.int32) // group
    if act_order:
        g_idx = RANDOM.permutation(g_idx)
    expected = np.empty((outputs, inputs), np.float32)
    for k in range(inputs):
        for j in range(outputs):
            expected[j, k] = np.float32(scales[g_idx[k], j]) * np.float32(q[k, j] - zeros[g_idx[k], j])
    packed_zeros = np.ascontiguousarray(pack_gptq((zeros - offset).T, bits).T)  # along the outputs
    return {"qweight": pack_gptq(q, bits), "qzeros": packed_zeros, "scales": scales, "g_idx": g_idx}, expected


def named(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"q_proj.{key}": part for key, part in parts.items()} | {"q_proj.bias": np.ones(3, np.float16)}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("stated", "offset"), [({}, 1), ({"checkpoint_format": "gptq"}, 1), ({"checkpoint_format": "gptq_v2"}, 0)]
)
def test_gptq(bits: int, act_order: bool, stated: dict[str, str], offset: int, tmp_path: Path) -> None:
    parts, expected = gptq_parts(bits, 64, 48, 16, offset, act_order)
    checkpoint = checkpoint_of(tmp_path, named(parts), quant_method="gptq", bits=bits, desc_act=act_order, **stated)
    assert set(checkpoint) == {"q_proj.weight", "q_proj.bias"}
    assert checkpoint["q_proj.weight"].shape == (48, 64)
    np.testing.assert_array_equal(checkpoint["q_proj.weight"].read(), expected)


def test_gptq_of_more_inputs_than_are_unpacked_at_a_time(tmp_path: Path) -> None:
    parts, expected = gptq_parts(4, 2560, 8, 128, 1, True)
    tensor = checkpoint_of(tmp_path, named(parts), quant_method="gptq", bits=4, desc_act=True)["q_proj.weight"]
    np.testing.assert_array_equal(tensor.read(), expected)


def test_gptq_without_group_indices(tmp_path: Path) -> None:
    parts, expected = gptq_parts(4, 64, 48, 16, 1, False)
    del parts["g_idx"]
    read = checkpoint_of(tmp_path, named(parts), quant_method="gptq", bits=4)["q_proj.weight"].read()
    np.testing.assert_array_equal(read, expected)
    with pytest.raises(CheckpointError, match="has no g_idx"):
        checkpoint_of(tmp_path, named(parts), quant_method="gptq", bits=4, desc_act=True)


def test_gptq_groups_are_as_large_as_the_config_says(tmp_path: Path) -> None:
    """96 inputs in groups of 64 are 64 and 32, not 48 and 48."""
    parts, expected = gptq_parts(4, 96, 48, 64, 1, False)
    del parts["g_idx"]
    read = checkpoint_of(tmp_path, named(parts), quant_method="gptq", bits=4, group_size=64)["q_proj.weight"].read()
    np.testing.assert_array_equal(read, expected)
    with pytest.raises(CheckpointError, match=r"2 groups for 96 inputs, and config\.json says 32"):
        _ = checkpoint_of(tmp_path, named(parts), quant_method="gptq", bits=4, group_size=32)["q_proj.weight"]


# AWQ


def pack_awq(q: np.ndarray) -> np.ndarray:
    """AutoAWQ's WQLinear_GEMM.from_linear: nibble i of a word holds column order_map[i] of its eight."""
    order_map = [0, 2, 4, 6, 1, 3, 5, 7]
    words = np.zeros((q.shape[0], q.shape[1] // 8), np.uint64)
    for row in range(q.shape[0]):
        for word in range(words.shape[1]):
            for i in range(8):
                words[row, word] |= np.uint64(int(q[row, word * 8 + order_map[i]]) << 4 * i)
    return words.astype(np.uint32).view(np.int32)


def awq_parts(inputs: int, outputs: int, group: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    q, zeros = RANDOM.integers(0, 16, (inputs, outputs)), RANDOM.integers(0, 16, (inputs // group, outputs))
    scales = RANDOM.uniform(0.01, 0.1, (inputs // group, outputs)).astype(np.float16)
    expected = np.empty((outputs, inputs), np.float32)
    for k in range(inputs):
        for j in range(outputs):
            expected[j, k] = np.float32(scales[k // group, j]) * np.float32(q[k, j] - zeros[k // group, j])
    return {"qweight": pack_awq(q), "qzeros": pack_awq(zeros), "scales": scales}, expected


@pytest.mark.parametrize("group", [16, 32, 96])
def test_awq(group: int, tmp_path: Path) -> None:
    parts, expected = awq_parts(96, 48, group)
    checkpoint = checkpoint_of(tmp_path, named(parts), quant_method="awq", bits=4, version="gemm", group_size=group)
    assert set(checkpoint) == {"q_proj.weight", "q_proj.bias"}
    np.testing.assert_array_equal(checkpoint["q_proj.weight"].read(), expected)


# bitsandbytes


@pytest.mark.parametrize(
    "name", [n.removesuffix(".expected") for n in open_checkpoint(GOLDEN) if n.endswith("expected")]
)
def test_bitsandbytes_reads_back_what_it_wrote(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN)
    read, expected = checkpoint[f"{name}.weight"].read(), checkpoint[f"{name}.expected"].read()
    np.testing.assert_allclose(read, expected, rtol=3e-7)  # int8: it divides by 127 at another place
    assert not any(part in checkpoint for part in (f"{name}.weight.absmax", f"{name}.SCB", f"{name}.weight.quant_map"))


# All of them


def test_parts_are_fetched_together(hub: Hub, tmp_path: Path) -> None:
    parts, expected = gptq_parts(4, 64, 48, 16, 1, True)
    config = json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}}).encode()
    far = {"far.weight": np.ones((100, 1000), np.float32)}
    hub.repositories["m"] = {"model.safetensors": encode(far | named(parts)), "config.json": config}
    checkpoint = open_checkpoint("m")
    opened, requests = checkpoint.bytes_fetched, len(hub.data_requests())
    np.testing.assert_array_equal(checkpoint["q_proj.weight"].read(), expected)
    assert checkpoint.bytes_fetched - opened == checkpoint.bytes_to_read(["q_proj.weight"])
    assert len(hub.data_requests()) - requests == 1


def test_an_unchecked_weight_is_read_as_it_is(tmp_path: Path) -> None:
    raw, scale = np.full((2, 2), 127, np.uint8), np.array([np.inf], np.float32)
    tensor = checkpoint_of(tmp_path, {"w": f8(raw), "w_scale": scale})["w"]
    assert np.isnan(tensor.unchecked(set()).read()).all()
    with pytest.raises(CheckpointError, match="not finite"):
        tensor.read()


@pytest.mark.parametrize("method", ["vptq", "aqlm", "quanto", "higgs", "\x1b[2J", None, 3])
def test_methods_that_are_not_read_are_refused_by_name(method: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"says quantised with .*which is not read; read are fp8, ") as caught:
        checkpoint_of(tmp_path, {"w": np.ones(3, np.float32)}, quant_method=method)
    assert str(caught.value).isprintable()


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("marlin-24", {}, {"quant_method": "compressed-tensors", "format": "marlin-24"}, "in format 'marlin-24'"),
    ("packed by an unknown tool", {"q.qweight": np.ones((2, 8), np.int32)}, {}, "whether by gptq or awq"),
    ("FP8 without a scale", {"w": f8(fp8(8, 8))}, {}, "F8_E4M3 cannot be read"),
    ("FP8, scales of another grid", {"w": f8(fp8(8, 8)), "w_scale": np.ones((3, 1), np.float32)},
     {"quant_method": "fp8", "weight_block_size": [4, 8]}, "3 x 1 scales for a weight of 8 x 8; .* need 2 x 1"),
    ("FP8, no scale", {"w": f8(fp8(8, 8)), "w_scale": np.ones((0, 1), np.float32)}, {}, "do not fit"),
    ("FP8, integer scale", {"w": f8(fp8(8, 8)), "w_scale": np.ones((1, 1), np.int32)}, {}, "scale of dtype I32"),
    ("FP8, NaN", {"w": f8(np.full((8, 8), 127, np.uint8)), "w_scale": np.ones(1, np.float32)}, {}, "not finite"),
    ("FP8, absurd blocks", {"w": f8(fp8(8, 8)), "w_scale": np.ones((2, 2), np.float32)},
     {"quant_method": "fp8", "weight_block_size": [0, -1]}, "in blocks of"),
    ("MXFP4 experts", {"experts_blocks": np.ones((4, 4), np.uint8)}, {"quant_method": "mxfp4"},
     "has blocks of dtype U8 .* needs U8 of 4"),
    ("bitsandbytes, no state", {"w": np.ones((4, 1), np.uint8), "w.absmax": np.ones(1, np.float32)}, {},
     "has no quant_state"),
    ("int8, scales of another shape", {"q.weight": np.ones((4, 4), np.int8), "q.SCB": np.ones(3, np.float32)}, {},
     "do not fit"),
    ("int8, a GPU's layout", {"q.weight": np.ones((4, 4), np.int8), "q.SCB": np.ones(4, np.float32),
     "q.weight_format": np.array(2, np.uint8)}, {}, "in a GPU's layout"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "quantization", "message"), [line[1:] for line in REFUSED], ids=[line[0] for line in REFUSED]
)
def test_what_does_not_fit_is_refused(
    tensors: dict[str, Any], quantization: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        for tensor in checkpoint_of(tmp_path, tensors, **quantization).values():
            tensor.read()


@pytest.mark.parametrize("spoilt", ["qweight", "qzeros", "scales", "g_idx"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_of_other_shapes_are_refused(spoilt: str, method: str, tmp_path: Path) -> None:
    parts = (gptq_parts(4, 64, 48, 16, 1, True) if method == "gptq" else awq_parts(64, 48, 16))[0]
    if spoilt not in parts:
        pytest.skip("awq has no g_idx")
    for change in (lambda a: a[1:], lambda a: a[..., 1:], lambda a: a.reshape(-1, 1, 1), lambda a: a.astype(np.uint8)):
        with pytest.raises(CheckpointError, match=r"fit together|needs|more of|rows"):
            checkpoint_of(tmp_path, named({**parts, spoilt: change(parts[spoilt])}), quant_method=method, bits=4)
    if spoilt != "qweight" and spoilt != "g_idx":
        with pytest.raises(CheckpointError, match=f"has no {spoilt}"):
            checkpoint_of(tmp_path, named({k: v for k, v in parts.items() if k != spoilt}), quant_method=method, bits=4)


@pytest.mark.parametrize("value", [-1, 4, 2**31 - 1])
def test_a_group_that_is_not_there_is_refused(value: int, tmp_path: Path) -> None:
    parts = gptq_parts(4, 64, 48, 16, 1, True)[0]
    parts["g_idx"][5] = value
    with pytest.raises(CheckpointError, match="g_idx from"):
        checkpoint_of(tmp_path, named(parts), quant_method="gptq", bits=4)["q_proj.weight"].read()


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 3},
        {"bits": "4"},
        {"bits": 0},
        {"bits": True},
        {"checkpoint_format": "marlin"},
        {"checkpoint_format": []},
    ],
)
def test_settings_that_are_not_read_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    parts = gptq_parts(4, 64, 48, 16, 1, True)[0]
    if changes.get("checkpoint_format") == []:
        changes = {"checkpoint_format": [1]}
    with pytest.raises(CheckpointError, match="is GPTQ"):
        checkpoint_of(tmp_path, named(parts), **{"quant_method": "gptq", "bits": 4, **changes})
    with pytest.raises(CheckpointError, match="is AWQ"):
        checkpoint_of(tmp_path, named(awq_parts(64, 48, 16)[0]), quant_method="awq", version="gemv")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([48, 64]),
    lambda inner: (
        st.just([*[1] * 70, 48, 64])
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(["shape", "blocksize", "nested_blocksize", "nested_offset"]), JSON)
@settings(max_examples=150, deadline=None)
def test_a_quant_state_of_anything_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    golden = open_checkpoint(GOLDEN).files[0]
    parts: dict[str, Any] = {}
    for name, entry in golden.tensors.items():
        if name.startswith("nf4_nested_48"):
            content = golden.bytes_of(entry, 0, entry.stop - entry.start).tobytes()
            if "quant_state" in name:
                content = json.dumps({**json.loads(content), key: value}).encode()
                entry = type(entry)("U8", (len(content),), 0, 0)
            parts[name] = (entry.dtype, entry.shape, content)
    try:
        read = checkpoint_of(tmp_path_factory.mktemp("state"), parts)["nf4_nested_48.weight"].read()
        assert read.size == 48 * 64
    except CheckpointError:
        pass
