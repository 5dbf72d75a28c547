"""What is called proved is exact on the very checkpoint: at its sizes, in every layer, far away, with large numbers."""

from pathlib import Path
from typing import Any

import pytest

import weightscope as ws
from tests.support.commands import run
from tests.support.slow import one_in
from weightscope.checkpoint.config import digest_of
from weightscope.checkpoint.opening import open_checkpoint

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.adopting.tricks import (  # noqa: E402
    SELDOM,
    TRICKS,
    Alone,
    BaseByLength,
    NoWindowConfig,
    Optional,
    OptionalConfig,
    Plain,
    ScaleOfWideHeads,
    TemperatureFrom6000,
    registered,
    saved,
    worst,
)
from weightscope.adopting import full_size  # noqa: E402
from weightscope.adopting.adopt import PROOF, adopt, answer_of  # noqa: E402
from weightscope.model.rows import table  # noqa: E402
from weightscope.model.rows.stanzas import file_of  # noqa: E402

pytestmark = pytest.mark.check


@pytest.mark.parametrize("trick", one_in(2, TRICKS))
def test_a_trick_of_the_full_size_is_never_proved(trick: str, tmp_path: Path) -> None:
    attention, sizes = TRICKS[trick]
    saved(registered(attention), tmp_path, **sizes)
    with pytest.raises(ws.CheckpointError, match="at its own size: layer"):
        adopt(open_checkpoint(tmp_path))


@pytest.mark.parametrize("trick", one_in(3, SELDOM))
def test_a_trick_of_some_texts_is_never_proved(trick: str, tmp_path: Path) -> None:
    attention, config, values = SELDOM[trick]
    saved(registered(attention, config), tmp_path, **values)
    with pytest.raises(ws.CheckpointError, match="no row reads it exactly; nearest"):
        adopt(open_checkpoint(tmp_path))


def test_texts_longer_than_the_longest_run_are_unproved(tmp_path: Path) -> None:
    """Where a text longer than the window does not fit, the row is proved on texts as long as those that ran."""
    saved(registered(BaseByLength), tmp_path, max_position_embeddings=2048)
    checkpoint = open_checkpoint(tmp_path)
    answer = answer_of(adopt(checkpoint), checkpoint)
    limit = "; unproved beyond texts of 1,152 tokens"
    assert answer["proof"].endswith(limit)
    (tmp_path / "rows.toml").write_text(answer["file"])
    assert limit in ws.open_model(tmp_path, families=tmp_path / "rows.toml").title


def test_without_a_known_window_positions_beyond_the_run_are_unproved(tmp_path: Path) -> None:
    saved(registered(TemperatureFrom6000, NoWindowConfig), tmp_path)
    adopted = adopt(open_checkpoint(tmp_path))
    assert adopted.beyond == ("position 4,608", "texts of 1,152 tokens")


def test_queries_that_see_one_key_prove_nothing(tmp_path: Path) -> None:
    saved(registered(Alone), tmp_path)
    (reason,) = adopt(open_checkpoint(tmp_path)).unproved.values()
    assert reason == "every query saw one key only, so that no score was compared"


@pytest.mark.parametrize(
    "sizes", [{}, {"head_dim": 48, "num_hidden_layers": 9, "max_position_embeddings": 4096}], ids=str
)
def test_a_proved_row_is_exact_on_the_checkpoint(sizes: dict[str, int], tmp_path: Path) -> None:
    model = saved(registered(Plain), tmp_path, **sizes)
    adopted = adopt(open_checkpoint(tmp_path))
    assert not adopted.unproved and worst(model, tmp_path, adopted.rows[0]) < 1e-5


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(registered(Plain), tmp_path, num_hidden_layers=5)
    load, loaded = full_size._Weights.load, []

    def counted(weights: Any, names: set[str], checkpoint: Any) -> None:
        load(weights, names, checkpoint)
        loaded.append({i for i, layer in enumerate(weights.model.layers) if not layer.mlp.up_proj.weight.is_meta})

    monkeypatch.setattr(full_size._Weights, "load", counted)
    assert not adopt(open_checkpoint(tmp_path)).unproved
    assert {frozenset(layers) for layers in loaded} == {frozenset(), *(frozenset({i}) for i in range(5))}


def test_a_checkpoint_too_large_to_run_is_unproved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(registered(ScaleOfWideHeads), tmp_path / "model", head_dim=48)
    monkeypatch.setattr(full_size, "MOST_WORK", 1e6)
    monkeypatch.setattr(table, "own_folder", lambda: tmp_path / "own")
    result = run("adopt", tmp_path / "model", "--save")
    assert "this row, unproved at its own size" in result.stdout and "multiplications; 1e+06 at most" in result.stdout
    (file,) = (tmp_path / "own").iterdir()
    assert "adopted, unproved at its own size" in ws.open_model(tmp_path / "model", families=file).title


@pytest.mark.parametrize(("option", "value"), [("position_mode", "alibi"), ("sharpness", 2.0)])
def test_an_option_that_no_row_reads_is_pinned(option: str, value: object, tmp_path: Path) -> None:
    model = registered(Optional, OptionalConfig)
    saved(model, tmp_path / "one")
    saved(model, tmp_path / "other", **{option: value})
    adopted = adopt(open_checkpoint(tmp_path / "one"))
    (tmp_path / "rows.toml").write_bytes(file_of(adopted.rows, PROOF))
    assert ws.open_model(tmp_path / "one", families=tmp_path / "rows.toml")
    with pytest.raises(ws.CheckpointError, match=f"a {option} other than .*, which this row was not proved for"):
        ws.open_model(tmp_path / "other", families=tmp_path / "rows.toml")


def test_a_proof_does_not_cover_another_config(tmp_path: Path) -> None:
    """Heads are narrow in the one, and in the other so wide that the scale is another: the row is wrong there."""
    saved(registered(ScaleOfWideHeads), tmp_path / "narrow")
    saved(registered(ScaleOfWideHeads), tmp_path / "wide", head_dim=48)
    checkpoint, file = open_checkpoint(tmp_path / "narrow"), tmp_path / "rows.toml"
    file.write_bytes(file_of(adopt(checkpoint).rows, PROOF, digest=digest_of(checkpoint.config)))
    assert ws.open_model(tmp_path / "narrow", families=file).family.origin == f"adopted, proved against {PROOF}"
    assert ws.open_model(tmp_path / "wide", families=file).title.endswith("but not with this config)")
