"""Workers that share no file system: each fetches from the Hub what its tasks read."""

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

import weightscope as ws
from tests.support import tasks
from tests.support.hub_server import COMMIT, Hub
from weightscope.checkpoint.hub import RemoteFile
from weightscope.checkpoint.storage import LocalFile
from weightscope.core.engine import Engine, Processes, ThisProcess
from weightscope.core.errors import CheckpointError
from weightscope.heads.audit import batch
from weightscope.heads.audit.audit import AuditOptions
from weightscope.heads.audit.batch import Job
from weightscope.model.run_identity import RunIdentity
from weightscope.model.sources import Source

pytestmark = pytest.mark.check


def tables(source: str, out: Path, engine: Engine) -> dict[str, bytes]:
    with engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "report_task", tasks.tables_alone)
        (outcome,) = batch.audit_all([Job(Source.named(source), out)], AuditOptions(), engine)
    assert outcome.error is None
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_workers_fetch_their_own_tensors(hub: Hub, tiny_gpt2: Path, tmp_path: Path, monkeypatch) -> None:
    hub.publish("owner/tiny", tiny_gpt2)
    monkeypatch.setenv("HF_ENDPOINT", hub.hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "of the workers"))
    from_workers = tables("owner/tiny", tmp_path / "remote", Processes(2))
    assert from_workers == tables(str(tiny_gpt2), tmp_path / "here", ThisProcess())
    assert any(path.is_file() for path in (tmp_path / "of the workers").rglob("*"))
    assert ws.open_model("owner/tiny").checkpoint.bytes_to_fetch(["h.1.attn.c_attn.weight"])  # not by this process


def test_a_worker_refuses_another_commit(hub: Hub, tiny_gpt2: Path) -> None:
    hub.publish("owner/tiny", tiny_gpt2)
    source = Source.named("owner/tiny")
    seen = source.as_seen(source.open())
    seen.elsewhere()
    at_another_commit = RunIdentity(seen.seen.text.replace(COMMIT, "0" * 40))
    there = (
        rf"is not the same on a worker \(model.safetensors of \d+ bytes at {COMMIT}\) as .*{'0' * 40}.*SOURCE@COMMIT"
    )
    with pytest.raises(CheckpointError, match=there):
        replace(seen, seen=at_another_commit).elsewhere()


def test_what_one_machine_has_cached_is_the_same_as_what_another_fetches(
    hub: Hub,
    tiny_gpt2: Path,
) -> None:
    hub.publish("owner/tiny", tiny_gpt2)
    source = Source.named("owner/tiny")
    remote = source.open()
    hf_hub_download("owner/tiny", "model.safetensors")
    cached = source.open()
    assert isinstance(remote.checkpoint.files[0], RemoteFile) and isinstance(cached.checkpoint.files[0], LocalFile)
    assert source.as_seen(cached) == source.as_seen(remote)
