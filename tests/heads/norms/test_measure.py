"""Norm-based analysis of running models, against plain float64 loops over the vectors f(x) themselves."""

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

torch = pytest.importorskip("torch", reason="the runner needs the extra `runner`")

from tests.support.random_models import runner_of  # noqa: E402
from weightscope.core.files import Files  # noqa: E402
from weightscope.heads.norms.measure import NormAnalysis, measure_norms, singular_values  # noqa: E402
from weightscope.model.layers.maps import Affine  # noqa: E402
from weightscope.model.text.kinds import TokenKinds  # noqa: E402
from weightscope.runner import Activations, Runner  # noqa: E402

pytestmark = pytest.mark.check

KINDS = TokenKinds(("first", ". or ,", "other"), np.array([2, 0, 1, 1, *[2] * 20], np.int8))
SEQUENCES = [np.array([1, 7, 9, 2, 11, 3]), np.array([1, 8, 2, 12]), np.array([1, 2, 20, 3, 21, 22])]
# Post-norm encoder; LayerNorm; RMSNorm with shared key-value heads; learned sinks, so that rows sum to less than 1.
FAMILIES = ("bert", "gpt2", "llama", "gpt_oss")


class Loops:
    """Everything again, a pair at a time, from each head's own matrices."""

    def __init__(self, runner: Runner) -> None:
        shape = (len(runner.layers), runner.model.config.n_heads, len(KINDS.names))
        self.f = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
        self.x = [[] for _ in range(shape[0])]
        self.alpha, self.alpha_f = np.zeros((2, *shape))
        self.of_kind = {}
        self.pairs = [[] for _ in KINDS.names]
        self.mixed = [[] for _ in range(shape[0])]
        runner.observe(SEQUENCES, self)

    def __call__(self, seen: Activations) -> None:
        layer = seen.layer.index
        for tokens, x, attention, output in zip(seen.tokens, seen.x, seen.attention, seen.output, strict=True):
            x, attention, n = x.astype(np.float64), attention.astype(np.float64), len(tokens)
            z = seen.layer.normalised(x)
            self.x[layer] += [np.sqrt((row**2).sum()) for row in x]
            added_up = np.zeros_like(x) + seen.layer.output_bias
            itself, mixed = np.zeros_like(x), np.zeros_like(x)
            for h, head in enumerate(seen.layer.heads):
                f = z @ head.vo.dense() + head.vo_bias  # (n, d)
                added_up += attention[h] @ f
                for i in range(n):
                    itself[i] += attention[h, i, i] * f[i]
                    mixed[i] += sum(attention[h, i, j] * f[j] for j in range(n) if j != i)
                lengths = [np.sqrt((row**2).sum()) for row in f]
                self.f[layer][h] += lengths
                for j, kind in enumerate(KINDS(tokens)):
                    self.of_kind.setdefault((layer, h, kind), []).append(lengths[j])
                    for i in range(n):
                        self.alpha[layer, h, kind] += attention[h, i, j] / n / len(SEQUENCES)
                        added = np.linalg.norm(attention[h, i, j] * f[j])
                        self.alpha_f[layer, h, kind] += added / n / len(SEQUENCES)
                        if attention[h, i, j] > 0:
                            self.pairs[kind].append((attention[h, i, j], lengths[j]))
            for i in range(n):
                of_others = np.linalg.norm(mixed[i])
                weight = np.mean([1 - a[i, i] / a[i].sum() for a in attention])
                kept = [np.linalg.norm(part) for part in (itself[i], itself[i] + x[i])]
                self.mixed[layer].append([weight, *(of_others / (of_others + size) for size in kept)])
            np.testing.assert_allclose(added_up, output, atol=1e-4 * np.abs(output).max())  # sum_j alpha f(x_j) + b_O


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[NormAnalysis, Loops]:
    runner = runner_of(request.param, tmp_path_factory.mktemp(request.param))
    return measure_norms(runner, SEQUENCES, KINDS), Loops(runner)


