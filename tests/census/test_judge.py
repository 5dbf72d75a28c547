"""The judge itself: a row that is right is exact, and one that is wrong in any one cell is called wrong."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from weightscope.checkpoint.opening import open_checkpoint
from weightscope.model.rows.cells import Biases, StoredNorm
from weightscope.model.rows.family import Family
from weightscope.model.rows.table import FAMILIES

pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers, not installed")

from tests.census.judge import Verdict, judge, readings  # noqa: E402
from weightscope.adopting.comparison import Stored  # noqa: E402
from weightscope.adopting.hooks import Observed  # noqa: E402
from weightscope.adopting.tiny_models import SIZES  # noqa: E402
from weightscope.adopting.trial import at_work  # noqa: E402

pytestmark = pytest.mark.check

CONFIG = "config.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[Observed], Stored, Path]]:
    """A tiny model of a type, seen at work and saved."""

    @cache
    def make(kind: str) -> tuple[list[Observed], Stored, Path]:
        model, observed = at_work(transformers.AutoConfig.for_model(kind), SIZES[:1], seed=1, start=37)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return observed, Stored(model, folder), folder

    return make


def row_of(kind: str) -> Family:
    return next(row for row in FAMILIES if kind in row.types)


def judged(made: Any, kind: str, row: Family, tmp_path: Path, **config: Any) -> Verdict:
    """The verdict on a model of one stack, read by a row and with some values of its config replaced."""
    observed, stored, folder = made(kind)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((folder / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(values | config))
    (verdict,) = judge(observed, stored, [ws.Model.of_row(open_checkpoint(tmp_path), row)])
    return verdict


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "bert", "gemma2"])
def test_a_right_row_is_exact(made: Any, kind: str, tmp_path: Path) -> None:
    assert judged(made, kind, row_of(kind), tmp_path).verdict == "exact"


BEFORE = StoredNorm("attention.output.LayerNorm", centred=True, bias=True)
ATTACKS: dict[str, tuple[str, Callable[[Family], Family]]] = {
    "pairs are neighbours": ("qwen3", lambda row: row.but(positions__rope__interleaved=True)),
    "turned the other way": ("qwen3", lambda row: row.but(positions__rope__backwards=True)),
    "not rotated": ("qwen3", lambda row: row.but(positions__rope=None)),
    "a norm that centres": ("qwen3", lambda row: row.but(norms__before=StoredNorm("input_layernorm", centred=True))),
    "gains less one": ("qwen3", lambda row: row.but(norms__before__offset=1.0)),
    "another norm's gains": ("qwen3", lambda row: row.but(norms__before__module="post_attention_layernorm")),
    "no norm": ("qwen3", lambda row: row.but(norms__before=None)),
    "another scale": ("qwen3", lambda row: row.but(scores__scale=lambda config, layer: config.head_dim**-0.4)),
    "no q/k-norm": ("qwen3", lambda row: row.but(scores__qk_norm=None)),
    "q/k-norm after rotation": ("qwen3", lambda row: row.but(scores__qk_norm__rotated=True)),
    "q/k-norm the wrong way round": ("qwen3", lambda row: row.but(scores__qk_norm__query="self_attn.k_norm")),
    "keys for values": ("qwen3", lambda row: row.but(heads__k="self_attn.v_proj", heads__v="self_attn.k_proj")),
    "no biases": ("qwen2", lambda row: row.but(heads__bias=Biases())),
    "no softcap": ("gemma2", lambda row: row.but(steps__softcap=None)),
    "no output bias": ("bert", lambda row: row.but(heads__bias__out=False)),
    "the other order of a fused tensor": ("gpt_neox", lambda row: row.but(heads__layout=row_of("phi3").heads.layout)),
    "a norm before a post-norm layer": ("bert", lambda row: row.but(norms__before=BEFORE)),
    "layers the wrong way round": ("qwen3", lambda row: row.but(config__stored_layer=lambda config, layer: 1 - layer)),
}  # fmt: skip


LEFT_UNREAD = {"no q/k-norm", "q/k-norm the wrong way round"}  # a tensor of attention that no cell reads is refused


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_row_with_one_wrong_cell_is_not_exact(made: Any, attack: str, tmp_path: Path) -> None:
    kind, change = ATTACKS[attack]
    verdict = judged(made, kind, change(row_of(kind)), tmp_path)
    assert verdict.verdict == ("refused" if attack in LEFT_UNREAD else "WRONG") and verdict.reason, verdict


def test_another_rotation_base_is_wrong_with_right_values(made: Any, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 12000.0}}
    verdict = judged(made, "llama", row_of("llama"), tmp_path, **rope)
    assert verdict.verdict == "WRONG" and "values are right" in verdict.reason


@pytest.mark.parametrize("kind", ["cohere2", "ernie4_5", "granitemoe", "helium", "ministral3", "nemotron", "smollm3"])
def test_a_llama_row_is_not_exact_for_its_relatives(made: Any, kind: str, tmp_path: Path) -> None:
    assert judged(made, kind, row_of("llama"), tmp_path).verdict != "exact"


def test_a_stack_that_did_not_run_is_unseen(made: Any) -> None:
    observed, stored, folder = made("bart")
    encoder = [call for call in observed if call.module.startswith("encoder")]
    verdicts = {verdict.row: verdict.verdict for verdict in judge(encoder, stored, *readings(folder))}
    assert verdicts == {"bart.encoder": "exact", "bart.decoder": "unseen", "bart.cross": "unseen"}


def test_a_refusal_is_quoted(made: Any, tmp_path: Path) -> None:
    observed, stored, folder = made("llama")
    (tmp_path / CONFIG).write_text('{"model_type": "of another world"}')
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (verdict,) = judge(observed, stored, *readings(tmp_path))
    assert verdict.verdict == "refused" and "of another world" in verdict.reason


def test_recorded_positions_are_those_given(made: Any) -> None:
    observed, _, _ = made("llama")
    np.testing.assert_array_equal(observed[0].positions, 37 + np.arange(SIZES[0].length))


def test_windows_of_an_image_are_joined_into_one_sequence(made: Any) -> None:
    observed, _, _ = made("qwen2_5_vl_vision")
    first = observed[0].attention
    np.testing.assert_allclose(first.sum(axis=-1), 1, atol=1e-5)
    assert first.shape[1:] == (64, 64) and np.count_nonzero(first[0, 0]) == 16
