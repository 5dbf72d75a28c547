"""An audit's numbers against dense matrices and the heads themselves, its files, and runs that are killed."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from threadpoolctl import threadpool_limits

import weightscope as ws
from tests.support.files import bfloat16, write
from tests.support.tasks import tables_alone
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.weights import shared
from weightscope.attention.factored import Factored
from weightscope.audits import audit as audit_job
from weightscope.audits import delivery
from weightscope.audits import many as audits
from weightscope.audits.audit import AuditOptions, audit, measure
from weightscope.audits.finished_layers import FinishedLayers
from weightscope.cli import main
from weightscope.fingerprint import Fingerprint
from weightscope.folder import HIDDEN

FIXTURES = Path(__file__).parent.parent / "families" / "fixtures"
FIRST_COLUMNS = ["layer", "head", "kv_head", "qk_sigma1", "qk_sigma2"]
NEEDED = ["qk_frobenius", "qk_stable_rank", "qk_effective_rank", "vo_sigma1", "vo_sigma2", "vo_frobenius",
          "vo_stable_rank", "vo_effective_rank"]  # fmt: skip
RESULTS = ["heads.csv", "spectra.npz", "findings.json", "directions.json", "report.html",
           "heads.png", "heads.svg", "spectra.png", "spectra.svg", "depth.png", "depth.svg"]  # fmt: skip


def dense_singular_values(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Of the d x d product formed in float64."""
    with threadpool_limits(1, "blas"):  # more are no faster at this size, and far slower beside other work
        return np.linalg.svd(left.astype(np.float64) @ right.astype(np.float64).T, compute_uv=False)


def assert_as_dense(model: ws.Model, layer: int, heads: range, work: Path) -> None:
    """Singular values of both maps to 1e-6 of sigma_1, those past the head's width nothing but rounding."""
    measured = measure(model, work, AuditOptions(layers=(layer,)), resume=False).measured
    for h in heads:
        head = model.layer(layer).head(h)
        for name, w in (("qk", head.qk), ("vo", head.vo)):
            expected = dense_singular_values(w.left, w.right)
            found = measured[f"{name}_singular_values"][0, h]
            assert np.abs(found - expected[: len(found)]).max() < 1e-6 * expected[0], (layer, h, name)
            assert expected[len(found) :].max() < 1e-6 * expected[0]


