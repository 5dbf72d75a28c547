"""A small model with rotary positions, tokens and feed-forward networks, and what is made of it."""

from pathlib import Path

import pytest

from tests.support.plants.derivations import DERIVATIONS
from tests.support.plants.named_parts import read_weights, write_weights
from tests.support.small_llama import write_small_llama
from weightscope.pairs.lineage import probes


@pytest.fixture(autouse=True)
def fixed_nonce(monkeypatch):
    """Probes drawn with one nonce: what is near a threshold does not fall on another side in every run."""
    monkeypatch.setattr(probes.secrets, "token_hex", lambda size: "0" * 2 * size)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return write_small_llama(tmp_path_factory.mktemp("lineage") / "base", layers=5)


@pytest.fixture
def made(base, tmp_path):
    """A function that makes derivations of it, one after the other, and returns the folder and the base's layers."""

    def make(*names: str) -> tuple[Path, list[int]]:
        weights = read_weights(base)
        for name in names:
            weights = DERIVATIONS[name].change(weights)
        folder = tmp_path / "-".join(names).replace(" ", "_").replace("%", "")[:60]
        write_weights(weights, folder)
        return folder, list(weights.came_from)

    return make
