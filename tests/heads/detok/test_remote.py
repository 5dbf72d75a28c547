"""Jobs on a checkpoint that lies on a Hub: they say what they will fetch, and fetch that."""

import json

import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.hub_server import Hub
from tests.support.large_models import shape_of_70b

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip


def test_inspect_prints_the_budget_of_a_70b_model(hub: Hub) -> None:
    hub.repositories["big/model"] = shape_of_70b() | {"config.json": json.dumps(CONFIG).encode()}
    result = run("inspect", "big/model", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "audit reads 26.3 GB of 141 GB, 12.1 GB of it queries and keys" in result.output
    assert "layer 0     302 MB of 141 GB, 151 MB of it queries and keys" in result.output
    assert "fetched for the headers; an audit fetches 26.3 GB" in result.output
    assert hub.sent < 300_000


@pytest.mark.check
def test_a_layer_is_fetched_in_few_requests_and_little_more_than_its_bytes(hub: Hub) -> None:
    hub.repositories["big/model"] = shape_of_70b() | {"config.json": json.dumps(CONFIG).encode()}
    model = ws.open_model("big/model")
    asked, sent = len(hub.data_requests()), model.checkpoint.bytes_fetched
    model.layer(3)
    needed = sum(tensor.nbytes for tensor in model.attention_tensors(3))
    assert needed <= model.checkpoint.bytes_fetched - sent <= 1.02 * needed
    assert len(hub.data_requests()) - asked < 60
