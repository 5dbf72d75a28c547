"""Make golden/: tiny models whose layers take more than their stream, and what eager attention computes on them.

    python -m tests.model.rows.make_golden [NAME ...]

A memory, added positions, distances that gate or become values. golden/NAME gets config.json, the attention tensors as
model.safetensors, and expected.npz: for TOWER.LAYER the stream `x`, whatever else `scores` takes (`memory`, `added`,
`added_to_memory`), `attention` (H, n, m) and `output` (n, d).
"""

import inspect
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "golden"
SIZES = {
    "d_model": 16, "hidden_size": 16, "vocab_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "encoder_layers": 2, "decoder_layers": 2, "num_hidden_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_attention_heads": 4, "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8, "intermediate_size": 8,
}  # fmt: skip
T5 = {
    "d_model": 16, "d_kv": 6, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 24,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 1,
}  # fmt: skip
WHISPER = {
    "num_mel_bins": 4, "max_source_positions": 7, "max_target_positions": 12, "begin_suppress_tokens": None,
    "suppress_tokens": None,
}  # fmt: skip
WITH_CROSS = {"is_decoder": True, "add_cross_attention": True, "max_position_embeddings": 16}
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 4, 4, 4], "depths": [1, 1, 1, 1], "layer_type": "basic"}

NOT_ATTENTION = re.compile(
    r"backbone|conv|mlp|fc[12]\b|intermediate|\d\.output\.|pooler|DenseReluDense|input_proj|position_head"
)
Given = tuple[str, str]  # a module and the name of an argument of its forward


@dataclass(frozen=True)
class Stack:
    """One layer: what attends there, the stream that enters, and what else `scores` takes, side by side."""

    tower: str
    layer: int
    attends: str
    stream: Given
    more: Mapping[str, tuple[Given, ...]]


def stack(tower: str, layer: int, attends: str, stream: Given, **more: Given | tuple[Given, ...]) -> Stack:
    return Stack(tower, layer, attends, stream, {k: v if isinstance(v[0], tuple) else (v,) for k, v in more.items()})


SELF, CROSS = "{}coder.layers.1.self_attn", "decoder.layers.{}.encoder_attn"
PLAIN, PADDED = "hidden_states", "input"


def bart_like(norm_first: bool) -> tuple[Stack, ...]:
    """The three stacks of BART and Whisper, whose streams enter attention or the norm before it."""
    stream = (lambda module: (f"{module}_layer_norm", PADDED)) if norm_first else (lambda module: (module, PLAIN))
    return (
        stack("encoder", 1, SELF.format("en"), stream(SELF.format("en"))),
        stack("decoder", 1, SELF.format("de"), stream(SELF.format("de"))),
        stack("cross", 1, CROSS.format(1), stream(CROSS.format(1)), memory=(CROSS.format(1), "key_value_states")),
    )


BLOCK = "{}coder.block.1.layer.{}."
T5_STACKS = (
    stack("encoder", 1, BLOCK.format("en", 0) + "SelfAttention", (BLOCK.format("en", 0) + "layer_norm", PLAIN)),
    stack("decoder", 1, BLOCK.format("de", 0) + "SelfAttention", (BLOCK.format("de", 0) + "layer_norm", PLAIN)),
    stack("cross", 1, BLOCK.format("de", 1) + "EncDecAttention", (BLOCK.format("de", 1) + "layer_norm", PLAIN),
          memory=(BLOCK.format("de", 1) + "EncDecAttention", "key_value_states")),
)  # fmt: skip
DETR_STACKS = (
    stack("encoder", 1, SELF.format("en"), (SELF.format("en"), PLAIN),
          added=(SELF.format("en"), "position_embeddings")),
    stack("cross", 1, CROSS.format(1), (CROSS.format(1), PLAIN), memory=(CROSS.format(1), "key_value_states"),
          added=(CROSS.format(1), "position_embeddings"),
          added_to_memory=(CROSS.format(1), "encoder_position_embeddings")),
)  # fmt: skip
TABLE_STACKS = (
    stack("decoder", 1, SELF.format("de"), (SELF.format("de") + "_layer_norm", PADDED),
          added=(SELF.format("de"), "object_queries")),
    stack("cross", 1, CROSS.format(1), (CROSS.format(1) + "_layer_norm", PADDED),
          memory=(CROSS.format(1), "key_value_states"), added=(CROSS.format(1), "object_queries"),
          added_to_memory=(CROSS.format(1), "spatial_position_embeddings")),
)  # fmt: skip
CONDITIONAL_STACKS = (
    stack("decoder", 1, SELF.format("de"), (SELF.format("de"), PLAIN),
          added=(SELF.format("de"), "query_position_embeddings")),
    *(stack("cross", layer, CROSS.format(layer), (CROSS.format(layer), PLAIN),
            memory=(CROSS.format(layer), "encoder_hidden_states"),
            added=tuple((CROSS.format(layer), name) for name in names),
            added_to_memory=(CROSS.format(layer), "encoder_position_embeddings"))
      for layer, names in ((0, ("query_position_embeddings", "query_sine_embed")), (1, ("query_sine_embed",)))),
)  # fmt: skip


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def detr_config(kind: str) -> Any:
    config: dict[str, Any] = SIZES | {"num_queries": 5, "use_timm_backbone": False, "backbone": None}
    return transformers.AutoConfig.for_model(
        kind, **config, use_pretrained_backbone=False, backbone_config=transformers.ResNetConfig(**RESNET)
    )


