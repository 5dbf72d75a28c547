"""An identity of a repository on the Hub: every byte of the weights is fetched once."""

from pathlib import Path

import weightscope as ws
from tests.support.hub_server import Hub

FIXTURES = Path(__file__).parents[2] / "fixtures" / "identity"


def test_repository_has_the_identity_of_its_files_and_is_fetched_once(hub: Hub) -> None:
    content = {path.name: path.read_bytes() for path in (FIXTURES / "shards").iterdir()}
    hub.repositories["owner/model"] = content
    assert ws.identity("owner/model").wsid == ws.identity(FIXTURES / "llama").wsid
    spans = [request.range.removeprefix("bytes=").split("-") for request in hub.data_requests() if request.range]
    stored = sum(len(data) for name, data in content.items() if name.endswith(".safetensors"))
    assert sum(int(stop) + 1 - int(start) for start, stop in spans) <= 1.1 * stored
