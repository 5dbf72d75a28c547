"""Workers that share no file system: each fetches from the Hub what its tasks read."""

from pathlib import Path

import pytest

import weightscope as ws
from tests.checkpoint.conftest import hub  # noqa: F401
from tests.support import tasks
from tests.support.hub_server import COMMIT, Hub
from weightscope.audits.audit import AuditOptions
from weightscope.audits.many import Commission, audit_all
from weightscope.engine import Engine, here, processes
from weightscope.errors import CheckpointError
from weightscope.sources import Source


def tables(source: str, out: Path, engine: Engine) -> dict[str, bytes]:
    with engine:
        (ended,) = audit_all([Commission(Source.named(source), out)], AuditOptions(), engine, tasks.tables_alone)
    assert ended.error is None
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def test_workers_fetch_their_own_tensors(hub: Hub, tiny_gpt2: Path, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    hub.repositories["owner/tiny"] = {path.name: path.read_bytes() for path in tiny_gpt2.iterdir()}
    monkeypatch.setenv("HF_ENDPOINT", hub.hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "of the workers"))
    found = tables("owner/tiny", tmp_path / "remote", processes(2))
    assert found == tables(str(tiny_gpt2), tmp_path / "here", here())
    assert any(path.is_file() for path in (tmp_path / "of the workers").rglob("*"))
    assert ws.open_model("owner/tiny").checkpoint.bytes_to_fetch(["h.1.attn.c_attn.weight"])  # not by this process


def test_a_worker_refuses_another_commit(hub: Hub, tiny_gpt2: Path) -> None:  # noqa: F811
    hub.repositories["owner/tiny"] = {path.name: path.read_bytes() for path in tiny_gpt2.iterdir()}
    source = Source.named("owner/tiny")
    seen = source.as_seen(source.open())
    assert seen.seen[1:] == (COMMIT,)
    seen.elsewhere()
    with pytest.raises(CheckpointError, match=rf"is not the same on a worker \({COMMIT}\).*SOURCE@COMMIT"):
        Source("owner/tiny", seen=(seen.seen[0], "0" * 40)).elsewhere()
