"""SKILL.md tells agents what is true: commands exist, and results have the keys that it names."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import weightscope.report.pages
from tests.support.commands import run
from tests.support.figures import undrawn
from weightscope.cli import main
from weightscope.pairs.same import VERDICTS
from weightscope.report.findings import SEVERITIES

TEXT = (Path(__file__).parents[2] / "SKILL.md").read_text()
COMMANDS = re.findall(r"`(weightscope [^`]+)`", TEXT)
KEYS = [
    (command, keys, meaning)
    for commands, keys, meaning in re.findall(r"^\| ([a-z, ]+) \| ((?:`\w+`(?:, )?)+) \| (.+) \|$", TEXT, re.M)
    for command in commands.split(", ")
]


def schema(name: str) -> dict[str, Any]:
    file = Path(weightscope.report.pages.__file__).parent / "schemas" / f"{name}-1.json"
    parsed: dict[str, Any] = json.loads(file.read_text())
    return parsed


def test_it_has_what_agents_look_for() -> None:
    about = yaml.safe_load(TEXT.split("---")[1])
    assert about["name"] == "weightscope" and 100 < len(about["description"]) < 1024


def test_it_fits_one_screen() -> None:
    assert len(TEXT.splitlines()) <= 45


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_can_be_typed_as_it_stands(typed: str) -> None:
    _, name, *arguments = shlex.split(typed)
    command = main.get_command(click.Context(main), name)
    assert command is not None
    command.make_parser(click.Context(command, **command.context_settings)).parse_args(arguments)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out, two = tmp_path_factory.mktemp("skill"), ["embedded", "embedded"]
    printed = {}
    for name in ("audit", "compare", "same", "lineage"):
        with undrawn():
            done = run(name, *(two[:1] if name == "audit" else two), "--out", out / name, "--json")
        assert done.exit_code == 0, done.output
        printed[name] = json.loads(done.stdout)
    return printed


def test_every_result_begins_as_it_says(results: dict[str, Any]) -> None:
    envelope = re.findall(r"`(\w+)`", TEXT.split("Every result has")[1].split("NaN is")[0])
    assert envelope == ["lead", "version", "command", "date", "sources"]
    assert all([*result][: len(envelope)] == envelope for result in results.values())


@pytest.mark.parametrize(("command", "keys", "meaning"), KEYS, ids=lambda value: str(value)[:30])
def test_a_key_is_there_and_holds_what_it_says(command: str, keys: str, meaning: str, results: dict[str, Any]) -> None:
    for key in re.findall(r"`(\w+)`", keys):
        value = results[command][key]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            assert set(re.findall(r"`(\w+)`", meaning)) <= value[0].keys(), key


def test_values_are_all_that_there_are() -> None:
    meanings = {(command, keys): meaning for command, keys, meaning in KEYS}
    assert len(KEYS) == 10
    assert meanings["same", "`verdict`"].split(", ") == list(VERDICTS)
    assert (
        re.sub(r" \([^)]*\)", "", meanings["lineage", "`verdict`"]).split(", ")
        == schema("lineage")["properties"]["verdict"]["enum"]
    )
    assert f"({', '.join(SEVERITIES)})" in meanings["audit", "`findings`"]


def test_differences_of_same_have_their_keys() -> None:
    (meaning,) = (meaning for command, keys, meaning in KEYS if (command, keys) == ("same", "`differences`"))
    keys = set(re.findall(r"`(\w+)`", meaning))
    assert any(keys <= set(shape.get("properties", {})) for shape in objects(schema("same")))


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object within a JSON value."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(item)
