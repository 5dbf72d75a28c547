"""The outlier-dimensions analysis on tiny models: against plain loops, and against the scores it takes apart."""

from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.cases import LLAMA, Case, case_of
from tests.support.tiny_models import NAMES, fixture
from weightscope.heads.outliers.measure import (
    Contributions,
    key_maps,
    keys_and_queries,
    left_out,
    summed_contributions,
)
from weightscope.model.layers.layer import Layer
from weightscope.model.text.kinds import TokenKinds

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")
transformers = pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from tests.support.random_models import random_model  # noqa: E402
from weightscope.heads.outliers.measure import measure_outliers  # noqa: E402
from weightscope.runner import Runner  # noqa: E402

pytestmark = pytest.mark.check

TOKENS = [np.array([3, 1, 4, 1, 5, 9]), np.array([9, 2, 6]), np.array([5, 3, 5, 8, 9, 7])]
KINDS = TokenKinds(("[CLS]", ". or ,", "never", "other"), np.array([1, 1, 3, 0, 3, 0, 3, 3, 1, 0, *[3] * 14], np.int8))
NO_ROPE = Case("no_rope", "smollm3", LLAMA | {"no_rope_layers": [0, 0]})


def plain_contributions(layer: Layer, x: np.ndarray, causal: bool) -> np.ndarray:
    """Mean over queries of eq. 7 for every key of one sequence, by loops over heads, keys and queries: (H, n, d)."""
    z = layer.normalised(x.astype(np.float64))
    sums = np.zeros((layer.n_heads, *x.shape))
    for h, head in enumerate(layer.heads):
        w, b = head.qk.dense().astype(np.float64), head.qk_bias.astype(np.float64)
        for n in range(len(z)):
            queries = range(n, len(z)) if causal else range(len(z))
            sums[h, n] = np.mean([(z[m] @ w + b) * z[n] for m in queries], axis=0)
    return sums


def test_dimensions_add_up_to_score_differences_between_keys(subtests: pytest.Subtests) -> None:
    """sum_j C_mnj - sum_j C_mlj is S_mn - S_ml, exactly in the families without a note of what is left out."""
    for name in NAMES:
        with subtests.test(fixture=name):
            small = fixture(name)
            for index in small.layers:
                layer, x = small.model.layer(index), small.arrays[f"x{index}"].astype(np.float64)
                scores = layer.scores(x) / layer.scale  # (H, n, n)
                farthest, w_k = 0.0, key_maps(layer)
                for m in range(len(x)):
                    mask = np.zeros((len(x), len(x)), bool)
                    mask[m] = True
                    keys, queries = keys_and_queries(layer, x[None], mask)
                    sums = [summed_contributions(keys[[n]], queries[:, [n]], w_k).sum(axis=1) for n in range(len(x))]
                    apart = np.ptp(np.stack(sums, axis=1) - scores[:, m], axis=1)  # (H,): 0 up to a term of the query's
                    farthest = max(farthest, float((apart / np.ptp(scores[:, m], axis=1)).max()))
                reasons = list(left_out(layer))
                assert (farthest < 1e-5) == (not reasons), (farthest, reasons)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_no_rope"])
def test_means_match_plain_loops(name: str, tmp_path: Path) -> None:
    """Batches, kinds and masks: everything against one token after the other in float64."""
    case = NO_ROPE if name == "llama_no_rope" else case_of(name)
    network = random_model(case)
    network.save_pretrained(tmp_path)
    model = ws.open_model(tmp_path)
    bare = getattr(network, network.base_model_prefix)
    runner = Runner(model, network)
    measured = measure_outliers(runner, TOKENS, KINDS)
    stream, contributions = measured.stream, measured.contributions

    n_layers, d, n_heads = model.config.n_layers, model.config.d_model, model.config.n_heads
    hidden = [[[] for _ in KINDS.names] for _ in range(n_layers + 1)]
    attention = [[[] for _ in KINDS.names] for _ in range(n_layers)]
    c = [[[] for _ in KINDS.names] for _ in range(n_layers)]
    causal = name != "bert"
    norm = {"gpt2": "ln_f", "llama_no_rope": "norm"}.get(name)
    last: list[torch.Tensor] = []
    if norm:  # transformers reports the last hidden state behind the final norm, which is no part of a layer
        getattr(bare, norm).register_forward_pre_hook(lambda module, args: last.append(args[0]))
    for tokens in TOKENS:
        with torch.no_grad():
            returned = bare(torch.from_numpy(tokens)[None], output_hidden_states=True, output_attentions=True)
        streams = [x[0].double().numpy() for x in (*returned.hidden_states[:-1], last[-1] if norm else returned[0])]
        for n, token in enumerate(tokens):
            kind = KINDS.of_token[token]
            for i, x in enumerate(streams):
                hidden[i][kind].append(x[n])
            for i, alpha in enumerate(returned.attentions):
                attention[i][kind].append(alpha[0, :, n if causal else 0 :, n].double().mean(dim=1).numpy())
        for i in range(n_layers):
            each = plain_contributions(model.layer(i), streams[i], causal)
            for n, token in enumerate(tokens):
                c[i][KINDS.of_token[token]].append(each[:, n])

    assert stream.counts.tolist() == contributions.counts.tolist() == [len(vectors) for vectors in hidden[0]]
    assert 0 in stream.counts
    of_stream = (stream.hidden, hidden, (d,)), (stream.attention, attention, (n_heads,))
    for averages, expected, shape in (*of_stream, (contributions.by_kind, c, (n_heads, d))):
        for of_layer, lists in zip(averages, expected, strict=True):
            for kind, values in enumerate(lists):
                mean = np.mean(values, axis=0) if values else np.full(shape, np.nan)
                np.testing.assert_allclose(of_layer[..., kind], mean, atol=2e-5 * np.nanmax(np.abs(of_layer)))
    everything = [sum(map(sum, lists)) / sum(map(len, lists)) for lists in hidden]
    np.testing.assert_allclose(stream.means[..., 0], everything, atol=1e-5 * np.abs(everything).max())


def test_a_dimension_dominates_a_layer_beside_the_others() -> None:
    """Twice the largest mean C of a dimension that is not among those given, by a loop; all of them are listed."""
    rng = np.random.default_rng(0)
    by_kind, counts = rng.normal(0, 1, (5, 4, 20, 2)), np.array([3, 7])
    by_kind[1, :, 6] += 30
    by_kind[3, :, 2] -= 40
    measured = Contributions(("[CLS]", "other"), counts, np.arange(5), by_kind, ())
    given, expected = np.array([6, 2, 11]), {}
    for layer in range(5):
        means = [np.mean([(3 * c[0] + 7 * c[1]) / 10 for c in by_kind[layer, :, j]]) for j in range(20)]
        control = max(abs(means[j]) for j in range(20) if j not in given)
        for j in given:
            if abs(means[j]) >= 2 * control:
                raised = sum((3 * c[0] + 7 * c[1]) > 0 for c in by_kind[layer, :, j])
                expected[layer, int(j)] = (means[j], raised, control)
    table = {row[:2]: row[2:] for row in measured.dominant(given).rows()}
    assert table.keys() == expected.keys() >= {(1, 6), (3, 2)}
    for place, cells in expected.items():
        np.testing.assert_allclose(table[place], cells, rtol=1e-12)
    assert not len(measured.dominant(np.array([], int)))
