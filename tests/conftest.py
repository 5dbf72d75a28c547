"""What several tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import weightscope as ws
from tests.support.browser import Page, browser
from tests.support.hub_server import Hub, serve
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.embedded import FOLDER


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 of 2 layers, 4 heads, width 24, vocabulary 50 and 32 positions."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), gpt2_weights())


@pytest.fixture(scope="session")
def embedded() -> ws.Model:
    """The checkpoint that comes with weightscope."""
    return ws.open_model(FOLDER)


@pytest.fixture(scope="session")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(_browser: Page) -> Page:
    """The one tab of the one browser of this run, with nothing noted yet."""
    _browser.complaints.clear()
    _browser.requests.clear()
    return _browser


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
