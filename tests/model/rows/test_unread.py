"""An unproved row says which keys of a checkpoint's config it does not read, and reads its own stack."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import weightscope as ws
from tests.support.tiny_models import FIXTURES
from weightscope.heads.audit.audit import other_stacks

READ = {"attention_bias": True, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 9e3}}


def changed(folder: Path, name: str = "llama", kind: str = "zebra", **values: Any) -> Path:
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": kind} | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("keys", "unread"), [
    ({}, []),
    (READ, []),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"attention_multiplier": 0.1, "use_qk_norm": True}, ["attention_multiplier", "use_qk_norm"]),
    ({"attention_dropout": 0.1, "router_bias": True, "key_scale": 2.0, "rope_at": "odd"}, ["key_scale", "rope_at"]),
    ({"use_qk_norm": False, "attn_temperature": None}, []),  # as if they were not there
])  # fmt: skip
def test_keys_that_change_nothing_and_may_matter_are_listed(
    keys: dict[str, Any], unread: list[str], tmp_path: Path
) -> None:
    model = ws.open_model(changed(tmp_path / "m", **keys), family="llama")
    assert model.unread.partition("may matter: ")[2] == ", ".join(unread)
    assert (model.unread in model.notes) == bool(unread)
    if unread:
        assert model.unread in ws.audit(model, directions=0).lead


def test_a_proved_row_lists_none(tmp_path: Path) -> None:
    assert not ws.open_model(changed(tmp_path / "m", kind="llama", key_scale=2.0)).unread


def test_the_stack_that_a_family_was_named_for_is_no_other_one(tmp_path: Path) -> None:
    model = ws.open_model(changed(tmp_path / "m"), family="llama")
    assert not model.stacks.others and not other_stacks(model)
