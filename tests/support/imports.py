"""What a module imports, read and not run."""

import ast
from functools import cache
from pathlib import Path


def names_of(node: ast.AST) -> list[str]:
    """Dotted names of one import; of `from a import b` both a and a.b, since b may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.module and not node.level, "an import is written with its full name"
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    """Dotted names of all that a module imports, wherever in it."""
    return {name for node in ast.walk(_parsed(path)) for name in names_of(node)}


@cache
def imports_when_loaded(path: Path) -> set[str]:
    """Dotted names of what is imported as soon as the module is: not in a function, a `try` or an `if`."""
    return {name for node in _parsed(path).body for name in names_of(node)}


def modules_imported(path: Path) -> set[str]:
    """Dotted names of the modules that a module imports: `from a import b` is a.b where that is a module, else a."""
    names = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.ImportFrom):
            names |= {name if _is_module(name) else str(node.module) for name in names_of(node)[1:]}
        else:
            names |= {*names_of(node)}
    return names


def _is_module(name: str) -> bool:
    place = Path(__file__).parents[2].joinpath(*name.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()
