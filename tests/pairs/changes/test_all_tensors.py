"""Every tensor of two checkpoints: planted changes are found, each as its kind."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support import files
from tests.support.commands import run
from tests.support.figures import undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.checkpoint import blocks
from weightscope.model.metrics.spectra import low_rank
from weightscope.pairs.changes.all_tensors import TensorChanges, compare_tensors
from weightscope.pairs.deeds.deed import What
from weightscope.pairs.deeds.rounding import CASTS, casts_between

Weights = dict[str, np.ndarray]
D = 128
MATRIX, OTHER = "h.1.attn.c_attn.weight", "h.0.attn.c_proj.weight"
RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within every matrix."""
    monkeypatch.setattr(blocks, "BLOCK", 50 * D)


@pytest.fixture(scope="module")
def base() -> Weights:
    return gpt2_weights(n_layers=3, d=D, vocab=300) | {"extra": np.arange(5, dtype=np.float32) + 0.1}


@pytest.fixture(scope="module")
def base_folder(base: Weights, tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), base)


def compared(base_folder: Path, weights: Weights, folder: Path) -> TensorChanges:
    return compare_tensors(ws.open_model(base_folder), ws.open_model(write_checkpoint(folder / "b", weights)))


def bfloat16(x: np.ndarray) -> np.ndarray:
    """As torch rounds, by arithmetic rather than bits: to 8 significant binary digits, ties to even."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)


def lora(shape: tuple[int, int], rank: int) -> np.ndarray:
    return 0.02 * RNG.standard_normal((shape[0], rank)) @ RNG.standard_normal((rank, shape[1]))


def round_all(w: Weights) -> None:
    for name in w:
        w[name] = bfloat16(w[name])


def halve_precision(w: Weights) -> None:
    for name in w:
        w[name] = w[name].astype(np.float16)


def quantise(w: Weights) -> None:
    """Int4 with a scale for every 32 neighbours, kept as float32."""
    groups = w[MATRIX].reshape(-1, 32)
    scale = np.abs(groups).max(axis=1, keepdims=True) / 7
    w[MATRIX] = (np.rint(groups / scale) * scale).reshape(w[MATRIX].shape).astype(np.float32)


def erase_a_head_and_quantise(w: Weights) -> None:
    quantise(w)
    w[MATRIX][:, 16:32] = 0  # a head of 16


def replace_a_head_and_quantise(w: Weights) -> None:
    w[MATRIX][:, 16:32] = RNG.permutation(w[MATRIX][:, 16:32], axis=0)
    quantise(w)


def merge_lora(w: Weights) -> None:
    w[MATRIX] = (w[MATRIX] + lora(w[MATRIX].shape, 4)).astype(np.float32)
    w[OTHER] = (w[OTHER] + lora(w[OTHER].shape, 8)).astype(np.float32)


def fine_tune(w: Weights) -> None:
    for name in w:
        w[name] = (w[name] + 1e-3 * RNG.standard_normal(w[name].shape)).astype(np.float32)


def fine_tune_a_layer(w: Weights) -> None:
    for name in w:
        if name.startswith("h.2."):
            w[name] = (w[name] + 1e-3 * RNG.standard_normal(w[name].shape)).astype(np.float32)


def move_rows(w: Weights) -> None:
    w["wte.weight"][[3, 40]] += 1


def grow(w: Weights) -> None:
    w["wte.weight"] = np.concatenate([w["wte.weight"], RNG.standard_normal((4, D)).astype(np.float32)])


def lose_and_gain(w: Weights) -> None:
    del w["extra"]
    w["lm_head.weight"] = w["wte.weight"].copy()


def reshape(w: Weights) -> None:
    w["h.2.attn.c_proj.weight"] = w["h.2.attn.c_proj.weight"][:, :-1]


def break_one(w: Weights) -> None:
    w[MATRIX][2, 2] = np.nan


CASES: list[tuple[Callable[[Weights], None], dict[str, int], str]] = [
    (lambda w: None, {"identical": 21}, "Every tensor is identical, 21 tensors in all."),
    (round_all, {"rounded": 21}, "21 the same after rounding (A to BF16)"),
    (halve_precision, {"rounded": 21}, "21 the same after rounding (A to F16)"),
    (quantise, {"quantised": 1, "identical": 20}, "(B to 15 values in 32 neighbours)"),
    (erase_a_head_and_quantise, {"quantised in part": 1, "identical": 20}, "1 quantised, with other values in some"),
    (replace_a_head_and_quantise, {"quantised in part": 1, "identical": 20}, "1 quantised, with other values in some"),
    (merge_lora, {"low rank": 2, "identical": 19}, "by a matrix of low rank (rank 4, 8). They changed in 2 of 3"),
    (fine_tune, {"changed": 21}, "They changed in every layer and in 3 tensors outside the layers."),
    (fine_tune_a_layer, {"changed": 6, "identical": 15}, "They changed in 1 of 3 layers, 2."),
    (move_rows, {"few rows": 1, "identical": 20}, "(2 of 300 rows)"),
    (grow, {"resized": 1, "identical": 20}, "(300 rows to 304; those that both have: identical)"),
    (lose_and_gain, {"missing": 1, "identical": 21}, "1 only in the first: extra."),  # the head is the embedding
    (reshape, {"reshaped": 1, "identical": 20}, "1 of another shape"),
    (break_one, {"not finite": 1, "identical": 20}, "1 with an unknown change: NaN or infinity"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kinds", "words"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_each_change_is_given_its_kind(
    change: Callable[[Weights], None],
    kinds: dict[str, int],
    words: str,
    base: Weights,
    base_folder: Path,
    tmp_path: Path,
) -> None:
    weights = {name: w.copy() for name, w in base.items()}
    change(weights)
    changes = compared(base_folder, weights, tmp_path)
    assert {kind.value: count for kind, count in changes.kinds.items()} == kinds
    assert words in changes.lead


def test_table_and_sentence_use_the_same_words(base: Weights, base_folder: Path, tmp_path: Path) -> None:
    weights = {name: w.copy() for name, w in base.items()}
    lose_and_gain(weights)
    weights[MATRIX] = np.random.default_rng(5).standard_normal(base[MATRIX].shape).astype(np.float32)
    shown = compared(base_folder, weights, tmp_path).moved_most(10)
    kinds = dict(zip(shown["tensor"], shown["kind"], strict=True))
    assert kinds == {"extra": "only in the first", MATRIX: "with other weights"}
    assert shown.names == ["tensor", "kind", "change"]  # a column without a value is left out


def test_sizes_of_changes_equal_numpys(base: Weights, base_folder: Path, tmp_path: Path) -> None:
    weights = {name: w.copy() for name, w in base.items()}
    fine_tune(weights)
    changes = compared(base_folder, weights, tmp_path)
    for change in changes.changes:
        a, b = base[change.name].astype(np.float64), weights[change.name].astype(np.float64)
        assert change.change == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-5)
        assert change.largest == np.abs(b - a).max() and change.values_changed == (a != b).sum()


@pytest.mark.parametrize("save", [np.float32, np.float16, bfloat16], ids=["F32", "F16", "BF16"])
def test_rank_of_a_merge_is_found_through_rounding(
    save: Callable[[np.ndarray], np.ndarray], base: Weights, tmp_path: Path
) -> None:
    """A merge is rounded to the dtype it is saved in; that rounding has full rank, and is not counted as rank."""
    stored = {name: np.asarray(save(w)) for name, w in base.items()}
    merged = stored | {MATRIX: np.asarray(save(stored[MATRIX].astype(np.float64) + lora(base[MATRIX].shape, 4)))}
    if save is bfloat16:  # in files that say so
        for name, weights in (("a", stored), ("b", merged)):
            write_checkpoint(tmp_path / name, weights)
            files.write(tmp_path / name / "model.safetensors", {key: files.bfloat16(w) for key, w in weights.items()})
        changes = compare_tensors(*(ws.open_model(tmp_path / name) for name in ("a", "b")))
    else:
        changes = compared(write_checkpoint(tmp_path / "a", stored), merged, tmp_path)
    (change,) = (change for change in changes.changes if change.kind is not What.IDENTICAL)
    assert (change.name, change.kind.value, change.rank) == (MATRIX, "low rank", 4)


def test_names_match_under_any_prefix(base: Weights, base_folder: Path, tmp_path: Path) -> None:
    prefixed = {f"transformer.{name}": w for name, w in base.items()}
    folder = write_checkpoint(tmp_path / "b", base)
    save_file(prefixed, folder / "model.safetensors")
    changes = compare_tensors(ws.open_model(base_folder), ws.open_model(folder))
    assert dict(changes.kinds) == {What.IDENTICAL: 21}


FLOATS = [("BF16", "bfloat16"), ("F16", "float16"), ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")]


@pytest.mark.check
@pytest.mark.parametrize(("name", "torch_name"), FLOATS)
def test_casts_equal_torchs(name: str, torch_name: str) -> None:
    torch = pytest.importorskip("torch")
    x = (RNG.standard_normal(5000) * 10.0 ** RNG.uniform(-6, 1, 5000)).astype(np.float32)
    expected = torch.from_numpy(x).to(getattr(torch, torch_name)).float().numpy()
    np.testing.assert_array_equal(CASTS[name](x), expected)
    assert name in casts_between(x, expected) and not casts_between(expected, x)


@pytest.mark.parametrize("rank", [1, 7, 40])
def test_low_rank_is_exact_and_full_rank_is_not_low(rank: int) -> None:
    w = RNG.standard_normal((600, rank)) @ np.diag(10.0 ** -np.linspace(0, 3, rank)) @ RNG.standard_normal((rank, 200))
    noise = 1e-6 * RNG.standard_normal(w.shape)
    assert low_rank(lambda: np.split(w + noise, 6), w.shape, 1e-6) == rank
    assert low_rank(lambda: np.split(w + 30 * noise, 6), w.shape, 1e-6) is None  # more is left than the errors


def test_memory_does_not_grow_with_tensor_size(tmp_path: Path) -> None:
    """Checkpoints of 8 MB, a block being a 300th of that, are compared and a rank is looked for."""
    weights = gpt2_weights(n_layers=32, d=D)
    moved = {name: w + np.float32(0.1) * w[::-1] if ".0.attn" in name else w for name, w in weights.items()}
    models = [ws.open_model(write_checkpoint(tmp_path / name, w)) for name, w in (("a", weights), ("b", moved))]
    assert models[0].checkpoint.nbytes > 8 << 20
    tracemalloc.start()
    try:
        compare_tensors(*models)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


# The command


def test_first_line_of_compare_names_unread_tensors(base: Weights, base_folder: Path, tmp_path: Path) -> None:
    weights = {name: w.copy() for name, w in base.items()}
    merge_lora(weights)
    lose_and_gain(weights)
    after = write_checkpoint(tmp_path / "b", weights)
    with undrawn():
        result = run("compare", base_folder, after, "--out", tmp_path / "out")
        assert "Not compared: 1 of 21 tensors (20 bytes of " in result.stdout.splitlines()[0], result.output
        assert not (tmp_path / "out" / "tensors.csv").exists()
        command = ["compare", str(base_folder), str(after), "--all", "--out", str(tmp_path / "out")]
        result = run(*command)
    first = result.stdout.splitlines()[0]
    assert "Not compared" not in first and "by a matrix of low rank (rank 4, 8)" in first
    assert len((tmp_path / "out" / "tensors.csv").read_text().splitlines()) == 23
    assert "Everything in the files" in (tmp_path / "out" / "report.html").read_text()
    findings = json.loads((tmp_path / "out" / "findings.json").read_text())
    (finding,) = (finding for finding in findings if finding["kind"] == "tensor_missing")
    assert [member["name"] for member in finding["members"]] == ["extra"]


def test_gains_set_to_one_are_not_rounded(base: Weights, base_folder: Path, tmp_path: Path) -> None:
    """A rounding to steps of 0.25 also gives one, and nothing shows that it was done."""
    gains = "h.1.ln_1.weight"
    near_one = base | {gains: (1 + 0.1 * RNG.uniform(-1, 1, D)).astype(np.float32)}
    write_checkpoint(tmp_path / "near", near_one)
    changes = compared(tmp_path / "near", near_one | {gains: np.ones(D, np.float32)}, tmp_path)
    (change,) = [change for change in changes.changes if change.name == gains]
    assert change.kind is What.CONSTANT


def test_few_values_are_rounded_where_other_tensors_are(base: Weights, base_folder: Path, tmp_path: Path) -> None:
    """A rounded copy in float32 rounds gains near one to one, and single numbers."""
    near_one = base | {"h.1.ln_1.weight": 1 + np.float32(1e-4) * RNG.uniform(-1, 1, D).astype(np.float32)}
    write_checkpoint(tmp_path / "near", near_one)
    rounded = {name: bfloat16(w) for name, w in near_one.items()}
    assert np.ptp(rounded["h.1.ln_1.weight"]) == 0
    changes = compared(tmp_path / "near", rounded, tmp_path)
    kinds = {
        change.name: (change.kind.value, change.detail)
        for change in changes.changes
        if change.kind is not What.IDENTICAL
    }
    assert {*kinds.values()} == {("rounded", "A to BF16")} and {"extra", "h.1.ln_1.weight"} <= {*kinds}
