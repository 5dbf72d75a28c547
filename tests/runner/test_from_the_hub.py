"""A model on the Hub is run from files that came through the checked reader, not through transformers' own."""

import pytest

import weightscope as ws
from tests.support.hub_server import Hub
from tests.support.two_layers import FOLDER

pytest.importorskip("torch", reason="the runner needs the extra `runner`")
pytest.importorskip("transformers", reason="the runner needs the extra `runner`")

from weightscope.runner import open_runner

pytestmark = pytest.mark.check

FILES = {name: (FOLDER / name).read_bytes() for name in ("config.json", "model.safetensors")}


def test_a_repository_runs_and_a_lying_one_is_refused(hub: Hub) -> None:
    hub.repositories["owner/model"] = FILES
    model = ws.open_model("owner/model")
    assert open_runner(model) is not None
    hub.repositories["owner/other"] = FILES
    lying = ws.open_model("owner/other")
    hub.headers = {"X-Linked-Etag": '"../../../../owned"'}
    with pytest.raises(ws.CheckpointError, match="its etag is"):
        open_runner(lying)
