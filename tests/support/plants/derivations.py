"""What people do to a checkpoint: every derivation is a function that takes weights and returns others.

`DERIVATIONS` lists them by name, with the kinds of change that each makes and what a checkpoint needs for it. Those
that preserve the function are checked against eager models by tests/analyses/test_derivations.py.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tests.support.plants.named_parts import READERS, STREAM_AXIS, WRITERS, Part, Weights

# Storage


def random_for(weights: Weights, *more: int) -> np.random.Generator:
    """Seeded by the shape of the checkpoint, so that a table can be made again, and by its own numbers, if any."""
    return np.random.default_rng([weights.size("layers"), weights.size("width"), *more, *weights.seed])


def copied(weights: Weights) -> Weights:
    """The same tensors."""
    return weights


def sharded(weights: Weights) -> Weights:
    """The same tensors in two files."""
    return replace(weights, shards=2)


def cast(weights: Weights, dtype: str) -> Weights:
    """Stored in another dtype."""
    return replace(weights, dtype=dtype)


def by_rows(quantise: Callable[[np.ndarray], np.ndarray], weights: Weights) -> Weights:
    """Every projection rounded to the grid of `quantise`, which takes rows of inputs, (out, in)."""
    return weights.but({part: quantise(np.ascontiguousarray(w.T)).T for part, w in weights.matrices()})


def groups_to_nearest(rows: np.ndarray, bits: int, group: int, symmetric: bool = True) -> np.ndarray:
    """Groups of a row to the nearest point of a uniform grid of their own; group 0 is the whole row."""
    length = group if group and rows.shape[1] % group == 0 else rows.shape[1]
    w = rows.reshape(len(rows), -1, length)
    if symmetric:
        scale = np.abs(w).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
        return (np.round(w / np.where(scale == 0, 1, scale)) * scale).reshape(rows.shape)
    low = w.min(-1, keepdims=True)
    scale = (w.max(-1, keepdims=True) - low) / (2**bits - 1)
    return (np.round((w - low) / np.where(scale == 0, 1, scale)) * scale + low).reshape(rows.shape)


NF4 = np.array([-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803,
                0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0])  # fmt: skip  # QLoRA, app. E


def nf4(rows: np.ndarray, group: int = 32) -> np.ndarray:
    """Groups to the sixteen quantiles of a normal distribution, times their largest value."""
    w = rows.reshape(-1, group)
    scale = np.abs(w).max(-1, keepdims=True)
    nearest = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, w / np.where(scale == 0, 1, scale))
    return (NF4[nearest] * scale).reshape(rows.shape)


def ggml(rows: np.ndarray, kind: str) -> np.ndarray:
    """There and back through a block format of GGUF, by the gguf package; rows that no block fits stay."""
    import gguf

    quantised = gguf.GGMLQuantizationType[kind]
    if rows.shape[1] % gguf.GGML_QUANT_SIZES[quantised][0]:
        return rows
    return gguf.quants.dequantize(gguf.quants.quantize(rows.astype(np.float32), quantised), quantised)


def q4_k(rows: np.ndarray) -> np.ndarray:
    """The grid of Q4_K: 8 groups of 32, whose scales and minima are multiples, up to 63, of two float16 numbers."""
    w = rows.reshape(len(rows), -1, 8, 32)
    low = np.minimum(w.min(-1), 0)
    scale = (w.max(-1) - low) / 15
    steps = [(x.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float32) for x in (scale, -low)]
    scale, offset = (np.round(x / np.where(s == 0, 1, s)).clip(0, 63) * s
                     for x, s in zip((scale, -low), steps, strict=True))  # fmt: skip
    levels = np.round((w + offset[..., None]) / np.where(scale == 0, 1, scale)[..., None]).clip(0, 15)
    return (levels * scale[..., None] - offset[..., None]).reshape(rows.shape)


# Training, as noise


def drifted(weights: Weights, share: float) -> Weights:
    """Gaussian noise of `share` of each matrix's norm, half to one and a half times that from layer to layer."""
    rng = random_for(weights, 1)
    by_layer = share * rng.uniform(0.5, 1.5, weights.size("layers"))
    moved = {}
    for part, w in sorted(weights.parts.items(), key=str):
        size = share if part[0] is None else by_layer[part[0]]
        if w.ndim == 2:
            noise = float(size * np.sqrt(np.mean(w**2)))
            moved[part] = w + noise * rng.standard_normal(w.shape, np.float32)
        elif "norm" in part[1]:
            moved[part] = w * (1 + 0.1 * size * rng.standard_normal(w.shape, np.float32))
    return weights.but(moved)


