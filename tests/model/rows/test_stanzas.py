"""Rows as files: a written row is read back, a file without rows is refused, and results name their rows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import run
from tests.support.tiny_models import FIXTURES, fixture
from weightscope.model.config.config import Every
from weightscope.model.layers.steps.scores import Sinks
from weightscope.model.rows.cells import Biases, QkNorm, RowInputs, StoredNorm
from weightscope.model.rows.family import Family
from weightscope.model.rows.stanzas import ROOTS, file_of, read_rows, stanza_of
from weightscope.model.rows.table import FAMILIES, Rows, own_folder
from weightscope.model.run_identity import RunIdentity

PROOF = "transformers 5.23.0"
LLAMA, BERT = (next(row for row in FAMILIES if row.name == name) for name in ("llama", "bert"))
NEW = LLAMA.but(name="novel", types=("newcomer",))


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return own_folder()


def saved(path: Path, row: Family | None = NEW, text: str = "") -> Path:
    """A file of a row, with more cells where they are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((file_of([row], PROOF).decode() if row else "") + text)
    return path


def renamed(folder: Path, name: str = "llama") -> Path:
    """A fixture that says to be of a model_type that no row of the table lists."""
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "newcomer"}))
    return folder


def test_every_row_survives_writing_and_reading(tmp_path: Path) -> None:
    wrong = []
    for row in FAMILIES:
        (tmp_path / "row.toml").write_bytes(file_of([row], PROOF))
        (again,) = read_rows(tmp_path / "row.toml", FAMILIES.row)
        if stanza_of(again) != stanza_of(row) or again.origin != f"adopted, proved against {PROOF}":
            wrong.append((row.name, row.tower))
    assert not wrong
    assert replace(again, origin="") == replace(row, gguf=None)


def test_a_stanza_with_stages_is_a_row_for_each(tmp_path: Path) -> None:
    """Of the others only the cells that name their stage differ, numbers and names of tensors among them."""
    text = """[novel.stage1]
like = "swin.stage1"
stages = 3
layer = "blocks.{s}.{i}."
notes = "of stages"
positions.bias.window_table.tensors = { "blocks.{s}.{i}.table" = "" }
positions.bias.window_table.side = "window_size"
config.derived = { stage = "{s}" }
"""
    (tmp_path / "row.toml").write_text(text)
    first, *later = read_rows(tmp_path / "row.toml", FAMILIES.row)
    assert [row.tower for row in (first, *later)] == ["stage1", "stage2", "stage3"]
    assert first.layer == "blocks.0.{i}." and first.types == ("novel",)
    for index, row in enumerate(later, 1):
        derived = replace(first.config.derived, index=index)
        bias = replace(first.positions.bias, tensors={f"blocks.{index}.{{i}}.table": ""})
        changed = {"tower": row.tower, "layer": f"blocks.{index}.{{i}}.", "config__derived": derived}
        assert row == first.but(positions__bias=bias, **changed)


def test_a_stanza_takes_cells_from_the_row_it_is_like(tmp_path: Path) -> None:
    text = """
[newcomer]
like = "llama"
alias = "latecomer"
heads = { modules = "mixer.{q,k,v,out}", bias = { qkv = true } }
norms.before = { norm = "layer:before", eps = 1e-5 }
positions.rope = false
config.layer_types = { every = "period" }
when = [{ key = "use_qk_norm", is = true, scores.qk_norm = true }]
in = [{ layers = "sliding_attention", steps.sinks = "mixer.sinks" }]

[newcomer.vision]
like = "newcomer"
types = ["newcomer_vision", "latecomer_vision"]
inputs = { tokens = "", more = "patches" }
"""
    row, alias, vision = read_rows(saved(tmp_path / "row.toml", None, text), FAMILIES.row)
    assert (row.heads.q, row.heads.out, row.heads.bias) == ("mixer.q", "mixer.out", Biases(True, True, True, False))
    assert (row.norms.before, row.rope, row.layer) == (
        StoredNorm("before", centred=True, bias=True, eps=1e-5),
        None,
        LLAMA.layer,
    )
    assert row.config.layer_types == Every("period")
    assert row.configured({"use_qk_norm": True}).scores.qk_norm == QkNorm()
    assert row.in_layer("sliding_attention").steps == (Sinks("mixer.sinks"),)
    assert (alias.name, alias.types, alias.heads.q) == ("latecomer", ("latecomer",), row.heads.q)
    assert (vision.name, vision.tower, vision.inputs) == ("newcomer", "vision", RowInputs(more="patches"))
    assert vision.types == ("newcomer_vision", "latecomer_vision")


