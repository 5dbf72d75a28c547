"""Faults planted in real weights are found by kind and place, and nothing else is; new weights give none."""

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.slow import mostly_checked
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.tiny_models import FIXTURES
from tests.support.weights import shared
from weightscope.core.files import Files
from weightscope.report.findings import (
    SEVERITIES,
    Finding,
    Findings,
    aggregated,
    finding_kinds,
    kind_of,
    of_head,
    spans,
)

Weights = dict[str, np.ndarray]
Place = tuple[str, int | None, int | None, str | None]


def found_in(folder: Path) -> Findings:
    return ws.audit(ws.open_model(folder), directions=0).findings


def places(findings: Findings) -> set[Place]:
    return {(finding.kind, finding.layer, finding.head, finding.map) for finding in findings}


@pytest.fixture(scope="module")
def vit() -> tuple[Path, Weights]:
    folder = shared("vit-tiny")
    return folder, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def known(vit) -> set[Place]:
    """What the untouched checkpoint has anyway."""
    return places(found_in(vit[0]))


def name(layer: int, which: str) -> str:
    module = {"o": "output.dense"}.get(which, f"attention.{which}")
    return f"vit.encoder.layer.{layer}.attention.{module}.weight"


def rows(head: int) -> slice:
    return slice(64 * head, 64 * head + 64)  # vit-tiny's heads are 64 wide


def plant_nan(w: Weights) -> None:
    w[name(4, "query")][64 + 3, 17] = np.nan


def plant_infinity(w: Weights) -> None:
    w[name(4, "o")][5, 130] = np.inf


def plant_zero(w: Weights) -> None:
    w[name(6, "o")][:, rows(2)] = 0


def plant_near_dead(w: Weights) -> None:
    w[name(7, "value")][rows(0)] *= 1e-5


def plant_collapse(w: Weights) -> None:
    u, s, vt = np.linalg.svd(w[name(3, "key")][rows(1)])
    s[3:] = 0
    w[name(3, "key")][rows(1)] = u * s @ vt[:64]


def plant_spike(w: Weights) -> None:
    for which in ("query", "key"):
        u, s, vt = np.linalg.svd(w[name(8, which)][rows(0)], full_matrices=False)
        w[name(8, which)][rows(0)] += 5 * s[0] * np.outer(u[:, 0], vt[0])


def plant_copy(w: Weights) -> None:
    """Head 2 of layer 9 asks what head 0 of layer 2 asks, in another basis."""
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((64, 64)))[0]
    for which in ("query", "key"):
        # Gains differ between the layers, so they are taken out: the copy is of the folded heads.
        gains = w["vit.encoder.layer.2.layernorm_before.weight"] / w["vit.encoder.layer.9.layernorm_before.weight"]
        w[name(9, which)][rows(2)] = basis @ (w[name(2, which)][rows(0)] * gains)


def plant_loud_head(w: Weights) -> None:
    w[name(5, "value")][rows(1)] *= 40


def plant_loud_layer(w: Weights) -> None:
    for which in ("query", "key"):  # one alone would leave its partner's scale
        w[name(6, which)] *= np.sqrt(12)


def plant_loud_last_layer(w: Weights) -> None:
    w[name(11, "o")] *= 12


def plant_outlier_dimension(w: Weights) -> None:
    w[name(10, "key")][:, 77] *= 40


def plant_gain(w: Weights) -> None:
    """A gain that the value map alone sees: queries and keys undo it."""
    w["vit.encoder.layer.7.layernorm_before.weight"][33] *= 60
    for which in ("query", "key", "value"):
        w[name(7, which)][:, 33] /= 60


def plant_tiny_row(w: Weights) -> None:
    w["vit.embeddings.position_embeddings"][0, 150] *= 0.01


FAULTS: list[tuple[Callable[[Weights], None], Place]] = [
    (plant_nan, ("not_finite", 4, 1, "qk")),
    (plant_infinity, ("not_finite", 4, 2, "vo")),
    (plant_zero, ("zero_head", 6, 2, "vo")),
    (plant_near_dead, ("near_dead_head", 7, 0, "vo")),
    (plant_collapse, ("rank_collapsed", 3, 1, "qk")),
    (plant_spike, ("spectral_spike", 8, 0, "qk")),
    (plant_copy, ("duplicate_heads", 2, 0, "qk")),
    (plant_loud_head, ("outlier_head", 5, 1, "vo")),
    (plant_loud_layer, ("layer_off_trend", 6, None, "qk")),
    (plant_loud_last_layer, ("layer_off_trend", 11, None, "vo")),
    (plant_outlier_dimension, ("outlier_dimension", 10, None, "qk")),
    (plant_gain, ("outlier_dimension", 7, None, None)),
    (plant_tiny_row, ("undertrained_rows", None, None, None)),
]


