"""Layers that share one set of weights by definition, as ALBERT's do, are one layer at several places."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import NAMES, fixture

SHARING = {"albert": ([0], 2), "albert_two_groups": ([0, 2], 3)}  # layers with weights of their own, and places


@pytest.mark.parametrize("name", SHARING)
def test_they_are_measured_once_and_are_no_copies(name: str) -> None:
    distinct, places = SHARING[name]
    model = fixture(name).model
    assert list(model.own_layers) == distinct and len(model.attention_layers) == places
    audit = ws.audit(model, directions=0, all_tensors=True)
    assert [*dict.fromkeys(audit.heads["layer"].tolist())] == distinct
    assert not {"duplicate_heads", "alike_heads", "duplicate_layers"} & {finding.kind for finding in audit.findings}
    assert any("share one set of weights" in note for note in audit.notes)
    assert all(np.array_equal(model.layer(1).heads[h].w_q, model.layer(0).heads[h].w_q) for h in range(4))


def test_a_later_place_is_audited_where_it_is_asked_for() -> None:
    model = fixture("albert").model
    assert ws.audit(model, layers=[1], directions=0).heads["layer"].tolist() == [1] * 4
    assert ws.audit(model, layers=[0, 1], directions=0).heads["layer"].tolist() == [0] * 4


@pytest.mark.parametrize("name", SHARING)
def test_no_head_is_linked_to_itself(name: str) -> None:
    distinct, _ = SHARING[name]
    circuits = ws.circuits(fixture(name).model)
    assert circuits.wiring.layers.tolist() == distinct
    assert np.isfinite(circuits.wiring.pk["k"]).any() == (len(distinct) > 1)
    assert any("share one set of weights" in caveat for caveat in circuits.caveats)


@pytest.mark.parametrize("name", SHARING)
def test_a_comparison_counts_them_once(name: str, tmp_path: Path) -> None:
    distinct, _ = SHARING[name]
    model = fixture(name).model
    comparison = ws.compare(model, model)
    assert [*dict.fromkeys(comparison.heads["layer"].tolist())] == distinct


def test_other_models_share_no_layers() -> None:
    """Two layers of attention under one index, as LongCat's, have weights of their own."""
    sharing = {name for name in NAMES if fixture(name).model.sharing}
    assert sharing == {*SHARING}
    by_tensors = set()
    for name in NAMES:
        model = fixture(name).model
        read = [tuple(tensor.name for tensor in model.attention_tensors(i)) for i in model.attention_layers]
        by_tensors |= {name} if len({*read}) < len(read) else set()
    assert by_tensors == sharing
