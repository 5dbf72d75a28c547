"""A row that is taken out of the table is found again, and nothing that is not exact is adopted."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import weightscope as ws
from tests.support.tiny_models import FIXTURES, fixture
from weightscope.checkpoint import open_checkpoint
from weightscope.cli import main
from weightscope.families import FAMILIES
from weightscope.families.rows import gpt
from weightscope.families.stored import file_of

pytest.importorskip("torch")
from weightscope.adoption.adopting import PROOF, adopt, as_python


def test_a_row_is_found_again_and_reads_the_checkpoint(tmp_path: Path) -> None:
    row = adopt(open_checkpoint(FIXTURES / "llama"), [one for one in FAMILIES if "llama" not in one.model_types])
    assert ".but(" in as_python(row) and "no_rope" not in as_python(row)
    (tmp_path / "row.json").write_bytes(file_of([row], PROOF))
    model, x = ws.open_model(FIXTURES / "llama", families=tmp_path / "row.json"), fixture("llama").arrays["x1"]
    assert model.family.origin == f"adopted, proved against {PROOF}"
    np.testing.assert_array_equal(model.layer(1).scores(x), fixture("llama").model.layer(1).scores(x))


def test_where_nothing_is_exact_it_says_how_near_it_came() -> None:
    unscaled = [one.but(scale=gpt.unscaled) for one in FAMILIES if one.name == "gpt_neox"]
    with pytest.raises(ws.CheckpointError, match=r"no row reads it exactly; nearest: .*values are right"):
        adopt(open_checkpoint(FIXTURES / "gpt_neox"), unscaled)
    with pytest.raises(ws.CheckpointError, match=r"no row is proposed"):
        adopt(open_checkpoint(FIXTURES / "gpt_neox"), [one for one in FAMILIES if one.name == "opt"])


def test_what_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "newcomer"}))
    result = CliRunner().invoke(main, ["adopt", str(folder)])
    assert result.exit_code == 2
    assert "has no architecture 'newcomer', and code that comes with a checkpoint is not run" in result.stderr


def test_families_are_listed() -> None:
    result = CliRunner().invoke(main, ["families", "--csv"])
    assert result.exit_code == 0
    assert "\nqwen2,qwen2" in result.stdout
    assert len(result.stdout.splitlines()) == len(FAMILIES) + 1