@pytest.mark.parametrize(("plant", "place"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_found_and_nothing_else(plant, place, vit, known, tmp_path) -> None:
    folder, weights = vit
    broken = {key: value.copy() for key, value in weights.items()}
    plant(broken)
    save_file(broken, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    findings = found_in(tmp_path)
    assert place not in known
    assert places(findings) - known == {place}
    (finding,) = (
        candidate for candidate in findings if (candidate.kind, candidate.layer, candidate.head, candidate.map) == place
    )
    assert finding.text.endswith(".")
    assert Findings([finding]).as_json()[0]["look_next"] == kind_of(place[0]).look_next


def test_the_text_of_a_finding_says_where_its_number_comes_from(vit, tmp_path) -> None:
    folder, weights = vit
    broken = {key: value.copy() for key, value in weights.items()}
    plant_nan(broken)
    plant_copy(broken)
    plant_tiny_row(broken)
    save_file(broken, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    by_kind = {finding.kind: finding for finding in found_in(tmp_path)}
    assert f"1 in {name(4, 'query')}" in by_kind["not_finite"].text
    assert by_kind["not_finite"].number == 1
    assert "layer 9 head 2" in by_kind["duplicate_heads"].text
    assert by_kind["duplicate_heads"].number == pytest.approx(1, abs=1e-4)
    assert "row 150" in by_kind["undertrained_rows"].text
    assert by_kind["undertrained_rows"].items == (150,)


@pytest.mark.check
def test_gpt2s_own_peculiarities_are_found() -> None:
    """Position 1023 was hardly trained (its norm is 0.12, the others' 3.37); layer 11 head 8 writes one direction."""
    findings = found_in(shared("gpt2-attention"))
    rows_of_positions = next(finding for finding in findings if finding.kind == "undertrained_rows")
    assert rows_of_positions.items == (1023,)
    assert rows_of_positions.number == pytest.approx(0.118, abs=1e-3)
    assert ("spectral_spike", 11, 8, "vo") in places(findings)


def fresh_gpt2(n_layers: int, d: int, seed: int) -> Weights:
    """GPT-2's initialisation: normal 0.02, residual projections divided by sqrt(2 layers), gains one, biases zero."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    weights = {"wte.weight": normal(300, d), "wpe.weight": normal(64, d)}
    for i in range(n_layers):
        weights |= {
            f"h.{i}.ln_1.weight": np.ones(d, np.float32),
            f"h.{i}.ln_1.bias": np.zeros(d, np.float32),
            f"h.{i}.attn.c_attn.weight": normal(d, 3 * d),
            f"h.{i}.attn.c_attn.bias": np.zeros(3 * d, np.float32),
            f"h.{i}.attn.c_proj.weight": normal(d, d, scale=0.02 / np.sqrt(2 * n_layers)),
            f"h.{i}.attn.c_proj.bias": np.zeros(d, np.float32),
        }
    return weights


SIZES = [(12, 128, 4), (1, 64, 2), (2, 32, 4), (6, 16, 4), (1, 16, 1), (3, 48, 12)]


@pytest.mark.parametrize("seed", mostly_checked(range(3), fast=[0]))
@pytest.mark.parametrize(("n_layers", "d", "n_heads"), SIZES)
def test_a_fresh_initialisation_is_told_and_nothing_else_unless_heads_are_narrow(
    n_layers, d, n_heads, seed, tmp_path
) -> None:
    folder = write_checkpoint(tmp_path / "fresh", fresh_gpt2(n_layers, d, seed), n_head=n_heads)
    findings = found_in(folder)
    assert [finding.kind for finding in findings] == ["untrained"] * (d >= 64)
    assert all(len(finding.members) == n_layers and finding.severity == "warning" for finding in findings)


@pytest.mark.parametrize("name", ["h.1.ln_1.weight", "h.0.attn.c_proj.bias", "h.1.ln_2.weight"])
def test_one_gain_or_bias_that_moved_is_no_initialisation(name: str, tmp_path) -> None:
    weights = fresh_gpt2(2, 128, 0) | {f"h.{i}.ln_2.weight": np.ones(128, np.float32) for i in (0, 1)}
    assert "untrained" in found_in(write_checkpoint(tmp_path / "fresh", weights)).kinds
    weights[name] = weights[name] + np.float32(1e-6) * np.arange(128, dtype=np.float32)
    assert "untrained" not in found_in(write_checkpoint(tmp_path / "moved", weights)).kinds


def test_trained_factors_with_folded_gains_are_no_initialisation(vit, tmp_path) -> None:
    folder, weights = vit
    flat = {n: np.full_like(w, n.endswith("weight")) if w.ndim == 1 else w for n, w in weights.items()}
    save_file(flat, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    assert "untrained" not in found_in(tmp_path).kinds


def test_a_padding_row_is_zero_by_design(tmp_path) -> None:
    weights = fresh_gpt2(2, 32, 0)
    weights["wte.weight"][7] = 0
    findings = found_in(write_checkpoint(tmp_path / "told", weights, pad_token_id=7))
    assert findings == []
    untold = found_in(write_checkpoint(tmp_path / "untold", weights))
    assert [(finding.kind, finding.items) for finding in untold] == [("undertrained_rows", (7,))]


@pytest.mark.parametrize("known", [True, False])
def test_where_most_positions_are_untrained_it_is_they_that_are_named(known: bool, tmp_path: Path) -> None:
    """321 of 512 positions are as drawn from normal(0, 0.02); the 191 trained ones are not outliers."""
    weights = fresh_gpt2(1, 32, 0)
    rng = np.random.default_rng(0)
    trained = np.cumsum(rng.standard_normal((191, 32)), axis=0) * 0.05 + 1
    weights["wpe.weight"] = np.concatenate([trained, 0.02 * rng.standard_normal((321, 32))]).astype(np.float32)
    folder = write_checkpoint(tmp_path, weights, **({"initializer_range": 0.02} if known else {}))
    (finding,) = found_in(folder)
    assert (finding.kind, finding.measure) == ("undertrained_rows", "position_norm")
    assert finding.text.startswith("321 of 512 position rows are as initialised, or hardly trained")
    assert sorted(row.index for row in finding.members) == [*range(191, 512)]
    assert finding.usual == pytest.approx(np.median(np.linalg.norm(trained, axis=1)), rel=1e-3)


@pytest.mark.parametrize("value", ["0.02", -1, float("nan"), [0.02], True])
def test_an_absurd_initializer_range_is_no_matter(value: object, tmp_path: Path) -> None:
    assert found_in(write_checkpoint(tmp_path, fresh_gpt2(1, 16, 0), initializer_range=value)) == []


def test_a_nan_in_an_embedding_that_was_read_before_is_a_finding(tmp_path: Path) -> None:
    """The audit reads everything anew: it shares nothing with what the model has read and checked."""
    weights = gpt2_weights()
    weights["wte.weight"][7, 3] = np.nan
    model = ws.open_model(write_checkpoint(tmp_path, weights))
    assert model.embeddings.n_tokens and model.layers[0] and model.first_layer
    findings = ws.audit(model, directions=0).findings
    assert [finding.items for finding in findings if finding.measure == "token_rows"] == [(7,)]
    with pytest.raises(ws.CheckpointError, match="not finite"):
        model.embeddings.tokens  # noqa: B018


def test_heads_of_a_layer_that_collapse_for_one_reason_are_one_finding(tmp_path: Path) -> None:
    weights = fresh_gpt2(3, 96, 0)
    u, s, vt = np.linalg.svd(weights["h.1.attn.c_attn.weight"][:, 96:192])  # all keys of layer 1
    weights["h.1.attn.c_attn.weight"][:, 96:192] = (u[:, :2] * s[:2]) @ vt[:2]
    findings = found_in(write_checkpoint(tmp_path, weights, n_head=8))
    (finding,) = (candidate for candidate in findings if candidate.kind == "rank_collapsed")
    assert (finding.kind, finding.severity, finding.layer, finding.head) == ("rank_collapsed", "warning", 1, None)
    assert finding.heads == list(finding.items) == list(range(8)) and finding.where == "layer 1 heads 0-7 qk"
    assert finding.text.startswith("8 of 8 heads (0-7), the farthest head ")
    rows = Findings([finding]).table
    assert rows["head"].tolist() == rows["index"].tolist() == list(range(8))
    assert set(rows["finding"]) == {1} and set(rows["severity"]) == {"warning"}
    assert np.allclose(rows["number"].astype(float), 1)  # two directions of every head, the first aside


def test_findings_name_tokens_and_all_their_rows_are_in_the_table(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")
    weights = fresh_gpt2(1, 32, 0)
    weights["wte.weight"][100:140] *= 1e-3
    folder = write_checkpoint(tmp_path, weights)
    words = tokenizers.models.WordLevel({f"word{i}": i for i in range(300)}, unk_token="word0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    audit = ws.audit(ws.open_model(folder), directions=0)
    (finding,) = audit.findings
    assert f"'word{finding.items[0]}'" in finding.text
    rows = audit.findings.table
    assert sorted(rows["index"]) == list(range(100, 140))
    assert [f"word{row}" for row in rows["index"]] == rows["name"].tolist()
    norms = np.linalg.norm(weights["wte.weight"][list(rows["index"])], axis=1)
    np.testing.assert_allclose(rows["number"].astype(float), norms, rtol=1e-5)
    files = Files()
    audit.write_tables(files)
    assert files.contents["findings.csv"].decode() == rows.csv()


def test_every_reported_kind_is_registered_and_every_registered_kind_is_reported() -> None:
    """By the text of the package: a kind is used by its variable, or by its name outside the registrations."""
    reported, texts, kinds, used = set(), set(), {}, set()
    for path in Path(ws.__file__).parent.rglob("*.py"):
        registrations = set()
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Assign) and getattr(getattr(node.value, "func", None), "id", "") == "finding":
                kinds[node.targets[0].id] = ast.literal_eval(node.value.args[0])
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            if called == "finding":
                registrations |= set(ast.walk(node))
            elif called in ("Finding", "of_head"):
                reported |= {ast.literal_eval(k.value) for k in node.keywords if k.arg == "kind" and is_text(k.value)}
            elif is_text(node) and node not in registrations:
                texts.add(node.value)
    assert kinds.keys() <= used
    assert reported and reported <= finding_kinds().keys() <= texts | set(kinds.values())
    with pytest.raises(KeyError):
        _ = Finding(kind="never registered", measure="", number=1.0, text="").severity


def test_a_kind_makes_its_findings_and_is_a_decorator() -> None:
    kind = finding_kinds()["zero_head"]
    about = {"map": "qk", "measure": "qk_frobenius", "usual": 2.0, "text": "It is zero."}
    assert kind(layer=0, number=0.0, **about) == Finding(kind="zero_head", layer=0, number=0.0, **about)
    assert kind.of_head(0, 3, number=0.0, **about).heads == [3]
    assert kind(is_text) is is_text


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_the_most_severe_findings_come_first_and_are_counted() -> None:
    kinds = list(finding_kinds())
    findings = Findings(Finding(kind=kind, layer=0, measure="", number=1.0, text="") for kind in reversed(kinds))
    assert [finding.kind for finding in findings] == kinds
    severities = [finding.severity for finding in findings]
    assert severities == sorted(severities, key=SEVERITIES.index)
    errors = findings.severities["error"]
    warnings, notes = findings.severities["warning"], findings.severities["note"]
    assert findings.verdict == f"{errors} errors and {warnings} warnings; {notes} notes"
    assert findings.headline.startswith(f"{findings.verdict} (1 × ")
    assert "1 × weights that are not finite" in findings.headline
    assert findings.that_fail(["error"]).verdict == f"{errors} errors"
    milder = Findings(finding for finding in findings if finding.severity == "note")
    assert milder.verdict == f"No errors or warnings; {notes} notes"
    assert sum(findings.severities.values()) == len(kinds)
    assert {finding.severity for finding in findings.that_fail(["warning"])} == {"error", "warning"}
    assert [finding.kind for finding in findings.that_fail(["zero_head"])] == ["zero_head"]
    assert findings.that_fail(["note"]) == findings and not findings.that_fail([])
    assert Findings().headline == "No findings." and len(Findings().table) == 0
    assert spans([7, 2, 1, 0, 9, 10]) == "0-2, 7, 9-10"


@pytest.mark.parametrize(
    ("number", "usual"), [(1.0, np.inf), (np.inf, np.inf), (np.nan, 1.0), (-1.0, 2.0), (1.0, np.nan)]
)
def test_findings_whose_numbers_have_no_ratio_are_put_together(number: float, usual: float) -> None:
    about = {"kind": "large_bias", "measure": "key_bias", "text": "Too long.", "usual": usual}
    (together,) = aggregated([of_head(0, head, number=number, **about) for head in range(2)], 4)
    assert together.heads == [0, 1] and together.severity == "warning"


def test_a_rank_that_is_usual_in_the_first_layer_is_a_note_and_a_lost_one_a_warning(tmp_path: Path) -> None:
    """Spectra that fall by ten a direction, in whole layers and in one head; and directions that were cut off."""

    def kinds(layer: int, heads: slice, spectrum: np.ndarray) -> set[tuple[str, int | None]]:
        weights = fresh_gpt2(3, 96, 0)
        keys = weights[f"h.{layer}.attn.c_attn.weight"][:, 96:192].reshape(96, 8, 12)
        u, s, vt = np.linalg.svd(keys.transpose(1, 0, 2), full_matrices=False)
        keys.transpose(1, 0, 2)[heads] = ((u * (s * spectrum)[:, None]) @ vt)[heads]
        findings = found_in(write_checkpoint(tmp_path / f"{layer}-{heads}-{spectrum[-1]}", weights, n_head=8))
        return {
            (finding.kind, finding.head)
            for finding in findings
            if finding.layer == layer and finding.kind != "layer_off_trend"
        }

    falling, cut = 10.0 ** -np.minimum(np.arange(12), 5), np.arange(12) < 2.0
    assert kinds(0, slice(8), falling) == {("low_rank_heads", None)}
    assert kinds(0, slice(3, 4), falling) == {("rank_collapsed", 3)}  # unlike its layer
    assert kinds(1, slice(8), falling) == {("rank_collapsed", None)}  # one finding for the layer
    assert kinds(0, slice(8), cut) == {("rank_collapsed", None)}


def test_a_head_of_one_direction_has_a_rank_and_a_number(tmp_path: Path) -> None:
    weights = fresh_gpt2(2, 96, 0)
    keys = weights["h.1.attn.c_attn.weight"][:, 96:108]
    keys[:, 1:] = 0
    (finding,) = (
        candidate for candidate in found_in(write_checkpoint(tmp_path, weights, n_head=8)) if candidate.map == "qk"
    )
    assert (finding.kind, finding.head) == ("rank_collapsed", 0) and 0 <= finding.number <= 1


@pytest.mark.parametrize("gain", ["h.1.ln_2.weight", "h.0.ln_2.weight"])
def test_a_gain_of_zero_that_attention_does_not_read_is_found(tmp_path: Path, gain: str) -> None:
    weights = gpt2_weights()
    weights |= {f"h.{layer}.ln_2.{part}": np.ones(24, np.float32) for layer in range(2) for part in ("weight", "bias")}
    assert not ws.audit(write_checkpoint(tmp_path / "a", weights), directions=0).findings.kinds["zero_tensor"]
    weights["h.0.ln_2.bias"][:] = 0  # a bias may be
    weights[gain][:] = 0
    for everything in (False, True):
        audit = ws.audit(write_checkpoint(tmp_path / "b", weights), directions=0, all_tensors=everything)
        zero = [
            finding for finding in audit.findings if finding.kind == "zero_tensor" and finding.severity == "warning"
        ]
        assert [finding.members[0].name for finding in zero if "ln_2.weight" in finding.text] == [gain]


def test_gains_that_are_stored_less_one_may_be_zero(tmp_path: Path) -> None:
    """As Gemma's are at the start of training."""
    folder = tmp_path / "gemma2"
    shutil.copytree(FIXTURES / "gemma2", folder)
    weights = load_file(folder / "model.safetensors")
    width = next(len(gain) for name, gain in weights.items() if name.endswith("input_layernorm.weight"))
    weights["model.layers.0.pre_feedforward_layernorm.weight"] = np.zeros(width, np.float32)
    save_file(weights, folder / "model.safetensors")
    assert not ws.audit(folder, directions=0).findings.kinds["zero_tensor"]
    weights["model.layers.0.pre_feedforward_layernorm.weight"] -= 1
    save_file(weights, folder / "model.safetensors")
    (finding,) = (candidate for candidate in ws.audit(folder, directions=0).findings if candidate.kind == "zero_tensor")
    assert finding.text == "model.layers.0.pre_feedforward_layernorm.weight + 1: zero throughout."


@pytest.mark.parametrize("name", ["attn.c_attn.bias", "attn.c_proj.bias"])
def test_a_bias_that_one_layer_lacks_is_found(tmp_path: Path, name: str) -> None:
    """Biases of all layers may be zero, as at the start of training, or of most layers."""
    weights = gpt2_weights(n_layers=5)
    for zero in ((2,), (1, 2), (0, 1, 2), range(5)):
        changed = weights | {f"h.{layer}.{name}": np.zeros_like(weights[f"h.0.{name}"]) for layer in zero}
        folder = write_checkpoint(tmp_path / str(len(zero)), changed)
        found_zero = [finding for finding in ws.audit(folder, directions=0).findings if finding.kind == "zero_tensor"]
        named = [member.name for finding in found_zero for member in finding.members]
        assert named == ([f"h.{layer}.{name}" for layer in zero] if len(zero) < 3 else [])
        everything = ws.audit(folder, directions=0, all_tensors=True).findings
        assert everything.kinds["zero_tensor"] == len(found_zero)
