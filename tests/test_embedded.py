"""The checkpoint that comes with weightscope shows what the paper reports of GPT-2; an untrained one does not."""

import json

import numpy as np
import pytest

import weightscope as ws
from weightscope.detokenization.first_layer import FirstLayer
from weightscope.detokenization.heads import detokenize
from weightscope.detokenization.neighbours import neighbours
from weightscope.detokenization.positions import head_trends, position_terms
from weightscope.embedded import COUNTS, FOLDER
from weightscope.text.counts import load_counts
from weightscope.text.tokenizer import load_tokenizer, token_id, tokenizer_hash


@pytest.fixture(scope="module")
def first(embedded: ws.Model) -> FirstLayer:
    return FirstLayer(embedded)


def test_a_head_ranks_the_tokens_that_come_before(first: FirstLayer) -> None:
    table = detokenize(first, load_counts(COUNTS)).table
    assert table[0].auroc >= 0.80
    assert table[0].tokens_scored > 7_500


def test_an_untrained_model_of_the_same_shape_ranks_nothing(tmp_path) -> None:
    torch = pytest.importorskip("torch", reason="the initialisation is PyTorch's, in the extra `runner`")
    transformers = pytest.importorskip("transformers", reason="the initialisation is transformers'")
    torch.manual_seed(0)
    config = transformers.GPT2Config.from_json_file(str(FOLDER / "config.json"))
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    table = detokenize(FirstLayer(ws.open_model(tmp_path)), load_counts(COUNTS)).table
    assert 0.45 < min(row.auroc for row in table) < max(row.auroc for row in table) < 0.55


def test_position_makes_a_head_favour_near_tokens(first: FirstLayer) -> None:
    found = head_trends(position_terms(first))
    assert max(row.near_mass for row in found) > 0.5  # an even attention gives the nearest tenth 0.1
    assert any(row.recency > 0.9 and row.t_p.slope > 0 for row in found)


def test_the_counts_are_its_tokenizers(embedded: ws.Model) -> None:
    counts, tokenizer = load_counts(COUNTS), load_tokenizer(FOLDER)
    counts.check(embedded.embeddings.n_tokens, tokenizer_hash(tokenizer))
    assert counts.documents == len(json.loads((FOLDER / "training.json").read_text())["corpus"])


def test_everything_shipped_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 12_000_000


def test_sigma_is_read_from_the_real_embeddings(embedded: ws.Model) -> None:
    rows, columns = np.arange(0, 8000, 997), np.array([0, 3, 255])
    e, p = embedded.embeddings.tokens[rows].astype(np.float64), embedded.positions[columns].astype(np.float64)
    expected = np.sqrt((e[:, None] + p).var(axis=-1) + 1e-5)
    np.testing.assert_allclose(embedded.embeddings.sigma(rows[:, None], columns), expected, rtol=1e-5)


EXAMPLES = {"riety": " prop", "ibility": " respons", "iamond": " d", "ishop": " B", "'t": " don"}


@pytest.mark.parametrize(("token", "previous"), EXAMPLES.items())
def test_a_split_words_first_part_ranks_first_for_some_head(first: FirstLayer, token: str, previous: str) -> None:
    tokenizer = load_tokenizer(FOLDER)
    found = neighbours(first, tokenizer, token_id(tokenizer, token), top=1)
    assert previous in {row.token for row in found}
