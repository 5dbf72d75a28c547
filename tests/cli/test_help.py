"""What the command line tells a person before it runs: help, examples, completion, near names; what --quiet leaves."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from tests.support.commands import run
from tests.support.documented import Line, check, words_of
from tests.support.figures import undrawn
from weightscope.cli import main
from weightscope.cli.command import GROUPS, SYNONYMS, command
from weightscope.cli.terminal import show
from weightscope.core.embedded import FOLDER
from weightscope.core.tables import Column, Table
from weightscope.model.rows.table import own_folder

COMMANDS = sorted(main.commands)


def test_a_command_alone_has_the_short_help_option_too() -> None:
    for alone in main.commands.values():
        assert CliRunner().invoke(alone, ["-h"]).output.startswith("Usage: ")


def test_list_of_commands_has_every_summary() -> None:
    printed = " ".join(run("--help").output.split())
    for name in COMMANDS:
        assert main.commands[name].short_help
        assert f"{name} {main.commands[name].short_help}" in printed  # whole


def examples_of(name: str) -> list[str]:
    """The examples that end a command's help."""
    return [line.strip() for line in str(main.commands[name].epilog).splitlines()[2:]]


def test_command_registers_where_it_is_written() -> None:
    """With its summary and examples, in the list of commands."""

    def look_command() -> None:
        pass

    try:
        command("Look at nothing.", ["weightscope look embedded"])(look_command)
        first, second = run("--help").output, run("look", "--help").output
    finally:
        del main.commands["look"]
    assert "\nMore:\n  look         Look at nothing." in first
    assert second.endswith("  Examples:\n    weightscope look embedded\n") and "--quiet" in second


def test_a_command_without_examples_is_a_command_as_well() -> None:
    group = type(main)("weightscope")
    group.add_command(click.command("plain")(lambda: None))
    assert CliRunner().invoke(group, ["plain", "--help"]).exit_code == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_and_each_parses(name: str) -> None:
    help_text = run(name, "--help").output
    assert "--quiet" in help_text
    assert "\n  Examples:\n" in help_text
    assert examples_of(name)
    for example in examples_of(name):
        assert f"    {example}\n" in help_text
        words = words_of(example.removeprefix("weightscope "))
        assert words[0] == name
        check(Line("--help", words, True))


def test_every_help_ends_with_examples() -> None:
    for name in COMMANDS:
        last = run(name, "--help").output.rpartition("\n\n")[2].splitlines()
        assert last == ["  Examples:", *(f"    {example}" for example in examples_of(name))]


def test_first_help_has_what_one_came_for_and_every_command_in_one_group() -> None:
    lines = run("--help").output.splitlines()
    wanted = [line.partition("  weightscope ")[2] for line in lines if line.startswith("    ")]
    assert len([*filter(None, wanted)]) == 8
    for line in filter(None, wanted):
        check(Line("--help", words_of(line), True))
    assert max(map(len, lines)) <= 80
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == COMMANDS
    places = [lines.index(f"{title}:") for title in GROUPS]
    assert places == sorted(places) and "More:" not in lines and "Commands:" not in lines


@pytest.mark.parametrize("name", SYNONYMS)
def test_a_name_that_people_try_first_leads_on(name: str) -> None:
    result = run(name, "model/")
    assert result.exit_code == 2 and name not in COMMANDS
    meant = result.stderr.partition("Did you mean: ")[2].strip()
    for advised in re.findall(r"weightscope ([^,]*?)(?:,|$| for)", meant):
        check(Line("synonym", words_of(advised), True))


@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["audti", "embedded"], "audit"),
        (["audit", "embedded", "--ot", "x"], "--out"),
        (["inspect", "embedded", "--family", "gpt22"], "gpt2"),
        (["norms", "embedded", "--sequences", "4"], "--inputs"),
        (["outliers", "embedded", "--sentences", "4"], "--inputs"),
        (["outliers", "embedded", "--sampled", "4"], "--sample"),
        (["norms", "embedded", "--longest", "4"], "--length"),
        (["audit", "embedded", "--out", "x", "--fail-on", "spectral_spyke"], "spectral_spike"),
    ],
)
def test_misspelled_name_gets_a_suggestion(arguments: list[str], meant: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert meant in result.stderr.casefold().rpartition("did you mean")[2]


def test_misspelled_measure_gets_a_suggestion() -> None:
    with pytest.raises(KeyError, match="did you mean 'qk_sigma1'"):
        Table([Column("qk_sigma1", [1.0]), Column("vo_sigma1", [2.0])])["qk_sigma"]


def test_quiet_prints_only_the_path_of_the_result(tmp_path: Path) -> None:
    for resumed in ([], ["--resume"]):  # what an earlier run made too
        with undrawn():
            result = run("audit", "embedded", "--out", tmp_path / "a", "--quiet", *resumed)
        assert (result.stdout, result.stderr) == (f"{tmp_path / 'a' / 'report.html'}\n", "")
    loud, quiet = run("neighbours", "embedded", " ship"), run("neighbours", "embedded", " ship", "--quiet")
    assert quiet.stdout and quiet.stdout in loud.stdout


def test_an_option_has_one_form_over_all_commands() -> None:
    """A name takes a value everywhere or nowhere, and a value of one kind."""
    forms: dict[str, set[tuple[bool, str]]] = {}
    for known in main.commands.values():
        for option in (parameter for parameter in known.params if isinstance(parameter, click.Option)):
            kind = type(option.type).__name__.removesuffix("Range").removesuffix("ParamType")
            forms.setdefault(option.opts[0], set()).add((option.is_flag, kind))
    # Of `same` a share of the values, of the studies a number of heads or queries: both are what other tools call it.
    # Of `rank` a share of the matrices, as Spectrum's; else a number of rows.
    # Of `same` one of two verdicts, else a severity or a kind of finding.
    assert {name for name, kinds in forms.items() if len(kinds) > 1} == {"--sample", "--top", "--fail-on"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["audit", "--help"], ["completion", "zsh"]])
