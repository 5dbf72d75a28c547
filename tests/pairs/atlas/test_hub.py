"""An atlas of a local Hub: what is fetched, commits that change, servers that fail, and hostile repositories."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks.synthetic import Sizes, write
from tests.support.hub_server import COMMIT, Hole, Hub
from weightscope.core.engine import ThisProcess
from weightscope.model.sources import Source
from weightscope.pairs.atlas.atlas import Atlas, AtlasOptions, make_atlas
from weightscope.pairs.atlas.prints import Print, make_print

pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `atlas`")

Files = dict[str, bytes | Hole]


def files_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return files_of(write(tmp_path_factory.mktemp("tiny"), Sizes(layers=4, inner=96)))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return files_of(write(tmp_path_factory.mktemp("moved"), Sizes(layers=4, inner=96), moved=0.05))


def made(names: list[str], folder: Path, **options: object) -> Atlas:
    listing = folder / "list.txt"
    listing.write_text("".join(f"{name}\n" for name in names))
    with ThisProcess() as engine:
        return make_atlas(listing, folder / "out", engine, AtlasOptions(**({"proved": 0} | options)))


def fetched(hub: Hub) -> int:
    return sum(int(stop) - int(start) + 1 for request in hub.data_requests()
               for start, stop in [str(request.range).removeprefix("bytes=").split("-")])  # fmt: skip


def test_of_a_7b_at_most_150_mb_are_fetched(hub: Hub, tmp_path: Path) -> None:
    """A sparse file of a 7B's shape: only what is asked of it is ever made."""
    sizes = Sizes(layers=32, width=4096, heads=32, head_dim=128, kv_heads=32, vocabulary=32000, inner=11008)
    folder = write(tmp_path / "seven", sizes, holes=True)
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        length = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)
        hole = Hole(file.read(length), path.stat().st_size)
    hub.repositories["big/seven"] = {"config.json": (folder / "config.json").read_bytes(), path.name: hole}
    answer = make_print(Source.named("big/seven"))
    assert answer is not None
    arrays, size = answer
    made_print = Print.of_arrays(arrays, "big/seven")
    assert len(hole) > 13e9 and size <= 150e6 and fetched(hub) <= 150e6
    assert sorted(set(made_print.sketches.layer.tolist())) == list(range(32)) and not made_print.outline().is_whole


def test_a_later_run_fetches_no_weights_of_what_is_unchanged(
    hub: Hub, tiny: Files, moved: Files, tmp_path: Path
) -> None:
    hub.repositories |= {"a/tiny": tiny, "b/tiny": dict(tiny), "c/other": moved}
    first = made(["a/tiny", "b/tiny", "c/other"], tmp_path)
    assert first.made == 3 and first.fetched and {each.commit for each in first.outlines} == {COMMIT}
    tables = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.csv")}
    before = len(hub.requests)
    again = made(["a/tiny", "b/tiny", "c/other"], tmp_path, resume=True)
    assert again.made == again.fetched == 0
    assert [request.method for request in hub.requests[before:]] == ["HEAD"] * 3
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.csv")} == tables
    hub.push("b/tiny", moved)
    before = len(hub.requests)
    changed = made(["a/tiny", "b/tiny", "c/other"], tmp_path, resume=True)
    assert changed.made == 1 and changed.outlines[1].commit == hub.commits["b/tiny"]
    assert not any("a/tiny" in request.path and request.method == "GET" for request in hub.requests[before:])
    assert (changed.outlines[1].blocks == changed.outlines[2].blocks).all()


def test_a_push_in_the_middle_changes_nothing(
    hub: Hub, tiny: Files, moved: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["a/tiny"] = tiny
    before = make_print(Source.named("a/tiny"))
    opened = Source.open

    def open_then_push(source: Source) -> object:
        model = opened(source)
        hub.push("a/tiny", moved)
        return model

    monkeypatch.setattr(Source, "open", open_then_push)
    during = make_print(Source.named("a/tiny"))
    assert before is not None and during is not None
    assert all((during[0][name] == array).all() for name, array in before[0].items())


def test_a_server_that_fails_now_and_then_is_asked_again(hub: Hub, tiny: Files, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("weightscope.checkpoint.http.FIRST_WAIT", 0.01)
    hub.repositories["a/tiny"] = tiny
    hub.faults = ["503", "breaks off", "other range", "500"]
    atlas = made(["a/tiny"], tmp_path)
    assert not atlas.problems and not hub.faults


def test_hostile_repositories_are_one_row_each(hub: Hub, tiny: Files, tmp_path: Path) -> None:
    weights = tiny["model.safetensors"]
    assert isinstance(weights, bytes)
    config = json.loads(bytes(tiny["config.json"]))

    def with_weights(content: bytes | Hole) -> Files:
        return tiny | {"model.safetensors": content}

    script = "<script>alert(1)</script>"
    renamed = f"{script}123456".encode()  # of the same length, since the header says its own
    hostile: dict[str, Files] = {
        "h/huge-header": with_weights(Hole((1 << 40).to_bytes(8, "little"), 1 << 41)),
        "h/long-header": with_weights(Hole((15_999_999).to_bytes(8, "little") + b" " * 99, 1 << 30)),
        "h/page": with_weights(b"<html>please log in</html>"),
        "h/cut-short": with_weights(weights[: len(weights) // 2]),
        "h/no-weights": {"config.json": tiny["config.json"], "../../../etc/model.safetensors": weights},
        "h/html-in-names": with_weights(weights.replace(b"model.layers.0.self_attn.q_proj", renamed)),
        "h/outside": {"config.json": tiny["config.json"], "model.safetensors.index.json": json.dumps(
            {"weight_map": {"x": "../../secret.safetensors"}}).encode()},
        "h/absurd": tiny | {"config.json": json.dumps(config | {"hidden_size": 10**300}).encode()},
        "h/unknown": tiny | {"config.json": json.dumps({"model_type": script}).encode()},
        "h/deep": tiny | {"config.json": b'{"a":' * 5000 + b"1" + b"}" * 5000},
        "h/nothing": {},
    }  # fmt: skip
    hub.repositories |= hostile | {"a/tiny": tiny, "h/gated": tiny, "h/private": tiny}
    hub.gated, hub.private = {"h/gated"}, {"h/private"}
    (tmp_path / "loop").symlink_to("loop")
    lines = [
        *hostile, "h/gated", "h/private", "h/missing", "a/tiny", "a/tiny", "https://huggingface.co/a/tiny", script,
        "../../etc/passwd", str(tmp_path / "loop"), "a/tiny@../../x", "x" * 5000,
    ]  # fmt: skip
    atlas = made(lines, tmp_path)
    assert [member.name for member in atlas.members] == ["a/tiny"]
    with (tmp_path / "out" / "errors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == {*lines}  # what is listed twice has one row, and its page
    assert all(row["error"] for row in rows) and all(len(row["error"]) < 3000 for row in rows)
    for page in (tmp_path / "out").rglob("*.html"):
        assert script not in page.read_text()
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.html")}
    assert written == {"index.html", "checkpoints/a--tiny.html"}
