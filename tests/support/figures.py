"""Commands without the seconds that it takes to draw figures."""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure

import weightscope
from weightscope.core.files import Files
from weightscope.report.pages import style
from weightscope.report.pages.style import Drawing

ROOT = Path(weightscope.__file__).parent


@cache
def figure_modules() -> tuple[ModuleType, ...]:
    """Every figures.py of the package. Pages are imported too: some import a figure by name."""
    paths = sorted(path for pattern in ("figures", "page") for path in ROOT.rglob(f"*{pattern}.py"))
    names = (".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in paths)
    modules = [*map(import_module, names)]
    return tuple(module for module in modules if module.__name__.endswith("figures"))


@contextmanager
def undrawn() -> Iterator[None]:
    """Figures are not even built: their files are empty. No test waits for the disk."""

    def save(figure: None, files: Files, name: str, numbers_in: str = "") -> Drawing:
        saved = (f"{name}.png", f"{name}.svg", numbers_in or f"{name}.figure.csv")
        for file in saved[: 2 if numbers_in else 3]:
            files.text(file, "")
        return Drawing("<svg/>", files=saved)

    replaced: dict[Any, Any] = {style.save: save}
    for module in figure_modules():
        drawing = (function for _, function in inspect.getmembers(module, inspect.isfunction))
        replaced |= {function: _nothing for function in drawing if hasattr(function, "__wrapped__")}  # @in_our_style
    with pytest.MonkeyPatch.context() as patch:
        for module in [module for name, module in sys.modules.items() if name.startswith("weightscope.")]:
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if function in replaced:
                    patch.setattr(module, name, replaced[function])
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def _nothing(*things: object, **options: object) -> None:
    """In place of a figure."""


@contextmanager
def unsaved() -> Iterator[None]:
    """Figures are put together and come out empty: what takes seconds is to draw them."""

    def savefig(figure: Figure, file: Any, format: str, **options: Any) -> None:
        file.write(b"<svg/>" if format == "svg" else b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield
