"""`import weightscope as ws`: every name is there, cheaply, whatever was imported before."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.bigram_counts import embedded_counts
from tests.support.tiny_models import fixture
from tests.support.two_layers import TWO_LAYERS

HEAVY = ("numpy", "scipy", "matplotlib", "torch", "transformers", "pandas", "sklearn", "cupy", "numba")


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_nothing_heavy_and_takes_no_time() -> None:
    code = "import sys, time; t = time.perf_counter(); import weightscope; print(time.perf_counter() - t, *sys.modules)"
    seconds, *modules = python(code).split()
    assert not set(HEAVY) & set(modules)
    assert float(seconds) < 0.3


@pytest.mark.parametrize("name", ws.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>>" in getattr(ws, name).__doc__
    assert name in dir(ws)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'weightscope' has no attribute 'nothing'"):
        ws.nothing  # noqa: B018


@pytest.mark.check
def test_a_room_of_the_same_name_hides_no_function() -> None:
    """Each is called twice, before and after every submodule is imported."""
    code = """
import pkgutil
from importlib import import_module
import weightscope as ws
def call():
    model = ws.open_model("embedded")
    print(len(ws.audit(model).heads), len(ws.compare(model, model).heads), len(ws.circuits(model).heads))
    print(ws.lineage(model, model).verdict)
call()
for module in pkgutil.walk_packages(ws.__path__, "weightscope."):
    if not module.name.endswith("__main__"):
        import_module(module.name)
assert all(callable(getattr(ws, name)) for name in ws.__all__)
call()
"""
    assert python(code).splitlines() == ["24 24 24", "related"] * 2


def test_the_lines_that_a_newcomer_types(tmp_path: Path) -> None:
    model = ws.open_model(TWO_LAYERS)
    assert [layer.index for layer in model.layers] == list(model.attention_layers)
    assert repr(model.head(1, 5)) == repr(model.layer(1).head(5))
    assert len(model.layers[:1]) == 1 and model.layers[-1].index == len(model.layers) - 1
    head = model.layers[0].heads[6]
    assert repr(head) == repr(model.layer(0).head(6))
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        assert np.array_equal(getattr(head, name), getattr(head, name.lower()))
    d, r = head.w_q.shape
    assert head.w_k.shape == head.w_v.shape == (d, r) and head.w_o.shape == (r, d) and head.b_q.shape == (r,)
    x = np.random.default_rng(0).normal(size=(3, d))
    assert (x @ head.qk).shape == (3, d) and (head.qk @ x.T).shape == (d, 3) and head.qk.T.shape == (d, d)
    assert len(head.qk.svdvals()) == r
    assert repr(head.qk) == "Factored(256 x 256, rank <= 32)"
    audit = ws.audit(model)
    assert len(audit.heads["qk_sigma1"]) == len(audit.heads.to_pandas()) == 16
    assert audit.findings
    audit.write(tmp_path)
    assert (tmp_path / "heads.csv").is_file()
    assert "<table" in audit._repr_html_()
    assert ws.compare(model, model).heads["qk_change"].max() == 0
    assert ws.bigram_auroc(model, embedded_counts(), sample=100).auroc.shape[0] == 8
    assert ws.first_layer(model).terms(7, [11, 12, 13], [0, 1, 2]).ee.shape == (3, 3)
    assert audit.plot().axes and head.plot_spectrum().axes


@pytest.mark.smoke
def test_the_line_that_runs_the_model() -> None:
    pytest.importorskip("torch")
    model, shapes = ws.open_model(TWO_LAYERS), []
    ws.open_runner(model).observe([np.array([11, 12, 13])], lambda layer: shapes.append(layer.attention.shape))
    assert shapes == [(1, 8, 3, 3)] * 2


def test_an_analysis_takes_a_models_name_as_well(two_layers: ws.Model) -> None:
    assert ws.audit(TWO_LAYERS, directions=0).heads.csv() == ws.audit(two_layers, directions=0).heads.csv()
    assert ws.compare(TWO_LAYERS, TWO_LAYERS).heads["qk_change"].max() == 0
    listed = ws.compare([TWO_LAYERS, two_layers, two_layers], labels=["a", "b", "c"])
    assert listed.labels == ws.compare(two_layers, two_layers, two_layers, labels=["a", "b", "c"]).labels
    assert repr(ws.circuits(TWO_LAYERS)) == repr(ws.circuits(two_layers))
    joined = ws.neighbours(TWO_LAYERS, "ibility", top=2, heads=[6])["joined"].tolist()
    assert joined == [" responsibility", " insensibility"]


def test_what_a_command_does_is_a_call_as_well(two_layers: ws.Model, tmp_path: Path) -> None:
    terms = ws.positions(TWO_LAYERS, query=100)
    assert terms.query == 100 and terms.heads.csv() == ws.first_layer(two_layers).positions(100).heads.csv()
    assert len(ws.positions(two_layers, unscaled=True).heads) == 8
    kernels = ws.positions(fixture("llama").model)
    assert kernels.heads.names[:2] == ["layer", "head"]
    assert ws.rank(TWO_LAYERS, "change", base=two_layers).rows == ws.rank(two_layers, "change", base=TWO_LAYERS).rows
    ws.fingerprint(TWO_LAYERS).save(tmp_path / "embedded.wsf")
    assert ws.lineage(TWO_LAYERS, tmp_path / "embedded.wsf").verdict == "related"


def test_an_atlas_takes_a_list_of_names(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `atlas`")
    (tmp_path / "list.txt").write_text("embedded\n")
    listed = ws.atlas(tmp_path / "list.txt", tmp_path / "by-file")
    assert ws.atlas(["embedded"], str(tmp_path / "by-name")).lead == listed.lead
    assert ws.atlas(("embedded",), tmp_path / "by-file", resume=True).made == 0
    assert (tmp_path / "by-name" / "index.html").is_file()
    with pytest.raises(ws.CheckpointError, match="the list names no source"):
        ws.atlas([], tmp_path / "refused")


def test_completion_shows_a_page(two_layers: ws.Model) -> None:
    """What is left out of it still answers; what users' scripts rely on is listed."""
    model = {"config", "family", "stacks", "layers", "layer", "head", "embeddings", "unembedding", "tensors", "name"}
    result = {"heads", "plot", "write", "lead", "as_json", "provenance"}
    audit = ws.audit(two_layers, directions=0)
    for thing, contract in (
        (two_layers, model),
        (audit, result | {"findings"}),
        (ws.compare(two_layers, two_layers), result),
    ):
        listed = {name for name in dir(thing) if not name.startswith("_")}
        assert contract <= listed and len(listed) < 40 and not any(name.isupper() for name in listed), sorted(listed)
    assert two_layers.prefix == "transformer." and audit.PAGE


