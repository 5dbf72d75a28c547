"""What the weights say of dimensions, against eq. 7 with the norm's beta in the token's place."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import case_of
from weightscope.heads.outliers.measure import extremity, guess, rank_agreement, ranks

torch = pytest.importorskip("torch", reason="tiny models are made with the extra `runner`")

from tests.support.random_models import random_model  # noqa: E402
from weightscope.runner import Activations, Runner  # noqa: E402
from weightscope.runner.hooks import tower_of  # noqa: E402

pytestmark = pytest.mark.check

POST_NORM = ("bert", "roberta", "distilbert", "deberta", "mpnet", "albert", "opt_post_norm", "electra")


@pytest.mark.parametrize("name", POST_NORM)
def test_the_streams_norm_is_what_the_stream_has_come_out_of(name: str, tmp_path: Path) -> None:
    """(x - beta) / gamma has mean 0 and variance 1 over dimensions, for every token of every such layer."""
    case = case_of(name)
    network = random_model(case)
    network.save_pretrained(tmp_path)
    model = ws.open_model(tmp_path, tower=case.tower or None)
    checked = []

    def see(seen: Activations) -> None:
        norm = model.stream_norm(seen.layer.index)
        if norm is not None:
            normal = (seen.x[0].astype(np.float64) - norm.beta) / norm.gamma
            np.testing.assert_allclose(normal.mean(axis=1), 0, atol=1e-4)
            np.testing.assert_allclose(normal.var(axis=1), 1, atol=1e-3)
            checked.append(seen.layer.index)

    Runner(model, tower_of(network, model)).observe([np.arange(3, 9)], see)
    assert set(checked) >= set(model.attention_layers) - {0}
    # A projection follows the norm of the embeddings in these two; post-norm OPT has no norm there.
    assert (0 in checked) == (name not in ("electra", "albert", "opt_post_norm"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_guess_matches_plain_products(name: str, tmp_path: Path) -> None:
    random_model(case_of(name)).save_pretrained(tmp_path)
    model = ws.open_model(tmp_path)
    guessed = guess(model)
    for i in model.attention_layers:
        heads, norm = model.layer(i).heads, model.stream_norm(i)
        columns = np.mean([np.linalg.norm(head.qk.dense().astype(np.float64), axis=0) for head in heads], axis=0)
        np.testing.assert_allclose(guessed.columns[i], columns, rtol=1e-5)
        if norm is None:
            c = [head.qk_bias for head in heads]
        else:
            np.testing.assert_array_equal(guessed.gains[i], np.abs(norm.gamma))
            c = [(norm.beta @ head.qk + head.qk_bias) * norm.beta for head in heads]
        np.testing.assert_allclose(guessed.contributions[i], np.abs(c).mean(axis=0), rtol=1e-4, atol=1e-6)
    stored = {"gpt2": "transformer.h.1.ln_1.weight", "llama": "model.layers.1.input_layernorm.weight"}
    if name in stored:
        np.testing.assert_array_equal(guessed.gains[1], np.abs(model.checkpoint[stored[name]].read()))


def test_agreement_is_about_order_and_size_alone() -> None:
    values = np.random.default_rng(0).standard_normal((3, 50))
    np.testing.assert_allclose(rank_agreement(values, -(values**3)), 1)
    np.testing.assert_allclose(rank_agreement(values, 1 / values), -1)
    assert np.isnan(rank_agreement(np.ones((1, 50)), values[:1])).all()
    assert np.isnan(rank_agreement(np.full((1, 50), np.nan), values[:1])).all()


def test_extremes_are_small_and_large_alike_and_ranks_begin_with_the_largest() -> None:
    sizes = np.exp(0.1 * np.random.default_rng(0).standard_normal((1, 50)))
    sizes[0, :3] = 100, 0.01, 0
    assert ranks(extremity(sizes))[0, :3].max() == 3
    assert ranks(sizes)[0, 0] == 1 and ranks(sizes)[0, 2] == 50
