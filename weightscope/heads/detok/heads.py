"""Heads that put split words together: T^ee against bigram counts (detokenization paper, sec. 3).

Where scoring every token takes too long, a stratified sample of tokens gives the mean with a
confidence interval.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from weightscope.checkpoint.provenance import Provenance
from weightscope.core.compute.cores import in_threads, one_blas_thread, usable_cores
from weightscope.core.compute.device import open_device
from weightscope.core.engine import Engine, ThisProcess, array_of
from weightscope.core.errors import CheckpointError, TooLargeError, printable
from weightscope.core.progress import bar, phase, progress_shown
from weightscope.core.results import Result, ShowsShapes, holds_arrays
from weightscope.core.tables import Column, Table
from weightscope.heads.detok.first_layer import FirstLayer, bare_embeddings
from weightscope.model.metrics.auroc import (
    auroc_of_one_order,
    auroc_of_own_scores,
    auroc_with_specific,
    mean_auroc,
    mean_by_frequency,
    roc_curve,
)
from weightscope.model.model import Model, as_model, overflow
from weightscope.model.run_identity import RunIdentity, file_identity
from weightscope.model.sources import Source
from weightscope.model.text.bigrams import count_bigrams
from weightscope.model.text.counts import Counts, load_counts
from weightscope.model.text.sequences import works
from weightscope.model.text.tokenizer import Tokenizer, TokenList

FEWEST = 100  # items of a sample: the interval takes their means for normally distributed
STRATUM_SIZE = 20  # items
LEVEL = 0.95


@holds_arrays
class Stratified(ShowsShapes):
    """Items drawn without replacement from strata of a population (Cochran 1977, chapter 5)."""

    items: np.ndarray  # (n,), ascending
    stratum: np.ndarray  # (n,) stratum of each item
    sizes: np.ndarray  # (S,) size of each stratum in the population

    @classmethod
    def draw(cls, items: np.ndarray, by: np.ndarray, how_many: int, seed: int = 0) -> "Stratified":
        """Draw a sample of `items` (N,), stratified in groups of similar `by` (N,)."""
        if how_many < FEWEST:
            raise CheckpointError(
                f"a sample of {how_many} is too small for an interval that holds; {FEWEST} will do"
            )
        rng, how_many = np.random.default_rng(seed), min(how_many, len(items))
        ordered = items[np.argsort(by, kind="stable")]
        strata = np.array_split(ordered, max(1, how_many // STRATUM_SIZE))
        sizes = np.array([len(members) for members in strata])
        # The same share of each stratum
        ends = np.round(np.cumsum(sizes) / max(len(items), 1) * how_many).astype(int)
        parts = zip(strata, np.diff(ends, prepend=0), strict=True)
        drawn = [rng.choice(members, n, replace=False) for members, n in parts]
        chosen = np.concatenate(drawn)
        order = np.argsort(chosen)
        stratum = np.repeat(np.arange(len(strata)), [len(members) for members in drawn])
        return cls(chosen[order], stratum[order], sizes)

    @property
    def weights(self) -> np.ndarray:
        """Number of items of the population that each drawn one represents, (n,)."""
        return (self.sizes / np.bincount(self.stratum, minlength=len(self.sizes)))[self.stratum]

    def mean(self, values: np.ndarray) -> tuple[float, float, float]:
        """Estimate the population's mean and its 95 % interval from the sample's values, (n,).

        If all items were drawn, the interval has no width; NaN among the values makes all three
        NaN.
        """
        from scipy.special import stdtrit  # SciPy takes a while to import

        n, total = np.bincount(self.stratum, minlength=len(self.sizes)), self.sizes.sum()
        means = np.bincount(self.stratum, values, len(self.sizes)) / n  # (S,)
        squares = np.bincount(self.stratum, (values - means[self.stratum]) ** 2, len(self.sizes))
        variances = np.where(n < self.sizes, squares / np.maximum(n - 1, 1), 0.0)
        shares = self.sizes / total
        mean = float(shares @ means)
        error = np.sqrt((shares**2 * (1 - n / self.sizes) * variances / n).sum())
        reach = float(stdtrit(max(len(values) - len(n), 1), (1 + LEVEL) / 2) * error)
        return mean, mean - reach, mean + reach


# Sampled tokens

SURELY_SHORT = 1e13  # multiply-adds: minutes on one slow core, so that nothing has to be timed
BESIDE_PRODUCTS = 1.5  # times the products alone, with the ranking of scores


def draw_tokens(first: FirstLayer, counts: Counts, how_many: int) -> Stratified:
    """Draw current tokens that follow some token, in strata by frequency."""
    n_tokens = first.model.embeddings.n_tokens
    matrix = counts.matrix(n_tokens)
    n_positives = np.diff(matrix.indptr)
    scored = np.flatnonzero((n_positives > 0) & (n_positives < n_tokens))
    return Stratified.draw(scored, counts.padded(n_tokens).occurrences[scored], how_many)


def seconds_of_all(first: FirstLayer, counts: Counts) -> float:
    """Estimated seconds to score every token here; 0 if it is surely a few minutes at most."""
    n_tokens = first.model.embeddings.n_tokens
    scored = np.count_nonzero(np.diff(counts.matrix(n_tokens).indptr))
    products = float(len(first.heads)) * scored * n_tokens * first.model.config.head_dim
    if products < SURELY_SHORT:
        return 0.0
    return BESIDE_PRODUCTS * products / products_a_second(first.model.config.head_dim)


def products_a_second(r: int) -> float:
    """Multiply-adds per second of float32 products of inner size r on all cores together."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((512, r), np.float32), rng.standard_normal((r, 4096), np.float32)
    pieces = 4 * usable_cores()
    for _ in range(2):  # the first one wakes the threads
        started = time.perf_counter()
        deque(in_threads(lambda _: a @ b, range(pieces)), maxlen=0)
        taken = time.perf_counter() - started
    return pieces * a.shape[0] * b.size / taken


