"""wsid1 computed twice: by weightscope, and by hand from docs/identity.md."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.pairs.identity import by_hand
from tests.pairs.identity.raw_file import Raw, raw, write
from weightscope.pairs.identity.identity import Identity, identity

VECTORS = Path("tests/fixtures/identity")
EXPECTED = json.loads((VECTORS / "model.id.json").read_text())
WIDTH, WORDS = 32, 33_000  # a million tokens' values: more than one block, and rows of the sketch


@pytest.mark.parametrize("container", ["llama", "llama4", "shards", "mlx", "phi3"])
def test_identity_of_the_vectors(container: str) -> None:
    assert by_hand.wsid_of(VECTORS / container) == EXPECTED["wsid"]


def test_digests_and_sketches_of_the_vectors() -> None:
    arrays = by_hand.identified(by_hand.arrays_of(VECTORS / "llama"))
    assert arrays.keys() == EXPECTED["tensors"].keys()
    for label, values in arrays.items():
        entry = EXPECTED["tensors"][label]
        kinds = entry.keys() & by_hand.NAN.keys()
        assert kinds == {"bf16", "f16", by_hand.exact_kinds(values)[-1]}
        assert all(by_hand.digest(values, kind) == entry[kind] for kind in kinds)
        norm, sums = by_hand.sketch_of(values)
        assert entry["sketch"].split() == [f"{norm:.6g}", *(str(int(each)) for each in sums)]


EDGES = [
    0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, 65504, 65519, 65519.996, 65520, -65520, 1e30,
    2**-14, 2**-24, -(2**-24), 2**-25, -(2**-25), 2**-25 * (1 + 2**-20), 3 * 2**-25, 5 * 2**-25, 2**-26,
    1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-23,
    2**-133, 2**-134, -(2**-134), 2**-149, -(2**-149), -1e-45, 2**-126, 3.3895314e38, 3.3961775e38, 3.4028235e38,
    1 + 2**-24, 1 + 2**-24 + 2**-50, 1 + 2**-11 + 2**-40, 1 + 2**-8 - 2**-40, 1e-300, -1e-300, 5e-324, 1e300, 2**-150,
    -(2**-150), 3 * 2**-151, np.pi,
]  # fmt: skip


def patterns(dtype: str, size: int, rng: np.random.Generator) -> bytes:
    """Random bit patterns, with every one of 16 bits; and the edges, as near as the dtype has them."""
    width = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}[dtype]
    bits = rng.integers(0, 1 << 8 * width, size, f"<u{width}", endpoint=False)
    every = np.arange(1 << 16, dtype="<u8")
    bits[: every.size] = every << 8 * (width - 2)
    with np.errstate(over="ignore"):
        edges = np.array(EDGES)
        if dtype == "BF16":
            bits[-edges.size :] = edges.astype("<f4").view("<u4") >> 16
        else:
            bits[-edges.size :] = edges.astype(f"<f{width}").view(bits.dtype)
    return bits.tobytes()


def stored(dtype: str, values: np.ndarray) -> bytes:
    if dtype == "BF16":
        return by_hand.written(values, "bf16").tobytes()
    return values.astype(by_hand.STORED[dtype]).tobytes()


def llama(folder: Path, dtypes: list[str], rng: np.random.Generator, hard: bool) -> Path:
    """The fixture with more tokens, other values, and biases: some zero, one -0."""
    folder.mkdir()
    config = json.loads((VECTORS / "llama" / "config.json").read_text())
    config |= {"vocab_size": WORDS, "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {name: w.shape for name, w in by_hand.tensors_in(VECTORS / "llama" / "model.safetensors")}
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (WORDS, WIDTH)
    for layer in range(2):
        for role in "qkvo":
            stem = f"model.layers.{layer}.self_attn.{role}_proj."
            shapes[f"{stem}bias"] = shapes[f"{stem}weight"][:1]
    tensors = {}
    for name, shape in shapes.items():
        dtype, size = str(rng.choice(dtypes)), int(np.prod(shape))
        content = stored(dtype, rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3))
        if name.endswith("1.self_attn.o_proj.bias"):
            content = stored(dtype, np.full(size, -0.0))
        elif name.endswith("_proj.bias") and ".0." in name:
            content = bytes(len(content))
        elif hard and size > 1 << 16:
            content = patterns(dtype, size, rng)
        elif hard:
            content = stored(dtype, rng.choice(EDGES, size))
        tensors[name] = Raw(dtype, shape, content)
    write(folder / "model.safetensors", tensors)
    return folder


def check(folder: Path) -> Identity:
    made = identity(folder)
    arrays = by_hand.arrays_of(folder)
    assert arrays.keys() == made.tensors.keys()
    for label, values in arrays.items():
        digest = made.tensors[label]
        assert [*digest.exact] == by_hand.exact_kinds(values), label
        assert digest.sha256 == {kind: by_hand.digest(values, kind) for kind in digest.sha256}, label
    assert by_hand.wsid_of(folder) == made.wsid
    return made


DTYPES = [["F32"], ["F16"], ["BF16"], ["F64"], ["F64", "F32", "F16", "BF16"]]


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
def test_identity_of_hard_values(dtypes: list[str], tmp_path: Path) -> None:
    made = check(llama(tmp_path / "hard", dtypes, np.random.default_rng(3), hard=True))
    zeros = {f"layer 0 {role}.bias" for role in "qkvo"} | {"layer 1 o.bias"}
    assert made.left_out.keys() == zeros


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_sketches_differ_by_float32_at_most(dtypes: list[str], tmp_path: Path) -> None:
    folder = llama(tmp_path / "plain", dtypes, np.random.default_rng(5), hard=False)
    made = check(folder)
    for label, values in by_hand.arrays_of(folder).items():
        norm, sums = by_hand.sketch_of(values)
        assert made.sketches[label].norm == pytest.approx(norm, rel=1e-5)
        assert np.abs(np.array(made.sketches[label].sums) - sums).max() <= 1


def test_a_tied_unembedding_is_left_out_whatever_its_dtype(tmp_path: Path) -> None:
    folder = shutil.copytree(VECTORS / "llama", tmp_path / "tied")
    arrays = dict(by_hand.tensors_in(folder / "model.safetensors"))
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].astype("f8")
    write(folder / "model.safetensors", {name: raw(w) for name, w in arrays.items()})
    assert check(folder).left_out.keys() == {"unembedding"}
