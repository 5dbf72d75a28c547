"""A destroyed tensor is named as different, in every container at hand and both ways round."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.files import write
from tests.support.plants.containers import BLOCK, CONTAINERS, Packed
from tests.support.plants.deeds import ALL_CONTAINERS
from tests.support.plants.destroyed import DESTROYED, OTHER_LAYER, destroyed, names_of
from tests.support.plants.families import FAMILIES, Planted, original, random_llama
from tests.support.slow import mostly_checked, one_in
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.checkpoint.checkpoint import Checkpoint, StoredTensor
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.checkpoint.packings.packed import DequantisedTensor, FilledTensor
from weightscope.pairs.deeds.change import Change
from weightscope.pairs.deeds.deed import Deed, What
from weightscope.pairs.same import judge

Arrays = Mapping[str, np.ndarray]


DEEDS = (*DESTROYED, OTHER_LAYER)
WITHOUT_TORCH = ("F32", "GGUF, Q8_0", "GGUF, Q4_0")
# Factors of scales under which the largest value of each block is just inside the cell of zero.
WIDER = {
    "GGUF, Q8_0": 2.02 * 127, "GGUF, Q4_0": 2.02 * 8, "GPTQ, 4 bits": 2.02 * 15, "MLX, 4 bits": 2.02 * 15,
    "FP8 in blocks": 1.01 * 448 * 1024,
}  # fmt: skip


def no_codes(packed: Packed, container: str) -> Packed:
    """Codes of zero under scales so large that every value lies in the cell of zero."""
    codes, zeros = packed["codes"], packed.get("zeros")
    wide = packed | {"codes": np.zeros_like(codes), "scales": packed["scales"] * np.float32(WIDER[container])}
    if container == "GGUF, Q4_0":
        wide["codes"] = np.full_like(codes, 8)
    if container == "GPTQ, 4 bits":
        assert zeros is not None
        wide["codes"] = np.repeat(zeros, codes.shape[1] // zeros.shape[1], axis=1)
    if container == "MLX, 4 bits":
        wide["zeros"] = np.zeros_like(packed["scales"])  # the values of code 0
    return wide


def written(planted: Planted, folder: Path, container: str, wide: tuple[str, ...] = ()) -> tuple[Path, Arrays]:
    """The checkpoint in a container, and the values that it holds; `wide`: tensors with codes of zero."""
    folder.mkdir(parents=True)
    if container == "F32":
        write(folder / "model.safetensors", dict(planted.tensors))
        (folder / "config.json").write_text(json.dumps(planted.config))
        return folder, planted.tensors
    slips = dict.fromkeys(wide, partial(no_codes, container=container))
    with np.errstate(all="ignore"):
        values = ALL_CONTAINERS[container].write(planted, folder, slips)
    return (folder / "model.gguf" if container.startswith("GGUF") else folder), values


def changed(before: Arrays, after: Arrays, names: tuple[str, ...]) -> set[str]:
    """Those whose values are not what they were."""
    return {name for name in names if not np.array_equal(before[name], after[name])}


def missed(planted: Planted, container: str, deed: str, names: tuple[str, ...], work: Path) -> Iterator[str]:
    """The destroyed tensors that `same` does not call different: in the copy or the original, and both ways round."""
    whole, _ = written(planted, work / "whole", "F32")
    good, values = written(planted, work / "good", container)
    if deed == "codes zero":
        packed = tuple(name for name in names if ALL_CONTAINERS[container].packs(name, planted.tensors[name]))
        copy, after = written(planted, work / "copy", container, packed)
        pairs = [("copy", whole, copy, changed(values, after, packed))]
    else:
        bad = destroyed(planted, deed, names)
        copy, after = written(bad, work / "copy", container)
        broken, _ = written(bad, work / "broken", "F32")
        gone = changed(values, after, names)
        pairs = [("copy", whole, copy, gone), ("original", good, broken, gone)]
    for what, one, other, lost in pairs:
        opened = [ws.open_model(each) for each in (one, other)]
        for way, (a, b) in (("forwards", opened), ("backwards", opened[::-1])):
            if lost:
                same = ws.same(a, b)
                named = {name for each in same.differing for name in (each.name_a, each.name_b)}
                yield from (f"{what} {way}: {name} is missed. {same.lead}" for name in sorted(lost - named))


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tensor that is not accepted is called takes most of the time, and decides nothing here."""

    def done(_: judge.Compared, change: Change) -> Deed:
        return Deed(What.TUNED if np.isfinite(change.moved) else What.NOT_FINITE)

    monkeypatch.setattr(judge, "what_was_done", done)