@pytest.mark.parametrize("cell, problem", [
    ("colour = 'red'", "[novel] colour: no such cell; there are prefixes, layer"),
    ("heds = 'red'", "[novel] heds: no such cell; did you mean 'heads'?"),
    ("heads.colour = 'red'", "[novel] heads.colour: no such cell; there are modules, qkv, layout, q"),
    ("name = 7", "[novel] name is 7; str was expected"),
    ("name = ''", "[novel] name is ; one at least was expected"),
    ("name = '" + "x" * 300 + "'", "a plain name of 200 characters at most was expected"),
    ('name = "\\u001b[2J"', "a plain name of 200 characters at most was expected"),
    ("types = 7", "[novel] types is 7; tuple was expected"),
    ("types = [" + "'a'," * 201 + "]", "[novel] types is 201 items; 200 at most was expected"),
    ("layer = 'layers.{i.__class__}.'", "a plain name of 200 characters at most was expected"),
    ("layer = 'layers.0.'", "[novel] layer is layers.0.; a name with {i} for the layer's index was expected"),
    ("heads.layout = 'os.system'", "[novel] heads.layout is os.system; one of by_dimension_and_head"),
    ("heads.modules = 'a.{q,k}'", "[novel] heads.modules is a.{q,k}; four modules, as self_attn.{q,k,v,o}_proj"),
    ("heads.bias = { x = true }", "[novel] heads.bias.x: no such cell; there are qkv, q, k, v, out"),
    ("scores.scale = 'separate'", "[novel] scores.scale is separate; one of deberta_scale"),
    ("norms.before = 'input_layernorm'", "[novel] norms.before is input_layernorm; \"rms:module\" or \"layer:module\""),
    ("norms.before = { eps = 1e-5 }", "[novel] norms.before is {'eps': 1e-05}; a norm"),
    ("norms.before = { norm = 'rms:n', eps = 2 }", "a number from 0 to 1 was expected"),
    ("norms.before = { norm = 'rms:n', centred = true }", "norms.before.centred: no such cell; `norm` says it"),
    ("positions.rope = { theta = 0 }", "[novel] positions.rope.theta is 0; a number from 1.001 to 1e+12 was expected"),
    ("positions.rope = { theta = nan }", "[novel] positions.rope.theta is nan; a number from 1.001 to 1e+12"),
    ("positions.rope = { turns = 1 }", "[novel] positions.rope.turns: no such cell; there are interleaved"),
    ("positions.grid = { spelled = { in_turn = ['up'] } }", "is up; one of frame, row, column was expected"),
    ("positions.rope = { interleave = true }", "interleave: no such cell; did you mean 'interleaved'?"),
    ("heads.bias = { ou = true }", "[novel] heads.bias.ou: no such cell; did you mean 'out'?"),
    ("scores.qk_norm = { scope = 'each' }", "[novel] scores.qk_norm.scope is each; one of shared, own, listed"),
    ("heads.kv_heads = 0", "[novel] heads.kv_heads is 0; a number from 1 to 1e+07 was expected"),
    ("heads.kv_heads = 1979-05-27", "[novel] heads.kv_heads is 1979-05-27; int or tuple was expected"),
    ("config.keys = { width = 'd' }", "[novel] config.keys.width: no such size; there are n_layers, d_model"),
    ("config.defaults = { deep = { a = [1e99] } }", "[novel] config.defaults.deep.a[0] is 1e+99; a number from"),
    ("config.layer_types = { every = {} }", "[novel] config.layer_types.every.key is missing; a part that every every"),
    ("config.layer_types = { all_full = 3 }", "[novel] config.layer_types.all_full is 3; no parameters was expected"),
    ("when = [{ key = 'k', layer = 'l.{i}.' }]", "[novel] when[0] is {'key': 'k'"),
    ("when = [{ key = 'k', is = 1, gguf = {} }]", "[novel] when[0].gguf: no such cell in a condition"),
    ("steps.sink = 'sinks'", "[novel] steps.sink: no such step; did you mean 'sinks'?"),
    ("steps.colour = 'red'", "[novel] steps.colour: no such step; there are added_positions, bias_gate"),
    ("heads.layout = 'seperate'", "keys_beside_values, keys_with_values, latent, latent_scaled"),
    ("heads.layout = 'seperate'", "stacked, stacked_as was expected; did you mean 'separate'?"),
    ("in_transformers = { colour = 'red' }", "[novel] in_transformers colour: no such cell"),
    ("gguf = { architecture = 'llama' }", "[novel] gguf: only rows of the package read GGUF files"),
    ("stages = 3", "[novel] stages is 3; a number up to 200, in a stanza [name.stage1] was expected"),
    ("like = 'novel'", "[novel] like is novel; a row that does not start from this one was expected"),
    ("like = 'lama'", "[novel] like is lama; a stanza of this file, or a row of the table was expected"),
])  # fmt: skip
def test_unfit_cell_is_refused_with_line_stanza_and_cell(cell: str, problem: str, tmp_path: Path) -> None:
    name = cell.partition(" ")[0]
    cells = [line for line in stanza_of(NEW).splitlines() if not line.startswith((f"{name} ", f"{name}."))]
    text = "\n".join([*cells, cell, ""])
    with pytest.raises(ws.CheckpointError) as error:
        ws.open_model(FIXTURES / "llama", families=saved(tmp_path / "row.toml", None, text))
    message = str(error.value)
    assert message.startswith("row.toml: line ") and problem in message and "? was" not in message


