"""Compilation with numba, the extra `fast`."""

from collections.abc import Callable
from typing import Any

from numba import njit, types
from numba.extending import intrinsic


def compiled(function: Any, **options: Any) -> Any:
    """Compile a function; cache the result next to its file or in the user's cache, if it can."""
    try:
        return njit(function, nogil=True, cache=True, **options)
    except RuntimeError:
        return njit(function, nogil=True, **options)


@intrinsic  # type: ignore[untyped-decorator]
def in_wide_vectors(typing_context: Any) -> tuple[Any, Callable[..., Any]]:
    """Let the calling function use vectors of 512 bits, which LLVM halves by default."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # bypasses llvmlite's own `add`, which knows no such names
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), emit