def test_help_loads_no_module_that_only_work_needs(arguments: list[str]) -> None:
    """Each of these modules takes a tenth of the time and more."""
    code = (
        "import sys\nfrom weightscope.__main__ import main\nbefore = set(sys.modules)\n"  # the interpreter's own
        "try:\n    main()\nfinally:\n    print('\\nLOADED', *set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert "click" in loaded and not loaded & {
        "numpy", "tqdm", "tempfile", "secrets", "random", "hashlib", "difflib", "subprocess", "importlib.metadata",
        "rich", "scipy", "matplotlib", "jinja2", "joblib", "torch", "transformers", "cupy", "numba", "tokenizers",
        "pyarrow", "sklearn", "huggingface_hub", "distributed", "pandas",
    }  # fmt: skip


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0 and "_WEIGHTSCOPE_COMPLETE" in result.output


@pytest.mark.parametrize(
    "typed, found",
    [
        ("weightscope aud", "audit"),
        ("weightscope audit emb", "embedded"),
        ("weightscope inspect x --family gpt_ne", "gpt_neo"),
        ("weightscope audit x --fail-on spectral", "spectral_spike"),
        ("weightscope circuits x --eng", "--engine"),
    ],
)
def test_a_shell_completes(typed: str, found: str) -> None:
    words = shlex.split(typed)
    asked = {"_WEIGHTSCOPE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    result = run(env=asked, prog_name="weightscope")
    assert found in result.output


def test_a_broken_file_of_rows_takes_no_completion_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    own_folder().mkdir(parents=True)
    (own_folder() / "broken.toml").write_text("x = [")
    test_a_shell_completes("weightscope inspect x --family gpt_ne", "gpt_neo")


@pytest.mark.parametrize("columns", [4, 9])
def test_a_ruled_table_cuts_no_heading(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    headings = [f"number{i}" for i in range(columns)]
    for width, ruled in ((9 * columns, True), (9 * columns - 1, False)):  # two spaces apart
        monkeypatch.setenv("COLUMNS", str(width))
        show(Table.of_rows(headings, [[1.5] * columns]))
        lines = click.unstyle(capsys.readouterr().out).splitlines()
        assert any("─" in line for line in lines) is ruled
        assert any(line.split() == headings for line in lines)


def test_sentences_break_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence, path = "  layer 3 head 2: " + "as wide as it is long, " * 6, "/a/path" * 20
    monkeypatch.setenv("COLUMNS", "40")
    show(sentence, path)
    assert capsys.readouterr().out == f"{sentence}\n{path}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show(sentence, path)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == path and max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == sentence.strip() and lines[1].startswith("    ")


def test_a_table_is_ruled_on_a_terminal_and_plain_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table([Column("token", ["[red]", "b"]), Column("n", [1, 20])])
    show(table)
    assert capsys.readouterr().out == table.text() + "\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show(table)
    ruled = capsys.readouterr().out
    assert "─" in ruled and "[red]" in ruled and "20" in ruled


def test_words_are_folded_at_any_width(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    main(["families"], standalone_mode=False)
    lines = click.unstyle(capsys.readouterr().out).splitlines()
    assert any("─" in line for line in lines) and max(map(len, lines)) <= 80
    assert any(line.startswith("Checked ") for line in lines)


def test_the_tensors_of_a_layer_are_ruled_on_a_terminal_and_lines_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformer.h.0.attn.c_attn.bias"
    main(["inspect", "embedded"], standalone_mode=False)
    assert f"\n  {name}  F16  (576,)\n" in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    main(["inspect", "embedded"], standalone_mode=False)
    output = click.unstyle(capsys.readouterr().out)
    assert "─" in output and f"\n {name}    F16    (576,) " in output


@pytest.mark.parametrize(
    "words, width",
    [
        ("inspect embedded --check", 110),
        ("compare embedded MOVED --out OUT", 80),
        ("detok embedded --sample 100 --out OUT", 80),
    ],
)
def test_a_result_is_ruled_on_a_terminal_with_its_numbers_whole(
    words: str, width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And plain, as in a pipe, where the terminal is too narrow for them."""
    weights = load_file(FOLDER / "model.safetensors")
    shutil.copytree(FOLDER, tmp_path / "MOVED")
    save_file(
        {name: array * np.float16(1.5) for name, array in weights.items()}, tmp_path / "MOVED" / "model.safetensors"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for columns, ruled in ((width, True), (30, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        with undrawn():
            main(words.split(), standalone_mode=False)
        output = click.unstyle(capsys.readouterr().out)
        assert ("─" in output) is ruled and "…" not in output
        lines = output.splitlines()
        table = lines[lines.index(next((x for x in lines if "─" in x), lines[0])) :]
        assert not ruled or max(len(line) for line in table if not line.startswith("Bigrams of")) <= width
