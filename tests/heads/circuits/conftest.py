"""What the tests of this folder share."""

from collections.abc import Iterator

import pytest

from weightscope.core.compute.cores import one_blas_thread


@pytest.fixture(scope="package", autouse=True)
def witnesses_on_one_thread() -> Iterator[None]:
    """Dense witnesses on one BLAS thread: several are slowed down many times over where the cores are busy."""
    with one_blas_thread():
        yield
