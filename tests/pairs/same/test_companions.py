"""Files next to weights and config.json: what decides is never passed over, and what does not is named."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import weightscope as ws
from tests.support.commands import is_one_line, run
from tests.support.tiny_models import FIXTURES
from weightscope.pairs.same.by_identity import compare_files

POOLING = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
MODULES = ("Transformer", "Pooling", "Dense")
AUTO_MAP = {"AutoModel": "modeling_own.OwnModel"}
Change = Callable[[Path], None]


def write_json(path: Path, values: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))


def write_dense(folder: Path, factor: float = 1.0) -> None:
    values = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    save_file({"linear.weight": factor * values}, folder / "2_Dense" / "model.safetensors")


def published(folder: Path) -> Path:
    """A tiny BERT as sentence-transformers saves it, with code of its own."""
    shutil.copytree(FIXTURES / "bert", folder)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": AUTO_MAP}
    write_json(folder / "config.json", config)
    paths = ("", "1_Pooling", "2_Dense")
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(MODULES, paths, strict=True))
    ]
    write_json(folder / "modules.json", listed)
    write_json(folder / "1_Pooling" / "config.json", POOLING)
    write_json(folder / "2_Dense" / "config.json", {"in_features": 32, "out_features": 16, "bias": False})
    write_dense(folder)
    write_json(folder / "generation_config.json", {"max_length": 20, "transformers_version": "4.56.0"})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_own.py").write_text("from .layers_own import Own\nclass OwnModel: pass\n")
    (folder / "layers_own.py").write_text("class Own: pass\n")
    (folder / "example.py").write_text("print(1)\n")
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return published(tmp_path / "a"), published(tmp_path / "b")


def test_files_that_are_all_equal_are_said_to_be_weights_and_config(pair: tuple[Path, Path]) -> None:
    same = ws.same(*pair)
    assert same.verdict == "same bytes"
    assert "the weights and config.json hold the same bytes" in same.lead
    assert same.as_json()["files"] == []
    assert not same.unread_files


def pools_the_first(folder: Path) -> None:
    pooling = POOLING | {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write_json(folder / "1_Pooling" / "config.json", pooling)


def lacks_a_module(folder: Path) -> None:
    listed = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", listed[:2])


def changes(name: str, text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


DECIDING: dict[str, Change] = {
    "1_Pooling/config.json": pools_the_first,
    "modeling_own.py": changes("modeling_own.py", "from .layers_own import Own\n\n"),
    "layers_own.py": changes("layers_own.py", "class Own: x = 1\n"),
    "modules.json": lacks_a_module,
    "1_Pooling/config.json (only in A)": lambda folder: (folder / "1_Pooling" / "config.json").unlink(),
}


@pytest.mark.parametrize("name", DECIDING)
def test_code_and_pooling_that_differ_leave_the_verdict_undecided(name: str, pair: tuple[Path, Path]) -> None:
    DECIDING[name](pair[1])
    for a, b in (pair, pair[::-1]):
        result = run("same", a, b)
        assert result.exit_code not in (0, 2), result.output
        assert name.partition(" ")[0] in result.stdout.splitlines()[0]
    value = json.loads(run("same", *pair, "--json").stdout)
    assert value["verdict"] == "undecided"
    assert [each["file"] for each in value["files"] if each["decides"]] == [name.partition(" ")[0]]


def with_module(kind: str, files: dict[str, str]) -> Change:
    """One more module, with these files in its folder."""

    def change(folder: Path) -> None:
        listed = json.loads((folder / "modules.json").read_text())
        listed.append({"idx": 3, "name": "3", "path": f"3_{kind}", "type": f"sentence_transformers.models.{kind}"})
        write_json(folder / "modules.json", listed)
        for name, text in files.items():
            (folder / f"3_{kind}" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"3_{kind}" / name).write_text(text)

    return change


def many_modules(last: str) -> Change:
    def change(folder: Path) -> None:
        for _ in range(20):
            with_module("Normalize", {})(folder)
        with_module("Dense", {"config.json": last})(folder)

    return change


def elsewhere(text: str) -> Change:
    """The transformer is loaded from a folder of its own, and other weights lie at the top."""

    def change(folder: Path) -> None:
        listed = json.loads((folder / "modules.json").read_text())
        listed[0]["path"] = "0_Transformer"
        write_json(folder / "modules.json", listed)
        (folder / "0_Transformer").mkdir()
        (folder / "0_Transformer" / "model.safetensors").write_text(text)

    return change


BY_MODULE: dict[str, tuple[Change, Change]] = {
    "prompts are left out of the mean": (
        changes("1_Pooling/config.json", json.dumps(POOLING | {"include_prompt": True})),
        changes("1_Pooling/config.json", json.dumps(POOLING | {"include_prompt": False})),
    ),
    "a bias or none": (
        changes("2_Dense/config.json", '{"bias": false}'), changes("2_Dense/config.json", "{}"),
    ),
    "another route": (
        with_module("Router", {"router_config.json": "1", "query/0/config.json": "{}"}),
        with_module("Router", {"router_config.json": "2", "query/0/config.json": "{}"}),
    ),
    "other weights of a route": (
        with_module("Router", {"query/0/model.safetensors": "1"}),
        with_module("Router", {"query/0/model.safetensors": "2"}),
    ),
    "other strides": (
        with_module("CNN", {"cnn_config.json": "1"}), with_module("CNN", {"cnn_config.json": "2"}),
    ),
    "fewer layers": (
        changes("sentence_bert_config.json", '{"max_seq_length": 9}'),
        changes("sentence_bert_config.json", '{"max_seq_length": 8, "config_args": {"num_hidden_layers": 1}}'),
    ),
    "the module after many": (many_modules('{"bias": false}'), many_modules('{"bias": true}')),
    "another transformer": (elsewhere("1"), elsewhere("2")),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_MODULE)
def test_modules_that_compute_something_else_are_never_passed_over(
    name: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    for folder, change in zip(pair, BY_MODULE[name], strict=True):
        change(folder)
    for a, b in (pair, pair[::-1]):
        assert ws.same(a, b).verdict == "undecided"
    original = tmp_path / "a.id.json"
    made = run("id", pair[0], "--out", original)
    assert run("same", original, pair[1]).exit_code == 4 or (made.exit_code == 2 and is_one_line(made))


def test_settings_of_texts_and_what_newer_versions_write_are_no_difference(pair: tuple[Path, Path]) -> None:
    more = {"include_prompt": True, "pooling_mode_lasttoken": False, "pooling_mode_weightedmean_tokens": False}
    write_json(pair[1] / "1_Pooling" / "config.json", POOLING | more)
    (pair[1] / "sentence_bert_config.json").write_text('{"max_seq_length": 8, "do_lower_case": false}')
    assert ws.same(*pair).verdict == "same bytes"


OTHER_WEIGHTS = {"weights": lambda folder: write_dense(folder, -1.0)}


@pytest.mark.parametrize("name", DECIDING | OTHER_WEIGHTS)
def test_an_identity_knows_the_files_that_decide(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    for folder in pair:
        names_own_code(folder)
    original, kept = tmp_path / "a.id.json", ["same", tmp_path / "a.id.json", pair[1]]
    assert run("id", pair[0], "--out", original).exit_code == run(*kept).exit_code == 0
    (DECIDING | OTHER_WEIGHTS)[name](pair[1])
    assert run(*kept).exit_code == 4
    assert ws.identity(pair[1]).wsid == ws.identity(pair[0]).wsid


def test_a_gguf_file_has_no_modules_that_could_differ(pair: tuple[Path, Path]) -> None:
    for folder in pair:
        (folder / "modeling_own.py").unlink()
    original = ws.identity(pair[0])
    copy = replace(original, container="gguf", files={})
    assert [each.file for each in compare_files(original, copy).deciding] == []
    assert len(compare_files(original, replace(copy, container="safetensors")).deciding) == 4


def test_code_in_one_of_them_alone_leaves_the_verdict_undecided(pair: tuple[Path, Path]) -> None:
    config = json.loads((pair[1] / "config.json").read_text())
    del config["auto_map"]
    write_json(pair[1] / "config.json", config)
    assert ws.same(*pair).verdict == ws.same(*pair[::-1]).verdict == "undecided"


def large(last: str) -> Change:
    """Code of more bytes than are read, which differs at its end."""
    return changes("modeling_own.py", f"{'# ' * 8_000_000}\n{last}\n")


UNREAD: dict[str, tuple[str, Change, Change]] = {
    "code of 16 MB": ("modeling_own.py was not compared", large("x = 1"), large("x = 2")),
    "code behind 100 names": (
        "more than 100 files are named",
        *(changes("modeling_own.py", "".join(f"from .layers_{i} import x\n" for i in range(150))),) * 2,
    ),
    "code behind a carriage return": (
        "layers_own.py differs",
        *(lambda folder, x=x: ((folder / "modeling_own.py").write_bytes(b"x = 1\rfrom .layers_own import Own\r"),
                               (folder / "layers_own.py").write_text(x)) for x in "ab"),
    ),
    "modules that are no JSON": ("modules.json was not compared", *(changes("modules.json", each) for each in "[{")),
    "settings that are no JSON": (
        "1_Pooling/config.json was not compared", *(changes("1_Pooling/config.json", each) for each in "[{"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_deciding_file_that_neither_side_can_read_leaves_the_verdict_undecided(
    name: str, pair: tuple[Path, Path]
) -> None:
    words, *made = UNREAD[name]
    for change, folder in zip(made, pair, strict=True):
        change(folder)
    same = ws.same(*pair)
    assert same.verdict == "undecided"
    assert words in same.lead


def test_identity_of_code_that_cannot_be_read_is_refused(pair: tuple[Path, Path]) -> None:
    large("x = 1")(pair[0])
    with pytest.raises(ws.CheckpointError, match=r"has code that cannot be read \(modeling_own\.py: has more than"):
        ws.identity(pair[0])


def test_code_of_empty_lines_is_read_soon(pair: tuple[Path, Path]) -> None:
    start = time.process_time()
    for folder in pair:
        (folder / "modeling_own.py").write_text("\n" * 10**6 + "from .layers_own import Own\n")
    assert ws.same(*pair).verdict == "same bytes"
    assert time.process_time() - start < 15


def test_weights_of_a_module_are_compared_as_any_tensor(pair: tuple[Path, Path]) -> None:
    write_dense(pair[1], 1.5)
    same = ws.same(*pair)
    assert same.verdict == "different"
    assert [each.name for each in same.differing] == ["2_Dense/linear.weight"]
    (pair[1] / "2_Dense" / "model.safetensors").unlink()
    assert not ws.same(*pair).holds()


def test_pickled_weights_of_a_module_are_not_passed_over(pair: tuple[Path, Path]) -> None:
    for folder, text in zip(pair, (b"one", b"two"), strict=True):
        (folder / "2_Dense" / "model.safetensors").unlink()
        (folder / "2_Dense" / "pytorch_model.bin").write_bytes(text)
    assert ws.same(*pair).verdict == "undecided"
    (pair[1] / "2_Dense" / "pytorch_model.bin").write_bytes(b"one")
    assert ws.same(*pair).verdict == "same bytes"


def test_weights_of_a_module_pickled_on_one_side_are_not_called_dropped(pair: tuple[Path, Path]) -> None:
    (pair[1] / "2_Dense" / "model.safetensors").unlink()
    (pair[1] / "2_Dense" / "pytorch_model.bin").write_bytes(b"one")
    for a, b in (pair, pair[::-1]):
        same = ws.same(a, b)
        assert same.verdict == "undecided"
        assert not same.differing


def names_own_code(folder: Path) -> None:
    """The transformer is a class of code next to the weights, as in jina-embeddings-v3."""
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["type"] = "custom_st.Transformer"
    write_json(folder / "modules.json", listed)
    (folder / "custom_st.py").write_text("from .layers_st import Own\nclass Transformer: pass\n")
    (folder / "layers_st.py").write_text("class Own: pass\n")


@pytest.mark.parametrize("name", ["custom_st.py", "layers_st.py"])
def test_code_behind_modules_that_differs_leaves_the_verdict_undecided(name: str, pair: tuple[Path, Path]) -> None:
    for folder in pair:
        names_own_code(folder)
    assert ws.same(*pair).verdict == "same bytes"
    (pair[1] / name).write_text("class Own: x = 1\n")
    for a, b in (pair, pair[::-1]):
        same = ws.same(a, b)
        assert same.verdict == "undecided"
        assert f"{name} differs" in same.lead
        assert "code behind modules.json" in same.lead


def test_own_class_of_a_module_is_not_the_library_class_of_its_name(pair: tuple[Path, Path]) -> None:
    names_own_code(pair[1])
    for a, b in (pair, pair[::-1]):
        same = ws.same(a, b)
        assert same.verdict == "undecided"
        assert "custom_st.Transformer" in same.lead


@pytest.mark.parametrize(
    ("name", "text"), [("generation_config.json", '{"max_length": 5}'), ("chat_template.jinja", "no")]
)
def test_templates_are_named_and_leave_the_verdict(name: str, text: str, pair: tuple[Path, Path]) -> None:
    (pair[1] / name).write_text(text)
    result = run("same", *pair)
    assert result.exit_code == 0
    assert f"{name} differs" in result.stdout
    assert ws.same(*pair).verdict == "same bytes"
    (pair[1] / name).unlink()
    assert f"{name} differs (only in A)" in run("same", *pair).stdout


def test_another_writer_of_the_same_settings_is_not_named(pair: tuple[Path, Path]) -> None:
    write_json(pair[1] / "generation_config.json", {"transformers_version": "5.0.0", "max_length": 20})
    write_json(
        pair[1] / "1_Pooling" / "config.json", POOLING | {"pooling_mode_max_tokens": False, "include_prompt": True}
    )
    (pair[1] / "example.py").write_text("print(2)\n")
    assert ws.same(*pair).as_json()["files"] == []


def test_the_transformer_alone_is_compared_where_one_lacks_modules(pair: tuple[Path, Path]) -> None:
    (pair[1] / "modules.json").unlink()
    result = run("same", *pair)
    assert result.exit_code == 0
    assert "modules.json is only in A" in result.stdout


def a_folder_for_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").mkdir()


HOSTILE: dict[str, Change] = {
    "modules that are no list": changes("modules.json", '{"a": 1}'),
    "modules that are no objects": changes("modules.json", '[1, null, "x"]'),
    "modules that are no JSON": changes("modules.json", "[[["),
    "a module outside": changes("modules.json", '[{"path": "../../etc", "type": "a.Dense"}]'),
    "a module at the root": changes("modules.json", '[{"path": "/etc", "type": "a.Dense"}]'),
    "a module of a long name": changes("modules.json", json.dumps([{"path": "x" * 5000, "type": "a.Dense"}])),
    "a module of no text": changes("modules.json", '[{"path": 3, "type": {}}, {"path": "\\u0000", "type": "Dense"}]'),
    "a million modules": changes("modules.json", "[" + ",".join(['{"path":"x","type":"y"}'] * 20_000) + "]"),
    "settings that are no JSON": changes("1_Pooling/config.json", "\x00"),
    "settings that nest": changes("1_Pooling/config.json", '{"a":' * 900 + "1" + "}" * 900),
    "a module cut short": changes("2_Dense/model.safetensors", "short"),
    "code that imports itself": changes("modeling_own.py", "from .modeling_own import x\nfrom .missing import y\n"),
    "a template that is a folder": a_folder_for_a_template,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_beside_end_in_a_verdict_or_one_line(name: str, pair: tuple[Path, Path]) -> None:
    HOSTILE[name](pair[1])
    for a, b in (pair, pair[::-1], (pair[1], pair[1])):
        result = run("same", a, b)
        assert result.exit_code in (0, 2, 3, 4)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert result.exit_code != 2 or is_one_line(result), result.output


@pytest.mark.parametrize(
    "value", [3, [], {"AutoModel": None}, {"AutoModel": ["../../x.Y", 3]}, {"A": "x" * 10_000 + ".Y"}]
)
def test_an_auto_map_of_any_kind_ends_in_a_verdict(value: object, pair: tuple[Path, Path]) -> None:
    for folder in pair:
        config = json.loads((folder / "config.json").read_text()) | {"auto_map": value}
        write_json(folder / "config.json", config)
    result = run("same", *pair)
    assert result.exit_code == 0, result.output