@pytest.mark.parametrize("text, problem", [
    ("", "the file is 0 stanzas; 1 to 200 stanzas was expected"),
    ("[[", "is not valid TOML (Invalid initial character for a key part (at end of document))"),
    ("x = " + "[" * 990, "is not valid TOML ("),
    ("x = 1" + "0" * 900 + "\n", "line 1: x is 1"),
    ("\xff", "is not valid TOML ('utf-8' codec can't decode"),
    ("x = 1", "line 1: x is 1; a stanza, [name] and its cells was expected"),
    ("proved_against = 3", "line 1: proved_against is 3; transformers and its version, or module:Class"),
    ("proved_for = 3", "line 1: proved_for is 3; 16 hexadecimal digits was expected"),
    ("tried_against = 3", "line 1: tried_against is 3; transformers and its version, in place of proved_against was"),
    ("[a]", "line 1: [a] layer is missing; a cell that every row has, or inherits with `like` was expected"),
    ("[a]\nlike = 'b'\n[b]\nlike = 'a'", "line 4: [b] like is a; a row that does not start from this one"),
    ("[a.stage1]\nstages = true", "line 2: [a.stage1] stages is True; a number up to 200"),
    ("[a.stage1]\nstages = 1000000000", "line 2: [a.stage1] stages is 1000000000; a number up to 200"),
    ("['a.b']\nlike = 'llama'", "the name of a stanza is a.b; one without dots"),
    ("a" + ".a" * 500, "has a line of more than 1000 bytes; no more are read"),
    (" \n" * 100_001, "has more than 200000 bytes; no more are read"),
])  # fmt: skip
def test_file_that_holds_no_rows_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "row.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ws.CheckpointError) as error:
        read_rows(tmp_path / "row.toml", FAMILIES.row)
    assert str(error.value).startswith(f"row.toml: {problem}")


