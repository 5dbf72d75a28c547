"""The next layer, and at the end the embeddings, are fetched while the current one is measured."""

import os
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.hub_server import Hub
from tests.support.tiny_gpt2 import gpt2_weights, write_checkpoint
from weightscope.heads.audit.audit import END, AuditOptions, measure_task, tensors_of_heads
from weightscope.heads.tensors.findings import other_gains
from weightscope.model.model import Model


@pytest.fixture
def remote(hub: Hub, tiny_gpt2: Path) -> Model:
    hub.publish("owner/tiny", tiny_gpt2)
    return ws.open_model("owner/tiny")


def to_fetch(model: Model, layer: int) -> int:
    return model.checkpoint.bytes_to_fetch(tensor.name for tensor in model.attention_tensors(layer))


def test_the_next_layer_is_here_when_this_one_is_measured(remote: Model) -> None:
    alone = measure_task(lambda: remote, 0, AuditOptions())
    assert to_fetch(remote, 1)
    ahead = measure_task(lambda: remote, 0, AuditOptions(), 1)
    assert not to_fetch(remote, 1)
    for name, values in alone.items():
        np.testing.assert_array_equal(ahead[name], values)


def test_the_embeddings_are_here_when_the_last_layer_is_measured(remote: Model) -> None:
    names = tensors_of_heads(remote, ())
    assert any("wte" in name for name in names) and remote.checkpoint.bytes_to_fetch(names)
    measure_task(lambda: remote, 1, AuditOptions(), END)
    assert not remote.checkpoint.bytes_to_fetch(names)


def test_gains_that_attention_does_not_read_are_here_too_and_judged(hub: Hub, tmp_path: Path) -> None:
    gains = {f"h.{layer}.ln_2.weight": np.full(24, layer, np.float32) for layer in range(2)}
    folder = write_checkpoint(tmp_path, gpt2_weights() | gains)
    hub.publish("owner/gains", folder)
    model = ws.open_model("owner/gains")
    assert list(other_gains(model)) == list(gains) and model.checkpoint.bytes_to_fetch(gains) == 2 * 24 * 4
    measure_task(lambda: model, 1, AuditOptions(), END)
    assert not model.checkpoint.bytes_to_fetch(gains)
    audit = ws.audit(model, directions=0)
    assert [finding.members[0].name for finding in audit.findings if finding.kind == "zero_tensor"] == [
        "h.0.ln_2.weight"
    ]
    assert not audit.coverage and model.checkpoint.bytes_fetched >= model.checkpoint.nbytes  # nothing is left unread


def test_a_next_layer_that_cannot_be_had_does_not_keep_this_one(remote: Model, hub: Hub) -> None:
    remote.layer(0)
    hub.repositories.clear()
    assert len(measure_task(lambda: remote, 0, AuditOptions(), 1)["qk_singular_values"])
    with pytest.raises(ws.CheckpointError):
        measure_task(lambda: remote, 1, AuditOptions())


def test_of_a_file_here_the_system_is_told_what_will_be_read(tiny_gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system takes no advice")
    model, advised = ws.open_model(tiny_gpt2), set()

    def listen(descriptor: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        advised.add((start, start + length))
        raise OSError("not on this file system")

    monkeypatch.setattr(os, "posix_fadvise", lambda *said: advised.add((said[1], said[1] + said[2])))
    model.checkpoint.prefetch(["h.1.attn.c_attn.weight"])
    (part,) = model.checkpoint["h.1.attn.c_attn.weight"].parts
    covered = {byte for start, stop in advised for byte in range(start, stop)}
    assert covered.issuperset(range(part.entry.start, part.entry.stop))
    # Linux reads no more of one range than its read-ahead, 128 KiB unless set otherwise.
    assert max(stop - start for start, stop in advised) <= 128 << 10
    monkeypatch.setattr(os, "posix_fadvise", listen)
    model.checkpoint.prefetch(["h.1.attn.c_attn.weight"])  # its refusal is no error
