"""A variable on make's command line becomes an option of the recipe, which rejects those that it does not have."""

import importlib
import os
import re
import shlex
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RECIPES = {
    "gpt2-detok": ["MODEL", "TEXT", "OUT", "DEVICE", "COUNTS", "SHARDS"],
    "norm-attention": ["MODEL", "TEXT", "OUT", "DEVICE"],
    "outlier-dimensions": ["MODEL", "TEXT", "OUT", "DEVICE"],
    "sink-bias": ["MODEL", "MODELS", "TEXT", "OUT", "DEVICE"],
    "sink-mechanisms": ["MODEL", "TEXT", "OUT", "DEVICE", "TOWER", "IMAGES"],
    "sink-toys": ["OUT"],
    "figures": ["BOOKS", "STSB", "GPT2", "VIT", "MPNET", "QWEN", "GEMMA", "ONLY"],
}
EVERY = {name for names in RECIPES.values() for name in names}


def command_of(target: str, *variables: str) -> list[str]:
    """The last command that make would run, as on a command line of its own."""
    ignored = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", *EVERY}  # these tests may run under make, with variables set
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    command = ["make", "-n", "PYTHON=python3", target, *variables]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True).stdout
    return shlex.split(printed.replace("\\\n", " ").splitlines()[-1])


def recipe_of(target: str) -> click.Command:
    module = command_of(target)[2]
    package = importlib.import_module(module)
    return package.main if hasattr(package, "main") else importlib.import_module(f"{module}.__main__").main


def test_every_test_of_the_census_is_left_to_a_release() -> None:
    """A module may mark all its tests `check` and some `census` as well; `-m check` alone would run both."""
    (chosen,) = re.findall(r'-m "([^"]*\bcheck\b[^"]*)"', MAKEFILE)
    assert not eval(chosen, {"check": True, "census": True}) and eval(chosen, {"check": True, "census": False})


@pytest.mark.check
@pytest.mark.parametrize("target", RECIPES)
def test_a_variable_reaches_its_recipe(target: str) -> None:
    pytest.importorskip("torch", reason="recipes import it")
    known = {option for parameter in recipe_of(target).params for option in parameter.opts}
    for name in RECIPES[target]:
        _, _, _, option, value = command_of(target, f"{name}=a-value")
        assert (option, value) == (f"--{'model' if name == 'MODELS' else name.lower()}", "a-value")
        assert option in known


@pytest.mark.check
@pytest.mark.parametrize("target", sorted(set(RECIPES) - {"figures"}))
def test_a_recipe_rejects_a_variable_that_it_does_not_take(target: str) -> None:
    pytest.importorskip("torch", reason="recipes import it")
    for name in {"COUNTS", "TOWER", "IMAGES"} - set(RECIPES[target]):
        result = CliRunner().invoke(recipe_of(target), command_of(target, f"{name}=x")[3:])
        assert result.exit_code == 2 and f"No such option '--{name.lower()}'" in result.output


def test_several_models_and_sizes_reach_the_sink_as_a_bias() -> None:
    assert command_of("sink-bias", "MODELS=a b", "SIZES=--paper")[3:] == ["--model", "a", "--model", "b", "--paper"]


def test_the_benchmarks_compared_can_be_chosen() -> None:
    assert command_of("bench-compare")[3:] == ["", "out/bench/bench.json"]
    assert command_of("bench-compare", "OLD=a.json", "NEW=b.json")[3:] == ["a.json", "b.json"]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^([a-z0-9-]+):.*## ", MAKEFILE, re.M)) - {"help", "clean"}))
def test_make_targets_run_existing_modules(target: str) -> None:
    assert command_of(target)


def test_constraints_are_versions_that_the_project_allows() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    extras = PYPROJECT["project"]["optional-dependencies"]
    of_developers = [each for each in PYPROJECT["dependency-groups"]["dev"] if isinstance(each, str)]
    declared = map(Requirement, [*chain(*extras.values()), *of_developers])
    allowed = {each.name: each.specifier for each in declared}
    assert lines
    for requirement in map(Requirement, lines):
        (pin,) = requirement.specifier
        assert pin.operator == "==" and allowed[requirement.name].contains(pin.version)
