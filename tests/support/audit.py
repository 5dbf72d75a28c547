"""Audits for tests to whom it is no matter how figures look, which take seconds to draw."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from weightscope.audit import page as audit_page
from weightscope.cli import main
from weightscope.compare import page as comparison_page
from weightscope.files import HIDDEN, Files
from weightscope.pages.style import Drawing

FIGURES = {
    audit_page: ("head_maps", "spectra", "depth"),
    comparison_page: ("changes", "spectra_before_and_after", "trajectories"),
}


@contextmanager
def undrawn() -> Iterator[None]:
    """Figures are empty files."""

    def save(figure: None, files: Files, name: str, numbers_in: str = "") -> Drawing:
        saved = (f"{name}.png", f"{name}.svg", numbers_in or f"{name}.figure.csv")
        for file in saved[: 2 if numbers_in else 3]:
            files.text(file, "")
        return Drawing("<svg/>", files=saved)

    with pytest.MonkeyPatch.context() as patch:
        for page, names in FIGURES.items():
            patch.setattr(page, "save", save)
            for name in names:
                patch.setattr(page.figures, name, lambda of: None)
        yield


def audit_of(source: object, out: Path, *options: str) -> Result:
    """`weightscope audit` in this process, its figures undrawn."""
    with undrawn():
        return CliRunner().invoke(main, ["audit", str(source), "--out", str(out), *options])


def names_in(folder: Path) -> list[str]:
    """What a person sees of a folder of results."""
    return sorted(path.name for path in folder.iterdir() if path.name != HIDDEN)