TOKENS = torch.arange(3, 10)[None]
TEXTS = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
SOUND = {"input_features": random(1, 4, 14), "decoder_input_ids": TOKENS[:, :5]}
IMAGE = {"pixel_values": random(1, 3, 96, 96)}
WITH_MEMORY = {"input_ids": TOKENS, "encoder_hidden_states": random(1, 5, 16)}
GPT2_AT, BERT_AT = "h.1.crossattention", "encoder.layer.1.crossattention"
# A model's config, its inputs and its stacks.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, torch.Tensor], tuple[Stack, ...]]] = {
    "t5": (lambda: transformers.T5Config(**T5), TEXTS, T5_STACKS),
    "bart": (lambda: transformers.BartConfig(**SIZES, max_position_embeddings=12), TEXTS, bart_like(False)),
    "whisper": (lambda: transformers.WhisperConfig(**SIZES, **WHISPER), SOUND, bart_like(True)),
    "gpt2_cross": (
        lambda: transformers.GPT2Config(**SIZES, **WITH_CROSS, n_embd=16, n_layer=2, n_head=4), WITH_MEMORY,
        (stack("cross", 1, GPT2_AT, ("h.1.ln_cross_attn", PADDED), memory=(GPT2_AT, "encoder_hidden_states")),),
    ),
    "bert_cross": (
        lambda: transformers.BertConfig(**SIZES, **WITH_CROSS), WITH_MEMORY,
        (stack("cross", 1, BERT_AT + ".self", (BERT_AT, PLAIN), memory=(BERT_AT + ".self", "encoder_hidden_states")),),
    ),
    "detr": (lambda: detr_config("detr"), IMAGE, DETR_STACKS),
    "table_transformer": (lambda: detr_config("table-transformer"), IMAGE, TABLE_STACKS),
    "conditional_detr": (lambda: detr_config("conditional_detr"), IMAGE, CONDITIONAL_STACKS),
}  # fmt: skip


class Seen:
    """What the modules of a model were given, by their names, and what they gave."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.given: dict[Given, np.ndarray] = {}
        self.gave: dict[str, np.ndarray] = {}
        self.attention: dict[str, np.ndarray] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._before(name), with_kwargs=True)
            module.register_forward_hook(self._after(name))

    def _before(self, name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            named = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            rows = {key: value for key, value in named.items() if isinstance(value, torch.Tensor) and value.ndim == 3}
            self.given |= {(name, key): value[0].numpy().copy() for key, value in rows.items()}

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            arrays = [array for array in outputs if isinstance(array, torch.Tensor)]
            if arrays and isinstance(arrays[0], torch.Tensor) and arrays[0].ndim == 3:
                self.gave[name] = arrays[0][0].numpy().copy()
            maps = [array for array in arrays if isinstance(array, torch.Tensor) and array.ndim == 4]
            if maps:
                self.attention[name] = maps[-1][0].numpy().copy()  # T5 hands out its bias before

        return hook


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """Every parameter drawn anew, norms and biases included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * draw if "norm" in name and name.endswith("weight") else 0.3 * draw)
    return module.eval()