# ROC curves (Fig. 2)


@holds_arrays
class TokenRoc(ShowsShapes):
    """ROC curves of one current token (Fig. 2), a pair of arrays per head."""

    text: str
    curves: list[tuple[np.ndarray, np.ndarray]]  # (false positive rate, true positive rate)


@phase("ROC curves")
def roc_curves(first: FirstLayer, counts: Counts, tokens: Mapping[str, int]) -> list[TokenRoc]:
    """ROC curves of every head for chosen current tokens (Fig. 2)."""
    rocs = []
    for text, token in tokens.items():
        previous, weights = counts.row(token)
        if not len(previous):
            problem = f"{text!r} follows no token in these counts, so it has no ROC curve"
            raise CheckpointError(problem, file=counts.file)
        with one_blas_thread():
            curves = [roc_curve(scores, previous, weights) for scores in first.token_scores(token)]
        rocs.append(TokenRoc(text, curves))
    return rocs


# AUROC of all heads (Table 2)

PRODUCTS_A_TASK = 50_000_000_000  # multiply-adds of a block of rows, up to a second of work
FEWEST_ROWS = 8192  # rows of a block; laying out the keys stays below a hundredth of the work


TABLES: dict[str, Callable[["BigramAuroc"], Any]] = {
    "heads.csv": lambda result: result.heads,
    "tokens.npz": lambda result: result.by_token,
}


