"""Outlier dimensions of a model: measured on sentences, and guessed from the weights alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from scipy.stats import spearmanr

from weightscope.metrics.outliers import robust_z
from weightscope.model import Model
from weightscope.outliers.contributions import Contributions, key_maps, observe_contributions, summed_contributions
from weightscope.outliers.stream import Stream, observe_stream
from weightscope.progress import bar
from weightscope.results import ShowsShapes
from weightscope.runner.framing import framing_of
from weightscope.runner.runner import Runner, open_runner
from weightscope.runner.study import Study
from weightscope.tables import Column, Table, crossed
from weightscope.text.kinds import TokenKinds, token_kinds
from weightscope.text.sequences import Texts, sentence_sequences


@dataclass(frozen=True, eq=False, repr=False)
class Guess(ShowsShapes):
    """Estimates for every dimension from the weights alone, without a run."""

    columns: np.ndarray  # (L, d): Mean over heads of the norm of W_QK's column, the gain of a pre-norm folded in
    # (L, d): |gamma| of the norm that produces attention's input: the layer's own, or in post-norm models the one
    # before it; NaN where there is none.
    gains: np.ndarray
    # (L, d): Mean over heads of |C| (eq. 7) for a token equal to that norm's beta, its mean output. In pre-norm models,
    # where W_QK acts on the input of the norm, only the query is known and this is |b_QK|; 0 without biases.
    contributions: np.ndarray

    def agreement(self, stream: Stream, measured: Contributions) -> Table:
        """Rank correlations over dimensions between guesses and measurements, by layer."""
        means = stream.means[:-1, :, 0]  # (L, d), over all tokens
        correlations = {
            "columns and |C|": rank_agreement(self.columns, measured.sizes),
            "extreme columns and |C|": rank_agreement(extremity(self.columns), measured.sizes),
            "gains and |mean|": rank_agreement(self.gains, means),
            "extreme gains and |mean|": rank_agreement(extremity(self.gains), means),
            "C at beta and |C|": rank_agreement(self.contributions, measured.sizes),
        }
        columns = (Column(name, values, as_mathematics(name)) for name, values in correlations.items())
        return Table([Column("layer", measured.layer_indices), *columns], "Spearman's correlation over dimensions.")

    def ranks_of(self, measured: Contributions, dimensions: np.ndarray) -> Table:
        """Rank of some dimensions among all, 1 the largest, by measure and by guess, for every layer."""
        ranked = {
            "|C|, measured": ranks(measured.sizes),
            "extreme column": ranks(extremity(self.columns)),
            "gain": ranks(self.gains),
            "C at beta": ranks(self.contributions),
        }
        rows = crossed(layer=measured.layer_indices, dimension=dimensions)
        columns = (Column(name, of_all[:, dimensions].ravel(), as_mathematics(name)) for name, of_all in ranked.items())
        d = self.columns.shape[1]
        caption = f"Rank of the outlier dimensions among {d}, 1 the largest, by measure and by guess."
        return Table([*rows, *columns], caption)


def as_mathematics(name: str) -> str:
    """The name of a column with its formulas marked."""
    return name.replace("|C|", "$|C|$").replace("|mean|", "$|mean|$").replace("C at beta", "$C$ at $beta$")


def guess(model: Model) -> Guess:
    """Read every attention layer's projections and norms."""
    of_layers = [_of_layer(model, index) for index in bar(model.attention_layers, "what weights tell", "layer")]
    return Guess(*(np.stack(arrays) for arrays in zip(*of_layers, strict=True)))


def _of_layer(model: Model, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, gains and contributions of one layer, (d,) each."""
    layer, norm = model.layer(index), model.stream_norm(index)
    w_q, b_q = (np.stack(parts) for parts in zip(*(layer.q.of(head) for head in range(layer.n_heads)), strict=True))
    w_k = key_maps(layer)
    if norm is None:
        gains, query, key = _pre_norm_gains(model, index), b_q, np.ones_like(w_k[0, :, 0])
    else:
        gains, key = norm.gamma, norm.beta
        query = key @ w_q + b_q  # (H, r)
    c = summed_contributions(key[None], query[:, None], w_k)  # (H, d)
    return column_norms(w_q, w_k).mean(axis=0), np.abs(gains), np.abs(c).mean(axis=0)


def _pre_norm_gains(model: Model, index: int) -> np.ndarray:
    norm = model.family.norm_of(index)
    if norm is None:
        return np.full(model.config.d_model, np.nan)
    return norm.read(model.under(model.family.stored_name(model.config, index)), model.config).gamma


def column_norms(w_q: np.ndarray, w_k: np.ndarray) -> np.ndarray:
    """Norms of the columns of every head's W_QK: how strongly dimension j of a key counts for any query; w_q (H, d,
    r), w_k (G, d, r) -> (H, d)."""
    grams = np.einsum("hdr,hds->hrs", w_q, w_q, dtype=np.float64, optimize=True)  # (H, r, r)
    of_head = np.repeat(w_k, len(w_q) // len(w_k), axis=0).astype(np.float64)  # (H, d, r)
    return np.sqrt(np.maximum(((of_head @ grams) * of_head).sum(axis=-1), 0))


def extremity(values: np.ndarray) -> np.ndarray:
    """How far a size is from the others in its layer, up or down: |robust z-score| of its log, (L, d) -> (L, d).

    Training may shrink the gain of a dimension that has grown, so small gains are as telling as large ones.
    """
    return np.stack([np.abs(robust_z(np.log(np.maximum(row, 1e-30)))) for row in values])


def rank_agreement(guessed: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation over dimensions, layer by layer: two (L, d) arrays -> (L,); NaN where one is unknown.

    Only magnitudes are compared.
    """
    pairs = zip(np.abs(guessed), np.abs(measured), strict=True)
    return np.array([spearmanr(g, m).statistic if np.ptp(g) > 0 and np.ptp(m) > 0 else np.nan for g, m in pairs])


