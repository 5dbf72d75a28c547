"""The three stacks of encoder-decoders: equal to eager attention, their heads the maps multiplied out, each audited."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import weightscope as ws
from tests.support.audits import audit_of

torch = pytest.importorskip("torch", reason="tiny models are made by torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="tiny models are made by transformers")

TOWERS = ("encoder", "decoder", "cross")
KINDS = ("t5", "umt5", "bart", "whisper", "t5gemma", "cohere_asr", "time_series_transformer")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, list[str]]]]:
    """Tiny models by kind: where they lie, and what the census says of their stacks."""
    from weightscope.adoption.census import CONFIG_MAPPING, at_work, readings
    from weightscope.adoption.judge import Stored, judge
    from weightscope.adoption.sizes import SIZES

    transformers.logging.disable_progress_bar()
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        model, observed = at_work(CONFIG_MAPPING[kind](), SIZES[1:], 1, 37)
        model.save_pretrained(folder)
        verdicts = judge(observed, Stored(model, folder), *readings(folder))
        found[kind] = folder, [verdict.verdict for verdict in verdicts]
    yield found


@pytest.mark.parametrize("kind", KINDS)
def test_all_three_stacks_are_the_eager_models(kind: str, folders: dict[str, tuple[Path, list[str]]]) -> None:
    folder, verdicts = folders[kind]
    assert verdicts == ["exact"] * 3
    assert ws.open_model(folder).family.tower == "decoder"
    assert {*TOWERS} <= {*ws.open_model(folder).stacks}


@pytest.mark.parametrize("kind", ["gpt2", "bert", "roberta"])
def test_cross_attention_that_a_decoder_was_given_is_the_eager_models(kind: str, tmp_path: Path) -> None:
    from weightscope.adoption.tiny import randomise

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}
    config = transformers.AutoConfig.for_model(
        kind, **sizes, vocab_size=24, is_decoder=True, add_cross_attention=True, pad_token_id=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model, 0)
    model.save_pretrained(tmp_path)
    memory = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1))
    entered: list[torch.Tensor] = []
    first = next(module for name, module in model.named_modules() if name.endswith("crossattention"))
    norm = next((module for name, module in model.named_modules() if name.endswith("ln_cross_attn")), first)
    norm.register_forward_pre_hook(
        lambda _, args, more: entered.append((args or (*more.values(),))[0]), with_kwargs=True
    )
    with torch.no_grad():
        ids = torch.arange(2, 9)[None]
        seen = model(input_ids=ids, encoder_hidden_states=memory, output_attentions=True).cross_attentions
    layer = ws.open_model(tmp_path, tower="cross").layer(0)
    scores = layer.scores(entered[0][0].numpy(), memory=memory[0].numpy())
    attention = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(attention, seen[0][0].numpy(), atol=1e-5)
    assert ws.open_model(tmp_path).family.memory is None


def test_a_cross_heads_matrix_is_its_projections_multiplied_out(folders: dict[str, tuple[Path, list[str]]]) -> None:
    folder, _ = folders["t5"]
    model = ws.open_model(folder, tower="cross")
    stem = "decoder.block.1.layer.1."
    names = ("EncDecAttention.q", "EncDecAttention.k", "EncDecAttention.v", "EncDecAttention.o", "layer_norm")
    q, k, v, o, gamma = (model.checkpoint[f"{stem}{name}.weight"].read().astype(np.float64) for name in names)
    r = model.config.head_dim
    for head in model.layer(1).heads:
        rows = slice(head.index * r, (head.index + 1) * r)
        np.testing.assert_allclose(head.qk.dense(), gamma[:, None] * q[rows].T @ k[rows], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(head.vo.dense(), v[rows].T @ o[:, rows].T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tower", TOWERS)
def test_each_stack_is_audited(tower: str, folders: dict[str, tuple[Path, list[str]]], tmp_path: Path) -> None:
    result = audit_of(folders["t5"][0], tmp_path, "--tower", tower)
    assert result.exit_code == 0, result.output
    assert ("cross-attention's maps lead from one space to another" in result.output) == (tower == "cross")


def test_heads_of_cross_attention_are_not_wired(folders: dict[str, tuple[Path, list[str]]]) -> None:
    with pytest.raises(ws.CheckpointError, match="is cross-attention: its heads read what an encoder made"):
        ws.circuits(ws.open_model(folders["t5"][0], tower="cross"))
