"""The checkpoint that comes with weightscope has induction heads, and its weights alone say which heads they read."""

import numpy as np
import pytest

import weightscope as ws
from weightscope.core.embedded import FOLDER
from weightscope.model.text.sequences import read_texts
from weightscope.model.text.tokenizer import Tokenizer

PASSAGE = 64  # tokens that are read twice
INDUCTION = ((3, 1), (3, 5))


def test_everything_shipped_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 7_600_000


def test_the_strongest_edges_by_keys_end_at_the_induction_heads() -> None:
    edges = ws.circuits("embedded").edges
    keys = edges.where((edges["kind"] == "k") & (edges["ranked_by"] == "pk")).head(6)
    assert {*zip(keys["to_layer"].tolist(), keys["to_head"].tolist(), strict=True)} == {*INDUCTION}
    assert {*keys["from_layer"].tolist()} == {2}


@pytest.mark.check
def test_heads_do_what_the_page_says() -> None:
    pytest.importorskip("torch", reason="running the model needs the extra `runner`")
    model = ws.open_model("embedded")
    encode = Tokenizer.at_hand(model).encode
    passages = [np.array(encode(text[20_000:24_000]))[:PASSAGE] for text in read_texts().texts]
    seen: dict[int, list[np.ndarray]] = {}
    texts = [np.concatenate([[0], passage, passage]) for passage in passages]
    ws.open_runner(model).observe(texts, lambda a: seen.setdefault(a.layer.index, []).append(a.attention))
    attention = np.array([np.concatenate(seen[layer]).mean(axis=0) for layer in sorted(seen)])  # (L, H, n, n)
    queries = np.arange(PASSAGE + 2, 2 * PASSAGE + 1)
    followed = attention[:, :, queries, queries - PASSAGE + 1].mean(axis=-1)  # (L, H)
    np.testing.assert_allclose([followed[head] for head in INDUCTION], [0.54, 0.35], atol=0.01)
    for head in INDUCTION:
        followed[head] = 0
    assert followed.max() < 0.02
    before = attention[:, :, queries, queries - 1].mean(axis=-1)
    assert np.unravel_index(before.argmax(), before.shape) == (2, 1)
