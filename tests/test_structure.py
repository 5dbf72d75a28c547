"""Imports go down only: whoever reads a module needs to know those below it and no others."""

import ast
from pathlib import Path

import pytest

import weightscope

ROOT = Path(weightscope.__file__).parent
FLOORS = """
errors parallel progress embedded half on_demand shapes
tables
folder device engine
checkpoint attention
metrics
families
embeddings
model
fingerprint
sources text
runner
pages
detokenization
circuitry
audits norms outlier_dimensions
sinks
cli
__main__
"""
FLOOR = {room: number for number, line in enumerate(FLOORS.strip().splitlines()) for room in line.split()}


def room_of(module: str) -> str | None:
    """The folder or single module of weightscope that a dotted name is in; None for others' and for weightscope."""
    parts = module.split(".")
    return parts[1] if parts[0] == "weightscope" and len(parts) > 1 else None


def imported(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {room for node in nodes if (room := room_of(node.module or ""))}


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