def test_rows_of_an_older_release_are_refused_with_what_to_do(config_home: Path) -> None:
    config_home.mkdir(parents=True)
    (config_home / "novel.json").write_text("{}")
    with pytest.raises(ws.CheckpointError, match=r"novel\.json: rows are TOML files now; `weightscope adopt SOURCE"):
        ws.open_model(FIXTURES / "llama")


MIXED = (
    "heads__layout", "norms__before", "scores", "positions", "heads__bias", "config__stored_layer",
    "config__layer_types", "steps", "heads__head_dim", "heads__kv_heads", "inputs", "norms__after",
)  # fmt: skip


def test_contradictory_cells_end_in_one_line(tmp_path: Path) -> None:
    """Cells of other rows, put at random into a row that reads: it reads, or says what is wrong."""
    rng, rows = np.random.default_rng(0), list(FAMILIES)
    folder, refused = renamed(tmp_path / "model"), 0
    for trial in range(150):
        cells = rng.choice(MIXED, 2)
        donors = {cell: rows[rng.integers(len(rows))] for cell in cells}
        row = NEW.but(**{cell: attrgetter(cell.replace("__", "."))(donor) for cell, donor in donors.items()})
        try:
            model = ws.open_model(folder, families=saved(tmp_path / f"{trial}.toml", row))
            for index in model.attention_layers:
                model.layer(index).scores(np.ones((3, model.config.d_model), np.float32))
        except ws.CheckpointError:
            refused += 1
    assert 10 < refused < 150


def test_rows_of_a_type_are_found_without_parsing_every_file() -> None:
    kinds = {kind for row in FAMILIES for kind in (row.name, *row.types)}
    for asked in [{kind} for kind in kinds] + [{"qwen3", "clip", "swin", "gemma3_text"}]:
        assert [*FAMILIES.rows(frozenset(asked))] == [row for row in FAMILIES if {row.name, *row.types} & asked]
    table = Rows(FAMILIES.folder)
    assert table.rows(frozenset({"swin"})) and table._files.keys() == {"swin.toml"}


def test_rows_start_from_their_own_file_or_from_a_root() -> None:
    """And a root from none of them, so a row never depends on a third file."""
    strangers = []
    files = {title: file for file in map(FAMILIES.file, FAMILIES.texts) for title in file.stanzas}
    for stanza, file in files.items():
        like = file.stanzas[stanza].get("like")
        if file is FAMILIES.file("remote.toml"):  # its rows start from what the published code builds on
            continue
        if like and files[like] is not file and (like not in ROOTS or stanza in ROOTS):
            strangers.append(stanza)
    assert not strangers


def test_a_saved_row_opens_what_the_table_does_not_know(tmp_path: Path, config_home: Path) -> None:
    folder, file = renamed(tmp_path / "model"), saved(tmp_path / "row.toml")
    with pytest.raises(ws.CheckpointError, match=r"unknown model_type 'newcomer'.*`weightscope adopt SOURCE`"):
        ws.open_model(folder)
    model, x = ws.open_model(folder, families=file), fixture("llama").arrays["x1"]
    assert repr(model).startswith(f"Model(novel (adopted, proved against {PROOF}): ")
    np.testing.assert_array_equal(model.layer(1).scores(x), fixture("llama").model.layer(1).scores(x))
    saved(config_home / "novel.toml")
    assert ws.open_model(folder).family == model.family


def test_given_file_precedes_the_table_and_a_users_folder_follows(tmp_path: Path, config_home: Path) -> None:
    renamed_row = LLAMA.but(name="other")
    saved(config_home / "other.toml", renamed_row)
    assert ws.open_model(FIXTURES / "llama").family.name == "llama"
    assert ws.open_model(FIXTURES / "llama", families=saved(tmp_path / "row.toml", renamed_row)).family.name == "other"


