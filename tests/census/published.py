"""Tiny models of architectures that only remote code has, after their published descriptions, and a census of them.

    python -m tests.census.published [TYPE ...] [--out weightscope/model/rows/published.csv]

Each `Published` names the tensors and the config keys of the files, and the text that describes the mechanism: code of
other projects, as read on 28 November 2026. The authors' own code was not run. One eager model computes attention from
that. Two sizes of each are run, saved and compared as the census does.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tests.census.census import _together
from tests.census.judge import Verdict, judge, readings
from tests.census.record import Row, write
from tests.census.unnamed import Named, named
from weightscope.adopting.comparison import Stored
from weightscope.adopting.hooks import observe
from weightscope.adopting.tiny_models import SIZES, randomise
from weightscope.adopting.trial import FAR
from weightscope.core.files import scratch_folder

IMAGE = 19  # tokens of an image


class Tree(nn.Module):
    """A module whose parts have dotted names."""

    def put(self, path: str, part: nn.Module | nn.Parameter) -> None:
        """Add a part, and the modules on the way to it."""
        first, _, rest = path.partition(".")
        if not rest:
            setattr(self, first, part)
            return
        if not hasattr(self, first):
            setattr(self, first, Tree())
        getattr(self, first).put(rest, part)

    def at(self, path: str) -> Any:
        """The part of this name."""
        part: Any = self
        for name in path.split(".") if path else ():
            part = getattr(part, name)
        return part


class RMSNorm(nn.Module):
    """x / rms(x) times a gain."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


@dataclass(frozen=True)
class Spec:
    """One stack of layers: sizes, names, and what its attention does."""

    width: int
    heads: int
    groups: int
    head_dim: int
    layers: str = "model.layers"
    tokens: str = "model.embed_tokens"  # empty of an image's stack; a parameter where `lone`
    lone: bool = False
    attention: str = "self_attn"  # module; empty where its projections are the layer's own
    fused: str = ""  # module of rows [q | k | v]
    grouped: bool = False  # its rows are [queries | key | value] of each group
    split: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    bias: bool = False
    out_bias: bool = False
    before: str = "input_layernorm"
    after: str = "post_attention_layernorm"  # before the network; empty where one norm feeds both
    centred: bool = False
    eps: float = 1e-5
    mlp: Sequence[str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # of two: up and down; `fused` gate and up
    gated: str = "two"  # two, fused or none
    mlp_bias: bool = False
    theta: float | None = 1e4
    rotary: int | None = None  # dims of a head that rotate
    frequencies: Callable[[Tensor], Tensor] | None = None
    amplitude: float = 1.0  # of the rotation
    causal: bool = True
    scale_tokens: float = 1.0
    scale_branch: float = 1.0
    qk_norms: Sequence[str] = ()
    behind: Sequence[str] = ()  # norms of what attention and the network write
    loops: int = 1  # passes over the layers, each with the last norm behind it
    without: Sequence[int] = ()  # layers that do not attend
    last: str = "model.norm"
    head: str = "lm_head"
    learned: Sequence[str] = ()  # names of a class token and of positions
    pre: str = ""  # a norm before the first layer
    scales: Sequence[str] = ()  # of the outputs of attention and of the network
    patches: str = ""  # module that makes patches
    n: int = 2

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.width, self.eps) if self.centred else RMSNorm(self.width, self.eps)


