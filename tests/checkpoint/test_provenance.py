"""Where results come from: digests against hashlib, etags, what was typed, hostile names, nothing read twice."""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.figures import undrawn
from tests.support.hub_server import COMMIT, Hub
from tests.support.provenance import ENVELOPE, envelope_in, footer_of, header_of, sha256, typed
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.checkpoint.provenance import Provenance, read_digests, source_of
from weightscope.checkpoint.storage import OpenFile
from weightscope.cli import main
from weightscope.core.errors import CheckpointError
from weightscope.heads.audit.audit import AuditOptions, measure_task
from weightscope.heads.audit.batch import report_task
from weightscope.model.model import open_model

JSON = {
    "audit": ["audit", "A", "--out", "OUT", "--json"],
    "compare": ["compare", "A", "B", "--out", "OUT", "--json"],
    "lineage": ["lineage", "A", "B", "--out", "OUT", "--json"],
    "same": ["same", "A", "A", "--json"],
    "learned": ["learned", "A", "B", "--json"],
    "inspect": ["inspect", "A", "--tensors", "--json"],
    "circuits": ["circuits", "A", "--json"],
    "neighbours": ["neighbours", "A", "--token-id", "3", "--json"],
    "positions": ["positions", "A", "--json"],
    "rank": ["rank", "A", "--json"],
    "draft": ["draft", "A", "--json"],
    "fingerprint": ["fingerprint", "A", "--out", "FILE", "--json"],
    "id": ["id", "A", "--json"],
}
# Tried elsewhere, or about no one checkpoint.
OTHERS_WITH_JSON = {
    "verify", "card", "atlas", "detok", "norms", "outliers", "sinks", "adopt",
    "bigrams", "convert", "families", "reference",
}  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two random checkpoints of one shape."""
    folders = tmp_path / "a", tmp_path / "b"
    for seed, folder in enumerate(folders):
        write_checkpoint(folder, gpt2_weights(n_layers=1, seed=seed))
    return folders


@pytest.mark.parametrize("command", JSON)
@pytest.mark.parametrize("digest", [False, True])
def test_every_json_has_the_envelope(command: str, digest: bool, pair: tuple[Path, Path], tmp_path: Path) -> None:
    places = {"A": pair[0], "B": pair[1], "OUT": tmp_path / "out", "FILE": tmp_path / "a.wsf"}
    arguments = [str(places.get(part, part)) for part in JSON[command]] + ["--digest"] * digest
    with undrawn():
        result = run(*arguments)
    assert result.exit_code == 0, result.output
    folders = pair[: 1 if "B" not in JSON[command] else 2]
    envelope_in(result.stdout, arguments, *folders, digest=digest)
    with_json = {name for name, each in main.commands.items() if "as_json" in {o.name for o in each.params}}
    assert {*JSON} | OTHERS_WITH_JSON == with_json
    if command == "lineage":
        envelope_in((tmp_path / "out" / "lineage.json").read_text(), arguments, *folders, digest=digest)


def test_a_result_from_python_has_no_command(pair: tuple[Path, Path]) -> None:
    for result in (ws.audit(pair[0]), ws.compare(*pair), ws.lineage(*pair)):
        made = result.as_json()
        assert made.keys() >= ENVELOPE and made["command"] is None and made["lead"] == result.lead
        names = [source["name"] for source in made["sources"]]
        assert names == [str(folder) for folder in pair[: len(names)]]
        json.dumps(made, allow_nan=False)


def test_one_checkpoint_that_is_named_twice_is_one_source(pair: tuple[Path, Path]) -> None:
    assert len(ws.compare(pair[0], pair[0]).provenance.sources) == 1


def test_source_is_named_as_typed(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's folders are told: not where the checkpoint is, nor in the lists of audits and of fingerprints."""
    here = pair[0].parent
    monkeypatch.chdir(here)
    (here / "list.txt").write_text("a\nnowhere\n")
    with undrawn():
        printed = [
            run("audit", "a", "--out", "one", "--json"),
            run("audit", "list.txt", "--out", "several", "--json"),
            run("compare", "a", "./b", "--out", "moved", "--json"),
            run("lineage", "a", "b", "--out", "origin", "--json"),
        ]
    assert [result.exit_code for result in printed] == [0, 2, 0, 0]
    results = [json.loads(result.stdout) for result in printed]
    assert [[source["name"] for source in result["sources"]] for result in (results[0], *results[2:])] == [
        ["a"], ["a", "./b"], ["a", "b"],
    ]  # fmt: skip
    assert [each["source"] for each in results[1]] == ["a", "nowhere"]
    assert all(each.keys() >= ENVELOPE for each in results[1])
    written = [path for path in here.rglob("*") if path.suffix in (".html", ".json", ".csv") and ".w" not in str(path)]
    assert len(written) > 20
    for text in [*(result.stdout for result in printed), *(path.read_text() for path in written)]:
        assert str(here) not in text


