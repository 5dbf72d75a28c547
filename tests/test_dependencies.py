"""What pyproject.toml declares is what weightscope imports, and each extra holds what its own modules import."""

import re
import sys
import tomllib
from pathlib import Path

from tests.support.imports import imports_of, imports_when_loaded

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "weightscope").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {
    "PIL": "pillow",
    "cupy": "cupy-cuda12x",
    "cupyx": "cupy-cuda12x",
    "dask": "distributed",
    "huggingface_hub": "huggingface-hub",
    "llvmlite": "numba",
    "markupsafe": "jinja2",
    "sklearn": "scikit-learn",
}  # packages with another name; dask comes with distributed, llvmlite with numba, markupsafe with jinja2
FOR_OTHERS = {"accelerate"}  # transformers imports it
OFFERED = {"pandas"}  # a table becomes a DataFrame where pandas is; nothing needs it
EXTRA_OF = {
    "runner": "runner",
    "adopting": "runner",
    "auroc_numba.py": "fast",
    "cells_numba.py": "fast",
    "ggml_numba.py": "fast",
    "compiled.py": "fast",
    "signing.py": "attest",
}  # folders and modules that are loaded with their extra only


def declared(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


BASE = declared(PROJECT["dependencies"])
EXTRAS = {name: declared(requirements) for name, requirements in PROJECT["optional-dependencies"].items()}


def packages(names: set[str]) -> set[str]:
    """The packages of others that dotted names are of."""
    tops = {name.split(".")[0] for name in names} - {"weightscope"} - sys.stdlib_module_names
    return {PACKAGES.get(top, top) for top in tops}


def test_declared_dependencies_are_those_imported() -> None:
    imported = packages({name for path in MODULES for name in imports_of(path)})
    assert imported - OFFERED == BASE.union(*EXTRAS.values()) - FOR_OTHERS


def test_modules_load_with_their_declared_dependencies_only() -> None:
    undeclared = {}
    for path in MODULES:
        extras = [EXTRAS[extra] for place, extra in EXTRA_OF.items() if place in path.parts]
        if missing := packages(imports_when_loaded(path)) - BASE.union(*extras):
            undeclared[path.relative_to(ROOT).as_posix()] = sorted(missing)
    assert not undeclared, f"these modules need packages of an extra to be imported: {undeclared}"


def test_no_extra_repeats_a_core_dependency() -> None:
    assert not BASE & set().union(*EXTRAS.values())
