"""Rounded twice or quantised: every value in its cell, and no fault that hides as clipped or as a lost scale."""

from importlib import import_module

import numpy as np
import pytest

import weightscope.pairs.deeds.blocks  # noqa: F401 - registers the words of its deeds
from tests.support.files import write
from tests.support.plants.derivations import groups_to_nearest
from weightscope.checkpoint.ggml_blocks import LAYOUTS
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.model.rows.gguf import RestoredTensor, logarithm
from weightscope.pairs.deeds.catalogue import compare_pairs
from weightscope.pairs.deeds.change import change_of, unchanged
from weightscope.pairs.deeds.deed import What, sentence
from weightscope.pairs.deeds.pair import Pair
from weightscope.pairs.deeds.quantised import exponentiated, quantised, rounded_twice, too_wide
from weightscope.pairs.deeds.recomputed import NUMBA, Cells, _nearest_stored
from weightscope.pairs.deeds.rounding import CASTS

RNG = np.random.default_rng(0)
WEIGHTS = (0.02 * RNG.standard_normal((64, 256))).astype(np.float32)
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def stored(folder, weights, kind="F32"):
    """A tensor of a GGUF file."""
    gguf = pytest.importorskip("gguf")
    writer, number = gguf.GGUFWriter(folder / f"{kind}.gguf", "llama"), gguf.GGMLQuantizationType[kind]
    writer.add_tensor("w.weight", gguf.quants.quantize(weights, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(folder / f"{kind}.gguf")["w.weight"]


# Blocks whose values are all zero: bytes, where the float16 is that scales them, and what else is not zero.
ZEROS = {
    "Q4_0": (18, 0, [(2, 18, 0x88)]), "Q4_1": (20, 0, []), "Q5_0": (22, 0, [(2, 6, 0xFF)]), "Q5_1": (24, 0, []),
    "Q8_0": (34, 0, []), "TQ2_0": (66, 64, [(0, 64, 0x55)]), "Q2_K": (84, 80, [(0, 16, 0x0F)]),
    "Q3_K": (110, 108, [(0, 32, 0xFF), (96, 108, 0xFF)]), "Q4_K": (144, 0, [(4, 8, 0xFF), (12, 16, 0x0F)]),
    "Q6_K": (210, 208, [(128, 192, 0xAA), (192, 208, 0x7F)]),
}  # fmt: skip


def without_codes(folder, kind, wide, where):
    """A copy whose blocks in some places are zero, under a scale whose cells are this wide."""
    gguf = pytest.importorskip("gguf")
    number, (size, place, filled) = gguf.GGMLQuantizationType[kind], ZEROS[kind]
    zero = np.zeros(size, np.uint8)
    for start, stop, byte in filled:
        zero[start:stop] = byte
    zero[place : place + 2] = np.float16(1).reshape(1).view(np.uint8)
    ends = [float(LAYOUTS[kind].scales(zero[None])[0].max())]  # of one step, where d is one
    zero[place : place + 2] = np.float16(wide / ends[0]).reshape(1).view(np.uint8)
    if where is ...:
        blocks = np.broadcast_to(zero, (len(WEIGHTS), WEIGHTS.shape[1] // LAYOUTS[kind].weights, size)).copy()
    else:
        blocks = gguf.quants.quantize(WEIGHTS, number).reshape(len(WEIGHTS), -1, size)
        blocks[where] = zero
    writer = gguf.GGUFWriter(folder / f"{kind}.gguf", "llama")
    writer.add_tensor("w.weight", blocks.reshape(len(WEIGHTS), -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(folder / f"{kind}.gguf")["w.weight"]


def judged(a, b):
    pair = Pair(a, b)
    change = unchanged(a, b)
    for part in pair.blocks():
        change = change.and_then(change_of(part))
    deed = quantised(pair, change)
    return (sentence(deed), deed.detail) if deed else None


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_values_are_in_their_cells(kind, tmp_path):
    a, b = stored(tmp_path, WEIGHTS), stored(tmp_path, WEIGHTS, kind)
    assert judged(a, b) == (f"B quantised ({kind})", "every value in the cell of its original")
    assert judged(b, a) == (f"A quantised ({kind})", "every value in the cell of its original")


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_cells_are_those_of_numpy(kind, tmp_path):
    pytest.importorskip("numba")
    changed = WEIGHTS.copy()
    changed[3, 40] = 40 * np.abs(WEIGHTS).max()  # outside its cell
    b = stored(tmp_path, WEIGHTS, kind)
    for name, weights, inside in (("a", WEIGHTS, True), ("changed", changed, False)):
        (tmp_path / name).mkdir()
        a, sums = stored(tmp_path / name, weights), []
        for fast in (False, True):
            cells = Cells()
            assert cells.add_all(_nearest_stored(a, b, fast)) == inside
            sums.append(cells)
        plain, compiled = sums
        assert (plain.changed, plain.outer, plain.wide) == (compiled.changed, compiled.outer, compiled.wide)
        for each in ("squares", "squares_b", "moved"):
            np.testing.assert_allclose(getattr(compiled, each), getattr(plain, each), rtol=1e-12)
        if inside:
            x, y = (tensor.read().astype(np.float64) for tensor in (a, b))
            np.testing.assert_allclose(plain.moved, np.square(x - y).sum(), rtol=1e-12)


@pytest.mark.parametrize("group", [1, 3, 16, 32])
def test_compiled_ends_are_those_of_numpy(group):
    pytest.importorskip("numba")
    x = np.random.default_rng(0).standard_normal((64, group)).astype(np.float32)
    x[:10, -1] = 0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-42, -1e-42, 3e38, -3e38
    least, most = import_module(NUMBA).ends(x)
    np.testing.assert_array_equal(least, x.min(axis=1))
    np.testing.assert_array_equal(most, x.max(axis=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["outlier", "block", "row scaled", "rows exchanged", "code", "all x 1.02"])
def test_a_fault_is_not_quantisation(kind, fault, tmp_path):
    """The original is changed after the copy was made, or the copy has a block of zeros."""
    changed = WEIGHTS.copy()
    if fault == "outlier":
        changed[3, 40] = 40 * np.abs(WEIGHTS).max()
    if fault == "block":
        copied = WEIGHTS.copy()
        copied[5, 32:64] = 0
        assert judged(stored(tmp_path, WEIGHTS), stored(tmp_path, copied, kind)) is None
        return
    if fault == "row scaled":
        changed[7] *= 1.5
    if fault == "all x 1.02":  # each value is near its level, and all of them lean outwards
        changed *= np.float32(1.02)
    if fault == "rows exchanged":
        changed[[1, 2]] = changed[[2, 1]]
    if fault == "code":  # in the middle of the block's grid, where nothing is clipped
        changed[9, int(np.abs(WEIGHTS[9, :32]).argmin())] += np.abs(WEIGHTS[9, :32]).max() / 2
    assert judged(stored(tmp_path, changed), stored(tmp_path, WEIGHTS, kind)) is None


@pytest.mark.parametrize("where", [..., (5,), (slice(None), 1)], ids=["all", "a row", "columns"])
@pytest.mark.parametrize("kind", ZEROS)
def test_codes_of_zero_under_a_large_scale_prove_nothing(kind, where, tmp_path):
    """Every original lies in the cell of zero."""
    is_whole = where is ...
    if kind.endswith("_K") and not is_whole:
        return  # the gguf package does not quantise to these
    if kind == "TQ2_0" and where == (slice(None), 1):
        return  # one block is a row
    a = stored(tmp_path, WEIGHTS)
    b = without_codes(tmp_path, kind, 2.02 * np.abs(WEIGHTS).max(), where)
    assert not b.read().any() if is_whole else True
    assert judged(a, b) is None and judged(b, a) is None
    if kind != "TQ2_0" or is_whole:  # others are quantised by search
        assert too_wide(Pair(a, b)).what is too_wide(Pair(b, a)).what is What.TOO_WIDE


@pytest.mark.parametrize(
    ("first", "then", "scale"), [("BF16", "F16", 1e-2), ("BF16", "F8_E4M3", 50), ("F16", "F8_E5M2", 50)]
)
def test_a_copy_of_a_copy_is_rounded_twice(first, then, scale, tmp_path):
    weights = WEIGHTS * np.float32(scale)  # so that the second rounding loses bits of the first
    twice = CASTS[then](CASTS[first](weights))
    assert not np.array_equal(twice, CASTS[then](weights))
    codes = {"F16": lambda x: x.astype("<f2").tobytes(), "F8_E4M3": float8(3, 7), "F8_E5M2": float8(2, 15)}[then]
    a = open_checkpoint(write(tmp_path / "a.safetensors", {"w": weights}))["w"]
    b = open_checkpoint(write(tmp_path / "b.safetensors", {"w": (then, weights.shape, codes(twice))}))["w"]
    proof = rounded_twice(Pair(a, b))
    assert proof is not None
    assert sentence(proof) == f"B to {first}, then to {then}"


def float8(fractions, bias):
    """Values that a float of eight bits holds, as its bytes."""

    def encode(x):
        exponent = np.maximum(np.frexp(np.abs(x))[1] - 1 + bias, 1)
        steps = np.rint(np.abs(x) / np.ldexp(1.0, exponent - bias - fractions)).astype(int)
        code = np.where(steps >= 1 << fractions, ((exponent << fractions) + steps - (1 << fractions)), steps)
        return (code | (np.signbit(x).astype(int) << 7)).astype(np.uint8).tobytes()

    return encode


@pytest.mark.parametrize(
    ("zero", "verdict"), [(0.0, "same bytes"), (-0.0, "same values")]
)  # a zero with the other sign is the same value in other bytes
def test_same_bytes_rests_on_bytes(zero, verdict, tmp_path):
    import weightscope as ws
    from tests.support.small_llama import write_small_llama

    a, b = (write_small_llama(tmp_path / name, 1) for name in "ab")
    file = b / "model.safetensors"
    content = bytearray(file.read_bytes())
    for path in (a / "model.safetensors", file):
        data = bytearray(content)
        data[-4:] = np.float32(0.0 if path != file else zero).tobytes()
        path.write_bytes(data)
    assert ws.same(a, b).verdict == verdict


@pytest.mark.parametrize("shape", [(6, 4), (6, 1)])
def test_state_space_stored_as_minus_exp(shape, tmp_path):
    """Mamba's A_log (d, n) and Mamba 2's (H,), which GGUF files have as columns of A."""
    logs = np.log(RNG.uniform(1, 16, shape)).astype(np.float32).squeeze()
    file = open_checkpoint(write(tmp_path / "a.safetensors", {"a": logs}))
    for worst, proof in ((0, "A to -exp in F32"), (1, "A to -exp in F32"), (4, None)):
        decay = -np.exp(logs.astype(np.float64)).astype(np.float32).reshape(shape)
        decay[3] += worst * np.spacing(decay[3])  # in units of the last place
        newer = RestoredTensor(stored(tmp_path, decay), logarithm, 1, 1)
        assert newer.shape == logs.shape
        forwards = exponentiated(Pair(file["a"], newer))
        assert (forwards and sentence(forwards)) == proof
        assert (backwards := exponentiated(Pair(newer, file["a"]))) is None or sentence(backwards) == "B to -exp in F32"


@pytest.mark.parametrize("lost", [0, 16])
def test_columns_that_have_nothing_of_the_original_are_not_quantised(lost, tmp_path):
    """Sixteen of 256 in a type of codebooks: rows alone hardly move."""
    gguf = pytest.importorskip("gguf")
    number, rng = gguf.GGMLQuantizationType["IQ1_S"], np.random.default_rng(3)
    blocks = rng.integers(0, 256, (256, 50), np.uint8)
    blocks[:, :2] = np.float16([0.01]).view(np.uint8)
    blocks[:, 35:50:2] |= 0x70  # scales
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    writer.add_tensor("w.weight", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    copy = open_checkpoint(tmp_path / "b.gguf")["w.weight"]
    original = copy.read() + 0.5 * copy.read().std() * rng.standard_normal(copy.shape)
    original[:, 64 : 64 + lost] = original.std() * rng.standard_normal((256, lost))
    a = stored(tmp_path, original.astype(np.float32))
    assert (judged(a, copy) is None) == bool(lost)


@pytest.mark.parametrize("seed", range(16))
def test_few_levels_without_a_zero_are_a_grid_and_no_more(seed, tmp_path):
    """Half a step may be more than the level next to zero; sixteen neighbours may all be that level."""
    weights = (0.02 * np.random.default_rng(seed).standard_t(4, (128, 128))).astype(np.float32)
    codes = groups_to_nearest(weights, 2, 32, symmetric=False).astype(np.float32)
    erased = codes.copy()
    row, group = np.argwhere(np.abs(weights) == np.abs(weights).max())[0] // (1, 32)
    erased[row, 32 * group : 32 * group + 32] = 0
    for values, is_whole in ((codes, True), (erased, False)):
        write(tmp_path / "model.safetensors", {"a": weights, "b": values})
        checkpoint = open_checkpoint(tmp_path)
        (change,) = compare_pairs(checkpoint, checkpoint, [Pair(*(checkpoint[name] for name in "ab"))])
        assert (change.kind is What.QUANTISED) == is_whole
