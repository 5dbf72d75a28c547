"""A GPT-2 of two layers shows what the paper reports of GPT-2; an untrained one does not."""

import numpy as np
import pytest

import weightscope as ws
from tests.support.bigram_counts import embedded_counts
from tests.support.two_layers import FOLDER
from weightscope.heads.detok.first_layer import FirstLayer, position_terms, ranked
from weightscope.model.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def first(two_layers: ws.Model) -> FirstLayer:
    return FirstLayer(two_layers)


def test_a_head_ranks_the_tokens_that_come_before(two_layers: ws.Model) -> None:
    heads = ws.bigram_auroc(two_layers).heads
    assert heads["auroc"].max() >= 0.80
    assert heads["tokens_scored"].min() > 6_500


@pytest.mark.check
def test_an_untrained_model_of_the_same_shape_ranks_nothing(tmp_path) -> None:
    torch = pytest.importorskip("torch", reason="the initialisation is PyTorch's, in the extra `runner`")
    transformers = pytest.importorskip("transformers", reason="the initialisation is transformers'")
    torch.manual_seed(0)
    config = transformers.GPT2Config.from_json_file(str(FOLDER / "config.json"))
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    auroc = ws.bigram_auroc(ws.open_model(tmp_path), embedded_counts()).heads["auroc"]
    assert 0.45 < auroc.min() < auroc.max() < 0.55


def test_position_makes_a_head_favour_near_tokens(first: FirstLayer) -> None:
    heads = position_terms(first).heads
    assert heads["near_mass"].max() > 0.5  # an even attention gives the nearest tenth 0.1
    assert ((heads["near_mass"] > 0.5) & (heads["t_p_slope"] > 0)).any()


def test_sigma_is_read_from_the_real_embeddings(two_layers: ws.Model) -> None:
    rows, columns = np.arange(0, 8000, 997), np.array([0, 3, 255])
    e, p = two_layers.embeddings.tokens[rows].astype(np.float64), two_layers.positions[columns].astype(np.float64)
    expected = np.sqrt((e[:, None] + p).var(axis=-1) + 1e-5)
    np.testing.assert_allclose(two_layers.embeddings.sigma(rows[:, None], columns), expected, rtol=1e-5)


EXAMPLES = {"riety": " prop", "ibility": " respons", "iamond": " d", "ishop": " B", "'t": " don"}


@pytest.mark.parametrize(("token", "previous"), EXAMPLES.items())
def test_a_split_words_first_part_ranks_first_for_some_head(first: FirstLayer, token: str, previous: str) -> None:
    tokenizer = Tokenizer.load(FOLDER)
    table = ranked(first, tokenizer, [tokenizer.id_of(token)], top=1)
    assert previous in table["token"]
