"""What several tests share, and which of them `make test` leaves to `make check`."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from matplotlib.figure import Figure

import weightscope as ws
from tests.support.browser import Page, browser
from tests.support.hub_server import Hub, serve
from tests.support.legible import faults
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from tests.support.two_layers import FOLDER
from weightscope.core import progress
from weightscope.report.pages import style

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one may take long over an example
hypothesis.settings.load_profile("any machine")

WHOLE_FILE = re.compile(r"^pytestmark = pytest\.mark\.(\w+)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file whose own mark is deselected: to import it, with PyTorch, would take seconds."""
    if collection_path.suffix != ".py":
        return None
    mark = WHOLE_FILE.search(collection_path.read_text(encoding="utf-8"))
    return True if mark and f"not {mark[1]}" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What opens a page in a browser belongs to `make check`."""
    for item in items:
        if "tab" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("smoke"):
            item.add_marker("check")


@pytest.fixture(autouse=True, scope="session")
def _no_bars() -> Iterator[None]:
    """No progress bar on a busy machine, where what takes an instant elsewhere takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "DELAY", 3600)
        yield


@pytest.fixture(autouse=True, scope="session")
def _faults_of_figures() -> Iterator[list[str]]:
    """What an editor would return each figure for that is saved, whatever the test."""
    faults_found: list[str] = []
    plain = style.description

    def description(figure: Figure) -> str:
        faults_found.extend(faults(figure))
        return plain(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "description", description)
        yield faults_found


@pytest.fixture(autouse=True)
def _legible(_faults_of_figures: list[str]) -> Iterator[None]:
    """A test fails over the figures that it draws, or that its fixtures drew."""
    yield
    faults = sorted(set(_faults_of_figures))
    _faults_of_figures.clear()
    if faults:
        pytest.fail("figures: " + "; ".join(faults))


@pytest.fixture(autouse=True)
def _no_pytorch(request: pytest.FixtureRequest) -> Iterator[None]:
    """`make test` stays fast: a test that imports PyTorch is marked `check`."""
    before = "torch" in sys.modules
    yield
    if not before and "torch" in sys.modules and not {"check", "census", "docs", "smoke"} & {
        mark.name for mark in request.node.iter_markers()
    }:  # fmt: skip
        pytest.fail("imports PyTorch: mark it `check`")


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 of 2 layers, 4 heads, width 24, vocabulary 50 and 32 positions."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), gpt2_weights())


@pytest.fixture(scope="session")
def two_layers() -> ws.Model:
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

    from weightscope.checkpoint import http
    from weightscope.checkpoint import hub as client

    with serve() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.hub)
        template = server.hub + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(http, "FIRST_WAIT", 0.01)
        monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
        yield server
