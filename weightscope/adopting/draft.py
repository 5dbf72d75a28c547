"""A row's skeleton by the names, shapes and config numbers of a checkpoint; needs no PyTorch.

Names and shapes decide some cells; the others are comments that list candidates. Nothing is
compared, so results of a draft are called unproved.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightscope.checkpoint.checkpoint import Checkpoint
from weightscope.core.errors import CheckpointError, first_line, printable, printable_lines
from weightscope.core.files import new_file, scratch_folder
from weightscope.model.config.config import KEYS
from weightscope.model.model import Model
from weightscope.model.rows.stanzas import read_rows
from weightscope.model.rows.table import FAMILIES

Shapes = Mapping[str, tuple[int, ...]]  # shapes of tensors, by name

# Patterns of the last part of a module's name, in lower case.
ROLES = {
    "q": re.compile(r"w?_?(q|query)(_?(proj|lin|linear))?|(to|linear)_q", re.ASCII),
    "k": re.compile(r"w?_?(k|key)(_?(proj|lin|linear))?|(to|linear)_k", re.ASCII),
    "v": re.compile(r"w?_?(v|value)(_?(proj|lin|linear))?|(to|linear)_v", re.ASCII),
    "qkv": re.compile(r"c_attn|w?_?qkv(_?proj)?|query_key_value|in_proj|to_qkv|joint", re.ASCII),
    "out": re.compile(
        r"w?_?(o|out|output)(_?(proj|lin|linear))?|to_out|linear_out|c_proj|dense|proj", re.ASCII
    ),
}
# Parts of names of other norms, and of the norm before attention.
OTHERS = re.compile(
    r"post|after|out|output|ffn|ff|mlp|feedforward|final|last|[2-9]|q|k|qnorm|knorm", re.ASCII
)
FEEDS = re.compile(r"in|input|pre|before|attn|attention|first|1", re.ASCII)
ROTARY = re.compile(r"rope|rotary|theta", re.ASCII)
POSITIONS = re.compile(r"pos|wpe", re.ASCII)
NUMBERED = re.compile(r"(.*?)(?<![^.])(\d+)\.(.+)", re.ASCII)
SIZES = {  # patterns that choose a key where several have the right value
    "n_layers": re.compile("layer|block|depth", re.ASCII),
    "d_model": re.compile("width|dim|hidden|embd|model", re.ASCII),
    "n_heads": re.compile("head", re.ASCII),
}
PACKED = "in_proj_weight"  # torch.nn.MultiheadAttention's rows [Q | K | V]
OF_TORCH = ("linear1.weight", "norm1.weight", "norm2.weight")  # in a torch TransformerEncoderLayer
MOST_NAMED = 8  # candidates in a comment


@dataclass
class Draft:
    """The lines of a stanza, decided and open."""

    cells: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def leave(self, cell: str, candidates: Sequence[object]) -> None:
        """Leave a cell open, with its candidates."""
        names = ", ".join(printable(candidate) for candidate in candidates[:MOST_NAMED])
        if len(candidates) > MOST_NAMED:
            names += ", ..."
        self.open.append(f"# {cell} = ?  # {names or 'nothing was found'}")


def drafted(checkpoint: Checkpoint) -> str:
    """The file of rows that a person completes: a stanza, and its open cells as comments."""
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}
    stem, indices, layer = _layers(shapes, checkpoint)
    outside = {name: shape for name, shape in shapes.items() if not name.startswith(stem)}
    draft, config = Draft([f"layer = {json.dumps(stem + '{i}.')}"]), checkpoint.config.raw
    heads = _heads(draft, layer)
    d = _width(draft, outside, layer)
    _norm(draft, layer, d, any("eps" in key for key in config))
    _positions(draft, outside, config, d)
    _sizes(draft, config, {"n_layers": len(indices), "d_model": d}, heads, layer)
    kind = config.get("model_type")
    is_name = isinstance(kind, str) and re.fullmatch(r"[\w-]{1,60}", kind, re.ASCII)
    title = str(kind) if is_name else "mine"
    if not config:
        sizes = f'"num_hidden_layers": {len(indices)}, "hidden_size": {d}'
        values = f'"model_type": "{title}", {sizes}, "num_attention_heads": HEADS'
        draft.open.append(f"# config.json is not there: {{{values}}}")
    elif title != kind:
        draft.open.append(f'# config.json needs "model_type": "{title}", or name another here')
    stanza = "\n".join([f"[{title}]", *draft.cells])
    verdict = _opened(stanza, checkpoint)
    head = [
        "# A draft: names and shapes were looked at, and nothing was compared with a model. "
        "Results say `unproved`.",
        f"# {verdict}",
        "# Cells and their meanings: docs/rows.md. "
        "Proof: weightscope adopt SOURCE --with module:Class",
    ]
    return printable_lines("\n".join([*head, "", stanza, *draft.open, ""]))


def _layers(shapes: Shapes, checkpoint: Checkpoint) -> tuple[str, list[int], Shapes]:
    """The prefix of layers' names, their indices, and the first one's tensors by name within it."""
    stacks: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, shape in shapes.items():
        if match := NUMBERED.fullmatch(name):
            stem, index, inner = match.groups()
            stacks.setdefault(stem, {}).setdefault(int(index), {})[inner] = shape
    if not stacks:
        problem = "no tensor is of a numbered layer (blocks.0.attn.q.weight)"
        raise CheckpointError(problem, file=checkpoint.name)
    stem = max(stacks, key=lambda stem: (sum(map(len, stacks[stem].values())), stem))
    return stem, sorted(stacks[stem]), stacks[stem][min(stacks[stem])]


def _modules(layer: Shapes) -> dict[str, tuple[int, ...]]:
    """The matrices of a layer, by module."""
    weights = {name: shape for name, shape in layer.items() if name.endswith(".weight")}
    matrices = {name: shape for name, shape in weights.items() if len(shape) == 2}
    return {name.removesuffix(".weight"): shape for name, shape in matrices.items()}


def _threefold(modules: Shapes) -> list[str]:
    """Matrices (3d, d) or (d, 3d) next to a square (d, d): queries, keys, values in one tensor."""
    # (the module around a matrix, its narrower side)
    places = {name: (name.rpartition(".")[0], min(shape)) for name, shape in modules.items()}
    square = {places[name] for name, shape in modules.items() if shape[0] == shape[1]}
    threefold = [name for name, shape in modules.items() if max(shape) == 3 * min(shape)]
    return [name for name in threefold if places[name] in square]


def _heads(draft: Draft, layer: Shapes) -> dict[str, str]:
    """Write the projections; return the modules by role."""
    modules, by_role = _modules(layer), dict[str, str]()
    if packed := _packed(layer):
        return _write_packed(draft, packed, layer)
    candidates = {
        role: [name for name in modules if pattern.fullmatch(name.rpartition(".")[2].lower())]
        for role, pattern in ROLES.items()
    }
    if not any(candidates[role] for role in ("q", "k", "v", "qkv")):
        candidates["qkv"] = _threefold(modules)
    inner = {name.rpartition(".")[0] for role in ("q", "qkv") for name in candidates[role]}
    for role, names in candidates.items():
        nearest = [name for name in names if name.rpartition(".")[0] in inner] or names
        if len(nearest) == 1:
            by_role[role] = nearest[0]
    fused = "qkv" in by_role and "q" not in by_role
    needed = ("qkv", "out") if fused else ("q", "k", "v", "out")
    if fused:
        layouts = ["stacked: all queries, all keys, all values", "grouped: head by head"]
        draft.leave("heads.layout", layouts)
    else:
        draft.cells.append('heads.layout = "separate"')
    matrices = [f"{name} {shape}" for name, shape in modules.items()]
    for role in needed:
        if role in by_role:
            draft.cells.append(f"heads.{role} = {json.dumps(by_role[role])}")
        else:
            draft.leave(f"heads.{role}", candidates[role] or matrices)
    biased = {role: f"{by_role[role]}.bias" in layer for role in needed if role in by_role}
    if biased and all(biased.values()):
        draft.cells.append("heads.bias = true")
    elif any(biased.values()):
        qkv = any(has for role, has in biased.items() if role != "out")
        flags = f"{{ qkv = {json.dumps(qkv)}, out = {json.dumps(biased.get('out', False))} }}"
        draft.cells.append(f"heads.bias = {flags}")
    return by_role


def _packed(layer: Shapes) -> str:
    """The module that is a torch.nn.MultiheadAttention of one width; empty unless there is one."""
    packed = {name: shape for name, shape in layer.items() if name.endswith(PACKED)}
    modules = [
        name.removesuffix(PACKED)
        for name, shape in packed.items()
        if len(shape) == 2 and shape[0] == 3 * shape[1]
    ]
    is_whole = len(modules) == 1 and f"{modules[0]}out_proj.weight" in layer
    return modules[0] if is_whole else ""


def _write_packed(draft: Draft, module: str, layer: Shapes) -> dict[str, str]:
    """Write the projections of a torch.nn.MultiheadAttention."""
    loose = [name for name in (f"{module}{PACKED}", f"{module}in_proj_bias") if name in layer]
    by_role = {"out": f"{module}out_proj"}
    draft.cells += [
        'heads.layout = "packed"',
        f"heads.qkv = {json.dumps(f'{module}in_proj')}",
        f"heads.out = {json.dumps(by_role['out'])}",
        f"heads.loose = {json.dumps(loose)}",
        f"heads.bias = {str(len(loose) == 2).lower()}",
    ]
    return by_role


def _width(draft: Draft, outside: Shapes, layer: Shapes) -> int:
    """Write the token table; return the width of the stream."""
    matrices = _modules(layer).values()
    widths = {n for shape in matrices for n in shape}
    embeddings = {name: s for name, s in outside.items() if len(s) == 2 and s[1] in widths}
    tables = {name: s for name, s in embeddings.items() if not POSITIONS.search(name)}
    heads = [name for name in tables if re.search(r"head|out", name)]
    tokens = [name for name in tables if name not in heads] or list(tables)
    if len(tokens) == 1:
        draft.cells.append(f"inputs.tokens = {json.dumps(tokens[0])}")
        return tables[tokens[0]][1]
    draft.leave("inputs.tokens", [f"{name} {tables[name]}" for name in tokens])
    return max(widths, key=lambda n: sum(n in shape for shape in matrices), default=0)


def _norm(draft: Draft, layer: Shapes, d: int, says_eps: bool) -> None:
    """Write the norm before attention, or after it (torch.nn.TransformerEncoderLayer's default)."""
    if _packed(layer) and all(name in layer for name in OF_TORCH):
        draft.cells.append('norms.after = { norm = "layer:norm2", eps = 1e-5 }')
        first = 'with norm_first=True, norms.before = { norm = "layer:norm1", eps = 1e-5 } instead'
        draft.leave("norms.after", [first])
        return
    vectors = [name for name, shape in layer.items() if shape == (d,)]
    gains = [name.removesuffix(".weight") for name in vectors if name.endswith(".weight")]
    parts = {name: re.split(r"[._]|(?<=\D)(?=\d)", name.lower()) for name in gains}
    unrelated = [name for name in gains if any(map(OTHERS.fullmatch, parts[name]))]
    norms = [name for name in gains if name not in unrelated]
    feeding = [name for name in norms if any(map(FEEDS.fullmatch, parts[name]))]
    chosen = feeding if len(feeding) == 1 else norms
    if len(chosen) != 1:
        advice = "rms: or layer: before its name; false if there is none"
        draft.leave("norms.before", [*(chosen or gains), advice])
        return
    kind = "layer" if f"{chosen[0]}.bias" in layer else "rms"
    draft.cells.append(f"norms.before = {json.dumps(f'{kind}:{chosen[0]}')}")
    may = []
    if kind == "rms":
        may.append("layer: with bias = false if it centres, offset = 1 if gains count from 1")
    if not says_eps:
        may.append("eps = 1e-5 or so: no key of config.json is one")
    if may:
        draft.leave("norms.before", ["{ norm = ... } and " + "; ".join(may)])


def _positions(draft: Draft, outside: Shapes, config: Mapping[str, Any], d: int) -> None:
    """Write the cells of positions."""
    tables = [name for name, s in outside.items() if s[-1:] == (d,) and POSITIONS.search(name)]
    rotary = [key for key in config if ROTARY.search(key)]
    if len(tables) == 1 and not rotary:
        draft.cells.append(f"inputs.positions = {json.dumps(tables[0])}")
    elif rotary and not tables:
        draft.cells.append("positions.rope = true")
        advice = "{ interleaved = true } if neighbours turn"
        draft.open.append(f"# positions.rope = ?  # from {', '.join(rotary)}; {advice}")
    else:
        advice = "positions.bias for ALiBi or buckets; nothing if there are none"
        draft.leave("positions.rope", [*tables, *rotary, advice])


def _sizes(
    draft: Draft,
    config: Mapping[str, Any],
    numbers: Mapping[str, int],
    heads: Mapping[str, str],
    layer: Shapes,
) -> None:
    """Write the config keys that hold the sizes, where they are not the usual ones."""
    integers = {key: value for key, value in config.items() if type(value) is int}
    matches = {
        size: [key for key, value in integers.items() if value == numbers[size]] for size in numbers
    }
    headed = [
        key for key in integers if re.search("head", key) and not re.search("dim|size|width", key)
    ]
    matches["n_heads"] = [key for key in headed if not re.search("kv|key|group", key)]
    keys = {}
    for size, called in SIZES.items():
        usual = [key for key in KEYS[size] if key in integers]
        if usual:
            continue
        named = [key for key in matches[size] if called.search(key)]
        if chosen := next((some[0] for some in (matches[size], named) if len(some) == 1), ""):
            keys[size] = chosen
        else:
            draft.leave(f"config.keys.{size}", matches[size] or list(integers))
    eps = [key for key in config if re.search("eps", key)]
    if eps and not any(key in config for key in KEYS["norm_eps"]):
        keys["norm_eps"] = eps[0]
    if keys:
        pairs = ", ".join(f"{size} = {json.dumps(key)}" for size, key in keys.items())
        draft.cells.append(f"config.keys = {{ {pairs} }}")
    if "q" not in heads:
        return
    modules = _modules(layer)
    known = (integers.get(key) for key in (keys.get("n_heads", ""), *KEYS["n_heads"]))
    n_heads = next(filter(None, known), 0)
    of_heads = [key for key in integers if re.search("head", key)]
    widths = [key for key in of_heads if re.search("dim|size|width", key)]
    fitting = [key for key in widths if integers[key] * n_heads == modules[heads["q"]][0]]
    if len(fitting) == 1:
        draft.cells.append(f"heads.head_dim = {json.dumps(fitting[0])}")
    if "k" in heads and modules[heads["q"]] != modules[heads["k"]]:
        shared = [key for key in headed if re.search("kv|key|group", key)]
        if len(shared) == 1:
            draft.cells.append(f"heads.kv_heads = {json.dumps(shared[0])}")
        else:
            draft.leave("heads.kv_heads", shared)


def _opened(stanza: str, checkpoint: Checkpoint) -> str:
    """A sentence on opening the checkpoint with the decided cells."""
    try:
        with scratch_folder() as folder:
            with new_file(folder / "draft.toml") as file:
                file.write(stanza.encode() + b"\n")
            (row,) = read_rows(folder / "draft.toml", FAMILIES.row)
        model = Model.of_row(checkpoint, row)
        for index in model.attention_layers:
            model.attention_tensors(index)
        layer = model.layer(model.attention_layers[0])
    except CheckpointError as error:
        return f"It does not open the checkpoint yet: {first_line(error)}"
    sizes = f"{len(model.attention_layers)} layers of {layer.n_heads} heads of {layer.head_dim}"
    return f"It opens, {sizes}: look at what is open before you believe a number."
