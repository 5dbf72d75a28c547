"""wsid1 of a Llama or a Phi-3, written from docs/identity.md alone, without any code of weightscope."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

STORED = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
NAN = {"bf16": 0x7FC0, "f16": 0x7E00, "f32": 0x7FC00000, "f64": 0x7FF8000000000000}
MODEL = {"embed_tokens": "tokens", "norm": "norm.outputs", "lm_head": "unembedding"}
LAYER = {"input_layernorm": "norm.before", "post_attention_layernorm": "norm.mlp"}
LAYER |= {f"self_attn.{role}_proj": role for role in "qkvo"}
LAYER |= {f"mlp.{role}_proj": role for role in ("gate", "up", "down")}


def wsid_of(folder):
    lines = sorted(line_of(label, values) for label, values in identified(arrays_of(Path(folder))).items())
    return "wsid1:" + hashlib.sha256(b"".join(lines)).hexdigest()


def line_of(label, values):
    exact = exact_kinds(values)
    shape = "x".join(str(size) for size in values.shape) or "scalar"
    hashes = " ".join(digest(values, kind) for kind in dict.fromkeys(["bf16", "f16", exact[-1]]))
    return f"{label} {shape} {'+'.join(exact)} {hashes}\n".encode()


def digest(values, kind):
    return hashlib.sha256(written(values, kind).tobytes()).hexdigest()


def written(values, kind):
    """Bits of the values, as unsigned little-endian integers."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype("<f4")
        if kind == "bf16":
            wide = single.view("<u4").astype(np.uint64)
            bits = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2")
        else:
            cast = values.astype("<f8") if kind == "f64" else single.astype({"f32": "<f4", "f16": "<f2"}[kind])
            bits = cast.view(f"<u{cast.itemsize}").copy()
    sign = np.array(1 << 8 * bits.itemsize - 1, bits.dtype)
    return np.where(np.isnan(values), bits.dtype.type(NAN[kind]), np.where(bits == sign, bits.dtype.type(0), bits))


def exact_kinds(values):
    held = [kind for kind in NAN if holds(values, kind)]
    return [kind for kind in held if kind in ("bf16", "f16")] or held[:1]


def holds(values, kind):
    return kind == "f64" or np.array_equal(widened(written(values, kind), kind), values.astype("f8"), equal_nan=True)


def widened(bits, kind):
    if kind == "bf16":
        return (bits.astype("<u4") << 16).view("<f4").astype("f8")
    return bits.view(f"<f{bits.itemsize}").astype("f8")


def sketch_of(values):
    """Norm and 16 sums in thousandths of it; values are finite."""
    flat = values.astype("f8").ravel()
    rows = -(-flat.size // 4096)
    table = np.pad(flat, (0, 4096 * rows - flat.size)).reshape(rows, 4096)[:, :1024]
    row_signs = signs("row", -(-rows // 16))[:rows]  # (rows, 16)
    sums = (row_signs * (table @ signs("column", 64))).sum(axis=0)
    norm = np.sqrt((table**2).sum())
    return norm, np.rint(1000 * sums / norm) if norm else sums


def signs(word, count):
    digests = b"".join(hashlib.sha256(f"{word} {number}".encode()).digest() for number in range(count))
    return 1.0 - 2.0 * np.unpackbits(np.frombuffer(digests, np.uint8)).reshape(-1, 16)


def identified(arrays):
    zero_biases = {label for label, values in arrays.items() if label.endswith(".bias") and not values.any()}
    output, tokens = arrays.get("unembedding"), arrays["tokens"]
    tied = output is not None and line_of("", output) == line_of("", tokens)
    left_out = zero_biases | ({"unembedding"} if tied else set())
    return {label: values for label, values in arrays.items() if label not in left_out}


def arrays_of(folder):
    config = json.loads((folder / "config.json").read_text())
    matched = [
        (label, name.removeprefix("model."), values)
        for path in sorted(folder.glob("*.safetensors"))
        for name, stored in tensors_in(path)
        for label, values in labelled(name.removeprefix("model."), stored, config).items()
    ]
    holders = Counter(label for label, _, _ in matched)
    return {f"{label} {name}" if holders[label] > 1 else label: values for label, name, values in matched}


def labelled(name, values, config):
    if name.endswith(("inv_freq", "position_ids")):
        return {}
    module, _, parameter = name.rpartition(".")
    bias = ".bias" if parameter == "bias" else ""
    if module in MODEL:
        return {MODEL[module] + bias: values}
    matched = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    if not matched:
        return {name: values}
    number, module = matched.groups()
    if module in LAYER:
        return {f"layer {number} {LAYER[module]}{bias}": values}
    if module == "self_attn.qkv_proj":
        head = config["hidden_size"] // config["num_attention_heads"]
        queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
        parts = zip("qkv", np.split(values, [queries, queries + keys]), strict=True)
    elif module == "mlp.gate_up_proj":
        parts = zip(("gate", "up"), np.split(values, 2), strict=True)
    else:
        return {name: values}
    return {f"layer {number} {role}{bias}": part for role, part in parts}


def tensors_in(path):
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            stored = raw[start + first : start + last]
            if entry["dtype"] == "BF16":
                values = widened(np.frombuffer(stored, "<u2"), "bf16").astype("f4")
            else:
                values = np.frombuffer(stored, STORED[entry["dtype"]])
            yield name, values.reshape(entry["shape"])
