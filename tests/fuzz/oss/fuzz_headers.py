"""A safetensors header, a config.json and an index; the header's length and bytes of tensors are added."""

import re
import struct
from pathlib import Path

from tests.fuzz.checkpoints import read_all
from tests.fuzz.oss import harness

OFFSETS = re.compile(rb"\[\s*\d+\s*,\s*(\d{1,4})\s*\]")
SHARD = "shard.safetensors"


def meet(folder: Path, content: bytes) -> str:
    """Open the folder as a model and read every tensor."""
    header, config, index = [*content.split(harness.BETWEEN), b"", b""][:3]
    size = max((int(stop) for stop in OFFSETS.findall(header)), default=0)
    for name, text in (
        (SHARD, struct.pack("<Q", len(header)) + header + bytes(range(256)) * (size // 256 + 1)),
        ("config.json", config),
        ("model.safetensors.index.json", index),
    ):
        (folder / name).unlink(missing_ok=True)
        if text:
            (folder / name).write_bytes(text[: 8 + len(header) + size] if name == SHARD else text)
    return read_all(folder)


if __name__ == "__main__":
    harness.fuzz(meet, "weightscope.checkpoint", "weightscope.model.config")
