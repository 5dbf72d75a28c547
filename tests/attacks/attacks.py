# ruff: noqa: E501 (one line an attack)
"""What a hostile file may try: one line each. Every one ends in a CheckpointError, fast and in little memory.

HEADERS are whole .safetensors files, GGUFS whole .gguf files, INDEXES and CONFIGS are the JSON next to a good one,
PACKINGS are things done to the quantised weights of tests/fixtures and to their settings,
PACKED are quantised files of zeros with their configs,
LAYOUTS are things done to a folder, TOKENIZERS are tokenizer.json files that are loaded and split a text, HUBS what
the server at HF_ENDPOINT does (see tests/support/hub_server.py). The second item of a line is a part of the message
that the reader must see.
"""

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}  # one honest tensor of 8 bytes
TWO = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}


def whole(header: object, body: bytes = b"\0" * 8, *, length: int | None = None) -> bytes:
    """A file of this header (an object, or raw bytes), its stated length true unless given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def one(**changes: object) -> bytes:
    """A file of one tensor, honest but for `changes`."""
    return whole({"w": {**ONE, **changes}})


def pair(first: list[int], second: list[int], size: int = 16) -> bytes:
    """A file of two tensors at these offsets."""
    return whole({"a": {**ONE, "data_offsets": first}, "b": {**TWO, "data_offsets": second}}, b"\0" * size)


def millions(item: bytes, opening: bytes = b"[", closing: bytes = b"]", size: int = 15_900_000) -> bytes:
    """JSON just short of the size limit, made of as many items as fit: what a parser pays dearest for."""
    return b'{"w":' + opening + item * (size // len(item)) + item.rstrip(b",") + closing + b"}"


HEADERS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "has 0 bytes"),
    "seven bytes": (b"\0" * 7, "has 7 bytes"),
    "length past the file": (whole({"w": ONE}, length=1000), "the file has only"),
    "length of 2**64 - 1": (whole({"w": ONE}, length=2**64 - 1), "18446744073709551615"),
    "length of 2**63": (whole({"w": ONE}, length=2**63), "9223372036854775808"),
    "length past 100 MB": (whole({"w": ONE}, length=100_000_001), "header of 100000001 bytes"),
    "length of zero": (whole(b"", b"\0" * 8), "not valid JSON"),
    "length short of the JSON": (whole({"w": ONE}, length=10), "not valid JSON"),
    "header of nulls": (whole(b"\0" * 64), "not valid JSON"),
    "invalid UTF-8": (whole(b'{"w\xff": 1}'), "not valid JSON"),
    "UTF-16": (whole(json.dumps({"w": ONE}).encode("utf-16")), "not valid JSON"),
    "a byte order mark": (whole(b"\xef\xbb\xbf" + json.dumps({"w": ONE}).encode()), "not valid JSON"),
    "JSON cut short": (whole(b'{"w": {"dtype": "F32", '), "not valid JSON"),
    "JSON and then more": (whole(json.dumps({"w": ONE}).encode() + b" {}"), "not valid JSON"),
    "not an object": (whole(b"[1, 2]"), "JSON list"),
    "a bare number": (whole(b"17"), "JSON int"),
    "duplicate tensor": (whole(b'{"w":%b,"w":%b}' % ((json.dumps(ONE).encode(),) * 2)), "appears twice"),
    "duplicate key in a tensor": (whole(b'{"w":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}'), "twice"),
    "duplicate among 90,000": (
        whole(b"{" + b",".join(b'"%d":1' % i for i in range(90_000)) + b',"89999":1}'), "appears twice"),
    "negative offset": (one(data_offsets=[-8, 0]), "data_offsets"),
    "offsets the wrong way": (one(data_offsets=[8, 0]), "has -8 bytes"),
    "offset past the file": (one(data_offsets=[0, 800], shape=[200]), "cut short"),
    "offset of 2**64": (one(data_offsets=[2**64, 2**64 + 8]), "data_offsets"),
    "offset of 10**4000": (one(data_offsets=[0, 10**4000]), "data_offsets"),
    "offset of 5000 digits": (whole(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 5000 + b"]}}"), "JSON"),
    "offset that is a float": (one(data_offsets=[0.0, 8.0]), "data_offsets"),
    "offset that is true": (one(data_offsets=[False, True], shape=[], dtype="U8"), "data_offsets"),
    "offset that is text": (one(data_offsets=["0", "8"]), "data_offsets"),
    "one offset": (one(data_offsets=[8]), "data_offsets"),
    "overlapping tensors": (pair([0, 8], [4, 12], 12), "overlaps"),
    "same bytes twice": (pair([0, 8], [0, 8], 8), "overlaps"),
    "gap between tensors": (pair([0, 8], [12, 20], 20), "leaves a gap"),
    "gap before the first": (one(data_offsets=[4, 12]), "leaves a gap"),
    "bytes after the last": (whole({"w": ONE}, b"\0" * 9), "the file has"),
    "body cut short": (whole({"w": ONE}, b"\0" * 7), "cut short"),
    "no tensors but a body": (whole({}, b"\0" * 8), "the file has"),
    "shape that overflows to the right size": (one(shape=[2**63 - 1, 2, 2**62 + 1]), "shape"),
    "shape of 32 large sizes": (one(shape=[2**62] * 32), "shape"),
    "shape of 33 sizes": (one(shape=[1] * 33), "shape"),
    "shape of 400,000 sizes": (one(shape=[1] * 400_000), "shape"),
    "zero next to sizes that overflow": (whole({"w": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, b""), "shape"),
    "negative size": (one(shape=[-2]), "shape"),
    "two negative sizes": (one(shape=[-1, -2]), "shape"),
    "size that is a float": (one(shape=[2.0]), "shape"),
    "size that is null": (one(shape=[None]), "shape"),
    "shape that is a number": (one(shape=2), "shape"),
    "shape nested 40 deep": (one(shape=json.loads("[" * 40 + "2" + "]" * 40)), "shape"),
    "dtype wider than the bytes": (one(dtype="F64"), "needs 16"),
    "dtype narrower than the bytes": (one(dtype="F16"), "needs 4"),
    "unknown dtype": (one(dtype="F128"), "F128"),
    "dtype in lower case": (one(dtype="f32"), "f32"),
    "dtype that is a list": (one(dtype=["F32"]), "dtype"),
    "half a byte": (one(dtype="F4", shape=[15]), "needs 7.5"),
    "entry with a key too many": (one(file="/etc/passwd"), "broken entry"),
    "entry with a key too few": (whole({"w": {"dtype": "F32", "shape": [2]}}), "broken entry"),
    "entry that is a number": (whole({"w": 1}), "broken entry"),
    "metadata that is not text": (whole({"__metadata__": {"a": 1}, "w": ONE}), "__metadata__"),
    "metadata that is a list": (whole({"__metadata__": [], "w": ONE}), "__metadata__"),
    # Python takes it for JSON, and the safetensors library does not.
    "half a surrogate pair": (whole(b'{"\\ud800": %b}' % json.dumps(ONE).encode()), "safetensors library refuses"),
    "name with terminal escapes": (whole({"\x1b[2J\x1b]0;owned\x07": {**ONE, "dtype": "X"}}), "\\x1b[2J"),
    "name that reverses the line": (whole({"\u202egnp.exe": {**ONE, "dtype": "X"}}), "\\u202e"),
    "name that is half a character": (whole(b'{"\\ud800":%b}' % json.dumps({**ONE, "dtype": "X"}).encode()), "\\ud800"),
    "name of 900 letters": (whole({"n" * 900: {**ONE, "dtype": "X"}}), "nnn ... nnn"),
    "name of 10 MB": (whole({"n" * 10_000_000: ONE}), "has a name of 10000000 characters"),
    "nesting without end": (whole(b'{"w":' * 49_000), "not valid JSON"),
    "lists without end": (whole(b"[" * 99_000), "not valid JSON"),
    "nesting that parses": (whole(b'{"w":' * 900 + b"1" + b"}" * 900), "nests deeper"),
    "15 MB of empty lists": (whole(millions(b"[],")), "lists"),
    "15 MB of empty objects": (whole(millions(b"{},")), "objects"),
    "15 MB of numbers": (whole(millions(b"1000,")), "items"),
    "15 MB of zeros": (whole(millions(b"0,")), "items"),
    "15 MB of text in wide characters": (whole("{\"\U0001f600\": \"".encode() + b"x" * 15_900_000 + b'"}'), "broken entry"),
    "15 MB of spaces": (whole(b" " * 15_900_000), "not valid JSON"),
    "15 MB of digits": (whole(b'{"w":' + b"9" * 15_900_000 + b"}"), "not valid JSON"),
    "15 MB of backslashes": (whole(b'{"' + b"\\\\" * 7_900_000 + b'":1}'), "has a name of 7900000 characters"),
    "15 MB of tensors": (whole(b"{" + b",".join(b'"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(250_000)) + b"}"), "objects"),
    "49,000 tensors, the last a lie": (
        whole(b"{" + b",".join(b'"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(49_000))
              + b',"z":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}'), "needs 4"),
    "95 MB of header": (whole(b" " * 95_000_000), "header of 95000000 bytes"),
    "FP8 in blocks of no stated size": (
        whole({"w": {"dtype": "F8_E4M3", "shape": [24, 64], "data_offsets": [0, 1536]},
               "w_scale_inv": {"dtype": "F32", "shape": [2, 4], "data_offsets": [1536, 1568]}}, b"\0" * 1568),
        "2 x 4 scales for a weight of 24 x 64, and config.json does not give the block size"),
    "a pickle": (b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00touch\x85R.", "pickled files"),
    "a zip": (b"PK\x03\x04" + b"\0" * 60, "pickled files"),
}  # fmt: skip


def index(weight_map: object) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


# Beside model.safetensors, which holds the one tensor `w`.
INDEXES: dict[str, tuple[bytes, str]] = {
    "up and out": (index({"w": "../outside.safetensors"}), "outside its folder"),
    "up, out and back": (index({"w": "../checkpoint/model.safetensors"}), "outside its folder"),
    "absolute": (index({"w": "/etc/passwd"}), "outside its folder"),
    "a folder below": (index({"w": "sub/model.safetensors"}), "outside its folder"),
    "backslashes": (index({"w": "..\\model.safetensors"}), "outside its folder"),
    "the folder itself": (index({"w": "."}), "outside its folder"),
    "the folder above": (index({"w": ".."}), "outside its folder"),
    "no name": (index({"w": ""}), "outside its folder"),
    "a null byte": (index({"w": "model\0.safetensors"}), "not a .safetensors file"),
    "half a character": (b'{"weight_map":{"w":"\\ud800.safetensors"}}', "not a .safetensors file"),
    "a terminal escape": (index({"w": "\x1b[31m.safetensors"}), "\\x1b[31m"),
    "a pickle": (index({"w": "pytorch_model.bin"}), "not a .safetensors file"),
    "not there": (index({"w": "absent.safetensors"}), "not in the folder"),
    "a name too long": (index({"w": "n" * 5000 + ".safetensors"}), "not in the folder"),
    "a tensor that is not in it": (index({"w": "model.safetensors", "v": "model.safetensors"}), "where the index has it"),
    "a number for a file": (index({"w": 1}), "weight_map"),
    "a tensor of a file that is not its own": (index({"v": "model.safetensors"}), "where the index has it"),
    "a list for a map": (index(["w"]), "weight_map"),
    "an empty map": (index({}), "empty"),
    "no map": (b"{}", "weight_map"),
    "the same tensor twice": (b'{"weight_map":{"w":"model.safetensors","w":"model.safetensors"}}', "twice"),
    "not JSON": (b"\x80", "not valid JSON"),
    "not an object": (b"3", "JSON int"),
    "nested": (b'{"a":' * 900 + b"1" + b"}" * 900, "nests deeper"),
    "nested without end": (b'{"a":' * 1_000_000, "objects"),
    "60 MB": (b" " * 60_000_000, "bytes"),
    "300,000 shards": (index({str(i): f"{i}.safetensors" for i in range(300_000)}), "names 300000 files"),
}  # fmt: skip

# In place of config.json. Code that uses a size checks it; here the file only has to be JSON.
CONFIGS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "not valid JSON"),
    "invalid UTF-8": (b'{"a": "\xff"}', "not valid JSON"),
    "not an object": (b"[]", "JSON list"),
    "a key twice": (b'{"n_layer": 1, "n_layer": 2}', "twice"),
    "a key of 1 MB": (b'{"' + b"n" * 10**6 + b'": 1}', "has a name of 1000000 characters"),
    "nested": (b'{"a":' * 900 + b"1" + b"}" * 900, "nests deeper"),
    "nested in lists": (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", "nests deeper"),
    "nested without end": (b'{"a":' + b"[" * 99_000, "not valid JSON"),
    "17 MB": (b" " * 17_000_000, "bytes"),
    "15 MB of empty lists": (millions(b"[],"), "lists"),
    "15 MB of numbers": (millions(b"1000,"), "items"),
    "a number of 5000 digits": (b'{"n_layer":' + b"9" * 5000 + b"}", "not valid JSON"),
}


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


# Done to a folder that holds model.safetensors and config.json.
Shapes = dict[str, tuple[str, list[int]]]  # of tensors by name: dtype and sizes
BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4, "I32": 4, "I64": 8}


def zeros(tensors: Shapes) -> bytes:
    """A file of tensors that are zeros."""
    header, end = {}, 0
    for name, (dtype, sizes) in tensors.items():
        start, end = end, end + BYTES[dtype] * math.prod(sizes)
        header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [start, end]}
    return whole(header, b"\0" * end)


def mlx(
    weight: object = ("U32", [4, 8]), scales: object = ("BF16", [4, 1]), biases: object = ("BF16", [4, 1])
) -> Shapes:
    """A module of 4 x 64 weights as MLX stores four bits in groups of 64; None for a part that is not there."""
    parts: dict[str, Any] = {"m.weight": weight, "m.scales": scales, "m.biases": biases}
    return {name: part for name, part in parts.items() if part}


def in_mlx(bits: object = 4, group_size: object = 64, **more: object) -> dict[str, Any]:
    return {"quantization": {"bits": bits, "group_size": group_size, **more}}


def auto_round(
    qweight: object = ("I32", [8, 32]), qzeros: object = ("I32", [2, 4]), scales: object = ("F16", [2, 32])
) -> Shapes:
    """A module of 32 x 64 weights as AutoRound stores four bits in groups of 32."""
    parts: dict[str, Any] = {"m.qweight": qweight, "m.qzeros": qzeros, "m.scales": scales}
    return {name: part for name, part in parts.items() if part}


def in_auto_round(**more: object) -> dict[str, Any]:
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "group_size": 32}
    return {"quantization_config": settings | more}


def hqq(**changes: object) -> Shapes:
    """A module of 64 x 64 weights as HQQ stores eight bits in groups of 64, its settings zeros."""
    parts: dict[str, Any] = {
        "W_q": ("U8", [64, 64]), "scale": ("F16", [64, 1]), "zero": ("F16", [64, 1]), "shape": ("I64", [2]),
        "axis": ("I32", []), "group_size": ("I32", []), "packing": ("U8", [7]),
    }  # fmt: skip
    return {f"m.{key}": part for key, part in (parts | changes).items() if part}


def in_bitnet(**more: object) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "bitnet", **more}}


PACKED: dict[str, tuple[Shapes, dict[str, Any], str]] = {
    "MLX, no scales": (mlx(scales=None), in_mlx(), "has no scales; MLX int4 in groups of 64 needs one"),
    "MLX, no biases": (mlx(biases=None), in_mlx(), "has no biases"),
    "MLX, scales of integers": (mlx(scales=("I32", [4, 1])), in_mlx(), "has scales of dtype I32 and shape (4, 1)"),
    "MLX, scales of other rows": (
        mlx(scales=("BF16", [3, 1])),
        in_mlx(),
        "8 words in a row and scales of shape (3, 1)",
    ),
    "MLX, scales of a vector": (mlx(scales=("BF16", [4])), in_mlx(), "needs F16 or BF16 or F32 or F64 of 2 dimensions"),
    "MLX, biases of other rows": (mlx(biases=("BF16", [4, 2])), in_mlx(), "do not fit together"),
    "MLX, a group that does not divide": (mlx(), in_mlx(group_size=128), "which do not fit MLX int4 in groups of 128"),
    "MLX, bits that do not divide": (mlx(), in_mlx(bits=3), "which do not fit MLX int3"),
    "MLX, other bits than stored": (mlx(), in_mlx(bits=8), "which do not fit MLX int8"),
    "MLX, 7 bits": (mlx(), in_mlx(bits=7), "has bits 7; affine has 1, 2, 3, 4, 5, 6, 8"),
    "MLX, bits that are text": (mlx(), in_mlx(bits="4"), "has bits 4; affine has"),
    "MLX, bits that are true": (mlx(), in_mlx(bits=True), "has bits True"),
    "MLX, no bits": (mlx(), {"quantization": {"group_size": 64}}, "has bits None"),
    "MLX, a group of 48": (mlx(), in_mlx(group_size=48), "has group_size 48; affine has 32, 64, 128"),
    "MLX, a group of 10^30": (mlx(), in_mlx(group_size=10**30), "has group_size 1000000"),
    "MLX, mxfp4 of 8 bits": (mlx(), in_mlx(bits=8, group_size=32, mode="mxfp4"), "has bits 8; mxfp4 has 4"),
    "MLX, mxfp4 with float scales": (mlx(), in_mlx(group_size=32, mode="mxfp4"), "has scales of dtype BF16"),
    "MLX, mxfp4 with biases": (
        mlx(scales=("U8", [4, 2]), biases=("U8", [4, 2])),
        in_mlx(group_size=32, mode="mxfp4"),
        "has biases; MLX mxfp4 has none",
    ),
    "MLX, a mode that is not known": (
        mlx(),
        in_mlx(mode="fp3"),
        "has mode 'fp3'; read are affine, mxfp4, nvfp4, mxfp8",
    ),
    "MLX, a mode that is a list": (mlx(), in_mlx(mode=["affine"]), "has mode '['affine']'"),
    "MLX, settings that are a list": (
        mlx(),
        {"quantization": [4, 64]},
        "config.json does not say how: it has no 'quantization'",
    ),
    "MLX, settings of nothing": (
        mlx(),
        in_mlx(gone={"bits": 4, "group_size": 64}),
        "has settings of gone, and no file has gone.weight",
    ),
    "MLX, settings of a module without bits": (
        mlx(),
        in_mlx(m={"group_size": 64}),
        "'quantization' of m has bits None",
    ),
    "MLX, packed against the config": (
        mlx(),
        in_mlx(m=False),
        "has dtype U32, and config.json says that it is not quantised",
    ),
    "MLX, not packed against the config": (
        mlx(weight=("BF16", [4, 64])),
        in_mlx(m={"bits": 4, "group_size": 64}),
        "has dtype BF16, and config.json says that it is quantised",
    ),
    "MLX, a global scale of affine": (
        {**mlx(), "m.global_scale": ("F32", [])},
        in_mlx(),
        "has a global_scale; MLX int4 in groups of 64 has none",
    ),
    "MLX, a vector": (mlx(("U32", [8]), ("BF16", [1]), ("BF16", [1])), in_mlx(), "do not fit together"),
    "AutoRound, no scales": (auto_round(scales=None), in_auto_round(), "has no scales; AutoRound's packing needs one"),
    "AutoRound, no zeros": (auto_round(qzeros=None), in_auto_round(), "has no qzeros"),
    "AutoRound, 9 bits": (auto_round(qzeros=("I32", [2, 9])), in_auto_round(), "do not fit together"),
    "AutoRound, other words": (
        auto_round(qweight=("I32", [9, 32])),
        in_auto_round(),
        "has 72 inputs; AutoRound packs 32 of them at a time",
    ),
    "AutoRound, zeros of other groups": (auto_round(qzeros=("I32", [3, 4])), in_auto_round(), "do not fit together"),
    "AutoRound, no zeros at all": (auto_round(qzeros=("I32", [2, 0])), in_auto_round(), "do not fit together"),
    "AutoRound, words of a vector": (auto_round(qweight=("I32", [8])), in_auto_round(), "do not fit together"),
    "AutoRound, no group size": (
        auto_round(),
        in_auto_round(group_size=None),
        "is in groups of None, says config.json",
    ),
    "AutoRound, a group of text": (
        auto_round(),
        in_auto_round(group_size="32"),
        "is in groups of 32, says config.json; a whole",
    ),
    "AutoRound, a group of -2": (auto_round(), in_auto_round(group_size=-2), "is in groups of -2"),
    "AutoRound, a packing that is not known": (
        auto_round(),
        in_auto_round(packing_format="auto_round:fp8_static"),
        "as 'auto_round:fp8_static', which is not read",
    ),
    "AutoRound, a packing that is a list": (
        auto_round(),
        in_auto_round(packing_format=[]),
        "as '[]', which is not read",
    ),
    "AutoRound as AWQ, other words": (
        auto_round(),
        in_auto_round(packing_format="auto_round:auto_awq"),
        "do not fit together",
    ),
    "HQQ, no scale": (hqq(scale=None), {}, "has no scale; HQQ needs one"),
    "HQQ, no shape": (hqq(shape=None), {}, "has no shape"),
    "HQQ, a shape of zeros": (hqq(), {}, "is packed as '\\x00\\x00\\x00\\x00\\x00\\x00\\x00'"),
    "HQQ, a shape of ten sizes": (hqq(shape=("I64", [10])), {}, "at most 2 integers were expected"),
    "HQQ, a packing of a megabyte": (hqq(packing=("U8", [10**6])), {}, "at most 16 integers were expected"),
    "HQQ, a scale of integers": (hqq(scale=("I32", [64, 1])), {}, "do not fit together"),
    "BitNet, no scale": ({"m.weight": ("U8", [4, 4])}, in_bitnet(), "has no weight_scale; BitNet ternary needs one"),
    "BitNet, scales": (
        {"m.weight": ("U8", [4, 4]), "m.weight_scale": ("F32", [2])},
        in_bitnet(),
        "do not fit together",
    ),
    "BitNet, a vector": ({"m.weight": ("U8", [4]), "m.weight_scale": ("F32", [1])}, in_bitnet(), "do not fit together"),
    "BitNet, divided by a scale of 0": (
        {"m.weight": ("U8", [4, 4]), "m.weight_scale": ("F32", [1])},
        in_bitnet(),
        "values that are not finite",
    ),
    "BitNet, made ternary as it runs": (
        {"m.weight": ("F32", [4, 4])},
        in_bitnet(linear_class="autobitlinear", quantization_mode="online"),
        "and mode 'online'; read are",
    ),
    "BitNet, a class that is not known": (
        {"m.weight": ("F32", [4, 4])},
        in_bitnet(linear_class=["x"]),
        "of class '['x']'",
    ),
    "MLX, no config": (mlx(), {}, "is packed as MLX does, and config.json does not say how"),
}


LAYOUTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe for weights": (lambda f: _replace(f / "model.safetensors", os.mkfifo), "not a regular file"),
    "a pipe for config": (lambda f: _replace(f / "config.json", os.mkfifo), "not a regular file"),
    "a device for weights": (
        lambda f: _replace(f / "model.safetensors", lambda p: p.symlink_to("/dev/zero")), "not a regular file"),
    "a device for config": (
        lambda f: _replace(f / "config.json", lambda p: p.symlink_to("/dev/zero")), "not a regular file"),
    "a folder for weights": (lambda f: _replace(f / "model.safetensors", Path.mkdir), "not a regular file"),
    "a link to nothing": (lambda f: _replace(f / "model.safetensors", lambda p: p.symlink_to("gone")), "cannot be read"),
    "a link to itself": (lambda f: _replace(f / "model.safetensors", lambda p: p.symlink_to(p)), "cannot be read"),
    "a config that links to itself": (lambda f: _replace(f / "config.json", lambda p: p.symlink_to(p)), "cannot be read"),
    "only a pickle": (
        lambda f: _replace(f / "model.safetensors", lambda p: (f / "pytorch_model.bin").write_bytes(b"\x80\x04}.")),
        "can run any code",
    ),
    "weights under a pickle's name": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "is a safetensors file",
    ),
    "nothing": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
    "a body swapped for a hole": (
        lambda f: os.truncate(f / "model.safetensors", 1 << 38), "but the file has 274877906944"),
}  # fmt: skip


Stored = dict[str, tuple[str, tuple[int, ...], bytes]]  # dtype, shape and bytes by name


def _spoil(
    part: str, dtype: str = "", shape: tuple[int, ...] | None = None, content: bytes | None = None
) -> Callable[..., object]:
    """Give one part of the first layer's up_proj another dtype, shape or content, or remove it."""

    def spoilt(tensors: Stored, _: dict[str, Any]) -> None:
        name = next(name for name in tensors if name.endswith(("up_proj." + part, "up_proj_" + part)))
        was_dtype, was_shape, was = tensors.pop(name)
        if dtype or shape is not None or content is not None:
            repeated = was if content is None else content * (len(was) // len(content))
            tensors[name] = dtype or was_dtype, was_shape if shape is None else shape, repeated

    return spoilt


def _state(*path: str, **changes: object) -> Callable[..., object]:
    """Change what quantization_config says, at this path within it."""

    def stated(_: Stored, settings: dict[str, Any]) -> None:
        for key in path:
            settings = settings[key]
        settings.update(changes)

    return stated


_FP6 = {"qscheme": "per_group", "ch_axis": -1, "scale_format": "e8m0", "group_size": 32}
_NAN, _GROUP = struct.pack("<f", float("nan")), ("config_groups", "group_0")
_ROTATION = {"config_groups": {"R3": {"type": "hadamard", "apply": [{"targets": ["self_attn"], "location": "q_attn"}]}}}

# Folder of tests/fixtures; what is done to it. `up_proj` has 64 outputs of 32 inputs, in two groups of 16.
PACKINGS: dict[str, tuple[str, Callable[..., object], str]] = {
    "integers without scales": ("compressed_tensors/int4_group", _spoil("weight_scale"), "has no scale"),
    "integers without a shape": ("compressed_tensors/int4_group", _spoil("weight_shape"), "has no shape"),
    "integers without zeros": ("compressed_tensors/int4_group_zeros", _spoil("weight_zero_point"), "has no weight_zero_point"),
    "integers without settings": ("compressed_tensors/int4_group", _state(config_groups={}), "no config_groups"),
    "settings that are a list": ("compressed_tensors/int4_group", _state(config_groups=[1]), "an object was expected"),
    "0 bits": ("compressed_tensors/int4_group", _state(*_GROUP, "weights", num_bits=0), "in '0' bits"),
    "9 bits": ("compressed_tensors/int4_group", _state(*_GROUP, "weights", num_bits=9), "in '9' bits"),
    "10**30 bits": ("compressed_tensors/int4_group", _state(*_GROUP, "weights", num_bits=10**30), "bits; 1 to 8 are read"),
    "true bits": ("compressed_tensors/int4_group", _state(*_GROUP, "weights", num_bits=True), "in 'True' bits"),
    "8 bits in the words of 4": ("compressed_tensors/int4_group", _state(*_GROUP, "weights", num_bits=8), "no packing fit"),
    "groups of another size": ("compressed_tensors/int4_group", _state(*_GROUP, "weights", group_size=8), "config.json says groups of 8"),
    "a shape of 2**63": ("compressed_tensors/int4_group", _spoil("weight_shape", content=struct.pack("<Q", 2**63)), "has a weight_shape of -9223372036854775808"),
    "a shape of other rows": ("compressed_tensors/int4_group", _spoil("weight_shape", content=struct.pack("<qq", 63, 32)), "there are 64 rows"),
    "a shape of no columns": ("compressed_tensors/int4_group", _spoil("weight_shape", content=struct.pack("<qq", 64, 0)), "there are 64 rows"),
    "a shape of 10**7 columns": ("compressed_tensors/int4_group", _spoil("weight_shape", content=struct.pack("<qq", 64, 10**7)), "4 words for 10000000 values"),
    "a shape in one number": ("compressed_tensors/int4_group", _spoil("weight_shape", "I32", (4,)), "do not fit together"),
    "scales of three groups": ("compressed_tensors/int4_group", _spoil("weight_scale", "F16", (64, 4)), "groups of 8 values; config.json says groups of 16"),
    "scales of half the rows": ("compressed_tensors/int4_group", _spoil("weight_scale", shape=(32, 4)), "do not fit together"),
    "scales that are integers": ("compressed_tensors/int4_group", _spoil("weight_scale", "I32"), "has scale of dtype I32"),
    "scales that are not finite": ("compressed_tensors/int4_group", _spoil("weight_scale", content=_NAN), "not finite"),
    "words that are floats": ("compressed_tensors/int4_group", _spoil("weight_packed", "F32"), "has packed of dtype F32"),
    "zeros of other rows": ("compressed_tensors/int4_group_zeros", _spoil("weight_zero_point", shape=(16, 1)), "do not fit together"),
    "zeros that are floats": ("compressed_tensors/int4_group_zeros", _spoil("weight_zero_point", "F32"), "has weight_zero_point of dtype F32"),
    "zeros of INT8 that are missing": ("compressed_tensors/int8_channel", _state(*_GROUP, "weights", symmetric=False), "has no weight_zero_point"),
    "INT8 without scales": ("compressed_tensors/int8_channel", _spoil("weight_scale"), "is I8 and has no weight_scale"),
    "INT8 with scales of other rows": ("compressed_tensors/int8_channel", _spoil("weight_scale", "F16", (128, 1)), "128 x 1 scales for a weight of 64 x 32"),
    "INT8 with scales that are not finite": ("compressed_tensors/int8_channel", _spoil("weight_scale", content=_NAN), "not finite"),
    "INT8 in blocks": ("compressed_tensors/float8_block", _state(*_GROUP, "weights", block_structure=[0, 8]), "is in blocks of [0, 8]"),
    "FP8 without scales": ("compressed_tensors/float8_channel", _spoil("weight_scale"), "is F8_E4M3 and has no weight_scale"),
    "a bitmask of zeros": ("compressed_tensors/float8_channel", _state(sparsity_config={"format": "sparse-24-bitmask"}), "in format 'sparse-24-bitmask'"),
    "an unknown format in a mixture": ("compressed_tensors/mixed", _state(*_GROUP, format="marlin-24"), "in format 'marlin-24'"),
    "a rotation at run time": ("compressed_tensors/int4_group", _state(transform_config=_ROTATION), "transforms activations ('R3')"),
    "NVFP4 without scales": ("compressed_tensors/nvfp4", _spoil("weight_scale"), "has no weight_scale"),
    "NVFP4 without its second scale": ("compressed_tensors/nvfp4", _spoil("weight_global_scale"), "has no weight_global_scale"),
    "NVFP4 with a second scale of 0": ("compressed_tensors/nvfp4", _spoil("weight_global_scale", content=b"\0" * 4), "not finite"),
    "NVFP4 with scales of other rows": ("compressed_tensors/nvfp4", _spoil("weight_scale", shape=(32, 4)), "do not fit together"),
    "NVFP4 with scales that are NaN": ("compressed_tensors/nvfp4", _spoil("weight_scale", content=b"\x7f"), "not finite"),
    "MXFP4 with scales that are NaN": ("compressed_tensors/mxfp4", _spoil("weight_scale", content=b"\xff"), "not finite"),
    "MXFP6 cut to three quarters": ("compressed_tensors/mxfp6", _spoil("weight_packed", shape=(48, 32)), "do not fit together"),
    "MXFP8 with scales that are floats": ("compressed_tensors/mxfp8", _spoil("weight_scale", "I8"), "has a scale of dtype I8"),
    "ModelOpt's NVFP4 without scales": ("modelopt/nvfp4", _spoil("weight_scale"), "has no weight_scale"),
    "ModelOpt's NVFP4 without its second scale": ("modelopt/nvfp4", _spoil("weight_scale_2"), "or weight_scale_2"),
    "ModelOpt's NVFP4 with two second scales": ("modelopt/nvfp4", _spoil("weight_scale_2", "F16", (2,)), "do not fit together"),
    "ModelOpt's FP8 without scales": ("modelopt/fp8", _spoil("weight_scale"), "is F8_E4M3 and has no weight_scale"),
    "ModelOpt's FP8 in other blocks": ("modelopt/fp8_blocks", _spoil("weight_scale", "F16", (4, 1, 1, 1)), "4 x 1 scales for a weight of 144 x 32"),
    "ModelOpt's AWQ": ("modelopt/nvfp4", _state(quant_algo="NVFP4_AWQ"), "with 'NVFP4_AWQ', which is not read"),
    "an escape for ModelOpt's algorithm": ("modelopt/nvfp4", _state(quant_algo="\x1b[2J"), "by ModelOpt with '\\x1b[2J'"),
    "Quark's MXFP6 without scales": ("quark/mxfp6_e3m2", _spoil("weight_scale"), "has no weight_scale"),
    "Quark's MXFP6 cut to three quarters": ("quark/mxfp6_e3m2", _spoil("weight", shape=(48, 32)), "do not fit together"),
    "Quark's integers": ("quark/mxfp4", _state("global_quant_config", "weight", dtype="uint4"), "by Quark as 'uint4'"),
    "Quark's FP4 with scales in FP8": (
        "quark/mxfp4",
        _state("global_quant_config", "weight", scale_format="e5m3", group_size=16),
        "per_group scales (format e5m3, group size 16), which is not read",
    ),
    "Quark's FP6 that says FP4": (
        "quark/mxfp6_e2m3", _state("global_quant_config", "weight", dtype="fp4"), "has 6 bits a value; config.json says fp4",
    ),
    "Quark in several steps": ("quark/mxfp4", _state("global_quant_config", weight=[{}, {}]), "as 'several steps'"),
    "both kinds of Quark's FP6": (
        "quark/mxfp6_e2m3",
        _state(layer_quant_config={"*.o_proj": {"weight": _FP6 | {"dtype": "fp6_e3m2"}}}),
        "as fp6_e2m3 and fp6_e3m2; one of them in a model is read",
    ),
    "experts without scales": ("gpt_oss/mxfp4", _spoil("scales"), "has no scales"),
    "experts with scales of another shape": ("gpt_oss/mxfp4", _spoil("scales", shape=(3, 64, 2)), "do not fit together"),
    "experts with scales that are NaN": ("gpt_oss/mxfp4", _spoil("scales", content=b"\xff"), "not finite"),
    "experts in blocks of 8": ("gpt_oss/mxfp4", _spoil("blocks", shape=(3, 128, 2, 8)), "do not fit together"),
    "experts as one matrix": ("gpt_oss/mxfp4", _spoil("blocks", shape=(384, 16)), "needs U8 of 4 dimensions"),
    "a g_idx of a group too many": ("compressed_tensors/older_int4_act_order", lambda t, _: _index(t, 6), "g_idx from 6 to 6; there are 6 groups"),
    "a g_idx below 0": ("compressed_tensors/older_int4_act_order", lambda t, _: _index(t, -2), "g_idx from -2"),
    "a g_idx of one group": ("compressed_tensors/older_int4_act_order", lambda t, _: _index(t, 3), "0 to 96 inputs in a group"),
    "a g_idx of floats": ("compressed_tensors/older_int4_act_order", lambda t, _: t.update({"down_proj.weight_g_idx": ("F32", (96,), _NAN * 96)}), "has g_idx of dtype F32"),
    "a g_idx too short": ("compressed_tensors/older_int4_act_order", lambda t, _: t.update({"down_proj.weight_g_idx": ("I32", (95,), b"\0" * 380)}), "do not fit together"),
}  # fmt: skip


def _index(tensors: Stored, group: int) -> None:
    tensors["down_proj.weight_g_idx"] = ("I32", (96,), struct.pack("<i", group) * 96)


def gguf(n_tensors: int = 0, n_keys: int = 0, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


LLAMA = key(b"general.architecture", 8, text(b"llama")) + b"".join(
    key(b"llama." + name, 4, struct.pack("<I", value))
    for name, value in ((b"block_count", 1), (b"embedding_length", 32), (b"attention.head_count", 2))
)


def gguf_tensor(
    name: bytes = b"output_norm.weight", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
) -> bytes:
    layout = f"<I{len(sizes)}QIQ" if sizes else "<IIQ"
    return text(name) + struct.pack(layout, len(sizes), *sizes, kind, offset)


def llama(*tensors: bytes, keys: bytes = b"", n_keys: int = 0, size: int = 128) -> bytes:
    header = gguf(len(tensors), 4 + n_keys, LLAMA + keys + b"".join(tensors))
    return header + b"\0" * (-len(header) % 32 + size)


GGUFS: dict[str, tuple[bytes, str]] = {
    "queries without columns": (llama(gguf_tensor(b"blk.0.attn_q.weight", (0, 32))), "do not divide"),
    "empty": (b"", "not a GGUF"),
    "another magic": (gguf(magic=b"GGML"), "not a GGUF"),
    "version 1": (gguf(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "cut after the magic": (b"GGUF", "cut short"),
    "cut in a key": (gguf(0, 1, text(b"general.architecture")[:12]), "cut short"),
    "2**64 - 1 tensors": (gguf(2**64 - 1), "18446744073709551615 tensors"),
    "2**63 keys": (gguf(0, 2**63), "9223372036854775808 keys"),
    "as many tensors as pass, none there": (gguf(50_000, 0), "cut short"),
    "a name of 2**64 - 1 bytes": (gguf(0, 1, text(b"", 2**64 - 1)), "cut short"),
    "a tensor's name of 1 MB": (gguf(1, 0, gguf_tensor(b"n" * 10**6)), "has a name of 1000000 characters"),
    "a key's name of 1 MB": (gguf(0, 1, key(b"n" * 10**6, 4, b"\0" * 4)), "has a name of 1000000 characters"),
    "a name that is not UTF-8": (gguf(0, 1, key(b"\xff", 4, b"\0" * 4)), "not UTF-8"),
    "a key twice": (gguf(0, 2, key(b"a", 4, b"\0" * 4) * 2), "twice"),
    "a value of type 99": (gguf(0, 1, key(b"a", 99, b"\0" * 8)), "type 99"),
    "a list of lists": (gguf(0, 1, key(b"a", 9, struct.pack("<IQ", 9, 1))), "list of type 9"),
    "a list of 2**62 numbers": (gguf(0, 1, key(b"a", 9, struct.pack("<IQ", 4, 2**62))), "cut short"),
    "a list of 2**62 strings": (gguf(0, 1, key(b"a", 9, struct.pack("<IQ", 8, 2**62))), "strings"),
    "lists of 2 million numbers": (
        gguf(0, 200, b"".join(key(b"%d" % i, 9, struct.pack("<IQ", 0, 10_000) + b"\0" * 10_000) for i in range(200))), "1010000 numbers"),
    "a million empty strings, one missing": (gguf(0, 1, key(b"a", 9, struct.pack("<IQ", 8, 1_000_000) + b"\0" * 7_999_992)), "cut short"),
    "no architecture": (gguf(), "architecture 'None'"),
    "an unknown architecture": (gguf(0, 1, key(b"general.architecture", 8, text(b"\x1b[2J"))), "\\x1b[2J"),
    "an architecture that is a number": (gguf(0, 1, key(b"general.architecture", 4, b"\0" * 4)), "architecture '0'"),
    "no sizes": (gguf(0, 1, key(b"general.architecture", 8, text(b"llama"))), "num_hidden_layers"),
    "no heads": (llama(keys=key(b"llama.attention.head_count_kv", 4, b"\0" * 4), n_keys=1), "num_key_value_heads"),
    "an alignment of zero": (llama(keys=key(b"general.alignment", 4, b"\0" * 4), n_keys=1), "alignment"),
    "an alignment of 48": (llama(keys=key(b"general.alignment", 4, b"0\0\0\0"), n_keys=1), "has alignment 48; a power of two"),
    "an alignment in 64 bits": (llama(keys=key(b"general.alignment", 10, struct.pack("<Q", 32)), n_keys=1), "of type 10"),
    "an unknown type": (llama(gguf_tensor(kind=999)), "type 999"),
    "integers for weights": (llama(gguf_tensor(kind=26)), "I32"),
    "five dimensions": (llama(gguf_tensor(sizes=(1, 1, 1, 1, 1))), "5 dimensions"),
    "sizes that overflow": (llama(gguf_tensor(sizes=(2**63, 2, 2**63))), "more elements"),
    "sizes past the file": (llama(gguf_tensor(sizes=(33,))), "cut short"),
    "an offset past the file": (llama(gguf_tensor(offset=2**63)), "cut short"),
    "an offset of 2**64 - 128": (llama(gguf_tensor(offset=2**64 - 128)), "cut short"),
    "overlapping tensors": (llama(gguf_tensor(), gguf_tensor(b"b.weight")), "overlaps"),
    "a tensor twice": (llama(gguf_tensor(), gguf_tensor(offset=128), size=256), "twice"),
    "half a block": (llama(gguf_tensor(sizes=(31,), kind=8)), "blocks of 32"),
    "a block of no dimension": (llama(gguf_tensor(sizes=(), kind=8)), "blocks of 32"),
    "a Q that heads do not divide": (llama(gguf_tensor(b"blk.0.attn_q.weight", (8, 3))), "2 heads of 2 keys and values do not divide"),
    "rope factors of zero": (llama(gguf_tensor(b"rope_freqs.weight")), "rotations"),
    "scaling that is not read": (llama(keys=key(b"llama.rope.scaling.type", 8, text(b"other")), n_keys=1), "other"),
    "65,535 parts": (llama(keys=key(b"split.count", 2, b"\xff\xff"), n_keys=1), "65535 parts"),
    "a part that its name does not say": (llama(keys=key(b"split.count", 2, b"\3\0"), n_keys=1), "its name does not say so"),
    "a text for the number of parts": (llama(keys=key(b"split.count", 8, text(b"2")), n_keys=1), "'split.count' is 2"),
    "scales that are infinite": (llama(gguf_tensor(sizes=(64,), kind=8), size=0) + b"\x00\x7c" * 34, "not finite"),
}  # fmt: skip


def tokenizer(model: dict[str, object] | None = None, **changes: object) -> bytes:
    """A tokenizer.json of three tokens that is good but for the changes to it and to its model."""
    described = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]} | (model or {})
    return json.dumps({"version": "1.0", "model": described} | changes).encode()


def charsmap(content: str) -> dict[str, str]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": content}}


def grown(times: int) -> dict[str, object]:
    """Every `a` becomes so many."""
    return {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * times}


def split(pattern: str) -> dict[str, object]:
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}}