def test_a_broken_file_among_a_users_own_is_named(config_home: Path) -> None:
    saved(config_home / "novel.toml", None, "[novel]\nlike = 'llama'\nheads.layout = 'gone'")
    with pytest.raises(ws.CheckpointError, match=r"novel\.toml: line 3: \[novel\] heads\.layout is gone"):
        ws.open_model(FIXTURES / "llama")


def test_two_files_of_rows_give_two_fingerprints(tmp_path: Path) -> None:
    folder = renamed(tmp_path / "model")

    def identity(row: Family) -> RunIdentity:
        return RunIdentity.of_model(ws.open_model(folder, families=saved(tmp_path / "row.toml", row)))

    assert identity(NEW) == identity(NEW) != identity(NEW.but(positions__rope__theta=2e4))
    assert identity(NEW) != RunIdentity.of_model(ws.open_model(folder, family="llama"))


@pytest.mark.check
@pytest.mark.parametrize("option", ["family", "families"])
def test_every_output_says_that_a_row_is_not_the_tables(option: str, tmp_path: Path) -> None:
    folder = renamed(tmp_path / "model")
    given = {"family": "llama", "families": str(saved(tmp_path / "row.toml"))}[option]
    labels = {"family": "unproved: no proof that this row reads model_type 'newcomer'", "families": "adopted, proved"}
    arguments = [str(folder), f"--{option}", given]
    assert labels[option] in run("inspect", *arguments).stdout
    for command, page in (("audit", "report.html"), ("circuits", "report.html")):
        out = tmp_path / command
        result = run(command, *arguments, "--out", out)
        assert result.exit_code == 0 and labels[option] in (result.stdout if command == "audit" else result.stderr)
        assert labels[option].replace("'", "&#39;") in (out / page).read_text()
    result = run("compare", folder, *arguments, "--out", tmp_path / "compare")
    assert labels[option] in result.stderr
    assert labels[option].replace("'", "&#39;") in (tmp_path / "compare" / "report.html").read_text()
    (tmp_path / "list.txt").write_text(str(folder))
    run("audit", tmp_path / "list.txt", *arguments[1:], "--out", tmp_path / "many")
    assert labels[option] in (tmp_path / "many" / "summary.csv").read_text()


def with_tensor(name: str, *shape: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {name: np.ones(shape, np.float32)}, folder / "model.safetensors")

    return change


@pytest.mark.parametrize("name, tensor, listed", [
    ("llama_linear", "model.layers.1.self_attn.attn_sub_norm.weight", True),
    ("llama_linear", "model.layers.1.self_attn.q_norm.weight", True),
    ("bert", "bert.encoder.layer.0.attention.self_attn_layer_norm.weight", True),
    ("llama_linear", "model.layers.0.self_attn.q_proj.bias", False),
    ("llama_linear", "model.layers.0.input_layernorm.bias", False),
])  # fmt: skip
def test_unread_attention_tensor_is_refused(name: str, tensor: str, listed: bool, tmp_path: Path) -> None:
    """Always if they belong to a module that is not read; if they belong to one that is, for an unlisted model_type."""
    folder = renamed(tmp_path / "model", name)
    with_tensor(tensor, 16)(folder)
    family = name.partition("_")[0]
    with pytest.raises(
        ws.CheckpointError, match=f"tensor '{tensor}' is an unsupported attention tensor.*; family {family}"
    ):
        ws.open_model(folder, family=family).layer(int(tensor.split(".")[2 if name != "bert" else 3]))
    shutil.copy(FIXTURES / name / "config.json", folder / "config.json")
    known = ws.open_model(folder)
    if not listed:
        assert len(known.layers) == known.config.n_layers and known.layer(0).head(0)
        return
    with pytest.raises(ws.CheckpointError, match="would ignore it"):
        [known.attention_tensors(index) for index in known.attention_layers]
