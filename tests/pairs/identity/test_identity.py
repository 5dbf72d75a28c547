"""One identity for the values of a model, whatever its files; and what an identity proves of a copy."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from weightscope.core.errors import CheckpointError
from weightscope.pairs.identity.identity import read_identity
from weightscope.pairs.identity.sketch import Sketching
from weightscope.pairs.identity.wsid import BF16, digest, wsid

FIXTURES = Path(__file__).parents[2] / "fixtures" / "identity"
MANIFEST = FIXTURES / "model.id.json"
CONTAINERS = ("llama", "llama4", "shards", "phi3", "mlx", "meta", "model.gguf")
HARD = st.sampled_from([0.0, -0.0, np.nan, np.inf, -np.inf, 6e-8, 2.9e-8, 6.1e-5, 65504.0, 65519.0, 65520.0, 1e30])
VALUES = arrays(np.float32, st.integers(0, 40), elements=HARD | st.floats(width=32))


def copied(folder: Path, change: Callable[[dict[str, np.ndarray]], object], source: str = "llama") -> Path:
    """A copy of a fixture in float32, its tensors changed."""
    shutil.copytree(FIXTURES / source, folder)
    stored = ws.open_model(FIXTURES / source).checkpoint
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def plain(bits: np.ndarray, nan: int) -> np.ndarray:
    """One zero and one NaN, by hand."""
    values = bits.view({2: "<f2", 4: "<f4", 8: "<f8"}[bits.itemsize])
    return np.where(np.isnan(values), nan, np.where(values == 0, 0, bits)).astype(bits.dtype)


@pytest.mark.parametrize("container", CONTAINERS)
def test_seven_containers_have_one_identity(container: str) -> None:
    assert ws.identity(FIXTURES / container).wsid == json.loads(MANIFEST.read_text())["wsid"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_copy_in_another_container_has_the_same_values(container: str) -> None:
    """Of another model_type it is not known here whether the code computes the same."""
    expected = "undecided" if container == "phi3" else "same values"
    assert ws.same(MANIFEST, FIXTURES / container).verdict == expected


def test_an_identity_read_back_is_the_one_written(tmp_path: Path) -> None:
    made = ws.identity("embedded")
    path = tmp_path / "embedded.id.json"
    path.write_text(json.dumps(made.as_json()))
    read = read_identity(path)
    assert (read.wsid, read.tensors, read.sketches) == (made.wsid, dict(made.tensors), dict(made.sketches))
    assert read.settings.values == json.loads(json.dumps(dict(made.settings.values)))


@given(VALUES)
def test_digests_are_those_of_numpys_own_casts(values: np.ndarray) -> None:
    made = digest([values[:7], values[7:]], values.shape)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16).view("<u2")
    assert made.sha256["f16"] == sha256(plain(half, 0x7E00).tobytes()).hexdigest()
    wide = plain(values.view("<u4"), 0x7FC00000)
    assert made.exact[0] in ("bf16", "f16") or made.sha256["f32"] == sha256(wide.tobytes()).hexdigest()
    with np.errstate(over="ignore", invalid="ignore"):
        is_half = np.array_equal(values.astype(np.float16).astype(np.float32), values, equal_nan=True)
    assert ("f16" in made.exact) == is_half
    assert ("bf16" in made.exact) == (not (wide & 0xFFFF).any())


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_by_its_bits_is_bfloat16_widened(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, 300, dtype=np.uint16)
    wide = (bits.astype("<u4") << 16).view("<f4")
    by_bits, widened = digest([bits.view(BF16)], bits.shape), digest([wide], wide.shape)
    assert by_bits.values == widened.values and by_bits.sha256["f16"] == widened.sha256["f16"]


def test_float64_and_integers_are_numbers() -> None:
    numbers = np.array([1, 2, 3])
    kinds = [digest([numbers.astype(kind)], (3,)).values for kind in ("i8", "u1", "f2", "f4", "f8")]
    assert len({*kinds}) == 1
    third = digest([np.array([1 / 3])], (1,))
    assert third.exact == ("f64",) and third.sha256["f64"] == sha256(np.array([1 / 3]).tobytes()).hexdigest()


def test_the_order_of_tensors_does_not_count_and_their_labels_do() -> None:
    a, b = (digest([np.full(3, value)], (3,)) for value in (1.0, 2.0))
    assert wsid({"a": a, "b": b}) == wsid({"b": b, "a": a}) != wsid({"a": b, "b": a})


def test_dtypes_do_not_count(tmp_path: Path) -> None:
    wide = copied(tmp_path / "wide", lambda tensors: None)
    assert ws.identity(wide).wsid == json.loads(MANIFEST.read_text())["wsid"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_rounded_copy_is_proved_by_digests(kind: str, tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)

    def fine(tensors: dict[str, np.ndarray]) -> None:
        for name, w in tensors.items():
            tensors[name] = (w * drawn.uniform(0.9, 1.1, w.shape)).astype(np.float32)

    original = copied(tmp_path / "original", fine)
    (tmp_path / "a.id.json").write_text(json.dumps(ws.identity(original).as_json()))

    def cast(tensors: dict[str, np.ndarray]) -> None:
        for name, w in load_file(original / "model.safetensors").items():
            bits = w.view("<u4").astype(np.uint64)
            nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype("<u4").view("<f4")
            tensors[name] = w.astype(np.float16) if kind == "float16" else nearest

    copy = copied(tmp_path / "copy", cast)
    result = ws.same(tmp_path / "a.id.json", copy)
    assert result.verdict == "rounded" and {each.verdict for each in result.tensors} == {"rounded"}
    assert ws.same(original, tmp_path / "a.id.json").verdict == "same values"


def test_a_bias_of_zeros_and_a_head_stored_twice_do_not_count(tmp_path: Path) -> None:
    def tie(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    stored, tied = copied(tmp_path / "stored", tie), copied(tmp_path / "tied", lambda t: t.pop("lm_head.weight"))
    assert ws.identity(stored).wsid == ws.identity(tied).wsid
    assert ws.identity(stored).left_out == {"unembedding": "tied: the values of tokens"}
    zero = digest([np.zeros(4)], (4,))
    assert wsid({"layer 0 q.bias": zero}) == wsid({})


@given(st.integers(0, 1000))
def test_a_sketch_does_not_depend_on_blocks(seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(19_000).astype(np.float32)
    cut = seed * 19
    at_once, parts = Sketching(), Sketching()
    at_once.add(values)
    parts.add(values[:cut])
    parts.add(values[cut:])
    x, y = at_once.finished(), parts.finished()
    assert x is not None and y is not None and np.allclose(x.sums, y.sums, atol=1)


def test_a_sketch_estimates_the_distance_within_its_deviation() -> None:
    """Over 200 pairs: the mean of squares is right to 3 standard deviations of its mean."""
    drawn, ratios = np.random.default_rng(0), []
    for _ in range(200):
        x, error = drawn.standard_normal((2, 3000)).astype(np.float32)
        a, b = Sketching(), Sketching()
        a.add(x)
        b.add(x + np.float32(0.1) * error)
        original, copy = a.finished(), b.finished()
        assert original is not None and copy is not None
        true = 0.1 * np.linalg.norm(error[:1024]) / np.linalg.norm(x[:1024])
        ratios.append((original.distance(copy) / true) ** 2)
    assert abs(np.mean(ratios) - 1) < 3 * np.sqrt(2 / 16 / 200) and np.std(ratios) < 0.5


def test_a_tensor_of_another_layer_is_named(tmp_path: Path) -> None:
    def swap(tensors: dict[str, np.ndarray]) -> None:
        first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
        tensors[first] = tensors[second]

    result = ws.same(MANIFEST, copied(tmp_path / "copy", swap))
    (judged,) = result.differing
    assert result.verdict == "different" and judged.role == "up" and judged.detail == "A's layer 1 up"


def test_a_sample_is_refused() -> None:
    with pytest.raises(CheckpointError, match="an identity is of all values"):
        ws.same(MANIFEST, FIXTURES / "llama", sample=0.5)


def test_a_signed_identity_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("securesystemslib", reason="signatures come with the extra `attest`")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pem").write_bytes(private)
    (tmp_path / "key.pub").write_bytes(public)
    signed = tmp_path / "model.id.json"
    done = run("id", FIXTURES / "llama", "--out", signed, "--sign-key", tmp_path / "key.pem")
    assert done.exit_code == 0, done.output
    assert run("same", signed, FIXTURES / "mlx", "--key", tmp_path / "key.pub").exit_code == 0
    refused = run("same", MANIFEST, FIXTURES / "mlx", "--key", tmp_path / "key.pub")
    assert refused.exit_code == 2 and "has no signature" in refused.output