def updated(weights: Weights, rank: int, share: float, parts: tuple[str, ...] = (*READERS, *WRITERS)) -> Weights:
    """A random update of this rank and `share` of the norm added to projections, as a merged LoRA adds."""
    rng = random_for(weights, 2)
    moved = {}
    for part, w in weights.within(*parts):
        update = rng.standard_normal((w.shape[0], rank)) @ rng.standard_normal((rank, w.shape[1]))
        moved[part] = w + share * np.linalg.norm(w) / np.linalg.norm(update) * update
    return weights.but(moved)


def averaged(weights: list[Weights], shares: list[float]) -> Weights:
    """The linear merge of checkpoints of one shape."""
    first = weights[0]
    mean = {
        part: sum(share * each.parts[part] for share, each in zip(shares, weights, strict=True)) for part in first.parts
    }
    return first.but(mean)


# Layers


def rearranged(weights: Weights, order: Callable[[int], Collection[int]]) -> Weights:
    """Layers taken in the order that `order` gives for their number; one may come twice, or not at all."""
    taken = list(order(weights.size("layers")))
    parts = {part: w for part, w in weights.parts.items() if part[0] is None}
    for new, old in enumerate(taken):
        parts |= {(new, name): w for (layer, name), w in weights.parts.items() if layer == old}
    made = replace(weights, parts=parts, came_from=tuple(weights.came_from[old] for old in taken))
    made = made.resized(layers=len(taken))
    if kinds := weights.config.get("layer_types"):
        made.config["layer_types"] = [kinds[old] for old in taken]
    elif pattern := weights.config.get("sliding_window_pattern", 6 if weights.dialect.offset else None):
        full = {True: "full_attention", False: "sliding_attention"}
        made.config["layer_types"] = [full[(old + 1) % pattern == 0] for old in taken]
    return made