# Over the later ones the library panics only when a text is split: they split "ab" and more.
TOKENIZERS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "cannot read it"),
    "not UTF-8": (b'{"version": "\xff"}', "cannot read it"),
    "a number": (b"1", "cannot read it"),
    "nested without end": (b'{"a":' * 1_000_000, "cannot read it"),
    "no tokens": (tokenizer({"vocab": {}, "merges": []}), "vocabulary is empty"),
    "an empty map of characters": (tokenizer(**charsmap("")), "Cannot parse precompiled_charsmap"),
    "a map of characters that aborts": (tokenizer(**charsmap("/////w==")), "SIGABRT"),
    "a merge that aborts": (
        tokenizer({"continuing_subword_prefix": "#", "vocab": {"a": 0, "é": 1, "aé": 2}, "merges": ["a é"]}), "SIGABRT"),
    "a prefix longer than its token": (tokenizer({"continuing_subword_prefix": "####"}), "out of range"),
    "an id of 3e8": (tokenizer({"vocab": {"a": 0, "b": 1, "ab": 300_000_000}}), "'ab' has the id 300000000"),
    "an id of 2**32 - 1": (tokenizer({"vocab": {"a": 0, "b": 1, "ab": 2**32 - 1}}), "the id 4294967295"),
    "an id of 2**64": (tokenizer({"vocab": {"a": 0, "b": 1, "ab": 2**64}}), "cannot read it"),
    "a dropout of 2": (tokenizer({"dropout": 2.0}), "Dropout"),
    "a map of no characters": (tokenizer(**charsmap("AAAAAA==")), "index out of bounds"),
    "a map that points anywhere": (tokenizer(**charsmap("BAAAAP////8=")), "index out of bounds"),
    "words of no length": (tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "chunk size must be non-zero"),
    "a pattern without end": (tokenizer(**split("(a|a)*(a|aa)+$b")), "retry-limit"),
    "a map of 5 MB": (tokenizer(normalizer={"type": "Replace", "pattern": {"String": "x"}, "content": "y" * 5_000_000}), "its normalizer and other steps have"),
    "names of 40 MB": (tokenizer({"vocab": {"a": 0, "b": 1, "ab": 2, "x" * 40_000_000: 3}}), "its tokens have 4000"),
    "a text that grows": (tokenizer(normalizer=grown(5000)), "its answer has"),
    "steps that nest": (
        b'{"version":"1.0","normalizer":' + b'{"type":"Sequence","normalizers":[' * 5000 + b"]}" * 5000 + b"}", "cannot read it"),
    "merges of no tokens": (tokenizer({"merges": [f"x{i} y{i}" for i in range(200_000)]}), "cannot read it"),
    "no unknown token": (tokenizer({"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "#", "max_input_chars_per_word": 9}), "Missing [UNK] token"),
}  # fmt: skip


HUBS: dict[str, tuple[dict[str, Any], str]] = {
    "a commit that climbs": ({"headers": {"X-Repo-Commit": "../../../../owned"}}, "its commit is '../../../../owned'"),
    "an absolute commit": ({"headers": {"X-Repo-Commit": "/tmp/owned"}}, "its commit is"),
    "a commit that is a branch": ({"headers": {"X-Repo-Commit": "main"}}, "its commit is 'main'"),
    "no commit": ({"headers": {"X-Repo-Commit": ""}}, "its commit is ''"),
    "an etag that climbs": ({"headers": {"ETag": '"../../../../owned"'}}, "its etag is '../../../../owned'"),
    "an absolute etag": ({"headers": {"ETag": '"/tmp/owned"', "X-Linked-Etag": '"/tmp/owned"'}}, "its etag is '/tmp/owned'"),
    "an etag of 10,000 letters": ({"headers": {"ETag": "e" * 10_000}}, "its etag is"),
    "a size that is no number": ({"headers": {"X-Linked-Size": "1e9"}}, "its size is '1e9'"),
    "a size below zero": ({"headers": {"X-Linked-Size": "-1"}}, "its size is '-1'"),
    "a size of 10**16": ({"headers": {"X-Linked-Size": "1" + "0" * 16}}, "its size is"),
    "a size of a terabyte": ({"headers": {"X-Linked-Size": "1" + "0" * 12}}, "at most 16000000 are read"),
    "one byte, says HEAD": ({"headers": {"X-Linked-Size": "1"}}, "'bytes 0-0/1' was asked for"),
    "weights at http on another host": ({"location": "http://127.0.0.2:9/w"}, "only https, or the same host"),
    "weights in a file": ({"location": "file:///etc/passwd"}, "only https, or the same host"),
    "weights at half an address": ({"location": "http://[::1"}, "to an invalid address"),
    "weights at a port of letters": ({"location": "http://127.0.0.1:x/"}, "to an invalid address"),
    "weights at no host": ({"location": "https:///w"}, "only https, or the same host"),
    "redirects without end": ({"location": "?again"}, "redirects more than 5 times"),
    "a config under gzip": ({"small_faults": ["encoded"]}, "an encoded body"),
    "a config of another size than HEAD said": ({"small_faults": ["other size"]}, "was asked for"),
    "a config of another range": ({"small_faults": ["other range"]}, "was asked for"),
    "a config of another etag": ({"small_faults": ["other etag"]}, "has changed on the server"),
    "a config that goes on": ({"small_faults": ["longer"]}, "more bytes than were asked for"),
    "a config that trickles": ({"small_faults": ["trickles"]}, "a second are expected"),
    "weights that trickle": ({"faults": ["trickles"], "forever": True}, "a second are expected"),
    "headers that trickle": ({"trickles": True}, "a second are expected"),
}  # fmt: skip
