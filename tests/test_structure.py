"""Imports go down only: whoever reads a module needs to know those below it and no others."""

import re
from pathlib import Path

import pytest

import weightscope
from tests.support.imports import imports_of

ROOT = Path(weightscope.__file__).parent
CHECKOUT = Path(__file__).parents[1]
LONGEST = 400  # lines of a module
FLOORS = """
bars
errors lapack parallel progress embedded half on_demand shapes
regular writing mathml
tables
notebook
folder device engine
checkpoint attention
metrics
families
embeddings
unembedding
model
overflow fingerprint
sources text
runner
adoption
pages
detokenization
circuitry
audits norms outlier_dimensions
sinks
cli
__main__
"""
FLOOR = {room: number for number, line in enumerate(FLOORS.strip().splitlines()) for room in line.split()}


HEAVY = {
    "torch": ("weightscope/runner/", "weightscope/adoption/", "analyses/sink_toys/", "analyses/train_"),
    "transformers": (
        "weightscope/runner/",
        "weightscope/adoption/",
        "analyses/sink_toys/",
        "analyses/train_",
    ),
    "matplotlib": ("weightscope/pages/", "/figures.py"),
    "cupy": ("weightscope/device.py",),
    "cupyx": ("weightscope/device.py",),
}  # where alone each may be imported


def modules(*folders: str) -> list[Path]:
    return sorted(path.relative_to(CHECKOUT) for folder in folders for path in (CHECKOUT / folder).rglob("*.py"))


def room_of(module: str) -> str | None:
    """The folder or single module of weightscope that a dotted name is in; None for others' and for weightscope."""
    parts = module.split(".")
    if parts[0] != "weightscope" or len(parts) == 1:
        return None
    return weightscope._HOMES.get(parts[1], parts[1]).split(".")[0]


def imported(path: Path) -> set[str]:
    """The rooms that a module imports from, as `import weightscope.room` or as `from weightscope import room` too."""
    rooms = {room_of(name) for name in imports_of(path)} - {None}
    return {room for room in rooms if room in FLOOR or (ROOT / room).exists()}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down_only(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "__init__":
        return
    above = {other for other in imported(path) - {room} if FLOOR[other] >= FLOOR[room]}
    assert not above, f"{room} is below {', '.join(sorted(above))}"


def test_every_room_has_its_floor() -> None:
    rooms = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"__init__"} == set(FLOOR)


@pytest.mark.parametrize("path", modules("weightscope", "analyses"), ids=str)
def test_what_is_heavy_is_imported_in_its_place_alone(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports_of(CHECKOUT / path)} & set(HEAVY)
    misplaced = {name for name in heavy if not any(place in path.as_posix() for place in HEAVY[name])}
    assert not misplaced, f"{path} imports {', '.join(sorted(misplaced))}"


# By a name that others can guess, or in steps that others can see: weightscope/writing.py alone does neither.
# A pipe in a file's place is waited for: weightscope/regular.py opens, but for what a manifest vouches for.
READS = re.compile(r"\.read_(text|bytes)\(|[^_a-z]open\([^)]*[\"']rb?[\"']|\.open\(encoding|(np\.load|ZipFile)\(path")
WRITES = re.compile(r"\.write_(text|bytes)\(|mkstemp|mkdtemp|NamedTemp|TemporaryDir|open\([^)]*[\"'][wax]b?\+?[\"']")


@pytest.mark.parametrize("path", modules("weightscope", "analyses"), ids=str)
def test_files_are_written_in_one_place(path: Path) -> None:
    found = WRITES.search((CHECKOUT / path).read_text(encoding="utf-8"))
    assert not found or path.name == "writing.py", f"{path} has {found and found[0]}"


@pytest.mark.parametrize("path", modules("weightscope"), ids=str)
def test_files_are_opened_in_one_place(path: Path) -> None:
    found = READS.search((CHECKOUT / path).read_text(encoding="utf-8"))
    assert not found or path.name == "many.py", f"{path} has {found and found[0]}"


def test_no_module_is_long() -> None:
    long = {path for path in modules("weightscope", "analyses") if len((CHECKOUT / path).open().readlines()) > LONGEST}
    assert not long


def test_imports_are_seen_in_every_form(tmp_path: Path) -> None:
    written = "import weightscope.cli\nfrom weightscope import sinks, open_model\ndef f():\n    import torch.nn as nn\n"
    path = tmp_path / "module.py"
    path.write_text(written)
    assert imported(path) == {"cli", "sinks", "model"}
    assert "torch.nn" in imports_of(path)


@pytest.mark.parametrize("path", modules("tests"), ids=str)
def test_no_test_imports_another(path: Path) -> None:
    parts = {part for name in imports_of(CHECKOUT / path) if name.startswith("tests.") for part in name.split(".")}
    assert not {part for part in parts if part.startswith("test_") or part == "conftest"}