@holds_arrays
class BigramAuroc(Result):
    """AUROC with which each head's T^ee ranks the previous tokens that occur, by current token.

    Attributes
    ----------
    model : str
        Its name.
    layer : int
    counts : Counts
        The bigrams that the ranking is compared with.
    auroc : (n_heads, vocab) float64 array
        NaN where a token follows no token in the counts, and where one was not drawn.
    specific : (n_heads, vocab) float64 array
        AUROC of T^ee less its mean over the current tokens that follow some token: a score of both
        tokens.
    constant : (n_heads, vocab) float64 array
        AUROC of that mean, a score of the previous token alone.
    baseline : (vocab,) float64 array
        AUROC of the previous token's frequency before other tokens than the current one, without
        any head.
    caveats : tuple of str
        What T^ee leaves out of the heads' scores.
    sample : Stratified, optional
        The current tokens that were drawn, where not all are scored.
    provenance : Provenance
        What was read, by which command and version, and when.
    """

    FIGURE, PAGE = "figures:auroc_figure", "page:write_auroc_page"
    TABLES = TABLES

    model: str
    layer: int
    counts: Counts
    auroc: np.ndarray
    specific: np.ndarray
    constant: np.ndarray
    baseline: np.ndarray
    caveats: tuple[str, ...]
    sample: Stratified | None = None
    provenance: Provenance = field(default_factory=Provenance, repr=False)

    @cached_property
    def heads(self) -> Table:
        """Table 2, one row per head; for a sample, with the ends of the 95 % interval."""
        symbol = "AUROC of bare embeddings" if self.layer else "AUROC"
        auroc, auroc_paper, scored = zip(*map(mean_auroc, self.auroc), strict=True)
        occurrences = self.counts.padded(self.auroc.shape[1]).occurrences
        between: list[Column] = []
        if self.sample is not None:
            drawn = self.auroc[:, self.sample.items]
            auroc, low, high = np.transpose([self.sample.mean(scores) for scores in drawn])
            auroc_paper = auroc * self.sample.sizes.sum() / self.auroc.shape[1]
            occurrences = occurrences.astype(float)
            occurrences[self.sample.items] *= self.sample.weights
            from_low = "lower end of the mean's 95 % interval"
            between = [
                Column("auroc_low", low, "95 % from", "", from_low, ".3f"),
                Column("auroc_high", high, "to", "", "upper end", ".3f"),
            ]
        specific, constant = self._means(self.specific), self._means(self.constant)
        less_mean = "AUROC of T^ee less its mean over current tokens"
        of_mean = "AUROC of that mean, which is the same for all current tokens"
        over_all, following = "mean over all tokens", "those that follow some token in the counts"
        by_frequency = [mean_by_frequency(scores, occurrences) for scores in self.auroc]
        in_text = "mean over places in text: each token as often as it occurs"
        columns = [
            Column("head", np.arange(len(self.auroc))),
            Column("auroc", auroc, symbol, "", "mean over the tokens scored", ".3f"),
            *between,
            Column("auroc_paper", auroc_paper, "AUROC, paper's mean", "", over_all, ".3f"),
            Column("auroc_specific", specific, "AUROC, specific part", "", less_mean, ".3f"),
            Column("auroc_constant", constant, "AUROC, constant part", "", of_mean, ".3f"),
            Column("tokens_scored", scored, "tokens scored", meaning=following),
            Column("auroc_by_frequency", by_frequency, "AUROC by frequency", "", in_text, ".3f"),
        ]
        caption = (
            "Table 2. The paper's mean counts a token that follows no token as 0. By frequency, a "
            "frequent token counts for more: that is the mean over the places of the text that was "
            "counted. T^ee is the sum of its mean over current tokens, a score of the previous "
            "token alone (constant), and of a score of both tokens (specific). Without a head, the "
            "previous token's frequency (the current token's counts left out) has AUROC "
            f"{self.auroc_baseline:.3f}."
        )
        notes = (caption, self.drawn, bare_embeddings(self.layer))
        return Table(columns, " ".join(filter(None, notes)))

    def _means(self, aurocs: np.ndarray) -> list[float]:
        """Mean over the tokens scored of each head, (n_heads, vocab); a sample gives estimates."""
        if self.sample is None:
            return [mean_auroc(scores).auroc for scores in aurocs]
        return [self.sample.mean(scores[self.sample.items])[0] for scores in aurocs]

    @property
    def auroc_baseline(self) -> float:
        """Mean AUROC of the previous token's frequency, over tokens that follow some token."""
        return mean_auroc(self.baseline).auroc

    @property
    def controls(self) -> dict[str, float]:
        """Further numbers for report.json."""
        return {"auroc_baseline": self.auroc_baseline}

    @property
    def by_token(self) -> dict[str, np.ndarray]:
        """Arrays of tokens.npz."""
        names = ("specific", "constant", "baseline")
        return {"auroc": self.auroc} | {f"auroc_{name}": getattr(self, name) for name in names}

    @property
    def drawn(self) -> str:
        """The number of tokens drawn, in a sentence; empty if all are scored."""
        if self.sample is None:
            return ""
        return (
            f"Means are estimates from {len(self.sample.items):,} current tokens of the "
            f"{self.sample.sizes.sum():,} that follow some token, drawn at random from groups of "
            "similar frequency."
        )

    @property
    def counted(self) -> str:
        """The texts counted if no counts were given, in a sentence; empty otherwise."""
        if set(self.counts.corpus_files) != {file.name for file in works()}:
            return ""
        return (
            f"Bigrams of {self.counts.tokens:,} tokens were counted, in the "
            f"{self.counts.documents} works in the public domain that come with weightscope; a "
            "larger corpus says more (`weightscope bigrams`)."
        )

    @property
    def ranked(self) -> Table:
        """`heads`, best head first."""
        return self.heads.sort("auroc", descending=True)

    @property
    def lead(self) -> str:
        """The result in a sentence."""
        head, auroc = self.ranked["head"], self.ranked["auroc"]
        result = (
            f"Head {head[0]} ranks previous tokens that occur in text above those that do not with "
            f"AUROC {auroc[0]:.2f}; head {head[-1]}, the lowest, with {auroc[-1]:.2f}; 0.5 is "
            f"chance. The previous token's frequency alone has {self.auroc_baseline:.2f}."
        )
        specific = self.heads.sort("auroc_specific", descending=True)
        result += (
            f" Of scores less what is the same for all current tokens, head {specific['head'][0]} "
            f"has the highest AUROC, {specific['auroc_specific'][0]:.2f}."
        )
        notes = (result, self.drawn, self.counted, bare_embeddings(self.layer))
        return " ".join(filter(None, notes))

    def shown(self) -> list[Table]:
        """Heads, the best first."""
        return [self.ranked]

    @property
    def about(self) -> str:
        best, auroc = self.ranked["head"][0], self.ranked["auroc"][0]
        sizes = f"{printable(self.model)}, layer {self.layer}: {len(self.auroc)} heads"
        return f"{sizes}, the best is head {best} with {auroc:.2f}"

    def printed(self) -> list[str | Table]:
        """Lines and tables for a terminal, in order."""
        caveats = [f"not in these numbers: {caveat}" for caveat in self.caveats]
        return [self.ranked, *filter(None, [self.counted]), *caveats]


