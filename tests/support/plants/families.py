"""Tiny checkpoints of a dozen families, with every part under one name however a family fuses or turns it.

Models are transformers' own, drawn anew with gains of norms that are not all one, and saved by transformers; what a
part is in its file is written here a second time, apart from the rows that weightscope reads files by.
"""

import zlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weightscope.checkpoint.config import read_json
from weightscope.core.files import Folder, scratch_folder

LAYERS, WIDTH, HEADS, GROUPS, HEAD_DIM, INNER, VOCABULARY = 3, 64, 4, 2, 16, 96, 128
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": HEAD_DIM, "intermediate_size": INNER, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


class Family(NamedTuple):
    """What a family's config adds to SIZES, and how its file names and stores parts."""

    config: dict[str, Any]
    layer: str
    modules: dict[str, str]  # by part; "qkv" and "gate_up" where they are fused
    tokens: str
    norm: str  # the last one
    head: str = ""  # empty where it is tied to the tokens
    fused: str = "blocks"  # or "groups", or "heads": how rows of qkv lie
    turned: bool = False  # matrices are (in, out)
    groups: int = GROUPS
    offset: float = 0.0  # what is added to stored gains of norms
    experts: int = 0
    masked: bool = False  # a masked language model

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a layer that are as wide as the model."""
        return tuple(part for part in self.modules if part.startswith("norm"))


_NORMS = {"norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
_SEPARATE = {part: f"self_attn.{part}_proj" for part in "qkvo"}
_GATED = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_LLAMA = Family({}, "model.layers.{i}.", _NORMS | _SEPARATE | _GATED, "model.embed_tokens", "model.norm", "lm_head")
_GPT = {"norm_1": "ln_1", "norm_2": "ln_2", "qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc",
        "down": "mlp.c_proj"}  # fmt: skip
_NEOX = {"qkv": "attention.query_key_value", "o": "attention.dense", "up": "mlp.dense_h_to_4h",
         "down": "mlp.dense_4h_to_h"}  # fmt: skip
_FALCON = {"norm_1": "ln_attn", "norm_2": "ln_mlp", "qkv": "self_attention.query_key_value",
           "o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}  # fmt: skip
_BERT = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
         "o": "attention.output.dense", "norm_1": "attention.output.LayerNorm", "up": "intermediate.dense",
         "down": "output.dense", "norm_2": "output.LayerNorm"}  # fmt: skip
_MOE = {"router": "mlp.gate"} | {f"expert.{part}": f"mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")}
_NO_GROUPS = {"num_key_value_heads": None, "head_dim": None}
_GPT_SIZES = {
    **dict.fromkeys(SIZES),
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
}
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA._replace(
        config={"tie_word_embeddings": True}, modules=_LLAMA.modules | _QK_NORMS, head="",
    ),
    "gemma2": _LLAMA._replace(
        config={"query_pre_attn_scalar": HEAD_DIM, "sliding_window": 8}, head="", offset=1.0,
        modules=_LLAMA.modules | {"norm_3": "pre_feedforward_layernorm", "norm_4": "post_feedforward_layernorm"},
    ),
    "phi3": _LLAMA._replace(
        modules=_NORMS | {"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_up_proj",
                          "down": "mlp.down_proj"},
    ),
    "gpt2": Family(_GPT_SIZES, "transformer.h.{i}.", _GPT, "transformer.wte", "transformer.ln_f", turned=True,
                   groups=HEADS),
    "gpt_neox": Family(_NO_GROUPS, "gpt_neox.layers.{i}.", _NORMS | _NEOX, "gpt_neox.embed_in",
                       "gpt_neox.final_layer_norm", "embed_out", fused="heads", groups=HEADS),
    "falcon": Family({**_NO_GROUPS, "num_kv_heads": GROUPS, "new_decoder_architecture": True,
                      "intermediate_size": None}, "transformer.h.{i}.",
                     _FALCON,
                     "transformer.word_embeddings", "transformer.ln_f", fused="groups"),
    "bert": Family(_NO_GROUPS, "bert.encoder.layer.{i}.", _BERT, "bert.embeddings.word_embeddings",
                   "bert.embeddings.LayerNorm", groups=HEADS, masked=True),
    "mixtral": _LLAMA._replace(
        config={"num_local_experts": 4, "num_experts_per_tok": 2}, experts=4,
        modules=_NORMS | _SEPARATE | {"router": "block_sparse_moe.gate", **{
            f"expert.{part}": f"block_sparse_moe.experts.{{e}}.{name}"
            for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))}},
    ),
    "qwen3_moe": _LLAMA._replace(
        config={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, experts=4,
        modules=_NORMS | _SEPARATE | _QK_NORMS | _MOE,
    ),
    "gpt_oss": _LLAMA._replace(
        config={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        modules=_NORMS | _SEPARATE | {"router": "mlp.router", "experts.gate_up": "mlp.experts.gate_up_proj",
                                      "experts.down": "mlp.experts.down_proj"},
        experts=4,
    ),
}  # fmt: skip


@dataclass
class Planted:
    """A checkpoint in memory: its config, its tensors by their names in the file, and how its family stores parts."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    def copy(self) -> "Planted":
        """One whose tensors and config can be changed."""
        return Planted(self.name, deepcopy(self.config), {name: w.copy() for name, w in self.tensors.items()})

    def stored(self, part: str, layer: int | None, end: str = "weight", expert: int = 0) -> str:
        """The tensor that holds a part of a layer, or of the model; empty if there is none."""
        family = self.family
        if layer is None:
            module = {"tokens": family.tokens, "norm": family.norm, "head": family.head}[part]
        else:
            module = family.modules.get(part) or family.modules.get({"q": "qkv", "k": "qkv", "v": "qkv",
                "gate": "gate_up", "up": "gate_up"}.get(part, ""), "")  # fmt: skip
            module = module and family.layer.format(i=layer) + module.replace("{e}", str(expert))
        names = (f"{module}.{end}", module if end == "weight" else f"{module}_{end}")
        return next((name for name in names if module and name in self.tensors), "")

    def rows(self, part: str) -> np.ndarray | None:
        """The rows of a fused tensor that are this part's; None where it has a tensor of its own."""
        family = self.family
        if part in family.modules or part not in ("q", "k", "v", "gate", "up"):
            return None
        if part in ("gate", "up"):
            return np.arange(INNER) + INNER * (part == "up")
        per = HEADS // family.groups
        if family.fused == "blocks":
            start = {"q": 0, "k": HEADS, "v": HEADS + family.groups}[part]
            places = np.arange(start, start + (HEADS if part == "q" else family.groups))
        else:
            first = {"q": 0, "k": per, "v": per + 1}[part]
            count = per if part == "q" else 1
            places = (np.arange(family.groups)[:, None] * (per + 2) + first + np.arange(count)).reshape(-1)
        return (places[:, None] * HEAD_DIM + np.arange(HEAD_DIM)).reshape(-1)

    def has(self, part: str, layer: int | None = 1, end: str = "weight") -> bool:
        return bool(self.stored(part, layer, end))

    def get(self, part: str, layer: int | None, end: str = "weight", expert: int = 0) -> np.ndarray:
        """A part with a row for each output, (out, in), or a vector."""
        w = self.tensors[self.stored(part, layer, end, expert)]
        w = w.T if self._is_turned(layer, w) else w
        rows = self.rows(part) if layer is not None else None
        return w if rows is None else w[rows]

    def put(self, part: str, layer: int | None, new: np.ndarray, end: str = "weight", expert: int = 0) -> None:
        """Replace a part."""
        name = self.stored(part, layer, end, expert)
        w = self.tensors[name].T if self._is_turned(layer, self.tensors[name]) else self.tensors[name]
        rows = self.rows(part) if layer is not None else None
        if rows is not None:
            w = w.copy()
            w[rows] = new
            new = w
        new = np.asarray(new, np.float32)
        self.tensors[name] = np.ascontiguousarray(new.T if self._is_turned(layer, self.tensors[name]) else new)

    def _is_turned(self, layer: int | None, w: np.ndarray) -> bool:
        return self.family.turned and layer is not None and w.ndim == 2

    def parts(self, *parts: str, layers: Iterator[int] | range = range(LAYERS)) -> Iterator[tuple[str, int, str]]:
        """Part, layer and end of every weight and bias that there is."""
        for layer in layers:
            for part in parts:
                for end in ("weight", "bias"):
                    if self.has(part, layer, end):
                        yield part, layer, end