def test_tables_1_and_2(both: tuple[NormAnalysis, Loops]) -> None:
    norms, loops = both

    def row(values: list[float]) -> list[float]:
        mean, sd = np.mean(values), np.std(values)
        return [mean, sd, sd / mean, max(values), min(values)]

    np.testing.assert_allclose(norms.f.table(), [[row(h) for h in layer] for layer in loops.f], rtol=2e-5)
    np.testing.assert_allclose(norms.x.table(), [row(layer) for layer in loops.x], rtol=2e-5)
    of_all = {row[0]: row[1:] for row in norms.summary.rows()}
    everything = [length for layer in loops.f for head in layer for length in head]
    inputs = [length for layer in loops.x for length in layer]
    np.testing.assert_allclose(of_all["|f(x)|, all heads together"], row(everything), rtol=2e-5)
    np.testing.assert_allclose(of_all["|x|, all layers together"], row(inputs), rtol=2e-5)


def test_table_3_and_fig_3(both: tuple[NormAnalysis, Loops]) -> None:
    norms, loops = both
    for ranks, sampled, pairs in zip(norms.ranks, norms.pairs, loops.pairs, strict=True):
        assert ranks.pairs == len(pairs)
        assert (
            abs(ranks.rho - spearmanr(*zip(*pairs, strict=True)).statistic) <= ranks.error < 0.5
        )  # of a hundred pairs
        for pair in sampled:
            assert np.abs(np.array(pairs) / pair - 1).max(axis=1).min() < 1e-4


def test_all_pairs_and_tenths_by_weight(both: tuple[NormAnalysis, Loops]) -> None:
    """Spearman and variation over every pair, and shuffled within kinds; tenths hold a tenth each, and add up."""
    norms, loops = both
    pairs = np.array([pair for of_kind in loops.pairs for pair in of_kind])
    kinds = np.repeat(range(len(loops.pairs)), [*map(len, loops.pairs)])
    everything, *tenths = norms.parts
    assert abs(everything.ranks.rho - spearmanr(*pairs.T).statistic) <= everything.ranks.error
    np.testing.assert_allclose(everything.variation, pairs[:, 1].std() / pairs[:, 1].mean(), rtol=0.02)
    ranks = rankdata(pairs, axis=0)
    of_kinds = np.stack(
        [ranks[kinds == kind].mean(axis=0) for kind in range(len(loops.pairs)) if (kinds == kind).any()]
    )
    by_kind = of_kinds[kinds[np.argsort(kinds)]] if len(of_kinds) == len(loops.pairs) else None
    if by_kind is not None:
        centred = by_kind - ranks.mean(axis=0)
        expected = (centred[:, 0] * centred[:, 1]).mean() / ranks.std(axis=0).prod()
        assert everything.by_group == pytest.approx(expected, abs=0.01)
    assert sum(tenth.ranks.pairs for tenth in tenths) == len(pairs) == everything.ranks.pairs
    for tenth in tenths:
        within = pairs[(pairs[:, 0] >= tenth.start) & (pairs[:, 0] < tenth.end), 1]
        assert len(within) == pytest.approx(tenth.ranks.pairs, abs=1)  # rounding in float32 moves one over an edge
        assert tenth.mean == pytest.approx(within.mean(), rel=0.02)
        assert tenth.at_one <= 1.5 * tenth.variation + 0.02


def test_mixing_ratios_are_those_of_the_vectors_themselves(both: tuple[NormAnalysis, Loops]) -> None:
    norms, loops = both
    np.testing.assert_allclose(norms.mixed, [np.mean(layer, axis=0) for layer in loops.mixed], rtol=2e-4)
    assert (norms.mixed[:, 2] < norms.mixed[:, 1]).any()


def test_figs_4_and_5(both: tuple[NormAnalysis, Loops]) -> None:
    norms, loops = both
    np.testing.assert_allclose(norms.alpha, loops.alpha, atol=1e-6)
    np.testing.assert_allclose(norms.alpha_f, loops.alpha_f, rtol=1e-4, atol=1e-6)
    for (layer, head, kind), lengths in loops.of_kind.items():
        np.testing.assert_allclose(norms.f_by_kind[layer, head, kind], np.mean(lengths), rtol=2e-5)


def test_rows_of_attention_sum_to_one_unless_there_are_sinks(both: tuple[NormAnalysis, Loops], request) -> None:
    total = both[0].alpha.sum(axis=-1)
    if "gpt_oss" in request.node.name:
        assert (total < 0.999).all()
    else:
        np.testing.assert_allclose(total, 1, atol=1e-6)