def upscaled(n: int) -> list[int]:
    """Depth upscaling (SOLAR): all but the last quarter, then all but the first quarter."""
    cut = max(1, n // 4)
    return [*range(n - cut), *range(cut, n)]


def each_twice(n: int) -> list[int]:
    """Every layer twice, one after the other (LLaMA Pro's places, without its zeros)."""
    return [i for i in range(n) for _ in range(2)]


def middle_twice(n: int) -> list[int]:
    """The middle third a second time after itself: a passthrough merge of the checkpoint with itself."""
    third = max(1, n // 3)
    return [*range(2 * third), *range(third, n)]


def middle_removed(n: int) -> list[int]:
    """Without the middle third."""
    third = max(1, n // 3)
    return [*range(third), *range(2 * third, n)]


def last_removed(n: int) -> list[int]:
    """Without the last two layers."""
    return list(range(n - 2))


def every_second(n: int) -> list[int]:
    """Every second layer, as distilled students are begun."""
    return list(range(0, n, 2))


def two_swapped(n: int) -> list[int]:
    """The second layer and the last but one change places, or the only two do."""
    order = list(range(n))
    a, b = (1, n - 2) if n > 3 else (0, n - 1)
    order[a], order[b] = order[b], order[a]
    return order


def backwards(n: int) -> list[int]:
    """The last layer first."""
    return list(range(n))[::-1]


# Heads


def _by_head(weights: Weights, part: Part, w: np.ndarray) -> np.ndarray:
    """A part of the attention with its heads on an axis of their own: (d, H, r), (H, r) or, for o, (H, r, d)."""
    r = weights.size("head_dim")
    if part[1] == "o.w":
        return w.reshape(-1, r, w.shape[1])
    return w.reshape(*w.shape[:-1], -1, r)


def _flat(part: Part, w: np.ndarray) -> np.ndarray:
    return w.reshape(-1, w.shape[-1]) if part[1] == "o.w" else w.reshape(*w.shape[:-2], -1)


def _heads_taken(weights: Weights, groups: Callable[[np.random.Generator], np.ndarray], within: bool) -> Weights:
    """Key-value heads in another order or fewer, each with the heads that read it, these in any order if `within`."""
    rng, (n, n_kv) = random_for(weights, 3), (weights.size("heads"), weights.size("kv_heads"))
    per = n // n_kv
    changed = {}
    for i in weights.layers():
        taken = groups(rng)
        heads = np.concatenate([g * per + (rng.permutation(per) if within else np.arange(per)) for g in taken])
        for part, w in weights.parts.items():
            if part[0] != i or part[1][:2] not in ("q.", "k.", "v.", "o.") or part[1] == "o.b":
                continue
            order = taken if part[1][0] in "kv" else heads
            axis = 0 if part[1] in ("o.w", "q.b", "k.b", "v.b") else 1
            changed[part] = _flat(part, _by_head(weights, part, w).take(order, axis))
    made = weights.but(changed)
    return made.resized(heads=len(taken) * per, kv_heads=len(taken), head_dim=weights.size("head_dim"))


def heads_permuted(weights: Weights) -> Weights:
    """Heads in a random order, a different one for each layer; heads of a group stay together."""
    made = _heads_taken(weights, lambda rng: rng.permutation(weights.size("kv_heads")), within=True)
    return replace(made, config=weights.config)


def heads_removed(weights: Weights) -> Weights:
    """A half of the key-value heads (or two of three), others in each layer, cut out with the heads that read them."""
    n = weights.size("kv_heads")
    left = max(count for count in range(1, n) if n % count == 0)  # configs want a divisor of the width
    return _heads_taken(weights, lambda rng: np.sort(rng.choice(n, left, replace=False)), within=False)


def heads_silenced(weights: Weights) -> Weights:
    """A quarter of the heads, others in each layer: their part of W_O is zero."""
    rng, n = random_for(weights, 4), weights.size("heads")
    changed = {}
    for part, w in weights.within("o.w"):
        by_head = _by_head(weights, part, w).copy()
        by_head[rng.choice(n, max(1, n // 4), replace=False)] = 0
        changed[part] = _flat(part, by_head)
    return weights.but(changed)


def grouped(weights: Weights) -> Weights:
    """Half the key-value heads, each the mean of two (the start of grouped-query attention)."""
    n = weights.size("kv_heads")
    changed = {}
    for part, w in weights.within("k.w", "v.w", "k.b", "v.b"):
        by_head = _by_head(weights, part, w)
        pairs = by_head.reshape(*by_head.shape[:-2], n // 2, 2, by_head.shape[-1])
        changed[part] = _flat(part, pairs.mean(-2))
    return weights.but(changed).resized(kv_heads=n // 2)


def gauge_changed(weights: Weights, which: str = "both") -> Weights:
    """Another basis for the queries and keys of every head, another for its values; `which` says which of the two.

    With a rotary embedding only what commutes with it: rotations and scales of the planes that it rotates.
    """
    rng, r = random_for(weights, 5), weights.size("head_dim")
    n, n_kv = weights.size("heads"), weights.size("kv_heads")
    changed: dict[Part, np.ndarray] = {}
    for i in weights.layers():
        for sides, asked in (("qk", "queries"), ("vo", "values")):
            if which not in ("both", asked):
                continue
            make = _planes if sides == "qk" and weights.dialect.rope else _basis
            bases = np.stack([make(rng, r) for _ in range(n_kv)])  # (n_kv, r, r)
            inverse = np.linalg.inv(bases)
            by_reader = np.repeat(np.arange(n_kv), n // n_kv)
            if sides == "qk":
                _times(weights, changed, i, "q", bases[by_reader])
                _times(weights, changed, i, "k", inverse.transpose(0, 2, 1))
            else:
                _times(weights, changed, i, "v", bases)
                o = _by_head(weights, (i, "o.w"), weights.parts[i, "o.w"])
                changed[i, "o.w"] = _flat((i, "o.w"), np.einsum("hrs,hsd->hrd", inverse[by_reader], o))
    return weights.but(changed)


def _times(weights: Weights, changed: dict[Part, np.ndarray], layer: int, part: str, bases: np.ndarray) -> None:
    """Every head's columns of a part times its basis."""
    for end in "wb":
        key = (layer, f"{part}.{end}")
        if key in weights.parts:
            by_head = _by_head(weights, key, weights.parts[key])
            changed[key] = _flat(key, np.einsum("...hr,hrs->...hs", by_head, bases))


def _basis(rng: np.random.Generator, r: int) -> np.ndarray:
    """A random matrix (r, r) with singular values between a half and two."""
    return rotation(rng, r) * np.exp(rng.uniform(-0.7, 0.7, r)) @ rotation(rng, r)


def _planes(rng: np.random.Generator, r: int) -> np.ndarray:
    """A rotation and a scale for every plane (i, i + r/2), (r, r)."""
    half, angle = r // 2, rng.uniform(0, 2 * np.pi, r // 2)
    scale = np.exp(rng.uniform(-0.7, 0.7, half))
    cos, sin = np.diag(scale * np.cos(angle)), np.diag(scale * np.sin(angle))
    return np.block([[cos, sin], [-sin, cos]])


# The residual stream


def rotation(rng: np.random.Generator, d: int) -> np.ndarray:
    """A random orthogonal matrix, uniform."""
    q, r = np.linalg.qr(rng.standard_normal((d, d)))
    return q * np.sign(np.diag(r))


def norms_folded(weights: Weights) -> Weights:
    """Scales and shifts of the norms before attention and feed-forward moved into the matrices that read them."""
    changed: dict[Part, np.ndarray] = {}
    neutral = 1.0 - weights.dialect.offset
    for i in weights.layers():
        for norm, readers in (("norm_1", "qkv"), ("norm_2", ("gate", "up"))):
            gamma = weights.parts[i, f"{norm}.w"] + weights.dialect.offset
            beta = weights.parts.get((i, f"{norm}.b"))
            for reader in readers:
                if (i, f"{reader}.w") not in weights.parts:
                    continue
                w = weights.parts[i, f"{reader}.w"]
                changed[i, f"{reader}.w"] = gamma[:, None] * w
                if beta is not None:
                    changed[i, f"{reader}.b"] = beta @ w + weights.parts[i, f"{reader}.b"]
            if any((i, f"{reader}.w") in weights.parts for reader in readers):
                changed[i, f"{norm}.w"] = np.full_like(gamma, neutral)
                if beta is not None:
                    changed[i, f"{norm}.b"] = np.zeros_like(beta)
    return weights.but(changed)


def _untied(weights: Weights) -> Weights:
    """With an unembedding of its own, which has the final norm's scale."""
    rows = weights.parts.get((None, "unembedding"), weights.parts[None, "tokens"])
    gamma = weights.parts[None, "final_norm.w"]
    made = weights.but({(None, "unembedding"): rows * gamma, (None, "final_norm.w"): np.ones_like(gamma)})
    return replace(made, config=made.config | {"tie_word_embeddings": False})


def rotated(weights: Weights) -> Weights:
    """The stream times a random orthogonal matrix, norms folded (QuaRot, SliceGPT)."""
    folded = _untied(norms_folded(weights))
    q = rotation(random_for(weights, 6), weights.size("width"))
    turned = {}
    for part, w in folded.parts.items():
        axis = STREAM_AXIS.get(part[1])
        if axis is not None and "norm" not in part[1]:
            turned[part] = w @ q if w.ndim == 1 or axis == 1 else q.T @ w
    return folded.but(turned)


def stream_permuted(weights: Weights) -> Weights:
    """The dimensions of the stream in a random order."""
    order = random_for(weights, 7).permutation(weights.size("width"))
    return weights.but(_along_stream(weights, order))


def width_cut(weights: Weights) -> Weights:
    """Without the eighth of the stream's dimensions that token embeddings use least."""
    norms = np.linalg.norm(weights.parts[None, "tokens"], axis=0)
    kept = np.sort(np.argsort(norms)[len(norms) // 8 :])
    made = weights.but(_along_stream(weights, kept))
    return made.resized(width=len(kept), head_dim=weights.size("head_dim"))


def _along_stream(weights: Weights, taken: np.ndarray) -> dict[Part, np.ndarray]:
    return {part: w.take(taken, STREAM_AXIS[part[1]]) for part, w in weights.parts.items() if part[1] in STREAM_AXIS}


# Feed-forward and vocabulary


def neurons_permuted(weights: Weights) -> Weights:
    """The neurons of every feed-forward layer in a random order."""
    rng = random_for(weights, 8)
    changed = {}
    for i in weights.layers():
        order = rng.permutation(len(weights.parts[i, "down.w"]))
        for name, axis in (("gate.w", 1), ("up.w", 1), ("up.b", 0), ("gate.b", 0), ("down.w", 0)):
            if (i, name) in weights.parts:
                changed[i, name] = weights.parts[i, name].take(order, axis)
    return weights.but(changed)


def vocabulary_extended(weights: Weights, share: float = 0.1) -> Weights:
    """More tokens, whose rows are the mean of all and a little noise."""
    rng = random_for(weights, 9)
    more = max(8, int(share * weights.size("vocabulary")))

    def longer(rows: np.ndarray) -> np.ndarray:
        noise = 0.1 * rows.std() * rng.standard_normal((more, rows.shape[1]), np.float32)
        return np.concatenate([rows, rows.mean(0) + noise])

    return _vocabulary(weights, longer)


def vocabulary_cut(weights: Weights) -> Weights:
    """The first 60 % of the tokens."""
    return _vocabulary(weights, lambda rows: rows[: int(0.6 * len(rows))])


def _vocabulary(weights: Weights, change: Callable[[np.ndarray], np.ndarray]) -> Weights:
    tables = {part: change(weights.parts[part]) for part in ((None, "tokens"), (None, "unembedding"))
              if part in weights.parts}  # fmt: skip
    return weights.but(tables).resized(vocabulary=len(tables[None, "tokens"]))


EXPERTS = {
    "llama": ("mixtral", "block_sparse_moe.", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen2": ("qwen2_moe", "mlp.", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


def upcycled(weights: Weights, share: float = 0.0, experts: int = 4) -> Weights:
    """Each feed-forward layer copied into every expert of a mixture, moved by `share` of its norm; a random router."""
    rng = random_for(weights, 10)
    model_type, folder, names = EXPERTS[weights.config["model_type"]]
    parts = {part: w for part, w in weights.parts.items() if part[1] not in ("gate.w", "up.w", "down.w")}
    named: dict[Part, str] = {}

    def add(layer: int, name: str, array: np.ndarray) -> None:
        parts[layer, name] = array.astype(np.float32)
        named[layer, name] = f"layers.{layer}.{folder}{name}.weight"

    for i in weights.layers():
        add(i, "gate", 0.1 * rng.standard_normal((experts, weights.size("width"))))
        for part, name in names.items():
            w = weights.parts[i, f"{part}.w"].T
            for expert in range(experts):
                noise = share * np.sqrt(np.mean(w**2)) * rng.standard_normal(w.shape)
                add(i, f"experts.{expert}.{name}", w + noise)
            if model_type == "qwen2_moe":
                add(i, f"shared_expert.{name}", w if part != "down" else 0 * w)
        if model_type == "qwen2_moe":
            add(i, "shared_expert_gate", np.zeros((1, weights.size("width"))))
    inner = weights.config["intermediate_size"]
    config = weights.config | {"model_type": model_type, "num_local_experts": experts, "num_experts_per_tok": 2}
    config["architectures"] = ["MixtralForCausalLM" if model_type == "mixtral" else "Qwen2MoeForCausalLM"]
    if model_type == "qwen2_moe":
        config |= {"num_experts": experts, "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner,
                   "decoder_sparse_step": 1, "norm_topk_prob": True}  # fmt: skip
    return replace(weights, config=config, parts=parts, names=named)


# What strangers may have in common


def shuffled(weights: Weights) -> Weights:
    """The entries of every tensor of two axes in a random order."""
    rng = random_for(weights, 11)
    return weights.but({part: rng.permuted(w.ravel()).reshape(w.shape) for part, w in _tables(weights)})


def redrawn(weights: Weights) -> Weights:
    """Normal numbers of the same standard deviation."""
    rng = random_for(weights, 12)
    return weights.but({part: w.std() * rng.standard_normal(w.shape, np.float32) for part, w in _tables(weights)})


def same_spectra(weights: Weights) -> Weights:
    """Every matrix with its singular values and random singular vectors."""
    rng = random_for(weights, 13)
    changed = {}
    for part, w in _tables(weights):
        values = np.linalg.svd(w.astype(np.float64), compute_uv=False) if min(w.shape) <= 1024 else None
        if values is None:
            continue
        left, right = (np.linalg.qr(rng.standard_normal((side, len(values))))[0] for side in w.shape)
        changed[part] = (left * values) @ right.T
    return weights.but(changed)


def _tables(weights: Weights) -> list[tuple[Part, np.ndarray]]:
    matrices = [item for item in weights.parts.items() if item[1].ndim == 2]
    return sorted(matrices, key=lambda item: str(item[0]))


def redraws(weights: Weights, seed: int) -> Iterator[tuple[str, Weights]]:
    """What strangers may have in common with a model: spectra, values, sizes."""
    rng = np.random.default_rng([13, seed])

    def spectra(w: np.ndarray) -> np.ndarray:
        values = np.linalg.svd(w.astype(np.float64), compute_uv=False)
        left, right = (np.linalg.qr(rng.standard_normal((side, len(values))))[0] for side in w.shape)
        return np.asarray((left * values) @ right.T)

    changes = {
        "spectra": spectra, "values": lambda w: rng.permuted(w.ravel()).reshape(w.shape),
        "sizes": lambda w: w.std() * rng.standard_normal(w.shape),
    }  # fmt: skip
    for name, change in changes.items():
        yield name, weights.but({part: change(w) for part, w in weights.parts.items() if w.ndim == 2})


# The list


@dataclass(frozen=True)
class Derivation:
    """A way of making one checkpoint of another."""

    change: Callable[[Weights], Weights]
    kinds: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    preserving: bool = False  # the model computes the same function
    also: tuple[str, ...] = ()  # kinds that may be named too, since they are part of it

    def then(self, following: "Derivation") -> "Derivation":
        """This derivation, then `following` on its result."""
        return Derivation(
            lambda weights: following.change(self.change(weights)),
            tuple(dict.fromkeys(self.kinds + following.kinds)),
            self.needs | following.needs,
            self.preserving and following.preserving,
            self.also + following.also,
        )


def _row(
    change: Callable[[Weights], Weights], kinds: str, *needs: str, preserving: bool = False, also: str = ""
) -> Derivation:
    listed = tuple(kind for kind in kinds.split(", ") if kind)
    return Derivation(change, listed, frozenset(needs), preserving, tuple(kind for kind in also.split(", ") if kind))


def _grid(quantise: Callable[..., np.ndarray], *needs: str, **options: Any) -> Derivation:
    return _row(partial(by_rows, partial(quantise, **options)), "quantised", *needs)


def _order(order: Callable[[int], Collection[int]], kind: str, *needs: str) -> Derivation:
    return _row(partial(rearranged, order=order), kind, *needs)


DERIVATIONS: dict[str, Derivation] = {
    "copy": _row(copied, "same bytes", preserving=True),
    "two shards": _row(sharded, "same bytes", preserving=True),
    "bfloat16": _row(partial(cast, dtype="bfloat16"), "cast"),
    "float16": _row(partial(cast, dtype="float16"), "cast", "not float16"),
    "4 bits, groups of 32": _grid(groups_to_nearest, bits=4, group=32),
    "4 bits, groups of 32, with minima": _grid(groups_to_nearest, bits=4, group=32, symmetric=False),
    "3 bits, groups of 32, with minima": _grid(groups_to_nearest, bits=3, group=32, symmetric=False),
    "8 bits, rows": _grid(groups_to_nearest, bits=8, group=0),
    "4 bits, rows": _grid(groups_to_nearest, bits=4, group=0),
    "NF4": _grid(nf4),
    "Q8_0": _grid(ggml, kind="Q8_0"),
    "Q4_0": _grid(ggml, kind="Q4_0"),
    "Q4_1": _grid(ggml, kind="Q4_1"),
    "Q5_0": _grid(ggml, kind="Q5_0"),
    "Q4_K": _grid(q4_k, "rows of 256"),
    "drift 1 %": _row(partial(drifted, share=0.01), "fine-tuned"),
    "drift 3 %": _row(partial(drifted, share=0.03), "fine-tuned"),
    "drift 10 %": _row(partial(drifted, share=0.1), "fine-tuned"),
    "drift 30 %": _row(partial(drifted, share=0.3), "fine-tuned"),
    "rank 1, all": _row(partial(updated, rank=1, share=0.1), "low-rank"),
    "rank 4, all": _row(partial(updated, rank=4, share=0.05), "low-rank"),
    "rank 8, queries and values": _row(partial(updated, rank=8, share=0.1, parts=("q.w", "v.w")), "low-rank"),
    "middle layers removed": _order(middle_removed, "layers removed", "3 layers"),
    "last layers removed": _order(last_removed, "layers removed", "3 layers"),
    "every second layer": _order(every_second, "layers removed"),
    "depth upscaled": _order(upscaled, "layers repeated", "3 layers"),
    "each layer twice": _order(each_twice, "layers repeated"),
    "middle layers twice": _order(middle_twice, "layers repeated", "3 layers"),
    "two layers swapped": _order(two_swapped, "layers reordered"),
    "layers backwards": _order(backwards, "layers reordered", "3 layers"),
    "heads permuted": _row(heads_permuted, "heads permuted", "own heads", preserving=True),
    "heads removed": _row(heads_removed, "heads removed", "any head count", "several groups"),
    "heads silenced": _row(heads_silenced, "heads removed"),
    "key-value heads in pairs": _row(grouped, "grouped", "even groups"),
    "basis of queries and keys": _row(
        partial(gauge_changed, which="queries"), "gauge", "free queries", preserving=True
    ),
    "basis of values": _row(partial(gauge_changed, which="values"), "gauge", preserving=True),
    "basis of heads": _row(gauge_changed, "gauge", "free queries", preserving=True),
    "norms folded": _row(norms_folded, "norms folded", "norms before", preserving=True),
    "stream rotated": _row(rotated, "stream rotated", "rms", "tokens", "stream", preserving=True, also="norms folded"),
    "stream permuted": _row(stream_permuted, "stream permuted", "stream", preserving=True),
    "neurons permuted": _row(neurons_permuted, "", "feed-forward", preserving=True, also="neurons permuted"),
    "vocabulary extended": _row(vocabulary_extended, "vocabulary", "tokens"),
    "vocabulary cut": _row(vocabulary_cut, "vocabulary", "tokens"),
    "upcycled": _row(upcycled, "experts", "experts", preserving=True),
    "upcycled, experts moved 5 %": _row(partial(upcycled, share=0.05), "experts", "experts", also="fine-tuned"),
    "width cut": _row(width_cut, "width", "any head count", "rms", "tokens", "stream", also="vocabulary"),
}  # fmt: skip
TWO = (
    ("stream rotated", "4 bits, groups of 32"), ("stream rotated", "bfloat16"), ("stream rotated", "drift 3 %"),
    ("stream rotated", "heads permuted"), ("stream permuted", "drift 10 %"), ("stream permuted", "Q8_0"),
    ("depth upscaled", "drift 10 %"), ("depth upscaled", "4 bits, groups of 32"), ("middle layers twice", "bfloat16"),
    ("middle layers removed", "drift 10 %"), ("middle layers removed", "Q4_0"), ("two layers swapped", "bfloat16"),
    ("two layers swapped", "drift 3 %"), ("heads permuted", "rank 4, all"), ("heads permuted", "drift 10 %"),
    ("heads permuted", "layers backwards"), ("heads removed", "drift 3 %"), ("heads silenced", "bfloat16"),
    ("basis of heads", "drift 3 %"), ("basis of heads", "8 bits, rows"), ("basis of heads", "heads permuted"),
    ("norms folded", "4 bits, groups of 32"), ("norms folded", "drift 10 %"), ("neurons permuted", "drift 10 %"),
    ("neurons permuted", "NF4"), ("rank 4, all", "bfloat16"), ("rank 8, queries and values", "Q8_0"),
    ("drift 10 %", "bfloat16"), ("drift 3 %", "4 bits, groups of 32"), ("vocabulary extended", "drift 10 %"),
    ("vocabulary extended", "rank 4, all"), ("vocabulary cut", "Q8_0"), ("key-value heads in pairs", "drift 3 %"),
    ("upcycled", "bfloat16"), ("depth upscaled", "stream permuted"), ("width cut", "drift 3 %"),
)  # fmt: skip
DERIVATIONS |= {f"{first}, then {second}": DERIVATIONS[first].then(DERIVATIONS[second]) for first, second in TWO}


def those_for(weights: Weights) -> dict[str, Derivation]:
    """The derivations that a checkpoint allows, by name."""
    traits = weights.traits()
    return {name: made for name, made in DERIVATIONS.items() if made.needs <= traits}
