"""Architectures of new combinations and new names are read, exactly on the checkpoint, or refused."""

from pathlib import Path
from typing import Any

import pytest

import weightscope as ws
from weightscope.checkpoint.opening import open_checkpoint

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.adopting.novelties import (  # noqa: E402
    Backwards,
    BackwardsConfig,
    GatedSinks,
    JointByHead,
    JointKeys,
    JointKeysOwnNorms,
    OwnBases,
    OwnBasesConfig,
    OwnBasesUsualEps,
    OwnSlopes,
    StoredSlopes,
    TalkingHeads,
    Tempered,
    Waves,
)
from tests.adopting.tricks import PlainConfig, registered, saved, worst  # noqa: E402
from weightscope.adopting.adopt import PROOF, adopt  # noqa: E402
from weightscope.adopting.tiny_models import SIZES  # noqa: E402
from weightscope.adopting.trial import at_work  # noqa: E402
from weightscope.model.rows.stanzas import file_of, read_rows  # noqa: E402
from weightscope.model.rows.table import FAMILIES  # noqa: E402

pytestmark = pytest.mark.check

READ: dict[str, tuple[Any, Any]] = {
    "keys with values in one tensor, LayerNorm of queries and keys": (JointKeys, PlainConfig),
    "the same head by head": (JointByHead, PlainConfig),
    "slopes of its own": (OwnSlopes, PlainConfig),
    "learned slopes": (StoredSlopes, PlainConfig),
    "values, keys, queries in one tensor, capped scores": (Backwards, BackwardsConfig),
    "an output gate and sinks": (GatedSinks, PlainConfig),
    "q/k-norms after a rotation by each layer's base": (OwnBases, OwnBasesConfig),
    "the same with torch's usual eps": (OwnBasesUsualEps, OwnBasesConfig),
    "keys with values, first, and norms with parameters of their own": (JointKeysOwnNorms, PlainConfig),
    "a temperature of each head": (Tempered, PlainConfig),
}


@pytest.mark.parametrize("name", READ)
def test_a_new_combination_is_read_exactly(name: str, tmp_path: Path) -> None:
    model = saved(registered(*READ[name]), tmp_path / "model")
    adopted = adopt(open_checkpoint(tmp_path / "model"))
    assert not adopted.unproved
    (tmp_path / "rows.toml").write_bytes(file_of(adopted.rows, PROOF))
    (row,) = read_rows(tmp_path / "rows.toml", FAMILIES.row)
    assert worst(model, tmp_path / "model", row) < 6e-5  # float32, where a temperature makes scores e times as large


def test_talking_heads_are_refused(tmp_path: Path) -> None:
    saved(registered(TalkingHeads), tmp_path)
    with pytest.raises(ws.CheckpointError, match="no row reads it exactly"):
        adopt(open_checkpoint(tmp_path))


def test_a_refusal_names_the_tensor_that_no_cell_reads(tmp_path: Path) -> None:
    saved(registered(Waves), tmp_path)
    with pytest.raises(ws.CheckpointError, match=r"attention is off by .*; no cell for self_attn\.temp made it exact"):
        adopt(open_checkpoint(tmp_path))


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_eps_of_inner_norms_is_found_under_another_key(kind: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[kind]
    model = transformers.AutoModel._model_mapping[config]
    keys = {**config.attribute_map, "rms_norm_eps": "small_eps"}
    config_class: Any = type("Again", (config,), {
        "model_type": f"{kind}_again", "attribute_map": keys,
        "__init__": config.__init__, "__module__": config.__module__,
    })  # fmt: skip
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    again = type("AgainModel", (model,), {"config_class": config_class})
    transformers.AutoModel.register(config_class, again, exist_ok=True)
    made, _ = at_work(config_class(), SIZES[1:], seed=5, start=0)
    made.save_pretrained(tmp_path)
    adopted = adopt(open_checkpoint(tmp_path))
    assert adopted.rows[0].config.keys["norm_eps"] == ("small_eps",) and not adopted.unproved
