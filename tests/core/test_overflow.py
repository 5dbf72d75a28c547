"""Finite weights that are too large to compute with are said to be: by every command, with the tensor's name."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import Weights, commands, is_one_line, run, studies, with_tokenizer, write_counts
from tests.support.figures import undrawn
from weightscope.model.metrics.spaces import nearest_rows

pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")

QKV, NORM = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.ln_1.weight"
TOKENS, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"


def all_of(tensor: str, value: float = 1e38) -> Callable[[Weights], None]:
    """A change: every element as large as that."""

    def change(weights: Weights) -> None:
        weights[tensor] = np.where(weights[tensor] < 0, -value, value).astype(np.float32)

    return change


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_counts(with_tokenizer("gpt2", tmp_path_factory.mktemp("counts")))


REFUSED = [  # tensor, commands that have no number to show
    (QKV, ["circuits", "detok", "neighbours", "positions", "unscaled"]),
    (NORM, ["detok", "neighbours", "positions", "unscaled"]),
    (TOKENS, ["detok", "neighbours", "positions"]),
    (POSITIONS, ["detok", "neighbours", "positions", "unscaled"]),
]


@pytest.mark.parametrize(("tensor", "refused"), REFUSED)
def test_overflow_is_one_line_that_names_the_tensor(tensor, refused, counts, tmp_path) -> None:
    source = with_tokenizer("gpt2", tmp_path / "source", all_of(tensor))
    for name, arguments in commands(source, counts, tmp_path).items():
        if name in refused:
            result = run(*arguments)
            assert is_one_line(result), (name, result.output, result.exception)
            assert f"overflows: its largest weight is 1e+38, in {tensor};" in result.stderr
            assert not (tmp_path / name / "report.html").exists()


@pytest.mark.parametrize("value", [1e20, 1e25, 3e38])
def test_a_norm_of_queries_that_overflows_is_no_score_of_zero(value: float, counts, tmp_path) -> None:
    tensor = "model.layers.0.self_attn.q_proj.weight"
    source = with_tokenizer("qwen3", tmp_path / "source", all_of(tensor, value))
    for name in ("detok", "neighbours"):
        result = run(*commands(source, counts, tmp_path)[name])
        assert is_one_line(result) and tensor in result.stderr, result.output


def test_audit_lists_heads_that_overflow(counts, tmp_path) -> None:
    source = with_tokenizer("gpt2", tmp_path / "source", all_of(QKV))
    with undrawn():
        result = run(*commands(source, counts, tmp_path)["audit"])
    assert result.exit_code == 0, result.output
    assert "()" not in result.output
    findings = json.loads((tmp_path / "audit" / "findings.json").read_text())
    overflowing = [finding for finding in findings if finding["kind"] == "overflow"]
    assert {(finding["layer"], finding["map"]) for finding in overflowing} == {(0, "qk"), (0, "vo")}
    for finding in overflowing:
        assert finding["severity"] == "error" and finding["number"] == pytest.approx(1e38)
        assert f"Weights as large as 1e+38, in {QKV}, overflow: heads 0-3 cannot be measured." == finding["text"]
    with (tmp_path / "audit" / "heads.csv").open(newline="") as file:
        heads = list(csv.DictReader(file))
    assert [row["qk_sigma1"] == "" for row in heads] == [True] * 4 + [False] * 4


def test_rows_of_an_embedding_that_overflow_are_a_finding(tmp_path: Path) -> None:
    source = with_tokenizer("gpt2", tmp_path, lambda weights: weights[TOKENS].__setitem__(7, 1e38))
    (finding,) = (candidate for candidate in ws.audit(ws.open_model(source)).findings if candidate.kind == "overflow")
    assert finding.items == (7,) and f"1 row of {TOKENS}" in finding.text and "'w7'" in finding.text


def test_comparison_of_overflowing_heads_shows_no_zero(counts, tmp_path) -> None:
    source = with_tokenizer("gpt2", tmp_path / "source", all_of(QKV))
    with undrawn():
        result = run(*commands(source, counts, tmp_path)["compare"])
    assert result.exit_code == 0, result.exception
    with (tmp_path / "compare" / "heads.csv").open(newline="") as file:
        changes = {(row["layer"], row["qk_change"]) for row in csv.DictReader(file)}
    assert changes == {("0", ""), ("1", "0")}
    findings = json.loads((tmp_path / "compare" / "findings.json").read_text())
    overflowing = [finding for finding in findings if finding["kind"] == "overflow"]
    assert {(finding["layer"], finding["map"]) for finding in overflowing} == {(0, "qk"), (0, "vo")}
    assert all(f"Weights as large as 1e+38, in {QKV}, overflow" in finding["text"] for finding in overflowing)
    assert not [finding for finding in findings if finding["kind"] == "not_finite"]  # no weight is


def with_feed_forward(weights: Weights) -> None:
    """Give both layers a feed-forward network, which fixtures leave out; layer 0's overflows."""
    rng, d = np.random.default_rng(0), 16
    for layer in (0, 1):
        stem = f"transformer.h.{layer}.mlp"
        for module, shape in (("c_fc", (d, 4 * d)), ("c_proj", (4 * d, d))):
            weights[f"{stem}.{module}.weight"] = rng.standard_normal(shape).astype(np.float32)
            weights[f"{stem}.{module}.bias"] = np.zeros(shape[1], np.float32)
        weights |= {f"transformer.h.{layer}.ln_2.{part}": np.ones(d, np.float32) for part in ("weight", "bias")}
    weights["transformer.h.0.mlp.c_fc.weight"] *= np.float32(5e37)


def test_heads_are_named_by_their_wiring_where_streams_overflow(tmp_path: Path) -> None:
    result = ws.circuits(ws.open_model(with_tokenizer("gpt2", tmp_path, with_feed_forward)))
    assert any("following tokens up to layer 1 overflows" in caveat for caveat in result.caveats)
    assert np.isnan(result.heads["copying"]).all() and np.isfinite(result.heads["identity"]).all()


@pytest.mark.check
def test_a_run_that_overflows_says_so(counts: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch comes with the extra `runner`")
    source = with_tokenizer("gpt2", tmp_path / "source", with_feed_forward)
    for arguments in studies(source, counts.parent / "corpus.txt", tmp_path).values():
        result = run(*arguments)
        assert is_one_line(result), result.output
        assert "attention's output in layer 1 overflows: its largest weight is" in result.stderr
        assert "in transformer.h.0.mlp.c_fc.weight" in result.stderr


def test_rows_without_a_direction_are_nearest_to_nothing() -> None:
    rows = np.eye(4, dtype=np.float32)
    rows[1] = np.nan
    rows[2] *= 1e38
    ((along, against),) = nearest_rows([(0, rows)], [np.ones((4, 1)) / 2], 3)
    assert along.rows.tolist() == against.rows.tolist() == [0, 3]
    ((along, against),) = nearest_rows([(0, rows * np.nan)], [np.ones((4, 1)) / 2], 3)
    assert not len(along.rows) and not len(against.rows)
