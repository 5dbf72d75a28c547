"""The commands of docs/adopting.md are run, and print what the page shows."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import weightscope as ws
from weightscope.cli import main
from weightscope.model.rows.table import standing

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.adopting.newcomer import NewcomerConfig, NewcomerModel  # noqa: E402
from weightscope.adopting import newcomers  # noqa: E402
from weightscope.model.rows import table  # noqa: E402

pytestmark = pytest.mark.check

PAGE = (Path(__file__).parents[2] / "docs" / "adopting.md").read_text(encoding="utf-8")
# What names files of the reader's own, as text, is not run.
BLOCKS = [block for kind, block in re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL) if kind != "text"]


def test_the_commands_of_the_page_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "own_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(newcomers, "model_types", lambda: ["newcomer"])
    transformers.AutoConfig.register("newcomer", NewcomerConfig, exist_ok=True)
    transformers.AutoModel.register(NewcomerConfig, NewcomerModel, exist_ok=True)
    NewcomerModel(NewcomerConfig()).save_pretrained("newcomer")
    printed = {}
    for command in (line for block in BLOCKS for line in block.splitlines() if line.startswith("weightscope ")):
        result = CliRunner().invoke(main, command.split()[1:])
        assert result.exit_code == 0, result.output
        printed[command.removeprefix("weightscope ")] = result.stdout
        if command.endswith("--save"):
            (tmp_path / "newcomer.toml").write_bytes((tmp_path / "own" / "newcomer.toml").read_bytes())
    assert len(printed) == 6
    assert printed["adopt newcomer"] == BLOCKS[1]
    assert "adopted, proved against transformers" in printed["inspect newcomer"]
    assert printed["inspect newcomer"] == printed["inspect newcomer --families newcomer.toml"]
    assert printed["families --new"].startswith("newcomer: exact causal blocks.{}.mixing")
    assert printed["families"].splitlines()[-1] == standing()
    (start,) = [block for block in BLOCKS if block.startswith("proved_against")]
    assert (tmp_path / "newcomer.toml").read_text().startswith(start)
    assert ws.open_model("newcomer", families="newcomer.toml").family.name == "newcomer"
