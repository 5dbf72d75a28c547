"""`weightscope audit` over every fixture: it succeeds, and its files are complete."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.audit import audit_of, names_in
from tests.support.plants.faults import initialised_anew
from tests.support.tiny_models import EACH_MECHANISM, MECHANISMS, fixture
from weightscope.core.files import REPORT
from weightscope.heads.audit.audit import FIGURES, AuditOptions, measured_layer
from weightscope.heads.audit.factor_findings import factor_findings
from weightscope.heads.audit.measure import MeasuredHeads
from weightscope.model.layers.kernel import why_no_kernel

TABLES = ["findings.csv", "findings.json", "heads.csv", "percentiles.csv", *REPORT, "spectra.npz"]
PICTURES = [f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")] + ["spectra.csv"]

OF_FACTORS = {"transposed_factors", "swapped_factors", "mixed_factors", "unbalanced_factors", "noise_floor"}
UNSAID = OF_FACTORS | {"untrained", "norm_offset"}


def audited(name: str, out: Path) -> ws.Model:
    """A fixture, audited by the command into `out`."""
    model = fixture(name)
    result = audit_of(model.folder, out, *(["--tower", model.case.tower] if model.case.tower else []))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == str(out / "report.html")
    return model.model


@pytest.mark.parametrize("name", EACH_MECHANISM)
def test_an_audit_ends_well_and_its_files_are_whole(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = audited(name, out)
    config, layers = model.config, list(model.own_layers)
    reads_tokens = bool(model.family.inputs.tokens)
    more = ["directions.json"] * reads_tokens + ["mixers.csv", "mixers.png", "mixers.svg"] * bool(model.mixer_layers)
    assert names_in(out) == sorted([*TABLES, *PICTURES, *more])
    with (out / "heads.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == [
        (layer, head) for layer in layers for head in range(config.n_heads)
    ]
    for row in rows:  # nothing is unknown, but for ratios of a part of W_QK that a layer does not have
        parts = model.layer(int(row["layer"])).qk_forms()
        lacking = tuple(f"_{part}" for part in ("free", "turning") if not parts[part].any())
        if row["sink_share"] == "":
            lacking += ("sink_share", "kernel_peak", "fast_share")
            assert "Sinks at the first token are not known: " in (out / "report.html").read_text()
        layer = model.layer(int(row["layer"]))
        if layer.rotation is None or why_no_kernel(layer):
            lacking += ("fast_share",)
            lacking += ("kernel_peak",) * (layer.additive is None or bool(why_no_kernel(layer)))
        if row["sink_share"] == "" or model.layer(int(row["layer"])).modulated:
            lacking += ("sink_kind",)
        if row["qk_logit_bound"] == "":
            lacking += ("qk_logit_bound",)
            assert "Nothing bounds the logits: " in (out / "report.html").read_text()
        if int(row["layer"]) != 0:
            lacking += ("qk_token_logit",)
        if model.layer(int(row["layer"])).sinks is None:
            lacking += ("learned_sink",)
        assert not [key for key, value in row.items() if value == "" and not key.endswith(lacking)]
    with np.load(out / "spectra.npz", allow_pickle=False) as spectra:
        assert spectra["layers"].tolist() == layers
        assert spectra["qk_singular_values"].shape[:2] == (len(layers), config.n_heads)
    findings = json.loads((out / "findings.json").read_text())
    assert UNSAID.isdisjoint(finding["kind"] for finding in findings)  # all is random, gains and biases too
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', (out / "report.html").read_text(), re.DOTALL)[1])
    assert facts["columns"].keys() == rows[0].keys() - {"layer", "head", "kv_head"}
    if reads_tokens:
        assert len(json.loads((out / "directions.json").read_text())) == len(rows)


@pytest.mark.parametrize("name", sorted(MECHANISMS - {"deepseek_v3"}))  # without factors through a latent
def test_layers_drawn_anew_are_neither_transposed_nor_swapped(name: str) -> None:
    model = fixture(name).model
    layer = model.layers[0]
    options = AuditOptions(deltas=(0,), directions=0)
    layers = {i: measured_layer(initialised_anew(replace(layer, index=i)), [], options) for i in range(8)}
    assert not list(factor_findings(model, MeasuredHeads(layers, model.config.d_model)))


def stream_rows(model: ws.Model) -> np.ndarray:
    """Every token as it enters layer 0 without a position, worked out from the stored tensors."""
    inputs, rows = model.family.inputs, model.embeddings.tokens.astype(np.float64)
    if not inputs.after:
        return rows
    gamma, beta, w, b = (
        model.checkpoint[model.prefix + name].read().astype(np.float64)
        for module in (inputs.norm.module, inputs.after)
        for name in (f"{module}.weight", f"{module}.bias")
    )
    normed = (rows - rows.mean(axis=1, keepdims=True)) / np.sqrt(
        rows.var(axis=1, keepdims=True) + model.config.norm_eps
    )
    return (normed * gamma + beta) @ w.T + b


@pytest.mark.parametrize("name", ["albert", "electra", "bert", "opt_post_norm", "gemma"])
def test_tokens_along_a_direction_are_the_nearest_that_enter_the_stream(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = audited(name, out)
    rows = stream_rows(model)  # (V, d)
    for head in json.loads((out / "directions.json").read_text()):
        layer = model.layer(head["layer"])
        seen = rows - rows.mean(axis=1, keepdims=True) if layer.norm is not None and layer.norm.centred else rows
        u = layer.head(head["head"]).qk.svd()[0]
        line = head["lines"][0]
        along = np.linalg.norm(seen @ u[:, : line["last"]], axis=1) / np.linalg.norm(seen, axis=1)
        nearest = {
            side["rows"][0]: abs(side["cosines"][0]) for side in line["sides"] if side["name"].startswith("query")
        }
        assert max(nearest.values()) == pytest.approx(along.max(), abs=1e-3)
        assert any(along[row] == pytest.approx(along.max(), abs=1e-5) for row in nearest)
