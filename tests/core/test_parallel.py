"""Work in threads: results in order, one BLAS thread each, and no more begun than is wanted."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from weightscope.core.compute.cores import in_threads, one_blas_thread


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_results_come_in_the_order_of_the_items() -> None:
    def slow_at_first(n: int) -> int:
        time.sleep(0.02 if n == 0 else 0)
        return n * n

    assert list(in_threads(slow_at_first, range(50), threads=4)) == [n * n for n in range(50)]
    assert list(in_threads(slow_at_first, [])) == []


def test_threads_work_side_by_side() -> None:
    together = threading.Barrier(3, timeout=10)
    list(in_threads(lambda n: together.wait(), range(3), threads=3))


def test_blas_threads_are_limited_and_restored() -> None:
    before = blas_threads()
    assert list(in_threads(lambda n: blas_threads(), range(2))) == [{1}, {1}]
    assert blas_threads() == before
    with one_blas_thread():
        assert blas_threads() == {1}
    assert blas_threads() == before


def test_scipys_blas_is_limited_without_scipy() -> None:
    code = """
import sys
from weightscope.core.compute.cores import one_blas_thread
with one_blas_thread():
    assert "numpy" in sys.modules and "scipy" not in sys.modules
    import scipy.linalg
    from threadpoolctl import threadpool_info
    print({library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"})
"""
    env = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "{1}\n"


@pytest.mark.filterwarnings("error")
def test_a_call_sees_the_callers_context() -> None:
    with np.errstate(invalid="ignore"):
        assert np.isnan(list(in_threads(np.sqrt, [np.float64(-1)]))).all()
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        list(in_threads(np.sqrt, [np.float64(-1)]))


def test_items_are_taken_a_few_ahead() -> None:
    taken = []

    def blocks() -> Iterator[int]:
        for n in range(100):
            taken.append(n)
            yield n

    results = in_threads(lambda n: n, blocks(), threads=2)
    assert next(results) == 0
    assert len(taken) == 5
    results.close()
    assert len(taken) == 5


def test_after_an_error_no_further_item_is_begun() -> None:
    begun = []

    def fail(n: int) -> None:
        begun.append(n)
        time.sleep(0.01)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(in_threads(fail, range(100), threads=2))
    assert len(begun) < 10
