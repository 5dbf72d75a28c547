"""What the tests of this folder share."""

from collections.abc import Iterator

import pytest
from threadpoolctl import threadpool_limits


@pytest.fixture(scope="package", autouse=True)
def one_blas_thread() -> Iterator[None]:
    """Dense witnesses on one BLAS thread: several are slowed down many times over where the cores are busy."""
    with threadpool_limits(1, "blas"):
        yield
