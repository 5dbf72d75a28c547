"""Which heads put words together: T^ee against bigram counts (detokenization paper, section 3)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.device import open_device
from weightscope.embedded import COUNTS
from weightscope.engine import Engine, ThisProcess
from weightscope.errors import CheckpointError
from weightscope.fingerprint import Fingerprint, file_identity
from weightscope.folder import write_csv, write_npz
from weightscope.metrics.auroc import bigram_auroc, mean_auroc, roc_curve
from weightscope.parallel import one_blas_thread
from weightscope.progress import bar
from weightscope.sources import Source
from weightscope.text.counts import Counts, load_counts

PRODUCTS_A_TASK = 50_000_000_000  # multiply-adds of a block of rows: half a second to a second of work
FEWEST_ROWS = 8192  # of a block, so that laying out the keys for it stays below a hundredth of the work


@dataclass(frozen=True)
class HeadAuroc:
    """One row of Table 2.

    Attributes
    ----------
    head : int
    auroc : float
        Mean over the tokens that follow some token in the counts.
    auroc_paper : float
        Mean over all tokens, those that follow none entering as 0: what the paper's code reports.
    tokens_scored : int
        How many tokens `auroc` is a mean of.
    """

    head: int
    auroc: float
    auroc_paper: float
    tokens_scored: int


@dataclass(frozen=True)
class Detokenization:
    """How well each head's T^ee ranks the previous tokens that occur, for every current token.

    Attributes
    ----------
    auroc : (n_heads, vocab) float64 array
        NaN where a token follows no token in the counts.
    table : list of HeadAuroc
        Best head first.
    """

    auroc: np.ndarray
    table: list[HeadAuroc]


class Ranking:
    """Heads and bigram counts, to be asked for the AUROC of some heads' rows.

    Parameters
    ----------
    first : FirstLayer
    counts : Counts
    """

    def __init__(self, first: FirstLayer, counts: Counts) -> None:
        self._first = first
        self._matrix = counts.matrix(first.model.embeddings.n_tokens)
        self._keys: tuple[int, np.ndarray] | None = None
        self._making = Lock()  # a worker may have several threads, and all need the same layer and keys

    def itself(self) -> "Ranking":
        """For tasks that do not leave this process."""
        return self

    def auroc(self, head: int, start: int, stop: int) -> np.ndarray:
        """AUROC of one head for current tokens start .. stop - 1, float64 (stop - start,)."""
        with self._making:
            keys = self._key_factor(self._first.heads[head].kv_head)
        queries, device = self._first.query_factor(head, start, stop), open_device(self._first.device)
        return bigram_auroc(queries, keys, self._matrix[start:stop], device=device)

    def _key_factor(self, kv_head: int) -> np.ndarray:
        """Of the key-value head asked for last, which is kept: rows and heads that share it come one after another."""
        if self._keys is None or self._keys[0] != kv_head:
            self._keys = None
            self._keys = kv_head, self._first.key_factor(kv_head)
        return self._keys[1]


@dataclass(frozen=True)
class RankingElsewhere:
    """How a worker gets at a Ranking: it reads the checkpoint and the counts itself, once, and keeps them.

    Attributes
    ----------
    source : Source
    layer, delta : int
        As in `FirstLayer`.
    counts : Path or None
        COUNTS.npz on a file system that workers share; None for those that come with weightscope.
    seen : Fingerprint
        Of that file where the task comes from.
    device : str
        As in `FirstLayer`, on the worker.
    """

    source: Source
    layer: int
    delta: int
    counts: Path | None
    seen: Fingerprint
    device: str = "cpu"

    @classmethod
    def of(cls, source: Source, first: FirstLayer, counts: Path | None) -> "RankingElsewhere":
        """What `first` is of `source`, and the counts as this machine has them."""
        path = None if counts is None else counts.absolute()
        return cls(source.as_seen(first.model), first.layer, first.delta, path, _fingerprint(path), first.device)

    def __call__(self) -> Ranking:
        with _opening:
            return _kept(self)


_opening = Lock()


def _fingerprint(counts: Path | None) -> Fingerprint:
    return Fingerprint.of(counts=None if counts is None else file_identity(counts))


@lru_cache(maxsize=1)
def _kept(elsewhere: RankingElsewhere) -> Ranking:
    path = elsewhere.counts or COUNTS
    elsewhere.seen.refuse_other(_fingerprint(elsewhere.counts), str(path))
    first = FirstLayer(elsewhere.source.elsewhere(), elsewhere.layer, elsewhere.delta, elsewhere.device)
    return Ranking(first, load_counts(path))


def auroc_of_rows(ranking: Callable[[], Ranking], head: int, start: int, stop: int) -> np.ndarray:
    """The task that Table 2 consists of: one head and a block of rows."""
    with one_blas_thread():
        return ranking().auroc(head, start, stop)


def rows_a_task(n_tokens: int, head_dim: int) -> int:
    """Rows of a block: seconds of work, many to a vocabulary as large as Llama 3's. They depend on sizes alone."""
    return max(FEWEST_ROWS, PRODUCTS_A_TASK // (n_tokens * head_dim))


def detokenize(
    first: FirstLayer,
    counts: Counts,
    engine: Engine | None = None,
    elsewhere: Callable[[], Ranking] | None = None,
) -> Detokenization:
    """AUROC of every head over the full vocabulary (Table 2).

    Parameters
    ----------
    first : FirstLayer
    counts : Counts
        Bigrams by the checkpoint's own tokenizer.
    engine : Engine, optional
        Where to compute; here if not given.
    elsewhere : function returning a Ranking, optional
        The same layer and counts for an engine outside this process; see `RankingElsewhere`.

    Raises
    ------
    CheckpointError
        No token embedding, counts of another vocabulary, or what a worker or the engine had to say.
    """
    if engine is None:
        with ThisProcess() as own:
            return detokenize(first, counts, own)
    n_tokens = first.model.embeddings.n_tokens
    here_too = Ranking(first, counts)
    ranking = elsewhere if engine.elsewhere else here_too.itself
    with one_blas_thread():
        rows = np.full((len(first.heads), n_tokens), np.nan)
    step = rows_a_task(n_tokens, first.model.config.head_dim)
    tasks = [(h, start, min(start + step, n_tokens)) for h in range(len(rows)) for start in range(0, n_tokens, step)]
    for task in tasks:
        engine.submit(task, auroc_of_rows, ranking, *task)
    with bar(what="AUROC", unit="token", total=rows.size, unit_scale=True) as done:
        while engine.busy:
            (head, start, stop), values, error = engine.next()
            if error is not None:
                raise error
            rows[head, start:stop] = values
            done.update(stop - start)
    table = [HeadAuroc(head, *mean_auroc(row)) for head, row in enumerate(rows)]
    return Detokenization(rows, sorted(table, key=lambda row: -row.auroc))


def write_detokenization(found: Detokenization, out: Path) -> None:
    """Write heads.csv and tokens.npz into `out`."""
    in_order = sorted(found.table, key=lambda row: row.head)
    write_csv(
        out / "heads.csv",
        ("head", "auroc", "auroc_paper", "tokens_scored"),
        ((row.head, row.auroc, row.auroc_paper, row.tokens_scored) for row in in_order),
    )
    write_npz(out / "tokens.npz", auroc=found.auroc)


@dataclass(frozen=True)
class TokenRoc:
    """ROC curves of one current token (Fig. 2), a pair of arrays a head.

    Attributes
    ----------
    text : str
    curves : list of (false positive rate, true positive rate)
    """

    text: str
    curves: list[tuple[np.ndarray, np.ndarray]]


def roc_curves(first: FirstLayer, counts: Counts, tokens: Mapping[str, int]) -> list[TokenRoc]:
    """ROC curves of every head for chosen current tokens (Fig. 2).

    Parameters
    ----------
    first : FirstLayer
    counts : Counts
    tokens : mapping of str to int
        Ids of the current tokens by their text.

    Raises
    ------
    CheckpointError
        A token follows no token in the counts, so that it has no curve.
    """
    found = []
    for text, token in tokens.items():
        previous, weights = counts.row(token)
        if not len(previous):
            raise CheckpointError(
                f"{text!r} follows no token in these counts, so it has no ROC curve", file=counts.file
            )
        with one_blas_thread():
            curves = [roc_curve(scores, previous, weights) for scores in first.token_scores(token)]
        found.append(TokenRoc(text, curves))
    return found