@pytest.mark.parametrize(("layer", "head"), [(0, 11), (1, 8), (11, 8)])
def test_gpt2s_singular_values_are_those_of_the_dense_matrices(layer: int, head: int, tmp_path) -> None:
    assert_as_dense(ws.open_model(shared("gpt2-attention")), layer, range(head, head + 1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layer", range(12))
def test_every_head_of_gpt2_is_as_accurate(layer: int, tmp_path) -> None:
    assert_as_dense(ws.open_model(shared("gpt2-attention")), layer, range(12), tmp_path)


def test_gpt2s_affine_map_is_that_of_the_paper(tmp_path) -> None:
    """norm-based-attention, eqs 9-11, on a head with a large bias, formed whole."""
    model = ws.open_model(shared("gpt2-attention"))
    measured = measure(model, tmp_path, AuditOptions(layers=(11,)), resume=False).measured
    head = model.layer(11).head(0)
    d = model.config.d_model
    dense = np.zeros((d + 1, d + 1))
    dense[:d, :d], dense[d, :d], dense[d, d] = head.vo.dense(), head.vo_bias, 1
    expected = np.linalg.svd(dense, compute_uv=False)[: head.vo.rank_bound + 1]
    np.testing.assert_allclose(measured["vo_affine_singular_values"][0, 0], expected, atol=1e-6 * expected[0])


FORMS = [
    "llama",
    "llama_yarn",
    "gpt_neox",
    "qwen3",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2_lite",
    "glm4",
    "olmo2",
    "falcon_multi_query",
    "phi3_longrope",
    "gemma3",
    "qwen3_next",
    "dinov2",
    "dinov3_vit",
    "bert",
    "albert",
]


@pytest.mark.parametrize("fixture", FORMS)
def test_every_form_of_a_head_is_measured_as_the_head_has_it(fixture: str, tmp_path) -> None:
    """Distances, the mean over a window, what turns and what does not, biases and shared key-value heads."""
    model = ws.open_model(FIXTURES / fixture)
    found = measure(model, tmp_path, AuditOptions(deltas=(0, 1, 5), window=7), resume=False)
    for i, index in enumerate(found.layers.tolist()):
        layer = model.layer(index)
        for h, head in enumerate(layer.heads()):
            forms: dict[str, Factored] = {"": head.qk}
            if layer.rotation is not None:
                turned = [head.qk_at(delta) for delta in range(7)]
                mean = Factored(np.mean([w.left for w in turned], axis=0), head.qk.right)
                forms |= {"_delta1": head.qk_at(1), "_delta5": head.qk_at(5), "_mean7": mean}
                if len(layer.rotation.turning) < head.qk.rank_bound:
                    forms |= {"_free": head.qk_free, "_turning": head.qk_rotary_at(0)}
            names = {name for name in found.measured if name.startswith("qk_singular_values")}
            assert names == {f"qk_singular_values{form}" for form in forms}
            for form, w in forms.items():
                expected = dense_singular_values(w.left, w.right)
                s = found.measured[f"qk_singular_values{form}"][i, h]
                kept = min(len(s), len(expected))
                np.testing.assert_allclose(s[:kept], expected[:kept], atol=2e-6 * found.columns["qk_sigma1"][i, h])
            expected = dense_singular_values(head.vo.left, head.vo.right)
            s = found.measured["vo_singular_values"][i, h]
            np.testing.assert_allclose(s[: len(expected)], expected[: len(s)], atol=2e-6 * expected[0])
            assert found.columns["qk_bias_norm"][i, h] == pytest.approx(
                np.linalg.norm(head.qk_bias), rel=1e-4, abs=1e-6
            )
            assert found.columns["vo_bias_norm"][i, h] == pytest.approx(
                np.linalg.norm(head.vo_bias), rel=1e-4, abs=1e-6
            )
            assert found.kv_heads[h] == head.kv_head
        shares = found.measured["qk_column_share"][i]
        dense = sum(head.qk.dense() ** 2 / head.qk.frobenius() ** 2 for head in layer.heads())
        np.testing.assert_allclose(shares, dense.sum(axis=0) / len(layer.heads()), atol=1e-5)
    assert found.caveats == tuple(dict.fromkeys(c for i in found.layers.tolist() for c in model.layer(i).caveats))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Twelve small layers, so that a run can be stopped between them."""
    weights = gpt2_weights(n_layers=12, d=48, vocab=60)
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "twelve layers", weights)


@pytest.fixture(scope="module")
def out(checkpoint: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    result = CliRunner().invoke(main, ["audit", str(checkpoint), "--out", str(folder)])
    assert result.exit_code == 0, result.output
    assert str(folder / "report.html") in result.output
    return folder


def names_in(folder: Path) -> list[str]:
    """What a person sees of a folder of results."""
    return sorted(path.name for path in folder.iterdir() if path.name != HIDDEN)


def test_an_audit_leaves_its_results_and_nothing_else(out: Path) -> None:
    assert names_in(out) == sorted(RESULTS)
    assert sorted(path.name for path in (out / HIDDEN).iterdir()) == ["lock", "manifest.json"]


def test_heads_csv_has_a_row_a_head_and_the_columns_promised(out: Path) -> None:
    with (out / "heads.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:5] == FIRST_COLUMNS
    assert set(NEEDED) < set(table[0])
    assert [(row["layer"], row["head"]) for row in table] == [(str(i), str(h)) for i in range(12) for h in range(4)]
    assert {row["qk_route"] for row in table} <= {"gram", "qr"}
    with np.load(out / "spectra.npz", allow_pickle=False) as spectra:
        s = spectra["qk_singular_values"]
        assert s.dtype == np.float64
        assert s.shape == (12, 4, 12)
        assert spectra["vo_singular_values"].shape == (12, 4, 12)
        assert spectra["vo_affine_singular_values"].shape == (12, 4, 13)
        assert spectra["layers"].tolist() == list(range(12))
        for row, values in zip(table, s.reshape(48, 12), strict=True):
            assert float(row["qk_sigma1"]) == pytest.approx(values[0], rel=1e-5)
            assert float(row["qk_stable_rank"]) == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-5)


def test_findings_and_directions_are_lists_a_program_reads(out: Path, checkpoint: Path) -> None:
    assert isinstance(json.loads((out / "findings.json").read_text()), list)
    directions = json.loads((out / "directions.json").read_text())
    assert len(directions) == 48
    line = directions[5]["lines"][0]
    assert (line["map"], line["first"]) == ("qk", 1)
    model = ws.open_model(checkpoint)
    u = model.layer(directions[5]["layer"]).head(directions[5]["head"]).qk.svd()[0][:, : line["last"]]
    rows = model.embeddings.tokens - model.embeddings.tokens.mean(axis=1, keepdims=True)
    along = np.linalg.norm(rows @ u, axis=1) / np.linalg.norm(rows, axis=1)
    nearest = {row for side in line["sides"] if side["name"].startswith("query") for row in side["rows"][:1]}
    assert int(along.argmax()) in nearest


def test_chosen_layers_alone_are_read(checkpoint: Path, tmp_path) -> None:
    result = CliRunner().invoke(main, ["audit", str(checkpoint), "--out", str(tmp_path), "--layers", "2,7-8"])
    assert result.exit_code == 0, result.output
    with np.load(tmp_path / "spectra.npz") as spectra:
        assert spectra["layers"].tolist() == [2, 7, 8]
        assert spectra["qk_singular_values"].shape == (3, 4, 12)


@pytest.mark.parametrize("wrong", [["--layers", "3-1"], ["--layers", "x"], ["--layers", ""], ["--deltas", "1.5"],
                                   ["--layers", "0-9999999"], ["--layers", "40"], ["--window", "0"]])  # fmt: skip
def test_a_wrong_option_is_said_in_a_line(wrong: list[str], checkpoint: Path, tmp_path) -> None:
    result = CliRunner().invoke(main, ["audit", str(checkpoint), "--out", str(tmp_path), *wrong])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def run_until(command: list[str], there: tuple[Path, str], environment: dict[str, str]) -> bool:
    """Start a command and kill it with signal 9 as soon as a folder has a file of a name; False if it ended first."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if any(there[0].rglob(there[1])):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.001)
    return False


def test_a_run_killed_twice_ends_with_the_same_bytes(checkpoint: Path, out: Path, tmp_path) -> None:
    """Once between layers, once while results are written; then resumed to the end."""
    code = "from weightscope.cli import main; main()"
    command = [sys.executable, "-c", code, "audit", str(checkpoint), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parents[1])}
    assert run_until(command, (tmp_path, "layer-0003.npz"), environment)
    assert not (tmp_path / "heads.csv").exists()
    assert run_until([*command, "--resume"], (tmp_path, "heads.csv"), environment)
    subprocess.run([*command, "--resume"], env=environment, check=True, capture_output=True)
    assert names_in(tmp_path) == sorted(RESULTS)
    for name in RESULTS:
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes(), name


def test_finished_layers_are_not_measured_again_unless_something_has_changed(checkpoint, tmp_path, monkeypatch) -> None:
    measured: list[int] = []
    whole = audit_job.describe_layer

    def counted(layer, options):
        measured.append(layer.index)
        return whole(layer, options)

    monkeypatch.setattr(audit_job, "describe_layer", counted)
    model, options = ws.open_model(checkpoint), AuditOptions()
    first = audit(model, tmp_path, options)
    assert measured == list(range(12))
    again = audit(model, tmp_path, options, resume=True)
    assert measured == list(range(12))
    np.testing.assert_array_equal(first.heads.columns["qk_sigma1"], again.heads.columns["qk_sigma1"])
    audit(model, tmp_path, AuditOptions(window=8), resume=True)
    assert len(measured) == 24
    audit(model, tmp_path, AuditOptions(window=8))
    assert len(measured) == 36


def test_a_layer_is_taken_for_that_of_its_own_fingerprint_alone(tmp_path: Path) -> None:
    finished = FinishedLayers(tmp_path, Fingerprint.of(a=1), resume=False)
    finished.put(0, {"x": np.ones(2)})
    assert FinishedLayers(tmp_path, Fingerprint.of(a=1), resume=True).get(0) is not None
    assert FinishedLayers(tmp_path, Fingerprint.of(a=2), resume=True).get(0) is None
    assert finished.get(0) is None
    assert not list((tmp_path / HIDDEN).iterdir())


@pytest.mark.parametrize(
    ("window", "resume", "notice"),
    [
        (1, True, None),
        (1, False, "discards 2 finished layers of an interrupted audit; --resume would have kept them"),
        (2, True, "starts afresh: discards 2 finished layers of other options or weights"),
        (2, False, "discards 2 finished layers of an interrupted audit with other options or weights"),
    ],
)
def test_layers_that_are_thrown_away_are_spoken_of(
    window: int, resume: bool, notice: str | None, tmp_path: Path
) -> None:
    first = FinishedLayers(tmp_path, Fingerprint.of(a=1), resume=False)
    assert first.notice is None
    for layer in (0, 5, 7):
        first.put(layer, {"x": np.ones(2)})
    (first.folder / "layer-0007.npz").write_bytes(b"cut")  # was never finished, so nothing is lost with it
    assert FinishedLayers(tmp_path, Fingerprint.of(a=window), resume).notice == notice


def audit_of(checkpoint: Path, out: Path, *options: str) -> Result:
    """Without drawing figures: how they look is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "deliver", tables_alone)
        return CliRunner().invoke(main, ["audit", str(checkpoint), "--out", str(out), *options])


def interrupted(checkpoint: Path, out: Path, *options: str) -> Result:
    """An audit in which somebody presses Ctrl-C at layer 2."""
    whole = audits.measure_one

    def until(opened, index, options):
        if index == 2:
            raise KeyboardInterrupt
        return whole(opened, index, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audits, "measure_one", until)
        return audit_of(checkpoint, out, *options)


def test_an_interrupted_audit_says_how_to_go_on_and_what_is_lost_otherwise(checkpoint: Path, tmp_path: Path) -> None:
    stopped = interrupted(checkpoint, tmp_path)
    assert stopped.exit_code == 1
    assert stopped.stderr.startswith("weightscope: interrupted; the same command with --resume goes on\n")
    went_on = interrupted(checkpoint, tmp_path, "--resume")
    assert went_on.stderr == stopped.stderr
    changed = interrupted(checkpoint, tmp_path, "--resume", "--window", "8")
    afresh = "weightscope: starts afresh: discards 2 finished layers of other options or weights"
    assert changed.stderr.splitlines()[0] == afresh
    again = audit_of(checkpoint, tmp_path, "--window", "8")
    assert again.exit_code == 0
    lost = "weightscope: discards 2 finished layers of an interrupted audit; --resume would have kept them\n"
    assert again.stderr == lost


def test_a_finished_audit_is_kept_until_something_has_changed(checkpoint: Path, tmp_path: Path) -> None:
    def is_kept(*options: str) -> bool:
        result = audit_of(checkpoint, tmp_path, "--resume", *options)
        assert result.exit_code == 0 and not result.stderr
        return "report.html is kept: an earlier run made it with these weights and options" in result.stdout

    assert not is_kept()
    assert is_kept()
    assert not is_kept("--window", "8")
    assert not is_kept()
    (tmp_path / "report.html").unlink()
    assert not is_kept()
    (tmp_path / "heads.csv").write_text("head,auroc\n")  # as `detok` writes it
    assert not is_kept(), "another command has written there since"
    assert is_kept()
    assert interrupted(checkpoint, tmp_path).exit_code == 1
    assert not is_kept(), "what lies there may be of two audits"
    assert "is kept" not in audit_of(checkpoint, tmp_path).stdout


def test_directions_of_another_audit_do_not_stay(checkpoint: Path, tmp_path: Path) -> None:
    assert audit_of(checkpoint, tmp_path).exit_code == 0
    assert (tmp_path / "directions.json").exists()
    assert audit_of(checkpoint, tmp_path, "--directions", "0").exit_code == 0
    assert names_in(tmp_path) == ["findings.json", "heads.csv", "report.html", "spectra.npz"]


def test_of_two_audits_at_once_one_ends_in_a_line_and_the_other_has_a_folder_of_its_own(
    checkpoint: Path, out: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", gpt2_weights(n_layers=12, d=48, vocab=60, seed=1))
    code, shared_out = "from weightscope.cli import main; main()", tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": str(Path(ws.__file__).parents[1])}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, "audit", str(source), "--out", str(shared_out)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for source in (checkpoint, other)
    ]  # fmt: skip
    said = [process.communicate()[1] for process in running]
    codes = [process.returncode for process in running]
    assert sorted(codes) == [0, 2], said
    refused = said[codes.index(2)]
    assert refused.startswith("weightscope: out: another run is writing into this folder") and refused.count("\n") == 1
    alone = out
    if codes[1] == 0:
        alone = tmp_path / "alone"
        assert audit_of(other, alone).exit_code == 0
    for name in ("heads.csv", "spectra.npz", "findings.json", "directions.json"):
        assert (shared_out / name).read_bytes() == (alone / name).read_bytes(), name


@pytest.mark.parametrize("kept", [0, 60, 200])
def test_a_finished_layer_cut_short_is_not_finished(tmp_path: Path, kept: int) -> None:
    finished = FinishedLayers(tmp_path, Fingerprint.of(), resume=False)
    finished.put(0, {"x": np.arange(1000.0)})
    assert 0 in finished
    (file,) = finished.folder.glob("layer-*.npz")
    file.write_bytes(file.read_bytes()[:kept])
    assert 0 not in finished
    assert finished.get(0) is None


def test_values_that_are_not_finite_reach_their_heads_alone(checkpoint: Path, tmp_path) -> None:
    weights = gpt2_weights(n_layers=12, d=48, vocab=60)
    weights["h.5.attn.c_attn.weight"][3, 48 + 12] = np.nan  # W_K of head 1
    weights["h.8.attn.c_proj.weight"][40, 0] = np.inf  # W_O of head 3
    broken = measure(ws.open_model(write_checkpoint(tmp_path / "broken", weights)), tmp_path, AuditOptions(), False)
    whole = measure(ws.open_model(checkpoint), tmp_path, AuditOptions(), False)
    for name, place in (("qk", (5, 1)), ("vo", (8, 3))):
        unknown = np.isnan(broken.columns[f"{name}_frobenius"])
        assert np.argwhere(unknown).tolist() == [list(place)]
        assert broken.columns[f"{name}_route"][place] == "none"
        np.testing.assert_array_equal(
            broken.columns[f"{name}_sigma1"][~unknown], whole.columns[f"{name}_sigma1"][~unknown]
        )


def test_an_audit_holds_one_layer_at_a_time(checkpoint: Path, tmp_path, monkeypatch) -> None:
    model = ws.open_model(checkpoint)
    measure(model, tmp_path, AuditOptions(), False)
    assert model._last is None


def test_a_layer_of_16_bits_costs_what_it_costs_on_disk(tmp_path) -> None:
    """No float32 copy of a whole projection is made, neither in reading nor in folding the norm nor for any head."""
    d, heads = 1024, 16
    rng = np.random.default_rng(0)
    stem = "model.layers.0."
    tensors = {f"{stem}self_attn.{x}_proj.weight": bfloat16(rng.standard_normal((d, d), np.float32)) for x in "qkvo"}
    tensors[f"{stem}input_layernorm.weight"] = bfloat16(np.ones(d, np.float32))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": d}
    write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8, **sizes}))
    model = ws.open_model(tmp_path)
    tracemalloc.start()
    try:
        layer = model.layer(0)
        for index in range(heads):
            head = layer.head(index)
            assert head.qk.left.dtype == head.vo.right.dtype == np.float32
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.6 * 4 * d * d * 2