def bigram_auroc(
    model: Model | str | Path,
    counts: Counts | str | Path | None = None,
    layer: int = 0,
    delta: int = 1,
    device: str = "cpu",
    progress: bool | None = None,
    sample: int | None = None,
) -> BigramAuroc:
    """AUROC with which every head's T^ee ranks previous tokens that occur, over the vocabulary.

    Parameters
    ----------
    model : Model, str or Path
        A model, or what `open_model` opens.
    counts : Counts or path, optional
        Bigrams by the model's own tokenizer, or their file. By default the tokenizer counts the
        works in the public domain that come with weightscope.
    layer, delta, device
        As in `FirstLayer`.
    progress : bool, optional
        Show a bar; by default in a notebook only.
    sample : int, optional
        Score this many randomly drawn current tokens against the full vocabulary: means then have
        intervals.

    Raises
    ------
    CheckpointError
        No token embedding, counts of another vocabulary or tokenizer, or no counts and no tokenizer
        that splits texts; a sample of too few tokens.

    Examples
    --------
    >>> import weightscope as ws
    >>> auroc = ws.bigram_auroc(ws.open_model("embedded"))
    >>> auroc
    BigramAuroc(embedded, layer 0: 6 heads, the best is head 5 with 0.77)
    >>> auroc.auroc.shape
    (6, 8000)
    """
    model = as_model(model)
    with progress_shown(progress):
        first, counts = FirstLayer(model, layer, delta, device), counts_for(model, counts)
        drawn = None if sample is None else draw_tokens(first, counts, sample)
        return measure_heads(first, counts, sample=drawn)


