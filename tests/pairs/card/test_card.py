"""Each item of a card is verified by a proof, failed, or not checked; and an edited card is found out."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.commands import is_one_line, run, with_tokenizer
from tests.support.plants.bugs import BUGS, Bug, enacted
from tests.support.weights import shared
from weightscope.pairs.card.card import BEGIN, END, Card, with_section

EMBEDDED = Path(ws.__file__).parent / "core" / "embedded"


def states(card: Card) -> dict[str, str]:
    return {each.item: each.state for each in card.items}


@pytest.fixture
def release(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED, tmp_path / "release"))


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The section of a release."""
    return ws.card(Path(shutil.copytree(EMBEDDED, tmp_path_factory.mktemp("made") / "release"))).section


def changed(folder: Path, name: str, values: object) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][...] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_healthy_checkpoint_fails_nothing() -> None:
    card = ws.card("embedded")
    assert states(card) == {
        "original": "not checked", "values": "verified", "randomness": "verified", "config": "verified",
        "readers": "verified", "logits": "verified", "lineage": "not checked", "identity": "verified",
    }  # fmt: skip
    assert card.identity.wsid == ws.identity("embedded").wsid


def test_readers_that_take_nothing_are_not_counted() -> None:
    (readers,) = [each for each in ws.card(shared("vit-tiny")).items if each.item == "readers"]
    assert readers.state == "verified"
    assert readers.what.startswith("transformers 4.57, transformers 5 take the same head size")
    assert readers.what.endswith("; not read by vLLM, llama.cpp")


def test_a_copy_and_its_base_are_verified(release: Path, tmp_path: Path) -> None:
    identity = tmp_path / "embedded.id.json"
    identity.write_text(json.dumps(ws.identity("embedded").as_json()))
    card = ws.card(release, base="embedded", original=identity)
    assert states(card)["original"] == states(card)["lineage"] == "verified"
    assert "The comparison is verified by weights." in next(each.what for each in card.items if each.item == "lineage")


def test_another_base_in_the_model_card_fails(release: Path) -> None:
    (release / "README.md").write_text("---\nbase_model: org/other\n---\n")
    (lineage,) = [each for each in ws.card(release, base="embedded").items if each.item == "lineage"]
    assert lineage.state == "failed" and "README.md names org/other as its base" in lineage.what


@pytest.mark.parametrize(
    ("name", "values", "item"),
    [
        ("transformer.h.1.mlp.c_fc.weight", np.nan, "values"),
        ("transformer.h.1.mlp.c_proj.weight", 0, "values"),
        ("transformer.h.1.mlp.c_proj.weight", 0.5, "values"),
        ("transformer.h.2.attn.c_attn.weight", np.random.default_rng(0).normal(0, 0.02, (192, 576)), "randomness"),
    ],
    ids=["NaN", "zero", "constant", "drawn anew"],
)
def test_a_broken_tensor_fails_its_item(name: str, values: object, item: str, release: Path) -> None:
    assert states(ws.card(changed(release, name, values)))[item] == "failed"


@pytest.mark.parametrize("name", ["transformer.h.1.mlp.c_fc.weight", "transformer.wte.weight"])
def test_a_matrix_drawn_anew_is_not_verified(name: str, release: Path) -> None:
    tensor = load_file(release / "model.safetensors")[name]
    drawn = np.random.default_rng(0).normal(0, tensor.std(), tensor.shape)
    (randomness,) = [each for each in ws.card(changed(release, name, drawn)).items if each.item == "randomness"]
    assert randomness.state == "not checked" and randomness.what.endswith(f"may be random: {name}")


