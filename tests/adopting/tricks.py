"""Architectures that a tiny model takes for a Llama: what differs shows at some size, position or number only.

`TRICKS` holds an attention class for each, and the sizes of a checkpoint at which it shows.
"""

from collections.abc import Callable
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import weightscope as ws
from weightscope.checkpoint.opening import open_checkpoint


class PlainConfig(PreTrainedConfig):
    model_type = "plain_again"

    def __init__(
        self,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int = 24,
        rope_theta: float = 1000.0,
        rms_norm_eps: float = 1e-5,
        vocab_size: int = 97,
        max_position_embeddings: int = 256,
        **more: Any,
    ) -> None:
        self.hidden_size, self.num_hidden_layers, self.head_dim = hidden_size, num_hidden_layers, head_dim
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.rope_theta, self.rms_norm_eps, self.vocab_size = rope_theta, rms_norm_eps, vocab_size
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**more)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Plain(nn.Module):
    """Llama's attention, in parts that a trick replaces."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        d, self.h, self.g, self.r = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.q_proj = nn.Linear(d, self.h * self.r, bias=False)
        self.k_proj = nn.Linear(d, self.g * self.r, bias=False)
        self.v_proj = nn.Linear(d, self.g * self.r, bias=False)
        self.o_proj = nn.Linear(self.h * self.r, d, bias=False)
        self.attention = torch.empty(0)  # what the last run saw
        self.ids = torch.empty(0)  # (b, n) token ids of the last run

    def scale(self) -> float:
        return float(self.r**-0.5)

    def turned_dims(self) -> int:
        return int(self.r)

    def base(self, n: int) -> float:
        return float(self.config.rope_theta)

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pairs half of the turned dimensions apart; x (b, heads, n, r)."""
        w = self.turned_dims()
        if not w:
            return x
        angles = self.places(positions)[:, None] * self.base(len(positions)) ** (-torch.arange(0, w, 2) / w)
        a, b = x[..., : w // 2], x[..., w // 2 : w]
        turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
        return torch.cat((*turned, x[..., w:]), -1)

    def vectors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return q, k, v

    def queries(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return q

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, (b, heads, n, r) each."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(each(x).view(*x.shape[:2], -1, self.r).transpose(1, 2) for each in projections)

    def placed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k

    def weighed(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)

    @staticmethod
    def made_once(n: int) -> torch.Tensor | None:
        """What the model makes of n tokens and hands to every layer, (1, 1, n, n)."""
        return None

    def gathered(self, gathered: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gathered

    def forward(self, x: torch.Tensor, positions: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        n = x.shape[1]
        q, k, v = self.vectors(*self.projected(x))
        q, k = self.placed(self.queries(self.turned(q, positions), positions), self.turned(k, positions))
        k, v = (heads.repeat_interleave(self.h // self.g, 1) for heads in (k, v))
        scores = self.scores(q @ k.transpose(-1, -2) * self.scale()) + (0 if bias is None else bias)
        self.attention = self.weighed(scores + torch.full((n, n), -torch.inf).triu(1))
        return self.o_proj(self.gathered((self.attention @ v).transpose(1, 2).reshape(len(x), n, -1), x))


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, config: Any, layer: int, attention: Callable[..., nn.Module]) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.self_attn = Norm(d, eps), attention(config, layer)
        self.post_attention_layernorm, self.mlp = Norm(d, eps), Network(d)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *more)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainModel(PreTrainedModel):
    config_class = PlainConfig
    base_model_prefix = "model"
    attention: Callable[..., nn.Module] = Plain

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        made = type(self).attention
        self.layers = nn.ModuleList(Block(config, i, made) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids[0]
        x = self.embed_tokens(input_ids)
        bias = self.layers[0].self_attn.made_once(input_ids.shape[1])
        for layer in self.layers:
            layer.self_attn.ids = input_ids
            x = layer(x, positions, *([] if bias is None else [bias]))
        return self.norm(x)


def trick(name: str, **parts: Callable[..., Any]) -> type[Plain]:
    """Llama's attention with some parts replaced."""
    return type(name, (Plain,), parts)


def scaled(name: str, factor: Callable[[Plain], float]) -> type[Plain]:
    """Scores times a factor."""
    return trick(name, scale=lambda self: float(self.r**-0.5) * factor(self))


def sharpened(name: str, when: Callable[[Plain, torch.Tensor, torch.Tensor], torch.Tensor], by: float) -> type[Plain]:
    """Queries of some positions times a factor: `when` gives what broadcasts to (b, heads, n, 1)."""
    return trick(name, queries=lambda self, q, places: q * torch.where(when(self, q, places), by, 1.0))


def gaining(name: str, keys: Callable[[Plain], torch.Tensor], by: float) -> type[Plain]:
    """Scores of some keys raised: `keys` gives what broadcasts to (b, heads, n, n)."""
    return trick(name, scores=lambda self, scores: scores + by * keys(self))


def handing(name: str, made: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> type[Plain]:
    """A tensor made of positions of queries and of keys, which the model hands to every layer."""
    return trick(name, made_once=staticmethod(lambda n: made(torch.arange(n)[:, None], torch.arange(n))[None, None]))


def _first_key_raised(self: Plain, scores: torch.Tensor) -> torch.Tensor:
    if scores.shape[-1] > 600:
        scores[..., 0] += 1
    return scores


def _late_normed(self: Plain, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (q * torch.rsqrt(q.square().mean(-1, keepdim=True)) if self.layer >= 6 else q), k, v


def _last_halved(self: Plain, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return q, k, v / 2 if self.layer == self.config.num_hidden_layers - 1 > 6 else v


def _by_logarithm(self: Plain, q: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return q * ((places + 1).log() / log(self.config.max_position_embeddings)).clamp(min=1)[:, None]


def _restarted(self: Plain, places: torch.Tensor) -> torch.Tensor:
    ends = torch.cat((torch.zeros(1, dtype=torch.bool), self.ids[0, :-1] == 2))
    return places - torch.where(ends, places, 0).cummax(0).values


def _base_by_length(self: Plain, n: int) -> float:
    trained = self.config.max_position_embeddings
    return float(self.config.rope_theta) * max(1.0, 2 * n / trained - 1) ** (self.r / (self.r - 2))


def _like(self: Plain) -> torch.Tensor:
    """Keys of the query's own token, but not the token itself."""
    like = (self.ids[:, :, None] == self.ids[:, None]) & ~torch.eye(self.ids.shape[1], dtype=torch.bool)
    return like[:, None]


def _after_eos(self: Plain, q: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Queries past an EOS, as far as ten tokens."""
    at = torch.arange(q.shape[2])
    return (at - torch.where(self.ids == 2, at, -100).cummax(1).values < 10)[:, None, :, None]


def _alone(self: Plain, scores: torch.Tensor) -> torch.Tensor:
    n = scores.shape[-1]
    return Plain.weighed(self, scores.masked_fill(~torch.eye(n, dtype=torch.bool) & (n > 30), -torch.inf))


def _eight_heads_turned(self: Plain, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.cat((Plain.turned(self, x[:, :8], places), x[:, 8:]), 1)


class WindowConfig(PlainConfig):
    """The key of its window has an unknown name."""

    model_type = "window_config"

    def __init__(self, context: int = 16384, **more: Any) -> None:
        self.context = context
        super().__init__(**more)


class NoWindowConfig(PlainConfig):
    """No number of it is its window."""

    model_type = "no_window_config"

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        del self.max_position_embeddings


ScaleOfWideHeads = trick("ScaleOfWideHeads", scale=lambda self: float(self.r**-0.5) if self.r <= 32 else 1 / self.r)
TemperatureFrom6000 = sharpened("TemperatureFrom6000", lambda _, q, places: (places >= 6000)[:, None], 1.5)
BaseByLength = trick("BaseByLength", base=_base_by_length)
Alone = trick("Alone", weighed=_alone)  # tokens of long texts see themselves only, whatever their scores are

# What acts on certain tokens, lengths, batches and additions only.
SELDOM: dict[str, tuple[type[Plain], type[PlainConfig], dict[str, Any]]] = {
    "keys of BOS gain 3": (
        gaining("BiasForBos", lambda self: (self.ids == 1)[:, None, None], 3.0), PlainConfig, {"vocab_size": 400}),
    "positions restart after EOS": (
        trick("RestartsAfterEos", places=_restarted), PlainConfig, {"vocab_size": 400}),
    "a recency bias of two values is handed to layers": (
        handing("Recency", lambda i, j: torch.where(i - j < 8, 0.0, -1.5)), PlainConfig, {}),
    "queries have a temperature from position 6000": (TemperatureFrom6000, WindowConfig, {}),
    "batches have another scale": (
        scaled("ScaleOfBatches", lambda self: 1 if len(self.ids) == 1 else 0.7), PlainConfig, {}),
    "keys of the last id gain": (
        gaining("BiasForTheLastId", lambda self: (self.ids == self.config.vocab_size - 1)[:, None, None], 2.0),
        PlainConfig, {"vocab_size": 50000}),
    "keys of a special token gain": (  # an id of the config amid a large vocabulary
        gaining("BiasForUnusedSpecial", lambda self: (self.ids == self.config.sep_token_id)[:, None, None], 2.0),
        PlainConfig, {"vocab_size": 50000, "sep_token_id": 30123}),
    "like attends to like": (gaining("LikeAttendsToLike", _like, 2.0), PlainConfig, {"vocab_size": 10**6}),
    "a text that begins with BOS has another scale": (
        scaled("FirstTokenIsBos", lambda self: 0.7 if self.ids[0, 0] == 1 else 1), PlainConfig, {"vocab_size": 400}),
    "the first keys gain by a tensor of two values": (  # as a bias by key alone, which all queries share
        handing("NearestKeyGains", lambda i, j: torch.where(j < 4, 1.0, 0.0) + 0 * i), PlainConfig, {}),
    "near keys gain by a boolean tensor": (handing("BooleanBias", lambda i, j: i - j < 3), PlainConfig, {}),
    "odd lengths have another scale": (
        scaled("OddLengths", lambda self: 0.8 if self.ids.shape[1] % 2 and self.ids.shape[1] > 32 else 1),
        PlainConfig, {}),
    "the second sequence has a temperature": (
        sharpened("SecondSequence", lambda _, q, places: (torch.arange(len(q)) > 0)[:, None, None, None], 1.3),
        PlainConfig, {}),
    "tokens are counted, and have a temperature from 1500": (
        type("CountsTokens", (sharpened("", lambda _, q, places: (torch.arange(len(places)) >= 1500)[:, None], 1.5),),
             {"places": lambda self, places: torch.arange(len(places))}),
        PlainConfig, {"max_position_embeddings": 2048}),
    "keys of BOS gain in the last layer": (
        gaining("LastLayerOfBos", lambda self: ((self.ids == 1) & (self.layer == self.config.num_hidden_layers - 1))
                [:, None, None], 2.0),
        PlainConfig, {"vocab_size": 400, "num_hidden_layers": 6}),
    "ten tokens past EOS have a temperature": (
        sharpened("TemperatureAfterEos", _after_eos, 1.4), PlainConfig, {"vocab_size": 400}),
}  # fmt: skip

TRICKS: dict[str, tuple[type[Plain], dict[str, int]]] = {
    "scale depends on heads wider than 32": (ScaleOfWideHeads, {"head_dim": 48}),
    "32 dimensions turn at most": (
        trick("TurnsThirtyTwo", turned_dims=lambda self: min(int(self.r), 32)), {"head_dim": 48}),
    "queries, keys and values are clamped at 6": (
        trick("ClampsVectors", vectors=lambda self, *of_heads: tuple(each.clamp(-6, 6) for each in of_heads)), {}),
    "scores are clamped at 12": (trick("ClampsScores", scores=lambda self, scores: scores.clamp(-12, 12)), {}),
    "scale depends on more than 8 layers": (
        scaled("ScaleOfDepth", lambda self: 1 if self.config.num_hidden_layers <= 8 else 0.7),
        {"num_hidden_layers": 9}),
    "every eighth layer does not turn": (
        trick("EighthDoesNotTurn", turned_dims=lambda self: 0 if self.layer % 8 == 7 else int(self.r)),
        {"num_hidden_layers": 8}),
    "queries have a temperature from position 512": (
        sharpened("TemperatureFrom512", lambda _, q, places: (places >= 512)[:, None], 1.5),
        {"max_position_embeddings": 2048}),
    "the base is four times as large beyond 64 tokens": (
        trick("LargerBaseFrom64", base=lambda self, n: float(self.config.rope_theta) * (4 if n > 64 else 1)), {}),
    "heads past the eighth do not turn": (
        trick("NinthHeadDoesNotTurn", turned=_eight_heads_turned), {"num_attention_heads": 10}),
    "queries grow with log n beyond the trained window": (trick("LogarithmOfLength", queries=_by_logarithm), {}),
    "scores beyond 40 grow half as fast": (
        trick("SlowsBeyondForty", scores=lambda self, scores: torch.where(scores > 40, 20 + scores / 2, scores)), {}),
    "the last of many layers halves values": (
        trick("LastHalvesValues", vectors=_last_halved), {"num_hidden_layers": 8}),
    "the first key gains beyond 600 tokens": (trick("SinkFrom600", scores=_first_key_raised), {}),
    "scale depends on streams wider than 160": (
        scaled("ScaleOfWideStreams", lambda self: min(1, 160 / self.config.hidden_size)), {"hidden_size": 176}),
    "positions stop at 700": (
        trick("StopsAt700", places=lambda self, places: places.clamp(max=700)), {"max_position_embeddings": 4096}),
    "queries are normed from the seventh layer on": (
        trick("LateQueriesAreNormed", vectors=_late_normed), {"num_hidden_layers": 7}),
    "positions begin again beyond the trained window": (
        trick("WrapsPositions", places=lambda self, places: places % self.config.max_position_embeddings),
        {"max_position_embeddings": 4096}),
    "scale depends on more than 8 heads": (
        scaled("ScaleOfManyHeads", lambda self: 1 if self.h <= 8 else 0.5), {"num_attention_heads": 10}),
}  # fmt: skip


class Optional(Plain):
    """A word and a number of the config that no row reads."""

    def turned_dims(self) -> int:
        return int(self.r) if self.config.position_mode == "rotary" else 0

    def queries(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return q * self.config.sharpness

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        n = torch.arange(scores.shape[-1])
        alibi = -(n[:, None] - n).abs() * 2.0 ** -torch.arange(1, self.h + 1)[:, None, None]
        return scores if self.config.position_mode == "rotary" else scores + alibi


class OptionalConfig(PlainConfig):
    model_type = "optional"

    def __init__(self, position_mode: str = "rotary", sharpness: float = 1.0, **more: Any) -> None:
        self.position_mode, self.sharpness = position_mode, sharpness
        super().__init__(**more)


@cache
def registered(attention: type[nn.Module], config: type[PreTrainedConfig] = PlainConfig) -> type[PreTrainedModel]:
    """A model class with this attention, known to transformers under the attention's name."""
    kind = attention.__name__.lower()
    # With its __init__ by name: transformers makes a dataclass of a config that has none of its own.
    config_class = type(f"{attention.__name__}Config", (config,), {"model_type": kind, "__init__": config.__init__})
    made = type(f"{attention.__name__}Attention", (attention,), {})
    model: Any = type(f"{attention.__name__}Model", (PlainModel,), {"config_class": config_class, "attention": made})
    transformers.AutoConfig.register(kind, config_class)
    transformers.AutoModel.register(config_class, model)
    return model  # type: ignore[no-any-return]


def saved(model_class: Any, folder: Path, **values: Any) -> Any:
    """A random model of these config values, in a folder."""
    torch.manual_seed(7)
    model = model_class(model_class.config_class(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape))
            elif "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model.eval()


def worst(model: Any, folder: Path, row: Any, n: int = 1300) -> float:
    """The largest error of a row's attention and output on a checkpoint, in any layer, of n random tokens."""
    read = ws.Model.of_row(open_checkpoint(folder), row)
    entered: list[np.ndarray] = []
    gave: list[np.ndarray] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, given: entered.append(given[0][0].numpy()))
        layer.self_attn.register_forward_hook(lambda _, given, out: gave.append(out[0].numpy()))
    with torch.no_grad():
        model(torch.randint(0, model.config.vocab_size, (1, n), generator=torch.Generator().manual_seed(3)))
    errors = []
    for index, (x, out, layer) in enumerate(zip(entered, gave, model.layers, strict=True)):
        seen = layer.self_attn.attention[0]
        own_layer = read.layer(index)
        scores = torch.from_numpy(own_layer.scores(x)) + torch.full((n, n), -torch.inf).triu(1)
        if own_layer.sinks is not None:
            scores = torch.cat((scores, torch.from_numpy(own_layer.sinks)[:, None, None].expand(-1, n, 1)), -1)
        errors.append((scores.softmax(-1)[..., :n] - seen).abs().max().item())
        errors.append(float(np.abs(own_layer.output(seen.numpy(), x) - out).max() / np.abs(out).max()))
    return max(errors)
