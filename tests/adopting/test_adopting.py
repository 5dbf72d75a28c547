"""A row that is taken out of the table is found again, and nothing that is not exact is adopted."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.census.record import read, tally, write
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES, fixture
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.model.rows import table
from weightscope.model.rows.family import Family
from weightscope.model.rows.stanzas import file_of, read_rows
from weightscope.model.rows.table import FAMILIES, standing

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.adopting.newcomer import NewcomerConfig, NewcomerModel  # noqa: E402
from weightscope.adopting import newcomers  # noqa: E402
from weightscope.adopting.adopt import PROOF, Adopted, adopt, as_stanza, misread  # noqa: E402
from weightscope.adopting.tiny_models import SIZES  # noqa: E402
from weightscope.adopting.trial import at_work  # noqa: E402

pytestmark = pytest.mark.check

CONFIG = "config.json"


def without(kind: str) -> list[Family]:
    """The table without the rows that read a model_type."""
    return [row for row in FAMILIES if kind not in row.types]


def published(kind: str, folder: Path) -> Path:
    """A checkpoint of a type, of other weights than any model that a row is proved on."""
    model, _ = at_work(transformers.AutoConfig.for_model(kind), SIZES[1:], seed=5, start=0)
    model.save_pretrained(folder)
    return folder


def changed(name: str, folder: Path, **values: Any) -> Path:
    """A fixture with some values of its config replaced; None takes a key out."""
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / CONFIG).read_text()) | values
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def same_as_the_table(adopted: Adopted, folder: Path, file: Path) -> None:
    """What adopted rows, saved and read again, say of a checkpoint is what the table's say."""
    file.write_bytes(file_of(adopted.rows, PROOF))
    for row in read_rows(file, FAMILIES.row):
        reread, table = ws.Model.of_row(open_checkpoint(folder), row), ws.open_model(folder, tower=row.tower or None)
        assert reread.family.origin == f"adopted, proved against {PROOF}" and not table.family.origin
        for index in table.attention_layers:
            layer, expected = reread.layer(index), table.layer(index)
            x = np.random.default_rng(index).normal(size=(11, expected.d_model)).astype(np.float32)
            more = {"memory": x[:7, : expected.k.shape[1]]} if expected.cross else {}
            far = 1000 + np.arange(11)
            np.testing.assert_allclose(layer.scores(x, far, **more), expected.scores(x, far, **more), atol=2e-4)
            np.testing.assert_allclose(layer.values(x), expected.values(x), atol=1e-5)


def test_a_removed_row_is_found_again_and_reads_the_checkpoint(tmp_path: Path) -> None:
    adopted = adopt(open_checkpoint(FIXTURES / "llama"), without("llama"))
    (row,) = adopted.rows
    assert not adopted.refused and "like = " in as_stanza(row) and "no_rope" not in as_stanza(row)
    same_as_the_table(adopted, FIXTURES / "llama", tmp_path / "row.toml")
    model, x = ws.open_model(FIXTURES / "llama", families=tmp_path / "row.toml"), fixture("llama").arrays["x1"]
    np.testing.assert_array_equal(model.layer(1).scores(x), fixture("llama").model.layer(1).scores(x))


def test_unheard_of_module_names_and_config_keys_are_found(tmp_path: Path) -> None:
    """Modules and config keys have names that stand nowhere else, one tensor holds all, gains count from 1."""
    transformers.AutoConfig.register("newcomer", NewcomerConfig, exist_ok=True)
    transformers.AutoModel.register(NewcomerConfig, NewcomerModel, exist_ok=True)
    NewcomerModel(NewcomerConfig()).save_pretrained(tmp_path / "model")
    (row,) = adopt(open_checkpoint(tmp_path / "model")).rows
    assert row.heads.q == row.heads.v == "mixing.joint" and row.norms.before and row.norms.before.offset == 1.0
    assert row.config.keys["n_heads"] == ("query_heads",) and row.rope and row.rope.interleaved


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma2"])
def test_rows_of_other_lineages_are_found_again(kind: str, tmp_path: Path) -> None:
    folder = published(kind, tmp_path / "model")
    same_as_the_table(adopt(open_checkpoint(folder), without(kind)), folder, tmp_path / "rows.toml")


