"""Architectures that combine what no row of the table has together."""

from typing import Any

import torch
from torch import nn

from tests.adopting.tricks import Plain, PlainConfig


def masked(scores: torch.Tensor) -> torch.Tensor:
    """Scores (1, H, n, n), with later keys masked."""
    n = scores.shape[-1]
    return scores + torch.full((n, n), -torch.inf).triu(1)


class JointKeys(Plain):
    """One tensor of keys, then values; a LayerNorm each of queries and keys, before they turn."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        del self.k_proj, self.v_proj
        self.kv = nn.Linear(config.hidden_size, 2 * self.g * self.r)
        self.norm_q, self.norm_k = nn.LayerNorm(self.r), nn.LayerNorm(self.r)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = self.kv(x).chunk(2, -1)
        return tuple(rows.view(*x.shape[:2], -1, self.r).transpose(1, 2) for rows in (self.q_proj(x), k, v))

    def vectors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.norm_q(q), self.norm_k(k), v


class JointByHead(JointKeys):
    """The keys of a head are stored next to its values."""

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = self.kv(x).view(*x.shape[:2], self.g, 2, self.r).permute(3, 0, 2, 1, 4)
        return self.q_proj(x).view(*x.shape[:2], -1, self.r).transpose(1, 2), k, v


class GainNorm(nn.Module):
    """A LayerNorm whose parameters have their own names, and whose eps is in the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.push = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6) * self.gain + self.push


class JointKeysOwnNorms(JointKeys):
    """Keys and values in one tensor again, which runs first; names of parameters that say nothing."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        del self.norm_q, self.norm_k, self.kv, self.q_proj
        self.memory = nn.Linear(config.hidden_size, 2 * self.g * self.r)
        self.asking = nn.Linear(config.hidden_size, self.h * self.r)
        self.first, self.second = GainNorm(self.r), GainNorm(self.r)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = self.memory(x).chunk(2, -1)
        return tuple(rows.view(*x.shape[:2], -1, self.r).transpose(1, 2) for rows in (self.asking(x), k, v))

    def vectors(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = self.first(k)
        return self.second(q), k, v


class Tempered(Plain):
    """Scores of each head have a learned temperature."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.temp = nn.Parameter(torch.zeros(self.h))

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return scores * self.temp.exp()[:, None, None]


class Waves(Tempered):
    """The same by a function that no row has."""

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return scores * self.temp.sin()[:, None, None]


class OwnSlopes(Plain):
    """A bias by distance with slopes 2^-(h + 1), however many heads there are; nothing turns."""

    def turned_dims(self) -> int:
        return 0

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(scores.shape[-1])
        slopes = 2.0 ** -torch.arange(1, self.h + 1)
        return scores - slopes[:, None, None] * (places[:, None] - places).abs()


class StoredSlopes(OwnSlopes):
    """The same with learned slopes."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.slopes = nn.Parameter(torch.rand(self.h))

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        places = torch.arange(scores.shape[-1])
        return scores - self.slopes[:, None, None] * (places[:, None] - places).abs()


class BackwardsConfig(PlainConfig):
    model_type = "backwards_config"

    def __init__(self, score_cap: float = 5.0, **more: Any) -> None:
        self.score_cap = score_cap
        super().__init__(**more)


class Backwards(Plain):
    """One tensor of values, keys and queries, in that order; scores are capped."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        del self.q_proj, self.k_proj, self.v_proj
        self.vkq = nn.Linear(config.hidden_size, (self.h + 2 * self.g) * self.r, bias=False)

    def projected(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = [self.g * self.r, self.g * self.r, self.h * self.r]
        v, k, q = (rows.view(*x.shape[:2], -1, self.r).transpose(1, 2) for rows in self.vkq(x).split(sizes, -1))
        return q, k, v

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.config.score_cap
        return cap * (scores / cap).tanh()


class GatedSinks(Plain):
    """A sink logit for each head, and a gate of what heads gather, made of what attention reads."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.sinks = nn.Parameter(torch.zeros(self.h))
        self.g_proj = nn.Linear(config.hidden_size, self.h * self.r, bias=False)

    def weighed(self, scores: torch.Tensor) -> torch.Tensor:
        n = scores.shape[-1]
        sinks = self.sinks[None, :, None, None].expand(len(scores), -1, n, 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def gathered(self, gathered: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return gathered * self.g_proj(x).sigmoid()


class OwnBasesConfig(PlainConfig):
    model_type = "own_bases_config"

    def __init__(self, layer_bases: list[float] | None = None, num_hidden_layers: int = 3, **more: Any) -> None:
        self.layer_bases = layer_bases or [100.0, 1000.0, 5000.0][:num_hidden_layers]
        super().__init__(num_hidden_layers=num_hidden_layers, **more)


class OwnBases(Plain):
    """Queries and keys are normed after they turn, in each layer by another base."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm, self.k_norm = nn.RMSNorm(self.r, eps=1e-5), nn.RMSNorm(self.r, eps=1e-5)

    def base(self, n: int) -> float:
        return float(self.config.layer_bases[self.layer])

    def placed(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q), self.k_norm(k)


class OwnBasesUsualEps(OwnBases):
    """The same with the eps that torch takes by default."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm, self.k_norm = nn.RMSNorm(self.r), nn.RMSNorm(self.r)


class TalkingHeads(Plain):
    """Scores of heads are mixed before the softmax, and attention after it (Shazeer et al. 2020)."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.before = nn.Linear(self.h, self.h, bias=False)
        self.after = nn.Linear(self.h, self.h, bias=False)

    def weighed(self, scores: torch.Tensor) -> torch.Tensor:
        mixed = self.before(scores.nan_to_num(neginf=-1e4).transpose(1, 3)).transpose(1, 3)
        return self.after(masked(mixed).softmax(-1).transpose(1, 3)).transpose(1, 3)