@pytest.mark.usefixtures("unnamed")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "deed", mostly_checked([*DEEDS, "codes zero"], fast=["zero", "1e30", OTHER_LAYER, "codes zero"])
)
@pytest.mark.parametrize("container", mostly_checked(WITHOUT_TORCH, fast=["F32", "GGUF, Q8_0"]))
def test_destroyed_tensors_of_a_llama_are_different(container: str, deed: str, tmp_path: Path) -> None:
    """All tensors at once."""
    if container.startswith("GGUF"):
        pytest.importorskip("gguf")
    if deed == "codes zero" and container not in WIDER:
        return
    llama = random_llama()
    assert [*missed(llama, container, deed, names_of(llama, deed), tmp_path)] == []


@pytest.mark.census
@pytest.mark.usefixtures("unnamed")
@pytest.mark.parametrize("container", ALL_CONTAINERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_destroyed_tensors_of_every_family_are_different(family: str, container: str, tmp_path: Path) -> None:
    """All tensors at once, in every container."""
    pytest.importorskip("transformers", reason="tiny models are made by transformers; install the extra `runner`")
    planted = original(family)
    if not ALL_CONTAINERS[container].takes(planted, {}):
        pytest.skip(f"{container} has no {family}")
    for i, deed in enumerate((*DEEDS, "codes zero")):
        if deed in DEEDS or container in WIDER:
            assert [*missed(planted, container, deed, names_of(planted, deed), tmp_path / str(i))] == [], deed


@pytest.mark.census
@pytest.mark.usefixtures("unnamed")
@pytest.mark.parametrize("deed", [*DEEDS, "codes zero"])
@pytest.mark.parametrize("container", ALL_CONTAINERS)
def test_one_destroyed_tensor_of_a_llama_is_different(container: str, deed: str, tmp_path: Path) -> None:
    """Each tensor alone: the others are as they were."""
    pytest.importorskip("torch", reason="containers are written by PyTorch")
    llama = random_llama()
    if deed in DEEDS or container in WIDER:
        for i, name in enumerate(names_of(llama, deed)):
            assert [*missed(llama, container, deed, (name,), tmp_path / str(i))] == []


# Copies by the writers of quantised formats

FIXTURES = Path(__file__).parents[2] / "fixtures"
PACKED = sorted(file.parent.relative_to(FIXTURES) for file in FIXTURES.glob("*/*/config.json"))
FEW = [path for path in PACKED if path.parts in {("gpt_oss", "mxfp4"), ("bitnet", "divides"), ("auto_round", "as_awq")}]
SETTINGS = ("quantization_config", "quantization")


def plain(fixture: Path, checkpoint: Checkpoint, folder: Path, deeds: Mapping[str, str]) -> Path:
    """The values of a packed checkpoint as float32, some of them destroyed."""
    tensors = {name: np.array(tensor.read(), np.float32, order="C") for name, tensor in checkpoint.items()}
    order = list(deeds)
    for i, (name, deed) in enumerate(deeds.items()):
        alike = [other for other in order[i + 1 :] + order[:i] if tensors[other].shape == tensors[name].shape]
        if deed == OTHER_LAYER:
            tensors[name] = checkpoint[alike[0]].read() if alike else np.flip(tensors[name]).copy()
        else:
            tensors[name] = DESTROYED[deed](tensors[name])
    folder.mkdir()
    write(folder / "model.safetensors", tensors)
    config = json.loads((fixture / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in SETTINGS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without_codes(fixture: Path, packed: Mapping[str, DequantisedTensor], folder: Path) -> Path:
    """The copy with codes of zero, or nearly, under scales so large that every value lies in the cell of one code."""
    shutil.copytree(fixture, folder)
    for tensor in packed.values():
        main, *_ = parts = tensor.parts
        file = folder / main.file.path.name
        content = bytearray(file.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for part, stored in zip(parts, _erased(tensor), strict=True):
            first, last = header[part.name]["data_offsets"]
            content[start + first : start + last] = stored
        file.write_bytes(content)
    return folder


FILLS = (*range(0, 256, 17), 0x80)  # bytes of codes that are all the same
ZEROS = ("qzeros", "zero_point", "zero", "biases")


def _erased(tensor: DequantisedTensor) -> Iterator[bytes]:
    """The bytes of each part."""
    levels = (tensor.codes() or (0, 0, 256))[2]
    factor = 2.02 * levels if isinstance(levels, int) else 1.01 * np.ptp(levels) / np.diff(levels).min()
    main, least, best = next(iter(tensor.by_key)), np.inf, tensor.by_key
    zeros = [key for key in ZEROS if key in tensor.by_key]
    for moved in ([], zeros):
        for fill in FILLS:
            filled = {key: _filled(tensor.by_key[key], fill if key == main else 0) for key in (main, *moved)}
            with suppress(ws.CheckpointError):  # a code that the packing has not
                largest = float(np.abs(replace(tensor, by_key=tensor.by_key | filled).dequantise()).max())
                if largest < least:
                    least, best = largest, tensor.by_key | filled
    for key, part in best.items():
        raw = part.raw()
        if key in ("scale", "scales", "factor") and part.dtype != "F8_E4M3":
            raw = _larger(raw, part.dtype, factor)
        yield (_larger(raw, "F32", 1 / factor) if key == "divisor" else raw).tobytes()


def _filled(part: StoredTensor, fill: int) -> FilledTensor:
    return FilledTensor(part.name, part.entry, part.file, None, fill)


def _larger(raw: np.ndarray, dtype: str, factor: float) -> np.ndarray:
    """Stored numbers times a factor."""
    if dtype == "U8":
        return np.minimum(raw + np.ceil(np.log2(factor)), 254).astype(np.uint8)
    if dtype == "BF16":
        wide = (raw.view("<u2").astype("<u4") << 16).view("<f4") * np.float32(factor)
        return (wide.view("<u4") >> 16).astype("<u2")
    kind = {"F16": "<f2", "F32": "<f4"}[dtype]
    return (raw.view(kind) * np.float32(factor)).astype(kind)


def missed_of_fixture(fixture: Path, shifts: range, work: Path) -> Iterator[str]:
    """The packed weights that `same` does not call different: destroyed in the original, each in another way; without
    their codes in the copy.
    """
    checkpoint = open_checkpoint(fixture)
    packed = {name: tensor for name, tensor in checkpoint.items() if isinstance(tensor, DequantisedTensor)}
    whole = plain(fixture, checkpoint, work / "whole", {})
    pairs = [(plain(fixture, checkpoint, work / str(shift), deeds), fixture, deeds) for shift in shifts
             if (deeds := {name: DEEDS[(i + shift) % len(DEEDS)] for i, name in enumerate(packed)})]  # fmt: skip
    erased = without_codes(fixture, packed, work / "erased")
    pairs += [(each, erased, dict.fromkeys(packed, "codes zero")) for each in (whole, fixture)]
    for a, b, deeds in pairs:
        before, after = map(open_checkpoint, (whole, erased if b is erased else a))
        lost = {
            name
            for name in deeds
            if not np.array_equal(*(each[name].unchecked(set()).read() for each in (before, after)))
        }
        for pair in ((a, b), (b, a)):
            same = ws.same(*pair)
            named = {name for each in same.differing for name in (each.name_a, each.name_b)}
            yield from (f"{name}, {deeds[name]}: missed. {same.lead}" for name in sorted(lost - named))


@pytest.mark.usefixtures("unnamed")
@pytest.mark.parametrize("fixture", FEW, ids=str)
def test_destroyed_weights_of_a_packer_are_different(fixture: Path, tmp_path: Path) -> None:
    """Each weight in one way."""
    assert [*missed_of_fixture(FIXTURES / fixture, range(1), tmp_path)] == []


@pytest.mark.check
@pytest.mark.usefixtures("unnamed")
@pytest.mark.parametrize("fixture", one_in(6, PACKED), ids=str)
def test_destroyed_weights_of_every_packing_are_different(fixture: Path, tmp_path: Path) -> None:
    """Each weight in each way."""
    assert [*missed_of_fixture(FIXTURES / fixture, range(len(DEEDS)), tmp_path)] == []


# Values that are not finite, or nearly


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [3e38, -3e38, np.inf, np.nan])
def test_values_that_overflow_are_different(value: float, tmp_path: Path) -> None:
    """One value, a row, and all values of a tensor."""
    llama, bad = random_llama(), random_llama()
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i, part in enumerate("qko")]
    bad.tensors[names[0]][3, 5] = value
    bad.tensors[names[1]][7] = value
    bad.tensors[names[2]][:] = value
    (a, _), (b, _) = (written(each, tmp_path / name, "F32") for name, each in (("a", llama), ("b", bad)))
    for pair in ((a, b), (b, a)):
        same = ws.same(*pair)
        assert same.verdict == "different"
        assert {each.name for each in same.differing} == {*names}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parts_of_a_fused_tensor_are_named_beside_broken_values(value: float, tmp_path: Path) -> None:
    """Queries that both lack, and keys with the other sign."""
    weights = gpt2_weights()
    fused, d = weights["h.1.attn.c_attn.weight"], 24
    fused[3, 5] = value
    a = write_checkpoint(tmp_path / "a", weights)
    fused[:, d : 2 * d] *= -1
    (each,) = ws.same(a, write_checkpoint(tmp_path / "b", weights)).differing
    assert each.deed == "negated, of k"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [np.inf, np.nan, 6e4])
@pytest.mark.parametrize("name", ["symmetric", "as_awq"])
def test_scales_that_are_not_finite_are_different(name: str, scale: float, tmp_path: Path) -> None:
    """AutoRound's float16 scales."""
    fixture = FIXTURES / "auto_round" / name
    checkpoint = open_checkpoint(fixture)
    tensor = checkpoint["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(tensor, DequantisedTensor)
    whole, copy = plain(fixture, checkpoint, tmp_path / "whole", {}), tmp_path / "copy"
    shutil.copytree(fixture, copy)
    file, part = copy / tensor.file.path.name, tensor.by_key["scales"]
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    first, last = json.loads(content[8:start])[part.name]["data_offsets"]
    content[start + first : start + last] = np.append(np.float16(scale), part.raw().view("<f2")[1:]).tobytes()
    file.write_bytes(content)
    shuffled = plain(fixture, checkpoint, tmp_path / "other", {tensor.name: "shuffled"})
    for pair in ((whole, copy), (copy, whole), (fixture, copy), (shuffled, copy), (copy, shuffled)):
        same = ws.same(*pair)
        assert same.verdict == "different"
        assert [each.name for each in same.differing] == [tensor.name]


@pytest.mark.check
@pytest.mark.parametrize(
    ("factor", "verdict"), [(1, "quantised"), (100, "quantised"), (1e4, "different"), (1e6, "different")]
)
def test_floats_under_a_scale_far_too_large_are_different(factor: float, verdict: str, tmp_path: Path) -> None:
    """Numbers of eight bits keep their precision under a larger scale, until all are below the normal ones."""
    torch = pytest.importorskip("torch", reason="FP8 is written by PyTorch")
    container = CONTAINERS["FP8 in blocks"]

    def pack(w: np.ndarray) -> Packed:
        assert container.pack is not None
        scales = container.pack(w)["scales"] * np.float32(factor)
        codes = torch.from_numpy(w / np.repeat(np.repeat(scales, BLOCK, 0), BLOCK, 1)).to(torch.float8_e4m3fn)
        return {"codes": codes.float().numpy(), "scales": scales}

    llama = random_llama()
    a, _ = written(llama, tmp_path / "a", "F32")
    replace(container, pack=pack).write(llama, tmp_path / "b")
    same = ws.same(a, tmp_path / "b")
    assert same.verdict == verdict
    assert {each.deed for each in same.differing} <= {"scales too large for the codes that are used"}
