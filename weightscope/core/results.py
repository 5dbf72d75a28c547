"""Base of results, which say, draw and write themselves; reprs of objects with arrays."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from reprlib import Repr
from types import ModuleType
from typing import Any, ClassVar, TypeVar, dataclass_transform

from markupsafe import Markup

from weightscope.core.files import REPORT, Files, OutputFolder
from weightscope.core.tables import Table, as_json, templates

SPECTRA = "model.layers.figures:spectrum_figure"  # draws singular values of maps by name
Holder = TypeVar("Holder")
given_axes: ContextVar[Any] = ContextVar(
    "the caller's Axes, which a figure is drawn into", default=None
)
WINGS = ("heads", "pairs")  # folders of weightscope; each folder in them is a question


def function_at(place: str, folder: str = "weightscope") -> Callable[..., Any]:
    """Import the function at "module:function" of a folder, such as a figure or a page."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"{folder}.{module}"), name)
    return function


def questions() -> Iterator[ModuleType]:
    """The folder of every question, imported without the modules in it.

    Its `__init__` may declare

    - `SIGNS`: the command that wrote a folder of results, by a file that no other writes;
    - `SHARED_SIGNS`: the same by a file that others write too, where none of `SIGNS` is there;
    - `HEADS`: the table with one row per head, by the command that writes it;
    - `FINDINGS`: names of modules; importing them registers every kind of finding of the folder.
    """
    for wing in WINGS:
        package = import_module(f"weightscope.{wing}")
        for module in iter_modules(package.__path__):
            yield import_module(f"{package.__name__}.{module.name}")


def notebook(lead: str, *tables: Any, picture: bytes = b"") -> str:
    """A result as a notebook's HTML: a sentence, a picture where there is one, and tables."""
    html = [Markup(table._repr_html_()) for table in tables]
    template = templates().get_template("notebook.html")
    return template.render(lead=lead, tables=html, picture=b64encode(picture).decode())


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def holds_arrays(cls: type[Holder]) -> type[Holder]:
    """Declare a frozen dataclass of arrays.

    Arrays cannot be compared to one truth value: an object equals only itself, and can be a key.
    """
    return dataclass(frozen=True, eq=False, repr=False)(cls)


class ShowsShapes:
    """Base of dataclasses that hold arrays: their repr shows the shapes of the arrays."""

    def __repr__(self: Any) -> str:
        names = [field.name for field in fields(self) if field.repr]
        values = (f"{name}={SHAPES.repr(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({', '.join(values)})"


class _ShapeRepr(Repr):
    """Short reprs; the shape of whatever has one."""

    def repr1(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", ())
        return str(tuple(shape)) if shape else super().repr1(x, level)


SHAPES = _ShapeRepr()


class ListsForUsers:
    """Base of objects whose completion leaves out what only weightscope itself calls."""

    INTERNAL: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        left_out = {"INTERNAL", *self.INTERNAL}
        return [name for name in super().__dir__() if name not in left_out]


class Result(ListsForUsers):
    """Base of results. They are data: figures and pages are imported when they are needed."""

    FIGURE: ClassVar[str] = ""  # "module:function" of its folder that draws the result
    PAGE: ClassVar[str] = ""  # the function that draws all figures and writes report.html
    # Function for each file: its table, arrays by name or JSON; None leaves the file out.
    TABLES: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    FILES: ClassVar[tuple[str, ...]] = REPORT  # mark a folder as holding such a result
    INTERNAL = frozenset((
        "FIGURE", "FILES", "PAGE", "TABLES", "about", "function_at", "printed", "shown",
        "write_files", "write_report", "write_tables",
    ))  # fmt: skip

    @property
    def lead(self) -> str:
        """The result in a sentence or a few."""
        raise NotImplementedError

    @property
    def about(self) -> str:
        """The checkpoint, and how much was measured or found, in a few words."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.about})"

    def __str__(self) -> str:
        return "\n".join(part if isinstance(part, str) else part.text() for part in self.printed())

    def printed(self) -> Sequence[Any]:
        """Lines and tables for a terminal, from top to bottom."""
        return [self.lead]

    def shown(self) -> Sequence[Any]:
        """Tables for a notebook."""
        return ()

    def _repr_html_(self) -> str:
        picture = getattr(self, "_repr_png_", bytes)()
        return notebook(self.lead, *self.shown(), picture=picture)

    def as_json(self: Any) -> dict[str, Any]:
        """The result as --json prints it: its sentence and origin, then each of its tables.

        A table is a list of objects under the name of its file without the ending; arrays stay in
        their .npz.
        """
        contents: dict[str, Any] = {}
        for name, content_of in self.TABLES.items():
            stem, _, ending = name.rpartition(".")
            content = None if ending == "npz" else content_of(self)
            if content is not None:
                contents[stem] = content.records() if isinstance(content, Table) else content
        return dict(as_json(self.provenance.envelope(self.lead) | contents))

    @classmethod
    def function_at(cls, place: str) -> Callable[..., Any]:
        """Import the function at "module:function" of the folder that the class is in."""
        return function_at(place, cls.__module__.rpartition(".")[0])

    def plot(self, *options: Any, ax: Any = None) -> Any:
        """The first figure of the result's page: a matplotlib Figure.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Draw into these instead, if the figure has one panel.

        Raises
        ------
        ValueError
            The figure has several panels.
        """
        before = given_axes.set(ax)
        try:
            return self.function_at(self.FIGURE)(self, *options)
        finally:
            given_axes.reset(before)

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
        self.function_at(self.PAGE)(files, self, *more)

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
