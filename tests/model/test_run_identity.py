"""Two checkpoints, or two ways to read one, are told apart without reading their weights."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support import tasks
from tests.support.commands import run
from tests.support.hub_server import COMMIT, Hub
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.checkpoint import storage
from weightscope.cli import main
from weightscope.core.embedded import FOLDER
from weightscope.heads.audit import batch
from weightscope.heads.audit.audit import AuditOptions
from weightscope.heads.audit.batch import layers_identity, results_identity
from weightscope.heads.audit.reference import OWN
from weightscope.model import run_identity
from weightscope.model.run_identity import DRAWN_WITH, TOKENIZER_FILES, RunIdentity, tokenizer_identity

FIXTURES = Path(__file__).parents[1] / "model" / "rows" / "fixtures"


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def of(source: str | Path, **options: str) -> RunIdentity:
    return RunIdentity.of_model(ws.open_model(source, **options))


def is_kept(*arguments: object) -> bool:
    """Whether `audit --resume` keeps what an earlier run has left. Figures are not drawn: they are no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "report_task", tasks.tables_alone)
        command = ["audit", *map(str, arguments), "--resume"]
        result = run(*command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return "is up to date" in result.stdout


def test_other_weights_at_the_same_revision_of_the_hub_are_audited_anew(hub: Hub, tmp_path: Path) -> None:
    for seed in (1, 2):
        write_checkpoint(tmp_path / str(seed), gpt2_weights(seed=seed))
    hub.repositories["owner/model"] = content_of(tmp_path / "1")
    assert not is_kept("owner/model", "--out", tmp_path / "out")
    assert is_kept("owner/model", "--out", tmp_path / "out")
    before = (tmp_path / "out" / "heads.csv").read_bytes()
    hub.repositories["owner/model"] = content_of(tmp_path / "2")
    assert not is_kept("owner/model", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "heads.csv").read_bytes() != before


def test_a_file_on_the_hub_is_known_by_endpoint_repository_and_etag(
    hub: Hub,
    tiny_gpt2: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("owner/model", "owner/copy"):
        hub.repositories[name] = content_of(tiny_gpt2)
    identity = of("owner/model")
    assert identity == of("owner/model")
    (file,) = identity.facts["files"]
    assert file.keys() == {"endpoint", "repository", "commit", "name", "etag", "size"}
    assert file["size"] == (tiny_gpt2 / "model.safetensors").stat().st_size
    assert identity != of("owner/copy")
    model = ws.open_model("owner/model")
    assert identity == RunIdentity.of_model(model)


def test_a_remote_file_is_not_looked_for_in_the_working_directory(
    hub: Hub,
    tiny_gpt2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repositories["owner/model"] = content_of(tiny_gpt2)
    monkeypatch.chdir(tmp_path)
    identity = of("owner/model")
    (tmp_path / "model.safetensors").write_text("another file of this name")
    assert of("owner/model") == identity


def rewritten_weights(folder: Path) -> None:
    write_checkpoint(folder, gpt2_weights(seed=5))


def touched_weights(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def longer_weights(folder: Path) -> None:
    """Another file of the same time."""
    weights, then = folder / "model.safetensors", (folder / "model.safetensors").stat().st_mtime_ns
    save_file(load_file(weights) | {"more": np.ones(3, np.float32)}, weights)
    os.utime(weights, ns=(then, then))


def other_weights_of_the_same_time(folder: Path) -> None:
    """As from an archive with normalised times, or by `cp -p`."""
    weights, status = folder / "model.safetensors", (folder / "model.safetensors").stat()
    rewritten_weights(folder)
    os.utime(weights, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert weights.stat().st_size == status.st_size


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 0.1}))


@pytest.mark.parametrize(
    "change", [rewritten_weights, touched_weights, longer_weights, other_weights_of_the_same_time, other_config]
)
@pytest.mark.parametrize("whole", [64 << 20, 0])
def test_changed_local_checkpoint_has_another_identity(
    change: Callable[[Path], None], whole: int, tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is read whole for it, of a large one every tensor is sampled."""
    monkeypatch.setattr(storage, "WHOLE", whole)
    folder = shutil.copytree(tiny_gpt2, tmp_path / "model")
    identity = of(folder)
    change(folder)
    assert of(folder) != identity


@pytest.mark.parametrize("name", sorted(gpt2_weights()))
def test_another_tensor_in_a_large_file_is_another_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "WHOLE", 0)
    weights, files = gpt2_weights(), []
    for change in (0, 1):
        folder = write_checkpoint(tmp_path / str(change), weights | {name: weights[name] + np.float32(change)})
        os.utime(folder / "model.safetensors", ns=(1, 1))
        (file,) = of(folder).facts["files"]
        files.append(file)
    assert files[0].pop("inode") != files[1].pop("inode")
    assert files[0].pop("sha256") != files[1].pop("sha256") and files[0] == files[1]


def test_a_large_file_that_is_moved_stays_the_same(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "WHOLE", 0)
    before = of(shutil.copytree(tiny_gpt2, tmp_path / "one"))
    assert of((tmp_path / "one").rename(tmp_path / "other")) == before


@pytest.mark.parametrize("place", ["a regular file", "no commit", "another cache", "a blob elsewhere"])
def test_only_a_blob_of_the_cache_is_known_by_its_name(place: str, hub: Hub, tiny_gpt2: Path, tmp_path: Path) -> None:
    """Any other file may have other weights by the same names."""
    cache = tmp_path / ("elsewhere" if place == "another cache" else "hub") / "models--owner--model"
    snapshot = cache / "snapshots" / ("main" if place == "no commit" else COMMIT)
    blobs = tmp_path / "blobs" if place == "a blob elsewhere" else cache / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(tiny_gpt2, snapshot)
    if place != "a regular file":
        (snapshot / "model.safetensors").rename(blobs / "abc")
        (snapshot / "model.safetensors").symlink_to(blobs / "abc")
    before = of(snapshot)
    rewritten_weights(tmp_path / "rewritten")
    shutil.copyfile(tmp_path / "rewritten" / "model.safetensors", snapshot / "model.safetensors")
    assert of(snapshot) != before and "commit" not in before.text


def test_a_checkpoint_is_the_same_from_wherever_it_is_named(
    tiny_gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_gpt2, tmp_path / "model")
    identity = of(folder)
    monkeypatch.chdir(tmp_path)
    assert of("model") == identity == of("model/model.safetensors")
    assert str(tmp_path) not in identity.text


@pytest.mark.parametrize("library", ["weightscope", "numpy", "scipy"])
def test_library_version_is_part_of_the_identity(
    library: str, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of(tiny_gpt2)
    if library == "weightscope":
        monkeypatch.setattr(ws, "__version__", "99")
    else:
        real = run_identity.version
        monkeypatch.setattr(run_identity, "version", lambda name: "99" if name == library else real(name))
    assert of(tiny_gpt2) != before


def two_towers(folder: Path) -> Path:
    """CLIP's text and vision towers in one checkpoint, as they are published."""
    shutil.copytree(FIXTURES / "clip_text", folder)
    weights = [load_file(FIXTURES / f"clip_{tower}" / "model.safetensors") for tower in ("text", "vision")]
    save_file(weights[0] | weights[1], folder / "model.safetensors")
    return folder


def test_each_tower_has_its_own_identity(tmp_path: Path) -> None:
    checkpoint = two_towers(tmp_path / "clip")
    assert not is_kept(checkpoint, "--out", tmp_path / "out", "--tower", "text")
    assert is_kept(checkpoint, "--out", tmp_path / "out", "--tower", "text")
    assert not is_kept(checkpoint, "--out", tmp_path / "out", "--tower", "vision")


def test_another_tokenizer_names_other_tokens(tmp_path: Path) -> None:
    """directions.json has its names; the layers are not measured again for it."""
    embedded = shutil.copytree(FOLDER, tmp_path / "model", ignore=shutil.ignore_patterns("*.npz", "__*"))
    assert not is_kept(embedded, "--out", tmp_path / "out")
    assert is_kept(embedded, "--out", tmp_path / "out")
    before = (tmp_path / "out" / "directions.json").read_bytes()
    (embedded / "tokenizer.json").unlink()
    assert not is_kept(embedded, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "directions.json").read_bytes() != before


def test_a_tokenizer_that_is_added_later_names_the_tokens(tmp_path: Path) -> None:
    embedded = shutil.copytree(FOLDER, tmp_path / "model", ignore=shutil.ignore_patterns("*.npz", "__*"))
    tokenizer = (embedded / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert not is_kept(embedded, "--out", tmp_path / "out")
    assert '"#4' in (tmp_path / "out" / "directions.json").read_text()
    tokenizer.rename(embedded / "tokenizer.json")
    assert not is_kept(embedded, "--out", tmp_path / "out")
    assert '"#4' not in (tmp_path / "out" / "directions.json").read_text()
    assert is_kept(embedded, "--out", tmp_path / "out")


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_any_file_of_a_tokenizer_that_appears_makes_other_results(name: str, tiny_gpt2: Path, tmp_path: Path) -> None:
    model = ws.open_model(shutil.copytree(tiny_gpt2, tmp_path / "model"))
    before, layers = results_identity(model, AuditOptions()), layers_identity(model, AuditOptions())
    (tmp_path / "model" / name).write_text("{}")
    assert results_identity(model, AuditOptions()) != before
    assert layers_identity(model, AuditOptions()) == layers  # measured layers stay good


@pytest.mark.parametrize("library", DRAWN_WITH)
def test_a_library_that_draws_and_is_installed_later_makes_other_results(
    library: str, tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = ws.open_model(tiny_gpt2), run_identity.version
    before = results_identity(model, AuditOptions())

    def without(name: str) -> str:
        if name == library:
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("weightscope.model.run_identity.version", without)
    assert results_identity(model, AuditOptions()) != before


def test_a_checkpoint_of_another_name_has_another_page(tiny_gpt2: Path, tmp_path: Path) -> None:
    first = shutil.copytree(tiny_gpt2, tmp_path / "one")
    before = results_identity(ws.open_model(first), AuditOptions())
    assert results_identity(ws.open_model(first.rename(tmp_path / "other")), AuditOptions()) != before


# What an option of a command that resumes is: of the source, of the audit, or of how it is run, which no number shows.
OF_SOURCE = {"source", "revision", "family", "tower", "tokenizer", "base", "families"}
OF_RUN = {"out", "resume", "engine", "scheduler", "jobs", "fail_on", "as_json", "sarif", "quiet", "digest"}
OTHERS = {
    "layers": (1,), "deltas": (0, 3), "window": 5, "directions": 1, "device": "cuda", "all_tensors": True,
    "reference": str(OWN), "baseline": "earlier", "accept": "accepted.csv", "sinks": True, "clip": 30.0, "exact": True,
}  # fmt: skip


def test_a_tokenizer_that_is_named_is_known_by_its_content_however_it_is_named(tiny_gpt2: Path, tmp_path: Path) -> None:
    """A folder, weights next to it, the file itself, a file with another name, a sentence-transformers root."""
    folder = shutil.copytree(tiny_gpt2, tmp_path / "other")
    root = tmp_path / "root"
    (root / "0_Transformer").mkdir(parents=True)
    (root / "modules.json").write_text(
        '[{"idx": 0, "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]'
    )
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, root / "0_Transformer" / name)
    places = {
        folder: folder / "tokenizer.json",
        folder / "model.safetensors": folder / "tokenizer.json",
        folder / "tokenizer.json": folder / "tokenizer.json",
        tmp_path / "named.json": tmp_path / "named.json",
        root: root / "0_Transformer" / "tokenizer.json",
    }
    identity = results_identity(ws.open_model(tiny_gpt2), AuditOptions())
    for source, file in places.items():
        file.write_text("{}")
        model = ws.open_model(tiny_gpt2, tokenizer=str(source))
        before = results_identity(model, AuditOptions())
        file.write_text("[]")
        assert len({before, identity, results_identity(model, AuditOptions())}) == 3, source


def test_every_option_of_a_command_that_resumes_is_in_its_identity(tiny_gpt2: Path, tmp_path: Path) -> None:
    resuming = {name: {option.name for option in command.params} for name, command in main.commands.items()}
    resuming = {name: options for name, options in resuming.items() if "resume" in options}
    # What an atlas keeps is of one checkpoint or of a pair: tests/pairs/atlas/test_store.py.
    assert resuming.pop("atlas") - OF_RUN == {"listing", "withdraw", "megabytes", "prove", "families"}
    assert resuming == {"audit": OF_SOURCE | OF_RUN | set(OTHERS)}
    assert {field.name for field in fields(AuditOptions)} == set(OTHERS)
    model = ws.open_model(tiny_gpt2)
    (tmp_path / "findings.json").write_text("[]")
    paths = {"baseline": tmp_path, "accept": tmp_path / "findings.json"}
    results = [AuditOptions(), *(AuditOptions(**{name: value}) for name, value in {**OTHERS, **paths}.items())]
    assert len({results_identity(model, options).digest for options in results}) == len(results)
    every_layer = AuditOptions(layers=tuple(model.attention_layers))
    assert results_identity(model, every_layer) == results_identity(model, AuditOptions())


def test_a_tokenizer_is_known_by_the_content_of_its_files(tmp_path: Path) -> None:
    assert tokenizer_identity(tmp_path) == []
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_identity(tmp_path)
    os.utime(tmp_path / "tokenizer.json", ns=(1, 1))
    assert tokenizer_identity(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("[]")
    assert tokenizer_identity(tmp_path) != before


def test_a_tokenizer_that_is_too_large_to_be_read_is_not_read_for_its_identity(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(3 << 30)  # a hole, which takes no room
    (identity,) = tokenizer_identity(tmp_path)
    assert identity["size"] == 3 << 30 and "sha256" not in identity


def test_facts_round_trip_and_order_does_not_matter() -> None:
    assert RunIdentity.of(a=1, b=(2, 3)).facts == {"a": 1, "b": [2, 3]}
    assert RunIdentity.of(a=1, b=2) == RunIdentity.of(b=2, a=1) == RunIdentity.of(b=2).also(a=1)
    assert RunIdentity.of(a=1).digest != RunIdentity.of(a=2).digest
