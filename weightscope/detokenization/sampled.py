"""AUROC of a sample of current tokens, for vocabularies of which scoring every token takes too long, and how long."""

import time
from collections import deque

import numpy as np

from weightscope.detokenization.first_layer import FirstLayer
from weightscope.metrics.sampling import Stratified
from weightscope.parallel import in_threads, usable_cores
from weightscope.text.counts import Counts

SURELY_SHORT = 1e13  # multiply-adds: minutes on one slow core, so that nothing has to be timed
BESIDE_PRODUCTS = 1.5  # times the products alone: what ranking the scores adds


def draw_tokens(first: FirstLayer, counts: Counts, how_many: int) -> Stratified:
    """Current tokens that follow some token, in strata by how often they do.

    Raises
    ------
    CheckpointError
        `how_many` is too few for an interval.
    """
    n_tokens = first.model.embeddings.n_tokens
    matrix = counts.matrix(n_tokens)
    n_positives = np.diff(matrix.indptr)
    scored = np.flatnonzero((n_positives > 0) & (n_positives < n_tokens))
    return Stratified.draw(scored, np.asarray(matrix.sum(axis=1)).ravel()[scored], how_many)


def seconds_of_all(first: FirstLayer, counts: Counts) -> float:
    """About how long scoring every token takes here; 0 where it is surely minutes at most."""
    n_tokens = first.model.embeddings.n_tokens
    scored = np.count_nonzero(np.diff(counts.matrix(n_tokens).indptr))
    products = float(len(first.heads)) * scored * n_tokens * first.model.config.head_dim
    if products < SURELY_SHORT:
        return 0.0
    return BESIDE_PRODUCTS * products / products_a_second(first.model.config.head_dim)


def products_a_second(r: int) -> float:
    """Multiply-adds of float32 products of inner size r that all cores together do in a second."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((512, r), np.float32), rng.standard_normal((r, 4096), np.float32)
    pieces = 4 * usable_cores()
    for _ in range(2):  # the first one wakes the threads
        started = time.perf_counter()
        deque(in_threads(lambda _: a @ b, range(pieces)), maxlen=0)
        taken = time.perf_counter() - started
    return pieces * a.shape[0] * b.size / taken