def test_a_list_of_audits_ends_with_what_each_has_read(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{pair[0]}\n{pair[1]}\n")
    command = ["audit", tmp_path / "list.txt", "--out", tmp_path / "out"]
    with undrawn():
        assert run(*command).exit_code == 0
    footers = [footer_of(tmp_path / "out" / name) for name in ("summary.html", "a/report.html", "b/report.html")]
    for footer, folders in zip(footers, (pair, pair[:1], pair[1:]), strict=True):
        assert typed(command) in footer
        for folder in pair:
            assert (sha256(folder / "model.safetensors") in footer) == (folder in folders)
            assert (f"{folder}: config.json" in footer) == (folder in folders)


def test_a_page_that_a_worker_makes_has_the_command_of_the_process_that_asked_for_it(pair: tuple[Path, Path]) -> None:
    model = ws.open_model(pair[0])
    layers = {0: measure_task(lambda: model, 0, AuditOptions())}
    asked = Provenance(({"name": "as typed", "files": []},), command="weightscope audit as-typed")
    asked = pickle.loads(pickle.dumps(asked))
    with undrawn():
        report = report_task(lambda: model, layers, AuditOptions(), asked)
    assert b"<code>weightscope audit as-typed</code>" in report.files["report.html"]
    assert (report.result["command"], report.result["sources"]) == (asked.command, list(asked.sources))


def test_a_kept_audit_is_printed_with_the_command_that_prints_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    first, again = (["audit", pair[0], "--out", tmp_path / "out", "--json", *more] for more in ([], ["--resume"]))
    with undrawn():
        run(*first)
        again.append("--digest")
        envelope_in(run(*again).stdout, again, pair[0], digest=True)
    assert typed(first) in footer_of(tmp_path / "out" / "report.html")  # the page was not made again


HOSTILE = "<img src=x onerror=alert(1)>&\"'\n\x1b[2J\udcff{}"


def test_no_name_gets_into_a_page_or_breaks_json(pair: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    try:
        pair[0].rename(folder)
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    with undrawn():
        result = run("audit", folder, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    envelope = json.loads(result.stdout)
    for text in (envelope["sources"][0]["name"], envelope["command"]):
        assert text.isprintable() and "onerror" in text
    text = (tmp_path / "out" / "report.html").read_text()
    page = text[text.index("<footer>") : text.index("</footer>")]
    assert "<img" not in page and "&lt;img src=x" in page and "\x1b" not in page and "\"'" not in page


def test_the_date_is_that_of_source_date_epoch(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert Provenance().date == "2023-11-14T22:13:20Z"
    for wrong in ("today", "", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        result = run("audit", pair[0], "--out", pair[0] / "out")
        assert result.exit_code == 2 and "SOURCE_DATE_EPOCH is" in result.stderr and not (pair[0] / "out").exists()


# Digests


@pytest.mark.parametrize("command", ["inspect", "draft", "neighbours", "fingerprint", "fingerprints"])
def test_commands_without_page_or_json_print_the_digests(command: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"{pair[0]}\n")
    arguments = {
        "inspect": ["inspect", pair[0]],
        "draft": ["draft", pair[0]],
        "neighbours": ["neighbours", pair[0], "--token-id", "3"],
        "fingerprint": ["fingerprint", pair[0], "--out", tmp_path / "a.wsf"],
        "fingerprints": ["fingerprint", tmp_path / "list.txt", "--out", tmp_path / "prints"],
    }[command]
    line = f"{sha256(pair[0] / 'model.safetensors')}  model.safetensors"
    plain, asked = run(*arguments), run(*arguments, "--digest")
    assert (plain.exit_code, asked.exit_code) == (0, 0), plain.output + asked.output
    assert line not in plain.output
    assert line in (asked.stdout if command == "inspect" else asked.stderr)


def test_every_command_that_takes_a_source_has_the_option() -> None:
    takes = {
        name: {each.name for each in command.params} & {"source", "sources", "suspect", "a"}
        for name, command in main.commands.items()
    }
    assert {name for name, named in takes.items() if named} - {"verify"} == {  # it always reads files whole
        name for name, command in main.commands.items() if "digest" in {each.name for each in command.params}
    }


def test_files_are_read_once_without_digest(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a checkpoint and say where it is from takes its header; a digest of it all reads it once more."""
    spans: list[tuple[int, int]] = []
    plain = OpenFile.read
    monkeypatch.setattr(OpenFile, "read", lambda file, *span: (spans.append(span), plain(file, *span))[1])
    checkpoint = open_model(pair[0]).checkpoint
    (file,) = checkpoint.files
    opened = list(spans)
    assert "sha256" not in source_of(checkpoint)["files"][0] and spans == opened
    assert max(stop for _, stop in opened) == max(512, file.header.size)
    read_digests(checkpoint)
    assert sum(stop - start for start, stop in spans[len(opened) :]) == file.size
    assert source_of(checkpoint)["files"][0]["sha256"] == sha256(pair[0] / "model.safetensors")


def test_file_read_whole_for_its_identity_has_a_digest(pair: tuple[Path, Path]) -> None:
    checkpoint = open_model(pair[0]).checkpoint
    assert checkpoint.files[0].sha256 == ""
    assert checkpoint.files[0].identity["sha256"] == checkpoint.files[0].sha256 == sha256(pair[0] / "model.safetensors")


def test_samples_of_a_large_file_are_not_its_digest(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightscope.checkpoint.storage.WHOLE", 100)
    checkpoint = open_model(pair[0]).checkpoint
    samples = checkpoint.files[0].identity["sha256"]
    record = source_of(checkpoint)["files"][0]
    assert record["samples_sha256"] == samples != sha256(pair[0] / "model.safetensors") and "sha256" not in record


def test_a_gguf_header_ends_where_its_data_begins(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_tensor("a", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from weightscope.checkpoint.opening import open_checkpoint

    (file,) = open_checkpoint(path).files
    start = path.read_bytes()[: file.tensors["a"].start]
    assert file.header == (len(start), hashlib.sha256(start).hexdigest())
    file.read_digest()
    assert file.sha256 == sha256(path)


def test_a_fingerprint_file_is_a_source_with_its_digest(pair: tuple[Path, Path], tmp_path: Path) -> None:
    prints = tmp_path / "prints"
    prints.mkdir()
    assert run("fingerprint", pair[1], "--out", prints / "b.wsf").exit_code == 0
    for base in (prints, prints / "b.wsf"):
        _, source = ws.lineage(pair[0], base).as_json()["sources"]
        size, digest = header_of(prints / "b.wsf")
        assert source == {"name": str(prints / "b.wsf"), "files": [{
            "name": "b.wsf", "size": (prints / "b.wsf").stat().st_size, "header_bytes": size, "header_sha256": digest,
            "sha256": sha256(prints / "b.wsf"),
        }]}  # fmt: skip


# The Hub


@pytest.fixture
def published(hub: Hub, pair: tuple[Path, Path]) -> Hub:
    hub.publish("owner/model", pair[0])
    return hub


def test_an_etag_that_is_a_digest_is_taken_and_nothing_is_fetched_for_it(published: Hub, pair) -> None:
    source = source_of((model := open_model("owner/model", revision="v1")).checkpoint)
    weights = pair[0] / "model.safetensors"
    size, digest = header_of(weights)
    assert source["name"] == "owner/model@v1"
    assert source["files"][0] == {
        "name": "model.safetensors", "size": weights.stat().st_size, "commit": COMMIT, "etag": sha256(weights),
        "header_bytes": size, "header_sha256": digest, "sha256": sha256(weights),
    }  # fmt: skip
    before = len(published.requests)
    read_digests(model.checkpoint)
    assert len(published.requests) == before


def test_a_file_whose_etag_is_no_digest_is_fetched_for_one(published: Hub, pair) -> None:
    published.headers = {"X-Linked-Etag": '"' + "0" * 40 + '"', "ETag": '"' + "0" * 40 + '"'}
    checkpoint = open_model("owner/model").checkpoint
    (file,) = checkpoint.files
    assert "sha256" not in source_of(checkpoint)["files"][0]
    read_digests(checkpoint)
    assert source_of(checkpoint)["files"][0]["sha256"] == file.sha256 == sha256(pair[0] / "model.safetensors")


def test_a_damaged_copy_in_the_hubs_cache_is_found(published: Hub, tmp_path: Path) -> None:
    from huggingface_hub import constants

    content = published.repositories["owner/model"]
    cache = Path(constants.HF_HUB_CACHE) / "models--owner--model"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    for name, stored in content.items():
        blob = cache / "blobs" / hashlib.sha256(stored).hexdigest()
        blob.write_bytes(stored)
        place = cache / "snapshots" / COMMIT / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(blob)
    (weights,) = open_model("owner/model").checkpoint.files
    assert weights.sha256 == hashlib.sha256(content["model.safetensors"]).hexdigest()
    damaged = bytearray(content["model.safetensors"])
    damaged[-1] ^= 1
    (cache / "blobs" / weights.sha256).write_bytes(damaged)
    result = run("inspect", "owner/model", "--digest")
    assert result.exit_code == 2 and "the copy in the Hub's cache is damaged" in result.stderr
    with pytest.raises(CheckpointError, match="damaged"):
        read_digests(open_model("owner/model").checkpoint)
