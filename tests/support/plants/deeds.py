"""Every way in which conversions are known to damage a checkpoint, and what `same` says of each.

A deed is done to the original's tensors or config before they are written in a container, or to the packed numbers
there. Whether it changes what is computed is asked of transformers' eager model with the values that the container
holds. Nothing here knows how `same` searches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import weightscope as ws
from tests.support.plants.containers import (
    CONTAINERS,
    Container,
    Slip,
    infinite_scale,
    inverted_scales,
    nan_scale,
    no_scales,
    other_axis,
    swapped_nibbles,
)
from tests.support.plants.families import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    VOCABULARY,
    Planted,
    logits,
    original,
)
from tests.support.plants.gguf_container import GgufContainer
from weightscope.core.files import Folder, scratch_folder
from weightscope.pairs.identity.identity import Stored

ALL_CONTAINERS: dict[str, Container | GgufContainer] = CONTAINERS | {
    f"GGUF, {kind}": GgufContainer(f"GGUF, {kind}", kind) for kind in ("Q8_0", "Q4_0")
}
ROUNDING = 1e-5  # |logits of B - of A| / |logits of A| that rounding makes: about 1e-7 for a copy
NOT_SAME = ("different",)
MIDDLE = range(1, 2)  # the layer of deeds that are done in one

# Parts in which a deed is done


def each_part(planted: Planted, parts: str, change: Callable[..., np.ndarray], layers: range = range(LAYERS)) -> None:
    """Change the weights and biases of some parts; `change` takes the array and the number of its heads."""
    heads = {"q": HEADS, "k": planted.family.groups, "v": planted.family.groups}
    for part, layer, end in planted.parts(*parts.split(), layers=layers):
        planted.put(part, layer, change(planted.get(part, layer, end), heads.get(part, 1)), end)


def to_neighbours(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + r/2 of each head become 2i and 2i + 1."""
    r = len(w) // heads
    order = [head * r + i + half * (r // 2) for head in range(heads) for i in range(r // 2) for half in (0, 1)]
    return w[order]


def to_halves(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows 2i and 2i + 1 of each head become i and i + r/2."""
    r = len(w) // heads
    return w[[head * r + 2 * i + half for head in range(heads) for half in (0, 1) for i in range(r // 2)]]


def heads_turned(w: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows in the place of the head before it."""
    return np.roll(w, len(w) // heads, axis=0)


def by_two(change: Callable[..., np.ndarray], w: np.ndarray, heads: int) -> np.ndarray:
    """A change by twice the number of heads."""
    return change(w, 2 * heads)


def plus(number: float, w: np.ndarray, heads: int) -> np.ndarray:
    """A number added."""
    return w + np.float32(number)


def all_norms(planted: Planted, number: float) -> None:
    """A number added to the gains of all norms of layers and the last."""
    for part, layer, end in planted.parts(*planted.family.norms):
        if end == "weight":
            planted.put(part, layer, plus(number, planted.get(part, layer), 1))
    planted.put("norm", None, plus(number, planted.get("norm", None), 1))


def one_norm(planted: Planted, number: float) -> None:
    """The same of one norm."""
    planted.put("norm_2", 1, plus(number, planted.get("norm_2", 1), 1))


def head_norms(planted: Planted, number: float) -> None:
    """The same of the norms of queries and keys."""
    for part, layer, _ in planted.parts("q_norm", "k_norm"):
        planted.put(part, layer, plus(number, planted.get(part, layer), 1))


def fused_order(planted: Planted, order: str) -> None:
    """The blocks of q|k|v in another order, in a layer."""
    if planted.family.fused == "blocks":
        _whole_fused(planted, lambda q, k, v: [{"q": q, "k": k, "v": v}[letter] for letter in order])


def blocks_to_groups(planted: Planted) -> None:
    """q|k|v by group where they are in blocks."""
    if planted.family.fused == "blocks":
        groups = planted.family.groups
        _whole_fused(planted, lambda *parts: [rows for i in range(groups) for part in parts
                                              for rows in np.split(part, groups)[i : i + 1]])  # fmt: skip


def groups_to_blocks(planted: Planted) -> None:
    """q|k|v in blocks where they are by group or by head."""
    if planted.family.fused != "blocks":
        _whole_fused(planted, lambda *parts: list(parts))


def _whole_fused(planted: Planted, order: Callable[..., list[np.ndarray]]) -> None:
    for end in ("weight", "bias"):
        if planted.has("qkv", 1, end):
            planted.put("qkv", 1, np.concatenate(order(*(planted.get(part, 1, end) for part in "qkv"))), end)


def exchanged(planted: Planted, one: str, other: str, layers: range = MIDDLE) -> None:
    """Two parts of the same shape in each other's place."""
    for layer in layers:
        for expert in range(planted.family.experts or 1):
            if planted.has(one, layer) and planted.has(other, layer):
                x, y = (planted.get(part, layer, expert=expert).copy() for part in (one, other))
                if x.shape == y.shape:
                    planted.put(one, layer, y, expert=expert)
                    planted.put(other, layer, x, expert=expert)


def interleaved(planted: Planted) -> None:
    """Rows of gate and up in turn, in one tensor."""
    if planted.has("gate_up"):
        planted.put("gate_up", 1, to_neighbours(planted.get("gate_up", 1), 1))
    if planted.has("experts.gate_up"):  # (experts, in, 2 inner), in turn: to halves
        w = planted.get("experts.gate_up", 1)
        planted.put("experts.gate_up", 1, np.concatenate([w[..., ::2], w[..., 1::2]], axis=-1))


def transposed(planted: Planted, part: str) -> None:
    """A matrix the other way round."""
    for name in filter(None, (planted.stored(part, 1),)):
        planted.tensors[name] = np.ascontiguousarray(planted.tensors[name].T)


def heads_of_output(planted: Planted) -> None:
    """The columns of W_O in the order of other heads."""
    planted.put("o", 1, np.roll(planted.get("o", 1), HEAD_DIM, axis=1))


EXPERTS = [2, 0, 3, 1]


def experts_moved(planted: Planted, experts: bool, router: bool) -> None:
    """Experts, the router's rows, or both in another order."""
    if not planted.family.experts:
        return
    for part in ("expert.gate", "expert.up", "expert.down"):
        if experts and planted.has(part):
            before = [planted.get(part, 1, expert=i).copy() for i in range(4)]
            for i, j in enumerate(EXPERTS):
                planted.put(part, 1, before[j], expert=i)
    for part in ("experts.gate_up", "experts.down"):
        for end in ("weight", "bias"):
            if experts and planted.has(part, 1, end):
                planted.put(part, 1, planted.get(part, 1, end)[EXPERTS], end)
    for part, layer, end in planted.parts("router", layers=MIDDLE):
        if router:
            planted.put(part, layer, planted.get(part, layer, end)[EXPERTS], end)


def divided(planted: Planted, how: str) -> None:
    """A matrix whose scales were left out, applied the wrong way round, or along its columns."""
    w = planted.get("o", 1)
    scales = np.abs(w).max(axis=1) / 127
    made = {"missing": w / scales[:, None], "inverted": w / scales[:, None] ** 2,
            "of the wrong axis": w / scales[:, None] * scales}  # fmt: skip
    planted.put("o", 1, made[how])


def nibbles(planted: Planted) -> None:
    """Neighbours along the inputs exchanged."""
    w = planted.get("down", 1) if planted.has("down") else planted.get("o", 1)
    new = w.reshape(len(w), -1, 2)[..., ::-1].reshape(w.shape)
    planted.put("down" if planted.has("down") else "o", 1, new)


def without(planted: Planted, *parts: str) -> None:
    """The biases of some parts left out."""
    for name in {planted.stored(part, 1, "bias") for part in parts} - {""}:
        del planted.tensors[name]


def zero_biases(planted: Planted, *parts: str) -> None:
    """The biases of some parts are zeros."""
    for part in parts:
        if planted.has(part, 1, "bias"):
            planted.put(part, 1, np.zeros_like(planted.get(part, 1, "bias")), "bias")


def tied(planted: Planted, is_so: bool, keep: bool = True) -> None:
    """The config says whether the head is tied, and the file does not follow."""
    if planted.config.get("tie_word_embeddings", True) == is_so or (is_so and not planted.has("head", None)):
        return
    planted.config["tie_word_embeddings"] = is_so
    if not keep and planted.has("head", None):
        del planted.tensors[planted.stored("head", None)]


def dropped(planted: Planted, *parts: str) -> None:
    """Tensors left out of the file."""
    for part in parts:
        layer = None if part == "head" else 1
        if (part != "head" or planted.family.head) and planted.has(part, layer):
            del planted.tensors[planted.stored(part, layer)]


def vocabulary(planted: Planted, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """The rows of the token embedding changed."""
    planted.put("tokens", None, change(planted.get("tokens", None)))


def cut(planted: Planted) -> None:
    """The last rows of the vocabulary gone, in config.json too."""
    planted.config["vocab_size"] = VOCABULARY - 16
    for part in ("tokens", "head"):
        if part != "head" or planted.family.head:
            planted.put(part, None, planted.get(part, None)[:-16])
    for name, w in planted.tensors.items():
        if w.shape == (VOCABULARY,):
            planted.tensors[name] = w[:-16]


def zeroed_rows(w: np.ndarray) -> np.ndarray:
    """Some rows of zeros."""
    new = w.copy()
    new[[5, 17, 99]] = 0
    return new


def head_rows(planted: Planted) -> None:
    """The rows of the language-model head shifted."""
    if planted.family.head:
        planted.put("head", None, np.roll(planted.get("head", None), 1, axis=0))


def of_another_layer(planted: Planted, part: str) -> None:
    """A layer has another one's tensor."""
    if planted.has(part):
        for expert in range(planted.family.experts or 1):
            planted.put(part, 2, planted.get(part, 1, expert=expert), expert=expert)


def layers_exchanged(planted: Planted) -> None:
    """Two layers in each other's place."""
    before = planted.copy().tensors
    layer = planted.family.layer
    for name in before:
        for i, j in ((0, 1), (1, 0)):
            if name.startswith(layer.format(i=i)):
                planted.tensors[name] = before[name.replace(layer.format(i=i), layer.format(i=j))]


def truncated(planted: Planted, share: float = 0.5) -> None:
    """The last values of a matrix are zeros, as of a write that was not finished."""
    part = next(part for part in ("down", "expert.down", "experts.down") if planted.has(part))
    name = planted.stored(part, 1)
    flat = planted.tensors[name].reshape(-1).copy()
    flat[int(share * flat.size) :] = 0
    planted.tensors[name] = flat.reshape(planted.tensors[name].shape)


def not_a_number(planted: Planted, value: float) -> None:
    """A value of a matrix is not finite."""
    w = planted.get("o", 1).copy()
    w[3, 7] = value
    planted.put("o", 1, w)


def noise(planted: Planted, share: float, names: Sequence[str]) -> None:
    """Training went on: every value of these tensors moved."""
    rng = np.random.default_rng(7)
    for name in names:
        w = planted.tensors[name]
        step = share * np.sqrt(np.mean(w**2)) * rng.standard_normal(w.shape)
        planted.tensors[name] = (w + step).astype(np.float32)


def shard(planted: Planted) -> None:
    """The second half of the tensors, which is a shard where there are two, is of another step."""
    names = list(planted.tensors)
    noise(planted, 0.05, [name for i, name in enumerate(names) if i * 2 // len(names) == 1])


def one_tuned(planted: Planted) -> None:
    """One matrix of another step."""
    noise(planted, 0.05, [planted.stored("o", 1)])


def low_rank(planted: Planted) -> None:
    """An update of rank two, as a LoRA makes."""
    rng = np.random.default_rng(3)
    for part in "qv":
        w = planted.get(part, 1)
        update = rng.standard_normal((len(w), 2)) @ rng.standard_normal((2, w.shape[1]))
        planted.put(part, 1, w + 0.3 * np.linalg.norm(w) / np.linalg.norm(update) * update)


def reread(planted: Planted, how: str) -> None:
    """The bytes of a matrix read as another dtype."""
    import torch

    name = planted.stored("tokens", None)
    w = torch.from_numpy(planted.tensors[name].copy())
    bfloat16, float16 = w.to(torch.bfloat16), w.to(torch.float16)
    made = {
        "BF16 as F16": lambda: bfloat16.view(torch.float16),
        "F16 as BF16": lambda: float16.view(torch.bfloat16),
        "swapped": lambda: torch.from_numpy(float16.numpy().byteswap()),
    }[how]()
    planted.tensors[name] = made.float().numpy()


def negated(planted: Planted) -> None:
    """A matrix with the other sign."""
    planted.put("o", 1, -planted.get("o", 1))


# Values of the config


def setting(planted: Planted, keys: str, value: Any) -> None:
    """Another value for the first of these keys that there is, dotted where it is nested."""
    for key in keys.split():
        level, *inner = key.split(".")
        if not inner and level in planted.config and planted.config[level] is not None:
            old = planted.config[level]
            planted.config[level] = value(old) if callable(value) else value
            return
        if inner and isinstance(planted.config.get(level), dict) and (inner[0] in planted.config[level]):
            old = planted.config[level][inner[0]]
            planted.config[level][inner[0]] = value(old) if callable(value) else value
            return


def scaling(planted: Planted) -> None:
    """Positions divided by two."""
    if isinstance(planted.config.get("rope_parameters"), dict) and "rope_theta" in planted.config["rope_parameters"]:
        planted.config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}


def head_sizes(planted: Planted) -> None:
    """Twice as many heads, half as wide."""
    sizes = {"head_dim": HEAD_DIM // 2, "num_attention_heads": 2 * HEADS, "num_key_value_heads": 2 * GROUPS}
    if {*sizes} <= {*planted.config} and "q_norm" not in planted.family.modules:
        planted.config |= sizes


# The list


@dataclass(frozen=True)
class Deed:
    """What is done, the words that have to name it, and where it is done if not to tensors or the config."""

    change: Callable[[Planted], None]
    words: tuple[str, ...]  # one of them has to be in what is said of each tensor, or in a key's name
    slip: Slip | None = None  # done to packed numbers, where a container packs
    part: str = "o"  # of the tensor whose packed numbers change


def _deed(words: str, change: Callable[..., None], *args: Any, slip: Slip | None = None) -> Deed:
    return Deed(lambda planted: change(planted, *args), tuple(words.split("|")), slip)


def _key(keys: str, value: Any) -> Deed:
    return Deed(lambda planted: setting(planted, keys, value), tuple(keys.split()))


ROTARY = "rotary layout"
DEEDS: dict[str, Deed] = {
    "nothing": _deed("", lambda planted: None),
    "q and k to neighbours": _deed(ROTARY, each_part, "q k", to_neighbours),
    "q and k to halves": _deed(ROTARY, each_part, "q k", to_halves),
    "q to neighbours": _deed(ROTARY, each_part, "q", to_neighbours),
    "k to neighbours": _deed(ROTARY, each_part, "k", to_neighbours),
    "k to halves": _deed(ROTARY, each_part, "k", to_halves),
    "q and k to neighbours, by twice the heads": _deed(ROTARY, each_part, "q k", partial(by_two, to_neighbours)),
    "q and k to neighbours, one layer": _deed(ROTARY, each_part, "q k", to_neighbours, MIDDLE),
    "norms plus 1": _deed("norm: 1 added", all_norms, 1),
    "norms minus 1": _deed("norm: 1 subtracted", all_norms, -1),
    "norms plus 2": _deed("norm: 1 added twice", all_norms, 2),
    "one norm plus 1": _deed("norm: 1 added", one_norm, 1),
    "q-norm and k-norm plus 1": _deed("norm: 1 added", head_norms, 1),
    "q|k|v in the order v|q|k": _deed("q+k+v in the order", fused_order, "vqk"),
    "q|k|v in the order q|v|k": _deed("q+k+v in the order", fused_order, "qvk"),
    "q|k|v from blocks to groups": _deed("q+k+v", blocks_to_groups),
    "q|k|v from groups to blocks": _deed("q+k+v", groups_to_blocks),
    "gate and up exchanged": _deed("gate and up exchanged", exchanged, "gate", "up"),
    "gate and up of experts exchanged": _deed("gate and up exchanged", exchanged, "expert.gate", "expert.up"),
    "gate and up interleaved": _deed("gate and up interleaved|gate and up taken apart", interleaved),
    "k and v exchanged": _deed("another role's tensor|q+k+v in the order", exchanged, "k", "v"),
    "square matrix transposed": _deed("transposed", transposed, "o"),
    "matrix transposed": _deed("transposed", transposed, "down"),
    "heads turned, W_O left": _deed("heads in another order", each_part, "q k v", heads_turned, MIDDLE),
    "heads of values turned": _deed("heads in another order", each_part, "v", heads_turned, MIDDLE),
    "heads of W_O turned": _deed("heads in another order", heads_of_output),
    "experts moved, router left": _deed("experts in another order", experts_moved, True, False),
    "router moved, experts left": _deed("experts in another order", experts_moved, False, True),
    "experts and router moved": _deed("", experts_moved, True, True),
    # Halves of 32 places exchanged are heads in another order where heads are 16 wide.
    "nibbles swapped": _deed("nibbles swapped|heads in another order", nibbles, slip=swapped_nibbles),
    "scales missing": _deed("scales missing", divided, "missing", slip=no_scales),
    "scales inverted": _deed("scales inverted", divided, "inverted", slip=inverted_scales),
    "scales of the wrong axis": _deed("wrong axis", divided, "of the wrong axis", slip=other_axis),
    "biases dropped": _deed("bias dropped", without, "q", "k", "v"),
    "bias of the network dropped": _deed("bias dropped", without, "down"),
    "biases zeroed": _deed("zeroed", zero_biases, "q", "k", "v"),
    "head tied in config": _deed("head tied|tie_word_embeddings", tied, True),
    "head tied in config, not in file": _deed("head tied|tie_word_embeddings", tied, True, False),
    "head untied in config": _deed("head tied|tie_word_embeddings", tied, False),
    "head dropped": _deed("head dropped|head tied", dropped, "head"),
    "norm dropped": _deed("tensor dropped", dropped, "norm_2"),
    "vocabulary shifted": _deed("rows of the vocabulary shifted", vocabulary, lambda w: np.roll(w, 1, axis=0)),
    "vocabulary shifted by 3": _deed("rows of the vocabulary shifted", vocabulary, lambda w: np.roll(w, -3, axis=0)),
    "vocabulary cut": _deed("vocabulary cut|rows cut|vocab_size", cut),
    "vocabulary rows zeroed": _deed("vocabulary zeroed", vocabulary, zeroed_rows),
    "head shifted": _deed("rows of the vocabulary shifted", head_rows),
    "matrix of another layer": _deed("of another layer", of_another_layer, "o"),
    "norm of another layer": _deed("of another layer", of_another_layer, "norm_2"),
    "layers exchanged": _deed("of another layer", layers_exchanged),
    "truncated write": _deed("zeros at the end", truncated),
    "truncated write, within a row": _deed("zeros at the end", truncated, 0.707),
    "NaN": _deed("NaN", not_a_number, float("nan"), slip=nan_scale),
    "infinity": _deed("NaN or infinity", not_a_number, float("inf"), slip=infinite_scale),
    "a shard of another step": _deed("a shard of another step|other values", shard),
    "one matrix of another step": _deed("other values", one_tuned),
    "low-rank update": _deed("low-rank", low_rank),
    "BF16 read as F16": _deed("dtype reinterpreted", reread, "BF16 as F16"),
    "F16 read as BF16": _deed("dtype reinterpreted", reread, "F16 as BF16"),
    "bytes swapped": _deed("dtype reinterpreted", reread, "swapped"),
    "negated": _deed("negated", negated),
    "rope base": _key("rope_parameters.rope_theta rotary_emb_base", lambda old: 3 * old),
    "rope scaling": _deed("rope_parameters|rope_scaling", scaling),
    "epsilon": _key("rms_norm_eps layer_norm_eps layer_norm_epsilon", lambda old: 1e-2),
    "activation": _key("hidden_act activation_function hidden_activation activation", "relu"),
    "softcap of scores": _key("attn_logit_softcapping", 1.0),
    "softcap of logits": _key("final_logit_softcapping", 1.0),
    "sliding window": _key("sliding_window", lambda old: 4),
    "head sizes": _deed("head_dim|num_attention_heads|num_key_value_heads", head_sizes),
    "layer types": _key("layer_types", lambda old: old[::-1] if old[::-1] != old else [old[1], *old[1:]]),
    "scale of scores": _key("query_pre_attn_scalar", 8),
    "experts per token": _key("num_experts_per_tok", 1),
    "weights of experts normed": _key("norm_topk_prob", lambda old: not old),
    "parallel residual": _key("use_parallel_residual", lambda old: not old),
    "share of dimensions that rotate": _key(
        "rope_parameters.partial_rotary_factor rotary_pct", lambda old: 0.75 - old / 2),
}  # fmt: skip
TWO = (
    ("q and k to neighbours, one layer", "one norm plus 1"), ("vocabulary shifted", "heads of W_O turned"),
    ("truncated write", "rope base"), ("square matrix transposed", "norm of another layer"),
    ("epsilon", "NaN"), ("head shifted", "gate and up exchanged"), ("scales missing", "vocabulary rows zeroed"),
)  # fmt: skip


@dataclass
class Case:
    """A deed done to a family's checkpoint: the result, and the words for each tensor or key that changed."""

    deed: str
    planted: Planted
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    slips: dict[str, Slip] = field(default_factory=dict)


def cases(
    name: str, packs: Callable[[str, np.ndarray], bool], only: Sequence[str] = (), start: Planted | None = None
) -> Iterator[Case]:
    """Every deed, or `only` some, that changes something in this family, alone and two at a time.

    start: the checkpoint it is done to, if not the family's original.
    """
    for deeds in [*((deed,) for deed in DEEDS), *TWO]:
        case = Case(", then ".join(deeds), (start or base(name)).copy())
        if only and case.deed not in only:
            continue
        did = [_do(case, DEEDS[deed], packs) for deed in deeds]
        if all(did) or deeds == ("nothing",):
            yield case


def _do(case: Case, deed: Deed, packs: Callable[[str, np.ndarray], bool]) -> bool:
    """Do a deed and note the changes; False where there are none."""
    planted, before = case.planted, case.planted.copy()
    slipped = planted.stored(deed.part, 1)
    if deed.slip and packs(slipped, planted.tensors[slipped]):
        case.slips[slipped] = deed.slip
        case.words[slipped] = deed.words
        return True
    deed.change(planted)
    names = [name for name in {*planted.tensors, *before.tensors}
             if not (name in planted.tensors and name in before.tensors
                     and np.array_equal(planted.tensors[name], before.tensors[name], equal_nan=True))]  # fmt: skip
    keys = [key for key in planted.config if planted.config[key] != before.config.get(key)]
    case.words |= dict.fromkeys(names, deed.words)
    case.keys |= dict.fromkeys(keys, deed.words)
    return bool(names or keys)


@lru_cache(None)
def base(name: str) -> Planted:
    """The original of a family."""
    return original(name)


@lru_cache(None)
def written(name: str, folder: Path) -> Path:
    """The original as float32."""
    CONTAINERS["F32"].write(base(name), folder / name)
    return folder / name


# What `same` says of it


def apart(x: np.ndarray | None, y: np.ndarray | None) -> float:
    """|y - x| / |x|; infinite where the model does not take the weights, gives NaN, or other shapes."""
    if x is None or y is None or x.shape != y.shape or not np.isfinite(y).all():
        return float("inf")
    return float(np.linalg.norm(y.astype(np.float64) - x) / np.linalg.norm(x))


def judged(name: str, container: Container | GgufContainer, case: Case, folder: Path) -> dict[str, Any]:
    """One row of the table."""
    with scratch_folder() as scratch:
        values = container.write(case.planted, scratch / "b", case.slips)
        faithful = _faithful(name, container, folder)
        moved = apart(faithful, logits(name, case.planted.config, values))
        row: dict[str, Any] = {"deed": case.deed, "family": name, "container": container.name, "logits": moved,
                               "rounding": max(ROUNDING, apart(_eager(name), faithful))}  # fmt: skip
        try:
            result = ws.same(written(name, folder), scratch / "b")
        except ws.CheckpointError as error:
            return row | {"verdict": "refused", "tensors_right": True, "named": True, "said": str(error)[:200],
                          "by_identity": "refused", "identity_right": True}  # fmt: skip
        row |= _by_identity(name, case, folder, scratch / "b")
    differing = {each.name_a or each.name_b: each for each in result.differing}
    keys = [each.config for each in result.config]
    deeds = {tensor: each.deed for tensor, each in differing.items()}
    right = {*deeds} == {*case.words} if result.verdict == "different" else not deeds
    if moved <= ROUNDING:  # nothing to be found
        named = result.verdict not in NOT_SAME
    else:
        tensors = [any(word in deeds.get(tensor, "") for word in words) for tensor, words in case.words.items()]
        config = [any(part in key for key in keys for word in words for part in word.split("."))
                  or any(word in deed for word in words for deed in deeds.values())
                  for words in case.keys.values()]  # fmt: skip
        named = all(tensors) and all(config)
        right = right or any("tie" in key for key in case.keys)
    return row | {"verdict": result.verdict, "tensors_right": right, "named": named,
                  "said": "; ".join(sorted({*deeds.values(), *keys})) or result.lead[:80]}  # fmt: skip


def _by_identity(name: str, case: Case, folder: Path, copy: Path) -> dict[str, Any]:
    """What `same` says where of the original only the identity is known, and if the tensors are those that changed."""
    stored, path = _identity(name, folder)
    try:
        result = ws.same(path, copy)
    except ws.CheckpointError:  # it cannot be read in one convention
        return {"by_identity": "refused", "identity_right": True}
    named = {stored[each.label].name if each.label in stored else each.name_b
             for each in result.differing if each.verdict == "different"}  # fmt: skip
    return {"by_identity": result.verdict, "identity_right": named == {*case.words}}


@lru_cache(None)
def _identity(name: str, folder: Path) -> tuple[Mapping[str, Stored], Path]:
    """The places of an original's tensors by label, and the file of its identity."""
    identity = ws.identity(written(name, folder))
    Folder(folder).json(f"{name}.id.json", identity.as_json())
    return identity.stored, folder / f"{name}.id.json"


@lru_cache(None)
def _faithful(name: str, container: Container | GgufContainer, folder: Path) -> np.ndarray | None:
    """Logits of the original in a container."""
    with scratch_folder() as scratch:
        values = container.write(base(name), scratch)
        return logits(name, base(name).config, values)


@lru_cache(None)
def _eager(name: str) -> np.ndarray | None:
    """Logits of the original."""
    return logits(name, base(name).config, base(name).tensors)


def rows_of(families: Sequence[str], containers: Sequence[str], deeds: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """A row for each deed, family and container."""
    with scratch_folder() as scratch:
        for name in families:
            for container in (ALL_CONTAINERS[each] for each in containers):
                if not container.takes(base(name), {}):
                    continue
                for case in cases(name, container.packs, deeds):
                    if container.takes(case.planted, case.keys):
                        yield judged(name, container, case, scratch)


def is_right(row: dict[str, Any]) -> bool:
    """Whether the verdict is "different" exactly where the logits differ."""
    return (row["verdict"] in (*NOT_SAME, "refused")) == (row["logits"] > ROUNDING)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Shares of the rows in which the verdict, the tensors and the deed are right."""
    differing = [row for row in rows if row["logits"] > ROUNDING]
    return {
        "deeds": len({row["deed"] for row in rows}), "families": len({row["family"] for row in rows}),
        "containers": len({row["container"] for row in rows}), "cases": len(rows), "logits differ": len(differing),
        "called different": sum(map(is_right, differing)),
        "missed, by more than the container's rounding": sum(
            not is_right(row) and row["logits"] > row["rounding"] for row in differing),
        "not called different, logits equal": sum(is_right(row) for row in rows if row["logits"] <= ROUNDING),
        "same function and logits differ": sum(row["verdict"] == "same function" for row in differing),
        "tensors right": sum(row["tensors_right"] for row in differing),
        "deed named": sum(row["named"] for row in differing),
        "refused": sum(row["verdict"] == "refused" for row in rows),
    }  # fmt: skip


COLUMNS = ("deed", "family", "container", "logits", "rounding", "verdict", "tensors_right", "named", "by_identity",
           "identity_right", "said")  # fmt: skip