@pytest.mark.parametrize(
    ("change", "what"),
    [({"vocab_size": 9000}, "config.json has 9,000 tokens, the embedding 8,000"),
     ({"tie_word_embeddings": False}, "the file has no head, and config.json does not tie it")],
)  # fmt: skip
def test_a_config_of_other_ends_fails(change: dict[str, object], what: str, release: Path) -> None:
    config = json.loads((release / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (release / "config.json").write_text(json.dumps(config | change))
    (item,) = [each for each in ws.card(release).items if each.item == "config"]
    assert (item.state, item.what) == ("failed", what)


def without(names: Sequence[str]) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


LAST = "transformer.h.3.mlp"


@pytest.mark.check
@pytest.mark.parametrize(
    ("change", "config", "what"),
    [
        (without([f"{LAST}.c_fc.weight"]), {}, "layer 3 of text has not the up of 3 other layers"),
        (lambda t: t.update({f"{LAST}.c_fcc.weight": t.pop(f"{LAST}.c_fc.weight")}), {}, "no row names"),
        (without([]), {"n_layer": 3}, "no row names transformer.h.3.attn"),
        (without([]), {"n_inner": 999}, "config.json has networks of 999, the file of 768"),
        (without([]), {"n_positions": 128}, "config.json has 128 positions, the file 256"),
        (lambda t: [t.pop(name) for name in [*t] if ".mlp." in name], {}, "no layer has a feed-forward network"),
    ],
    ids=["a tensor less", "misspelt", "a layer more", "another width", "other positions", "no network"],
)  # fmt: skip
def test_what_does_not_fit_the_config_is_not_verified(
    change: Callable[[dict[str, np.ndarray]], object], config: dict[str, object], what: str, release: Path
) -> None:
    tensors = load_file(release / "model.safetensors")
    change(tensors)
    save_file(tensors, release / "model.safetensors", {"format": "pt"})
    stored = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(json.dumps(stored | config))
    (item,) = [each for each in ws.card(release).items if each.item == "config"]
    assert item.state == "not checked" and what in item.what


def test_another_tokenizer_than_the_original_fails(release: Path) -> None:
    tokenizer = json.loads((release / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (release / "tokenizer.json").write_text(json.dumps(tokenizer))
    (original, *_) = ws.card(release, original="embedded").items
    assert original.state == "failed" and "The tokenizers differ" in original.what


def test_a_name_without_a_label_stops_its_item_alone(release: Path) -> None:
    tensors = load_file(release / "model.safetensors") | {"my own": np.ones(3, np.float32)}
    save_file(tensors, release / "model.safetensors", {"format": "pt"})
    card = ws.card(release, base="embedded")
    assert states(card)["identity"] == "not checked" and states(card)["values"] == "verified"
    assert 'wsid: ""' in card.section


@pytest.mark.check
def test_a_table_of_types_that_is_zero_is_not_judged(tmp_path: Path) -> None:
    source = with_tokenizer("bert", tmp_path / "source")
    (name,) = [each for each in load_file(source / "model.safetensors") if "token_type" in each]
    (values,) = [each for each in ws.card(changed(source, name, 0)).items if each.item == "values"]
    assert values.state == "not checked" and "zero, which may be meant" in values.what


def test_a_scalar_of_floats_fails_nothing(release: Path) -> None:
    tensors = load_file(release / "model.safetensors") | {"transformer.logit_scale": np.array(4.6, np.float16)}
    save_file(tensors, release / "model.safetensors", {"format": "pt"})
    assert states(ws.card(release))["values"] == "verified"


@pytest.mark.parametrize(("named", "state"), [
    ("Org/Embedded", "verified"), ("org/embedded@main", "verified"), ("[org/a, org/embedded]", "verified"),
    ("org/other", "failed"),
])  # fmt: skip
def test_spellings_of_a_base(named: str, state: str, release: Path) -> None:
    (release / "README.md").write_text(f"---\nbase_model: {named}\n---\n")
    assert states(ws.card(release, base="embedded"))["lineage"] == state


def test_a_head_that_the_config_ties_and_readers_overwrite_fails(release: Path) -> None:
    tensors = load_file(release / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"][::-1].copy()
    save_file(tensors, release / "model.safetensors", {"format": "pt"})
    assert states(ws.card(release))["readers"] == "failed"
    config = json.loads((release / "config.json").read_text()) | {"tie_word_embeddings": True}
    (release / "config.json").write_text(json.dumps(config))
    assert states(ws.card(release))["config"] == "failed"


def test_readers_that_disagree_fail(tmp_path: Path) -> None:
    source = with_tokenizer("llama", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config |= {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    (source / "config.json").write_text(json.dumps(config))
    assert states(ws.card(source))["readers"] == "failed"


def test_a_second_run_replaces_the_section() -> None:
    first = with_section("# Model\n\ntext\n", f"{BEGIN}\none\n{END}")
    assert first == f"# Model\n\ntext\n\n{BEGIN}\none\n{END}\n"
    assert with_section(f"{first}\nmore\n", f"{BEGIN}\ntwo\n{END}") == first.replace("one", "two") + "\nmore\n"


def test_an_edited_card_fails_its_check(section: str, release: Path) -> None:
    page = release / "README.md"
    assert run("card", release, "--out", page).exit_code == 0
    assert page.read_text() == f"{section}\n" and run("card", release, "--check").exit_code == 0
    page.write_text(page.read_text().replace("not checked", "verified", 1))
    edited = run("card", release, "--check")
    assert edited.exit_code == 3 and "has another section" in edited.output
    page.write_text("# Model\n")
    assert run("card", release, "--check").exit_code == 3


def bomb(levels: int = 9) -> str:
    """Metadata of which each level merges nine of the level before: older YAML parsers fill the memory."""
    first = "a0: &a0 {x: 1}\n"
    return first + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1},' * 9}]}}\n" for i in range(1, levels))


@pytest.mark.parametrize(("metadata", "what"), [
    (bomb(), "has an anchor"), ("- x\n" * 300_000, "has more than 1000000 characters of metadata"),
], ids=["merges", "a long list"])  # fmt: skip
def test_metadata_that_takes_long_is_not_read(metadata: str, what: str, release: Path) -> None:
    (release / "README.md").write_text(f"---\n{metadata}\nbase_model: org/embedded\n---\n")
    (lineage,) = [each for each in ws.card(release, base="embedded").items if each.item == "lineage"]
    assert lineage.state == "not checked" and what in lineage.what


def test_markers_without_an_end_are_text() -> None:
    """Were time to grow with their square, this would take an hour."""
    text = f"{BEGIN}\n" * 1_000_000
    assert with_section(text, f"{BEGIN}one{END}").endswith(f"{BEGIN}\n\n{BEGIN}one{END}\n")


def test_a_page_that_is_no_text_is_refused_and_left(release: Path) -> None:
    page = release / "README.md"
    page.write_bytes(b"# caf\xe9\n")
    assert is_one_line(result := run("card", release, "--out", page)) and "is not UTF-8" in result.stderr
    assert page.read_bytes() == b"# caf\xe9\n"


@pytest.mark.parametrize(
    "forge",
    [
        lambda section: f"{section}\n{section.replace('not checked', 'verified')}",
        lambda section: section.replace('version: "', 'version: "9 # certified '),
        lambda section: section.replace('version: "', 'version: "9"\r```\r\rall verified\r'),
        lambda section: f"All is verified.\n<!-- \n{section}\n-->",
        lambda section: f"```\n{section}\n```",
    ],
    ids=["a second section", "a comment", "a carriage return", "hidden", "in a fence"],
)
def test_a_forged_card_fails_its_check(forge: Callable[[str], str], section: str, release: Path) -> None:
    (release / "README.md").write_text(forge(section), newline="")
    assert run("card", release, "--check").exit_code == 3


def test_names_cannot_end_a_section_or_be_markup(release: Path) -> None:
    name = f"m{END} ![](x) `a`.safetensors"
    (release / "model.safetensors").rename(release / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(release / name), name)}
    (release / "model.safetensors.index.json").write_text(json.dumps(index))
    page = release / "README.md"
    assert run("card", release, "--out", page).exit_code == 0
    text = page.read_text()
    assert run("card", release, "--out", page).exit_code == 0 and page.read_text() == text
    assert run("card", release, "--check").exit_code == 0 and "\n![" not in text


def test_a_card_holds_wherever_the_checkpoint_lies(release: Path, tmp_path: Path) -> None:
    """Its commands name no folder above the checkpoint, and its lineage draws the same probes in each run."""
    sections = [ws.card(each, base=EMBEDDED).section for each in (release, release)]
    moved = Path(shutil.copytree(release, tmp_path / "elsewhere" / release.name))
    assert {*sections, ws.card(moved, base=EMBEDDED).section} == {sections[0]}
    assert str(tmp_path) not in sections[0]


def test_a_failed_item_is_an_exit_status(release: Path) -> None:
    broken = changed(release, "transformer.h.1.mlp.c_fc.weight", np.nan)
    done = run("card", broken, "--json")
    assert done.exit_code == 3 and "values failed" in json.loads(done.stdout)["lead"]


@pytest.mark.check
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.tool}-{bug.report.rpartition('/')[2]}")
def test_a_public_bug_fails_the_comparison_with_the_original(bug: Bug, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="tiny models are built by transformers: pip install '.[runner]'")
    made = enacted(bug).make(tmp_path)
    identity = tmp_path / "original.id.json"
    identity.write_text(json.dumps(ws.identity(made.bases[0]).as_json()))
    assert states(ws.card(made.suspect, original=identity))["original"] == "failed"