def of_model(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Config, tensors and expected arrays of a whole model."""
    make_config, inputs, stacks = MODELS[name]
    model: Any = randomised(transformers.AutoModel.from_config(make_config(), attn_implementation="eager"))
    seen = Seen(model)
    with torch.no_grad():
        model(**inputs, output_attentions=True)
    expected = {}
    for stack in stacks:
        arrays = {"x": seen.given[stack.stream], "attention": seen.attention[stack.attends]}
        output = (
            stack.attends
            if not stack.attends.endswith(".self")
            else stack.attends.removesuffix("self") + "output.dense"
        )
        arrays["output"] = seen.gave[output]
        arrays |= {key: np.hstack([seen.given[given] for given in parts]) for key, parts in stack.more.items()}
        expected |= {f"{stack.tower}.{stack.layer}.{key}": array for key, array in arrays.items()}
    with tempfile.TemporaryDirectory() as scratch:  # save_pretrained renames some tensors
        model.save_pretrained(scratch)
        tensors = load_file(Path(scratch) / "model.safetensors")
    kept = {key: w for key, w in tensors.items() if not NOT_ATTENTION.search(key)}
    return model.config.to_dict() | {"transformers_version": ""}, kept, expected


@contextmanager
def softmaxes() -> Iterator[list[np.ndarray]]:
    """The results of every softmax meanwhile."""
    entered: list[np.ndarray] = []
    softmax = torch.nn.functional.softmax

    def watched(scores: Any, *args: Any, **kwargs: Any) -> Any:
        entered.append(softmax(scores, *args, **kwargs).numpy().copy())
        return softmax(scores, *args, **kwargs)

    torch.nn.functional.softmax = watched
    try:
        yield entered
    finally:
        torch.nn.functional.softmax = softmax


SPEECH = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 30}


def of_speech(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One attention module of WavLM (gated biases of distances) or VITS (keys and values of distances)."""
    from transformers.models.vits.modeling_vits import VitsAttention
    from transformers.models.wavlm.modeling_wavlm import WavLMAttention

    if name == "vits":
        values, stem = {"window_size": 3}, "text_encoder.encoder.layers.0.attention."
        module = VitsAttention(transformers.VitsConfig(**SPEECH, **values))
    else:
        values, stem = {"num_buckets": 8, "max_bucket_distance": 12}, "encoder.layers.0.attention."
        module = WavLMAttention(24, 3, num_buckets=8, max_distance=12)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 15, 24, generator=generator)
    with torch.no_grad(), softmaxes() as attention:
        for parameter in module.eval().parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        output = module(x)[0][0].numpy()
    tensors = {stem + key: w.numpy() for key, w in module.state_dict().items()}
    arrays = {"x": x[0].numpy(), "attention": attention[0].reshape(3, 15, 15), "output": output}
    return SPEECH | values | {"model_type": name}, tensors, {f".0.{key}": array for key, array in arrays.items()}


def of_fusion(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Grounding DINO's fusion of image and text: one matrix of scores, a softmax each way."""
    from transformers.models.grounding_dino.modeling_grounding_dino import GroundingDinoFusionLayer

    sizes = {
        "d_model": 24, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "encoder_layers": 1, "decoder_layers": 1,
    }  # fmt: skip
    layer = GroundingDinoFusionLayer(transformers.GroundingDinoConfig(**sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        image, text = (torch.randn(1, n, 24, generator=generator) for n in (9, 5))
        (seen, to_text), (read, to_image) = layer(image, text)
        seen, read = seen - layer.layer_norm_vision(image), read - layer.layer_norm_text(text)
    expected = {}
    for tower, x, memory, attention, output in (
        ("image_to_text", image, text, to_text, seen), ("text_to_image", text, image, to_image, read),
    ):  # fmt: skip
        maps = attention.numpy().reshape(2, x.shape[1], -1)
        arrays = {"x": x[0].numpy(), "memory": memory[0].numpy(), "attention": maps, "output": output[0].numpy()}
        expected |= {f"{tower}.0.{key}": array for key, array in arrays.items()}
    tensors = {f"encoder.layers.0.fusion_layer.{key}": w.numpy() for key, w in layer.state_dict().items()}
    return sizes | {"model_type": "grounding-dino"}, tensors, expected


NAMES = {**dict.fromkeys(MODELS, of_model), "wavlm": of_speech, "vits": of_speech, "grounding_dino": of_fusion}


def make(name: str, folder: Path) -> None:
    """Write one golden folder."""
    config, tensors, expected = NAMES[name](name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file({key: w.copy() for key, w in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(folder / "expected.npz", **expected)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for each in sys.argv[1:] or NAMES:
        print(each, flush=True)
        make(each, GOLDEN / each)
