"""What workers answer, of another version or on purpose: nothing is believed that has another type or shape."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.figures import undrawn
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.core.engine import Cluster, Finished, ThisProcess
from weightscope.core.errors import CheckpointError
from weightscope.heads.audit.audit import AuditOptions
from weightscope.heads.audit.batch import Job, audit_all
from weightscope.heads.circuits.passes import wiring
from weightscope.heads.detok.first_layer import FirstLayer
from weightscope.heads.detok.heads import measure_heads
from weightscope.model.sources import Source
from weightscope.model.text.counts import Counts

THINGS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda answer: None,
    "text": lambda answer: "x" * 100,
    "a number": lambda answer: 0.5,  # would be taken for every head
    "objects": lambda answer: np.array([{}]),
    "another shape": lambda answer: np.zeros((1, 2, 3)),
    "text in the right shape": lambda answer: np.full(np.shape(first_of(answer)), "0.5"),
    "complex numbers": lambda answer: first_of(answer) * 1j,
    "half of a pair": lambda answer: answer[:1],
}


def first_of(answer: Any) -> Any:
    return answer[0] if isinstance(answer, tuple) else answer


class Answering(ThisProcess):
    """A worker whose answers are changed on the way."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self._change = change

    def next(self) -> Finished:
        key, value, error = super().next()
        return Finished(key, value if error else self._change(value), error)

    def in_words(self, error: Exception) -> Exception:
        """As of a cluster."""
        pytest.importorskip("distributed", reason="Dask comes with the extra `cluster`")
        client = object.__new__(Cluster)
        client._address = "tcp://there:1"
        return client.in_words(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), gpt2_weights())


@pytest.mark.parametrize("thing", THINGS)
def test_the_auroc_of_a_block(thing: str, folder: Path) -> None:
    first = FirstLayer(ws.open_model(folder))
    n = first.model.embeddings.n_tokens
    counts = Counts(np.arange(n + 1), np.arange(n)[::-1].copy(), np.ones(n, np.int64), "", ("made up",), 1, n)
    with Answering(THINGS[thing]) as engine, pytest.raises(CheckpointError, match="a worker answers for head 0 with"):
        measure_heads(first, counts, engine)


@pytest.mark.parametrize("thing", THINGS)
def test_the_pairs_of_layers(thing: str, folder: Path) -> None:
    with Answering(THINGS[thing]) as engine, pytest.raises(CheckpointError, match="a worker answers for"):
        wiring(ws.open_model(folder), engine=engine)


def without(name: str) -> Callable[[Any], Any]:
    """A layer's answer without one of its arrays, as an older version might send it."""
    return lambda answer: {k: v for k, v in answer.items() if k != name} if isinstance(answer, dict) else answer


def cut(name: str) -> Callable[[Any], Any]:
    """A layer's answer with one array of half as many heads."""
    return lambda answer: answer | {name: answer[name][:1]} if isinstance(answer, dict) else answer


@pytest.mark.parametrize("change", [without, cut])
@pytest.mark.parametrize("name", ["caveats", "kv_head", "qk_singular_values", "vo_route", "factor_norm", "o_sketch"])
def test_the_layers_of_an_audit(name: str, change: Callable[[str], Any], folder: Path, tmp_path: Path) -> None:
    with Answering(change(name)) as engine, undrawn():
        (outcome,) = audit_all([Job(Source.named(str(folder)), tmp_path / "out")], AuditOptions(), engine)
    if outcome.error is not None:  # else the array is not needed for anything
        assert isinstance(outcome.error, CheckpointError), outcome.error
        assert "same version" in str(outcome.error) and not (tmp_path / "out" / "heads.csv").exists()
