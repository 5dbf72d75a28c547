"""Bugs of converters and exporters that were reported in public, done again to tiny models, and what `same` says.

Each is re-enacted from its published description: what the bug did to the weights is done to a model of random weights
of an architecture that it concerned, or of one with the same convention.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import weightscope as ws
from tests.support.plants.bug_versions import Release, run
from tests.support.plants.plant import Made, Plant
from weightscope.core.errors import CheckpointError

Weights = dict[str, np.ndarray]
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 3, 64, 8, 4, 8, 4
COMMON = {
    "hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
MORE = {
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": WIDTH // 2},
}


class Bug(NamedTuple):
    """A public report, and what its bug did to the weights."""

    report: str  # where it is described, on github.com
    tool: str
    what: str  # what happened, in our words
    model: str  # the model_type that it is done to
    deed: Callable[[Weights], None]
    named: str  # what the deed of `same` has to contain


def _each(weights: Weights, end: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change every tensor whose name ends so."""
    for name in [name for name in weights if name.endswith(end)]:
        weights[name] = np.ascontiguousarray(change(weights[name]))


def _norms(by: float, *, last: bool = True) -> Callable[[Weights], None]:
    """Add a number to the gains of norms."""

    def change(weights: Weights) -> None:
        for name in [name for name in weights if "norm" in name and (last or "layers." in name)]:
            weights[name] = weights[name] + np.float32(by)

    return change


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in the order that a rotation of neighbours needs."""
    return w.reshape(heads, 2, -1, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def _rotary(queries: int = HEADS, keys: int = KV_HEADS) -> Callable[[Weights], None]:
    """Queries and keys in the other rotary layout, by these numbers of heads; 0 leaves them."""

    def change(weights: Weights) -> None:
        for letter, heads in (("q", queries), ("k", keys)):
            if heads:
                _each(weights, f"self_attn.{letter}_proj.weight", lambda w, heads=heads: interleaved(w, heads))  # type: ignore[misc]

    return change


def _undone_wrongly(weights: Weights) -> None:
    """The rotary layout of GGUF files undone with the axes of heads and of their pairs exchanged, by as many heads of
    keys as of queries.
    """
    for letter, heads in (("q", HEADS), ("k", KV_HEADS)):

        def change(w: np.ndarray, heads: int = heads) -> np.ndarray:
            stored = interleaved(w, heads)
            return stored.reshape(-1, HEADS, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)

        _each(weights, f"self_attn.{letter}_proj.weight", change)


def _unfilled_experts(weights: Weights) -> None:
    """Experts that were never filled, as they are initialised."""
    rng = np.random.default_rng(1)
    for name in [name for name in weights if ".experts." in name]:
        weights[name] = (0.02 * rng.standard_normal(weights[name].shape)).astype(np.float32)


def _without(end: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if name.endswith(end)]:
            del weights[name]

    return change


def _square_experts(weights: Weights) -> None:
    """Stacked down-projections, square in the model of the report, not transposed."""
    _each(weights, "experts.down_proj", lambda w: w.swapaxes(-1, -2) if w.shape[-1] == w.shape[-2] else w[:, ::-1])


BUGS = (
    Bug("Blaizzy/mlx-vlm/issues/1548", "mlx-vlm", "1 added to norms of files that were converted already", "qwen3",
        _norms(1), "1 added"),
    Bug("Blaizzy/mlx-vlm/pull/2114", "mlx-vlm", "published conversions keep a folded 1 that the reader adds again",
        "gemma2", _norms(1), "1 added"),
    Bug("ml-explore/mlx-lm/pull/1198", "mlx-lm", "norms shifted twice where a file has MTP tensors", "gemma2",
        _norms(2), "1 added twice"),
    Bug("unslothai/unsloth-zoo/pull/1095", "unsloth-zoo", "norms of layers one too high in an export, others right",
        "gemma2", _norms(1, last=False), "1 added"),
    Bug("NVIDIA-NeMo/Megatron-Bridge/issues/1929", "Megatron-Bridge",
        "zero-centred norms changed in place, once more with each export", "gemma2", _norms(-1), "1 subtracted"),
    Bug("huggingface/nanotron/pull/427", "nanotron", "interleaved queries and keys exported as they are", "llama",
        _rotary(), "rotary layout"),
    Bug("ggml-org/llama.cpp/pull/3364", "llama.cpp", "keys permuted by the wrong number of heads (GQA)", "llama",
        _rotary(0, HEADS // KV_HEADS), "by 2 heads instead of 4"),
    Bug("huggingface/transformers/issues/31766", "transformers",
        "the permutation of a GGUF file undone by the wrong number of heads", "llama", _undone_wrongly, "and back"),
    Bug("foundation-model-stack/foundation-model-stack/pull/527", "foundation-model-stack",
        "rotary rows permuted with half the head size", "llama", _rotary(2 * HEADS, 2 * KV_HEADS),
        "by 16 heads instead of 8"),
    Bug("AI-Hypercomputer/maxtext/issues/1774", "MaxText",
        "Llama 3's queries and keys permuted though they need not be", "llama", _rotary(), "rotary layout"),
    Bug("NVIDIA-NeMo/Megatron-Bridge/pull/3740", "Megatron-Bridge", "packed experts skipped and left as initialised",
        "qwen3_moe", _unfilled_experts, "unrelated values"),
    Bug("NVIDIA/Model-Optimizer/pull/1305", "Model-Optimizer", "biases of experts dropped by an early return",
        "gpt_oss", _without("experts.down_proj_bias"), "bias dropped"),
    Bug("ml-explore/mlx-lm/issues/1079", "mlx-lm", "square experts of bfloat16 files not transposed", "gpt_oss",
        _square_experts, "transposed"),
)  # fmt: skip


COLUMNS = ("report", "tool", "what", "model", "evidence", "verdict", "deeds", "as_expected")
SOUND = ("same bytes", "same values")
DESCRIBED, RAN = "from the description", "the tool's own versions"
QWEN_3_5 = {
    "text_config": COMMON | {
        "num_hidden_layers": 4, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
                            "mrope_section": [1, 1, 0], "mrope_interleaved": True},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": WIDTH,
        "patch_size": 4, "num_position_embeddings": 16,
    },
    "tie_word_embeddings": False,
}  # fmt: skip


def tiny(model_type: str, folder: Path) -> Path:
    """A model of random weights with gains that differ from one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    sizes: dict[str, Any] = COMMON | MORE.get(model_type, {})
    if model_type == "gpt_oss":
        sizes["intermediate_size"] = WIDTH  # experts are square, as in the models of the report
    is_text = model_type != "qwen3_5"
    config: Any = AutoConfig.for_model(model_type, **(sizes if is_text else QWEN_3_5))
    model = (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
        elif name.endswith("bias"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def enacted(bug: Bug) -> Plant:
    """The bug done to a model of random weights."""
    from safetensors.numpy import load_file, save_file

    def make(folder: Path) -> Made:
        original, broken = tiny(bug.model, folder / bug.model), folder / "broken"
        weights = load_file(original / "model.safetensors")
        bug.deed(weights)
        broken.mkdir()
        save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(original / "config.json", broken)
        return Made(broken, [original])

    cells = {"report": f"https://github.com/{bug.report}", "tool": bug.tool, "what": bug.what, "model": bug.model}
    return Plant(f"{bug.tool} {bug.report}", make, {"same": bug.named}, cells | {"evidence": DESCRIBED})


def before_and_after(release: Release, folder: Path) -> Iterator[Plant]:
    """A version of a tool with a bug, and one with its fix, run in one folder; `make` raises where one does not run."""
    original = tiny(release.model, folder / f"{release.tool}-{release.model}")
    for version, has_bug in zip(release.versions, (True, False), strict=True):

        def make(_: Path, version: str = version) -> Made:
            ran = run(release, version, original, folder / release.tool)
            return Made(ran.copy, [ran.original])

        what = release.what if has_bug else "mended"
        cells = {"report": release.url, "tool": f"{release.tool} {version}", "what": what, "model": release.model}
        named = release.named if has_bug else None
        yield Plant(f"{release.tool} {version}", make, {"same": named}, cells | {"evidence": RAN})


def judged(plant: Plant, made: Made) -> dict[str, object]:
    """Verdict and deeds of `same`: "different" under the bug's name, and equal values once it is mended."""
    try:
        same = ws.same(made.bases[0], made.suspect)
        verdict, deeds = same.verdict, "; ".join(dict.fromkeys(each.deed for each in same.differing))
    except CheckpointError as error:
        verdict, deeds = "refused", str(error)
    named = plant.expects["same"]
    is_right = verdict in SOUND if named is None else named in deeds and verdict == "different"
    return {"verdict": verdict, "deeds": deeds, "as_expected": is_right}
