"""`import weightscope as ws`: every name is there, cheaply, whatever was imported before."""

import subprocess
import sys

import pytest

import weightscope as ws

HEAVY = ("numpy", "scipy", "matplotlib", "torch", "transformers", "pandas", "sklearn", "cupy")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_nothing_heavy_and_takes_no_time() -> None:
    code = "import sys, time; t = time.perf_counter(); import weightscope; print(time.perf_counter() - t, *sys.modules)"
    seconds, *modules = python(code).split()
    assert not set(HEAVY) & set(modules)
    assert float(seconds) < 0.3


@pytest.mark.parametrize("name", ws.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(ws, name).__doc__
    assert name in dir(ws)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'weightscope' has no attribute 'nothing'"):
        ws.nothing  # noqa: B018


def test_no_name_is_a_folders_too() -> None:
    """Importing a submodule binds its name in the package, over whatever was there: the two must differ."""
    code = """
import pkgutil
import weightscope as ws
print(*({module.name for module in pkgutil.iter_modules(ws.__path__)} & set(ws.__all__)))
"""
    assert python(code).split() == []


@pytest.mark.parametrize(
    "first", ["import weightscope.detokenization.first_layer", "import weightscope; weightscope.first_layer"]
)
def test_a_name_does_not_depend_on_what_was_imported_before(first: str) -> None:
    code = f"{first}\nimport weightscope as ws\nprint(callable(ws.first_layer))"
    assert python(code).split() == ["True"]