def original(name: str) -> Planted:
    """The family's tiny model, drawn anew from a seed of its name and saved by transformers."""
    import torch
    import transformers
    from safetensors.torch import load_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = _auto(name).from_config(_config(name), attn_implementation="eager")
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for module, parameter in model.named_parameters():
        draw = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
        is_gain = parameter.ndim == 1 and module.endswith("weight")
        gain = 1 - FAMILIES[name].offset + 0.2 * draw
        sizes = 0.15 * np.exp(0.4 * rng.standard_normal((len(parameter), *[1] * (parameter.ndim - 1)), np.float32))
        with torch.no_grad():
            parameter.copy_(torch.tensor(gain if is_gain else sizes * draw))
    with scratch_folder() as folder:
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        config = read_json(folder / "config.json")
    return Planted(name, config, {key: tensors[key].float().numpy().copy() for key in sorted(tensors)})


def _config(name: str) -> Any:
    import transformers

    sizes = SIZES | FAMILIES[name].config
    return transformers.AutoConfig.for_model(name, **{key: size for key, size in sizes.items() if size is not None})


def _auto(name: str) -> Any:
    import transformers

    return transformers.AutoModelForMaskedLM if FAMILIES[name].masked else transformers.AutoModelForCausalLM


TOKENS = [5, 17, 3, 99, 64, 31, 120, 126, 127, 8, 77, 45, 100, 23, 60, 12, 90, 3, 111, 50, 6, 127, 125, 71]