class Attention(Tree):
    """Softmax attention of heads in groups."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        fill(self, spec)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return attend(self, self.spec, x, positions)


def fill(module: Tree, s: Spec) -> None:
    """Add the projections."""
    rows = (s.heads * s.head_dim, s.groups * s.head_dim, s.groups * s.head_dim)
    if s.fused:
        module.put(s.fused, nn.Linear(s.width, sum(rows), bias=s.bias))
    else:
        for name, size in zip(s.split, rows, strict=True):
            module.put(name, nn.Linear(s.width, size, bias=s.bias))
    module.put(s.out, nn.Linear(rows[0], s.width, bias=s.out_bias))
    for name in s.qk_norms:
        module.put(name, RMSNorm(s.head_dim, s.eps))


def attend(module: Tree, s: Spec, x: Tensor, positions: Tensor) -> Tensor:
    """Rotated queries and keys, a softmax, and the sum of values through the output's matrix."""
    b, n, _ = x.shape
    rows = (s.heads * s.head_dim, s.groups * s.head_dim, s.groups * s.head_dim)
    if s.grouped:
        per_group = module.at(s.fused)(x).reshape(b, n, s.groups, -1, s.head_dim)
        made = [part.flatten(2) for part in per_group.split([s.heads // s.groups, 1, 1], 3)]
    else:
        made = module.at(s.fused)(x).split(rows, -1) if s.fused else [module.at(name)(x) for name in s.split]
    q, k, v = (part.reshape(b, n, -1, s.head_dim).transpose(1, 2) for part in made)
    if s.qk_norms:
        q, k = module.at(s.qk_norms[0])(q), module.at(s.qk_norms[1])(k)
    if s.theta is not None:
        q, k = rotated(q, s, positions), rotated(k, s, positions)
    k, v = (part.repeat_interleave(s.heads // s.groups, 1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(s.head_dim)
    if s.causal:
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    mixed = torch.softmax(scores, -1) @ v
    return module.at(s.out)(mixed.transpose(1, 2).reshape(b, n, -1))


def rotated(x: Tensor, s: Spec, positions: Tensor) -> Tensor:
    """Halves of the first dims of every head, turned by position."""
    dims = s.rotary or s.head_dim
    inverse = s.theta ** -(torch.arange(0, dims, 2) / dims)
    inverse = s.frequencies(inverse) if s.frequencies else inverse
    angles = positions[0].float()[:, None] * inverse
    cos, sin = angles.cos() * s.amplitude, angles.sin() * s.amplitude
    a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, x[..., dims:]), -1)


class Block(Tree):
    """A layer: attention, then the network, or both at once."""

    def __init__(self, spec: Spec, attends: bool) -> None:
        super().__init__()
        self.spec, self.attends, s = spec, attends, spec
        if attends:
            self.put(s.before, s.norm())
            self.put(s.attention, Attention(s)) if s.attention else fill(self, s)
        if s.after:
            self.put(s.after, s.norm())
        inner = 2 * s.width - 8
        sizes = [(s.width, 2 * inner if s.gated == "fused" else inner)] * (len(s.mlp) - 1) + [(inner, s.width)]
        for name, size in zip(s.mlp, sizes, strict=True):
            self.put(name, nn.Linear(*size, bias=s.mlp_bias))
        for name in s.scales:
            self.put(name, nn.Parameter(torch.ones(s.width)))
        for name in s.behind:
            self.put(name, s.norm())

    def network(self, x: Tensor) -> Tensor:
        s = self.spec
        up, down = self.at(s.mlp[-2])(x), self.at(s.mlp[-1])
        if s.gated == "fused":
            gate, up = up.chunk(2, -1)
            return down(nn.functional.silu(gate) * up)
        return down(nn.functional.silu(self.at(s.mlp[0])(x)) * up if s.gated == "two" else nn.functional.gelu(up))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        s = self.spec
        ahead, behind = (self.at(name) for name in s.scales) if s.scales else (1.0, 1.0)
        if self.attends:
            z = self.at(s.before)(x)
            y = self.at(s.attention)(z, positions) if s.attention else attend(self, s, z, positions)
            if not s.after:
                return x + y + self.network(z)
            x = x + (self.at(s.behind[0])(y) if s.behind else y) * ahead * s.scale_branch
        y = self.network(self.at(s.after)(x))
        return x + (self.at(s.behind[1])(y) if s.behind else y) * behind * s.scale_branch


@dataclass(frozen=True)
class Published:
    """An architecture as it was published: its config, its stacks, what else a file of it has, and who describes it."""

    kind: str
    by: str
    make: Callable[[int], tuple[dict[str, Any], Sequence[Spec]]]  # of the number of a size
    more: Callable[[Sequence[Spec]], Mapping[str, Sequence[int]]] = field(default=lambda specs: {})


class Whole(PreTrainedModel):
    """A tiny model of an architecture: text first, then what an image's stack does to patches that are drawn once."""

    config_class = PreTrainedConfig
    attention_modules = "*"  # whatever takes a softmax

    def __init__(self, published: Published, number: int) -> None:
        values, self.specs = published.make(number)
        config = type("Config", (PreTrainedConfig,), {"model_type": published.kind})(vocab_size=151)
        super().__init__(config)
        self.values = {"model_type": published.kind, **values}
        self.tree = Tree()
        for spec in self.specs:
            table = nn.Embedding(151, spec.width)
            if spec.tokens:
                self.tree.put(spec.tokens, table.weight if spec.lone else table)
            for i in range(spec.n):
                self.tree.put(f"{spec.layers}.{i}", Block(spec, i not in spec.without))
            for name in filter(None, (spec.last, spec.pre)):
                self.tree.put(name, spec.norm())
            if spec.head:
                self.tree.put(spec.head, nn.Linear(spec.width, 151, bias=spec.mlp_bias))
            for name, rows in zip(spec.learned, (IMAGE, 1), strict=False):
                self.tree.put(name, nn.Parameter(torch.ones(rows, spec.width)))
            if spec.patches:
                self.tree.put(spec.patches, nn.Linear(48, spec.width))
        for name, shape in published.more(self.specs).items():
            self.tree.put(name, nn.Parameter(torch.ones(tuple(shape))))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave them to `randomise`."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        ends = []
        for s in self.specs:
            where = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
            where = where if s.tokens else torch.arange(IMAGE)[None]
            if s.tokens:
                table = self.tree.at(s.tokens)
                x = nn.functional.embedding(input_ids, table if s.lone else table.weight) * s.scale_tokens
            else:
                x = torch.randn(1, IMAGE, s.width, generator=torch.Generator().manual_seed(7))
            if len(s.learned) > 1:
                x = torch.cat((self.tree.at(s.learned[1])[None], x[:, 1:]), 1)
            x = x + self.tree.at(s.learned[0]) if s.learned else x
            x = self.tree.at(s.pre)(x) if s.pre else x
            for _ in range(s.loops):
                for i in range(s.n):
                    x = self.tree.at(f"{s.layers}.{i}")(x, where)
                x = self.tree.at(s.last)(x) if s.loops > 1 else x
            ends.append(x)
        return ends[0]

    def save_pretrained(self, folder: Any) -> None:
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in self.tree.named_parameters()}
        save_file(tensors, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(self.values), encoding="utf-8")


def tiny(published: Published, number: int) -> Whole:
    """A random model of one of the two sizes."""
    model = Whole(published, number)
    randomise(model, number + 1)
    return model.float().eval()


def census(published: Published) -> list[Row]:
    """The rows of one architecture."""
    by_stack: dict[str, list[Verdict]] = {}
    roles = Named(0, 0)
    for number in (0, 1):
        model = tiny(published, number)
        observed, problems = observe(model, replace(SIZES[number], vocabulary=151), number + 1, FAR * number)
        assert observed, (published.kind, problems)
        with scratch_folder() as folder:
            model.save_pretrained(folder)
            models, problem, refusals = readings(folder)
            for verdict in judge(observed, Stored(model, folder), models, problem, refusals):
                by_stack.setdefault(verdict.stack, []).append(verdict)
            roles = roles if number else named(models)
    rows = [_together(published.kind, both) for both in by_stack.values()]
    return [
        replace(row, stack=row.stack.removeprefix("tree."), reason=row.reason or published.by, classes=1,
                tensors=roles.tensors, unnamed=roles.unnamed, where=roles.where)
        for row in rows
    ]  # fmt: skip


# Descriptions. Sizes are two: (width, heads, groups, head_dim).

FREE, EQUAL = ((80, 4, 2, 24), (120, 6, 3, 32)), ((96, 4, 4, 24), (192, 6, 6, 32))
GROUPED = ((96, 4, 2, 24), (192, 6, 3, 32))
IMAGES = ((72, 3, 3, 24), (128, 4, 4, 32))
VLLM, SGLANG, LLAMA_CPP = "vLLM 0.33.0's code", "SGLang 0.5.23's code", "llama.cpp's code"
MLX = "mlx-lm 0.32.2's code"
OLDER_VLLM = "vLLM 0.11.0's code"  # later ones left the type out
MOONDREAM_3 = "vLLM 0.33.0's code of Moondream 3 and its published description"


def text(number: int, sizes: Any = FREE, **cells: Any) -> Spec:
    """A Llama-like stack of text."""
    return Spec(*sizes[number], n=2 + number, **cells)


def image(number: int, **cells: Any) -> Spec:
    """A stack of an image's patches, without positions or a mask."""
    given = {"tokens": "", "head": "", "centred": True, "causal": False, "theta": None, "gated": "none"}
    biases = {"bias": True, "out_bias": True, "mlp_bias": True}
    return Spec(*IMAGES[number], n=3 - number, **{**given, **biases, **cells})


def llama(s: Spec, **more: Any) -> dict[str, Any]:
    """A Llama's config in the dialect of transformers 4."""
    return {
        "hidden_size": s.width, "num_attention_heads": s.heads, "num_key_value_heads": s.groups, "vocab_size": 151,
        "num_hidden_layers": s.n, "rms_norm_eps": s.eps, "max_position_embeddings": 4096, "rope_theta": s.theta,
        "intermediate_size": 2 * s.width - 8, "head_dim": s.head_dim, "hidden_act": "silu",
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


CLIP = {
    "attention": "self_attn", "split": ("q_proj", "k_proj", "v_proj"), "out": "out_proj", "before": "layer_norm1",
    "after": "layer_norm2", "mlp": ("mlp.fc1", "mlp.fc2"),
}  # fmt: skip


def clip(number: int, prefix: str) -> Spec:
    return image(
        number, layers=f"{prefix}.encoder.layers", pre=f"{prefix}.pre_layrnorm", last=f"{prefix}.post_layernorm",
        patches=f"{prefix}.embeddings.patch_embedding",
        learned=(f"{prefix}.embeddings.position_embedding.weight", f"{prefix}.embeddings.class_embedding"), **CLIP,
    )  # fmt: skip


def phi3_v(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    sizes = ((96, 4, 2, 24), (192, 6, 3, 32))
    half = sizes[number][3] // 2
    short, long = [1.0 + 0.1 * i for i in range(half)], [2.0 + i for i in range(half)]
    s = text(
        number, sizes, fused="qkv_proj", mlp=("mlp.gate_up_proj", "mlp.down_proj"), gated="fused",
        frequencies=lambda inverse: inverse / torch.tensor(short),
        amplitude=math.sqrt(1 + math.log(32) / math.log(4096)),
    )  # fmt: skip
    scaling = {"type": "su", "short_factor": short, "long_factor": long}
    v = clip(number, "model.vision_embed_tokens.img_processor.vision_model")
    config = llama(s, rope_scaling=scaling, original_max_position_embeddings=4096, max_position_embeddings=131072)
    config |= {"sliding_window": 262144, "img_processor": vision(v) | {"name": "clip_vision_model"}}
    del config["head_dim"]
    return config, (s, v)


def vision(s: Spec, **more: Any) -> dict[str, Any]:
    """The sizes of an image's stack."""
    sizes = {"hidden_size": s.width, "num_attention_heads": s.heads, "num_hidden_layers": s.n, "layer_norm_eps": s.eps}
    return sizes | {"image_size": 28, "patch_size": 14} | more


def h2ovl(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, layers="language_model.model.layers", tokens="language_model.model.embed_tokens",
             last="language_model.model.norm", head="language_model.lm_head")  # fmt: skip
    v = image(
        number, layers="vision_model.encoder.layers", attention="attn", fused="qkv", out="proj", before="norm1",
        after="norm2", mlp=("mlp.fc1", "mlp.fc2"), scales=("ls1", "ls2"), eps=1e-6, last="",
        patches="vision_model.embeddings.patch_embedding",
        learned=("vision_model.embeddings.position_embedding", "vision_model.embeddings.class_embedding"),
    )  # fmt: skip
    config = {"llm_config": llama(s, model_type="llama", architectures=["LlamaForCausalLM"]),
              "vision_config": vision(v, model_type="intern_vit_6b", qkv_bias=True, norm_type="layer_norm",
                                      qk_normalization=False), "downsample_ratio": 0.5}  # fmt: skip
    return config, (s, v)


def moondream(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    sizes = ((96, 4, 4, 24), (192, 6, 6, 32))
    parts = {"attention": "attn", "fused": "qkv", "out": "proj", "mlp": ("mlp.fc1", "mlp.fc2"), "gated": "none",
             "centred": True, "bias": True, "out_bias": True, "mlp_bias": True}  # fmt: skip
    s = text(number, sizes, layers="model.text.blocks", tokens="model.text.wte", lone=True, before="ln", after="",
             last="model.text.post_ln", head="model.text.lm_head", rotary=sizes[number][3] // 2, **parts)  # fmt: skip
    v = image(number, layers="model.vision.blocks", before="ln1", after="ln2", last="model.vision.post_ln",
              learned=("model.vision.pos_emb",), patches="model.vision.patch_emb", **parts)  # fmt: skip
    config = {"config": {"text": {"dim": s.width, "n_layers": s.n, "n_heads": s.heads, "max_context": 2048},
                         "vision": {"enc_dim": v.width, "enc_n_layers": v.n, "enc_n_heads": v.heads}}}  # fmt: skip
    return config, (s, v)


def projector(start: str, *names: str) -> Callable[[Sequence[Spec]], dict[str, Sequence[int]]]:
    """Matrices and biases from an image's width to the text's, and vectors of that width."""

    def shapes(specs: Sequence[Spec]) -> dict[str, Sequence[int]]:
        d, image_width = specs[0].width, specs[-1].width
        wide = {
            ".weight": lambda first: (d, image_width if first else d),
            ".bias": lambda first: (d,),
            "": lambda _: (1, d),
        }
        return {
            f"{start}{name}": next(make(name == names[0]) for end, make in wide.items() if name.endswith(end))
            for name in names
        }

    return shapes


def dots_ocr(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, EQUAL, bias=True)
    return llama(s, use_sliding_window=False, sliding_window=131072, max_window_layers=28), (s,)


def deci(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = replace(text(number, EQUAL), groups=EQUAL[number][1] // 2, n=3 + number, without=(1,))
    blocks = [
        {"attention": {"no_op": i in s.without, "replace_with_linear": False,
                       "n_heads_in_group": None if i in s.without else 2},
         "ffn": {"no_op": False, "ffn_mult": 2.5}} for i in range(s.n)]  # fmt: skip
    config = llama(s, block_configs=blocks, num_key_value_heads=None, intermediate_size=None)
    del config["head_dim"]
    return config, (s,)


def llada(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(
        number, EQUAL, layers="model.transformer.blocks", tokens="model.transformer.wte", attention="", out="attn_out",
        before="attn_norm", after="ff_norm", mlp=("ff_proj", "up_proj", "ff_out"), last="model.transformer.ln_f",
        head="model.transformer.ff_out", theta=5e5, causal=False,
    )  # fmt: skip
    return {
        "d_model": s.width, "n_heads": s.heads, "n_kv_heads": s.groups, "n_layers": s.n, "rms_norm_eps": s.eps,
        "rope": True, "rope_theta": s.theta, "block_type": "llama", "alibi": False, "include_bias": False,
        "include_qkv_bias": False, "layer_norm_type": "rms", "max_sequence_length": 4096, "embedding_size": 151,
        "vocab_size": 151, "weight_tying": False, "mlp_hidden_size": 2 * s.width - 8,
    }, (s,)  # fmt: skip


def qwen(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(
        number, EQUAL, layers="transformer.h", tokens="transformer.wte", attention="attn", fused="c_attn", out="c_proj",
        bias=True, before="ln_1", after="ln_2", mlp=("mlp.w2", "mlp.w1", "mlp.c_proj"), last="transformer.ln_f",
        eps=1e-6,
    )  # fmt: skip
    return {
        "hidden_size": s.width, "num_attention_heads": s.heads, "num_hidden_layers": s.n, "kv_channels": s.head_dim,
        "layer_norm_epsilon": s.eps, "rotary_emb_base": 10000, "rotary_pct": 1.0, "seq_length": 8192, "no_bias": True,
        "use_logn_attn": True, "use_dynamic_ntk": True, "vocab_size": 151, "tie_word_embeddings": False,
        "intermediate_size": 4 * s.width,
    }, (s,)  # fmt: skip


def minicpm(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, EQUAL, scale_tokens=12, scale_branch=1.4 / math.sqrt(2 + number))
    config = llama(s, scale_emb=12, scale_depth=1.4, dim_model_base=256)
    del config["rope_theta"], config["head_dim"]
    return config, (s,)


def bailing(number: int, **cells: Any) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(
        number, tokens="model.word_embeddings", attention="attention", fused="query_key_value", out="dense",
        qk_norms=("query_layernorm", "key_layernorm"), theta=6e5, rotary=FREE[number][3] // 2, **cells,
    )  # fmt: skip
    flags = {"use_qk_norm": True, "use_rmsnorm": True, "use_qkv_bias": False, "use_bias": False}
    return llama(s, num_experts=4, first_k_dense_replace=1, partial_rotary_factor=0.5, **flags), (s,)


def llada2(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    return bailing(number, causal=False)  # tokens of one block see each other


def mixture(specs: Sequence[Spec]) -> dict[str, Sequence[int]]:
    """A router, an expert and the shared one of layer 1, which do not run."""
    d, start = specs[0].width, "model.layers.1.mlp."
    parts = [(f"{place}.{part}_proj.weight", (d, 16) if part == "down" else (16, d))
             for place in ("experts.0", "shared_experts") for part in ("gate", "up", "down")]  # fmt: skip
    return {f"{start}gate.weight": (4, d), f"{start}gate.expert_bias": (4,)} | {
        start + name: size for name, size in parts
    }


def mimo(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, EQUAL, bias=True)
    m = replace(s, layers="model.mtp_layers", tokens="", head="", last="", n=1)
    config = llama(s, num_nextn_predict_layers=1, attention_bias=True, use_sliding_window=False)
    return config, (s, m)


def next_token(specs: Sequence[Spec]) -> dict[str, Sequence[int]]:
    """What joins a token and a state before the layer that predicts the next, which does not run."""
    d, start = specs[0].width, "model.mtp_layers.0."
    norms = {f"{start}{name}_layernorm.weight": (d,) for name in ("token", "hidden", "final")}
    return norms | {f"{start}input_proj.weight": (d, 2 * d)}


def llava(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number)
    v = clip(number, "model.vision_tower.vision_tower.vision_model")
    return llama(s, mm_hidden_size=v.width, vision_layers=v.n, vision_heads=v.heads, mm_projector_type="mlp2x_gelu"), (
        s,
        v,
    )


def llava_qwen(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, EQUAL, bias=True)
    return llama(s, use_sliding_window=False, mm_hidden_size=1152), (s,)


def nanbeige(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, loops=2 + number)
    return llama(s, num_loops=s.loops, skip_loop_final_norm=False), (s,)


def ouro(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, EQUAL, loops=3 - number, behind=("input_layernorm_2", "post_attention_layernorm_2"))
    return llama(s, total_ut_steps=s.loops, use_sliding_window=False, early_exit_threshold=1.0), (s,)


def exit_gate(specs: Sequence[Spec]) -> dict[str, Sequence[int]]:
    """What says after each pass whether a token needs another, which does not run."""
    return {"model.early_exit_gate.weight": (1, specs[0].width), "model.early_exit_gate.bias": (1,)}


def telechat3(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number)
    return llama(s, attention_bias=False, mlp_bias=False), (s,)


def internlm2(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(
        number, GROUPED, tokens="model.tok_embeddings", attention="attention", fused="wqkv",
        grouped=True, out="wo", bias=not number, out_bias=not number, before="attention_norm", after="ffn_norm",
        mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"), head="output",
    )  # fmt: skip
    config = llama(s, bias=s.bias)
    del config["head_dim"]
    return config, (s,)


def deepseek(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, EQUAL)
    return llama(s, n_routed_experts=4, first_k_dense_replace=1, moe_layer_freq=1), (s,)


def klear(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, GROUPED, qk_norms=("q_norm", "k_norm"))
    config = llama(s, num_experts=4, mlp_only_layers=[0], decoder_sparse_step=1, attention_bias=False)
    del config["head_dim"]
    return config, (s,)


def bailing_1(number: int) -> tuple[dict[str, Any], Sequence[Spec]]:
    s = text(number, tokens="model.word_embeddings", attention="attention", fused="query_key_value", out="dense")
    return llama(s, num_experts=4, first_k_dense_replace=0, use_qkv_bias=False, use_bias=False), (s,)


def routed(*more: str) -> Callable[[Sequence[Spec]], dict[str, Sequence[int]]]:
    """The mixture of layer 1, with other tensors next to its router."""
    shapes = {"mlp.expert_bias": lambda d: (4,), "mlp.coefficient.weight": lambda d: (2, d),
              "mlp.coefficient.bias": lambda d: (2,)}  # fmt: skip

    def of(specs: Sequence[Spec]) -> dict[str, Sequence[int]]:
        usual = {name: size for name, size in mixture(specs).items() if not name.endswith("gate.expert_bias")}
        return usual | {f"model.layers.1.{name}": shapes[name](specs[0].width) for name in more}

    return of


PUBLISHED = (
    Published("phi3_v", VLLM, phi3_v, projector(
        "model.vision_embed_tokens.", "img_projection.0.weight", "img_projection.0.bias", "img_projection.2.weight",
        "img_projection.2.bias", "sub_GN", "glb_GN")),
    Published("h2ovl_chat", VLLM, h2ovl, projector(
        "mlp1.", "1.weight", "1.bias", "0.weight", "0.bias", "3.weight", "3.bias")),
    Published("moondream1", MOONDREAM_3, moondream, projector(
        "model.", "vision.proj_mlp.fc1.weight", "vision.proj_mlp.fc1.bias", "vision.proj_mlp.fc2.weight",
        "vision.proj_mlp.fc2.bias", "region.coord_features", "region.coord_encoder.weight", "region.coord_encoder.bias",
        "region.coord_decoder.fc1.weight", "region.coord_decoder.fc2.bias", "region.size_features",
        "region.size_encoder.weight", "region.size_decoder.fc1.weight", "region.size_decoder.fc2.bias")),
    Published("dots_ocr", VLLM, dots_ocr),
    Published("nemotron-nas", VLLM, deci),
    Published("llada", LLAMA_CPP, llada),
    Published("qwen", OLDER_VLLM, qwen),
    Published("minicpm", VLLM, minicpm),
    Published("llada2_moe", SGLANG, llada2, mixture),
    Published("bailing_moe_v2", VLLM, bailing, mixture),
    Published("mimo", VLLM, mimo, next_token),
    Published("llava_llama", SGLANG, llava, projector(
        "model.", "mm_projector.0.weight", "mm_projector.0.bias", "mm_projector.2.weight", "mm_projector.2.bias",
        "image_newline")),
    Published("llava_mistral", SGLANG, llava),
    Published("llava_qwen", SGLANG, llava_qwen, projector(
        "model.", "mm_projector.0.weight", "mm_projector.0.bias", "mm_projector.2.weight", "mm_projector.2.bias",
        "image_newline")),
    Published("nanbeige", MLX, nanbeige),
    Published("ouro", "the code of its authors and of vLLM", ouro, exit_gate),
    Published("telechat3", MLX, telechat3),
    Published("internlm2", MLX, internlm2),
    Published("deepseek", MLX, deepseek, routed()),
    Published("Klear", MLX, klear, routed("mlp.expert_bias", "mlp.coefficient.weight", "mlp.coefficient.bias")),
    Published("bailing_moe", MLX, bailing_1, routed()),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.census.published", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model_types; all by default")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [row for each in PUBLISHED if not options.types or each.kind in options.types for row in census(each)]
    for row in rows:
        line = f"{row.type:16} {row.verdict:8} {row.kind:6} {row.stack}  {row.reason}"
        print(f"{line}  {row.tensors} tensors, {row.unnamed} without a role {row.where}")
    if options.out:
        write(options.out, rows)
    return int(any(row.verdict == "WRONG" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
