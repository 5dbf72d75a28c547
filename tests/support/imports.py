"""What a module imports, read and not run."""

import ast
from pathlib import Path


def names_of(node: ast.AST) -> list[str]:
    """Dotted names of one import; of `from a import b` both a and a.b, since b may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.module and not node.level, "an import is written with its full name"
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def imports_of(path: Path) -> set[str]:
    """Dotted names of all that a module imports, wherever in it."""
    return {name for node in ast.walk(ast.parse(path.read_text())) for name in names_of(node)}


def imports_when_loaded(path: Path) -> set[str]:
    """Dotted names of what is imported as soon as the module is: not in a function, a `try` or an `if`."""
    return {name for node in ast.parse(path.read_text()).body for name in names_of(node)}