def counts_for(model: Model, counts: Counts | str | Path | None) -> Counts:
    """The bigram counts, after checking that they are for this model's tokens."""
    n_tokens = model.embeddings.n_tokens
    if counts is None:
        try:
            counts = count_bigrams(works(), Tokenizer.load(model.tokenizer))
        except CheckpointError as error:
            how = "`weightscope bigrams CORPUS --tokenizer SOURCE --out COUNTS.npz` makes them"
            problem = f"needs bigram counts ({error}); {how}"
            raise CheckpointError(problem, file=model.name) from None
    elif not isinstance(counts, Counts):
        counts = load_counts(counts)
    try:
        tokenizer = Tokenizer.load(model.tokenizer)
    except CheckpointError:
        counts.check(n_tokens)
    else:  # a list of tokens may be padded to the embedding
        counts.check(n_tokens, None if isinstance(tokenizer, TokenList) else tokenizer.hash)
    return counts


def measure_heads(
    first: FirstLayer,
    counts: Counts,
    engine: Engine | None = None,
    on_worker: "Callable[[], Scorer] | None" = None,
    sample: Stratified | None = None,
) -> BigramAuroc:
    """Compute `bigram_auroc` in blocks of rows, wherever an engine computes."""
    if engine is None:
        with ThisProcess() as local_engine:
            return measure_heads(first, counts, local_engine, sample=sample)
    n_tokens, scorer = first.model.embeddings.n_tokens, Scorer(first, counts)
    get_scorer = on_worker if engine.elsewhere else lambda: scorer
    aurocs = np.full((3, len(first.heads), n_tokens), np.nan)
    step = max(FEWEST_ROWS, PRODUCTS_A_TASK // (n_tokens * first.model.config.head_dim))
    n_rows = n_tokens if sample is None else len(sample.items)
    for head in range(len(first.heads)):
        for start in range(0, n_rows, step):
            stop = min(start + step, n_rows)
            rows = range(start, stop) if sample is None else sample.items[start:stop]
            engine.submit((head, start, stop), auroc_of_rows, get_scorer, head, rows)
    with bar(what="AUROC", unit="token", total=len(first.heads) * n_rows, unit_scale=True) as done:
        while engine.busy:
            (head, start, stop), values, error = engine.next()
            if error is not None:
                raise error
            place = slice(start, stop) if sample is None else sample.items[start:stop]
            aurocs[:, head, place] = array_of(values, (3, stop - start), f"head {head}")
            done.update(stop - start)
    caveats = (*first.attention.caveats, *counts.caveats)
    provenance = Provenance.of(first.model.checkpoint)
    matrix = counts.matrix(n_tokens)  # (V, V)
    frequency = np.bincount(matrix.indices, matrix.data, n_tokens)
    before_others = frequency[matrix.indices] - matrix.data
    baseline = auroc_of_own_scores(frequency, before_others, matrix)
    model, (auroc, specific, constant) = first.model.title, aurocs
    aurocs_of = auroc, specific, constant, baseline
    return BigramAuroc(model, first.layer, counts, *aurocs_of, caveats, sample, provenance)


def auroc_of_rows(
    get_scorer: "Callable[[], Scorer]", head: int, tokens: range | np.ndarray
) -> np.ndarray:
    """Compute `Scorer.aurocs`, (3, n), as a task: one head and a block of rows."""
    with one_blas_thread():
        return get_scorer().aurocs(head, tokens)


class Scorer:
    """A layer's heads and bigram counts, from which it computes the AUROC of a head's rows."""

    def __init__(self, first: FirstLayer, counts: Counts) -> None:
        self._first = first
        self._matrix = counts.matrix(first.model.embeddings.n_tokens)
        self._scored = np.diff(self._matrix.indptr) > 0  # (V,)
        self._keys: tuple[int, np.ndarray] | None = None
        self._mean_row: np.ndarray | None = None
        self._mean: tuple[int, np.ndarray] | None = None
        # A worker may have several threads, and all need the same layer and keys
        self._making = Lock()

    def aurocs(self, head: int, tokens: range | np.ndarray) -> np.ndarray:
        """AUROC of one head for n current tokens, float64 (3, n).

        The rows are the AUROC of T^ee, of T^ee less its mean over the current tokens that follow
        some token, and of that mean.
        """
        with self._making:
            kv_head = self._first.heads[head].kv_head  # heads that share it follow each other
            if self._keys is None or self._keys[0] != kv_head:
                self._keys = None
                self._keys = kv_head, self._first.key_factor(kv_head)
            keys, mean = self._keys[1], self._mean_query(head)
        if isinstance(tokens, range):
            queries = self._first.query_factor(head, tokens.start, tokens.stop)
            counts = self._matrix[tokens.start : tokens.stop]
        else:
            queries, counts = self._first.query_rows(head, tokens), self._matrix[tokens]
        try:
            aurocs = auroc_with_specific(
                queries, keys, mean, counts, device=open_device(self._first.device)
            )
            return np.stack((*aurocs, auroc_of_one_order(keys @ mean, counts)))
        except TooLargeError:
            raise overflow(self._first.model, f"T^ee of head {head}", self._first.layer) from None

    def _mean_query(self, head: int) -> np.ndarray:
        """The mean query of the scored tokens, float32 (r,); the last head's is kept."""
        if self._mean is None or self._mean[0] != head:
            if self._mean_row is None:
                self._mean_row = self._first.mean_row(self._scored)
            mean = self._first.mean_query(head, self._scored, self._mean_row)
            what = f"the query side of T^ee of head {head}"
            self._first.check_finite(what, mean, self._first.layer)
            self._mean = head, mean.astype(np.float32)
        return self._mean[1]


@dataclass(frozen=True)
class ScorerOnWorker:
    """A recipe for a worker's Scorer, which reads the checkpoint and the counts once."""

    source: Source
    layer: int  # as in `FirstLayer`
    delta: int
    counts: Path | None  # COUNTS.npz on a file system that workers share; None as in `bigram_auroc`
    seen: RunIdentity  # identity of that file where the task comes from
    device: str = "cpu"  # as in `FirstLayer`, on the worker

    @classmethod
    def of(cls, source: Source, first: FirstLayer, counts: Path | None) -> "ScorerOnWorker":
        """Describe `first` by its source, and the counts as this machine has them."""
        path = None if counts is None else counts.absolute()
        seen = source.as_seen(first.model)
        return cls(seen, first.layer, first.delta, path, _identity(path), first.device)

    def __call__(self) -> Scorer:
        with _opening:
            return _kept(self)


_opening = Lock()


@lru_cache(maxsize=1)
def _kept(wanted: ScorerOnWorker) -> Scorer:
    wanted.seen.refuse_other(_identity(wanted.counts), str(wanted.counts))
    first = FirstLayer(wanted.source.elsewhere(), wanted.layer, wanted.delta, wanted.device)
    return Scorer(first, counts_for(first.model, wanted.counts))


def _identity(counts: Path | None) -> RunIdentity:
    return RunIdentity.of(counts=None if counts is None else file_identity(counts))