def test_singular_values_match_the_dense_affine_map(tmp_path: Path) -> None:
    """f~ of eqs 9 to 11, written out; all other entries are zero."""
    layer = runner_of("bert", tmp_path).layers[1]
    for head, spectrum in zip(layer.heads, singular_values(layer), strict=True):
        d = len(head.vo_bias)
        affine_map = np.zeros((d + 1, d + 1))
        affine_map[:d, :d], affine_map[d, :d], affine_map[d, d] = head.vo.dense(), head.vo_bias, 1
        expected = np.linalg.svd(affine_map, compute_uv=False)
        np.testing.assert_allclose(spectrum, expected[: len(spectrum)], rtol=1e-4)
        np.testing.assert_allclose(expected[len(spectrum) :], 0, atol=1e-5)


def test_a_change_of_basis_within_heads_changes_nothing(tmp_path: Path) -> None:
    """W_V R and R^-1 W_O give the same f."""
    runner = runner_of("bert", tmp_path)
    plain = measure_norms(runner, SEQUENCES, KINDS)
    rng = np.random.default_rng(0)
    for index, layer in runner.layers.items():
        h, r = layer.w_o.shape[:2]
        gauge = np.eye(r) + 0.3 * rng.standard_normal((h, r, r))
        v = Affine(layer.v.w @ gauge, (layer.v.b[:, None] @ gauge)[:, 0])
        runner.layers[index] = replace(layer, v=v, w_o=np.linalg.inv(gauge) @ layer.w_o)
    turned = measure_norms(runner, SEQUENCES, KINDS)
    np.testing.assert_allclose(turned.f.table(), plain.f.table(), rtol=1e-4)
    np.testing.assert_allclose(turned.alpha_f, plain.alpha_f, rtol=1e-4)
    np.testing.assert_allclose(turned.singular_values, plain.singular_values, rtol=1e-4)


def test_batches_change_nothing_and_a_seed_repeats_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("gpt2", tmp_path)
    many = SEQUENCES * 40
    norms, again = (measure_norms(runner, many, KINDS, seed=7) for _ in range(2))
    for first, second in zip(norms.pairs, again.pairs, strict=True):
        assert len(first)
        np.testing.assert_array_equal(first, second)
    once = measure_norms(runner, SEQUENCES, KINDS)
    np.testing.assert_allclose(once.f.table(), norms.f.table(), rtol=1e-5)
    np.testing.assert_allclose(once.alpha_f, norms.alpha_f, rtol=1e-5)
    assert [each.pairs * 40 for each in once.ranks] == [each.pairs for each in norms.ranks]


def test_files_hold_what_was_measured(both: tuple[NormAnalysis, Loops]) -> None:
    norms, _ = both
    files = Files()
    norms.write_tables(files)
    n_layers, n_heads = norms.alpha.shape[:2]
    tables = {
        name.removesuffix(".csv"): list(csv.DictReader(content.decode().splitlines()))
        for name, content in files.contents.items()
        if name.endswith(".csv")
    }
    n_kinds = len(KINDS.names)
    sizes = {"heads": n_layers * n_heads, "layers": n_layers, "kinds": n_kinds, "shares": n_kinds, "summary": 4,
             "weights": len(norms.parts), "mixing": n_layers}  # fmt: skip
    assert {name: len(rows) for name, rows in tables.items()} == sizes
    assert sum(float(row["weight"]) for row in tables["shares"]) == pytest.approx(1)
    assert sum(float(row["length"]) for row in tables["shares"]) == pytest.approx(1)
    last = tables["heads"][-1]
    assert (int(last["layer"]), int(last["head"])) == (n_layers - 1, n_heads - 1)
    assert float(last["alpha . or ,"]) == pytest.approx(norms.alpha[-1, -1, 1], rel=1e-5)
    assert float(last["|f| cv"]) == pytest.approx(norms.f.table()[-1, -1, 2], rel=1e-5)
    with np.load(io.BytesIO(files.contents["norms.npz"])) as arrays:
        np.testing.assert_array_equal(arrays["alpha_f"], norms.alpha_f)
        assert len(arrays["pairs"]) == len(arrays["pairs_kind"]) == sum(map(len, norms.pairs))


def test_page_mentions_a_gate_that_f_leaves_out(tmp_path: Path) -> None:
    for name, gated in (("qwen3_next", True), ("llama", False)):
        norms = measure_norms(runner_of(name, tmp_path / name), SEQUENCES, KINDS)
        assert norms.gated is gated
