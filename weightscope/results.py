"""What every result has: a sentence, tables to show, a figure, a page, and files that it writes into a folder."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from weightscope.display import function_at, notebook
from weightscope.files import Files, OutputFolder


class Result:
    """Base of results. They are data: what draws them and writes their page is imported when it is needed.

    Attributes
    ----------
    FIGURE, PAGE : str
        The functions that draw a result and write its page, as "module:function" of weightscope.
    TABLES : mapping
        Names of files, and what gives the table, the arrays by name or the JSON that each holds; None is left out.
    FILES : tuple of str
        Names by which a folder is known to hold such a result.
    """

    FIGURE: ClassVar[str] = ""
    PAGE: ClassVar[str] = ""
    TABLES: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    FILES: ClassVar[tuple[str, ...]] = ("report.html",)

    @property
    def lead(self) -> str:
        """The result in a sentence or a few."""
        raise NotImplementedError

    def shown(self) -> Sequence[Any]:
        """The tables that a notebook shows."""
        return ()

    def _repr_html_(self) -> str:
        picture = getattr(self, "_repr_png_", bytes)()
        return notebook(self.lead, *self.shown(), picture=picture)

    def plot(self) -> Any:
        """The first figure of the result's page: a matplotlib Figure."""
        return function_at(self.FIGURE)(self)

    def write(self, out: str | Path) -> None:
        """Write tables, figures and report.html into a folder, as the command does.

        Raises
        ------
        CheckpointError
            It cannot be written to, or another run is writing into it.
        """
        with OutputFolder(Path(out), names=self.FILES) as files:
            self.write_files(files)

    def write_files(self, files: Files) -> None:
        """Write the same into a folder that is open already, or into memory."""
        self.write_report(files)  # figures come no later than the numbers
        self.write_tables(files)

    def write_report(self, files: Files, *more: Any) -> None:
        """Write the figures as PNG and SVG, and report.html."""
        function_at(self.PAGE)(files, self, *more)

    def write_tables(self, files: Files) -> None:
        """Write the tables, the arrays and the JSON."""
        for name, content_of in self.TABLES.items():
            content = content_of(self)
            if content is None:
                continue
            if name.endswith(".csv"):
                files.table(name, content)
            elif name.endswith(".npz"):
                files.npz(name, **content)
            else:
                files.json(name, content)