def ranks(values: np.ndarray) -> np.ndarray:
    """Rank of every dimension in its layer by magnitude, 1 for the largest: (L, d) -> (L, d) int."""
    return np.argsort(np.argsort(-np.abs(values), axis=1, kind="stable"), axis=1, kind="stable") + 1


# Measured on sentences


NAMED = 6  # outlier dimensions in the lead, and in the page's figures and tables; the files have all


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class OutlierAnalysis(Study):
    """Which dimensions of the residual stream stand out, what they add to attention scores, and what predicts it."""

    FIGURE, PAGE = "outliers.figures:means_figure", "outliers.page:write_outliers_page"
    TABLES: ClassVar = {
        "stream.csv": lambda outliers: outliers.stream.table(),
        "attention.csv": lambda outliers: outliers.stream.attention_table(),
        "contributions.csv": lambda outliers: outliers.contributions.table(outliers.dimensions),
        "preferences.csv": lambda outliers: outliers.preferences,
        "guess.csv": lambda outliers: outliers.agreement,
        "outliers.npz": lambda outliers: outliers.arrays(),
    }

    stream: Stream  # Figs 1 to 3
    contributions: Contributions  # Figs 4 and 5, and Table 1
    guess: Guess  # from the weights alone

    @property
    def dimensions(self) -> np.ndarray:
        """The outlier dimensions, the farthest first."""
        return self.stream.outliers

    @property
    def preferences(self) -> Table:
        """How much higher each kind of key scores than the last kind, and which dimensions cause it, by layer."""
        return self.contributions.preferences(self.dimensions)

    @cached_property
    def agreement(self) -> Table:
        """Rank correlations over dimensions between guesses and measurements, by layer."""
        return self.guess.agreement(self.stream, self.contributions)

    @property
    def lead(self) -> str:
        """How many dimensions stand out, and what they do where a kind of key scores most unlike the others."""
        c, dimensions, d = self.contributions, self.dimensions, self.stream.hidden.shape[1]
        gaps = np.nan_to_num(c.gaps)  # (L, K - 1, d)
        layer, kind = np.unravel_index(np.abs(gaps.sum(axis=-1)).argmax(), gaps.shape[:2])
        gap = gaps[layer, kind]
        j, total = int(np.abs(gap).argmax()), float(gap.sum())
        says = (
            f"In layer {c.layer_indices[layer]} {c.kind_names[kind]} keys score {abs(total):.2f} "
            f"{'above' if total >= 0 else 'below'} {c.kind_names[-1]} ones (mean over heads, before 1/√d'"
            f"{c.apart_from}): of that, dimension {j} is {gap[j]:+.2f}"
        )
        run_on = f"Run on {self.stream.counts.sum():,} tokens of {self.source}."
        if not len(dimensions):
            return f"None of the {d} dimensions stands out by its mean over tokens. {says}. {run_on}"
        of_outliers = f"{'the outlier is' if len(dimensions) == 1 else 'the outliers are'} {gap[dimensions].sum():+.2f}"
        which = ", ".join(map(str, dimensions[:NAMED])) + (" and others" if len(dimensions) > NAMED else "")
        them = "one stands" if len(dimensions) == 1 else f"{len(dimensions)} stand"
        out = f"Of {d} dimensions of the residual stream, {them} out in some layer: {which}"
        return f"{out}. {says} and {of_outliers}. {run_on}"

    @property
    def about(self) -> str:
        return f"{self.model}: {len(self.dimensions)} of {self.stream.hidden.shape[1]} dimensions stand out"

    def shown(self) -> list[Table]:
        """What makes a kind of key preferred, by layer."""
        return [self.preferences]

    def arrays(self) -> dict[str, np.ndarray]:
        """The content of outliers.npz."""
        stream, contributions, guessed = self.stream, self.contributions, self.guess
        return {
            "kinds": np.array(stream.kind_names), "layers": stream.layer_indices, "dimensions": self.dimensions,
            "tokens": stream.counts, "keys": contributions.counts,
            "hidden": stream.hidden.astype(np.float32), "attention": stream.attention.astype(np.float32),
            "contributions": contributions.by_kind.astype(np.float32), "guessed_columns": guessed.columns,
            "guessed_gains": guessed.gains, "guessed_contributions": guessed.contributions,
        }  # fmt: skip


def study_outliers(
    model: Model, texts: Texts, n: int, sampled: int, longest: int, seed: int = 0, device: str = "cpu"
) -> OutlierAnalysis:
    """Run a model on n sentences of at most `longest` tokens; contributions are means over the first `sampled`."""
    framing = framing_of(model)
    sequences = sentence_sequences(framing, texts.texts, n, longest, seed)
    outliers = measure_outliers(open_runner(model, device=device), sequences, token_kinds(framing), sampled)
    return replace(outliers, source=texts.source)


def measure_outliers(
    runner: Runner, sequences: Sequence[np.ndarray], kinds: TokenKinds, sampled: int = 100
) -> OutlierAnalysis:
    """Run a model over sentences, and read its weights: sequences (n,)."""
    return OutlierAnalysis.of(
        runner,
        stream=observe_stream(runner, sequences, kinds),
        contributions=observe_contributions(runner, sequences[:sampled], kinds),
        guess=guess(runner.model),
    )
