"""Parts of the reference that are made of the package itself, for `{{ ... }}` on a page."""

from collections.abc import Callable

import weightscope


def public_names() -> str:
    """Every public name, for mkdocstrings."""
    return "\n".join(f"::: weightscope.{name}\n" for name in weightscope.__all__)


PARTS: dict[str, Callable[..., str]] = {"public_names": public_names}
