"""`weightscope circuits` and ws.circuits: files, page and what they say."""

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import weightscope as ws
from tests.support.bigram_counts import embedded_counts
from tests.support.browser import Page
from tests.support.tiny_models import fixture
from tests.support.two_layers import TWO_LAYERS
from tests.support.weights import shared
from weightscope.cli import main
from weightscope.core.files import REPORT, Files
from weightscope.heads.circuits.circuits import PARALLEL, channel_tokens, channels, read_by
from weightscope.heads.circuits.figures import KIND_COLOURS, ROLE_COLOURS, UNNAMED
from weightscope.heads.circuits.names import GIVEN, SAMPLED
from weightscope.heads.circuits.page import MEANINGS
from weightscope.heads.circuits.passes import wiring
from weightscope.heads.circuits.wiring import strongest
from weightscope.model.text.tokenizer import Tokenizer, token_names

FILES = {"wiring.npz", "edges.csv", "roles.csv", "circuits.png", "circuits.svg", *REPORT}


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["circuits", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_writes_wiring_edges_roles_a_figure_and_a_page(tmp_path: Path) -> None:
    status, printed = run(TWO_LAYERS, "--out", tmp_path, "--top", 5)
    assert status == 0, printed
    assert printed.splitlines()[-1] == str(tmp_path / "report.html")
    assert printed.startswith("16 heads in 2 layers, 0 of them named from the weights alone. Strongest link by keys:")
    assert "like a" not in printed + (tmp_path / "report.html").read_text()
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == FILES
    edges = list(csv.DictReader(io.StringIO((tmp_path / "edges.csv").read_text())))
    assert [row["rank"] for row in edges] == ["1", "2", "3", "4", "5"] * 6
    assert {(row["kind"], row["ranked_by"]) for row in edges} == {(k, m) for k in "qkv" for m in ("pk", "cs")}
    roles = list(csv.DictReader(io.StringIO((tmp_path / "roles.csv").read_text())))
    assert len(roles) == 16
    with np.load(tmp_path / "wiring.npz") as arrays:
        assert arrays["pk_ok"].shape == (2, 8, 2, 8)


def test_python_gives_the_same_without_a_folder(two_layers: ws.Model) -> None:
    circuits = ws.circuits(two_layers, top=5)
    assert len(circuits.heads) == 16 and len(circuits.edges) == 30
    assert "<table" in circuits._repr_html_()
    files = Files()
    circuits.write_files(files)
    assert set(files.contents) == FILES
    assert circuits.plot().axes


SAME_STREAM = {  # what config.json is changed to, and whether attention and network then read the same stream
    "codegen": ({}, True),
    "falcon_multi_query": ({"parallel_attn": False}, False),
    "gpt_neox": ({"use_parallel_residual": False}, False),
    "stablelm": ({"use_parallel_residual": True}, True),
    "cohere": ({}, True),
}


@pytest.mark.parametrize("name", SAME_STREAM)
def test_the_config_decides_whether_a_network_reads_the_same_stream_as_attention(name: str, tmp_path: Path) -> None:
    config, same = SAME_STREAM[name]
    shutil.copytree(fixture(name).folder, tmp_path / name)
    path = tmp_path / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert (PARALLEL in ws.circuits(ws.open_model(tmp_path / name)).caveats) is same


def test_layers_can_be_chosen_and_have_to_be_attention(tmp_path: Path) -> None:
    assert run(TWO_LAYERS, "--out", tmp_path, "--layers", "1")[0] == 0
    status, printed = run(TWO_LAYERS, "--out", tmp_path, "--layers", "0,7")
    assert status == 2 and "no layer 7: the model has 2" in printed


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gptj", "vit"])
def test_families_of_every_kind_give_all_files(name: str, tmp_path: Path) -> None:
    circuits = ws.circuits(fixture(name).model)
    circuits.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == FILES


def test_heads_that_share_a_key_value_head_stand_once_among_the_edges() -> None:
    model = fixture("llama").model
    wired = wiring(model)
    shared_by = wired.n_heads // wired.n_kv_heads
    pairs = [edge.pair for edge in strongest(wired, "k", "pk", 1000)]
    assert len(pairs) == wired.n_heads * wired.n_kv_heads  # of two layers
    assert len({(i, a, j, b // shared_by) for i, a, j, b in pairs}) == len(pairs)


def test_every_name_has_a_colour_of_its_own_which_no_line_has() -> None:
    assert set(GIVEN) == set(ROLE_COLOURS) == set(MEANINGS)
    colours = [*ROLE_COLOURS.values(), UNNAMED, *KIND_COLOURS.values()]
    assert len(set(colours)) == len(colours)


def test_a_channel_is_the_first_singular_direction_of_what_passes_between_two_heads(two_layers: ws.Model) -> None:
    wired = wiring(two_layers)
    edge = strongest(wired, "k", "pk", 1)[0]
    (channel,) = channels(two_layers, wired, [edge])
    a, b = two_layers.layer(0).head(edge.a), two_layers.layer(1).head(edge.b)
    left, s, _ = np.linalg.svd(a.vo.dense().astype(np.float64) @ b.qk.dense().T)
    passed = left[:, 0] @ a.vo.dense()
    assert channel.space.shape == (256, 1)
    assert abs(channel.space[:, 0] @ passed) / np.linalg.norm(passed) == pytest.approx(1, abs=1e-5)
    assert channel.share == pytest.approx(s[0] ** 2 / (s**2).sum(), rel=1e-5)
    (tokens,) = channel_tokens(two_layers, [channel.space])
    raised, lowered = (side.split(" ") for side in tokens.split(" | "))
    logits = np.concatenate([rows for _, rows in two_layers.unembedding.blocks()]) @ channel.space[:, 0]
    name = token_names(Tokenizer.at_hand(two_layers))
    assert tokens.startswith(repr(name(int(logits.argmax())))) and len(raised) >= 5 <= len(lowered)


@pytest.mark.check
def test_bigram_counts_name_detokenization_heads(two_layers: ws.Model, tmp_path: Path) -> None:
    embedded_counts().save(tmp_path / "counts.npz")
    circuits = ws.circuits(two_layers, counts=tmp_path / "counts.npz")
    scores = circuits.roles.scores["detokenization"]
    specific = ws.bigram_auroc(two_layers, embedded_counts()).heads["auroc_specific"]
    np.testing.assert_allclose(scores[0], specific)
    assert scores[0].argmax() == 6 and np.isnan(scores[1]).all()
    assert circuits.named["detokenization"].count("0.6") == 1 and "0.5" not in circuits.named["detokenization"]
    place = circuits.named["detokenization"].index("0.6")
    assert circuits.scores_of("detokenization")[place] == f"{scores[0, 6]:.2f}"
    files = Files()
    circuits.write_files(files)
    assert f'data-head="0.6">0.6</button> <small>{scores[0, 6]:.2f}</small>' in files.contents["report.html"].decode()


def test_scores_of_sampled_tokens_have_intervals(two_layers: ws.Model) -> None:
    table = ws.circuits(two_layers).heads
    for name in SAMPLED:
        known = np.isfinite(table[name])
        low, middle, high = (table[column][known] for column in (f"{name}_low", name, f"{name}_high"))
        assert known.any() and (low <= middle).all() and (middle <= high).all() and (low < high).any()


@pytest.mark.check
def test_gpt2_s_heads_are_named_by_their_wiring() -> None:
    """4.11 is the best known previous-token head, which induction heads read; the five are the strongest of those."""
    circuits = ws.circuits(ws.open_model(shared("gpt2-attention")))
    assert circuits.named["feeds keys"] == ["4.11"]
    assert {"5.1", "5.5", "6.9", "7.2", "7.10"} <= set(circuits.named["keys read a head"])
    assert "induction" not in circuits.named
    assert "4.7" in circuits.named["identity"]


@pytest.mark.check
def test_as_many_heads_are_drawn_as_in_the_paper() -> None:
    """The 20 largest values of each kind, of the weights as they are stored: no norm folded (its Fig. 1)."""
    model = ws.open_model(shared("gpt2-attention"))
    bare = replace(model.reading.settings, family=model.family.but(norms__before=None))
    model.reading = replace(model.reading, settings=bare)
    wired = wiring(model)
    for measure, labelled, unlabelled in (("pk", 24, 28), ("cs", 16, 30)):
        drawn = set()
        for scores in getattr(wired, measure).values():
            largest = np.argsort(-np.nan_to_num(scores, nan=-np.inf).ravel())[:20]
            i, a, j, b = np.unravel_index(largest, scores.shape)
            drawn |= {*zip(i, a, strict=True), *zip(j, b, strict=True)}
        assert len(drawn) == labelled + unlabelled


def test_a_page_without_names_has_no_empty_table(tmp_path: Path) -> None:
    circuits = ws.circuits(fixture("gpt2").model)
    assert not circuits.n_named
    circuits.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "No head reaches the threshold" in page and "<h2>Named heads" not in page


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_asks_for_nothing_fits_and_can_be_used_with_keys(width: int, tab: Page, tmp_path: Path) -> None:
    circuits = ws.circuits(ws.open_model(TWO_LAYERS))
    circuits.write(tmp_path)
    tab.open(tmp_path / "report.html", width)
    assert tab.complaints == [] and len(tab.requests) == 1
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run("document.querySelectorAll('#diagram circle').length") == 16
    strongest = circuits.strongest_edges["to"][0].split(" of ")[1]
    chosen = "document.getElementById('chosen').textContent"
    assert tab.run(chosen) == f"Head {strongest}" == "Head 1.5"
    tab.run("document.getElementById('diagram').focus()")
    for key in ("ArrowDown", "ArrowLeft", "ArrowUp"):
        tab.press(key)
    assert tab.run(chosen) == "Head 0.4"
    tab.press("ArrowRight")
    assert tab.run("document.querySelectorAll('#reads .head').length") > 0
    address = tab.run("location.hash")
    assert address.startswith("#L1H")
    tab.press("Escape")
    assert tab.run(chosen) == f"Head {strongest}" and tab.run("location.hash") == ""
    tab.open(tmp_path / "report.html", width, fragment=address[1:])
    assert tab.run(chosen) == f"Head 1.{address[4:]}" and tab.complaints == []


@pytest.mark.parametrize("width", [1280, 390])
def test_heads_in_tables_lead_to_their_panel_and_two_layers_fill_the_diagram(
    width: int, tab: Page, tmp_path: Path
) -> None:
    ws.circuits(TWO_LAYERS).write(tmp_path)
    tab.open(tmp_path / "report.html", width)
    drawn = "[...document.querySelectorAll('#diagram circle')].at(-1).getBoundingClientRect().right"
    assert tab.run(f"canvas.getBoundingClientRect().right - {drawn}") < 60
    for cell in ("tr:last-child td:nth-child(2)", "tr:first-child td:nth-child(1)"):
        link = f"document.querySelector('#edges tbody {cell} a')"
        for _ in range(2):  # again, after another head was chosen
            tab.run(f"{link}.click()")
            tab.settle()
            head = tab.run(f"{link}.textContent").rpartition(" ")[2]
            assert tab.run("document.getElementById('chosen').textContent") == f"Head {head}"
            assert abs(tab.run("document.getElementById('wiring').getBoundingClientRect().top")) < 2
            tab.run("document.getElementById('diagram').focus()")
            tab.press("Escape")
    assert tab.complaints == []


@pytest.mark.check
def test_the_diagram_fits_or_scrolls_in_its_own_box(tab: Page, tmp_path: Path) -> None:
    ws.circuits(fixture("gpt2").model).write(tmp_path / "few")
    ws.circuits(ws.open_model(shared("gpt2-attention")), top=5).write(tmp_path / "many")
    for name, scrolls in (("few", False), ("many", True)):
        tab.open(tmp_path / name / "report.html", 390)
        tab.settle()
        assert tab.run("canvas.scrollWidth > canvas.clientWidth") is scrolls
        assert tab.run("document.querySelector('#wiring .hint').checkVisibility()") is scrolls
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_lists_the_strongest_edges_in_few_columns_with_words(two_layers: ws.Model) -> None:
    circuits = ws.circuits(two_layers)
    shown = circuits.strongest_edges
    assert len(shown) == 20 and len(shown.columns) == 6
    assert list(shown["pk_z"]) == sorted(circuits.edges["pk_z"][circuits.edges["ranked_by"] == "pk"])[::-1][:20]
    row = circuits.edges.where(circuits.edges["ranked_by"] == "pk").sort("pk_z", descending=True).records()[0]
    assert shown["to"][0].startswith(f"values of {row['to_layer']}.{row['to_head']}") and row["kind"] == "v"
    assert shown["of"][0] == 32 and not any("_" in column.heading for column in shown.columns)
    assert not len(ws.circuits(two_layers, layers=[0]).strongest_edges)


def test_names_in_a_hostile_checkpoint_s_path_are_text(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x>"
    folder.mkdir()
    source = fixture("gpt2").folder
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    ws.circuits(ws.open_model(folder)).write(tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<img src=x>" not in text and "&lt;img src=x&gt;" in text
    json.loads(text.split('id="facts">')[1].split("</script>")[0])


def test_the_strongest_link_stands_beside_what_random_spaces_share(two_layers: ws.Model) -> None:
    """Two random spaces of 32 of 255 dimensions (a LayerNorm takes one of 256) share 32^2 / 255 dimensions."""
    circuits = ws.circuits(two_layers)
    assert f"of the 32 dimensions that head 0.1 writes (random spaces: {32 * 32 / 255:.1f})" in circuits.lead


@pytest.mark.parametrize("loops", [{"num_loops": 3}, {"num_loops": 1, "loop_loss_weights": [0.5, 0.5]}])
def test_passes_of_a_looped_model_are_named(loops: dict[str, object], tmp_path: Path) -> None:
    """Layers that run three times: an earlier head reads a later one in the next pass."""
    folder = shutil.copytree(fixture("llama").folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "nanbeige", "architectures": None, **loops}
    (folder / "config.json").write_text(json.dumps(config))
    model = ws.open_model(folder)
    assert model.config.loops == 3
    (sentence,) = (note for note in model.notes if "run 3 times" in note)
    assert "passes after the first" in sentence
    circuits = ws.circuits(model, top=2)
    for result in (circuits, ws.audit(model), ws.compare(model, model)):
        assert sentence in result.caveats
    assert read_by(model, "1.0").caption == "Components of earlier heads that 1.0 reads most, in one pass."


def test_passes_of_an_unlooped_model_are_not(two_layers: ws.Model) -> None:
    assert two_layers.config.loops == 1
    assert not any("passes after" in caveat for caveat in ws.circuits(two_layers, top=2).caveats)