STACKS = {"bart": 3, "t5": 3, "whisper": 3, "clip_text_model": 1}
AGAIN = [
    "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi", "phi3", "gpt2", "gptj", "opt", "bloom", "falcon",
    "stablelm", "starcoder2", "cohere", "olmo", "olmo2", "granite", "smollm3", "bert", "roberta", "distilbert", "t5",
    "bart", "vit", "clip_text_model", "whisper", "codegen", "gpt_bigcode", "glm4", "nemotron", "helium", "exaone4",
    "mpt", "gpt_neo", "persimmon", "deepseek_v3", "modernbert", "esm", "gpt_oss", "olmoe", "wav2vec2",
]  # fmt: skip


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[] if kind in {"gpt2", "t5", "whisper"} else pytest.mark.census) for kind in AGAIN
])  # fmt: skip
def test_every_stack_of_a_known_type_is_found_again(kind: str, tmp_path: Path) -> None:
    folder = published(kind, tmp_path / "model")
    adopted = adopt(open_checkpoint(folder), without(kind))
    assert not adopted.refused and len(adopted.rows) == STACKS.get(kind, 1)
    same_as_the_table(adopted, folder, tmp_path / "rows.toml")


def test_a_refusal_tells_how_near_the_nearest_row_came() -> None:
    unbiased = [row for row in FAMILIES if row.positions.bias is None]
    with pytest.raises(
        ws.CheckpointError, match=r"no row reads it exactly; nearest: values are right; attention is off"
    ):
        adopt(open_checkpoint(FIXTURES / "bloom"), unbiased)


def test_a_switch_that_was_not_proved_is_refused(tmp_path: Path) -> None:
    adopted = adopt(open_checkpoint(published("gpt2", tmp_path / "model")), without("gpt2"))
    assert adopted.rows[0].heads.transposed == ("c_attn", "c_proj")  # whatever the seed of Python's hashes
    (tmp_path / "row.toml").write_bytes(file_of(adopted.rows, PROOF))
    switched = changed("gpt2", tmp_path / "switched", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ws.CheckpointError, match="scale_attn_by_inverse_layer_idx true, which this row was not proved"):
        ws.open_model(switched, families=tmp_path / "row.toml")


def test_keys_of_older_configs_are_found_and_a_misreading_is_seen(tmp_path: Path) -> None:
    """GPT-NeoX's rotary_pct: transformers 5 knows it, and writes another key."""
    older = {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 100}
    checkpoint = open_checkpoint(changed("gpt_neox", tmp_path / "older", **older))
    (row,) = adopt(checkpoint, without("gpt_neox")).rows
    assert row.rope and row.rope.fraction_key == "rotary_pct"
    understood = transformers.AutoConfig.from_pretrained(tmp_path / "older").to_dict()
    assert not misread(row, checkpoint, understood)
    assert misread(row.but(positions__rope__fraction_key="partial_rotary_factor"), checkpoint, understood)


def test_shapes_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    folder = changed("llama", tmp_path / "model", num_key_value_heads=4)
    with pytest.raises(ws.CheckpointError, match=r"does not fit this file: .*k_proj\.weight"):
        adopt(open_checkpoint(folder), without("llama"))


def test_a_type_unknown_to_transformers_is_refused(tmp_path: Path) -> None:
    folder = changed("llama", tmp_path / "model", model_type="unheard_of", auto_map={"AutoModel": "evil.Model"})
    result = run("adopt", folder)
    assert result.exit_code == 2
    assert "has no architecture 'unheard_of', and code that comes with a checkpoint is not run" in result.stderr


def test_families_are_listed_and_counted(tmp_path: Path) -> None:
    result = run("families", "--csv", tmp_path / "rows.csv")
    assert result.exit_code == 0
    rows = (tmp_path / "rows.csv").read_text()
    assert "\nqwen2,qwen2" in rows
    assert len(rows.splitlines()) == len(FAMILIES) + 1
    last_line = result.stdout.splitlines()[-1]
    assert last_line == standing() and f"types: {tally(read())['exact']} of " in last_line


def test_a_census_names_its_version_of_transformers(tmp_path: Path) -> None:
    write(tmp_path / "census.csv", read())
    assert f"of {PROOF} on tiny" in standing(tmp_path / "census.csv")
    assert read(tmp_path / "census.csv") == read()


def test_families_new_tries_types_that_the_census_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {kind: verdicts for kind, verdicts in table.census().items() if kind != "bert"}
    monkeypatch.setattr(newcomers, "model_types", lambda: ["bert", "llama"])
    monkeypatch.setattr(table, "census", lambda: counted)
    result = run("families", "--new")
    assert result.stdout == "bert: exact self encoder.layer.{}.attention.self\n"
