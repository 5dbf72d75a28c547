"""A test for numba, the extra `fast`; code that it compiles needs `compute.compiled`."""

import os
from functools import cache

NUMBA_SETTINGS = ".numba_config.yaml"


def numba_may_run() -> bool:
    """True if numba is installed, and the working directory has no settings for it.

    numba reads them when it is imported and whenever it compiles. They may say where its cache is,
    which it unpickles, and the working directory may be a checkpoint's.
    """
    return not os.path.lexists(NUMBA_SETTINGS) and _numba_is_there()


@cache
def _numba_is_there() -> bool:
    """True if numba is installed and works with this NumPy."""
    try:
        import weightscope.core.compute.compiled  # noqa: F401
    except ImportError:
        return False
    return True