def logits(name: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Of the eager model with these weights, float32, (tokens, vocabulary); None where it does not take them."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from safetensors.numpy import save_file

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with scratch_folder() as folder:
        rest = {key: value for key, value in config.items() if key != "quantization_config"}
        Folder(folder).json("config.json", rest)
        whole = {key: np.ascontiguousarray(w, np.float32) for key, w in tensors.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        try:
            model = _auto(name).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
            with torch.no_grad():
                ids = [token for token in TOKENS if token < config["vocab_size"]]
                return np.asarray(model(torch.tensor([ids])).logits[0].numpy())
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, ZeroDivisionError, StrictDataclassError):
            return None


def random_llama() -> Planted:
    """Three layers of random weights, the same each time."""
    rng, d, inner = np.random.default_rng(0), 64, 96
    shapes = {"embed_tokens": (128, d), "norm": (d,)} | {
        f"layers.{i}.{name}": shape for i in range(3) for name, shape in {
            "input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (d, d),
            "self_attn.k_proj": (d // 2, d), "self_attn.v_proj": (d // 2, d), "self_attn.o_proj": (d, d),
            "mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner)}.items()}  # fmt: skip
    shapes = {f"model.{name}.weight": shape for name, shape in shapes.items()} | {"lm_head.weight": (128, d)}
    draw = {name: 0.1 * rng.standard_normal(shape) for name, shape in shapes.items()}
    draw |= {name: w * np.exp(rng.standard_normal((len(w), 1)) / 3) for name, w in draw.items() if w.ndim == 2}
    draw |= {name: w + 1 for name, w in draw.items() if w.ndim == 1}
    config = {key: size for key, size in SIZES.items() if size is not None}
    config |= {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
               "architectures": ["LlamaForCausalLM"],
               "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    return Planted("llama", config, {name: w.astype(np.float32) for name, w in draw.items()})
