"""Every number on a page is in the JSON next to it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import Weights, run, with_tokenizer, write_counts
from tests.support.figures import undrawn, unsaved
from tests.support.numbers import missing
from tests.support.slow import mostly_checked
from tests.support.two_layers import TWO_LAYERS
from weightscope.cli import main
from weightscope.core.files import Folder
from weightscope.core.tables import Column, Table
from weightscope.report.pages.page import Section, write_page

pytest.importorskip("tokenizers", reason="tokenizers come with the extra `bigrams`")

COMMANDS: dict[str, list[str]] = {
    "audit": ["audit", "gpt2", "--all", "--directions", "1"],
    "audit of a decoder": ["audit", "llama"],
    "audits": ["audit", "list.txt"],
    "compare": ["compare", "gpt2", "changed", "--all"],
    "compare three": ["compare", "gpt2", "changed", "gpt2"],
    "circuits": ["circuits", "gpt2"],
    "detok": ["detok", "gpt2", "--counts", "counts.npz", "--token", "w5"],
    "detok of a sample": ["detok", TWO_LAYERS, "--sample", "100"],
    "positions": ["positions", "gpt2"],
    "positions unscaled": ["positions", "gpt2", "--unscaled"],
    "positions of a decoder": ["positions", "llama"],
    "lineage": ["lineage", "changed", "gpt2"],
    "same": ["same", "gpt2", "changed"],
    "learned": ["learned", "gpt2", "changed"],
    "atlas": ["atlas", "models.txt"],
}
FEW = ("audit", "compare", "circuits", "detok", "positions", "lineage", "same", "atlas")  # tried on every change
# Those that print a result as JSON.
WITH_JSON = [
    name
    for name, (command, *_) in COMMANDS.items()
    if any(option.name == "as_json" for option in main.get_command(click.Context(main), command).params)
]
OF_PAGE = {"atlas": {"sources"}, "circuits": {"roles", "edges", "accuracy"}}  # keys with more or less on the page
CROWDED = {"learned"}  # labels of its figure cover each other for models as tiny and as alike as these
STUDIES: dict[str, list[str]] = {
    "norms": ["norms", TWO_LAYERS, "--text", "text.txt", "--inputs", "2", "--length", "16"],
    "outliers": ["outliers", TWO_LAYERS, "--text", "text.txt", "--inputs", "8", "--sample", "2", "--length", "16"],
    "sink-bias": ["sinks", TWO_LAYERS, "--question", "bias", "--inputs", "2", "--length", "32", "--evaluated", "1"],
    "sink-kind": ["sinks", TWO_LAYERS, "--question", "kind", "--inputs", "2", "--length", "32"],
    "circuits measured": ["circuits", TWO_LAYERS, "--measure", "--text", "text.txt"],
    "positions on text": ["positions", TWO_LAYERS, "--on-text", "--text", "text.txt"],
}


def changed(weights: Weights) -> None:
    """One head of the first layer is zero, the others are moved."""
    name = next(name for name in weights if name.endswith("attn.c_attn.weight"))
    weights[name] = weights[name] * np.float32(1.01)
    weights[name][:, :2] = 0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], tuple[Path, str]]:
    """A function that runs a command: the folder that it wrote, and the text that it printed."""
    folder = tmp_path_factory.mktemp("numbers")
    for name, change in {"gpt2": None, "changed": changed}.items():
        with_tokenizer("gpt2", folder / name, change)
    with_tokenizer("llama", folder / "llama")
    write_counts(folder / "gpt2").rename(folder / "counts.npz")
    (folder / "list.txt").write_text(f"{folder / 'gpt2'}\n{folder / 'llama'}\n{folder / 'missing'}\n")
    (folder / "models.txt").write_text("".join(f"{folder / name}\n" for name in ("gpt2", "changed", "missing")))
    paragraphs = (f"On day {n} the crew of the ship saw land again, and sailed on." for n in range(40))
    (folder / "text.txt").write_text("\n\n".join(paragraphs))

    def write(arguments: list[str]) -> tuple[Path, str]:
        given = [folder / argument if (folder / argument).exists() else argument for argument in arguments]
        out = folder / "out" / "-".join(arguments).replace("/", "")
        with undrawn() if arguments[0] in CROWDED else unsaved():
            result = run(*given, "--out", out)
        assert out.exists() and not isinstance(result.exception, Exception), result.output
        return out, result.stdout

    return write


@pytest.mark.check
@pytest.mark.parametrize("name", STUDIES)
def test_every_number_on_the_page_of_a_study_is_in_its_json(
    name: str, written: Callable[[list[str]], tuple[Path, str]]
) -> None:
    pytest.importorskip("torch", reason="PyTorch comes with the extra `runner`")
    check(written(STUDIES[name])[0])


@pytest.mark.parametrize("name", mostly_checked(COMMANDS, fast=FEW))
def test_every_number_on_a_page_is_in_its_json(name: str, written: Callable[[list[str]], tuple[Path, str]]) -> None:
    out, printed = written([*COMMANDS[name], *(["--json"] if name in WITH_JSON else [])])
    check(out)
    if name in WITH_JSON:
        check_printed(name, out, json.loads(printed))


def check_printed(name: str, out: Path, told: Any) -> None:
    """JSON on the command line is the result; what files and the page have too is the same there."""
    for result in told if isinstance(told, list) else [told]:
        if result.get("error"):
            continue
        folder = out / result.get("folder", "")
        for file in folder.glob("*.json"):
            held = json.loads(file.read_text())
            if file.stem in result:  # findings.json
                assert result[file.stem] == held
            elif file.stem == name:  # lineage.json of lineage
                assert result == held
            elif file.stem in ("report", "index"):
                for finding in held.get("findings", []):
                    del finding["percentile"]  # the page alone has it
                shared = (result.keys() & held.keys()) - OF_PAGE.get(name, set())
                assert shared >= {"lead", "version", "command", "date"}
                assert {key: result[key] for key in shared} == {key: held[key] for key in shared}
        if "heads" in result and name != "atlas":
            heads = ws.load(folder).heads
            assert {*heads.names} == {*result["heads"][0]}
            for column in heads.names:
                values = [head[column] for head in result["heads"]]
                if heads[column].dtype.kind in "fi":
                    numbers = [np.nan if value is None else float(value) for value in values]
                    assert np.allclose(numbers, heads[column], rtol=5e-6, atol=0, equal_nan=True), column
                else:
                    assert [*map(str, values)] == [*map(str, heads[column])], column


def check(folder: Path) -> None:
    pages = sorted(folder.rglob("*.html"))
    assert pages
    for page in pages:
        numbers = json.loads(page.with_suffix(".json").read_text(), parse_constant=int)
        assert missing(page.read_text(), numbers) == []
        if page.stem in ("report", "summary", "index"):
            result = ws.load(page.parent)
            assert result.page == numbers and result.lead == numbers["lead"]
            read = {".csv": result.table, ".npz": result.arrays, ".json": result.json}
            for file in result.files:
                if (page.parent / file).stat().st_size:  # a figure that was not drawn has no data
                    read.get(Path(file).suffix, lambda name: name)(file)
            assert "findings.json" not in result.files or result.findings is not None


def test_every_command_that_writes_a_page_is_tried_here() -> None:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    with_pages = {
        name
        for name, command in commands.items()
        for option in (command.params if command and name != "convert" else ())  # it writes weights
        if option.name == "out" and not getattr(option.type, "file_okay", True)
    }
    assert with_pages <= {arguments[0] for arguments in (COMMANDS | STUDIES).values()}
    assert with_pages >= {"audit", "compare", "circuits", "norms"}
    with_json = {COMMANDS[name][0] for name in WITH_JSON}
    assert with_json == {
        "audit", "compare", "circuits", "detok", "positions", "lineage", "same", "learned", "atlas",
    }  # fmt: skip


def test_a_number_that_the_json_lacks_is_found(tmp_path: Path) -> None:
    rows = Table.of_rows(("head", Column("size", format=".2f")), [(0, 0.123456), (1, np.nan)])
    write_page(Folder(tmp_path), "report.html", "Title", "Of 1,234 tokens.", [Section("Part", "About 7.5 %.", [rows])])
    page, told = (tmp_path / name for name in ("report.html", "report.json"))
    held = json.loads(told.read_text())
    assert missing(page.read_text(), held) == []
    lost = set(missing(page.read_text(), held | {"sections": []}))
    assert lost - {"0", "1"} == {"0.0", "0.123456", "1.0", "About 7.5 %.", "0.12"}  # a 0 or 1 may be in the date
    assert missing(page.read_text(), held | {"lead": ""}) == ["Of 1,234 tokens."]
    assert missing(page.read_text().replace("1,234", "1,235"), held) == ["Of 1,235 tokens."]
    held["sections"][0]["parts"][0]["rows"][0]["size"] = 0.1234561
    assert missing(page.read_text(), held) == ["0.123456"]
