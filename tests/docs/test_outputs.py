"""Commands in docs/ print the output that the pages show, on real checkpoints and copies of these."""

import shlex
from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.figures import undrawn
from tests.support.outputs import PAGES, Shown, in_one_line, make_checkpoints, shown
from weightscope.core.errors import CheckpointError

pytestmark = [pytest.mark.docs, pytest.mark.check]
OUTPUTS = [each for page in PAGES for each in shown(page)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    try:
        make_checkpoints(folder)
    except CheckpointError as error:
        pytest.skip(str(error))
    return folder


@pytest.mark.parametrize("each", OUTPUTS, ids=lambda each: f"{each.page}: {each.command}")
def test_a_command_prints_what_its_page_shows(each: Shown, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoints)
    with undrawn():
        result = run(*shlex.split(each.command))
    assert result.exit_code in {0, 3}, result.output
    printed = in_one_line(result.output)
    for piece in each.pieces:
        assert piece in printed
        printed = printed.partition(piece)[2]


def test_each_page_shows_an_output() -> None:
    assert {each.page for each in OUTPUTS} == {*PAGES} and all(each.pieces for each in OUTPUTS)