WRONG: list[tuple[type[Exception], str, Callable[[ws.Model], object]]] = [
    (TypeError, "model is 3, of type int; expected a Model", lambda model: ws.audit(3)),
    (TypeError, "model is None", lambda model: ws.compare(model, None)),
    (TypeError, "compare takes two models or more; 1 given", lambda model: ws.compare(model)),
    (TypeError, "compare takes two models or more; 1 given", lambda model: ws.compare([model])),
    (TypeError, "model is 3", lambda model: ws.compare([model, 3])),
    (ws.CheckpointError, "no layer 2", lambda model: model.head(2, 0)),
    (ws.CheckpointError, "no head 8", lambda model: model.head(0, 8)),
    (ws.CheckpointError, "by is 'size'; it is one of snr, stable-rank", lambda model: ws.rank(model, "size")),
    (ws.CheckpointError, "has position embeddings; counts are for", lambda model: ws.positions(model, counts="c.npz")),
    (ws.CheckpointError, "scores by distance need no query", lambda model: ws.positions(fixture("llama").model, 3)),
    (TypeError, "source is None", lambda model: ws.open_model(None)),
    (TypeError, "layers is '0-1', of type str; expected a sequence", lambda model: ws.audit(model, layers="0-1")),
    (TypeError, "layers is '0-1'", lambda model: ws.circuits(model, layers="0-1")),
    (TypeError, "deltas is '0,1'", lambda model: ws.audit(model, deltas="0,1")),
    (TypeError, "layer is '0', of type str; expected a whole number", lambda model: model.layer("0")),
    (TypeError, "layer is 0.0", lambda model: model.layer(0.0)),
    (TypeError, "head is '0'", lambda model: model.layer(0).head("0")),
    (IndexError, "no index 99: there are 8 heads", lambda model: model.layer(0).heads[99]),
    (IndexError, "no index -3: there are 2 attention layers", lambda model: model.layers[-3]),
    (TypeError, "column is 0, of type int; expected a name", lambda model: ws.audit(model).heads[0]),
    (ValueError, r"x has shape \(3,\) and dtype int64; layer 0 needs numbers of shape \(tokens, 256\)",
     lambda model: model.layer(0).scores([1, 2, 3])),
    (ValueError, r"x has shape \(2, 7\)", lambda model: model.layer(0).values(np.ones((2, 7)))),
    (ValueError, r"x has shape \(2, 7\)", lambda model: model.layer(0).output(np.ones((8, 2, 2)), np.ones((2, 7)))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "work"), WRONG)
def test_an_argument_of_the_wrong_kind_is_one_line_that_says_what_is_expected(
    kind: type[Exception], message: str, work: Callable[[ws.Model], object], two_layers: ws.Model
) -> None:
    with pytest.raises(kind, match=message) as raised:
        work(two_layers)
    assert "\n" not in str(raised.value)


def test_lists_of_numbers_are_arrays(two_layers: ws.Model) -> None:
    layer, x = two_layers.layer(0), np.random.default_rng(0).normal(size=(3, 256))
    attention = np.full((8, 3, 3), 1 / 3)
    assert np.array_equal(layer.scores(x.tolist()), layer.scores(x))
    assert np.array_equal(layer.output(attention.tolist(), x.tolist()), layer.output(attention, x))


def test_numpy_makes_a_matrix_of_a_small_factored_map_and_refuses_a_large_one(two_layers: ws.Model) -> None:
    head = two_layers.layer(0).head(6)
    assert np.array_equal(np.asarray(head.qk), head.qk.dense()) and head.ov.shape == head.vo.shape
    assert np.array_equal(np.asarray(head.ov, np.float64), head.vo.dense().astype(np.float64))
    long = np.ones((5000, 1))
    with pytest.raises(TypeError, match=r"Factored\(5000 x 5000, rank <= 1\) is too large .*\.dense\(\)"):
        np.asarray(ws.Factored(long, long))


def test_only_public_names_are_listed(two_layers: ws.Model) -> None:
    assert set(dir(ws)) == {*ws.__all__, "__version__"}
    assert repr(two_layers.family) == "Family(gpt2)"
