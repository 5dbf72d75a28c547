"""What an audit costs in calls of LAPACK, products and bytes read: counted, because times depend on the machine."""

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from benchmarks.synthetic import Sizes, write
from weightscope.checkpoint.storage import OpenFile
from weightscope.core.compute import lapack
from weightscope.heads.audit import directions, measure
from weightscope.model.metrics import spaces

audit = import_module("weightscope.heads.audit.audit")  # the package has a function of this name
LAYERS, HEADS, WIDTH, RANK, TOKENS = 4, 8, 256, 32, 2000
SIZES = Sizes(layers=LAYERS, width=WIDTH, heads=HEADS, head_dim=RANK, kv_heads=HEADS, vocabulary=TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ws.Model:
    return ws.open_model(write(tmp_path_factory.mktemp("model"), SIZES))


def counted(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, cost: Callable[..., dict[str, int]]
) -> Counter[str]:
    """What the calls of a function cost, which still run."""
    costs: Counter[str] = Counter()
    function = getattr(owner, name)

    def counting(*arguments: Any, **options: Any) -> Any:
        costs.update(cost(*arguments, **options))
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, counting)
    return costs


def test_a_head_costs_twelve_decompositions_of_its_own_width(model: ws.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectra of W_QK as stored, at distance one and averaged, and of W_VO: four. The eigenvalues of W_VO and of the
    symmetric part of W_QK; the least of four factors; two of the bound on logits.
    """
    monkeypatch.setattr(audit, "affordable_names", lambda model: {})  # small models get their heads' wiring, too
    calls = counted(monkeypatch, lapack, "_run", lambda name, *_: {name: 1})
    ws.audit(model, directions=2)
    of_a_head = {name: count / (LAYERS * HEADS) for name, count in calls.items()}
    assert of_a_head == {"dgesdd": 4, "dgeev": 1, "dsyevd": 7}


def test_a_heads_factors_are_multiplied_once_for_each_of_its_maps(
    model: ws.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = counted(monkeypatch, measure, "inner_products", lambda a, b, *_: {"rows": len(a), "calls": 1})
    ws.audit(model, directions=2)
    assert costs == {"rows": 2 * LAYERS * HEADS * WIDTH, "calls": 2 * LAYERS * HEADS}


def test_a_token_is_multiplied_once_with_each_direction_that_is_shown(
    model: ws.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = counted(
        monkeypatch, spaces._Strip, "hits", lambda strip, rows, _: {"products": len(rows) * len(strip.columns)}
    )
    directions = ws.audit(model, directions=2).directions
    shown = sum(
        len(line.block.values) * sum(not side[0].endswith("−") for side in line.sides)
        for head in directions
        for line in head.lines
    )
    assert len(directions) == LAYERS * HEADS and products["products"] == TOKENS * shown


def test_every_layer_is_read_once_to_measure_it_and_once_for_its_vectors(
    model: ws.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written into the stream is read once more, tokens six times: for the scores of pairs, as what is read and
    as what is written, and three times for their own norms. Every layer of this model is like a random one, so it is
    read once more to see whether its entries might be shuffled.
    """
    monkeypatch.setattr(audit, "affordable_names", lambda model: {})  # small models get their heads' wiring, too
    read = counted(monkeypatch, OpenFile, "read", lambda _, start, stop: {"bytes": stop - start})
    ws.audit(model, directions=2)
    matrix, tokens = 2 * WIDTH * HEADS * RANK, 2 * WIDTH * TOKENS
    assert read["bytes"] < 1.01 * (LAYERS * (4 + 4 + 1 + 4) * matrix + 6 * tokens)


def test_an_audit_without_directions_reads_no_singular_vector(model: ws.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = counted(monkeypatch, directions, "nearest_rows", lambda *_, **__: {"calls": 1})
    arrays = ws.audit(model, directions=0).measured.arrays
    assert not groups and np.isfinite(arrays["qk_singular_values"]).all()
