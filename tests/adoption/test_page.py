"""The commands of docs/adopting.md are run, and print what it says."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import weightscope as ws
from weightscope.adoption.record import standing
from weightscope.cli import main

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.adoption.newcomer import NewcomerConfig, NewcomerModel  # noqa: E402
from weightscope.adoption import census  # noqa: E402
from weightscope.families import own_rows  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "adopting.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_rows, "own_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(census, "model_types", lambda: ["newcomer"])
    transformers.AutoConfig.register("newcomer", NewcomerConfig, exist_ok=True)
    transformers.AutoModel.register(NewcomerConfig, NewcomerModel, exist_ok=True)
    NewcomerModel(NewcomerConfig()).save_pretrained("newcomer")
    printed = {}
    for command in (line for block in BLOCKS for line in block.splitlines() if line.startswith("weightscope ")):
        result = CliRunner().invoke(main, command.split()[1:])
        assert result.exit_code == 0, result.output
        printed[command.removeprefix("weightscope ")] = result.stdout
        if command.endswith("--save"):
            (tmp_path / "newcomer.json").write_bytes((tmp_path / "own" / "newcomer.json").read_bytes())
    assert len(printed) == 6
    assert printed["adopt newcomer"] == BLOCKS[1]
    assert "adopted, proved against transformers" in printed["inspect newcomer"]
    assert printed["inspect newcomer"] == printed["inspect newcomer --families newcomer.json"]
    assert printed["families --new"].startswith("newcomer: exact causal blocks.{}.mixing")
    assert printed["families"].splitlines()[-1] == standing()
    (start,) = [block for block in BLOCKS if block.startswith("{")]
    assert (tmp_path / "newcomer.json").read_text().startswith(start)
    assert ws.open_model("newcomer", families="newcomer.json").family.name == "newcomer"
