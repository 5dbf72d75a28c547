"""What a direction of the residual stream does to logits, asked of transformers' own final norm and unembedding."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import weightscope as ws
from tests.support.cases import case_of
from weightscope.core.errors import CheckpointError
from weightscope.heads.audit.directions import token_rows

torch = pytest.importorskip("torch", reason="the witness is a model of torch, which is not installed")
transformers = pytest.importorskip("transformers", reason="the witness is a model of transformers, not installed")

pytestmark = pytest.mark.check

FINAL_NORMS = ("norm", "ln_f", "norm_f", "final_layer_norm", "final_layernorm")
DECODERS = (
    "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "opt_post_norm", "bloom", "mpt", "falcon_grouped", "llama", "mistral",
    "qwen3_next", "gemma2", "gemma3", "phi", "phi3", "olmo", "olmo2", "stablelm", "starcoder2", "cohere", "glm4",
    "gpt_oss", "deepseek_v3",
)  # fmt: skip


def saved(name: str, folder: Path, **config: object) -> "torch.nn.Module":
    """A case's model, written as transformers writes it."""
    from dataclasses import replace

    from tests.support.random_models import random_model

    case = case_of(name)
    model = random_model(replace(case, config=case.config | config))
    model.save_pretrained(folder)
    return model


def logits_of(model: "torch.nn.Module", x: np.ndarray) -> np.ndarray:
    """What transformers' modules after the last layer make of rows of the stream."""
    named = {name.rpartition(".")[2]: module for name, module in model.named_modules() if not re.search(r"\d", name)}
    with torch.no_grad():
        y = torch.from_numpy(x)
        y = next((named[norm] for norm in FINAL_NORMS if norm in named), torch.nn.Identity())(y)
        y = named.get("project_out", torch.nn.Identity())(y)
        return model.get_output_embeddings()(y).numpy()


@pytest.mark.parametrize("name", DECODERS)
def test_a_direction_adds_to_logits_what_transformers_says(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    opened = ws.open_model(tmp_path)
    unembedding, d = opened.unembedding, opened.config.d_model
    x = np.random.default_rng(0).standard_normal((5, d)).astype(np.float32) * 3
    sigma = np.ones(5, np.float32) if unembedding.norm is None else unembedding.norm.sigma(x)
    (_, u), *more = unembedding.blocks()
    assert not more and unembedding.tied == model.config.tie_word_embeddings
    at_zero = logits_of(model, np.zeros((1, d), np.float32))
    ours = x @ u.T / sigma[:, None] + at_zero
    np.testing.assert_allclose(ours, logits_of(model, x), atol=1e-4)
    # Some kernels round a product by how many rows it has.
    np.testing.assert_allclose(unembedding.rows(np.array([3, 1])), u[[3, 1]], rtol=0, atol=1e-6)


def test_a_wrapped_language_model_has_its_unembedding_beside_it(tmp_path: Path) -> None:
    weights = {f"language_model.{name}": w for name, w in tensors_of("llama", tmp_path / "plain").items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tmp_path / "plain" / "config.json").read_text())
    assert ws.open_model(tmp_path).unembedding.tensor.name == "language_model.lm_head.weight"


def tensors_of(name: str, folder: Path) -> dict[str, np.ndarray]:
    saved(name, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_tokens_that_a_head_writes_are_those_whose_logits_it_raises(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path, tie_word_embeddings=False)
    audit = ws.audit(ws.open_model(tmp_path), directions=1)
    constant = logits_of(model, np.zeros((1, model.config.hidden_size), np.float32))
    for head in audit.directions:
        direction = ws.open_model(tmp_path).layer(head.layer).head(head.head).vo.svd()[2][:1]
        raised = (logits_of(model, np.ascontiguousarray(direction, np.float32)) - constant)[0]
        sides = {side["name"]: side for side in head.lines[1].as_json()["sides"]}
        poles = {tuple(sides[f"writes {pole}"]["rows"]) for pole in "+−"}
        assert poles == {tuple(np.argsort(-raised)[:8]), tuple(np.argsort(raised)[:8])}
        assert sides["writes +"]["through"].endswith(("lm_head.weight", "embed_out.weight"))
        assert "embed" in sides["reads +"]["through"] or "wte" in sides["reads +"]["through"]
    assert "through the unembedding" in audit.lead and "final norm folded in" in audit.lead


def without(folder: Path, *names: str, **config: object) -> ws.Model:
    """The checkpoint less some tensors."""
    weights = {k: w for k, w in load_file(folder / "model.safetensors").items() if not k.endswith(names)}
    save_file(weights, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return ws.open_model(folder)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(5)]
    for folder in folders:
        saved("llama", folder)
    _, _, note = token_rows(without(folders[0], "lm_head.weight"))
    assert "no unembedding in this checkpoint" in note and "for what they write" in note
    read, written, note = token_rows(without(folders[1], "embed_tokens.weight"))
    assert read is written and written.unit == "logits" and "no token embedding in this checkpoint" in note
    _, _, note = token_rows(without(folders[2], "model.norm.weight"))
    assert "without the final norm, which is not in this checkpoint (model.norm.weight)" in note
    assert token_rows(without(folders[3], "lm_head.weight", "embed_tokens.weight"))[:2] == (None, None)
    # Tied weights may have been saved under either name.
    tied = without(folders[4], "embed_tokens.weight", tie_word_embeddings=True)
    assert tied.embeddings.token_tensor.name == tied.unembedding.tensor.name == "lm_head.weight"


def test_an_encoder_has_no_unembedding_that_is_one_matrix() -> None:
    from tests.support.tiny_models import fixture

    with pytest.raises(CheckpointError, match="bert has no unembedding that is one matrix"):
        _ = fixture("bert").model.unembedding
