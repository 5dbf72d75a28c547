"""A base of rotation at the top of a config, as transformers 4 wrote it, means the same as in rope_parameters."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

pytestmark = pytest.mark.check


@pytest.mark.parametrize("kind", ["nomic_bert", "jina_embeddings_v3", "olmo_hybrid", "qwen3", "deepseek_v3"])
def test_a_base_at_the_top_is_the_base(kind: str, tmp_path: Path) -> None:
    from tests.census.judge import judge, readings
    from weightscope.adopting.comparison import Stored
    from weightscope.adopting.tiny_models import SIZES
    from weightscope.adopting.trial import FAR, at_work

    values = transformers.AutoConfig.for_model(kind).to_dict()
    values["rope_parameters"] = {"rope_type": "default", **(values["rope_parameters"] or {}), "rope_theta": 37.0}
    config = transformers.AutoConfig.for_model(**values)
    model, observed = at_work(config, SIZES[:1], 3, FAR)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.pop("rope_parameters")["rope_theta"] == 37.0
    (tmp_path / "config.json").write_text(json.dumps(written | {"rope_theta": 37.0}))
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 37.0
    verdicts = judge(observed, Stored(model, tmp_path), *readings(tmp_path))
    assert [verdict.verdict for verdict in verdicts] == ["exact"], verdicts
