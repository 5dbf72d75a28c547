"""Imports go down only: to understand a module, a reader needs only those below it."""

import re
from pathlib import Path

import weightscope
from tests.support.imports import imports_of, modules_imported

ROOT = Path(weightscope.__file__).parent
CHECKOUT = Path(__file__).parents[1]
MAP = re.findall(r"^    (\w+)  .*$", str(weightscope.__doc__).partition("where to begin.")[2], re.M)
FLOOR = {wing: -number for number, wing in enumerate(MAP)}


HEAVY = {
    "torch": ("weightscope/runner/", "weightscope/adopting/", "analyses/toys/", "analyses/experiments/"),
    "transformers": (
        "weightscope/runner/",
        "weightscope/adopting/",
        "analyses/toys/",
        "analyses/experiments/",
    ),
    "matplotlib": ("weightscope/report/pages/", "figures.py"),
    "cupy": ("weightscope/core/compute/device.py",),
    "cupyx": ("weightscope/core/compute/device.py",),
}  # where alone each may be imported


def modules(*folders: str) -> list[Path]:
    return sorted(path.relative_to(CHECKOUT) for folder in folders for path in (CHECKOUT / folder).rglob("*.py"))


def wing_of(module: str) -> str | None:
    """The wing of weightscope that a dotted name is in; None for others' and for weightscope."""
    parts = module.split(".")
    if parts[0] != "weightscope" or len(parts) == 1:
        return None
    return weightscope._HOMES.get(parts[1], parts[1]).split(".")[0]


def imported(path: Path) -> set[str]:
    """The wings that a module imports from, as `import weightscope.wing` or as `from weightscope import wing` too."""
    rooms = {wing_of(name) for name in imports_of(path)} - {None}
    return {room for room in rooms if room in FLOOR or (ROOT / room).exists()}


def test_imports_go_down_only() -> None:
    upward = {}
    for path in modules("weightscope"):
        room = path.parts[1].removesuffix(".py")
        if room not in ("__init__", "__main__"):
            above = {below for below in imported(CHECKOUT / path) - {room} if FLOOR[below] > FLOOR[room]}
            upward |= {str(path): sorted(above)} if above else {}
    assert not upward, f"these modules import wings above their own: {upward}"


def test_every_wing_has_its_floor() -> None:
    rooms = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"__init__", "__main__"} == set(FLOOR)


def test_tests_use_no_experiment() -> None:
    """What both need is in tests/support; tests/analyses is about the experiments themselves."""
    users = [path for path in modules("tests") if path.parts[1] not in ("analyses", "test_structure.py")]
    assert not matches(re.compile(r"^\s*(from|import) analyses\.experiments", re.M), users)


def test_heavy_packages_are_imported_in_their_places_only() -> None:
    misplaced = [
        f"{path} imports {name}"
        for path in modules("weightscope", "analyses")
        for name in sorted({name.split(".")[0] for name in imports_of(CHECKOUT / path)} & set(HEAVY))
        if not any(place in path.as_posix() for place in HEAVY[name])
    ]
    assert not misplaced


# By a name that others can guess, or in steps that others can see: weightscope/core/files.py alone does neither.
# A pipe in a file's place is waited for, but by weightscope/core/files.py.
READS = re.compile(r"\.read_(text|bytes)\(|[^_a-z]open\([^)]*[\"']rb?[\"']|\.open\(encoding|(np\.load|ZipFile)\(path")
WRITES = re.compile(r"\.write_(text|bytes)\(|mkstemp|mkdtemp|NamedTemp|TemporaryDir|open\([^)]*[\"'][wax]b?\+?[\"']")
# A process that reads a map is killed when another cuts the file short.
MAPS = re.compile(r"\b(safe_open|memmap|mmap|mmap_mode|GGUFReader|safetensors\.numpy import .*load)\b")


def matches(pattern: re.Pattern[str], paths: list[Path], *allowed: str) -> list[str]:
    """Modules whose text matches, but for those allowed to, each with its first match."""
    first = {path: pattern.search((CHECKOUT / path).read_text(encoding="utf-8")) for path in paths}
    return [f"{path}: {match[0]}" for path, match in first.items() if match and path.name not in allowed]


def test_files_are_written_in_one_module() -> None:
    assert not matches(WRITES, modules("weightscope", "analyses"), "files.py")


def test_files_are_opened_in_one_module() -> None:
    """The table of architectures opens what is in the package."""
    assert not matches(READS, modules("weightscope"), "table.py")


def test_no_file_is_mapped() -> None:
    """`storage.py` hands the library a copy of the header in memory, which no other process can cut."""
    assert not matches(MAPS, modules("weightscope", "analyses"), "storage.py")


def test_no_two_modules_import_each_other() -> None:
    """Imports inside functions and under TYPE_CHECKING count: no module is reached again from its imports."""
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in modules("weightscope")}
    del names["weightscope"]  # it imports public names on demand
    graph = {name: modules_imported(CHECKOUT / path) & names.keys() - {name} for name, path in names.items()}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these modules import each other, or lead to a circle: {', '.join(sorted(graph))}"


def test_imports_are_seen_in_every_form(tmp_path: Path) -> None:
    written = "import weightscope.cli\nfrom weightscope import heads, open_model\ndef f():\n    import torch.nn as nn\n"
    path = tmp_path / "module.py"
    path.write_text(written)
    assert imported(path) == {"cli", "heads", "model"}
    assert "torch.nn" in imports_of(path)


def test_no_test_imports_another() -> None:
    imports = [
        f"{path} imports {name}"
        for path in modules("tests")
        for name in imports_of(CHECKOUT / path)
        if name.startswith("tests.") and re.search(r"\.(test_|conftest\b)", name)
    ]
    assert not imports
