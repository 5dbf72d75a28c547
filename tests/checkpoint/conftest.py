"""A local Hub that the real client is pointed at."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import Hub, serve


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running Hub; caches are empty, waits are short, and there is no token."""
    from huggingface_hub import constants

    from weightscope.checkpoint import hub as client
    from weightscope.checkpoint import ranges

    with serve() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.hub)
        template = server.hub + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(ranges, "FIRST_WAIT", 0.01)
        monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
        yield server
