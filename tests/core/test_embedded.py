"""The checkpoint that comes with weightscope has induction heads, and the weights alone say whose keys read which head."""

import numpy as np
import pytest

import weightscope as ws
from weightscope.core.embedded import FOLDER

PASSAGE = 64  # tokens that are read twice


@pytest.fixture(scope="module")
def model() -> ws.Model:
    return ws.open_model("embedded")


@pytest.fixture(scope="module")
def attention(model: ws.Model) -> np.ndarray:
    """Attention (L, H, 2n, 2n) over passages of frequent tokens that are read twice, a mean over eight."""
    pytest.importorskip("torch", reason="running the model needs the extra `runner`")
    passages = np.random.default_rng(0).integers(300, 1500, (8, PASSAGE))
    seen: dict[int, list[np.ndarray]] = {}
    texts = [np.concatenate([passage, passage]) for passage in passages]
    ws.open_runner(model).observe(texts, lambda a: seen.setdefault(a.layer.index, []).append(a.attention))
    return np.array([np.mean([each.reshape(-1, *each.shape[-2:]).reshape(-1, 6, 128, 128).mean(0) for each in seen[i]], axis=0) for i in sorted(seen)])


def test_everything_shipped_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 7_600_000
